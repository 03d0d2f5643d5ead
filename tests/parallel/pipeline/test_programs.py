"""Test a pipeline's programs for 4 x 8 absent H100s: memory, the matmuls beside permutes, and reductions.

The program is a real Llama with attention, as a training step makes its gradients (benchmarks/pipeline.py).
"""

from __future__ import annotations

import pytest

from benchmarks.pipeline import DATA, SEQUENCE, TENSOR, compiled, loops, permutes

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]  # Ten programs take half a minute each.

MIB = 2**20
PIPELINES = [("1f1b", 1), ("interleaved_1f1b", 2)]


@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
def test_memory_does_not_grow_with_microbatches(schedule, chunks):
    memory = {m: compiled(schedule, chunks, m)[0].memory["temp"] for m in (8, 32)}
    assert memory[32] - memory[8] <= MIB


@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
def test_gradients_are_as_large_as_the_parameters(schedule, chunks):
    """Both are fp32; the output also has the loss, and the argument also two moments and a batch of int32."""
    memory = compiled(schedule, chunks, 8)[0].memory
    batch = 3 * 8 * 2048 * 4  # These are tokens, targets and weights of 8 microbatches of one sequence.
    assert memory["output"] == pytest.approx((memory["argument"] - batch) / 3, rel=0.001)


@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
def test_the_data_axis_communicates_once_a_step(schedule, chunks):
    memory, program = compiled(schedule, chunks, 8)[0].memory, compiled(schedule, chunks, 8)[1]
    found = [(instructions[at].collective, around) for around, instructions, at in loops(program)]
    data = [(c, around) for c, around in found if c and "data" in c.axes]
    assert all(not around for _, around in data)
    # The payloads are every gradient in fp32, and the few sums.
    assert sum(c.payload_bytes for c, _ in data) == pytest.approx(memory["output"], rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "chunks", "layout", "options"),
    [
        ("1f1b", 1, DATA, {}),
        ("interleaved_1f1b", 2, DATA, {}),
        ("interleaved_1f1b", 2, DATA, {"head": "replicated"}),
        ("interleaved_1f1b", 2, TENSOR, {}),
        ("1f1b", 1, SEQUENCE, {}),
        ("interleaved_1f1b", 2, SEQUENCE, {}),
    ],
)
def test_steady_permutes_hide_under_matmuls(schedule, chunks, layout, options):
    """Each chunk's layers are a loop, whose matmuls count once: 4 forward, more backward."""
    found = permutes(compiled(schedule, chunks, 8, layout, **options)[1])
    steady = [matmuls for _, matmuls in found[1:-1]]  # The first permute is that of warm-up, the last that of drain.
    # There is one forward and one backward; with chunks there are both in each of the three loops.
    assert len(steady) == (2 if chunks == 1 else 6)
    assert all(matmuls is not None and matmuls >= 4 for matmuls in steady)
