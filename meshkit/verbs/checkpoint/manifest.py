"""Name the folders of checkpoints, and write and check their manifests, which hold the sha256 of every file.

    120                 whole: it has a manifest, and every process has written its part
    120.partial-3       being written, or left by a process that was killed; removed at the next start
    120.corrupt         found damaged and set aside; never removed, never counted
    120.deleting        being removed

    each process: the files it wrote -> fingerprints -> process 0: all fingerprints -> meshkit.json, written last
    meshkit.json -> read_manifest -> find_corruption: all files, or one process's share of them

A folder is renamed to its step once all of its files are on disk, and renamed again before it is removed. orbax stores
no checksum of its arrays, so without a manifest a flipped bit would be restored as a wrong value.

    a file is missing, or has other contents          corrupt: skipped and set aside
    EIO, ESTALE, ENOMEM, EMFILE, ...                  read again after each of PAUSES_S, then RunError (exit code 4)
    EACCES, EPERM                                     ConfigError (exit code 2)

Only a checkpoint that could be read is called corrupt. Otherwise storage that is away for a minute, or one `chmod`,
would cause the newest checkpoint to be set aside.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from meshkit.config.files import inside, integer, open_regular, read_regular
from meshkit.errors import ConfigError, MeshkitError, RunError

MANIFEST = "meshkit.json"
_SCHEMA = "meshkit.checkpoint/2"
_LARGEST_BYTES = 256 * 2**20
_SEAL = '"sha256": "'
_CORRUPT = "corrupt"
# The last suffix is that of orbax's own unfinished checkpoints.
_UNFINISHED = ("partial", "deleting", "orbax-checkpoint-tmp")
_THREADS = 4  # Hashing releases the GIL. More threads do not help, because disks limit the speed.
PAUSES_S = (0.5, 2.0, 8.0)  # Seconds between attempts to read a file.
# Includes a pipe or a device in place of the file (ENXIO), and a too large file (EFBIG); see meshkit.config.files.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def is_absent(error: OSError) -> bool:
    """Return whether an error means that there is no such regular file, and not that the storage failed."""
    return error.errno in _ABSENT


def retried[T](read: Callable[[], T]) -> T:
    """Return the result of `read`; if storage or memory fails, call it again after each of PAUSES_S.

    Raises:
        OSError: there is no such file, it may not be read, or it still cannot be read.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return read()
        except MemoryError:
            error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        except OSError as problem:
            error = problem
        if pause_s is None or is_absent(error) or error.errno in _FORBIDDEN:
            raise error
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def explain(problem: BaseException) -> str:
    """Return the operating system's error behind an exception in one line, or the first line of its message."""
    for error in (problem, problem.__cause__, problem.__context__):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = str(problem)
    if found := _OS_ERROR.search(text):  # tensorstore ends a long message with the system's error.
        return os.strerror(int(found[1]))
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(problem).__name__)[:300]


def describe_failure(problem: BaseException) -> dict[str, Any]:
    """Return why something could not be read, as a JSON object: `reason`, and whether the access is `forbidden`."""
    chain = (problem, problem.__cause__, problem.__context__)
    numbers = {error.errno for error in chain if isinstance(error, OSError)}
    numbers |= {int(number) for number in _OS_ERROR.findall(str(problem))}
    return {"reason": explain(problem), "forbidden": not numbers.isdisjoint(_FORBIDDEN)}


