"""Test the gang on this machine: the first failure ends all of it, and it restarts. Children are plain Python.

A time limit in a test is a multiple of what the supervisor promises (it looks every 20 ms), for machines under load.
"""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from meshkit.errors import ConfigError, RunError
from meshkit.runs.phases import Pulse
from meshkit.verbs.launch import local as supervisor
from meshkit.verbs.launch.local import Policy, Supervisor, last_step, next_attempt, only_launcher
from meshkit.verbs.launch.processes import Limits, LocalGang, Member, Watchdog
from tests.verbs.launch.children import FAST, Run, alive, wait_for

ROOT = Path(__file__).resolve().parents[3]
NEEDS_PRCTL = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: prctl, /proc")


def test_all_done(tmp_path):
    run = Run(tmp_path, "print('hello from', rank); sys.exit(0)")
    assert run() == 0
    assert run.shown == ["[0] hello from 0"]  # What the other processes print is only in the log.
    assert (tmp_path / "logs/attempt0/rank1.log").read_text() == "hello from 1\n"


def test_what_gloo_says_of_every_group_is_in_the_logs_alone(tmp_path):
    """Two threads write it piece by piece, as strace shows, so that the program's own text may be in the same line."""
    rest = " peer ranks. Expected number of connected peer ranks is : 1"
    said = f"[Gloo] Rank [Gloo] Rank 00 is connected to 1 is connected to 1{rest}\n{rest}hello\n world\n"
    run = Run(tmp_path, f"print({said!r}, end=''); sys.exit(0)")
    assert run() == 0
    assert run.shown == [f"[0] {rest}hello", "[0]  world"]
    assert (tmp_path / "logs/attempt0/rank0.log").read_text() == said


def test_a_failure_is_shown_and_takes_the_gang_down_and_the_next_attempt_finishes(tmp_path):
    body = """
        if attempt == 0 and rank == 1:
            until("ready"); step(3); print("the GPU fell off the bus"); sys.exit(4)
        if attempt == 0:
            mark("ready"); wait()
    """
    run = Run(tmp_path, body)
    assert run() == 0
    assert "process 1 ended first: exit code 4 (the run failed and may be restarted)" in run.text
    assert "  | the GPU fell off the bus" in run.text
    assert "restart 1 of 2; step 3 was reached" in run.text
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["attempt0", "attempt1"]


@pytest.mark.parametrize("code", [2, 3])
def test_what_the_user_must_mend_is_not_restarted(tmp_path, code):
    run = Run(tmp_path, f"sys.exit({code}) if rank == 1 else wait()")
    assert run() == code
    assert next_attempt(tmp_path / "logs") == 1


@pytest.mark.parametrize(
    ("die", "what"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("raise ValueError('no such thing')", r"exit code 1 \(an exception"),
    ],
)
def test_a_death_is_restarted_until_the_budget_is_used_up(tmp_path, die, what):
    body = f"""
        if rank == 1:
            step(attempt + 1); {die}
        wait()
    """
    run = Run(tmp_path, body)
    with pytest.raises(RunError, match=rf"process 1 failed \({what}.*in attempt 2, and its 2 restarts are used up"):
        run()
    assert next_attempt(tmp_path / "logs") == 3


def test_no_progress_stops_before_the_budget(tmp_path):
    run = Run(tmp_path, "step(7); sys.exit(4)", policy=Policy(max_restarts=9, failure_grace_s=0.3, pause_s=0.01))
    with pytest.raises(RunError, match="2 attempts in a row have reached no step after 7"):
        run()
    assert next_attempt(tmp_path / "logs") == 3  # One attempt got to step 7, and two got no further.


def test_the_failure_that_is_the_cause_is_shown(tmp_path):
    """jax aborts the other processes when one is gone, so one look may see both ends."""
    body = """
        if rank == 0:
            mark("zero"); os.kill(os.getpid(), signal.SIGABRT)
        until("zero"); sys.exit(2)
    """
    run = Run(tmp_path, body, policy=Policy(max_restarts=0))
    gang = LocalGang(run.supervisor.command, run.supervisor.environments(0), tmp_path / "logs")
    with closing(Pulse()) as pulse, gang:
        for member in gang.members:  # Both have told of their end.
            assert select.select([member.channel], [], [], 60)[0]
        end = run.supervisor.watch(0, gang, _NothingNew(), Watchdog([pulse, pulse], Limits()))
    assert (end.failed.rank, end.received, end.stuck) == (1, None, None)


class _NothingNew:
    def new_lines(self, *, last=False):
        return []


def test_stubborn_processes_and_their_children_are_killed(tmp_path):
    body = """
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if rank == 0:
            code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
            child = subprocess.Popen([sys.executable, "-c", code])
            open("child", "w").write(str(child.pid)); open("parent", "w").write(str(os.getpid())); mark("ready")
            wait()
        until("ready"); sys.exit(2)
    """
    run = Run(tmp_path, body)
    started = time.monotonic()
    assert run() == 2
    assert time.monotonic() - started < 30  # This is less than the 99 s of the child.
    assert not alive(tmp_path / "parent")
    deadline = time.monotonic() + 10  # init has to reap the child.
    while alive(tmp_path / "child") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(tmp_path / "child")


