"""Test the replica check: it finds any flipped bit, says whose it is, and says nothing of a clean run."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console

from meshkit.config.experiment import load
from meshkit.errors import RunError
from meshkit.verbs.train import trainer
from meshkit.verbs.train.watch import ReplicaCheck, hash_bits

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.uint8]


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def state_on(mesh):
    """Return arrays that are whole, sharded over fsdp with four copies of each part, and sharded over everything."""
    specs = {"whole": PartitionSpec(), "part": PartitionSpec("fsdp"), "single": PartitionSpec(("data", "fsdp"))}
    values = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    return {name: jax.device_put(values, NamedSharding(mesh, spec)) for name, spec in specs.items()}


def corrupt(array, *devices):
    """Return the array with one bit flipped in the copy that each of these devices holds."""
    copies = []
    for shard in array.addressable_shards:
        value = np.array(shard.data)
        if shard.device in devices:
            value.view(np.uint32).reshape(-1)[5] ^= 1 << 3
        copies.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_every_flip_of_one_bit_changes_the_hash(dtype):
    random = np.random.default_rng(0)
    bits = 8 * jnp.dtype(dtype).itemsize
    words = random.integers(0, 2**bits, 257, dtype=np.uint64).astype(f"u{bits // 8}")
    positions, flipped = random.integers(0, 257, 1000), random.integers(0, bits, 1000)

    @jax.jit
    @jax.vmap
    def hash_with(position, bit):
        unsigned = jnp.asarray(words)
        changed = unsigned.at[position].set(unsigned[position] ^ (jnp.ones((), unsigned.dtype) << bit))
        return hash_bits(jax.lax.bitcast_convert_type(changed, dtype))

    clean = hash_bits(jax.lax.bitcast_convert_type(jnp.asarray(words), dtype))
    assert np.all(np.asarray(hash_with(positions, flipped.astype(words.dtype))) != np.asarray(clean))


def test_the_hash_tells_swapped_elements_apart_and_is_the_same_everywhere():
    assert hash_bits(jnp.array([1.0, 2.0])) != hash_bits(jnp.array([2.0, 1.0]))

    def mix(x):  # Any platform must come to the result of these plain Python integers.
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    words = [0, 1, 2**32 - 1, 0x3F800000]
    expected = sum(mix(w ^ mix(i)) for i, w in enumerate(words)) % 2**32
    assert int(hash_bits(jnp.array(words, jnp.uint32))) == expected


def test_clean_replicas_pass(mesh):
    state = state_on(mesh)
    check = ReplicaCheck(mesh, state)
    assert check.paths == ["part", "whole"]  # An array sharded over every axis has no second copy.
    check.check(state, 1)


def test_one_corrupt_copy_of_eight_is_named(mesh):
    state = state_on(mesh)
    check = ReplicaCheck(mesh, state)
    device = mesh.devices[2, 1]
    state["whole"] = corrupt(state["whole"], device)
    with pytest.raises(
        RunError, match=rf"after step 7 .* 1 of 2 .* whole on GPU {device.id} \(process 0, host .*7 others"
    ):
        check.check(state, 7)
    with pytest.raises(RunError) as caught:
        check.check(state, 7)
    assert caught.value.exit_code == 4


def test_a_corrupt_part_is_compared_with_the_copies_of_that_part_only(mesh):
    state = state_on(mesh)
    check = ReplicaCheck(mesh, state)
    device = mesh.devices[0, 1]
    state["part"] = corrupt(state["part"], device)
    (found,) = check.differences(state)
    assert (found.path, found.devices, found.copies, found.majority) == ("part", (device,), 4, True)


def test_two_against_two_names_all_four(mesh):
    state = state_on(mesh)
    check = ReplicaCheck(mesh, state)
    state["part"] = corrupt(state["part"], mesh.devices[0, 0], mesh.devices[1, 0])
    (found,) = check.differences(state)
    assert not found.majority
    assert found.devices == tuple(mesh.devices[:, 0])
    with pytest.raises(RunError, match="without a majority"):
        check.check(state, 1)


def test_the_check_moves_eight_bytes_an_array(mesh):
    state = {str(i): jax.device_put(np.float32(i), NamedSharding(mesh, PartitionSpec())) for i in range(10)}
    check = ReplicaCheck(mesh, state)
    text = check.differ.lower(*state.values()).compile().as_text()
    assert text
    moved = [line for line in text.splitlines() if " all-reduce(" in line or " all-gather(" in line]
    assert all("[10]" in line for line in moved), moved
    assert len(moved) == 3  # They are min, max, and the verdict.


@pytest.mark.parametrize("words", [[], ["train.replica_check_every=1"]], ids=["default", "every step"])
def test_a_run_stops_before_it_saves_what_is_corrupt(tmp_path, monkeypatch, words):
    spec = load(
        Path(__file__).parents[3] / "configs" / "experiments" / "mlp.toml",
        ["mesh.fsdp=", "mesh.data=8", 'rules.preset="data"', "train.steps=4", "checkpoint.every=2", *words],
    )
    real = ReplicaCheck.check

    def corrupt_then_check(self, state, step):
        if step == 4:
            kernel = state.params["pairs"][0]["up"]["kernel"]
            state.params["pairs"][0]["up"]["kernel"] = corrupt(kernel, jax.devices()[3])
        real(self, state, step)

    monkeypatch.setattr(ReplicaCheck, "check", corrupt_then_check)
    with pytest.raises(RunError, match=r"after step 4 .* params/pairs/0/up/kernel on GPU 3 .* 7 others"):
        trainer.train(spec, tmp_path, console=Console(quiet=True))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == ["2"]


def test_zero_compares_nothing(tmp_path, monkeypatch):
    spec = load(
        Path(__file__).parents[3] / "configs" / "experiments" / "mlp.toml",
        ["train.replica_check_every=0", "train.steps=2", "checkpoint.every=2"],
    )
    monkeypatch.setattr(ReplicaCheck, "check", lambda *_: pytest.fail("compared"))
    assert trainer.train(spec, tmp_path, console=Console(quiet=True)).step == 2


def test_the_share_of_the_state_that_has_replicas(mesh):
    assert ReplicaCheck(mesh, state_on(mesh)).share == 2 / 3  # All but what is sharded over everything has replicas.
