"""Test what each strategy moves on 2 hosts x 8 absent H100s against the closed form, byte for byte.

Payloads are as in the report: bytes of one instance on one GPU (operand; result of an all-gather), times how often it
runs. Instances of up to 4 KiB (sums of the loss, of the gradient's norm, gradients of a lone norm scale) are left out
and must be all-reduces. Each strategy costs a compile, so most of them are `slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment

pytestmark = pytest.mark.deviceless

DEBUG = Path(__file__).parents[2] / "configs/experiments/llama_debug_cpu.toml"
SMALL = 4096
BATCH, LENGTH, LAYERS, EMBED, MLP, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 64, 256, 2, 256, 768, 2048, 16, 8, 16

KERNELS = LAYERS * EMBED * (HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * MLP)
TABLE = VOCAB * EMBED  # The look-up and the head each have a table.
NORMS = (2 * LAYERS + 1) * EMBED
PARAMETERS = KERNELS + 2 * TABLE + NORMS
BF16, FP32 = 2, 4
SUMS = 2 * FP32  # XLA may reduce loss_sum and weight along with the gradients.

SIZES = [
    "cluster={name='dgx_h100',hosts=2}",
    *(f"mesh.{axis}=" for axis in ("data", "fsdp", "tensor")),
    f"train.global_batch={BATCH}",
    f"train.sequence_length={LENGTH}",
    'train.remat="full"',
    *(f"model.{k}={v}" for k, v in (("embed", EMBED), ("mlp", MLP), ("vocab", VOCAB), ("heads", HEADS),
                                    ("kv_heads", KV_HEADS))),
]  # fmt: skip
BOTH = "{infiniband=2,nvlink=8}"


def moved(*overrides: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (collective, axes) -> (payload bytes, instances) of a step, without the small instances."""
    report = plan_experiment(load(DEBUG, [*SIZES, *overrides])).report
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for row in report.communication:
        for op in row.ops:
            if op.payload_bytes <= SMALL * op.count:
                assert row.collective == "all-reduce", op.name
                continue
            payload, count = total.get((row.collective, "+".join(row.axes)), (0, 0))
            total[row.collective, "+".join(row.axes)] = (payload + op.payload_bytes, count + op.count)
    return total


def tokens(ways: int) -> int:
    """Return the bytes of int32 tokens, which the scattered look-up gradient gathers, with the batch over `ways`."""
    return 4 * BATCH * LENGTH // ways


def activation(ways: int) -> int:
    """Return the bytes of a bf16 [batch, length, embed] array with the batch over `ways`."""
    return BF16 * BATCH * LENGTH * EMBED // ways


@pytest.mark.slow
def test_data():
    """Every gradient is all-reduced once in fp32: the layers' one by one, the rest with the sums of the loss."""
    got = moved(f"mesh.data={BOTH}", 'rules.preset="data"')
    assert got == {("all-reduce", "data"): (FP32 * PARAMETERS + SUMS, LAYERS + 1)}


@pytest.mark.slow
def test_zero1():
    """Weights are gathered once in bf16 and gradients are scattered in fp32.

    The look-up's gradient is not reduced: its rows go to the GPUs that own their columns, the tokens go to all, and
    then it is scattered.
    """
    got = moved(f"mesh.data={BOTH}", 'rules.preset="zero1"')
    assert got == {
        ("all-gather", "data"): (BF16 * PARAMETERS + tokens(1), 1),
        ("reduce-scatter", "data"): (FP32 * (PARAMETERS - TABLE), LAYERS + 1),
        ("all-to-all", "data"): (activation(16), 1),
    }


@pytest.mark.slow
def test_zero1_and_zero2_are_one_program_without_accumulation():
    overrides = [f"mesh.data={BOTH}", "model.layers=1"]
    one, two = (
        plan_experiment(load(DEBUG, [*SIZES, *overrides, f'rules.preset="{name}"'])).report.program
        for name in ("zero1", "zero2")
    )
    assert one.fingerprint == two.fingerprint


@pytest.mark.slow
def test_zero1_accumulated_reduces_once():
    got = moved(f"mesh.data={BOTH}", 'rules.preset="zero1"', "train.accumulate=4")
    assert got == {
        ("all-gather", "data"): (BF16 * PARAMETERS, 1),
        ("reduce-scatter", "data"): (FP32 * PARAMETERS, 1),
    }


@pytest.mark.slow
def test_zero2_accumulated_reduces_every_micro_batch():
    got = moved(f"mesh.data={BOTH}", 'rules.preset="zero2"', "train.accumulate=4")
    assert got == {
        ("all-gather", "data"): (BF16 * PARAMETERS + tokens(1), 1 + 4),
        ("reduce-scatter", "data"): (4 * FP32 * (PARAMETERS - TABLE), 4 * (LAYERS + 1)),
        ("all-to-all", "data"): (activation(16), 4),
    }


# The scale of each norm is gathered in fp32: once forward, and twice backward, for the recomputed norm and for its
# gradient. The last norm's scale is gathered once.
FSDP_GATHERS = 2 * BF16 * KERNELS + 2 * BF16 * TABLE + FP32 * ((NORMS - EMBED) * 3 + EMBED)


