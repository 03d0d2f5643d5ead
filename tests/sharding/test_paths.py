"""Test overrides by path on trees that hold more than the model: tuples, dicts, optimizers, a TrainState."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import meshkit as mk

RULES = mk.ShardingRules({}, overrides=[("wi", (None, "tensor")), ("inner/wo", ("tensor", None))])
WI, WO = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None)


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.wi = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.wo = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.wi = nnx.Param(jax.random.normal(rngs.params(), (8, 16)))
        self.inner = Inner(rngs)


@pytest.fixture(scope="module")
def mesh():
    return mk.build_mesh(mk.MeshSpec.parse({"data": 4, "tensor": 2}), mk.Cluster.load("cpu8"))


def made():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def spec(variable):
    return variable.get_raw_value().sharding.spec


def test_an_override_places_a_parameter_and_its_moments_in_a_tuple(mesh):
    model, optimizer = mk.shard_model(made, mesh, RULES)
    moments = optimizer.opt_state[0].mu
    assert (spec(model.wi), spec(model.inner.wo)) == (WI, WO)
    assert (spec(moments["wi"]), spec(moments["inner"]["wo"])) == (WI, WO)
    whole = {spec(v) for v in (model.inner.wi, moments["inner"]["wi"])}
    # The override is for the model's own `wi`, not the one inside of `inner`.
    assert whole == {PartitionSpec(None, None)}
    assert model.wi.get_raw_value().addressable_shards[0].data.shape == (8, 8)


def test_an_override_places_a_parameter_and_its_moments_in_a_dict(mesh):
    tree = mk.abstract(lambda: dict(zip(("network", "adam"), made())), mesh, RULES)
    found = [spec(tree["network"].wi), spec(tree["adam"].opt_state[0].nu["inner"]["wo"])]
    assert found == [WI, WO]


def test_frozen_parameters_have_paths_within_the_model_too(mesh):
    def make():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=lambda path, _: path == ("wi",))

    model, _ = mk.abstract(make, mesh, RULES)
    assert (spec(model.wi), spec(model.inner.wo), spec(model.inner.wi)) == (WI, WO, PartitionSpec(None, None))


def test_a_train_state_of_linen(mesh):
    class Dense(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="up")(x)

    def make():
        params = Dense().init(jax.random.key(0), jnp.zeros((2, 8)))["params"]
        return TrainState.create(apply_fn=Dense().apply, params=params, tx=optax.adam(1e-3))

    for glob in ("up/kernel", "params/up/kernel", "params/**/kernel"):
        state = mk.abstract(make, mesh, mk.ShardingRules({}, overrides=[(glob, (None, "tensor"))]))
        assert state.params["up"]["kernel"].sharding.spec == WI
        assert state.opt_state[0].mu["up"]["kernel"].sharding.spec == WI


def test_moments_follow_the_override_of_the_nearest_parameter(mesh):
    def network():
        params = {"wi": jnp.zeros((8, 16))}
        return {"params": params, "opt_state": optax.adam(1e-3).init(params)}

    rules = mk.ShardingRules({}, overrides=[("one/params/wi", (None, "tensor")), ("other/params/wi", ("tensor", None))])
    state = mk.abstract(lambda: {"one": network(), "other": network()}, mesh, rules)
    assert [state[k]["opt_state"][0].mu["wi"].sharding.spec for k in ("one", "other")] == [WI, WO]


def test_the_whole_path_still_matches_and_the_first_match_wins(mesh):
    rules = mk.ShardingRules({}, overrides=[("0/wi", ("tensor", None)), ("wi", (None, "tensor"))])
    model, optimizer = mk.abstract(made, mesh, rules)
    assert (spec(model.wi), spec(optimizer.opt_state[0].mu["wi"])) == (PartitionSpec("tensor", None), WI)


def test_an_override_that_matches_nothing_warns_and_proposes_a_path(mesh):
    rules = mk.ShardingRules({}, overrides=[("inner/w0", ("tensor", None)), ("**/wi", (None, "tensor"))])
    with pytest.warns(
        UserWarning, match=r"path 'inner/w0' matches none of these \d+ arrays: did you mean \"inner/w[io]\""
    ):
        mk.shard_model(made, mesh, rules)
    with pytest.warns(UserWarning, match="'inner/w0' matches none"):
        mk.shardings(nnx.state(made()[0]), mesh, rules)


def test_a_proposed_path_is_one_within_the_model(mesh):
    rules = mk.ShardingRules({}, overrides=[("1/inner/wo", (None, "tensor"))], strict=True)
    with pytest.raises(mk.ConfigError, match=r"'1/inner/wo' matches none of these(.|\n)*try .inner/wo"):
        mk.shard_model(made, mesh, rules)


def test_strict_rules_stop_at_an_override_that_matches_nothing(mesh):
    rules = mk.ShardingRules({}, overrides=[("inner/w0", ("tensor", None))], strict=True)
    with pytest.raises(mk.ConfigError, match="'inner/w0' matches none of these"):
        mk.shard_model(made, mesh, rules)


def with_average():
    model, optimizer = made()
    return model, optimizer, Model(nnx.Rngs(1))


def as_dict(optimizer):
    def make():
        params = {"wi": jnp.zeros((8, 16)), "inner": {"wo": jnp.zeros((16, 8)), "bias": jnp.zeros(8)}}
        return {"params": params, "opt_state": optimizer.init(params), "batch_stats": {"wi_mean": jnp.zeros(8)}}

    return make


def frozen_bias(params):
    return jax.tree.map(lambda x: "trained" if x.ndim > 1 else "frozen", params)


STATES = {
    "modules and an average of one": with_average,
    "a dict of parameters and an optimizer": as_dict(optax.adam(1e-3)),
    "a part of which the optimizer has no state": as_dict(
        optax.multi_transform({"trained": optax.adam(1e-3), "frozen": optax.set_to_zero()}, frozen_bias)
    ),
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
@pytest.mark.parametrize("together", [False, True], ids=["an argument each", "one argument"])
def test_overrides_place_every_array_where_lint_looks_for_it(make, together, mesh):
    rules = mk.ShardingRules({}, overrides=RULES.overrides, strict=True)
    state = mk.abstract(lambda: (make(), jnp.zeros(4)) if together else make(), mesh, rules)
    args = (state,) if together or isinstance(state, dict) else state
    step = jax.jit(lambda *args: jax.tree.map(lambda x: x, nnx.state(args)))
    codes = {f.code for f in mk.lint(step, args, mesh=mesh, cluster=mk.Cluster.load("cpu8"), rules=rules)}
    assert not codes & {"placed_otherwise", "rule_never_used"}
