"""Test that checkpoints are verified and never silently wrong, and that errors of a background save are reported."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshkit.config.experiment import load
from meshkit.config.sections import CheckpointTable
from meshkit.errors import ConfigError, RunError, TraceError
from meshkit.step.state import TrainState
from meshkit.verbs.checkpoint import manifest
from meshkit.verbs.checkpoint.manifest import MANIFEST, find_corruption, read_manifest
from meshkit.verbs.checkpoint.store import CheckpointStore

EXPERIMENT = Path(__file__).parents[3] / "configs" / "experiments" / "mlp.toml"
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
    store = CheckpointStore(tmp_path, CheckpointTable(keep=2))
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
    store.save(state_at(3))  # The step can be done again.
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
    record = json.loads((store.folder / "3" / MANIFEST).read_text())
    assert record["arrays"]["params/kernel"] == "float32[16, 4]"
    assert record["step"] == 3
    assert all(len(digest) == 64 for _, digest in record["files"].values())


def test_the_manifest_says_what_made_it(tmp_path):
    store = CheckpointStore(tmp_path, facts={"experiment": "name = 'x'", "data": {"examples": 5}})
    store.save(state_at(1, sharding((2, 4), ("data", "tensor"), PartitionSpec(None, "tensor"))))
    store.wait()
    record = read_manifest(tmp_path / "1").record
    assert record["mesh"] == {"data": 2, "tensor": 4}
    assert (record["processes"], record["experiment"], record["data"]) == (1, "name = 'x'", {"examples": 5})


def test_a_second_damaged_copy_of_a_step_replaces_no_evidence(store):
    for copy in ("3.corrupt", "3.corrupt-2"):
        flip_a_bit(largest_file(store.folder / "3"))
        with pytest.warns(UserWarning, match="checkpoint 3 is corrupt"):
            store.restore_latest(abstract(state_at(0)))
        assert (store.folder / copy).is_dir()
        store.save(state_at(3))
        store.wait()
    assert store.steps() == [3, 2]


@pytest.mark.parametrize(("verify", "finds"), [("full", True), ("own", True), ("off", False)])
def test_what_each_way_to_verify_finds(store, verify, finds):
    """The bit is in the file of orbax's shardings, which a restore with shardings of its own does not read."""
    flip_a_bit(store.folder / "3" / "state" / "_sharding")
    careful = CheckpointStore(store.folder, CheckpointTable(verify=verify))
    if finds:
        with pytest.warns(UserWarning, match=r"checkpoint 3 is corrupt \(state/_sharding has other contents"):
            assert int(careful.restore_latest(abstract(state_at(0))).step) == 2
    else:
        assert int(careful.restore_latest(abstract(state_at(0))).step) == 3


@pytest.mark.parametrize(("text", "means"), [("true", "own"), ("false", "off"), ('"full"', "full")])
def test_the_experiment_says_how_to_verify(text, means):
    assert load(EXPERIMENT, [f"checkpoint.verify={text}"]).checkpoint.verify == means
    with pytest.raises(ConfigError, match=r"checkpoint\.verify"):
        load(EXPERIMENT, ["checkpoint.verify=sometimes"])


def test_other_data_is_said(store):
    first = CheckpointStore(store.folder / "a", facts={"data": {"examples": 5}})
    first.save(state_at(1))
    first.wait()
    assert first.restore_latest(abstract(state_at(0))) is not None
    other = CheckpointStore(store.folder / "a", facts={"data": {"examples": 6}})
    with pytest.warns(UserWarning, match=r"other data \(5 examples\) than there is now \(6 examples\)"):
        other.restore_latest(abstract(state_at(0)))


class Disk:
    """Make hashing, with which every save ends, fail or wait as the test says."""

    def __init__(self, monkeypatch):
        self.error, self.gate = None, threading.Event()
        self.gate.set()
        real = manifest.fingerprint

        def fingerprint(path, *, sync):
            self.gate.wait(60)
            if self.error:
                raise self.error
            return real(path, sync=sync)

        monkeypatch.setattr(manifest, "fingerprint", fingerprint)


@pytest.fixture
def disk(monkeypatch):
    disk = Disk(monkeypatch)
    yield disk
    disk.gate.set()


def ended(store):
    """Wait for the save in the background, as a training does by looking again at every step."""
    store.saving.wait(60)
    store.check()


def test_a_failed_save_is_said_at_the_next_step_and_the_next_save_works(tmp_path, disk):
    said = []
    store = CheckpointStore(tmp_path, CheckpointTable(keep=1), say=said.append)
    store.save(state_at(1))
    ended(store)
    assert store.news().keys() == {"checkpoint_step", "checkpoint_s"}
    disk.error = OSError(28, "No space left on device", "x")
    store.save(state_at(2))
    ended(store)
    assert said == [
        "warning: checkpoint 2 could not be saved; the newest is 1: No space left on device: x. Training goes on."
    ]
    assert store.news() == {"checkpoint_error": "checkpoint 2: No space left on device: x"}
    assert store.news() == {}
    assert [p.name for p in tmp_path.iterdir()] == ["1"]  # The last good one stays, and no half-written one does.
    disk.error = None
    store.save(state_at(2))  # The same step is saved again, and it is not taken as done.
    store.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["2"]
    assert store.steps() == [2]


