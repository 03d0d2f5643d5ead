"""Define ten models that meshkit does not know; `python -m benchmarks.third_party` shards, trains and plans them.

Seven are imported or extracted from a checkout of Flax, one is Keras's, and two are written here in the style of a
guide. Each function returns what meshkit must know: a loss, rules and a batch.
"""

# ruff: noqa: I001
from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace as with_changes
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import meshkit as mk

FSDP = mk.ShardingRules({"act_batch": ["data", "fsdp"]}, auto={"axis": "fsdp", "min_bytes": 4096})


def first_key() -> jax.Array:
    """Return the key of all random values; it is a function, because making it starts the devices."""
    return jax.random.key(1)


@dataclass(frozen=True)
class Foreign:
    """A model of another project, its loss and batch, and the rules that shard it."""

    what: str
    """A description for a reader."""
    make: Callable[[], Any]
    """A function that makes (model, optimizer), or {"params": ..., "opt_state": ...}."""
    loss: Callable[..., Any] | None
    """The loss of the model and a batch; None if `step` has it."""
    batch: tuple[Any, ...]
    """The arguments of the loss after the model."""
    optimizer: optax.GradientTransformation | None = None
    """The optimizer of a model without nnx modules."""
    step: Callable[..., Any] | None = None
    """The model's own step, unedited, instead of a ready-made one; it is jitted if it is not yet."""
    rules: mk.ShardingRules = FSDP
    """The sharding rules."""
    axes: tuple[tuple[str, int], ...] = (("data", 2), ("fsdp", 4))
    """The mesh axes and their sizes."""
    explicit: bool = False
    """Whether the mesh has explicit axes."""
    placed: bool = False
    """Whether batches arrive sharded, as a loader or jax.device_put leaves them."""
    loader: Callable[[], Any] | None = None
    """A function that returns an iterator over batches; None repeats the same batch."""


def _module(loss: Callable[..., Any], make: Callable[[], nnx.Module], batch: tuple[Any, ...], what: str) -> Foreign:
    """Return the training of an nnx model with Adam."""

    def both() -> Any:
        model = make()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    return Foreign(what, both, loss, batch)


def _tree(loss: Callable[..., Any], init: Callable[[], Any], batch: tuple[Any, ...], what: str) -> Foreign:
    """Return the training of a linen model, or of any other pytree, with Adam."""
    adam = optax.adam(1e-3)

    def both() -> Any:
        params = init()
        return {"params": params, "opt_state": adam.init(params)}

    return Foreign(what, both, loss, batch, adam)


_IMPORTS = """
import dataclasses
import typing as tp
from functools import partial
import jax
import jax.numpy as jnp
import optax
from flax import nnx
"""


def _taken(file: Path, *names: str) -> dict[str, Any]:
    """Return definitions of a script unchanged, without its other imports and without running it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = [n for n in tree.body if getattr(n, "name", None) in names
             or (isinstance(n, ast.Assign) and getattr(n.targets[0], "id", None) in names)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "taken.py"
        module.write_text(f"{_IMPORTS}\n{ast.unparse(ast.Module(found, []))}\n", encoding="utf-8")
        spec = importlib.util.spec_from_file_location("taken", module)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["taken"] = taken = importlib.util.module_from_spec(spec)  # Dataclasses look for annotations there.
        spec.loader.exec_module(taken)
    return vars(taken)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def gemma(flax: Path) -> Foreign:
    """Return Flax's Gemma 3, with two layers of its smallest model."""
    sys.path.insert(0, str(flax / "examples/gemma"))
    import transformer
    import transformer_cfg

    config = with_changes(
        transformer_cfg.TransformerConfig.gemma3_270m(), num_layers=2, num_embed=1024,
        attention_types=transformer_cfg.make_attention_layers_types(transformer_cfg.GEMMA3_ATTENTION_PATTERN, 2),
    )  # fmt: skip
    tokens = jax.random.randint(first_key(), (8, 32), 0, 1024)

    def loss(model, tokens):
        tokens = mk.constrain(tokens, "act_batch", None)
        mask = transformer.make_causal_attn_mask(jnp.ones_like(tokens, bool))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return _cross_entropy(model(tokens, positions, None, mask)[0], jnp.roll(tokens, -1, 1))

    made = lambda: transformer.Transformer(config, rngs=nnx.Rngs(0))
    return _module(loss, made, (tokens,), "Gemma 3 (nnx), flax/examples/gemma")


