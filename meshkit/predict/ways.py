"""Predict which implementation XLA:GPU chooses for a ragged all-to-all, by group, options and jaxlib (see ways.toml).

The compiled instructions show what the compiler does to the collective (it may split it over hosts or make it dense).
The implementation (a "way") is chosen at run time, by conditions for which ways.toml names sources.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, resources
from typing import Any, Literal

from meshkit.config.cluster import Cluster
from meshkit.hlo.schedule import Collective

RAGGED = "ragged-all-to-all"
_ONE_SHOT = "xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel"
_BARRIER = "xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl"
_DEVICE = "xla_gpu_experimental_ragged_all_to_all_use_device_kernel"
_FALLBACK = "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"
_SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
_SYMMETRIC_OF = "xla_enable_nccl_symmetric_buffers_for_collectives"
_MODE = "xla_gpu_ragged_all_to_all_mode"


@functools.cache
def ways_table() -> Mapping[str, Any]:
    """Return the tables of ways.toml: the rows of `way` and `problem`, and `options` with XLA's default values."""
    return tomllib.loads(resources.files("meshkit.predict").joinpath("ways.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Way:
    """One way to run a ragged all-to-all."""

    name: str
    price: str
    """Name of the algorithm in predict/algorithms.py that gives its cost."""
    what: str
    needs: str
    source: str
    most_peers: int | None = None


@dataclass(frozen=True)
class Problem:
    """A known problem of a way."""

    ways: list[str]
    severity: Literal["error", "warning"]
    says: str
    hint: str
    source: str
    above: int = 0
    """It occurs in groups of more GPUs than this."""
    since: str = ""
    """The first release of jaxlib with the problem; "" if all releases before `before` have it."""
    before: str = ""
    """The first later release of jaxlib without the problem; "" if there is none."""
    hosts: bool = False
    """Whether the group must span several hosts."""


@functools.cache
def ways() -> Mapping[str, Way]:
    """Return name -> way, in the order in which XLA tries the ways."""
    return {row["name"]: Way(**row) for row in ways_table()["way"]}


@dataclass(frozen=True)
class WayChoice:
    """The release of jaxlib and the changed options of XLA, which together with the group determine the way."""

    options: Mapping[str, object] = field(default_factory=dict)
    jaxlib: str = field(default_factory=lambda: metadata.version("jaxlib"))

    def way(self, c: Collective, cluster: Cluster) -> Way:
        """Return the way in which XLA runs a ragged all-to-all on a cluster with one process per host."""
        return ways()[self._name(c.group_size, c.gpus_per_domain, cluster)]

    def problems(self, way: Way, c: Collective, cluster: Cluster) -> list[Problem]:
        """Return the known problems of a collective that runs in a given way."""
        rows = (Problem(**row) for row in ways_table()["problem"])
        several = c.gpus_per_domain > cluster.gpus_per_host
        return [
            p
            for p in rows
            if way.name in p.ways
            and c.group_size > p.above
            and (several or not p.hosts)
            and (not p.since or _release(self.jaxlib) >= _release(p.since))
            and (not p.before or _release(self.jaxlib) < _release(p.before))
        ]

    def _name(self, n: int, g: int, cluster: Cluster) -> str:
        """Return the name of the way for a group of n GPUs, of which g are in each NVLink domain."""
        if n == 1:
            return "copy"
        symmetric = self._is_on(_SYMMETRIC) or "raggedalltoall" in self._text(_SYMMETRIC_OF)
        if symmetric and self._is_on(_DEVICE):
            return "device kernel"
        if n == g and self._is_on(_ONE_SHOT):
            direct = cluster.scale_up == "nvlink" and cluster.mesh_hops(g) == 1.0
            if direct and self._is_on(_BARRIER):
                return "one-shot"
            reached = direct or cluster.scale_up == "pcie"
            if reached and g <= min(cluster.gpus_per_host, ways()["one-shot by pointers"].most_peers or 0):
                return "one-shot by pointers"
        if not self._is_on(_FALLBACK):
            return "refused"
        return "puts" if "symmetric" in self._text(_MODE) else "sends"

    def _is_on(self, name: str) -> bool:
        return self._text(name) in ("1", "true")

    def _text(self, name: str) -> str:
        return str(self.options.get(name, ways_table()["options"][name])).strip().lower()


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; a suffix as in `0.12.0.dev1` is left out."""
    parts = version.split(".")
    return tuple(int(p) for p in parts if p.isdigit())