def unreadable_error(what: str, failure: dict[str, Any], at: str) -> MeshkitError:
    """Return the error to raise for a result of `describe_failure`.

    Returns:
        A ConfigError if access is forbidden (a wrong mode or owner), else a RunError, after which a restart may help.
    """
    if failure["forbidden"]:
        return ConfigError(
            f"{what} may not be read: {failure['reason']}. Nothing was changed.",
            at=at,
            hint="chmod -R u+rwX, or a run as the user who wrote it",
        )
    return RunError(
        f"{what} cannot be read: {failure['reason']}; tried {len(PAUSES_S) + 1} times within {sum(PAUSES_S):.0f} s. "
        "Its contents may be intact; nothing was changed.",
        at=at,
        hint="the same command, once the storage answers and there is memory",
    )


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest."""

    record: Mapping[str, Any]
    """The manifest as a JSON object: `schema`, `step`, `previous`, `arrays`, `mesh`, `processes`, `versions`, `files`
    and the facts of the run (`experiment`, `data`, `run`)."""
    seal: str
    """The sha256 of the manifest itself, which is also stored in it."""

    @property
    def step(self) -> int:
        """The training step after which the checkpoint was saved."""
        return int(self.record["step"])

    @property
    def arrays(self) -> Mapping[str, str]:
        """The path of every array -> its dtype and shape, such as `float32[128, 256]`."""
        return self.record["arrays"]

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """The name of every file except the manifest -> its size in bytes and sha256."""
        return {name: (int(size), str(digest)) for name, (size, digest) in self.record["files"].items()}


def fingerprints(folder: Path, paths: Iterable[Path], *, sync: bool = False) -> dict[str, tuple[int, str]]:
    """Return {name below the folder: (size in bytes, sha256)}; several files are hashed at the same time.

    Args:
        folder: the folder of the checkpoint.
        paths: the files.
        sync: call fsync on each file first. After a failure files are then not read again, because a second fsync would
            not report the data that the first one lost.

    Raises:
        OSError: one of them cannot be read.
    """

    def read(path: Path) -> tuple[int, str]:
        return fingerprint(path, sync=True) if sync else retried(lambda: fingerprint(path, sync=False))

    with ThreadPoolExecutor(_THREADS) as pool:
        listed = list(paths)
        found = pool.map(read, listed)
        return {path.relative_to(folder).as_posix(): each for path, each in zip(listed, found)}


def fingerprint(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Return the size in bytes and the sha256 of a file.

    Raises:
        OSError: it cannot be read or written to disk, or is no regular file.
    """
    with open_regular(path) as f:
        if sync:
            _sync(f.fileno())
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()


