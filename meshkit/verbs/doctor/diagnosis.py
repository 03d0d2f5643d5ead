"""What `meshkit doctor --json` prints."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshkit.redaction import redact

Status = Literal["ok", "warning", "error"]


class Result(BaseModel):
    """One check.

    Attributes:
        check: its name.
        status: `error` is what makes a job fail or hang; `warning` what makes it slow, or fails later.
        message: what was found, with the numbers.
        hint: the way out; None where all is well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    check: str
    status: Status
    message: str
    hint: str | None = None


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


def error(check: str, message: str, hint: str) -> Result:
    """A check that found what makes a job fail or hang."""
    return Result(check=check, status="error", message=redact(message), hint=redact(hint))
