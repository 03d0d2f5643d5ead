"""Test when a process counts as late, by a clock of the test's."""

import pytest

from meshkit.runs.hang_watch import AwakeAge
from meshkit.runs.phases import Phases

LOOK_S, HOUR_S = 0.5, 3600.0


@pytest.mark.parametrize(
    ("looks", "age_s"),
    [
        ([LOOK_S] * 1190, 595.0),
        ([LOOK_S] * 10 + [HOUR_S] + [LOOK_S] * 1170, 590.0),  # The job or its machine was suspended.
        ([LOOK_S] * 10 + [HOUR_S, HOUR_S] + [LOOK_S] * 1210, 610.0),  # After that, the process makes no progress.
        ([4 * LOOK_S] * 5, 10.0),  # The machine is busy.
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(looks, age_s):
    now = [100.0]
    phases = Phases(clock=lambda: now[0])
    phases.enter("step", 1)
    age = AwakeAge(phases, clock=lambda: now[0])
    age.look()
    for passed in looks:
        now[0] += passed
        seen = age.look()
    assert seen == age_s
    phases.enter("data", 2)
    now[0] += LOOK_S
    assert age.look() == LOOK_S
