"""Hugging Face's layout of DeepSeek-V3: names of tensors and config keys. `models.hf` has what all models share.

Files store rotary dims in pairs, and `models.deepseek` rotates pairs, so nothing is permuted. The modules for
multi-token prediction are layers after the last one, with copies of the embedding and the head. A model without
`mtp_depth` does not read them. `read_options` sets no `mtp_depth`: transformers keeps its key in config.json, but drops
the weights of the modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshkit.errors import ConfigError
from meshkit.weights.layout import Layout, Row
from meshkit.weights.quantized import BLOCK
from models.hf import ENDS, FUSED_EXPERTS, HEAD, QWEN_EXPERTS, _positive, _show, _size, find_table, refuse

# option of ours -> key of config.json
KEYS = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "mlp": "moe_intermediate_size",
    "dense_mlp": "intermediate_size",
    "dense_layers": "first_k_dense_replace",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "head_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "groups": "n_group",
    "groups_per_token": "topk_group",
    "routed_scale": "routed_scaling_factor",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
}
# Features that our model does not have: key of config.json -> the values that do not ask for the feature.
_UNSUPPORTED = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "tie_word_embeddings": (False, None),
    "norm_topk_prob": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
    "rope_interleave": (True, None),
}
# Option of ours -> key of the table of rotary positions, and transformers' default for that key.
_YARN = {
    "yarn_factor": ("factor", None),
    "yarn_length": ("original_max_position_embeddings", None),
    "yarn_fast": ("beta_fast", 32.0),
    "yarn_slow": ("beta_slow", 1.0),
    "yarn_scale": ("mscale_all_dim", None),
}

_HEADS = {  # a layer's attention: parameter -> (tensor, dims in the file, our dims)
    "query_down/kernel": ("q_a_proj", "query_rank embed", "embed query_rank"),
    "query_norm/scale": ("q_a_layernorm", "query_rank", "query_rank"),
    "query_up/kernel": ("q_b_proj", "(heads query_dim) query_rank", "query_rank heads query_dim"),
    "kv_down/kernel": ("kv_a_proj_with_mqa", "kv_down embed", "embed kv_down"),
    "kv_norm/scale": ("kv_a_layernorm", "kv_rank", "kv_rank"),
    "kv_up/kernel": ("kv_b_proj", "(heads kv_up) kv_rank", "kv_rank heads kv_up"),
    "output/kernel": ("o_proj", "embed (heads value_dim)", "heads value_dim embed"),
}

_MTP = tuple(
    Row(f"mtp/{ours}", f"model.layers.{{mtp_depth}}.{name}.weight", dims, f"mtp_depth {turned}")
    for ours, name, dims, turned in (
        ("embedding_norm/scale", "enorm", "embed", "embed"),
        ("hidden_norm/scale", "hnorm", "embed", "embed"),
        ("join/kernel", "eh_proj", "embed joined", "joined embed"),
        ("norm/scale", "shared_head.norm", "embed", "embed"),
    )
)


def deepseek_layout(config: Any) -> Layout:
    """Return the layout of `DeepseekV3ForCausalLM` for a DeepSeekConfig.

    Raises:
        ConfigError: the model has no shared expert, which DeepSeek-V3 always has.
    """
    if not config.shared_experts:
        raise ConfigError("a DeepSeek-V3 has shared experts, but the model has none.", hint="model.shared_experts = 1")
    c, options = config, {option: getattr(config, option) for option in KEYS}
    options["dense_mlp"] = c.dense.mlp
    options |= {option: getattr(c, option) for option in (_YARN if c.yarn_factor > 1 else ())}
    sizes = {option: value for option, value in options.items() if type(value) is int}
    sizes |= {
        "query_dim": c.head_dim + c.rope_dim,
        "kv_down": c.kv_rank + c.rope_dim,
        "kv_up": c.head_dim + c.value_dim,
    }
    sizes |= {"shared_mlp": c.shared_experts * c.mlp}
    dense = _layers("prefix", "dense_layers", 0) if c.dense_layers else ()
    layers, end = ("layers", "layers", c.dense_layers), c.layers + c.dense_layers
    common, stacks, copies = (*ENDS, HEAD, *dense, *_layers(*layers)), [layers], {}
    if c.mtp_depth:
        sizes |= {"mtp_depth": c.mtp_depth, "joined": 2 * c.embed}
        stacks.append(mtp := ("mtp/block", "mtp_depth", end))
        common = (*common, *(replace(row, every=(end, 1)) for row in _MTP), *_layers(*mtp))
        copies = {
            f"model.layers.{end + number}.{name}": row
            for number in range(c.mtp_depth)
            for row, name in ((ENDS[0], "embed_tokens.weight"), (HEAD, "shared_head.head.weight"))
        }
    rows, fused_rows = ((*common, *(row for stack in stacks for row in _moe(*stack, fused))) for fused in (False, True))
    return Layout(
        rows=rows,
        others=(fused_rows,),
        sizes=sizes,
        config=_written(config, options),
        options={"yarn_factor": 1.0, **options},
        read_config=read_options,
        keys=KEYS,
        computed=None if c.mtp_depth else rf"model\.layers\.{end}\..*",
        copies={name: row.name for name, row in copies.items()},
        repeated=tuple(replace(row, name=name) for name, row in copies.items()),
    )


def _layers(path: str, count: str, first: int) -> tuple[Row, ...]:
    """Return the rows of some layers' attention and norms; for `prefix`, also those of the feed-forward block."""
    layer = f"model.layers.{{{count}}}."
    rows = {"attention_norm/scale": ("input_layernorm", "embed", "embed")}
    rows |= {"mlp_norm/scale": ("post_attention_layernorm", "embed", "embed")}
    rows |= {f"attention/{ours}": (f"self_attn.{name}", *dims) for ours, (name, *dims) in _HEADS.items()}
    if path == "prefix":
        rows |= {f"mlp/{name}/kernel": dims for name, dims in _swiglu("mlp.", "dense_mlp").items()}
    return tuple(
        Row(f"{path}/{ours}", f"{layer}{name}.weight", file, f"{count} {dims}", every=(first, 1))
        for ours, (name, file, dims) in rows.items()
    )


