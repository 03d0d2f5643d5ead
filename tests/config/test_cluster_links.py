"""Test the links of a cluster: which fabric they are, and that a path is as fast as its slowest part."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.config import catalog
from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.errors import ConfigError


def sustained(link):
    return link.bytes_per_s * link.achieved


@pytest.mark.parametrize(
    ("name", "overrides", "link", "fabric", "bytes_per_s"),
    [
        ("dgx_h100", {}, "nvlink", "nvlink4_nvswitch", 450e9),
        ("dgx_h100", {}, "infiniband", "infiniband_ndr", 50e9),
        ("dgx_h100", {"nics_per_host": 4}, "infiniband", "infiniband_ndr", 25e9),
        ("dgx_h100", {"oversubscription": 2.0}, "infiniband", "infiniband_ndr", 25e9),
        ("dgx_h100", {"fabric": "roce"}, "infiniband", "roce_400", 50e9),
        ("dgx_h100", {"nic": "tcp_100"}, "infiniband", "tcp_100", 12.5e9),
        ("dgx_h100", {"nic": "roce_200", "fabric": "infiniband"}, "infiniband", "infiniband_200", 25e9),
        ("dgx_h100", {"nvlink_switch": False}, "nvlink", "nvlink4_mesh", 450e9),
        ("dgx_h100", {"gpus_per_host": 4}, "nvlink", "nvlink4_mesh", 450e9),
        ("dgx_h100", {"gpus_per_host": 4, "nvlink_switch": True}, "nvlink", "nvlink4_nvswitch", 450e9),
        ("dgx_h100", {"scale_up": "pcie"}, "nvlink", "pcie5_p2p", 63.015e9),
        ("dgx_h100", {"scale_up": "shared_memory"}, "nvlink", "shared_memory", 614.4e9 / 2 / 8),
        ("cloud_h100_roce", {}, "infiniband", "roce_400", 50e9),
        ("cloud_h100_tcp", {}, "infiniband", "tcp_200", 12.5e9),
        ("superpod_h100_nvlink256", {}, "nvlink", "nvlink4_nvswitch", 450e9),
        ("dgx1_p100", {}, "nvlink", "nvlink1_mesh", 80e9),
        ("dgx1_v100", {}, "nvlink", "nvlink2_mesh", 150e9),
        ("dgx1_v100", {"scale_up": "pcie"}, "nvlink", "pcie3_p2p", 15.754e9),
        ("dgx2", {}, "nvlink", "nvlink2_nvswitch", 150e9),
        ("dgx2", {}, "infiniband", "infiniband_edr", 6.25e9),
        ("dgx_a100", {}, "nvlink", "nvlink3_nvswitch", 300e9),
        ("gb200_nvl72", {}, "nvlink", "nvlink5_nvswitch", 900e9),
        ("workstation_2xrtx", {}, "nvlink", "pcie5_p2p", 63.015e9),
        ("workstation_2xrtx", {"scale_up": "shared_memory"}, "nvlink", "shared_memory", 63.015e9),
        ("cpu8", {}, "nvlink", "shared_memory", 2e9),
        ("cpu8", {"nvlink_domain_size": 4}, "infiniband", "shared_memory", 2e9),
    ],
)
def test_links(name, overrides, link, fabric, bytes_per_s):
    found = Cluster.load(name, **overrides).link(link)
    assert (found.name, found.fabric, found.bytes_per_s) == (link, fabric, bytes_per_s)


@pytest.mark.parametrize("name", shipped_clusters())
def test_links_of_shipped_clusters_are_usable(name):
    cluster = Cluster.load(name)
    for link in (cluster.link("nvlink"), cluster.link("infiniband"), cluster.offload_link()):
        assert link.bytes_per_s > 0
        assert 0 < link.achieved <= 1
        assert 0 < link.latency_small_s <= link.latency_s


@pytest.mark.parametrize(
    ("name", "gpus", "gb_per_s"),
    [
        ("superpod_h100_nvlink256", 8, 450),  # The group is inside one host.
        ("superpod_h100_nvlink256", 16, 225),  # Of a host's 144 links, 72 leave it.
        ("superpod_h100_nvlink256", 256, 225),
        ("gb200_nvl72", 72, 900),  # This cluster has no taper.
        ("dgx1_p100", 8, 80),
        ("dgx1_p100", 4, 60),  # Three links lead to the rest of the quad.
        ("dgx1_p100", 2, 20),
        ("dgx1_v100", 4, 100),  # GPU 0 has one, one and two links to the others.
        ("dgx1_v100", 2, 25),  # GPUs 0 and 1 share a single link.
    ],
)
def test_nvlink_of_a_group(name, gpus, gb_per_s):
    assert Cluster.load(name).link("nvlink", gpus=gpus).bytes_per_s == pytest.approx(gb_per_s * 1e9)


def test_half_of_a_cube_has_the_links_of_that_half():
    assert Cluster.load("dgx1_p100", nvlink_domain_size=4).link("nvlink").bytes_per_s == pytest.approx(60e9)
    four = {"gpu": "v100", "gpus_per_host": 4}  # Each pair of the four GPUs is wired with two links.
    assert Cluster.load(four).link("nvlink").bytes_per_s == 150e9
    assert Cluster.load(four).link("nvlink", gpus=2).bytes_per_s == 50e9


def test_the_taper_of_256_gpus_is_the_vendors_all_to_all_figure():
    """Half of the GPUs send to the other half in both directions and all of it leaves a host: 57.6 TB/s."""
    beyond = Cluster.load("superpod_h100_nvlink256").link("nvlink", gpus=256).bytes_per_s
    assert 2 * 128 * beyond == pytest.approx(57.6e12)


@pytest.mark.parametrize("gpus", range(2, 9))
def test_eight_gpus_without_a_switch_split_900_gb_per_s_in_seven(gpus):
    """Each pair has 128.6 GB/s, both directions together; a group of g has g - 1 such links at each GPU."""
    cluster = Cluster.load("dgx_h100", nvlink_switch=False)
    assert 2 * cluster.link("nvlink", gpus=gpus).bytes_per_s == pytest.approx((gpus - 1) * 900e9 / 7)


def test_nvlinks_that_lead_to_the_cpu_lead_to_no_gpu():
    """An AC922 with four V100 has three links to the CPU and three to the other GPU of the socket."""
    table = {"gpu": "v100", "gpus_per_host": 4, "nvlink_domain_size": 2, "cpu_link": "power9_nvlink2"}
    cluster = Cluster.load(table)
    assert cluster.link("nvlink").bytes_per_s == 75e9
    assert (cluster.offload_link().fabric, cluster.offload_link().bytes_per_s) == ("nvlink2_cpu", 75e9)


@pytest.mark.parametrize(
    ("overrides", "bytes_per_s", "achieved"),
    [
        ({"gpu": "h100_sxm", "nic": "ib_ndr"}, 50e9, 0.92),  # The NIC is the slowest part.
        ({"gpu": "a100_80gb", "nic": "ib_ndr"}, 31.508e9, 0.8),  # The slot is Gen4 and the NIC Gen5.
        ({"gpu": "v100", "nic": "ib_hdr"}, 15.754e9, 0.8),  # The slots are Gen3.
        ({"gpu": "v100", "nic": "ib_edr"}, 12.5e9, 0.94),
        # With two NICs a GPU, the GPU's own slot is the slowest part.
        ({"gpu": "h100_sxm", "nic": "ib_ndr", "nics_per_host": 16}, 63.015e9, 0.8),
        ({"gpu": "h100_sxm", "nic": "ib_xdr"}, 63.015e9, 0.8),  # The slot is Gen5 and the NIC Gen6.
        # The GPU reaches the NIC through its CPU, not through a slot of its own.
        ({"gpu": "gb300", "nic": "ib_xdr"}, 100e9, 0.92),
        ({"gpu": "h100_sxm", "nic": "tcp_10"}, 1.25e9, 0.64),
    ],
)
def test_a_path_is_the_slowest_of_nic_and_slots(overrides, bytes_per_s, achieved):
    link = Cluster.load({"gpus_per_host": 8, "hosts": 2} | overrides).link("infiniband")
    assert (link.bytes_per_s, link.achieved) == (bytes_per_s, achieved)


@pytest.mark.parametrize("name", [n for n in shipped_clusters() if Cluster.load(n).nic])
def test_without_gpudirect_no_path_is_faster(name):
    direct, through = (Cluster.load(name, gpudirect_rdma=on).link("infiniband") for on in (True, False))
    assert sustained(through) <= sustained(direct)
    assert through.fabric == direct.fabric


def test_without_gpudirect_a_switch_carries_each_byte_twice():
    """A 100 Gb/s NIC and a GPU below a Gen3 switch reached 6 GB/s (NVIDIA/nccl#465); 0.8 x 15.75 / 2 is 6.3."""
    table = {"gpu": "v100", "gpus_per_host": 1, "hosts": 4, "nic": "ib_edr", "gpudirect_rdma": False}
    assert sustained(Cluster.load(table).link("infiniband")) == pytest.approx(6e9, rel=0.06)


def test_without_gpudirect_host_memory_is_shared_by_the_gpus_of_a_host():
    """Each byte sent or received is written once and read once: four passes over 614 GB/s for eight GPUs."""
    link = Cluster.load("dgx_h100", gpudirect_rdma=False).link("infiniband")
    assert link.bytes_per_s == pytest.approx(614.4e9 / 8 / 4)
    fewer = Cluster.load("dgx_h100", gpudirect_rdma=False, gpus_per_host=2).link("infiniband")
    # With two GPUs the path from switch to CPU is the slower part.
    assert fewer.bytes_per_s == pytest.approx(63.015e9 / 2)


def test_a_grace_without_gpudirect_is_bound_by_its_memory():
    """A GH200 with four 200 Gb/s ports reached 96 GB/s with GPUDirect and 80 without (NVIDIA/nccl#1579, 2025).

    The model says 92 in both cases, within 20 % of each: Grace's memory, 512 x 0.8 / 4 = 102 GB/s, is just above the
    ports.
    """
    table = {"gpu": "gh200", "gpus_per_host": 1, "hosts": 2, "nic": "ib_ndr200", "nics_per_host": 4}
    for gpudirect, measured in ((True, 96e9), (False, 80e9)):
        link = Cluster.load(table | {"gpudirect_rdma": gpudirect}).link("infiniband")
        assert sustained(link) == pytest.approx(measured, rel=0.2)


def test_no_peer_access_is_near_the_measured_ring():
    """Four RTX PRO 6000 reached 37.6 GB/s through host memory and 46.7 with peer access (nccl-tests, 128 MiB).

    The catalog's 0.8 x 63 = 50.4 GB/s uses SimAI's share for PCIe switches; 46.7 is 8 % below it.
    """
    table = {"gpu": "rtx_pro_6000", "gpus_per_host": 4}
    assert sustained(Cluster.load(table | {"scale_up": "shared_memory"}).link("nvlink")) == pytest.approx(
        37.6e9, rel=0.01
    )
    assert sustained(Cluster.load(table | {"scale_up": "pcie"}).link("nvlink")) == pytest.approx(46.7e9, rel=0.1)


def test_a_port_in_its_other_mode_has_that_modes_numbers():
    found = Cluster.load("dgx_h100", fabric="ethernet").link("infiniband")
    tcp = catalog.nic("tcp_400")
    assert (found.fabric, found.latency_s) == ("tcp_400", tcp.latency_s)
    assert sustained(found) <= tcp.bytes_per_s * tcp.achieved


@pytest.mark.parametrize(
    ("name", "overrides", "fabric", "bytes_per_s"),
    [
        ("dgx_h100", {}, "pcie5", 63.015e9),
        ("dgx2", {}, "pcie3", 153.6e9 / 16),  # 16 GPUs share the host memory bandwidth of two sockets of that time.
        ("gb200_nvl72", {}, "nvlink_c2c", 225e9),
        ("dgx1_p100", {"cpu_link": "power8_nvlink1", "gpus_per_host": 4}, "nvlink1_cpu", 40e9),
    ],
)
def test_offload(name, overrides, fabric, bytes_per_s):
    link = Cluster.load(name, **overrides).offload_link()
    assert (link.fabric, link.bytes_per_s) == (fabric, bytes_per_s)


def test_a_checkpoint_is_as_fast_as_storage_or_the_way_to_it():
    assert Cluster.load("dgx_h100").checkpoint_bytes_per_s is None
    assert Cluster.load("dgx_h100", storage_bytes_per_s=20e9).checkpoint_bytes_per_s == 20e9
    direct = Cluster.load("dgx_h100", storage_bytes_per_s=1e12)
    assert direct.checkpoint_bytes_per_s == pytest.approx(8 * 63.015e9 * 0.8)
    staged = Cluster.load("dgx_h100", storage_bytes_per_s=1e12, gpudirect_rdma=False)
    assert staged.checkpoint_bytes_per_s == pytest.approx(614.4e9 / 2 * 0.8)  # Host memory is written and read.


CLUSTERS = st.fixed_dictionaries(
    {
        "gpu": st.sampled_from(catalog.gpu_keys()),
        "gpus_per_host": st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
        "hosts": st.sampled_from([1, 2, 9, 36]),
        "nvlink_domain_size": st.sampled_from([1, 2, 4, 8, 16, 72]),
        "scale_up": st.sampled_from(["nvlink", "pcie", "shared_memory"]),
        "nic": st.sampled_from(catalog.nic_keys()),
        "nics_per_host": st.sampled_from([1, 4, 8, 16]),
        "gpudirect_rdma": st.booleans(),
        "oversubscription": st.sampled_from([1.0, 2.5]),
        "nvlink_taper": st.sampled_from([1.0, 0.5]),
    },
    optional={
        "fabric": st.sampled_from(["infiniband", "roce", "ethernet"]),
        "nvlink_switch": st.booleans(),
        "cpu_link": st.sampled_from(catalog.cpu_link_keys()),
    },
)


@settings(max_examples=300)
@given(CLUSTERS, st.integers(1, 80))
def test_whatever_cluster_is_accepted_has_links(table, gpus):
    refused = None
    try:
        cluster = Cluster.load(table)
    except ConfigError as error:
        refused = error
    if refused:
        assert refused.at
        assert refused.hint
        return
    whole, part = cluster.link("nvlink"), cluster.link("nvlink", gpus=gpus)
    assert 0 < part.bytes_per_s <= whole.bytes_per_s * (1 + 1e-12)
    assert part.fabric == whole.fabric
    assert cluster.link("infiniband").bytes_per_s > 0
    assert cluster.offload_link().bytes_per_s > 0
    assert Cluster.load(cluster.to_dict()) == cluster
    faster = Cluster.load(table | {"gpudirect_rdma": True, "oversubscription": 1.0}).link("infiniband")
    assert sustained(cluster.link("infiniband")) <= sustained(faster)
