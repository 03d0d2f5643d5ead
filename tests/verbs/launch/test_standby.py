"""Test processes of the next attempt that wait beside the present one: they take over, or leave no trace."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.distributed.environment import COORDINATOR
from meshkit.errors import RunError
from meshkit.runs.standby import wait_for_turn
from meshkit.verbs.launch.restart import Outage, Standby
from tests.verbs.launch.children import FAST, Run, alive, wait_for

STANDBY = replace(FAST, standby=True)
# Each writes down that it was started, waits for its turn, makes a step, and says so.
WAITS = """
with open(f"started{attempt}.{rank}", "a") as f:
    f.write(f"{os.getpid()}\\n")
from meshkit.runs.phases import Phases
from meshkit.runs.standby import wait_for_turn
wait_for_turn("json")
mark(f"went{attempt}.{rank}")
print(f"attempt {attempt} goes", flush=True)
phases = Phases().__enter__()
phases.enter("step", attempt + 1)
if rank == 0: step(attempt + 1)
phases.enter("data", attempt + 2)
"""


def alive_number(pid):
    return Path(f"/proc/{pid}").exists()


def started(folder, attempt, rank):
    return (folder / f"started{attempt}.{rank}").read_text().split()


def test_those_who_wait_take_over(tmp_path):
    body = """
    if attempt == 0:
        until("started1.0"); until("started1.1")
        if rank == 1: sys.exit(4)
        wait()
    done()
    """
    run = Run(tmp_path, WAITS + body.replace("\n    ", "\n"), policy=STANDBY)
    assert run() == 0
    assert len(started(tmp_path, 1, 0)) == len(started(tmp_path, 1, 1)) == 1  # Nobody was started for it afterwards.
    assert not (tmp_path / "went2.0").exists()
    assert "attempt 1 goes" in (tmp_path / "logs" / "attempt1" / "rank1.log").read_text()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"attempt0", "attempt1"}
    again = next(line for line in run.shown if line.startswith("trains again"))
    assert all(part in again for part in ("found", "others ended", "start", "step"))


def test_one_who_has_ended_is_forgotten(tmp_path):
    """It is killed while it waits, so the next attempt is started as the first one was."""
    body = """
    if attempt == 0:
        until("started1.0"); until("started1.1")
        if rank == 1:
            os.kill(int(open("started1.0").read()), signal.SIGKILL)
            time.sleep(0.3)
            sys.exit(4)
        wait()
    done()
    """
    run = Run(tmp_path, WAITS + body.replace("\n    ", "\n"), policy=STANDBY)
    assert run() == 0
    assert len(started(tmp_path, 1, 0)) == len(started(tmp_path, 1, 1)) == 2
    assert "restart 1 of 2; step 1 was reached" in run.text
    assert not any(alive_number(pid) for rank in (0, 1) for pid in started(tmp_path, 1, rank))


def test_a_port_that_is_taken_meanwhile_is_not_waited_for(tmp_path):
    body = """
    if attempt == 0:
        until("started1.0"); until("started1.1"); until("taken")
        if rank == 1: sys.exit(4)
        wait()
    done()
    """
    run = Run(tmp_path, WAITS + body.replace("\n    ", "\n"), policy=STANDBY)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        made = run.supervisor.environments
        address = f"127.0.0.1:{other.getsockname()[1]}"
        run.supervisor.environments = lambda attempt: [{**e, COORDINATOR: address} for e in made(attempt)]
        (tmp_path / "taken").touch()
        assert run() == 0
    assert len(started(tmp_path, 1, 0)) == 2


def test_a_start_that_fails_or_takes_long_holds_up_nothing(tmp_path):
    """The launcher watches meanwhile; the next attempt waits for the start, and finds none where it failed."""
    begun, goes_on = threading.Event(), threading.Event()

    @contextmanager
    def starts(number, folder, descriptor):
        begun.set()
        goes_on.wait(20)
        raise RunError("no port is free")
        yield

    with Standby(starts, tmp_path / "standby") as standby, ExitStack() as stack:
        standby.start(1)
        assert begun.wait(20)
        goes_on.set()
        assert standby.take(tmp_path / "logs", stack) is None


def test_nobody_waits_where_no_restart_is_left_and_none_is_left_at_the_end(tmp_path):
    run = Run(tmp_path, WAITS + "time.sleep(0.5); done()", policy=replace(STANDBY, max_restarts=0))
    assert run() == 0
    assert not (tmp_path / "started1.0").exists()
    more = tmp_path / "more"
    more.mkdir()
    run = Run(more, WAITS + "until('started1.0'); until('started1.1'); done()", policy=STANDBY)
    assert run() == 0
    assert not (more / "went1.0").exists()
    assert not (more / "logs" / "standby").exists()
    assert not any(alive_number(pid) for rank in (0, 1) for pid in started(more, 1, rank))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
def test_those_who_wait_end_with_a_launcher_that_is_killed(tmp_path):
    code = f"""
