"""Test a checkpoint of one mesh on another: every bit of parameters, moments, random key and position is the same."""

from __future__ import annotations

import jax
import pytest

from benchmarks.corruption.campaign import abstract, random_state, same_bits
from meshkit.verbs.checkpoint.store import CheckpointStore


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder with a checkpoint saved on 4 x 2."""
    folder = tmp_path_factory.mktemp("reshard")
    store = CheckpointStore(folder)
    store.save(random_state(7, shape=(4, 2)))
    store.wait()
    return folder


@pytest.mark.parametrize("shape", [(2, 4), (8, 1), (1, 8), (2, 2), (1, 1)])
def test_any_other_mesh_restores_the_same_bits(saved, shape):
    wanted = random_state(7, shape=shape)
    restored = CheckpointStore(saved).restore_latest(abstract(wanted))
    assert restored is not None
    assert same_bits(restored, wanted)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
        assert a.sharding == b.sharding
        assert a.dtype == b.dtype
