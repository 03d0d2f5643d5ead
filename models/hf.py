"""Hugging Face's layout of Llama, Mixtral and Qwen3: names of tensors and config keys, and how dims correspond.

`Llama.hf_layout` and `Moe.hf_layout` hand these tables to `meshkit.weights.files`, which streams the
weights. Both sides pair up the rotary dims by halves, so queries and keys need no permutation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from meshkit.errors import ConfigError
from meshkit.weights import files as weights
from meshkit.weights.layout import Layout, Row

# option of ours -> key of config.json
KEYS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
MOE_KEYS = {option: key for option, key in KEYS.items() if option != "tied"}
MOE_KEYS |= {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
_QWEN_MOE_KEYS = MOE_KEYS | {"mlp": "moe_intermediate_size", "experts": "num_experts"}
_KEYS = {"llama": KEYS, "mixtral": MOE_KEYS, "qwen3": KEYS, "qwen3_moe": _QWEN_MOE_KEYS}  # by model_type
_QWEN = ("qwen3", "qwen3_moe")
# What transformers takes a key for that config.json leaves out.
_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False, "head_dim": 128},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "norm_topk_prob": False},
}
# What our models do not do: key -> the values by which it is not asked for.
_UNSUPPORTED = {
    "quantization_config": (None,),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "norm_topk_prob": (True, None),
}

_LAYER = "model.layers.{layers}."
_COMMON = (
    Row("embedding", "model.embed_tokens.weight", "vocab embed", "vocab embed"),
    Row("layers/attention_norm/scale", _LAYER + "input_layernorm.weight", "embed", "layers embed"),
    Row(
        "layers/attention/query/kernel",
        _LAYER + "self_attn.q_proj.weight",
        "(heads head_dim) embed",
        "layers embed heads head_dim",
    ),
    Row(
        "layers/attention/key/kernel",
        _LAYER + "self_attn.k_proj.weight",
        "(kv_heads head_dim) embed",
        "layers embed kv_heads head_dim",
    ),
    Row(
        "layers/attention/value/kernel",
        _LAYER + "self_attn.v_proj.weight",
        "(kv_heads head_dim) embed",
        "layers embed kv_heads head_dim",
    ),
    Row(
        "layers/attention/output/kernel",
        _LAYER + "self_attn.o_proj.weight",
        "embed (heads head_dim)",
        "layers heads head_dim embed",
    ),
    Row("layers/mlp_norm/scale", _LAYER + "post_attention_layernorm.weight", "embed", "layers embed"),
    Row("norm/scale", "model.norm.weight", "embed", "embed"),
)
_QK_NORMS = (
    Row("layers/attention/query_norm/scale", _LAYER + "self_attn.q_norm.weight", "head_dim", "layers head_dim"),
    Row("layers/attention/key_norm/scale", _LAYER + "self_attn.k_norm.weight", "head_dim", "layers head_dim"),
)
_HEAD = Row("head/kernel", "lm_head.weight", "vocab embed", "embed vocab")
_SWIGLU = (
    Row("layers/mlp/gate/kernel", _LAYER + "mlp.gate_proj.weight", "mlp embed", "layers embed mlp"),
    Row("layers/mlp/up/kernel", _LAYER + "mlp.up_proj.weight", "mlp embed", "layers embed mlp"),
    Row("layers/mlp/down/kernel", _LAYER + "mlp.down_proj.weight", "embed mlp", "layers mlp embed"),
)
_SPARSE, _EXPERT = _LAYER + "block_sparse_moe.", _LAYER + "block_sparse_moe.experts.{experts}."
_EXPERTS = (
    Row("layers/moe/router/kernel", _SPARSE + "gate.weight", "experts embed", "layers embed experts"),
    Row("layers/moe/experts/gate", _EXPERT + "w1.weight", "mlp embed", "layers experts embed mlp"),
    Row("layers/moe/experts/up", _EXPERT + "w3.weight", "mlp embed", "layers experts embed mlp"),
    Row("layers/moe/experts/down", _EXPERT + "w2.weight", "embed mlp", "layers experts mlp embed"),
)
_OF_EXPERT = _LAYER + "mlp.experts.{experts}."
_QWEN_EXPERTS = (
    Row("layers/moe/router/kernel", _LAYER + "mlp.gate.weight", "experts embed", "layers embed experts"),
    Row("layers/moe/experts/gate", _OF_EXPERT + "gate_proj.weight", "mlp embed", "layers experts embed mlp"),
    Row("layers/moe/experts/up", _OF_EXPERT + "up_proj.weight", "mlp embed", "layers experts embed mlp"),
    Row("layers/moe/experts/down", _OF_EXPERT + "down_proj.weight", "embed mlp", "layers experts mlp embed"),
)
# The names that transformers 5 has in memory, and writes with `save_original_format=False`.
_GATE_UP, _STACK = _LAYER + "mlp.experts.gate_up_proj", "layers experts embed mlp"
_FUSED_EXPERTS = (
    Row("layers/moe/router/kernel", _LAYER + "mlp.gate.weight", "experts embed", "layers embed experts"),
    Row("layers/moe/experts/gate", _GATE_UP, "experts (part mlp) embed", _STACK, part=(0, 2)),
    Row("layers/moe/experts/up", _GATE_UP, "experts (part mlp) embed", _STACK, part=(1, 2)),
    Row("layers/moe/experts/down", _LAYER + "mlp.experts.down_proj", "experts embed mlp", "layers experts mlp embed"),
)
_ROTARY = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # in files of old versions; follows from rope_theta


def llama_layout(config: Any) -> Layout:
    """Layout of `LlamaForCausalLM` for a LlamaConfig; of `Qwen3ForCausalLM` where queries and keys are normalized."""
    rows = (*_COMMON, *_SWIGLU, *(() if config.tied else (_HEAD,)))
    copies = {_HEAD.name: "model.embed_tokens.weight"} if config.tied else {}
    if config.qk_norm:
        written = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
        return _layout(config, (*rows, *_QK_NORMS), written | {"attention_bias": False}, copies=copies)
    written = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return _layout(config, rows, written | {"attention_bias": False, "mlp_bias": False}, copies=copies)


def moe_layout(config: Any) -> Layout:
    """Layout of `MixtralForCausalLM` for a MoeConfig; of `Qwen3MoeForCausalLM` where queries and keys are normalized.

    Raises:
        ConfigError: the model has shared experts, which neither has.
    """
    kind = "Qwen3Moe" if config.qk_norm else "Mixtral"
    if config.shared_experts:
        message = f"a {kind} has no shared experts, but the model has {config.shared_experts}."
        raise ConfigError(message, hint="model.shared_experts = 0")
    written = {"architectures": [f"{kind}ForCausalLM"], "hidden_act": "silu", "tie_word_embeddings": False}
    written |= {"sliding_window": None, "router_aux_loss_coef": config.load_balance_weight}
    common, experts = (*_COMMON, _HEAD), _EXPERTS
    if config.qk_norm:
        common, experts = (*common, *_QK_NORMS), _QWEN_EXPERTS
        written |= {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        written |= {"attention_bias": False, "intermediate_size": config.mlp}  # of layers without experts: none
    else:
        written |= {"model_type": "mixtral"}
    return _layout(config, (*common, *experts), written, others=((*common, *_FUSED_EXPERTS),))


def _layout(config: Any, rows: tuple[Row, ...], written: Mapping[str, Any], **more) -> Layout:
    kind = str(written["model_type"])
    keys = _KEYS[kind]
    options = {option: getattr(config, option) for option in (*keys, "qk_norm")}
    written = {**written, **{key: options[option] for option, key in keys.items()}}
    # transformers 4 reads rope_theta, transformers 5 rope_parameters.
    written["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return Layout(
        rows=rows,
        sizes={option: value for option, value in options.items() if type(value) is int},
        config=written,
        options=options,
        read_config=lambda theirs: _options(theirs, kind),
        keys=keys,
        computed=_ROTARY,
        **more,
    )


def read_options(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The options of `Llama`, `Moe` or `DeepSeek` that a folder's config.json amounts to.

    Raises:
        ConfigError: no config.json, another architecture, or one with a feature that our models do not have.
    """
    from models import deepseek_hf  # which imports this module

    config = weights.read_config(folder)
    kind = str(config.get("model_type"))
    try:
        return deepseek_hf.read_options(config) if kind == "deepseek_v3" else _options(config, kind)
    except ConfigError as error:
        raise ConfigError(error.message, at=str(Path(folder) / weights.CONFIG), hint=error.hint) from None