def test_the_last_good_checkpoint_stays_until_the_newer_one_is_whole(tmp_path, disk):
    store = CheckpointStore(tmp_path, CheckpointTable(keep=1))
    store.save(state_at(1))
    store.wait()
    disk.gate.clear()
    store.save(state_at(2))
    assert (tmp_path / "1").is_dir()
    assert not (tmp_path / "2").exists()
    again = CheckpointStore(tmp_path / "elsewhere")
    assert again.steps() == []
    disk.gate.set()
    store.wait()
    assert [p.name for p in tmp_path.iterdir() if p.name.isdigit()] == ["2"]


def test_a_save_that_outlasts_the_interval_is_waited_for_and_said_once(tmp_path, disk, monkeypatch):
    monkeypatch.setattr("meshkit.verbs.checkpoint.store.SAID_AFTER_S", 0.0)
    said = []
    store = CheckpointStore(tmp_path, CheckpointTable(keep=9), say=said.append)
    for step in (1, 2, 3):
        disk.gate.clear()
        threading.Timer(0.2, disk.gate.set).start()
        store.save(state_at(step))  # The second and third saves wait here for the one before.
    store.wait()
    assert store.steps() == [3, 2, 1]  # No checkpoint is skipped, and none is overtaken.
    assert len(said) == 1
    assert re.match(r"warning: training waited [\d.]+ s for checkpoint 1, which took [\d.]+ s to write", said[0])
    assert store.news()["checkpoint_wait_s"] > 0


@pytest.mark.parametrize(("number", "saves"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_disk_that_cannot_sync_is_used_and_one_that_fails_to_is_not_trusted(tmp_path, monkeypatch, number, saves):
    def fsync(_):
        raise OSError(number, os.strerror(number))

    store = CheckpointStore(tmp_path)
    monkeypatch.setattr(manifest.os, "fsync", fsync)
    store.save(state_at(1))
    with contextlib.nullcontext() if saves else pytest.raises(RunError, match="Input/output error"):
        store.wait()
    assert store.steps() == ([1] if saves else [])


def test_a_step_that_is_saved_again_is_restored_as_it_was_saved_last(tmp_path):
    """Nothing of a folder's earlier contents is cached."""
    for made in (1, 2):
        store = CheckpointStore(tmp_path)
        kernel = state_at(made).params["kernel"]
        store.save(TrainState(jnp.int32(7), {"kernel": kernel}, {"mu": kernel * 2}, {}, jnp.zeros(2, jnp.uint32)))
        store.wait()
        restored = store.restore_latest(abstract(state_at(0)))
        np.testing.assert_array_equal(restored.params["kernel"], kernel)
        flip_a_bit(largest_file(tmp_path / "7"))
        (tmp_path / "7").rename(tmp_path / "7.corrupt")
        shutil.rmtree(tmp_path / "7.corrupt")


def test_a_run_whose_last_state_cannot_be_saved_fails(tmp_path, disk):
    store = CheckpointStore(tmp_path)
    disk.error = OSError("disk full")
    store.save(state_at(1))
    with pytest.raises(RunError, match=r"saving checkpoint 1 failed: disk full; there is no checkpoint"):
        store.wait()
    store.close()


def test_every_so_many_steps_are_kept_beside_the_newest(tmp_path):
    store = CheckpointStore(tmp_path, CheckpointTable(keep=1, keep_every=2))
    for step in (1, 2, 3, 4, 5):
        store.save(state_at(step))
    store.wait()
    assert store.steps() == [5, 4, 2] == CheckpointStore(tmp_path).steps()


def test_what_a_killed_save_left_is_no_checkpoint(store):
    (store.folder / "4.partial-0" / "state").mkdir(parents=True)
    (store.folder / "9.deleting").mkdir()
    again = CheckpointStore(store.folder)
    assert again.steps() == [3, 2]
    assert sorted(p.name for p in store.folder.iterdir()) == ["2", "3"]


def test_a_state_changed_after_save_returns_is_saved_as_it_was(tmp_path, disk):
    """The step donates its state, so what is written in the background must be a copy, or held."""
    store, state = CheckpointStore(tmp_path), state_at(1)
    disk.gate.clear()
    store.save(state)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(state))
    disk.gate.set()
    store.wait()
    restored = store.restore_latest(abstract(state_at(0)))
    np.testing.assert_array_equal(restored.params["kernel"], np.arange(64.0).reshape(16, 4) + 1)
