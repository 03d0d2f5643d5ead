"""The user's own code, named by import path: found, and what it raises said in terms of the experiment."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshkit.config.experiment import Experiment
from meshkit.config.own_code import check_writers, defined_in, find_folder, is_of_python, serve
from meshkit.config.shipped import MODELS, is_shipped_name, shipped_folder
from meshkit.config.site import is_under, listed, read_site
from meshkit.errors import ConfigError, MeshkitError
from meshkit.redaction import redact

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
    except (MeshkitError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(error, jax.errors.JaxRuntimeError):
            raise
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
    text = redact(f"{type(error).__name__}: {first.rstrip('.')}") if first else type(error).__name__
    return f"{text} ({place})" if place else text


def _user_line(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that is neither meshkit's nor of an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<", *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def load_object(
    name: str, search_paths: Iterable[Path] = (), *, at: str | None = None, also: Sequence[str] = ()
) -> Any:
    """What `"pkg.mod:Name"` names: of an installed package, or of the first of the experiment's folders that holds it.

    The models that meshkit ships come last. Python's own modules are refused before anything is imported. Where the
    site declares roots of models (`meshkit.config.site`), every module on the way lies in one of them or is a shipped
    model, and only they are searched beside what Python finds anyway. `also` names packages on which meshkit rests
    itself, which are as allowed as it is where they are installed.

    Raises:
        ConfigError: not of that form, a module of Python itself, no such module, one that fails to import or that
            everybody may change, or no such name in it; or it is outside of the declared roots.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"'{name}' is not of the form \"package.module:Name\".", at=at)
    if is_of_python(module_name):
        raise ConfigError(
            f"'{name}' is of Python itself, and is not loaded: an experiment names a model's code.",
            at=at,
            hint="a module of your own, under a name that Python has not, or of an installed package",
        )
    roots = read_site().model_roots
    searched = list(search_paths) if roots is None else [*(p for p in search_paths if is_under(p, roots)), *roots]
    shipped = [shipped_folder()] if is_shipped_name(module_name) else []
    folder = find_folder(module_name, [*searched, *shipped])
    check_writers(module_name, folder, at)
    if folder is not None:
        serve(module_name, folder, at)
    try:
        if roots is not None and not (folder is None and module_name.partition(".")[0] in also):
            _check_roots(module_name, [*roots, *(folder / MODELS for folder in shipped)], at)
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"importing '{module_name}' failed: {describe_error(error)}.", at=at) from error
        where = ", ".join(map(str, searched)) or "the import path"
        hint = "a path that exists in the working directory or beside the experiment file"
        raise ConfigError(f"no module '{error.name}' in {where}.", at=at, hint=hint) from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing '{module_name}' raised {describe_error(error)}.", at=at) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f'"{module_name}:{near[0]}"' if near else None
        raise ConfigError(f"module '{module_name}' has no '{attribute}'.", at=at, hint=hint)
    return getattr(module, attribute)


def load_function(experiment: Experiment, key: str, name: str) -> Callable[..., Any]:
    """The user's function that a key of the experiment names.

    Raises:
        ConfigError: at that key; see `load_object`, or it is no function of a module of theirs.
    """
    found = load_object(name, experiment.search_paths, at=experiment.where(key))
    if not callable(found):
        raise experiment.error(key, f"{name} is a {type(found).__name__}, not a function.")
    module = defined_in(found)
    if module is None or is_of_python(module):
        raise experiment.error(
            key, f"{name} is of Python itself, not a function of yours.", hint="a function written in a module"
        )
    return found


def _check_roots(module_name: str, roots: Sequence[Path], at: str | None) -> None:
    """Stops where a module is outside of the roots, before its code or that of a package around it runs.

    Raises:
        ConfigError: it is, or is built into Python.
        ModuleNotFoundError: there is none.
    """
    parts = module_name.split(".")
    for i in range(1, len(parts) + 1):
        part = ".".join(parts[:i])
        # finding a module imports the packages around it, which have been checked by then
        spec = importlib.util.find_spec(part)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {part!r}", name=part)
        files = [
            *(spec.submodule_search_locations or ()),
            *([spec.origin] if spec.has_location and spec.origin else []),
        ]
        outside = next((file for file in files if not is_under(file, roots)), None)
        if outside is not None or not files:
            raise ConfigError(
                f"module '{part}' is at {outside or 'no file'}, outside of the folders that this site allows.",
                at=at,
                hint=f"a model in {listed(roots)}",
            )


def raised_by_user(error: BaseException) -> str | None:
    """`file:line` if the statement that raised is the user's own: a refusal, not an accident in some library."""
    frames = traceback.extract_tb(error.__traceback__)
    refuses = bool(frames) and (frames[-1].line or "").lstrip().startswith("raise ")
    return _user_line(error) if refuses else None
