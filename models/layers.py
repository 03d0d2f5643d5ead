"""Building blocks of the transformer models: parameters, norms and projections.

Every parameter carries its logical axes as nnx metadata (`out_sharding`), and every large activation is constrained by
logical axes. A parameter may be stacked over layers: it then has a leading `layers` dim, over which a scan runs.

**Precision rule.** A layer computes in the dtype of its activations, and the gradient of a weight is *produced*, and
therefore reduced over the mesh, in the dtype of the weight that the layer was given. So the caller chooses the
precision of the gradient reduction by passing fp32 or bf16 weights, and the matmuls run in bf16 either way.
`models.fp8`, `models.mxfp8` and `models.nvfp4` follow the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from meshkit.parallel.collective_matmul import gather_matmul, matmul_cut, matmul_scatter
from meshkit.sharding import constrain, current_scope, sharding_scope
from models import fp8 as one_scale
from models import mxfp8 as block_scales
from models import nvfp4 as four_bits
from models.attention import NATURAL, TokenOrder
from models.fp8 import Layouts
from models.matmul import project

RESIDUAL_AXES = ("act_batch", "act_residual_length", "act_embed")  # axes of the residual stream between blocks
WHOLE_AXES = ("act_batch", "act_length", "act_embed")  # axes of the input of a block's matmuls
PROJECTION = "projection"  # the name of every projection's output in recomputation policies


def parameter(rngs: nnx.Rngs, init: jax.nn.initializers.Initializer, shape, axes, *, stack: int | None) -> nnx.Param:
    """Return an fp32 parameter with a logical axis for each dim; `stack` adds a leading `layers` dim.

    flax must not shard by these names itself (`eager_sharding`): they are logical axes, and no mesh is set.
    """
    if stack is not None:
        shape, axes = (stack, *shape), ("layers", *axes)
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), out_sharding=tuple(axes), eager_sharding=False)


class RMSNorm(nnx.Module):
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * scale, computed in fp32 (Zhang and Sennrich, 2019).

    Args:
        size: size of the last dim.
        axis: logical axis of the last dim.
    """

    def __init__(self, size: int, *, eps: float, stack: int | None = None, axis: str = "embed", rngs: nnx.Rngs):
        self.eps = eps
        self.scale = parameter(rngs, jax.nn.initializers.ones, (size,), (axis,), stack=stack)

    def __call__(self, x: Float[Array, "*dims size"]) -> Float[Array, "*dims size"]:
        h = x.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        return (h * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True)
class Matmuls:
    """How projections multiply.

    Attributes:
        fp8: multiply in fp8, see `models.fp8`.
        fp8_scaling: source of fp8's scales, `current` or `delayed`.
        mxfp8: multiply in MXFP8, see `models.mxfp8`.
        nvfp4: multiply in NVFP4, see `models.nvfp4`.
        collective: hide the gathers and scatters of sequence parallelism, which cuts the length between blocks, behind
            the matmuls, see `meshkit.parallel.collective_matmul`.

    Raises:
        ValueError: options that exclude each other, or delayed scaling without fp8.
    """

    fp8: bool = False
    fp8_scaling: str = "current"
    mxfp8: bool = False
    nvfp4: bool = False
    collective: bool = False

    def __post_init__(self):
        if self.fp8_scaling not in ("current", "delayed"):
            raise ValueError(f"fp8_scaling = '{self.fp8_scaling}' is neither current nor delayed.")
        if self.delayed and not self.fp8:
            raise ValueError("fp8_scaling = 'delayed' needs fp8, which is off.")
        if self.fp8 + self.mxfp8 + self.nvfp4 > 1:
            raise ValueError("fp8, mxfp8 and nvfp4 exclude each other: choose one.")
        if self.few_bits and self.collective:
            raise ValueError("collective_matmul multiplies in bf16 or fp32, not in fp8 or fp4: choose one.")

    @property
    def delayed(self) -> bool:
        """Whether scales come from a history."""
        return self.fp8_scaling == "delayed"

    @property
    def few_bits(self) -> Any:
        """The module whose `project_each` multiplies in 8 or 4 bits; None for 16 or 32 bits."""
        return one_scale if self.fp8 else block_scales if self.mxfp8 else four_bits if self.nvfp4 else None


