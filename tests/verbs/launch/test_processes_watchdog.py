"""Test that processes which live but make no progress are named, stopped and started again.

Children are plain Python. The limits are seconds at most, and a child says where it is as it gets there, however late
that is. On a machine so loaded that a healthy child is later than its limit, the attempt counts as stuck, so the tests
of what is stuck make the other child's limits irrelevant.
"""

import os
import re
import subprocess
import sys
import textwrap
from contextlib import closing
from types import SimpleNamespace
from typing import cast

import pytest

from meshkit.distributed.environment import Gang
from meshkit.errors import ConfigError, RunError
from meshkit.runs import owner
from meshkit.runs.hang import StepOrder
from meshkit.runs.limits import HANG_WATCH_S, Limits, read_limits
from meshkit.runs.phases import PHASES, Phases, Pulse
from meshkit.verbs.launch.local import Policy, Supervisor
from meshkit.verbs.launch.processes import LocalGang, Watchdog

PRELUDE = """
import ctypes, os, signal, sys, time
from meshkit.runs.phases import Phases
rank, attempt = int(os.environ["RANK_"]), int(os.environ["ATTEMPT_"])
def waits_for_data():
    while True: time.sleep(0.05)
"""


def run(folder, body, limits, max_restarts=1, host=None, **variables):
    shown = []
    within = "with Phases() as phases:\n    enter = phases.enter\n" + textwrap.indent(textwrap.dedent(body), "    ")
    code = PRELUDE + within
    policy = Policy(max_restarts=max_restarts, failure_grace_s=0.3, pause_s=0.01, limits=limits)
    told = {**os.environ, **variables}
    environments = lambda attempt: [{**told, "RANK_": str(i), "ATTEMPT_": str(attempt)} for i in range(2)]
    supervisor = Supervisor([sys.executable, "-c", code], environments, folder, policy, shown.append, host=host)
    return supervisor, shown


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits(stall_s=1000, of_phase={"step": 3}, stopped_s=0), "has not moved"),
        pytest.param(
            *(Limits(stall_s=1000, stopped_s=1), "has been stopped (SIGSTOP)"),
            marks=pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc"),
        ),
    ],
)
def test_a_stopped_process_is_named_and_all_start_again(tmp_path, limits, says):
    body = """
        enter("step", 3)
        if attempt == 0:
            def is_stopped(): os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 1: is_stopped()
            waits_for_data()
    """
    supervisor, shown = run(tmp_path, body, limits)
    assert supervisor.run() == 0
    text = "\n".join(shown)
    assert f"process 1 is stuck in attempt 0: it {says} for" in text
    assert "in phase 'step' at step 3" in text
    assert "in is_stopped" in text  # The function is in its stack.
    assert "restart 1 of 1" in text


def test_a_process_that_waits_for_data_is_named_with_its_stack(tmp_path):
    """Process 0 waits in the collective of step 4 for process 1, which has not come out of its data."""
    body = """
        if attempt == 0:
            enter("data", 4) if rank == 1 else enter("step", 4)
            waits_for_data()
    """
    supervisor, shown = run(tmp_path, body, Limits(stall_s=1.5))
    assert supervisor.run() == 0
    text = "\n".join(shown)
    assert "process 1 is stuck in attempt 0: it has not moved for" in text
    assert "in phase 'data' at step 4; 1 others wait" in text
    assert "in waits_for_data" in text  # The function is in its stack, the last lines of its log.


def test_on_one_of_several_hosts_nothing_is_said_of_processes_that_others_watch(tmp_path, monkeypatch):
    """Only its own processes are known, in a file of its own; a step that is there says how many the job has."""
    monkeypatch.setattr("meshkit.verbs.launch.local.HANG_WATCH_S", 0.5)
    StepOrder(4, (), ()).write(tmp_path)
    body = """
        if attempt == 0:
            enter("data", 4) if rank == 1 else enter("step", 4)
            waits_for_data()
    """
    job = Gang("gpu0:61000", 4, 0, attempt=7).emit()
    supervisor, shown = run(tmp_path, body, Limits(stall_s=1.5), host=1, **job)
    assert supervisor.run() == 0
    text = "\n".join(shown)
    assert (
        "process 1 has not entered step 4, in which process 0 waits; nothing is known here of the other hosts" in text
    )
    assert not re.search("process(es)? [23]|no answer", text)
    assert f"evidence: {tmp_path}/hang/attempt7-host1.json" in text
    assert (tmp_path / "hang" / "attempt7-host1.json").exists()


def test_a_stuck_gang_without_restarts_is_an_error(tmp_path):
    supervisor, _ = run(tmp_path, 'enter("step", 1); waits_for_data()', Limits(stall_s=0.5), max_restarts=0)
    with pytest.raises(RunError, match=r"process [01] failed"):
        supervisor.run()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
def test_a_library_that_keeps_the_interpreter_is_alive_and_has_the_limit_of_its_phase(tmp_path):
    """No thread of Python runs in the library, but its stack is told all the same."""
    body = """
        def keeps(seconds): ctypes.PyDLL(None).usleep(int(1e6 * seconds))
        enter("compile", 0)
        if attempt == 0:
            keeps(2.5)
            enter("step", 7 - rank)
            keeps(99)
    """
    limits = Limits(stall_s=1.5, of_phase={"start": 1000, "compile": 1000})
    supervisor, shown = run(tmp_path, body, limits)
    assert supervisor.run() == 0
    text = "\n".join(shown)
    used = r"it has not moved for \d+ s \([\d.]+ s of CPU time\), in phase 'step' at step 6; 1 others wait"
    assert re.search(f"process 1 is stuck in attempt 0: {used}", text)
    assert "in keeps" in text


