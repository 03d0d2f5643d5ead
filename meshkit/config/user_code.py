"""Load the code that an experiment names, the user's or a model that meshkit ships, as far as the site allows it.

Each module is loaded from the one folder that has it. A folder on `sys.path` would serve every import, such as jax's
search for plugins in `jax_plugins` or a package's search for entry points. Here a folder serves only the module that an
experiment names, and the imports of the code in that folder. Other users must not be able to change these files, and
cached byte code is not read.

meshkit ships models (`models.llama:Llama`) and experiments (`llama3_8b`). In a clone they are in `models/` and
`configs/experiments/` at the top, in a wheel below the package. No installed package is called `models`, and the user's
own `models` takes precedence.

A loss, data source, tokenizer, metrics function, hook or optimizer must be the user's own code, or belong to a package
of `FUNCTIONS` or of the site's list, or be named on the command line. The reason is that some installed functions
execute their arguments.
"""

from __future__ import annotations

import difflib
import errno
import functools
import importlib
import importlib.util
import inspect
import os
import site
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import SOURCE_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader, all_suffixes
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from meshkit.config.places import Places, UserCode, describe_error
from meshkit.config.site import is_under, listed, read_site
from meshkit.config.toml import did_you_mean, split_key
from meshkit.console import say
from meshkit.errors import ConfigError, a_type

_PACKAGE = Path(__file__).resolve().parents[1]
MODELS = "models"
# Keys that name functions -> the installed packages that an experiment file may name there.
FUNCTIONS = {
    "train.loss": ("optax", "meshkit.step.loss"),
    "train.metrics": (),
    "train.hooks": (),
    "optimizer.class": ("optax",),
    "data.source": ("grain",),
    "data.tokenizer": (),
    "program.make": ("meshkit.integrations",),
}
_IMPORTING = ("importlib", "_frozen_importlib", "_frozen_importlib_external")
_OF_PYTHON = {*sys.stdlib_module_names, *sys.builtin_module_names, "__main__", "__mp_main__", "test"}
_MOST_WRAPPERS = 100
_MOST_LINKS = 40
_warned: set[Path] = set()


