"""Matmuls of the linear layers in NVFP4, for plans alone: e2m1 values, and a scale in e4m3 for every 16 of them
along the dim that a matmul sums over.

As jax has it (`jax.nn.scaled_dot_general`, which is for inference: jax-ml/jax 26944), the forward pass alone multiplies
so; gradients are bf16's. A scale in e4m3 has a range of its own, so that a tensor has a second one in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from meshkit.parallel.block_scaled import block_scaled_matmul
from models.fp8 import AS_THEY_COME, Layouts, dot
from models.mxfp8 import Blocks, matrix_of

BLOCK = 16
VALUES, SCALES = jnp.float4_e2m1fn, jnp.float8_e4m3fn
_LARGEST_VALUE, _LARGEST_SCALE = 6.0, 448.0


def quantize(x: jax.Array) -> tuple[Blocks, jax.Array]:
    """x in blocks along its last dim, which is a multiple of 16, and the fp32 scale of the whole."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x)) / (_LARGEST_VALUE * _LARGEST_SCALE), jnp.finfo(jnp.float32).tiny)
    blocks = (x / scale).reshape(*x.shape[:-1], -1, BLOCK)
    scales = (jnp.max(jnp.abs(blocks), axis=-1) / _LARGEST_VALUE).astype(SCALES)
    values = blocks / jnp.maximum(scales.astype(jnp.float32), 2.0**-9)[..., None]
    values = jnp.clip(values, -_LARGEST_VALUE, _LARGEST_VALUE).astype(VALUES).reshape(x.shape)
    # Where XLA multiplies what it dequantizes, it would take both casts for none (excess precision).
    return Blocks(*lax.optimization_barrier((values, scales))), scale


def project_each(
    x: jax.Array, kernels: Sequence[jax.Array], contracted: int, out_dtype, layouts: Layouts = AS_THEY_COME
) -> tuple[jax.Array, ...]:
    """As `models.fp8.project_each`; what moves over the mesh is bf16, which the backward pass multiplies."""
    x = layouts.multiplied(layouts.inputs(x))
    cast = [lax.stop_gradient(kernel.astype(x.dtype)) for kernel in kernels]
    return tuple(layouts.outputs(_project(x, k, c, contracted, jnp.dtype(out_dtype))) for k, c in zip(kernels, cast))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _project(x, kernel, cast, contracted, out_dtype):
    del kernel  # takes the gradient
    rows, x_scale = quantize(x.reshape(*x.shape[: x.ndim - contracted], -1))
    columns, kernel_scale = quantize(matrix_of(cast, contracted).T)
    product = block_scaled_matmul(rows, columns, 1, jnp.float32) * (x_scale * kernel_scale)
    return product.astype(out_dtype).reshape(*x.shape[: x.ndim - contracted], *cast.shape[contracted:])


def _project_forward(x, kernel, cast, contracted, out_dtype):
    return _project(x, kernel, cast, contracted, out_dtype), (x, cast, jnp.zeros((), kernel.dtype))


def _project_backward(contracted, out_dtype, residuals, gradient):
    del out_dtype
    x, cast, like = residuals
    gradient, columns = gradient.astype(x.dtype), range(contracted, cast.ndim)
    rows = range(x.ndim - contracted)
    dx = dot(gradient, cast, range(len(rows), gradient.ndim), columns, x.dtype)
    wide = jnp.promote_types(x.dtype, like.dtype)  # no matmul has fp32 operands and a narrower product
    return dx, dot(x, gradient, rows, rows, wide).astype(like.dtype), None


_project.defvjp(_project_forward, _project_backward)
