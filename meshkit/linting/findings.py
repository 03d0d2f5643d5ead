"""What a lint says: findings, and the allow list that silences them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from meshkit.config.rules import path_matches
from meshkit.config.sections import AllowTable
from meshkit.errors import ConditionError
from meshkit.report.schema import Part

Severity = Literal["error", "warning", "note"]
SEVERITY_COLOURS: dict[Severity, str] = {"error": "red", "warning": "yellow", "note": "cyan"}


class Finding(Part):
    """Something that is legal and probably not meant."""

    code: str  # of its class, e.g. `idle_axis`
    severity: Severity  # `error` stops, `warning` stops `explain --strict`, `note` only tells
    path: str  # what it is about: a parameter's path, a logical or mesh axis, `collective/<kind>/<axes>`
    message: str  # one sentence with the numbers
    hint: str | None = None  # what to do, where possible a line of TOML
    allowed: bool = False  # whether the experiment's allow list silences it
    reason: str | None = None  # why it is allowed

    def __str__(self) -> str:
        """One line."""
        what = f"{self.severity} {self.code} at {self.path}: {self.message}"
        return what + (f"; try {self.hint}" if self.hint else "")


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, warnings, notes; otherwise in the order given."""
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(findings, key=lambda f: order[f.severity])


def apply_allow_list(
    findings: Iterable[Finding], allow: Sequence[AllowTable], *, unchecked: Iterable[str] = ()
) -> tuple[list[Finding], list[Finding]]:
    """What stays and what is allowed; an entry that silences nothing is itself a finding.

    Args:
        findings: of all checks that ran.
        allow: `[[lint.allow]]` of the experiment; `path` is a glob as in `[[rules.override]]`.
        unchecked: codes that nobody looked for, so that an entry about them says nothing.
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
    """Stops if any finding is more than a note.

    Raises:
        ConditionError: with how many, and which.
    """
    failing = [f for f in findings if f.severity != "note"]
    if failing:
        codes = ", ".join(dict.fromkeys(f.code for f in failing))
        number = "is 1 finding" if len(failing) == 1 else f"are {len(failing)} findings"
        raise ConditionError(
            f"there {number} ({codes}), and --strict asks for none.",
            hint="mend it, or allow it: [[lint.allow]] code, path, reason",
        )


def finding_lines(f: Finding) -> Iterator[RenderableType]:
    """Its class and place, what is wrong, and what to do."""
    yield Text.assemble((f"{f.severity} {f.code}", SEVERITY_COLOURS[f.severity]), f" at {f.path}")
    yield Padding(Text(f.message), (0, 0, 0, 2))
    if f.hint:
        yield Padding(Text(f"try {f.hint}"), (0, 0, 0, 2))
