"""Take snapshots: copies of the state in host memory, held by the launcher, from which the next attempt can resume.

    state, every `checkpoint.snapshot_every` steps -> copied to this process's slot -> training goes on
                                                   -> sha256, seal -> the launcher copies it to another host
                                                   -> all processes agree that they have it
    next attempt: whole slots of this run and layout -> newest step that all processes have -> TrainState
    next attempt on another mesh: the launchers have written the slots as files -> the parts of the new layout

Every process keeps all shards that its devices hold, each once. A slot is overwritten only when all processes have
sealed the other, newer one. So there is always a step whose snapshot is whole on all processes.

Why orbax's emergency checkpoints are not used: docs/adr/0019-snapshots-at-a-neighbour.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshkit.distributed.join import Agreement
from meshkit.errors import RunError
from meshkit.runs.snapshots import COPY_VARIABLE, Slot, slots_here
from meshkit.sharding.resolve import path_name
from meshkit.step.state import TrainState
from meshkit.units import format_bytes, format_seconds

Index = tuple[tuple[int, int], ...]  # First and end index of a shard in each dimension.
_LIMIT_S = 600.0  # Seconds for all processes to seal a snapshot, or to report which snapshots they have.
_made = itertools.count()  # Every process makes its `Snapshots` in the same order.


class Snapshots:
    """The snapshots of one process. Every process of the job makes a `Snapshots`, and calls it at the same steps.

    Args:
        run: the ID of the run; snapshots of other runs are ignored.
        folder: the folder of the snapshots that the launchers have written because the mesh has changed.
        say: prints one line.
    """

    def __init__(self, run: str, folder: Path, say: Callable[[str], None]):
        self._run, self._folder, self._say, self._slots = run, folder, say, slots_here()
        self._agreement = Agreement(f"snapshots/{next(_made)}")
        self._thread: threading.Thread | None = None
        self._next = 0
        self._longest_wait_s = 0.5  # only a longer wait for a snapshot is reported
        missing = self._agreement.reach(
            "slots", bool(self._slots), lambda every: every.count(False), timeout_s=_LIMIT_S
        )
        self.enabled = not missing
        """Whether every process has slots, and no snapshot has failed."""
        if missing and self._agreement.rank == 0:
            say("note: no snapshots are taken; checkpoint.snapshot_every needs `meshkit launch local` to keep them.")

    def take(self, state: TrainState) -> None:
        """Wait for an earlier snapshot, and copy the state. When this returns, the next step may change the state."""
        began = time.monotonic()
        self.close()
        if (waited_s := time.monotonic() - began) > self._longest_wait_s:
            self._longest_wait_s = 2 * waited_s
            self._say(
                f"warning: training waited {format_seconds(waited_s)} for the previous snapshot; a larger "
                "checkpoint.snapshot_every avoids that"
            )
        if not self.enabled:  # the last snapshot may have failed; then the older one stays, which all may have
            return
        blocks = [block for leaf in jax.tree.leaves(state) for block in _blocks_of(leaf)]
        layout = _layout(state)
        blocks.append(np.frombuffer(layout, np.uint8))
        slot, step, size = self._slots[self._next], int(state.step), sum(block.nbytes for block in blocks)
        self._next = (self._next + 1) % len(self._slots)
        data, problem = None, ""
        try:
            data = slot.reserve(size)
            _copy(blocks, np.frombuffer(data, np.uint8))
        except OSError as error:
            problem = f"{format_bytes(size)} do not fit into this host's memory ({error.strerror})"
        record = {"step": step, "run": self._run, "layout": _digest(layout), "layout_bytes": len(layout)}
        run = (slot, data, record, problem)
        self._thread = threading.Thread(target=self._seal, args=run, name="meshkit-snapshot", daemon=True)
        self._thread.start()

    def _seal(self, slot: Slot, data: memoryview | None, record: dict[str, Any], problem: str) -> None:
        """Seal the snapshot, and wait for all processes. After a failure on any process, none takes further ones."""
        try:
            if data is not None:
                slot.seal(data, record)
                if COPY_VARIABLE in os.environ and not slot.wait_until_copied(_LIMIT_S):
                    problem = "no other host has a copy of the last one"
            said = self._agreement.reach(f"seal/{record['step']}", problem, _first, timeout_s=2 * _LIMIT_S)
        except Exception as error:
            said = str(error) or type(error).__name__
        if said:
            self.enabled = False
            if self._agreement.rank == 0:
                self._say(f"warning: no further snapshots are taken: {said}.")
        else:  # all processes have a newer snapshot
            self._remove_written()

    def restore(self, abstract: TrainState, *, after: int) -> TrainState | None:
        """Return the newest state of which all processes have a whole snapshot, on `abstract`'s shardings, or None.

        Args:
            abstract: ShapeDtypeStructs with shardings.
            after: the step of the newest checkpoint on disk. Snapshots that are not newer are ignored.
        """
        if not self.enabled:
            return None
        found: dict[int, tuple[int, memoryview]] = {}
        layout = _digest(_layout(abstract))
        for number, slot in enumerate(self._slots):
            record = slot.record()
            if record and (record.get("run"), record.get("layout")) == (self._run, layout) and record["step"] > after:
                if (data := slot.read()) is not None:
                    found[record["step"]] = number, data
                else:
                    self._say(f"warning: the snapshot of step {record['step']} is corrupt; it is skipped.")
        written = {step: parts for step, parts in _read_written(self._folder, self._run).items() if step > after}
        mine = {"slots": sorted(found), "files": [step for step, parts in written.items() if self._intact(parts)]}
        step, in_files = self._agreement.reach("restore", mine, _newest_of_all, timeout_s=_LIMIT_S)
        for number, slot in enumerate(self._slots):  # clear others: their steps are made again, and may differ
            if in_files or not step or number != found[step][0]:
                slot.clear()
        if not step:
            return None
        if in_files:
            state = _resharded(abstract, written[step])
        else:
            number, data = found[step]
            self._next = (number + 1) % len(self._slots)
            state = _state_of(abstract, np.frombuffer(data, np.uint8))
        jax.block_until_ready(state)
        return state

    def _intact(self, parts: list[_Written]) -> bool:
        """Return whether this process's share of the written parts is intact. Together, the shares hold all parts."""
        share = parts[self._agreement.rank :: self._agreement.size]
        broken = [part for part in share if not part.is_intact()]
        for part in broken[:1]:
            self._say(f"warning: the written snapshot of step {part.record['step']} is corrupt; it is skipped.")
        return not broken

    def _remove_written(self) -> None:
        if self._agreement.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Wait until no snapshot is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _first(every: list[str]) -> str:
    """Return the first problem of any process; "" if there is none."""
    return next(filter(None, every), "")


