"""Test what a collective in flight takes from kernels beside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.hlo.module import read_schedule
from meshkit.hlo.schedule import Collective, Instruction, Schedule
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.kernels import KernelWork
from meshkit.predict.nccl import fitted_values, model_constant
from meshkit.predict.network import Price, collective_price, collective_time_s
from meshkit.predict.pricing import NO_LOAD, Load, Pricer, arithmetic_left, combined_load, load_of
from meshkit.predict.simulate import step_pricer
from tests.hlo_text import parse_hlo

H100, B200, A100 = catalog.gpu("h100_sxm"), catalog.gpu("b200"), catalog.gpu("a100_80gb")
GATHER = Collective("g", "g", "all-gather", ("fsdp",), True, "nvlink", None, "bf16", 8, 1, 8, 8 * 10**9)
HBM = 3e12
CLUSTER = Cluster.load("dgx_h100", hosts=1)
GATHERED = Price(0.02, 0.02, 0.0, 0.02, channels=24)


def test_a_kernel_loses_the_multiprocessors_of_the_collective():
    assert load_of(GATHER, GATHERED, B200, HBM).arithmetic == pytest.approx(1 - 24 / 148)
    assert load_of(GATHER, replace(GATHERED, channels=2), B200, HBM).arithmetic == pytest.approx(1 - 2 / 148)


@pytest.mark.parametrize(("blocks", "slower"), [(8, 1.097), (16, 1.198), (24, 1.171)])
def test_a_matmul_on_hopper_loses_what_one_lost_beside_blocks_that_stream(blocks, slower):
    """benchmarks/gpu measured one H100 with cuBLAS 13.1 (2026-11-22); the law and a line are both within 6 %."""
    assert 1 / arithmetic_left(H100, blocks) == pytest.approx(slower, rel=0.06)


def test_a_matmul_on_an_a100_falls_to_what_was_measured_there():
    """A matmul of 1.18 ms took 2.08 ms under an all-gather (NVIDIA/nccl#1428); a second collective takes no more."""
    load = load_of(GATHER, GATHERED, A100, HBM)
    assert load.slowdowns(KernelWork(arithmetic_s=1.18))[0] == pytest.approx(2.08 / 1.18, rel=2e-3)
    assert combined_load([(load, 1.0), (load, 1.0)]).arithmetic == load.arithmetic


def test_several_at_once_take_their_multiprocessors_each_and_what_was_measured_once():
    one, other = Load(0.9, 0.7), Load(0.8, 0.9)
    both = combined_load([(one, 1.0), (other, 0.5)])
    assert (both.arithmetic, both.memory) == pytest.approx((0.7, 0.65))
    measured = replace(one, arithmetic=0.6, adds=False)
    assert combined_load([(measured, 1.0), (measured, 1.0)]).arithmetic == pytest.approx(0.6)
    assert combined_load([(Load(0.3, 0.3), 1.0)] * 3) == Load(0.2, pytest.approx(-1.1))
    assert combined_load([]) == NO_LOAD


def test_a_kernel_bound_by_memory_loses_three_passes_of_the_bytes_that_arrive():
    load = load_of(GATHER, GATHERED, H100, HBM)
    assert load.memory == pytest.approx(1 - 3 * (7e9 / 0.02) / HBM)
    assert load.slowdowns(KernelWork(arithmetic_s=0.1, memory_s=1.0)) == (pytest.approx(1 / load.memory), 1.0)


def test_symmetric_memory_is_priced_where_its_kernels_are_faster():
    """The option is of jaxlib 0.12; between hosts, and for all-to-alls, nothing changes."""
    cluster = Cluster.load("dgx_h100", hosts=2)
    usual, symmetric = (
        Pricer(cluster, assumptions_for({"xla_gpu_experimental_enable_nccl_symmetric_buffers": on}))
        for on in (False, True)
    )

    def seconds(pricer, **changed):
        return pricer.collective_s(Instruction("i", "i", "collective", collective=replace(GATHER, **changed)))

    small = {"payload_bytes": 2**16}
    forced = collective_time_s(
        "all-gather", payload_bytes=2**16, gpus_per_domain=8, cluster=cluster, algorithm="symmetric"
    )
    assert seconds(symmetric, **small) == forced < seconds(usual, **small)
    for kind in ({"collective": "all-to-all"}, {"group_size": 16}):
        assert seconds(symmetric, **small, **kind) == seconds(usual, **small, **kind)


def test_a_copy_engine_takes_no_multiprocessor_and_two_passes():
    price = collective_price("all-gather", 8e9, (8, 1, None), CLUSTER, {"algorithm": "copy engine"})
    load = load_of(GATHER, price, H100, HBM)
    wire = GATHER.payload_bytes * 7 / 8
    assert (load.arithmetic, load.memory) == (0.81, pytest.approx(1 - 2 * wire / price.seconds / HBM))


@pytest.mark.parametrize(("starts", "algorithm"), [(1, "copy engine"), (0, "symmetric")])
def test_gathers_of_a_program_that_overlaps_run_on_copy_engines(starts, algorithm):
    """With symmetric buffers, XLA asks NCCL for no multiprocessors where most collectives are asynchronous."""
    gather = replace(GATHER, payload_bytes=2**16)
    body = (Instruction("s", "s", "start" if starts else "collective", collective=gather),)
    body += (Instruction("d", "d", "done", starts="s"),) if starts else ()
    pricer = step_pricer(Schedule("m", {"e": body}, "e", "f"), CLUSTER, Assumptions(symmetric=True))
    forced = collective_price("all-gather", 2**16, (8, 1, None), CLUSTER, {"algorithm": algorithm})
    assert pricer.collective_s(body[0]) == forced.seconds


def test_grouped_and_combined_collectives_are_launched_once():
    """A combined collective is one message; NCCL has one kernel for several in one start on the same GPUs."""
    text = (Path(__file__).parents[1] / "data" / "hlo" / "fused.hlo").read_text()
    together_ = text.replace("channel_id=4, replica_groups=[2,4]<=[8]", "channel_id=4, replica_groups=[1,8]<=[8]")
    placement = Placement.from_shape(("data",), (8,), gpus_per_domain=8)
    schedules = [read_schedule(parse_hlo(t), placement) for t in (text, together_)]
    apart, grouped = (
        {i.name: i for i, _ in s.walk() if i.name.startswith("group_start") and i.collective} for s in schedules
    )
    groups = [i.collective for i in (*apart.values(), *grouped.values())]
    assert [c is not None and c.grouped for c in groups] == [False, False, True, False]
    pricer = Pricer(Cluster.load("dgx_h100"), Assumptions())
    launch = model_constant("xla_launch_s") + fitted_values()["kernel_s.4"]
    alone, rides = (pricer.collective_s(found["group_start/gather"]) for found in (apart, grouped))
    assert alone - rides == pytest.approx(launch)
    one, two, both = (
        pricer.collective_s(Instruction("i", "i", "collective", collective=replace(GATHER, payload_bytes=size)))
        for size in (2**20, 2**18, 2**20 + 2**18)
    )
    assert both < one + two - launch  # The steps of its ring also count once.


def test_only_what_is_short_of_a_resource_slows_down():
    load = load_of(GATHER, GATHERED, H100, HBM)
    assert load.slowdowns(KernelWork(host_s=1.0, memory_s=0.1)) == (1.0, 1.0)
    assert load.slowdowns(KernelWork()) == (1.0, 1.0)


def test_a_slow_network_leaves_memory_alone():
    assert load_of(GATHER, replace(GATHERED, seconds=2.0), H100, HBM).memory > 0.99
    assert load_of(GATHER, Price(0.0), H100, HBM) == NO_LOAD
    assert load_of(GATHER, GATHERED, catalog.gpu("cpu"), HBM) == NO_LOAD
