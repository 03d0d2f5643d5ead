"""What `meshkit doctor --json` prints, and how it reads in a terminal."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshkit.errors import MeshkitError
from meshkit.redaction import redact

Status = Literal["ok", "warning", "error"]
_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "bold red")}


class Result(BaseModel):
    """One check."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    check: str
    status: Status
    """`error` is what makes a job fail or hang; `warning` what makes it slow, or fails later."""
    message: str
    """What was found, with the numbers."""
    hint: str | None = None
    """The way out; None where all is well."""


class Diagnosis(BaseModel):
    """All checks of one machine, or of a gang as process 0 saw it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal["meshkit.doctor/1"] = "meshkit.doctor/1"
    host: str
    checks: tuple[Result, ...]

    @property
    def errors(self) -> tuple[Result, ...]:
        """The checks that found what makes a job fail."""
        return tuple(c for c in self.checks if c.status == "error")

    def to_dict(self) -> dict:
        """As JSON has it."""
        found = self.model_dump(mode="json")
        return {"schema": found.pop("schema_"), **found}


def ok(check: str, message: str) -> Result:
    """A check that found nothing wrong."""
    return Result(check=check, status="ok", message=redact(message))


def warning(check: str, message: str, hint: str) -> Result:
    """A check that found what makes a job slow, or fails later."""
    return Result(check=check, status="warning", message=redact(message), hint=redact(hint))


def failed(check: str, problem: MeshkitError, hint: str) -> Result:
    """A check that ended in an error, which may know the way out better than `hint`."""
    return error(check, problem.message, problem.hint or hint)


def error(check: str, message: str, hint: str) -> Result:
    """A check that found what makes a job fail or hang."""
    return Result(check=check, status="error", message=redact(message), hint=redact(hint))


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints one line a check, and the way out below those that found something."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for c in diagnosis.checks:
        word, style = _MARKS[c.status]
        grid.add_row(Text(word, style), Text(c.check, "bold"), Text(c.message))
        if c.hint:
            grid.add_row("", "", Text(f"try {c.hint}", "dim"))
    console.print(grid)
    bad, odd = len(diagnosis.errors), sum(c.status == "warning" for c in diagnosis.checks)
    console.print(f"{diagnosis.host}: {len(diagnosis.checks)} checks, {bad} errors, {odd} warnings")
