"""A benchmark on a terminal: nccl-tests' table for each axis and collective, then the fits.

Units are nccl-tests': bytes, us, GB/s of 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshkit.units import format_count, format_percent, format_rate, format_seconds
from meshkit.verbs.bench.bench_report import BenchFit, BenchReport, BenchRow

COLUMNS = ("size", "count", "type", "time", "algbw", "busbw", "#wrong", "fit")
UNITS = ("B", "elements", "", "us", "GB/s", "GB/s", "", "error")
_WIDTHS = (11, 11, 8, 10, 8, 8, 7, 8)
_FIT_COLUMNS = (("collective", 47), ("latency", 7), ("bus bw", 9), ("points", 6), ("error", 7))
_GOOD_FIT = 0.3


def render(report: BenchReport, *, title: str | None = None, rows: bool = True) -> RenderableType:
    """The whole benchmark for `rich.print`, 80 columns; `rows = False` leaves out the single sizes."""
    parts: list[RenderableType] = [_headline(report, title)]
    if rows:
        for group in grouped(report.rows):
            parts += [Padding(_group_title(group[0]), (1, 0, 0, 0)), _rows_table(group)]
    parts += [_heading("fitted latency and bandwidth"), _fits_table(report.fits), Text(summary(report))]
    if rates_lines(report):
        parts += [_heading("sustained rates of one device"), *(Text(f"  {line}") for line in rates_lines(report))]
    if report.warnings:
        parts += [_heading("warnings"), *(Text(f"! {w.message}", "yellow") for w in report.warnings)]
    return Group(*parts)


def grouped(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Rows by axis and collective, in the order of measurement, sizes ascending."""
    groups: dict[tuple, list[BenchRow]] = {}
    for row in sorted(rows, key=lambda row: bool(row.axes)):  # copies first; the sort is stable
        groups.setdefault((row.axes, row.collective), []).append(row)
    order = {axes: i for i, axes in enumerate(dict.fromkeys(row.axes for row in rows))}
    return sorted(groups.values(), key=lambda group: order[group[0].axes])


def row_texts(row: BenchRow) -> tuple[str, ...]:
    """The cells of one size, under COLUMNS in UNITS."""
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
    """`nvlink (nvlink4_nvswitch), 4 GPUs` or `infiniband (...), 2 domains x 4 GPUs`."""
    if row.link is None:
        return "inside each device"
    gpus = f"{row.gpus_per_domain} GPUs"
    shape = gpus if row.domains == 1 else f"{row.domains} domains" + (f" x {gpus}" if row.gpus_per_domain > 1 else "")
    return f"{row.link} ({row.fabric}), {shape}"


def collective_words(row: BenchRow | BenchFit) -> str:
    """`all-reduce`; of one that XLA does not have, with what stands in for it."""
    return row.collective if row.emulated is None else f"{row.collective} (emulated by {row.emulated})"


def summary(report: BenchReport) -> str:
    """One line: correctness and fit over everything."""
    checked = sum(row.checked for row in report.rows)
    wrong = "every result is numpy's" if report.wrong == 0 else f"{report.wrong} of them WRONG"
    fit = ""
    if report.residual_median is not None:
        errors = f"{format_percent(report.residual_median)} at the median, {format_percent(report.residual_p90)}"
        fit = f" Fitted time against measured: off by {errors} at the 90th percentile."
    return f"{len(report.rows)} cases, {format_count(checked).strip()} elements checked: {wrong}.{fit}"


def rates_lines(report: BenchReport) -> list[str]:
    """What one device sustains, a line each."""
    rates = report.rates
    lines = [f"matmul {name}: {_flops(rate)}" for name, rate in rates.matmul_flops_per_s.items()]
    lines += [f"attention {name}: {_flops(rate)}" for name, rate in rates.attention_flops_per_s.items()]
    if rates.memory_bytes_per_s is not None:
        lines.append(f"memory, read and written: {format_rate(rates.memory_bytes_per_s)}")
    return lines


def machine(report: BenchReport) -> str:
    """`8 x cpu in 2 processes, jax 0.12`."""
    d = report.devices
    processes = f" in {d.processes} processes" if d.processes > 1 else ""
    return f"{d.count} x {d.kind}{processes}, jax {d.jax}, jaxlib {d.jaxlib}"


def mesh_words(report: BenchReport) -> str:
    """`data 2 (infiniband) x fsdp 4`."""
    parts = []
    for axis in report.mesh:
        across, inside = axis.infiniband or 1, axis.nvlink or 1
        where = "" if across == 1 else " (infiniband)" if inside == 1 else f" (nvlink {inside} x infiniband {across})"
        parts.append(f"{axis.axis} {axis.size}{where}")
    return " x ".join(parts)


def _headline(report: BenchReport, title: str | None) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in (
        ("devices", machine(report)),
        ("mesh", mesh_words(report)),
        ("measured", f"{report.date}, in {format_seconds(report.wall_s)}"),
    ):
        table.add_row(label, text)
    return Group(Text(f"{title}, bench" if title else "bench", "bold underline"), table)


def _group_title(row: BenchRow) -> Text:
    title = Text(", ".join(row.axes) or "device", "bold cyan")
    title.append(f"  {collective_words(row)}", "bold")
    shape = f"{row.num_groups} x {row.group_size} GPUs" if row.axes else f"{row.num_groups} at once"
    return title.append(f"  {shape}", "dim")


def _rows_table(rows: Sequence[BenchRow]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for width in _WIDTHS:
        table.add_column(width=width - 1, justify="right", overflow="fold")
    table.add_row(*COLUMNS, style="dim")
    table.add_row(*UNITS, style="dim")
    for row in rows:
        table.add_row(*row_texts(row), style="bold red" if row.wrong else "")
    return table


def _fits_table(fits: Sequence[BenchFit]) -> RenderableType:
    if not fits:
        return Text("none: a fit needs two sizes", "dim")
    parts: list[RenderableType] = [_fit_line([name for name, _ in _FIT_COLUMNS], "dim")]
    shape = None
    for fit in fits:
        if (fit.axes, group_words(fit)) != shape:
            shape = fit.axes, group_words(fit)
            parts.append(Text(", ".join(fit.axes), "bold cyan").append(f"  {shape[1]}", "dim"))
        style = "yellow" if fit.residual_median > _GOOD_FIT else ""
        parts.append(_fit_line([f"  {collective_words(fit)}", *fit_texts(fit)], style))
    return Group(*parts)


def _fit_line(texts: Sequence[str], style: str) -> RenderableType:
    """One line; all lines have the same widths, so that titles may stand between them."""
    table = Table.grid(padding=(0, 1))
    for index, (_, width) in enumerate(_FIT_COLUMNS):
        table.add_column(width=width, justify="right" if index else "left", style=style, overflow="fold")
    table.add_row(*texts)
    return table


def fit_texts(fit: BenchFit) -> tuple[str, ...]:
    """Latency, bandwidth, number of sizes and median error of a fit."""
    error = format_percent(fit.residual_median)
    return format_seconds(fit.latency_s), format_rate(fit.bytes_per_s), str(fit.points), error


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, "bold"), (1, 0, 0, 0))


def _gigabytes(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else _three_digits(bytes_per_s / 1e9)


def _three_digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _flops(flops_per_s: float) -> str:
    return f"{format_count(flops_per_s)}FLOP/s"
