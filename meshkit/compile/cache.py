"""Compiled programs kept on disk, and the folder under both caches: theirs and that of executables.

    export (program bytes) + request -> program_key -> load | compile, store

A key is a hash of everything that reaches the compiler, so a hit is what a compile would give. That includes the lines
of source that each operation comes from, down to where the step was planned from: the report shows them. An entry is
a JSON header and the scheduled HLO, in the folder `programs` of `cache_root`.

Kernels are kept apart, for all programs of one GPU: XLA finds those of earlier programs by their operations
(`xla_gpu_kernel_cache_file`), and makes only what is new in a changed step. It does not ask which GPU or release a file
is of, and fails on a torn one; so a key says the first, the digest the second, and each compile has a copy of its own.

An entry may be thrown away. It is one file in a folder that only its owner can enter: a digest of its content, then the
content. It is written whole or not at all; one that is not what was written, or not by this user, is a miss. Entries
used longest ago go when all of a folder exceed `$MESHKIT_CACHE_BYTES` (default 2 GiB). The folders lie under `meshkit`
in `$XDG_CACHE_HOME`, or under `$MESHKIT_CACHE` (`off` keeps nothing).

    /shared/link/compiled -> one descriptor per name, from the root, each checked before the next -> HeldFolder

A path that was checked may lead elsewhere a moment later: whoever owns a link on the way turns it. So nothing is looked
up twice. Every folder on the way is opened below the one that was checked before; links are read below a folder that
others cannot change, and count only where this user or root made them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.compile.options import version_of
from meshkit.compile.scratch import scratch_folder
from meshkit.config.sections import PGLE_OPTION, TABLE_OPTION
from meshkit.errors import ConfigError

_MAGIC = b"meshkit program 1\n"
_SUFFIX, _KERNELS = ".program", ".kernels"
_MOST_KERNEL_BYTES = 64 * 2**20  # of one entry, which XLA reads whole; a larger one is begun anew
# Options that choose instructions and their order: the code of a kernel has nothing of them, and programs that differ
# in them share kernels. Any other option has kernels of its own.
_OF_SCHEDULES = re.compile(
    r"xla_gpu_(pipeline_\w+|\w+_combine_threshold_bytes|enable_while_loop_double_buffering|memory_limit_slop_factor"
    r"|enable_latency_hiding_scheduler|experimental_parallel_collective_overlap_limit)"
    rf"|{PGLE_OPTION}|{TABLE_OPTION}"
)
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
_COMPILER = ("compile/child.py", "compile/options.py", "hlo/proto.py")
# Variables by which jax, XLA and its plugins change what they compile.
_VARIABLES = ("JAX_", "XLA_", "TF_", "MOSAIC_", "TRITON_", "CUDA_", "MESHKIT_XLA_")
DEFAULT_BYTES = 2 * 2**30
_OFF = {"", "0", "off", "no", "none", "false"}
# A writer that died leaves its temporary file; after an hour nobody is writing it any more.
_STALE_S = 3600.0
_KEY, _KEY_BYTES = "seal.key", 32
_MOST_LINKS = 40  # as Linux follows
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class KeptProgram:
    """The output of the compiler process."""

    result: Mapping[str, Any]
    log: str
    module: bytes  # serialized, scheduled


def program_key(program: bytes, request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """A hash of all that decides what XLA makes of a program.

    Args:
        program: as `jax.export` serializes it.
        request: what the compiler process gets with it: target, topology, mesh, options.
        environment: of the compiler process.
    """
    files = _named_files(request.get("compiler_options") or {})
    return _key(environment, program=hashlib.sha256(program).hexdigest(), request=request, files=files)


def kernels_key(request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """A hash of what decides the code of a kernel beside its operations: the GPU, versions, options.

    Args:
        request: as for `program_key`.
        environment: as for `program_key`.
    """
    options = {**(request.get("planners_options") or {}), **(request.get("compiler_options") or {})}
    deciding = {name: value for name, value in options.items() if not _OF_SCHEDULES.fullmatch(name)}
    return _key(environment, target=request["target_config"], options=deciding)


def _key(environment: Mapping[str, str], **decided_by: object) -> str:
    decided_by |= {
        "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
        "environment": {k: v for k, v in environment.items() if k.startswith(_VARIABLES)},
        "compiler": _source_digest(),
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
    problem = private_folder(folder, of_code=False)
    if problem and named:
        raise ConfigError(
            f"the cache folder that MESHKIT_CACHE names cannot be used: {problem}.",
            at=str(folder),
            hint="MESHKIT_CACHE=off, or a folder of your own",
        )
    return None if problem else folder


def load(folder: Path, key: str) -> KeptProgram | None:
    """What was kept under a key; None if nothing was.

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
        with contextlib.suppress(OSError):
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
    """A file of kernels for XLA; b"" where none was kept.

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
        with contextlib.suppress(OSError):
            (folder / (key + _KERNELS)).unlink()


def _store(folder: Path) -> Store:
    return Store(folder, max_bytes(), _MAGIC)


def profile_text(costs: Mapping[str, float]) -> str:
    """Seconds of instructions as the text form of `tensorflow.profiler.ProfiledInstructionsProto`."""
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
        with contextlib.suppress(OSError):  # a cache on a full disk: what follows writes elsewhere
            write_whole(path, text.encode())
        if not path.exists():
            path = stack.enter_context(scratch_folder()) / name
            write_whole(path, text.encode())
        yield path


def _source_digest() -> str:
    """Digest of the code that runs in the compiler process: its output is what is kept."""
    sources = (Path(__file__).parent.parent.joinpath(name).read_bytes() for name in _COMPILER)
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


class NotPrivate(Exception):
    """Why a folder cannot hold code that will be run, for people."""


class HeldFolder:
    """A folder that was opened; closed with the last reference to it.

    Args:
        descriptor: of the folder.
        path: without links.
    """

    def __init__(self, descriptor: int, path: Path):
        self.descriptor, self.path = descriptor, path

    def __del__(self):
        with suppress(OSError):
            os.close(self.descriptor)


def hold_private(folder: Path) -> HeldFolder:
    """Opens a folder for code that will be run; it and those above it are made, for this user alone, where missing.

    Raises:
        NotPrivate: it is a link, belongs to another user, others may enter it, it cannot be written, or others could
            put another one in its place.
    """
    todo, links = deque(Path(os.path.abspath(folder)).parts[1:]), 0
    try:
        at = HeldFolder(os.open(os.sep, _WALK), Path(os.sep))
        while todo:
            _check_above(at)
            name = todo.popleft()
            with suppress(FileExistsError):
                if not _is_there(name, at):
                    os.mkdir(name, 0o700, dir_fd=at.descriptor)
            found = os.stat(name, dir_fd=at.descriptor, follow_symlinks=False)
            if not stat.S_ISLNK(found.st_mode):
                where = at.path.parent if name == os.pardir else at.path / name
                at = HeldFolder(os.open(name, _WALK, dir_fd=at.descriptor), where)
                continue
            links += 1
            if not todo and at.path / name == Path(os.path.abspath(folder)):
                raise NotPrivate("it is a link")
            if found.st_uid not in (0, os.geteuid()):
                raise NotPrivate(f"{at.path / name} is a link of another user (uid {found.st_uid})")
            if links > _MOST_LINKS:
                raise NotPrivate(os.strerror(errno.ELOOP))
            target = os.readlink(name, dir_fd=at.descriptor)
            todo.extendleft(reversed([part for part in target.split(os.sep) if part not in ("", os.curdir)]))
            if target.startswith(os.sep):
                at = HeldFolder(os.open(os.sep, _WALK), Path(os.sep))
        _check_private(at)
        return HeldFolder(
            os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at.descriptor), at.path
        )
    except OSError as error:
        raise NotPrivate(error.strerror or str(error)) from None


def private_folder(folder: Path, *, of_code: bool = True) -> str | None:
    """Makes a folder that its owner alone can enter, where there is none.

    Args:
        folder: to make or check.
        of_code: what is in it will be executed, see `hold_private`. Any other folder is made private.

    Returns:
        What is wrong with it, None if nothing is.
    """
    try:
        if of_code:
            hold_private(folder)
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return f"it belongs to another user (uid {found.st_uid})"
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except NotPrivate as problem:
        return str(problem)
    except OSError as error:
        return error.strerror or str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def open_own(name: str, at: int) -> int:
    """A descriptor of a file in a held folder, to read: a regular one of this user, which others cannot write.

    Args:
        name: of the file, without a folder.
        at: descriptor of the folder.

    Raises:
        OSError: there is none, it cannot be read, or it is another kind of thing (a link, of another user, ...).
    """
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        problem = "it is no file"
    elif found.st_uid != os.geteuid():
        problem = f"it belongs to another user (uid {found.st_uid})"
    elif found.st_mode & 0o022:
        problem = f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EPERM, problem, name)


def write_whole(path: Path, content: bytes, *, at: int | None = None) -> None:
    """Writes a file whole or not at all.

    Args:
        path: where.
        content: of the file.
        at: descriptor of the folder that the path is below.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name[:16]}-{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600, dir_fd=at)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path, src_dir_fd=at, dst_dir_fd=at)
    except OSError:
        with suppress(OSError):
            os.unlink(partial, dir_fd=at)
        raise


