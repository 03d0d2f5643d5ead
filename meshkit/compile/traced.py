"""FLOP of a program as it was traced, before any compiler: what a compiled one is held against.

Counted over all GPUs: matmuls, convolutions and fused attention, loops as often as they run, what is recomputed as
often as it is, and nothing whose result nobody uses. A compiled program that executes more repeats work on several
GPUs, one that executes less was not read right.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.interpreters import partial_eval

_ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")


def traced_flops(jaxpr: Any) -> float | None:
    """FLOP of a (closed) jaxpr over all GPUs; None where it holds a loop or kernel whose work cannot be counted."""
    try:
        used, _ = partial_eval.dce_jaxpr(plain := getattr(jaxpr, "jaxpr", jaxpr), [True] * len(plain.outvars))
        return _count(used)
    except _Uncountable:
        return None


class _Uncountable(Exception):
    """A loop of unknown length around matmuls, or a kernel of the user's own."""


def _count(jaxpr: Any, manual: frozenset[str] = frozenset()) -> float:
    """FLOP of a jaxpr; `manual` are the mesh axes of the shard_maps around, counted already."""
    return sum(_of_equation(equation, manual) for equation in jaxpr.eqns)


def _of_equation(equation: Any, manual: frozenset[str]) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _of_dot(equation)
    if name == "ragged_dot_general" or name == "ragged_dot":
        left, right = (v.aval.shape for v in equation.invars[:2])
        return 2.0 * math.prod(left) * right[-1]
    if name == "conv_general_dilated":
        return _of_convolution(equation)
    if name.startswith(_ATTENTION):
        return _of_attention(equation)
    if name == "pallas_call" or name.startswith("mosaic_gpu"):
        raise _Uncountable
    times = params.get("length", 1) if name == "scan" else 1
    if name == "shard_map":
        named = params.get("newly_manual_axes") or params.get("manual_axes")  # in jax 0.12; before
        axes = frozenset(named or params["mesh"].axis_names)
        times, manual = math.prod(params["mesh"].shape[axis] for axis in axes - manual), manual | axes
    inner = [_count(j, manual) for j in _jaxprs(params)]
    if name == "while" and any(inner):
        raise _Uncountable
    if name == "cond":
        return max(inner, default=0.0)
    return times * (max(inner, default=0.0) if name.startswith("custom_") else sum(inner))


def _jaxprs(params: Any) -> list[Any]:
    """Jaxprs among the parameters of an equation, in tuples too."""
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
    kernel, numbers = equation.invars[1].aval.shape, equation.params["dimension_numbers"]
    features = kernel[numbers.rhs_spec[0]]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / max(1, features)


def _of_attention(equation: Any) -> float:
    """As hlo/costs.py counts a cuDNN call: two matmuls forward, five backward, half of them under a causal mask."""
    query, key = (v.aval.shape for v in equation.invars[:2])
    names = equation.params.get("layout", 0)
    batch, length, heads, head_dim = query if names == 0 else (query[0], query[2], query[1], query[3])
    keys = key[1] if names == 0 else key[2]
    mask = str(equation.params.get("mask_type", "")).upper()
    share = 0.5 if "CAUSAL" in mask else 1.0
    backward = 2.5 if "bwd" in equation.primitive.name else 1.0
    return 4.0 * batch * heads * length * keys * head_dim * share * backward
