"""Matmuls of the linear layers in NVFP4, only for plans: e2m1 values, and an e4m3 scale for each block of 16 values
along the dim that a matmul sums over.

The range of e4m3 is small, so a tensor also has one scale in fp32. Only the forward pass multiplies in NVFP4, as in
`jax.nn.scaled_dot_general`, which is for inference (jax-ml/jax 26944). The gradients are those of a bf16 matmul.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshkit.parallel.block_scaled import block_scaled_matmul
from models.fp8 import AS_THEY_COME, Layouts
from models.matmul import project
from models.mxfp8 import Blocks, matrix_of

BLOCK = 16
VALUES, SCALES = jnp.float4_e2m1fn, jnp.float8_e4m3fn
_LARGEST_VALUE, _LARGEST_SCALE = float(jnp.finfo(VALUES).max), float(jnp.finfo(SCALES).max)
_SMALLEST_SCALE = float(jnp.finfo(SCALES).smallest_subnormal)


def quantize(x: jax.Array) -> tuple[Blocks, jax.Array]:
    """Return x in blocks along its last dim, a multiple of 16, and the fp32 scale of the whole tensor."""
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x)) / (_LARGEST_VALUE * _LARGEST_SCALE), jnp.finfo(jnp.float32).tiny)
    blocks = (x / scale).reshape(*x.shape[:-1], -1, BLOCK)
    scales = (jnp.max(jnp.abs(blocks), axis=-1) / _LARGEST_VALUE).astype(SCALES)
    values = blocks / jnp.maximum(scales.astype(jnp.float32), _SMALLEST_SCALE)[..., None]
    values = jnp.clip(values, -_LARGEST_VALUE, _LARGEST_VALUE).astype(VALUES).reshape(x.shape)
    # Without the barrier XLA may remove the cast to 4 bits and the cast back (its option xla_allow_excess_precision).
    return Blocks(*lax.optimization_barrier((values, scales))), scale


def project_each(
    x: jax.Array, kernels: Sequence[jax.Array], contracted: int, out_dtype, layouts: Layouts = AS_THEY_COME
) -> tuple[jax.Array, ...]:
    """Return what `models.fp8.project_each` returns, computed in NVFP4.

    Tensors move over the mesh in bf16, because the backward pass multiplies them in bf16.
    """
    x = layouts.multiplied(layouts.inputs(x))
    return tuple(layouts.outputs(project(x, k, contracted, jnp.dtype(out_dtype), _multiply)) for k in kernels)


def _multiply(x: jax.Array, kernel: jax.Array, contracted: int, out_dtype) -> jax.Array:
    rows, x_scale = quantize(x.reshape(*x.shape[: x.ndim - contracted], -1))
    columns, kernel_scale = quantize(matrix_of(kernel, contracted).T)
    product = block_scaled_matmul(rows, columns, 1, jnp.float32) * (x_scale * kernel_scale)
    return product.astype(out_dtype).reshape(*x.shape[: x.ndim - contracted], *kernel.shape[contracted:])