def write_manifest(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the manifest with its own sha256, and sync it and all folders to disk.

    Args:
        folder: the folder of the checkpoint.
        record: a JSON object: `step`, `previous`, `arrays`, `files` and facts of the run. `schema` and `versions` are
            added.

    Raises:
        OSError: it cannot be written.
    """
    body = json.dumps({"schema": _SCHEMA, **record, "versions": _versions()}, indent=1)[: -len("\n}")] + ",\n "
    partial = folder / f"{MANIFEST}.tmp"
    with open(partial, "w", encoding="utf-8") as f:
        f.write(body + _tail(body))
        f.flush()
        _sync(f.fileno())
    os.replace(partial, folder / MANIFEST)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder.

    Raises:
        ValueError: there is none, it was changed, or another version wrote it; the message is for people.
        OSError: it cannot be read, which says nothing of what it holds.
    """
    try:
        read = functools.partial(read_regular, checkpoint / MANIFEST, _LARGEST_BYTES)
        text = retried(read).decode()  # Line ends stay as they are.
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and not is_absent(error):
            raise
        raise ValueError(f"no readable manifest: {MANIFEST}: {_reason(error)}") from None
    at = text.rfind(_SEAL)
    if at < 0 or text[at:] != _tail(text[:at]):
        raise ValueError(f"no readable manifest: {MANIFEST} {_unsealed(text)}")
    record = json.loads(text)
    if record.get("schema") != _SCHEMA:
        raise ValueError(f"no readable manifest: {MANIFEST} has schema {record.get('schema')}, not {_SCHEMA}")
    manifest = Manifest(record, text[at + len(_SEAL) :].partition('"')[0])
    try:
        outside = next((name for name in manifest.files if not _is_inside(name)), None)
        whole = manifest.step >= 0 and bool(manifest.files) and isinstance(manifest.arrays, dict)
    except (KeyError, TypeError, ValueError, AttributeError):
        outside, whole = None, False
    if outside is not None or not whole:
        problem = f"names {outside}, which is not in the checkpoint" if outside is not None else "lists no files"
        raise ValueError(f"no readable manifest: {MANIFEST} {problem}")
    return manifest


def previous_of(folder: Path, step: int) -> dict[str, Any] | None:
    """Return the step and seal of the newest whole checkpoint before this step; None if there is none.

    Returns:
        `step`, and as `sha256` the seal of the manifest, which is None if the manifest is damaged.

    Raises:
        OSError: the folder, or the manifest of that checkpoint, cannot be read.
    """
    before = next((s for s in whole_steps(folder) if s < step), None)
    if before is None:
        return None
    found: dict[str, Any] = {"step": before, "sha256": None}
    with contextlib.suppress(ValueError):  # A damaged manifest is reported when it is needed.
        found["sha256"] = read_manifest(folder / str(before)).seal
    return found


def find_break(folder: Path, step: int) -> str | None:
    """Return why a checkpoint cannot be the successor of the one before it in the folder; None if it can.

    A checkpoint whose predecessor is gone or damaged is accepted. So is one whose manifest has no `previous`,
    unless it carries no run ID and the one before it does.

    Raises:
        OSError: the folder, or a manifest in it, cannot be read.
        ValueError: the checkpoint has no readable manifest.
    """
    record, found = read_manifest(folder / str(step)).record, previous_of(folder, step)
    if found is None or found["sha256"] is None:
        return None
    if "previous" not in record:
        said = read_manifest(folder / str(found["step"])).record.get("run") if record.get("run") is None else None
        return (
            None
            if said is None
            else f"it names no run, but checkpoint {found['step']} before it belongs to run {said!r:.80}"
        )
    follows = record["previous"]
    if not isinstance(follows, dict) or not isinstance(follows.get("step"), int):
        return f"it is the first one of its run, but the folder has an earlier checkpoint {found['step']}"
    if follows["step"] < found["step"]:
        return f"it follows checkpoint {follows['step']}, but the folder has checkpoint {found['step']} between the two"
    if follows["step"] == found["step"] and follows.get("sha256") not in (None, found["sha256"]):
        return f"it follows another checkpoint {found['step']} than the one in this folder"
    return None


def find_corruption(checkpoint: Path, *, contents: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """Return a difference between a checkpoint folder and its manifest; None if there is none.

    Args:
        checkpoint: the folder of a checkpoint, which may have been set aside.
        contents: compare also sha256, not only names and sizes.
        share: (i, n) compares the sha256 of only the i-th of n parts of the files; the n parts cover all files.

    Raises:
        OSError: a file cannot be read, which says nothing of what it holds.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return str(error)
    number = checkpoint.name.partition(".")[0]
    if number != str(manifest.step):
        return f"{MANIFEST} has step {manifest.step}, but the folder is called {checkpoint.name}"
    try:
        for name, (size, _) in manifest.files.items():
            path = inside(checkpoint, name)
            if path is None:
                return f"{MANIFEST} names {name!r}, which is not in the folder"
            found = _stat(path)
            if found is None or not stat.S_ISREG(found.st_mode):
                return f"{name} is missing"
            if found.st_size != size:
                return f"{name} has {found.st_size} bytes instead of {size}"
        return _find_changed(checkpoint, manifest, share) if contents else None
    except OSError as error:
        if is_absent(error):
            return f"{error.filename or 'a file'} cannot be read: {_reason(error)}"
        raise


def share_of_files(sizes: Mapping[str, int], index: int, count: int) -> list[str]:
    """Return part `index` of `count` parts of the files. They have about equally many bytes; each file is in one part.

    Returns:
        The names in the part, the largest file first. Every process gets the same parts from the same sizes.
    """
    loads, mine = [0] * count, []
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1  # The 1 spreads empty files as well.
        if least == index:
            mine.append(name)
    return mine


def _sync(descriptor: int) -> None:
    """Call fsync. Ignore that some network file systems lack it for a folder, or for a file that is open to read."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


def _find_changed(checkpoint: Path, manifest: Manifest, share: tuple[int, int]) -> str | None:
    files = manifest.files
    names = share_of_files({name: size for name, (size, _) in files.items()}, *share)
    found = fingerprints(checkpoint, [checkpoint / name for name in names])
    changed = next((name for name in names if found[name] != files[name]), None)
    return None if changed is None else f"{changed} has other contents than were written"


def _stat(path: Path) -> os.stat_result | None:
    """Return the stat of a path; None if it does not exist. `Path.is_file` would hide other errors."""
    try:
        return retried(path.stat)
    except OSError as error:
        if is_absent(error):
            return None
        raise


def _is_inside(name: str) -> bool:
    """Return whether a name stays below the folder. Needed because a seal does not show who wrote the manifest."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _tail(body: str) -> str:
    return f'{_SEAL}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _unsealed(text: str) -> str:
    try:
        schema = json.loads(text)["schema"]
        if schema != _SCHEMA:
            return f"has schema {schema}, not {_SCHEMA}"
    except (ValueError, KeyError, TypeError):
        pass
    return "has other contents than were written"


def _versions() -> dict[str, str]:
    names = ("meshkit", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def kept_steps(steps: Iterable[int], *, keep: int, keep_every: int = 0) -> set[int]:
    """Return the newest `keep` steps, and all steps that are multiples of `keep_every` (none if it is 0).

    The steps are read twice, so they cannot be an iterator.
    """
    newest = sorted(steps, reverse=True)[:keep]
    return {*newest, *(s for s in steps if keep_every and s % keep_every == 0)}


def step_folder(path: Path) -> tuple[int, bool] | None:
    """Return the step of a checkpoint's folder, and whether it was set aside; None if it is no such folder."""
    number, _, rest = path.name.partition(".")
    step = _step(number)
    if step is None or rest.partition("-")[0] not in ("", _CORRUPT):
        return None
    found = _stat(path)
    return (step, bool(rest)) if found is not None and stat.S_ISDIR(found.st_mode) else None


def _step(name: str) -> int | None:
    """Return the step for a folder's name of plain digits without leading zeros; None for other names."""
    step = integer(name)
    return step if str(step) == name else None


def whole_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that are not set aside, newest first.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted((step for step, aside in _step_folders(folder) if not aside), reverse=True)


def steps_aside(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that were set aside.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(step for step, aside in _step_folders(folder) if aside)


def _step_folders(folder: Path) -> list[tuple[int, bool]]:
    found = map(step_folder, retried(lambda: list(folder.iterdir())) if _stat(folder) is not None else ())
    return [each for each in found if each is not None]


def set_aside(folder: Path, step: int) -> Path:
    """Rename a damaged checkpoint, never over an earlier one of the same step.

    Returns:
        The new path.

    Raises:
        OSError: it cannot be renamed.
    """
    target, copies = folder / f"{step}.{_CORRUPT}", 1
    while target.exists():
        copies += 1
        target = folder / f"{step}.{_CORRUPT}-{copies}"
    os.replace(folder / str(step), target)
    return target


def remove_step(folder: Path, step: int) -> None:
    """Remove a checkpoint. It is renamed first, so that an interrupted removal leaves no incomplete one under its name.

    Raises:
        OSError: it cannot be renamed.
    """
    gone = folder / f"{step}.deleting"
    os.replace(folder / str(step), gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove folders that a process, now dead, did not finish writing or removing.

    Each folder is renamed first. If its process still runs, this process can then no longer complete it.

    Raises:
        OSError: the folder cannot be listed; what cannot be removed is left.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        number, _, rest = path.name.partition(".")
        if _step(number) is not None and rest.startswith(_UNFINISHED):
            gone = folder / f"{number}.deleting-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):  # Another process removes it, or it cannot be removed.
                os.replace(path, gone)
            shutil.rmtree(gone, ignore_errors=True)
