"""Presets: named tables of rules over the axis names that the shipped configs use.

A mesh need not have every axis that a preset names: the missing ones are left out. `meshkit explain E --rules` prints
what a preset gives on a mesh. Sources of the schemes: ZeRO 1 to 3, Rajbhandari et al. 2020; FSDP and its hybrid form,
Zhao et al. 2023; tensor parallelism, Shoeybi et al. 2019; sequence parallelism, Korthikanti et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BATCH = ("data", "fsdp")
_TENSOR = dict.fromkeys(
    ("heads", "kv_heads", "mlp", "vocab", "act_heads", "act_kv_heads", "act_mlp", "act_vocab"), "tensor"
)
_FSDP = {"act_batch": _BATCH, "embed": "fsdp"}
_CONTEXT = {"act_length": "context", "act_residual_length": ("context", "tensor")}
_EXPERT = {"act_batch": (*_BATCH, "expert"), "experts": "expert", "act_experts": "expert"}

# ZeRO-1 and 2 cut what the optimizer works on (fp32 parameters and moments) over `data` and gather the weights once a
# step, in the compute dtype. They differ in the accumulators of gradients over micro-batches: whole on every GPU and
# reduced once a step, or cut and reduced with every micro-batch.
_ZERO_1 = {"logical": {"act_batch": "data", "embed": "data"}, "compute": {"embed": "replicated"}}
_ZERO_2 = {**_ZERO_1, "gradients": {"embed": "data"}}

# preset -> table of the rules -> logical axis -> mesh axes
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "data": {"logical": {"act_batch": "data"}},
    "zero1": _ZERO_1,
    "zero2": _ZERO_2,
    "zero3": {"logical": _FSDP},
    "fsdp": {"logical": _FSDP},
    "hsdp": {"logical": _FSDP},
    "tensor": {"logical": {"act_batch": "data", **_TENSOR}},
    "tensor_sequence": {"logical": {"act_batch": "data", **_TENSOR, "act_residual_length": "tensor"}},
    "zero1_tensor": {**_ZERO_1, "logical": {**_ZERO_1["logical"], **_TENSOR}},
    "fsdp_tensor": {"logical": {**_FSDP, **_TENSOR}},
    "fsdp_tensor_sequence": {"logical": {**_FSDP, **_TENSOR, "act_residual_length": "tensor"}},
    "fsdp_context": {"logical": {**_FSDP, "act_length": "context", "act_residual_length": "context"}},
    "fsdp_expert": {"logical": {**_FSDP, **_EXPERT}},
    "all": {"logical": {**_FSDP, **_TENSOR, **_CONTEXT, **_EXPERT}},
}