def gang_of(count):
    """Return members that the watchdog sees as running: this very process."""
    members = [SimpleNamespace(rank=i, pid=os.getpid(), ending=None) for i in range(count)]
    return cast(LocalGang, SimpleNamespace(members=members, running=members))


class Watched:
    """One process, its watchdog, and a clock that advances with each look."""

    def __init__(self, pulse, limits, wait_s=0.0):
        self.now, self.gang = 0.0, gang_of(1)
        self.dog = Watchdog([pulse], limits, wait_s=wait_s, clock=lambda: self.now)

    def called_after(self, seconds):
        """Return when the process is called stuck, and why, or None."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            if (found := self.dog.look(self.gang)) is not None:
                return self.now, found.why
        return None


@pytest.mark.parametrize(
    ("phase", "limits", "after_s"),
    [
        ("step", Limits(stall_s=100), 102),  # It is seen at 1 s for the first time.
        ("compile", Limits(stall_s=100), 602),
        ("save", Limits(stall_s=100, of_phase={"save": 40}), 42),
        ("compile", Limits(stall_s=0, of_phase={"compile": 40}), 42),
        ("compile", Limits(stall_s=100, of_phase={"compile": 0}), None),
        ("step", Limits(stall_s=0), None),
    ],
)
def test_limits_by_phase(phase, limits, after_s):
    with closing(Pulse()) as pulse, Phases(pulse.path) as phases:
        phases.enter(phase, 5)
        called = Watched(pulse, limits).called_after(1000)
        assert (called and called[0]) == after_s
        assert called is None or f"in phase '{phase}' at step 5" in called[1]


def test_on_several_hosts_the_processes_have_time_to_name_the_hang_first():
    with closing(Pulse()) as pulse, Phases(pulse.path) as phases:
        phases.enter("step", 5)
        called = Watched(pulse, Limits(stall_s=100), HANG_WATCH_S).called_after(1000)
    assert called is not None
    assert called[0] == 102 + HANG_WATCH_S


def test_before_the_first_pulse_the_limit_is_that_of_a_start():
    with closing(Pulse()) as pulse:
        called = Watched(pulse, Limits(stall_s=10)).called_after(1000)
    assert called is not None
    assert called[0] == 61
    assert "in phase 'start' at step 0" in called[1]


def test_one_that_gets_on_is_never_called():
    with closing(Pulse()) as pulse, Phases(pulse.path) as phases:
        watched = Watched(pulse, Limits(stall_s=10))
        for step in range(20):
            phases.enter("step", step)
            assert watched.called_after(9) is None


def test_a_job_that_was_suspended_is_not_stuck():
    """The supervisor was stopped as well, so nothing is known of the hours in between."""
    with closing(Pulse()) as pulse, Phases(pulse.path) as phases:
        phases.enter("step", 1)
        watched = Watched(pulse, Limits(stall_s=100))
        assert watched.called_after(50) is None
        watched.now += 7200
        assert watched.called_after(50) is None
        called = watched.called_after(50)
        assert called is not None
        assert "has not moved for 101 s" in called[1]


def test_what_is_no_move_is_none():
    with closing(Pulse()) as pulse:
        assert pulse.read() is None
        os.pwrite(pulse.descriptor, b'{"moves": 1, "pha', 0)
        assert pulse.read() is None


def test_limits_that_options_give():
    assert read_limits(["600"]) == Limits()
    assert read_limits(["compile=7200", "30", "stopped=5"]) == Limits(30, {"compile": 7200}, 5)
    assert read_limits(["0", "step=9"]) == Limits(0, {"step": 9}, 0)
    assert all(read_limits([f"{phase}=1"]).of(phase) == 1 for phase in PHASES)


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1e999", "compile", "compile=", "coffee=5", "=5"])
def test_what_is_no_limit_is_refused(text):
    with pytest.raises(ConfigError, match="is no limit") as error:
        read_limits([text])
    assert error.value.at == "--stall-timeout"


_HOLDS = """
from pathlib import Path
from meshkit.runs.owner import take_run
if rank == 0:
    with take_run(Path({folder!r})) as held:
        Path({folder!r}, "holds").touch()
        ctypes.PyDLL(None).sleep(6)  # with the interpreter: no thread of this process runs
        held.check()
"""
_ELSEWHERE = """
import sys, time
from pathlib import Path
from meshkit.errors import ConfigError
from meshkit.runs import owner
folder, me = Path({folder!r}), owner.this_process(0) | {{"host": "elsewhere", "boot": "another"}}
owner.this_process, owner.LEASE_S = (lambda attempt: me), 2.0
while not (folder / "holds").exists(): time.sleep(0.05)
time.sleep(2.5)
try:
    owner.take_run(folder)
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
def test_a_process_whose_interpreter_is_kept_for_longer_than_its_lease_keeps_the_folder(tmp_path, monkeypatch):
    """Another host looks while no thread of the process runs; its launcher gives the sign of life."""
    monkeypatch.setattr(owner, "BEAT_S", 0.3)
    code, holds = (text.format(folder=str(tmp_path)) for text in (_ELSEWHERE, _HOLDS))
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as elsewhere:
        supervisor, shown = run(tmp_path, holds, Limits())
        assert supervisor.run() == 0, shown
        said = elsewhere.communicate(timeout=30)[1]
    assert "another job has this run folder: process" in said
    assert [path.name for path in (tmp_path / "owner").iterdir()] == ["1.released.json"]
