"""Provide small models, and safetensors files that follow the format exactly, for the tests of weights."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.weights.files import read_weights
from models.gpt_oss import GptOss
from models.llama import Llama
from models.moe import Moe

LLAMA = {"vocab": 40, "embed": 16, "mlp": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}
MOE = {"vocab": 40, "embed": 16, "mlp": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "experts": 4}
MODELS = {
    "llama": (Llama, LLAMA),
    "tied llama": (Llama, LLAMA | {"tied": True}),
    "moe": (Moe, MOE),
    "qwen": (Llama, LLAMA | {"qk_norm": True, "tied": True}),
    "qwen moe": (Moe, MOE | {"qk_norm": True}),
    "gpt oss": (GptOss, MOE | {"layers": 4, "embed": 32, "mlp": 64}),
}


def describe(name, **changes):
    cls, options = MODELS[name]
    return nnx.eval_shape(lambda: cls(rngs=nnx.Rngs(0), **options | changes))


def fill(model):
    """Return random parameters without compiling an initializer."""
    rng = np.random.default_rng(0)
    abstract_params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), abstract_params)


@functools.cache
def make(name):
    """Return a model without arrays, and parameters for it."""
    model = describe(name)
    return model, fill(model)


def mesh_of(**axes):
    return Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))


def abstract(model, mesh, rules):
    """Return ShapeDtypeStructs with the shardings that the rules give."""
    shards = nnx.to_pure_dict(mk.shardings(nnx.state(model, nnx.Param), mesh, rules))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shards)


def one_device(params):
    place = NamedSharding(mesh_of(all=8), PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params)


def assert_same_bits(a, b):
    same = jax.tree.map(lambda x, y: np.array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32)), a, b)
    assert all(jax.tree.leaves(same))


def read(folder, name="llama"):
    model, params = make(name)
    return read_weights(folder, model.hf_layout(), one_device(params))


def save(path, tensors, *, pad=0):
    """Write a safetensors file that follows the format exactly: name -> (dtype, shape, bytes)."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw(path, header, b"".join(data for _, _, data in tensors.values()), pad=pad)


def raw(path, header, data, *, pad=0):
    text = (header if isinstance(header, str) else json.dumps(header)).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def parts(path):
    """Return (header, data) of a file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]
