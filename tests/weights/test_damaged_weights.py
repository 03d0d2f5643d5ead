"""Test that no damaged, dishonest or merely different file of weights is believed."""

from __future__ import annotations

import contextlib
import json
import os
import random

import pytest
from flax import nnx

from meshkit.errors import ConfigError
from meshkit.weights.files import read_weights, write_weights
from tests.weights.weight_files import (
    assert_same_bits,
    describe,
    fill,
    make,
    one_device,
    parts,
    raw,
    read,
)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small Llama in one file."""
    model, params = make("llama")
    write_weights(params, tmp_path / "out", model.hf_layout())
    return tmp_path / "out"


HEADERS = {
    "not JSON": ("{", "invalid JSON in header"),
    "a list": ("[]", "invalid type: sequence"),
    "deep": ("[" * 100_000, "invalid JSON in header"),
    "a key twice": (
        '{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}, "a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        "the key a stands twice",
    ),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, "missing field `data_offsets`"),
    "a negative size": ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "invalid value: integer `-1`"),
    "a size of 2**70": ({"a": {"dtype": "F32", "shape": [2**70], "data_offsets": [0, 4]}}, "expected usize"),
    "a fraction": ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, "floating point `1.0`"),
    "an unknown dtype": ({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, "unknown variant `F31`"),
    "another size": (
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        "invalid shape, data type, or offset",
    ),
    "beyond the file": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, "file not fully covered"),
    "far away": (
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [2**40, 2**40 + 4]}},
        "invalid offset for tensor `a`",
    ),
    "an overlap": (
        {n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"},
        "invalid offset for tensor `[ab]`",
    ),
    "a remainder": ({"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}, "file not fully covered"),
}


@pytest.mark.parametrize(("header", "message"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_refused(folder, header, message):
    raw(folder / "model.safetensors", header, b"\0" * 4)
    with pytest.raises(ConfigError, match=f"model.safetensors is no intact safetensors file: .*{message}") as caught:
        read(folder)
    assert caught.value.at == str(folder / "model.safetensors")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        ((2**63).to_bytes(8, "little") + b"{}", "header too large"),
        (b"\x05\0\0\0\0\0\0\0{}", "invalid header length"),
        (b"\x02\0\0\0\0\0\0\0\xff\xfe", "invalid UTF-8 in header"),
        (b"version https://git-lfs.github.com/spec/v1\n", "header too large"),
    ],
)
def test_a_file_that_is_none_is_refused(folder, content, message):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(folder)


def test_a_truncated_file_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model.safetensors is no intact safetensors file: .*not fully covered"):
        read(folder)


def change(folder, edit):
    """Edit the header of the only file."""
    header, data = parts(folder / "model.safetensors")
    edit(header)
    raw(folder / "model.safetensors", header, data)


def test_missing_surplus_and_misshapen_tensors_are_named(folder):
    name = "model.layers.1.self_attn.q_proj.weight"
    change(folder, lambda h: h.update({"model.layers.1.query": h.pop(name)}))
    with pytest.raises(ConfigError, match=rf"{name} is missing; layers/attention/query/kernel needs it"):
        read(folder)
    change(folder, lambda h: h.update({name: h.pop("model.layers.1.query")}))
    change(folder, lambda h: h[name].update(shape=[16, 32]))
    with pytest.raises(ConfigError, match=r"is \(16, 32\) in the file.*\(heads head_dim\) embed = \(32, 16\)"):
        read(folder)
    change(folder, lambda h: h[name].update(shape=[32, 16], dtype="I32"))
    with pytest.raises(ConfigError, match=r"q_proj.weight is I32, which is not one of F32, F16, BF16"):
        read(folder)


def test_a_shape_that_differs_names_the_options(tmp_path):
    wide = describe("llama", mlp=32)
    write_weights(fill(wide), tmp_path / "out", wide.hf_layout())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=r"weights have mlp = 32 \(intermediate_size in config.json\).*\n.*\n.*model.mlp = 32"
    ):
        read(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    with pytest.raises(
        ConfigError, match=r"is \(32, 16\) in the file, but the model wants mlp embed = \(24, 16\)[^*]*model.mlp"
    ):
        read(tmp_path / "out")


def test_a_model_with_fewer_layers_does_not_take_the_first_ones(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    model = describe("llama", layers=2)
    with pytest.raises(ConfigError, match=r"no parameter for model.layers.2.input_layernorm.weight, \(16,\)"):
        read_weights(folder, model.hf_layout(), one_device(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None, "rope_theta": 1e4}, "weights have rope_theta = 10000.0"),
        ({"rms_norm_eps": 1e-6}, "weights have norm_eps = 1e-06"),
        ({"tie_word_embeddings": True}, "weights have tied = True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary positions of type 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions of type 'yarn'"),
        ({"rope_scaling": 3}, "rotary positions of type 3"),
        ({"attention_bias": True}, "attention_bias = True asks for what our llama does not do"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ({"model_type": "mamba"}, "model_type = 'mamba' is not 'llama'"),
        ({"hidden_size": "16"}, "hidden_size = '16' is not a whole number"),
        ({"rms_norm_eps": None}, "rms_norm_eps = None is not a positive number"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_theta = True is not a positive number"),
    ],
)
def test_a_config_that_means_another_model_is_refused(folder, changes, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        read(folder)
    assert caught.value.at == str(folder / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "JSON object: Expecting"), ("[]", "JSON object: it is a list"), (None, "cannot be read: No such file")],
)
def test_a_config_that_is_none_is_refused(folder, content, message):
    (folder / "config.json").unlink() if content is None else (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"config.json .*{message}"):
        read(folder)


def test_pickles_are_refused_and_say_why(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="is a pickle, and loading a pickle runs whatever code is in it"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        read(tmp_path / "nowhere")


@pytest.fixture
def sharded(tmp_path):
    model, params = make("llama")
    write_weights(params, tmp_path / "sharded", model.hf_layout(), max_shard_bytes=6000)
    return tmp_path / "sharded"


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\0.safetensors"]
)
def test_an_index_cannot_point_out_of_its_folder(sharded, name):
    edit_index(sharded, lambda files: files.update({"lm_head.weight": name}))
    with pytest.raises(ConfigError, match="is not a safetensors file of this folder"):
        read(sharded)


def test_an_index_and_its_shards_agree(sharded):
    first = min(p.name for p in sharded.glob("*.safetensors"))
    edit_index(sharded, lambda files: files.update({"lm_head.weight": first}))
    with pytest.raises(ConfigError, match=rf"says that lm_head.weight is in {first}, but it is not"):
        read(sharded)
    edit_index(sharded, lambda files: files.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"holds lm_head.weight, which model.safetensors.index.json does not"):
        read(sharded)
    (sharded / first).unlink()
    with pytest.raises(ConfigError, match=rf"names {first}, which is missing"):
        read(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ConfigError, match="weight_map does not map"):
        read(sharded)


def test_links_stay_in_the_folder(folder, tmp_path):
    file = folder / "model.safetensors"
    os.replace(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"model.safetensors is a link to .*elsewhere, outside of the folder"):
        read(folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read(folder)


def test_an_ambiguous_folder_is_refused(sharded, folder):
    os.replace(folder / "model.safetensors", sharded / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has both model.safetensors and model.safetensors.index.json"):
        read(sharded)


def mutate(content, rng):
    """Return a copy of a file's bytes with damage in its header or its length."""
    header_end = 8 + int.from_bytes(content[:8], "little")
    kind = rng.choice(["flip", "cut", "grow", "zero", "swap", "length"])
    out = bytearray(content)
    at = rng.randrange(header_end)
    if kind == "flip":
        out[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del out[rng.randrange(len(out)) :]
    elif kind == "grow":
        out += bytes(rng.randrange(1, 64))
    elif kind == "zero":
        out[at : at + 8] = bytes(min(8, header_end - at))
    elif kind == "swap":
        other = rng.randrange(8, header_end)
        out[at], out[other] = out[other], out[at]
    else:
        out[:8] = rng.randrange(2**64).to_bytes(8, "little")
    return bytes(out)


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_refused_or_harmless_and_never_a_wrong_value(folder, seed):
    """The damage is in the header or the length; the format has no hashes, so a flip inside a tensor cannot be seen."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for round_ in range(5):
        file.write_bytes(mutate(content, random.Random(100 * seed + round_)))
        with contextlib.suppress(ConfigError):
            assert_same_bits(read(folder), make("llama")[1])
