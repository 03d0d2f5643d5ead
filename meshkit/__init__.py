"""meshkit: declarative meshes, sharding rules and truthful communication reports for JAX on NVIDIA GPU clusters.

All public names are here, and each is imported on first use: `import meshkit` does not import jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

_PUBLIC = {
    "Cluster": "meshkit.config.cluster",
    "ConfigError": "meshkit.errors",
    "Experiment": "meshkit.config.experiment",
    "Hook": "meshkit.verbs.train.hooks",
    "MeshSpec": "meshkit.config.mesh",
    "MeshkitError": "meshkit.errors",
    "Program": "meshkit.step.given",
    "ProgramError": "meshkit.errors",
    "Report": "meshkit.report.schema",
    "ShardingRules": "meshkit.config.rules",
    "SubmititExecutor": "meshkit.search.workers",
    "TraceError": "meshkit.errors",
    "abstract": "meshkit.sharding.resolve",
    "build_mesh": "meshkit.sharding.mesh",
    "collective_time_s": "meshkit.predict.network",
    "compare": "meshkit.report.compare",
    "constrain": "meshkit.sharding.constrain",
    "describe_devices": "meshkit.sharding.mesh",
    "explain": "meshkit.verbs.explain.explainer",
    "keep_shardings": "meshkit.sharding.resolve",
    "lint": "meshkit.linting.examine",
    "live": "meshkit.verbs.profile.live",
    "load_experiment": "meshkit.config.experiment",
    "init_distributed": "meshkit.runs.own_loop",
    "make_train_step": "meshkit.planning.resolved",
    "overlap": "meshkit.timeline",
    "pipeline": "meshkit.parallel.pipeline",
    "plan": "meshkit.planning.planner",
    "prepare_platform": "meshkit.sharding.mesh",
    "progress": "meshkit.runs.own_loop",
    "profile": "meshkit.verbs.profile.block",
    "read_report": "meshkit.report.folder",
    "render": "meshkit.report.views.report",
    "shard_model": "meshkit.sharding.resolve",
    "shard_over": "meshkit.sharding.constrain",
    "sharded_step": "meshkit.step.train_step",
    "sharding_scope": "meshkit.sharding.constrain",
    "shardings": "meshkit.sharding.resolve",
    "tune": "meshkit.search.tuner",
    "write_html": "meshkit.report.views.report",
}
_RENAMED = {"explain": "explain_step", "lint": "lint_step", "load_experiment": "load"}

if TYPE_CHECKING:
    from meshkit.config.cluster import Cluster
    from meshkit.config.experiment import Experiment
    from meshkit.config.experiment import load as load_experiment
    from meshkit.config.mesh import MeshSpec
    from meshkit.config.rules import ShardingRules
    from meshkit.errors import ConfigError, MeshkitError, ProgramError, TraceError
    from meshkit.linting.examine import lint_step as lint
    from meshkit.parallel.pipeline import pipeline
    from meshkit.planning.planner import plan
    from meshkit.planning.resolved import make_train_step
    from meshkit.predict.network import collective_time_s
    from meshkit.report.compare import compare
    from meshkit.report.folder import read_report
    from meshkit.report.schema import Report
    from meshkit.report.views.report import render, write_html
    from meshkit.runs.own_loop import init_distributed, progress
    from meshkit.search.tuner import tune
    from meshkit.search.workers import SubmititExecutor
    from meshkit.sharding.constrain import constrain, shard_over, sharding_scope
    from meshkit.sharding.mesh import build_mesh, describe_devices, prepare_platform
    from meshkit.sharding.resolve import abstract, keep_shardings, shard_model, shardings
    from meshkit.step.given import Program
    from meshkit.step.train_step import sharded_step
    from meshkit.timeline import overlap
    from meshkit.verbs.explain.explainer import explain_step as explain
    from meshkit.verbs.profile.block import profile
    from meshkit.verbs.profile.live import live
    from meshkit.verbs.train.hooks import Hook

__all__ = [
    "Cluster",
    "ConfigError",
    "Experiment",
    "Hook",
    "MeshSpec",
    "MeshkitError",
    "Program",
    "ProgramError",
    "Report",
    "ShardingRules",
    "SubmititExecutor",
    "TraceError",
    "abstract",
    "build_mesh",
    "collective_time_s",
    "compare",
    "constrain",
    "describe_devices",
    "explain",
    "init_distributed",
    "keep_shardings",
    "lint",
    "live",
    "load_experiment",
    "make_train_step",
    "overlap",
    "pipeline",
    "plan",
    "prepare_platform",
    "profile",
    "progress",
    "read_report",
    "render",
    "shard_model",
    "shard_over",
    "sharded_step",
    "sharding_scope",
    "shardings",
    "tune",
    "write_html",
]


def __getattr__(name: str):
    if name == "__version__":
        from importlib import metadata  # its import takes longer than the rest of this module

        return metadata.version("meshkit")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'meshkit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
