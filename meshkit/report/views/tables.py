"""Make the tables of a report and of a comparison. The HTML page shows all columns, the terminal some of them.

The tables of a report are functions of a `Shown` (the report and its name on the page). Every number is a `Value`,
which has the number's key in the JSON. Columns and lines without any known number are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshkit.report.compare import Comparison, Pair, compare
from meshkit.report.schema import QualityPart, Report
from meshkit.report.views.page import (
    Cell,
    Column,
    Numbers,
    Source,
    Table,
    Value,
    folded,
    number_columns,
    section,
    text_columns,
)
from meshkit.report.views.words import (
    axes_text,
    goodput_shares,
    group_text,
    link_text,
    links,
    names_of,
    row_name,
    share_text,
)
from meshkit.units import format_bytes, format_count, format_percent, format_rate, format_seconds

_MAX_KERNELS = 40
_MAX_STRAGGLERS = 16
_SPARES = (("hosts", str), ("gpus", str), ("goodput", format_percent), ("goodput_of_all", format_percent))
_SPREAD = ("min", "median", "p90", "max")
Form = Callable[[Any], str]
# Lines of a table: (label, key, format).
Labelled = Sequence[tuple[str, str, Form]]


@dataclass(frozen=True)
class Shown:
    """A report, and its name on the page."""

    report: Report
    name: str = ""

    @cached_property
    def number(self) -> Numbers:
        """Gives the number at a path in report.json."""
        return Numbers(self.name, self.report)

    def numbers(self, at: str, columns: Iterable[tuple[str, Form]]) -> list[Value]:
        """Return the numbers of some keys below a path; exposed seconds are highlighted."""
        return [self.number(f"{at}.{key}", form, "exposed" if key == "exposed_s" else "") for key, form in columns]

    def known(self, at: str, lines: Labelled) -> list[tuple[str, Cell]]:
        """Return (label, number) of the lines whose number is known; the keys are below the path `at`."""
        found = ((label, self.number(f"{at}.{key}", form)) for label, key, form in lines)
        return [(label, number) for label, number in found if number.value is not None]


def _count(value: float | None) -> str:
    """Return a count as text: `64`, or `1.5` for a mean of unequal devices."""
    return "-" if value is None else f"{value:g}"


def step_table(shown: Shown) -> Table:
    """Return the step's parts: mean, share of the step, and if measured, the spread over devices and steps."""
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
        spread = _spread_cells(shown, key) if measured else []
        rows.append(
            [label, shown.number(f"step.{key}", format_seconds), share_text(getattr(step, key), step.time_s), *spread]
        )
    columns = number_columns("mean", "of the step", *((*_SPREAD, "slowest") if measured else ()))
    return Table([*text_columns(f"per step and {report.device}"), *columns], rows)


def _spread_cells(shown: Shown, key: str) -> list[Cell]:
    spread = getattr(shown.report.spread, key, None)
    if spread is None or spread.max is None:
        return [""] * (len(_SPREAD) + 1)
    where = f"{shown.report.device} {spread.worst_device}, step {spread.worst_step}"
    return [*(shown.number(f"spread.{key}.{name}", format_seconds) for name in _SPREAD), where]


def links_table(shown: Shown) -> Table:
    """Return communication by mesh axis and link, summed over kinds of collectives, the most exposed first."""
    communication, groups = shown.report.communication, dict[tuple, list[int]]()
    keys = ("wire_bytes_nvlink", "wire_bytes_infiniband")
    crossed = [
        (key, link)
        for key, link in zip(keys, links(shown.report.cluster))
        if any(getattr(r, key) for r in communication)
    ]
    for i, row in enumerate(communication):
        groups.setdefault((row.axes, link_text(row)), []).append(i)
    rows = []
    for (axes, link), members in groups.items():
        at = f"communication.{'+'.join(map(str, members))}"
        seconds = [("time_s", format_seconds), ("overlapped_s", format_seconds), ("exposed_s", format_seconds)]
        sent = [(key, format_bytes) for key, _ in crossed]
        exposed_s = shown.number.value(f"{at}.exposed_s")
        share = share_text(exposed_s, shown.report.step.time_s)
        row = [axes_text(axes), link, *shown.numbers(at, seconds), share, *shown.numbers(at, sent)]
        rows.append((-(exposed_s or 0), row))
    rows.sort(key=lambda item: item[0])
    names = [f"sent, {link}" for _, link in crossed]
    columns = number_columns("time", "overlapped", "exposed", "of the step", *names)
    return Table([*text_columns("axes", "slowest link"), *columns], [row for _, row in rows])


