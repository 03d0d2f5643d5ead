"""Locate the keys of an experiment, and the user's code that they name, for error messages.

`planning.resolved` makes `UserCode` and `Places` from an Experiment, for modules that run the code and have no
Experiment. `UserCode.calling` reports an exception of the user's code as an error at the key that names the code.
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
    """The places where the keys of a file were written."""

    document: TomlDocument | None = field(default=None, repr=False)
    """The file with its overrides; None for an experiment made in code, where the place of a key is the key itself."""

    def where(self, key: str) -> str:
        """Return the place where a dotted key was written."""
        return self.document.where(split_key(key)) if self.document else key

    def error(self, key: str, message: str, hint: str | None = None) -> ConfigError:
        """Return an error about a dotted key, which points at the place where the key was written."""
        return SpecError(message, key=split_key(key), hint=hint, at=self.where(key))


@dataclass(frozen=True)
class UserCode:
    """A class or function that a key names."""

    found: Any
    name: str
    """The name as it is written, `package.module:Name`."""
    key: str
    """The dotted key that names the code, such as `model.class`."""
    places: Places

    def error(self, message: str, hint: str | None = None) -> ConfigError:
        """Return an error about the code, which points at the key that names it."""
        return self.places.error(self.key, message, hint)

    @contextmanager
    def calling(self, what: str | None = None, hint: str | None = None) -> Iterator[None]:
        """Turn an exception of the code in this block into a ConfigError at the key that names the code.

        meshkit's own errors pass unchanged. So do errors of a device or of memory, which the code did not cause.

        The message begins with `what`, which is by default the name of the code.

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
    """Describe an exception in one line: type, first line of the message, and innermost line of the user's code."""
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
    """Return the user's innermost `file:line` if a `raise` statement of the user's code or of meshkit made the error.

    Return None for an accidental error, and for one that Python or an installed package raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    refuses = bool(frames) and (frames[-1].line or "").lstrip().startswith("raise ")
    of_library = refuses and not frames[-1].filename.startswith(_OURS) and frames[-1].filename.startswith(_INSTALLED)
    return _user_line(error) if refuses and not of_library else None


def line_within(error: BaseException) -> str | None:
    """Return the innermost `file:line` outside of Python and `TOOLS`; None if a frame of meshkit is further in."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_OURS):
            return None
        if not _OF_TOOLS.search(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def _user_line(error: BaseException) -> str | None:
    """Return `file:line` of the innermost frame that is neither in meshkit nor in an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<", *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None
