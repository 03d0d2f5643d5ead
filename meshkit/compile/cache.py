"""Keep planned programs on disk, and provide the root folder and the `Store` that the cache of executables shares.

    export (program bytes) + request -> program_key -> load | compile, store

A key is a hash of everything that reaches the compiler, so a cache hit returns the result that a compile would give.
The key includes the source lines of each operation, with those of its callers, because the report shows them. An entry
is a JSON header and the scheduled HLO, in the folder `programs` of `cache_root`.

Kernels have their own entries, which all programs for one GPU share. XLA finds kernels of earlier programs by their
operations (`xla_gpu_kernel_cache_file`) and compiles only the kernels that a changed step adds. XLA does not check for
which GPU or release a kernel file is, so the key includes both. XLA fails on a truncated file, so an entry has a digest
and each compile works on its own copy.

Every entry may be deleted at any time. It is one file in a private folder of meshkit (private.py): a digest of the
content, then the content, written whole or not at all. A damaged file is a miss, and so is a file of another user. The
least recently used entries are deleted when a folder exceeds `$MESHKIT_CACHE_BYTES` (default 2 GiB). The folders are in
`$XDG_CACHE_HOME/meshkit`, or in `$MESHKIT_CACHE` (`off` keeps nothing).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.children import scratch_folder
from meshkit.compile.options import version_of
from meshkit.config.files import read_regular
from meshkit.config.sections import PGLE_OPTION, TABLE_OPTION
from meshkit.errors import ConfigError
from meshkit.private import NotPrivate, open_own, private_folder, write_whole

_SUFFIX, _KERNELS = ".program", ".kernels"
_MOST_KERNEL_BYTES = 64 * 2**20  # of one kernel file, which XLA reads whole; a larger file is deleted
# Options that choose instructions and their order. They do not affect the code of a kernel, so programs that differ
# only in these options share kernels. Every other option is part of the key of the kernels.
_OF_SCHEDULES = re.compile(
    r"xla_gpu_(pipeline_\w+|\w+_combine_threshold_bytes|enable_while_loop_double_buffering|memory_limit_slop_factor"
    r"|enable_latency_hiding_scheduler|experimental_parallel_collective_overlap_limit)"
    rf"|{PGLE_OPTION}|{TABLE_OPTION}"
)
_MOST_NAMED_BYTES = 2**28  # of a file that an option names
_TEXT = ".pbtxt"  # XLA parses a file with this suffix as a text proto
# Packages that take part in compiling: XLA, the tools that it calls, and the libraries whose versions it queries.
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
_COMPILER = ("compile/child.py", "compile/options.py", "compile/partitioned.py", "hlo/proto.py")
# Variables by which jax, XLA and its plugins change what they compile.
_VARIABLES = ("JAX_", "XLA_", "TF_", "MOSAIC_", "TRITON_", "CUDA_", "MESHKIT_XLA_")
DEFAULT_BYTES = 2 * 2**30
_OFF = {"", "0", "off", "no", "none", "false"}
# A writer that dies leaves its temporary file behind; after an hour the file counts as abandoned.
_STALE_S = 3600.0
_MEMORY_SIZE = re.compile(r"device_memory_size: \d+")  # in a target config; it affects the schedule, not the kernels
# The only file names that are ever deleted from a folder of entries.
_ENTRY = re.compile(r".+\.(program|kernels|executable|pbtxt)")
_PARTIAL = re.compile(r".{0,16}-[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class KeptProgram:
    """The output of the compiler process."""

    result: Mapping[str, Any]
    log: str
    module: bytes
    """The scheduled module, serialized."""


def program_key(program: bytes, request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return a hash of everything that determines XLA's output for a program.

    Args:
        program: the bytes that `jax.export` serialized.
        request: the request to the compiler process: target, topology, mesh, options.
        environment: the environment variables of the compiler process.
    """
    files = _named_files(request.get("compiler_options") or {})
    return _key(environment, program=hashlib.sha256(program).hexdigest(), request=request, files=files)


