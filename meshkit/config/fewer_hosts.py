"""Fit an experiment to fewer hosts: `launch.hosts` -> overrides of the cluster, the mesh and the accumulation -> load.

The global batch stays as it is. One mesh axis between NVLink domains becomes smaller, and the batch of a step is
accumulated in more pieces, so that no device gets more examples at once than before.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from meshkit.config.mesh import MeshAxis
from meshkit.config.toml import SpecError, inline

if TYPE_CHECKING:
    from meshkit.config.experiment import Experiment

_KEY = ("launch", "hosts")


def fit_to_hosts(experiment: Experiment) -> list[str]:
    """Return the overrides that make an experiment run on `launch.hosts` hosts; none where its cluster has as many.

    Raises:
        SpecError: the cluster has fewer hosts, or neither a mesh axis nor the global batch divides so.
    """
    cluster, hosts = experiment.cluster, experiment.launch.hosts
    if hosts is None or hosts == cluster.hosts:
        return []
    if hosts > cluster.hosts:
        message = f"launch.hosts = {hosts} are left of a cluster that has {cluster.hosts}."
        raise SpecError(message, key=_KEY, value=hosts, hint=f"launch.hosts = {cluster.hosts}")
    domains, odd = divmod(hosts * cluster.gpus_per_host, cluster.nvlink_domain_size)
    if odd:
        per_domain = cluster.nvlink_domain_size // cluster.gpus_per_host
        message = f"{hosts} hosts are no whole number of NVLink domains of {per_domain} hosts."
        raise SpecError(message, key=_KEY, value=hosts, hint=f"launch.hosts = {hosts // per_domain * per_domain}")
    axis = _smaller_axis(experiment, domains)
    axes = [axis if axis.name == other.name else other for other in experiment.mesh.axes]
    mesh = [f"mesh.{other.name}={inline(other.to_plain())}" for other in axes]
    return [f"cluster.hosts={hosts}", *mesh, _more_pieces(experiment, domains)]


def _smaller_axis(experiment: Experiment, domains: int) -> MeshAxis:
    """Return the axis that becomes smaller, with its new size. One that shards no parameters is taken first."""
    rules, before = experiment.rules, experiment.cluster.num_nvlink_domains
    batch = rules.mapping("activations").get("act_batch", ())
    of_parameters = {axis for axes in rules.mapping("parameters").values() for axis in axes}
    of_replicas = {experiment.local_sgd.axis, experiment.compression.axis}
    could = [axis for axis in experiment.mesh.axes if axis.name in batch and axis.name not in of_replicas]
    for axis in sorted(could, key=lambda axis: axis.name in of_parameters):
        factor, rest = divmod(axis.number("infiniband") * domains, before)
        if not rest:
            return replace(axis, infiniband=factor)
    sizes = ", ".join(f"{axis.name} {axis.number('infiniband')}" for axis in could) or "none"
    raise SpecError(
        f"{domains} of {before} NVLink domains fit no mesh axis that shards the batch and spans domains ({sizes}).",
        key=_KEY,
        value=experiment.launch.hosts,
        hint="another number of hosts: domains / its part of the axis must be whole",
    )


def _more_pieces(experiment: Experiment, domains: int) -> str:
    """Return the override of accumulation, or of a pipeline's microbatches, that keeps the global batch."""
    pipeline, batch, before = experiment.pipeline, experiment.train.global_batch, experiment.cluster.num_nvlink_domains
    key, pieces, multiple = "train.accumulate", experiment.train.accumulate, 1
    if pipeline.axis is not None:
        key, pieces = "pipeline.microbatches", pipeline.microbatches
        multiple = experiment.mesh.sizes[pipeline.axis] if pipeline.virtual_stages > 1 else 1
    axes = experiment.rules.mapping("activations").get("act_batch", ())
    ways = math.prod(experiment.mesh.sizes[axis] for axis in axes) * domains // before
    for count in range(-(-pieces * before // domains), batch // ways + 1):
        if batch % (ways * count) == 0 and count % multiple == 0:
            return f"{key}={count}"
    raise SpecError(
        f"a global batch of {batch} does not divide by the {ways} GPUs that shard it on {experiment.launch.hosts} "
        f"hosts, in at least {-(-pieces * before // domains)} pieces.",
        key=_KEY,
        value=experiment.launch.hosts,
        hint=f"another number of hosts, or train.global_batch = {-(-batch // ways) * ways}",
    )