PLAIN = Matmuls()


class Projection(nnx.Module):
    """A linear map from the trailing `inputs` dims to the `outputs` dims, e.g. embed -> heads, head_dim.

    Args:
        name: scope of the matmul in HLO, and name of its output in recomputation policies.
        inputs: logical axis -> size, of the dims that are contracted.
        outputs: logical axis -> size, of the dims that replace them.
        scale: factor on the 1/sqrt(fan_in) standard deviation of the initial weights.
        matmuls: how the projection multiplies.
        bias: add a bias, zero at first. It is added in its own dtype, in which its gradient is therefore reduced.
    """

    def __init__(
        self,
        name: str,
        inputs: dict,
        outputs: dict,
        *,
        stack: int | None = None,
        scale=1.0,
        matmuls: Matmuls = PLAIN,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        self.name, self.contracted, self.matmuls = name, len(inputs), matmuls
        self.rows, self.columns = next(iter(inputs.items())), next(iter(outputs.items()))
        stddev = scale / math.sqrt(math.prod(inputs.values()))
        shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
        self.kernel = parameter(rngs, jax.nn.initializers.normal(stddev), shape, axes, stack=stack)
        if matmuls.delayed:
            self.amaxes = one_scale.new_history(stack)
        if bias:
            zeros = jax.nn.initializers.zeros
            self.bias = parameter(rngs, zeros, (*outputs.values(),), (*outputs,), stack=stack)

    def __call__(self, x: jax.Array, out_dtype=None) -> jax.Array:
        kernel = self.kernel.get_value()
        with jax.named_scope(self.name):
            if self.matmuls.collective and (cut := matmul_cut(x.shape[1], self.rows)):
                return self.mark(matmul_scatter(cut, x, kernel, self.contracted))
            if self.matmuls.few_bits:
                pinned = {"outputs": _pinned(RESIDUAL_AXES), "gradients": _pinned(WHOLE_AXES)}
                layouts = Layouts(**pinned) if self.columns[0] == "embed" else Layouts()
                (y,) = _in_few_bits(x, [self], out_dtype or x.dtype, layouts)
                return self.mark(y)
            y = project(x, kernel, self.contracted, out_dtype or x.dtype)
            return self.mark(_scattered(y) if self.columns[0] == "embed" else y)

    def mark(self, y: jax.Array) -> jax.Array:
        """Name the output for recomputation policies: PROJECTION without the bias, the projection's name with it."""
        if not hasattr(self, "bias"):
            return checkpoint_name(checkpoint_name(y, self.name), PROJECTION)
        y = checkpoint_name(y, PROJECTION)
        return checkpoint_name((y + self.bias.get_value()).astype(y.dtype), self.name)


def project_each(x: jax.Array, *projections: Projection) -> tuple[jax.Array, ...]:
    """Return the outputs of several projections of x [batch, length, embed], which may be cut along length.

    Collective matmuls gather x while they multiply, once for all projections. 8-bit matmuls gather x in 8 bits. Others
    gather x before they multiply.
    """
    kernels = [p.kernel.get_value() for p in projections]
    name, cut = "_".join(p.name for p in projections), None
    if projections[0].matmuls.collective:
        cut = matmul_cut(x.shape[1], *(p.columns for p in projections))
    with jax.named_scope(name):
        if cut is not None:
            outputs = gather_matmul(cut, x, kernels)
        elif projections[0].matmuls.few_bits:
            layouts = Layouts(inputs=_pinned(RESIDUAL_AXES), multiplied=_pinned(WHOLE_AXES))
            outputs = _in_few_bits(x, projections, x.dtype, layouts)
        else:
            x = for_matmuls(x)
            outputs = [project(x, kernel, 1, x.dtype) for kernel in kernels]
    return tuple(p.mark(y) for p, y in zip(projections, outputs))


def _in_few_bits(x: jax.Array, projections: Sequence[Projection], out_dtype, layouts: Layouts):
    first = projections[0]
    histories = [[p.amaxes.get_value() for p in projections]] if first.matmuls.delayed else []
    kernels = [p.kernel.get_value() for p in projections]
    return first.matmuls.few_bits.project_each(x, kernels, first.contracted, out_dtype, layouts, *histories)


def dropout(x: jax.Array, rate: float, key: Any, place: int = 0, order: TokenOrder = NATURAL) -> jax.Array:
    """Zero each number of x [batch, length, embed] with probability `rate`, and divide the others by 1 - rate
    (Srivastava et al., 2014).

    Threefry draws the mask, not the Philox of `rbg`: each number of a mask is a hash of its place in the global array,
    so a GPU draws only its own piece, and every mesh draws the same mask. The numbers of `rbg` are not cut along with
    an array. Where `jax.checkpoint` keeps no mask (one byte a number), a recomputed layer draws the same mask again.

    Args:
        key: random key of the step, the micro-batch and the layer; None drops nothing.
        place: number of this dropout within the layer.
        order: order of the tokens; a mask depends on their positions in the sequence.
    """
    if key is None:
        return x
    key = jax.random.fold_in(key, place)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, order.positions(x.shape[1]))
    bits = jax.vmap(lambda key: jax.random.bits(key, (x.shape[0], x.shape[2])), out_axes=1)(keys)
    kept = constrain(bits >= jnp.uint32(int(rate * 2**32)), *RESIDUAL_AXES)
    scaled = x.astype(jnp.float32) * (1 / (1 - rate))  # in bf16 1 / 0.9 would be 0.2 % too small
    return jnp.where(kept, scaled, 0.0).astype(x.dtype)


