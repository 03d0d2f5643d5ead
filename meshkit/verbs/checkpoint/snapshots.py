"""Snapshots: the state in host memory that the launcher holds, from which the next attempt goes on without the disk.

    state, every `checkpoint.snapshot_every` steps -> copied to this process's slot -> training goes on
                                                   -> sha256, seal -> the launcher copies it to another host
                                                   -> all processes have it
    next attempt: whole slots of this run and this layout -> the newest step that all have -> TrainState

Every process keeps all shards that its devices hold, each once. The step before a snapshot has ended on all processes,
and a slot is written over only once all have sealed the newer one, so one step is always whole everywhere.

orbax's emergency checkpoints do not serve here: docs/adr/0019-snapshots-at-a-neighbour.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meshkit.distributed.join import Agreement
from meshkit.runs.snapshots import COPY_VARIABLE, Slot, slots_here
from meshkit.sharding.resolve import path_name
from meshkit.step.state import TrainState
from meshkit.units import format_bytes

Index = tuple[tuple[int, int], ...]  # First and end index of a shard in each dim.
_LIMIT_S = 600.0  # Time for all processes to seal, or to say what they have.
_made = itertools.count()  # Every process makes them in the same order.


class Snapshots:
    """The snapshots of one process. Every process of the job makes one, and calls it at the same steps.

    Args:
        run: identity of the run; a snapshot of another one is none.
        say: prints one line.
    """

    def __init__(self, run: str, say: Callable[[str], None]):
        self._run, self._say, self._slots = run, say, slots_here()
        self._agreement = Agreement(f"snapshots/{next(_made)}")
        self._thread: threading.Thread | None = None
        self._next = 0
        missing = self._agreement.reach(
            "slots", bool(self._slots), lambda every: every.count(False), timeout_s=_LIMIT_S
        )
        self.enabled = not missing
        """Whether every process has somewhere to keep them."""
        if missing and self._agreement.rank == 0:
            say("note: no snapshots are taken: `meshkit launch local` keeps those of checkpoint.snapshot_every.")

    def take(self, state: TrainState) -> None:
        """Copy the state; return when the next step may change it. Wait for an earlier snapshot first."""
        self.close()
        if not self.enabled:  # also since just now: the older one may be what all have
            return
        blocks = [block for leaf in jax.tree.leaves(state) for block in _blocks_of(leaf)]
        slot, step, size = self._slots[self._next], int(state.step), sum(block.nbytes for block in blocks)
        self._next = (self._next + 1) % len(self._slots)
        data, problem = None, ""
        try:
            data = slot.reserve(size)
            _copy(blocks, np.frombuffer(data, np.uint8))
        except OSError as error:
            problem = f"{format_bytes(size)} do not fit into this host's memory ({error.strerror})"
        record = {"step": step, "run": self._run, "layout": _layout(state)}
        run = (slot, data, record, problem)
        self._thread = threading.Thread(target=self._seal, args=run, name="meshkit-snapshot", daemon=True)
        self._thread.start()

    def _seal(self, slot: Slot, data: memoryview | None, record: dict[str, Any], problem: str) -> None:
        """Seal the snapshot, and wait until all processes have. Where it fails on one, none takes another."""
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

    def restore(self, abstract: TrainState, *, after: int) -> TrainState | None:
        """Return the newest state that all processes have whole, on the shardings of `abstract`; None without one.

        Args:
            abstract: ShapeDtypeStructs with shardings.
            after: step of the newest checkpoint on disk; an older snapshot is of no use.
        """
        if not self.enabled:
            return None
        found: dict[int, tuple[int, memoryview]] = {}
        layout = _layout(abstract)
        for number, slot in enumerate(self._slots):
            record = slot.record()
            if record and (record.get("run"), record.get("layout")) == (self._run, layout) and record["step"] > after:
                if (data := slot.read()) is not None:
                    found[record["step"]] = number, data
                else:
                    self._say(f"warning: the snapshot of step {record['step']} is corrupt; it is passed over.")
        step = self._agreement.reach("restore", sorted(found), _newest_of_all, timeout_s=_LIMIT_S)
        for number, slot in enumerate(self._slots):  # what others do not have is made again, and may differ
            if not step or number != found[step][0]:
                slot.clear()
        if not step:
            return None
        number, data = found[step]
        self._next = (number + 1) % len(self._slots)
        state = _state_of(abstract, np.frombuffer(data, np.uint8))
        jax.block_until_ready(state)
        return state

    def drop(self) -> None:
        """Forget the snapshots of this process, so that the next attempt resumes from a checkpoint."""
        self.close()
        for slot in self._slots:
            slot.clear()

    def close(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _first(every: list[str]) -> str:
    """Return the first problem that any process has; empty for none."""
    return next(filter(None, every), "")


def _newest_of_all(every: list[list[int]]) -> int:
    """Return the newest step that every process has; 0 for none."""
    return max(set(every[0]).intersection(*every[1:]), default=0)


def _indices(leaf: Any) -> dict[Any, Index]:
    """Map each device of this process to the part of the array that it holds."""
    found = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    return {device: tuple(s.indices(size)[:2] for s, size in zip(parts, leaf.shape)) for device, parts in found.items()}


def _kept(leaf: Any) -> list[Index]:
    """Return the parts of an array that this process keeps, each once, in order."""
    return sorted(set(_indices(leaf).values()))


def _blocks_of(leaf: jax.Array) -> list[np.ndarray]:
    """Return those parts as host arrays, which jax keeps until the next step takes the array."""
    indices, shards = _indices(leaf), {shard.device: shard.data for shard in leaf.addressable_shards}
    held = {index: shards[device] for device, index in indices.items()}
    for data in held.values():
        data.copy_to_host_async()
    return [np.asarray(held[index]) for index in sorted(held)]


def _copy(blocks: list[np.ndarray], into: np.ndarray) -> None:
    """Copy arrays behind each other. Not one may be left a view: the next step changes what it shows."""
    at = 0
    for block in blocks:
        flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
        into[at : at + flat.nbytes] = flat
        at += flat.nbytes


def _layout(state: TrainState) -> str:
    """Return a hash of every array's name, dtype, shape, and the parts of it that this process keeps."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    told = [(path_name(path), str(leaf.dtype), leaf.shape, _kept(leaf)) for path, leaf in leaves]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _state_of(abstract: TrainState, data: np.ndarray) -> TrainState:
    """Return the state whose parts stand behind each other in `data`."""
    at = 0

    def place(leaf: Any) -> jax.Array:
        nonlocal at
        blocks = {}
        for index in _kept(leaf):
            shape = tuple(end - first for first, end in index)
            size = int(np.prod(shape)) * leaf.dtype.itemsize
            blocks[index] = data[at : at + size].view(leaf.dtype).reshape(shape)
            at += size
        kind = leaf.sharding.memory_kind
        parts = [
            jax.device_put(blocks[index].copy(), SingleDeviceSharding(device, memory_kind=kind))
            for device, index in _indices(leaf).items()
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return jax.tree.map(place, abstract)
