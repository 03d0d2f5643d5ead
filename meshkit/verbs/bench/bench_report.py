"""The result of `meshkit bench`: its pydantic models (`meshkit.bench/1`), its terminal view and its HTML page.

Values are in SI units, which the key names. An unknown value is None (`null`). Bandwidths are defined as in nccl-tests:
algorithm bandwidth = size / time, and bus bandwidth = algorithm bandwidth x the collective's factor. Both are per GPU
and one direction. The views show nccl-tests' table for each axis and collective, in the units of nccl-tests (bytes, us,
GB/s of 10^9 bytes), and the fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshkit.config.calibration import COLLECTIVES, Calibration, Fit, MeasuredOn, NetworkConstants, Rates
from meshkit.report.schema import ClusterPart, LinkName, MeshAxisPart, Part
from meshkit.report.views.charts import AXIS_COLORS, GRID, frame
from meshkit.report.views.page import (
    Cell,
    Column,
    Page,
    Table,
    below_titles,
    card,
    cards,
    folded,
    heading,
    labelled,
    number_columns,
    section,
    text_columns,
    warning_panel,
)
from meshkit.report.views.words import mesh_text
from meshkit.units import format_bytes, format_count, format_percent, format_rate, format_seconds

SCHEMA = "meshkit.bench/1"
BENCH_FILE = "bench.json"
_COLLECTIVE = Column("collective", words=True, width=47)
_COLUMNS = (
    Column("size", unit="B", width=10),
    Column("count", unit="elements", width=10),
    Column("type", width=7),
    Column("time", unit="us", width=9),
    Column("algbw", unit="GB/s", width=7),
    Column("busbw", unit="GB/s", width=7),
    Column("#wrong", width=6),
    Column("fit", unit="error", width=7),
)
_FIT_COLUMNS = (
    Column("latency", width=7),
    Column("bus bw", width=9),
    Column("points", width=6),
    Column("median error", short="error", width=7),
)
GOOD_FIT = 0.3
_MOVED = 0.02  # A constant that the fit changed by a smaller share than this is not shown.
# The mesh axes' colours and three more, so that each of the ten collectives has its own colour.
_COLORS = (*AXIS_COLORS, "#3f7cac", "#d1495b", "#6c757d")
_POINTS_OF_A_LINE = 60


class DevicesPart(Part):
    """The devices and software that were measured."""

    platform: str
    kind: str
    count: int
    processes: int
    jax: str
    jaxlib: str


class BenchRow(Part):
    """One measured case: a collective of one size over one axis. A copy on the device has no axis and no link.

    Of `checked` elements, `wrong` differ from numpy's result. If XLA lacks the collective, `emulated` names the one
    that ran in its place. `fitted_time_s` comes from the fit for this link, collective and group shape.
    """

    axes: tuple[str, ...]
    link: LinkName | None
    fabric: str | None
    gpus_per_domain: int
    domains: int
    group_size: int
    num_groups: int
    collective: str
    emulated: str | None = None
    size_bytes: int
    count: int
    dtype: str
    time_s: float
    algorithm_bandwidth_bytes_per_s: float | None
    bus_bandwidth_bytes_per_s: float | None
    wire_bytes: float | None
    runs: int
    wrong: int
    checked: int
    fitted_time_s: float | None = None


class BenchFit(Part):
    """Latency and bus bandwidth of one collective over groups of one shape.

    `residual_median` and `residual_p90` are the median and 90th percentile of |fitted / measured - 1|.
    """

    link: LinkName
    fabric: str
    collective: str
    emulated: str | None = None
    axes: tuple[str, ...]
    gpus_per_domain: int
    domains: int
    latency_s: float
    bytes_per_s: float
    residual_median: float
    residual_p90: float
    points: int

    def time_s(self, wire_bytes: float) -> float:
        """Return the seconds of one collective for which each GPU sends `wire_bytes`."""
        return self.latency_s + wire_bytes / self.bytes_per_s


class ConstantPart(Part):
    """A constant of the network model, or a link's rate relative to the catalog's."""

    name: str
    value: float
    shipped: float


class NetworkPart(Part):
    """The network model's constants, fitted to this cluster. The errors are medians of |predicted / measured - 1|."""

    constants: tuple[ConstantPart, ...]
    points: int
    error_before: float
    error_after: float