def rows_table(shown: Shown) -> Table:
    """Return every row of communication as in report.json, with waiting and transfer if they are known."""
    communication = shown.report.communication
    columns: Labelled = (
        ("count", "count", _count),
        ("payload", "payload_bytes", format_bytes),
        ("time", "time_s", format_seconds),
        ("overlapped", "overlapped_s", format_seconds),
        ("exposed", "exposed_s", format_seconds),
        ("of it waiting", "exposed_wait_s", format_seconds),
        ("alone", "sole_exposed_s", format_seconds),
        ("transfer", "transfer_s", format_seconds),
        ("wait", "wait_s", format_seconds),
        ("bus bw", "bus_bandwidth_bytes_per_s", format_rate),
        ("its peak", "bus_bandwidth_peak_bytes_per_s", format_rate),
    )
    if all(row.time_s is None for row in communication):  # Compute is unknown, so show durations instead of shares.
        columns = [("time", "busy_s", format_seconds) if column[0] == "time" else column for column in columns]
    if all(row.wait_s is None for row in communication):
        columns = [column for column in columns if column[0] not in ("transfer", "wait", "of it waiting")]
    if all(row.bus_bandwidth_peak_bytes_per_s is None for row in communication):
        columns = [column for column in columns if column[0] != "its peak"]
    keys = [(key, form) for _, key, form in columns]
    rows = [
        [
            axes_text(r.axes),
            link_text(r),
            group_text(r, shown.report.device),
            row_name(r),
            *shown.numbers(f"communication.{i}", keys),
        ]
        for i, r in enumerate(communication)
    ]
    heads = text_columns("axes", "link", "groups", "collective")
    return Table([*heads, *number_columns(*(label for label, *_ in columns))], rows)


def ops_table(shown: Shown) -> Table:
    """Return single collectives, the most exposed first, with the model code that caused them."""
    ops = [(i, j, row, op) for i, row in enumerate(shown.report.communication) for j, op in enumerate(row.ops)]
    ops.sort(key=lambda item: (-(item[3].exposed_s or 0), -(item[3].busy_s or 0)))
    keys = (
        ("exposed_s", format_seconds),
        ("busy_s", format_seconds),
        ("count", _count),
        ("payload_bytes", format_bytes),
    )
    rows = [
        [
            op.name, axes_text(row.axes), *shown.numbers(f"communication.{i}.ops.{j}", keys),
            Source(op.source, op.line, op.combined_text()),
        ]
        for i, j, row, op in ops
    ]  # fmt: skip
    columns = number_columns("exposed", "busy", "count", "payload")
    return Table([*text_columns("operation", "axes"), *columns, *text_columns("caused by")], rows)


def kinds_table(shown: Shown) -> Table:
    """Return compute by kind of work."""
    kinds = shown.report.kernels.classes if shown.report.kernels else ()
    keys = (("count", _count), ("time_s", format_seconds), ("busy_s", format_seconds))
    rows = [[c.kind, *shown.numbers(f"kernels.classes.{i}", keys)] for i, c in enumerate(kinds)]
    return Table([*text_columns("kind of work"), *number_columns("kernels a step", "time", "busy")], rows)


