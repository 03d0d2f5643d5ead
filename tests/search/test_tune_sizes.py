"""Test tune over several sizes of the cluster, its objective, and the reasons for the winner, with made-up plans."""

from __future__ import annotations

from collections import Counter

import pytest

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.warnings import HOST_MEMORY_EXCEEDED
from meshkit.report.schema import Report, StepPart, Warning_, WindowPart
from meshkit.search.candidate import OutcomeRow, make_outcome
from meshkit.search.tune_report import differences, why
from meshkit.search.tuner import Sizes, parse_hosts, tune_experiment
from tests.search.made_up import MadeUpWorkers
from tests.search.test_tune import AXES, ON_16, TINY, made_up


def by_gpus(settings):
    """Return a time: 1 s on 2 hosts, 1.6 times as fast with twice the hosts, 10 ms less for each further choice."""
    hosts = next((int(s.partition("=")[2]) for s in settings if s.startswith("cluster.hosts")), 2)
    return (2 / hosts) ** 0.678 * (1.0 - 0.01 * sum(s.startswith("train.") for s in settings))


def sized(settings):
    hosts = next((int(s.partition("=")[2]) for s in settings if s.startswith("cluster.hosts")), 2)
    return made_up(settings, by_gpus(settings)).model_copy(update={"num_gpus": 8 * hosts})


@pytest.mark.parametrize(("objective", "gpus"), [("time", 16), ("gpu_hours", 8)])
def test_other_sizes_get_a_share_and_the_objective_says_whose_winner_it_is(monkeypatch, tmp_path, objective, gpus):
    MadeUpWorkers(sized).install(monkeypatch)
    batch = (*ON_16, "train.global_batch=32")
    search = {"out": tmp_path, "budget": 12, "jobs": 2, "axes": ["fsdp"], "sizes": Sizes((1, 2, 4), objective)}
    report = tune_experiment(TINY, batch, **search)
    assert Counter(o.num_gpus for o in report.outcomes) == {16: 8, 8: 2, 32: 2}
    assert (report.winner.num_gpus, report.base.num_gpus, report.objective) == (gpus, 16, objective)
    assert {report.outcomes[i].num_gpus for i in report.pareto} == {8, 16, 32}
    for outcome in report.outcomes[8:]:
        loaded = load(TINY, (*batch, *outcome.settings))  # The batch is the same, on a mesh of that size.
        assert (loaded.mesh.size, loaded.train.global_batch) == (loaded.cluster.hosts * 8, 32)
    assert load(tmp_path / "winner.toml").cluster.num_gpus == gpus
    said = [text for text in report.why if "GPU seconds" in text]
    assert said == ([] if objective == "time" else [said[0]])
    MadeUpWorkers(lambda _: 1 / 0).install(monkeypatch)  # A second run plans nothing.
    assert tune_experiment(TINY, batch, **search).reused == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": Sizes((1,)), "budget": 2}, "2 variants are too few for 2 sizes"),
        ({"sizes": Sizes(objective="cost")}, "'cost' is not an objective"),
        ({"sizes": Sizes((0,))}, "the cluster cannot have 0 hosts: .*hosts"),
    ],
)
def test_a_size_that_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        tune_experiment(TINY, ON_16, **options)


@pytest.mark.parametrize("text", ["4,x", "0", "4,,8", "-1"])
def test_hosts_are_a_list_of_numbers(text):
    assert parse_hosts("8, 4,8") == (4, 8)
    assert parse_hosts(None) == ()
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        parse_hosts(text)


def test_a_plan_that_needs_more_host_memory_than_there_is_does_not_fit():
    parts = {"window": WindowPart(steps=1, devices=1), "step": StepPart()}
    report = Report(source="plan", warnings=(Warning_(code=HOST_MEMORY_EXCEEDED, message="too much"),), **parts)
    assert make_outcome(report, (), {}, 1.0).status == "does_not_fit"
    assert make_outcome(report.model_copy(update={"warnings": ()}), (), {}, 1.0).status == "fits"


def test_the_reason_names_what_is_no_longer_computed_twice_and_small_collectives_that_went_away():
    """HFU of 60 % of 12 s and 50.4 % of 10 s mean 0.7 of the FLOP; 20 ms of 10 s are gone, though a mere 0.2 %."""

    def outcome(settings, time_s, hfu, exposed_s, host_bytes=None):
        row = OutcomeRow(axes=("fsdp",), link="infiniband", collective="all-gather", dtype="bf16", count=1)
        rows = (row.model_copy(update={"time_s": 1.0, "exposed_s": exposed_s}),)
        made = made_up(settings, time_s, rows=rows, compute_s=time_s - exposed_s)
        return made.model_copy(update={"hfu": hfu, "host_bytes": host_bytes})

    base, winner = outcome((), 12.0, 0.6, 0.02), outcome(("a=1",), 10.0, 0.504, 0.0005, 2**30)
    said = why(base, winner, differences(base, winner))
    assert said[0] == "a step takes 10.0 s instead of 12.0 s (-16.7 %)."
    waits = "1.00 GiB of each GPU wait in host memory instead"
    assert said[1:] == (
        f"30.0 % of the matmul FLOP, which the model itself does not need, no longer run; {waits}.",
        "compute fell from 12.0 s to 10.00 s.",
        "exposed all-gather bf16 over fsdp on infiniband went away but for 500 us: 20.0 ms before.",
    )


def test_the_reason_names_the_collective_that_went_away(monkeypatch):
    def row(axes, link, exposed):
        return OutcomeRow(
            axes=axes, link=link, collective="all-gather", dtype="bf16", count=1, time_s=exposed, exposed_s=exposed
        )

    def outcome(settings):
        slow = row(("fsdp",), "infiniband", 0.5)
        rows = (row(("fsdp",), "nvlink", 0.1),) if settings else (slow, row(("fsdp",), "nvlink", 0.1))
        return made_up(settings, 0.6 if settings else 1.1, compute_s=0.5, rows=rows)

    MadeUpWorkers(outcome).install(monkeypatch)
    report = tune_experiment(TINY, ON_16, budget=2, jobs=1, axes=AXES)
    assert report.why == (
        "a step takes 600 ms instead of 1.10 s (-45.5 %).",
        "exposed all-gather bf16 over fsdp on infiniband went away: 500 ms.",
    )
    assert sum(d.saved_s for d in report.differences) == pytest.approx(0.5)
