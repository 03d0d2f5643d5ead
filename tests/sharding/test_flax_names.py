"""Test that Flax's own constraints count as meshkit's do inside a sharding_scope, and change nothing outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.linting.placements import Subject, lint
from meshkit.sharding.constrain import record_activations
from meshkit.sharding.resolve import placements

SPEC = mk.MeshSpec.parse({"data": 2, "fsdp": 2, "tensor": 2})
RULES = mk.ShardingRules(
    {
        "embed": "fsdp",
        "mlp": "tensor",
        "act_batch": ["data", "fsdp"],
        "batch": ["data", "fsdp"],
        "hidden": "tensor",
    }
)
WHOLE = PartitionSpec()


@pytest.fixture(scope="module")
def mesh():
    return mk.build_mesh(SPEC, mk.Cluster.load("cpu8"))


class Theirs(nn.Module):
    """A linen model that names its weights and activations by flax's own means."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up = nn.with_logical_partitioning(init, ("embed", "mlp"))
        down = nn.with_logical_partitioning(init, ("mlp", "embed"))
        x = nn.with_logical_constraint(x, ("batch", "embed"))
        h = nn.with_logical_constraint(nn.gelu(nn.Dense(64, kernel_init=up)(x)), ("batch", "hidden"))
        return nn.with_logical_constraint(nn.Dense(16, kernel_init=down)(h), ("batch", "embed"))


def in_scope(mesh, function, rules=RULES):
    def scoped(*args):
        with mk.sharding_scope(mesh, rules):
            return function(*args)

    return scoped


@pytest.fixture(scope="module")
def theirs(mesh):
    x = jax.random.normal(jax.random.key(1), (8, 16))
    boxed = Theirs().init(jax.random.key(0), x)
    variables = jax.device_put(nn.unbox(boxed), mk.shardings(boxed, mesh, RULES))

    def loss(variables, x):
        return jnp.mean((Theirs().apply(variables, x) - x) ** 2)

    return boxed, variables, x, loss


def test_a_foreign_linen_model_is_constrained_and_computes_the_same(mesh, theirs):
    boxed, variables, x, loss = theirs
    whole = jax.jit(jax.value_and_grad(loss))(nn.unbox(boxed), x)
    with record_activations() as record:
        cut = jax.jit(jax.value_and_grad(in_scope(mesh, loss)))(variables, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), cut, whole)
    assert [(a.logical_axes, a.spec) for a in record] == [
        # fsdp is taken: a mesh axis shards one dim, the first that asks for it.
        (
            ("batch", "embed"),
            (("data", "fsdp"), ()),
        ),
        (("batch", "hidden"), (("data", "fsdp"), ("tensor",))),
        (("batch", "embed"), (("data", "fsdp"), ())),
    ]
    out = jax.jit(in_scope(mesh, Theirs().apply))(variables, x)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(("data", "fsdp"))), 2)


def test_the_lint_counts_them(mesh, theirs):
    boxed, variables, x, loss = theirs
    with record_activations() as record:
        jax.eval_shape(in_scope(mesh, loss), variables, x)
    subject = Subject(placements(boxed, mesh, RULES), record, RULES, SPEC)
    assert "unconstrained_activations" not in {f.code for f in lint(subject)}
    nothing = Subject(placements(boxed, mesh, RULES), [], RULES, SPEC)
    assert "unconstrained_activations" in {f.code for f in lint(nothing)}


def test_the_lint_names_an_axis_that_does_not_divide_what_flax_asked(mesh):
    with record_activations() as record:
        ask = in_scope(mesh, lambda x: nn.with_logical_constraint(x, ("batch", "embed")))
        jax.eval_shape(ask, jnp.ones((6, 16)))
    (found,) = [f for f in lint(Subject([], record, RULES, SPEC)) if f.code == "axis_left_out"]
    assert (
        "dim 0 ('batch') of activation [6, 16] has size 6, which the 4 GPUs of mesh axis 'data' x 'fsdp'"
        in found.message
    )


