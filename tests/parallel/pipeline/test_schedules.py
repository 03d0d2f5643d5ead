"""Test schedules as tables: sizes, slots and bubbles in closed form, and a checker that notices every damage."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from meshkit.errors import ConfigError
from meshkit.parallel.pipeline.schedules import check_tables, make_tables

SIZES = [(s, v, m * s) for s, v, m in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8))]


def name(v):
    return ("1f1b", "interleaved_1f1b")[v > 1]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SIZES)
def test_ticks_slots_and_bubble_are_the_closed_forms(stages, chunks, microbatches):
    tables = make_tables(name(chunks), stages, chunks, microbatches)
    forward = sum(p.ticks for p in tables.phases if p.forward)
    backward = sum(p.ticks for p in tables.phases if p.backward)
    assert forward == backward == chunks * microbatches + stages - 1
    assert tables.ticks == chunks * microbatches + stages - 1 + chunks * stages - 1
    if microbatches >= 2 * stages:
        assert tables.slots == (chunks + 1) * stages - 1
    assert tables.slots <= (chunks + 1) * stages - 1
    assert tables.forward.valid.sum() == tables.backward.valid.sum() == stages * chunks * microbatches


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SIZES)
def test_the_loss_runs_once_for_each_microbatch(stages, chunks, microbatches):
    """The output head costs as much as one to ten layers, so interleaving must not run it v times as often."""
    tables = make_tables(name(chunks), stages, chunks, microbatches)
    assert sum(p.ticks for p in tables.phases if p.outer and p.forward and p.backward) == microbatches
    found, which = tables.scored
    assert which[found].tolist() == list(range(microbatches))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7, 9, 100])
def test_one_chunk_takes_any_number_of_microbatches(microbatches):
    assert make_tables("1f1b", 4, 1, microbatches).slots == min(7, microbatches + 1)


DAMAGES = {
    "a forward left out": ("forward", "valid", lambda t: np.argwhere(t.forward.valid)[5], False, "pieces of work"),
    "another microbatch": ("forward", "microbatch", lambda t: np.argwhere(t.forward.valid)[5], 1, "twice"),
    "another slot": ("forward", "slot", lambda t: (2, 0), 0, "overwrites slot"),
    "two microbatches swapped": ("backward", "microbatch", lambda t: (5, 3), 6, "twice"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checker_notices(damage):
    tables = make_tables("1f1b", 4, 1, 8)
    side, field, where, value, message = DAMAGES[damage]
    array = getattr(getattr(tables, side), field).copy()
    place = tuple(where(tables))
    assert array[place] != value
    array[place] = value
    damaged = dataclasses.replace(tables, **{side: dataclasses.replace(getattr(tables, side), **{field: array})})
    with pytest.raises(AssertionError, match=message):
        check_tables(damaged)


@pytest.mark.parametrize(("shift", "message"), [(1, "gets no"), (-1, "gets no")])
def test_the_checker_notices_a_stage_that_is_early_or_late(shift, message):
    tables = make_tables("interleaved_1f1b", 4, 2, 8)
    rolled = {f.name: getattr(tables.forward, f.name).copy() for f in dataclasses.fields(tables.forward)}
    for array in rolled.values():
        array[:, 2] = np.roll(array[:, 2], shift)
    damaged = dataclasses.replace(tables, forward=type(tables.forward)(**rolled))
    with pytest.raises(AssertionError, match=message):
        check_tables(damaged)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (("1f1b", 4, 2, 8), r"(?s)one virtual stage on each stage, not 2.*try schedule = \"interleaved_1f1b\""),
        (("interleaved_1f1b", 4, 2, 10), r"(?s)10 microbatches are not a multiple of 4.*microbatches = 8 or 12"),
        (("interleaved_1f1b", 4, 2, 3), r"(?s)3 microbatches.*try microbatches = 4$"),
        (("gpipe", 4, 1, 8), r"(?s)no pipeline schedule 'gpipe'.*one of 1f1b, interleaved_1f1b"),
        (("1f1b", 4, 1, 0), "at least one stage"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_tables(*sizes)
