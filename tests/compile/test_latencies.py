"""XLA scheduled by prices: which of several programs is taken, what XLA is told, and that processes agree."""

from dataclasses import dataclass

import pytest

import meshkit as mk
from meshkit.compile.latencies import ROUNDS, predicted_costs, schedule_by_prices, without_path
from meshkit.compile.options import Option
from meshkit.config.experiment import load
from meshkit.config.sections import PGLE_OPTION
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.schedule import Collective
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.network import collective_time_s

CLUSTER = mk.Cluster.load("dgx_h100", hosts=1)
GATHER = Collective("gather", "k", "all-gather", ("fsdp",), True, "nvlink", None, "bf16", 8, 1, 8, 2**30)


def schedule(compute_flops):
    found = (
        Instruction("dot.1", "fusion", "kernel", cost=Cost({"bf16": compute_flops})),
        Instruction("gather", "all-gather", "collective", collective=GATHER),
        Instruction("nothing", "bitcast", "free"),
    )
    return Schedule("m", {"main": found}, "main", "f")


@dataclass
class Made:
    """A program that takes as long as its FLOP."""

    flops: float
    told: str = ""


def schedules(flops, fits=lambda made: True, agree=None):
    """What `schedule_by_prices` takes of programs of these FLOP, one after the other; and what each was told."""
    first, *rest = (Made(f) for f in flops)
    left = iter(rest)

    def remake(option):
        assert option.name == PGLE_OPTION
        made = next(left)
        with open(option.value) as file:
            made.told = file.read()
        return made

    keywords = {"agree": agree} if agree else {}
    taken = schedule_by_prices(
        first, remake, lambda m: schedule(m.flops), CLUSTER, assumptions=Assumptions(), fits=fits, **keywords
    )
    return taken, rest


@pytest.fixture(autouse=True, params=["off", "on"])
def cache(request, monkeypatch, tmp_path):
    monkeypatch.setenv("MESHKIT_CACHE", "off" if request.param == "off" else str(tmp_path))


def test_prices_are_of_what_takes_time():
    costs = predicted_costs(schedule(1e12), CLUSTER, Assumptions())
    assert set(costs) == {"dot.1", "gather"}
    assert costs["gather"] == pytest.approx(
        collective_time_s("all-gather", payload_bytes=2**30, gpus_per_domain=8, domains=1, cluster=CLUSTER)
    )


@pytest.mark.parametrize(
    ("flops", "taken"), [((3e15, 2e15, 1e15), 2), ((3e15, 1e15, 2e15), 1), ((1e15, 2e15, 3e15), 0)]
)
def test_the_fastest_is_taken(flops, taken):
    found, rest = schedules(flops)
    assert found.flops == flops[taken]
    assert len(rest) == ROUNDS
    assert all('name: "gather" cost_us: ' in made.told for made in rest)
    assert rest[0].told != rest[1].told  # the second is told the prices of the first's instructions


def test_one_that_does_not_fit_is_not():
    found, _ = schedules((3e15, 2e15, 1e15), fits=lambda made: made.flops > 1e15)
    assert found.flops == 2e15


def test_what_does_not_fit_is_not_compiled_again():
    found, rest = schedules((3e15, 2e15, 1e15), fits=lambda made: made.flops < 3e15)
    assert found.flops == 3e15
    assert not any(made.told for made in rest)


def test_all_processes_take_what_process_0_says():
    topics = []

    def agree(topic, mine):
        topics.append(topic)
        return 1 if topic == "fastest" else 'costs { name: "gather" cost_us: 1 }\n'

    found, rest = schedules((3e15, 2e15, 1e15), agree=agree)
    assert found.flops == 2e15
    assert {made.told for made in rest} == {'costs { name: "gather" cost_us: 1 }\n'}
    assert topics == ["latencies 0", "latencies 1", "fastest"]


def test_a_report_says_that_latencies_are_predicted_and_keeps_a_users_path():
    taken = []
    schedule_by_prices(
        Made(1e15),
        lambda option: taken.append(option) or Made(2e15),
        lambda m: schedule(m.flops),
        CLUSTER,
        assumptions=Assumptions(),
        fits=lambda made: True,
    )
    assert [o.value for o in without_path(taken)] == ["predicted"] * ROUNDS
    users = Option(PGLE_OPTION, "runs/mine/pgle.pbtxt", "[xla]")
    assert without_path([users]) == (users,)


def test_a_measured_profile_and_predicted_latencies_exclude_each_other():
    path = "configs/experiments/mlp.toml"
    with pytest.raises(mk.ConfigError, match=r"asks for predicted latencies, and xla.* names measured ones"):
        load(path, ['train.pgle="predicted"', f'xla.{PGLE_OPTION}="p.pbtxt"'])
    with pytest.raises(mk.ConfigError, match=r"train\.pgle"):
        load(path, ['train.pgle="measured"'])