def kernels_table(shown: Shown) -> Table:
    """Return the compute instructions with the most busy seconds."""
    kinds = shown.report.kernels.classes if shown.report.kernels else ()
    ops = [(i, j, op, c.kind) for i, c in enumerate(kinds) for j, op in enumerate(c.ops)]
    ops.sort(key=lambda item: -(item[2].busy_s or 0))
    keys = (("busy_s", format_seconds), ("count", _count))
    rows = [
        [op.name, kind, *shown.numbers(f"kernels.classes.{i}.ops.{j}", keys), Source(op.source, op.line)]
        for i, j, op, kind in ops[:_MAX_KERNELS]
    ]
    columns = (*text_columns("operation", "kind"), *number_columns("busy", "count"), *text_columns("caused by"))
    return Table(columns, rows)


_MEMORY: Labelled = (
    ("peak", "peak_bytes", format_bytes),
    ("XLA's count", "program_bytes", format_bytes),
    ("parameters", "parameters_bytes", format_bytes),
    ("optimizer state", "optimizer_bytes", format_bytes),
    ("gradients", "gradients_bytes", format_bytes),
    ("activations", "activations_bytes", format_bytes),
    ("temporaries", "temporary_bytes", format_bytes),
    ("reserved", "reserved_bytes", format_bytes),
    ("of it cuDNN workspace", "cudnn_workspace_bytes", format_bytes),
    ("of it fragmentation", "fragmentation_bytes", format_bytes),
    ("of it NCCL buffers", "nccl_bytes", format_bytes),
    ("of it CUDA context", "context_bytes", format_bytes),
    ("budget", "pool_bytes", format_bytes),
    ("capacity", "capacity_bytes", format_bytes),
)


def memory_table(shown: Shown) -> Table:
    """Return the parts of the fullest GPU's memory, as far as known."""
    return Table([*text_columns(f"per {shown.report.device}"), Column()], shown.known("memory", _MEMORY))


def stragglers_table(shown: Shown) -> Table:
    """Return the stragglers of the report, with the waits that they cause and the reasons why they are late."""
    devices = shown.report.stragglers.devices if shown.report.stragglers else ()
    columns: Labelled = (
        ("delays the others by", "delay_s", format_seconds),
        ("wait caused, added up", "caused_wait_s", format_seconds),
        ("waited itself", "waited_s", format_seconds),
        ("came last", "last_share", format_percent),
        ("its compute", "compute_s", format_seconds),
    )
    keys = [(key, form) for _, key, form in columns]
    rows = []
    for i, device in enumerate(devices[:_MAX_STRAGGLERS]):
        process = None if device.process is None else f"process {device.process}"
        where = ", ".join(text for text in (device.host, process) if text)
        late: list[Cell] = ["", ""]
        if device.late:
            behind = shown.number(f"stragglers.devices.{i}.late.behind_s", format_seconds)
            late = [behind, ", ".join(name.replace("_", " ") for name in device.late.causes)]
        numbers = shown.numbers(f"stragglers.devices.{i}", keys)
        rows.append([f"{shown.report.device} {device.device}", where, *numbers, *late])
    labels = (*(label for label, *_ in columns), "behind the usual")
    return Table([*text_columns("device", "where"), *number_columns(*labels), *text_columns("by")], rows)


_QUALITY: Labelled = (
    ("operations read", "events", lambda v: "-" if v is None else f"{v:,}"),
    ("events that the profiler lost", "dropped_events", _count),
    ("communication whose instruction is known", "mapped_share", format_percent),
    ("communication on mesh axes", "axis_mapped_share", format_percent),
    ("kernels whose instruction is known", "kernels_mapped_share", format_percent),
    ("in CUDA graphs without an instruction, a step", "graph_s", format_seconds),
    ("kernels that compute and communicate, a step", "fused_s", format_seconds),
    ("rows by axis withheld", "axes_withheld", lambda v: "yes" if v else "no"),
    ("executions at the edges left out", "partial_steps", _count),
    ("clocks", "clocks", _count),
    ("largest clock offset taken out", "clock_offset_s", format_seconds),
    ("ends of one collective still differ by", "clock_residual_s", format_seconds),
    ("waiting a step, by the shortest durations", "wait_clock_free_s", format_seconds),
    ("waiting a step, by start times", "wait_clocked_s", format_seconds),
    ("the capture added to a step", "overhead_s", format_seconds),
)


