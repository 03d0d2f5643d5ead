"""The safetensors format, one file or a folder of shards with an index.

    8 bytes   length of the header, little endian
    header    JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..., "__metadata__": {...}}
    data      the tensors, row major, little endian, back to back

(https://huggingface.co/docs/safetensors). A file is checked as a whole before any of it is used, and its tensors are
views of a memory map: a reshape or transpose of one costs nothing, and what is read from disk are the pages of the
slice that is taken in the end.

Files come from anywhere, so nothing in them is trusted. What cannot be seen is a flipped bit inside a tensor: the
format has no checksums.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from meshkit.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the reference implementation
_LONGEST_INDEX = 100_000_000
_MOST_DIMS = 32
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_AGAIN = "the download or copy once more: the file is damaged, or it is no safetensors file"


@dataclass(frozen=True)
class Tensor:
    """What a header says of a tensor: dtype as the format spells it, and where its bytes are in the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A safetensors file, checked and mapped into memory.

    Attributes:
        tensors: name -> Tensor.

    Raises:
        ConfigError: it cannot be opened, or is not exactly what its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as f:
                size = os.fstat(f.fileno()).st_size
                self._data_at, header = self._read_header(f, size)
        except OSError as error:
            self._fail(f"{path.name} cannot be read: {error.strerror}.", "a file that this process may read")
        self.tensors = self._check(header, size - self._data_at)
        self._map = np.memmap(path, np.uint8, mode="r")

    def view(self, name: str) -> np.ndarray:
        """A tensor's values, unread until they are used; of the dtypes in `DTYPES` only."""
        tensor = self.tensors[name]
        begin, end = self._data_at + tensor.begin, self._data_at + tensor.end
        return self._map[begin:end].view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _read_header(self, f: Any, size: int) -> tuple[int, Any]:
        """Where the data begins, and the header as JSON."""
        if size < 8:
            self._fail(f"{self.path.name} has {size} bytes; the length of its header alone takes 8.")
        length = int.from_bytes(f.read(8), "little")
        if length > min(size - 8, _LONGEST_HEADER):
            self._fail(
                f"{self.path.name} announces a header of {length} bytes, but has {size - 8} bytes left"
                f" (at most {_LONGEST_HEADER} are read)."
            )
        try:
            return 8 + length, json.loads(f.read(length).decode(), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            self._fail(f"the header of {self.path.name} is not JSON: {_short(error)}.")

    def _check(self, header: Any, data_bytes: int) -> dict[str, Tensor]:
        """The tensors of a header that describes the data section without gap, overlap or remainder."""
        if not isinstance(header, dict):
            self._fail(f"the header of {self.path.name} is a JSON {type(header).__name__}, not an object.")
        tensors = [self._tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
        reached = 0
        for t in sorted(tensors, key=lambda t: (t.begin, t.end)):
            if t.begin != reached:
                what = "overlaps the tensor before it" if t.begin < reached else "leaves a gap"
                self._fail(f"{shown(t.name)} begins at byte {t.begin} and {what}, which ends at byte {reached}.")
            reached = t.end
        if reached != data_bytes:
            self._fail(
                f"{self.path.name} has {data_bytes} bytes of data, but its header describes {reached}:"
                f" it is {'truncated' if reached > data_bytes else 'longer than it should be'}."
            )
        return {t.name: t for t in tensors}

    def _tensor(self, name: str, entry: Any) -> Tensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = isinstance(shape, list) and len(shape) <= _MOST_DIMS and all(map(_is_size, (*shape, begin, end)))
        except (TypeError, KeyError, ValueError):
            whole, dtype, shape, begin, end = False, "", (), 0, 0
        if not whole or not isinstance(dtype, str):
            self._fail(f"the header says of {shown(name)} {shown(entry)}, not a dtype, a shape and two offsets.")
        if dtype not in _BITS:
            self._fail(f"{shown(name)} has the dtype {shown(dtype)}, which is unknown.")
        size = math.prod(shape) * _BITS[dtype] // 8
        if end - begin != size:
            self._fail(f"{shown(name)} is {dtype} {shown(shape)}, {size} bytes, but has offsets {begin} to {end}.")
        return Tensor(name, dtype, tuple(shape), begin, end)

    def _fail(self, message: str, hint: str = _AGAIN) -> NoReturn:
        raise ConfigError(message, at=str(self.path), hint=hint) from None


def open_folder(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it, of a folder with `model.safetensors`, or shards and their index.

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
        file = SafetensorsFile(_inside(folder, SINGLE, folder / SINGLE))
        return dict.fromkeys(file.tensors, file)
    raise _nothing_in(folder)


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
    path = _inside(folder, INDEX, folder / INDEX)
    try:
        if (size := path.stat().st_size) > _LONGEST_INDEX:
            raise ValueError(f"it has {size} bytes, more than {_LONGEST_INDEX}")
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        files = index["weight_map"]
        if not isinstance(files, dict) or not files or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("weight_map does not map tensor names to file names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{INDEX} is no index of safetensors files: {_short(error)}."
        raise ConfigError(message, at=str(folder / INDEX), hint=_AGAIN) from None
    return files


def _open_shards(folder: Path, index: Mapping[str, str]) -> dict[str, SafetensorsFile]:
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
        shards[name] = SafetensorsFile(_inside(folder, name, folder / name))
    for name, file in index.items():
        if name not in shards[file].tensors:
            message = f"{INDEX} says that {shown(name)} is in {file}, but it is not."
            raise ConfigError(message, at=at, hint="shards and index of one and the same export")
    for file, shard in shards.items():
        for name in shard.tensors:
            if index.get(name) != file:
                message = f"{file} holds {shown(name)}, which {INDEX} does not say."
                raise ConfigError(message, at=at, hint="shards and index of one and the same export")
    return {name: shards[file] for name, file in index.items()}


def _inside(folder: Path, name: str, path: Path) -> Path:
    """The path, unless it is no regular file or a link that leads elsewhere.

    A link into the `blobs` of the same repository is what the cache of huggingface_hub is made of.
    """
    home, target = folder.resolve(), path.resolve()
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not cached:
        message = f"{name} is a link to {target}, outside of the folder."
        raise ConfigError(message, at=str(path), hint="a copy of the file in its place, if the target is what you mean")
    if not stat.S_ISREG(target.stat().st_mode):
        raise ConfigError(f"{name} is not a regular file.", at=str(path), hint=_AGAIN)
    return path


def write_file(
    path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: str, values: Iterable[np.ndarray]
) -> None:
    """Writes one file, a tensor at a time.

    Args:
        tensors: (name, shape) in the order of `values`.
        dtype: of all, a key of DTYPES.
        values: read one by one, each dropped before the next.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    at = 0
    for name, shape in tensors:
        end = at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data aligned to 8 bytes
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for (_, shape), value in zip(tensors, values, strict=True):
            assert (value.shape, value.dtype) == (tuple(shape), DTYPES[dtype])
            f.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def shown(value: Any, longest: int = 120) -> str:
    """A value out of an untrusted file, printable and not long."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= longest else f"{text[:longest]}..."


def _short(error: BaseException) -> str:
    return shown(f"no {error}" if isinstance(error, KeyError) else str(error)).rstrip(".")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ: parsers disagree on which of two equal ones counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice} stands twice")
    return found
