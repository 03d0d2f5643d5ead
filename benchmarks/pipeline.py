"""Print the memory of pipeline schedules by number of microbatches, and the matmuls that hide their permutes.

    python -m benchmarks.pipeline

XLA compiles the training step of a Llama with attention for absent H100s, with four stages across four hosts.
pipeline.md has the output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from meshkit.compile.options import CompileChoices
from meshkit.compile.program import CompiledProgram, compile_absent
from meshkit.config.experiment import Experiment, load
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.planning.resolved import make_train_step
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices
from meshkit.step.train_step import TrainProgram

CONFIG = Path(__file__).parent.parent / "configs/experiments/llama_debug_cpu.toml"
EMBED, LENGTH, STAGES, LAYERS = 2048, 2048, 4, 16
MODEL = {"vocab": 32_000, "embed": EMBED, "mlp": 8192, "layers": LAYERS, "heads": 16, "kv_heads": 8, "head_dim": 128}
MICROBATCHES = (8, 32)
# The mesh axes beside the pipeline, and the preset of rules.
Layout = tuple[str, str]
DATA = ("data=8", "")
TENSOR = ("tensor=2 fsdp=4", "fsdp_tensor")
SEQUENCE = ("tensor=2 fsdp=4", "fsdp_tensor_sequence")


def experiment(
    schedule: str,
    chunks: int,
    microbatches: int,
    layout: Layout = DATA,
    *,
    sequences: int = 1,
    **pipeline: Any,
) -> Experiment:
    """Return an experiment on four hosts of 8 H100.

    Args:
        schedule: the pipeline's schedule.
        chunks: the pipeline's virtual stages.
        microbatches: the number of microbatches of a step.
        layout: the mesh axes beside the pipeline and the preset of rules; DATA, TENSOR or SEQUENCE.
        sequences: the sequences of a microbatch on one data shard.
        pipeline: further keys of `[pipeline]`.
    """
    axes, rules = layout
    ways = {name: int(size) for name, _, size in (axis.partition("=") for axis in axes.split())}
    shards = ways.get("data", 1) * ways.get("fsdp", 1)
    keys = {"schedule": schedule, "virtual_stages": chunks, "microbatches": microbatches, **pipeline}
    written = ", ".join(f"{k} = {v!r}" for k, v in {"axis": "pipeline", **keys}.items())
    sets = ["cluster={name='dgx_h100',hosts=4}", "mesh.data=", "mesh.fsdp=", "mesh.tensor="]
    sets += ["mesh.pipeline={infiniband=4}", *(f"mesh.{axis}" for axis in axes.split())]
    sets += [f"model.{k}={v}" for k, v in MODEL.items()]
    sets += [f"rules.preset={rules}"] if rules else ["rules={preset='data'}"]
    sets += [f"pipeline={{{written}}}", "train.precision=bf16", f"train.sequence_length={LENGTH}"]
    sets += [f"train.global_batch={microbatches * shards * sequences}", "train.accumulate=1"]
    return load(CONFIG, sets)


@functools.cache
def built(schedule: str, chunks: int, microbatches: int, layout: Layout = DATA, **options: Any) -> TrainProgram:
    """Return the training step of an `experiment`, built for absent GPUs."""
    made = experiment(schedule, chunks, microbatches, layout, **options)
    return make_train_step(made, build_mesh(made.mesh, made.cluster, devices=describe_devices(made.cluster)))


@functools.cache
def compiled(
    schedule: str, chunks: int, microbatches: int, layout: Layout = DATA, **options: Any
) -> tuple[CompiledProgram, Schedule]:
    """Return the loss and gradients of an `experiment` as XLA compiles them, without the optimizer."""
    made = experiment(schedule, chunks, microbatches, layout, **options)
    program = built(schedule, chunks, microbatches, layout, **options)
    args = (program.abstract_state, program.abstract_step_batch)
    mesh = program.mesh
    assert isinstance(mesh, DescribedMesh)
    choices = CompileChoices(program.xla_options)
    found = compile_absent(program.gradients, args, mesh=mesh, cluster=made.cluster, choices=choices)
    return found, found.schedule


def loops(schedule: Schedule, name: str = "", around: tuple = ()) -> Iterator[tuple[tuple, Sequence[Instruction], int]]:
    """Yield (iterations of the loops around it, instructions of its computation, its index) of every instruction."""
    instructions = schedule.computations[name or schedule.entry]
    for at, i in enumerate(instructions):
        yield around, instructions, at
        for body in i.bodies:
            yield from loops(schedule, body, (*around, i.trip_count) if i.kind == "while" else around)


def permutes(schedule: Schedule) -> list[tuple[tuple, int | None]]:
    """Return (iterations of the loops around it, matmuls that hide it) of every permute between stages.

    The number of matmuls is None for a permute that blocks. Matmuls in loops count once.
    """
    found = []
    for around, instructions, at in loops(schedule):
        i = instructions[at]
        if i.collective and i.collective.collective == "collective-permute" and i.collective.axes == ("pipeline",):
            ends = (n for n, done in enumerate(instructions) if done.starts == i.name)
            found.append((around, _matmuls(schedule, instructions[at : next(ends)]) if i.kind == "start" else None))
    return found


def _matmuls(schedule: Schedule, instructions: Sequence[Instruction]) -> int:
    inner = sum(_matmuls(schedule, schedule.computations[body]) for i in instructions for body in i.bodies)
    return inner + sum(bool(i.cost and i.cost.matmul_flops) for i in instructions)


def main() -> None:
    """Print the Markdown tables."""
    jax.config.update("jax_platforms", "cpu")
    print(f"| schedule | v | {' | '.join(f'M = {m}' for m in MICROBATCHES)} | per microbatch |")
    print("|---" * (len(MICROBATCHES) + 3) + "|")
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2)):
        found = [_temp_mib(schedule, chunks, m) for m in MICROBATCHES]
        slope = (found[-1] - found[0]) / (MICROBATCHES[-1] - MICROBATCHES[0])
        cells = " | ".join(f"{x:.1f}" for x in found)
        print(f"| {schedule} | {chunks} | {cells} | {slope:.1f} |", flush=True)
    print("\n| schedule | v | layout | head | matmuls under each permute of the steady ticks |\n|---|---|---|---|---|")
    one, two = ("1f1b", 1), ("interleaved_1f1b", 2)
    cases = [(*one, DATA, {}), (*two, DATA, {}), (*two, DATA, {"head": "replicated"}), (*two, TENSOR, {})]
    for schedule, chunks, layout, options in [*cases, (*one, SEQUENCE, {}), (*two, SEQUENCE, {})]:
        steady = [n for _, n in permutes(compiled(schedule, chunks, 8, layout, **options)[1])][1:-1]
        shown = ", ".join("blocks" if n is None else str(n) for n in steady)
        name, head = " ".join(part for part in layout if part), options.get("head", "vocab_parallel")
        print(f"| {schedule} | {chunks} | {name} | {head} | {shown} |", flush=True)


def _temp_mib(schedule: str, chunks: int, microbatches: int) -> float:
    return compiled(schedule, chunks, microbatches)[0].memory["temp"] / 2**20


if __name__ == "__main__":
    main()
