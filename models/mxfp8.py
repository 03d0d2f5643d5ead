"""Matmuls of the linear layers in MXFP8: e4m3 values, and a power-of-two scale for each block of 32 values along the
dim that a matmul sums over (OCP Microscaling Formats, 1.0, 2023).

Gradients are in e4m3 too: the scale of each block covers the range for which other recipes need e5m2. Scales are
rounded up, so that nothing is clipped (Mishra et al., 2506.08027). A tensor that enters two matmuls is quantized twice,
into two forms, because each matmul sums over another dim. There is no state: a scale is computed from its block just
before the cast.

The matmul is `jax.nn.scaled_matmul` (`meshkit.parallel.block_scaled`), a kernel of cuDNN on Blackwell. CPUs and other
GPUs dequantize the same values before they multiply. `models.fp8` lists the parts of a model that are not quantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshkit.parallel.block_scaled import block_scaled_matmul
from models.fp8 import AS_THEY_COME, Layouts

BLOCK = 32
VALUES, SCALES = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
# 448, the largest number of e4m3, is 1.75 x 2^8.
_LARGEST_EXPONENT, _LARGEST_MANTISSA = 8, 0x600000


class Blocks(NamedTuple):
    """A tensor in MXFP8: values, and a scale for every 32 along one of its dims."""

    values: jax.Array
    scales: jax.Array


def quantize(x: jax.Array, axis: int = -1) -> Blocks:
    """Return x in blocks along a dim, padded with zeros to a multiple of 32.

    A block's scale is the smallest power of two that brings its largest absolute value into the range of e4m3. A block
    with an infinity or a NaN becomes all NaN.
    """
    axis %= x.ndim
    if missing := -x.shape[axis] % BLOCK:
        x = jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(x.ndim)])
    blocks = x.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
    amax = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True).astype(jnp.float32)
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    scale = jnp.maximum(exponent - _LARGEST_EXPONENT + (mantissa > _LARGEST_MANTISSA), 0)
    scale = jnp.where(exponent == 255, 255, scale)  # 255 encodes NaN
    inverse = jnp.where(exponent == 255, jnp.nan, lax.bitcast_convert_type((254 - scale) << 23, jnp.float32))
    values = (blocks.astype(jnp.float32) * inverse).astype(VALUES).reshape(x.shape)
    scales = lax.bitcast_convert_type(jnp.squeeze(scale, axis + 1).astype(jnp.uint8), SCALES)
    # Without the barrier XLA may remove the cast to fp8 and the cast back (its option xla_allow_excess_precision).
    return Blocks(*lax.optimization_barrier((values, scales)))


def project_each(
    x: jax.Array, kernels: Sequence[jax.Array], contracted: int, out_dtype, layouts: Layouts = AS_THEY_COME
) -> tuple[jax.Array, ...]:
    """Return what `models.fp8.project_each` returns, computed in MXFP8.

    Both forms of a kernel are made outside of the custom_vjp. So FSDP gathers them in fp8, and a recomputed forward
    pass and the backward pass share them. For the backward pass the input is kept in blocks along the length.
    """
    matrices = [lax.stop_gradient(matrix_of(kernel, contracted)) for kernel in kernels]
    forms = tuple((quantize(matrix, 0), quantize(matrix, 1)) for matrix in matrices)
    return _project(x, tuple(kernels), forms, contracted, jnp.dtype(out_dtype), layouts)


def matrix_of(kernel: jax.Array, contracted: int) -> jax.Array:
    return kernel.reshape(math.prod(kernel.shape[:contracted]), -1)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _project(x, kernels, forms, contracted, out_dtype, layouts):
    return _project_forward(x, kernels, forms, contracted, out_dtype, layouts)[0]


def _project_forward(x, kernels, forms, contracted, out_dtype, layouts):
    x = layouts.inputs(x)
    inputs = x.reshape(*x.shape[: x.ndim - contracted], -1)
    rows, tokens = (_moved(quantize(inputs, axis), layouts) for axis in (-1, -2))
    products = [block_scaled_matmul(rows, _turned(by_rows), 1, out_dtype) for by_rows, _ in forms]
    shapes = [(*inputs.shape[:-1], *kernel.shape[contracted:]) for kernel in kernels]
    outputs = tuple(layouts.outputs(p.reshape(shape)) for p, shape in zip(products, shapes))
    like_x = jnp.zeros((0, *x.shape[x.ndim - contracted :]), x.dtype)
    likes = [jnp.zeros((0, *kernel.shape), kernel.dtype) for kernel in kernels]
    return outputs, (tokens, [by_columns for _, by_columns in forms], (like_x, likes))


def _moved(x: Blocks, layouts: Layouts) -> Blocks:
    """Return the blocks in the layout of the matmul; they move over the mesh in fp8."""
    return Blocks(*(layouts.multiplied(layouts.inputs(part)) for part in x))


def _project_backward(contracted, out_dtype, layouts, residuals, gradients):
    del out_dtype
    tokens, kernels, (like_x, likes) = residuals
    inputs, dx, dkernels = like_x.shape[1:], [], []
    for gradient, kernel, like in zip(gradients, kernels, likes):
        gradient = gradient.reshape(*gradient.shape[: gradient.ndim - like.ndim + 1 + contracted], -1)
        by_columns, by_tokens = (Blocks(*map(layouts.gradients, quantize(gradient, axis))) for axis in (-1, -2))
        dx.append(block_scaled_matmul(by_columns, kernel, 1, like_x.dtype))
        dkernel = block_scaled_matmul(_turned(tokens), _turned(by_tokens), tokens.values.ndim - 1, like.dtype)
        dkernels.append(dkernel.reshape(like.shape[1:]))
    added = sum(dx[1:], dx[0])
    return layouts.inputs(added.reshape(*added.shape[:-1], *inputs)), tuple(dkernels), None


_project.defvjp(_project_forward, _project_backward)


def _turned(x: Blocks) -> Blocks:
    """Return [..., k, n] as [n, ..., k]: the dims that a matmul sums over come last."""
    return Blocks(*(jnp.moveaxis(part, -1, 0) for part in x))
