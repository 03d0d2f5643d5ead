"""The programs of a pipeline compiled for 4 x 8 absent H100s: memory, what its permutes hide under, its reductions."""

from __future__ import annotations

import functools

import pytest

from benchmarks import pipeline as benchmark

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]  # a minute and a half of compiling

MIB = 2**20
PIPELINES = [("1f1b", 1), ("interleaved_1f1b", 2)]


@functools.cache
def compiled(schedule, chunks, microbatches, head="replicated"):
    return benchmark.compiled(schedule, chunks, microbatches, model={"head": head})


def walk(schedule, name=None, loops=()):
    """(loops around it, computation, index, instruction), of the whole program."""
    instructions = schedule.computations[name or schedule.entry]
    for i, instruction in enumerate(instructions):
        yield loops, instructions, i, instruction
        for body in instruction.bodies:
            inner = (*loops, instruction.trip_count) if instruction.kind == "while" else loops
            yield from walk(schedule, body, inner)


def matmuls(schedule, instructions):
    """How many matmuls are in a row of instructions, those of loops once."""
    found = 0
    for i in instructions:
        found += bool(i.cost and i.cost.matmul_flops)
        found += sum(matmuls(schedule, schedule.computations[body]) for body in i.bodies)
    return found


@pytest.mark.parametrize(("schedule", "chunks", "few"), [("1f1b", 1, 8), ("interleaved_1f1b", 2, 16)])
def test_memory_does_not_grow_with_microbatches(schedule, chunks, few):
    """Interleaved with M = 2 S has a single round, so no loop over rounds: another program, smaller by a constant."""
    memory = {m: compiled(schedule, chunks, m)[0].memory for m in (few, 32)}
    assert memory[32]["temp"] - memory[few]["temp"] <= MIB


@pytest.mark.slow
def test_memory_of_gpipe_grows_by_an_activation_a_microbatch():
    memory = {m: compiled("gpipe", 1, m)[0].memory for m in (8, 32)}
    activation = benchmark.BATCH * benchmark.LENGTH * benchmark.EMBED * 2
    assert (memory[32]["temp"] - memory[8]["temp"]) / 24 == pytest.approx(activation, rel=0.05)


@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
def test_gradients_are_as_large_as_the_parameters(schedule, chunks):
    """Parameters are bf16, gradients fp32."""
    memory = compiled(schedule, chunks, 8)[0].memory
    batch = 2 * 8 * benchmark.BATCH * benchmark.LENGTH * 4  # tokens and targets
    assert memory["output"] == pytest.approx(2 * (memory["argument"] - batch), rel=0.01)


@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
def test_the_data_axis_communicates_once_a_step(schedule, chunks):
    program = compiled(schedule, chunks, 8)[1]
    found = [(i.collective, loops) for loops, _, _, i in walk(program) if i.collective]
    assert all("data" not in c.axes for c, loops in found if loops)
    reduced = sum(c.payload_bytes for c, loops in found if "data" in c.axes)
    # every gradient of a stage, fp32, and the few sums
    assert reduced == pytest.approx(compiled(schedule, chunks, 8)[0].memory["output"], rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "chunks", "head"),
    [("1f1b", 1, "replicated"), ("1f1b", 1, "vocab_parallel"), ("interleaved_1f1b", 2, "vocab_parallel")],
)
def test_steady_permutes_hide_under_matmuls(schedule, chunks, head):
    program = compiled(schedule, chunks, 32, head)[1]
    hidden = []
    for loops, instructions, at, i in walk(program):
        if not i.collective or i.collective.collective != "collective-permute":
            continue
        assert i.collective.axes == ("pipeline",)
        warmup = loops == (4 * chunks - 1,)  # as many ticks as drain: only one of forward and backward runs there
        if i.kind == "start" and not warmup:
            done = next(n for n, d in enumerate(instructions) if d.starts == i.name)
            hidden.append(matmuls(program, instructions[at:done]))
        elif not warmup:
            hidden.append(0)
    assert len(hidden) == (2 if chunks == 1 else 6)  # forward and backward; with chunks in each of the three loops
    assert min(hidden) >= 1
