"""Test goodput under failures: the simulator against a run walked event by event, and against closed forms."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.predict.failures import (
    HOST,
    Costs,
    Failure,
    Spares,
    best_interval,
    draw,
    expected_goodput,
    expected_shares,
    months,
    play,
)

CALM = Costs(step_s=2.0, blocked_s=0.5, write_s=20.0, detection_s=100.0, restart_s=600.0, read_s=30.0)
SLOW_WRITES = Costs(step_s=2.0, blocked_s=5.0, write_s=300.0, detection_s=100.0, restart_s=600.0, read_s=30.0)
INSTANT = Costs(step_s=1.0, blocked_s=4.0, write_s=0.0, detection_s=0.0, restart_s=0.0)


def young_s(blocked_s, between_s):
    """Return Young's interval between saves (1974), the optimum to first order."""
    return math.sqrt(2 * blocked_s * between_s)


def daly_s(blocked_s, between_s):
    """Return Daly's interval (2006, equation 37), which is of higher order."""
    x = blocked_s / (2 * between_s)
    return young_s(blocked_s, between_s) * (1 + math.sqrt(x) / 3 + x / 9) - blocked_s


def walked(costs, every, failures, steps):
    """Return a run's attempts and the seconds of each kind, from a walk event by event."""
    found, saved, began, up, attempts = Counter(), 0, 0, costs.first_s, 1
    for ends in [*(failure.at_s for failure in failures), math.inf]:
        if ends < began:
            continue
        found["down"] += min(up, ends) - began
        attempt, now, step, written = Counter(), up, saved, [(-math.inf, saved)]
        while now < ends and step < steps:
            attempt["made"] += min(costs.step_s, ends - now)
            now += costs.step_s
            step += now <= ends
            if now <= ends and every and (step % every == 0 or step == steps):
                saved_at = max(now, written[-1][0]) + costs.blocked_s  # This save begins after the one before it.
                attempt["save"] += min(saved_at, ends) - now
                now = saved_at
                written.append((now + costs.write_s, step))
        if every and step == steps and now <= ends:  # The run waits for the last save.
            attempt["save"] += min(written[-1][0], ends) - now
        done = step == steps and max(now, written[-1][0]) <= ends
        kept = steps if done else max(made for at, made in written if at <= ends)
        found["save"] += attempt["save"]
        found["step"] += (kept - saved) * costs.step_s
        found["lost"] += attempt["made"] - (kept - saved) * costs.step_s
        if done:
            return found, attempts
        saved, attempts = kept, attempts + 1
        found["down"] += costs.detection_s
        began, up = ends + costs.detection_s, ends + costs.detection_s + costs.up_s
    raise AssertionError("an attempt that nothing ends is done")


@settings(max_examples=300, deadline=None)
@given(
    every=st.integers(0, 6),
    tens=st.tuples(*(st.integers(low, 9) for low in (1, 0, 0, 0, 0, 0, 0))),
    gaps=st.lists(st.integers(1, 60), max_size=8),
    steps=st.integers(1, 25),
)
def test_a_run_played_is_the_run_walked_event_by_event(every, tens, gaps, steps):
    costs = Costs(*(10 * ten for ten in tens))
    # What begins with the i-th failure lies i ticks behind a multiple of ten, so no two moments coincide.
    failures = [Failure(10 * at + i + 1, "restart") for i, at in enumerate(itertools.accumulate(gaps))]
    spent = play(costs, every, failures, steps=steps)
    found, attempts = walked(costs, every, failures, steps)
    # An attempt that ends while it waits for the very last save loses that wait, which the walk counts as a save's.
    assert (spent.step_s, spent.save_s + spent.lost_s, spent.down_s) == pytest.approx(
        (found["step"], found["save"] + found["lost"], found["down"]), abs=1e-6
    )
    assert spent.save_s <= found["save"] + 1e-6
    assert spent.step_s == steps * costs.step_s
    assert spent.attempts == attempts


@pytest.mark.parametrize(
    ("costs", "every", "between_s"),
    [(CALM, 100, 4 * 3600), (SLOW_WRITES, 100, 4 * 3600), (SLOW_WRITES, 200, 1500), (INSTANT, 50, 600)],
)
def test_the_simulator_agrees_with_the_closed_form(costs, every, between_s):
    count = 20_000
    spent = play(costs, every, draw(3, 1 / between_s), until_s=count * between_s)
    expected = expected_shares(costs, every, between_s)
    # The deviation of kept - goodput x time from one failure to the next is below (1 - goodput) M and a cycle.
    deviation = ((1 - expected.goodput) * between_s + costs.cycle_s(every)) / between_s / math.sqrt(count)
    assert spent.goodput == pytest.approx(expected.goodput, abs=4 * deviation)
    assert spent.down_s / spent.wall_s == pytest.approx(expected.down, abs=4 * deviation)
    assert sum(expected) == pytest.approx(1)