def quality_table(shown: Shown) -> Table:
    """Return the data quality of a measurement."""
    part, window = shown.report.quality or QualityPart(), shown.report.window
    rows: list[tuple[str, Cell]] = [("processes seen", f"{window.processes_seen} of {window.processes_expected}")]
    rows += shown.known("quality", _QUALITY)
    for label, processes in (
        ("processes without a trace", part.missing_processes),
        ("damaged traces", part.damaged_processes),
    ):
        if processes:
            rows.append((label, ", ".join(map(str, processes[:16])) + (", ..." if len(processes) > 16 else "")))
    if part.wait_method:
        how = {"clocked": "by start times", "clock_free": "by the shortest duration in each collective"}
        rows.append(("waiting told from transfer", how[part.wait_method]))
    return Table(text_columns("of the trace", ""), rows)


def goodput_table(shown: Shown) -> Table:
    """Return the parts of the run's wall time."""
    part = shown.report.goodput
    if part is None:
        return Table((), ())
    rows = [
        (s.label, shown.number(f"{s.key}_s", format_seconds), share_text(s.value, part.wall_s))
        for s in goodput_shares(part)
    ]
    for label, key, form in (
        ("wall time", "wall_s", format_seconds),
        ("goodput", "share", format_percent),
        ("attempts", "attempts", _count),
        ("steps made again", "lost_steps", _count),
    ):
        rows.append((label, shown.number(f"goodput.{key}", form), ""))
    return Table([*text_columns("of the run"), *number_columns("", "of the wall time")], rows)


def spares_table(shown: Shown) -> Table:
    """Return goodput by number of spare hosts."""
    part = shown.report.failures
    if part is None:
        return Table((), ())
    each = "spare hosts" if all(row.pools == 1 for row in part.spares) else "spare hosts a domain"
    rows = [
        [shown.number(f"failures.spares.{i}.{key}", form) for key, form in _SPARES] for i in range(len(part.spares))
    ]
    return Table(number_columns(each, "GPUs", "goodput", "of all GPUs"), rows)


def pipeline_table(shown: Shown) -> Table:
    """Return the bubble, the ticks and the permutes of a pipeline."""
    lines: Labelled = (
        ("bubble, inside compute", "step.bubble_s", format_seconds),
        ("bubble, share of the step", "step.bubble_fraction", format_percent),
        ("bubble, share of the layers' work", "pipeline.bubble_fraction", format_percent),
        ("executed / useful FLOP of the layers", "pipeline.executed_over_useful", lambda v: f"{v:.4f}"),
        ("warm-up ticks", "pipeline.warmup_ticks", _count),
        ("steady ticks", "pipeline.steady_ticks", _count),
        ("drain ticks", "pipeline.drain_ticks", _count),
        ("inputs of chunks kept, at most", "pipeline.slots", _count),
        ("layers of padding", "pipeline.padding_layers", _count),
        ("permutes between stages", "pipeline.permute_count", _count),
        ("their time", "pipeline.permute_s", format_seconds),
        ("of it exposed", "pipeline.permute_exposed_s", format_seconds),
    )
    rows = [(label, shown.number(key, form)) for label, key, form in lines]
    return Table([*text_columns(""), Column()], rows)


