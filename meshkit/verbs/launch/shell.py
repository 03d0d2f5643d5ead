"""A bash script as values and fixed text: what is the job's is quoted, what is meshkit's has no holes in it.

directives, assignments (quoted) + bodies/*.sh (as they are) -> Script.render()
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from meshkit.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@%/=\[\]*-]*", re.ASCII)


@dataclass(frozen=True)
class Script:
    """A bash script.

    Attributes:
        comment: its first lines, without `#`.
        directives: `#SBATCH` options by name; an empty value is a flag.
        assignments: shell variables: whole numbers, words, or arrays of words.
        bodies: names of the fixed parts that follow, without `.sh`.
    """

    comment: Sequence[str]
    directives: Mapping[str, str]
    assignments: Mapping[str, int | str | tuple[str, ...]]
    bodies: Sequence[str]

    def render(self) -> str:
        """The text.

        Raises:
            ConfigError: a directive has a character that SLURM might take for something else.
        """
        head = ["#!/usr/bin/env bash", *(f"# {line}" for line in self.comment)]
        head += [_directive(name, value) for name, value in self.directives.items()]
        values = [f"{name}={_value(value)}" for name, value in self.assignments.items()]
        texts = [
            resources.files("meshkit.verbs.launch").joinpath(f"bodies/{b}.sh").read_text("utf-8") for b in self.bodies
        ]
        return "\n".join([*head, "", *values, "", *texts]).rstrip("\n") + "\n"


def one_line(text: str, at: str) -> str:
    """The text, for a place that takes no line breaks and control characters.

    Raises:
        ConfigError: it has one.
    """
    if not text.isprintable():
        raise ConfigError(f"{text[:80]!r} has a line break or control character in it.", at=at, hint="one line")
    return text


def _directive(name: str, value: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name[:80]}' is no option of sbatch.", at="--sbatch", hint="--sbatch partition=gpu")
    if not _PLAIN.fullmatch(value):
        raise ConfigError(
            f"'{value[:80]}' has a space or another character that a #SBATCH line cannot hold.", at=f"--sbatch {name}"
        )
    return f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"


def _value(value: int | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return "(" + " ".join(map(shlex.quote, value)) + ")"
    return str(value) if isinstance(value, int) else shlex.quote(value)
