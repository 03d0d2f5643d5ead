"""Make steps that `mk.tune` finds by name, in other processes too."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk

SPEC = mk.MeshSpec.parse({"fsdp": 2, "tensor": 1})
RULES = mk.ShardingRules({"act_batch": "fsdp", "act_wide": "tensor"}, overrides=[("w", (["fsdp"], ["tensor"]))])


def small(mesh, wide=4096, layers=1):
    """Return a step of two matmuls and their gradients; `wide` need not divide."""

    def loss(params, x):
        with mk.sharding_scope(mesh, RULES):
            for _ in range(layers):
                hidden = mk.constrain(x @ params["w"], "act_batch", "act_wide")
                x = mk.constrain(hidden @ params["w"].T, "act_batch", None)
            return jnp.mean(x**2)

    step = jax.jit(lambda params, x: jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x)))
    params = mk.abstract(lambda: {"w": jnp.zeros((1024, wide))}, mesh, RULES)
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    return step, (params, x)
