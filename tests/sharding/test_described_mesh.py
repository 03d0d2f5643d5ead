"""Test a mesh of absent GPUs wherever jax takes a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax import set_mesh  # This import comes before any described mesh is made.
from jax._src.mesh import thread_resources
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshkit as mk

CONTEXTS = {
    "set_mesh": jax.set_mesh,
    "set_mesh, imported before": set_mesh,
    "use_abstract_mesh": jax.sharding.use_abstract_mesh,
    "with": lambda mesh: mesh,
}


def described(axis_type):
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "tensor": 8})
    return mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster), axis_types=axis_type)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_specs_are_of_the_mesh_in_context(context, axis_type):
    mesh = described(axis_type)

    @jax.jit
    def step(x):
        constrain = jax.lax.with_sharding_constraint if axis_type is AxisType.Auto else jax.sharding.reshard
        return constrain(x * 2, PartitionSpec("data", "tensor"))

    with context(mesh):
        assert jax.sharding.get_abstract_mesh() == mesh
        traced = step.trace(jax.ShapeDtypeStruct((16, 16), jnp.float32))
        assert "tensor" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert jax.sharding.get_abstract_mesh().empty


def test_code_that_asks_for_the_mesh_of_a_with_block_gets_it():
    mesh = described(AxisType.Auto)
    with mesh, mesh:
        assert thread_resources.env.physical_mesh is mesh
    assert thread_resources.env.physical_mesh.empty


def test_set_as_a_call_it_stays_until_another_is_set():
    mesh = described(AxisType.Auto)
    jax.set_mesh(mesh)  # pyright: ignore[reportArgumentType]
    try:
        assert jax.sharding.get_abstract_mesh() == mesh
        jax.shard_map(lambda x: x, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"))
    finally:
        jax.set_mesh(None)
    assert jax.sharding.get_abstract_mesh().empty


def test_an_error_leaves_no_mesh_behind():
    mesh = described(AxisType.Auto)
    with pytest.raises(ValueError, match="mine"), mesh, jax.set_mesh(mesh):  # pyright: ignore[reportArgumentType]
        raise ValueError("mine")
    assert jax.sharding.get_abstract_mesh().empty


def test_what_is_no_mesh_is_refused_as_by_jax():
    described(AxisType.Auto)
    with pytest.raises(ValueError, match="Expected mesh of type"):
        jax.set_mesh("data")  # pyright: ignore[reportArgumentType]


def test_an_attached_mesh_is_set_as_ever():
    described(AxisType.Auto)
    attached = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(attached):
        x = jax.device_put(jnp.ones(8), NamedSharding(attached, PartitionSpec("data")))
        assert float(jax.jit(jnp.sum)(x)) == 8.0
