"""Checkpoints on disk: what their folders are called, and the manifest with the sha256 of every file, its own included.

    120                 whole: it has a manifest, and every process had written its part
    120.partial-3       being written, or left by a process that was killed; removed at the next start
    120.corrupt         found damaged and set aside; never removed, never counted
    120.deleting        about to be gone

    each process: the files it wrote -> fingerprints -> process 0: all of them -> meshkit.json, last and as a whole
    meshkit.json -> read_manifest -> find_corruption: all files, or one process's share of them

A folder gets the name of its step by one rename, when all is on disk, and loses it by another before it is removed.
orbax stores no checksum of its arrays: without a manifest a flipped bit is restored as a wrong value.

    a file is missing, or has other contents          corrupt: passed over, set aside
    EIO, ESTALE, ENOMEM, EMFILE, ...                  read again after each of PAUSES_S, then RunError (exit code 4)
    EACCES, EPERM                                     ConfigError (exit code 2)

Only what was read can be called corrupt: storage that is away for a minute, or one `chmod`, would otherwise cost the
newest checkpoint its name.
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
# Also what orbax calls a checkpoint that it has not finished.
_UNFINISHED = ("partial", "deleting", "orbax-checkpoint-tmp")
_THREADS = 4  # Hashing releases the interpreter's lock; more threads than disks read at once gain nothing.
PAUSES_S = (0.5, 2.0, 8.0)  # Pauses between attempts to read a file.
# Also a pipe or a device in the file's place (ENXIO), and far too many bytes (EFBIG): see meshkit.config.files.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def is_absent(error: OSError) -> bool:
    """Return whether an error says that no such file is there, which storage that answers has said."""
    return error.errno in _ABSENT


def retried[T](read: Callable[[], T]) -> T:
    """Return what `read` gives; where storage or memory fails, call it again after each of PAUSES_S.

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
    """Return the system's error of a file in one line, without the calls around it."""
    for error in (problem, problem.__cause__, problem.__context__):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = str(problem)
    if found := _OS_ERROR.search(text):  # tensorstore ends a long message with the system's error.
        return os.strerror(int(found[1]))
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(problem).__name__)[:300]


def describe_failure(problem: BaseException) -> dict[str, Any]:
    """Return why something could not be read, as JSON: `reason`, and whether it is `forbidden`."""
    chain = (problem, problem.__cause__, problem.__context__)
    numbers = {error.errno for error in chain if isinstance(error, OSError)}
    numbers |= {int(number) for number in _OS_ERROR.findall(str(problem))}
    return {"reason": explain(problem), "forbidden": not numbers.isdisjoint(_FORBIDDEN)}


def unreadable_error(what: str, failure: dict[str, Any], at: str) -> MeshkitError:
    """Return the error that ends a command because of what `describe_failure` has found.

    Returns:
        A ConfigError where it is forbidden (a mode or an owner is wrong), else a RunError, which a restart may mend.
    """
    if failure["forbidden"]:
        return ConfigError(
            f"{what} may not be read: {failure['reason']}. Nothing was changed.",
            at=at,
            hint="chmod -R u+rwX, or the user who wrote it",
        )
    return RunError(
        f"{what} cannot be read: {failure['reason']}; tried {len(PAUSES_S) + 1} times within {sum(PAUSES_S):.0f} s. "
        "That says nothing of its contents: nothing was changed.",
        at=at,
        hint="the same command, once the storage answers and there is memory",
    )


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest."""

    record: Mapping[str, Any]
    """The manifest as JSON has it: `schema`, `step`, `previous`, `arrays`, `mesh`, `processes`, `versions`, `files` and
    what the run added (`experiment`, `data`, `run`)."""
    seal: str

    @property
    def step(self) -> int:
        """Return the training step after which it was saved."""
        return int(self.record["step"])

    @property
    def arrays(self) -> Mapping[str, str]:
        """Map the path of every array to `float32[128, 256]`."""
        return self.record["arrays"]

    @property
    def files(self) -> dict[str, tuple[int, str]]:
        """Map the name of every file but the manifest to its size in bytes and sha256."""
        return {name: (int(size), str(digest)) for name, (size, digest) in self.record["files"].items()}


def fingerprints(folder: Path, paths: Iterable[Path], *, sync: bool = False) -> dict[str, tuple[int, str]]:
    """Map names below the folder to size in bytes and sha256; several files are hashed at a time.

    Args:
        sync: have the system write each of them to disk, before it counts as written. What cannot be read is read
            again only without it: a second fsync would say nothing of what the first one lost.

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
    """Write the manifest, sealed with its own sha256, and has it and the names of all files on disk.

    Args:
        record: `step`, `previous`, `arrays`, `files` and what else the run says, JSON. `schema` and `versions` are
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
        raise ValueError(f"no readable manifest: {MANIFEST} is of schema {record.get('schema')}, not {_SCHEMA}")
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
    """Return step and seal of the newest whole checkpoint before this step; None if there is none.

    Returns:
        `step`, and as `sha256` the seal of its manifest, None where that manifest is damaged.

    Raises:
        OSError: the folder, or that one's manifest, cannot be read.
    """
    before = next((s for s in whole_steps(folder) if s < step), None)
    if before is None:
        return None
    found: dict[str, Any] = {"step": before, "sha256": None}
    with contextlib.suppress(ValueError):  # A damaged one is found when it is needed.
        found["sha256"] = read_manifest(folder / str(before)).seal
    return found


def find_break(folder: Path, step: int) -> str | None:
    """Say why this folder's run cannot have made a checkpoint after those before it; None if it may have.

    What an earlier version wrote says nothing of it, and one whose predecessor is gone cannot be compared.

    Raises:
        OSError: the folder, or a manifest in it, cannot be read.
        ValueError: the checkpoint has no readable manifest.
    """
    record, found = read_manifest(folder / str(step)).record, previous_of(folder, step)
    if found is None or found["sha256"] is None:
        return None
    if "previous" not in record:
        said = read_manifest(folder / str(found["step"])).record.get("run") if record.get("run") is None else None
        return None if said is None else f"it says no run, but checkpoint {found['step']} before it is of {said!r:.80}"
    follows = record["previous"]
    if not isinstance(follows, dict) or not isinstance(follows.get("step"), int):
        return f"it is the first one of its run, but checkpoint {found['step']} lies before it"
    if follows["step"] < found["step"]:
        return f"it follows checkpoint {follows['step']}, but checkpoint {found['step']} lies between the two"
    if follows["step"] == found["step"] and follows.get("sha256") not in (None, found["sha256"]):
        return f"it follows another checkpoint {found['step']} than the one that lies here"
    return None


def find_corruption(checkpoint: Path, *, contents: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """Say what differs between a checkpoint folder and its manifest; None if nothing does.

    Args:
        checkpoint: the folder of one step, or of one set aside.
        contents: compare sha256 too, not only names and sizes.
        share: (i, n): of the contents only the i-th of n parts; together they are all of them.

    Raises:
        OSError: a file cannot be read, which says nothing of what it holds.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        return str(error)
    number = checkpoint.name.partition(".")[0]
    if number != str(manifest.step):
        return f"{MANIFEST} is of step {manifest.step}, but the folder is called {checkpoint.name}"
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
    """Return the i-th of n parts of the files, of about equally many bytes; every file is in exactly one of them.

    Returns:
        Names, the largest file first; the same parts for the same sizes, on every process.
    """
    loads, mine = [0] * count, []
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1  # The 1 spreads empty files as well.
        if least == index:
            mine.append(name)
    return mine


