"""Test that executions of a program are found on the device, with or without the runtime's numbers."""

import numpy as np
import pytest

from meshkit.trace.operations import found_windows, step_windows


def windows(ops, num_steps=None, run=None):
    """Return the windows of steps; `ops` are (id, start), each one unit long."""
    op, start = (np.array(column) for column in zip(*sorted(ops, key=lambda o: o[1])))
    run = np.full(len(op), -1) if run is None else np.array(run)
    return step_windows(start.astype(float), start + 1.0, op, run, num_steps)


@pytest.mark.parametrize("num_steps", [None, 3])
def test_loops_run_several_times_in_one_execution(num_steps):
    # Each execution has op 0 once, op 1 four times, and op 2 once.
    ops = [(o, 100 * k + t) for k in range(3) for o, t in ((1, 0), (0, 5), (1, 10), (1, 20), (1, 30), (2, 40))]
    assert windows(ops, num_steps) == [(0, 100), (100, 200)]


def test_a_single_execution_ends_with_its_last_operation():
    assert windows([(0, 3), (1, 9)], 1) == [(3, 10)]


def test_dropped_events_do_not_move_the_windows():
    ops = [(o, 100 * k + 10 * o) for k in range(4) for o in range(6)]
    ops.remove((3, 130))  # The profiler lost one event.
    assert windows(ops, 4) == [(0, 100), (100, 200), (200, 300)]


def test_a_wrong_number_of_steps_is_not_believed():
    ops = [(o, 100 * k + 10 * o) for k in range(4) for o in range(3)]
    assert windows(ops, 7) == [(0, 100), (100, 200), (200, 300)]


def test_executions_may_overlap_at_their_seams():
    # Op 1 of an execution runs after op 0 of the next has begun.
    ops = [(0, 0), (1, 12), (0, 10), (1, 22), (0, 20), (1, 32)]
    assert windows(ops, 3) == [(0, 10), (10, 20)]


def test_more_executions_than_any_trace_has_are_none():
    start = np.arange(30_000, dtype=np.int64)
    op = start % 2
    assert found_windows(start, start + 1, op, np.zeros(2, bool)) == []
    assert len(found_windows(start[:1000], start[:1000] + 1, op[:1000], np.zeros(2, bool))) == 499


def test_many_kinds_of_operations_in_few_executions_and_few_in_many():
    many = [(o, 10_000 * k + 3 * o) for k in range(3) for o in range(50)]
    assert windows(many) == [(0, 10_000), (10_000, 20_000)]
    few = [(o, 100 * k + 10 * o) for k in range(50) for o in range(3)]
    assert windows(few) == [(100 * k, 100 * k + 100) for k in range(49)]