class RatesPart(Part):
    """Sustained rates of one device; see `meshkit.config.calibration.Rates`."""

    matmul_flops_per_s: dict[str, float] = {}
    attention_flops_per_s: dict[str, float] = {}
    memory_bytes_per_s: float | None = None


class BenchWarning(Part):
    """A reason to read the numbers with care."""

    code: str
    message: str


class BenchReport(Part):
    """The whole result. `residual_median` and `residual_p90` are over all rows that have a fitted time."""

    schema_: Literal["meshkit.bench/1"] = Field(default=SCHEMA, alias="schema")
    date: str
    cluster: ClusterPart
    mesh: tuple[MeshAxisPart, ...]
    devices: DevicesPart
    rows: tuple[BenchRow, ...]
    fits: tuple[BenchFit, ...]
    rates: RatesPart
    network: NetworkPart | None = None
    wrong: int
    residual_median: float | None
    residual_p90: float | None
    wall_s: float
    warnings: tuple[BenchWarning, ...] = ()

    def write(self, folder: str | Path) -> Path:
        """Write `bench.json` into a folder and return its path."""
        path = Path(folder) / BENCH_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    def calibration(self) -> Calibration:
        """Return the calibration that a cluster file can name. Emulated collectives are left out."""
        kept = [f for f in self.fits if f.emulated is None and f.collective in COLLECTIVES]
        fits = tuple(Fit(**{name: getattr(fit, name) for name in Fit.model_fields}) for fit in kept)
        machine = MeasuredOn(
            gpu=self.cluster.gpu or "unknown",
            scale_up=self.cluster.scale_up or "unknown",
            fabric=self.cluster.fabric,
            devices=self.devices.count,
            date=self.date,
            jax=self.devices.jax,
            jaxlib=self.devices.jaxlib,
        )
        network = self.network and NetworkConstants(
            constants={one.name: one.value for one in self.network.constants},
            **self.network.model_dump(exclude={"constants"}),
        )
        return Calibration(fits, machine, Rates(**self.rates.model_dump()), network)


def render(report: BenchReport, *, title: str | None = None, rows: bool = True) -> RenderableType:
    """Return the benchmark for `rich.print`, 80 columns wide; `rows = False` leaves out the tables of all sizes."""
    measured = f"{report.date}, in {format_seconds(report.wall_s)}"
    about = (("devices", machine(report)), ("mesh", mesh_text(report.cluster, report.mesh)), ("measured", measured))
    parts: list[RenderableType] = [Text(f"{title}, bench" if title else "bench", "bold underline"), labelled(about)]
    for group in grouped(report.rows) if rows else ():
        styles = ["bold red" if row.wrong else "" for row in group]
        table = Table(_COLUMNS, [_row_cells(row) for row in group], styles)
        parts += [Padding(_group_title(group[0]), (1, 0, 0, 0)), table.terminal(gap=1, header="dim")]
    parts += [heading("fitted latency and bandwidth"), _fits(report.fits), Text(summary(report))]
    if report.network is not None:
        lines = network_lines(report.network)
        parts += [heading("constants of the network model"), *(Text(f"  {line}") for line in lines)]
    if rates := _rates(report):
        parts += [heading("sustained rates of one device"), *(Text(f"  {work}: {rate}") for work, rate in rates)]
    if report.warnings:
        parts += [heading("warnings"), *(Text(f"! {w.message}", "yellow") for w in report.warnings)]
    return Group(*parts)


