"""Test optimizer states whose arrays differ in shape from the parameters, and names that are nearly right."""

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import meshkit as mk
from meshkit.sharding.resolve import kept_spec
from meshkit.step.given import group_arguments

P = PartitionSpec
RULES = mk.ShardingRules({"embed": "fsdp", "mlp": "tensor"}, overrides=[("**/plain", ("fsdp", "tensor"))])
FACTORED = optax.adafactor(1e-2, min_dim_size_to_factor=4)


@pytest.fixture(scope="module")
def mesh():
    return mk.build_mesh(mk.MeshSpec.parse({"fsdp": 4, "tensor": 2}), mk.Cluster.load("cpu8"))


@pytest.mark.parametrize(
    ("whole", "shape", "kept"),
    [
        ((8, 16), (8,), (("fsdp",),)),
        ((8, 16), (16,), (("tensor",),)),
        ((8, 16), (1,), ((),)),
        ((8, 8), (8,), ((),)),  # It is one of the two dims, but which one is unknown.
        ((3, 8, 8), (3, 8), ((), ())),
        ((8, 16), (), ()),
        ((8, 16), (8, 16), (("fsdp",), ("tensor",))),
    ],
)
def test_a_statistic_is_cut_as_the_dims_that_it_keeps(whole, shape, kept):
    spec = (("fsdp",), ("tensor",)) if len(whole) == 2 else ((), ("fsdp",), ("tensor",))
    assert kept_spec(spec, whole, shape) == kept


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(32, kernel_init=init, name="up")(x)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)


def test_adafactor_of_boxed_linen_parameters_is_born_sharded_and_steps(mesh):
    x = jnp.ones((8, 16))

    def make():
        variables = Linen().init(jax.random.key(0), x)
        return {"params": variables, "opt_state": FACTORED.init(variables)}

    layout = mk.shardings(jax.eval_shape(make), mesh, RULES)
    rows, columns = (getattr(layout["opt_state"][0], name)["params"]["up"] for name in ("v_row", "v_col"))
    assert (rows["kernel"].spec, columns["kernel"].spec) == (P("fsdp"), P("tensor"))
    assert rows["bias"].spec == P(None)  # Nothing fills this place.
    state = jax.jit(make, out_shardings=layout)()

    @jax.jit
    def step(state):
        gradients = jax.grad(lambda v: jnp.mean(Linen().apply(v, x) ** 2))(state["params"])
        updates, opt_state = FACTORED.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), step(state), step(make()))


def test_adafactor_of_an_nnx_optimizer_and_of_plain_arrays(mesh):
    def make():
        model = Nnx(nnx.Rngs(0))
        return model, nnx.Optimizer(model, FACTORED, wrt=nnx.Param)

    with nnx.use_eager_sharding(False):
        shapes = nnx.state(nnx.eval_shape(make))
    found = {
        path[-3:]: v.get_raw_value().spec
        for path, v in nnx.to_flat_state(mk.shardings(shapes, mesh, RULES))
        if "kernel" in path
    }
    assert found["v_row", "up", "kernel"] == P("fsdp")
    assert found["v_col", "up", "kernel"] == P("tensor")
    params = {"a": {"plain": jnp.ones((16, 32))}}
    alone = mk.shardings(FACTORED.init(params), mesh, RULES)  # Nothing here says which parameter the rows belong to.
    assert alone[0].v_row["a"]["plain"].spec == P(None)
    both = mk.shardings({"params": params, "state": FACTORED.init(params)}, mesh, RULES)
    assert both["state"][0].v_row["a"]["plain"].spec == P("fsdp")


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A module of attributes, as Equinox's are."""

    weight: Any


def test_attributes_below_params_are_parameters(mesh):
    params = {"layers": [Layer(jnp.ones((8, 8)))]}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    found = mk.shardings(state, mesh, mk.ShardingRules({}, overrides=[("layers/0/weight", ("fsdp", None))]))
    assert found["params"]["layers"][0].weight.spec == P("fsdp", None)
    assert found["opt_state"][0].mu["layers"][0].weight.spec == P("fsdp", None)
    groups = group_arguments((state,))
    assert [*groups.parameters] == ["params/layers/0/weight"]
    assert len(groups.optimizer) == 3


def test_a_parameter_of_the_wrong_rank_stays_an_error(mesh):
    with pytest.raises(mk.ConfigError, match="names 2 dims, but the array has shape"):
        mk.shardings({"a": {"plain": jnp.ones(16)}}, mesh, RULES)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"embed": "fsdp", "mpl": "tensor"}, "'mlp', and the rule for 'mpl' matches no dim here: use one spelling"),
        ({"embd": "fsdp", "mlp": "tensor"}, "'embed', and the rule for 'embd' matches no dim here: use one spelling"),
        ({"embed": "fsdp", "mlp": "tensor", "heads": "tensor"}, None),
    ],
)
def test_a_misspelt_rule_is_found_where_parameters_are_placed(mesh, rules, said):
    shapes = jax.eval_shape(Linen().init, jax.random.key(0), jnp.ones((8, 16)))
    if said:
        with pytest.warns(UserWarning, match=said) as caught:
            mk.shardings(shapes, mesh, mk.ShardingRules(rules))
        assert caught[0].filename == __file__
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mk.shardings(shapes, mesh, mk.ShardingRules(rules))


@pytest.mark.parametrize(("name", "misspelt"), [("act_embd", True), ("act_embed", False), ("act_kv_heads", False)])
def test_a_misspelt_name_is_found_where_activations_are_constrained(mesh, name, misspelt):
    rules = mk.ShardingRules({"act_embed": "tensor", "act_heads": "tensor"})

    def apply(x):
        with mk.sharding_scope(mesh, rules):
            return mk.constrain(x, None, name)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(apply)(jnp.ones((8, 16)))
    assert [w.filename for w in caught] == [__file__] * misspelt
