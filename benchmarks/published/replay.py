"""One row: experiment, compiled program, prediction. Seventh in the flow of the replay."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.published.corrections import Step, corrected, corrections_of
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.holdings import framework_peak_bytes
from benchmarks.published.kernels import adapted, write_calibration
from benchmarks.published.programs import Program, get_program, has_program, program_key
from benchmarks.published.reasons import Case, mean_kernel_s, outside_note
from benchmarks.published.replica import BLOCKING, HIDDEN, framework_view, replica_step_s
from benchmarks.published.rows import Row, measured_peak_bytes, measured_step_time_s
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.errors import MeshkitError
from meshkit.predict.interval import step_interval, stratum_of
from meshkit.predict.simulate import Simulation
from meshkit.timeline import overlap


@dataclass(frozen=True)
class Prediction:
    """A row beside what was predicted for it; None is unknown.

    Attributes:
        exposed_s: communication that nothing hides.
        hidden_s, blocking_s: the step if every collective hid, and if none did.
        configured: whether the source states everything that decides the time.
        handling: `none`, `adjusted` or `stage`, see Run.handling.
        interval_low_s, interval_high_s: of 80 %, by the errors of published runs (predict/interval.py).
        model_flops: of the step over all GPUs, the whole attention square counted.
        seconds: that the prediction took.
    """

    id: str
    source: str
    family: str = ""
    precision: str = ""
    gpu: str = ""
    num_gpus: int | None = None
    measured_s: float | None = None
    predicted_s: float | None = None
    exposed_s: float | None = None
    hidden_s: float | None = None
    blocking_s: float | None = None
    peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    peak_means: str = ""
    configured: bool = False
    model_flops: float | None = None
    cached: bool = False
    seconds: float = 0.0
    note: str = ""
    handling: str = ""
    interval_low_s: float | None = None
    interval_high_s: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1 if self.predicted_s and self.measured_s else None

    @property
    def inside(self) -> bool | None:
        """Whether the measured time lies between the bounds of the prediction."""
        if None in (self.hidden_s, self.blocking_s, self.measured_s):
            return None
        return self.hidden_s <= self.measured_s <= self.blocking_s  # pyright: ignore[reportOperatorIssue]


def family_of(run: Run) -> str:
    """What errors are reported by: the framework, with experts apart."""
    return f"{run.framework.name}, experts" if run.shape.experts else run.framework.name


def group_key(row: Row) -> str:
    """Equal for rows that share a compiled program; "" for one that cannot be matched."""
    try:
        run = resolve(row)
    except Exception:  # whatever a row holds, `predict` says so in its note
        return ""
    return "" if isinstance(run, str) else program_key(run.toml)


def predict(row: Row, folder: Path, *, compile_missing: bool = True) -> Prediction:
    """The prediction of a row; what goes wrong is in its note, never raised.

    Args:
        row: as read.
        folder: where programs and experiment files are kept.
        compile_missing: otherwise a row whose program is not there yet stays blank.
    """
    started = time.perf_counter()
    try:
        found = _predict(row, folder, compile_missing)
    except MeshkitError as error:
        found = _blank(row, f"not predicted: {str(error).splitlines()[0]}")
    except Exception as error:  # a row must not end the replay of the others
        found = _blank(row, f"not predicted: {type(error).__name__}: {str(error)[:200]}")
    return Prediction(**{**asdict(found), "seconds": time.perf_counter() - started})


def _blank(row: Row, note: str) -> Prediction:
    measured, how = measured_step_time_s(row)
    peak = measured_peak_bytes(row.notes, row.source)
    return Prediction(row.id, row.source, measured_s=measured, measured_peak_bytes=peak[0] if peak else None,
                      peak_means=peak[1] if peak else "", note=_join(note, how))  # fmt: skip


def _join(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _predict(row: Row, folder: Path, compile_missing: bool) -> Prediction:
    run = resolve(row)
    if isinstance(run, str):
        return _blank(row, f"not matched: {run}")
    experiments = folder / "experiments"
    experiments.mkdir(parents=True, exist_ok=True)
    name = str(run.document["name"]) if run.whole else f"{_safe(row.id)}.stage"
    (experiments / f"{name}.toml").write_text(run.toml)
    write_calibration(run.toml, experiments)
    if not compile_missing and not has_program(run.toml, folder / "programs"):
        blank = _blank(row, "not predicted: its program was not compiled")
        peak_bytes = framework_peak_bytes(run, blank.peak_means or "allocated")
        return replace(blank, family=family_of(run), peak_bytes=peak_bytes)
    program, cached = get_program(run.toml, folder / "programs")
    measured, how = measured_step_time_s(row, run.model_flops)
    peak = measured_peak_bytes(row.notes, row.source)
    predicted, exposed, hidden, blocking = _times(run, program)
    gpu = str(run.machines.table["gpu"])
    interval = step_interval(predicted, stratum_of(catalog.gpu(gpu), run.precision, bool(run.shape.experts)))
    low, high = interval.p80_s if interval else (None, None)
    found = Prediction(
        id=row.id,
        source=row.source,
        family=family_of(run),
        precision=run.precision,
        gpu=gpu,
        num_gpus=run.gpus,
        measured_s=measured,
        predicted_s=predicted,
        exposed_s=exposed,
        hidden_s=hidden,
        blocking_s=blocking,
        peak_bytes=_peak_bytes(run, program, peak[1] if peak else ""),
        measured_peak_bytes=peak[0] if peak else None,
        peak_means=peak[1] if peak else "",
        configured=run.configured,
        model_flops=run.model_flops,
        cached=cached,
        handling=run.handling,
        interval_low_s=low,
        interval_high_s=high,
    )
    return Prediction(**{**asdict(found), "note": _note(run, program, found, how)})


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in name)[:80] or "row"


def _times(run: Run, program: Program) -> tuple[float, float, float, float]:
    """(step, exposed communication, step with all hidden, step with all blocking), seconds."""
    if run.whole:
        simulation, more = whole_step(run, program)
        step = simulation.timeline.steps[0]
        exposed = overlap(step.compute, step.communication, step.window).exposed_s
        times = (step.window[1], simulation.all_overlapped_s, simulation.all_exposed_s)
        predicted, hidden, blocking = (seconds + more for seconds in times)
        return predicted, exposed, hidden, blocking
    cluster = Cluster.load(run.machines.table)
    predicted = replica_step_s(run, program, cluster, framework_view(run))
    hidden = replica_step_s(run, program, cluster, HIDDEN)
    return predicted, max(0.0, predicted - hidden), hidden, replica_step_s(run, program, cluster, BLOCKING)


def whole_step(run: Run, program: Program) -> tuple[Simulation, float]:
    """The simulated step of a program that is all of it, and seconds that its corrections add."""
    cluster = adapted(program.experiment.cluster, run.kernels)
    at = Step(run, cluster, program.readers)
    simulation = program.simulate(run.kernels, corrected(at, program.schedule), gpus=run.gpus)
    return simulation, sum(c.step(at) for c in corrections_of(run) if c.step)


def _peak_bytes(run: Run, program: Program, means: str) -> int | None:
    """The compiler's peak, or what the run's framework holds, as the row counts it."""
    held = framework_peak_bytes(run, means or "allocated")
    return program.peak_bytes if held is None and run.whole else held


def _case(run: Run, program: Program, found: Prediction, how: str) -> Case:
    assert found.measured_s
    assert found.predicted_s
    assert found.hidden_s
    assert found.blocking_s
    compute_s = found.hidden_s
    if not run.whole:  # of one micro-batch on as many layers as were compiled
        compute_s /= run.micro_batches + (run.stages - 1) / run.chunks
        compute_s *= run.document["model"]["layers"] / run.stage_layers
    kernel_s = mean_kernel_s(program.schedule, compute_s)
    return Case(run, found.measured_s, found.predicted_s, found.hidden_s, found.blocking_s, kernel_s, how)


def _note(run: Run, program: Program, found: Prediction, how: str) -> str:
    doubts = [text[1:] for text in run.assumed if text.startswith("!")]
    rest = [text for text in run.assumed if not text.startswith("!")]
    parts = [f"not fully configured: {', '.join(doubts)}" if doubts else "", ", ".join(rest), how]
    if not run.whole:
        parts.append("one stage compiled, 1F1B and gradient reduction as the framework does them")
    if run.framework.memory and not run.shape.experts:
        parts.append("peak memory in closed form, of what the framework keeps")
    if found.inside is False:
        parts.append(outside_note(_case(run, program, found, how)))
    return _join(*parts)
