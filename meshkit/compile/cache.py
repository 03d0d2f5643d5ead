"""Compiled programs kept on disk: program, target, options and versions -> what XLA made of them.

    export (program bytes) + request -> program_key -> load | compile, store

A key is a hash of everything that reaches the compiler, so a hit is what a compile would give. That includes the lines
of source that each operation comes from, down to where the step was planned from: the report shows them. An entry is
one file in a folder that only its owner can read: a digest, a JSON header and the scheduled HLO; a damaged one is a
miss. The folder is `meshkit/programs` under `$XDG_CACHE_HOME`, or `programs` under `$MESHKIT_CACHE` (`off` keeps
nothing); the entries used longest ago go when all of them exceed `$MESHKIT_CACHE_BYTES` (default 2 GiB).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.compile.preflight import version_of
from meshkit.errors import ConfigError

DEFAULT_BYTES = 2 * 2**30
_OFF = {"", "0", "off", "no", "none", "false"}
_MAGIC = b"meshkit program 1\n"
_SUFFIX = ".program"
_TEXT = ".pbtxt"  # what XLA reads by its path, and takes for nothing else
# A writer that died leaves its temporary file; after an hour nobody is writing it any more.
_STALE_S = 3600.0
# Whatever takes part in compiling: XLA and what it calls, and the libraries whose versions it asks for.
_DISTRIBUTIONS = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",
    "nvidia-nvjitlink-cu12",
    "nvidia-nvjitlink",
    "nvidia-nvvm",
)
_COMPILER = ("child.py", "live.py", "options.py")
# Variables by which jax, XLA and its plugins change what they compile.
_VARIABLES = ("JAX_", "XLA_", "TF_", "MOSAIC_", "TRITON_", "CUDA_", "MESHKIT_XLA_")


class DamagedEntry(Exception):
    """A cache file that is not what was written."""


@dataclass(frozen=True)
class Entry:
    """What the compiler process left behind: its result and log, and the serialized scheduled module."""

    result: Mapping[str, Any]
    log: str
    module: bytes


def program_key(program: bytes, request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """A hash of all that decides what XLA makes of a program.

    Args:
        program: as `jax.export` serializes it.
        request: what the compiler process is told beside it: target, topology, mesh, options.
        environment: of the compiler process.
    """
    decided_by = {
        "program": hashlib.sha256(program).hexdigest(),
        "request": request,
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "environment": {k: v for k, v in environment.items() if k.startswith(_VARIABLES)},
        "compiler": _source_digest(),
        "files": _named_files(request.get("compiler_options") or {}),
    }
    return hashlib.sha256(json.dumps(decided_by, sort_keys=True, default=repr).encode()).hexdigest()


def _named_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files that options name, such as a profile of measured costs: they are read by the compiler."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if name.endswith("_path") and isinstance(value, str) and value:
            path = Path(value)
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                with contextlib.suppress(OSError):
                    found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def cache_folder() -> Path | None:
    """The private folder that programs are kept in, made if need be; None where none is wanted or can be made.

    Raises:
        ConfigError: `MESHKIT_CACHE` names a folder that cannot serve, or `MESHKIT_CACHE_BYTES` is no number.
    """
    root = cache_root()
    if root is None:
        return None
    folder, named = root / "programs", "MESHKIT_CACHE" in os.environ
    problem = _make_private(folder)
    if problem and named:
        raise ConfigError(
            f"the cache folder that MESHKIT_CACHE names cannot be used: {problem}.",
            at=str(folder),
            hint="MESHKIT_CACHE=off, or a folder of your own",
        )
    return None if problem else folder


def cache_root() -> Path | None:
    """Where everything is kept that may be thrown away; None where nothing is wanted.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number.
    """
    named = os.environ.get("MESHKIT_CACHE")
    if named is not None and named.strip().lower() in _OFF:
        return None
    max_bytes()  # a wrong bound is said before anything is compiled
    if named is not None:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else _home() / ".cache") / "meshkit"


@contextlib.contextmanager
def cache_off(*, when: bool = True) -> Iterator[None]:
    """Nothing is read or kept inside, by this process and those it starts."""
    before = os.environ.get("MESHKIT_CACHE")
    if when:
        os.environ["MESHKIT_CACHE"] = "off"
    try:
        yield
    finally:
        if when and before is None:
            del os.environ["MESHKIT_CACHE"]
        elif when and before is not None:
            os.environ["MESHKIT_CACHE"] = before


def load(folder: Path, key: str) -> Entry | None:
    """The entry of a key, which then counts as just used; None if there is none.

    Raises:
        DamagedEntry: the file is not what was written; it is removed.
    """
    path = folder / f"{key}{_SUFFIX}"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise DamagedEntry(f"{path.name} cannot be read: {e.strerror or e}") from None
    try:
        entry = _decode(content)
    except (ValueError, KeyError, TypeError, zlib.error):
        with contextlib.suppress(OSError):
            path.unlink()
        raise DamagedEntry(f"{path.name} ({len(content)} bytes) was damaged") from None
    with contextlib.suppress(OSError):
        os.utime(path)
    return entry


def store(folder: Path, key: str, entry: Entry) -> None:
    """Keeps an entry, whole or not at all, and removes those used longest ago beyond the bound.

    A full disk or a folder that became unwritable costs the entry, never the plan.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f"{key[:16]}-", suffix=".tmp", dir=folder)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(_encode(entry))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / f"{key}{_SUFFIX}")
        _trim(folder, keep=key)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def text_file(text: str) -> Iterator[Path]:
    """A file with a text that XLA reads by its path, which is the same for the same text; kept where programs are.

    Raises:
        ConfigError: as `cache_folder`.
        OSError: it cannot be written, not even among temporary files.
    """
    name = hashlib.sha256(text.encode()).hexdigest()[:32] + _TEXT
    with contextlib.ExitStack() as stack:
        folder = cache_folder() or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshkit-")))
        path = folder / name
        with contextlib.suppress(OSError):  # a cache on a full disk: what follows writes elsewhere
            _write_text(path, text)
        if not path.exists():
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshkit-"))) / name
            _write_text(path, text)
        yield path


