"""What an experiment names that lies elsewhere: the user's code, what meshkit ships, within what the site allows.

    "pkg.mod", folders -> find_folder -> its folder -> check_writers, serve -> importlib imports pkg from there

Each module comes from the one folder that holds it. A folder on `sys.path` answers whoever asks, with whatever lies in
it: jax looks for plugins in `jax_plugins`, packages for their entry points. Here a folder answers for the module that
an experiment names, and for what the code that came from there imports itself; everybody else is told that nothing is
there.

Shipped are models (`models.llama:Llama`) and experiments (`llama3_8b`). In a clone they lie at its top, `models/` and
`configs/experiments/`; in the wheel below the package. No installed package is called `models`, and a user's own comes
before.

    /etc/meshkit/site.toml, MESHKIT_MODEL_ROOTS, MESHKIT_FILE_ROOTS -> Site -> load_object, load

    model_roots = ["/opt/models", "/home/shared/experiments"]    # code that `pkg.mod:Name` may come from
    file_roots  = ["/data"]                                      # files and folders that an experiment may name

Without them an experiment may name any file, and code where `find_folder` finds it. An experiment file has no key for
it, so it cannot widen what is declared; the variables can only narrow what the site's file says. This protects whoever
runs somebody else's experiment; it does not confine code once it runs, nor a user who writes their own.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import site
import stat
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder, all_suffixes
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from meshkit.config.files import PATH_KEYS
from meshkit.config.places import Places, UserCode, describe_error
from meshkit.config.toml import SpecError, did_you_mean, dotted
from meshkit.console import say
from meshkit.errors import ConfigError, a_type

_PACKAGE = Path(__file__).resolve().parents[1]
MODELS = "models"
SITE_FILE = Path("/etc/meshkit/site.toml")
_VARIABLES = {"model_roots": "MESHKIT_MODEL_ROOTS", "file_roots": "MESHKIT_FILE_ROOTS"}
_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")
_OF_PYTHON = {*sys.stdlib_module_names, *sys.builtin_module_names, "__main__", "__mp_main__", "test"}
_MOST_WRAPPERS = 100
_warned: set[str] = set()


def load_object(
    name: str, search_paths: Iterable[Path] = (), *, at: str | None = None, also: Sequence[str] = ()
) -> Any:
    """What `"pkg.mod:Name"` names: of an installed package, or of the first of the experiment's folders that holds it.

    The models that meshkit ships come last. Python's own modules are refused before anything is imported. Where the
    site declares roots of models, every module on the way lies in one of them or is a shipped
    model, and only they are searched beside what Python finds anyway. `also` names packages on which meshkit rests
    itself, which are as allowed as it is where they are installed.

    Args:
        name: `package.module:Name`.
        search_paths: folders of the experiment, the first one first.
        at: where the name was written, for errors.
        also: packages on which meshkit rests itself.

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


def load_function(name: str, search_paths: Iterable[Path], key: str, places: Places) -> UserCode:
    """The user's function that a key of the experiment names.

    Args:
        name: the key's value, `package.module:function`.
        search_paths: folders of the experiment, the first one first.
        key: the one that names it, `train.metrics`.
        places: where keys were written.

    Raises:
        ConfigError: at that key; see `load_object`, or it is no function of a module of theirs.
    """
    code = UserCode(load_object(name, search_paths, at=places.where(key)), name, key, places)
    check_function(code)
    return code


def check_function(code: UserCode) -> None:
    """Stops where what a key names is no function of a module of the user's.

    Raises:
        ConfigError: at that key.
    """
    if not callable(code.found):
        raise code.error(f"{code.name} is {a_type(code.found)}, not a function.")
    module = defined_in(code.found)
    if module is None or is_of_python(module):
        raise code.error(f"{code.name} is of Python itself, not a function of yours.", "a function written in a module")


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


def is_of_python(module_name: str) -> bool:
    """Whether a module is Python's own: its standard library, or built in."""
    return module_name.partition(".")[0] in _OF_PYTHON


def defined_in(found: Any) -> str | None:
    """The module whose Python code runs when something is called; None for what is no code of a module.

    Looks through partials, decorators and methods: what is called in the end counts.
    """
    inner = found
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif inspect.ismethod(inner):
            inner = inner.__func__
        elif not inspect.isclass(inner) and hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    if inspect.isbuiltin(inner) or not callable(inner):
        return None
    return inner.__module__ if inspect.isclass(inner) or inspect.isfunction(inner) else type(inner).__module__


def find_folder(module_name: str, folders: Iterable[Path]) -> Path | None:
    """The first of the folders that holds a module; None where Python itself finds it, or none of them does.

    What is installed comes first, so that no folder beside an experiment can stand for a package of its name.
    """
    top, folders = module_name.partition(".")[0], list(folders)
    spec = _installed(top)
    if spec is not None and any(_holds(Path(folder), module_name) for folder in _parents(spec)):
        return None
    if folder := next((folder for folder in folders if _holds(folder, module_name)), None):
        return folder
    if spec is not None and spec.loader is not None:
        return None
    return next((folder for folder in folders if _holds(folder, top) or (folder / top).is_dir()), None)