def write_bench_html(report: BenchReport, path: str | Path, *, title: str | None = None) -> Path:
    """Write an HTML page with Plotly charts, which opens offline, and return its path."""
    sub = " · ".join((machine(report), f"mesh {mesh_text(report.cluster, report.mesh)}", report.date))
    page = Page(f"{title}: measured links" if title else "Measured links", sub)
    page.add(_cards(report), warning_panel([w.message for w in report.warnings]))
    for index, axes in enumerate(dict.fromkeys(row.axes for row in report.rows if row.axes)):
        page.add(_axis_section(report, axes, f"axis-{index}", page))
    page.add(_copy_section(report, page), _network_section(report), _rates_section(report))
    page.add(f"<footer>meshkit.bench/1 · {escape(summary(report))}</footer>")
    return page.write(path)


def grouped(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Return one list of rows per axis and collective; axes, collectives and sizes keep the order of measurement."""
    groups: dict[tuple, list[BenchRow]] = {}
    for row in rows:
        groups.setdefault((row.axes, row.collective), []).append(row)
    order = {axes: i for i, axes in enumerate(dict.fromkeys(row.axes for row in rows))}
    return sorted(groups.values(), key=lambda group: order[group[0].axes])


def _row_cells(row: BenchRow) -> tuple[str, ...]:
    error = None if row.fitted_time_s is None else row.fitted_time_s / row.time_s - 1
    return (
        f"{row.size_bytes}",
        f"{row.count}",
        row.dtype,
        _three_digits(row.time_s * 1e6),
        _gigabytes(row.algorithm_bandwidth_bytes_per_s),
        _gigabytes(row.bus_bandwidth_bytes_per_s),
        f"{row.wrong}",
        "-" if error is None else f"{100 * error:+.0f} %",
    )


def group_words(row: BenchRow | BenchFit) -> str:
    """Return `nvlink (nvlink4_nvswitch), 4 GPUs` or `infiniband (...), 2 domains x 4 GPUs`."""
    if row.link is None:
        return "inside each device"
    gpus = f"{row.gpus_per_domain} GPUs"
    shape = gpus if row.domains == 1 else f"{row.domains} domains" + (f" x {gpus}" if row.gpus_per_domain > 1 else "")
    return f"{row.link} ({row.fabric}), {shape}"


def collective_words(row: BenchRow | BenchFit) -> str:
    """Return `all-reduce`, or `reduce (emulated by all-reduce)` for a collective that XLA lacks."""
    return row.collective if row.emulated is None else f"{row.collective} (emulated by {row.emulated})"


def summary(report: BenchReport) -> str:
    """Return one line about all rows: how many elements were checked or wrong, and the errors of the fits."""
    checked = sum(row.checked for row in report.rows)
    wrong = "all of them equal numpy's" if report.wrong == 0 else f"{report.wrong} of them WRONG"
    fit = ""
    if report.residual_median is not None:
        errors = f"{format_percent(report.residual_median)} at the median, {format_percent(report.residual_p90)}"
        fit = f" Fitted time against measured: off by {errors} at the 90th percentile."
    return f"{len(report.rows)} cases, {format_count(checked).strip()} elements checked: {wrong}.{fit}"


def _rates(report: BenchReport) -> list[tuple[str, str]]:
    rates = report.rates
    lines = [(f"matmul {name}", _flops(rate)) for name, rate in rates.matmul_flops_per_s.items()]
    lines += [(f"attention {name}", _flops(rate)) for name, rate in rates.attention_flops_per_s.items()]
    if rates.memory_bytes_per_s is not None:
        lines.append(("memory, read and written", format_rate(rates.memory_bytes_per_s)))
    return lines


def network_lines(network: NetworkPart) -> list[str]:
    """Describe the network model's error before and after the fit, and the constants that the fit changed."""
    before, after = format_percent(network.error_before), format_percent(network.error_after)
    lines = [f"{network.points} collectives: median error {before} with shipped constants, {after} with these"]
    moved = [one for one in network.constants if abs(one.value / one.shipped - 1) > _MOVED]
    return [*lines, *(f"{one.name}: {one.value:.3g} (shipped: {one.shipped:.3g})" for one in moved)]


def machine(report: BenchReport) -> str:
    """Return `8 x cpu in 2 processes, jax 0.12.0, jaxlib 0.12.0`."""
    d = report.devices
    processes = f" in {d.processes} processes" if d.processes > 1 else ""
    return f"{d.count} x {d.kind}{processes}, jax {d.jax}, jaxlib {d.jaxlib}"


def _group_title(row: BenchRow) -> Text:
    title = Text(", ".join(row.axes) or "device", "bold cyan")
    title.append(f"  {collective_words(row)}", "bold")
    shape = f"{row.num_groups} x {row.group_size} GPUs" if row.axes else f"{row.num_groups} at once"
    return title.append(f"  {shape}", "dim")


def _fits(fits: Sequence[BenchFit]) -> RenderableType:
    if not fits:
        return Text("none: a fit needs two sizes", "dim")
    columns = (_COLLECTIVE, *_FIT_COLUMNS)
    groups = []
    for (axes, words), members in itertools.groupby(fits, lambda fit: (fit.axes, group_words(fit))):
        found = list(members)
        styles = ["yellow" if fit.residual_median > GOOD_FIT else "" for fit in found]
        table = Table(columns, [(collective_words(fit), *_fit_cells(fit)) for fit in found], styles)
        groups.append((Text(", ".join(axes), "bold cyan").append(f"  {words}", "dim"), table))
    return below_titles(columns, groups)


def _fit_cells(fit: BenchFit) -> tuple[str, ...]:
    error = format_percent(fit.residual_median)
    return format_seconds(fit.latency_s), format_rate(fit.bytes_per_s), str(fit.points), error


def _gigabytes(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else _three_digits(bytes_per_s / 1e9)


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _flops(flops_per_s: float) -> str:
    return f"{format_count(flops_per_s)}FLOP/s"


def bandwidth_chart(rows: Sequence[BenchRow], fits: Sequence[BenchFit]) -> dict:
    """Draw bus bandwidth against size, one colour per collective: measured points as markers, fits as dotted lines."""
    data = []
    measured = [group for group in grouped(rows) if group[0].bus_bandwidth_bytes_per_s is not None]
    for group, color in zip(measured, _COLORS * 2):
        name = collective_words(group[0])
        data.append(_marks(group, name, color))
        fit = next((f for f in fits if _is_fit_of(f, group[0])), None)
        if fit is not None:
            data.append(_line(group, fit, name, color))
    return {"data": data, "layout": _layout()}


def _is_fit_of(fit: BenchFit, row: BenchRow) -> bool:
    shapes = ((x.link, x.collective, x.gpus_per_domain, x.domains) for x in (fit, row))
    return len(set(shapes)) == 1


def _marks(rows: Sequence[BenchRow], name: str, color: str) -> dict:
    texts = [f"{format_bytes(r.size_bytes)}, {format_seconds(r.time_s)}, {r.wrong} wrong" for r in rows]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": [r.size_bytes for r in rows],
        "y": [(r.bus_bandwidth_bytes_per_s or 0.0) / 1e9 for r in rows],
        "customdata": texts,
        "hovertemplate": "%{y:.3~g} GB/s at %{customdata}<extra>" + escape(name) + "</extra>",
        "marker": {"color": color, "size": 7},
        "line": {"color": color, "width": 1.2},
    }


def _line(rows: Sequence[BenchRow], fit: BenchFit, name: str, color: str) -> dict:
    sizes = np.geomspace(rows[0].size_bytes, rows[-1].size_bytes, _POINTS_OF_A_LINE)
    wire = sizes * (rows[0].wire_bytes or 0.0) / rows[0].size_bytes
    rates = wire / (fit.latency_s + wire / fit.bytes_per_s) / 1e9
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name}, fitted",
        "legendgroup": name,
        "showlegend": False,
        "x": [float(f"{s:.6g}") for s in sizes],
        "y": [float(f"{r:.6g}") for r in rates],
        "hoverinfo": "skip",
        "line": {"color": color, "width": 1.5, "dash": "dot"},
    }


