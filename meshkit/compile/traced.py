"""Count the floating-point operations (FLOP) of a traced step, and find results that it computes and drops."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from meshkit.hlo.costs import visible_share

# Prefixes of the primitives of cuDNN attention.
_ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")
# `jax.nn.scaled_matmul` multiplies [batch, m, k] by [batch, n, k].
_BLOCK_SCALED = ("scaled_matmul", "scaled_matmul_wrapper")
_RECOMPUTED = "rematted_computation"  # jax's name for the computation that jax.checkpoint repeats
# Weights of the fields of `TracedFlops`: FLOP of block-scaled matmuls count in all fields, other FLOP not in the last.
_UNSCALED, _SCALED = np.array([1.0, 1.0, 1.0, 0.0]), np.ones(4)


@dataclass(frozen=True)
class TracedFlops:
    """FLOP of one call of a step over all GPUs, counted in the traced jaxpr.

    Attributes:
        executed: includes every recomputation, and the part of an attention that its mask leaves: half if it is causal,
            the band of a sliding window. A compiled program that executes more FLOP repeats work on several GPUs.
        model: excludes the recomputation of `jax.checkpoint`. Attention counts in full, as if it had no mask, and its
            backward pass counts as two forward passes. This is the convention of `step.program`.
        model_causal: like `model`, but without the attention scores that the mask hides: half of causal attention
            counts, and only the band of a sliding window.
        block_scaled: the part of `executed` in block-scaled matmuls (`jax.nn.scaled_matmul`, `jax.lax.scaled_dot`).
    """

    executed: float
    model: float
    model_causal: float
    block_scaled: float = 0.0


def traced_flops(jaxpr: Any) -> TracedFlops | None:
    """Return the FLOP of a (closed) jaxpr; None if it has a loop or kernel whose work cannot be counted.

    Matmuls, convolutions and fused attention count; those in a loop count once for each iteration. Operations whose
    result is not used do not count.
    """
    try:
        used, _ = partial_eval.dce_jaxpr(plain := getattr(jaxpr, "jaxpr", jaxpr), [True] * len(plain.outvars))
        found = _count(used)
    except _Uncountable:
        return None
    return TracedFlops(*map(float, found))


def dead_updates(jaxpr: Any) -> tuple[str, ...]:
    """Return the types (`f32[64,256]`) of input matrices for which the step computes new values that it drops.

    Such a step computes gradients or new parameters and does not return them, so its compiled program leaves that work
    out. The result is empty if the step returns any matrix with the type of an input.
    """
    plain = getattr(jaxpr, "jaxpr", jaxpr)
    entering = {v.aval.str_short(short_dtypes=True) for v in plain.invars if _is_matrix(v.aval)}
    if any(v.aval.str_short(short_dtypes=True) in entering for v in plain.outvars):
        return ()
    used, _ = partial_eval.dce_jaxpr(plain, [True] * len(plain.outvars))
    made, kept = collections.Counter(_made(plain)), collections.Counter(_made(used))
    dropped = sorted(name for name in entering if made[name] > kept[name])
    # If other new values of a type are used, the dropped ones may be activations of a parameter's type. Such types are
    # named only if there is no type of which all new values are dropped.
    return tuple([name for name in dropped if not kept[name]] or dropped)


def _is_matrix(aval: Any) -> bool:
    return len(getattr(aval, "shape", ())) > 1 and jnp.issubdtype(aval.dtype, jnp.inexact)


def _made(jaxpr: Any) -> Iterator[str]:
    """Yield the type of every matrix that an equation makes, in a jaxpr and in the jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield from (v.aval.str_short(short_dtypes=True) for v in equation.outvars if _is_matrix(v.aval))
        for inner in _jaxprs(equation.params):
            yield from _made(inner)


class _Uncountable(Exception):
    """The jaxpr has a loop of unknown length around matmuls, or a custom kernel of the user."""


def _count(jaxpr: Any, manual: frozenset[str] = frozenset()) -> np.ndarray:
    """Return the fields of `TracedFlops` for a jaxpr.

    `manual` has the mesh axes of the enclosing shard_maps. Callers multiply the result by the sizes of these axes.
    """
    return sum((_of_equation(equation, manual) for equation in jaxpr.eqns), np.zeros(4))