def _options(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Our options, of a config.json that must be of one kind of model."""
    if config.get("model_type") != kind or kind not in _DEFAULTS:
        wanted = f"'{kind}'" if kind in _DEFAULTS else " or ".join(map(repr, _DEFAULTS))
        message = f"model_type = {_show(config.get('model_type'))} is not {wanted}."
        raise ConfigError(message, hint="weights of that architecture")
    values = {**_DEFAULTS[kind], **config}
    for key, harmless in _UNSUPPORTED.items():
        if values.get(key) not in harmless:
            message = f"{key} = {_show(values[key])} asks for what our {kind} does not do."
            raise ConfigError(
                message, hint="weights that were trained without it; ignoring it would change every logit"
            )
    keys = _KEYS[kind]
    if "tied" not in keys and config.get("tie_word_embeddings"):
        raise ConfigError(f"tie_word_embeddings = True, but our {kind} has a head of its own.")
    values |= _rotary(config)
    if values.get("num_experts") is None:  # transformers 5 calls them by Mixtral's name
        values["num_experts"] = values.get("num_local_experts")
    if values.get("num_key_value_heads") is None and kind == "llama":
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if values.get("head_dim") is None:
        values["head_dim"] = _size(values, "hidden_size") // _size(values, "num_attention_heads")
    return {option: _value(values, option, key) for option, key in keys.items()} | {"qk_norm": kind in _QWEN}


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_theta`, from where this version of transformers wrote it; scaled positions are refused."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if table is None:
            continue
        kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, dict) else table
        if kind != "default":
            message = f"{key} asks for rotary positions of type {_show(kind)}, which our models do not have."
            raise ConfigError(message, hint="weights with plain rotary positions; ignoring it would change every logit")
        if isinstance(table, dict) and table.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{key} turns a part of each head only, which our models do not do.")
        found |= {"rope_theta": table["rope_theta"]} if "rope_theta" in table else {}
    return found


def _value(values: Mapping[str, Any], option: str, key: str) -> Any:
    if option == "tied":
        if not isinstance(values[key], bool):
            raise ConfigError(f"{key} = {_show(values[key])} is neither true nor false.")
        return values[key]
    return _positive(values, key) if option in ("rope_theta", "norm_eps") else _size(values, key)


def _positive(values: Mapping[str, Any], key: str) -> float:
    """A positive number out of a config.json; raises ConfigError for anything else."""
    number = values.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e30:
        raise ConfigError(f"{key} = {_show(number)} is not a positive number.")
    return float(number)


def _size(values: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1 out of a config.json; raises ConfigError for anything else."""
    size = values.get(key)
    if type(size) is not int or size < 1:
        raise ConfigError(f"{key} = {_show(size)} is not a whole number of at least 1.")
    return size


def _show(value: Any) -> str:
    """A value out of an untrusted file, as a message may show it."""
    return weights.shown(value if value is None or not isinstance(value, str) else repr(value))


def export(model: nnx.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Writes a Llama, Moe or DeepSeek as a folder that `transformers` loads with `from_pretrained`.

    Args:
        model: with its weights, sharded in any way.
        folder: must not exist yet, or be empty.
        options: `dtype` and `max_shard_bytes` of `meshkit.weights.files.write_weights`; its errors.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    weights.write_weights(params, folder, model.hf_layout(), **options)  # pyright: ignore[reportAttributeAccessIssue]
