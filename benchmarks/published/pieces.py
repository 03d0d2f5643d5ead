"""What a user's plan does not get, piece by piece: `python -m benchmarks.published.pieces --rows FILE.csv --out DIR`.

The replay knows of other frameworks what a plan of one's own step does not: each such piece is left out in turn, on all
rows whose program is compiled in DIR, and those that it changes are counted. Prints a table in markdown.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.published import experiments, experts, ours, replay, replica
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.kernels import Kernels, kernels_of
from benchmarks.published.programs import Program, get_program, has_program
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row, measured_step_time_s, read_rows
from benchmarks.published.statistics import groups
from meshkit.config.cluster import Cluster

_LIKE_A_COPY = 0.9  # of device memory's peak, as the catalog has it
_CHANGED = 1e-4  # of a step


@dataclass(frozen=True)
class Piece:
    """Something that the replay has beyond a plan.

    Attributes:
        name: and, after the colon, what stands in its place.
        touches: the runs that it may change.
        without: (module, attribute, replacement) of the replay, as long as it is left out.
    """

    name: str
    touches: Callable[[Run], object]
    without: Sequence[tuple[Any, str, Any]]


def _framework(**fields: Any) -> list[tuple[Any, str, Any]]:
    find = experiments.find_framework
    return [(experiments, "find_framework", lambda row: replace(find(row), **fields))]


def _recipe(**fields: Any) -> list[tuple[Any, str, Any]]:
    find = experiments.find_recipe
    return [(experiments, "find_recipe", lambda row: replace(find(row), **fields))]


def _kernels(found: Callable[[Kernels], Kernels]) -> list[tuple[Any, str, Any]]:
    return [(module, "kernels_of", lambda *of: found(kernels_of(*of))) for module in (replay, replica)]


def _unfused(run: Run) -> bool:
    return run.whole and run.framework.prefetches


def _stage(run: Run) -> bool:
    return not run.whole


def _counted(run: Run) -> object:
    return run.framework.between


def _experts(run: Run) -> object:
    return run.shape.experts


def _nvfp4(run: Run) -> bool:
    return run.precision == "nvfp4"


_STEP = replica.replica_step_s


def _one_chunk(run: Run, *more: Any) -> float:
    return _STEP(replace(run, chunks=1), *more)


_NEVER = re.compile(r"$^")
PIECES = (
    Piece("FSDP's stream: gathers and scatters as XLA schedules them", _unfused,
          [(replay, "prefetched", lambda s, _: s)]),
    Piece("operators that torchtitan does not fuse: fused", _unfused, [(replay, "eager_s", lambda *_: 0.0)]),
    Piece("copies of XLA's loop over layers: kept", lambda run: _unfused(run) or _stage(run), [
        (replay, "is_loop_copy", lambda _: False), (ours, "_LOOP_COPY", _NEVER)]),
    Piece("casts of weights once a step: with every micro-batch", _stage, [
        (ours, "_CAST", _NEVER), (ours, "_LARGEST", _NEVER), (ours, "_SCALES_BYTES", -1)]),
    Piece("recomputed layers run whole: without their last matmul", lambda run: run.framework.reruns, [
        (module, "rerun", lambda _, schedule: schedule) for module in (replay, replica)]),
    Piece("kernels between matmuls by a framework's source: XLA's", _counted, [
        (replica, "between_matmuls", lambda *_: set()), (replica, "between_s", lambda *_: (0.0, 0.0))]),
    Piece("passes over logits by a framework's source: XLA's", _counted, [(replica, "logits_s", lambda *_: 0.0)]),
    Piece("the optimizer's step by a framework's source: XLA's", _counted, [(replica, "step_s", lambda *_: 0.0)]),
    Piece("tensor parallelism beside matmuls of weights, Megatron-LM of 2022: it blocks",
          lambda run: "Korthikanti" in run.row.source, _framework(overlaps_tensor=False)),
    Piece("XLA's own recomputation: kept", _stage, [(replica, "repeats", lambda _: set())]),
    Piece("attention of its library and year: the catalog's", lambda _: True,
          _kernels(lambda k: replace(k, attention=""))),
    Piece("matmuls, memory and power cap of its machine: the catalog's",
          lambda run: kernels_of(run.row, run.framework).variant,
          _kernels(lambda k: replace(k, variant=""))),
    Piece("sequence parallelism in chunks beside matmuls: as XLA schedules it",
          lambda run: _stage(run) and run.framework.chunked_tensor and run.tensor > 1,
          _framework(chunked_tensor=False)),
    Piece("sends of ring attention under attention: as XLA schedules them", lambda run: _stage(run) and run.context > 1,
          [(replica, "_sends_around_ring", lambda _: False)]),
    Piece("sends between stages under other micro-batches: they block",
          lambda run: run.framework.overlaps_stages and run.stages > 1, _framework(overlaps_stages=False)),
    Piece("stages in chunks: one chunk a stage", lambda run: run.chunks > 1, [(replica, "replica_step_s", _one_chunk)]),
    Piece("gradients under the last backward pass, weights under the next forward: neither",
          lambda run: _stage(run) and run.framework.overlaps_gradients, _framework(overlaps_gradients=False)),
    Piece("gradients in buckets: all at once", lambda run: _stage(run) and run.framework.bucket_parameters,
          _framework(bucket_parameters=0)),
    Piece("a broadcast for every parameter tensor: one gather", lambda run: run.framework.per_tensor,
          _framework(per_tensor=False)),
    Piece("copies into buckets: none", lambda run: run.framework.bucket_copy_bytes, _framework(bucket_copy_bytes=0)),
    Piece("optimizer state cut over replicas: whole on each",
          lambda run: _stage(run) and run.framework.sharded_optimizer,
          [(replica, "optimizer_ways", lambda _: 1)]),
    Piece("experts, grouped calls: batched matmuls", _experts, [(experts, "_grouped", lambda cost, _: cost)]),
    Piece("experts, casts: at the rate of plain copies", _experts, [(experts, "CAST_SHARE", _LIKE_A_COPY)]),
    Piece("experts, HybridEP: NCCL's all-to-all of every copy", _experts, _recipe(dispatcher="alltoall")),
    Piece("experts, overlap of the exchange: it blocks", _experts, _recipe(overlapped=False)),
    Piece("experts, fused epilogues: kernels of their own", _experts, _recipe(fused=False)),
    Piece("experts, biases, clamps and rotation of GPT-OSS: none", _experts, [
        (replica, "passes_s", lambda run, cluster: experts.passes_s(
            replace(run, shape=replace(run.shape, biased=False)), cluster))]),
    Piece("experts, permutations: at the rate of plain copies", _experts, [
        (experts, name, _LIKE_A_COPY) for name in ("_PERMUTE_SHARE", "_HYBRID_PERMUTE_SHARE", "_HYBRID_RETURN_SHARE")]),
    Piece("NVFP4, casts: none", _nvfp4, [(replica, "casts_s", lambda *_, **__: 0.0)]),
    Piece("NVFP4, what tensor-parallel GPUs send: nothing", _nvfp4, [
        (replica, "travel_s", lambda *_, **__: (0.0, 0.0))]),
    Piece("NVFP4, layers recomputed: none", _nvfp4, [(experiments, "_recomputed_share", lambda *_: 0.0)]),
)  # fmt: skip


def step_s(run: Run, program: Program) -> float:
    """Seconds of the predicted step of a row."""
    if not run.whole:
        return replica.replica_step_s(run, program, Cluster.load(run.machines.table), replica.framework_view(run))
    simulation, more = replay.whole_step(run, program)
    return simulation.timeline.steps[0].window[1] + more


def errors_without(rows: Sequence[Row], folder: Path, pieces: Sequence[Piece]) -> list[tuple[Prediction, list[float]]]:
    """Each row whose program is compiled: its prediction, and the step without each of the pieces."""
    found = []
    for row in rows:
        run = resolve(row)
        if isinstance(run, str) or not has_program(run.toml, folder / "programs"):
            continue
        measured_s, _ = measured_step_time_s(row, run.model_flops)
        if not measured_s:
            continue
        program, _ = get_program(run.toml, folder / "programs")
        whole = Prediction(row.id, row.source, replay.family_of(run), run.precision, measured_s=measured_s,
                           predicted_s=step_s(run, program))  # fmt: skip
        found.append((whole, [_without(p, row, program) if p.touches(run) else whole.predicted_s for p in pieces]))
    return found


def _without(piece: Piece, row: Row, program: Program) -> float:
    with ExitStack() as stack:
        for target, name, value in piece.without:
            stack.enter_context(patch.object(target, name, value))
        run = resolve(row)
        assert isinstance(run, Run)
        return step_s(run, program)


def table_line(name: str, found: Sequence[tuple[Prediction, float]], rows: Mapping[str, Row]) -> str:
    """One line of the table.

    Args:
        name: of the piece.
        found: of every row its prediction, and the step in seconds without the piece.
        rows: by id.
    """
    pairs = [(p, replace(p, predicted_s=seconds)) for p, seconds in found]
    changes = {p.id: q.predicted_s / p.predicted_s - 1 for p, q in pairs if p.predicted_s and q.predicted_s}
    touched = [(p, q) for p, q in pairs if abs(changes[p.id]) > _CHANGED]
    if not touched:
        return f"| {name} | 0 | 0 | | | | |"
    base, other = ([pair[n] for pair in touched] for n in (0, 1))
    few = [changes[p.id] for p in base]
    parts = [name, len(touched), len(groups(base, rows)), medians(other, rows), medians(base, rows),
             medians([q for _, q in pairs], rows), f"{min(few):+.1%} to {max(few):+.1%}"]  # fmt: skip
    return f"| {' | '.join(map(str, parts))} |"


def medians(found: Iterable[Prediction], rows: Mapping[str, Row]) -> str:
    """Medians over groups of their median error, without and with its sign."""
    errors = [[p.error or 0.0 for p in members] for members in groups(found, rows).values()]
    plain = statistics.median(statistics.median(abs(e) for e in group) for group in errors)
    return f"{plain:.1%}, {statistics.median(statistics.median(group) for group in errors):+.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.pieces", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of `python -m benchmarks.published`")
    parser.add_argument("--only", default="", help="pieces whose name holds this text")
    options = parser.parse_args(arguments)
    rows = {row.id: row for row in read_rows(options.rows)}
    pieces = [piece for piece in PIECES if options.only in piece.name]
    found = errors_without(list(rows.values()), options.out, pieces)
    base = [p for p, _ in found]
    print(f"{len(base)} rows, {len(groups(base, rows))} groups: {medians(base, rows)}\n")
    print("| without it | rows | groups | those rows without it | with it | all rows without it | one row |")
    print("|---|---|---|---|---|---|---|")
    for n, piece in enumerate(pieces):
        print(table_line(piece.name, [(p, seconds[n]) for p, seconds in found], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
