"""What a collective in flight takes from kernels beside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.hlo.module import parse_hlo, read_schedule
from meshkit.hlo.schedule import Collective, Instruction, Schedule
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.kernels import KernelWork
from meshkit.predict.nccl import by_hand, fitted_values
from meshkit.predict.network import Price, collective_price, collective_time_s
from meshkit.predict.pricing import NO_LOAD, Load, Pricer, load_of, together
from meshkit.predict.simulate import step_pricer

H100, B200 = catalog.gpu("h100_sxm"), catalog.gpu("b200")
GATHER = Collective("g", "g", "all-gather", ("fsdp",), True, "nvlink", None, "bf16", 8, 1, 8, 8 * 10**9)
HBM = 3e12
CLUSTER = Cluster.load("dgx_h100", hosts=1)
GATHERED = Price(0.02, 0.02, 0.0, 0.02, channels=24)


def test_a_matmul_on_hopper_falls_to_what_was_measured():
    """80 to 47 % of peak under an all-gather, NVIDIA forum 337991."""
    load = load_of(GATHER, GATHERED, H100, HBM)
    assert 1 / load.beside(KernelWork(arithmetic_s=1.0, memory_s=0.1))[0] == pytest.approx(47 / 80, rel=2e-3)


def test_without_a_measurement_it_loses_the_multiprocessors_of_the_collective():
    assert load_of(GATHER, GATHERED, B200, HBM).arithmetic == pytest.approx(1 - 24 / 148)
    assert load_of(GATHER, replace(GATHERED, channels=2), B200, HBM).arithmetic == pytest.approx(1 - 2 / 148)
    assert load_of(GATHER, GATHERED, H100, HBM, waves=False).arithmetic == pytest.approx(1 - 24 / 132)


def test_several_at_once_take_their_multiprocessors_each_and_a_second_wave_once():
    one, other = Load(0.9, 0.7), Load(0.8, 0.9)
    both = together([(one, 1.0), (other, 0.5)])
    assert (both.arithmetic, both.memory) == pytest.approx((0.7, 0.65))
    waves = replace(one, arithmetic=0.6, adds=False)
    assert together([(waves, 1.0), (waves, 1.0)]).arithmetic == pytest.approx(0.6)
    assert together([(Load(0.3, 0.3), 1.0)] * 3) == Load(0.2, pytest.approx(-1.1))
    assert together([]) == NO_LOAD


def test_a_kernel_bound_by_memory_loses_three_passes_of_the_bytes_that_arrive():
    load = load_of(GATHER, GATHERED, H100, HBM)
    assert load.memory == pytest.approx(1 - 3 * (7e9 / 0.02) / HBM)
    assert load.beside(KernelWork(arithmetic_s=0.1, memory_s=1.0)) == (pytest.approx(1 / load.memory), 1.0)


def test_symmetric_memory_is_priced_where_its_kernels_are_faster():
    """The option of jaxlib 0.12; between hosts, and of all-to-alls, nothing changes."""
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
    """With symmetric buffers XLA asks NCCL for no multiprocessors where most collectives are asynchronous."""
    gather = replace(GATHER, payload_bytes=2**16)
    body = (Instruction("s", "s", "start" if starts else "collective", collective=gather),)
    body += (Instruction("d", "d", "done", starts="s"),) if starts else ()
    pricer = step_pricer(Schedule("m", {"e": body}, "e", "f"), CLUSTER, Assumptions(symmetric=True))
    forced = collective_price("all-gather", 2**16, (8, 1, None), CLUSTER, {"algorithm": algorithm})
    assert pricer.collective_s(body[0]) == forced.seconds


def test_grouped_and_combined_collectives_are_launched_once():
    """What XLA combines is one message of all bytes; of several in one start, NCCL has one kernel for the same GPUs."""
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
    launch = by_hand("xla_launch_s") + fitted_values()["kernel_s.4"]
    alone, rides = (pricer.collective_s(found["group_start/gather"]) for found in (apart, grouped))
    assert alone - rides == pytest.approx(launch)
    one, two, both = (
        pricer.collective_s(Instruction("i", "i", "collective", collective=replace(GATHER, payload_bytes=size)))
        for size in (2**20, 2**18, 2**20 + 2**18)
    )
    assert both < one + two - launch  # and the steps of its ring, once


def test_only_what_is_short_of_a_resource_slows_down():
    load = load_of(GATHER, GATHERED, H100, HBM)
    assert load.beside(KernelWork(host_s=1.0, memory_s=0.1)) == (1.0, 1.0)
    assert load.beside(KernelWork()) == (1.0, 1.0)


def test_a_slow_network_leaves_memory_alone():
    assert load_of(GATHER, replace(GATHERED, seconds=2.0), H100, HBM).memory > 0.99
    assert load_of(GATHER, Price(0.0), H100, HBM) == NO_LOAD
    assert load_of(GATHER, GATHERED, catalog.gpu("cpu"), HBM) == NO_LOAD