DOCUMENT = "compare"
# (label, key of a `Pair`, format, whether a missing value counts as zero; if not, it is unknown).
Line = tuple[str, str, Form, bool]
_OPS_COMPARED = 12  # The most rows on a terminal.
_OPS_COMPARED_OF_PAGE = 30
_NOTABLE = 0.1  # A ratio that differs from 1 by more than this is printed in bold.
_QUANTITIES: Sequence[Line] = (
    ("step time", "step.time_s", format_seconds, False),
    ("  compute", "step.compute_s", format_seconds, False),
    ("  exposed communication", "step.exposed_s", format_seconds, False),
    ("  memory copies", "step.other_s", format_seconds, False),
    ("  idle", "step.idle_s", format_seconds, False),
    ("communication", "step.communication_s", format_seconds, False),
    ("  of it overlapped", "step.overlapped_s", format_seconds, False),
    ("MFU", "step.mfu", format_percent, False),
    ("HFU", "step.hfu", format_percent, False),
    ("tokens/s per device", "step.tokens_per_s_per_gpu", format_count, False),
    ("peak memory per device", "memory.peak_bytes", format_bytes, False),
)


def render_comparison(comparison: Comparison) -> RenderableType:
    """Return the whole comparison for `rich.print`; quantities that are unknown in both reports are left out."""
    kernels = [f"{op.b_name} ({op.kind})" for op in comparison.kernel_ops[:_OPS_COMPARED]]
    ops = [op.b_name for op in comparison.ops[:_OPS_COMPARED]]
    moved = any(op.transfer_s.ratio is not None for op in comparison.ops)
    what, key = ("moving data", "transfer_s") if moved else ("busy", "busy_s")
    tables = [
        _known(comparison, "communication: time of each kind", _rows(comparison, "time_s")),
        _known(comparison, "  of it exposed", _rows(comparison, "exposed_s")),
        _known(comparison, f"collectives, {what}", _numbered(f"ops.{{}}.{key}", ops)),
        _known(comparison, "compute: time of each kind", _kinds(comparison)),
        _known(comparison, "operations, busy", _numbered("kernel_ops.{}.busy_s", kernels)),
        _known(comparison, "single operations, worst ratios", _ratios(comparison)),
    ]
    below = [*(table.terminal() for table in tables if table.rows), Text(_joined_text(comparison), "dim")]
    first = [Text(comparison.verdict, "bold"), Text()] if comparison.verdict else []
    return Group(
        *first, _known(comparison, "step", _QUANTITIES).terminal(), *(Padding(part, (1, 0, 0, 0)) for part in below)
    )


def compared_section(a: Report, b: Report) -> str:
    """Return the panel of the page that compares two reports: step, rows, kinds of work and single operations."""
    found = compare(a, b)
    sides = _sides(found)
    parts = [_known(found, "per step and device", _QUANTITIES).html()]
    for table in (
        _known(found, "exposed communication", _rows(found, "exposed_s")),
        _known(found, "communication, overlapped or not", _rows(found, "time_s")),
        _known(found, "compute by kind of work", _kinds(found)),
        _known(found, "single operations, worst ratios", _ratios(found)),
    ):
        parts.append(table.html() if table.rows else "")
    ops = [((op.b_name,), Source(op.source, op.line)) for op in found.ops]
    parts.append(_operations(found, "collectives", text_columns("collective"), "ops.{}.exposed_s", ops))
    kernels = [((op.b_name, op.kind), Source(op.source, op.line)) for op in found.kernel_ops]
    heads = text_columns("operation", "kind")
    parts.append(_operations(found, "compute operations", heads, "kernel_ops.{}.busy_s", kernels))
    said = f"{found.verdict} " if found.verdict else ""
    note = f"{said}{_joined_text(found)} Difference: the second minus the first."
    return section(f"{sides[0][0].upper()}{sides[0][1:]} and {sides[1]}", note, *parts)


