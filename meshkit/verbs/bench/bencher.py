"""`meshkit bench`: measure collectives over every axis of a mesh, and the rates of one device.

    experiment -> mesh -> [ size x axis x collective: verify, time ] -> fit -> BenchReport, calibration.toml

On GPUs the constants of the network model are fitted too, by the method that gave the shipped constants (refit.py).

In a job of several processes, every process calls `bench`, and process 0 writes the files. The processes join by the
environment variables of `meshkit.distributed.join`, or jax.distributed is already initialized.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jaxlib
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from meshkit.config import calibration
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import MeshAxis
from meshkit.console import stderr
from meshkit.distributed.join import join_gang
from meshkit.errors import ConfigError
from meshkit.predict.refit import network_constants, shipped_constants
from meshkit.report.schema import LinkName
from meshkit.report.summarize import cluster_part, mesh_part
from meshkit.sharding import build_mesh, prepare_platform
from meshkit.sharding.mesh import device_memory
from meshkit.units import KIB, format_bytes, format_percent, format_seconds
from meshkit.verbs.bench.bench_report import (
    GOOD_FIT,
    BenchFit,
    BenchReport,
    BenchRow,
    BenchWarning,
    ConstantPart,
    DevicesPart,
    NetworkPart,
    RatesPart,
    write_bench_html,
)
from meshkit.verbs.bench.measure import (
    COPY_KIND,
    DTYPE,
    Case,
    CaseTiming,
    gather,
    kinds,
    largest_size_bytes,
    make_case,
    measure,
    measure_rates,
    platform_of,
)

HTML_FILE = "bench.html"
SMALLEST_BYTES, FACTOR = KIB, 4
_FIT_ITERATIONS = 60
_SMALLEST_ERROR = 1e-3  # Weights are 1 / error. This lower bound of the error keeps them finite.
_FEWEST_PROGRAMS = 5  # The fewest runs of a case's program: one for the check, one to warm up, three timed ones.


def bench(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    sizes: Sequence[int] | None = None,
    budget_s: float = 300.0,
    case_budget_s: float = 0.25,
    rates: bool = True,
    console: Console | None = None,
) -> BenchReport:
    """Measure the experiment's mesh on the attached devices.

    Args:
        experiment: the experiment whose cluster and mesh are measured. Its model is not used.
        out: folder for `bench.json`, `bench.html` and `calibration.toml`; None writes nothing.
        sizes: sizes in bytes; by default 1 KiB, 4 KiB, ... up to the largest that fits in memory.
        budget_s: seconds for all collectives. A case that would exceed them, judged by its previous size, is left out,
            with a warning.
        case_budget_s: seconds of timed runs for one size of one collective; three runs at least, 21 at most.
        rates: whether to measure matmul, attention and memory rates too.
        console: the console that shows progress; stderr by default.

    Raises:
        ConfigError: the attached devices are not those of the experiment, `sizes` is empty or has a size below 1, or
            the environment of a job of several processes is wrong.
        RunError: the other processes cannot be reached, or a size does not fit the devices' memory.
    """
    if not jax.distributed.is_initialized() and join_gang()[1] > 1:
        prepare_platform(experiment.cluster)  # Each process makes its own part of the virtual CPU devices.
    began = time.perf_counter()
    mesh = _mesh(experiment)
    chosen = _sizes(sizes, mesh)
    run = _Bench(experiment, mesh, chosen, budget_s, case_budget_s, began)
    less = "smaller --sizes, or ending what else uses the GPU's memory"
    with device_memory(experiment.cluster, experiment.train, experiment.file, hint=less):
        run.execute(console or stderr())
        measured = measure_rates(jax.local_devices(backend=mesh.devices.flat[0].platform)[0]) if rates else RatesPart()
    report = run.report(measured)
    if out is not None and jax.process_index() == 0:
        folder = Path(out)
        report.write(folder)
        calibration.write(folder / calibration.CALIBRATION_FILE, report.calibration())
        write_bench_html(report, folder / HTML_FILE, title=experiment.name)
    return report


def _mesh(experiment: Experiment) -> jax.sharding.Mesh:
    """Return the experiment's mesh on the attached devices; raise an error if a process has no device in the mesh."""
    if jax.distributed.is_initialized():
        # Start jax now, with the launcher's number of CPU devices, before `build_mesh` can set the cluster's number.
        jax.devices()
    mesh = cast(jax.sharding.Mesh, build_mesh(experiment.mesh, experiment.cluster))
    idle = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if idle:
        raise ConfigError(
            f"cluster '{experiment.cluster.name}' has {mesh.size} devices, and none belongs to process "
            f"{', '.join(map(str, sorted(idle)))}.",
            hint=f"a cluster of {len(jax.devices())} devices, or fewer processes",
        )
    return mesh


