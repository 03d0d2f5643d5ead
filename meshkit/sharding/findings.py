"""What a lint says: findings, the allow list that silences them, and what each mesh axis is for. Layer 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from meshkit.spec.rules import ShardingRules, path_pattern
from meshkit.spec.sections import Allowed

Severity = Literal["error", "warning", "note"]

_TENSOR_ACTIVATIONS = ("act_heads", "act_kv_heads", "act_mlp", "act_vocab")
_TENSOR_PARAMETERS = ("heads", "kv_heads", "mlp", "vocab")
_EXPERTS = ("experts", "act_experts")


@dataclass(frozen=True)
class Finding:
    """Something that is legal and probably not meant.

    Attributes:
        code: of its class, e.g. `idle_axis`.
        severity: `error` stops, `warning` stops `explain --strict`, `note` only tells.
        path: what it is about: a parameter's path, a logical or mesh axis, `collective/<kind>/<axes>`.
        message: one sentence with the numbers.
        hint: what to do, where possible a line of TOML.
        reason: why it is allowed, where the experiment's allow list silences it.
    """

    code: str
    severity: Severity
    path: str
    message: str
    hint: str | None = None
    reason: str | None = None

    @property
    def allowed(self) -> bool:
        """Whether the allow list silences it."""
        return self.reason is not None


@dataclass(frozen=True)
class AxisRoles:
    """Which mesh axes do what, read off the rules.

    Attributes:
        batch, length: axes that cut `act_batch`, and `act_length` or `act_residual_length`.
        residual: axes that cut `act_residual_length` alone (sequence parallelism).
        tensor: axes that cut heads, mlp or vocab of activations, or of parameters without cutting the batch; a
            pipeline, which cuts layers, may cut the vocabulary too and is none.
        expert: axes that cut experts.
    """

    batch: frozenset[str]
    length: frozenset[str]
    residual: frozenset[str]
    tensor: frozenset[str]
    expert: frozenset[str]

    @classmethod
    def of(cls, rules: ShardingRules) -> AxisRoles:
        """The roles that rules give."""
        mapping = rules.mapping("activations")

        def cut(*names: str) -> frozenset[str]:
            return frozenset(a for name in names for a in mapping.get(name, ()))

        batch, length = cut("act_batch"), cut("act_length")
        tensor = cut(*_TENSOR_ACTIVATIONS) | (cut(*_TENSOR_PARAMETERS) - batch - cut("layers"))
        return cls(batch, length, cut("act_residual_length") - length, tensor - length, cut(*_EXPERTS))


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, warnings, notes; otherwise in the order given."""
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda f: order[f.severity])


def apply_allow_list(
    findings: Iterable[Finding], allow: Sequence[Allowed], *, unchecked: Iterable[str] = ()
) -> tuple[list[Finding], list[Finding]]:
    """What stays and what is allowed; an entry that silences nothing is itself a finding.

    Args:
        findings: of all checks that ran.
        allow: `[[lint.allow]]` of the experiment; `path` is a glob as in `[[rules.override]]`.
        unchecked: codes that nobody looked for, so that an entry about them says nothing.
    """
    kept, allowed, used = [], [], set()
    for f in findings:
        matching = [
            i for i, a in enumerate(allow) if a.code == f.code and path_pattern(a.path).fullmatch(f.path) is not None
        ]
        used.update(matching)
        if matching and f.severity != "error":
            allowed.append(replace(f, reason=allow[matching[0]].reason))
        else:
            kept.append(f)
    idle = [a for i, a in enumerate(allow) if i not in used and a.code not in set(unchecked)]
    kept += [
        Finding(
            "unused_allow",
            "note",
            f"lint/allow/{a.code}/{a.path}",
            f"the allow entry for {a.code} at '{a.path}' silences nothing",
            "remove the entry, or correct its code or path",
        )
        for a in idle
    ]
    return sort_findings(kept), allowed
