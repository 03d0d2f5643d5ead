"""Test that block-scaled matmuls over a mesh equal one device's, and move no more than handwritten ones would."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshkit.parallel.block_scaled import block_scaled_matmul

BATCH, LENGTH, INPUTS, OUTPUTS = 8, 64, 128, 256
FSDP = ("data", "fsdp")


def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def blocks(seed, *shape):
    """Return values in e4m3 and their scales 2^-3 to 2^3, one for 32 along the last dim."""
    values = jax.random.normal(jax.random.key(seed), shape).astype(jnp.float8_e4m3fn)
    powers = jax.random.randint(jax.random.key(seed + 1), (*shape[:-1], shape[-1] // 32), -3, 4)
    return values, jnp.exp2(powers.astype(jnp.float32)).astype(jnp.float8_e8m0fnu)


def dequantized(part):
    values, scales = (np.asarray(x, np.float32) for x in part)
    return values * np.repeat(scales, 32, axis=-1)


# Each case holds the shapes of both operands and how many dims are summed over, their shardings and the result's, and
# what is moved: each collective with the elements of its result on one device. On CPUs 8 bits travel as 16 or 32.
CASES = {
    "the input of a layer and a kernel under FSDP": (
        ((BATCH, LENGTH, INPUTS), (OUTPUTS, INPUTS), 1),
        (P(FSDP), P("tensor", "fsdp"), P(FSDP, None, "tensor")),
        [("all-gather", OUTPUTS // 2 * INPUTS), ("all-gather", OUTPUTS // 2 * INPUTS // 32)],
    ),
    "what sequence parallelism cuts again": (
        ((BATCH, LENGTH, INPUTS), (OUTPUTS, INPUTS), 1),
        (P(FSDP, None, "tensor"), P(None, "tensor"), P(FSDP, "tensor")),
        [("reduce-scatter", BATCH // 4 * LENGTH // 2 * OUTPUTS)],
    ),
    "the gradient of a kernel under FSDP and replicas": (
        ((INPUTS, BATCH, LENGTH), (OUTPUTS, BATCH, LENGTH), 2),
        (P(None, FSDP), P("tensor", FSDP), P("fsdp", "tensor")),
        [("reduce-scatter", INPUTS // 2 * OUTPUTS // 2), ("all-reduce", INPUTS // 2 * OUTPUTS // 2)],
    ),
    "the gradient of a kernel where the length is cut": (
        ((INPUTS, BATCH, LENGTH), (OUTPUTS, BATCH, LENGTH), 2),
        (P(None, FSDP, "tensor"), P(None, FSDP, "tensor"), P()),
        [("all-reduce", INPUTS * OUTPUTS)],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_one_devices_and_moves_no_more_than_it_must(case):
    """Both sides are fp32 sums of a few thousand products of either sign, in another order."""
    (left, right, summed), cuts, moved = case
    first, second, result = (NamedSharding(mesh(), cut) for cut in cuts)
    a, b = blocks(0, *left), blocks(2, *right)
    fn = jax.jit(
        lambda a, b: block_scaled_matmul(a, b, summed, jnp.float32),
        in_shardings=((first, first), (second, second)),
        out_shardings=result,
    )
    compiled = fn.lower(a, b).compile()
    inner = len(left) - summed
    expected = np.tensordot(dequantized(a), dequantized(b), (range(inner, len(left)), range(1, len(right))))
    found = np.asarray(compiled(*jax.device_put((a, b), ((first, first), (second, second)))))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert sorted(collectives(compiled.as_text())) == sorted(moved)


@pytest.mark.parametrize(("ways", "each"), [(2, 1.5), (8, 0.375)])
def test_a_cut_inside_a_block_is_refused(ways, each):
    """Three blocks of 32: the scale of the second one would be on one GPU, and half of its values on another."""
    row = jax.make_mesh((ways,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ways])
    cut = NamedSharding(row, P(None, "tensor"))
    a, b = ((jax.device_put(values, cut), scales) for values, scales in (blocks(0, 16, 96), blocks(2, 24, 96)))
    with pytest.raises(Exception, match=f"96, which is 3 blocks of 32, .* tensor {ways}: {each} blocks a GPU"):
        jax.jit(lambda a, b: block_scaled_matmul(a, b, 1, jnp.float32))(a, b)


def collectives(hlo):
    """Yield the collective and the number of elements of every array that a collective makes."""
    pattern = r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    for made, name in re.findall(pattern, hlo):
        for dims in re.findall(r"\w+\[([\d,]*)\]", made):
            yield name, math.prod(int(d) for d in dims.split(",") if d)