def _sizes(sizes: Sequence[int] | None, mesh: jax.sharding.Mesh) -> list[int]:
    if sizes is not None:
        if not sizes or min(sizes) < 1:
            raise ConfigError(
                "bench needs sizes of at least 1 byte.", hint="--sizes 1024,1048576, or no --sizes for a sweep"
            )
        return sorted(set(sizes))
    largest, chosen = largest_size_bytes(mesh, _available_bytes()), [SMALLEST_BYTES]
    while chosen[-1] * FACTOR <= largest:
        chosen.append(chosen[-1] * FACTOR)
    return chosen


def _available_bytes() -> int | None:
    """Return the host memory that programs can allocate, reclaimable file cache included; None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * KIB if found else None


@dataclass
class _Bench:
    """One benchmark: it chooses the cases and their order, and collects rows and warnings."""

    experiment: Experiment
    mesh: jax.sharding.Mesh
    sizes: list[int]
    budget_s: float
    case_budget_s: float
    began: float
    rows: list[BenchRow] = field(default_factory=list)
    warnings: list[BenchWarning] = field(default_factory=list)

    def execute(self, console: Console) -> None:
        """Measure small sizes first, so that the budget cuts off only the largest."""
        cases = list(self._cases())
        columns = (TextColumn("bench"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
        show = console.is_terminal and jax.process_index() == 0
        next_s: dict[tuple[str | None, str], float] = {}  # (axis, collective) -> expected seconds of its next size.
        left_out: set[int] = set()
        with Progress(
            *columns, TextColumn("{task.description}"), TimeElapsedColumn(), console=console, disable=not show
        ) as bar:
            task = bar.add_task("", total=len(cases))
            for size, axis, case in cases:
                name = axis.name if axis else None
                bar.update(task, advance=1, description=f"{format_bytes(size)} {name or ''} {case.kind.name}")
                if self._exceeds(next_s.get((name, case.kind.name), 0.0)):
                    left_out.add(size)
                    continue
                self.rows.append(self._row(case, axis, measure(self.mesh, case, budget_s=self.case_budget_s)))
                next_s[name, case.kind.name] = _FEWEST_PROGRAMS * FACTOR * self.rows[-1].time_s
        if left_out:
            text = f"some or all cases of {', '.join(format_bytes(s) for s in sorted(left_out))} were left out: they"
            self._warn("budget", f"{text} would have exceeded the time budget of {format_seconds(self.budget_s)}.")

    def _cases(self) -> Iterator[tuple[int, MeshAxis | None, Case]]:
        axes = [axis for axis in self.experiment.mesh.axes if axis.size > 1]
        for size in self.sizes:
            yield size, None, make_case(COPY_KIND, None, 1, size)
            for axis in axes:
                for kind in kinds(platform_of(self.mesh.devices.flat[0])):
                    if not kind.is_barrier or size == self.sizes[0]:
                        yield size, axis, make_case(kind, axis.name, axis.size, size)

    def _exceeds(self, next_s: float) -> bool:
        """Return whether the next case would exceed the budget. Process 0 decides for all processes."""
        elapsed = time.perf_counter() - self.began
        return bool(gather([float(elapsed + next_s > self.budget_s)])[0, 0])

    def _row(self, case: Case, axis: MeshAxis | None, found: CaseTiming) -> BenchRow:
        # The slowest link that a group along the axis crosses.
        link = None if axis is None else "infiniband" if axis.number("infiniband") > 1 else "nvlink"
        factor = case.kind.bus_factor(case.group_size)
        algorithm = case.size_bytes / found.time_s if factor is not None else None
        return BenchRow(
            axes=(axis.name,) if axis else (),
            link=link,
            fabric=self.experiment.cluster.link(link).fabric if link else None,
            gpus_per_domain=axis.number("nvlink") if axis else 1,
            domains=axis.number("infiniband") if axis else 1,
            group_size=case.group_size,
            num_groups=self.mesh.size // case.group_size,
            collective=case.kind.name,
            emulated=case.kind.emulated,
            size_bytes=case.size_bytes,
            count=case.count,
            dtype=DTYPE,
            time_s=found.time_s,
            algorithm_bandwidth_bytes_per_s=algorithm,
            bus_bandwidth_bytes_per_s=algorithm * factor if algorithm is not None and factor is not None else None,
            wire_bytes=case.size_bytes * factor if factor is not None and axis else None,
            runs=found.runs,
            wrong=found.wrong,
            checked=found.checked,
        )

    def report(self, rates: RatesPart) -> BenchReport:
        fits, rows = fit_rows(self.rows)
        errors = [abs(r.fitted_time_s / r.time_s - 1) for r in rows if r.fitted_time_s is not None]
        median, p90 = (float(q) for q in np.quantile(errors, [0.5, 0.9])) if errors else (None, None)
        wrong = sum(row.wrong for row in rows)
        if wrong:
            kinds_ = sorted({f"{row.collective} over {row.axes[0] if row.axes else '-'}" for row in rows if row.wrong})
            self._warn("wrong", f"{wrong} elements differ from numpy's: {', '.join(kinds_)}.")
        if median is not None and median > GOOD_FIT:
            text = f"half of the measured times differ from the fitted ones by more than {format_percent(median)}"
            self._warn("fit", f"{text}; so a plan with this calibration is that inaccurate, too.")
        device = self.mesh.devices.flat[0]
        if device.platform == "cpu":
            self._warn("cpu", "virtual CPU devices share cores and memory: the numbers are of this machine under load.")
        return BenchReport(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            cluster=cluster_part(self.experiment.cluster),
            mesh=mesh_part(self.experiment.mesh.placement(self.experiment.cluster)),
            devices=DevicesPart(
                platform=platform_of(device),
                kind=device.device_kind,
                count=self.mesh.size,
                processes=jax.process_count(),
                jax=jax.__version__,
                jaxlib=jaxlib.__version__,
            ),
            rows=tuple(rows),
            fits=tuple(fits),
            rates=rates,
            network=network_part(rows, self.experiment.cluster) if device.platform != "cpu" else None,
            wrong=wrong,
            residual_median=median,
            residual_p90=p90,
            wall_s=time.perf_counter() - self.began,
            warnings=tuple(self.warnings),
        )

    def _warn(self, code: str, message: str) -> None:
        self.warnings.append(BenchWarning(code=code, message=message))


def network_part(rows: Sequence[BenchRow], cluster: Cluster) -> NetworkPart | None:
    """Return the network model's constants, fitted to the rows; None if there are too few rows."""
    found = network_constants([row for row in rows if row.axes and row.emulated is None], cluster)
    if found is None:
        return None
    shipped = shipped_constants(cluster)
    constants = tuple(ConstantPart(name=n, value=v, shipped=shipped[n]) for n, v in found.constants.items())
    return NetworkPart(constants=constants, **found.model_dump(exclude={"constants"}))


