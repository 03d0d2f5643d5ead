"""Seconds by phase add up to the age of the process, and the pulse tells them while the main thread is busy."""

import json
import os
import time

from meshkit.runs.phases import Phases


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


def test_a_phase_that_comes_seldom_is_told_at_once(tmp_path, monkeypatch):
    """Not after the second that a pulse may take: `save` may be over by then."""
    monkeypatch.setattr("meshkit.runs.phases._EVERY_S", 1000.0)
    pulse = tmp_path / "rank0.pulse"
    with Phases(pulse) as phases:
        for phase in ("compile", "save"):
            phases.enter(phase)
            deadline = time.monotonic() + 60
            while phase not in (pulse.read_text() if pulse.exists() else ""):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_full_disk_still_takes_a_sign_of_life(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshkit.runs.phases._EVERY_S", 0.01)
    pulse = tmp_path / "rank0.pulse"
    pulse.touch()
    os.utime(pulse, (1, 1))
    monkeypatch.setattr("os.pwrite", full)
    with Phases(pulse):
        deadline = time.monotonic() + 60
        while pulse.stat().st_mtime < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
