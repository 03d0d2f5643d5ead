"""What a collective in flight takes from kernels beside it."""

from dataclasses import replace

import pytest

from meshkit.config import catalog
from meshkit.hlo.schedule import Collective
from meshkit.predict.kernels import KernelWork
from meshkit.predict.pricing import NO_LOAD, load_of

H100, B200 = catalog.gpu("h100_sxm"), catalog.gpu("b200")
GATHER = Collective("g", "g", "all-gather", ("fsdp",), True, "nvlink", None, "bf16", 8, 1, 8, 8 * 10**9)
HBM = 3e12


def test_a_matmul_on_hopper_falls_to_what_was_measured():
    """80 to 47 % of peak under an all-gather, NVIDIA forum 337991."""
    load = load_of(GATHER, 0.02, H100, HBM)
    assert 1 / load.slowdown(KernelWork(arithmetic_s=1.0, memory_s=0.1)) == pytest.approx(47 / 80, rel=2e-3)


def test_without_a_measurement_it_loses_the_multiprocessors_of_the_collective():
    inside = load_of(GATHER, 0.02, B200, HBM)
    over_hosts = load_of(replace(GATHER, group_size=64), 0.02, B200, HBM)
    assert inside.arithmetic == pytest.approx(1 - 24 / 148)
    assert over_hosts.arithmetic == pytest.approx(1 - 16 / 148)


def test_a_kernel_bound_by_memory_loses_three_passes_of_the_bytes_that_arrive():
    load = load_of(GATHER, 0.02, H100, HBM)
    assert load.memory == pytest.approx(1 - 3 * (7e9 / 0.02) / HBM)
    assert load.slowdown(KernelWork(arithmetic_s=0.1, memory_s=1.0)) == pytest.approx(1 / load.memory)


def test_only_what_is_short_of_a_resource_slows_down():
    load = load_of(GATHER, 0.02, H100, HBM)
    assert load.slowdown(KernelWork(host_s=1.0, memory_s=0.1)) == 1.0
    assert load.slowdown(KernelWork()) == 1.0


def test_a_slow_network_leaves_memory_alone():
    assert load_of(GATHER, 2.0, H100, HBM).memory > 0.99
    assert load_of(GATHER, 0.0, H100, HBM) == NO_LOAD
    assert load_of(GATHER, 1.0, catalog.gpu("cpu"), HBM) == NO_LOAD
