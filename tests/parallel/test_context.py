"""Test context parallel attention on 8 devices against one device, forward and backward, in every arrangement."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from meshkit.errors import ConfigError
from meshkit.parallel import blocks, gathered_attention, ring_attention, ulysses_attention
from meshkit.parallel.context import ATTENTION
from meshkit.parallel.layout import ContextLayout, balance, balanced_positions, restore

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 64, 8, 16

# fp32 sums in another order differ by sqrt(K) u of the largest sum, as in tests/equivalence. The longest sums here run
# over K = LENGTH * 4 (a key head's gradient: all queries of its group of 4). D = 8 of them are in series: scores,
# softmax, output, merged output; and backward d(weights), delta, d(scores), the gradient. Errors are relative to the
# largest entry.
TOLERANCE = np.sqrt(8 * LENGTH * 4) * 2.0**-24  # This is 2.7e-6.

MODES = {"all_gather": gathered_attention, "ring": ring_attention, "ulysses": ulysses_attention}
MESHES = {
    "8": ({"context": 8}, {}),
    "4 x tensor 2": ({"context": 4, "tensor": 2}, {"heads": "tensor"}),
    "2 x data 2 x tensor 2": ({"data": 2, "context": 2, "tensor": 2}, {"batch": "data", "heads": "tensor"}),
}


def mesh_of(sizes) -> Mesh:
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def arrays(kv_heads: int, dtype=jnp.float32) -> list[jax.Array]:
    """Return q, k, v and a gradient of the output."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, n, HEAD_DIM) for n in (HEADS, kv_heads, kv_heads, HEADS)]
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def with_gradients(attention):
    def run(q, k, v, g):
        out, pull = jax.vjp(attention, q, k, v)
        return [out, *pull(g)]

    return jax.jit(run)


@functools.cache
def reference(causal: bool, kv_heads: int):
    attention = with_gradients(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal, implementation="xla"))
    return attention(*arrays(kv_heads))


def worst(got, wanted) -> float:
    return max(float(jnp.abs(g - w).max() / jnp.abs(w).max()) for g, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("kv_heads", "causal"),
    [
        (2, True),
        (8, False),
        pytest.param(8, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
    ids=["grouped, causal", "full", "causal", "grouped, full"],
)
@pytest.mark.parametrize("arrangement", MESHES)
@pytest.mark.parametrize("mode", MODES)
def test_attention_and_its_gradients_are_exact(mode, arrangement, kv_heads, causal):
    sizes, cuts = MESHES[arrangement]
    mesh = mesh_of(sizes)
    attention = with_gradients(lambda *qkv: MODES[mode](*qkv, mesh=mesh, axis="context", causal=causal, **cuts))
    assert worst(attention(*arrays(kv_heads)), reference(causal, kv_heads)) < TOLERANCE


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_blocks_add_up(monkeypatch, causal, kv_heads):
    """The plain implementation has 4 x 4 blocks of scores, of which a causal mask skips 6."""
    monkeypatch.setattr(blocks, "BLOCK", LENGTH // 4)
    q, k, v, g = arrays(kv_heads)
    out, lse = blocks.attend(q, k, v, causal=causal, implementation="xla")
    gradients = blocks.attend_gradients(q, k, v, out, lse, g, causal=causal, implementation="xla")
    assert worst([out, *gradients], reference(causal, kv_heads)) < TOLERANCE
    (first, _), _ = blocks.visible_pairs(LENGTH, LENGTH, causal)
    assert len(first) == (10 if causal else 16)


def test_bf16_is_as_good_as_bf16_on_one_device():
    """Rounding inputs, weights and output costs both the same against fp32; ring may lose one merge more."""
    mesh = mesh_of({"context": 8})
    exact = reference(True, 2)
    whole = with_gradients(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="xla"))
    ring = with_gradients(lambda *qkv: ring_attention(*qkv, mesh=mesh, axis="context"))
    rounded = arrays(2, jnp.bfloat16)
    assert worst(ring(*rounded), exact) < 2 * worst(whole(*rounded), exact)


def test_two_axes_cut_the_length_as_one():
    mesh = mesh_of({"outer": 2, "inner": 2})
    attention = with_gradients(lambda *qkv: ring_attention(*qkv, mesh=mesh, axis=("outer", "inner")))
    assert worst(attention(*arrays(2)), reference(True, 2)) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_it_works_in_a_scan_of_recomputed_layers(mode):
    mesh, (q, k, v, g) = mesh_of({"context": 2}), arrays(8)

    def layers(attention):
        def layer(x, _):
            return jax.checkpoint(lambda x: x + attention(x, x * 0.5, x))(x), None

        return lambda x, k, v: jax.lax.scan(layer, x, None, length=3)[0] + 0 * (k + v)

    whole = layers(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="xla"))
    cut = layers(lambda *qkv: MODES[mode](*qkv, mesh=mesh, axis="context"))
    wanted = with_gradients(whole)(q, k, v, g)[:2]
    assert worst(with_gradients(cut)(q, k, v, g)[:2], wanted) < np.sqrt(3) * TOLERANCE


@pytest.mark.parametrize(
    ("mode", "collective"), [("ring", "ppermute"), ("all_gather", "all_gather"), ("ulysses", "all_to_all")]
)
def test_a_policy_that_keeps_attention_does_not_communicate_again(mode, collective):
    """The exchange in the forward pass is traced once less than with `full` recomputation, because names are kept."""
    mesh = mesh_of({"context": 8})

    def count(policy):
        def layer(x):
            return jnp.sin(MODES[mode](x, x, x, mesh=mesh, axis="context"))

        def loss(x):
            return jnp.sum(jax.checkpoint(layer, policy=policy)(x) ** 2)

        return str(jax.make_jaxpr(jax.grad(loss))(arrays(8)[0])).count(f"{collective}[")

    kept = jax.checkpoint_policies.save_only_these_names(ATTENTION)
    assert count(kept) < count(None)


@pytest.mark.parametrize("ways", [2, 3, 8])
def test_balanced_order_gives_gpu_i_chunks_i_and_its_mirror(ways):
    chunks = balanced_positions(4 * ways, ways).reshape(ways, 2, 2)
    np.testing.assert_array_equal(chunks[:, :, 0] // 2, [[i, 2 * ways - 1 - i] for i in range(ways)])
    np.testing.assert_array_equal(chunks[:, :, 1] - chunks[:, :, 0], np.ones((ways, 2)))


@pytest.mark.parametrize("ways", [2, 3, 8])
def test_balance_and_restore_are_inverse_and_each_others_gradient(ways):
    layout = ContextLayout(mesh_of({"context": ways}), ("context",))
    spec = jax.sharding.PartitionSpec(None, "context")
    x = jnp.arange(2 * 4 * ways, dtype=jnp.float32).reshape(2, -1)
    positions = balanced_positions(4 * ways, ways)

    @jax.jit
    def run(x):
        there, pull = jax.vjp(lambda x: balance(x, layout, spec), x)
        return there, restore(there, layout, spec), *pull(there)

    there, *back = run(x)
    np.testing.assert_array_equal(there, x[:, positions])
    for found in back:
        np.testing.assert_array_equal(found, x)


def ring_program(local: int):
    """Return the compiled loss and gradients of ring attention over 8 devices, `local` tokens on each."""
    mesh = mesh_of({"context": 8})
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "context"))
    x = jax.ShapeDtypeStruct((1, 8 * local, 1, 8), jnp.float32, sharding=sharding)
    attention = with_gradients(lambda *qkv: ring_attention(*qkv, mesh=mesh, axis="context", balanced=True))
    return attention.lower(x, x, x, x).compile()