def _layout() -> dict:
    sizes = [2**exponent for exponent in range(10, 37, 4)]
    return frame(
        430,
        legend={"orientation": "v"},
        xaxis={**GRID, "type": "log", "tickvals": sizes, "ticktext": [_tick(s) for s in sizes]},
        yaxis={**GRID, "type": "log", "ticksuffix": " GB/s", "automargin": True, "dtick": 1},
        hoverlabel={"font": {"size": 12}},
    )


def _tick(size_bytes: int) -> str:
    """Return `16 KiB`, without decimals: every tick is a whole number of its unit."""
    number, unit = format_bytes(size_bytes).split(" ")
    return f"{float(number):g} {unit}"


def _cards(report: BenchReport) -> str:
    wrong = card(f"wrong results in {len(report.rows)} cases", f"{report.wrong}", css="bad" if report.wrong else "good")
    error = card("median error of latency + bandwidth", format_percent(report.residual_median))
    fastest: dict[str, BenchFit] = {}
    for fit in report.fits:
        if fit.collective == "all-reduce" and fit.bytes_per_s > getattr(fastest.get(fit.link), "bytes_per_s", 0.0):
            fastest[fit.link] = fit
    links = (card(f"all-reduce on {link}, bus", format_rate(fit.bytes_per_s)) for link, fit in fastest.items())
    return cards((wrong, error, *links))


