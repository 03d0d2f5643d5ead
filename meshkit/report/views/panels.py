"""The panels of the report's page that stand on a table: the step, communication, kernels, stragglers.

Each is a function of a `Shown` (a report and what the page calls it) that returns HTML, or "" where nothing is known.
Every number is a `Value`: it says where in report.json it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from meshkit.report.parts import Part
from meshkit.report.schema import CommunicationPart, OpPart, Report
from meshkit.report.views.page import Document, Value, cells, inline, table
from meshkit.report.views.words import axes_text, group_text, link_text, row_name, short_source
from meshkit.units import format_bytes, format_percent, format_rate, format_seconds

_MAX_OPS = 40
_MAX_KERNELS = 40
_MAX_STRAGGLERS = 16
_SPREAD = ("min", "median", "p90", "max")


@dataclass(frozen=True)
class Shown:
    """A report on the page, and its name there."""

    report: Report
    name: str

    @cached_property
    def number(self) -> Document:
        """The numbers of its report.json, by path."""
        return Document(self.name, self.report)


def count(value: float | None) -> str:
    """A count: `64`, or `1.5` where it is a mean of unequal devices."""
    return "-" if value is None else f"{value:g}"


def yes_no(value: bool | None) -> str:
    """A flag in words."""
    return "-" if value is None else "yes" if value else "no"


def step_table(shown: Shown) -> str:
    """The step's parts: mean, share of the step, and how they vary over devices and steps."""
    report, step = shown.report, shown.report.step
    lines = [
        ("step", "time_s"),
        ("compute", "compute_s"),
        ("exposed communication", "exposed_s"),
        ("memory copies", "other_s"),
        ("idle", "idle_s"),
        ("communication", "communication_s"),
        ("of it under compute", "overlapped_s"),
    ]
    if step.bubble_s:
        lines.append(("pipeline bubble, inside compute", "bubble_s"))
    measured = report.spread.time_s.median is not None
    rows = []
    for label, key in lines:
        value = getattr(step, key)
        share = format_percent(value / step.time_s) if value is not None and step.time_s else "-"
        numbers: list[str | Value] = [shown.number(f"step.{key}", format_seconds), share]
        if measured:
            numbers += _spread_cells(shown, key)
        rows.append(cells("td", (label,), numbers))
    columns = ("mean", "of the step", *(("min", "median", "p90", "max", "slowest") if measured else ()))
    return table(cells("th", ("per step and GPU",), columns), rows)


def _spread_cells(shown: Shown, key: str) -> list[str | Value]:
    spread = getattr(shown.report.spread, key, None)
    if spread is None or spread.max is None:
        return [""] * (len(_SPREAD) + 1)
    where = f"GPU {spread.worst_device}, step {spread.worst_step}"
    return [*(shown.number(f"spread.{key}.{name}", format_seconds) for name in _SPREAD), where]


def links_table(shown: Shown) -> str:
    """Communication by mesh axis and link: the sums over the kinds of collectives."""
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(shown.report.communication):
        groups.setdefault((row.axes, link_text(row)), []).append(i)
    time_s = shown.report.step.time_s
    rows = []
    for (axes, link), members in groups.items():
        at = f"communication.{'+'.join(map(str, members))}"
        exposed = shown.number(f"{at}.exposed_s", format_seconds, "exposed")
        share = format_percent(exposed.value / time_s) if exposed.value is not None and time_s else "-"
        numbers = (
            shown.number(f"{at}.time_s", format_seconds),
            shown.number(f"{at}.overlapped_s", format_seconds),
            exposed,
            share,
            shown.number(f"{at}.wire_bytes_nvlink", format_bytes),
            shown.number(f"{at}.wire_bytes_infiniband", format_bytes),
        )
        rows.append((-(exposed.value or 0), cells("td", (axes_text(axes), link), numbers)))
    columns = ("time", "overlapped", "exposed", "of the step", "sent, nvlink", "sent, infiniband")
    return table(cells("th", ("axes", "slowest link"), columns), [row for _, row in sorted(rows)])