def test_temporary_memory_is_linear_in_the_local_length():
    """With 4 times the tokens on each device, memory is at most 4 times as large.

    Blocks of scores have one size (past 2 * BLOCK). `benchmarks/ring_memory.md` has the same from 2k to 32k.
    """
    small, large = (ring_program(n).memory_analysis().temp_size_in_bytes for n in (2048, 8192))
    assert large <= 4 * small


@pytest.mark.parametrize(
    ("mode", "shape", "options", "message"),
    [
        ("ring", (2, 60, 8, 16), {}, "length = 60 does not divide into the 8 pieces of 'context'"),
        ("ring", (2, 72, 8, 16), {}, "length = 72 does not divide into the 16 chunks"),
        ("all_gather", (2, 72, 8, 16), {}, "length = 72 does not divide into the 16 chunks"),
        ("ulysses", (2, 64, 12, 16), {}, "Ulysses cuts 12 heads over 8 GPUs .context = 8., which does not divide"),
        ("ring", (2, 64, 8, 16), {"axis": "contxt"}, "the mesh has axes context, not 'contxt'"),
        ("ring", (2, 64, 8, 16), {"batch": "context"}, "mesh axis 'context' cannot cut two dims"),
    ],
)
def test_sizes_that_do_not_fit_say_so(mode, shape, options, message):
    x = jnp.zeros(shape)
    with pytest.raises(ConfigError, match=message):
        MODES[mode](x, x, x, **{"mesh": mesh_of({"context": 8}), "axis": "context", **options})


def test_arrays_that_do_not_go_together_say_so(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # Users have no hook that checks shapes before.
    q, k = jnp.zeros((2, 64, 8, 16)), jnp.zeros((2, 64, 3, 16))
    mesh = mesh_of({"context": 8})
    with pytest.raises(ConfigError, match="8 heads are not a multiple of 3 kv_heads"):
        ring_attention(q, k, k, mesh=mesh, axis="context")
    with pytest.raises(ConfigError, match=r"not \(2, 64, 8, 16\), \(2, 32, 3, 16\)"):
        ring_attention(q, k[:, :32], k[:, :32], mesh=mesh, axis="context")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_cudnn_and_the_plain_implementation_agree(causal):
    """Blocks are bf16, log-sum-exp included; both sides round weights to bf16, so to 2^-8 of the largest entry."""
    if not any(d.platform == "gpu" for d in jax.devices()):
        pytest.skip("needs a GPU with cuDNN")
    random = np.random.default_rng(0)
    shapes = [(2, 256, n, 64) for n in (8, 2, 2, 8)]
    q, k, v, g = (jnp.asarray(random.standard_normal(s), jnp.bfloat16) for s in shapes)

    def run(implementation):
        how = {"causal": causal, "implementation": implementation}
        out, lse = blocks.attend(q, k, v, **how)
        # Half of the weight is elsewhere, as for one block of several.
        return [out, lse, *blocks.attend_gradients(q, k, v, out, lse + np.log(2), g, **how)]

    assert worst([x.astype(jnp.float32) for x in run("cudnn")], run("xla")) < 2.0**-6
