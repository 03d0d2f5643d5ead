"""Fit an experiment to fewer hosts: `launch.hosts` -> overrides of the cluster, the mesh and the accumulation -> load.

The global batch stays as it is. One mesh axis between NVLink domains becomes smaller. The batch of a step is cut into
more micro-batches, of a pipeline or of accumulation, so that no device gets more examples at once than before.
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
        hosts: number of hosts that are left, fewer than the mesh uses.
        mesh: the experiment's mesh, resolved on the cluster.
        pipeline: the [pipeline] section, whose axis is None if there is no pipeline.
        replicas: mesh axes whose replicas have a state of their own, so that they keep their size.

    Raises:
        SpecError: the cluster has fewer hosts, the hosts are not whole NVLink domains, no mesh axis can become smaller,
            or the global batch cannot be split evenly.
    """
    there = cluster.hosts_used
    if hosts > there:
        message = f"launch.hosts = {hosts} is more than the {there} hosts that the mesh uses."
        raise SpecError(message, key=_KEY, value=hosts, hint=f"launch.hosts = {there}")
    domains, odd = divmod(hosts * cluster.num_nvlink_domains, there)
    if odd:
        per_domain = cluster.hosts_used_per_domain
        message = f"{hosts} hosts are not a whole number of NVLink domains of {per_domain} hosts."
        raise SpecError(
            message, key=_KEY, value=hosts, hint=f"launch.hosts = {max(1, hosts // per_domain) * per_domain}"
        )
    share = Fraction(domains, cluster.num_nvlink_domains)
    batch = rules.mapping("activations").get("act_batch", ())
    of_parameters = {axis for axes in rules.mapping("parameters").values() for axis in axes}
    could = [axis for axis in mesh.axes if axis.name in batch and axis.name not in replicas]
    # An axis that shards no parameters comes first: if it becomes smaller, no GPU holds more parameters.
    could.sort(key=lambda axis: axis.name in of_parameters)
    axis = _smaller_axis(could, hosts, share)
    axes = [axis if axis.name == other.name else other for other in mesh.axes]
    key, pieces, multiple = "train.accumulate", train.accumulate, 1
    if pipeline.axis is not None:
        key, pieces = "pipeline.microbatches", pipeline.microbatches
        multiple = mesh.sizes[pipeline.axis] if pipeline.virtual_stages > 1 else 1
    whole = math.prod(mesh.sizes[name] for name in batch)
    ways = int(whole * share)
    least = math.ceil(pieces / share / multiple) * multiple
    for count in range(least, train.global_batch // ways + 1, multiple):
        if train.global_batch % (ways * count) == 0:
            meshes = (f"mesh.{each.name}={inline(each.to_plain())}" for each in axes)
            return [f"cluster.hosts={cluster.hosts * share}", *meshes, f"{key}={count}"]
    unit = math.lcm(ways * least, whole * pieces)  # The batch must also be one that all hosts can split.
    raise SpecError(
        f"a global batch of {train.global_batch} cannot be split evenly into {ways} shards on {hosts} hosts, each of "
        f"at least {least} micro-batches.",
        key=_KEY,
        value=hosts,
        hint=f"another number of hosts, or train.global_batch = {math.ceil(train.global_batch / unit) * unit}",
    )


def _smaller_axis(could: Collection[MeshAxis], hosts: int, share: Fraction) -> MeshAxis:
    """Return the first axis that keeps a whole number of NVLink domains, with its new size.

    Raises:
        SpecError: there is no such axis.
    """
    for axis in could:
        if (factor := axis.number("infiniband") * share).denominator == 1:
            return replace(axis, infiniband=int(factor))
    sizes = ", ".join(f"{axis.name} {axis.number('infiniband')}" for axis in could) or "none"
    raise SpecError(
        f"no mesh axis that shards the batch ({sizes}) can shrink to {share} of its NVLink domains.",
        key=_KEY,
        value=hosts,
        hint="a number of hosts that leaves one of these axes a whole number of NVLink domains",
    )