def rows_table(shown: Shown) -> str:
    """Every row of communication; waiting and transfer apart where they are known."""
    split = any(row.wait_s is not None for row in shown.report.communication)
    columns = [
        ("count", "count", count),
        ("payload", "payload_bytes", format_bytes),
        ("time", "time_s", format_seconds),
    ]
    columns += [("overlapped", "overlapped_s", format_seconds), ("exposed", "exposed_s", format_seconds)]
    columns.append(("alone", "sole_exposed_s", format_seconds))
    if split:
        columns += [("transfer", "transfer_s", format_seconds), ("wait", "wait_s", format_seconds)]
    columns.append(("bus bw", "bus_bandwidth_bytes_per_s", format_rate))
    if any(row.bus_bandwidth_peak_bytes_per_s is not None for row in shown.report.communication):
        columns.append(("its peak", "bus_bandwidth_peak_bytes_per_s", format_rate))
    rows = []
    for i, row in enumerate(shown.report.communication):
        at = f"communication.{i}"
        numbers = [_number(shown, f"{at}.{key}", form) for _, key, form in columns]
        rows.append(cells("td", (axes_text(row.axes), link_text(row), group_text(row), row_name(row)), numbers))
    head = cells("th", ("axes", "link", "groups", "collective"), [label for label, *_ in columns])
    return table(head, rows)


def _number(shown: Shown, key: str, form: Callable[[Any], str]) -> Value:
    return shown.number(key, form, "exposed" if key.endswith(".exposed_s") else "")


def ops_table(shown: Shown) -> str:
    """Single collectives ranked by exposed seconds, with the model code that caused them."""
    ops = [(i, j, row, op) for i, row in enumerate(shown.report.communication) for j, op in enumerate(row.ops)]
    if not ops:
        return ""
    ops.sort(key=lambda item: (-(item[3].exposed_s or 0), -(item[3].busy_s or 0)))
    head = cells("th", ("operation", "axes"), ("exposed", "busy", "count", "payload")) + cells("th", ("caused by",), ())
    rows = [_op_row(shown, f"communication.{i}.ops.{j}", row, op) for i, j, row, op in ops[:_MAX_OPS]]
    more = len(ops) - _MAX_OPS
    rest = f'<p class="note">and {more} more, in report.json</p>' if more > 0 else ""
    title = f"Exposed seconds of the {len(ops)} single collectives, ranked"
    return f"<details open><summary>{title}</summary>{table(head, rows)}{rest}</details>"


def _op_row(shown: Shown, at: str, row: CommunicationPart, op: OpPart) -> str:
    numbers = (
        shown.number(f"{at}.exposed_s", format_seconds, "exposed"),
        shown.number(f"{at}.busy_s", format_seconds),
        shown.number(f"{at}.count", count),
        shown.number(f"{at}.payload_bytes", format_bytes),
    )
    return cells("td", (op.name, axes_text(row.axes)), numbers) + source_cell(op.source, op.line)


def source_cell(source: str | None, line: str | None) -> str:
    """Line of source and op_name path, the whole path as a tip."""
    where = f"<b>{escape(line)}</b> " if line else ""
    tip = f' title="{escape(source)}"' if source else ""
    return f'<td class="source"{tip}>{where}<code>{escape(short_source(source) or ("" if line else "-"))}</code></td>'


def kernels_table(shown: Shown) -> str:
    """Compute by kind of work, and the instructions that take the most time."""
    part = shown.report.kernels
    if part is None or not part.classes:
        return ""
    kinds = [
        cells(
            "td",
            (c.kind,),
            (
                shown.number(f"kernels.classes.{i}.count", count),
                shown.number(f"kernels.classes.{i}.time_s", format_seconds),
                shown.number(f"kernels.classes.{i}.busy_s", format_seconds),
            ),
        )
        for i, c in enumerate(part.classes)
    ]
    head = cells("th", ("kind of work",), ("kernels a step", "time", "busy"))
    ops = [(i, j, op, c.kind) for i, c in enumerate(part.classes) for j, op in enumerate(c.ops)]
    ops.sort(key=lambda item: -(item[2].busy_s or 0))
    rows = []
    for i, j, op, kind in ops[:_MAX_KERNELS]:
        at = f"kernels.classes.{i}.ops.{j}"
        numbers = (shown.number(f"{at}.busy_s", format_seconds), shown.number(f"{at}.count", count))
        rows.append(cells("td", (op.name, kind), numbers) + source_cell(op.source, op.line))
    listing = table(cells("th", ("operation", "kind"), ("busy", "count")) + cells("th", ("caused by",), ()), rows)
    title = f"The {len(rows)} operations with the most busy seconds"
    return f"{table(head, kinds)}<details><summary>{title}</summary>{listing}</details>"