def load_object(
    name: str, search_paths: Iterable[Path] = (), *, at: str | None = None, key: str = "", by_command: bool = False
) -> Any:
    """Import the object `"pkg.mod:Name"` from an installed package, or from the first of the folders with the module.

    The models that meshkit ships come last. Python's own modules are refused before anything is imported. If the site
    declares model roots, the module and its parent packages must be in a root, be a shipped model, or belong to an
    installed package that the key may name.

    Args:
        at: place where the name was written, for errors.
        key: the key that names the object. The keys in `FUNCTIONS` may name only a few installed packages.
        by_command: whether the command line names the object, which then may be in any installed package.

    Raises:
        ConfigError: the name has another form, or its module is Python's own, is unknown, fails to import, is writable
            by others, or is not allowed.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"'{name}' is not of the form \"package.module:Name\".", at=at)
    if is_of_python(module_name):
        raise ConfigError(
            f"'{name}' belongs to Python itself, so it is not loaded: an experiment names a model's code.",
            at=at,
            hint="a module of an installed package, or one of your own with a name that Python does not use",
        )
    allowed_here = read_site()
    roots, packages = allowed_here.model_roots, [*FUNCTIONS[key], *allowed_here.functions] if key in FUNCTIONS else []
    searched = list(search_paths) if roots is None else [*(p for p in search_paths if is_under(p, roots)), *roots]
    shipped = [shipped_folder()] if is_shipped_name(module_name) else []
    folder = find_folder(module_name, [*searched, *shipped])
    found_in, own = _home(module_name, folder)
    allowed = own or by_command or key not in FUNCTIONS
    if not allowed and not _is_listed(module_name, packages):
        raise _not_listed(name, module_name, key, packages, at)
    if own and found_in is not None:
        serve(module_name, found_in, at)
    try:
        if roots is not None and (own or not _is_listed(module_name, packages)):
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
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module_name and n[0] != "_"]
        hint = " or ".join(f'"{module_name}:{found}"' for found in near or sorted(own)[:5]) or None
        raise ConfigError(f"module '{module_name}' has no '{attribute}'.", at=at, hint=hint)
    found = getattr(module, attribute)
    defined = defined_in(found)
    if not allowed and defined is not None and not is_of_python(defined) and not _is_listed(defined, packages):
        raise _not_listed(name, defined, key, packages, at)
    return found


def load_code(name: str, search_paths: Iterable[Path], key: str, places: Places) -> UserCode:
    """Import the object that a key of the experiment names.

    Raises:
        ConfigError: at that key; see `load_object`.
    """
    by_command = places.document is None or places.document.is_overridden(split_key(key))
    found = load_object(name, search_paths, at=places.where(key), key=key, by_command=by_command)
    return UserCode(found, name, key, places)


def load_function(name: str, search_paths: Iterable[Path], key: str, places: Places) -> UserCode:
    """Import the function that a key of the experiment names; arguments as for `load_code`.

    Raises:
        ConfigError: at that key; see `load_object` and `check_function`.
    """
    code = load_code(name, search_paths, key, places)
    check_function(code)
    return code


def check_function(code: UserCode) -> None:
    """Refuse an object that is not a function, or is a function of Python itself.

    Raises:
        ConfigError: at the key that names it.
    """
    if not callable(code.found):
        raise code.error(f"{code.name} is {a_type(code.found)}, not a function.")
    module = defined_in(code.found)
    if module is None or is_of_python(module):
        raise code.error(
            f"{code.name} belongs to Python itself; it is not a function of yours.", "a function written in a module"
        )


def _is_listed(module_name: str, packages: Iterable[str]) -> bool:
    return any(f"{module_name}.".startswith(f"{package}.") for package in packages)


def _not_listed(name: str, module_name: str, key: str, packages: Sequence[str], at: str | None) -> ConfigError:
    return ConfigError(
        f"'{name}' belongs to the installed package '{module_name.partition('.')[0]}', but in a file {key} may "
        f"only name code of {' or '.join([*packages, 'your own modules'])}.",
        at=at,
        hint=f"a function of your own, in a module beside the file, that calls it; or the same by --set {key}=...",
    )


def _check_roots(module_name: str, roots: Sequence[Path], at: str | None) -> None:
    """Check that a module and its parent packages are in the roots, each before its code runs.

    Raises:
        ConfigError: a module is outside of the roots, or has no file.
        ModuleNotFoundError: there is no such module.
    """
    parts = module_name.split(".")
    for i in range(1, len(parts) + 1):
        part = ".".join(parts[:i])
        # `find_spec` imports the parent packages, which have been checked by then.
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
    """Return whether a module is Python's own: in its standard library, or built in."""
    return module_name.partition(".")[0] in _OF_PYTHON


def defined_in(found: Any) -> str | None:
    """Return the module whose Python code runs when an object is called; None if no Python code does.

    Partials, decorators and methods are followed to the innermost function.
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
    """Return the first of the folders that has a module; None if the module is installed, or no folder has it.

    Installed packages take precedence, so that no folder can replace a package of the same name.
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
    """Return the Python file of a module, in the folder that `find_folder` returns; nothing is imported."""
    folders = list(folders)
    found = find_folder(module_name, folders)
    held = [found] if found is not None else [Path(p) for p in _parents(_installed(module_name.partition(".")[0]))]
    files = (file for folder in held for file in _files(folder, module_name, SOURCE_SUFFIXES))
    return next((file for file in files if file.is_file()), None)


