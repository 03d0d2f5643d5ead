"""Config to jax: devices, meshes, shardings, constraints, and the communication that a strategy allows.

Input: a cluster, a mesh's spec, rules, a tree of arrays. Output: a mesh, NamedShardings, constraints, a `Strategy`.
May be imported by models, parallel, step, compile, linting and the verbs.
"""

from meshkit.sharding.constrain import (
    attention_implementation,
    constrain,
    current_scope,
    shard_over,
    shard_over_mesh,
    sharding_scope,
)
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices, prepare_platform
from meshkit.sharding.resolve import shard_model, shardings

__all__ = [
    "DescribedMesh",
    "attention_implementation",
    "build_mesh",
    "constrain",
    "current_scope",
    "describe_devices",
    "prepare_platform",
    "shard_model",
    "shard_over",
    "shard_over_mesh",
    "sharding_scope",
    "shardings",
]