def _newest_of_all(every: list[dict[str, list[int]]]) -> tuple[int, bool]:
    """Return the newest step that every process has, or 0, and whether it is read from files instead of slots."""
    slots, files = (
        max(set.intersection(*(set(said[kind]) for said in every)), default=0) for kind in ("slots", "files")
    )
    return max(slots, files), files > slots


def _indices(leaf: Any) -> dict[Any, Index]:
    """Map each device of this process to the part of the array that it holds."""
    found = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return {device: tuple(s.indices(size)[:2] for s, size in zip(parts, leaf.shape)) for device, parts in found.items()}


def _kept(leaf: Any) -> list[Index]:
    """Return the parts of an array that this process keeps, each once, in order."""
    return sorted(set(_indices(leaf).values()))


def _blocks_of(leaf: jax.Array) -> list[np.ndarray]:
    """Return the parts of `_kept` as host arrays, which jax keeps until the array is donated to the next step."""
    indices, shards = _indices(leaf), {shard.device: shard.data for shard in leaf.addressable_shards}
    held = {index: shards[device] for device, index in indices.items()}
    for data in held.values():
        data.copy_to_host_async()
    return [np.asarray(held[index]) for index in sorted(held)]


def _copy(blocks: list[np.ndarray], into: np.ndarray) -> None:
    """Copy arrays into `into`, one behind the other. They must be copied, since the next step overwrites them."""
    at = 0
    for block in blocks:
        flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        into[at : at + flat.nbytes] = flat
        at += flat.nbytes