import sys
from pathlib import Path
from dataclasses import replace
from tests.verbs.launch.children import FAST, Run
Run(Path({str(tmp_path)!r}), {WAITS + "wait()"!r}, policy=replace(FAST, standby=True))()
"""
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        for rank in (0, 1):
            wait_for(tmp_path / f"started1.{rank}")
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    deadline = time.monotonic() + 20
    files = [tmp_path / f"started{attempt}.{rank}" for attempt in (0, 1) for rank in (0, 1)]
    while any(alive(file) for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not (tmp_path / "went1.0").exists()


PRIORITY = "import os, threading\nNICE = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
IMPORTS = """
import gc, os, sys, time
from meshkit.runs.standby import turn_came_at, wait_for_turn
wait_for_turn(sys.argv[1])
assert "MESHKIT_STANDBY" not in os.environ
assert time.monotonic() - turn_came_at() < 5
assert gc.get_freeze_count()
print(os.getpriority(os.PRIO_PROCESS, 0), getattr(sys.modules.get("slow_module"), "NICE", None))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: the priority of a thread")
@pytest.mark.parametrize(("module", "nice"), [("slow_module", 19), ("broken_module", None)])
def test_a_process_imports_with_the_lowest_priority_and_goes_on_with_its_own(tmp_path, module, nice):
    (tmp_path / "slow_module.py").write_text(PRIORITY)
    (tmp_path / "broken_module.py").write_text("raise ValueError('broken')\n")
    reads, writes = os.pipe()
    env = {**os.environ, "MESHKIT_STANDBY": str(reads), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with open(writes, "wb", buffering=0) as lets_go:
        command = [sys.executable, "-c", IMPORTS, module]
        child = subprocess.Popen(command, env=env, pass_fds=[reads], stdout=subprocess.PIPE, text=True)
        os.close(reads)
        lets_go.write(b".")
        said, _ = child.communicate(timeout=60)
    assert said.split() == [str(os.getpriority(os.PRIO_PROCESS, 0)), str(nice)]


def test_a_process_that_nobody_let_wait_does_not(monkeypatch):
    monkeypatch.delenv("MESHKIT_STANDBY", raising=False)
    wait_for_turn("no_such_module")


def test_the_line_of_a_restart_adds_up():
    """Finding it takes 1 s and ending the others 0.5 s; of 4 s to the first step the slower process's parts name 3."""
    outage = Outage(failed_at=10.0, found_at=11.0, ended_at=11.5)
    slow = {"start": 0.4, "rendezvous": 0.5, "step": 2.5}
    line = outage.line([{"start": 0.1, "rendezvous": 0.5, "step": 1.0}, slow], now=15.5)
    assert line == (
        "trains again 5.50 s after the failure: "
        "found 1.00 s, others ended 0.50 s, start 1.00 s, rendezvous 0.50 s, step 2.50 s"
    )