def find_source(module_name: str, folders: Iterable[Path]) -> Path | None:
    """The Python file of a module that `find_folder` would find; nothing is imported."""
    folders = list(folders)
    found = find_folder(module_name, folders)
    held = [found] if found is not None else [Path(p) for p in _parents(_installed(module_name.partition(".")[0]))]
    files = (file for folder in held for file in _files(folder, module_name, SOURCE_SUFFIXES))
    return next((file for file in files if file.is_file()), None)


def check_writers(module_name: str, folder: Path | None, at: str | None) -> None:
    """Stops where anybody may change a module, or put one beside it; says where a group may.

    Args:
        module_name: the module.
        folder: that holds it, looked at unless pip installed it; None for one that Python finds.
        at: where the module is named.

    Raises:
        ConfigError: its file, a package around it, or the folder that holds it is writable by everybody.
    """
    if os.name != "posix":
        return
    if folder is None:
        spec = _installed(module_name.partition(".")[0])
        folder = next(map(Path, _parents(spec)), None) if spec else None
    if folder is None or any(folder.is_relative_to(packages) for packages in _package_folders()):
        return
    parts = module_name.split(".")
    inside = [folder.joinpath(*parts[:i]) for i in range(len(parts) + 1)]
    for path in [*inside, *(inside[-1].with_name(parts[-1] + suffix) for suffix in all_suffixes())]:
        try:
            found = path.stat()
        except OSError:  # a package or a file: one of the two is not there
            continue
        if found.st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"module '{module_name}' is not loaded: everybody may write {path} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}).",
                at=at,
                hint=f"chmod o-w {path}, once you know what is in it; or a folder that only you can write",
            )
        shared = found.st_mode & stat.S_IWGRP and not is_private_group(found.st_uid, found.st_gid)
        if shared and str(path) not in _warned:
            _warned.add(str(path))
            say(f"meshkit: a group may write {path}, from which the module '{module_name}' is loaded; chmod g-w {path}")


def serve(module_name: str, folder: Path, at: str | None) -> None:
    """Lets importlib find a module in a folder, and what the code from there imports.

    Raises:
        ConfigError: another module of that name is loaded already.
    """
    top = module_name.partition(".")[0]
    loaded = sys.modules.get(top)
    other = next(iter(_parents(loaded.__spec__)), None) if loaded is not None and loaded.__spec__ else None
    if other is not None and os.path.realpath(other) != os.path.realpath(folder):
        raise ConfigError(
            f"module '{top}' in {folder} cannot be loaded: another one of that name is, from {other}.",
            at=at,
            hint="another name for one of the two",
        )
    importlib.invalidate_caches()
    FINDER.served[top] = folder
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


class _Finder:
    """Finds top-level modules in the folders that hold the user's code, for that code alone."""

    def __init__(self):
        self.served: dict[str, Path] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a named module, or of one that lies beside a named one whose code imports it."""
        if path is not None or is_of_python(name):  # a package finds its modules itself
            return None
        folder = self.served.get(name)
        if folder is None:
            folder = self.served.get(_importer())
            found = None if folder is None else _installed(name)
            if folder is None or (found is not None and found.loader is not None):
                return None
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is not None:
            self.served[name] = folder
            if spec.loader is None:  # a folder without __init__.py: it alone, not all of its name on sys.path
                spec.submodule_search_locations = [str(folder / name)]
        return spec


FINDER: Any = _Finder()


def _importer() -> str:
    """The top-level name of the module whose code is importing; empty if there is none."""
    frame: FrameType | None = sys._getframe(2)  # whoever asked the finder
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        if top not in _IMPORTING:
            return top
        frame = frame.f_back
    return ""


def _installed(top: str) -> ModuleSpec | None:
    """What Python finds under a top-level name without any folder of an experiment; nothing is imported."""
    for finder in sys.meta_path:
        if finder is not FINDER and (spec := finder.find_spec(top, None)) is not None:
            return spec
    return None


def _parents(spec: ModuleSpec | None) -> list[str]:
    """The folders that hold a top-level module, by its spec: several for a package without __init__.py."""
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or ()) or ([spec.origin] if spec.has_location and spec.origin else [])
    return [os.path.dirname(place) for place in places]


def _holds(folder: Path, module_name: str) -> bool:
    """Whether a folder has the file of a module."""
    return any(os.path.isfile(file) for file in _files(folder, module_name, all_suffixes()))


def _files(folder: Path, module_name: str, suffixes: Iterable[str]) -> list[Path]:
    """The files that a module of a folder may be."""
    base, suffixes = folder.joinpath(*module_name.split(".")), list(suffixes)
    return [base.with_name(base.name + suffix) for suffix in suffixes] + [base / f"__init__{s}" for s in suffixes]


def _package_folders() -> list[str]:
    """Where pip installs, whose permissions are those of the installation."""
    return [*site.getsitepackages(), site.getusersitepackages()]


def is_private_group(uid: int, gid: int) -> bool:
    """Whether a group is the one that a user has alone, as many systems give every user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def shipped_folder() -> Path:
    """The folder that holds `models/` and `configs/experiments/`."""
    inside = _PACKAGE / "_shipped"
    return inside if inside.is_dir() else _PACKAGE.parent


