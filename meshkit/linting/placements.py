"""Find placements that are legal but probably not intended, and silence findings that the allow list allows.

The input is where the rules put parameters and activations. `meshkit.linting.examine` adds findings that only the
compiled program shows.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from meshkit.config.mesh import MeshSpec
from meshkit.config.rules import AutoRule, ShardingRules, path_matches
from meshkit.config.sections import AllowTable
from meshkit.errors import ConditionError
from meshkit.report.schema import Part
from meshkit.sharding.constrain import Activation
from meshkit.sharding.resolve import Placed, unmatched_overrides
from meshkit.sharding.strategy import AxisRoles
from meshkit.units import format_bytes

Severity = Literal["error", "warning", "note"]
SEVERITY_COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}
# A replicated parameter of at least this many bytes is worth a finding. For a smaller one, gathering costs more than
# sharding saves (in the latency of one NCCL ring step, NVLink moves about 1 MB: 3.4 us x 360 GB/s).
SMALL_BYTES = 2**20
# The parameter must also be this share of all parameters on a GPU: norms of a large model are replicated on purpose.
_WORTH = 1e-3
_MOST_ALIKE = 3  # More findings of one kind become a single finding.


class Finding(Part):
    """Something that is legal but probably not intended."""

    code: str
    """The class of the finding, such as `idle_axis`."""
    severity: Severity
    """`error` stops the command, `warning` fails `explain --strict`, `note` only informs."""
    path: str
    """The subject: a parameter's path, a logical or mesh axis, or `collective/<kind>/<axes>`."""
    message: str
    """One sentence, with numbers."""
    hint: str | None = None
    """The remedy, where possible a line of TOML."""
    allowed: bool = False
    """Whether the experiment's allow list silences it."""
    reason: str | None = None
    """Why the allow list allows it."""
    seconds: float | None = None
    """Seconds of a step that the finding concerns, if known."""

    def __str__(self) -> str:
        what = f"{self.severity} {self.code} at {self.path}: {self.message}"
        return what + (f"; try {self.hint}" if self.hint else "")


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with errors first, then warnings, then notes; otherwise in the order given."""
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda f: order[f.severity])


def apply_allow_list(
    findings: Iterable[Finding], allow: Sequence[AllowTable], *, unchecked: Iterable[str] = ()
) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that remain and those that are allowed; an entry that silences nothing is itself a finding.

    Args:
        allow: `[[lint.allow]]` of the experiment; `path` is a glob as in `[[rules.override]]`.
        unchecked: codes that were not checked; an entry for such a code is no finding if it silences nothing.
    """
    kept, allowed, used = [], [], set()
    for f in findings:
        matching = [i for i, a in enumerate(allow) if a.code == f.code and path_matches(a.path, f.path)]
        used.update(matching)
        if matching and f.severity != "error":
            allowed.append(f.model_copy(update={"allowed": True, "reason": allow[matching[0]].reason}))
        else:
            kept.append(f)
    idle = [a for i, a in enumerate(allow) if i not in used and a.code not in set(unchecked)]
    kept += [
        Finding(
            code="unused_allow",
            severity="note",
            path=f"lint/allow/{a.code}/{a.path}",
            message=f"the allow entry for {a.code} at '{a.path}' silences nothing",
            hint="remove the entry, or correct its code or path",
        )
        for a in idle
    ]
    return sort_findings(kept), allowed


def check_strict(findings: Iterable[Finding]) -> None:
    """Raise a `ConditionError` that counts and lists findings, if one is more severe than a note."""
    failing = [f for f in findings if f.severity != "note"]
    if failing:
        codes = ", ".join(dict.fromkeys(f.code for f in failing))
        number = "is 1 finding" if len(failing) == 1 else f"are {len(failing)} findings"
        raise ConditionError(
            f"there {number} ({codes}), but --strict allows none.",
            hint="fixing them, or allowing them: [[lint.allow]] code, path, reason",
        )


