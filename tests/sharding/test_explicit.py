"""Test explicit sharding: `constrain` reshards, a scope enters the mesh, and plan takes such steps, also of nnx."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.sharding.constrain import record_activations

RULES = mk.ShardingRules(
    {"act_batch": "data", "act_mlp": "tensor"}, overrides=[("w1", (None, "tensor")), ("w2", ("tensor", None))]
)
SPEC = mk.MeshSpec.parse({"data": 4, "tensor": 2})
H100S = mk.Cluster.load("dgx_h100")


def mesh_of(cluster="cpu8", spec=SPEC, types=AxisType.Explicit, **options):
    machines = mk.Cluster.load(cluster, **options)
    return mk.build_mesh(
        spec, machines, devices=None if machines.is_cpu else mk.describe_devices(machines), axis_types=types
    )


def loss_of(p, x, out):
    h = mk.constrain(jax.nn.relu(x @ p["w1"]), "act_batch", "act_mlp")
    return jnp.mean((jnp.einsum("bf,fd->bd", h, p["w2"], **out) - x) ** 2)


def make_step(mesh, out):
    def step(p, x):
        with mk.sharding_scope(mesh, RULES):
            loss, gradients = jax.value_and_grad(loss_of)(p, x, out)
            return jax.tree.map(lambda a, b: a - 0.1 * b, p, gradients), loss

    return step


EXPLICIT = {"out_sharding": PartitionSpec("data", None)}


@pytest.fixture(scope="module")
def values():
    a, b, c = jax.random.split(jax.random.key(0), 3)
    p = {"w1": jax.random.normal(a, (16, 32)), "w2": jax.random.normal(b, (32, 16))}
    return p, jax.random.normal(c, (8, 16))


def on(mesh, values):
    p, x = values
    places = mk.shardings(p, mesh, RULES), NamedSharding(mesh, PartitionSpec("data"))
    if isinstance(mesh, jax.sharding.Mesh):
        return jax.device_put(p, places[0]), jax.device_put(x, places[1])
    return jax.tree.map(lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s), values, places)


def rows(report):
    return [(r.axes, r.collective, r.payload_bytes) for r in report.communication]


def test_an_explicit_step_computes_what_the_plain_one_does(values):
    whole = jax.jit(make_step(None, {}))(*values)
    mesh = mesh_of()
    with record_activations() as record:
        cut = jax.jit(make_step(mesh, EXPLICIT))(*on(mesh, values))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), cut, whole)
    assert cut[0]["w1"].sharding.spec == PartitionSpec(None, "tensor")
    assert [a.spec for a in record] == [(("data",), ("tensor",))]


@pytest.mark.parametrize("types", [AxisType.Explicit, {"data": AxisType.Explicit}])
def test_constrain_reshards_explicit_axes_and_leaves_the_others_to_xla(values, types):
    mesh = mesh_of(types=types)
    x = jax.device_put(values[1], NamedSharding(mesh, PartitionSpec(None, None)))
    seen = []

    def moved(x):
        with mk.sharding_scope(mesh, RULES):
            y = mk.constrain(x, "act_batch", "act_mlp")
            seen.append(jax.typeof(y).sharding.spec)
            return y

    assert jax.jit(moved)(x).sharding.spec == PartitionSpec("data", "tensor")
    assert seen == [PartitionSpec("data", "tensor" if types is AxisType.Explicit else None)]
    if types is AxisType.Explicit:  # It also works outside of jit.
        assert moved(x).sharding.spec == PartitionSpec("data", "tensor")


@pytest.mark.deviceless
def test_plan_takes_explicit_steps_on_described_and_on_attached_meshes(values):
    found = []
    for mesh in (mesh_of("dgx_h100"), mesh_of()):
        report = mk.plan(make_step(mesh, EXPLICIT), on(mesh, values), mesh=mesh, cluster=H100S)
        found.append(rows(report))
    assert found[0] == found[1]
    assert {tuple(axes) for axes, *_ in found[0]} == {("data",), ("tensor",)}


class Net(nnx.Module):
    """A model written as in flax's guide to explicit sharding."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (16, 32)), out_sharding=(None, "tensor"))
        self.down = nnx.Param(init(rngs.params(), (32, 16)), out_sharding=("tensor", None))

    def __call__(self, x):
        h = jnp.dot(x, self.up[...], out_sharding=PartitionSpec("data", "tensor"))
        return jnp.dot(jax.nn.relu(h), self.down[...], out_sharding=PartitionSpec("data", None))


@pytest.mark.deviceless
def test_an_explicit_nnx_step_of_somebody_else_trains_and_is_planned():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)

    @nnx.jit
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(x) - x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    with jax.set_mesh(mesh):
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, PartitionSpec("data")))
        assert model.up.get_value().sharding.spec == PartitionSpec(None, "tensor")
        report = mk.plan(step, (model, optimizer, x), mesh=mesh, cluster=H100S)
        first, second = step(model, optimizer, x), step(model, optimizer, x)
    assert second < first
    assert {tuple(axes) for axes, *_ in rows(report)} == {("data",), ("tensor",)}


@pytest.mark.parametrize("types", [AxisType.Explicit, AxisType.Auto])
def test_a_step_that_closes_over_a_mesh_of_another_size_says_what_to_do(types, values):
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2, "nvlink": 4}, "tensor": 2})
    absent, small = mesh_of("dgx_h100", spec, types, hosts=2), mesh_of(types=types)
    step, arguments = make_step(small, EXPLICIT if types is AxisType.Explicit else {}), on(absent, values)
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    with pytest.raises(mk.ProgramError, match=r"closes over another mesh.*data 8 x tensor 2, 16 GPUs") as caught:
        mk.plan(step, arguments, mesh=absent, cluster=cluster)
    assert "make_step(mesh)" in caught.value.hint


@pytest.mark.parametrize(("types", "said"), [({"dat": AxisType.Auto}, "'data'"), ("Explicit", "AxisType.Explicit")])
def test_types_of_no_axis(types, said):
    with pytest.raises(mk.ConfigError) as caught:
        mesh_of(types=types)
    assert said in caught.value.hint