def test_a_stopped_process_is_killed_with_the_rest(tmp_path):
    body = """
        if rank == 0:
            open("stopped", "w").write(str(os.getpid())); mark("ready"); os.kill(os.getpid(), signal.SIGSTOP)
        until("ready"); time.sleep(0.1); sys.exit(2)
    """
    assert Run(tmp_path, body)() == 2
    assert not alive(tmp_path / "stopped")


def test_a_terminal_that_is_gone_changes_nothing(tmp_path):
    def gone(line):
        raise BrokenPipeError

    run = Run(tmp_path, "print('a line'); sys.exit(0 if attempt else 4)")
    run.show = gone
    assert run() == 0


def test_a_lost_connection_is_not_named_as_the_cause(tmp_path):
    """One look may see both the process that lost its connection and the one that was killed."""
    from meshkit.verbs.launch.local import cause_first
    from meshkit.verbs.launch.processes import Ending

    members = [
        cast(Member, SimpleNamespace(rank=rank, ending=Ending(code), ended_s=seconds))
        for rank, code, seconds in [(0, 4, 1.0), (1, -9, 1.1), (2, -6, 0.9)]
    ]
    assert [m.rank for m in sorted(members, key=cause_first)] == [1, 0, 2]


def test_the_whole_traceback_is_shown(tmp_path):
    body = """
        if rank == 1:
            for i in range(40): print("line", i)
            def a(n): b(n)
            def b(n): c(n)
            def c(n): a(n - 1) if n else d()
            def d(): raise ValueError("far away")
            a(4)
        wait()
    """
    run = Run(tmp_path, body, policy=Policy(max_restarts=0, failure_grace_s=0.3))
    with pytest.raises(RunError, match="exit code 1"):
        run()
    words = [line for line in run.shown if line.startswith("  | ")]
    # The traceback is shown although other words are cut to fewer lines.
    assert words[0] == "  | Traceback (most recent call last):"
    assert words[-1] == "  | ValueError: far away"


def test_what_a_process_did_is_known_after_its_end(tmp_path):
    run = Run(tmp_path, 'pulse("step"); os.kill(os.getpid(), 9) if rank and not attempt else done()')
    assert run() == 0
    assert "process 1 ended first: killed by SIGKILL" in run.text
    assert "in phase 'step' at step 5" in run.text


def test_a_process_that_leaves_with_0_in_the_midst_is_the_one_that_is_named(tmp_path):
    """The other has lost its connection to it, and says so with exit code 4."""
    body = """
        pulse("data" if rank else "step")
        if attempt == 0 and rank == 1:
            mark("left"); os._exit(0)
        if attempt == 0:
            until("left"); time.sleep(0.5); print("Connection reset by peer"); sys.exit(4)
        done()
    """
    run = Run(tmp_path, body)
    assert run() == 0
    assert "process 1 ended first: exit code 0 before its work was done, while the others went on" in run.text
    assert "in phase 'data' at step 5" in run.text
    assert "restart 1 of 2" in run.text


def test_one_that_leaves_with_0_every_time_is_an_error(tmp_path):
    run = Run(tmp_path, 'pulse("data"); os._exit(0)', processes=1)
    with pytest.raises(RunError, match=r"process 0 failed \(exit code 0 before its work was done.*2 attempts in a row"):
        run()


# This helper is in a session of its own, below a process that is gone, and only SIGKILL ends it.
HELPER = """
        import subprocess
        code = ("import os, signal, sys, time;"
                "os.setsid(); signal.signal(15, signal.SIG_IGN); os.fork() and os._exit(0);"
                "open('new' + sys.argv[1], 'w').write(str(os.getpid()));"
                "os.rename('new' + sys.argv[1], 'helper' + sys.argv[1]); time.sleep(99)")
        subprocess.run([sys.executable, "-c", code, str(rank)])
        until("helper0"); until("helper1")
"""


@NEEDS_PRCTL
@pytest.mark.parametrize(
    "end", ["sys.exit(2) if rank else wait()", "os.kill(os.getpid(), 9) if rank else wait()", "sys.exit(0)",
            "mark(f'ready{rank}'); wait()"],
    ids=["exit code 2", "SIGKILL", "done", "SIGTERM"],
)  # fmt: skip
def test_helpers_in_sessions_of_their_own_end_with_the_attempt(tmp_path, end):
    policy = Policy(max_restarts=0, save_grace_s=1, failure_grace_s=0.3)
    run = Run(tmp_path, HELPER + f"        {end}", policy=policy)
    if "ready" in end:
        threading.Thread(target=_terminate_once, args=([tmp_path / "ready0", tmp_path / "ready1"],)).start()
    with suppress(RunError):
        run()
    assert not any(alive(tmp_path / f"helper{rank}") for rank in range(2))