def _swiglu(prefix: str, width: str) -> dict[str, tuple[str, str, str]]:
    up, down = (f"{width} embed", f"embed {width}"), (f"embed {width}", f"{width} embed")
    return {name: (f"{prefix}{name}_proj", *(down if name == "down" else up)) for name in ("gate", "up", "down")}


def _moe(path: str, count: str, first: int, fused: bool) -> tuple[Row, ...]:
    """Return the rows of some layers' router and experts; `fused` takes the names that transformers 5 has in memory."""
    mlp = "model.layers.{layers}.mlp."
    rows = [*(FUSED_EXPERTS if fused else QWEN_EXPERTS)]
    rows += [Row("layers/moe/router/bias", mlp + "gate.e_score_correction_bias", "experts", "layers experts")]
    rows += [
        Row(f"layers/moe/shared/{ours}/kernel", f"{mlp}{name}.weight", file, f"layers {dims}")
        for ours, (name, file, dims) in _swiglu("shared_experts.", "shared_mlp").items()
    ]

    def moved(row: Row) -> Row:
        name, ours = row.name.replace("{layers}", f"{{{count}}}"), row.ours.replace("layers", count)
        return replace(row, path=row.path.replace("layers", path), name=name, ours=ours, every=(first, 1))

    return tuple(map(moved, rows))


def _written(c: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model."""
    written = {key: harmless[0] for key, harmless in _UNSUPPORTED.items()}
    written |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    written |= {"num_nextn_predict_layers": c.mtp_depth}
    written |= {KEYS[option]: options[option] for option in KEYS}
    written |= {"num_hidden_layers": c.layers + c.dense_layers, "num_key_value_heads": c.heads}
    written["max_position_embeddings"] = int(c.yarn_length * c.yarn_factor)
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.yarn_factor > 1:
        table |= {key: getattr(c, option) for option, (key, _) in _YARN.items()}
        table |= {"rope_type": "yarn", "mscale": c.yarn_scale}
    return written | {"rope_parameters": table}


def read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `DeepSeek` that correspond to a config.json.

    Raises:
        ConfigError: it is of another architecture, or asks for what our model does not do.
    """
    if config.get("model_type") != "deepseek_v3":
        raise ConfigError(f"model_type = {_show(config.get('model_type'))} is not 'deepseek_v3'.")
    refuse(config, _UNSUPPORTED, "deepseek_v3")
    scaled = find_table(config, "quantization_config")
    if scaled and (scaled.get("quant_method"), scaled.get("weight_block_size")) != ("fp8", [BLOCK, BLOCK]):
        message = f"quantization_config = {_show(scaled)} is not fp8 in blocks of {BLOCK} x {BLOCK}."
        raise ConfigError(message, hint="the original checkpoint, or one in BF16")
    if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
        message = f"num_key_value_heads = {_show(config['num_key_value_heads'])} is not num_attention_heads."
        raise ConfigError(message, hint="weights of a DeepSeek-V3, whose heads have keys of their own")
    table = find_table(config, "rope_parameters", "rope_scaling")
    values = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, **config, **_rotary(table)}
    found: dict[str, Any] = {}
    for option, key in KEYS.items():
        zero = option == "dense_layers" and values.get(key) == 0
        real = option in ("routed_scale", "rope_theta", "norm_eps")
        found[option] = 0 if zero else _positive(values, key) if real else _size(values, key)
    found["layers"] -= found["dense_layers"]
    if found["layers"] < 1:
        raise ConfigError(f"all {found['dense_layers']} layers are dense: a DeepSeek-V3 has some with experts.")
    return found | {option: values[option] for option in _YARN if option in values}


def _rotary(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return our options of YaRN, and `rope_theta` if the table has it."""
    kind = table.get("rope_type", table.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"our model has no rotary positions of type {_show(kind)}, only plain ones and YaRN's.")
    found = {"rope_theta": table["rope_theta"]} if "rope_theta" in table else {}
    if kind == "default":
        return found | {"yarn_factor": 1.0}
    values = {**{key: default for key, default in _YARN.values() if default}, **table}
    if values.get("mscale") != values.get("mscale_all_dim") or table.get("attention_factor") not in (None, 1, 1.0):
        message = (
            f"mscale = {_show(values.get('mscale'))} is not mscale_all_dim = {_show(values.get('mscale_all_dim'))}"
        )
        raise ConfigError(f"{message}, or attention_factor is not 1: our YaRN scales only attention's scores.")
    for option, (key, _) in _YARN.items():
        found[option] = _size(values, key) if option == "yarn_length" else _positive(values, key)
    return found
