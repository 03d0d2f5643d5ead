"""Predict a planned training's goodput under failures, the best intervals between saves, and the use of spare hosts.

Report, StepFacts, Cluster, [failures] -> Costs -> closed form, simulator -> FailuresPart
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ProgramExperiment
from meshkit.config.sections import FailuresTable
from meshkit.errors import ConfigError
from meshkit.predict.failures import (
    DAY_S,
    Costs,
    Spares,
    best_interval,
    draw,
    expected_goodput,
    expected_shares,
    months,
    play,
)
from meshkit.report.schema import FailuresPart, Report, SparesPart
from meshkit.runs.snapshots import snapshots_held
from meshkit.step.program import StepFacts

_SEED = 20261127
_PLAYED = 4000  # Failures to simulate: the lost share is then off by at most 1 / sqrt(4000) of itself.
_MOST_SPARES, _ENOUGH = 16, 1e-3  # More spare hosts are not tried once goodput is within 0.001 of its best.


class _Known(NamedTuple):
    """Values of `[failures]`, with the catalog's defaults. The failure rate is not included."""

    host_share: float
    detection_s: float
    restart_s: float
    repair_hours: float

    @classmethod
    def read(cls, given: FailuresTable) -> _Known:
        row = catalog.failures()
        return cls(*(row[name] if getattr(given, name) is None else getattr(given, name) for name in cls._fields))


def plan_failures(report: Report, facts: StepFacts, experiment: Experiment | ProgramExperiment) -> FailuresPart:
    """Return the planned training's goodput under failures, and the shares of time that are lost.

    Raises:
        ConfigError: the plan predicts no step time, or does not know how large the state is.
    """
    cluster, given = experiment.cluster, experiment.failures
    step_s, state_bytes = report.step.time_s, facts.state_bytes
    if not step_s or not state_bytes:
        missing = "a step time" if state_bytes else "the bytes of parameters and optimizer state"
        hint = "leaving out --failures, or planning a [model] with meshkit's own step, whose state is known"
        raise ConfigError(f"--failures needs {missing}, which this plan does not have.", at="--failures", hint=hint)
    known, hosts = _Known.read(given), cluster.hosts_used
    rates = {name: rate * cluster.gpus_per_host for name, rate in catalog.published_failures_per_gpu_day().items()}
    default, rate = next(iter(rates.items()))
    rate, source = (given.per_host_day, "given") if given.per_host_day is not None else (rate, default)
    between_s = DAY_S / (rate * hosts)
    disk, storage = _disk_costs(known, cluster, facts, step_s)
    memory, held = _memory_costs(disk, cluster, state_bytes, hosts)
    every = (experiment.checkpoint.every if isinstance(experiment, Experiment) else 0) or None
    best, best_snapshot = best_interval(disk, between_s), best_interval(memory, between_s)
    month = months(disk, every or best, 1 / between_s, seed=_SEED)
    shares = expected_shares(disk, every or best, between_s)
    apart_s = {name: DAY_S / (rate * hosts) for name, rate in rates.items()}
    return FailuresPart(
        per_host_day=rate,
        rate_source=source,
        hosts=hosts,
        between_s=between_s,
        **known._asdict(),
        storage_bytes_per_s=storage,
        blocked_s=disk.blocked_s,
        write_s=disk.write_s,
        read_s=disk.read_s,
        every=every,
        goodput=shares.goodput,
        goodput_low=month[len(month) // 10],
        goodput_high=month[-len(month) // 10],
        saving_share=shares.saving,
        lost_share=shares.lost,
        down_share=shares.down,
        best_every=best,
        best_goodput=expected_goodput(disk, best, between_s),
        best_snapshot_every=best_snapshot,
        snapshot_goodput=expected_goodput(memory, best_snapshot, between_s),
        snapshot_write_s=memory.write_s,
        snapshot_host_bytes=held,
        spares=tuple(_spares(disk, every or best, between_s, known, cluster)),
        published={name: expected_goodput(disk, every or best_interval(disk, s), s) for name, s in apart_s.items()},
    )


def _disk_costs(known: _Known, cluster: Cluster, facts: StepFacts, step_s: float) -> tuple[Costs, float]:
    """Return the costs of checkpoints on disk, and the storage's bandwidth in bytes per second.

    A save blocks the steps while all GPUs copy their shards to their hosts at once. If the cluster file has no storage
    bandwidth, the bandwidth per GPU of Llama 3's cluster is assumed.
    """
    assert facts.state_bytes is not None
    storage = cluster.checkpoint_bytes_per_s or cluster.num_gpus * catalog.failures()["storage_bytes_per_gpu_s"]
    link, held = cluster.offload_link(), (facts.parameters_bytes or 0) + (facts.optimizer_bytes or 0)
    blocked_s = (held or facts.state_bytes / cluster.num_gpus) / (link.bytes_per_s * link.achieved)
    written_s = facts.state_bytes / storage
    return Costs(step_s, blocked_s, written_s, known.detection_s, known.restart_s, written_s + blocked_s), storage


def _memory_costs(disk: Costs, cluster: Cluster, state_bytes: float, hosts: int) -> tuple[Costs, float]:
    """Return the costs of snapshots in host memory with a copy on another host, and their bytes on each host.

    A snapshot blocks the steps as a checkpoint does, since the next step may change the state. The copy to the other
    host crosses the scale-out fabric during the following steps. A lost host's share is restored over the same fabric.
    """
    share = state_bytes / hosts
    link = cluster.link("infiniband")
    copied_s = share / (link.bytes_per_s * link.achieved * cluster.gpus_per_host) if hosts > 1 else 0.0
    costs = replace(disk, write_s=copied_s, read_s=copied_s + disk.blocked_s)
    return costs, share * snapshots_held(hosts)


def _spares(costs: Costs, every: int, between_s: float, known: _Known, cluster: Cluster) -> Iterator[SparesPart]:
    """Yield the goodput with 0, 1, ... spare hosts, until another spare host gains nothing.

    If NVLink domains span hosts, only a host of the same domain can replace a host, so each domain has its own spares.
    """
    pools = cluster.num_nvlink_domains if cluster.hosts_per_domain > 1 else 1
    there = cluster.hosts_per_domain - cluster.hosts_used_per_domain
    span_s, best = _PLAYED * between_s, expected_goodput(costs, every, between_s)
    for each in range(_MOST_SPARES + 1):
        spares = Spares(each, known.repair_hours * 3600, pools=pools, seed=_SEED)
        failures = draw(_SEED, 1 / between_s, host_share=known.host_share)
        goodput = play(costs, every, failures, until_s=span_s, spares=spares).goodput
        gpus = pools * each * cluster.gpus_per_host
        yield SparesPart(
            hosts=each,
            pools=pools,
            gpus=gpus,
            goodput=goodput,
            goodput_of_all=goodput * cluster.num_gpus / (cluster.num_gpus + gpus),
        )
        if goodput > best - _ENOUGH and each >= there:
            return
