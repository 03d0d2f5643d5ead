"""Seconds by phase add up to the age of the process, and the pulse tells them while the main thread is busy."""

import json
import time

from meshkit.training.phases import Phases


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


def test_the_pulse_beats_while_the_main_thread_waits(tmp_path):
    pulse = tmp_path / "rank0.pulse"
    with Phases(pulse) as phases:
        phases.enter("step", 7)
        seen = set()
        deadline = time.monotonic() + 60
        while len(seen) < 2:
            assert time.monotonic() < deadline
            if pulse.exists():
                record = json.loads(pulse.read_text())
                if record["phase"] == "step":
                    seen.add(record["beats"])
            time.sleep(0.05)
    assert record["step"] == 7
    assert record["moves"] == 1


def test_a_pulse_that_cannot_be_written_stops_nothing(tmp_path):
    with Phases(tmp_path / "missing" / "rank0.pulse") as phases:
        phases.enter("step", 1)
    assert phases.step == 1
