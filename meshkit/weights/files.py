"""Read and write the weights of a model as safetensors, through a `Layout`.

    folder -> check of every file and config.json -> sharded arrays, each device's part read from the memory map
    arrays -> one tensor (one layer of a stack) at a time -> shards of at most `max_shard_bytes`, index, config.json

No host holds a whole model: reading needs memory for the host's own part of one array, writing for one shard.

The library `safetensors` checks a header and reads slices of a memory map. This module adds the checks that the library
lacks: of shards, links, pickles and duplicate names. Files may come from anywhere, so nothing in them is trusted. A
flipped bit inside a tensor cannot be detected: the format has no checksums.

`first_state` makes the first state of a new run, with the weights of `checkpoint.initial` if it is set.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chex
import jax
import ml_dtypes
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshkit.config.files import open_regular, read_regular
from meshkit.errors import ConfigError, RunError, a_type
from meshkit.sharding.resolve import path_name
from meshkit.step.spec import StepSpec
from meshkit.step.state import TrainState, describe_model
from meshkit.step.train_step import TrainProgram
from meshkit.weights.layout import Layout, Row
from meshkit.weights.quantized import FP8, dequantized, fp8_values

MAX_SHARD_BYTES = 5_000_000_000
_WRITTEN = {"fp32": "F32", "bf16": "BF16"}
_TORCH_DTYPE = {"fp32": "float32", "bf16": "bfloat16"}
_ROWS = 4096  # Number of rows that are compared at a time.
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_LONGEST_INDEX, _LONGEST_CONFIG = 100_000_000, 10_000_000  # The largest index and config.json that are read, in bytes.
_LONGEST_SHOWN = 120  # Longest text in a message, in characters.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INTACT = "an intact copy: the file is damaged, or it is not a safetensors file"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file; indexing `values` with slices of step 1 reads that part from a memory map."""

    path: Path
    """File that holds it."""
    dtype: str
    """The format's name for it, such as `F32`."""
    shape: tuple[int, ...]
    values: Any
    """The library's lazy slice of the tensor, which returns numpy arrays. For FP8, which the library cannot slice, this
    is a memory map. `dequantized` replaces the `values` of quantized tensors by objects that return fp32."""


Files = Mapping[str, Tensor]


def open_file(path: Path) -> dict[str, Tensor]:
    """Return tensor name -> tensor of one file.

    Raises:
        ConfigError: it cannot be opened, or is not exactly what its header says.
    """
    try:
        with open_regular(path) as f:
            file = safe_open(path, framework="numpy")
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length), object_pairs_hook=_unique)
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it has no __iter__
    except OSError as error:
        message, hint = f"{path.name} cannot be read: {error.strerror}.", "a file that this process may read"
        raise ConfigError(message, at=str(path), hint=hint) from None
    except (SafetensorError, ValueError) as error:
        said = str(error).removeprefix("Error while deserializing header: ")
        raise ConfigError(
            f"{path.name} is no intact safetensors file: {shown(said)}.", at=str(path), hint=_INTACT
        ) from None
    tensors = {name: Tensor(path, s.get_dtype(), tuple(s.get_shape()), s) for name, s in slices.items()}
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            start = 8 + length + header[name]["data_offsets"][0]
            tensors[name] = replace(tensor, values=fp8_values(path, start, tensor.shape))
    return tensors


