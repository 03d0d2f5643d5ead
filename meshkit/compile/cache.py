"""Compiled programs kept on disk, and the folder under both caches: theirs and that of executables.

    export (program bytes) + request -> program_key -> load | compile, store

A key is a hash of everything that reaches the compiler, so a hit is what a compile would give. That includes the lines
of source that each operation comes from, down to where the step was planned from: the report shows them. An entry is
a JSON header and the scheduled HLO, in the folder `programs` of `cache_root`.

Kernels are kept apart, for all programs of one GPU: XLA finds those of earlier programs by their operations
(`xla_gpu_kernel_cache_file`), and makes only what is new in a changed step. It does not ask which GPU or release a file
is of, and fails on a torn one; so a key says the first, the digest the second, and each compile has a copy of its own.

An entry may be thrown away. It is one file in a folder of meshkit's own (private.py): a digest of its content, then the
content, written whole or not at all; one that is not what was written, or not by this user, is a miss. Entries used
longest ago go when all of a folder exceed `$MESHKIT_CACHE_BYTES` (default 2 GiB). The folders lie under `meshkit` in
`$XDG_CACHE_HOME`, or under `$MESHKIT_CACHE` (`off` keeps nothing).
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
_MOST_KERNEL_BYTES = 64 * 2**20  # of one entry, which XLA reads whole; a larger one is begun anew
# Options that choose instructions and their order: the code of a kernel has nothing of them, and programs that differ
# in them share kernels. Any other option has kernels of its own.
_OF_SCHEDULES = re.compile(
    r"xla_gpu_(pipeline_\w+|\w+_combine_threshold_bytes|enable_while_loop_double_buffering|memory_limit_slop_factor"
    r"|enable_latency_hiding_scheduler|experimental_parallel_collective_overlap_limit)"
    rf"|{PGLE_OPTION}|{TABLE_OPTION}"
)
_MOST_NAMED_BYTES = 2**28  # of a file that an option names
_TEXT = ".pbtxt"  # what XLA reads by its path, and takes for nothing else
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
_COMPILER = ("compile/child.py", "compile/options.py", "compile/partitioned.py", "hlo/proto.py")
# Variables by which jax, XLA and its plugins change what they compile.
_VARIABLES = ("JAX_", "XLA_", "TF_", "MOSAIC_", "TRITON_", "CUDA_", "MESHKIT_XLA_")
DEFAULT_BYTES = 2 * 2**30
_OFF = {"", "0", "off", "no", "none", "false"}
# A writer that died leaves its temporary file; after an hour nobody is writing it any more.
_STALE_S = 3600.0
_MEMORY_SIZE = re.compile(r"device_memory_size: \d+")  # of a target: it bounds the schedule alone
# All that is ever removed from a folder of entries, though it is meshkit's own.
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
    """Return a hash of all that decides what XLA makes of a program.

    Args:
        program: as `jax.export` serializes it.
        request: what the compiler process gets with it: target, topology, mesh, options.
        environment: of the compiler process.
    """
    files = _named_files(request.get("compiler_options") or {})
    return _key(environment, program=hashlib.sha256(program).hexdigest(), request=request, files=files)


def kernels_key(request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Return a hash of what decides the code of a kernel beside its operations: the GPU, versions, options.

    The GPU's memory decides the schedule alone.

    Args:
        request: as for `program_key`.
        environment: as for `program_key`.
    """
    options = {**(request.get("planners_options") or {}), **(request.get("compiler_options") or {})}
    deciding = {name: value for name, value in options.items() if not _OF_SCHEDULES.fullmatch(name)}
    target = _MEMORY_SIZE.sub("", request["target_config"])
    return _key(environment, target=target, options=deciding)