def fit_rows(rows: Sequence[BenchRow]) -> tuple[list[BenchFit], list[BenchRow]]:
    """Return one fit for each link, collective and group shape, over all its axes, and the rows with fitted times.

    A group shape is the number of NVLink domains that a group spans, and its number of GPUs in each. Copies and
    barriers get no fit, nor does a group shape that was measured with one size only.
    """
    groups: dict[tuple, list[BenchRow]] = {}
    for row in rows:
        if row.link is not None and row.wire_bytes is not None:
            groups.setdefault(_fit_key(row), []).append(row)
    fits = {key: fit for key, members in groups.items() if (fit := _fit(members)) is not None}
    fitted = []
    for row in rows:
        fit = fits.get(_fit_key(row))
        time_s = fit.time_s(row.wire_bytes) if fit is not None and row.wire_bytes is not None else None
        fitted.append(row.model_copy(update={"fitted_time_s": time_s}))
    return list(fits.values()), fitted


def _fit_key(row: BenchRow) -> tuple:
    return row.link, row.collective, row.gpus_per_domain, row.domains


def _fit(rows: Sequence[BenchRow]) -> BenchFit | None:
    line = fit_line([r.wire_bytes or 0.0 for r in rows], [r.time_s for r in rows])
    if line is None:
        return None
    first = rows[0]
    return BenchFit(
        link=cast(LinkName, first.link),
        fabric=first.fabric or "",
        collective=first.collective,
        emulated=first.emulated,
        axes=tuple(dict.fromkeys(axis for row in rows for axis in row.axes)),
        gpus_per_domain=first.gpus_per_domain,
        domains=first.domains,
        **line._asdict(),
    )