def specs_of(mesh, function, x, rules=RULES):
    with record_activations() as record:
        jax.eval_shape(in_scope(mesh, function, rules), x)
    return [(a.spec, a.dropped) for a in record]


def test_rules_of_flax_win_and_meshkits_fill_what_they_leave(mesh):
    own = (("batch", "tensor"), ("embed", None))
    x = jnp.ones((8, 16))

    def ask(x):
        return nn.with_logical_constraint(x, ("batch", "hidden"))

    def inside(x):
        with nn.logical_axis_rules(own):
            return nn.with_logical_constraint(x, ("batch", "embed"))

    assert specs_of(mesh, inside, x) == [((("tensor",), ()), ())]
    with nn.logical_axis_rules(own):
        assert specs_of(mesh, ask, x) == [((("tensor",), ()), ())]  # hidden asks for tensor, which batch has.
    handed = specs_of(mesh, lambda x: nn.with_logical_constraint(x, ("batch", "hidden"), rules=(("batch", "data"),)), x)
    assert handed == [((("data",), ("tensor",)), ())]
    assert specs_of(mesh, lambda x: nn.logical_to_mesh_axes(("batch", "hidden")) and x, x) == []


def test_flaxs_ways_to_leave_dims_alone_are_kept(mesh):
    x = jnp.ones((8, 16))
    free = PartitionSpec.UNCONSTRAINED
    jaxpr = str(jax.make_jaxpr(in_scope(mesh, lambda x: nn.with_logical_constraint(x, (free, "hidden"))))(x))
    assert "UNCONSTRAINED, 'tensor'" in jaxpr
    fallback = nn.spmd.RulesFallback
    none = lambda x: nn.with_logical_constraint(x, ("batch", "nobody"), fallback=fallback.NO_CONSTRAINT)
    assert specs_of(mesh, none, x) == []
    with pytest.raises(ValueError, match="did not match a rule"):
        specs_of(mesh, lambda x: nn.with_logical_constraint(x, ("nobody",), fallback=fallback.RAISE_ERROR), x)
    uneven = specs_of(mesh, lambda x: nn.with_logical_constraint(x, ("batch", "embed")), jnp.ones((6, 16)))
    assert uneven == [((("data",), ()), ("fsdp",))]


def test_a_rule_of_flax_about_another_mesh_says_so(mesh):
    def ask(x):
        return nn.with_logical_constraint(x, ("batch",), rules=(("batch", "stage"),))

    with pytest.raises(mk.ConfigError, match=r"rule for 'batch' names mesh axis 'stage'.*has 'data', 'fsdp', 'tensor'"):
        specs_of(mesh, ask, jnp.ones(8))


def test_variables_with_names_can_be_made_inside_and_lie_as_the_rules_say(mesh):
    """Outside of a mesh, flax refuses variables with nnx's metadata; inside a scope they follow it."""
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))

    def make():
        return nnx.state(nnx.Linear(16, 64, kernel_init=init, rngs=nnx.Rngs(0)), nnx.Param)

    with pytest.raises(ValueError, match="mesh"):
        jax.jit(make)()
    state = jax.jit(in_scope(mesh, make))()
    wanted = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    assert state["kernel"].get_value().sharding.is_equivalent_to(wanted, 2)
    with nnx.use_eager_sharding(False):
        np.testing.assert_array_equal(state["kernel"].get_value(), jax.jit(make)()["kernel"].get_value())


def test_outside_of_a_scope_flax_is_flax(mesh, theirs):
    _, variables, x, loss = theirs
    in_scope(mesh, lambda: None)()
    assert nn.get_logical_axis_rules() == ()
    assert "sharding_constraint" not in str(jax.make_jaxpr(loss)(variables, x))
    with jax.set_mesh(mesh), nn.logical_axis_rules((("batch", "data"),)):
        assert "sharding_constraint" in str(jax.make_jaxpr(loss)(variables, x))
    with mk.sharding_scope(None, None):
        assert "sharding_constraint" not in str(jax.make_jaxpr(loss)(variables, x))