def test_fsdp_gathers_twice_and_scatters_once():
    """Each layer is gathered once a pass and reduced once, and so is the table.

    With collectives pipelined over the layers (the options that the plan derives), the first layer's weights travel
    with the table's.
    """
    got = moved(f"mesh.fsdp={BOTH}", 'rules.preset="fsdp"')
    assert got == {
        ("all-gather", "fsdp"): (FSDP_GATHERS + tokens(1), 2 * LAYERS),
        ("reduce-scatter", "fsdp"): (FP32 * (PARAMETERS - TABLE), LAYERS + 1),
        ("all-to-all", "fsdp"): (activation(16), 1),
    }


@pytest.mark.slow
def test_fsdp_accumulated_gathers_once_and_scatters_once():
    got = moved(f"mesh.fsdp={BOTH}", 'rules.preset="fsdp"', "train.accumulate=4")
    assert got == {
        ("all-gather", "fsdp"): (BF16 * PARAMETERS, 1),
        ("reduce-scatter", "fsdp"): (FP32 * PARAMETERS, 1),
    }


@pytest.mark.slow
def test_fsdp_accumulated_in_pieces_pays_for_every_micro_batch():
    got = moved(f"mesh.fsdp={BOTH}", 'rules.preset="fsdp"', "train.accumulate=4", 'rules.gradients.embed="fsdp"')
    assert got["reduce-scatter", "fsdp"] == (4 * FP32 * (PARAMETERS - TABLE), 4 * (LAYERS + 1))
    assert got["all-gather", "fsdp"][0] >= 4 * 2 * BF16 * KERNELS


@pytest.mark.slow
def test_hsdp_reduces_shards_across_hosts():
    got = moved("mesh.data={infiniband=2}", "mesh.fsdp=8", 'rules.preset="hsdp"')
    assert got == {
        ("all-gather", "fsdp"): (FSDP_GATHERS + tokens(2), 2 * LAYERS),
        ("reduce-scatter", "fsdp"): (FP32 * (PARAMETERS - TABLE - EMBED), LAYERS + 1),
        ("all-to-all", "fsdp"): (activation(16), 1),
        # The last norm's scale is reduced whole over both axes, with the sums of the loss, which is small.
        ("all-reduce", "data"): (FP32 * (PARAMETERS - EMBED) // 8, LAYERS + 1),
    }


# Row-parallel outputs forward are those of attention and feed-forward of each layer and of the masked look-up; full
# remat repeats the attention's. Backward they are the input gradients of attention, feed-forward and head.
ROW_PARALLEL = 5 * LAYERS + 2
# Column-parallel inputs under sequence parallelism are two a layer, forward and recomputed, and the head's. Backward
# they are the output gradients of attention, feed-forward and look-up.
COLUMN_PARALLEL = 6 * LAYERS + 2


def logsumexp(ways: int) -> int:
    """Return the bytes of three fp32 [batch, length] arrays: largest logit, sum of exponentials, target's logit."""
    return 3 * FP32 * BATCH * LENGTH // ways


@pytest.mark.slow  # tests/planning/test_plan.py covers a perceptron by default.
def test_tensor():
    got = moved("mesh.data={infiniband=2}", "mesh.tensor=8", 'rules.preset="tensor"')
    assert got == {
        ("all-reduce", "tensor"): (ROW_PARALLEL * activation(2) + logsumexp(2), ROW_PARALLEL + 3),
        ("all-reduce", "data"): (FP32 * ((PARAMETERS - NORMS) // 8 + NORMS) + SUMS, LAYERS + 1),
    }


def test_tensor_with_sequence_parallelism():
    got = moved("mesh.data={infiniband=2}", "mesh.tensor=8", 'rules.preset="tensor_sequence"')
    assert got == {
        # XLA combines the gathers of a feed-forward's recomputed input and of its gradient.
        ("all-gather", "tensor"): (COLUMN_PARALLEL * activation(2), COLUMN_PARALLEL - LAYERS),
        ("reduce-scatter", "tensor"): (ROW_PARALLEL * activation(2), ROW_PARALLEL),
        ("all-reduce", "tensor"): (logsumexp(2), 3),
        ("all-reduce", "data"): (FP32 * (PARAMETERS - NORMS) // 8 + SUMS, LAYERS + 1),
        ("all-reduce", "data+tensor"): (FP32 * NORMS, 1),
    }


@pytest.mark.slow
def test_fsdp_with_tensor():
    got = moved("mesh.fsdp={infiniband=2,nvlink=2}", "mesh.tensor=4", 'rules.preset="fsdp_tensor"')
    norms = FP32 * ((NORMS - EMBED) * 3 + EMBED)
    assert got == {
        # XLA combines the gather of the tables with a layer's, and two of the reductions over tensor.
        ("all-gather", "fsdp"): ((FSDP_GATHERS - norms) // 4 + norms + tokens(1), 2 * LAYERS),
        ("reduce-scatter", "fsdp"): (FP32 * ((PARAMETERS - NORMS - TABLE) // 4 + NORMS), LAYERS + 1),
        ("all-to-all", "fsdp"): (activation(4), 1),
        ("all-reduce", "tensor"): (ROW_PARALLEL * activation(4) + logsumexp(4), ROW_PARALLEL - 1 + 3),
    }


@pytest.mark.slow
def test_reduce_precision_halves_the_gradients():
    got = moved(f"mesh.fsdp={BOTH}", 'rules.preset="fsdp"', "train.accumulate=2", 'train.reduce_precision="bf16"')
    assert got["reduce-scatter", "fsdp"] == (BF16 * PARAMETERS, 1)
