"""The user's own code, named by import path: found, and what it raises said in terms of the experiment. Layer 4."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from meshkit.errors import ConfigError, MeshkitError
from meshkit.spec.experiment import Experiment

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_LONGEST_MESSAGE = 300


@contextmanager
def user_code(experiment: Experiment, key: str, what: str, hint: str | None = None) -> Iterator[None]:
    """A block that runs the user's code: what it raises is the user's to mend, so it becomes a ConfigError at `key`.

    Errors of meshkit pass, and so do those of a device or of memory, which say nothing about the code.
    """
    try:
        yield
    except (MeshkitError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except (Exception, SystemExit) as error:
        raise experiment.error(key, f"{what} raised {describe_error(error)}.", hint=hint) from error


def describe_error(error: BaseException) -> str:
    """An exception on one line: type, first line of its message, and the last line of the user's own that it passed."""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{Path(error.filename or '?').name}:{error.lineno}"
    else:
        message, place = str(error), _user_line(error)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    if len(first) > _LONGEST_MESSAGE:
        first = f"{first[:_LONGEST_MESSAGE]}..."
    text = f"{type(error).__name__}: {first.rstrip('.')}" if first else type(error).__name__
    return f"{text} ({place})" if place else text


def _user_line(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that is neither meshkit's nor of an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<", *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def load_object(name: str, search_paths: Iterable[Path] = (), *, at: str | None = None) -> Any:
    """What `"pkg.mod:Name"` names, with the experiment's folders importable.

    Raises:
        ConfigError: not of that form, no such module, one that fails to import, or no such name in it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"'{name}' is not of the form \"package.module:Name\".", at=at)
    for path in map(str, search_paths):
        if path not in sys.path:
            sys.path.append(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"importing '{module_name}' failed: {describe_error(error)}.", at=at) from error
        searched = ", ".join(map(str, search_paths)) or "the import path"
        hint = "a path that exists in the working directory or beside the experiment file"
        raise ConfigError(f"no module '{error.name}' in {searched}.", at=at, hint=hint) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing '{module_name}' raised {describe_error(error)}.", at=at) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f'"{module_name}:{near[0]}"' if near else None
        raise ConfigError(f"module '{module_name}' has no '{attribute}'.", at=at, hint=hint)
    return getattr(module, attribute)


def raised_by_user(error: BaseException) -> str | None:
    """`file:line` if the statement that raised is the user's own: a refusal, not an accident in some library."""
    frames = traceback.extract_tb(error.__traceback__)
    refuses = bool(frames) and (frames[-1].line or "").lstrip().startswith("raise ")
    return _user_line(error) if refuses else None