def _terminate_once(there):
    for path in there:
        wait_for(path)
    os.kill(os.getpid(), signal.SIGTERM)


@NEEDS_PRCTL
def test_nobody_survives_the_launcher(tmp_path):
    """The launcher is killed with SIGKILL, so only its processes and helpers in sessions of their own are left."""
    body = (
        HELPER
        + """
        open(f"now{rank}", "w").write(str(os.getpid())); os.rename(f"now{rank}", f"pid{rank}")
        wait()
    """
    )
    code = f"""
        from pathlib import Path
        from tests.verbs.launch.children import Run
        Run(Path({str(tmp_path)!r}), {body!r})()
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env)
    files = [tmp_path / f"{name}{rank}" for name in ("pid", "helper") for rank in range(2)]
    try:
        for file in files:
            wait_for(file, 60)
        assert all(map(alive, files))
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 10
    while any(map(alive, files)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, files))


def test_a_later_launch_counts_on(tmp_path):
    (tmp_path / "logs/attempt4").mkdir(parents=True)
    run = Run(tmp_path, "print('attempt', attempt)")
    assert run() == 0
    assert run.shown == ["[0] attempt 5"]


def test_two_launchers_do_not_share_a_folder_of_logs(tmp_path):
    """One that SIGKILL ended has let go of the folder; one of another host is waited for."""
    shown = []
    code = f"""
        import os, time; from pathlib import Path
        from meshkit.verbs.launch.local import only_launcher
        with only_launcher(Path({str(tmp_path / "logs")!r}), print):
            Path({str(tmp_path / "held")!r}).touch(); time.sleep(99)
    """
    first = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        wait_for(tmp_path / "held", 60)
        for _ in range(2):
            says = pytest.raises(
                ConfigError, match=f"another launcher uses this run folder: process {first.pid} on host"
            )
            with says, only_launcher(tmp_path / "logs", shown.append):
                pass
        assert shown == []
        (tmp_path / "logs/launcher").write_text("process 7 on host elsewhere")
        threading.Timer(1.0, first.kill).start()
        with only_launcher(tmp_path / "logs", shown.append):
            assert shown == [
                "waiting for the launcher that uses the run folder (process 7 on host elsewhere) to end, up to 120 s"
            ]
    finally:
        first.kill()
        first.wait()
    with only_launcher(tmp_path / "logs", shown.append):
        assert (tmp_path / "logs/launcher").read_text().startswith(f"process {os.getpid()} on host ")


def test_a_log_that_is_there_is_not_written_over(tmp_path):
    (log := tmp_path / "logs" / "rank0.log").parent.mkdir()
    log.write_text("of another launcher")
    with pytest.raises(ConfigError, match=r"process 0 cannot be started: .*File exists"):
        LocalGang([sys.executable, "-c", ""], [dict(os.environ)], tmp_path / "logs").__enter__()
    assert log.read_text() == "of another launcher"


def test_a_program_that_is_not_there(tmp_path):
    supervisor = Supervisor(["no-such-program"], lambda _: [dict(os.environ)], tmp_path, FAST, print)
    with pytest.raises(ConfigError, match="process 0 cannot be started"):
        supervisor.run()


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (None, 0),
        ("", 0),
        ('{"step": 1}\n{"step": 2}\n', 2),
        ('{"step": 1}\n{"step": 2, "lo', 1),
        ('{"step": 9}\n\x00\x00garbage\n[]\n', 9),
        ('{"step": 9}\n' + "[" * 100_000, 9),
        ('{"step": 9}\n{"step": ' + "1" * 5000 + "}", 9),
    ],
)
def test_the_last_step(tmp_path, text, step):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert last_step(tmp_path) == step


def test_last_step_reads_what_train_writes(tmp_path):
    from meshkit.runs.metrics import MetricsLog

    log = MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.write({"step": 12, "loss": float("nan")})
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None
    assert last_step(tmp_path) == 12


def test_a_line_without_an_end_is_followed_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "MOST_BYTES", 100)
    monkeypatch.setattr(supervisor, "MOST_AT_ONCE", 150)
    monkeypatch.setattr(supervisor, "MOST_AT_THE_END", 300)
    log = tmp_path / "0.log"
    follower = supervisor.Follower(log)
    log.write_text("a" * 90)
    assert follower.new_lines() == []
    log.write_text("a" * 200 + "\nb")
    assert [len(line) for line in follower.new_lines()] == [200]
    assert follower.new_lines(last=True) == ["b"]
    with log.open("a") as file:
        file.write("c" * 1000 + "\nthe end\n")
    assert [len(line) for line in follower.new_lines()] == [150]
    assert [line[-7:] for line in follower.new_lines(last=True)] == ["c" * 7, "the end"]


def test_a_folder_of_logs_with_another_digit_is_not_counted(tmp_path):
    for name in ("attempt2", "attempt\N{SUPERSCRIPT NINE}", "attempt" + "9" * 200):
        (tmp_path / name).mkdir()
    assert next_attempt(tmp_path) == 3
