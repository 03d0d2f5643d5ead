"""Damage a checkpoint's files, one at a time and seeded, and restore after each damage.

Two steps are saved. Each trial copies them and flips one bit of a file of the newer step, truncates the file, or
deletes it. Then `restore_latest` must name the damaged file, restore the step before it bit for bit, and set the
damaged step aside. The same damages with `verify = "off"` show what the campaign can find: meshkit then compares only
names and sizes, as a store without checksums would.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshkit.config.sections import CheckpointTable
from meshkit.errors import MeshkitError
from meshkit.step.state import TrainState
from meshkit.verbs.checkpoint.store import CheckpointStore

KINDS = ("flip", "truncate", "delete")
SAFE, UNNAMED = "file named, step before used", "step before used, file not named"
WRONG, UNSEEN, STOPPED = "wrong state restored", "not noticed, state right", "stopped with an error"
OUTCOMES = (SAFE, UNNAMED, WRONG, UNSEEN, STOPPED)
BEFORE, DAMAGED = 10, 20  # The two steps.


@dataclass(frozen=True)
class Damage:
    """One change to one file."""

    kind: str
    """One of KINDS."""
    file: str
    """The path of the file below the checkpoint's folder."""
    at: int
    """The bit that is flipped, or the number of bytes that are left."""


def random_state(step: int, seed: int = 0, shape: tuple[int, int] = (4, 2)) -> TrainState:
    """Return a state of random bits in several dtypes, which is the same on any mesh.

    NaNs, infinities and denormals are among the values.
    """
    random = np.random.default_rng([seed, step])
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))

    def placed(values: np.ndarray, *axes):
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def array(shape, dtype, *axes):
        bits = random.integers(0, 2**8, (*shape, jnp.dtype(dtype).itemsize), np.uint8)
        return placed(bits.view(dtype).reshape(shape), *axes)

    params = {
        "embedding": array((64, 32), np.float32, "data", "tensor"),
        "layers": {"kernel": array((2, 32, 64), np.float32, None, "tensor", "data"), "scale": array((32,), np.float32)},
        "head": array((32, 16), jnp.bfloat16, "tensor", None),
    }
    moments = {"mu": jax.tree.map(lambda x: x, params), "count": array((), np.int32)}
    return TrainState(placed(np.array(step, np.int32)), params, moments, {}, array((2,), np.uint32))


def abstract(state: TrainState) -> TrainState:
    """Return the state as ShapeDtypeStructs with its shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def same_bits(a: TrainState, b: TrainState) -> bool:
    """Return whether two states are equal bit for bit; with several processes, in the shards of this one."""

    def pieces(x: jax.Array) -> list[bytes]:
        if x.is_fully_addressable:
            return [np.asarray(x).tobytes()]
        return [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(pieces(x) == pieces(y) for x, y in pairs)


def save_steps(folder: Path) -> None:
    """Save checkpoints of two random states."""
    store = CheckpointStore(folder, CheckpointTable(keep=2))
    for step in (BEFORE, DAMAGED):
        store.save(random_state(step))
    store.wait()


def choose(folder: Path, seed: int) -> Damage:
    """Return the damage of a seed.

    The kinds follow one another. Every file of the newer step is equally likely unless it is empty, so metadata and
    manifest as much as arrays.
    """
    random = np.random.default_rng(seed)
    checkpoint = folder / str(DAMAGED)
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    path, kind = files[random.integers(len(files))], KINDS[seed % len(KINDS)]
    at = int(random.integers(path.stat().st_size * (8 if kind == "flip" else 1)))
    return Damage(kind, path.relative_to(checkpoint).as_posix(), at)


def apply(checkpoint: Path, damage: Damage) -> None:
    """Damage the file."""
    path = checkpoint / damage.file
    if damage.kind == "delete":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if damage.kind == "flip":
        content[damage.at // 8] ^= 1 << damage.at % 8
    else:
        del content[damage.at :]
    path.write_bytes(content)


def restore_damaged(saved: Path, damage: Damage, *, verify: str = "own") -> str:
    """Return the outcome of one damage, one of OUTCOMES."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoints"
        shutil.copytree(saved, folder)
        apply(folder / str(DAMAGED), damage)
        store = CheckpointStore(folder, CheckpointTable(verify=verify))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                restored = store.restore_latest(abstract(random_state(0)))
            except MeshkitError:
                return STOPPED
        if restored is None or not same_bits(restored, random_state(int(restored.step))):
            return WRONG
        if int(restored.step) == DAMAGED:
            return UNSEEN
        named = any(damage.file in str(w.message) for w in said)
        aside = (folder / f"{DAMAGED}.corrupt").is_dir()
        return SAFE if named and aside else UNNAMED


def clean_restores(count: int) -> int:
    """Return how many of `count` undamaged checkpoints are restored bit for bit and without a warning."""
    good = 0
    for seed in range(count):
        with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
            warnings.simplefilter("error")
            store, state = CheckpointStore(Path(scratch)), random_state(DAMAGED, seed)
            store.save(state)
            store.wait()
            restored = CheckpointStore(Path(scratch)).restore_latest(abstract(state))
            good += restored is not None and same_bits(restored, state)
    return good


def run(saved: Path, seeds: range, *, verify: str = "own") -> Counter[tuple[str, str]]:
    """Return the number of damages by (kind, outcome)."""
    damages = [choose(saved, seed) for seed in seeds]
    return Counter((d.kind, restore_damaged(saved, d, verify=verify)) for d in damages)
