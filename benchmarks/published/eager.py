"""Memory passes that eager PyTorch makes beside what a compiled program makes. Sixth in the flow of the replay.

Counted from torchtitan's Llama of the version that its page names (pytorch/torchtitan@9dec370, models/norms.py and
models/llama/model.py), operator by operator, each reading and writing memory by itself; a compiled program fuses all of
a norm, a rotation or an activation into one kernel. Frameworks that bring fused kernels of their own (Megatron-LM,
InternEvo) have nothing to add: what they launch moves as many bytes as our program does (README.md).
"""

from __future__ import annotations

import re

from benchmarks.published.experiments import Run
from meshkit.config.cluster import Cluster
from meshkit.predict.kernels import memory_bytes_per_s

# Bytes an element, (all operators) - (one fused kernel).
# RMSNorm: x.float() 6, x * x 8, mean 4, x * rsqrt 8, type_as 6, times weight 4; its backward: weight 4 and 8, cast 6,
# products with rsqrt and with x 8 and 16, x * x 16 and 12, sum of both paths 12, cast 6.
_NORM, _NORM_BACK = 36 - 4, 88 - 6
_ROTATION = 20 - 4  # of queries and keys: float 6, complex product 8, type_as 6; backward alike
_REPEAT = 2  # keys and values copied for every head, summed again on the way back
_GATE, _GATE_BACK = 10 - 6, 18 - 10  # silu 4 and product 6; the product's two gradients 6 each, silu's 6
_RESIDUAL = 2  # an addition of its own 6, beside the norm behind it 4


def eager_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a step; 0 for a row that does not say `eager`, and for models without gate."""
    if not re.search(r"\beager\b", run.row.notes) or not run.shape.gated:
        return 0.0
    forward, backward = layer_bytes(run)
    again = 1 if run.document["train"]["remat"] == "none" else 2
    tokens = run.micro_batch * run.micro_batches * run.length / run.context
    layers = run.shape.layers / run.stages
    return tokens * layers * (again * forward + backward) / memory_bytes_per_s(cluster.gpu)


def layer_bytes(run: Run) -> tuple[float, float]:
    """Bytes a token and layer on one GPU, forward and backward, beyond those of fused kernels."""
    s = run.shape
    keys = s.keys
    cut = run.tensor if "act_residual_length" not in run.document["rules"].get("logical", {}) else 1
    heads = _ROTATION * (s.hidden + keys) + 2 * _REPEAT * s.hidden * (s.heads > s.kv_heads)
    forward = 2 * (_NORM + _RESIDUAL) * s.hidden / cut + (heads + _GATE * s.ffn) / run.tensor
    backward = 2 * _NORM_BACK * s.hidden / cut + (heads + _GATE_BACK * s.ffn) / run.tensor
    return forward, backward
