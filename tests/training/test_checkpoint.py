"""Checkpoints: verified, never wrong in silence, and errors of the background save surface."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshkit.errors import ConfigError, RunError, TraceError
from meshkit.training.checkpoint import MANIFEST, CheckpointStore, find_corruption
from meshkit.training.state import TrainState

ROWS = PartitionSpec("fsdp")


def sharding(shape=(8,), axes=("fsdp",), spec=ROWS):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, spec)


def state_at(step: int, place=None) -> TrainState:
    kernel = jax.device_put(jnp.arange(64.0).reshape(16, 4) + step, place or sharding())
    return TrainState(jnp.int32(step), {"kernel": kernel}, {"mu": kernel * 2}, {}, jnp.zeros(2, jnp.uint32))


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3):
        store.save(state_at(step))
    store.wait()
    yield store
    store.close()


def largest_file(folder: Path) -> Path:
    return max((p for p in (folder / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_are_kept_and_restored_on_another_mesh(store):
    assert store.steps() == [3, 2]
    place = sharding((2, 4), ("data", "tensor"), PartitionSpec(None, "tensor"))
    restored = store.restore_latest(abstract(state_at(0, place)))
    np.testing.assert_array_equal(restored.params["kernel"], np.arange(64.0).reshape(16, 4) + 3)
    assert restored.params["kernel"].sharding == place


def test_nothing_saved_restores_nothing(tmp_path):
    store = CheckpointStore(tmp_path / "new")
    assert store.restore_latest(abstract(state_at(0))) is None
    store.close()


def test_a_flipped_bit_is_found_and_the_step_before_is_taken(store):
    flip_a_bit(largest_file(store.folder / "3"))
    with pytest.warns(UserWarning, match=r"checkpoint 3 is corrupt .*other contents"):
        restored = store.restore_latest(abstract(state_at(0)))
    assert int(restored.step) == 2
    assert (store.folder / "3.corrupt").is_dir()
    store.save(state_at(3))  # the step can be done again
    store.wait()
    assert store.steps() == [3, 2]


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_damage_is_named(store, damage):
    folder = store.folder / "3"
    target = folder / MANIFEST if damage == "manifest" else largest_file(folder)
    target.unlink() if damage == "delete" else target.write_bytes(target.read_bytes()[:10])
    problem = {"truncate": "has 10 bytes instead of", "delete": "is missing", "manifest": "no readable manifest"}[
        damage
    ]
    assert problem in find_corruption(folder, contents=False)


def test_no_intact_checkpoint_is_an_error_not_a_new_start(store):
    for step in (2, 3):
        flip_a_bit(largest_file(store.folder / str(step)))
    with (
        pytest.warns(UserWarning, match="corrupt"),
        pytest.raises(TraceError, match="none of the 2 checkpoints is intact"),
    ):
        store.restore_latest(abstract(state_at(0)))


@pytest.mark.parametrize(("shape", "dtype"), [((16, 8), jnp.float32), ((16, 4), jnp.bfloat16)])
def test_another_shape_or_dtype_is_an_error(store, shape, dtype):
    """orbax alone would cast float32 to bfloat16 without a word."""
    wanted = abstract(state_at(0))
    wanted.params["kernel"] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding())
    with pytest.raises(ConfigError, match=r"params/kernel was float32\[16, 4\] and is now"):
        store.restore_latest(wanted)


def test_manifest_lists_arrays_and_files(store):
    manifest = json.loads((store.folder / "3" / MANIFEST).read_text())
    assert manifest["arrays"]["params/kernel"] == "float32[16, 4]"
    assert manifest["step"] == 3
    assert all(len(digest) == 64 for _, digest in manifest["files"].values())


def test_an_error_of_the_background_save_surfaces(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(
        "meshkit.training.checkpoint._fingerprint", lambda path: (_ for _ in ()).throw(OSError("disk full"))
    )
    store.save(state_at(1))
    with pytest.raises(RunError, match="disk full"):
        store.wait()
    monkeypatch.undo()
    assert store.steps() == []