def _axis_section(report: BenchReport, axes: tuple[str, ...], name: str, page: Page) -> str:
    rows = [row for row in report.rows if row.axes == axes]
    fits = [fit for fit in report.fits if any(_is_fit_of(fit, row) for row in rows)]
    note = (
        f"{group_words(rows[0])}, {rows[0].num_groups} groups at once. Bus bandwidth per GPU, one direction, as "
        "nccl-tests counts it. Dotted: latency + bandwidth as fitted."
    )
    fitted = Table((_COLLECTIVE, *_FIT_COLUMNS), [(collective_words(fit), *_fit_cells(fit)) for fit in fits])
    drawn = page.chart(name, bandwidth_chart(rows, fits))
    return section(f"Axis {', '.join(axes)}", note, drawn, fitted.html(), _all_rows(rows))


def _copy_section(report: BenchReport, page: Page) -> str:
    rows = [row for row in report.rows if not row.axes]
    if not rows:
        return ""
    note = "Bandwidth is size / time, on all devices at once. Memory carries twice these bytes: read and written."
    return section("Copy on the device", note, page.chart("copy", bandwidth_chart(rows, ())), _all_rows(rows))


def _rates_section(report: BenchReport) -> str:
    rows = _rates(report)
    if not rows:
        return ""
    note = "One device alone, on random data, long enough to reach its sustained clock."
    return section("Sustained rates", note, Table([*text_columns("work"), *number_columns("rate")], rows).html())


def _network_section(report: BenchReport) -> str:
    if report.network is None:
        return ""
    note, *_ = network_lines(report.network)
    rows = [(one.name, f"{one.value:.3g}", f"{one.shipped:.3g}") for one in report.network.constants]
    columns = [*text_columns("constant"), *number_columns("here", "shipped")]
    return section("Constants of the network model", f"{note}.", Table(columns, rows).html())


def _all_rows(rows: Sequence[BenchRow]) -> str:
    cells: list[Sequence[Cell]] = [
        (collective_words(row), *_row_cells(row)) for group in grouped(rows) for row in group
    ]
    return folded(f"All {len(rows)} measurements", Table((_COLLECTIVE, *_COLUMNS), cells).html())
