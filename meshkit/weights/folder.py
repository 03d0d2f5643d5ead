"""A folder of safetensors files, checked: one file, or shards with an index, and their config.json.

    folder -> index, links and headers checked -> {tensor name: Tensor}, nothing of it read yet

The library `safetensors` checks a header and reads slices of a memory map. What it has no notion of stands here:
shards, links, pickles, names that stand twice. Files come from anywhere, so nothing in them is trusted. What cannot be
seen is a flipped bit inside a tensor: the format has no checksums.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from meshkit.config.bounded import read_regular
from meshkit.errors import ConfigError

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_LONGEST_INDEX, _LONGEST_CONFIG = 100_000_000, 10_000_000  # bytes
_LONGEST_SHOWN = 120  # characters of a message
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_AGAIN = "the download or copy once more: the file is damaged, or it is no safetensors file"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; what it is indexed with, slices of step 1, is read from a memory map."""

    path: Path
    """File that holds it."""
    dtype: str
    """As the format spells it."""
    shape: tuple[int, ...]
    values: Any
    """The library's slice of it; of the dtypes in `DTYPES` it gives numpy arrays."""


def open_file(path: Path) -> dict[str, Tensor]:
    """Name -> Tensor of one file.

    Raises:
        ConfigError: it cannot be opened, or is not exactly what its header says.
    """
    try:
        with open(path, "rb") as f:
            file = safe_open(path, framework="numpy")
            json.loads(f.read(int.from_bytes(f.read(8), "little")), object_pairs_hook=_unique)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it has no __iter__
    except OSError as error:
        message, hint = f"{path.name} cannot be read: {error.strerror}.", "a file that this process may read"
        raise ConfigError(message, at=str(path), hint=hint) from None
    except (SafetensorError, ValueError) as error:
        said = str(error).removeprefix("Error while deserializing header: ")
        raise ConfigError(
            f"{path.name} is no intact safetensors file: {shown(said)}.", at=str(path), hint=_AGAIN
        ) from None
    return {name: Tensor(path, s.get_dtype(), tuple(s.get_shape()), s) for name, s in slices.items()}


def open_folder(folder: Path) -> dict[str, Tensor]:
    """Name -> Tensor of a folder with `model.safetensors`, or shards and their index.

    Raises:
        ConfigError: no such files, only pickles, an index that does not match its shards or points out of the folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}.", hint="a folder that holds config.json and safetensors files")
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        message = f"{folder} has both {SINGLE} and {INDEX}; they may be different weights."
        raise ConfigError(message, at=str(folder), hint="removing the one that is not meant")
    if index:
        return _open_shards(folder, _read_index(folder))
    if single:
        return open_file(_inside(folder, SINGLE))
    raise _nothing_in(folder)


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json of a folder.

    Raises:
        ConfigError: it is missing, or no JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        config = _read_json(path, _LONGEST_CONFIG)
        if not isinstance(config, dict):
            raise ValueError(f"it is a JSON {type(config).__name__}, not an object")
    except OSError as error:
        hint = "the config.json that belongs to the weights: without it nobody knows how they are meant"
        raise ConfigError(f"{CONFIG} cannot be read: {error.strerror}.", at=str(path), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{CONFIG} is not JSON: {shown(str(error))}.", at=str(path), hint="an intact copy") from None
    return config


def shown(value: Any) -> str:
    """A value out of an untrusted file, printable and not long."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _nothing_in(folder: Path) -> ConfigError:
    names = sorted(p.name for p in folder.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return ConfigError(
            f"{pickles[0]} is a pickle, and loading a pickle runs whatever code is in it, so it is not read.",
            at=str(folder),
            hint="the same weights as safetensors, e.g. saved again by save_pretrained on a machine that may run it",
        )
    found = ", ".join(names[:5]) or "nothing"
    message = f"{folder} has neither {SINGLE} nor {INDEX}, but {found}{', ...' * (len(names) > 5)}."
    return ConfigError(message, at=str(folder), hint="a folder as save_pretrained writes it")


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        files = _read_json(_inside(folder, INDEX), _LONGEST_INDEX)["weight_map"]
        if not isinstance(files, dict) or not files or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("weight_map does not map tensor names to file names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = shown(f"no {error}" if isinstance(error, KeyError) else str(error)).rstrip(".")
        message = f"{INDEX} is no index of safetensors files: {said}."
        raise ConfigError(message, at=str(folder / INDEX), hint=_AGAIN) from None
    return files


def _open_shards(folder: Path, index: Mapping[str, str]) -> dict[str, Tensor]:
    at = str(folder / INDEX)
    shards = {}
    for name in sorted(set(index.values())):
        plain = name.endswith(".safetensors") and "\0" not in name and Path(name).name == name and "\\" not in name
        if not plain:
            message = f"{INDEX} names the file {shown(name)}, which is not a safetensors file of this folder."
            raise ConfigError(
                message, at=at, hint="weights from a source that you trust: this index is not an honest one"
            )
        if not (folder / name).exists():
            message = f"{INDEX} names {shown(name)}, which is missing."
            raise ConfigError(message, at=at, hint="downloading all shards: one is not there")
        shards[name] = open_file(_inside(folder, name))
    for name, file in index.items():
        if name not in shards[file]:
            message = f"{INDEX} says that {shown(name)} is in {file}, but it is not."
            raise ConfigError(message, at=at, hint="shards and index of one and the same export")
    for file, shard in shards.items():
        for name in shard:
            if index.get(name) != file:
                message = f"{file} holds {shown(name)}, which {INDEX} does not say."
                raise ConfigError(message, at=at, hint="shards and index of one and the same export")
    return {name: shards[file][name] for name, file in index.items()}


def _inside(folder: Path, name: str) -> Path:
    """The path of a file in the folder, unless it is no regular file or a link that leads elsewhere.

    A link into the `blobs` of the same repository is what the cache of huggingface_hub is made of.
    """
    path, home = folder / name, folder.resolve()
    target = path.resolve()
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not cached:
        message = f"{name} is a link to {target}, outside of the folder."
        raise ConfigError(message, at=str(path), hint="a copy of the file in its place, if the target is what you mean")
    if not stat.S_ISREG(target.stat().st_mode):
        raise ConfigError(f"{name} is not a regular file.", at=str(path), hint=_AGAIN)
    return path


def _read_json(path: Path, longest: int) -> Any:
    if (size := path.stat().st_size) > longest:
        raise ValueError(f"it has {size} bytes, more than {longest}")
    return json.loads(read_regular(path, longest), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ: parsers disagree on which of two equal ones counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice} stands twice")
    return found