def mnist(flax: Path) -> Foreign:
    """Return convolutions, batch norm and dropout whose random streams come with the call."""
    found = _taken(flax / "examples/mnist/train.py", "CNN", "loss_fn")
    batch = {"image": jax.random.normal(first_key(), (16, 28, 28, 1)), "label": jnp.arange(16) % 10}

    def loss(model, batch, rngs):
        image = mk.constrain(batch["image"], "act_batch", None, None, None)
        return found["loss_fn"](model, batch | {"image": image}, rngs)[0]

    what = "Conv + BatchNorm + Dropout (nnx), flax/examples/mnist"
    return _module(loss, lambda: found["CNN"](nnx.Rngs(0)), (batch, nnx.Rngs(dropout=3)), what)


def scan(flax: Path) -> Foreign:
    """Return layers made by nnx.vmap and run by nnx.scan."""
    found = _taken(flax / "examples/nnx_toy_examples/06_scan_over_layers.py", "Block", "ScanMLP")

    def loss(model, x):
        return jnp.mean((model(mk.constrain(x, "act_batch", None)) - x) ** 2)

    what = "vmap + scan over layers (nnx), flax/examples/nnx_toy_examples/06"
    made = lambda: found["ScanMLP"](64, n_layers=3, rngs=nnx.Rngs(0))
    return _module(loss, made, (jax.random.normal(first_key(), (64, 64)),), what)


def own_step(flax: Path) -> Foreign:
    """Return a training with its own nnx.jit'ed step and optimizer, which shares the model's variables."""
    names = ("MeshRules", "mesh_rules", "MLP", "SGDState", "SGD", "train_step")
    found = _taken(flax / "examples/nnx_toy_examples/10_fsdp_and_optimizer.py", *names)
    x = jnp.linspace(-2, 2, 104)[:, None]

    def made():
        model = found["MLP"](1, 32, 1, rngs=nnx.Rngs(0))
        return model, found["SGD"](nnx.variables(model, nnx.Param), 0.01, decay=0.9)

    what = "own optimizer under nnx.jit (nnx), flax/examples/nnx_toy_examples/10"
    overrides = [("**/w2", ("model", None))]  # The example names a dim of size 1.
    rules = mk.ShardingRules({"model": "model"}, overrides=overrides)  # Its names are axes of its mesh.
    axes = (("data", 2), ("model", 4))
    return Foreign(what, made, None, (x, 0.8 * x**2), step=found["train_step"], rules=rules, axes=axes)


def lm1b(flax: Path) -> Foreign:
    """Return a transformer with named dims, two of them wrong (README.md)."""
    sys.path.insert(0, str(flax / "examples/lm1b"))
    from models import TransformerConfig, TransformerLM

    small = TransformerConfig(1024, 1024, num_layers=1, emb_dim=128, qkv_dim=128, mlp_dim=256, deterministic=True)
    model, tokens = TransformerLM(small), jax.random.randint(first_key(), (16, 32), 1, 1024)

    def loss(variables, tokens):
        return _cross_entropy(model.apply(variables, mk.constrain(tokens, "act_batch", None)), tokens)

    found = _tree(loss, lambda: model.init(first_key(), tokens), (tokens,), "transformer (linen), flax/examples/lm1b")
    heads = [("**/out/kernel", ("tensor", None, "fsdp")), ("**/Multi*/*/kernel", ("fsdp", "tensor", None))]
    names = {"embed": "fsdp", "mlp": "tensor", "vocab": "tensor", "act_batch": "fsdp"}
    rules = mk.ShardingRules(names, overrides=heads)
    return with_changes(found, rules=rules, axes=(("fsdp", 4), ("tensor", 2)))


def wmt(flax: Path) -> Foreign:
    """Return an encoder and decoder without names."""
    sys.path.insert(0, str(flax / "examples/wmt"))
    from models import Transformer, TransformerConfig

    sizes = {"emb_dim": 128, "num_heads": 4, "num_layers": 1, "qkv_dim": 128, "mlp_dim": 256, "max_len": 64}
    model = Transformer(TransformerConfig(1024, 1024, deterministic=True, **sizes))
    tokens = jax.random.randint(first_key(), (16, 32), 1, 1024)

    def loss(variables, tokens):
        tokens = mk.constrain(tokens, "act_batch", None)
        return _cross_entropy(model.apply(variables, tokens, tokens), tokens)

    return _tree(
        loss, lambda: model.init(first_key(), tokens, tokens), (tokens,), "translation (linen), flax/examples/wmt"
    )