def check_writers(module_name: str, file: str | Path, folder: Path, at: str | None) -> None:
    """Refuse a module whose file, or a folder or link on its path, others can replace; warn if a group can.

    Others are all users except this one, root, and the owners of meshkit and of the declared roots. For the folders
    above the searched folder only the mode is checked, because it decides who can replace their content. Folders above
    a root are not checked.

    Raises:
        ConfigError: everybody can write a file, folder or link on the path, or it belongs to another user.
    """
    if os.name != "posix":
        return
    roots = read_site().model_roots or ()
    trusted = {os.geteuid(), 0, *(place.stat().st_uid for place in (_PACKAGE, *roots) if place.exists())}
    real = Path(os.path.realpath(folder))
    declared = {above for root in roots if is_under(real, [root]) for above in root.parents}
    above = {*folder.parents, *real.parents}
    for path, found in _way(file):
        if path in declared:
            continue
        mode = 0 if stat.S_ISLNK(found.st_mode) else stat.S_IMODE(found.st_mode)
        passed = path in above
        problem = hint = None
        if mode & stat.S_IWOTH and not (passed and mode & stat.S_ISVTX):
            problem = f"everybody may write {path} (mode {mode:04o})"
            hint = f"chmod o-w {path}, once you know what is in it; or a folder that only you can write"
        elif not passed and found.st_uid not in trusted:
            problem = f"{path} belongs to another user (uid {found.st_uid})"
            hint = "a copy of your own; or its folder in MESHKIT_MODEL_ROOTS, if they may run code as you"
        if problem:
            raise ConfigError(f"module '{module_name}' is not loaded: {problem}.", at=at, hint=hint)
        shared = not passed and mode & stat.S_IWGRP and not is_private_group(found.st_uid, found.st_gid)
        if shared and folder not in _warned:  # Warn once, however many files there are.
            _warned.add(folder)
            what = f"a group may write {path}, on the way to the module '{module_name}'"
            say(f"meshkit: {what}; chmod -R g-w {folder}")


def _way(file: str | Path) -> Iterator[tuple[Path, os.stat_result]]:
    here, left, links = Path("/"), [*reversed(Path.cwd().joinpath(file).parts[1:])], 0
    yield here, here.lstat()
    while left:
        part = left.pop()
        if part == "..":
            here = here.parent
            continue
        path = here / part
        found = path.lstat()
        yield path, found
        if not stat.S_ISLNK(found.st_mode):
            here = path
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
        target = Path(os.readlink(path))
        here = Path("/") if target.is_absolute() else here
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def serve(module_name: str, folder: Path, at: str | None) -> None:
    """Let importlib find a module in a folder, and the modules in the folder that its code imports.

    Raises:
        ConfigError: another module of that name is loaded already.
    """
    top = module_name.partition(".")[0]
    loaded = sys.modules.get(top)
    other = loaded.__spec__ if loaded is not None else None
    if _parents(other) and not _is_of(other, folder):
        raise ConfigError(
            f"module '{top}' in {folder} cannot be loaded: a module of that name is loaded from {_parents(other)[0]}.",
            at=at,
            hint="another name for one of the two",
        )
    importlib.invalidate_caches()
    FINDER.served[top] = folder
    FINDER.named[folder] = at
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