def _of_equation(equation: Any, manual: frozenset[str]) -> np.ndarray:
    """Return the fields of `TracedFlops` for one equation with its inner jaxprs.

    Raises:
        _Uncountable: the work of a loop or kernel is unknown.
    """
    found = _executed(equation, manual)
    if any(getattr(part, "name", "") == _RECOMPUTED for part in equation.source_info.name_stack.stack):
        return found * (1.0, 0.0, 0.0, 1.0)
    return found


def _executed(equation: Any, manual: frozenset[str]) -> np.ndarray:
    """Return the fields of an equation as if it were no part of a recomputation; equations inside it may be."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _UNSCALED * _of_dot(equation)
    if name == "scaled_dot":
        return _SCALED * _of_dot(equation)
    if name == "ragged_dot_general" or name == "ragged_dot":
        left, right = (v.aval.shape for v in equation.invars[:2])
        return _UNSCALED * (2.0 * math.prod(left) * right[-1])
    if name in _BLOCK_SCALED:
        left, right = (v.aval.shape for v in equation.invars[:2])
        return _SCALED * (2.0 * math.prod(left) * right[1])
    if name == "conv_general_dilated":
        return _UNSCALED * _of_convolution(equation)
    if name.startswith(_ATTENTION):
        return _of_attention(equation)
    if name == "pallas_call" or name.startswith("mosaic_gpu"):
        raise _Uncountable
    times = params.get("length", 1) if name == "scan" else 1
    if name == "shard_map":
        named = params.get("newly_manual_axes") or params.get("manual_axes")  # the key in jax 0.12, or in older jax
        axes = frozenset(named or params["mesh"].axis_names)
        times, manual = math.prod(params["mesh"].shape[axis] for axis in axes - manual), manual | axes
    inner = [_count(j, manual) for j in _jaxprs(params)]
    if name == "while" and any(map(np.any, inner)):
        raise _Uncountable
    most = max(inner, key=lambda one: one[0], default=np.zeros(4))
    if name == "cond":
        return most
    return times * (most if name.startswith("custom_") else sum(inner, np.zeros(4)))


def _jaxprs(params: Any) -> list[Any]:
    """Return the jaxprs among the parameters of an equation, including those in tuples and lists."""
    values = [inner for v in params.values() for inner in (v if isinstance(v, tuple | list) else (v,))]
    jaxprs = [getattr(v, "jaxpr", v) for v in values]
    return [j for j in jaxprs if hasattr(j, "eqns")]


def _of_dot(equation: Any) -> float:
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    left, right = (v.aval.shape for v in equation.invars[:2])
    shared = math.prod(left[d] for d in (*contracted, *batched))
    parts = 4.0 if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.complexfloating) else 1.0
    return 2.0 * parts * math.prod(left) * math.prod(right) / max(1, shared)


def _of_convolution(equation: Any) -> float:
    """Return the FLOP of a convolution: 2 for each multiplication, without those by zeros that dilation inserts.

    Along each spatial dimension the number of multiplications is the product of the two smallest sizes among input,
    kernel and output. The forward pass and both backward passes thus have the same FLOP, as in `hlo.costs`.
    """
    numbers = equation.params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    shapes = [v.aval.shape for v in (*equation.invars[:2], *equation.outvars)]
    left, kernel, out = ([shape[d] for d in spec] for shape, spec in zip(shapes, specs, strict=True))
    pairs = math.prod(math.prod(sorted(sizes)[:2]) for sizes in zip(left[2:], kernel[2:], out[2:], strict=True))
    return 2.0 * out[0] * out[1] * kernel[1] * pairs


def _of_attention(equation: Any) -> np.ndarray:
    """Return the fields for fused attention: two matmuls forward, and five backward, of which the model needs four.

    `hlo.costs` counts cuDNN's calls in the same way.
    """
    query, key, value = (v.aval.shape for v in equation.invars[:3])
    names = equation.params.get("layout", 0)
    batch, length, heads, head_dim = query if names == 0 else (query[0], query[2], query[1], query[3])
    keys = key[1] if names == 0 else key[2]
    mask = str(equation.params.get("mask_type", "")).upper()
    share = visible_share(keys, "CAUSAL" in mask, equation.params.get("sliding_window_length") or 0)
    forward = 2.0 * batch * heads * length * keys * (head_dim + value[-1])
    backward, scores = "bwd" in equation.primitive.name, 2.0 * batch * heads * length * keys * head_dim
    executed, model = (2 * forward + scores, 2 * forward) if backward else (forward, forward)
    return np.array((executed * share, model, model * share, 0.0))