def _sync(descriptor: int) -> None:
    """Call fsync, which some network file systems lack for a folder, or for a file that is open to read."""
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
    """Return the stat of a path; None if there is nothing. `Path.is_file` would hide errors."""
    try:
        return retried(path.stat)
    except OSError as error:
        if is_absent(error):
            return None
        raise


def _is_inside(name: str) -> bool:
    """Return whether a name stays below the folder: a seal says that nothing has changed, not who wrote it."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _tail(body: str) -> str:
    return f'{_SEAL}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def _unsealed(text: str) -> str:
    try:
        schema = json.loads(text)["schema"]
        if schema != _SCHEMA:
            return f"is of schema {schema}, not {_SCHEMA}"
    except (ValueError, KeyError, TypeError):
        pass
    return "has other contents than were written"


def _versions() -> dict[str, str]:
    names = ("meshkit", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def kept_steps(steps: Iterable[int], *, keep: int, keep_every: int = 0) -> set[int]:
    """Return the newest `keep` steps, and those that `keep_every` divides (0: none).

    The steps are read twice, so they cannot be an iterator.
    """
    newest = sorted(steps, reverse=True)[:keep]
    return {*newest, *(s for s in steps if keep_every and s % keep_every == 0)}


def step_folder(path: Path) -> tuple[int, bool] | None:
    """Return the step of a checkpoint's folder, and whether it was set aside; None for anything else."""
    number, _, rest = path.name.partition(".")
    step = _step(number)
    if step is None or rest.partition("-")[0] not in ("", _CORRUPT):
        return None
    found = _stat(path)
    return (step, bool(rest)) if found is not None and stat.S_ISDIR(found.st_mode) else None


def _step(name: str) -> int | None:
    """Return the step that a name is, as it is written here: of plain digits, with no zero before them."""
    step = integer(name)
    return step if str(step) == name else None


def whole_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoint is not set aside, newest first.

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
        Where it is now.

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
    """Remove a checkpoint. One that is killed on the way leaves no half checkpoint under the name of a whole one.

    Raises:
        OSError: it cannot be renamed.
    """
    gone = folder / f"{step}.deleting"
    os.replace(folder / str(step), gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what processes that are gone left half written or half removed.

    By another name first: one that was only taken to be gone can then no longer give it the name of a whole one.

    Raises:
        OSError: the folder cannot be listed; what cannot be removed is left.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        number, _, rest = path.name.partition(".")
        if _step(number) is not None and rest.startswith(_UNFINISHED):
            gone = folder / f"{number}.deleting-{uuid.uuid4().hex}"
            with contextlib.suppress(OSError):  # Somebody else removes it, or nobody can.
                os.replace(path, gone)
            shutil.rmtree(gone, ignore_errors=True)