def deciding(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide what a compiler process makes of a program."""
    return {name: value for name, value in environment.items() if name.startswith(_VARIABLES)}


def _key(environment: Mapping[str, str], **decided_by: object) -> str:
    decided_by |= {
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "environment": deciding(environment),
        "compiler": _source_digest(),
    }
    return hashlib.sha256(json.dumps(decided_by, sort_keys=True, default=repr).encode()).hexdigest()


def _named_files(options: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files that options name, such as a profile of measured costs: they are read by the compiler."""
    found: dict[str, str] = {}
    for _, path in named_paths(options):
        with suppress(OSError, ValueError):
            for file in sorted(path.iterdir()) if path.is_dir() else [path]:
                with suppress(OSError, ValueError):
                    found[str(file)] = digest_of(file)
    return found


def named_paths(options: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the options that name a file or folder, and what they name."""
    for name, value in options.items():
        if name.endswith("_path") and isinstance(value, str) and value:
            yield name, Path(value)


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file that an option names.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than 256 MiB.
        ValueError: a NUL byte in the path.
    """
    return hashlib.sha256(read_regular(file, _MOST_NAMED_BYTES)).hexdigest()


def cache_folder() -> Path | None:
    """Return the private folder that programs are kept in, made if need be; None where none is wanted or can be made.

    Raises:
        ConfigError: `MESHKIT_CACHE` names a folder that cannot serve, or `MESHKIT_CACHE_BYTES` is no number.
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
    """Return the error about a folder of the one that `MESHKIT_CACHE` names."""
    return ConfigError(
        f"the cache folder that MESHKIT_CACHE names cannot be used: {problem}.",
        at=str(folder),
        hint="MESHKIT_CACHE=/a/new/folder, which meshkit makes; or off",
    )


def load(folder: Path, key: str) -> KeptProgram | None:
    """Return the program that was kept under a key, or None.

    Args:
        folder: from `cache_folder`.
        key: from `program_key`.

    Raises:
        DamagedEntry: the file is not what was written; it is removed.
        ConfigError: `MESHKIT_CACHE_BYTES` is no number of bytes.
    """
    body = _store(folder).read(key + _SUFFIX)
    if body is None:
        return None
    try:
        length = int.from_bytes(body[:8], "little")
        header = json.loads(body[8 : 8 + length])
        return KeptProgram(dict(header["result"]), str(header["log"]), zlib.decompress(body[8 + length :]))
    except (ValueError, KeyError, TypeError, zlib.error):  # sealed, and yet of another form
        with suppress(OSError):
            (folder / (key + _SUFFIX)).unlink()
        raise DamagedEntry(f"{key}{_SUFFIX} was damaged") from None


def store(folder: Path, key: str, made: KeptProgram) -> None:
    """Keeps a program: header length (8 bytes), header, compressed module.

    A full disk costs the entry; those used longest ago go where all exceed the bound.

    Args:
        folder: from `cache_folder`.
        key: from `program_key`.
        made: what `load` gives back.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number of bytes.
    """
    header = json.dumps({"result": dict(made.result), "log": made.log}).encode()
    body = len(header).to_bytes(8, "little") + header + zlib.compress(made.module, 1)
    _store(folder).write(key + _SUFFIX, body)


def load_kernels(folder: Path, key: str) -> bytes:
    """Return a file of kernels for XLA; b"" where none was kept.

    Args:
        folder: from `cache_folder`.
        key: from `kernels_key`.

    Raises:
        DamagedEntry: as `load`.
        ConfigError: as `load`.
    """
    return _store(folder).read(key + _KERNELS) or b""


def store_kernels(folder: Path, key: str, content: bytes) -> None:
    """Keeps a file of kernels in the place of the one before; b"" removes that. Of two at once the last one stays.

    Args:
        folder: from `cache_folder`.
        key: from `kernels_key`.
        content: that XLA wrote; too much of it is as good as none.

    Raises:
        ConfigError: as `store`.
    """
    if content and len(content) <= _MOST_KERNEL_BYTES:
        _store(folder).write(key + _KERNELS, content)
    else:
        with suppress(OSError):
            (folder / (key + _KERNELS)).unlink()


def _store(folder: Path) -> Store:
    return Store(folder, max_bytes())


def profile_text(costs: Mapping[str, float]) -> str:
    """Return the seconds of instructions as the text form of `tensorflow.profiler.ProfiledInstructionsProto`."""
    return "".join(f'costs {{ name: "{name}" cost_us: {s * 1e6:.6g} }}\n' for name, s in sorted(costs.items()))


@contextlib.contextmanager
def text_file(text: str) -> Iterator[Path]:
    """A file with a text that XLA reads by its path, which is the same for the same text; kept where programs are.

    Raises:
        ConfigError: as `cache_folder`.
        OSError: it cannot be written, not even among temporary files.
    """
    name = hashlib.sha256(text.encode()).hexdigest()[:32] + _TEXT
    with contextlib.ExitStack() as stack:
        folder = cache_folder() or stack.enter_context(scratch_folder())
        path = folder / name
        with suppress(OSError):  # a cache on a full disk: what follows writes elsewhere
            write_whole(path, text.encode())
        if not path.exists():
            path = stack.enter_context(scratch_folder()) / name
            write_whole(path, text.encode())
        yield path


def _source_digest() -> str:
    """Digest of the code that runs in the compiler process: its output is what is kept."""
    sources = (Path(__file__).parent.parent.joinpath(name).read_bytes() for name in _COMPILER)
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


class DamagedEntry(Exception):
    """A file of a store that is not what was written, or cannot be read."""


@dataclass(frozen=True)
class Store:
    """A folder of entries, each a file of its own: the SHA-256 of the content, then the content."""

    folder: Path
    """A folder made by `private_folder`."""
    most_bytes: int
    """The bytes that all entries may take."""

    def read(self, name: str) -> bytes | None:
        """Return the content of an entry, which then counts as just used; None if there is none.

        Raises:
            DamagedEntry: the file is not what was written, and is removed; or it cannot be read.
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
        """Keeps an entry, and removes those used longest ago beyond the bound.

        A full disk or a folder that became unwritable costs the entry, never the work.
        """
        with suppress(OSError):
            write_whole(self.folder / name, _sealed(content))
            self.trim(keep=name)

    def trim(self, keep: str = "") -> None:
        """Removes what writers left behind, then entries used longest ago until all fit the bound."""
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
    """Where everything is kept that may be thrown away; None where nothing is wanted.

    Raises:
        ConfigError: `MESHKIT_CACHE_BYTES` is no number, or `MESHKIT_CACHE` starts in a home that there is not.
    """
    named = os.environ.get("MESHKIT_CACHE")
    if named is not None and named.strip().lower() in _OFF:
        return None
    max_bytes()  # a wrong bound is said before anything is compiled
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
    """Return the bytes that all entries of a store together may take.

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
