"""Locates the keys of an experiment, and the user's code that they name, for messages.

    Experiment -> planning.resolve -> UserCode, Places -> whatever runs the code, which knows no Experiment

The user must fix what their code raises: `UserCode.calling` reports it at the key that names the code.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshkit.config.files import TomlDocument
from meshkit.config.toml import SpecError, split_key
from meshkit.errors import ConfigError, MeshkitError
from meshkit.redaction import redact

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# Packages that models and trainers are built with: their lines say nothing about the user's code.
TOOLS = "jax|jaxlib|flax|optax|chex|equinox|haiku|keras|einops|jaxtyping|beartype"
_OF_TOOLS = re.compile(rf"^<|/lib/python[\d.]+/(?!(?:site|dist)-packages/)|/(?:site|dist)-packages/(?:{TOOLS})/")
_LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Places:
    """Where the keys of a file were written."""

    document: TomlDocument | None = field(default=None, repr=False)
    """The file with what was laid over it; None for an experiment made in code, whose keys stand for themselves."""

    def where(self, key: str) -> str:
        """Return where a key (dotted) was written."""
        return self.document.where(split_key(key)) if self.document else key

    def error(self, key: str, message: str, hint: str | None = None) -> ConfigError:
        """Return an error about a key (dotted), pointing at where it was written."""
        return SpecError(message, key=split_key(key), hint=hint, at=self.where(key))


@dataclass(frozen=True)
class UserCode:
    """A class or function that a key names."""

    found: Any
    name: str
    """As it is written, `package.module:Name`."""
    key: str
    """The one that names it (dotted), `model.class`."""
    places: Places

    def error(self, message: str, hint: str | None = None) -> ConfigError:
        """Return an error about the code, pointing at the key that names it."""
        return self.places.error(self.key, message, hint)

    @contextmanager
    def calling(self, what: str | None = None, hint: str | None = None) -> Iterator[None]:
        """Turn what the code in this block raises into a ConfigError at the key that names it.

        Errors of meshkit pass, and so do those of a device or of memory, which say nothing about the code.

        `what` is the code, at the beginning of the message, by default its name.

        Raises:
            ConfigError: the block raised another Exception, or a SystemExit.
        """
        try:
            yield
        except (MeshkitError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            jax = sys.modules.get("jax")
            if jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
                raise
            raise self.error(f"{what or self.name} raised {describe_error(error)}.", hint) from error


def describe_error(error: BaseException) -> str:
    """Return an exception in one line: type, first line of its message, and the last line of the user's own code."""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{Path(error.filename or '?').name}:{error.lineno}"
    else:
        message, place = str(error), _user_line(error)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    if len(first) > _LONGEST_MESSAGE:
        first = f"{first[:_LONGEST_MESSAGE]}..."
    text = redact(f"{type(error).__name__}: {first.rstrip('.')}") if first else type(error).__name__
    return f"{text} ({place})" if place else text


def raised_by_user(error: BaseException) -> str | None:
    """Return `file:line` if a `raise` of the user's own code made the error; None for an accident in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    refuses = bool(frames) and (frames[-1].line or "").lstrip().startswith("raise ")
    return _user_line(error) if refuses else None


def line_within(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame of a program, installed or not; None if meshkit's are further in."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OURS):
            return None
        if not _OF_TOOLS.search(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def _user_line(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame that is neither meshkit's nor of an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<", *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None