class _Source(SourceFileLoader):
    """Compiles a module from its source, because cached byte code may come from another user."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError(errno.ENOTSUP, "byte code is neither read nor written", path)


class _Finder:
    """Finds modules in the folders of the user's code for imports by that code; refuses files that others can write."""

    def __init__(self):
        self.served: dict[str, Path] = {}  # Top-level name -> folder.
        self.named: dict[Path, str | None] = {}  # Folder -> place where an experiment names code from it.

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a served module, of its submodule, or of a module beside it that its code imports."""
        if is_of_python(name):
            return None
        folder = self.served.get(name.partition(".")[0])
        if folder is None:
            folder = None if path is not None else self.served.get(_importer())
            if folder is None:
                return None
            found = _installed(name)
            if found is not None and found.loader is not None and not _is_of(found, folder):
                return None
        spec = PathFinder.find_spec(name, [str(folder)] if path is None else path)
        if spec is None:
            return None
        if path is None:
            self.served[name] = folder
            if spec.loader is None:  # A namespace package is only this folder, not each folder of its name on sys.path.
                spec.submodule_search_locations = [str(folder / name)]
        if is_shipped_name(name) and folder == shipped_folder():
            return spec
        files = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
        for file in files:
            check_writers(name, file, folder, self.named.get(folder))
        if type(spec.loader) is SourceFileLoader:
            spec.loader = _Source(spec.loader.name, spec.loader.path)
        return spec


FINDER: Any = _Finder()


def _importer() -> str:
    """Return the top-level name of the module whose code is importing; empty if there is none."""
    frame: FrameType | None = sys._getframe(2)  # The frame that asked the finder.
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        top = name.partition(".")[0]
        if top not in _IMPORTING:
            return top
        frame = frame.f_back
    return ""


def _installed(top: str) -> ModuleSpec | None:
    """Return the spec of a top-level name, without the folders of experiments; nothing is imported."""
    for finder in sys.meta_path:
        if finder is not FINDER and (spec := finder.find_spec(top, None)) is not None:
            return spec
    return None


def _parents(spec: ModuleSpec | None) -> list[str]:
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or ()) or ([spec.origin] if spec.has_location and spec.origin else [])
    return [os.path.dirname(place) for place in places]


def _is_of(spec: ModuleSpec | None, folder: Path) -> bool:
    return os.path.realpath(folder) in map(os.path.realpath, _parents(spec))


def _holds(folder: Path, module_name: str) -> bool:
    return any(os.path.isfile(file) for file in _files(folder, module_name, all_suffixes()))


def _files(folder: Path, module_name: str, suffixes: Iterable[str]) -> list[Path]:
    base, suffixes = folder.joinpath(*module_name.split(".")), list(suffixes)
    return [base.with_name(base.name + suffix) for suffix in suffixes] + [base / f"__init__{s}" for s in suffixes]


def _home(module_name: str, folder: Path | None) -> tuple[Path | None, bool]:
    """Return the folder that has a module, and whether the module is the user's own or a shipped model."""
    top = module_name.partition(".")[0]
    if folder is None:
        spec = _installed(top)
        parents = [Path(parent) for parent in _parents(spec)]
        if not parents:
            return None, spec is None  # There is no such module (a later error), or it has no file.
        folder = next((parent for parent in parents if _holds(parent, module_name)), parents[0])
    elif is_shipped_name(module_name) and folder == shipped_folder():
        return folder, True
    file = next((file for file in _files(folder, module_name, all_suffixes()) if file.is_file()), folder / top)
    return folder, top != _PACKAGE.name and not _in_packages(file)


def _in_packages(file: str | Path) -> bool:
    """Return whether a file is in a folder into which pip installs packages; its permissions are not checked."""
    on_path = (path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    folders = {*site.getsitepackages(), site.getusersitepackages(), *on_path}
    return is_under(file, [Path(os.path.realpath(folder)) for folder in folders])


def is_private_group(uid: int, gid: int) -> bool:
    """Return whether a group is a user's private group, which has no other member."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def shipped_folder() -> Path:
    """Return the folder that holds `models/` and `configs/experiments/`."""
    inside = _PACKAGE / "_shipped"
    return inside if inside.is_dir() else _PACKAGE.parent


def is_shipped_name(module_name: str) -> bool:
    """Return whether the name of a module is that of a shipped model, `models` or `models.*`."""
    return module_name.partition(".")[0] == MODELS


@cache
def shipped_experiments() -> dict[str, Path]:
    """Map the name of every shipped experiment to its file."""
    return {file.stem: file for file in sorted((shipped_folder() / "configs" / "experiments").glob("*.toml"))}


def find_experiment(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file of an experiment: the given path or, if there is no such file, the shipped experiment.

    Raises:
        ConfigError: a bare name is neither a file nor a shipped experiment.
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
