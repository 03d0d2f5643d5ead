"""The network model: limits that follow from the closed form, and the measured points it must be near."""

import pytest

import meshkit as mk
from meshkit.timeline.network import collective_time_s, wire_factor

KINDS = ["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]


@pytest.fixture(scope="module")
def h100():
    return mk.Cluster.load("dgx_h100", hosts=8)


@pytest.mark.parametrize("kind", KINDS)
def test_large_messages_run_at_the_links_achieved_bandwidth(h100, kind):
    link = h100.link("nvlink")
    payload = 2**36
    seconds = collective_time_s(kind, payload_bytes=payload, gpus_per_domain=8, cluster=h100)
    assert payload * wire_factor(kind, 8) / seconds == pytest.approx(link.bytes_per_s * link.achieved, rel=1e-2)


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter"])
def test_a_ring_over_domains_is_bound_by_its_share_of_the_nics(h100, kind):
    """One ring per GPU: wire bytes / g cross each GPU's NIC; NVLink is faster than that."""
    link, payload = h100.link("infiniband"), 2**36
    for g in (1, 8):
        seconds = collective_time_s(kind, payload_bytes=payload, gpus_per_domain=g, domains=4, cluster=h100)
        nvlink = h100.link("nvlink")
        wire = payload * wire_factor(kind, 4 * g)
        outside = wire / g / (link.bytes_per_s * link.achieved)
        inside = wire / (nvlink.bytes_per_s * nvlink.achieved) if g > 1 else 0.0
        assert seconds == pytest.approx(max(outside, inside), rel=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_time_grows_with_bytes_and_with_domains(h100, kind):
    def time(payload, domains):
        return collective_time_s(kind, payload_bytes=payload, gpus_per_domain=8, domains=domains, cluster=h100)

    sizes = [time(2**e, 2) for e in range(4, 34, 2)]
    assert sizes == sorted(sizes)
    assert time(2**20, 2) <= time(2**20, 4) <= time(2**20, 8)


def test_one_gpu_communicates_nothing(h100):
    assert collective_time_s("all-reduce", payload_bytes=2**30, gpus_per_domain=1, cluster=h100) == 0.0


def test_small_all_reduce_is_near_nccl_tests(h100):
    """nccl-tests on DGX H100: 8 bytes take 13.0 us (NVIDIA dgxc benchmark README). NCCL's own constants for a ring with
    LL give 6.6 + 14 x 0.6 = 15.0 us; we add the 5 us that XLA spends to launch."""
    seconds = collective_time_s("all-reduce", payload_bytes=8, gpus_per_domain=8, cluster=h100)
    assert seconds == pytest.approx(15.0e-6 + 5e-6, rel=1e-3)


def test_all_gather_is_near_the_measured_bus_bandwidth(h100):
    """H200, 8 GPUs, 16 GiB: 361 GB/s (ml-engineering, nccl-tests); H100 has the same NVLink."""
    seconds = collective_time_s("all-gather", payload_bytes=16 * 2**30, gpus_per_domain=8, cluster=h100)
    assert 16 * 2**30 * 7 / 8 / seconds == pytest.approx(361e9, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"collective": "all-sum", "payload_bytes": 1, "gpus_per_domain": 8}, "unknown collective 'all-sum'"),
        ({"collective": "all-reduce", "payload_bytes": -1, "gpus_per_domain": 8}, "makes no sense"),
        ({"collective": "all-reduce", "payload_bytes": 1, "gpus_per_domain": 0}, "makes no sense"),
    ],
)
def test_nonsense_is_refused(h100, arguments, message):
    with pytest.raises(mk.ConfigError, match=message):
        collective_time_s(cluster=h100, **arguments)
