"""Test that a checkpoint in MXFP4 that follows the format is read as the numbers it stands for, in parts too."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.weights.files import read_weights, write_weights
from meshkit.weights.quantized import Mxfp4
from tests.weights.weight_files import abstract, make, mesh_of

RULES = ShardingRules({"embed": "fsdp", "experts": "expert", "layers": "data"})
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def numbers_of(blocks, scales):
    """Return the numbers, one by one, as the format is written down."""
    out = np.zeros((*scales.shape, 32))
    for at in np.ndindex(*scales.shape):
        for i in range(32):
            code = (int(blocks[at][i // 2]) >> 4 * (i % 2)) & 15
            out[(*at, i)] = (-1) ** (code >> 3) * VALUES[code & 7] * 2.0 ** (int(scales[at]) - 127)
    return out.reshape(*scales.shape[:-1], -1)


def random_blocks(*shape):
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (*shape, 16), np.uint8)
    return blocks, random.integers(120, 130, shape, np.uint8)


def test_numbers_are_those_of_the_format_and_parts_those_of_the_whole():
    blocks, scales = random_blocks(3, 2)
    whole = numbers_of(blocks, scales)
    tensor = Mxfp4(blocks, scales, (3, 64))
    np.testing.assert_array_equal(tensor[:], whole)
    np.testing.assert_array_equal(tensor[1:3, 7:40], whole[1:3, 7:40])
    np.testing.assert_array_equal(tensor[0:1, 33:64], whole[0:1, 33:64])
    assert np.isnan(Mxfp4(blocks, np.full_like(scales, 255), (3, 64))[:]).all()


@pytest.fixture
def folder(tmp_path):
    """Return GPT-OSS as OpenAI publishes it: experts' kernels are blocks and scales, everything else is bf16."""
    model, params = make("gpt oss")
    write_weights(params, tmp_path / "out", model.hf_layout(), dtype="bf16")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(4):
        for name, rows, blocks in (("gate_up_proj", 128, 1), ("down_proj", 32, 2)):
            kernel = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[kernel]
            tensors[kernel + "_blocks"], tensors[kernel + "_scales"] = random_blocks(4, rows, blocks)
    save_file(tensors, file)
    config = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return tmp_path / "out"


def test_experts_in_blocks_are_read_on_any_mesh(folder):
    model, _ = make("gpt oss")
    params = read_weights(folder, model.hf_layout(), abstract(model, mesh_of(data=1, fsdp=2, expert=4), RULES))
    experts = jax.tree.map(np.asarray, params["layers"]["full"]["moe"]["experts"])
    gate_up, down = numbers_of(*random_blocks(4, 128, 1)), numbers_of(*random_blocks(4, 32, 2))
    np.testing.assert_array_equal(experts["gate"][1], gate_up[:, 0::2].swapaxes(1, 2))
    np.testing.assert_array_equal(experts["up"][1], gate_up[:, 1::2].swapaxes(1, 2))
    np.testing.assert_array_equal(experts["down"][0], down.swapaxes(1, 2))


def test_blocks_without_their_scales_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    model, _ = make("gpt oss")
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.down_proj_blocks .* no scales: no MXFP4"):
        read_weights(folder, model.hf_layout(), abstract(model, mesh_of(data=1, fsdp=2, expert=4), RULES))


def test_another_quantization_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    model, _ = make("gpt oss")
    with pytest.raises(ConfigError, match="method 'fp8', not 'mxfp4'"):
        read_weights(folder, model.hf_layout(), abstract(model, mesh_of(data=1, fsdp=2, expert=4), RULES))
