"""Test `mk.sharded_step`: models of others, unedited, train as unsharded ones do, and plan takes the same step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import meshkit as mk

RULES = mk.ShardingRules({"act_batch": ["data", "fsdp"]}, auto={"axis": "fsdp", "min_bytes": 256})
SPEC = mk.MeshSpec.parse({"data": 2, "fsdp": 4})


class Theirs(nnx.Module):
    """A model without names, with state of its own."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(nnx.relu(self.first(x))))


def make():
    model = Theirs(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss(model, x):
    return jnp.mean((model(mk.constrain(x, "act_batch", None)) - x) ** 2)


def losses(step, state, x):
    return [float(step(*state, x)) for _ in range(3)]


X = jax.random.normal(jax.random.key(1), (16, 16))


def test_an_nnx_model_trains_as_unsharded_and_stays_where_it_was():
    mesh = mk.build_mesh(SPEC, mk.Cluster.load("cpu8"))
    model, optimizer = mk.shard_model(make, mesh, RULES)
    before = model.first.kernel.get_value().sharding
    assert "fsdp" in before.spec
    found = losses(mk.sharded_step(loss, mesh, RULES), (model, optimizer), X)

    @nnx.jit
    def plain(model, optimizer, x):
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    np.testing.assert_allclose(found, losses(plain, make(), X), rtol=1e-5)
    assert model.first.kernel.get_value().sharding.is_equivalent_to(before, 2)
    moment = optimizer.opt_state[0].mu["first"]["kernel"].get_value()
    assert moment.sharding.is_equivalent_to(before, 2)


def test_a_loss_may_return_more_than_its_value():
    mesh = mk.build_mesh(SPEC, mk.Cluster.load("cpu8"))

    def with_aux(model, x):
        return loss(model, x), {"rows": x.shape[0]}

    plain = mk.sharded_step(loss, mesh, RULES)(*mk.shard_model(make, mesh, RULES), X)
    value, aux = mk.sharded_step(with_aux, mesh, RULES)(*mk.shard_model(make, mesh, RULES), X)
    assert (value, aux) == (plain, {"rows": 16})

    def of(params, x):
        return jnp.sum((x @ params["w"]) ** 2), params["w"][0, 0]

    optimizer, params = optax.sgd(0.1), {"w": jnp.ones((16, 16))}
    step = mk.sharded_step(of, mesh, RULES, optimizer=optimizer)
    _, (value, before) = step({"params": params, "opt_state": optimizer.init(params)}, X)
    assert before == 1
    np.testing.assert_allclose(value, jnp.sum((X @ jnp.ones((16, 16))) ** 2), rtol=1e-5)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.relu(nn.Dense(32)(x)))


@pytest.mark.deviceless
def test_a_linen_model_trains_as_unsharded_and_is_planned():
    optimizer = optax.adam(1e-2)

    def made():
        params = Linen().init(jax.random.key(0), X)
        return {"params": params, "opt_state": optimizer.init(params)}

    def of(params, x):
        return jnp.mean((Linen().apply(params, mk.constrain(x, "act_batch", None)) - x) ** 2)

    mesh = mk.build_mesh(SPEC, mk.Cluster.load("cpu8"))
    step, state = mk.sharded_step(of, mesh, RULES, optimizer=optimizer), mk.shard_model(made, mesh, RULES)
    found = []
    for _ in range(2):
        state, value = step(state, X)
        found.append(float(value))
    whole = made()
    for value in found:
        plain, gradients = jax.value_and_grad(of)(whole["params"], X)
        updates, moments = optimizer.update(gradients, whole["opt_state"], whole["params"])
        whole = {"params": optax.apply_updates(whole["params"], updates), "opt_state": moments}
        np.testing.assert_allclose(value, plain, rtol=1e-5)
    cluster = mk.Cluster.load("dgx_h100")
    absent = mk.build_mesh(SPEC, cluster, devices=mk.describe_devices(cluster))
    step = mk.sharded_step(of, absent, RULES, optimizer=optimizer)
    report = mk.plan(step, (mk.abstract(made, absent, RULES), X), mesh=absent, cluster=cluster)
    assert {row.collective for row in report.communication} >= {"all-gather"}
    assert "dead_update" not in {warning.code for warning in report.warnings}
