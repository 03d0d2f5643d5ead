"""Building blocks of the transformer models: parameters, norms and projections.

Every parameter carries its logical axes as nnx metadata (`out_sharding`), every large activation is constrained by
logical axis. A parameter may be stacked over layers: a leading `layers` dim that a scan takes apart.

**Precision rule.** A layer computes in the dtype of its activations, and the gradient of a weight is *produced*, and
therefore reduced over the mesh, in the dtype of the weight that the layer was given. So the caller picks the precision
of the gradient reduction by passing fp32 or bf16 weights, and the matmuls run in bf16 either way.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

PROJECTION = "projection"  # the name under which recomputation policies know a projection's output


def parameter(rngs: nnx.Rngs, init: jax.nn.initializers.Initializer, shape, axes, *, stack: int | None) -> nnx.Param:
    """An fp32 parameter with a logical axis per dim; `stack` adds a leading `layers` dim.

    flax must not apply the names itself (`eager_sharding`): they are logical, and no mesh is around.
    """
    if stack is not None:
        shape, axes = (stack, *shape), ("layers", *axes)
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), out_sharding=tuple(axes), eager_sharding=False)


class RMSNorm(nnx.Module):
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * scale, computed in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, embed: int, *, eps: float, stack: int | None = None, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = parameter(rngs, jax.nn.initializers.ones, (embed,), ("embed",), stack=stack)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        return (h * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
    """A linear map without bias from the trailing `inputs` dims to the `outputs` dims, e.g. embed -> heads, head_dim.

    Args:
        name: shows in HLO as the scope of the matmul.
        inputs: logical axis -> size of the dims contracted away.
        outputs: logical axis -> size of the dims that come in their place.
        scale: factor on the 1/sqrt(fan_in) standard deviation of the initial weights.
    """

    def __init__(self, name: str, inputs: dict, outputs: dict, *, stack: int | None = None, scale=1.0, rngs: nnx.Rngs):
        self.name, self.contracted = name, len(inputs)
        stddev = scale / math.sqrt(math.prod(inputs.values()))
        shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
        self.kernel = parameter(rngs, jax.nn.initializers.normal(stddev), shape, axes, stack=stack)

    def __call__(self, x: jax.Array, out_dtype=None) -> jax.Array:
        with jax.named_scope(self.name):
            y = project(x, self.kernel.get_value(), self.contracted, out_dtype or x.dtype)
            return checkpoint_name(y, PROJECTION)


def project(x: jax.Array, kernel: jax.Array, contracted: int, out_dtype) -> jax.Array:
    """x contracted with the kernel over its first `contracted` dims, under the precision rule of this module.

    The kernel is cast once, outside of the custom_vjp, so that a recomputed forward pass and the backward pass share
    the cast kernel, and with it the all-gather that FSDP puts behind the cast.
    """
    return _project(x, kernel, lax.stop_gradient(kernel.astype(x.dtype)), contracted, out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _project(x, kernel, cast, contracted, out_dtype):
    del kernel  # takes the gradient
    return _dot(x, cast, _last(x, contracted), range(contracted), out_dtype)


def _project_forward(x, kernel, cast, contracted, out_dtype):
    like = jnp.zeros((), kernel.dtype)
    return _project(x, kernel, cast, contracted, out_dtype), (x, cast, like)


def _project_backward(contracted, out_dtype, residuals, g):
    x, cast, like = residuals
    g = g.astype(x.dtype)
    dx = _dot(g, cast, _last(g, cast.ndim - contracted), range(contracted, cast.ndim), x.dtype)
    leading = range(x.ndim - contracted)
    return dx, _dot(x, g, leading, leading, like.dtype), None


_project.defvjp(_project_forward, _project_backward)


def _dot(a, b, a_dims, b_dims, dtype) -> jax.Array:
    numbers = ((tuple(a_dims), tuple(b_dims)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=dtype)


def _last(x: jax.Array, n: int) -> range:
    return range(x.ndim - n, x.ndim)
