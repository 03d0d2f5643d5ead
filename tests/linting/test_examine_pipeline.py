"""Test the communication contract of a pipeline: what stages exchange is explained, and the schedule bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshkit.linting.examine import collective_findings, explain_collectives
from meshkit.sharding.strategy import StageRuns
from tests.linting import test_examine as contract

TICKS, STAGES, MICROBATCHES = 10, 3, 8  # There are M + S - 1 ticks, and each stage has one layer.
ROWS = "bf16[2,960,64]"  # These are a microbatch's rows on one GPU: 16 sequences over data 2 x fsdp 4.
LAYERS = {"layers": "pipeline", "vocab": "pipeline"}


@pytest.fixture(autouse=True)
def axis(monkeypatch):
    monkeypatch.setitem(contract.SIZES, "pipeline", STAGES)


def explained(*collectives, times=1, logical=None):
    stages = StageRuns("pipeline", MICROBATCHES, TICKS, MICROBATCHES + STAGES, chunk_layers=1, layers=contract.LAYERS)
    strategy = contract.strategy({**LAYERS, **(logical or {})}, deferred=frozenset({"data", "fsdp"}), stages=stages)
    whole = replace(strategy, tokens=MICROBATCHES * strategy.tokens)
    return explain_collectives(contract.schedule(*collectives, times=times), whole)


@pytest.mark.parametrize(
    ("kind", "axes", "shape", "says"),
    [
        ("collective-permute", ("pipeline",), ROWS, "passed on between the stages of pipeline"),
        ("all-reduce", ("pipeline",), ROWS, "embedding and head of all stages over pipeline"),
        ("all-reduce", ("pipeline",), "f32[2,960]", "vocabulary over pipeline: maximum, sum and target"),
        ("all-reduce", ("pipeline", "tensor"), "f32[2,960]", "vocabulary over pipeline x tensor"),
        ("all-reduce", ("data",), "f32[16,128]", "gradients, reduced over data once a step"),
        ("all-gather", ("fsdp",), "bf16[16,128]", "weights, gathered over fsdp once a step"),
    ],
)
def test_what_stages_exchange_is_explained(kind, axes, shape, says):
    (row,) = explained(contract.moved(kind, axes, shape), logical=contract.TENSOR | {"vocab": ["pipeline", "tensor"]})
    assert says in (row.explanation or row.cause)


def test_permutes_are_bounded_by_the_ticks_both_ways():
    permute = contract.moved("collective-permute", ("pipeline",), ROWS)
    (row,) = explained(permute, times=2 * TICKS)
    assert row.payload_bytes == row.bound_bytes == 2 * TICKS * 2 * 960 * 64 * 2
    assert not collective_findings([row])
    assert "more often than declared" in collective_findings(explained(permute, times=4 * TICKS))[0].message


def test_an_activation_gathered_over_the_stages_is_a_finding():
    (row,) = explained(contract.moved("all-gather", ("pipeline",), "bf16[16,960,64]"))
    assert row.explanation is None
    assert collective_findings([row])[0].code == "unexplained_collective"
