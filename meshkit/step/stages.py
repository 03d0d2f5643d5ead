"""A model and a loss -> the three functions of a pipeline: what stands before, in and behind the layers.

A model that can be pipelined has, beside `__call__`:

    model.layers                          its layers, parameters stacked in arrays [layers, ...]
    first(batch, ctx) -> x                what enters the layers: one array [batch, ...]
    layer(parameters, x, ctx, key) -> x   one layer, with its parameters as a nested dict of arrays; or (x, values),
                                          values a dict of scalars; key is a random key of the layer and microbatch
    last(x, ctx) -> logits                of what leaves them

`ctx` is the StageContext of `meshkit.parallel.pipeline`. Whatever else has parameters may be used in `first` and `last`
alone. With `head = "vocab_parallel"` these see their stage's part of every parameter with a `vocab` dim: `first` looks
tokens up by `vocabulary.lookup`, or as it does, and the logits of `last` are of that part.

The default loss is the cross-entropy of these logits. A `train.loss` that is a plain function is called with the model,
where `model(...)` gives the logits (the head must be replicated). One that has more to say is an object with methods
beside `__call__`:

    of_hidden(model, x, batch, ctx) -> loss_sum, weight, metrics      of what leaves the layers
    of_layer(model, values, batch) -> loss_sum, metrics               of one layer's values, summed over the layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshkit.config.experiment import Experiment
from meshkit.config.user_code import load_function, user_code
from meshkit.parallel.pipeline import StageContext, StageOutput, scan_layers, vocabulary
from meshkit.step.loss import Loss, cross_entropy
from meshkit.step.state import LAYERS, ModelDescription

WEIGHT = "weight"  # of a microbatch, handed out of the pipeline among its metrics
_METHODS = ("first", "layer", "last")


class StageFunctions:
    """The functions of one experiment's pipeline.

    Args:
        experiment: names model and loss.
        model: one that `check_model` accepts; arrays are put in from outside.
        loss: as `find_loss` gives it.
        training: False for an evaluation.

    Raises:
        ConfigError: a loss that cannot be pipelined with this head.
    """

    def __init__(self, experiment: Experiment, model: ModelDescription, loss: Loss, *, training: bool = True):
        self.experiment, self.model, self.training = experiment, model, training
        self._loss, self._own = loss, _own_loss(experiment)

    def first(self, outer: Mapping[str, Any], batch: Any, ctx: StageContext) -> Any:
        """What enters the first layer."""
        with self._calling("first"):
            return self._model(outer).first(batch, ctx)

    def stage(self, layers: Mapping[str, Any], x: Any, ctx: StageContext) -> Any:
        """A chunk of layers."""
        model = self._model({})

        def layer(parameters, x, key):
            with self._calling("layer"):
                out = model.layer(parameters, x, ctx, key)
            x, values = out if isinstance(out, tuple) else (out, {})
            of_layer = getattr(self._own, "of_layer", None)
            if not values or of_layer is None:
                return x
            loss_sum, metrics = of_layer(model, values, ctx.batch)
            return StageOutput(x, loss_sum, metrics)

        return scan_layers(layer, layers, x, ctx)

    def last(self, outer: Mapping[str, Any], x: Any, batch: Any, ctx: StageContext) -> tuple[Any, Any, dict[str, Any]]:
        """loss_sum, weight, and metrics with that weight among them, of what leaves the last layer."""
        model = self._model(outer)
        with self._calling("last"):
            if self._own is None:
                loss_sum, weight, metrics = self._next_token(model, x, batch, ctx)
            elif hasattr(self._own, "of_hidden"):
                loss_sum, weight, metrics = self._own.of_hidden(model, x, batch, ctx)
            else:
                loss_sum, weight, metrics = self._loss(_WithLogits(model, x, ctx), batch, ctx.rng)
        return loss_sum, weight, {**metrics, WEIGHT: weight}

    def _next_token(self, model: Any, x: Any, batch: Any, ctx: StageContext) -> tuple[Any, Any, dict]:
        logits = model.last(x, ctx)
        if self.experiment.pipeline.head == "vocab_parallel":
            self._check_pieces(logits, ctx)
            losses = vocabulary.cross_entropy(logits, batch["targets"], ctx.axis)
        else:
            losses = cross_entropy(logits, batch["targets"])
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), {}

    def _check_pieces(self, logits: jax.Array, ctx: StageContext) -> None:
        """Refuses logits that are not a stage's part of a `vocab` dim: their cross-entropy would be wrong.

        Raises:
            ConfigError: with the sizes.
        """
        sizes, stages = vocab_sizes(self.model), jax.lax.axis_size(ctx.axis)
        if logits.shape[-1] * stages not in sizes:
            name, shown = self.experiment.model.class_path, " or ".join(map(str, sorted(sizes))) or "not named"
            raise self.experiment.error(
                "pipeline.head",
                f"{name} gives {logits.shape[-1]} logits on each of {stages} stages, but its vocabulary is {shown}.",
                hint='head = "replicated"',
            )

    def _model(self, outer: Mapping[str, Any]) -> Any:
        """The module around some arrays; abstract ones stand where none are given, and must not be used."""
        abstract = nnx.to_pure_dict(self.model.params)
        model = self.model.merge({**abstract, **outer}, nnx.to_pure_dict(self.model.variables))
        model.train() if self.training else model.eval()
        return model

    def _calling(self, method: str) -> Any:
        name = self.experiment.model.class_path
        return user_code(self.experiment, "model.class", f"{method} of {name}")


class _WithLogits:
    """A model whose layers have run: called, it gives the logits; anything else is the model's own."""

    def __init__(self, model: Any, x: Any, ctx: StageContext):
        self._model, self._x, self._ctx = model, x, ctx

    def __call__(self, *_args: Any) -> jax.Array:
        return self._model.last(self._x, self._ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def check_model(experiment: Experiment, model: ModelDescription) -> None:
    """Refuses a model that has no stages to make.

    Raises:
        ConfigError: naming what it lacks.
    """
    name, made = experiment.model.class_path, model.abstract_model()
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if LAYERS not in model.params or missing:
        lacks = f"has no stacked `{LAYERS}`" if LAYERS not in model.params else f"has no {', '.join(missing)}()"
        raise experiment.error(
            "pipeline.axis",
            f"{name} cannot be cut into stages: it {lacks}.",
            hint="models.llama:Llama or models.moe:Moe, the methods that meshkit.step.stages describes, or "
            "mk.pipeline in a step of your own",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params[LAYERS], is_leaf=_is_variable):
        names = leaf.get_metadata().get("out_sharding") if _is_variable(leaf) else None
        if not names or names[0] != LAYERS:
            shown = jax.tree_util.keystr(path, simple=True, separator="/")
            raise experiment.error(
                "pipeline.axis",
                f"{LAYERS}/{shown} of {name} has the dims {names}, of which the first must be '{LAYERS}'.",
                hint="parameters stacked over all layers, named with out_sharding",
            )
    if jax.tree.leaves(model.variables):
        raise experiment.error(
            "pipeline.axis",
            f"{name} has state beside its parameters (batch statistics), which stages cannot hand on.",
            hint="a model without such state, or no [pipeline]",
        )


def layer_count(model: ModelDescription) -> int:
    """Layers of a model that `check_model` accepts."""
    return jax.tree.leaves(nnx.to_pure_dict(model.params)[LAYERS])[0].shape[0]


def _own_loss(experiment: Experiment) -> Callable[..., Any] | None:
    """`train.loss` itself.

    Raises:
        ConfigError: it needs whole logits, and the head gives pieces.
    """
    name = experiment.train.loss
    if name is None:
        return None
    own = load_function(experiment, "train.loss", name)
    if experiment.pipeline.head == "vocab_parallel" and not hasattr(own, "of_hidden"):
        raise experiment.error(
            "train.loss",
            f"{name} takes whole logits, but each stage has a part of the vocabulary.",
            hint='pipeline.head = "replicated", or a loss with the method of_hidden of meshkit.step.stages',
        )
    return own


def by_stages(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of a model as a pipeline takes them."""
    return {"stages": params[LAYERS], "outer": {name: tree for name, tree in params.items() if name != LAYERS}}


def vocab_sizes(model: ModelDescription) -> set[int]:
    """Sizes of the `vocab` dims that stand outside of the layers."""
    leaves = jax.tree.leaves(by_stages(model.params)["outer"], is_leaf=_is_variable)
    named = [zip(leaf.get_metadata().get("out_sharding") or (), leaf.shape) for leaf in leaves]
    return {size for dims in named for name, size in dims if name == "vocab"}


def _is_variable(leaf: Any) -> bool:
    """Whether it is an nnx variable, which carries the names of its dims."""
    return isinstance(leaf, nnx.Variable)
