"""The communication contract: each collective of a compiled program, and the reason that the strategy gives for it.

A collective without a reason, or more bytes than its reason allows, is a finding: most often XLA resharding an
activation that nobody constrained. So is what XLA itself calls an involuntary full rematerialization."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshkit.compile.program import CompiledProgram
from meshkit.hlo.instructions import dtype_bits
from meshkit.hlo.module import Schedule
from meshkit.hlo.schedule import Collective
from meshkit.linting.findings import Finding
from meshkit.sharding.strategy import SCALAR_BYTES, Axes, Payload, Strategy
from meshkit.units import format_bytes

SCALARS = "scalars and norms, up to 4 KiB each"
WITHIN = "copied by a GPU to itself: leaves no GPU"
CODES = ("unexplained_collective", "involuntary_rematerialization")
# XLA combines small sums with large ones and pads; a twentieth and a mebibyte is less than any array worth a finding.
_SLACK, _SLACK_BYTES = 1.05, 2**20
_LONGEST, _PLACES = 100, 4  # of a path that a finding shows, in characters; of a combined collective's, how many
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclass
class Explained:
    """Collectives of one kind over the same axes for the same reason, in one step on one GPU."""

    collective: str
    axes: tuple[str, ...]
    explanation: str | None  # None where there is none
    bound_bytes: float | None = None  # what the reason allows; None where it has no closed form
    count: float = 0  # how many; a combined one counts where its largest array belongs
    payload_bytes: float = 0
    sources: dict[str, float] = field(default_factory=dict)  # op_name paths, those with the most bytes first
    cause: str = ""  # a guess why, where there is no explanation

    @property
    def exceeds(self) -> bool:
        """Whether it moves more than its reason allows."""
        return self.bound_bytes is not None and self.payload_bytes > self.bound_bytes * _SLACK + _SLACK_BYTES


def explain_collectives(schedule: Schedule, strategy: Strategy) -> list[Explained]:
    """Every collective of a step with its reason, the most bytes first."""
    rows: dict[tuple, Explained] = {}
    for instruction, runs in schedule.walk():
        if (collective := instruction.collective) is None:
            continue
        times = runs / strategy.steps_per_call
        axes = frozenset(collective.axes)
        parts = _parts(collective)
        largest = max(range(len(parts)), key=lambda i: parts[i][1])
        for index, (part, size) in enumerate(parts):
            words, bound, cause = _reason(part, collective, axes, strategy)
            row = rows.setdefault(
                (collective.collective, collective.axes, words),
                Explained(collective.collective, collective.axes, words, bound, cause=cause),
            )
            row.count += times * (index == largest)
            row.payload_bytes += times * size
            row.sources[collective.source] = row.sources.get(collective.source, 0) + times * size
    return sorted(rows.values(), key=lambda r: -r.payload_bytes)


def collective_findings(rows: Sequence[Explained], *, of_file: bool = True) -> list[Finding]:
    """Findings about collectives without a reason, and about reasons that do not allow for so many bytes."""
    found = []
    for row in rows:
        if row.explanation is not None and not row.exceeds:
            continue
        axes = "+".join(row.axes)
        moved = f"{_times(row.count)} {row.collective} over {axes}, {format_bytes(row.payload_bytes)}"
        if row.explanation is None:
            message = f"nothing in the strategy explains {moved} a step: {row.cause}; at {_places(row)}"
        else:
            message = (
                f"{moved} a step, where {row.explanation} take at most {format_bytes(row.bound_bytes or 0)}: something "
                f"is communicated more often than declared; most at {_places(row)}"
            )
        found.append(
            Finding(
                code="unexplained_collective",
                severity="warning",
                path=f"collective/{row.collective}/{axes}",
                message=message,
                hint=_hint(row, of_file),
            )
        )
    return found


def rematerialization_findings(compiled: CompiledProgram) -> list[Finding]:
    """Findings about arrays that XLA makes whole on every GPU because it knows no way between two shardings."""
    return [
        Finding(
            code="involuntary_rematerialization",
            severity="warning",
            path=f"rematerialization/{r.source or r.array}",
            message=f"XLA makes {r.array} whole on every GPU for a moment, to go from one sharding to another"
            + (f" at {r.source}" if r.source else ""),
            hint='x = meshkit.constrain(x, "act_batch", ...) on both sides of it, or rules that cut both alike',
        )
        for r in compiled.rematerializations
    ]


def _parts(c: Collective) -> list[tuple[Payload, float]]:
    """The arrays of a collective, each with its share of the payload."""
    gathered = c.group_size if c.collective == "all-gather" else 1
    shapes = [(dtype, [int(d) for d in dims.split(",") if d]) for dtype, dims in _SHAPE.findall(c.key.split("|")[3])]
    if c.collective == "ragged-all-to-all":
        shapes = shapes[:1]
    if c.collective == "all-to-all" and len(shapes) > 1:  # one piece for each GPU of the group
        total = sum(math.prod(dims) for _, dims in shapes)
        return [(Payload(c.collective, shapes[0][0], total, 1, c.payload_bytes, c.source), c.payload_bytes)]
    parts = []
    for dtype, dims in shapes:
        elements = math.prod(dims) * gathered
        size = math.ceil(elements * dtype_bits(dtype) / 8)
        parts.append((Payload(c.collective, dtype, elements, len(dims), size, c.source), size))
    return parts or [(Payload(c.collective, c.dtype, 0, 0, c.payload_bytes), c.payload_bytes)]


def _reason(part: Payload, c: Collective, axes: Axes, strategy: Strategy) -> tuple[str | None, float | None, str]:
    if not axes:  # every group is one GPU
        return WITHIN, None, ""
    if c.payload_bytes <= SCALAR_BYTES:
        return SCALARS, None, ""
    for term in strategy.terms(axes):
        if part.collective in term.kinds and term.fits(part):
            return term.words, term.bound_bytes, ""
    if part.bytes <= SCALAR_BYTES:
        return SCALARS, None, ""
    return None, None, _guess(part, c, axes, strategy)


def _guess(part: Payload, c: Collective, axes: Axes, s: Strategy) -> str:
    """The likely cause of a collective that nothing explains."""
    names = " x ".join(c.axes)
    weight = s.weight_of(part, axes)
    if c.collective == "all-reduce" and weight and s.gathers_whole(part, axes):
        return f"the gradient of {weight.path} is reduced whole, although {names} keeps it in shards"
    if c.collective == "all-gather" and weight and axes & weight.stays:
        return f"{weight.path}, or an array of its size, is gathered over {names}, which is meant to work on its shards"
    if axes & s.roles.batch and c.collective in ("all-gather", "all-reduce"):
        return f"an activation is made whole over {names}, which cuts the batch"
    if axes & s.roles.tensor and c.collective == "all-gather":
        return f"an activation that {names} is meant to keep in shards (heads, hidden or vocabulary) is made whole"
    if axes & s.roles.length and c.collective == "all-gather":
        return f"an activation is made whole over {names}, which cuts the sequence"
    return "XLA moves shards between two layouts"


def _hint(row: Explained, of_file: bool) -> str:
    if row.explanation is not None:
        own = "micro-batches (say `accumulate`)"
        return f"see what repeats it: `remat`, {'`accumulate`' if of_file else own}, or a layer that is run twice"
    if not of_file:
        return "constrain the array where it is made"
    path = f"collective/{row.collective}/{'+'.join(row.axes)}"
    return (
        "constrain the array where it is made; or, if it is meant, "
        f'[[lint.allow]] code = "unexplained_collective", path = "{path}", reason = "..."'
    )


def _places(row: Explained) -> str:
    """The places in the model with most bytes."""
    ranked = sorted(row.sources, key=lambda s: -row.sources[s])
    shown = [_short(s) for s in ranked[:2]]
    return " and ".join(shown) + (f" and {len(ranked) - 2} more places" if len(ranked) > 2 else "")


def _short(source: str) -> str:
    """An op_name path without what every path of a step has; of a combined collective the ends of its paths."""
    path = re.sub(r"jit\(train_step\)/|while/body/|eval_jaxpr/|checkpoint/|rematted_computation/", "", source)
    if ":" in path:
        ends = dict.fromkeys("/".join(p.strip("()").rsplit("/", 3)[-3:]) for p in path.split(":"))
        shown = list(ends)[:_PLACES]
        return ", ".join(shown) + (f" and {len(ends) - len(shown)} more" if len(ends) > len(shown) else "")
    if len(path) > _LONGEST:
        return "..." + path[-_LONGEST:].partition("/")[2]
    return path or "an op without a name"


def _times(count: float) -> str:
    return f"{count:g}" if count else "part of a combined"
