"""Which checkpoints of a run stay, and what their folders are called.

    120                 whole: it has a manifest, and every process had written its part
    120.partial-3       being written, or left by a process that was killed; removed at the next start
    120.corrupt         found damaged and set aside; never removed, never counted
    120.deleting        about to be gone

A folder gets the name of its step by one rename, when all is on disk, and loses it by another before it is removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

_CORRUPT = "corrupt"
# Also what orbax calls a checkpoint that it has not finished.
_UNFINISHED = ("partial", "deleting", "orbax-checkpoint-tmp")


def kept_steps(steps: Iterable[int], *, keep: int, keep_every: int = 0) -> set[int]:
    """The newest `keep` steps, and those that `keep_every` divides (0: none)."""
    newest = sorted(steps, reverse=True)[:keep]
    return {*newest, *(s for s in steps if keep_every and s % keep_every == 0)}


def step_folder(path: Path) -> tuple[int, bool] | None:
    """The step of a checkpoint's folder, and whether it was set aside; None for anything else."""
    number, _, rest = path.name.partition(".")
    if not number.isdigit() or not path.is_dir() or rest.partition("-")[0] not in ("", _CORRUPT):
        return None
    return int(number), bool(rest)


def whole_steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint which is not set aside, newest first."""
    found = map(step_folder, folder.iterdir()) if folder.is_dir() else ()
    return sorted((f[0] for f in found if f is not None and not f[1]), reverse=True)


def steps_aside(folder: Path) -> list[int]:
    """Steps of the checkpoints that were set aside."""
    found = map(step_folder, folder.iterdir()) if folder.is_dir() else ()
    return sorted(f[0] for f in found if f is not None and f[1])


def set_aside(folder: Path, step: int) -> Path:
    """Renames a damaged checkpoint, never over an earlier one of the same step.

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
    """Removes a checkpoint. One that is killed on the way leaves no half checkpoint under the name of a whole one.

    Raises:
        OSError: it cannot be renamed.
    """
    gone = folder / f"{step}.deleting"
    os.replace(folder / str(step), gone)
    shutil.rmtree(gone, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what processes that are gone left half written or half removed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        number, _, rest = path.name.partition(".")
        if number.isdigit() and rest.startswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)
