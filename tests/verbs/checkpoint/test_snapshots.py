"""Test snapshots in host memory: what is restored is what was taken, bit for bit, or nothing."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshkit.distributed.join import Agreement
from meshkit.errors import RunError
from meshkit.runs.snapshots import COPY_VARIABLE, SNAPSHOTS_VARIABLE, Slot, SnapshotMemory, slots_here, write_snapshots
from meshkit.step.state import TrainState
from meshkit.verbs.checkpoint.snapshots import Snapshots

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


@pytest.fixture
def memory(monkeypatch):
    held = SnapshotMemory()
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, held.value)
    yield held
    held.close()


def sharding(*spec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"))
    return NamedSharding(mesh, PartitionSpec(*spec))


def state_of(step, *, wide=8):
    """Return a state with arrays sharded over both axes, one and none, in three dtypes, one scalar and one empty."""
    draw = np.random.default_rng(step)
    put = lambda array, *spec: jax.device_put(array, sharding(*spec))
    return TrainState(
        step=put(jnp.int32(step)),
        params={
            "both": put(draw.standard_normal((8, wide), np.float32), "data", "tensor"),
            "bf16": put(jnp.asarray(draw.standard_normal((3, 4)), jnp.bfloat16), None, "tensor"),
            "copies": put(draw.standard_normal(5).astype(np.float32)),
        },
        opt_state=(put(np.zeros((0, 4), np.float32)),),
        variables={},
        rng=put(np.array([step, 7], np.uint32)),
    )


def abstract_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def snapshots(run="run", said=None, folder=Path("nowhere")):
    return Snapshots(run, folder, (said if said is not None else []).append)


def taken(*steps):
    """Take whole snapshots of these steps, as a process leaves them behind."""
    store = snapshots()
    for step in steps:
        store.take(state_of(step))
    store.close()


def restored(after=0, *, run="run", like=None, said=None, folder=Path("nowhere")):
    return snapshots(run, said, folder).restore(abstract_of(like or state_of(0)), after=after)


def assert_same(found, expected):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.sharding == theirs.sharding
        assert mine.dtype == theirs.dtype
        for a, b in zip(mine.addressable_shards, theirs.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()


def test_the_newest_snapshot_comes_back_bit_for_bit_on_its_shardings(memory):
    taken(4, 8, 12)
    assert_same(restored(), state_of(12))


def test_steps_after_a_snapshot_do_not_change_it(memory):
    store, state = snapshots(), state_of(4)
    store.take(state)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state))
    store.close()
    assert_same(restored(), state_of(4))


def test_a_restored_state_stays_as_it_is_when_its_slot_is_written_over(memory):
    taken(4, 8)
    found = restored()
    taken(12, 16)
    assert_same(found, state_of(8))


def test_one_that_was_not_whole_is_none(memory):
    taken(4, 8)
    slots_here()[0].reserve(100)  # The process of a third one ends while it copies.
    assert_same(restored(), state_of(8))
    slots_here()[1].reserve(100)
    assert restored() is None


def test_a_corrupt_one_is_passed_over_with_a_word(memory):
    taken(4, 8)
    os.pwrite(memory.descriptors[1], b"?", 4100)  # The byte is in the data, which begins on a page.
    said = []
    assert_same(restored(said=said), state_of(4))
    assert said == ["warning: the snapshot of step 8 is corrupt; it is skipped."]


def test_one_of_another_run_or_of_other_arrays_or_older_than_a_checkpoint_is_none(memory):
    for other in ({"run": "another"}, {"like": state_of(0, wide=16)}, {"after": 8}):
        taken(4, 8)
        assert restored(**other) is None
    taken(4, 8)
    assert_same(restored(after=4), state_of(8))


def test_what_was_not_restored_is_none_from_then_on(memory):
    """Steps after the restored one are made again, and on other devices or kernels not bit for bit."""
    taken(4, 8)
    os.pwrite(memory.descriptors[1], b"?", 4100)
    assert_same(restored(), state_of(4))
    assert [slot.record() is not None for slot in memory.slots] == [True, False]


def test_after_a_restore_the_older_slot_is_written_first(memory):
    taken(4, 8)
    store = snapshots()
    store.restore(abstract_of(state_of(0)), after=0)
    store.take(state_of(12))
    store.close()
    os.pwrite(memory.descriptors[0], b"?", 4100)
    assert_same(restored(), state_of(8))


def test_without_a_launcher_none_are_taken_and_that_is_said(monkeypatch):
    monkeypatch.delenv(SNAPSHOTS_VARIABLE, raising=False)
    said = []
    store = snapshots(said=said)
    store.take(state_of(4))
    assert store.restore(abstract_of(state_of(0)), after=0) is None
    assert "checkpoint.snapshot_every needs `meshkit launch local`" in said[0]


def test_where_memory_is_short_training_goes_on_without_snapshots(memory, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    taken(4)
    monkeypatch.setattr(Slot, "reserve", refuse)
    said = []
    store = snapshots(said=said)
    store.take(state_of(8))
    store.close()
    assert not store.enabled
    assert "No space left on device" in said[0]
    monkeypatch.undo()
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, memory.value)
    assert_same(restored(), state_of(4))


def test_where_others_do_not_have_the_last_one_the_one_before_it_stays(memory, monkeypatch):
    """When their host is lost meanwhile, this process may get as far as the next snapshot before it ends."""

    def fail(*_, **__):
        raise RunError("process 1 has said nothing")

    taken(4)
    store = snapshots()
    store.restore(abstract_of(state_of(0)), after=0)
    monkeypatch.setattr(Agreement, "reach", fail)
    store.take(state_of(8))
    store.take(state_of(12))
    store.close()
    assert [(slot.record() or {}).get("step") for slot in memory.slots] == [4, 8]


def test_a_snapshot_counts_once_another_host_has_it_where_one_copies(memory, monkeypatch):
    monkeypatch.setenv(COPY_VARIABLE, "1")
    said = []
    store = snapshots(said=said)
    store.take(state_of(4))
    while memory.slots[0].record() is None:  # It is being hashed.
        time.sleep(0.01)
    assert store.enabled
    threading.Timer(0.6, memory.slots[0].say_copied, [True]).start()
    store.take(state_of(8))
    assert re.match(r"warning: training waited [\d.]+ m?s for the previous snapshot", said.pop())
    while memory.slots[1].record() is None:
        time.sleep(0.01)
    memory.slots[1].say_copied(False)
    store.close()
    assert said == ["warning: no further snapshots are taken: no other host has a copy of the last one."]


def test_nothing_of_the_memory_is_left_once_it_is_closed():
    held = SnapshotMemory()
    first, _ = held.descriptors
    held.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)


def on_another_mesh(state):
    """Return the same arrays on shardings that no process had when the snapshot was taken."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    spec = {"both": ("tensor", "data"), "bf16": (None, "data"), "copies": ()}
    put = lambda x, *axes: jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec(*axes)))
    return TrainState(
        step=put(state.step),
        params={name: put(leaf, *spec[name]) for name, leaf in state.params.items()},
        opt_state=jax.tree.map(put, state.opt_state),
        variables={},
        rng=put(state.rng),
    )


