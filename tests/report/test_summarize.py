"""Test how a timeline becomes a report: numbers computed by hand, and the invariants of the contract."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.hlo.schedule import Collective
from meshkit.predict.algorithms import wire_factor
from meshkit.predict.network import infiniband_share, peak_bus_bandwidth_bytes_per_s
from meshkit.report.schema import StepPart
from meshkit.report.summarize import Machines, check_invariants, summarize, training_cost
from meshkit.step.program import StepFacts
from meshkit.timeline import DeviceStep, Timeline
from tests.report.conftest import make_collective


def ms(value):
    return pytest.approx(value * 1e-3, rel=1e-9)


def find(report, collective):
    return next(r for r in report.communication if r.collective == collective)


def test_step_is_the_mean_of_the_device_steps(report):
    step = report.step
    assert step.time_s == ms(10.5)  # Device 0 takes 10 ms and device 1 takes 11.
    assert step.compute_s == ms(6)
    assert step.communication_s == ms(6)
    assert step.overlapped_s == ms(3)
    assert step.exposed_s == ms(3)
    assert step.other_s == ms(0.5)
    assert step.idle_s == ms(1.0)
    assert (report.window.steps, report.window.devices) == (2, 2)


def test_rows_share_what_runs_at_the_same_time(report):
    # Both all-gathers are one row, 3-6 ms, of which 5-6 is shared with the all-reduce; 4-6 is exposed.
    gather = find(report, "all-gather")
    assert gather.time_s == ms(2.5)
    assert gather.exposed_s == ms(1.5)
    assert gather.sole_exposed_s == ms(1)
    assert gather.busy_s == ms(4)
    assert gather.count == 2
    assert [(op.name, op.exposed_s) for op in gather.ops] == [("all-gather.2", ms(1)), ("all-gather.1", ms(0.5))]
    # The row is 5-9 ms, without half of 5-6 and half of 7-7.5, which unmapped communication shares.
    reduce = find(report, "all-reduce")
    assert reduce.time_s == ms(3.25)
    assert reduce.exposed_s == ms(1.5)


def test_bytes_follow_nccl_tests(report):
    gather = find(report, "all-gather")
    assert gather.payload_bytes == 2 * 2**20
    assert gather.wire_bytes == 2 * 2**20 * 3 // 4
    assert (gather.wire_bytes_nvlink, gather.wire_bytes_infiniband) == (gather.wire_bytes, 0)
    assert gather.bus_bandwidth_bytes_per_s == pytest.approx(gather.wire_bytes / 4e-3)
    reduce = find(report, "all-reduce")
    assert reduce.wire_bytes == 2**24 * 2 * 7 // 8
    assert reduce.wire_bytes_infiniband == reduce.wire_bytes / 4
    assert reduce.wire_bytes_nvlink == reduce.wire_bytes * 3 / 4


def test_unmapped_communication_is_a_row_and_a_warning(report):
    row = next(r for r in report.communication if not r.axes)
    assert (row.collective, row.link, row.payload_bytes, row.bus_bandwidth_bytes_per_s) == (None, None, None, None)
    warning = next(w for w in report.warnings if w.code == "unmapped_communication")
    assert warning.seconds == row.time_s == ms(0.25)


def test_collectives_that_never_ran_have_no_row(report):
    assert "all-to-all" not in {r.collective for r in report.communication}


def test_utilization(report):
    assert report.step.mfu == pytest.approx(8e12 / (10.5e-3 * 8 * 1e15))
    assert report.step.mfu_causal == pytest.approx(6e12 / (10.5e-3 * 8 * 1e15))
    assert report.step.hfu is None
    assert report.step.tokens_per_s_per_gpu == pytest.approx(4096 / 10.5e-3 / 8)


def test_spread_names_the_worst(report):
    spread = report.spread.time_s
    assert (spread.min, spread.max, spread.worst_device, spread.worst_step) == (ms(10), ms(11), 1, 5)


def test_a_prediction_has_bounds_and_no_spread(timeline):
    report = summarize(timeline, source="plan", step_bounds=(0.008, 0.012))
    assert (report.step.all_overlapped_s, report.step.all_exposed_s) == (0.008, 0.012)
    assert report.spread.time_s.max is None


def test_transfer_and_wait_split_busy(timeline):
    first = timeline.steps[0]
    busy = np.diff(first.communication, axis=1)[:, 0]
    step = DeviceStep(**{**vars(first), "transfer_s": busy / 2})
    row = find(summarize(Timeline((step,), timeline.collectives), source="profile"), "all-gather")
    assert (row.transfer_s, row.wait_s) == (ms(2), ms(2))
    assert row.bus_bandwidth_bytes_per_s == pytest.approx(row.wire_bytes / 2e-3)


def test_no_steps_is_all_unknown():
    report = summarize(Timeline((), ()), source="plan")
    assert report.step == StepPart()
    assert report.communication == ()


def test_a_wrong_sum_is_caught(report):
    wrong = report.model_copy(update={"step": report.step.model_copy(update={"idle_s": 0.5})})
    with pytest.raises(AssertionError, match="step: the parts add up to"):
        check_invariants(wrong)
    wrong = report.model_copy(update={"communication": report.communication[1:]})
    with pytest.raises(AssertionError, match="communication rows' time_s"):
        check_invariants(wrong)


@pytest.mark.parametrize(
    ("collective", "n", "factor"),
    [
        ("all-reduce", 8, 2 * 7 / 8),
        ("all-gather", 8, 7 / 8),
        ("reduce-scatter", 4, 3 / 4),
        ("all-to-all", 4, 3 / 4),
        ("collective-permute", 4, 1),
        ("collective-broadcast", 4, 1),
        ("all-reduce", 1, 0),
    ],
)
def test_wire_factors(collective, n, factor):
    assert wire_factor(collective, n) == pytest.approx(factor)


def test_infiniband_share():
    def share(kind, n, g, link="infiniband"):
        return infiniband_share(Collective("x", "x", kind, ("a",), True, link, None, "bf16", n, 1, g, 8))

    assert share("all-gather", 16, 8) == 1 / 8  # One hop of every eight of the ring leaves.
    assert share("all-to-all", 16, 8) == 8 / 15  # Eight of fifteen peers are elsewhere.
    assert share("all-gather", 8, 8, "nvlink") == 0


def test_training_cost():
    machines = Machines(
        Placement.from_shape(("data",), (16,)), Cluster.load("dgx_h100", hosts=2, price_per_gpu_hour=3.0)
    )
    facts = StepFacts(training_steps=1800)
    part = training_cost(2.0, facts, machines)
    assert (part.hours, part.gpu_hours, part.cost) == (1.0, 16.0, 48.0)
    assert training_cost(2.0, facts, dataclasses.replace(machines, cluster=None)).cost is None
    assert training_cost(None, facts, machines).hours is None


@given(st.data())
def test_invariants_hold_on_random_steps(data):
    span = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)
    kinds = ["all-gather", "all-gather", "all-reduce", "all-to-all"]
    collectives = tuple(
        Collective(f"c.{i}", f"k{i}", k, ("a",), True, "nvlink", None, "f32", 4, 1, 4, 100) for i, k in enumerate(kinds)
    )

    def step(i):
        spans = {name: data.draw(st.lists(span, max_size=6)) for name in ("compute", "communication", "copies")}
        arrays = {name: np.array(s, float).reshape(-1, 2) for name, s in spans.items()}
        n = len(spans["communication"])
        owners = data.draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n))
        return DeviceStep(
            device=i,
            step=0,
            window=(0.1, 0.9),
            compute_op=np.zeros(len(spans["compute"]), int),
            collective=np.array(owners, int),
            **arrays,
        )

    timeline = Timeline(tuple(step(i) for i in range(data.draw(st.integers(1, 3)))), collectives)
    check_invariants(summarize(timeline, source="profile"))


@pytest.mark.parametrize(
    ("kind", "link", "size", "per_domain", "expected"),
    [
        ("all-gather", "nvlink", 8, 8, 450e9),  # NVLink 4 has 450 GB/s a GPU and direction.
        ("all-gather", "nvlink", 2, 2, 450e9),  # The group uses the switch.
        ("all-reduce", "infiniband", 2, 1, 50e9),  # Each domain has one GPU, whose NIC is NDR 400.
        ("all-reduce", "infiniband", 8, 4, 200e9),  # A ring leaves the domain on every fourth hop.
        ("all-reduce", "infiniband", 16, 8, 400e9),
        ("all-to-all", "infiniband", 16, 8, 50e9 * 15 / 8),  # 8 of 15 peers are elsewhere.
        ("all-gather", "nvlink", 1, 1, None),
    ],
)
def test_peak_of_the_bus_bandwidth(kind, link, size, per_domain, expected):
    cluster = Cluster.load("dgx_h100", hosts=2)
    collective = make_collective("x.1", kind, ("data",), link, size=size, per_domain=per_domain)
    found = peak_bus_bandwidth_bytes_per_s(collective, cluster)
    assert found == (None if expected is None else pytest.approx(expected))
    assert peak_bus_bandwidth_bytes_per_s(collective, None) is None
    assert peak_bus_bandwidth_bytes_per_s(collective, Cluster.load("cpu8")) is None


def test_each_captured_step_by_itself(report):
    five, six = report.per_step
    assert (five.step, six.step) == (5, 6)
    assert (five.time_s, five.compute_s, five.exposed_s) == (ms(10.5), ms(6), ms(3))
    assert (five.slowest_device, five.slowest_time_s) == (1, ms(11))
    for sample in report.per_step:
        parts = sample.compute_s + sample.exposed_s + sample.other_s + sample.idle_s
        assert parts == pytest.approx(sample.time_s, rel=1e-9)


def test_executions_of_several_steps_are_means_of_them(timeline):
    report = summarize(timeline, source="profile", facts=StepFacts(steps_per_call=4))
    assert report.per_step[0].time_s == ms(10.5 / 4)