def finding_lines(f: Finding) -> Iterator[RenderableType]:
    yield Text.assemble((f"{f.severity} {f.code}", SEVERITY_COLOURS[f.severity]), f" at {f.path}")
    yield Padding(Text(f.message), (0, 0, 0, 2))
    if f.hint:
        yield Padding(Text(f"try {f.hint}"), (0, 0, 0, 2))


@dataclass(frozen=True)
class Subject:
    """The placements, rules and sizes that the lint reads."""

    parameters: Sequence[Placed]
    activations: Sequence[Activation]
    """Activations as the model constrains them, without repetitions."""
    rules: ShardingRules
    spec: MeshSpec
    others: Sequence[Placed] = ()
    """The model's other arrays (batch statistics and the like); overrides may name them."""
    deferred: frozenset[str] = frozenset()
    """Mesh axes over which the step itself, or an explicit axis type, already shards arrays."""
    state_bytes: int = 0
    """Bytes of parameters, optimizer state and everything else that a step carries, on one GPU."""
    pool_bytes: int | None = None
    """Bytes that a program may take of a GPU's memory; None without GPUs."""
    written: Mapping[str, Any] | None = field(default=None, repr=False)
    """The `[rules]` table of the file, which distinguishes its rules from a preset's; None without a file."""
    of_file: bool = True
    """Whether hints name tables of an experiment file; otherwise they name arguments of `ShardingRules`."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        return self.spec.sizes

    @cached_property
    def roles(self) -> AxisRoles:
        """The purpose of each mesh axis."""
        return AxisRoles.read(self.rules)

    @cached_property
    def cut_by(self) -> frozenset[str]:
        """Mesh axes that shard some parameter."""
        return frozenset().union(*(p.axes for p in self.parameters))

    def pieces(self, axes: Iterable[str]) -> int:
        """Return the number of pieces into which axes shard a dim."""
        return math.prod(self.sizes[a] for a in axes)

    def bytes_per_gpu(self, p: Placed) -> int:
        return p.bytes // self.pieces(p.axes)


def lint(subject: Subject) -> list[Finding]:
    """Return every finding about rules, parameters and activations, errors first."""
    checks = (
        _too_large, _unmatched, _replicated, _uneven, _never_used, _duplicates, _crossing, _idle, _unconstrained
    )  # fmt: skip
    return sort_findings(f for check in checks for f in check(subject))


def _too_large(s: Subject) -> Iterator[Finding]:
    """Yield an error if the state alone does not fit into the memory of a GPU."""
    if s.pool_bytes is None or s.state_bytes <= s.pool_bytes:
        return
    free = [a for a, size in s.sizes.items() if size > 1 and a not in s.cut_by]
    more = f"rules that also shard the parameters over {_names(free)}" if free else "more GPUs"
    yield Finding(
        code="state_too_large",
        severity="error",
        path="state",
        message=f"parameters, optimizer state and the like take {format_bytes(s.state_bytes)} on each GPU, more than "
        f"the {format_bytes(s.pool_bytes)} that the step may take",
        hint=f'{more}, or [optimizer] memory = "host"',
    )


def _unmatched(s: Subject) -> Iterator[Finding]:
    """Yield the arrays without dim names to which no override and no automatic rule applies."""
    if math.prod(s.spec.shape) == 1:
        return
    for p in s.parameters:
        if p.rule != "none" or math.prod(p.shape) <= 1:
            continue
        yield Finding(
            code="unmatched_parameter",
            severity="warning" if s.cut_by else "note",
            path=p.path,
            message=f"{p.path} {list(p.shape)} has no dim names, and no rule names it, so every GPU holds all of it "
            f"({format_bytes(p.bytes)})",
            hint=_override_hint(s, p),
        )


def summarize_unmatched(findings: Sequence[Finding], s: Subject) -> list[Finding]:
    """Return the findings; more than three `unmatched_parameter` are joined into one finding."""
    many = [f for f in findings if f.code == "unmatched_parameter"]
    if len(many) <= _MOST_ALIKE:
        return list(findings)
    paths = {f.path for f in many}
    bare = sorted((p for p in s.parameters if p.path in paths), key=lambda p: -p.bytes)
    axes = sorted((a for a, size in s.sizes.items() if size > 1), key=lambda a: (a not in s.roles.batch, -s.sizes[a]))
    axis = "fsdp" if "fsdp" in axes else axes[0]
    total = sum(1 for p in s.parameters if math.prod(p.shape) > 1)
    one = many[0].model_copy(
        update={
            "path": "parameters",
            "message": f"{len(many)} of {total} parameters have no dim names and no rule names them, so every GPU "
            f"holds all of them ({format_bytes(sum(p.bytes for p in bare))}; the largest is {bare[0].path} "
            f"{list(bare[0].shape)}, {format_bytes(bare[0].bytes)})",
            "hint": (f'[rules.auto] with axis = "{axis}"' if s.of_file else f'auto={{"axis": "{axis}"}} of the rules')
            + ", which shards in each array the largest dim that it divides",
        }
    )
    return sort_findings([one, *(f for f in findings if f.code != "unmatched_parameter")])


def _replicated(s: Subject) -> Iterator[Finding]:
    """Yield the large parameters that an axis replicates, although the axis shards other parameters."""
    held = sum(s.bytes_per_gpu(p) for p in s.parameters)
    for p in s.parameters:
        own = p.axes
        each = s.bytes_per_gpu(p)
        if p.rule == "none" or each < max(SMALL_BYTES, _WORTH * held):
            continue
        # A batch axis never needs to replicate a parameter. Tensor and expert axes shard only some parameters.
        missing = {a for a in s.cut_by - own if s.sizes[a] > 1}
        if own - s.roles.expert:
            missing &= s.roles.batch - s.roles.expert
        if not missing or (own and not any(s.sizes[a] > 1 for a in own)):
            continue
        best = _best_cut(s, p, sorted(missing, key=lambda a: -s.sizes[a]))
        saved = each - each // (s.sizes[best[0]] if best else s.pieces(missing))
        what = (
            "is replicated on every GPU" if not own else f"is not sharded over {_names(missing)}, which shards others"
        )
        yield Finding(
            code="replicated_parameter",
            severity="warning",
            path=p.path,
            message=f"{p.path} {list(p.shape)} {what}: {format_bytes(each)} each, of which {format_bytes(saved)} are "
            "wasted" + (f"; mesh axis '{best[0]}' ({s.sizes[best[0]]}) divides dim {best[1]}" if best else ""),
            hint=_override_hint(s, p),
        )


def _uneven(s: Subject) -> Iterator[Finding]:
    """Yield the dims of activations that their axes do not divide, with the cost of padding and of leaving axes out."""
    for a in s.activations:
        if not a.dropped:
            continue
        wanted = a.wanted or s.rules.spec_for(a.logical_axes, kind="activations")
        each = a.bytes / s.pieces(a.axes)
        for dim, (axes, kept) in enumerate(zip(wanted, a.spec)):
            if axes == kept:
                continue
            size, ways = a.shape[dim], s.pieces(axes)
            padded = -(-size // ways) * ways
            costs = each * s.pieces(kept) / size * (padded - size) / ways
            name = a.logical_axes[dim]
            yield Finding(
                code="axis_left_out",
                severity="warning",
                path=str(name),
                message=f"dim {dim} ('{name}') of activation {list(a.shape)} has size {size}, which the {ways} GPUs of "
                f"mesh axis {_names(axes)} do not divide, so {_names(x for x in axes if x not in kept)} is left out "
                f"and each GPU holds {format_bytes(int(each))}; padding to {padded} would cost "
                f"{format_bytes(int(costs))} a GPU",
                hint=f"a size that {ways} divides ({padded}), or {name} = {_plain(kept)} in [rules.logical]",
            )


def _never_used(s: Subject) -> Iterator[Finding]:
    of_parameters = {n for p in (*s.parameters, *s.others) for n in p.logical_axes or ()}
    used = of_parameters | {n for a in s.activations for n in a.logical_axes}
    if "experts" in used:
        used.add("act_experts")  # `expert_layer` reads this rule itself, without a constraint.
    tables = [("logical", name) for name in s.rules.logical if name in s.rules.explicit]
    tables += [
        (kind, name) for kind in ("compute", "gradients", "optimizer") for name in getattr(s.rules, kind)
        if s.written is None or name in (s.written.get(kind) or {})
    ]  # fmt: skip
    for kind, name in tables:
        known = used if kind == "logical" else of_parameters
        if name in known or (name.startswith("act_") and not s.activations):
            continue
        near = difflib.get_close_matches(name, [str(n) for n in known if n], n=1)
        yield Finding(
            code="rule_never_used",
            severity="warning",
            path=name,
            message=f"the rule for '{name}' in [rules.{kind}] matches no dim of the model",
            hint=f"'{near[0]}' in its place, or removing {name} from [rules.{kind}]"
            if near
            else f"removing {name} from [rules.{kind}]",
        )
    arrays = [*s.parameters, *s.others]
    for pattern, near in unmatched_overrides(s.rules, arrays):
        yield Finding(
            code="rule_never_used",
            severity="warning",
            path=pattern,
            message=f"the override for path '{pattern}' matches none of the model's {len(arrays)} arrays",
            hint=f'path = "{near}"' if near else "removing the override",
        )
    if isinstance(s.rules.auto, AutoRule) and not any(p.rule == "auto" for p in (*s.parameters, *s.others)):
        message = (
            "[rules.auto] applies to arrays without dim names, but every array of the model has names or an override"
        )
        yield Finding(
            code="rule_never_used", severity="warning", path="auto", message=message, hint="remove [rules.auto]"
        )


def _duplicates(s: Subject) -> Iterator[Finding]:
    """Yield the rules that repeat another rule, or that never apply."""
    arrays = [*s.parameters, *s.others]
    taken: dict[str, str] = {}
    for pattern, _ in s.rules.overrides:
        matched = [p.path for p in arrays if path_matches(pattern, p.path) or path_matches(pattern, p.model_path)]
        if matched and all(path in taken for path in matched):
            first = taken[matched[0]]
            yield Finding(
                code="duplicate_rule",
                severity="warning",
                path=pattern,
                message=f"the override for path '{pattern}' never applies: '{first}', which comes first, matches "
                f"{'it' if len(matched) == 1 else f'all {len(matched)} arrays that it matches'}",
                hint=f"removing it, or putting it before '{first}'",
            )
        for path in matched:
            taken.setdefault(path, pattern)
    for kind in ("compute", "optimizer"):  # In [rules.gradients] an equal entry matters: it sets when to reduce.
        for name, axes in getattr(s.rules, kind).items():
            if name in s.rules.logical and axes == s.rules.logical[name]:
                yield Finding(
                    code="duplicate_rule",
                    severity="warning",
                    path=name,
                    message=f"[rules.{kind}] {name} = {_plain(axes)} repeats [rules.logical]",
                    hint=f"removing {name} from [rules.{kind}]",
                )


def _crossing(s: Subject) -> Iterator[Finding]:
    """Yield the axes that communicate in every layer, across NVLink domains."""
    domain = math.prod(axis.number("nvlink") for axis in s.spec.axes)
    for axis in s.spec.axes:
        across = axis.number("infiniband")
        role = "tensor" if axis.name in s.roles.tensor else "expert" if axis.name in s.roles.expert else None
        if across == 1 or role is None:
            continue
        what = "every layer's activations" if role == "tensor" else "every routed token, twice a layer,"
        fits = math.gcd(axis.size, domain)
        hint = (
            f"[mesh] {axis.name} = {fits}, with the {across} domains on an axis that shards the batch"
            if fits == axis.size
            else f"[mesh] {axis.name} = {fits}, its largest part inside a domain, and another axis for the rest"
        )
        inner = [a for a in s.spec.axes if a.name in s.roles.expert and a.size > 1 and a.number("infiniband") == 1]
        two_levels = role == "expert" and axis.number("nvlink") == 1 and bool(inner)
        if two_levels:
            hint = "hierarchical_dispatch = true in [model], if not set: it sends one copy of a token to each domain"
        yield Finding(
            code="axis_crosses_domain",
            severity="note" if two_levels else "warning",
            path=axis.name,
            message=f"{role} axis '{axis.name}' of size {axis.size} crosses {across} NVLink domains of {domain} GPUs: "
            f"{what} go over InfiniBand",
            hint=hint,
        )


def _idle(s: Subject) -> Iterator[Finding]:
    names = {n for p in s.parameters for n in p.logical_axes or ()}
    states = {
        a for kind in ("compute", "gradients", "optimizer") for n, axes in getattr(s.rules, kind).items()
        if n in names for a in axes
    }  # fmt: skip
    cut = s.cut_by | states | frozenset().union(*(a.axes for a in s.activations))
    cut = cut | s.deferred
    if not s.activations:  # The step shards the batch even without a constraint.
        cut = cut | s.roles.batch
    idle = [axis for axis, size in s.sizes.items() if size > 1 and axis not in cut]
    batch = [a for a in s.spec.axis_names if a in s.roles.batch or a in idle]
    for axis in idle:
        message = f"mesh axis '{axis}' of size {s.sizes[axis]} shards nothing: its GPUs repeat work"
        hint = f"[rules.logical] act_batch = {_plain(batch)}, or another preset"
        if axis in s.roles.batch:
            hint = 'meshkit.constrain(x, "act_batch", ...) in the model, and a batch that the axis divides'
        yield Finding(code="idle_axis", severity="warning", path=axis, message=message, hint=hint)


def _unconstrained(s: Subject) -> Iterator[Finding]:
    """Yield a finding if the model never constrains the batch: the partitioner then infers activations from weights."""
    batch = [a for a in s.spec.axis_names if a in s.roles.batch - s.deferred and s.sizes[a] > 1]
    if not batch or any(a.axes.issuperset(batch) for a in s.activations):
        return
    what = "constrains no activation" if not s.activations else "constrains none of its activations over the batch"
    trapped = s.cut_by & set(batch)
    why = (
        f"the parameters are sharded over {_names(sorted(trapped))}, too, so XLA may follow them and gather the "
        "batch on every GPU (a 4-layer decoder took 5.7 times as long and 4 times the memory)"
        if trapped
        else "XLA has only the batch itself to follow"
    )
    yield Finding(
        code="unconstrained_activations",
        severity="warning" if trapped else "note",
        path="activations",
        message=f"act_batch is sharded over {_names(batch)}, but the model {what}: {why}",
        hint='x = meshkit.constrain(x, "act_batch", None, ...) after the embedding and after each block',
    )


def _best_cut(s: Subject, p: Placed, axes: Sequence[str]) -> tuple[str, int] | None:
    """Return the first of the axes that can still shard a dim of p, and the largest such dim."""
    for axis in axes:
        own = [s.pieces(cuts) for cuts in p.spec]
        fits = [d for d, n in enumerate(p.shape) if n % (own[d] * s.sizes[axis]) == 0]
        if fits:
            return axis, max(fits, key=lambda d: (p.shape[d] // own[d], -d))
    return None


def _override_hint(s: Subject, p: Placed) -> str | None:
    """Return an override that shards p, in a form that can be pasted below [rules]."""
    candidates = [a for a in s.spec.axis_names if s.sizes[a] > 1 and a not in p.axes]
    # Axes that shard other parameters come first, since these are gathered anyway; tensor axes come last.
    ranked = sorted(candidates, key=lambda a: (a in s.roles.tensor, a not in s.cut_by, -s.sizes[a]))
    best = _best_cut(s, p, ranked)
    if best is None:
        return None
    spec = [(*axes, best[0]) if d == best[1] else axes for d, axes in enumerate(p.spec)]
    if not s.of_file:
        return f'overrides=[("{p.path}", {tuple(list(axes) or None for axes in spec)})] of the rules'
    return f'override = [{{ path = "{p.path}", spec = [{", ".join(_plain(axes) for axes in spec)}] }}] below [rules]'


def _plain(axes: Iterable[str]) -> str:
    names = [f'"{a}"' for a in axes]
    return '"replicated"' if not names else names[0] if len(names) == 1 else f"[{', '.join(names)}]"


def _names(axes: Iterable[str]) -> str:
    return " x ".join(repr(a) for a in axes)
