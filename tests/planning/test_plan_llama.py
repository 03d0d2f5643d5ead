"""Test the plan of a whole training step, the debug Llama on 16 absent H100s, against the closed form."""

from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment

pytestmark = pytest.mark.deviceless

DEBUG = Path(__file__).parents[2] / "configs/experiments/llama_debug_cpu.toml"
ON_H100S = ["cluster={name='dgx_h100',hosts=2}", "mesh.data={infiniband=2}", "mesh.fsdp=4", "mesh.tensor=2"]
BATCH, LENGTH, LAYERS, HEADS, HEAD_DIM, EMBED, MLP, KV_HEADS, VOCAB = 16, 128, 2, 8, 16, 128, 384, 4, 256


@pytest.fixture(scope="module")
def plan():
    return plan_experiment(load(DEBUG, ON_H100S))


def executed(plan):
    """Return instructions with how often they run in a step."""

    def walk(name, times):
        for i in plan.schedule.computations[name]:
            yield i, times
            for body in i.bodies:
                yield from walk(body, times * (i.trip_count or 1))

    return list(walk(plan.schedule.entry, 1))


def test_attention_is_cudnns_and_its_flops_are_the_closed_form(plan):
    """Per GPU and layer, attention has 4 b h s^2 d / 2 FLOP forward (causal) and 2.5 times that backward.

    The batch is over data x fsdp = 8 GPUs, and heads are over tensor = 2.
    """
    forward = 4 * (BATCH / 8) * (HEADS / 2) * LENGTH**2 * HEAD_DIM / 2
    found = sum(i.cost.attention_flops * times for i, times in executed(plan) if i.cost)
    assert found == LAYERS * 3.5 * forward


def test_matmul_flops_are_six_times_parameters_times_tokens(plan):
    """Both passes have 6 N FLOP per token over 16 GPUs, without recompute; N leaves out norms and the look-up."""
    attention = EMBED * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    matmul_parameters = LAYERS * (attention + 3 * EMBED * MLP) + EMBED * VOCAB
    found = sum(sum(i.cost.matmul_flops.values()) * times for i, times in executed(plan) if i.cost)
    assert found == 6 * matmul_parameters * BATCH * LENGTH / 16


def test_every_collective_is_mapped_to_axes_and_links(plan):
    rows = plan.report.communication
    assert all(r.axes for r in rows)
    for r in rows:
        assert r.link == ("infiniband" if "data" in r.axes else "nvlink")
        assert r.group_size * r.num_groups == 16


def test_gradients_are_reduced_in_fp32_and_weights_gathered_in_bf16(plan):
    """`reduce_precision` defaults to fp32 and `precision` to bf16; XLA may combine bf16 weights with fp32 norms."""
    reductions = [
        r for r in plan.report.communication if "data" in r.axes and r.collective in ("all-reduce", "reduce-scatter")
    ]
    assert reductions
    assert {r.dtype for r in reductions} == {"f32"}
    gathers = {r.dtype for r in plan.report.communication if r.collective == "all-gather" and r.axes == ("fsdp",)}
    assert gathers & {"bf16", "mixed"}


def test_arguments_are_the_state_and_the_batch(plan):
    """One GPU's arguments are fp32 parameters and two fp32 moments, as sharded, and the batch.

    The batch has tokens and targets in int32 and weights in fp32. XLA aligns every buffer to 256 bytes.
    """
    memory = plan.report.memory
    state = memory.parameters_bytes + memory.optimizer_bytes
    batch = 3 * 4 * BATCH * LENGTH // 8
    buffers = 60
    assert abs(plan.compiled.memory["argument"] - state - batch) <= 256 * buffers
    assert memory.optimizer_bytes == pytest.approx(2 * memory.parameters_bytes, abs=64)
    assert memory.peak_bytes <= memory.pool_bytes
    assert memory.fits


def test_combined_collectives_name_what_their_arrays_are_for(plan):
    """XLA names one of the arrays at most; here each has its producer or its user."""
    combined = [(row, op) for row in plan.report.communication for op in row.ops if op.arrays > 1]
    assert combined
    for _, op in combined:
        assert sum(op.causes.values()) == pytest.approx(op.payload_bytes)
        assert list(op.causes.values()) == sorted(op.causes.values(), reverse=True)
    # A layer's weights are gathered twice, and each time before the loop for the first layer and in it for the next.
    weights = [op for row, op in combined if row.dtype == "bf16" and op.arrays == 7]
    assert len(weights) == 4
    for op in weights:
        bytes_of = {cause.split()[0].split("/")[-1]: n for cause, n in op.causes.items()}
        assert bytes_of["gate_up"] == 2 * bytes_of["down"] == pytest.approx(op.payload_bytes / 2)
