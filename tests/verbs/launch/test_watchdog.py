"""Processes that are alive and do not get on are named, stopped and started again. Children are plain Python.

Times: the limits are fractions of a second and the children beat every 50 ms; on a machine so loaded that a healthy
child is late, the attempt counts as stuck, so the tests of what is stuck make the other child's limits irrelevant.
"""

import json
import os
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshkit.errors import RunError
from meshkit.verbs.launch.processes import LocalGang, Member
from meshkit.verbs.launch.supervisor import Policy, Supervisor
from meshkit.verbs.launch.watchdog import Limits, Watchdog

PRELUDE = """
import json, os, signal, sys, time, threading, faulthandler
rank, attempt = int(os.environ["RANK_"]), int(os.environ["ATTEMPT_"])
faulthandler.register(signal.SIGUSR1, all_threads=True)
now = {"moves": 0, "phase": "start", "step": 0}
def beat():
    n = 0
    while True:
        n += 1
        path = os.environ["MESHKIT_PULSE"]
        with open(path + ".tmp", "w") as f: json.dump({**now, "beats": n}, f)
        os.replace(path + ".tmp", path)
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
def enter(phase, step):
    now.update(moves=now["moves"] + 1, phase=phase, step=step)
def waits_for_data():
    while True: time.sleep(0.05)
"""


def run(folder, body, limits, max_restarts=1):
    shown = []
    code = PRELUDE + textwrap.dedent(body)
    policy = Policy(max_restarts=max_restarts, failure_grace_s=0.3, pause_s=0.01, limits=limits)
    environments = lambda attempt: [{**os.environ, "RANK_": str(i), "ATTEMPT_": str(attempt)} for i in range(2)]
    supervisor = Supervisor([sys.executable, "-c", code], environments, folder, policy, shown.append)
    return supervisor, shown


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(stall_s=1000, silence_s=3, stopped_s=1000), "gives no sign of life"),
        pytest.param(
            *(Limits(stall_s=1000, silence_s=1000, stopped_s=1), "has been stopped (SIGSTOP)"),
            marks=pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc"),
        ),
    ],
)
def test_a_stopped_process_is_named_and_all_start_again(tmp_path, limits, says):
    body = """
        enter("step", 3)
        if attempt == 0:
            time.sleep(0.3)
            def is_stopped(): os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 1: is_stopped()
            waits_for_data()
    """
    supervisor, shown = run(tmp_path, body, limits)
    assert supervisor.run() == 0
    text = "\n".join(shown)
    assert f"process 1 is stuck in attempt 0: it {says} for" in text
    assert "in phase 'step' at step 3" in text
    assert "in is_stopped" in text  # of its stack
    assert "restart 1 of 1" in text


def test_a_process_that_waits_for_data_is_named_with_its_stack(tmp_path):
    """Process 0 waits in the collective of step 4; process 1, which it waits for, has not come out of its data."""
    body = """
        if attempt == 0:
            enter("data", 4) if rank == 1 else enter("step", 4)
            waits_for_data()
    """
    supervisor, shown = run(tmp_path, body, Limits(stall_s=1.5, silence_s=1000))
    assert supervisor.run() == 0
    text = "\n".join(shown)
    assert "process 1 is stuck in attempt 0: it has not moved for" in text
    assert "in phase 'data' at step 4; 1 others wait" in text
    assert "in waits_for_data" in text  # of its stack, the last lines of its log


def test_a_stuck_gang_without_restarts_is_an_error(tmp_path):
    supervisor, _ = run(tmp_path, 'enter("step", 1); waits_for_data()', Limits(stall_s=0.5), max_restarts=0)
    with pytest.raises(RunError, match=r"process [01] failed"):
        supervisor.run()


def gang_of(count):
    """Members that run, as far as the watchdog looks: in this very process."""
    process = cast(Any, SimpleNamespace(pid=os.getpid()))
    return LocalGang([], [], Path(), members=[Member(i, process, Path()) for i in range(count)])


def beat(path, beats, moves, phase, step):
    path.write_text(json.dumps({"beats": beats, "moves": moves, "phase": phase, "step": step}))


@pytest.mark.parametrize(("phase", "after_s", "called"), [("step", 90, False), ("step", 110, True),
                                                          ("compile", 550, False), ("compile", 650, True)])  # fmt: skip
def test_limits_by_phase(tmp_path, phase, after_s, called):
    now = [0.0]
    pulse = tmp_path / "rank0.pulse"
    dog = Watchdog([pulse], Limits(stall_s=100, silence_s=30), clock=lambda: now[0])
    gang = gang_of(1)
    for second in range(after_s):
        now[0] = float(second)
        beat(pulse, second, 1, phase, 5)
        found = dog.look(gang)
        assert found is None or second > (100 if phase == "step" else 600)
    assert (found is not None) == called


def test_before_the_first_pulse_the_limit_is_that_of_a_start(tmp_path):
    now = [0.0]
    dog = Watchdog([tmp_path / "rank0.pulse"], Limits(stall_s=10), clock=lambda: now[0])
    now[0] += 59
    assert dog.look(gang_of(1)) is None
    now[0] += 2
    found = dog.look(gang_of(1))
    assert found is not None
    assert found.why == "has not moved for 61 s, in phase 'start' at step 0"


def test_no_limit(tmp_path):
    now = [0.0]
    pulse = tmp_path / "rank0.pulse"
    dog = Watchdog([pulse], Limits(stall_s=0), clock=lambda: now[0])
    beat(pulse, 1, 1, "step", 1)
    dog.look(gang_of(1))
    now[0] += 1e6
    assert dog.look(gang_of(1)) is None


def test_a_pulse_that_is_only_touched_is_a_sign_of_life(tmp_path):
    """All that a full disk may allow."""
    now = [0.0]
    pulse = tmp_path / "rank0.pulse"
    beat(pulse, 1, 1, "step", 1)
    dog = Watchdog([pulse], Limits(stall_s=100, silence_s=5), clock=lambda: now[0])
    for second in range(40):
        now[0] = float(second)
        os.utime(pulse, (second, second))
        assert dog.look(gang_of(1)) is None


def test_an_unreadable_pulse_is_none(tmp_path):
    pulse = tmp_path / "rank0.pulse"
    pulse.write_text("{")
    assert Watchdog([pulse], Limits(stall_s=1)).look(gang_of(1)) is None
