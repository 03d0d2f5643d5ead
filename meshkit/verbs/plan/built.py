"""Variants of a step of anybody's: a function that builds it for a mesh, and values for the choices that it takes.

    build(mesh, **choices) -> (step, args) -> plan -> Outcome

A variant is settings, as it is of an experiment: `mesh={ fsdp = 8 }`, `remat="full"`. So a request for it stays a line
of JSON, which names the function and carries no code.
"""

from __future__ import annotations

import importlib
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshkit.compile.options import PLAIN
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.config.toml_text import inline
from meshkit.errors import MeshkitError
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.units import format_bytes
from meshkit.verbs.plan.outcome import Outcome, outcome_of
from meshkit.verbs.plan.planner import make_plan

Build = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class BuiltStep:
    """A step as it is, before anything is changed: a mesh of a cluster, and a value of every choice."""

    cluster: Cluster
    mesh: MeshSpec
    choices: Mapping[str, Any]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> BuiltStep:
        """What `to_dict` gave."""
        return cls(Cluster.load(plain["cluster"]), MeshSpec.parse(plain["mesh"]), plain["choices"])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"cluster": self.cluster.to_dict(), "mesh": self.mesh.to_dict(), "choices": dict(self.choices)}


def plan_named(name: str, base: BuiltStep, settings: tuple[str, ...]) -> Outcome:
    """The outcome of one variant of what a function of that name, `pkg.mod:fn`, builds."""
    module, _, path = name.partition(":")
    build: Any = importlib.import_module(module)
    for part in path.split("."):
        build = getattr(build, part)
    return plan_built(build, base, settings)


def plan_built(build: Build, base: BuiltStep, settings: tuple[str, ...]) -> Outcome:
    """The outcome of one variant; what goes wrong is one too. Arguments that leave no room are not compiled."""
    start, cluster = time.perf_counter(), base.cluster
    changed = {key: value for setting in settings for key, value in tomllib.loads(setting).items()}
    spec = (MeshSpec.parse(changed.pop("mesh")) if "mesh" in changed else base.mesh).resolve(cluster)
    axes = {name: inline(value) for name, value in spec.to_dict().items()}

    def not_planned(status: Any, error: str) -> Outcome:
        wall_s = time.perf_counter() - start
        return Outcome(settings=settings, status=status, mesh=axes, error=error, num_gpus=spec.size, wall_s=wall_s)

    try:
        absent = build_mesh(spec, cluster, devices=describe_devices(cluster))
        step, args = build(absent, **{**base.choices, **changed})
        pool = int(cluster.gpu.memory_bytes * PLAIN.memory_fraction)
        if (needed := _bytes_of(args)) > pool:
            text = f"the arguments take {format_bytes(needed)} on each GPU, of {format_bytes(pool)}"
            return not_planned("does_not_fit", text)
        made = make_plan(step, args, mesh=absent, cluster=cluster)
    except MeshkitError as e:
        return not_planned("error", e.message)
    except Exception as e:  # of the function's own, such as a batch that the mesh does not divide
        return not_planned("error", f"{type(e).__name__}: {e}")
    return outcome_of(made.report, settings, axes, time.perf_counter() - start, made.compiled.host_peak_bytes)


def _bytes_of(args: Any) -> int:
    """Bytes of arguments on one GPU, as far as their shardings say."""
    arrays = [leaf for leaf in jax.tree.leaves(args) if isinstance(getattr(leaf, "sharding", None), NamedSharding)]
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in arrays
        if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended) and leaf.sharding.memory_kind != "pinned_host"
    )
