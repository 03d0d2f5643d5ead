"""Model FLOPs of a training step, the numerator of MFU.

    model_flops = 6 N tokens + 12 layers heads head_dim T tokens        (Chowdhery et al., 2022, appendix B)

N counts the parameters that multiply activations: the output head does, a tied table once, an input look-up not. The
second term is attention's two matmuls over a full T x T square; a causal kernel computes half of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class ModelFlops:
    """Work of one training step over all GPUs.

    Attributes:
        matmul_parameters: N.
        model_flops: 6 N tokens + the whole attention square.
        model_flops_causal: the same with half of the attention term.
        source: `model` when the model describes itself (`matmul_parameters`, `attention_shape`), else `shapes`: N is
            then every parameter of two dims or more, and there is no attention term.
    """

    matmul_parameters: int
    model_flops: float
    model_flops_causal: float
    source: str


def count_model_flops(model: Any, abstract_params: Any, tokens: int, sequence_length: int) -> ModelFlops:
    """ModelFlops of a step on `tokens` tokens in sequences of `sequence_length`.

    Args:
        model: may have `matmul_parameters() -> int` and `attention_shape() -> (layers, heads, head_dim)`.
        abstract_params: tree of its parameters, for a model that has not.
        tokens: of one step, over all GPUs.
        sequence_length: T.
    """
    described = hasattr(model, "matmul_parameters")
    if described:
        n = int(model.matmul_parameters())
    else:
        n = sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params) if len(p.shape) >= 2)
    layers, heads, head_dim = model.attention_shape() if hasattr(model, "attention_shape") else (0, 0, 0)
    dense = 6.0 * n * tokens
    attention = 12.0 * layers * heads * head_dim * sequence_length * tokens
    return ModelFlops(n, dense + attention, dense + attention / 2, "model" if described else "shapes")
