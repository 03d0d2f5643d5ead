"""meshkit: declarative meshes, sharding rules and truthful communication reports for JAX on NVIDIA GPU clusters.

Everything public is here, and imported only when it is used: `import meshkit` costs no jax.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING

_PUBLIC = {
    "Cluster": "meshkit.spec.cluster",
    "ConfigError": "meshkit.errors",
    "Experiment": "meshkit.spec.experiment",
    "MeshSpec": "meshkit.spec.mesh",
    "MeshkitError": "meshkit.errors",
    "ProgramError": "meshkit.errors",
    "Report": "meshkit.report.schema",
    "ShardingRules": "meshkit.spec.rules",
    "TraceError": "meshkit.errors",
    "build_mesh": "meshkit.sharding.mesh",
    "collective_time_s": "meshkit.timeline.network",
    "compare": "meshkit.report.compare",
    "constrain": "meshkit.sharding.constrain",
    "describe_devices": "meshkit.sharding.devices",
    "load_experiment": "meshkit.spec.experiment",
    "make_train_step": "meshkit.training.step",
    "overlap": "meshkit.timeline.spans",
    "pipeline": "meshkit.parallel.pipeline",
    "plan": "meshkit.planner",
    "prepare_platform": "meshkit.sharding.devices",
    "profile": "meshkit.profiler",
    "read_report": "meshkit.report.schema",
    "shard_model": "meshkit.sharding.resolve",
    "shard_over": "meshkit.sharding.constrain",
    "sharding_scope": "meshkit.sharding.constrain",
    "shardings": "meshkit.sharding.resolve",
}
_RENAMED = {"load_experiment": "load"}

if TYPE_CHECKING:
    from meshkit.errors import ConfigError, MeshkitError, ProgramError, TraceError
    from meshkit.parallel.pipeline import pipeline
    from meshkit.planner import plan
    from meshkit.profiler import profile
    from meshkit.report.compare import compare
    from meshkit.report.schema import Report, read_report
    from meshkit.sharding.constrain import constrain, shard_over, sharding_scope
    from meshkit.sharding.devices import describe_devices, prepare_platform
    from meshkit.sharding.mesh import build_mesh
    from meshkit.sharding.resolve import shard_model, shardings
    from meshkit.spec.cluster import Cluster
    from meshkit.spec.experiment import Experiment
    from meshkit.spec.experiment import load as load_experiment
    from meshkit.spec.mesh import MeshSpec
    from meshkit.spec.rules import ShardingRules
    from meshkit.timeline.network import collective_time_s
    from meshkit.timeline.spans import overlap
    from meshkit.training.step import make_train_step

__all__ = [
    "Cluster",
    "ConfigError",
    "Experiment",
    "MeshSpec",
    "MeshkitError",
    "ProgramError",
    "Report",
    "ShardingRules",
    "TraceError",
    "build_mesh",
    "collective_time_s",
    "compare",
    "constrain",
    "describe_devices",
    "load_experiment",
    "make_train_step",
    "overlap",
    "pipeline",
    "plan",
    "prepare_platform",
    "profile",
    "read_report",
    "shard_model",
    "shard_over",
    "sharding_scope",
    "shardings",
]


def __getattr__(name: str):
    if name == "__version__":
        return metadata.version("meshkit")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
