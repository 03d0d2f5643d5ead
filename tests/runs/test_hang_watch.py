"""When a process calls itself late, by a clock of the test's."""

import itertools
import time

import pytest

from meshkit.runs.hang_watch import HangWatch
from meshkit.runs.limits import Limits
from meshkit.runs.phases import Phases

LOOK_S, HOUR_S = 0.5, 3600.0


@pytest.mark.parametrize(
    ("looks", "late"),
    [
        ([LOOK_S] * 1190, False),  # 595 s in a step, whose limit is 600 s
        ([LOOK_S] * 1210, True),
        ([LOOK_S] * 10 + [HOUR_S] + [LOOK_S] * 1170, False),  # the job was suspended, or its machine
        ([LOOK_S] * 10 + [HOUR_S] + [LOOK_S] * 1210, True),  # and then it does not get on
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(looks, late, tmp_path, monkeypatch):
    now, called = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    phases = Phases(clock=time.monotonic)
    phases.enter("step", 1)
    watch = HangWatch(phases, tmp_path, print, Limits())
    monkeypatch.setattr(watch, "_talk", lambda: (called.append(True), watch._told.set()))
    rest = itertools.chain(looks)

    def wait(seconds):
        assert seconds == LOOK_S
        passed = next(rest, None)
        now[0] += passed or 0.0
        return passed is None

    monkeypatch.setattr(watch._ended, "wait", wait)
    watch._look()
    assert called == [True] * late
