"""Matmuls of the linear layers in fp8: e4m3 forward, e5m2 for what flows back; the quantization is flax's `fp8_ops`.

Every tensor has one scale, its largest absolute value over fp8's largest number, taken from the tensor itself just
before it is cast (*current* scaling). So there is no state: nothing to carry through scans, recomputation,
micro-batches or checkpoints, and nothing stale after a resume or a jump of the loss. The price is one more pass over
each tensor and, where it is cut over the mesh, an all-reduce of one number.

Hopper's tensor cores keep 14 bits of a sum. Forward that is enough; gradients, of weights over all tokens, are promoted
to fp32 on the way, as in flax, Transformer Engine and torchao (DeepSeek-V3, 2412.19437, 3.3.2, has the errors). It
takes those matmuls up to 10 % longer there; Blackwell sums in fp32.

The embedding's look-up has no matmul; norms, rotary positions and attention scores need more than three bits of
mantissa; the output head stays in bf16 since its rounding goes into the loss undamped (Peng et al., 2023; Micikevicius
et al., 2022, leave out the same).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_PROMOTED = lax.Precision.HIGHEST
_SMALLEST = 2.0**-100  # of a largest absolute value: 448 over it is still finite in fp32


class Scaled(NamedTuple):
    """A tensor in fp8: values times scale, an fp32 scalar."""

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, dtype) -> Scaled:
    """x in fp8 under a scale that puts its largest absolute value on fp8's largest number.

    A tensor with an infinity or a NaN becomes all NaN: clipping it would hide that the run has diverged.
    """
    return _quantize(x, dtype, _amax(x))


Layout = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Layouts:
    """How activations lie over the mesh, as functions that constrain them; each leaves an array alone by default.

    Attributes:
        inputs: of the input as it comes, and of its gradient.
        multiplied: of the input as it is multiplied: what lies between the two is moved in fp8.
        outputs: of the outputs.
        gradients: of the outputs' gradients as they are multiplied, where the partitioner does not find it.
    """

    inputs: Layout = lambda x: x
    multiplied: Layout = lambda x: x
    outputs: Layout = lambda x: x
    gradients: Layout = lambda x: x


AS_THEY_COME = Layouts()


def project_each(
    x: jax.Array, kernels: Sequence[jax.Array], contracted: int, out_dtype, layouts: Layouts = AS_THEY_COME
) -> tuple[jax.Array, ...]:
    """x contracted with each kernel over its first `contracted` dims; a weight's gradient is of its kernel's dtype.

    The kernels have one scale, and so have the gradients of their outputs.

    As if the kernels were one: the gradients of x then add up before they are scaled, and are reduced over the mesh
    once. The kernels are quantized outside of the custom_vjp: the backward pass shares their fp8 form, and where FSDP
    cuts them, fp8 is what the all-gather moves. The input is kept for the backward pass in fp8 as well.
    """
    quantized = jax.tree.map(lax.stop_gradient, _quantize_alike(kernels, FORWARD))
    return _project(x, tuple(kernels), quantized, contracted, jnp.dtype(out_dtype), layouts)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _project(x, kernels, quantized, contracted, out_dtype, layouts):
    return _project_forward(x, kernels, quantized, contracted, out_dtype, layouts)[0]


def _project_forward(x, kernels, quantized, contracted, out_dtype, layouts):
    scaled = quantize(layouts.inputs(x), FORWARD)
    scaled = Scaled(layouts.multiplied(layouts.inputs(scaled.values)), scaled.scale)
    dims = range(x.ndim - contracted, x.ndim)
    products = [_dot(scaled.values, k.values, dims, range(contracted), out_dtype) for k in quantized]
    # Laid out before it is scaled: a reduce-scatter must follow the matmul itself.
    outputs = [_scale(layouts.outputs(p), scaled.scale * k.scale) for p, k in zip(products, quantized)]
    likes = jnp.zeros((), x.dtype), [jnp.zeros((), k.dtype) for k in kernels]
    return tuple(outputs), (scaled, quantized, likes)


def _project_backward(contracted, out_dtype, layouts, residuals, gradients):
    del out_dtype
    x, kernels, (like_x, likes) = residuals
    gradients = _quantize_alike(gradients, BACKWARD)
    products = []
    for g, kernel in zip(gradients, kernels):
        rank, outputs = g.values.ndim, kernel.values.ndim - contracted
        columns = range(contracted, kernel.values.ndim)
        dims = range(rank - outputs, rank)
        products.append(_dot(g.values, kernel.values, dims, columns, like_x.dtype, _PROMOTED))
    dx = _scale(layouts.inputs(sum(products[1:], products[0])), gradients[0].scale * kernels[0].scale)
    rows = range(x.values.ndim - contracted)
    dkernels = [
        _scale(_dot(x.values, g.values, rows, rows, like.dtype, _PROMOTED), x.scale * g.scale)
        for g, like in zip(gradients, likes)
    ]
    return dx, tuple(dkernels), None


_project.defvjp(_project_forward, _project_backward)


def _quantize_alike(tensors: Sequence[jax.Array], dtype) -> list[Scaled]:
    """Tensors in fp8 under the scale of the one that needs the largest."""
    amax = jnp.max(jnp.stack([_amax(x) for x in tensors]))
    return [_quantize(x, dtype, amax) for x in tensors]


def _amax(x: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), _SMALLEST)


def _quantize(x: jax.Array, dtype, amax: jax.Array) -> Scaled:
    scale = fp8_ops.compute_scale(amax, jnp.float32(1), fp8_ops.get_fp8_max(dtype, jnp.float32))
    scale = jnp.where(jnp.isfinite(amax), scale, jnp.nan)
    return Scaled(fp8_ops.quantize(x, dtype, scale, jnp.float32), scale)


def _dot(a: jax.Array, b: jax.Array, a_dims, b_dims, dtype, precision=None) -> jax.Array:
    """The product of fp8 values, summed over the mesh in `dtype` (bf16 or fp32).

    Before it is scaled: 448^2 times any length of sum is far below the largest bf16. Sums are promoted to fp32 as
    `precision` says: by default a Hopper GPU adds them all up in its tensor cores.
    """
    return lax.dot_general(a, b, ((tuple(a_dims), tuple(b_dims)), ((), ())), precision, preferred_element_type=dtype)


def _scale(product: jax.Array, scale: jax.Array) -> jax.Array:
    return fp8_ops.dequantize(product, jnp.float32, scale).astype(product.dtype)
