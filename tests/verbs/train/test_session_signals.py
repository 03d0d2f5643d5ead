"""Test that a signal before the first step ends a run at once, and that later it waits for the end of a step."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from meshkit.verbs.train.session import Preempted, StopRequest
from tests.releases import without_jaxlibs_lines

ROOT = Path(__file__).resolve().parents[3]
GANG = {"MESHKIT_COORDINATOR": "127.0.0.1:1", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": "1"}
# No signal interrupts this C call, which locks a mutex a second time, just as none interrupts a compilation.
BUSY = """
    import ctypes, sys
    from pathlib import Path
    from meshkit.verbs.train.session import StopRequest
    with StopRequest():
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        Path("busy").touch()
        libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_before_the_first_step_one_process_stops_where_it_is(number, error):
    before = signal.getsignal(number)
    with pytest.raises(error, match="before the first step" if error is Preempted else None), StopRequest():  # noqa: PT012
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert signal.getsignal(number) is before


def test_in_the_loop_it_is_asked_for():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        stop.arm()
        assert not stop.agreed(1, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert stop.agreed(2, 2)
        assert stop.preempted
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: a mutex of 64 bytes of zeros")
@pytest.mark.parametrize(
    ("number", "code", "variables"),
    [(signal.SIGTERM, 75, GANG), (signal.SIGINT, 130, GANG), (signal.SIGTERM, 75, {"MESHKIT_PULSE": "rank0.pulse"})],
)
def test_before_the_first_step_a_supervised_one_ends_in_the_middle_of_a_compilation(tmp_path, number, code, variables):
    env = os.environ | variables | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(BUSY)], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "busy").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == code
    assert without_jaxlibs_lines(said) == f"meshkit: stopped by {number.name} before the first step: nothing to save.\n"
