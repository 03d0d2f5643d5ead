"""Hugging Face's layout of Llama, Mixtral, Qwen3 and GPT-OSS: tensor names, config keys and the order of dims.

`Llama.hf_layout` and `Moe.hf_layout` pass these tables to `meshkit.weights.files`, which streams the weights. Both
formats pair rotary dims by halves, so queries and keys need no permutation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flax import nnx

from meshkit.errors import ConfigError
from meshkit.weights import files as weights
from meshkit.weights.layout import Layout, Row
from meshkit.weights.quantized import MXFP4_BLOCKS

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
_GPT_OSS_KEYS = MOE_KEYS | {"window": "sliding_window", "swiglu_limit": "swiglu_limit"}
_KEYS = {"llama": KEYS, "mixtral": MOE_KEYS, "qwen3": KEYS, "qwen3_moe": _QWEN_MOE_KEYS}  # by model_type
_KEYS |= {"gpt_oss": _GPT_OSS_KEYS}
_QWEN = ("qwen3", "qwen3_moe")
# transformers' defaults for keys that config.json leaves out.
_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False, "head_dim": 128},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "norm_topk_prob": False},
    "gpt_oss": {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "attention_bias": True, "swiglu_limit": 7.0},
}
# Features that our models do not have: key of config.json -> the values that do not ask for the feature.
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
_UNSUPPORTED_OF = {"gpt_oss": _UNSUPPORTED | {"attention_bias": (True,), "swiglu_alpha": (1.702, None)}}
for _ours in ("quantization_config", "sliding_window"):  # GPT-OSS files may be MXFP4, and all have a window
    del _UNSUPPORTED_OF["gpt_oss"][_ours]

_LAYER = "model.layers.{layers}."
ENDS = (
    Row("embedding", "model.embed_tokens.weight", "vocab embed", "vocab embed"),
    Row("norm/scale", "model.norm.weight", "embed", "embed"),
)
_COMMON = (
    *ENDS,
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
)
_QK_NORMS = (
    Row("layers/attention/query_norm/scale", _LAYER + "self_attn.q_norm.weight", "head_dim", "layers head_dim"),
    Row("layers/attention/key_norm/scale", _LAYER + "self_attn.k_norm.weight", "head_dim", "layers head_dim"),
)
HEAD = Row("head/kernel", "lm_head.weight", "vocab embed", "embed vocab")
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
QWEN_EXPERTS = (
    Row("layers/moe/router/kernel", _LAYER + "mlp.gate.weight", "experts embed", "layers embed experts"),
    Row("layers/moe/experts/gate", _OF_EXPERT + "gate_proj.weight", "mlp embed", "layers experts embed mlp"),
    Row("layers/moe/experts/up", _OF_EXPERT + "up_proj.weight", "mlp embed", "layers experts embed mlp"),
    Row("layers/moe/experts/down", _OF_EXPERT + "down_proj.weight", "embed mlp", "layers experts mlp embed"),
)
# Names that transformers 5 uses in memory, and writes with `save_original_format=False`.
_GATE_UP, _STACK = _LAYER + "mlp.experts.gate_up_proj", "layers experts embed mlp"
FUSED_EXPERTS = (
    Row("layers/moe/router/kernel", _LAYER + "mlp.gate.weight", "experts embed", "layers embed experts"),
    Row("layers/moe/experts/gate", _GATE_UP, "experts (part mlp) embed", _STACK, part=(0, 2)),
    Row("layers/moe/experts/up", _GATE_UP, "experts (part mlp) embed", _STACK, part=(1, 2)),
    Row("layers/moe/experts/down", _LAYER + "mlp.experts.down_proj", "experts embed mlp", "layers experts mlp embed"),
)
_PROJECTION_BIASES = tuple(
    Row(
        f"layers/attention/{ours}/bias",
        _LAYER + f"self_attn.{theirs}_proj.bias",
        "embed" if ours == "output" else f"({heads} head_dim)",
        "layers embed" if ours == "output" else f"layers {heads} head_dim",
    )
    for ours, theirs, heads in (
        ("query", "q", "heads"),
        ("key", "k", "kv_heads"),
        ("value", "v", "kv_heads"),
        ("output", "o", ""),
    )
)
_SINKS = Row("layers/attention/sinks", _LAYER + "self_attn.sinks", "heads", "layers heads")
_ROUTER_ROWS = (
    Row("layers/moe/router/kernel", _LAYER + "mlp.router.weight", "experts embed", "layers embed experts"),
    Row("layers/moe/router/bias", _LAYER + "mlp.router.bias", "experts", "layers experts"),
)
_EXPERT_BIASES = (
    Row("layers/moe/experts/gate_bias", _GATE_UP + "_bias", "experts (mlp part)", "layers experts mlp", part=(0, 2)),
    Row("layers/moe/experts/up_bias", _GATE_UP + "_bias", "experts (mlp part)", "layers experts mlp", part=(1, 2)),
    Row("layers/moe/experts/down_bias", _LAYER + "mlp.experts.down_proj_bias", "experts embed", "layers experts embed"),
)
_TURNED_EXPERTS = (  # gate and up alternate along the last dim
    Row("layers/moe/experts/gate", _GATE_UP, "experts embed (mlp part)", _STACK, part=(0, 2)),
    Row("layers/moe/experts/up", _GATE_UP, "experts embed (mlp part)", _STACK, part=(1, 2)),
    Row("layers/moe/experts/down", _LAYER + "mlp.experts.down_proj", "experts mlp embed", "layers experts mlp embed"),
)
_MXFP4_EXPERTS = (  # blocks lie along the dim that a matmul contracts
    Row("layers/moe/experts/gate", _GATE_UP + MXFP4_BLOCKS, "experts (mlp part) embed", _STACK, part=(0, 2)),
    Row("layers/moe/experts/up", _GATE_UP + MXFP4_BLOCKS, "experts (mlp part) embed", _STACK, part=(1, 2)),
    Row(
        "layers/moe/experts/down",
        _LAYER + "mlp.experts.down_proj" + MXFP4_BLOCKS,
        "experts embed mlp",
        "layers experts mlp embed",
    ),
)
_ROTARY = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # in files of old versions; computed from rope_theta


def llama_layout(config: Any) -> Layout:
    """Return the layout of `LlamaForCausalLM` for a LlamaConfig, or of `Qwen3ForCausalLM` if it has `qk_norm`."""
    rows = (*_COMMON, *_SWIGLU, *(() if config.tied else (HEAD,)))
    copies = {HEAD.name: "model.embed_tokens.weight"} if config.tied else {}
    if config.qk_norm:
        written = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
        return _layout(config, (*rows, *_QK_NORMS), written | {"attention_bias": False}, copies=copies)
    written = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return _layout(config, rows, written | {"attention_bias": False, "mlp_bias": False}, copies=copies)


def moe_layout(config: Any) -> Layout:
    """Return the layout of `MixtralForCausalLM` for a MoeConfig, or of `Qwen3MoeForCausalLM` if it has `qk_norm`.

    Raises:
        ConfigError: the model has shared experts, which neither has.
    """
    kind = "Qwen3Moe" if config.qk_norm else "Mixtral"
    if config.shared_experts:
        message = f"a {kind} has no shared experts, but the model has {config.shared_experts}."
        raise ConfigError(message, hint="model.shared_experts = 0")
    written = {"architectures": [f"{kind}ForCausalLM"], "hidden_act": "silu", "tie_word_embeddings": False}
    written |= {"sliding_window": None, "router_aux_loss_coef": config.load_balance_weight}
    common, experts = (*_COMMON, HEAD), _EXPERTS
    if config.qk_norm:
        common, experts = (*common, *_QK_NORMS), QWEN_EXPERTS
        written |= {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        written |= {"attention_bias": False, "intermediate_size": config.mlp}  # unused
    else:
        written |= {"model_type": "mixtral"}
    return _layout(config, (*common, *experts), written, others=((*common, *FUSED_EXPERTS),))


def gpt_oss_layout(config: Any) -> Layout:
    """Return the layout of `GptOssForCausalLM` for a GptOssConfig; it can read MXFP4 experts, not write them."""
    written = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu"}
    written |= {"attention_bias": True, "tie_word_embeddings": False, "layer_types": _layer_types(config.layers)}
    written |= {"router_aux_loss_coef": config.load_balance_weight}
    same = (*_COMMON, HEAD, *_PROJECTION_BIASES, _SINKS, *_ROUTER_ROWS, *_EXPERT_BIASES)
    plain, quantized = (_by_turns((*same, *experts)) for experts in (_TURNED_EXPERTS, _MXFP4_EXPERTS))
    layout = _layout(config, plain, written, others=(quantized,))
    # Both versions of transformers read this form. The constants are the defaults of `models.attention.Yarn`.
    yarn = {"rope_type": "yarn", "factor": config.rope_factor, "rope_theta": config.rope_theta, "truncate": False}
    yarn |= {"original_max_position_embeddings": config.rope_original_length, "beta_fast": 32.0, "beta_slow": 1.0}
    options = {**layout.options, "rope_factor": config.rope_factor}
    options |= {"rope_original_length": config.rope_original_length}
    return replace(
        layout,
        sizes={**layout.sizes, "layers": config.layers // 2},
        config={**layout.config, "rope_parameters": yarn, "max_position_embeddings": _longest(config)},
        options=options,
    )


def _by_turns(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows of a model whose layers alternate between two kinds, each with a stack of its own."""
    found = []
    for row in rows:
        if not row.path.startswith("layers/"):
            found.append(row)
            continue
        for number, kind in enumerate(("sliding", "full")):
            found.append(replace(row, path=row.path.replace("layers/", f"layers/{kind}/"), every=(number, 2)))
    return tuple(found)


