"""Test what NCCL's RAS service says of a hang, over loopback: its JSON, slow and silent servers, and garbage.

In the answers process 3 of the job is 4003, and so on; the tests put in the ids of running processes.
"""

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from meshkit.runs import nccl_ras
from meshkit.runs.hang import MOST_LINES
from meshkit.runs.limits import Limits
from meshkit.runs.nccl_ras import ask, describe, read_answer
from meshkit.verbs.launch.local import Policy, Supervisor

HELLO = "SERVER PROTOCOL 2\nOK\n"
TEXT = HELLO + "ERROR: Unknown command SET FORMAT json\nNCCL version 2.27.7 compiled with CUDA 12.9\n"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: sessions of other processes")


def in_json(counts, missing=(), *, dead=(), gathered=None):
    """Return an answer in the layout of NCCL's page on RAS: counts of AllReduce by rank, each a process of its own.

    Ranks 0 to 3 are on this machine.
    """
    host = lambda r: "127.0.0.1" if r < 4 else "192.0.2.7"
    place = lambda r: {"rank": r, "host": host(r), "pid": 4000 + r, "cuda_dev": r, "nvml_dev": r}
    fine = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    launched = lambda r: {"Broadcast": 0, "AllGather": (gathered or {}).get(r, 5), "AllReduce": counts[r]}
    ranks = [{**place(r), "status": fine, "collective_counts": launched(r)} for r in counts]
    gone = [{**place(r), "status": {"unresponsive": True, "considered_dead": r in dead}} for r in (*missing, *dead)]
    size = len(ranks) + len(gone)
    communicator = {"hash": "0xabc123", "secondary_hash": "0x1:0x2", "size": size, "ranks": ranks}
    communicator |= {"ranks_count": len(ranks), "missing_ranks_count": len(gone), "missing_ranks": gone}
    told = {"nccl_version": "2.28.9", "communicators_count": 1, "communicators": [communicator]}
    return HELLO + "OK\n" + json.dumps({**told, "ras": {"timeouts_count": 0}}, indent=2) + "\n"


BEHIND = in_json({0: 1042, 1: 1042, 2: 1042, 3: 1041})


@contextmanager
def serving(*answers):
    """Serve the next answer to each connection, a text or a function of the socket, and the last one repeatedly."""
    server = socket.create_server(("127.0.0.1", 0))
    questions, kept = [], []

    def serve():
        for i in range(1000):
            try:
                channel, _ = server.accept()
            except OSError:
                return
            kept.append(channel)
            answer = answers[min(i, len(answers) - 1)]
            channel.settimeout(10)
            try:
                question = b""
                while not question.endswith(b"STATUS\n"):
                    question += channel.recv(1024)
                questions.append(question.decode())
                if callable(answer):
                    answer(channel)
                else:
                    channel.sendall(answer.encode())
                    channel.close()
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield {"NCCL_RAS_ADDR": f"127.0.0.1:{server.getsockname()[1]}"}, questions
    finally:
        server.shutdown(socket.SHUT_RDWR)  # This ends `accept`.
        server.close()
        for channel in kept:
            channel.close()


@pytest.fixture
def gang():
    """Yield the rank of each of four processes by its process id; each leads a session."""
    started = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(4)]
    yield {p.pid: i for i, p in enumerate(started)}
    for process in started:
        process.kill()
        process.wait()