def test_a_written_snapshot_comes_back_bit_for_bit_on_another_mesh_until_there_is_a_newer_one(memory, tmp_path):
    taken(4, 8)
    write_snapshots({0: memory}, 1, tmp_path / "written")
    like = {"like": on_another_mesh(state_of(0)), "folder": tmp_path / "written"}
    assert_same(restored(**like), on_another_mesh(state_of(8)))
    assert_same(restored(**like), on_another_mesh(state_of(8)))  # The slots are empty by now.
    assert restored(**like, run="another") is None
    assert restored(**like, after=8) is None
    store = snapshots(folder=tmp_path / "written")
    store.take(on_another_mesh(state_of(12)))
    store.close()
    assert not (tmp_path / "written").exists()


def test_a_written_snapshot_that_is_corrupt_or_lacks_a_part_is_passed_over(memory, tmp_path):
    taken(4, 8)
    write_snapshots({0: memory}, 1, tmp_path)
    with (tmp_path / "8" / "0").open("r+b") as file:
        file.write(b"?")
    said = []
    like = {"like": on_another_mesh(state_of(0)), "folder": tmp_path}
    assert_same(restored(**like, said=said), on_another_mesh(state_of(4)))
    assert said == ["warning: the written snapshot of step 8 is corrupt; it is skipped."]
    (tmp_path / "4" / "0").unlink()
    assert restored(**like) is None
    write_snapshots({0: memory}, 2, tmp_path)
    assert restored(**like) is None


def test_a_written_snapshot_of_arrays_of_another_shape_is_an_error(memory, tmp_path):
    taken(4)
    write_snapshots({0: memory}, 1, tmp_path)
    with pytest.raises(RunError, match=r"params/both of a snapshot has shape \(8, 8\), but \(8, 16\) on this mesh"):
        restored(like=state_of(0, wide=16), folder=tmp_path)
