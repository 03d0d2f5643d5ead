"""Matmuls of the linear layers in fp8: e4m3 in the forward pass, e5m2 for gradients. flax's `fp8_ops` quantizes.

Every tensor has one scale: its largest absolute value divided by fp8's largest number. By default that value is taken
from the tensor itself just before the cast (*current* scaling). So there is no state to carry through scans,
recomputation, micro-batches or checkpoints, and no scale is stale after a resume or a jump of the loss. The price is
one more pass over each tensor and, where the tensor is cut over the mesh, an all-reduce of one number.

With *delayed* scaling the scale comes from the largest absolute values of the previous steps (Micikevicius et al.,
2022), so a tensor is cast while it is computed. Numbers above the largest of these values are clipped to it. So is an
infinity, but it enters the history, so that the scale, and with it the tensor, is NaN from the next step on. A history
is a variable whose gradient is its next value, as in flax. Micro-batches and replicas take the maximum of their
histories. A history of zeros, as at the start, gives a scale of one.

Hopper's tensor cores keep 14 bits of a sum, which is enough in the forward pass. In the backward pass, where gradients
of weights sum over all tokens, partial sums are promoted to fp32, as in flax, Transformer Engine and torchao
(section 3.3.2 of DeepSeek-V3, 2412.19437, measures the error of 14-bit sums). Hopper needs up to 10 % longer for these
matmuls. Blackwell sums in fp32 anyway.

Some parts stay out of fp8, as in Peng et al., 2023, and Micikevicius et al., 2022. The embedding's look-up has no
matmul. Norms, rotary positions and attention scores need more than three bits of mantissa. The output head stays in
bf16, since its rounding errors enter the loss undamped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import fp8_ops
from jax import lax

from models.matmul import dot

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_PROMOTED = lax.Precision.HIGHEST
_SMALLEST = 2.0**-100  # lower bound on a tensor's largest absolute value: 448 / 2^-100 is still finite in fp32
STEPS = 16  # length of a history, as in Transformer Engine's guide
INPUT, KERNEL, GRADIENT = range(3)  # columns of a history


def new_history(stack: int | None) -> nnx.Variable:
    """Return a history of zeros for the largest absolute values of previous steps, newest first.

    Its shape is [steps, 3], and [stack, steps, 3] for the layers of a stack.
    """
    kind = nnx.variable_type_from_name(fp8_ops.OVERWRITE_WITH_GRADIENT, allow_register=True)
    return kind(jnp.zeros((STEPS, 3) if stack is None else (stack, STEPS, 3), jnp.float32))


class Scaled(NamedTuple):
    """A tensor in fp8: values times scale, an fp32 scalar."""

    values: jax.Array
    scale: jax.Array


def quantize(x: jax.Array, dtype) -> Scaled:
    """Return x in fp8, with a scale that maps its largest absolute value to fp8's largest number.

    A tensor with an infinity or a NaN becomes all NaN: clipping it would hide that the run has diverged.
    """
    return _quantize(x, dtype, _amax(x))


Layout = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class Layouts:
    """How activations lie over the mesh, as functions that constrain an array; the default changes nothing.

    Attributes:
        inputs: layout of the input as it arrives, and of the input's gradient.
        multiplied: layout of the input in the matmul; the move from `inputs` to this layout is in fp8.
        outputs: layout of the outputs.
        gradients: layout of the outputs' gradients in the matmuls of `models.mxfp8`; the partitioner does not find
            this layout by itself. The matmuls of fp8 and NVFP4 do not use it.
    """

    inputs: Layout = lambda x: x
    multiplied: Layout = lambda x: x
    outputs: Layout = lambda x: x
    gradients: Layout = lambda x: x


AS_THEY_COME = Layouts()


def project_each(
    x: jax.Array,
    kernels: Sequence[jax.Array],
    contracted: int,
    out_dtype,
    layouts: Layouts = AS_THEY_COME,
    histories: Sequence[jax.Array] = (),
) -> tuple[jax.Array, ...]:
    """Return the products of x with each kernel, summed over the kernel's first `contracted` dims.

    The gradient of a kernel has the kernel's dtype, and the gradient of x has the dtype of x.

    All kernels share one scale, and all gradients of their outputs share another, as if the kernels were one. So the
    gradients of x add up before they are scaled, and are reduced over the mesh once.

    The kernels are quantized outside of the custom_vjp: the backward pass shares their fp8 form and, where FSDP cuts
    them, the all-gather moves fp8. The input is also kept for the backward pass in fp8.

    Args:
        histories: histories of delayed scaling, one for each kernel, all with equal values; empty for current scaling.
    """
    frozen = [lax.stop_gradient(kernel) for kernel in kernels]
    amax = _amax(*frozen)
    quantized = [_quantize(k, FORWARD, _past(amax, histories, KERNEL)) for k in frozen], amax
    return _project(x, tuple(kernels), quantized, tuple(histories), contracted, jnp.dtype(out_dtype), layouts)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _project(x, kernels, quantized, histories, contracted, out_dtype, layouts):
    return _project_forward(x, kernels, quantized, histories, contracted, out_dtype, layouts)[0]


def _project_forward(x, kernels, quantized, histories, contracted, out_dtype, layouts):
    x, (quantized, kernel_amax) = layouts.inputs(x), quantized
    amax = _amax(x)
    scaled = _quantize(x, FORWARD, _past(amax, histories, INPUT))
    scaled = Scaled(layouts.multiplied(layouts.inputs(scaled.values)), scaled.scale)
    dims = range(x.ndim - contracted, x.ndim)
    products = [dot(scaled.values, k.values, dims, range(contracted), out_dtype) for k in quantized]
    # The product gets its layout before it is scaled: a reduce-scatter must follow the matmul itself. Unscaled sums do
    # not overflow: 448^2 times any number of terms is far below the largest bf16.
    outputs = [_scale(layouts.outputs(p), scaled.scale * k.scale) for p, k in zip(products, quantized)]
    likes = jnp.zeros((), x.dtype), [jnp.zeros((), k.dtype) for k in kernels]
    return tuple(outputs), (scaled, quantized, likes, histories, (amax, kernel_amax) if histories else ())


def _project_backward(contracted, out_dtype, layouts, residuals, gradients):
    del out_dtype
    x, kernels, (like_x, likes), histories, amaxes = residuals
    amax = _amax(*gradients)
    gradients = [_quantize(g, BACKWARD, _past(amax, histories, GRADIENT)) for g in gradients]
    newest = jnp.stack([*amaxes, amax])[None]
    newest = jnp.where(newest <= _SMALLEST, 0.0, newest)  # a tensor of zeros says nothing about the next step's tensor
    products = []
    for g, kernel in zip(gradients, kernels):
        rank, outputs = g.values.ndim, kernel.values.ndim - contracted
        columns = range(contracted, kernel.values.ndim)
        dims = range(rank - outputs, rank)
        products.append(dot(g.values, kernel.values, dims, columns, like_x.dtype, _PROMOTED))
    dx = _scale(layouts.inputs(sum(products[1:], products[0])), gradients[0].scale * kernels[0].scale)
    rows = range(x.values.ndim - contracted)
    dkernels = [
        _scale(dot(x.values, g.values, rows, rows, like.dtype, _PROMOTED), x.scale * g.scale)
        for g, like in zip(gradients, likes)
    ]
    return dx, tuple(dkernels), None, tuple(jnp.concatenate([newest, h[:-1]]) for h in histories)


_project.defvjp(_project_forward, _project_backward)


def _amax(*tensors: jax.Array) -> jax.Array:
    """Return the largest absolute value of several tensors."""
    amaxes = [jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), _SMALLEST) for x in tensors]
    return jnp.max(jnp.stack(amaxes)) if amaxes[1:] else amaxes[0]


def _past(amax: jax.Array, histories: Sequence[jax.Array], column: int) -> jax.Array:
    """Return the largest absolute value of the previous steps; without a history, the current tensor's (`amax`)."""
    return jnp.max(histories[0][:, column]) if histories else amax


def _quantize(x: jax.Array, dtype, amax: jax.Array) -> Scaled:
    """Return x in fp8, with a scale that maps `amax` to fp8's largest number; if `amax` is 0, the scale is one."""
    scale = fp8_ops.compute_scale(amax, jnp.float32(1), fp8_ops.get_fp8_max(dtype, jnp.float32))
    scale = jnp.where(jnp.isfinite(amax), scale, jnp.nan)
    return Scaled(fp8_ops.quantize(x, dtype, scale, jnp.float32), scale)


def _scale(product: jax.Array, scale: jax.Array) -> jax.Array:
    return fp8_ops.dequantize(product, jnp.float32, scale).astype(product.dtype)
