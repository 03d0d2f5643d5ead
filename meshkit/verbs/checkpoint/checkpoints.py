"""`meshkit checkpoint`: list a run's checkpoints, verify whether they are intact, and export their weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from meshkit.config.experiment import Experiment
from meshkit.errors import ConfigError, TraceError
from meshkit.planning.resolved import resolve
from meshkit.sharding.mesh import use_no_accelerator
from meshkit.verbs.checkpoint.manifest import (
    describe_failure,
    find_break,
    find_corruption,
    read_manifest,
    retried,
    step_folder,
    unreadable_error,
)
from meshkit.verbs.checkpoint.saving import STATE
from meshkit.weights.files import layout_of, write_weights

_FOLDER = "checkpoints"


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a run."""

    step: int
    folder: Path
    size_bytes: int
    arrays: int | None
    """The number of arrays; None if the manifest cannot be read."""
    corruption: str | None
    """How the files differ from the manifest; None if they do not, or if `unreadable`."""
    unreadable: dict[str, Any] | None
    """The result of `describe_failure` if the files cannot be read; whether they are intact is then unknown."""
    set_aside: bool
    """Whether a run has found the checkpoint corrupt and has renamed it."""


def find(run: Path, *, contents: bool = False) -> list[Saved]:
    """Return the checkpoints of a run folder, oldest first.

    With `contents` every file is read and its sha256 is compared, too. Without it only names and sizes are compared.

    Raises:
        ConfigError: there is no such folder, it may not be read, or it has no checkpoint.
        RunError: the folder cannot be read.
    """
    folder = run / _FOLDER if (run / _FOLDER).is_dir() else run
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {run}.", hint="a run folder of meshkit train")
    try:
        named = [(path, step_folder(path)) for path in retried(lambda: list(folder.iterdir()))]
    except OSError as error:
        raise unreadable_error("the folder of checkpoints", describe_failure(error), str(folder)) from None
    found = [_describe(path, it[0], aside=it[1], contents=contents) for path, it in named if it is not None]
    if not found:
        raise ConfigError(f"{folder} has no checkpoint.", hint="[checkpoint] every = N in the experiment saves some")
    return sorted(found, key=lambda s: (s.step, not s.set_aside))


def export(
    run: Path,
    out: Path,
    *,
    experiment: Experiment,
    step: int | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int = 5 << 30,
) -> int:
    """Write the parameters of a checkpoint as a folder of safetensors, in the layout of the model's `hf_layout()`.

    Args:
        run: the run folder.
        out: the folder to write, which must not exist or must be empty.
        experiment: names the model. The model's code is run.
        step: the step of the checkpoint; the newest by default.
        dtype: `fp32` or `bf16`.
        max_shard_bytes: the largest size of one file.

    Returns:
        The step of the checkpoint.

    Raises:
        ConfigError: there is no such checkpoint, its files may not be read, or the model has no `hf_layout()`.
        TraceError: the checkpoint is corrupt.
        RunError: the checkpoint cannot be read.
    """
    saved = [s for s in find(run) if not s.set_aside and step in (None, s.step)]
    if not saved:
        raise ConfigError(f"{run} has no checkpoint of step {step}.", hint="meshkit checkpoint list RUN")
    newest = saved[-1]
    corruption, failure = _look(newest.folder, contents=True)
    if failure is not None:
        raise unreadable_error(f"checkpoint {newest.step}", failure, str(newest.folder))
    if corruption is not None:
        raise TraceError(f"checkpoint {newest.step} is corrupt: {corruption}.", at=str(newest.folder), hint="--step")
    use_no_accelerator()
    layout = layout_of(resolve(experiment))
    write_weights(_read_params(newest.folder / STATE), out, layout, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return newest.step


def _describe(path: Path, step: int, *, aside: bool, contents: bool) -> Saved:
    corruption, failure = _look(path, contents=contents, chain=contents and not aside)
    arrays, size = None, 0
    with suppress(ValueError, OSError):
        arrays = len(read_manifest(path).arrays) if failure is None else None
    with suppress(OSError):
        size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return Saved(step, path, size, arrays, corruption, failure, aside)


def _look(path: Path, *, contents: bool, chain: bool = False) -> tuple[str | None, dict[str, Any] | None]:
    try:
        corruption = find_corruption(path, contents=contents)
        if corruption is None and chain and (problem := find_break(path.parent, int(path.name))):
            corruption = f"it does not belong to the other checkpoints here: {problem}"
        return corruption, None
    except OSError as error:
        return None, describe_failure(error)


def _read_params(folder: Path) -> Any:
    """Return the parameters of a saved state as numpy arrays, nested as in the model. Reads nothing but parameters."""
    handler, at = ocp.PyTreeCheckpointHandler(), epath.Path(folder)
    metadata = handler.metadata(at)
    tree = getattr(metadata, "tree", metadata)["params"]
    item = {"params": jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), tree)}
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    restored = handler.restore(at, args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True))
    return restored["params"]