def is_shipped_name(module_name: str) -> bool:
    """Whether a module may be one of the shipped models, by its name."""
    return module_name.partition(".")[0] == MODELS


@cache
def shipped_experiments() -> dict[str, Path]:
    """Name -> file of every shipped experiment."""
    return {file.stem: file for file in sorted((shipped_folder() / "configs" / "experiments").glob("*.toml"))}


def find_experiment(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file of an experiment: as given, or a shipped one by its name where no such file is.

    Raises:
        ConfigError: a bare name of which there is neither.
    """
    name = os.fspath(path)
    if not name or "/" in name or os.sep in name or name.endswith(".toml") or os.path.isfile(name):
        return path
    known = shipped_experiments()
    if name in known:
        return known[name]
    if not name.isidentifier() or os.path.exists(name):
        return path
    hint = did_you_mean(name, known)
    raise ConfigError("there is no such experiment file, nor one that meshkit ships.", at=name, hint=hint)


@dataclass(frozen=True)
class Site:
    """The declared folders, resolved; None where nothing is declared and any will do.

    Attributes:
        model_roots: that models, losses, data, metrics and hook functions may come from.
        file_roots: that files and folders named by an experiment may lie in.
    """

    model_roots: tuple[Path, ...] | None = None
    file_roots: tuple[Path, ...] | None = None


def read_site() -> Site:
    """The site's file, narrowed by the variables.

    Raises:
        ConfigError: the file can be changed by others, or says something else; a root is not absolute, or a variable
            names one that the file does not allow.
    """
    declared = _read_file(SITE_FILE)
    found: dict[str, tuple[Path, ...] | None] = {}
    for key, variable in _VARIABLES.items():
        allowed = declared.get(key)
        wanted = _roots(os.environ[variable].split(os.pathsep), variable) if os.environ.get(variable) else None
        if wanted is not None and allowed is not None:
            for root in wanted:
                if not is_under(root, allowed):
                    raise ConfigError(
                        f"{variable} names {root}, which {SITE_FILE} does not allow.",
                        at="environment",
                        hint=f"a folder in {listed(allowed)}",
                    )
        found[key] = allowed if wanted is None else wanted
    return Site(found["model_roots"], found["file_roots"])


def is_under(path: str | Path, roots: Sequence[Path]) -> bool:
    """Whether a path, with `..` and links resolved, is one of the roots or lies in one."""
    real = Path(os.path.realpath(path))
    return any(real == root or root in real.parents for root in roots)


def listed(roots: Sequence[Path]) -> str:
    """The roots in words."""
    return ", ".join(map(str, roots)) or "no folder at all"


def check_files(table: Mapping[str, Any]) -> None:
    """Stops where an experiment names a file outside of the declared folders; its paths are absolute by now.

    Raises:
        ConfigError: which key, and where it may lie.
    """
    roots = read_site().file_roots
    if roots is None:
        return
    for key in PATH_KEYS:
        value: Any = table
        for name in key:
            value = value.get(name) if isinstance(value, Mapping) else None
        # what is no path: the name of a cluster, a function, the standard library
        if isinstance(value, str) and os.path.isabs(value) and not is_under(value, roots):
            raise SpecError(
                f"{dotted(key)} is outside of the folders that this site allows.",
                key=key,
                value=value,
                hint=f"a path in {listed(roots)}",
            )


def _read_file(path: Path) -> dict[str, tuple[Path, ...]]:
    """The folders that the site's file declares; none without a file."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"{path} could be changed by others than the administrator (uid {found.st_uid}, mode "
                    f"{stat.S_IMODE(found.st_mode):04o}).",
                    hint=f"chown root {path} && chmod 644 {path}",
                )
            table = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # not TOML, not UTF-8
        hint = "model_roots and file_roots, each a list of folders"
        raise ConfigError(f"the site's file cannot be read: {error}.", at=str(path), hint=hint) from None
    for key, value in table.items():
        if key not in _VARIABLES:
            hint = did_you_mean(key, _VARIABLES)
            raise ConfigError(f"the site's file has an unknown key '{key}'.", at=str(path), hint=hint)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{key} is not a list of folders.", at=str(path), hint=f'{key} = ["/opt/models"]')
    return {key: _roots(value, str(path)) for key, value in table.items()}


def _roots(texts: Sequence[str], at: str) -> tuple[Path, ...]:
    """Absolute folders, with links resolved."""
    for text in texts:
        if not os.path.isabs(text):
            raise ConfigError(f"'{text}' is not an absolute path.", at=at, hint="folders from / on")
    return tuple(Path(os.path.realpath(text)) for text in texts)
