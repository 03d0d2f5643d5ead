"""Executables kept on disk, so that a restarted training compiles nothing a second time.

    with compile_cache(say):   jax compiles -> <private folder>/<machine>/<key> -> the next attempt loads

An entry is native code that the next run executes, so whoever can write the folder can run code as its owner. It must
belong to the user, be closed to everybody else (0700), and lie where nobody else can put another one in its place;
where it does not, nothing is read or kept. jax makes the keys (program, options, versions, devices). Beyond what jax
does, a file is written whole or not at all and carries a digest: jax's own would leave half a file behind when it is
killed, and warn of it at every start.

The folder is `meshkit/compiled` under `$XDG_CACHE_HOME`, or `compiled` under `$MESHKIT_CACHE` (`off` keeps nothing).
Below it is one for each kind of CPU: code for one may use instructions that another lacks.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler
from jax._src.compilation_cache_interface import CacheInterface

from meshkit.compile.cache import cache_root, max_bytes
from meshkit.errors import ConfigError

_DIGEST_BYTES = 32
_STALE_S = 3600.0  # a writer that died leaves its temporary file
_SETTINGS = {
    # also the small programs around the step: a restart makes dozens
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # the report names lines of source, which must be those of this program
    "jax_compilation_cache_include_metadata_in_key": True,
}
_WRITE_ARGUMENTS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]


class CompileCache(CacheInterface):
    """Executables in a folder, by key.

    Args:
        folder: private; see `private_folder`.
        most_bytes: that all entries may take; those used longest ago go.

    Attributes:
        hits, misses: look-ups so far.
    """

    def __init__(self, folder: Path, most_bytes: int):
        self._path, self._most_bytes = folder, most_bytes
        self.hits = self.misses = 0

    def get(self, key: str) -> bytes | None:
        """The entry of a key; None where there is none, or it is not what was written."""
        path = self._path / key
        content = None
        with suppress(OSError):
            content = path.read_bytes()
        if content is not None and hashlib.sha256(content[_DIGEST_BYTES:]).digest() != content[:_DIGEST_BYTES]:
            with suppress(OSError):
                path.unlink()
            content = None
        if content is None:
            self.misses += 1
            return None
        self.hits += 1
        with suppress(OSError):
            os.utime(path)
        return content[_DIGEST_BYTES:]

    def put(self, key: str, value: bytes) -> None:
        """Keeps an entry, whole or not at all. A full disk costs the entry."""
        temporary: Path | None = None
        try:
            handle, name = tempfile.mkstemp(suffix=".tmp", dir=self._path)
            temporary = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(value).digest() + value)
            temporary.replace(self._path / key)
            self.trim(keep=key)
        except OSError:
            if temporary is not None:
                temporary.unlink(missing_ok=True)

    def trim(self, keep: str = "") -> None:
        """Removes entries used longest ago until all fit."""
        entries = []
        for path in self._path.iterdir():
            with suppress(OSError):  # another process trims too
                found = path.stat()
                if path.suffix == ".tmp" and time.time() - found.st_mtime > _STALE_S:
                    path.unlink()
                elif stat.S_ISREG(found.st_mode) and path.suffix != ".tmp":
                    entries.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._most_bytes:
                return
            if path.name != keep:
                path.unlink(missing_ok=True)
                total -= size


@contextmanager
def compile_cache(say: Callable[[str], None]) -> Iterator[CompileCache | None]:
    """Inside, jax keeps what it compiles and finds it again. After jax.distributed has started, where it does.

    Args:
        say: takes a sentence where nothing is kept although it would be.

    Yields:
        The cache; None where there is none, or the user has given jax one of their own.

    Raises:
        ConfigError: `MESHKIT_CACHE` or `JAX_COMPILATION_CACHE_DIR` names a folder that is not private.
    """
    if theirs := jax.config.jax_compilation_cache_dir:
        _check_theirs(theirs)
        yield None
        return
    cache = _open(say)
    if cache is None:
        yield None
        return
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", *_SETTINGS)}
    write: Any = getattr(compiler, "_cache_write", None)
    try:
        # the folder is also where XLA:GPU keeps what its autotuner found
        for name, value in {"jax_compilation_cache_dir": str(cache._path), **_SETTINGS}.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compilation_cache._cache, compilation_cache._cache_initialized = cache, True
        as_expected = write is not None and list(inspect.signature(write).parameters) == _WRITE_ARGUMENTS
        if as_expected and jax.default_backend() == "cpu":
            compiler._cache_write = _write_from_any_process
        yield cache
    finally:
        if write is not None:
            compiler._cache_write = write
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def _write_from_any_process(
    cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any
) -> None:
    """What jax does after a compile, in every process: on CPUs each has keys of its own, on GPUs all have the same."""
    try:
        compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, int(compile_time_secs))
    except Exception as error:  # XLA cannot serialize it: it is compiled again next time
        warnings.warn(f"{module_name} cannot be kept: {error}", stacklevel=2)


def _open(say: Callable[[str], None]) -> CompileCache | None:
    root = cache_root()
    if root is None:
        return None
    folder, named = root / "compiled", "MESHKIT_CACHE" in os.environ
    problem = private_folder(folder) or private_folder(folder / _machine())
    if problem is None:
        cache = CompileCache(folder / _machine(), max_bytes())
        with suppress(OSError):
            cache.trim()
        return cache
    if named:
        raise ConfigError(
            f"compiled programs cannot be kept in the folder that MESHKIT_CACHE names: {problem}.",
            at=str(folder),
            hint="a folder of your own (chmod 700), or MESHKIT_CACHE=off",
        )
    say(f"compiled programs are not kept, a restart compiles again: {folder}: {problem}; MESHKIT_CACHE names another")
    return None


def _check_theirs(folder: str) -> None:
    if "://" in folder:
        return
    problem = private_folder(Path(folder))
    if problem:
        raise ConfigError(
            f"jax's compilation cache holds code that would be run, and it is not private: {problem}.",
            at=f"JAX_COMPILATION_CACHE_DIR={folder}",
            hint="a folder of your own (chmod 700), or without that variable, for meshkit's",
        )


def private_folder(folder: Path) -> str | None:
    """Makes a folder that its owner alone can enter, where there is none.

    Returns:
        What is wrong with it, None if nothing is: a link, another owner, open to others, or in a folder in which
        others could put another one in its place.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        mine = os.geteuid()
        if not stat.S_ISDIR(found.st_mode):
            return "it is a link"
        if found.st_uid != mine:
            return f"it belongs to another user (uid {found.st_uid})"
        if stat.S_IMODE(found.st_mode) & 0o077:
            return f"others may enter it (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
        for parent in folder.resolve().parents:
            above = parent.stat()
            shared = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
            if shared or above.st_uid not in (0, mine):
                who = "others can write" if shared else f"uid {above.st_uid} owns"
                return f"{who} {parent}, and could put another folder in its place"
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def _machine() -> str:
    """A name for this kind of CPU."""
    described = [platform.machine(), platform.processor()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        described += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
