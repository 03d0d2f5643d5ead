"""Turn a folder of results into a calibration and into tables of predicted, measured and their ratio.

No GPU is needed. Plans are made here from the experiment files that came back, and are kept beside their runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.ids import TURN, as_it_ran, ids_of
from benchmarks.gpu.kernels import ADDED, SHAPES
from benchmarks.gpu.measurements import MEASUREMENTS, Measurement
from benchmarks.gpu.options import OWN
from benchmarks.gpu.verbs import LLAMA_1B, MEASURED
from meshkit.compile.options import version_of
from meshkit.config import calibration, catalog
from meshkit.config.calibration import CALIBRATION_FILE, Calibration, MeasuredOn, Rates
from meshkit.config.cluster import Gpu
from meshkit.config.experiment import Experiment, load
from meshkit.errors import ConfigError, MeshkitError
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Schedule
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.kernels import KernelWork, kernel_work, memory_bytes_per_s
from meshkit.predict.pricing import Load, arithmetic_left
from meshkit.predict.simulate import simulate
from meshkit.report.folder import read_report
from meshkit.report.measured import read_history, untraced_step_s
from meshkit.report.schema import Report
from meshkit.report.summarize import Machines, summarize_simulation
from meshkit.step.program import StepFacts
from meshkit.trace.captured import open_program
from meshkit.units import format_bytes, format_count, format_percent, format_rate, format_seconds

SCORE, PLAN = "score.md", "plan.json"
_FORMATS: dict[str, Callable[[float], str]] = {
    "s": format_seconds,
    "FLOP/s": lambda x: f"{format_count(x)}FLOP/s",
    "bytes/s": format_rate,
    "bytes": format_bytes,
    "share": format_percent,
    "": lambda x: f"{x:.4g}",
}
_DTYPES = {"bf16": "bf16", "fp8": "f8e4m3fn"}
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128  # The sizes of kernels.attention.


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    """The text of the first column."""
    predicted: float | str | bool | None
    """The predicted number, or the expected text or truth value."""
    measured: float | str | bool | None
    """The measured number, text or truth value."""
    unit: str = ""
    """The unit of the numbers, a key of _FORMATS."""
    within: float | None = None
    """The largest relative error that was promised."""
    at_least: float | None = None
    """The least value that was promised."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None unless both are numbers."""
        pair = (self.measured, self.predicted)
        if any(isinstance(x, bool | str) or not x for x in pair):
            return None
        return float(pair[0]) / float(pair[1])  # pyright: ignore[reportArgumentType]

    @property
    def holds(self) -> bool | None:
        """Whether a promise holds; None if there is no promise, or if a side is missing."""
        if self.measured is None:
            return None
        if self.at_least is not None:
            return float(self.measured) >= self.at_least
        if self.within is not None:
            return None if self.ratio is None else abs(self.ratio - 1) <= self.within
        return self.measured == self.predicted if isinstance(self.predicted, bool | str) else None


@dataclass(frozen=True)
class Card:
    """The GPU that the results were measured on."""

    key: str | None
    """The key that the measurement `card` found; None if it found none."""
    gpu: Gpu | None
    """The catalog's entry; None for a CPU or a GPU that the catalog lacks."""
    said: Mapping[str, Any]
    """All values of the measurement `card`."""
    toy: bool
    """Whether the results are of toy size."""


def score(folder: Path) -> str:
    """Return the tables of a folder of results; write them (score.md) and a calibration into it.

    Raises:
        ConfigError: the folder has no result of the measurement `card`.
    """
    card = _card(folder)
    text = "\n".join([*_header(card), *_tables(folder, card)])
    (folder / SCORE).write_text(text + "\n", encoding="utf-8")
    rates = rates_of(folder)
    if rates != Rates():
        calibration.write(folder / CALIBRATION_FILE, Calibration((), _measured_on(card), rates))
    return text


def rates_of(folder: Path) -> Rates:
    """Return the rates of a calibration: sustained rates of large matmuls, of attention at 4k, and of a large copy."""
    found = (_result(folder, name) for name in ("matmul", "copy", "attention"))
    matmul, copy, attention = (result["values"] if result else {} for result in found)
    sustained = {k.split()[0]: v for k, v in matmul.items() if k.endswith("cubed sustained_flops_per_s")}
    sizes = {int(k.split()[0]): v for k, v in copy.items()}
    passes = {p: attention.get(f"4096 {p}_flops_per_s") for p in ("forward", "backward")}
    return Rates(
        memory_bytes_per_s=sizes[max(sizes)] if sizes else None,
        matmul_flops_per_s=sustained,
        attention_flops_per_s={p: v for p, v in passes.items() if v},
    )