def seal_key(folder: HeldFolder) -> bytes:
    """The secret with which entries below a folder are sealed; made where there is none.

    Raises:
        NotPrivate: it cannot be read or made, or others can read it.
    """
    try:
        if not _is_there(_KEY, folder):
            _make_key(folder.descriptor)
        with os.fdopen(open_own(_KEY, folder.descriptor), "rb") as file:
            key, mode = file.read(_KEY_BYTES + 1), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise NotPrivate(f"{_KEY}: {error.strerror or error}") from None
    if len(key) != _KEY_BYTES or mode & 0o077:
        raise NotPrivate(f"{_KEY} is not {_KEY_BYTES} bytes that others cannot read (mode {mode:04o}): remove it")
    return key


def _make_key(at: int) -> None:
    """Writes a secret under the name of the key; of processes that do so at the same time the first one's stays."""
    made = Path(f"{secrets.token_hex(8)}.tmp")
    write_whole(made, secrets.token_bytes(_KEY_BYTES), at=at)
    try:
        os.link(made, _KEY, src_dir_fd=at, dst_dir_fd=at)
    except FileExistsError:
        pass
    except OSError:  # no links on this file system: the last one's stays, and what was sealed before is compiled again
        os.replace(made, _KEY, src_dir_fd=at, dst_dir_fd=at)
    with suppress(FileNotFoundError):
        os.unlink(made, dir_fd=at)