def open_folder(folder: Path) -> dict[str, Tensor]:
    """Return tensor name -> tensor of a folder, which has `model.safetensors` or shards and their index.

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
    """Return the config.json of a folder.

    Raises:
        ConfigError: it is missing, or no JSON object.
    """
    path = Path(folder) / CONFIG
    try:
        config = _read_json(path, _LONGEST_CONFIG)
        if not isinstance(config, dict):
            raise ValueError(f"it is {a_type(config)}")
    except OSError as error:
        hint = "the config.json that belongs to the weights: without it nobody knows how they are meant"
        raise ConfigError(f"{CONFIG} cannot be read: {error.strerror}.", at=str(path), hint=hint) from None
    except (ValueError, RecursionError) as error:
        message = f"{CONFIG} cannot be read as a JSON object: {shown(str(error))}."
        raise ConfigError(message, at=str(path), hint="an intact copy") from None
    return config


def shown(value: Any) -> str:
    """Return a value from an untrusted file as printable text of limited length."""
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
            hint="the same weights as safetensors, written by save_pretrained (in a sandbox, if you do not trust them)",
        )
    found = ", ".join(names[:5]) or "nothing"
    message = f"{folder} has neither {SINGLE} nor {INDEX}, but {found}{', ...' * (len(names) > 5)}."
    return ConfigError(message, at=str(folder), hint="a folder as save_pretrained writes it")


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor name -> file name."""
    try:
        files = _read_json(_inside(folder, INDEX), _LONGEST_INDEX)["weight_map"]
        if not isinstance(files, dict) or not files or not all(isinstance(f, str) for f in files.values()):
            raise ValueError("weight_map does not map tensor names to file names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = shown(f"no {error}" if isinstance(error, KeyError) else str(error)).rstrip(".")
        message = f"{INDEX} is no index of safetensors files: {said}."
        raise ConfigError(message, at=str(folder / INDEX), hint="an intact copy of the index") from None
    return files


def _open_shards(folder: Path, index: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of all shards; refuse an index and shards that disagree on a name."""
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
    """Return the path of a file in the folder; refuse a link out of the folder, or a file that is not regular.

    A link into the `blobs` of the same repository is allowed: the cache of huggingface_hub consists of such links.
    """
    path, home = folder / name, folder.resolve()
    target = path.resolve()
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not cached:
        message = f"{name} is a link to {target}, outside of the folder."
        raise ConfigError(message, at=str(path), hint="a copy of the file in its place, if the target is what you mean")
    if not stat.S_ISREG(target.stat().st_mode):
        raise ConfigError(f"{name} is not a regular file.", at=str(path), hint="a regular file in its place")
    return path


def _read_json(path: Path, longest: int) -> Any:
    if (size := path.stat().st_size) > longest:
        raise ValueError(f"it has {size} bytes, and at most {longest} are read")
    return json.loads(read_regular(path, longest), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse duplicate keys, since parsers disagree on which of them counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice} stands twice")
    return found


def read_weights(folder: str | os.PathLike[str], layout: Layout, abstract: Any) -> Any:
    """Return the parameters that a folder of safetensors holds, as sharded arrays.

    Each process reads what its own devices hold, one array at a time, and casts it to the parameter's dtype.

    Args:
        folder: a folder with config.json and model.safetensors, or with shards and model.safetensors.index.json.
        layout: how the tensors correspond to the parameters.
        abstract: nested dict of ShapeDtypeStructs with NamedShardings, such as `TrainProgram.abstract_state.params`.

    Returns:
        The nested dict with a jax.Array in place of each ShapeDtypeStruct.

    Raises:
        ConfigError: config.json describes another model, or a tensor is missing, surplus, of another shape or dtype, or
            a file is damaged. No parameter is read before all files are checked.
    """
    folder = Path(folder)
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    wanted = {path_name(path): leaf for path, leaf in leaves}
    _check_parameters(layout, {path: leaf.shape for path, leaf in wanted.items()})
    files = dequantized(open_folder(folder))
    _check_config(folder, layout)
    rows = {row.path: row for row in layout.rows_for(files)}
    _check_tensors(folder, layout, rows.values(), files)
    arrays = [_read_array(rows[path], layout.sizes, files, leaf) for path, leaf in wanted.items()]
    return jax.tree_util.tree_unflatten(structure, arrays)


def write_weights(
    params: Any,
    folder: str | os.PathLike[str],
    layout: Layout,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the parameters as a folder of safetensors with config.json. The folder appears complete or not at all.

    All processes of a job must call this function; the first process writes.

    Args:
        params: nested dict of arrays, sharded in any way.
        folder: a folder that does not exist yet, or is empty.
        layout: how the parameters correspond to tensors.
        dtype: `fp32`, which keeps every bit of fp32 parameters, or `bf16`, which rounds to nearest even.
        max_shard_bytes: most bytes of the tensors in one file; a larger tensor gets a file of its own.

    Raises:
        ConfigError: parameters that are not those of the layout, another dtype, or a folder that is not empty.
        RunError: the files could not be written.
    """
    folder = Path(folder).absolute()
    if dtype not in _WRITTEN:
        raise ConfigError(f"dtype = {dtype!r} is not one that weights are written in.", hint="'fp32' or 'bf16'")
    arrays = {path_name(path): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    _check_parameters(layout, {path: x.shape for path, x in arrays.items()})
    _check_free(folder)
    # If several parameters share a tensor (`Row.part`), the row of the first one writes the tensor.
    rows = [row for row in layout.rows if not row.part or row.part[0] == 0]
    rows += layout.repeated
    tensors = [(row, index, name) for row in rows for index, name in row.names(layout.sizes)]
    written = DTYPES[_WRITTEN[dtype]]
    values = (
        row.to_file(_whole(layout, row, arrays, index), layout.sizes).astype(written, order="C")
        for row, index, _ in tensors
    )
    shapes = [(name, row.file_shape(layout.sizes)) for row, _, name in tensors]
    if jax.process_index() == 0:
        config = {**layout.config, "torch_dtype": _TORCH_DTYPE[dtype]}
        _write_folder(folder, config, shapes, values, written.itemsize, max_shard_bytes)
    else:
        for _ in values:  # Every process takes part in gathering each tensor.
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("meshkit.write_weights")


def _whole(layout: Layout, row: Row, arrays: Mapping[str, jax.Array], index: tuple[int, ...]) -> np.ndarray:
    """Return the values of one tensor: a slice of a parameter, or the stacked slices of all parameters that share it.

    Args:
        index: position of the slice along the parameter's leading dims, which have a tensor for each index.
    """
    if row.part is None:
        return fetch(arrays[row.path], index)
    parts = [r for r in layout.rows if r.name == row.name and r.every == row.every]
    return np.stack([fetch(arrays[r.path], index) for r in sorted(parts, key=lambda r: r.part or ())])


def _check_parameters(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse parameters that are not those of the layout."""
    known = {row.path: row.shape(layout.sizes) for row in layout.rows}
    for path in [*shapes, *known]:
        if shapes.get(path) != known.get(path):
            has, says = (list(s[path]) if path in s else "not there" for s in (shapes, known))
            hint = "the layout of this very model: model.hf_layout()"
            raise ConfigError(f"the parameter {path} is {has} in the model and {says} in the layout.", hint=hint)


def _check_config(folder: Path, layout: Layout) -> None:
    """Refuse a config.json whose options differ from the model's: sizes, and values not seen in shapes (rope_theta)."""
    at = str(folder / CONFIG)
    try:
        theirs = layout.read_config(read_config(folder))
    except ConfigError as error:
        raise ConfigError(error.message, at=error.at or at, hint=error.hint) from None
    for option, value in theirs.items():
        if value != layout.options[option]:
            message = (
                f"the weights have {option} = {shown(value)} ({layout.keys.get(option, option)} in {CONFIG}),"
                f" but the model has {option} = {layout.options[option]}."
            )
            raise ConfigError(message, at=at, hint=f"model.{option} = {shown(value)}")


def _check_tensors(folder: Path, layout: Layout, rows: Any, files: Files) -> None:
    """Refuse missing, wrong or additional tensors."""
    known = set()
    for row in rows:
        shape = row.file_shape(layout.sizes)
        for _, name in row.names(layout.sizes):
            known.add(name)
            if name not in files:
                hint = "weights of the same architecture, and all of their files"
                raise ConfigError(f"the tensor {name} is missing; {row.path} needs it.", at=str(folder), hint=hint)
            _check_tensor(files[name], name, row, shape)
    for name, tensor in files.items():
        if name in layout.copies:
            _check_copy(files, name, layout.copies[name])
        elif name not in known and not (layout.computed and re.fullmatch(layout.computed, name)):
            message = f"the model has no parameter for {shown(name)}, {shown(tensor.shape)}."
            raise ConfigError(
                message, at=str(tensor.path), hint="a model of the same architecture and number of layers"
            )


def _check_tensor(tensor: Tensor, name: str, row: Row, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in DTYPES:
        message = f"{name} is {tensor.dtype}, which is not one of {', '.join(DTYPES)}."
        hint = "the same weights in one of these dtypes, not quantized"
    elif tensor.shape != shape:
        differ = {d for g, a, b in zip(row.groups, tensor.shape, shape) if a != b for d in g} or set(row.ours.split())
        named = [dim for group in row.groups for dim in group if dim in differ and dim != "part"]
        message = f"{name} is {shown(tensor.shape)} in the file, but the model wants {row.file} = {shape}."
        hint = f"{' and '.join(f'model.{d}' for d in named)} as in the file"
    else:
        return
    raise ConfigError(message, at=str(tensor.path), hint=hint)


def _check_copy(files: Files, name: str, original: str) -> None:
    """Refuse a tensor that differs from the tensor that it must repeat, such as the head of a tied model."""
    first, second = files[original], files[name]
    if (first.dtype, first.shape) != (second.dtype, second.shape) or not _equal_bytes(first, second):
        message = f"{name} must repeat {original}, since the model has one parameter for both, but differs from it."
        raise ConfigError(message, at=str(second.path), hint="weights whose copies agree, or model.tied = false")


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    blocks = [slice(i, min(i + _ROWS, n)) for n in a.shape[:1] for i in range(0, n, _ROWS)] or [...]
    return all(a.values[block].tobytes() == b.values[block].tobytes() for block in blocks)


def _read_array(row: Row, sizes: Mapping[str, int], files: Files, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return one parameter; each part is read once for all its replicas on this host."""
    pieces: dict[tuple[range, ...], np.ndarray] = {}

    def piece(index: Any) -> np.ndarray:
        ranges = tuple(range(*s.indices(n)) for s, n in zip(index, like.shape, strict=True))
        if ranges not in pieces:
            pieces[ranges] = read_slice(row, sizes, files, ranges, np.dtype(like.dtype))
        return pieces[ranges]

    assert like.sharding is not None
    return jax.make_array_from_callback(like.shape, like.sharding, piece)


def read_slice(
    row: Row, sizes: Mapping[str, int], files: Files, ranges: tuple[range, ...], dtype: np.dtype
) -> np.ndarray:
    """Return a block of a parameter, read from the tensors it touches and from no others.

    Args:
        ranges: ranges of indices, one for each dim of the parameter.
        dtype: dtype of the result.
    """
    out = np.empty([len(r) for r in ranges], dtype)
    stacked = len(row.stacked)
    inner = dict(zip(row.ours.split()[stacked:], ranges[stacked:]))
    for at in itertools.product(*(range(len(r)) for r in ranges[:stacked])):
        name = row.name_at(tuple(r[i] for r, i in zip(ranges, at)))
        out[at] = row.to_ours(files[name].values, sizes, inner)
    return out


def _check_free(folder: Path) -> None:
    """Raise ConfigError on every process if the first process finds that the folder is not free."""
    taken = jax.process_index() == 0 and (folder.is_file() or (folder.is_dir() and any(folder.iterdir())))
    if jax.process_count() > 1:
        taken = bool(multihost_utils.broadcast_one_to_all(taken))
    if taken:
        raise ConfigError(f"{folder} exists already.", at=str(folder), hint="another folder; nothing is overwritten")


def _write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: list[tuple[str, tuple[int, ...]]],
    values: Iterator[np.ndarray],
    itemsize: int,
    max_shard_bytes: int,
) -> None:
    """Write under a temporary name, one file at a time, then rename the folder."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        try:
            _write_json(partial / CONFIG, config)
            shards = _cut(tensors, itemsize, max_shard_bytes)
            index: dict[str, str] = {}
            for number, shard in enumerate(shards, start=1):
                file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                index |= dict.fromkeys(shard, file)
                _write_file(partial / file, {name: next(values) for name in shard})
            if len(shards) > 1:
                total = sum(math.prod(shape) for _, shape in tensors) * itemsize
                _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
            os.replace(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except (OSError, SafetensorError) as error:
        raise RunError(f"the weights could not be written: {error}.", at=str(folder)) from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})  # transformers refuses a file without this entry.
    shutil.copymode(path.with_name(CONFIG), path)  # The library makes files that only their owner may read.
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def _cut(tensors: list[tuple[str, tuple[int, ...]]], itemsize: int, most: int) -> list[list[str]]:
    """Return the names of the tensors in order, in files of at most `most` bytes, each with one tensor at least."""
    shards, room = [], 0
    for name, shape in tensors:
        size = math.prod(shape) * itemsize
        if not shards or size > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size
    return shards


@jax.jit
def _take(x: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    for i in index:
        x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return x


def fetch(x: Any, index: tuple[int, ...]) -> np.ndarray:
    """Return x[index] on the host; an array that spans processes is gathered on every host."""
    if isinstance(x, np.ndarray):
        return x[index]
    piece = _take(x, index) if index else x
    if piece.is_fully_addressable:
        return np.asarray(piece)
    return np.asarray(multihost_utils.process_allgather(piece, tiled=True))


def first_state(program: TrainProgram, initial: str | None) -> TrainState:
    """Return the state before the first step, on the program's shardings, with initial weights from a folder if given.

    Only the parameters come from the folder. Optimizer state starts at zero in both cases.

    Args:
        program: the training program; its arrangement, if it has one, reorders the layers that were read.
        initial: `checkpoint.initial`, the folder; None for random weights.

    Raises:
        ConfigError: the model does not say how its parameters correspond to files, or the files do not fit it.
    """
    state = program.init()
    if initial is None:
        return state
    layout = layout_of(program.spec)
    state = replace(state, params=None)  # The random weights are freed before others are read.
    arrangement, wanted = program.arrangement, program.abstract_state.params
    params = read_weights(Path(initial), layout, arrangement.saved.params if arrangement else wanted)
    params = arrangement.params_from_saved(params) if arrangement else params
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(params, wanted)
    except AssertionError as error:
        message = f"the weights do not make the parameters of {program.spec.model_class.name}: {error}"
        raise ConfigError(message, at=initial, hint="the hf_layout() of this very model") from None
    return replace(state, params=params)


def layout_of(spec: StepSpec) -> Layout:
    """Return the layout that `hf_layout()` of the spec's model gives.

    Raises:
        ConfigError: it has no such method.
    """
    code, name = spec.model_class, spec.model_class.name
    model = describe_model(spec).abstract_model()
    method = getattr(model, "hf_layout", None)
    if method is None:
        message = f"{name} has no method hf_layout(), which says what its weights are called in a file."
        hint = "a model that has one, such as models.llama:Llama or models.moe:Moe, or adding one to this model"
        raise spec.places.error("checkpoint.initial", message, hint=hint)
    with code.calling(f"hf_layout of {name}"):
        layout = method()
    if not isinstance(layout, Layout):
        message = f"hf_layout of {name} gives {a_type(layout)}, not a meshkit.weights.layout.Layout."
        raise code.error(message)
    return layout