def with_pids(answer, gang):
    for pid, process in gang.items():
        answer = answer.replace(str(4000 + process), str(pid))
    return answer


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            BEHIND,
            (
                "NCCL's RAS: communicator 0xabc123 of 4 ranks: rank 3 (process 3) has launched 1041 AllReduce, "
                "3 ranks have launched 1042"
            ),
        ),
        (
            in_json({0: 1042, 1: 1041}),
            (
                "NCCL's RAS: communicator 0xabc123 of 2 ranks: rank 1 (process 1) has launched 1041 AllReduce, "
                "rank 0 (process 0) has launched 1042"
            ),
        ),
        (
            in_json({0: 1041, 1: 1041, 2: 1042, 3: 1042}),
            (
                "NCCL's RAS: communicator 0xabc123 of 4 ranks: ranks 0 (process 0) and 1 (process 1) have launched "
                "1041 AllReduce, 2 ranks have launched 1042"
            ),
        ),
        (
            in_json(dict.fromkeys(range(14), 640) | {14: 641, 3: 641}),
            (
                "NCCL's RAS: communicator 0xabc123 of 15 ranks: 13 ranks have launched 640 AllReduce, "
                "ranks 3 (process 3) and 14 have launched 641"
            ),
        ),
        (
            in_json(dict.fromkeys(range(8), 9) | {3: 8}, gathered={3: 0}),
            (
                "NCCL's RAS: communicator 0xabc123 of 8 ranks: rank 3 (process 3) has launched 0 AllGather, "
                "7 ranks have launched 5 (also different: AllReduce)"
            ),
        ),
        (
            in_json({0: 7, 1: 7, 2: 7}, missing=[3]),
            "NCCL's RAS: communicator 0xabc123 of 4 ranks: rank 3 (process 3) gave no answer",
        ),
        (
            in_json({0: 7, 1: 7, 2: 7}, dead=[3]),
            "NCCL's RAS: communicator 0xabc123 of 4 ranks: rank 3 (process 3) is considered dead",
        ),
        (
            in_json({}, missing=range(4, 10), dead=[2, 3]),
            (
                "NCCL's RAS: communicator 0xabc123 of 8 ranks: ranks 2 (process 2) and 3 (process 3) are considered "
                "dead; ranks 4, 5, 6, 7 and 2 more gave no answer"
            ),
        ),
        (in_json({0: 7, 1: 7, 2: 7, 3: 7}), ""),
        (TEXT, ""),
    ],
)
def test_an_answer_is_told_in_one_line(gang, answer, line):
    with serving(with_pids(answer, gang)) as (environment, questions):
        assert describe(ask(environment), gang) == line
    assert questions == ["CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"]


def test_counts_of_many_kinds_show_the_lowest_two_and_the_highest(gang):
    answer = in_json({0: 9, 1: 9, 2: 4, 3: 6} | dict.fromkeys(range(4, 9), 8))
    line = describe(with_pids(answer, gang), gang)
    assert line.endswith(
        "of 9 ranks: rank 2 (process 2) has launched 4 AllReduce, rank 3 (process 3) has launched 6, "
        "ranks 0 (process 0) and 1 (process 1) have launched 9"
    )


def test_of_several_communicators_one_with_missing_ranks_is_told_or_else_the_largest(gang):
    read = lambda answer: json.loads(answer.removeprefix(HELLO + "OK\n"))["communicators"]
    behind = read(in_json({0: 1, 1: 2})) + read(in_json({0: 1, 1: 2, 2: 2}))
    tell = lambda said: describe(with_pids(HELLO + json.dumps({"communicators": said}), gang), gang)
    assert tell(behind).endswith("launched 2 (one of 2 communicators with a problem)")
    assert "of 3 ranks: rank 0 (process 0) has launched 1 AllReduce, 2 ranks have launched 2" in tell(behind)
    assert tell(behind + read(in_json({0: 1}, missing=[1]))).endswith(
        "of 2 ranks: rank 1 (process 1) gave no answer (one of 3 communicators with a problem)"
    )


@pytest.mark.parametrize("answer", [BEHIND, in_json({0: 7}, missing=[1]), in_json({0: 7}, dead=[1])])
def test_the_answer_of_another_job_is_not_told(gang, answer):
    """The processes run on this machine, but this launcher has not started them."""
    answer = with_pids(answer, gang)
    assert describe(answer, gang)
    assert describe(answer, {os.getpid(): 0}) == ""
    assert describe(answer, {}) == ""
    assert describe(answer, dict([*gang.items()][1:])) == ""  # This launcher has started only some of them.


def test_an_answer_that_names_no_process_of_this_machine_is_not_told(gang):
    """It may be another job's, since process ids of another machine mean nothing here."""
    assert describe(with_pids(BEHIND, gang).replace("127.0.0.1", "192.0.2.7"), gang) == ""