def _is_there(name: str, at: HeldFolder) -> bool:
    try:
        os.stat(name, dir_fd=at.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _check_above(at: HeldFolder) -> None:
    """Refuses a folder in which others could exchange what is in it."""
    found = os.fstat(at.descriptor)
    shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if shared or found.st_uid not in (0, os.geteuid()):
        who = "others can write" if shared else f"uid {found.st_uid} owns"
        raise NotPrivate(f"{who} {at.path}, and could put another folder in its place")


def _check_private(at: HeldFolder) -> None:
    found = os.fstat(at.descriptor)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        raise NotPrivate(f"it belongs to another user (uid {found.st_uid})")
    if mode & 0o077:
        raise NotPrivate(f"others may enter it (mode {mode:04o}, not 0700)")
    if not os.access(os.curdir, os.W_OK | os.X_OK, dir_fd=at.descriptor):
        raise NotPrivate("it cannot be written")


class DamagedEntry(Exception):
    """A file of a store that is not what was written, or cannot be read."""


@dataclass(frozen=True)
class Store:
    """A folder of sealed entries, each a file of its own."""

    folder: Path  # private
    most_bytes: int  # that all entries may take
    magic: bytes = b""  # that every entry begins with
    held: HeldFolder | None = None
    """The folder where what is in it is run: nothing is looked up by its path again."""
    key: bytes = b""
    """With which entries and their names are sealed; b"": a digest that finds accidents alone."""

    def read(self, name: str) -> bytes | None:
        """The content of an entry, which then counts as just used; None if there is none.

        Raises:
            DamagedEntry: the file is not what was written, and is removed; or it cannot be read.
        """
        try:
            with self._opened() as at, os.fdopen(open_own(name, at), "rb") as file:
                sealed = file.read()
                start = len(self.magic) + hashlib.sha256().digest_size
                content = sealed[start:]
                if hmac.compare_digest(sealed[:start], self._seal(name, content)):
                    with suppress(OSError):
                        os.utime(file.fileno())
                    return content
                with suppress(OSError):
                    os.unlink(name, dir_fd=at)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise DamagedEntry(f"{name} cannot be read: {e.strerror or e}") from None
        raise DamagedEntry(f"{name} ({len(sealed)} bytes) was damaged")

    def write(self, name: str, content: bytes) -> None:
        """Keeps an entry, and removes those used longest ago beyond the bound.

        A full disk or a folder that became unwritable costs the entry, never the work.
        """
        with suppress(OSError):
            with self._opened() as at:
                write_whole(Path(name), self._seal(name, content) + content, at=at)
            self.trim(keep=name)

    def trim(self, keep: str = "") -> None:
        """Removes what writers left behind, then entries used longest ago until all fit the bound."""
        entries: list[tuple[float, int, str]] = []
        with self._opened() as at, os.scandir(at) as listed:
            for entry in listed:
                with suppress(OSError):  # another process trims too
                    found = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".tmp"):
                        if time.time() - found.st_mtime > _STALE_S:
                            os.unlink(entry.name, dir_fd=at)
                    elif stat.S_ISREG(found.st_mode):
                        entries.append((found.st_mtime, found.st_size, entry.name))
            total = sum(size for _, size, _ in entries)
            for _, size, name in sorted(entries):
                if total <= self.most_bytes:
                    return
                if name != keep or size > self.most_bytes:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=at)
                    total -= size

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor of the folder, with a position of its own in its names."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        at = os.open(os.curdir, flags, dir_fd=self.held.descriptor) if self.held else os.open(self.folder, flags)
        try:
            yield at
        finally:
            os.close(at)

    def _seal(self, name: str, content: bytes) -> bytes:
        if not self.key:
            return self.magic + hashlib.sha256(content).digest()
        seal = hmac.new(self.key, name.encode() + b"\0", "sha256")
        seal.update(content)
        return self.magic + seal.digest()


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
    """Bytes that all entries of a store together may take.

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
