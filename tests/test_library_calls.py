"""Test calls of the library that people get wrong: each has one error that says what to try instead."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import meshkit as mk

CPU, ABSENT = mk.Cluster.load("cpu8"), mk.Cluster.load("dgx_h100", hosts=1)
SPEC, RULES = mk.MeshSpec.parse({"fsdp": 8}), mk.ShardingRules({"embed": "fsdp"})
X = jnp.ones((8, 8))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


@jax.tree_util.register_pytree_node_class
class Holding:
    """A tree with a leaf that is not an array, as Equinox's modules have."""

    def tree_flatten(self):
        return (jnp.tanh, X), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls()


def model():
    return Model(nnx.Rngs(0))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.fixture(scope="module")
def mesh():
    return mk.build_mesh(SPEC, CPU)


WRONG = {
    "a model in place of what makes it": (
        lambda mesh: mk.shard_model(model(), mesh, RULES),
        r"a Model is not: missing a required argument: 'x'(.|\n)*try lambda: Model",
    ),
    "a class that takes arguments": (
        lambda mesh: mk.abstract(Model, mesh, RULES),
        r"Model is not: missing a required argument: 'rngs'(.|\n)*try lambda: Model",
    ),
    "arrays in place of what makes them": (
        lambda mesh: mk.shard_model({"w": X}, mesh, RULES),
        r"a dict is not: it cannot be called(.|\n)*meshkit.shardings\(state, mesh, rules\)\) for arrays that",
    ),
    "a model with more than arrays": (
        lambda mesh: mk.shard_model(Holding, mesh, RULES),
        r"holds more than arrays: (.|\n)*try lambda: equinox.filter\(make\(\), equinox.is_array\)",
    ),
    "a function in place of a tree": (
        lambda mesh: mk.shardings(model, mesh, RULES),
        r"no array: its first leaf is a function(.|\n)*jax.eval_shape",
    ),
    "mesh and rules": (
        lambda mesh: mk.shard_model(model, RULES, mesh),
        r"mesh is a ShardingRules, not a Mesh or DescribedMesh(.|\n)*in this order: make_model, mesh, rules$",
    ),
    "mesh and loss": (
        lambda mesh: mk.sharded_step(mesh, loss, RULES),
        "mesh is a function, not a Mesh",
    ),
    "a dict in place of rules": (
        lambda mesh: mk.shardings({"w": X}, mesh, {"embed": "fsdp"}),
        r"rules is a dict, not a ShardingRules(.|\n)*try rules = meshkit.ShardingRules\(\{",
    ),
    "rules and mesh of a scope": (
        lambda mesh: mk.sharding_scope(RULES, mesh).__enter__(),
        "mesh is a ShardingRules",
    ),
    "rules and mesh of kept shardings": (
        lambda mesh: mk.keep_shardings(RULES, mesh),
        "mesh is a ShardingRules",
    ),
    "cluster and spec": (
        lambda mesh: mk.build_mesh(CPU, SPEC),
        r"spec is a Cluster, not a MeshSpec(.|\n)*meshkit.MeshSpec.parse",
    ),
    "a cluster's name": (
        lambda mesh: mk.describe_devices("dgx_h100"),
        r"cluster is a str, not a Cluster(.|\n)*meshkit.Cluster.load\(",
    ),
    "a name and an array": (
        lambda mesh: mk.constrain("act_batch", X),
        r"got a str as its array(.|\n)*constrain\(x, ",
    ),
    "step and arguments": (
        lambda mesh: mk.plan((X,), model, mesh=mesh, cluster=ABSENT),
        r"the step is a tuple, not a function(.|\n)*mk.Program\(step",
    ),
    "a spec in place of a mesh": (
        lambda mesh: mk.plan(model, (X,), mesh=SPEC, cluster=ABSENT),
        r"mesh is a MeshSpec, (.|\n)*meshkit.build_mesh\(spec, cluster\)",
    ),
    "mesh and cluster of a lint": (
        lambda mesh: mk.lint(model, (X,), mesh=ABSENT, cluster=mesh),
        "mesh is a Cluster, not a Mesh",
    ),
    "a compiled step": (
        lambda mesh: mk.plan(jax.jit(jnp.sin).lower(X).compile(), (X,), mesh=mesh, cluster=ABSENT),
        r"compiled already(.|\n)*without .lower",
    ),
    "flax's optimizer in place of optax's": (
        lambda mesh: mk.sharded_step(loss, mesh, RULES, optimizer=nnx.Optimizer(model(), optax.sgd(1), wrt=nnx.Param)),
        "optimizer is an Optimizer, not a GradientTransformation",
    ),
    "optimizer and model of a step": (
        lambda mesh: mk.sharded_step(loss, mesh, RULES)(
            nnx.Optimizer(model(), optax.sgd(1), wrt=nnx.Param), model(), X
        ),
        r"second argument is a Model, not an nnx.Optimizer(.|\n)*step\(model, optimizer, \*batch\)",
    ),
    "folders in place of reports": (
        lambda mesh: mk.compare("a", "b"),
        r"a is a str, not a Report(.|\n)*meshkit.read_report\(folder\)",
    ),
    "a folder to render": (lambda mesh: mk.render("a"), "report is a str, not a Report or Comparison"),
    "a page and its report": (lambda mesh: mk.write_html("page.html", X), "report is a str, not a Report"),
    "a program and its folder": (
        lambda mesh: mk.profile(loss, program="runs/mine").__enter__(),
        "folder is a function, not a str or Path",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_is_wrong_says_what_to_try(mesh, name):
    call, said = WRONG[name]
    with pytest.raises(mk.ConfigError, match=said):
        call(mesh)
