"""The matmul of a linear layer and its gradients, under the precision rule of `models.layers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def dot(a: jax.Array, b: jax.Array, a_dims, b_dims, dtype, precision=None) -> jax.Array:
    """Return `a` contracted with `b` over these dims of both; the product is summed in `dtype`, over the mesh too."""
    return lax.dot_general(a, b, ((tuple(a_dims), tuple(b_dims)), ((), ())), precision, preferred_element_type=dtype)


def multiply(x: jax.Array, kernel: jax.Array, contracted: int, out_dtype) -> jax.Array:
    """Return x contracted with the kernel over its first `contracted` dims."""
    return dot(x, kernel, _last(x, contracted), range(contracted), out_dtype)


def project(x: jax.Array, kernel: jax.Array, contracted: int, out_dtype, forward: Callable = multiply) -> jax.Array:
    """Return x contracted with the kernel over its first `contracted` dims; `forward` multiplies in the forward pass.

    The kernel is cast once, outside of the custom_vjp. So a recomputed forward pass and the backward pass share the
    cast kernel, and also the all-gather that FSDP puts after the cast.
    """
    return _project(x, kernel, lax.stop_gradient(kernel.astype(x.dtype)), contracted, out_dtype, forward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _project(x, kernel, cast, contracted, out_dtype, forward):
    del kernel  # only receives the gradient
    return forward(x, cast, contracted, out_dtype)


def _project_forward(x, kernel, cast, contracted, out_dtype, forward):
    like = jnp.zeros((), kernel.dtype)
    return _project(x, kernel, cast, contracted, out_dtype, forward), (x, cast, like)


def _project_backward(contracted, out_dtype, forward, residuals, g):
    del out_dtype, forward
    x, cast, like = residuals
    g = g.astype(x.dtype)
    dx = dot(g, cast, _last(g, cast.ndim - contracted), range(contracted, cast.ndim), x.dtype)
    leading = range(x.ndim - contracted)
    wide = jnp.promote_types(x.dtype, like.dtype)  # a matmul with fp32 operands has no narrower product
    return dx, dot(x, g, leading, leading, wide).astype(like.dtype), None


_project.defvjp(_project_forward, _project_backward)


def _last(x: jax.Array, n: int) -> range:
    return range(x.ndim - n, x.ndim)