def predicted_report(experiment: Experiment) -> Report:
    """Return the plan of what one GPU runs alone.

    No collective runs beside its kernels, and it waits for no slower GPU.
    """
    from meshkit.planning.planner import plan_experiment

    plan = plan_experiment(experiment)
    machines = Machines(
        plan.compiled.placement, experiment.cluster, processes_seen=0, processes_expected=experiment.cluster.hosts
    )
    found = alone(plan.schedule, plan.compiled.hlo, plan.compiled.options, machines, plan.facts)
    return found.model_copy(update={"memory": plan.report.memory, "program": plan.report.program})


def _ran(folder: Path, measured: Report) -> tuple[Report, set[str]] | None:
    """Return the model's report of the program that was rehearsed, and what memory held instead of its ids.

    It is None if no trace came back. A program with mocked collectives is priced at the full clock: its gathered
    weights were whatever the buffers held, and such values draw less power.
    """
    if not (folder / "run/trace").is_dir():
        return None
    captured = open_program(folder / "run")
    if captured.cluster is None or captured.schedule is None:
        return None
    mocked = any(i.collective for i, _ in captured.schedule.walk())
    machines = Machines(captured.placement, captured.cluster, processes_expected=captured.cluster.num_gpus)
    gpu, own = captured.cluster.gpu, ids_of(folder / "run")
    schedule, held = as_it_ran(captured.schedule, captured.module, gpu, measured, own)
    work, options = captured.record.work, captured.record.options or {}
    return alone(schedule, captured.module, options, machines, work, full_clock=mocked), {*held.values()}


def alone(
    schedule: Schedule, module: Any, options: Mapping[str, object], machines: Machines, facts: StepFacts, **more: bool
) -> Report:
    """Return the report of a simulated step without contention and without slower GPUs."""
    alone = replace(assumptions_for(options), contention=False, slowest=False, **more)
    assert machines.cluster is not None
    simulation = simulate(schedule, machines.cluster, assumptions=alone)
    known = read_instructions(module)
    return summarize_simulation(
        simulation, schedule, source="plan", machines=machines, facts=facts, instructions=known, warnings=()
    )


def _card(folder: Path) -> Card:
    found = _result(folder, "card")
    if found is None:
        raise ConfigError(
            "there is no result of `card`, the measurement that names the GPU.",
            at=str(folder),
            hint="--score with the folder of --out, after its pieces are unpacked into it",
        )
    key = found["values"].get("gpu")
    gpu = catalog.gpu(key) if key in catalog.gpu_keys() else None
    return Card(key, gpu, found["values"], found.get("toy", False))


def _measured_on(card: Card) -> MeasuredOn:
    versions = _versions(card)
    return MeasuredOn(
        gpu=card.key or "cpu",
        scale_up="none",
        devices=1,
        date=card.said.get("date", "unknown"),
        jax=versions.get("jax", "unknown"),
        jaxlib=versions.get("jaxlib", "unknown"),
    )


def _versions(card: Card) -> dict[str, str]:
    return dict(part.split()[:2] for part in card.said.get("versions", "").split(", ") if " " in part)


def _header(card: Card) -> list[str]:
    said = card.said
    wrong = [f"- {name}: {what}" for name, what in said.get("checks", {}).items() if not what.startswith("ok")]
    machine = f"Measured on {said.get('nvidia_smi')}, {said.get('date')}, with {said.get('versions')}."
    if card.gpu is None:
        machine = f"Measured on no GPU of the catalog ({said.get('nvidia_smi')}): nothing is predicted of it."
    here, there = version_of("jaxlib"), _versions(card).get("jaxlib")
    if there not in (None, here):
        wrong.append(f"- Steps are planned with jaxlib {here}: another XLA makes other kernels of them than {there}.")
    return [machine, "", *wrong, *([""] if wrong else [])]


def _tables(folder: Path, card: Card) -> Iterator[str]:
    """Yield a table for each measurement, and how many promises hold."""
    held: list[bool] = []
    for m in MEASUREMENTS:
        found = _result(folder, m.name)
        if m.name == "card" or found is None:
            continue
        yield f"### {m.question} (`{m.name}`)\n"
        if found["status"] != "done":
            yield f"It {found['status']}.\n"
        every = _ROWS[m.function](m, folder / m.name, found["values"], card)
        rows = [row for row in every if row.predicted is not None or row.measured is not None]
        held += [row.holds for row in rows if row.holds is not None]
        if rows:
            yield "| what | predicted | measured | measured / predicted | holds |\n|---|---|---|---|---|"
            yield from (_line(row) for row in rows)
            yield ""
    yield f"Of {len(held)} promises {sum(held)} hold."


