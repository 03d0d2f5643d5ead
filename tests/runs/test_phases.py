"""Test that seconds by phase add up to the age of the process, and that its pulse tells others where it is."""

import os
import subprocess
import sys
import textwrap
from contextlib import closing

import pytest

from meshkit.runs.phases import PULSE_VARIABLE, Move, Phases, Pulse


def test_seconds_add_up():
    now = [100.0]
    phases = Phases(clock=lambda: now[0])
    age = phases.seconds["start"]
    for phase, seconds in [("compile", 3), ("data", 1), ("step", 5), ("data", 2), ("step", 7)]:
        phases.enter(phase, step=1)
        now[0] += seconds
    totals = phases.totals()
    assert totals == {"start": age, "compile": 3, "data": 3, "step": 12}
    assert sum(totals.values()) == age + 18


def test_the_pulse_says_each_move_at_once():
    with closing(Pulse()) as pulse:
        assert pulse.read() is None
        with Phases(pulse.path) as phases:
            assert pulse.read() == Move(0, "start", 0)
            for number, phase in enumerate(("compile", "data", "step"), start=1):
                phases.enter(phase, step=7)
                assert pulse.read() == Move(number, phase, 7)
        assert pulse.read() == Move(4, "end", 7)


def test_the_pulse_says_what_the_parts_of_the_start_took_once_a_step_is_made():
    now = [100.0]
    with closing(Pulse()) as pulse, Phases(pulse.path, clock=lambda: now[0]) as phases:
        age = phases.seconds["start"]
        parts = [("start", "rendezvous", 2), ("compile", "lower", 3), ("data", None, 1), ("step", None, 4)]
        for phase, part, seconds in parts:
            phases.enter(phase, 7 if phase == "step" else None, part=part)
            now[0] += seconds
            if part == "lower":
                phases.begin_part("load", ago_s=1.0)
        phases.enter("step", 7)  # The process is back from a hook.
        assert pulse.read_parts() is None
        phases.enter("data", 8)
        expected = {"start": round(age, 3), "rendezvous": 2, "lower": 2, "load": 1, "data": 1, "step": 4}
        assert pulse.read_parts() == expected
        now[0] += 9
        phases.enter("step", 8)
        assert pulse.read_parts() == expected


def test_another_process_reads_it_while_this_one_keeps_the_interpreter():
    """A library that keeps the interpreter, as a large unpickle does, lets no thread of Python run."""
    code = """
    import ctypes
    from meshkit.runs.phases import Phases
    with Phases() as phases:
        phases.enter("restore", 3)
        print("in", flush=True)
        ctypes.PyDLL(None).sleep(99)
    """
    with closing(Pulse()) as pulse:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=os.environ | {PULSE_VARIABLE: str(pulse.path)},
            pass_fds=(pulse.descriptor,),
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"in\n"
            assert pulse.read() == Move(1, "restore", 3)
        finally:
            child.kill()
            child.communicate()


@pytest.mark.parametrize("size", [None, 0, 127, 4096])
def test_what_is_no_pulse_is_left_alone(tmp_path, size):
    """The process has not inherited the variable's descriptor, or has another file there."""
    path = tmp_path / "other"
    if size is not None:
        path.write_bytes(b"x" * size)
    with Phases(path) as phases:
        phases.enter("step", 1)
    assert phases.step == 1
    assert (path.read_bytes() == b"x" * size) if size is not None else not path.exists()
