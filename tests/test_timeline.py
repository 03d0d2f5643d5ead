"""Test the sweep against cases worked out by hand, and against brute force on an integer grid, cell by cell."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import ConfigError
from meshkit.timeline import DeviceStep, overlap, sweep

WINDOW = 24  # The grid has this many cells.


def test_overlap_of_the_synthetic_step():
    # This is one GPU of the synthetic trace, in us: see tests/data/SOURCES.md.
    compute = np.array([(0, 10), (10, 50), (105, 120)]) * 1e-6
    communication = np.array([(20, 80), (70, 100)]) * 1e-6
    found = overlap(compute, communication, (0.0, 150e-6))
    assert found.compute_s == pytest.approx(65e-6)
    assert found.communication_s == pytest.approx(80e-6)
    assert found.overlapped_s == pytest.approx(30e-6)
    assert found.exposed_s == pytest.approx(50e-6)
    assert found.idle_s == pytest.approx(35e-6)


def test_compute_under_compute_counts_once():
    # Summing the pairwise intersections would give 4 s of overlap for 2 s of communication.
    found = overlap([(0, 4), (0, 4)], [(1, 3)], (0, 4))
    assert (found.compute_s, found.overlapped_s, found.exposed_s) == (4, 2, 0)


def test_spans_outside_the_window_are_cut_off():
    found = overlap([(-5, 1)], [(3, 100)], (0, 4))
    assert (found.compute_s, found.communication_s, found.idle_s) == (1, 1, 2)


def test_empty_inputs_are_all_idle():
    found = overlap([], np.zeros((0, 2)), (2.0, 5.0))
    assert (found.window_s, found.idle_s, found.compute_s, found.communication_s) == (3, 3, 0, 0)


def test_an_epoch_of_nanosecond_clocks_costs_no_precision():
    epoch = 1.7e9
    found = overlap([(epoch, epoch + 2)], [(epoch + 1, epoch + 3)], (epoch, epoch + 4))
    assert (found.compute_s, found.overlapped_s, found.exposed_s, found.idle_s) == (2, 1, 1, 1)


@pytest.mark.parametrize(
    ("compute", "communication", "window", "message"),
    [
        ([1.0, 2.0, 3.0], [], (0, 1), r"`compute` has shape \(3,\)"),
        ([], [(2.0, 1.0)], (0, 1), "`communication` row 0 ends at 1.0 s, before it starts"),
        ([(0.0, math.nan)], [], (0, 1), "1 values that are not finite"),
        ([("a", "b")], [], (0, 1), "not an array of numbers"),
        ([], [], (1, 0), "`window` row 0 ends"),
        ([], [], (0, 1, 2), "`window` has shape"),
        ([], [], 3.0, "`window` has shape"),
        ([], [], (0, math.inf), "not finite"),
    ],
)
def test_bad_spans_are_refused(compute, communication, window, message):
    with pytest.raises(ConfigError, match=message):
        overlap(compute, communication, window)


def spans_strategy(max_size=8):
    cell = st.integers(-3, WINDOW + 3)
    return st.lists(st.tuples(cell, cell).map(sorted), max_size=max_size)


@given(
    compute=spans_strategy(),
    communication=spans_strategy(),
    copies=spans_strategy(4),
    owners=st.lists(st.integers(-1, 3), min_size=8, max_size=8),
)
def test_sweep_equals_brute_force(compute, communication, copies, owners):
    rows = np.array([0, 1, 1, 2, 3])  # Collectives 1 and 2 share a row; the last row is unmapped communication.
    owner = np.array(owners[: len(communication)], np.intp)
    step = DeviceStep(
        device=0,
        step=0,
        window=(0.0, float(WINDOW)),
        compute=np.array(compute, float).reshape(-1, 2),
        compute_op=np.zeros(len(compute), int),
        communication=np.array(communication, float).reshape(-1, 2),
        collective=owner,
        copies=np.array(copies, float).reshape(-1, 2),
    )
    found = sweep(step, 4, rows)
    total, per_collective = brute_force(compute, communication, copies, np.where(owner < 0, 4, owner), rows)
    for name, value in total.items():
        assert getattr(found.total, name) == pytest.approx(value), name
    for name, values in per_collective.items():
        np.testing.assert_allclose(getattr(found, name), values, atol=1e-9, err_msg=name)
    t = found.total
    assert t.compute_s + t.exposed_s + t.other_s + t.idle_s == pytest.approx(t.window_s)
    assert found.share_s.sum() == pytest.approx(t.communication_s)
    assert found.exposed_share_s.sum() == pytest.approx(t.exposed_s)


def brute_force(compute, communication, copies, owner, rows):
    """Return the definitions of the report contract, evaluated one cell of the grid at a time."""
    total = dict.fromkeys(("compute_s", "communication_s", "overlapped_s", "exposed_s", "other_s", "idle_s"), 0.0) | {
        "window_s": float(WINDOW)
    }
    parts = {name: np.zeros(5) for name in ("share_s", "exposed_share_s", "sole_exposed_s", "busy_s", "count")}
    for cell in range(WINDOW):
        computing, active, copying = (
            [i for i, (a, b) in enumerate(spans) if a <= cell < b] for spans in (compute, communication, copies)
        )
        total["compute_s"] += bool(computing)
        total["communication_s"] += bool(active)
        total["overlapped_s"] += bool(active and computing)
        total["exposed_s"] += bool(active and not computing)
        total["other_s"] += bool(copying and not active and not computing)
        total["idle_s"] += not (computing or active or copying)
        active_rows = {rows[owner[i]] for i in active}
        for i in active:
            part = 1 / len(active_rows) / sum(rows[owner[j]] == rows[owner[i]] for j in active)
            parts["share_s"][owner[i]] += part
            parts["exposed_share_s"][owner[i]] += part * (not computing)
            parts["sole_exposed_s"][owner[i]] += part * (not computing and len(active_rows) == 1)
            parts["busy_s"][owner[i]] += 1
    for i, (a, b) in enumerate(communication):
        parts["count"][owner[i]] += min(b, WINDOW) > max(a, 0)
    return total, parts