def _line(row: Row) -> str:
    def shown(x: float | str | bool | None) -> str:
        return "-" if x is None else _FORMATS[row.unit](x) if isinstance(x, float | int) else str(x)

    def said(x: float | str | bool | None) -> str:
        return ("yes" if x else "no") if isinstance(x, bool) else shown(x)

    promise = f" (within {row.within:.0%})" if row.within else f" (at least {row.at_least:.0%})" if row.at_least else ""
    verdict = "" if row.holds is None else f"{'yes' if row.holds else 'no'}{promise}"
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    return f"| {row.what} | {said(row.predicted)} | {said(row.measured)} | {ratio} | {verdict} |"


def _result(folder: Path, name: str) -> dict[str, Any] | None:
    """Return the results of a measurement; None if it was not made."""
    path = folder / name / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _steps(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    """Yield the rows of a step that was trained or rehearsed, beside its plan."""
    rehearsed, trained = m.function == "verbs:rehearse", m.function == "verbs:train"
    measured = _measured(folder, rehearsed)
    planned = _plan(folder) if card.gpu else None
    ran, held = (_ran(folder, measured) if rehearsed and card.gpu and measured else None) or (None, set[str]())
    if ran and planned and measured:
        yield Row("step, as planned", planned.step.time_s, measured.step.time_s, "s")
        yield Row("its exposed communication, as planned", planned.step.exposed_s, measured.step.exposed_s, "s")
    priced = ran or planned
    step, seen = (priced.step if priced else None), (measured.step if measured else None)
    # `clock_s` is the median of the later half of all steps, traced ones among them; `own_s` is the trace's own time.
    clock_s, own_s = values.get("step_time_s"), seen and seen.time_s
    time_s = _untraced_s(folder) or (clock_s or own_s if trained else own_s or clock_s)
    yield Row("step", step and step.time_s, time_s, "s", within=0.10)
    yield Row("its compute", step and step.compute_s, seen and seen.compute_s, "s", within=0.10)
    yield Row("its memory copies", step and step.other_s, seen and seen.other_s, "s")
    yield Row("its idle time", step and step.idle_s, seen and seen.idle_s, "s")
    goal = 0.45 if m.name == "train_llama_1b" and card.gpu else None
    yield Row("mfu_causal", step and step.mfu_causal, seen and seen.mfu_causal, "share", at_least=goal)
    peaks = [report.memory.peak_bytes if report else None for report in (planned, measured)]
    releases = [report.program.jaxlib for report in (planned, measured) if report]
    other = f", planned by jaxlib {releases[0]}, run by {releases[1]}" if len(set(releases)) > 1 else ""
    same = _plan(folder, releases[1]) if other and card.gpu else None
    yield Row(f"peak of memory{other}", peaks[0], peaks[1], "bytes", within=None if same else 0.05)
    if same:
        yield Row(f"peak of memory, planned by jaxlib {releases[1]}", same.memory.peak_bytes, peaks[1], "bytes", 0.05)
    if measured and measured.memory.program_bytes:
        yield Row(f"XLA's count of its memory{other}", peaks[0], measured.memory.program_bytes, "bytes")
    yield Row("compile", None, values.get("compile_s"), "s")
    if not (planned and priced and measured and priced.kernels and measured.kernels):
        return
    kinds = {c.kind: c.time_s for c in measured.kernels.classes}
    for c in priced.kernels.classes:
        ids = f", {' and '.join(sorted(held))}" if held and c.kind == "gather and scatter" else ""
        yield Row(f"{c.kind} kernels{ids}", c.time_s, kinds.get(c.kind), "s", within=0.15 if rehearsed else None)
    if rehearsed:
        rows = [r.communication for r in (planned, measured)]
        moved = [{(c.axes, c.collective, c.dtype, c.payload_bytes) for c in each} for each in rows]
        yield Row("the plan's collectives", True, moved[0] == moved[1])  # Counts are the combiner's choice.


def _measured(folder: Path, rehearsed: bool) -> Report | None:
    """Return the report of what ran. A training's trace is read anew, so that it is read as traces are today."""
    from meshkit.verbs.profile.profiler import measure_run

    if not rehearsed and (folder / "run/trace").is_dir():
        return measure_run(folder / "run").report
    return read_report(folder / MEASURED) if (folder / MEASURED).exists() else None


def _untraced_s(folder: Path) -> float | None:
    """Return the seconds of a training's step by its own clock, before the trace began; None if too few steps ran."""
    capture = folder / "run/trace/capture-p0.json"
    if not capture.exists():
        return None
    first = json.loads(capture.read_text(encoding="utf-8"))["first_step"]
    return untraced_step_s(read_history(folder / "run"), first)


def _plan(folder: Path, jaxlib: str | None = None) -> Report | None:
    """Return the plan beside a run, which is made once; None if it cannot be made here.

    Args:
        folder: the measurement's folder.
        jaxlib: the release to plan with; None for the plan of the installed one.
    """
    path, file = folder / (f"plan-{jaxlib}.json" if jaxlib else PLAN), folder / "run/experiment.toml"
    if path.exists():
        return read_report(path)
    if not file.exists() or jaxlib not in (None, version_of("jaxlib")):
        return None
    try:
        report = predicted_report(replace(load(file), path=LLAMA_1B))  # Its code is found relative to this path.
    except MeshkitError as e:
        print(f"{file}: no plan: {e.message}")
        return None
    report.write(path)
    return report


def _matmuls(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    for key, measured in values.items():
        precision, _, rest = key.partition(" ")
        if found := re.fullmatch(r"(\d+) cubed (burst|sustained)_flops_per_s", rest):
            shape, burst = (int(found[1]),) * 3, found[2] == "burst"
            what = f"{precision} {found[1]} cubed, {found[2]}"
        elif rest.removesuffix(" flops_per_s") in SHAPES:
            what = key.removesuffix(" flops_per_s")
            shape, burst = SHAPES[what.removeprefix(f"{precision} ")], False
        else:
            yield Row(key, None, measured)  # Power and clocks.
            continue
        rows, inner, columns = shape
        matmul = Matmul(_DTYPES[precision], batch=1, m=rows, n=columns, k=inner)
        size = 1 if precision == "fp8" else 2
        moved = float(size * inner * (rows + columns) + 2 * rows * columns)
        cost = Cost({matmul.dtype: matmul.flops}, bytes_accessed=moved, matmuls=(matmul,))
        work = _work(cost, card, Assumptions(sustained=not burst))
        yield Row(what, work and matmul.flops / work.alone_s, measured, "FLOP/s")


def _attention(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    for key, measured in values.items():
        if not (found := re.fullmatch(r"(\d+)( burst)? (forward|backward)_flops_per_s", key)):
            continue
        length, backward, tokens = int(found[1]), found[3] == "backward", values[f"{found[1]} tokens"]
        cost = Cost(
            attention_flops=(2.5 if backward else 1.0) * 2 * tokens * _HEADS * length * _HEAD_DIM,
            attention_backward=backward,
            bytes_accessed=float((2 if backward else 1) * 2 * tokens * _HEAD_DIM * 2 * (_HEADS + _KV_HEADS)),
            attention_queries=tokens * _HEADS,
            attention_length=length,
            attention_head_dim=_HEAD_DIM,
            attention_causal=True,
        )
        work = _work(cost, card)
        what = key.removesuffix("_flops_per_s")
        yield Row(what, work and cost.attention_flops / work.alone_s, measured, "FLOP/s")


def _copies(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    for key, measured in values.items():
        size = int(key.split()[0])
        seconds = _streaming_s(2.0 * size, card)
        yield Row(format_bytes(size), seconds and 2 * size / seconds, measured, "bytes/s")


def _small(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    for key, seconds in values.items():
        if key.endswith(" s"):
            name = key.removesuffix(" s")
            predicted = _streaming_s(seconds * values[f"{name} bytes_per_s"], card)
            along, apart, turns = ADDED.get(name, (0.0, 0.0, 0.0))
            work = _work(Cost(added=(along + turns * TURN, apart)), card)  # The fill before it has its bytes.
            yield Row(name, predicted and work and predicted + work.alone_s, seconds, "s")


def _contention(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    """Yield the slowdowns of kernels and of what runs beside them.

    Held multiprocessors count as those of a collective, and streamed bytes as those that it moves. For channels and for
    copies from the host, the rows have the rate beside a kernel, compared with the rate alone.
    """
    for key, measured in values.items():
        label, _, what = key.rpartition(": ")
        moves, _, name = label.rpartition(", beside ")
        if moves and name != "nothing":
            alone = values.get(f"{moves}, beside nothing: {what}", 0.0)
            expected = _beside(card, moves, alone, name)
            yield Row(label, expected and expected[1] * alone, measured, "bytes/s")
        elif what == "slowdown":
            name, _, beside = label.partition(", ")
            streamed = values.get(f"{label}: streamed bytes_per_s", 0.0)
            moved = values.get(f"{beside}, beside nothing: bytes_per_s", streamed)
            expected = _beside(card, beside, moved, name)
            yield Row(f"slowdown of a {label}", expected and expected[0], measured)


def _beside(card: Card, what: str, moved: float, name: str) -> tuple[float, float] | None:
    """Return the slowdown of a kernel beside something that moves `moved` bytes per second, and that rate's share left.

    Both follow the model of collectives beside kernels. The result is None without a GPU of the catalog.
    """
    if card.gpu is None:
        return None
    blocks = re.match(r"(\d+) ", what)
    arithmetic = arithmetic_left(card.gpu, int(blocks[1])) if blocks and int(blocks[1]) else 1.0
    work = KernelWork(arithmetic_s=1.0) if name == "matmul" else KernelWork(memory_s=1.0)
    return Load(arithmetic, max(0.0, 1.0 - moved / memory_bytes_per_s(card.gpu))).slowdowns(work)


def _options(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    """Yield each option beside meshkit's own choice, which stands in the place of a prediction."""
    for key, measured in values.items():
        label, _, what = key.rpartition(": ")
        program, _, case = label.partition(", ")
        own = None if case == OWN else values.get(f"{program}, {OWN}: {what}")
        yield Row(f"{label}: {what}", own, measured, "bytes" if what == "bytes" else "s")


def _rates(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    """Yield the rates that `meshkit bench` measured on one GPU, beside the rates that plans use without it."""
    n, gpu = 8192, card.gpu
    for key, measured in values.items():
        what, _, name = key.partition(" ")
        predicted = None
        if gpu and what == "matmul" and name in gpu.peak_flops:
            dtype = {"fp8": "f8e4m3fn", "fp16": "f16", "tf32": "f32", "fp32": "f32_highest"}.get(name, name)
            matmul = Matmul(dtype, batch=1, m=n, n=n, k=n)
            predicted = matmul.flops / kernel_work(Cost({dtype: matmul.flops}, matmuls=(matmul,)), gpu).alone_s
        elif gpu and what == "attention":
            flops = (2.5 if name == "backward" else 1.0) * 2 * 4 * 16 * 4096**2 * 128
            cost = Cost(attention_flops=flops, attention_backward=name == "backward", attention_length=4096)
            cost = replace(cost, attention_queries=4 * 16 * 4096, attention_head_dim=128, attention_causal=True)
            predicted = flops / kernel_work(cost, gpu).alone_s
        elif gpu:
            predicted = memory_bytes_per_s(gpu)
        yield Row(key, predicted, measured, "bytes/s" if what == "memory" else "FLOP/s")


def _said(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    """Yield what was measured without any prediction."""
    for key, measured in values.items():
        unit = next((unit for suffix, unit in ((" s", "s"), (" bytes", "bytes")) if key.endswith(suffix)), "")
        yield Row(key, None, measured, unit)


_EXPECTED = {
    "kill_and_resume": {"killed exit code": "-9", "equal": True},
    "preemption": {"exit code": "75", "verify exit code": "0"},
    "out_of_memory": {"exit code": "4", "traceback": False, "remedy": True},
}


def _behaviour(m: Measurement, folder: Path, values: Mapping[str, Any], card: Card) -> Iterator[Row]:
    for key, expected in _EXPECTED[m.name].items():
        seen = values.get(key)
        yield Row(key, expected, str(seen) if isinstance(expected, str) and seen is not None else seen)


def _work(cost: Cost, card: Card, assumptions: Assumptions | None = None) -> KernelWork | None:
    return kernel_work(cost, card.gpu, assumptions=assumptions or Assumptions()) if card.gpu else None


def _streaming_s(moved: float, card: Card) -> float | None:
    """Return the seconds of a kernel that moves `moved` bytes, and at least those of the shortest kernel."""
    return max(moved / memory_bytes_per_s(card.gpu), catalog.kernels()["least_s"]) if card.gpu else None


_ROWS: dict[str, Callable[[Measurement, Path, Mapping[str, Any], Card], Iterator[Row]]] = {
    "verbs:train": _steps,
    "verbs:trace": _steps,
    "verbs:rehearse": _steps,
    "verbs:resume": _behaviour,
    "verbs:preempt": _behaviour,
    "verbs:exhaust": _behaviour,
    "kernels:matmuls": _matmuls,
    "kernels:attention": _attention,
    "kernels:copies": _copies,
    "kernels:small": _small,
    "contention:measure": _contention,
    "options:measure": _options,
    "verbs:bench": _rates,
    "captures:measure": _said,
    "floor:measure": _said,
}
