"""Test other people's training programs of benchmarks/gpu/programs.py at sizes that suit a CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import meshkit as mk
from benchmarks.gpu.programs import PROGRAMS


@pytest.mark.parametrize("name", ["lora", "lstm", "pallas"])
def test_a_program_trains_at_toy_size(name):
    foreign = PROGRAMS[name](True)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    model, optimizer = mk.shard_model(foreign.make, mesh, foreign.rules)
    assert foreign.loss is not None
    step = mk.sharded_step(foreign.loss, mesh, foreign.rules)
    losses = np.array([step(model, optimizer, *foreign.batch) for _ in range(3)])
    assert np.isfinite(losses).all()
    assert (np.diff(losses) < 0).all()
