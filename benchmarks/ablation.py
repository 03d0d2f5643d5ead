"""What each ingredient of the model is worth: `python -m benchmarks.ablation --rows FILE.csv --out DIR [--only TEXT]`.

Predicts published rows with one ingredient left out at a time and prints a table in markdown. DIR is that of
`python -m benchmarks.published`, whose compiled programs are used; what it lacks is compiled. `--recompile` adds the
ingredients that change the program itself: without pipelined collectives, without any overlap.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from benchmarks.published import programs, replay
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row, read_rows
from benchmarks.published.statistics import groups
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.simulate import Simulation, simulate

_ALL = Assumptions()


@dataclass(frozen=True)
class Ingredient:
    """One thing to leave out, or to take otherwise.

    Attributes:
        name: as the table has it.
        without: the assumptions that are left.
        pick: the seconds to take from a simulation; None for the simulated step.
        drop: XLA options that go, by how their names begin; it recompiles the program.
    """

    name: str
    without: Assumptions = _ALL
    pick: Callable[[Simulation], float] | None = None
    drop: str = ""


EVERYTHING = Ingredient("everything")
INGREDIENTS = (
    EVERYTHING,
    Ingredient("rates by shape: every matmul as fast as a large one", Assumptions(shapes=False)),
    Ingredient("the power cap: matmuls at the rate of a burst", Assumptions(sustained=False)),
    Ingredient("attention's own rates: as fast as a matmul", Assumptions(attention=False)),
    Ingredient("contention: collectives take nothing from compute", Assumptions(contention=False)),
    Ingredient("second waves: collectives take their multiprocessors", Assumptions(waves=False)),
    Ingredient("the slowest GPU: all alike", Assumptions(slowest=False)),
    Ingredient("overlap: every collective exposed", pick=lambda s: s.all_exposed_s),
    Ingredient("communication: every collective hidden, and free", pick=lambda s: s.all_overlapped_s),
    Ingredient("one stream: two (xla_gpu_experimental_enable_collective_multi_streaming)", Assumptions(streams=2)),
    Ingredient("several hardware queues: one (CUDA_DEVICE_MAX_CONNECTIONS=1)", Assumptions(single_queue=True)),
    Ingredient(
        "all of these: peak rates of bursts, no contention, all GPUs alike",
        Assumptions(shapes=False, sustained=False, attention=False, contention=False, slowest=False),
    ),
)
RECOMPILED = (Ingredient("overlap over iterations: collectives not pipelined", drop="xla_gpu_pipeline_"),)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of `python -m benchmarks.published`")
    parser.add_argument("--only", default="", help="rows whose id, source or model holds this text")
    parser.add_argument("--recompile", action="store_true", help="also what changes the program")
    parser.add_argument("--compiled-only", action="store_true", help="leave out rows whose program is not there")
    options = parser.parse_args(arguments)
    rows = {r.id: r for r in read_rows(options.rows) if options.only.lower() in f"{r.id} {r.source}".lower()}
    table = {}
    for ingredient in (*INGREDIENTS, *(RECOMPILED if options.recompile else ())):
        print(f"{ingredient.name} ...", file=sys.stderr)
        table[ingredient.name] = predict_without(ingredient, rows, options.out, not options.compiled_only)
    print(render(table, rows))
    return 0


def predict_without(
    ingredient: Ingredient, rows: Mapping[str, Row], folder: Path, compile_missing: bool
) -> dict[str, Prediction]:
    """id -> prediction of each row that can be predicted."""
    with _patched(ingredient):
        found = [replay.predict(row, folder, compile_missing=compile_missing) for row in rows.values()]
    return {p.id: p for p in found if p.error is not None}


@contextmanager
def _patched(ingredient: Ingredient):
    """The replay with other assumptions, another reading of a simulation, or other lines in its experiment files."""

    def simulated(*args, **options) -> Simulation:
        result = simulate(*args, **options, assumptions=ingredient.without)
        if ingredient.pick is None:
            return result
        (step,) = result.timeline.steps
        window = (0.0, ingredient.pick(result))
        return replace(result, timeline=replace(result.timeline, steps=(replace(step, window=window),)))

    def resolved(row: Row) -> Run | str:
        run = resolve(row)
        return run if isinstance(run, str) or not ingredient.drop else _without_options(run, ingredient.drop)

    saved = programs.simulate, replay.resolve, replay.get_program
    programs.simulate, replay.resolve, replay.get_program = simulated, resolved, _program
    try:
        yield
    finally:
        programs.simulate, replay.resolve, replay.get_program = saved


@functools.cache
def _program(toml: str, folder: Path) -> tuple[programs.Program, bool]:
    """Each program read once, however many ingredients are left out of it."""
    return programs.get_program(toml, folder)


def _without_options(run: Run, start: str) -> Run:
    options = {k: v for k, v in run.document.get("xla", {}).items() if not k.startswith(start)}
    return replace(run, document={**run.document, "xla": options})


def render(table: Mapping[str, Mapping[str, Prediction]], rows: Mapping[str, Row]) -> str:
    """A row per ingredient: median error over groups of correlated rows, and the change of the predicted step."""
    base = table[EVERYTHING.name]
    families = sorted({p.family for p in base.values()})
    head = ["left out", "median error", "median of signed errors", "step, median change", *families]
    lines = [versions(len(base)), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, found in table.items():
        change = statistics.median((found[i].predicted_s or 0) / (base[i].predicted_s or 1) - 1 for i in found)
        cells = [name, _percent(_median(found, rows)), _percent(_signed(found, rows), signed=True)]
        cells += ["" if name == EVERYTHING.name else _percent(change, signed=True)]
        for family in families:
            cells.append(_percent(_median({i: p for i, p in found.items() if p.family == family}, rows)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(found: Mapping[str, Prediction], rows: Mapping[str, Row]) -> float | None:
    each = [statistics.median(abs(p.error or 0) for p in g) for g in groups(found.values(), rows).values()]
    return statistics.median(each) if each else None


def _signed(found: Mapping[str, Prediction], rows: Mapping[str, Row]) -> float | None:
    each = [statistics.median(p.error or 0 for p in g) for g in groups(found.values(), rows).values()]
    return statistics.median(each) if each else None


def _percent(share: float | None, *, signed: bool = False) -> str:
    return "" if share is None else f"{100 * share:+.1f} %" if signed else f"{100 * share:.1f} %"


def versions(count: int) -> str:
    names = ("meshkit", "jax", "jaxlib")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    today = datetime.date.today().isoformat()
    return f"{count} rows, {today}, {versions}, Python {platform.python_version()}; no GPU is involved."


if __name__ == "__main__":
    sys.exit(main())
