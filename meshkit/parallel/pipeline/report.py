"""What a pipeline's schedule costs, in closed form.

    ticks with forward = ticks with backward = M v + S - 1, of which each stage needs M v
    bubble fraction    = (S - 1) / (M v + S - 1)              time that stages of equal cost do nothing useful
    executed / useful  = (M + (S - 1) / v) / M                of the layers' FLOP, both on the same layers

Padding of uneven layers is executed as well: both then count chunk_layers for every chunk.
"""

from __future__ import annotations

from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.parallel.pipeline.schedules import Tables
from meshkit.parallel.pipeline.stack import Stack

# Names of scopes in the program: what runs in a tick, and in it what is before, in and behind the layers.
TICK, FIRST, STAGE, LAST = "pipeline_tick", "pipeline_first", "pipeline_stage", "pipeline_last"


def make_report(tables: Tables, stack: Stack, *, axis: str = "pipeline", shared_head: bool = False) -> PipelineReport:
    """The report of a schedule on a stack of layers.

    With `shared_head` all stages work on a microbatch's embedding and loss (`head = "vocab_parallel"`); else each does
    all of it, and one stage's counts.

    `picture` has a row for each stage and a text for each tick: `F3`, `B1`, `F3 B1`, with the chunk behind a dot where
    there are several (`F3.1`), empty where the stage waits.
    """
    s, v, m = tables.stages, tables.virtual_stages, tables.microbatches
    executed = (m * v + s - 1) * stack.chunk_layers * s
    useful = m * stack.layers
    ticks = {name: sum(p.ticks for p in tables.phases if p.name == name) for name in ("warmup", "steady", "drain")}
    return PipelineReport(
        axis=axis,
        schedule=tables.schedule,
        stages=s,
        virtual_stages=v,
        microbatches=m,
        layers=stack.layers,
        padding_layers=stack.size - stack.layers,
        warmup_ticks=ticks["warmup"],
        steady_ticks=ticks["steady"],
        drain_ticks=ticks["drain"],
        slots=tables.slots,
        bubble_fraction=1 - useful / executed,
        executed_over_useful=executed / useful,
        picture=tuple(tuple(_work(tables, t, stage) for t in range(tables.ticks)) for stage in range(s)),
        useful=_useful(tables, useful / executed, 1 if shared_head else s),
    )


def _useful(tables: Tables, layers: float, repeated: int) -> dict[str, float]:
    """`PipelineReport.useful`; the head runs once for each microbatch, the embedding in every tick that may need it."""
    if tables.schedule in ("gpipe", "circular"):
        embedded = tables.ticks // 2
    else:
        embedded = 1 + sum(p.ticks for p in tables.phases if p.forward and p.outer)
    return {TICK: layers, STAGE: layers, FIRST: tables.microbatches / embedded / repeated, LAST: 1 / repeated}


def _work(tables: Tables, tick: int, stage: int) -> str:
    found = []
    for letter, slots in (("F", tables.forward), ("B", tables.backward)):
        if slots.valid[tick, stage]:
            chunk = f".{slots.chunk[tick, stage]}" if tables.virtual_stages > 1 else ""
            found.append(f"{letter}{slots.microbatch[tick, stage]}{chunk}")
    return " ".join(found)
