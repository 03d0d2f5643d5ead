"""Write one checkpoint to disk, in a thread of its own.

    state -> [copied to host memory] -> training goes on
          -> this process writes and hashes its shards -> process 0: merge, manifest, rename -> the same outcome on all

orbax writes the arrays. This module lets all processes agree whether a save is complete or has failed. With orbax's own
manager, a process whose disk is full leaves all others waiting in a barrier, and a save that failed in the background
is listed as a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from meshkit.distributed.join import Agreement
from meshkit.errors import ConfigError
from meshkit.runs.owner import RunOwner
from meshkit.step.state import TrainState
from meshkit.verbs.checkpoint.manifest import (
    explain,
    fingerprints,
    previous_of,
    remove_step,
    sync_folder,
    write_manifest,
)

STATE = "state"
_REMOVE_S, QUIET_S = 5.0, 0.5  # What remains after these seconds is removed at the next save, or at the end of the run.
_VISIBLE_S = 90.0  # NFS clients cache directory listings for up to a minute.


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended. `step` and `error` are the same on every process."""

    step: int
    seconds: float
    """Seconds from the call to the end, on this process."""
    error: str | None
    """Why there is no checkpoint of this step; None if there is."""
    notes: tuple[str, ...] = ()


class Saving:
    """A checkpoint being written. Every process of the job makes one at the same step.

    Args:
        folder: the folder of the run's checkpoints.
        number: the number of this save, counted by every process.
        record: the manifest without its `files`: `step`, `arrays` and more.
        agreement: the channel on which the processes of the job agree.
        limit_s: seconds for all processes to write their parts.
        superseded: steps whose checkpoints are removed once this one is complete.
        owner: the owner of the run folder; None if no other job can write it.
    """

    def __init__(
        self,
        folder: Path,
        number: int,
        record: Mapping[str, Any],
        agreement: Agreement,
        *,
        limit_s: float,
        superseded: Sequence[int] = (),
        owner: RunOwner | None = None,
    ):
        self.superseded = tuple(superseded)
        self.step = int(record["step"])
        mine = number if owner is None else f"{owner.token}-{number}"  # No two owners write into one folder.
        self._target, self._partial = folder / str(self.step), folder / f"{self.step}.partial-{mine}"
        self._check_owner = owner.check if owner is not None else lambda: None
        self._number, self._record, self._agreement, self._limit_s = number, record, agreement, limit_s
        self._handler = ocp.StandardCheckpointHandler()
        self._copied = threading.Event()
        self._outcome: SaveOutcome | None = None
        self._thread = threading.Thread(target=self._save, name=f"meshkit-save-{self.step}", daemon=True)

    def start(self, state: TrainState) -> None:
        """Begin the save; return once the state is in host memory, so that the next step may change it."""
        self._state, self._began = state, time.monotonic()
        self._thread.start()
        self._copied.wait()

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome is not None

    @property
    def partial(self) -> Path:
        """The folder into which the save writes until it is complete."""
        return self._partial

    def wait(self, timeout_s: float | None = None) -> SaveOutcome | None:
        """Wait for the outcome and return it; None after `timeout_s`."""
        self._thread.join(timeout_s)
        return self._outcome

    def _save(self) -> None:
        """Run the save without raising: an error, here or on another process, becomes the outcome."""
        try:
            mine = self._write()
            error = self._agreement.reach(f"save/{self._number}", mine, self._commit, timeout_s=self._limit_s)
        except BaseException as problem:
            error = str(problem) or type(problem).__name__
        notes = self._remove_superseded() if error is None and self._agreement.rank == 0 else []
        self._outcome = SaveOutcome(self.step, time.monotonic() - self._began, error, tuple(notes))

    def _write(self) -> dict[str, Any]:
        """Write this process's part; return `files`, or `error`."""
        into = self._partial / STATE
        try:
            into.mkdir(parents=True, exist_ok=True)
            args = ocp.args.StandardSave(self._state)
            futures = asyncio.run(self._handler.async_save(epath.Path(into), args=args))
            self._state = None
            self._copied.set()
            wait_for_all(futures or ())
            # No other process writes into this folder, and the merge does not change it.
            shards = into / f"ocdbt.process_{self._agreement.rank}"
            files = fingerprints(self._partial, _files(shards), sync=True)
            if self._agreement.size > 1 and (took_s := time.monotonic() - self._began) > self._limit_s:
                # The others no longer wait, so this save has failed on all processes.
                raise OSError(f"its part took {took_s:.0f} s to write, but a save may take {self._limit_s:.0f} s")
            return {"files": files}
        except BaseException as problem:
            return {"error": explain(problem)}
        finally:
            self._copied.set()

    def _commit(self, parts: list[dict[str, Any]]) -> str | None:
        """Complete the checkpoint, or remove it if a process failed; return the error, if any. Runs on process 0."""
        errors = [f"process {rank}: {p['error']}" for rank, p in enumerate(parts) if "error" in p]
        error = parts[0].get("error") if len(parts) == 1 else next(iter(errors), None)
        try:
            if error is None:
                self._finish({name: found for part in parts for name, found in part["files"].items()})
        except BaseException as problem:
            error = explain(problem)
        if error is not None:  # The next save needs the space on a full disk.
            remove_failed(self._partial)
        return error

    def _remove_superseded(self) -> list[str]:
        notes = []
        for step in self.superseded:
            try:
                self._check_owner()
                remove_step(self._target.parent, step)
            except (OSError, ConfigError) as problem:
                notes.append(f"warning: the old checkpoint {step} cannot be removed: {explain(problem)}.")
        return notes

    def _finish(self, hashed: Mapping[str, tuple[int, str]]) -> None:
        self._see(hashed)
        self._handler.finalize(epath.Path(self._partial / STATE))
        every = {path.relative_to(self._partial).as_posix(): path for path in _files(self._partial)}
        rest = fingerprints(self._partial, [path for name, path in every.items() if name not in hashed], sync=True)
        previous = previous_of(self._target.parent, self.step)
        write_manifest(self._partial, {**self._record, "previous": previous, "files": {**hashed, **rest}})
        self._check_owner()  # A new owner removes this folder first, so nothing can be committed in between.
        os.replace(self._partial, self._target)
        sync_folder(self._target.parent)

    def _see(self, hashed: Mapping[str, tuple[int, str]]) -> None:
        """Wait until this process sees the files of all others, since orbax's merge would leave out unseen files."""
        ends = time.monotonic() + _VISIBLE_S
        while unseen := [name for name, (size, _) in hashed.items() if _size(self._partial / name) != size]:
            if time.monotonic() > ends:
                raise OSError(
                    f"{unseen[0]} was written, but process 0 does not see it: do all hosts share this file system?"
                )
            time.sleep(0.1)


