"""Checkpoints of a run: asynchronous, verified, and resumed exactly. Layer 4.

    checkpoints/120/state/...         orbax, each process its own shards
    checkpoints/120/meshkit.json      manifest: step, size and sha256 of every file, shapes and dtypes

orbax writes into a temporary folder and renames it; the manifest is written just before that rename, so a checkpoint
either has one or does not exist. It is needed because orbax stores no checksums: a flipped bit in an array would be
restored as a wrong value, and a dtype that differs would be cast without a word.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from meshkit.errors import ConfigError, RunError, TraceError
from meshkit.sharding.resolve import path_name
from meshkit.training.arrange import Arrangement
from meshkit.training.state import TrainState

MANIFEST = "meshkit.json"
_SCHEMA = "meshkit.checkpoint/1"
_NOT_HASHED = (MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt")


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        folder: made if missing.
        keep: how many of the newest to keep.
        verify: compare every file with the manifest before restoring.
        arrangement: of a pipeline's state, which is written in the order that it has without one.
    """

    def __init__(self, folder: Path, *, keep: int = 2, verify: bool = True, arrangement: Arrangement | None = None):
        self.folder, self.keep, self.verify = Path(folder).absolute(), keep, verify
        self.arrangement = arrangement
        self._saving: dict[str, Any] = {}
        # orbax reports each step of each save at INFO and above; a run prints its own progress.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        finish = ocp.options.AsyncOptions(post_finalization_callback=self._write_manifest)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep, cleanup_tmp_directories=True, async_options=finish, enable_async_checkpointing=True
        )
        handlers = {"state": ocp.StandardCheckpointHandler()}
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def save(self, state: TrainState) -> None:
        """Starts writing the state; returns when it is copied to host memory. Waits for an earlier save to end.

        Raises:
            RunError: an earlier save failed.
        """
        self.wait()
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        if self.arrangement:
            state = self.arrangement.to_saved(state)
        self._saving = {"step": step, "arrays": _describe(state)}
        self._guard(lambda: self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state))))

    def check(self) -> None:
        """Raises RunError if the save in the background has failed; cheap enough for every step."""
        self._guard(self._manager.check_for_errors)

    def wait(self) -> None:
        """Returns when nothing is being written. Raises RunError if it failed."""
        self._guard(self._manager.wait_until_finished)

    def close(self) -> None:
        """Waits for the last save, then lets go of orbax's threads."""
        self.wait()
        self._manager.close()

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first."""
        return sorted(self._manager.all_steps(read=True), reverse=True)

    def restore_latest(self, abstract: TrainState) -> TrainState | None:
        """The newest state that is intact, on the shardings of `abstract`; None when there is no checkpoint.

        A corrupt checkpoint is passed over with a warning, and set aside (`120.corrupt`) once one before it is
        restored. Where none is intact nothing is touched, and every further attempt is refused as well.

        Args:
            abstract: ShapeDtypeStructs with shardings; the mesh, and a pipeline's stages, may differ from those that
                saved.

        Raises:
            ConfigError: an array was saved with another shape or dtype: the model is not the same.
            TraceError: there are checkpoints, but none is intact.
        """
        steps, corrupt = self.steps(), []
        for step in steps:
            problem = self._problem(step)
            if problem is None:
                state = self._restore(step, abstract)
                for broken in corrupt:
                    self._set_aside(broken)
                return state
            warnings.warn(f"checkpoint {step} is corrupt ({problem}); trying the one before it.", stacklevel=2)
            corrupt.append(step)
        aside = len(list(self.folder.glob("*.corrupt"))) if self.folder.is_dir() else 0
        if steps or aside:
            raise TraceError(
                f"none of the {len(steps) + aside} checkpoints is intact.",
                at=str(self.folder),
                hint="another --out to start over",
            )
        return None

    def _restore(self, step: int, abstract: TrainState) -> TrainState:
        saved = self.arrangement.saved if self.arrangement else abstract
        self._check_arrays(step, saved)
        targets = ocp.args.Composite(state=ocp.args.StandardRestore(saved))
        state = self._manager.restore(step, args=targets)["state"]
        return self.arrangement.from_saved(state) if self.arrangement else state

    def _problem(self, step: int) -> str | None:
        """What is wrong with a checkpoint, the same answer on every process."""
        problem = None
        if jax.process_index() == 0:
            problem = find_corruption(self.folder / str(step), contents=self.verify)
        if jax.process_count() == 1:
            return problem
        broken = multihost_utils.broadcast_one_to_all(problem is not None)
        return (problem or "found by process 0") if bool(broken) else None

    def _set_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            target = self.folder / f"{step}.corrupt"
            shutil.rmtree(target, ignore_errors=True)
            os.replace(self.folder / str(step), target)
        self._manager.close()
        self._manager = self._open()

    def _check_arrays(self, step: int, abstract: TrainState) -> None:
        saved = json.loads((self.folder / str(step) / MANIFEST).read_text())["arrays"]
        wanted = _describe(abstract)
        for path in [*wanted, *(p for p in saved if p not in wanted)]:
            if saved.get(path) != wanted.get(path):
                was, now = saved.get(path, "not there"), wanted.get(path, "not there")
                raise ConfigError(
                    f"checkpoint {step} does not fit the experiment: {path} was {was} and is now {now}.",
                    at=str(self.folder / str(step)),
                    hint="the model and optimizer of the run's experiment.toml, or another --out",
                )

    def _write_manifest(self) -> None:
        """Called by orbax when all processes have written, before the folder gets its final name."""
        if jax.process_index() != 0:
            return
        (folder,) = self.folder.glob(f"{self._saving['step']}.orbax-checkpoint-tmp*")
        files = {p.relative_to(folder).as_posix(): _fingerprint(p) for p in _files(folder)}
        manifest = {"schema": _SCHEMA, **self._saving, "files": files}
        with open(folder / MANIFEST, "w") as f:
            json.dump(manifest, f, indent=1)
            f.flush()
            os.fsync(f.fileno())

    def _guard(self, act) -> None:
        try:
            act()
        except Exception as error:  # orbax re-raises whatever its threads met
            raise RunError(f"saving a checkpoint failed: {error}", at=str(self.folder)) from error


def find_corruption(checkpoint: Path, *, contents: bool = True) -> str | None:
    """What differs between a checkpoint folder and its manifest, or None.

    Args:
        checkpoint: the folder of one step.
        contents: compare sha256 too, not only names and sizes.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = {name: (int(size), str(digest)) for name, (size, digest) in manifest["files"].items()}
        if not files or not isinstance(manifest["arrays"], dict):
            raise ValueError("it lists nothing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"no readable manifest: {error}"
    for name, (size, digest) in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if contents and _fingerprint(path)[1] != digest:
            return f"{name} has other contents than were written"
    return None


def _describe(state: TrainState) -> dict[str, str]:
    """Path -> `float32[128, 256]` of every array."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {path_name(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _files(folder: Path) -> Iterator[Path]:
    """All files but our manifest and those that orbax rewrites when it commits, which hold times and no arrays."""
    return (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in _NOT_HASHED)


def _fingerprint(path: Path) -> tuple[int, str]:
    with open(path, "rb") as f:
        return path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()
