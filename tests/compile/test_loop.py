"""Test scheduling by predicted prices: which program is taken, what XLA is told, and that processes agree."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import meshkit as mk
from meshkit.compile.choices import ROUNDS, compile_to_fit, predicted_costs, without_path
from meshkit.compile.options import CompileChoices, Option
from meshkit.config.experiment import load
from meshkit.config.sections import PGLE_OPTION, PREDICTED
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
    """Stand in for a compiled program whose time is proportional to its FLOP."""

    flops: float
    peak_bytes: int = 0
    chosen: Sequence[Option] = ()
    log: tuple[str, ...] = ()
    told: str = ""

    @property
    def schedule(self):
        return schedule(self.flops)


def schedules(flops, peaks=(0, 0, 0), *, derived=(), pgle=PREDICTED, **keywords):
    """Return the program that the loop takes of those with these FLOP, and the later programs with their prices."""
    each = [Made(*of) for of in zip(flops, peaks)]
    left = iter(each)

    def make(chosen):
        made = next(left)
        made.chosen = chosen
        for option in chosen:
            if option.name == PGLE_OPTION:
                with open(option.value) as file:
                    made.told = file.read()
        return made

    choices = CompileChoices({}, derived, 100 / CLUSTER.gpu.memory_bytes, pgle)
    taken, _ = compile_to_fit(make, CLUSTER, choices, **keywords)
    return taken, each[1:]


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
    assert rest[0].told != rest[1].told  # The second program is told the prices of the first one's instructions.


def test_one_that_does_not_fit_is_not():
    found, _ = schedules((3e15, 2e15, 1e15), peaks=(0, 0, 101))
    assert found.flops == 2e15


def test_what_does_not_fit_is_not_compiled_again():
    found, rest = schedules((3e15, 2e15, 1e15), peaks=(101, 0, 0))
    assert found.flops == 3e15
    assert not any(made.told for made in rest)


@pytest.mark.parametrize(
    ("flops", "taken", "said"),
    [((1e15, 3e15, 2e15), 2, True), ((1e15, 2e15, 3e15), 1, False)],
    ids=["recomputing costs more", "exposed gathers cost more"],
)
def test_where_only_less_memory_fits_the_faster_way_to_it_is_taken(flops, taken, said):
    """The first program needs too much, the second keeps within a limit, the third also drops what hides gathers."""
    limit = Option("xla_limit", 10_000, "it fits", tight=(100, "it does not"))
    hiding = Option("xla_hiding", True, "it hides gathers", costs_memory=True)
    found, rest = schedules(flops, (101, 90, 80), derived=(limit, hiding), pgle="off")
    assert found.flops == flops[taken]
    options = [{o.name: o.value for o in made.chosen} for made in rest[:2]]
    assert [o["xla_limit"] for o in options] == [100, 100]
    assert ["xla_hiding" in o for o in options] == [True, False]
    assert ["with them XLA saves memory" in line for line in found.log] == [True] * said
    other, _ = schedules(flops, (101, 90, 80), derived=(limit, hiding), pgle="off", agree=lambda *_: not said)
    assert other.flops == flops[3 - taken]


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
    found, rest = schedules((3e15, 1e15, 2e15))
    assert [o.value for o in found.chosen if o.name == PGLE_OPTION] == [PREDICTED]
    assert all(o.value != PREDICTED for made in rest for o in made.chosen)
    users = Option(PGLE_OPTION, "runs/mine/pgle.pbtxt", "[xla]")
    assert without_path([users]) == (users,)


def test_a_measured_profile_and_predicted_latencies_exclude_each_other():
    path = "configs/experiments/mlp.toml"
    with pytest.raises(mk.ConfigError, match=r"asks for predicted latencies, but xla.* names measured ones"):
        load(path, ['train.pgle="predicted"', f'xla.{PGLE_OPTION}="p.pbtxt"'])
    with pytest.raises(mk.ConfigError, match=r"train\.pgle"):
        load(path, ['train.pgle="measured"'])