def memory_table(shown: Shown) -> str:
    """What the fullest GPU holds; what is unknown is left out."""
    lines = [
        (label, key)
        for label, key in (
            ("peak", "peak_bytes"),
            ("parameters", "parameters_bytes"),
            ("optimizer state", "optimizer_bytes"),
            ("gradients", "gradients_bytes"),
            ("activations", "activations_bytes"),
            ("temporaries", "temporary_bytes"),
            ("reserved", "reserved_bytes"),
            ("of it cuDNN workspace", "cudnn_workspace_bytes"),
            ("of it fragmentation", "fragmentation_bytes"),
            ("of it NCCL buffers", "nccl_bytes"),
            ("of it CUDA context", "context_bytes"),
            ("budget", "pool_bytes"),
            ("capacity", "capacity_bytes"),
        )
        if getattr(shown.report.memory, key) is not None
    ]
    rows = [cells("td", (label,), (shown.number(f"memory.{key}", format_bytes),)) for label, key in lines]
    return f"<details><summary>In numbers</summary>{table(cells('th', ('per GPU',), ('',)), rows)}</details>"


def stragglers_table(shown: Shown) -> str:
    """Devices ranked by the wait that they cause."""
    part = shown.report.stragglers
    if part is None or not part.devices:
        return ""
    rows = []
    for i, device in enumerate(part.devices[:_MAX_STRAGGLERS]):
        at = f"stragglers.devices.{i}"
        where = ", ".join(
            text for text in (device.host, None if device.process is None else f"process {device.process}") if text
        )
        numbers = (
            shown.number(f"{at}.caused_wait_s", format_seconds),
            shown.number(f"{at}.waited_s", format_seconds),
            shown.number(f"{at}.last_share", format_percent),
            shown.number(f"{at}.compute_s", format_seconds),
        )
        rows.append(cells("td", (f"GPU {device.device}", where), numbers))
    columns = ("wait caused", "waited itself", "came last", "its compute")
    return table(cells("th", ("device", "where"), columns), rows)


_QUALITY: Sequence[tuple[str, str, Callable[[Any], str]]] = (
    ("operations read", "events", lambda v: "-" if v is None else f"{v:,}"),
    ("events that the profiler lost", "dropped_events", count),
    ("communication whose instruction is known", "mapped_share", format_percent),
    ("communication on mesh axes", "axis_mapped_share", format_percent),
    ("kernels whose instruction is known", "kernels_mapped_share", format_percent),
    ("inside CUDA graphs, a step", "graph_s", format_seconds),
    ("kernels that compute and communicate, a step", "fused_s", format_seconds),
    ("rows by axis withheld", "axes_withheld", yes_no),
    ("executions at the edges left out", "partial_steps", count),
    ("clocks", "clocks", count),
    ("largest clock offset taken out", "clock_offset_s", format_seconds),
    ("ends of one collective still differ by", "clock_residual_s", format_seconds),
    ("waiting a step, by the shortest instances", "wait_clock_free_s", format_seconds),
    ("waiting a step, by start times", "wait_clocked_s", format_seconds),
    ("the capture added to a step", "overhead_s", format_seconds),
)


def quality_table(shown: Shown) -> str:
    """How far the measurement can be believed; what is unknown is left out."""
    part, window = shown.report.quality, shown.report.window
    lines = [("processes seen", f"{window.processes_seen} of {window.processes_expected}")]
    if part is not None:
        for label, key, form in _QUALITY:
            if getattr(part, key) is not None:
                lines.append((label, inline(shown.number(f"quality.{key}", form))))
        lines += [(label, text) for label, text in _quality_words(part)]
    rows = [f"<td>{escape(label)}</td><td>{text}</td>" for label, text in lines]
    return table(cells("th", ("of the trace", ""), ()), rows)


def _quality_words(part: Part) -> list[tuple[str, str]]:
    words = {"clocked": "by start times", "clock_free": "by the shortest instance of each collective"}
    found = []
    for label, key in (("processes without a trace", "missing_processes"), ("damaged traces", "damaged_processes")):
        numbers = getattr(part, key)
        if numbers:
            found.append((label, escape(", ".join(map(str, numbers[:16])) + (", ..." if len(numbers) > 16 else ""))))
    method = getattr(part, "wait_method", None)
    return [*found, ("waiting told from transfer", words[method])] if method else found