def _write_text(path: Path, text: str) -> None:
    """Whole or not at all; what is there counts as just used."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        os.utime(path)
        return
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def max_bytes() -> int:
    """Bytes that all entries together may take.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number of bytes.
    """
    given = os.environ.get("MESHKIT_CACHE_BYTES")
    if given is None:
        return DEFAULT_BYTES
    if not given.strip().isdecimal():
        raise ConfigError(
            f"MESHKIT_CACHE_BYTES is '{given}', not a number of bytes.", hint=f"MESHKIT_CACHE_BYTES={DEFAULT_BYTES}"
        )
    return int(given)


def _source_digest() -> str:
    """Of the code that runs in the compiler process: what it leaves behind is what is kept."""
    sources = (Path(__file__).with_name(name).read_bytes() for name in _COMPILER)
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def _home() -> Path:
    with contextlib.suppress(RuntimeError):  # no HOME and no entry in the password file
        return Path.home()
    return Path("/nonexistent")


def _make_private(folder: Path) -> str | None:
    """Makes a folder that its owner alone can enter; what is wrong, if that cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as e:
        return e.strerror or str(e)
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as e:
            return e.strerror or str(e)
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def _encode(entry: Entry) -> bytes:
    """magic, digest of the rest, header length (8 bytes), header, module; the module compressed."""
    header = json.dumps({"result": dict(entry.result), "log": entry.log}).encode()
    body = len(header).to_bytes(8, "little") + header + zlib.compress(entry.module, 1)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(content: bytes) -> Entry:
    start = len(_MAGIC) + 32
    body = content[start:]
    if content[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != content[len(_MAGIC) : start]:
        raise ValueError("not what was written")
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    return Entry(dict(header["result"]), str(header["log"]), zlib.decompress(body[8 + length :]))


def _trim(folder: Path, keep: str) -> None:
    """Removes what writers left behind, then entries used longest ago until all fit the bound."""
    entries: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process trims too
            found = path.stat()
            if path.suffix == ".tmp" and time.time() - found.st_mtime > _STALE_S:
                path.unlink()
            elif path.suffix in (_SUFFIX, _TEXT):
                entries.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in entries)
    bound = max_bytes()
    for _, size, path in sorted(entries):
        if total <= bound:
            return
        if path.stem != keep or size > bound:
            path.unlink(missing_ok=True)
            total -= size
