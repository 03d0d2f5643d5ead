"""Test `plan --failures`: what it takes from the plan, the cluster and `[failures]`, and what it reports."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.distributed import join
from meshkit.errors import ConfigError
from meshkit.planning.failures import plan_failures
from meshkit.planning.warnings import HOST_MEMORY_EXCEEDED, snapshot_warnings
from meshkit.predict.failures import Costs, best_interval, expected_goodput
from meshkit.report.schema import FailuresPart, Report, StepPart, WindowPart
from meshkit.report.views.report import render
from meshkit.report.views.words import failures_lines
from meshkit.step.program import StepFacts
from meshkit.units import format_bytes

GB = 10**9
STATE, PER_GPU, STEP_S = 96 * GB, 6 * GB, 1.0
FACTS = StepFacts(state_bytes=STATE, parameters_bytes=PER_GPU // 3, optimizer_bytes=PER_GPU * 2 // 3)


def planned(*overrides, step_s: float | None = STEP_S, facts=FACTS):
    report = Report(source="plan", window=WindowPart(steps=1, devices=16), step=StepPart(time_s=step_s))
    return report, plan_failures(report, facts, load("llama3_8b", list(overrides)))


def test_the_costs_are_those_of_the_plan_and_of_the_cluster():
    report, part = planned("cluster.storage_bytes_per_s=2e9", "failures.per_host_day=0.5", "checkpoint.every=300")
    link = load("llama3_8b").cluster.offload_link()
    assert part.blocked_s == pytest.approx(PER_GPU / (link.bytes_per_s * link.achieved))
    assert part.write_s == pytest.approx(STATE / 2e9)
    assert part.read_s == pytest.approx(part.write_s + part.blocked_s)
    assert (part.hosts, part.between_s) == (2, pytest.approx(86400 / (2 * 0.5)))
    costs = Costs(STEP_S, part.blocked_s, part.write_s, part.detection_s, part.restart_s, part.read_s)
    assert part.goodput == expected_goodput(costs, 300, part.between_s)
    assert part.best_every == best_interval(costs, part.between_s)
    assert part.goodput + part.saving_share + part.lost_share + part.down_share == pytest.approx(1)
    assert part.goodput_low < part.goodput < part.goodput_high
    assert part.goodput < part.best_goodput < part.snapshot_goodput
    assert FailuresPart.model_validate_json(part.to_json()) == part
    text = str(render(report.model_copy(update={"failures": part})))
    assert "goodput under failures" in text


def test_a_default_that_nobody_gives_is_the_catalogs():
    _, part = planned()
    row = catalog.failures()
    assert part.rate_source == "llama3"
    assert part.per_host_day == pytest.approx(419 / 2048 / 54)
    assert part.storage_bytes_per_s == 16 * row["storage_bytes_per_gpu_s"]
    assert (part.detection_s, part.restart_s, part.repair_hours) == (100, 660, 24)
    assert row["detection_s"] == join.HEARTBEAT_S  # A process that is lost without a word is detected after this time.


def test_a_published_rate_is_that_of_its_study():
    between_h = {name: 24 / rate for name, rate in catalog.published_failures_per_gpu_day().items()}
    assert between_h["llama3"] / 16384 == pytest.approx(54 * 24 / 419)
    assert between_h["rsc_1024"] / 1024 == pytest.approx(7.9)
    assert between_h["rsc_16384"] / 16384 == pytest.approx(1.8)


def test_a_host_of_four_gpus_fails_half_as_often_as_one_of_eight():
    _, whole = planned()
    smaller = [f"cluster.{key}=4" for key in ("gpus_per_host", "hosts", "nvlink_domain_size", "gpus_used_per_domain")]
    _, half = planned(*smaller, "mesh={ fsdp = 4, data = { infiniband = 4 } }")
    assert half.per_host_day == pytest.approx(whole.per_host_day / 2)
    assert half.between_s == pytest.approx(whole.between_s)
    cut = [f"cluster.{key}=4" for key in ("nvlink_domain_size", "gpus_used_per_domain")]  # Each host has two domains.
    _, same = planned(*cut, "mesh={ fsdp = 4, data = { infiniband = 4 } }")
    assert (same.hosts, same.between_s) == (whole.hosts, whole.between_s)


def test_an_experiment_without_checkpoints_hears_of_the_best_interval():
    report, part = planned("checkpoint.every=0", "failures.per_host_day=2")
    assert part.every is None
    assert part.goodput == part.best_goodput
    assert "No checkpoints are written" in failures_lines(report.model_copy(update={"failures": part}))[2]


def test_spares_are_told_until_another_one_gives_nothing():
    _, part = planned("failures.per_host_day=1", "failures.restart_s=60")
    goodputs = [row.goodput for row in part.spares]
    assert goodputs == sorted(goodputs)
    assert goodputs[-1] == pytest.approx(part.goodput, abs=4 / math.sqrt(4000))
    assert part.spares[0].goodput_of_all == part.spares[0].goodput
    assert all(row.gpus == 8 * row.hosts for row in part.spares)
    _, never = planned("failures.per_host_day=1", "failures.restart_s=60", "failures.host_share=0")
    assert len(never.spares) == 1


def test_the_spare_gpus_of_a_rack_serve_that_rack():
    mesh = ("mesh={ fsdp = 64, data = { infiniband = 4 } }", "train.global_batch=256")
    _, part = planned("cluster=gb200_nvl72", "cluster.hosts=72", "cluster.gpus_used_per_domain=64", *mesh)
    row = next(row for row in part.spares if row.hosts == 2)
    assert (row.pools, row.gpus) == (4, 4 * 8)  # 8 of 72 GPUs are spare in each of 4 racks.
    assert row.goodput_of_all == pytest.approx(row.goodput * 64 / 72)
    assert part.hosts == 4 * 16


def test_what_the_plan_does_not_know_is_said():
    with pytest.raises(ConfigError, match="a step time"):
        planned(step_s=None)
    with pytest.raises(ConfigError, match="bytes of parameters and optimizer state"):
        planned(facts=StepFacts())


def test_snapshots_count_in_a_hosts_memory():
    compiled = SimpleNamespace(host_peak_bytes=GB)
    roomy, tight = (load("llama3_8b", [f"cluster.host_memory_bytes={size}"]).cluster for size in ("2e12", "100e9"))
    rack = Cluster.load("gb200_nvl72", hosts=72, gpus_used_per_domain=64)
    (of_part,) = snapshot_warnings(PER_GPU, compiled, rack)  # pyright: ignore[reportArgumentType]
    assert f"up to {format_bytes(5 * PER_GPU * 4)}" in of_part.message
    (told,) = snapshot_warnings(PER_GPU, compiled, roomy)  # pyright: ignore[reportArgumentType]
    assert told.code == "host_memory"
    assert "two snapshots, two of another host and one copy" in told.message
    assert f"up to {format_bytes(5 * PER_GPU * 8)} of {format_bytes(2e12)}" in told.message
    _, exceeded = snapshot_warnings(PER_GPU, compiled, tight)  # pyright: ignore[reportArgumentType]
    assert exceeded.code == HOST_MEMORY_EXCEEDED
    assert format_bytes((5 * PER_GPU + GB) * 8) in exceeded.message