@pytest.mark.parametrize("number", ["-1", "99999999999"])
def test_a_number_that_no_process_has_is_left_out(gang, number):
    answer = with_pids(BEHIND.replace("4003", number), gang)
    assert "of 4 ranks: rank 3 has launched 1041" in describe(answer, gang)


def test_a_process_that_does_not_run_is_asked_no_longer_than_needed(gang):
    """The processes of a machine share the socket, and the kernel may choose one that is stopped."""
    silent = lambda channel: None
    with serving(silent, silent, with_pids(BEHIND, gang)) as (environment, questions):
        assert "rank 3 (process 3)" in describe(ask(environment), gang)
    assert len(questions) == 3


def drip(channel):
    channel.sendall(HELLO.encode())
    for _ in range(100):
        channel.sendall(b"x")
        time.sleep(0.05)


def flood(channel):
    while True:
        channel.sendall(b"x" * 65536)


@pytest.mark.parametrize("answer", [lambda channel: None, drip, lambda channel: channel.close()])
def test_a_slow_or_silent_server_does_not_hold_up(monkeypatch, answer):
    monkeypatch.setattr(nccl_ras, "MOST_S", 1.0)
    with serving(answer) as (environment, _):
        began = time.monotonic()
        said = ask(environment)
        assert time.monotonic() - began < 2.5  # The rest is for a busy machine.
    assert describe(said, {}) == ""


def test_an_endless_answer_is_cut(monkeypatch):
    monkeypatch.setattr(nccl_ras, "MOST_BYTES", 100_000)
    monkeypatch.setattr(nccl_ras, "MOST_S", 60.0)
    began = time.monotonic()
    with serving(flood) as (environment, _):
        assert len(ask(environment)) == 100_000
    assert time.monotonic() - began < 30  # The time limit does not have to pass.


def test_the_part_of_an_answer_that_came_in_time_is_kept(monkeypatch):
    monkeypatch.setattr(nccl_ras, "MOST_S", 1.0)
    with serving(lambda channel: channel.sendall(BEHIND[:600].encode())) as (environment, _):
        assert ask(environment) == BEHIND[:600]
    assert read_answer(BEHIND[:600]) == []


def test_a_slow_look_up_of_a_name_does_not_hold_up(monkeypatch):
    monkeypatch.setattr(nccl_ras, "MOST_S", 0.2)
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(10) and [])
    began = time.monotonic()
    assert ask({"NCCL_RAS_ADDR": "login.example:28028"}) == ""
    assert time.monotonic() - began < 5
    released.set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "address", ["localhost", ":", "localhost:port", "localhost:99999", "localhost:" + "9" * 30, "[::1", "\x00:1"]
)
def test_what_is_no_address_is_not_asked(address):
    assert ask({"NCCL_RAS_ADDR": address}) == ""


def test_a_service_that_is_off_or_absent_is_no_answer():
    with serving(BEHIND) as (environment, questions):
        assert ask({**environment, "NCCL_RAS_ENABLE": "0"}) == ""
    assert questions == []
    assert ask(environment) == ""  # Nobody listens there any more.


BROKEN = [
    '{"communicators": 3}',
    '{"communicators": [{"hash": 7}]}',
    '{"communicators": [{"hash": "0x\\u001b[2J", "size": 2, "missing_ranks": [], "ranks": []}]}',
    '{"communicators": [{"hash": "0x1", "size": Infinity, "missing_ranks": [], "ranks": []}]}',
    '{"communicators": ' + "[" * 100_000,
    '{"communicators": [{"hash": "0x1", "size": 2, "missing_ranks": [], "ranks": [{"collective_counts": []}]}]}',
    (
        '{"communicators": [{"hash": "0x1", "size": 1, "ranks": [], "missing_ranks": '
        '[{"status": {"considered_dead": true}, "rank": -1, "host": "127.0.0.1", "pid": 1}]}]}'
    ),
]


@pytest.mark.parametrize("text", BROKEN)
def test_json_of_another_form_says_nothing(gang, text):
    assert read_answer(HELLO + "OK\n" + text) == []
    assert describe(HELLO + "OK\n" + text, gang) == ""