@pytest.mark.parametrize("costs", [CALM, INSTANT, SLOW_WRITES])
def test_goodput_is_that_of_first_order_where_failures_are_rare(costs):
    every, between_s = 500, 5e7
    work_s, cycle_s = every * costs.step_s, costs.cycle_s(every)
    down_s = costs.detection_s + costs.up_s
    lost_s = cycle_s / 2 + costs.write_s + work_s + costs.blocked_s - cycle_s
    first_order = work_s / cycle_s * (1 - (down_s + lost_s) / between_s)
    second_order = ((down_s + 2 * cycle_s + costs.write_s) / between_s) ** 2
    assert expected_goodput(costs, every, between_s) == pytest.approx(first_order, abs=second_order)


@pytest.mark.parametrize("between_s", [3e2, 3e3, 3e4, 3e5])
def test_the_best_interval_is_youngs_and_closer_dalys(between_s):
    best_s = best_interval(INSTANT, between_s) * INSTANT.step_s
    young, daly = young_s(INSTANT.blocked_s, between_s), daly_s(INSTANT.blocked_s, between_s)
    # The bound is a step, or the next order.
    assert abs(best_s - daly) <= max(INSTANT.step_s, INSTANT.blocked_s**2 / between_s)
    assert abs(best_s - young) <= INSTANT.blocked_s + INSTANT.step_s  # Young leaves out the time of the save itself.
    found = [expected_goodput(INSTANT, every, between_s) for every in range(1, 3 * round(best_s))]
    assert max(found) == expected_goodput(INSTANT, round(best_s), between_s)


def test_steps_do_not_save_more_often_than_a_write_takes():
    free = Costs(step_s=2.0, blocked_s=0.0, write_s=301.0, detection_s=10.0, restart_s=10.0)
    assert best_interval(free, 3600.0) == 151


def test_goodput_goes_to_nothing_where_no_save_is_ever_written():
    assert 0 <= expected_goodput(SLOW_WRITES, 10**6, 10.0) < 1e-9


def test_a_job_without_spares_waits_for_each_lost_host():
    failures = [Failure(1000.0, HOST), Failure(4000.0, "restart"), Failure(6000.0, HOST)]
    spent = play(CALM, 100, failures, steps=5000, spares=Spares(0, 1500.0))
    assert spent.wait_s == 3000.0
    assert play(CALM, 100, failures, steps=5000, spares=Spares(1, 1500.0)).wait_s == 0


def test_a_spare_host_serves_again_once_the_lost_one_is_mended():
    spares = Spares(1, 1500.0)
    assert [spares.wait_s(now) for now in (0.0, 1000.0, 2600.0)] == [0.0, 500.0, 0.0]


def test_a_spare_host_of_another_pool_does_not_help():
    spares = Spares(1, 1e9, pools=2, seed=1)
    waits = [spares.wait_s(0.0) > 0 for _ in range(3)]
    assert any(waits)  # Of three lost hosts, two were in one pool.
    assert not any(Spares(3, 1e9, pools=2, seed=1).wait_s(0.0) for _ in range(3))


def test_the_same_seed_draws_the_same_failures():
    first, again = (list(itertools.islice(draw(5, 1e-3, host_share=0.5), 50)) for _ in range(2))
    assert first == again
    assert {failure.kind for failure in first} == {HOST, "restart"}
    assert list(months(CALM, 100, 1e-4, seed=1)) == sorted(months(CALM, 100, 1e-4, seed=1))


def test_a_failure_may_save_the_steps_and_take_a_time_of_its_own():
    costs = Costs(step_s=1.0, blocked_s=0.0, write_s=0.0, detection_s=2.0, restart_s=5.0)
    lost, kept = (play(costs, 10, [Failure(14.0, "x", saves=saves)], until_s=30.0) for saves in (False, True))
    assert (lost.lost_steps, lost.step_s, lost.lost_s, lost.down_s) == (4, 19.0, 4.0, 7.0)
    assert (kept.lost_steps, kept.step_s, kept.lost_s, kept.down_s) == (0, 23.0, 0.0, 7.0)
    assert play(costs, 10, [Failure(14.0, "x", up_s=1.0)], until_s=30.0).down_s == 3.0