def _layout(state: TrainState) -> bytes:
    """Return JSON with every array's name, dtype and shape, and the parts of it that this process keeps."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return json.dumps([(path_name(p), str(leaf.dtype), leaf.shape, _kept(leaf)) for p, leaf in leaves]).encode()


def _digest(layout: bytes) -> str:
    return hashlib.sha256(layout).hexdigest()


def _state_of(abstract: TrainState, data: np.ndarray) -> TrainState:
    """Return the state whose parts are stored one behind the other in `data`."""
    blocks = _Blocks(data)
    return jax.tree.map(lambda leaf: _place(leaf, {i: blocks.take(i, leaf.dtype) for i in _kept(leaf)}), abstract)


class _Blocks:
    """Read the arrays that are stored one behind the other in the bytes of a snapshot."""

    def __init__(self, data: np.ndarray):
        self._data, self._at = data, 0

    def take(self, index: Index, dtype: Any) -> np.ndarray:
        """Return the next array as a view."""
        shape = tuple(end - first for first, end in index)
        size = math.prod(shape) * dtype.itemsize
        self._at += size
        return self._data[self._at - size : self._at].view(dtype).reshape(shape)


def _place(leaf: Any, blocks: Mapping[Index, np.ndarray]) -> jax.Array:
    """Return an array on the sharding of `leaf`, from the parts that this process keeps."""
    kind = leaf.sharding.memory_kind
    parts = [
        jax.device_put(blocks[index].copy(), SingleDeviceSharding(device, memory_kind=kind))
        for device, index in _indices(leaf).items()
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _resharded(abstract: TrainState, written: list[_Written]) -> TrainState:
    """Return the state of a snapshot that was taken on another mesh.

    Raises:
        RunError: an array has another shape on this mesh.
    """
    blocks: dict[str, dict[Index, np.ndarray]] = {}
    shapes = {}
    for part in written:
        length = part.record["layout_bytes"]
        reader = _Blocks(part.data)
        for name, dtype, shape, kept in json.loads(part.data[-length:].tobytes()):
            shapes[name] = tuple(shape)
            for index in (tuple((first, end) for first, end in pairs) for pairs in kept):
                blocks.setdefault(name, {})[index] = reader.take(index, jax.numpy.dtype(dtype))

    def place(path: Any, leaf: Any) -> jax.Array:
        name = path_name(path)
        if shapes.get(name) != leaf.shape:
            message = f"{name} of a snapshot has shape {shapes.get(name)}, but {leaf.shape} on this mesh."
            raise RunError(message, hint="removing `snapshots` from the run folder, so that a checkpoint is read")
        return _place(leaf, {index: _cut(index, blocks[name], leaf.dtype) for index in _kept(leaf)})

    return jax.tree_util.tree_map_with_path(place, abstract)


def _cut(index: Index, blocks: Mapping[Index, np.ndarray], dtype: Any) -> np.ndarray:
    """Return a part of an array, assembled from the stored parts that overlap it."""
    found = np.empty([end - first for first, end in index], dtype)
    for held, block in blocks.items():
        overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, held)]
        if all(first < end for first, end in overlap):
            into = tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(overlap, index))
            source = tuple(slice(first - start, end - start) for (first, end), (start, _) in zip(overlap, held))
            found[into] = block[source]
    return found


@dataclass(frozen=True)
class _Written:
    """One process's part of a snapshot, in a file of `write_snapshots`."""

    data: np.ndarray
    """The bytes of the file, memory-mapped."""
    record: Mapping[str, Any]

    def is_intact(self) -> bool:
        """Read all bytes, and return whether they have the sha256 with which the process sealed them."""
        return hashlib.sha256(self.data).hexdigest() == self.record.get("sha256")


def _read_written(folder: Path, run: str) -> dict[int, list[_Written]]:
    """Return {step: parts by rank} of a run's written snapshots; snapshots that lack a part are left out."""
    found: dict[int, list[_Written]] = {}
    for step in folder.glob("*/0.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            processes = json.loads(step.read_text())["processes"]
            parts = [_open_written(step.with_name(str(rank))) for rank in range(processes)]
            if all((part.record["run"], part.record["processes"]) == (run, processes) for part in parts):
                found[parts[0].record["step"]] = parts
    return found


def _open_written(path: Path) -> _Written:
    return _Written(np.memmap(path, np.uint8, "r"), json.loads(path.with_suffix(".json").read_text()))