def _layer_types(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2)


def _longest(config: Any) -> int:
    return int(config.rope_factor * config.rope_original_length)


def _layout(config: Any, rows: tuple[Row, ...], written: Mapping[str, Any], **more) -> Layout:
    kind = str(written["model_type"])
    keys = _KEYS[kind]
    options = {option: getattr(config, option) for option in (*keys, *(() if kind == "gpt_oss" else ("qk_norm",)))}
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
    """Return the options of `Llama`, `Moe`, `DeepSeek` or `GptOss` that correspond to a folder's config.json.

    Raises:
        ConfigError: no config.json, another architecture, or one with a feature that our models do not have.
    """
    from models import deepseek_hf  # imported late, since it imports this module

    config = weights.read_config(folder)
    kind = str(config.get("model_type"))
    try:
        return deepseek_hf.read_options(config) if kind == "deepseek_v3" else _options(config, kind)
    except ConfigError as error:
        raise ConfigError(error.message, at=str(Path(folder) / weights.CONFIG), hint=error.hint) from None


def _options(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return our options from a config.json, whose `model_type` must be `kind`."""
    if config.get("model_type") != kind or kind not in _DEFAULTS:
        wanted = f"'{kind}'" if kind in _DEFAULTS else " or ".join(map(repr, _DEFAULTS))
        message = f"model_type = {_show(config.get('model_type'))} is not {wanted}."
        raise ConfigError(message, hint="weights of that architecture")
    values = {**_DEFAULTS[kind], **config}
    refuse(values, _UNSUPPORTED_OF.get(kind, _UNSUPPORTED), kind)
    keys = _KEYS[kind]
    if "tied" not in keys and config.get("tie_word_embeddings"):
        raise ConfigError(f"tie_word_embeddings = True, but our {kind} has a head of its own.")
    more: dict[str, Any] = {"qk_norm": kind in _QWEN}
    if kind == "gpt_oss":
        rotary, more = _yarn(config)
        values |= rotary
        _check_gpt_oss(values)
    else:
        values |= _rotary(config)
    if values.get("num_experts") is None:  # transformers 5 uses Mixtral's key
        values["num_experts"] = values.get("num_local_experts")
    if values.get("num_key_value_heads") is None and kind == "llama":
        values["num_key_value_heads"] = values.get("num_attention_heads")
    if values.get("head_dim") is None:
        values["head_dim"] = _size(values, "hidden_size") // _size(values, "num_attention_heads")
    return {option: _value(values, option, key) for option, key in keys.items()} | more


def refuse(config: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]], kind: str) -> None:
    """Raise ConfigError at the first key of a config.json whose value asks for an unsupported feature."""
    for key, harmless in unsupported.items():
        if config.get(key) not in harmless:
            message = f"{key} = {_show(config[key])} asks for what our {kind} does not do."
            hint = "weights that were trained without it; ignoring it would change every logit"
            raise ConfigError(message, hint=hint)


def find_table(config: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Return the table at the first of the keys that a config.json has, or an empty table.

    Raises:
        ConfigError: the value is not a table.
    """
    key = next((key for key in keys if config.get(key)), None)
    if key is None:
        return {}
    if not isinstance(config[key], dict):
        raise ConfigError(f"{key} = {_show(config[key])} is not a table.")
    return config[key]


def _check_gpt_oss(config: Mapping[str, Any]) -> None:
    """Check that layers alternate between sliding and full attention, and that quantized weights are MXFP4."""
    layers = _size(config, "num_hidden_layers")
    types = config.get("layer_types")
    if layers % 2 or (types is not None and types != _layer_types(layers)):
        message = f"layer_types = {_show(types)} of {layers} layers are not sliding and full attention by turns."
        raise ConfigError(message, hint="weights of GPT-OSS, whose layers take turns")
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
    if method not in (None, "mxfp4"):
        raise ConfigError(f"quantization_config has the method {_show(method)}, not 'mxfp4'.")


def _yarn(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `rope_theta` if the config has it, and our options of YaRN; refuse other scalings of positions."""
    table = find_table(config, "rope_parameters", "rope_scaling")
    fixed = {"rope_type": "yarn", "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
    for key, wanted in fixed.items():
        found = table.get(key, table.get("type") if key == "rope_type" else True if key == "truncate" else wanted)
        if found != wanted:
            message = f"rotary positions have {key} = {_show(found)}, but our gpt_oss has only {_show(wanted)}."
            raise ConfigError(message, hint="weights of GPT-OSS; ignoring it would change every logit")
    if unknown := sorted({"attention_factor", "mscale", "mscale_all_dim"} & {k for k, v in table.items() if v}):
        raise ConfigError(f"rotary positions have {unknown[0]}, which our gpt_oss does not have.")
    factor, length = (table.get(key) for key in ("factor", "original_max_position_embeddings"))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor < 1e30:
        raise ConfigError(f"factor = {_show(factor)} of rotary positions is not a number of at least 1.")
    if type(length) is not int or length < 1:
        raise ConfigError(f"original_max_position_embeddings = {_show(length)} is not a whole number of at least 1.")
    theta = {"rope_theta": table["rope_theta"]} if "rope_theta" in table else {}
    return theta, {"rope_factor": float(factor), "rope_original_length": length}


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_theta` from the table that this version of transformers wrote; refuse scaled positions."""
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
            raise ConfigError(f"{key} turns only a part of each head, which our models do not do.")
        found |= {"rope_theta": table["rope_theta"]} if "rope_theta" in table else {}
    return found


def _value(values: Mapping[str, Any], option: str, key: str) -> Any:
    if option == "tied":
        if not isinstance(values[key], bool):
            raise ConfigError(f"{key} = {_show(values[key])} is neither true nor false.")
        return values[key]
    return _positive(values, key) if option in ("rope_theta", "norm_eps", "swiglu_limit") else _size(values, key)


def _positive(values: Mapping[str, Any], key: str) -> float:
    """Return a positive number from a config.json; raise ConfigError for anything else."""
    number = values.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e30:
        raise ConfigError(f"{key} = {_show(number)} is not a positive number.")
    return float(number)


def _size(values: Mapping[str, Any], key: str) -> int:
    """Return a whole number of at least 1 from a config.json; raise ConfigError for anything else."""
    size = values.get(key)
    if type(size) is not int or size < 1:
        raise ConfigError(f"{key} = {_show(size)} is not a whole number of at least 1.")
    return size


def _show(value: Any) -> str:
    """Return a value from an untrusted file in a form that is safe in a message."""
    return weights.shown(value if value is None or not isinstance(value, str) else repr(value))


def export(model: nnx.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Write a Llama, Moe or DeepSeek as a folder that `transformers` loads with `from_pretrained`.

    Args:
        model: a model with its weights, sharded in any way.
        folder: a folder that does not exist yet, or is empty.
        options: `dtype` and `max_shard_bytes` of `meshkit.weights.files.write_weights`, which raises its own errors.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    weights.write_weights(params, folder, model.hf_layout(), **options)  # pyright: ignore[reportAttributeAccessIssue]