def training_key(rate: float, deterministic: bool, key: Any) -> Any:
    """Return the dropout key of a model's call; None if nothing is dropped.

    Raises:
        ValueError: the model trains with dropout, but was called without a key.
    """
    if not rate or deterministic:
        return None
    if key is None:
        raise ValueError(f"dropout = {rate} draws in training: call model(tokens, key=rng), or model.eval() before.")
    return key


def layer_keys(key: Any, layers: int) -> Any:
    """Return keys [layers], equal to those of a pipeline's stages: `fold_in(key, layer)`; None without a key."""
    return None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(layers))


def for_matmuls(x: jax.Array) -> jax.Array:
    """Return the input of matmuls: whole along embed, and along the length that sequence parallelism cuts."""
    # Without the first constraint XLA gathers before the cast that ends a norm, and moves fp32.
    return constrain(constrain(x, *RESIDUAL_AXES), *WHOLE_AXES)


def depth_scale(layers: int) -> float:
    """Return the scale that keeps the residual variance at any depth, at 2 additions a layer (Radford et al., 2019)."""
    return 1 / math.sqrt(2 * layers)


def _scattered(y: jax.Array) -> jax.Array:
    """Lay out the output of a row-parallel projection as the residual stream, if context and tensor axes both cut it.

    Constrained to be whole over the tensor axis first, the output gets one reduce-scatter over it. If asked for both
    cuts at once, the partitioner gathers the kernel over the tensor axis and the activations over the context axis.
    """
    scope = current_scope()
    if scope is None or y.ndim != len(RESIDUAL_AXES):
        return y
    length, residual = (scope.shard_count(name) for name in ("act_length", "act_residual_length"))
    return constrain(constrain(y, *WHOLE_AXES), *RESIDUAL_AXES) if 1 < length < residual else y


def _pinned(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    """Return `constrain` bound to the current scope, for a backward pass that is traced outside of the scope."""
    scope = current_scope()

    def pin(x: jax.Array) -> jax.Array:
        if scope is None:
            return x
        with sharding_scope(scope.mesh, scope.rules):
            return constrain(x, *axes)

    return pin
