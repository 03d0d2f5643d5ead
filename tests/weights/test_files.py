"""Test weights in and out of safetensors: bit-equal on any mesh, a slice at a time, in every layout that is read."""

from __future__ import annotations

import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import meshkit as mk
from meshkit.errors import ConfigError, RunError
from meshkit.weights import files as weights
from meshkit.weights.files import open_file, read_weights, write_weights
from meshkit.weights.layout import Layout, Row
from models import hf
from tests.weights.weight_files import (
    MOE,
    abstract,
    assert_same_bits,
    describe,
    make,
    mesh_of,
    one_device,
    read,
    save,
)

FSDP_TENSOR = mk.ShardingRules(
    {"embed": "fsdp", "mlp": "tensor", "heads": "tensor", "kv_heads": "tensor", "vocab": "tensor"}
)
EXPERTS = mk.ShardingRules({"embed": "fsdp", "experts": "expert", "layers": "data"})


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small Llama in one file."""
    model, params = make("llama")
    write_weights(params, tmp_path / "out", model.hf_layout())
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"),
    [("llama", 4000), ("tied llama", 10**9), ("moe", 4000), ("qwen", 10**9), ("qwen moe", 4000), ("gpt oss", 4000)],
)
def test_a_round_trip_keeps_every_bit_on_another_mesh(tmp_path, name, max_shard_bytes):
    model, params = make(name)
    first = abstract(model, mesh_of(data=2, fsdp=2, tensor=2), FSDP_TENSOR)
    params = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), params, first)
    write_weights(params, tmp_path / "out", model.hf_layout(), max_shard_bytes=max_shard_bytes)
    other = abstract(model, mesh_of(data=1, fsdp=2, expert=4), EXPERTS)
    again = read_weights(tmp_path / "out", model.hf_layout(), other)
    assert_same_bits(params, again)
    assert jax.tree.map(lambda x: x.sharding, again) == jax.tree.map(lambda x: x.sharding, other)
    assert hf.read_options(tmp_path / "out") == model.hf_layout().options


def test_the_names_are_those_of_the_published_checkpoints(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items() if "layers.1." in n or "layers" not in n} == {
        "model.embed_tokens.weight": (40, 16),
        "model.layers.1.input_layernorm.weight": (16,),
        "model.layers.1.self_attn.q_proj.weight": (32, 16),
        "model.layers.1.self_attn.k_proj.weight": (16, 16),
        "model.layers.1.self_attn.v_proj.weight": (16, 16),
        "model.layers.1.self_attn.o_proj.weight": (16, 32),
        "model.layers.1.post_attention_layernorm.weight": (16,),
        "model.layers.1.mlp.gate_proj.weight": (24, 16),
        "model.layers.1.mlp.up_proj.weight": (24, 16),
        "model.layers.1.mlp.down_proj.weight": (16, 24),
        "model.norm.weight": (16,),
        "lm_head.weight": (40, 16),
    }


def test_a_mixture_of_qwen_must_weigh_its_experts_to_one(tmp_path):
    """transformers takes the key as false where config.json has none."""
    model, params = make("qwen moe")
    write_weights(params, tmp_path / "out", model.hf_layout())
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert {"model.layers.0.self_attn.q_norm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"} <= set(names)
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    assert (config["model_type"], config["num_experts"], config["moe_intermediate_size"]) == ("qwen3_moe", 4, 24)
    assert hf.read_options(tmp_path / "out")["qk_norm"] is True
    file.write_text(json.dumps({k: v for k, v in config.items() if k != "norm_topk_prob"}))
    with pytest.raises(ConfigError, match="norm_topk_prob = False asks for what our qwen3_moe does not do"):
        hf.read_options(tmp_path / "out")


def test_tensors_are_what_the_layout_says(tmp_path):
    """In plain numpy, a query kernel [layers, embed, heads, head_dim] is [heads * head_dim, embed] in the file."""
    model, params = make("llama")
    write_weights(params, tmp_path / "out", model.hf_layout())
    file = load_file(tmp_path / "out" / "model.safetensors")
    query = np.asarray(params["layers"]["attention"]["query"]["kernel"])[2]
    output = np.asarray(params["layers"]["attention"]["output"]["kernel"])[2]
    np.testing.assert_array_equal(file["model.layers.2.self_attn.q_proj.weight"], query.reshape(16, 32).T)
    np.testing.assert_array_equal(file["model.layers.2.self_attn.o_proj.weight"], output.reshape(32, 16).T)


def test_shards_hold_at_most_what_they_may_and_the_index_knows_them(tmp_path):
    model, params = make("llama")
    write_weights(params, tmp_path / "out", model.hf_layout(), max_shard_bytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {name: load_file(tmp_path / "out" / name) for name in set(index["weight_map"].values())}
    held = [t.nbytes for f in files.values() for t in f.values()]
    assert index["metadata"]["total_size"] == sum(held)
    for file in files.values():
        assert sum(t.nbytes for t in file.values()) <= 4000
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*files, "config.json", "model.safetensors.index.json"]
    )


def test_only_the_slices_of_a_device_are_read(folder, monkeypatch):
    """With FSDP over 8 of `embed`, every parameter is in 8 pieces, and each byte is asked for once."""
    asked, original = [], weights.read_slice

    def counted(row, sizes, files, ranges, dtype):
        out = original(row, sizes, files, ranges, dtype)
        asked.append((row.path, out.nbytes))
        return out

    monkeypatch.setattr(weights, "read_slice", counted)
    model, params = make("llama")
    target = abstract(model, mesh_of(fsdp=8), mk.ShardingRules({"embed": "fsdp"}))
    read_weights(folder, model.hf_layout(), target)
    sizes = {weights.path_name(p): x.nbytes for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    for path, total in sizes.items():
        assert [n for p, n in asked if p == path] == [total // 8] * 8
    asked.clear()
    read_weights(
        folder, model.hf_layout(), abstract(model, mesh_of(data=4, fsdp=2), mk.ShardingRules({"embed": "fsdp"}))
    )
    assert sum(n for _, n in asked) == sum(sizes.values())  # The four replicas of this host share what is read.


def test_a_slice_touches_no_other_tensors(folder):
    """The second layer of a pipeline stage opens the tensors of that layer alone."""
    model, params = make("llama")
    layout = model.hf_layout()
    row = next(r for r in layout.rows if r.path == "layers/mlp/down/kernel")
    name = "model.layers.1.mlp.down_proj.weight"
    only = {name: open_file(folder / "model.safetensors")[name]}
    block = weights.read_slice(row, layout.sizes, only, (range(1, 2), range(6, 12), range(16)), np.dtype(np.float32))
    np.testing.assert_array_equal(block, np.asarray(params["layers"]["mlp"]["down"]["kernel"])[1:2, 6:12])


def test_writing_fetches_one_tensor_at_a_time(tmp_path, monkeypatch):
    fetched, original = [], weights.fetch

    def counted(x, index):
        fetched.append(original(x, index).nbytes)
        return original(x, index)

    monkeypatch.setattr(weights, "fetch", counted)
    model, params = make("moe")
    write_weights(params, tmp_path / "out", model.hf_layout())
    # This is the embedding; of three stacks of experts, never more than one expert is fetched.
    assert max(fetched) == 40 * 16 * 4
    assert sum(fetched) == sum(x.nbytes for x in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_files_are_read_as_the_fp32_they_stand_for(tmp_path, dtype):
    model, params = make("llama")
    half = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[dtype]
    if dtype == "bf16":
        write_weights(params, tmp_path / "out", model.hf_layout(), dtype="bf16")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    else:
        rewrite(params, tmp_path / "out", model, np.float16, "F16")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(half).astype(np.float32), params)
    assert_same_bits(read(tmp_path / "out"), rounded)


def rewrite(params, folder, model, dtype, name):
    """Write the parameters to the folder, with all tensors in another dtype."""
    write_weights(params, folder, model.hf_layout())
    arrays = {n: x.astype(dtype) for n, x in load_file(folder / "model.safetensors").items()}
    save(folder / "model.safetensors", {n: (name, a.shape, a.tobytes()) for n, a in arrays.items()})


@pytest.mark.parametrize("pad", range(4))
def test_data_at_any_alignment_is_read_right(tmp_path, pad):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    save(tmp_path / "m.safetensors", {"x": ("F32", (2, 3), values.tobytes())}, pad=pad)
    np.testing.assert_array_equal(open_file(tmp_path / "m.safetensors")["x"].values[...], values)
    save(tmp_path / "h.safetensors", {"x": ("BF16", (2, 3), values.astype(ml_dtypes.bfloat16).tobytes())}, pad=pad)
    half = open_file(tmp_path / "h.safetensors")["x"].values[...]
    np.testing.assert_array_equal(np.asarray(half).astype(np.float32), values)


def test_the_download_cache_of_the_hub_is_read_through_its_links(folder, tmp_path):
    (tmp_path / "repo" / "blobs").mkdir(parents=True)
    (tmp_path / "repo" / "snapshots").mkdir()
    snapshot = tmp_path / "repo" / "snapshots" / "abc"
    os.replace(folder, snapshot)
    for path in list(snapshot.iterdir()):
        os.replace(path, tmp_path / "repo" / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert_same_bits(read(snapshot), make("llama")[1])


def test_a_tied_model_may_repeat_its_table(tmp_path):
    model, params = make("tied llama")
    write_weights(params, tmp_path / "out", model.hf_layout())
    path = tmp_path / "out" / "model.safetensors"
    tensors = {n: ("F32", x.shape, x.tobytes()) for n, x in load_file(path).items()}
    inv_freq = ("F32", (4,), bytes(16))  # Old versions wrote it, though it follows from rope_theta.
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": inv_freq}
    save(path, tensors | more | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert_same_bits(read(tmp_path / "out", "tied llama"), params)
    save(path, tensors | {"lm_head.weight": ("F32", (40, 16), bytes(40 * 16 * 4))})
    with pytest.raises(ConfigError, match=r"lm_head.weight must repeat model.embed_tokens.weight"):
        read(tmp_path / "out", "tied llama")


def test_the_fused_experts_of_newer_files_are_read(tmp_path):
    model, params = make("moe")
    write_weights(params, tmp_path / "out", model.hf_layout())
    path = tmp_path / "out" / "model.safetensors"
    arrays = load_file(path)
    for layer in range(MOE["layers"]):
        old, new = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        w1, w2, w3 = (
            np.stack([arrays.pop(f"{old}experts.{e}.{w}.weight") for e in range(MOE["experts"])])
            for w in ("w1", "w2", "w3")
        )
        arrays[f"{new}gate.weight"] = arrays.pop(f"{old}gate.weight")
        arrays[f"{new}experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        arrays[f"{new}experts.down_proj"] = w2
    save(path, {n: ("F32", a.shape, a.tobytes()) for n, a in arrays.items()})
    assert_same_bits(read(tmp_path / "out", "moe"), params)


def test_nothing_is_overwritten_and_nothing_half_written_stays(folder, monkeypatch, tmp_path):
    model, params = make("llama")
    with pytest.raises(ConfigError, match="exists already"):
        write_weights(params, folder, model.hf_layout())
    with pytest.raises(ConfigError, match=r"dtype = 'fp16' is not one.*\n.*'fp32' or 'bf16'"):
        write_weights(params, tmp_path / "half", model.hf_layout(), dtype="fp16")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_weights(params, tmp_path / "full", model.hf_layout())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_layout_of_another_model_is_refused(tmp_path):
    _, params = make("llama")
    other = describe("llama", embed=8)
    with pytest.raises(ConfigError, match=r"embedding is \[40, 16\] in the model and \[40, 8\] in the layout"):
        write_weights(params, tmp_path / "out", other.hf_layout())
    with pytest.raises(ConfigError, match=r"head/kernel is \[16, 40\] in the model and not there in the layout"):
        write_weights(params, tmp_path / "out", make("tied llama")[0].hf_layout())
    with pytest.raises(ConfigError, match="a Mixtral has no shared experts, but the model has 1"):
        describe("moe", shared_experts=1).hf_layout()


def test_a_layout_of_ones_own_needs_no_class_of_ours(tmp_path):
    """Any model needs only a row per parameter, with dims merged, transposed and stacked as its files have them."""
    layout = Layout(
        rows=(Row("w", "block.{layers}.w", "(b a)", "layers a b"),),
        sizes={"layers": 2, "a": 3, "b": 4},
        config={"kind": "mine"},
        options={},
        read_config=lambda config: {},
    )
    params = {"w": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    write_weights(params, tmp_path / "out", layout)
    stored = load_file(tmp_path / "out" / "model.safetensors")["block.1.w"]
    np.testing.assert_array_equal(stored, params["w"][1].T.reshape(-1))
    assert_same_bits(read_weights(tmp_path / "out", layout, one_device(params)), params)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("gpt_oss", "rope_parameters", "yarn"),
        ("gpt_oss", "rope_scaling", ["yarn"]),
        ("deepseek_v3", "quantization_config", "fp8"),
        ("deepseek_v3", "rope_scaling", "yarn"),
        ("deepseek_v3", "rope_parameters", 3),
    ],
)
def test_a_value_that_is_not_a_table_is_refused_with_its_file_and_key(kind, key, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, key: value}))
    with pytest.raises(ConfigError, match=f"{key} = .* is not a table") as error:
        hf.read_options(tmp_path)
    assert error.value.at == str(tmp_path / "config.json")
