"""The table of constants: each is where it is said to be, and is put back after it was changed."""

import pytest

import meshkit as mk
from benchmarks.constants import CONSTANTS, MORE, known_of, more_of, with_more
from meshkit.config import catalog
from meshkit.predict.nccl import by_hand


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: f"{c.table} {c.name}")
def test_every_constant_has_a_value_a_source_and_a_kind(constant):
    assert all(known_of(constant))


def test_a_constant_is_changed_and_put_back():
    spread, gap = (c for c in CONSTANTS if c.name in ("gpu_spread", "kernel_gap_s"))
    before = catalog.kernels()["gpu_spread"], by_hand("kernel_gap_s")
    for constant, found in ((spread, lambda: catalog.kernels()["gpu_spread"]), (gap, lambda: by_hand("kernel_gap_s"))):
        was = found()
        with more_of(constant):
            assert found() == pytest.approx(MORE * was)
    assert (catalog.kernels()["gpu_spread"], by_hand("kernel_gap_s")) == before


def test_more_of_a_rate_is_of_the_cluster_that_is_simulated():
    cluster = mk.Cluster.load("dgx_h100")
    memory, nic = (next(c for c in CONSTANTS if c.what.startswith(what)) for what in ("device memory", "a NIC"))
    assert with_more(cluster, memory).gpu.achieved["memory"] == pytest.approx(0.99)
    assert with_more(cluster, nic).nic.achieved == 1.0
    assert cluster.gpu.achieved["memory"] == 0.9
