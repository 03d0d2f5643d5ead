"""Test signals: they are passed on and honoured together, and nobody waits for a process that cannot save.

Children are plain Python. A time limit in a test is a multiple of what the supervisor promises, for machines under
load.
"""

import os
import signal
import threading
import time

import pytest

from meshkit.errors import RunError
from meshkit.verbs.launch.local import Policy, next_attempt
from tests.verbs.launch.children import Run, wait_for


@pytest.fixture(autouse=True)
def _a_terminal():
    """Reset SIGHUP, which nohup ignores from the start and the supervisor leaves so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "child_code", "code"),
    [(signal.SIGTERM, 75, 75), (signal.SIGTERM, 0, 0), (signal.SIGHUP, 75, 75), (signal.SIGINT, 130, 130)],
)
def test_a_signal_is_passed_on_and_nothing_restarts(tmp_path, number, child_code, code):
    got = signal.SIGTERM if number == signal.SIGHUP else number  # A closed terminal sends SIGHUP.
    body = f"""
        signal.signal({int(got)}, lambda *_: (time.sleep(0.2), mark(f"saved{{rank}}"), os._exit({child_code})))
        mark(f"ready{{rank}}"); wait()
    """
    run = Run(tmp_path, body)
    sender = threading.Thread(target=_signal_when_ready, args=(tmp_path, number))
    sender.start()
    before = signal.getsignal(number)
    assert run() == code
    sender.join()
    assert signal.getsignal(number) is before
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert f"{got.name} is passed on" in run.text
    assert next_attempt(tmp_path / "logs") == 1


def _signal_when_ready(folder, number, times=1):
    wait_for(folder / "ready0")
    wait_for(folder / "ready1")
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(0.3)


def test_told_twice_is_now(tmp_path):
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN); mark(f'ready{rank}'); wait()"
    run = Run(tmp_path, body, policy=Policy(save_grace_s=600))
    sender = threading.Thread(target=_signal_when_ready, args=(tmp_path, signal.SIGINT, 2))
    sender.start()
    assert run() == 130
    sender.join()


def test_who_does_not_save_in_time_is_killed(tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); mark(f'ready{rank}'); wait()"
    run = Run(tmp_path, body, policy=Policy(save_grace_s=0.3))
    sender = threading.Thread(target=_signal_when_ready, args=(tmp_path, signal.SIGTERM))
    sender.start()
    with pytest.raises(RunError, match="told to stop by SIGTERM, but a process did not save and end: killed by SIGK"):
        run()
    sender.join()


def test_one_that_fails_instead_of_saving_leaves_nothing_to_wait_for(tmp_path):
    """A save takes all processes, so the others would wait for it until the end of the grace."""
    body = """
        pulse("save")
        signal.signal(signal.SIGTERM, (lambda *_: os._exit(4)) if rank else signal.SIG_IGN)
        mark(f"ready{rank}"); wait()
    """
    run = Run(tmp_path, body, policy=Policy(save_grace_s=600, failure_grace_s=0.3))
    sender = threading.Thread(target=_signal_when_ready, args=(tmp_path, signal.SIGTERM))
    sender.start()
    began = time.monotonic()
    with pytest.raises(RunError, match="a process did not save and end"):
        run()
    assert time.monotonic() - began < 60
    sender.join()


def test_a_gang_that_is_preempted_by_others_is_not_cut_short(tmp_path):
    body = """
        signal.signal(signal.SIGTERM, lambda *_: None)  # as jax has it
        pulse("save")
        if rank == 1:
            until("saved0"); time.sleep(1)  # longer than twice the grace after a failure
        mark(f"saved{rank}"); sys.exit(75)
    """
    assert Run(tmp_path, body)() == 75
    assert (tmp_path / "saved1").exists()


def test_one_that_is_told_alone_before_the_loop_ends_the_others_too(tmp_path):
    """It exits with 75 at once; the others would wait for it in a collective, or in the rendezvous."""
    body = """
        pulse("compile")
        if rank == 1:
            mark("ready"); sys.exit(75)
        until("ready"); signal.signal(signal.SIGTERM, lambda *_: (mark("told"), os._exit(75))); wait()
    """
    assert Run(tmp_path, body)() == 75
    assert (tmp_path / "told").exists()


def test_one_that_is_told_alone_leaves_none_in_a_collective(tmp_path):
    body = """
        signal.signal(signal.SIGTERM, lambda *_: None)
        pulse("step" if rank == 0 else "compile")
        if rank == 1: sys.exit(75)
        wait()
    """
    run = Run(tmp_path, body, policy=Policy(save_grace_s=600, failure_grace_s=0.3))
    began = time.monotonic()
    assert run() == 75
    assert time.monotonic() - began < 60  # Two short graces pass, not the one for a save.


@pytest.mark.parametrize(("phase", "code"), [("restore", 75), ("step", None), (None, 75)])
def test_told_before_the_first_step_is_preempted_with_nothing_to_save(tmp_path, phase, code):
    body = f"""
        phase = {phase!r}
        if phase: pulse(phase)
        mark(f"ready{{rank}}"); wait()
    """
    run = Run(tmp_path, body)
    sender = threading.Thread(target=_signal_when_ready, args=(tmp_path, signal.SIGTERM))
    sender.start()
    if code is None:
        with pytest.raises(RunError, match="did not save and end: killed by SIGTERM"):
            run()
    else:
        assert run() == code
    sender.join()
