"""Test the compiler's input: target descriptions, which agree with OpenXLA's own, and the FLOP of a traced step."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshkit as mk
from meshkit.compile.lowering import lowering_for, target_config, topology_name
from meshkit.compile.traced import traced_flops
from meshkit.config.catalog import gpu

A, B = jnp.zeros((8, 16)), jnp.zeros((16, 32))
ONE = 2.0 * 8 * 16 * 32
SPECS = Path(__file__).parent.parent / "data" / "gpu_specs"
NUMBERS = [
    "threads_per_block_limit",
    "threads_per_warp",
    "threads_per_core_limit",
    "core_count",
    "fpus_per_core",
    "registers_per_core_limit",
    "registers_per_block_limit",
    "shared_memory_per_block",
    "shared_memory_per_core",
    "shared_memory_per_block_optin",
]


def field(text, name):
    found = re.search(rf"^\s*{name}: (\S+)$", text, re.MULTILINE)
    return found and found[1]


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("p100", "p100"),
        ("v100", "v100"),
        ("a100_40gb", "a100_sxm_40"),
        ("a100_80gb", "a100_sxm_80"),
        ("h100_sxm", "h100_sxm"),
        ("h100_pcie", "h100_pcie"),
        ("h200", "h200"),
        ("b200", "b200"),
        ("gb200", "gb200"),
        ("b300", "b300"),
        ("gb300", "gb300"),
        ("rtx_pro_6000", "rtx6000pro"),
    ],
)
def test_fields_agree_with_openxla(key, file):
    ours, theirs = target_config(gpu(key)), (SPECS / f"{file}.txtpb").read_text()
    differing = {n: (field(ours, n), field(theirs, n)) for n in NUMBERS if field(ours, n) != field(theirs, n)}
    assert differing == {}


def test_no_program_is_compiled_for_a_cpu():
    with pytest.raises(mk.ConfigError, match="'cpu' is no GPU"):
        target_config(gpu("cpu"))


@pytest.mark.parametrize(
    ("cluster", "hosts", "expected"),
    [("dgx_h100", 2, "2x1x8"), ("gb200_nvl72", 36, "2x18x4"), ("dgx_a100", 1, "1x1x8")],
)
def test_topology_splits_into_domains_and_hosts(cluster, hosts, expected):
    assert topology_name(mk.Cluster.load(cluster, hosts=hosts)) == expected


def flops(fn, *args):
    found = traced_flops(jax.make_jaxpr(fn)(*args))
    return found and found.executed


def test_a_matmul_and_its_gradients():
    assert flops(jnp.dot, A, B) == ONE
    assert flops(jax.value_and_grad(lambda a, b: jnp.dot(a, b).sum(), argnums=(0, 1)), A, B) == 3 * ONE


def test_what_is_recomputed_counts_again():
    def loss(a, b):
        return jnp.sin(jax.checkpoint(lambda a: jnp.sin(jnp.dot(a, b)))(a)).sum()

    # Three matmuls run: the forward one, its recomputation, and the gradient of a.
    assert flops(jax.grad(loss), A, B) == 3 * ONE


def test_what_nobody_uses_does_not_count():
    """The backward pass of a first layer does not need the gradient of its input."""

    @jax.custom_vjp
    def dot(a, b):
        return jnp.dot(a, b)

    dot.defvjp(lambda a, b: (dot(a, b), (a, b)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    assert flops(jax.value_and_grad(lambda b: dot(A, b).sum()), B) == 2 * ONE


def test_a_complex_multiply_add_is_four_real_ones():
    assert flops(jnp.dot, A.astype(jnp.complex64), B.astype(jnp.complex64)) == 4 * ONE


def test_a_scan_counts_its_iterations_and_a_conditional_its_longest_branch():
    assert flops(lambda a, b: lax.scan(lambda c, _: (c, jnp.dot(a, b)), 0.0, None, length=5)[1], A, B) == 5 * ONE
    assert flops(lambda a, b: lax.cond(a[0, 0] > 0, lambda: jnp.dot(a, b), lambda: jnp.zeros((8, 32))), A, B) == ONE


def test_jit_and_custom_derivatives_count_once():
    @jax.custom_vjp
    def dot(a, b):
        return jnp.dot(a, b)

    dot.defvjp(lambda a, b: (dot(a, b), (a, b)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    assert flops(jax.jit(dot), A, B) == ONE
    assert flops(jax.jit(jax.value_and_grad(lambda a, b: dot(a, b).sum(), argnums=(0, 1))), A, B) == 3 * ONE


def test_inside_a_shard_map_every_device_counts():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    assert flops(mapped, A, B) == ONE
    replicated = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    assert flops(replicated, A, B) == 8 * ONE


def test_a_convolution_is_its_window_times_its_outputs():
    x, kernel = jnp.zeros((4, 10, 10, 3)), jnp.zeros((3, 3, 3, 16))
    numbers = ("NHWC", "HWIO", "NHWC")
    found = flops(lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers), x, kernel)
    assert found == 2.0 * (4 * 10 * 10 * 16) * (3 * 3 * 3)


@pytest.mark.parametrize("groups", [1, 2, 8])  # The last is depthwise.
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_all_passes_of_a_convolution_multiply_as_often(stride, dilation, padding, groups):
    x, kernel = jnp.zeros((4, 13, 16, 8)), jnp.zeros((3, 2, 8 // groups, 16))

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
        )  # fmt: skip

    out, pull = jax.eval_shape(convolve, x, kernel), lambda x, kernel, y: jax.vjp(convolve, x, kernel)[1](y)
    once = 2.0 * 4 * out.shape[1] * out.shape[2] * 16 * 3 * 2 * 8 / groups
    assert flops(convolve, x, kernel) == once
    for wanted in (0, 1):
        assert flops(lambda *args, i=wanted: pull(*args)[i], x, kernel, jnp.zeros(out.shape)) == once


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_transposed_convolution_multiplies_with_every_element_of_its_input(stride):
    """Each input element meets each kernel element once, forward and backward, as in a loop."""
    x, kernel = jnp.zeros((4, 10, 8)), jnp.zeros((3, 8, 16))

    def convolve(x, kernel):
        return lax.conv_transpose(x, kernel, (stride,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))

    once = 2.0 * sum(1 for _ in np.ndindex(4, 10, 8, 3, 16))
    assert flops(convolve, x, kernel) == once
    assert flops(jax.grad(lambda *args: convolve(*args).sum(), argnums=(0, 1)), x, kernel) == 2 * once


def test_a_batch_in_groups_multiplies_each_with_its_own_features():
    x, kernel = jnp.zeros((6, 10, 8)), jnp.zeros((3, 8, 16))

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"), batch_group_count=2
        )

    once = 2.0 * (3 * 10 * 16) * (3 * 8)
    assert flops(convolve, x, kernel) == once
    assert flops(jax.grad(lambda *args: convolve(*args).sum(), argnums=(0, 1)), x, kernel) == 2 * once


BAND = 64 / 256 - (64 / 256) ** 2 / 2  # A window of 64 tokens is a band without the triangle before the first token.


@pytest.mark.parametrize(("causal", "share", "window"), [(True, 0.5, None), (False, 1.0, None), (True, BAND, (63, 0))])
def test_fused_attention_forward_and_backward(causal, share, window):
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)

    def attend(q, k, v):
        fused = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
        return fused(q, k, v, local_window_size=window).astype(jnp.float32).sum()

    with lowering_for(mk.Cluster.load("dgx_h100")):
        forward, both = flops(attend, q, q, q), flops(jax.grad(attend, argnums=(0, 1, 2)), q, q, q)
    square = 4.0 * 2 * 4 * 256 * 256 * 64 * share
    assert forward == square
    assert both == 3.5 * square


def test_a_loop_of_unknown_length_around_a_matmul_is_not_counted():
    def until(a):
        return lax.while_loop(lambda c: c.sum() < 1, lambda c: jnp.dot(c, c), a)

    square = np.zeros((8, 8), np.float32)
    assert flops(until, square) is None
    assert flops(lambda a: lax.while_loop(lambda c: c.sum() < 1, lambda c: c + 1, a), square) == 0.0
