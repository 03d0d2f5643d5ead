"""Test that attention by blocks under `jax.vmap`, used by deferred reductions, runs as a larger batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshkit as mk
from meshkit.compile.program import compile_absent
from meshkit.parallel.blocks import attend, fused_attention, mapped_as_batch

LENGTH, HEADS, HEAD_DIM, VALUE_DIM = 256, 2, 192, 128


def test_a_mapped_kernel_computes_what_it_does_for_each_element():
    """Two dims are mapped at once with the same values in each; the CPU's kernel has results of the same shapes."""
    random = np.random.default_rng(0)
    batches = (3, 2, 4), (3, 4), (4,)
    q, k, v = (jnp.asarray(random.standard_normal((*dims, 64, 2, 8)), jnp.float32) for dims in batches)
    plain = partial(attend, causal=True, implementation="xla")
    mapped = jax.vmap(jax.vmap(mapped_as_batch(plain), (0, None, None)), (0, 0, None))
    out, lse = jax.jit(mapped)(q, k, v)
    for at in np.ndindex(3, 2):
        wanted = plain(q[at], k[at[0]], v)
        np.testing.assert_allclose(out[at], wanted[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse[at], wanted[1], rtol=1e-6, atol=1e-6)


@pytest.mark.deviceless
def test_a_mapped_call_of_cudnn_is_one_forward_and_one_backward_kernel_of_a_larger_batch():
    """Heads are 192 with values of 128; the calls of both programs read and write the same shapes."""
    cluster = mk.Cluster.load("dgx_h100")
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))

    def gradients(q, k, v):
        return jax.grad(lambda *args: fused_attention(*args).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)

    def calls(step, *batch):
        sizes = (HEAD_DIM, HEAD_DIM, VALUE_DIM)
        args = tuple(jax.ShapeDtypeStruct((*batch, LENGTH, HEADS, size), jnp.bfloat16) for size in sizes)
        schedule = compile_absent(step, args, mesh=mesh, cluster=cluster).schedule
        found = [i for i, _ in schedule.walk() if i.cost and i.cost.attention_flops]
        return sorted((i.cost.attention_backward, i.cost.attention_flops, i.cost.bytes_accessed) for i in found)

    mapped = calls(jax.vmap(gradients), 3, 4)
    assert mapped == calls(gradients, 12)
    assert [backward for backward, *_ in mapped] == [False, True]
