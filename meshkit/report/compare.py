"""Compare two reports: a prediction with its measurement, or an earlier run with a later one.

Rows of communication are joined by axes, link, collective and dtype, and compute by kind of work. Single operations are
joined by name if both reports are of one compiled program. Otherwise they are joined by key, which survives a
recompile. The result includes the share of the seconds that could be joined.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from meshkit.errors import ConfigError, check_kinds
from meshkit.report import schema
from meshkit.report.schema import KernelPart, OpPart, Part, Report
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

_SAME = 0.01  # Step times that differ by less than this share are equal: two captures of one run differ as much.
_MAX_CAUSES = 4
_ROW_QUANTITIES = ("count", "payload_bytes", "time_s", "overlapped_s", "exposed_s", "busy_s", "transfer_s")
_MOST_RATIOS = 10  # The most operations in `worst_ratios`.
_LEAST_OF_RATIO = 0.001  # An operation with a smaller share of the step is not in `worst_ratios`.


class Pair(Part):
    """One quantity in both reports; `ratio` is b / a, or None if a value is unknown or a is zero."""

    a: float | None = None
    b: float | None = None
    ratio: float | None = None

    @property
    def difference(self) -> float:
        """Return b - a; an unknown value counts as zero."""
        return (self.b or 0.0) - (self.a or 0.0)


class ComparedSide(Part):
    """The source and the program of one of the two reports."""

    source: schema.Source
    program: schema.ProgramPart


class ComparedRow(Part):
    """Communication of one kind over the same axes and link in both reports; None if a report has no such row."""

    axes: tuple[str, ...]
    link: schema.LinkName | None
    fabric: str | None = None
    """The network of the link; null if the reports differ in it."""
    collective: str | None
    dtype: str | None
    replica_groups: str | None = None
    count: Pair
    payload_bytes: Pair
    time_s: Pair
    overlapped_s: Pair
    exposed_s: Pair
    busy_s: Pair
    transfer_s: Pair
    """Seconds without waiting for peers, since a prediction has none."""

    @property
    def one_sided(self) -> bool:
        """Return whether only one report has such communication; it is then zero in the other report."""
        return self.count.a is None or self.count.b is None


class ComparedOp(Part):
    """One collective instruction that is in both reports."""

    key: str
    a_name: str
    b_name: str
    axes: tuple[str, ...] = ()
    source: str | None = None
    line: str | None = None
    count: Pair
    busy_s: Pair
    transfer_s: Pair
    """Seconds without waiting for peers, since a prediction has none."""
    exposed_s: Pair


class ComparedKind(Part):
    """Compute of one kind in both reports."""

    kind: str
    count: Pair
    time_s: Pair
    busy_s: Pair


class ComparedKernel(Part):
    """One compute instruction that both reports list by name."""

    key: str | None
    kind: str
    a_name: str
    b_name: str
    source: str | None = None
    line: str | None = None
    count: Pair
    busy_s: Pair


class ComparedRatio(Part):
    """One instruction of a program that is in both reports, among those whose seconds differ by the largest factors.

    Attributes:
        kind: the kind of compute, or the collective.
        seconds: busy seconds; for a collective, without waiting for peers.
    """

    name: str
    kind: str
    source: str | None = None
    line: str | None = None
    seconds: Pair


class ComparedPart(Part):
    """A part of the step in both reports; the differences of all parts add up to the difference of the step.

    Attributes:
        part: `compute`, `exposed communication`, `memory copies` or `idle`.
        what: the kind of compute, the row of communication, or the place of the idle time; null if unknown.
        operation: the operation in both reports that differs most, with its source line.
    """

    part: str
    what: str | None = None
    operation: str | None = None
    seconds: Pair


class JudgedCondition(Part):
    """A condition of `--fail-if`: whether report b meets it, the value in b, the limit, and the value in a if used."""

    condition: str
    met: bool
    value: float
    limit: float
    reference: float | None = None


class Comparison(Part):
    """Two reports side by side, the largest difference in seconds first.

    Attributes:
        step, memory: every number of the two parts.
        kernels, kernel_ops: compute by kind, and its single instructions.
        joined_by: whether operations were joined by name or by key.
        joined_share: share of the busy seconds of both reports' collectives that could be joined; null without any.
        kernels_joined_share: the same share for all compute (a report lists only the longest operations by name).
        conditions: the conditions of `--fail-if`.
        verdict: by how much the second step differs, and in which parts; null if a step time is unknown.
        parts: the parts of the step, the largest difference first.
        worst_ratios: instructions of one program that take at least 0.1 % of the step, the largest factor first.
    """

    schema_: Literal["meshkit.compare/1"] = Field(default="meshkit.compare/1", alias="schema")
    verdict: str | None = None
    a: ComparedSide
    b: ComparedSide
    step: dict[str, Pair]
    memory: dict[str, Pair]
    communication: tuple[ComparedRow, ...]
    ops: tuple[ComparedOp, ...]
    kernels: tuple[ComparedKind, ...] = ()
    kernel_ops: tuple[ComparedKernel, ...] = ()
    joined_by: Literal["name", "key"]
    joined_share: float | None
    kernels_joined_share: float | None = None
    conditions: tuple[JudgedCondition, ...] = ()
    parts: tuple[ComparedPart, ...] = ()
    worst_ratios: tuple[ComparedRatio, ...] = ()

    def __repr__(self) -> str:
        """Return a line with the verdict; `mk.render` shows the tables."""
        return f"<Comparison: {self.verdict or 'a step has no time'}>"

    __str__ = __repr__


def compare(a: Report, b: Report) -> Comparison:
    """Compare two reports, b relative to a.

    Args:
        a: the reference: a prediction, or the earlier run.
        b: the measurement, or the later run; ratios are b / a.

    Returns:
        The comparison, with a verdict if both steps have a time.
    """
    check_kinds(compare, a=a, b=b)
    a, b = _moving(a), _moving(b)
    fingerprint = a.program.fingerprint
    same_program = fingerprint is not None and fingerprint == b.program.fingerprint
    ops, share = _joined_ops(a, b, by_name=same_program)
    kernel_ops, kernels_share = _joined_kernels(a, b, by_name=same_program)
    found = Comparison(
        a=ComparedSide(source=a.source, program=a.program),
        b=ComparedSide(source=b.source, program=b.program),
        step={
            name: pair(getattr(a.step, name), getattr(b.step, name))
            for name in schema.StepPart.model_fields
            if not name.startswith("time_interval")
        },
        memory={
            name: pair(getattr(a.memory, name), getattr(b.memory, name))
            for name in type(a.memory).model_fields
            if name.endswith("_bytes")
        },
        communication=_joined_rows(a, b),
        ops=ops,
        kernels=_joined_kinds(a, b),
        kernel_ops=kernel_ops,
        joined_by="name" if same_program else "key",
        joined_share=share,
        kernels_joined_share=kernels_share,
    )
    parts = tuple(sorted(_parts(found), key=lambda part: -abs(part.seconds.difference)))
    ratios = tuple(sorted(_ratios(found), key=lambda r: -abs(math.log(r.seconds.ratio or 1.0))))[:_MOST_RATIOS]
    known = {"parts": parts, "verdict": _verdict(found, parts), "worst_ratios": ratios}
    return found.model_copy(update=known)


def _moving(report: Report) -> Report:
    """Return the report with transfer times for all collectives; in a prediction they are equal to the busy times."""
    if report.source == "profile":
        return report
    rows = []
    for row in report.communication:
        ops = tuple(op.model_copy(update={"transfer_s": op.busy_s}) for op in row.ops)
        rows.append(row.model_copy(update={"transfer_s": row.busy_s, "ops": ops}))
    return report.model_copy(update={"communication": tuple(rows)})


def _ratios(found: Comparison) -> Iterator[ComparedRatio]:
    step = found.step["time_s"]
    least_s = _LEAST_OF_RATIO * max(step.a or 0.0, step.b or 0.0)
    if found.joined_by != "name":
        return
    collectives = [(op, op.key.partition("|")[0], op.transfer_s) for op in found.ops]
    kernels = [(op, op.kind, op.busy_s) for op in found.kernel_ops]
    for op, kind, seconds in (*collectives, *kernels):
        if seconds.ratio and max(seconds.a or 0.0, seconds.b or 0.0) >= least_s:
            yield ComparedRatio(name=op.b_name, kind=kind, source=op.source, line=op.line, seconds=seconds)


def _parts(found: Comparison) -> Iterator[ComparedPart]:
    if found.kernels:
        for kind in found.kernels:
            ops = [op for op in found.kernel_ops if op.kind == kind.kind]
            worst = max(ops, key=lambda op: abs(op.busy_s.difference), default=None)
            yield ComparedPart(part="compute", what=kind.kind, operation=_placed(worst), seconds=kind.time_s)
    else:
        yield ComparedPart(part="compute", seconds=found.step["compute_s"])
    exposed = [row.exposed_s for row in found.communication]
    if all(p.a is not None or p.b is not None for p in exposed):
        for row in found.communication:
            over = " + ".join(row.axes) or row.replica_groups
            what = " ".join(part for part in (row.collective or "unknown", row.dtype, over and f"over {over}") if part)
            same = [
                op for op in found.ops if op.axes == row.axes and row.collective and op.key.startswith(row.collective)
            ]
            worst = max(same, key=lambda op: abs(op.exposed_s.difference), default=None)
            part = ComparedPart(
                part="exposed communication", what=what, operation=_placed(worst), seconds=row.exposed_s
            )
            yield part
    else:
        yield ComparedPart(part="exposed communication", seconds=found.step["exposed_s"])
    yield ComparedPart(part="memory copies", seconds=found.step["other_s"])
    where = {"idle_inside_s": "between kernels", "idle_between_s": "between steps", "idle_input_s": "before the input"}
    idle = {what: found.step[key] for key, what in where.items()}
    if any(p.a is None or p.b is None for p in idle.values()):
        yield ComparedPart(part="idle", seconds=found.step["idle_s"])
        return
    for what, seconds in idle.items():
        yield ComparedPart(part="idle", what=what, seconds=seconds)


def _placed(op: ComparedOp | ComparedKernel | None) -> str | None:
    if op is None or not (op.busy_s.difference):
        return None
    where = op.line or op.source
    return f"{op.b_name} ({where})" if where else op.b_name


def _verdict(found: Comparison, parts: Sequence[ComparedPart]) -> str | None:
    """Return a sentence on how the step time changed, and which parts changed it most."""
    step = found.step["time_s"]
    if step.a is None or step.b is None or not step.a:
        return None
    more_s = step.b - step.a
    if abs(more_s) < _SAME * step.a:
        return f"Both steps take {format_seconds(step.b)}."
    word = "longer" if more_s > 0 else "shorter"
    causes = [p for p in parts if p.seconds.difference * more_s > 0 and abs(p.seconds.difference) > 0.1 * abs(more_s)]
    listed = []
    for part in causes[:_MAX_CAUSES]:
        a, b = (format_seconds(x or 0.0) for x in (part.seconds.a, part.seconds.b))
        most = f", most in {part.operation}" if part.operation else ""
        sign = "+" if part.seconds.difference > 0 else "-"
        named = ": ".join(text for text in (part.part, part.what) if text)
        listed.append(f"{sign}{format_seconds(abs(part.seconds.difference))} {named} ({a} to {b}{most})")
    by = format_percent(abs(more_s) / step.a)
    than = f"{format_seconds(abs(more_s))} ({by}) {word} than the first"
    if step.b >= 2 * step.a:
        than = f"{step.b / step.a:.3g} times as long as the first of {format_seconds(step.a)}"
    text = f"The second step takes {format_seconds(step.b)}, {than}"
    return text + (f": {'; '.join(listed)}." if listed else ".")


def with_predicted(measured: Report, predicted: Report | None) -> Report:
    """Return the measured report with its prediction, and with the warnings of `plan_warnings`.

    Args:
        predicted: a plan, or the prediction for the traced program; None leaves the report as it is.
    """
    if predicted is None:
        return measured
    found = compare(predicted, measured)
    part = schema.PredictedPart(
        step=_with_prediction(found.step["time_s"], kind="step"),
        kernels=tuple(_with_prediction(kind.time_s, kind=kind.kind) for kind in found.kernels),
        communication=tuple(
            _with_prediction(
                row.transfer_s,
                kind=row.collective,
                axes=row.axes,
                dtype=row.dtype,
                replica_groups=row.replica_groups,
            )
            for row in found.communication
        ),
        collectives=tuple(
            _with_prediction(op.transfer_s, op, kind=op.key.partition("|")[0], axes=op.axes) for op in found.ops
        ),
        worst_ratios=tuple(_with_prediction(op.seconds, op, kind=op.kind) for op in found.worst_ratios),
    )
    warnings = (*plan_warnings(predicted, measured), *measured.warnings)
    return measured.model_copy(update={"predicted": part, "warnings": warnings})


def _with_prediction(seconds: Pair, op: ComparedOp | ComparedRatio | None = None, **what: Any) -> schema.BesidePart:
    if op is not None:
        name = op.b_name if isinstance(op, ComparedOp) else op.name
        what |= {"name": name, "source": op.source, "line": op.line}
    return schema.BesidePart(measured_s=seconds.b, predicted_s=seconds.a, ratio=seconds.ratio, **what)


def plan_warnings(plan: Report, measured: Report) -> Iterator[schema.Warning_]:
    """Yield a warning, `other_plan`, if a plan and a measurement are of different jobs.

    Jobs are different if their mesh or GPUs differ, or if their programs have no collective in common.
    """
    differs = []
    for what in ("mesh", "cluster"):
        a, b = getattr(plan, what), getattr(measured, what)
        if what == "mesh" and a and b and [(x.axis, x.size) for x in a] != [(x.axis, x.size) for x in b]:
            sizes = [" x ".join(f"{x.axis} {x.size}" for x in mesh) for mesh in (a, b)]
            differs.append(f"mesh ({sizes[0]}, measured {sizes[1]})")
        elif what == "cluster" and a.gpu and b.gpu and (a.gpu, a.num_gpus) != (b.gpu, b.num_gpus):
            differs.append(f"cluster ({a.num_gpus} x {a.gpu}, measured {b.num_gpus} x {b.gpu})")
    found = compare(plan, measured)
    if not differs and found.joined_share == 0 and found.joined_by == "key":
        differs.append("program: none of its collectives is in the measurement")
    if differs:
        message = f"The plan is of another {' and '.join(differs)}: do not compare its numbers with this measurement."
        yield schema.Warning_(code="other_plan", message=message)


def pair(a: float | None, b: float | None) -> Pair:
    ratio = b / a if a and b is not None else None
    return Pair(a=a, b=b, ratio=ratio if ratio is not None and math.isfinite(ratio) else None)


def _joined_rows(a: Report, b: Report) -> tuple[ComparedRow, ...]:
    sides: tuple[dict[tuple, list], ...] = {}, {}
    for side, report in zip(sides, (a, b)):
        for row in report.communication:
            side.setdefault((row.axes, row.link, row.collective, row.dtype, row.replica_groups), []).append(row)
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        values: dict[str, Any] = {n: pair(*(total(side.get(key), n) for side in sides)) for n in _ROW_QUANTITIES}
        axes, link, collective, dtype, groups = key
        fabrics = {row.fabric for side in sides for row in side.get(key, ())}
        fabric = fabrics.pop() if len(fabrics) == 1 else None
        values |= {"collective": collective, "dtype": dtype, "replica_groups": groups}
        rows.append(ComparedRow(axes=axes, link=link, fabric=fabric, **values))
    return tuple(sorted(rows, key=lambda row: (-abs(row.exposed_s.difference), -abs(row.time_s.difference))))


def total(rows: Sequence[Part] | None, name: str) -> float | None:
    """Return the sum of a number over parts of a report; None if there are no parts, or if a number is unknown."""
    values = [getattr(row, name) for row in rows or ()]
    return None if not values or None in values else sum(values)


def _joined_ops(a: Report, b: Report, *, by_name: bool) -> tuple[tuple[ComparedOp, ...], float | None]:
    sides = [{(op.name if by_name else op.key): (op, row) for row in r.communication for op in row.ops} for r in (a, b)]
    busy = sum(op.busy_s or 0.0 for side in sides for op, _ in side.values())
    common, joined = _common(*sides)
    ops = [
        ComparedOp(
            axes=row.axes,
            **_both(left, right),
            transfer_s=pair(left.transfer_s, right.transfer_s),
            exposed_s=pair(left.exposed_s, right.exposed_s),
        )
        for (left, row), (right, _) in common
    ]
    ops.sort(key=lambda op: (-abs(op.exposed_s.difference), -abs(op.busy_s.difference)))
    return tuple(ops), joined / busy if busy else None


def _common(a: Mapping[str, tuple], b: Mapping[str, tuple]) -> tuple[list[tuple[tuple, tuple]], float]:
    """Return the pairs of values whose keys are in both, and their busy seconds.

    Args:
        a, b: key -> a tuple whose first item is the part of the report.
    """
    found = [(a[key], b[key]) for key in a if key in b]
    return found, sum(side[key][0].busy_s or 0.0 for side in (a, b) for key in a if key in b)


def _both(left: OpPart | KernelPart, right: OpPart | KernelPart) -> dict[str, Any]:
    return {
        "key": left.key,
        "a_name": left.name,
        "b_name": right.name,
        "source": right.source or left.source,
        "line": right.line or left.line,
        **_pairs(left, right, ("count", "busy_s")),
    }


def _joined_kinds(a: Report, b: Report) -> tuple[ComparedKind, ...]:
    sides = [{c.kind: c for c in r.kernels.classes} if r.kernels else {} for r in (a, b)]
    if not all(sides):
        return ()
    kinds = [
        ComparedKind(kind=kind, **_pairs(sides[0].get(kind), sides[1].get(kind), ("count", "time_s", "busy_s")))
        for kind in dict.fromkeys([*sides[0], *sides[1]])
    ]
    return tuple(sorted(kinds, key=lambda k: -abs(k.time_s.difference)))


def _joined_kernels(a: Report, b: Report, *, by_name: bool) -> tuple[tuple[ComparedKernel, ...], float | None]:
    sides = [_kernels(r, by_name) for r in (a, b)]
    if not all(sides):
        return (), None
    common, joined = _common(*sides)
    busy = sum(c.busy_s or 0.0 for r in (a, b) if r.kernels for c in r.kernels.classes)
    ops = [ComparedKernel(kind=kind, **_both(left, right)) for (left, kind), (right, _) in common]
    ops.sort(key=lambda op: -abs(op.busy_s.difference))
    return tuple(ops), joined / busy if busy else None


def _kernels(report: Report, by_name: bool) -> Mapping[str, tuple[KernelPart, str]]:
    ops = [(op, c.kind) for c in (report.kernels.classes if report.kernels else ()) for op in c.ops]
    by_name = by_name or all(op.key is None for op, _ in ops)  # Kernels of an unknown program have no keys.
    return {key: (op, kind) for op, kind in ops if (key := op.name if by_name else op.key)}


def _pairs(a: OpPart | Part | None, b: OpPart | Part | None, names: Iterable[str]) -> dict[str, Pair]:
    return {name: pair(getattr(a, name, None), getattr(b, name, None)) for name in names}


_CONDITION = re.compile(r"^\s*([A-Za-z_0-9.+]+)\s*(>=|<=|>|<)\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(x?)\s*$")
_LARGEST_LIMIT = 1e40
_HOLDS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_EXAMPLES = "exposed_s>1.1x, step.time_s>0.5, communication.fsdp.exposed_s>1.2x or mfu<0.4"


def check_condition(comparison: Comparison, text: str) -> JudgedCondition:
    """Check a condition such as `exposed_s>1.1x` for report b, and return it with its numbers.

    Args:
        text: `QUANTITY OP NUMBER`. The quantity is a key of `step` or `memory`, with or without the part's name, or
            `communication.AXES.KEY`: the sum over the rows of these axes (`communication.data+fsdp.exposed_s`). With
            an `x` after it, the number is a multiple of the value in report a.

    Raises:
        ConfigError: the condition cannot be read, the quantity does not exist, or its value is unknown.
    """
    found = _CONDITION.match(text)
    if not found:
        raise ConfigError(f"the condition '{text}' cannot be read.", at=f"--fail-if '{text}'", hint=_EXAMPLES)
    name, sign, number, relative = found.groups()
    values = _quantity(comparison, name, text)
    try:
        limit = float(number)
    except ValueError:
        raise ConfigError(f"'{number}' is not a number.", at=f"--fail-if '{text}'", hint=_EXAMPLES) from None
    if limit > _LARGEST_LIMIT:
        raise ConfigError(f"'{number}' is more than any quantity.", at=f"--fail-if '{text}'", hint=_EXAMPLES)
    reference = None
    if relative:
        reference = _known(values.a, name, "first", text)
        limit *= reference
    value = _known(values.b, name, "second", text)
    met = _HOLDS[sign](value, limit)
    return JudgedCondition(condition=text, met=met, value=value, limit=limit, reference=reference)


def condition_text(checked: JudgedCondition) -> str:
    """Return `exposed_s>1.1x: it is 212 ms, it was 162 ms, 1.31 x`."""
    form = _form(checked.condition)
    value = form(checked.value).strip()
    if checked.reference is None:
        return f"{checked.condition}: it is {value}"
    times = f", {checked.value / checked.reference:.2f} x" if checked.reference else ""
    return f"{checked.condition}: it is {value}, it was {form(checked.reference).strip()}{times}"


def _form(condition: str) -> Callable[[Any], str]:
    name = re.split(r"[<>]", condition)[0].strip()
    for suffix, form in (("per_gpu", format_count), ("_s", format_seconds), ("_bytes", format_bytes)):
        if name.endswith(suffix):
            return form
    shares = ("mfu", "mfu_causal", "hfu", "bubble_fraction")
    return format_percent if name.rpartition(".")[2] in shares else format_count


def _known(value: float | None, name: str, which: str, text: str) -> float:
    if value is None:
        raise ConfigError(f"{name} is unknown in the {which} report, so '{text}' cannot be checked.")
    return value


def _quantity(comparison: Comparison, name: str, text: str) -> Pair:
    if name.startswith("communication."):
        return _communication(comparison, name, text)
    known: dict[str, Pair] = {**comparison.memory, **comparison.step}
    qualified = {f"{part}.{key}": v for part in ("step", "memory") for key, v in getattr(comparison, part).items()}
    if name not in known and name not in qualified:
        close = difflib.get_close_matches(name, [*known, *qualified], n=1)
        hint = close[0] if close else ", ".join(list(comparison.step)[:7])
        raise ConfigError(f"the reports have no quantity '{name}'.", at=f"--fail-if '{text}'", hint=hint)
    return qualified.get(name) or known[name]


def _communication(comparison: Comparison, name: str, text: str) -> Pair:
    """Return the sum over the rows of the axes in `name`; a report without such a row has 0."""
    _, _, rest = name.partition(".")
    axes, _, key = rest.rpartition(".")
    keys = [key for key, field in ComparedRow.model_fields.items() if field.annotation is Pair]
    named = {"+".join(row.axes) for row in comparison.communication}
    if axes not in named or key not in keys:
        hint = f"axes: {', '.join(sorted(n for n in named if n)) or 'none'}; keys: {', '.join(keys)}"
        raise ConfigError(f"the reports have no communication '{rest}'.", at=f"--fail-if '{text}'", hint=hint)
    pairs = [getattr(row, key) for row in comparison.communication if "+".join(row.axes) == axes]
    a, b = (total([p for p in pairs if getattr(p, side) is not None], side) or 0.0 for side in ("a", "b"))
    return pair(a, b)
