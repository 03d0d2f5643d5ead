"""Test sums of bf16 over manual axes beside automatic ones, on which XLA aborts on CPU devices otherwise."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshkit.parallel.pipeline.manual import psum, psum_scatter
from tests.parallel.pipeline import toy


@pytest.mark.parametrize("scatter", [False, True])
def test_bf16_is_added_on_cpu_devices_too(scatter):
    mesh = toy.make_mesh(pipeline=2, tensor=2)
    x = np.arange(32, dtype=np.float32).reshape(4, 8)

    def local(x):
        inside = NamedSharding(jax.sharding.get_abstract_mesh(), P(None, "tensor"))
        x = jax.lax.with_sharding_constraint(x, inside)
        return psum_scatter(x, "pipeline", 0, mesh) if scatter else psum(x, "pipeline", mesh)

    run = functools.partial(jax.shard_map, mesh=mesh, axis_names={"pipeline"}, check_vma=False)
    out = P("pipeline") if scatter else P()
    total = jax.jit(run(local, in_specs=P("pipeline"), out_specs=out))(x.astype(jnp.bfloat16))
    assert total.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(total, np.float32), x[:2] + x[2:])
