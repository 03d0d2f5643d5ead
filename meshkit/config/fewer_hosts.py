"""Fit an experiment to fewer hosts: `launch.hosts` -> overrides of the cluster, the mesh and the accumulation -> load.

The global batch stays as it is. One mesh axis between NVLink domains becomes smaller, and the batch of a step is
accumulated in more pieces, so that no device gets more examples at once than before.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import PipelineTable, TrainTable
from meshkit.config.toml import SpecError, inline

_KEY = ("launch", "hosts")


def fit_to_hosts(
    hosts: int,
    cluster: Cluster,
    mesh: MeshSpec,
    rules: ShardingRules,
    train: TrainTable,
    pipeline: PipelineTable,
    replicas: Collection[str | None],
) -> list[str]:
    """Return the overrides that make an experiment run on fewer hosts.

    Args:
        hosts: number of hosts that are left, fewer than the cluster has.
        mesh: resolved on the cluster.
        pipeline: with axis None if there is none.
        replicas: mesh axes whose replicas have a state of their own, so that they keep their size.

    Raises:
        SpecError: the cluster has fewer hosts, or neither a mesh axis nor the global batch divides so.
    """
    if hosts > cluster.hosts:
        message = f"launch.hosts = {hosts} hosts cannot be left of a cluster that has {cluster.hosts}."
        raise SpecError(message, key=_KEY, value=hosts, hint=f"launch.hosts = {cluster.hosts}")
    domains, odd = divmod(hosts * cluster.gpus_per_host, cluster.nvlink_domain_size)
    if odd:
        per_domain = cluster.nvlink_domain_size // cluster.gpus_per_host
        message = f"{hosts} hosts are not a whole number of NVLink domains of {per_domain} hosts."
        raise SpecError(
            message, key=_KEY, value=hosts, hint=f"launch.hosts = {max(1, hosts // per_domain) * per_domain}"
        )
    share = Fraction(domains, cluster.num_nvlink_domains)
    batch = rules.mapping("activations").get("act_batch", ())
    of_parameters = {axis for axes in rules.mapping("parameters").values() for axis in axes}
    could = [axis for axis in mesh.axes if axis.name in batch and axis.name not in replicas]
    could.sort(key=lambda axis: axis.name in of_parameters)  # one that shards no parameters is taken first
    axis = _smaller_axis(could, hosts, share)
    axes = [axis if axis.name == other.name else other for other in mesh.axes]
    key, pieces, multiple = "train.accumulate", train.accumulate, 1
    if pipeline.axis is not None:
        key, pieces = "pipeline.microbatches", pipeline.microbatches
        multiple = mesh.sizes[pipeline.axis] if pipeline.virtual_stages > 1 else 1
    ways, least = int(math.prod(mesh.sizes[name] for name in batch) * share), math.ceil(pieces / share)
    for count in range(least, train.global_batch // ways + 1):
        if train.global_batch % (ways * count) == 0 and count % multiple == 0:
            meshes = (f"mesh.{each.name}={inline(each.to_plain())}" for each in axes)
            return [f"cluster.hosts={hosts}", *meshes, f"{key}={count}"]
    unit = ways * least
    raise SpecError(
        f"a global batch of {train.global_batch} cannot be split evenly over the {ways} GPUs that shard it on {hosts} "
        f"hosts, in at least {least} pieces.",
        key=_KEY,
        value=hosts,
        hint=f"another number of hosts, or train.global_batch = {math.ceil(train.global_batch / unit) * unit}",
    )


def _smaller_axis(could: Collection[MeshAxis], hosts: int, share: Fraction) -> MeshAxis:
    """Return the first axis that keeps a whole number of NVLink domains, with its new size."""
    for axis in could:
        if (factor := axis.number("infiniband") * share).denominator == 1:
            return replace(axis, infiniband=int(factor))
    sizes = ", ".join(f"{axis.name} {axis.number('infiniband')}" for axis in could) or "none"
    raise SpecError(
        f"no mesh axis that shards the batch ({sizes}) can shrink evenly to {share} of its NVLink domains.",
        key=_KEY,
        value=hosts,
        hint="a number of hosts that makes one of these axes smaller by a whole factor",
    )