def test_damaged_answers_are_read_without_an_error(gang):
    """Bytes of each answer are exchanged, lost or doubled; its line is one line without control characters."""
    random_ = random.Random(0)
    wholes = [with_pids(answer, gang) for answer in (BEHIND, in_json({0: 1, 1: 2}, missing=[2]), TEXT)]
    for _ in range(1500):
        text = list(random_.choice(wholes))
        for _ in range(random_.randint(1, 30)):
            at = random_.randrange(len(text))
            text[at] = random_.choice(["", "\n", "\x1b", "9", "-1", text[at] * 2, chr(random_.randrange(1, 0x3000))])
        line = describe(HELLO + "".join(text).removeprefix(HELLO), gang)
        assert line == "" or (line.startswith("NCCL's RAS: ") and line.isprintable())


@pytest.mark.parametrize(("missing", "dead"), [(0, 0), (10_000, 0), (10_000, 10_000)])
def test_a_huge_answer_is_read_in_time(gang, missing, dead):
    counts = {r: r for r in range(10_000)}
    answer = in_json(counts, range(10_000, 10_000 + missing), dead=range(20_000, 20_000 + dead))
    began = time.monotonic()
    describe(answer, gang)
    assert read_answer(answer)
    assert time.monotonic() - began < 20  # It takes a second or two; quadratic growth would take minutes.


CHILD = """
import os, signal, time
from pathlib import Path
from meshkit.runs.phases import Phases
rank = int(os.environ["RANK_"])
with Phases() as phases:
    (Path(os.environ["FOLDER_"]) / str(rank)).write_text(str(os.getpid()))
    if os.environ["ATTEMPT_"] == "0":
        phases.enter(*(("data", 4) if rank == 1 else ("step", 4)))
        if rank == 1 and "STOPS_" in os.environ: os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(99)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("variables", "text", "asked", "told"),
    [
        ({"MESHKIT_LOCAL_DEVICE_IDS": "0"}, in_json({0: 1042, 1: 1041}), True, True),
        ({"MESHKIT_LOCAL_DEVICE_IDS": "0"}, TEXT, True, False),
        ({}, TEXT, False, False),  # There are no GPUs.
        ({"MESHKIT_LOCAL_DEVICE_IDS": "0", "STOPS_": "1"}, TEXT, False, False),
    ],
)
def test_the_launcher_tells_it_in_the_name_of_a_hang(tmp_path, variables, text, asked, told):
    """Process 1 is in its data and NCCL says that it is behind; the answer is kept, even if it is not JSON.

    A stopped process is resumed for its stack, so its count would be of a process that no longer hangs.
    """

    def answer(channel):
        pids = {int((tmp_path / str(rank)).read_text()): rank for rank in range(2)}
        channel.sendall(with_pids(text, pids).encode())
        channel.close()

    shown = []
    with serving(answer) as (environment, questions):

        def environments(attempt):
            each = {**os.environ, **environment, **variables, "ATTEMPT_": str(attempt), "FOLDER_": str(tmp_path)}
            return [{**each, "RANK_": str(i)} for i in range(2)]

        policy = Policy(max_restarts=1, failure_grace_s=0.3, pause_s=0.01, limits=Limits(stall_s=1.5, stopped_s=1))
        run = Supervisor([sys.executable, "-c", CHILD], environments, tmp_path / "run", policy, shown.append)
        assert run.run() == 0
    start = next(i for i, line in enumerate(shown) if "process 1 is stuck" in line)
    message = shown[start : start + MOST_LINES]
    line = "  NCCL's RAS: communicator 0xabc123 of 2 ranks: rank 1 (process 1) has launched 1041 AllReduce, rank 0 "
    assert [shown_line.startswith(line) for shown_line in message].count(True) == told
    assert any("evidence: " in shown_line for shown_line in message)
    assert len(questions) == asked
    evidence = json.loads((tmp_path / "run/hang/attempt0.json").read_text())
    assert ("SERVER PROTOCOL 2" in evidence.get("nccl_ras", [])) == asked