class FittedLine(NamedTuple):
    """A fitted line, seconds = latency_s + wire_bytes / bytes_per_s, and its errors against the measured times."""

    latency_s: float
    bytes_per_s: float
    residual_median: float
    """The median of |fitted / measured - 1|."""
    residual_p90: float
    points: int
    """The number of measured times that the line is fitted to."""


def fit_line(wire_bytes: Sequence[float], times_s: Sequence[float]) -> FittedLine | None:
    """Fit a line to measured points of wire bytes per GPU and seconds; return None for fewer than two sizes.

    The fit minimizes the sum of absolute relative errors, by least squares with iterated weights 1 / |error|. Errors
    are relative, so that small sizes count as much as large ones. They are absolute rather than squared, so that one
    disturbed size hardly moves the line. Both terms stay physical: a latency that would be negative is 0. If the time
    grows by less than the median error up to the largest size, the errors hide the growth. The bandwidth is then the
    lowest one whose growth the errors would hide, or the highest measured one if that is higher.
    """
    wire, times = np.asarray(wire_bytes, float), np.asarray(times_s, float)
    if len(np.unique(wire)) < 2:
        return None
    # latency * (1 / t) + slope * (wire / t) = 1: divided by the measured time t, each equation's error is relative.
    design = np.stack([1 / times, wire / times], axis=1)
    weights = np.ones(len(times))
    solution = errors = np.zeros(2)
    for _ in range(_FIT_ITERATIONS):
        solution = _not_negative(design, weights)
        errors = np.abs(design @ solution - 1)
        weights = 1 / np.maximum(errors, _SMALLEST_ERROR)
    latency, slope = solution
    hidden = max(np.median(errors), _SMALLEST_ERROR)  # A share of the latency.
    slope = max(slope, min(hidden * latency / wire.max(), (times / wire).min()))
    errors = np.abs(design @ np.array([latency, slope]) - 1)
    median, p90 = np.quantile(errors, [0.5, 0.9])
    return FittedLine(float(latency), float(1 / slope), float(median), float(p90), len(times))


def _not_negative(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted least-squares solution for two unknowns >= 0.

    If an unknown would be negative, the result is the better of the two fits in which one unknown is 0.
    """
    scale = np.sqrt(weights)
    rows, target = design * scale[:, None], scale
    size = np.abs(rows).max(0)  # The columns differ by ten orders of magnitude, so each is scaled to 1.
    free = np.linalg.lstsq(rows / size, target, rcond=None)[0] / size
    if (free >= 0).all():
        return free
    corners = np.diag(rows.T @ target / (rows**2).sum(0))
    losses = ((corners @ rows.T - target) ** 2).sum(1)
    return corners[int(losses.argmin())]
