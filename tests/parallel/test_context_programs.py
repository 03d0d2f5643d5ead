"""Test what context parallelism moves in programs compiled for 2 x 8 H100, each collective against its closed form."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.parallel import gathered_attention, ring_attention, ulysses_attention

pytestmark = pytest.mark.deviceless

LAYERS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 3, 16_384, 32, 4, 128
WAYS, TENSOR, BF16, FP32 = 8, 2, 2, 4
LOCAL = LENGTH // WAYS
# P is the size of the keys and values of one GPU for one sequence.
PIECE = 2 * LOCAL * KV_HEADS // TENSOR * HEAD_DIM * BF16
GRADIENT = PIECE * FP32 // BF16
QUERIES = LOCAL * HEADS // TENSOR * HEAD_DIM * BF16
# Each tensor GPU has 16 heads and 2 key heads; 8 ways need 8 key heads, so each has 4 copies.
ULYSSES = QUERIES + 2 * LOCAL * 8 * HEAD_DIM * BF16

# Each row holds, per layer, forward and backward: (collective, dtype) -> bytes, and the number of collectives.
CLOSED_FORM = {
    "ring": (
        ring_attention,
        {
            ("collective-permute", "bf16"): (WAYS - 1 + 1) * PIECE,  # These are forward, and the first hop of backward.
            ("collective-permute", "u16"): (WAYS - 2) * (PIECE + GRADIENT),
            ("collective-permute", "f32"): 2 * GRADIENT,
        },
        (WAYS - 1) + (WAYS + 1),
    ),
    "all_gather": (
        gathered_attention,
        {("all-gather", "bf16"): 2 * WAYS * PIECE, ("reduce-scatter", "f32"): WAYS * GRADIENT},
        3,
    ),
    "ulysses": (ulysses_attention, {("all-to-all", "bf16"): 2 * (ULYSSES + QUERIES)}, 4),
}


@pytest.fixture(scope="module")
def cluster():
    return mk.Cluster.load("dgx_h100", hosts=2)


@pytest.fixture(scope="module")
def spec():
    return mk.MeshSpec.parse({"context": {"nvlink": 4, "infiniband": 2}, "tensor": 2})


def schedule_of(attention, spec, cluster, **options):
    """Return the schedule of a scan of layers x -> x + attention(x, keys and values taken from x), and its gradient."""
    from meshkit.compile.program import compile_absent

    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
    sharding = NamedSharding(mesh, PartitionSpec(None, "context", "tensor"))

    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16, sharding=sharding)

    def layers(x, g):
        def layer(x, _):
            groups = x.reshape(1, LENGTH, KV_HEADS, -1, HEAD_DIM)
            k, v = groups[:, :, :, 0], groups[:, :, :, 1]
            return x + attention(x, k, v, mesh=mesh, axis="context", heads="tensor", **options), None

        out, pull = jax.vjp(lambda x: jax.lax.scan(layer, x, None, length=LAYERS)[0], x)
        return out, pull(g)

    return compile_absent(layers, (x, x), mesh=mesh, cluster=cluster).schedule


def executed(schedule):
    """Return instructions with how often they run."""

    def walk(name, times):
        for i in schedule.computations[name]:
            yield i, times
            for body in i.bodies:
                yield from walk(body, times * (i.trip_count or 1))

    return list(walk(schedule.entry, 1))


@pytest.mark.parametrize("mode", CLOSED_FORM)
def test_bytes_and_flops_are_the_closed_form(mode, spec, cluster):
    attention, wanted, count = CLOSED_FORM[mode]
    options = {} if mode == "ulysses" else {"balanced": True}
    found = executed(schedule_of(attention, spec, cluster, **options))
    collectives = [(i.collective, times) for i, times in found if i.collective]
    assert {c.axes for c, _ in collectives} == {("context",)}
    moved = Counter()
    for c, times in collectives:
        moved[c.collective, c.dtype] += c.payload_bytes * times
    assert moved == {key: LAYERS * size for key, size in wanted.items()}
    assert sum(times for _, times in collectives) == LAYERS * count

    # Every GPU computes its share of the visible half of the scores, as cuDNN counts a causal block.
    forward = 4 * HEADS / TENSOR * LENGTH**2 * HEAD_DIM / 2 / WAYS
    assert sum(i.cost.attention_flops * times for i, times in found if i.cost) == LAYERS * 3.5 * forward