def _known(comparison: Comparison, title: str, lines: Iterable[Line]) -> Table:
    number = Numbers(DOCUMENT, comparison)
    known = [line for line in lines if (values := number.value(line[1])).a is not None or values.b is not None]
    columns = [Column(title, words=True, width=36), *_columns(*_sides(comparison))]
    return Table(columns, [(label, *_cells(number, key, form, zero)) for label, key, form, zero in known])


def _rows(comparison: Comparison, key: str) -> list[Line]:
    found = []
    for i, row in enumerate(comparison.communication):
        label = f"{axes_text(row.axes)}, {link_text(row)}: {row_name(row)}"
        found.append((label, f"communication.{i}.{key}", format_seconds, row.one_sided))
    return found


def _kinds(comparison: Comparison) -> list[Line]:
    return _numbered("kernels.{}.time_s", [k.kind for k in comparison.kernels])


def _ratios(comparison: Comparison) -> list[Line]:
    labels = []
    for op in comparison.worst_ratios:
        where = op.line or op.source
        labels.append(f"{op.name} ({op.kind}{f'; {where}' if where else ''})")
    return _numbered("worst_ratios.{}.seconds", labels)


def _numbered(key: str, labels: Iterable[str]) -> list[Line]:
    return [(label, key.format(i), format_seconds, True) for i, label in enumerate(labels)]


def _operations(
    comparison: Comparison, what: str, heads: list[Column], key: str, ops: Sequence[tuple[tuple[str, ...], Source]]
) -> str:
    if not ops:
        return ""
    number, sides = Numbers(DOCUMENT, comparison), _sides(comparison)
    quantity = "exposed" if key.endswith("exposed_s") else "busy"
    rows = [
        (*names, *_cells(number, key.format(i), format_seconds, True), source)
        for i, (names, source) in enumerate(ops[:_OPS_COMPARED_OF_PAGE])
    ]
    columns = [*heads, *_columns(f"{quantity}, {sides[0]}", sides[1]), *text_columns("caused by")]
    return folded(f"The {len(rows)} {what} whose {quantity} seconds differ most", Table(columns, rows).html())


def _columns(a: str, b: str) -> list[Column]:
    sides = [Column(name, width=10, clip=True) for name in (a, b)]
    return [*sides, Column("difference", short="B - A", width=9, clip=True), Column("ratio", short="B / A", width=8)]


def _cells(number: Numbers, key: str, form: Form, absent_is_zero: bool) -> list[Cell]:
    values: Pair = number.value(key)
    ratio = number(f"{key}.ratio", _ratio_text)
    style = "dim" if values.ratio is None else "bold" if abs(values.ratio - 1) > _NOTABLE else ""
    difference = _difference_text(values, form, absent_is_zero)
    return [number(f"{key}.a", form), number(f"{key}.b", form), difference, replace(ratio, style=style)]


def _sides(comparison: Comparison) -> list[str]:
    return names_of([comparison.a.source, comparison.b.source])


def _joined_text(comparison: Comparison) -> str:
    shares = [
        f"{format_percent(share)} of the seconds of single {what}"
        for share, what in (
            (comparison.joined_share, "collectives"),
            (comparison.kernels_joined_share, "compute operations"),
        )
        if share is not None
    ]
    if not shares:
        return "No single operations to join."
    if not comparison.joined_share and not comparison.kernels_joined_share:
        return "No single operation is in both reports: they are of different programs."
    how = "the same program: joined by name" if comparison.joined_by == "name" else "different programs: joined by key"
    text = " and ".join(shares)
    return f"In both reports: {text} ({how}). The largest difference comes first."


def _difference_text(values: Pair, form: Form, absent_is_zero: bool) -> str:
    if not absent_is_zero and (values.a is None or values.b is None):
        return "-"
    text = form(abs(values.difference)).strip()
    return f"{'+' if values.difference > 0 else '-'}{text}" if values.difference else text


def _ratio_text(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    if ratio >= 10_000:
        return ">9999 x"
    return f"{ratio:.2f} x" if ratio < 100 else f"{ratio:.0f} x"