def wait_for_all(futures: Sequence[Any]) -> None:
    """Wait until all arrays are written; raise the first error only then."""
    problems = []
    for future in futures:
        try:
            future.result()
        except BaseException as problem:
            problems.append(problem)
    if problems:
        raise problems[0]


def remove_failed(folder: Path) -> None:
    """Remove a folder until it stays gone: threads of a failed save may create it and its files again for a moment."""
    ends, gone_since = time.monotonic() + _REMOVE_S, time.monotonic()
    while time.monotonic() < min(ends, gone_since + QUIET_S):
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            gone_since = time.monotonic()
        time.sleep(0.05)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def silence_orbax() -> None:
    """Suppress orbax's messages on the terminal from now on. A second call changes nothing.

    orbax logs every step of every save. If one of many writes fails, it stops waiting for the others. Each of them
    then prints a traceback when it ends: of a closed event loop, or of a coroutine, task or future that was never
    awaited. meshkit reports the first error itself.
    """
    logging.getLogger("absl").addFilter(_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_not_of_a_save)
    if getattr(sys.unraisablehook, "__name__", "") != _unraisable.__name__:
        _before.append(sys.unraisablehook)
        sys.unraisablehook = _unraisable


_before: list[Any] = []


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _not_of_a_save(record: logging.LogRecord) -> bool:
    """Return whether a message of asyncio is unrelated to saves: it names no code of orbax and no partial file."""
    text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    files = (frame.f_code.co_filename for frame, _ in frames)
    return "orbax" not in text and ".partial-" not in text and not any("orbax" in name for name in files)


def _unraisable(found: Any) -> None:
    loop_is_gone = isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == "Event loop is closed"
    code = getattr(found.object, "cr_code", None)
    if not loop_is_gone and "orbax" not in getattr(code, "co_filename", ""):
        _before[-1](found)