def kernels_key(request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return a hash of everything that determines a kernel's code except its operations: GPU, versions, options.

    The size of the GPU's memory is left out, because it affects only the schedule.

    Args:
        request: as for `program_key`.
        environment: as for `program_key`.
    """
    options = {**(request.get("planners_options") or {}), **(request.get("compiler_options") or {})}
    deciding = {name: value for name, value in options.items() if not _OF_SCHEDULES.fullmatch(name)}
    target = _MEMORY_SIZE.sub("", request["target_config"])
    return _key(environment, target=target, options=deciding)


def deciding(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that affect the output of a compiler process."""
    return {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}


def _key(environment: Mapping[str, str], **decided_by: object) -> str:
    decided_by |= {
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "environment": deciding(environment),
        "compiler": _source_digest(),
    }
    return hashlib.sha256(json.dumps(decided_by, sort_keys=True, default=repr).encode()).hexdigest()


def _named_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files that options name, such as measured costs: the compiler reads these files."""
    found: dict[str, str] = {}
    for _, path in named_paths(options):
        with suppress(OSError, ValueError):
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                with suppress(OSError, ValueError):
                    found[str(file)] = digest_of(file)
    return found


def named_paths(options: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each option whose value is the path of a file or folder."""
    for name, value in options.items():
        if name.endswith("_path") and isinstance(value, str) and value:
            yield name, Path(value)


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file that an option names.

    Raises:
        OSError: the file cannot be read, is no regular file, or is larger than 256 MiB.
        ValueError: the path contains a NUL byte.
    """
    return hashlib.sha256(read_regular(file, _MOST_NAMED_BYTES)).hexdigest()


def cache_folder() -> Path | None:
    """Return the private folder of the programs, created if it is missing.

    Return None if caching is off or the default folder cannot be used.

    Raises:
        ConfigError: `MESHKIT_CACHE` names a folder that cannot be used, or `MESHKIT_CACHE_BYTES` is no number.
    """
    root = cache_root()
    if root is None:
        return None
    folder = root / "programs"
    try:
        return private_folder(folder)
    except NotPrivate as problem:
        if "MESHKIT_CACHE" in os.environ:
            raise unfit_folder(folder, problem) from None
    return None


def unfit_folder(folder: Path, problem: NotPrivate) -> ConfigError:
    """Return the error about an unusable subfolder of `MESHKIT_CACHE`."""
    return ConfigError(
        f"the cache folder that MESHKIT_CACHE names cannot be used: {problem}.",
        at=str(folder),
        hint="MESHKIT_CACHE=/a/new/folder, which meshkit makes; or off",
    )


def load(folder: Path, key: str) -> KeptProgram | None:
    """Return the program that is stored under a key, or None.

    Args:
        folder: from `cache_folder`.
        key: from `program_key`.

    Raises:
        DamagedEntry: the file is damaged (it is then removed) or cannot be read.
        ConfigError: `MESHKIT_CACHE_BYTES` is no number of bytes.
    """
    body = _store(folder).read(key + _SUFFIX)
    if body is None:
        return None
    try:
        length = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + length])
        return KeptProgram(dict(header["result"]), str(header["log"]), zlib.decompress(body[8 + length :]))
    except (ValueError, KeyError, TypeError, zlib.error):  # the digest is right, but the content has another form
        with suppress(OSError):
            (folder / (key + _SUFFIX)).unlink()
        raise DamagedEntry(f"{key}{_SUFFIX} was damaged") from None


def store(folder: Path, key: str, made: KeptProgram) -> None:
    """Store a program as header length (8 bytes), header, compressed module.

    On a full disk the entry is lost, without an error. The least recently used entries are deleted if the folder
    exceeds its limit.

    Args:
        folder: from `cache_folder`.
        key: from `program_key`.
        made: the program; `load` returns an equal one.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number of bytes.
    """
    header = json.dumps({"result": dict(made.result), "log": made.log}).encode()
    body = len(header).to_bytes(8, "little") + header + zlib.compress(made.module, 1)
    _store(folder).write(key + _SUFFIX, body)


def load_kernels(folder: Path, key: str) -> bytes:
    """Return the content of a kernel file for XLA; b"" if there is no entry.

    Args:
        folder: from `cache_folder`.
        key: from `kernels_key`.

    Raises:
        DamagedEntry: see `load`.
        ConfigError: see `load`.
    """
    return _store(folder).read(key + _KERNELS) or b""


def store_kernels(folder: Path, key: str, content: bytes) -> None:
    """Replace the stored kernel file; b"" removes it. Of two concurrent writers the last one wins.

    Args:
        folder: from `cache_folder`.
        key: from `kernels_key`.
        content: the file that XLA wrote; more than 64 MiB removes the entry, too.

    Raises:
        ConfigError: see `store`.
    """
    if content and len(content) <= _MOST_KERNEL_BYTES:
        _store(folder).write(key + _KERNELS, content)
    else:
        with suppress(OSError):
            (folder / (key + _KERNELS)).unlink()


def _store(folder: Path) -> Store:
    return Store(folder, max_bytes())


def profile_text(costs: Mapping[str, float]) -> str:
    """Return seconds by instruction name as the text form of `tensorflow.profiler.ProfiledInstructionsProto`."""
    return "".join(f'costs {{ name: "{name}" cost_us: {s * 1e6:.6g} }}\n' for name, s in sorted(costs.items()))


@contextlib.contextmanager
def text_file(text: str) -> Iterator[Path]:
    """Write a text to a file for XLA and yield its path; equal texts get the same path in the folder of the programs.

    Raises:
        ConfigError: see `cache_folder`.
        OSError: the file cannot be written, not even to a temporary folder.
    """
    name = hashlib.sha256(text.encode()).hexdigest()[:32] + _TEXT
    with contextlib.ExitStack() as stack:
        folder = cache_folder() or stack.enter_context(scratch_folder())
        path = folder / name
        with suppress(OSError):  # the disk of the cache is full: the code below writes to a temporary folder
            write_whole(path, text.encode())
        if not path.exists():
            path = stack.enter_context(scratch_folder()) / name
            write_whole(path, text.encode())
        yield path


def _source_digest() -> str:
    """Return a digest of the code that runs in the compiler process, because this code determines the entries."""
    sources = (Path(__file__).parent.parent.joinpath(name).read_bytes() for name in _COMPILER)
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


class DamagedEntry(Exception):
    """A file of a store is damaged or cannot be read."""


@dataclass(frozen=True)
class Store:
    """A folder with one file for each entry: the SHA-256 of the content, then the content."""

    folder: Path
    """A folder made by `private_folder`."""
    most_bytes: int
    """The limit of the total size of all entries."""

    def read(self, name: str) -> bytes | None:
        """Return the content of an entry and mark the entry as just used; None if there is no such entry.

        Raises:
            DamagedEntry: the file is damaged (it is then removed) or cannot be read.
        """
        path = self.folder / name
        try:
            with os.fdopen(open_own(path), "rb") as file:
                written = file.read()
                content = written[hashlib.sha256().digest_size :]
                if written == _sealed(content):
                    with suppress(OSError):
                        os.utime(file.fileno())
                    return content
            with suppress(OSError):
                path.unlink()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DamagedEntry(f"{name} cannot be read: {e.strerror or e}") from None
        raise DamagedEntry(f"{name} ({len(written)} bytes) was damaged")

    def write(self, name: str, content: bytes) -> None:
        """Store an entry, then delete the least recently used entries beyond the limit.

        If the disk is full or the folder is not writable, the entry is lost, without an error.
        """
        with suppress(OSError):
            write_whole(self.folder / name, _sealed(content))
            self.trim(keep=name)

    def trim(self, keep: str = "") -> None:
        """Delete abandoned temporary files, then the least recently used entries until the rest fits the limit."""
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process trims too
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    continue
                if _PARTIAL.fullmatch(path.name) and time.time() - found.st_mtime > _STALE_S:
                    path.unlink()
                elif _ENTRY.fullmatch(path.name):
                    entries.append((found.st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.most_bytes:
                return
            if path.name != keep or size > self.most_bytes:
                path.unlink(missing_ok=True)
                total -= size


def _sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def cache_root() -> Path | None:
    """Return the root folder of all caches; None if caching is off.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number, or `MESHKIT_CACHE` begins with an unknown home (`~name`).
    """
    named = os.environ.get("MESHKIT_CACHE")
    if named is not None and named.strip().lower() in _OFF:
        return None
    max_bytes()  # report a wrong limit before anything is compiled
    if named is not None:
        folder = os.path.expanduser(named)
        if folder.startswith("~"):
            raise ConfigError(
                f"MESHKIT_CACHE is '{named}', and nobody has that home.", hint="MESHKIT_CACHE=/a/folder, or off"
            )
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if Path(base).is_absolute() else _home() / ".cache") / "meshkit"


def max_bytes() -> int:
    """Return the limit in bytes of the total size of a store's entries.

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


def _home() -> Path:
    with suppress(RuntimeError):  # no HOME and no entry in the password file
        return Path.home()
    return Path("/nonexistent")
