"""Test `mk.abstract`, which returns what a function would make, with its shardings."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import meshkit as mk

RULES = mk.ShardingRules({"embed": "fsdp", "mlp": "tensor"}, overrides=[("w", ("fsdp", None))])
KERNEL = PartitionSpec("fsdp", "tensor")


@pytest.fixture(scope="module")
def mesh():
    cluster = mk.Cluster.load("dgx_h100")
    return mk.build_mesh(mk.MeshSpec.parse({"fsdp": 4, "tensor": 2}), cluster, devices=mk.describe_devices(cluster))


class Net(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


def test_modules_and_their_optimizer(mesh):
    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = mk.abstract(make, mesh, RULES)
    assert isinstance(model, Net)
    assert model.up.kernel.get_value().sharding.spec == KERNEL
    assert optimizer.opt_state[0].mu["up"]["kernel"].get_raw_value().sharding.spec == KERNEL
    assert {type(x) for x in jax.tree.leaves(nnx.state((model, optimizer)))} == {jax.ShapeDtypeStruct}


def test_boxes_and_plain_arrays(mesh):
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.Dense(32, kernel_init=init, name="up")(x)

    variables = mk.abstract(lambda: Linen().init(jax.random.key(0), jnp.ones((2, 16))), mesh, RULES)
    box = variables["params"]["up"]["kernel"]
    assert box.names == ("embed", "mlp")
    assert box.unbox(apply_constraint=False).sharding.spec == KERNEL
    plain = mk.abstract(lambda: {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, mesh, RULES)
    assert plain["w"].sharding.spec == PartitionSpec("fsdp", None)
    assert plain["b"].shape == (4,)
