"""The experiment file in a run folder: written once resolved, and what a resumed run may say differently."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from meshkit.config.experiment import Experiment
from meshkit.errors import ConfigError

_EXPERIMENT_FILE = "experiment.toml"
# What a run cannot change on the way: its arrays, its objective, and the order of its data.
_FIXED = (
    "model.",
    "data.",
    "optimizer.dtype",
    "train.global_batch",
    "train.sequence_length",
    "train.seed",
    "train.loss",
    "local_sgd.",
    "compression.",
)


def check_experiment_file(experiment: Experiment, folder: Path) -> list[str]:
    """What the run's own experiment file says differently, one sentence a key; none for a new run.

    Raises:
        ConfigError: the file cannot be read, or a key differs that the state or the order of the data depends on.
    """
    path = folder / _EXPERIMENT_FILE
    if not path.exists():
        return []
    try:
        saved = _flat(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the experiment file of this run cannot be read: {error}.",
            at=str(path),
            hint="the file that the run began with, copied there; or another --out",
        ) from None
    wanted = _flat(tomllib.loads(experiment.to_toml()))
    changed = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    for key in changed:
        if key.startswith(_FIXED):
            raise ConfigError(
                f"this run has {key} = {saved.get(key)!r}, but the experiment now says {wanted.get(key)!r}.",
                at=str(path),
                hint="another --out, or the value that the run began with",
            )
    return [f"{key} was {saved.get(key)!r} in this run and is now {wanted.get(key)!r}" for key in changed]


def write_experiment_file(experiment: Experiment, folder: Path) -> None:
    """Writes the resolved experiment into the run folder, as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        partial = folder / f"{_EXPERIMENT_FILE}.tmp"
        partial.write_text(experiment.to_toml())
        os.replace(partial, folder / _EXPERIMENT_FILE)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"seed": 0}}` as `{"train.seed": 0}`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