def imagenet(flax: Path) -> Foreign:
    """Return a residual network with batch norm over a named axis, which a vmap over one row binds."""
    sys.path.insert(0, str(flax / "examples/imagenet"))
    from functools import partial
    from models import ResNet, ResNetBlock

    model = partial(ResNet, stage_sizes=[1, 1], block_cls=ResNetBlock)(num_classes=16, num_filters=16)
    images = jax.random.normal(first_key(), (16, 32, 32, 3))

    def loss(variables, images):
        apply = jax.vmap(lambda x: model.apply(variables, x, mutable="batch_stats")[0], axis_name="batch")
        logits = apply(mk.constrain(images, "act_batch", None, None, None)[None])[0]
        return _cross_entropy(logits, jnp.arange(16))

    return _tree(loss, lambda: model.init(first_key(), images), (images,), "ResNet (linen), flax/examples/imagenet")


def logical(flax: Path) -> Foreign:
    """Return a model as flax's guide writes it: logical names, constraints of its own, scan over remat."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            up = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            down = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
            y = nn.with_logical_constraint(nn.relu(nn.Dense(256, kernel_init=up)(x)), ("batch", "hidden"))
            return nn.with_logical_constraint(x + nn.Dense(128, kernel_init=down)(y), ("batch", "features")), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
                             metadata_params={nn.PARTITION_NAME: "layers"})  # fmt: skip
            return layers()(x, None)[0]

    model, x = Stack(), jax.random.normal(first_key(), (64, 128))
    loss = lambda variables, x: jnp.mean((model.apply(variables, x) - 1) ** 2)
    found = _tree(
        loss, lambda: model.init(first_key(), x), (x,), "logical names, scan, remat (linen), as flax's guide has it"
    )
    names = {"embed": "fsdp", "mlp": "tensor", "batch": "fsdp", "hidden": "tensor"}
    return with_changes(found, rules=mk.ShardingRules(names), axes=(("fsdp", 4), ("tensor", 2)))


def explicit(flax: Path) -> Foreign:
    """Return a model with shardings in the types of its arrays."""
    init = lambda: {
        "up": jax.random.normal(first_key(), (64, 256)) / 8,
        "down": jax.random.normal(first_key(), (256, 64)) / 16,
    }

    def loss(params, x):
        hidden = jax.nn.relu(jnp.dot(x, params["up"], out_sharding=_like(x)))
        return jnp.mean((jnp.dot(hidden, params["down"], out_sharding=_like(x)) - x) ** 2)

    found = _tree(
        loss, init, (jax.random.normal(first_key(), (64, 64)),), "explicit sharding (jax), as jax's guide has it"
    )
    return with_changes(found, explicit=True)


def _like(x: jax.Array) -> Any:
    """Return the sharding of x, if its type has one."""
    mesh = jax.typeof(x).sharding.mesh
    return jax.typeof(x).sharding if mesh.axis_names and not mesh.are_all_axes_auto else None


def keras(flax: Path) -> Foreign:
    """Return a Keras model on jax: variables are a list, the call is stateless."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras as library

    library.utils.set_random_seed(0)
    layers = [
        library.layers.Dense(256, activation="relu"),
        library.layers.LayerNormalization(),
        library.layers.Dense(64),
    ]
    model = library.Sequential([library.Input((64,)), *layers])
    rest = [v.value for v in model.non_trainable_variables]

    def loss(params, x):
        return jnp.mean((model.stateless_call(params, rest, mk.constrain(x, "act_batch", None))[0] - x) ** 2)

    init = lambda: [jnp.copy(v.value) for v in model.trainable_variables]
    return _tree(loss, init, (jax.random.normal(first_key(), (64, 64)),), "Sequential (Keras 3 on jax)")


MODELS = (gemma, mnist, scan, own_step, lm1b, wmt, imagenet, logical, explicit, keras)
