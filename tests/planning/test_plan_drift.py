"""Test that plan reports a step whose state changes its sharding, and that `mk.keep_shardings` prevents the change."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk

SPEC = mk.MeshSpec.parse({"data": 2, "tensor": 4})
RULES = mk.ShardingRules({"act_batch": "data", "mlp": "tensor", "act_mlp": "tensor"}, overrides=[("**/bias", (None,))])
OPTIMIZER = optax.adam(1e-2)


class Feed(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(16, 32, kernel_init=nnx.with_partitioning(init, (None, "mlp")), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=nnx.with_partitioning(init, ("mlp", None)), rngs=rngs)

    def __call__(self, x):
        return self.down(mk.constrain(jax.nn.relu(self.up(x)), "act_batch", "act_mlp"))


def make():
    model = Feed(nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def of_modules(mesh, around):
    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    @around
    def step(model, optimizer, x):
        def loss(model):
            with mk.sharding_scope(mesh, RULES):
                return jnp.mean((model(x) - x) ** 2)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    return step


def of_arrays(mesh, **how):
    def loss(params, x):
        with mk.sharding_scope(mesh, RULES):
            hidden = mk.constrain(jax.nn.relu(x @ params["w"] + params["bias"]), "act_batch", "act_mlp")
        return jnp.mean(hidden**2)

    def step(params, moments, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, moments = OPTIMIZER.update(gradients, moments)
        return value, (optax.apply_updates(params, updates), moments)

    return jax.jit(step, **how), jax.jit(jax.grad(loss))


@pytest.fixture(scope="module")
def target():
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    return {"cluster": cluster, "mesh": mk.build_mesh(SPEC, cluster, devices=mk.describe_devices(cluster))}


def batch(mesh):
    return jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))


def drifts(report):
    return [warning.message for warning in report.warnings if warning.code == "state_drifts"]


@pytest.mark.deviceless
def test_a_step_of_modules_that_drifts_is_told_of_with_the_paths_and_kept_shardings_end_it(target):
    args = (*mk.abstract(make, target["mesh"], RULES), batch(target["mesh"]))
    (message,) = drifts(mk.plan(of_modules(target["mesh"], lambda step: step), args, **target))
    assert "3 of 14 arrays of the state" in message
    assert "up/bias (f32[32] a GPU before, f32[8] after), opt_state/0/mu/up/bias" in message
    assert "@meshkit.keep_shardings(mesh, rules)" in message
    kept = of_modules(target["mesh"], mk.keep_shardings(target["mesh"], RULES))
    assert drifts(mk.plan(kept, args, **target)) == []
    explained = mk.explain(of_modules(target["mesh"], lambda step: step), args, rules=RULES, **target)
    assert "state_drifts" in {finding.code for finding in explained.findings}


@pytest.mark.deviceless
def test_a_step_of_arrays_that_drifts_is_told_of_and_gradients_are_none(target):
    def made():
        params = {"w": jnp.ones((16, 32)), "bias": jnp.zeros(32)}
        return params, OPTIMIZER.init(params)

    args = (*mk.abstract(made, target["mesh"], RULES), batch(target["mesh"]))
    step, gradient = of_arrays(target["mesh"])
    (message,) = drifts(mk.plan(step, args, **target))
    assert "bias (f32[32] a GPU before, f32[8] after)" in message
    layout = jax.tree.map(lambda array: array.sharding, args[:2])
    assert drifts(mk.plan(of_arrays(target["mesh"], out_shardings=(None, layout))[0], args, **target)) == []
    # Gradients have the parameters' shapes, but they are not the parameters.
    assert drifts(mk.plan(gradient, (args[0], args[2]), **target)) == []


def test_kept_shardings_let_a_compiled_step_be_called_again():
    mesh = mk.build_mesh(SPEC, mk.Cluster.load("cpu8"))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, PartitionSpec("data")))
    model, optimizer = mk.shard_model(make, mesh, RULES)
    drifting = of_modules(mesh, lambda step: step).lower(model, optimizer, x).compile()
    drifting(model, optimizer, x)
    with pytest.raises(ValueError, match="sharding"):
        drifting(model, optimizer, x)
    model, optimizer = mk.shard_model(make, mesh, RULES)
    whole = model.up.bias.get_value().sharding
    step = of_modules(mesh, mk.keep_shardings(mesh, RULES)).lower(model, optimizer, x).compile()
    losses = [step(model, optimizer, x) for _ in range(3)]
    assert losses[2] < losses[0]
    for bias in (model.up.bias, optimizer.opt_state[0].mu["up"]["bias"]):
        assert bias.get_value().sharding.is_equivalent_to(whole, 1)


def test_kept_shardings_are_of_modules():
    mesh = mk.build_mesh(SPEC, mk.Cluster.load("cpu8"))
    step = mk.keep_shardings(mesh, RULES)(lambda state, x: state)
    with pytest.raises(mk.ConfigError, match=r"got a dict, an int, but none is an nnx module(.|\n)*out_shardings"):
        step({"w": 1}, 2)
