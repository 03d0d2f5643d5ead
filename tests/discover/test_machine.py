"""Test what a Probe finds on a whole machine: its kind, the cluster that it makes, its faults and its ports."""

import re
import subprocess
import sys

import pytest

from meshkit.config.cluster import Cluster
from meshkit.discover import FixtureProbe, LiveProbe, check, discover, merge, to_cluster
from meshkit.discover.machine import read_nics, read_rdma
from meshkit.discover.nvidia_smi import FABRIC_QUERY, GPU_QUERY, NVLINK_QUERY
from meshkit.discover.probe import read_nvml
from meshkit.discover.topology import gpu_by_name, gpu_name_by_pci, names, pcie_generation
from meshkit.errors import ConfigError


def codes(machine, cluster="dgx_h100"):
    return [(f.code, f.where) for f in check(discover(machine.probe()), Cluster.load(cluster))]


def test_an_hgx_host_is_a_dgx_h100(hgx):
    found = discover(hgx.probe())
    table = to_cluster(found)
    assert (
        Cluster.load(table).to_dict() | {"name": "dgx_h100", "host_memory_bytes": 2e12}
        == Cluster.load("dgx_h100").to_dict()
    )
    assert found.numa_nodes == ((0, 0), (0, 1))
    assert next(c for c in found.connections if {c.a, c.b} == {"gpu0", "gpu7"}).path == "NV18"
    assert [nic.id for nic in found.nearest_nics("gpu5")[1]] == ["mlx5_5"]
    assert found.rdma.works
    assert not found.warnings
    assert codes(hgx) == []


def test_a_rack_host_knows_that_its_domain_goes_on(rack_host):
    found = discover(rack_host.probe())
    assert [(len(d.gpus), d.spans_hosts) for d in found.domains] == [(4, True)]
    assert any("GPUs of other hosts may be in it" in warning for warning in found.warnings)
    assert to_cluster(found)["nvlink_switch"] is True
    assert codes(rack_host, "gb200_nvl72") == []


def test_hosts_of_a_rack_merge_into_one_domain(rack_host):
    found = merge([discover(rack_host.probe())] * 18, "18 hosts")
    cluster = Cluster.load(to_cluster(found))
    expected = Cluster.load("gb200_nvl72")
    assert (cluster.hosts, cluster.nvlink_domain_size, cluster.num_nvlink_domains) == (18, 72, 1)
    assert cluster.link("nvlink") == expected.link("nvlink")
    assert cluster.link("infiniband") == expected.link("infiniband")


def test_hosts_without_a_fabric_keep_domains_of_their_own(hgx):
    cluster = Cluster.load(to_cluster(merge([discover(hgx.probe())] * 2, "2 hosts")))
    assert (cluster.hosts, cluster.nvlink_domain_size, cluster.num_nvlink_domains) == (2, 8, 2)


def test_cards_meet_over_pcie_or_in_host_memory(cards, cards_without_peer_access):
    assert Cluster.load(to_cluster(discover(cards.probe()))).link("nvlink").fabric == "pcie5_p2p"
    table = to_cluster(discover(cards_without_peer_access.probe()))
    assert (table["scale_up"], table["nic"]) == ("shared_memory", "roce_100")


def break_nic(m):
    m.files["/sys/class/infiniband/mlx5_3/ports/1/state"] = "1: DOWN\n"


def break_width(m):
    m.gpus[2]["pcie"]["width"] = 8


def break_generation(m):
    m.gpus[2]["pcie"]["generation"] = 3


def break_nic_slot(m):
    m.files["/sys/class/infiniband/mlx5_1/device/current_link_width"] = "8\n"


def break_links(m):
    for link in m.gpus[6]["nvlinks"][:2]:
        link["active"] = False


def break_domain(m):
    for link in m.gpus[6]["nvlinks"]:
        link["active"] = False
    for gpu in m.gpus:
        for peer in gpu["peers"]:
            if 6 in (gpu["index"], peer["index"]):
                peer["nvlink"] = False


def break_count(m):
    del m.gpus[7]
    for gpu in m.gpus:
        gpu["peers"] = [p for p in gpu["peers"] if p["index"] < 7]
    del m.commands["nvidia-smi topo -m"]


def break_kind(m):
    m.gpus[0]["name"] = "NVIDIA H200"


def break_rdma(m):
    del m.files["/sys/module/nvidia_peermem/version"]
    m.files["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1  (b)\n"


def break_acs(m):
    m.commands["lspci -vvv"] = "00:01.0 PCI bridge\n\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+\n"


def break_rate(m):
    for i in range(8):
        m.files[f"/sys/class/infiniband/mlx5_{i}/ports/1/rate"] = "200 Gb/sec (4X HDR)\n"


@pytest.mark.parametrize(
    ("damage", "expected", "words"),
    [
        (break_nic, [("nic_down", "mlx5_3"), ("nic_count", "")], r"mlx5_3 is DOWN"),
        (break_width, [("pcie_width", "gpu2")], r"PCIe x8, but it and its slot support x16"),
        (break_generation, [("pcie_generation", "gpu2")], r"generation 3, but it and its slot support 5"),
        (break_nic_slot, [("pcie_width", "mlx5_1")], r"mlx5_1 runs at PCIe x8"),
        (break_links, [("nvlink_down", "gpu6")], r"16 of 18 NVLinks up"),
        (break_domain, [("outside_domain", "gpu6")], r"gpu6 is outside the NVLink domain of 7 GPUs"),
        (break_count, [("gpu_count", "")], r"8 GPUs a host, but 7 are here"),
        (break_kind, [("gpu_kind", "")], r"gpu0 is NVIDIA H200"),
        (break_rdma, [("gpudirect_rdma", "")], r"neither nvidia_peermem nor dma-buf"),
        (break_acs, [("gpudirect_rdma", "")], r"1 PCIe bridges redirect"),
        (break_rate, [("nic_kind", "")], r"run at 400 Gb/s, but mlx5_0 to mlx5_7 \(8\) at 200"),
    ],
)
def test_check_finds_what_is_broken(hgx, damage, expected, words):
    damage(hgx)
    findings = check(discover(hgx.probe()), Cluster.load("dgx_h100"))
    assert [(f.code, f.where) for f in findings] == expected
    assert any(re.search(words, f.message) for f in findings)


def test_a_link_that_saves_power_is_not_broken(hgx):
    for gpu in hgx.gpus:
        gpu["performance_state"] = 8
        gpu["pcie"]["generation"] = 1
    assert codes(hgx) == []


def test_a_gpu_outside_leaves_a_cluster_that_uses_the_others(hgx):
    break_domain(hgx)
    table = to_cluster(discover(hgx.probe()))
    assert (table["nvlink_domain_size"], table["gpus_used_per_domain"]) == (8, 7)


def test_a_gpu_of_another_partition_is_outside_the_domain(rack_host):
    rack_host.gpus[3]["fabric"]["clique_id"] = 2
    assert ("outside_domain", "gpu3") in codes(rack_host, "gb200_nvl72")


def test_a_gpu_that_has_not_joined_the_fabric_is_outside_the_domain(rack_host):
    rack_host.gpus[3]["fabric"]["state"] = "in_progress"
    findings = check(discover(rack_host.probe()), Cluster.load("gb200_nvl72"))
    assert any("in progress" in f.message and f.code == "outside_domain" for f in findings)


def test_storage_ports_are_not_counted(hgx):
    hgx.files |= {
        path.replace("mlx5_0", "mlx5_9"): text.replace("0000:18", "0000:f8")
        for path, text in hgx.files.items()
        if "infiniband/mlx5_0/" in path
    }
    assert to_cluster(discover(hgx.probe()))["nics_per_host"] == 8


def test_nvidia_smi_serves_where_nvml_is_missing(hgx):
    rows = [
        f"{i}, NVIDIA H100 80GB HBM3, 00000000:{0x10 + 16 * i:02X}:00.0, 81559, 9.0, P0, 5, 16, 5, 16" for i in range(8)
    ]
    hgx.commands[" ".join(GPU_QUERY)] = "\n".join(rows) + "\n"
    hgx.commands[" ".join(FABRIC_QUERY)] = "\n".join(f"{i}, N/A, N/A" for i in range(8)) + "\n"
    hgx.commands[" ".join(NVLINK_QUERY)] = "".join(
        f"GPU {i}: NVIDIA H100 80GB HBM3 (UUID: GPU-x)\n" + "".join(f"\t Link {k}: 26.562 GB/s\n" for k in range(18))
        for i in range(8)
    )
    found = discover(FixtureProbe(files=hgx.files, commands=hgx.commands, nvml="the NVML binding is not installed"))
    assert (
        Cluster.load(to_cluster(found)).to_dict() | {"name": "dgx_h100", "host_memory_bytes": 2e12}
        == Cluster.load("dgx_h100").to_dict()
    )


def test_a_machine_without_a_gpu_says_why():
    found = discover(FixtureProbe(nvml="no NVIDIA driver"))
    assert found.nothing_here == "no NVIDIA driver"
    with pytest.raises(ConfigError, match="no GPU to describe: no NVIDIA driver"):
        to_cluster(found)
    assert [f.code for f in check(found, Cluster.load("dgx_h100"))] == ["gpu_count"]
    assert check(found, Cluster.load("cpu8")) == ()


def test_this_machine_can_be_asked():
    probe = LiveProbe()
    assert probe.read_file("/does/not/exist") is None
    assert probe.list_dir("/does/not/exist") == ()
    assert probe.run_command("a-command-that-is-not-there") is None
    assert isinstance(discover(probe).hosts, int)
    assert read_nvml() is not None


def test_gpus_of_two_kinds_are_no_cluster(hgx):
    break_kind(hgx)
    with pytest.raises(ConfigError, match="several kinds of GPUs: NVIDIA H100 80GB HBM3, NVIDIA H200"):
        to_cluster(discover(hgx.probe()))


def test_hosts_that_differ_are_no_cluster(hgx):
    whole = discover(hgx.probe())
    break_count(hgx)
    with pytest.raises(ConfigError, match="the hosts have 7 and 8 GPUs"):
        to_cluster(merge([whole, discover(hgx.probe())], "2 hosts"))


def test_discovery_needs_no_jax():
    code = "import sys, meshkit.verbs.topo; sys.exit(any(m in sys.modules for m in ('jax', 'flax')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_domain_of_another_size_than_declared(hgx, rack_host):
    found = discover(hgx.probe())
    assert [f.code for f in check(found, Cluster.load("dgx_h100", nvlink_domain_size=4))] == ["domain_size"]
    for index, gpu in enumerate(rack_host.gpus):
        gpu["fabric"]["clique_id"] = index // 2
    assert codes(rack_host, "gb200_nvl72") == [("domain_size", "")]


def test_what_all_hosts_say_is_said_once(rack_host):
    first = discover(rack_host.probe())
    rack_host.files["/sys/class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN\n"
    warnings = merge([first, discover(rack_host.probe())], "2 hosts").warnings
    assert len(warnings) == 2
    assert warnings[1] == "host1: port mlx5_0 is DOWN, so nothing can use it."


PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def port(**files):
    return {f"{PORT}/{name}": text + "\n" for name, text in files.items()}


@pytest.mark.parametrize(
    ("rate", "layer", "key"),
    [
        ("100 Gb/sec (4X EDR)", "InfiniBand", "ib_edr"),
        ("100 Gb/sec (2X HDR)", "InfiniBand", "ib_hdr100"),
        ("200 Gb/sec (4X HDR)", "InfiniBand", "ib_hdr"),
        ("200 Gb/sec (2X NDR)", "InfiniBand", "ib_ndr200"),
        ("400 Gb/sec (4X NDR)", "InfiniBand", "ib_ndr"),
        ("800 Gb/sec (4X XDR)", "InfiniBand", "ib_xdr"),
        ("100 Gb/sec (4X EDR)", "Ethernet", "roce_100"),
        ("200 Gb/sec", "Ethernet", "roce_200"),
        ("400 Gb/sec (4X NDR)", "Ethernet", "roce_400"),
        ("56 Gb/sec (4X FDR)", "InfiniBand", None),
        ("fast", "InfiniBand", None),
        ("400 Gb/sec (4X NDR)", "Unspecified", None),
    ],
)
def test_the_rate_and_layer_of_a_port_name_its_catalog_entry(rate, layer, key):
    files = port(rate=rate, link_layer=layer, state="4: ACTIVE", phys_state="5: LinkUp")
    (nic,), warnings = read_nics(FixtureProbe(files=files))
    assert (nic.id, nic.key, nic.active) == ("mlx5_0", key, True)
    assert bool(warnings) == (key is None)


@pytest.mark.parametrize(
    ("state", "physical", "active", "said"),
    [
        ("4: ACTIVE", "5: LinkUp", True, "ACTIVE"),
        ("1: DOWN", "3: Disabled", False, "DOWN (Disabled)"),
        ("1: DOWN", "2: Polling", False, "DOWN (Polling)"),
        ("2: INIT", "5: LinkUp", False, "INIT"),  # There is no subnet manager.
        ("", "", None, None),
    ],
)
def test_only_an_active_port_counts(state, physical, active, said):
    files = port(rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand", state=state, phys_state=physical)
    (nic,), warnings = read_nics(FixtureProbe(files=files))
    assert (nic.active, nic.state) == (active, said)
    assert any("nothing can use it" in warning for warning in warnings) == (active is False)


def test_an_adapter_with_two_ports_has_two():
    files = port(rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand", state="4: ACTIVE")
    files |= {path.replace("ports/1", "ports/2"): text for path, text in files.items()}
    nics, _ = read_nics(FixtureProbe(files=files))
    assert [nic.id for nic in nics] == ["mlx5_0.1", "mlx5_0.2"]


@pytest.mark.parametrize(
    ("driver", "kernel", "dma_buf"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1", "6.8.0-1", True),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1", "5.4.0", False),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1", "6.8.0-1", False),
        (None, "6.8.0", None),
    ],
)
def test_dma_buf_needs_the_open_driver_and_a_kernel(driver, kernel, dma_buf):
    files = port(state="4: ACTIVE") | {"/proc/sys/kernel/osrelease": kernel}
    files |= {} if driver is None else {"/proc/driver/nvidia/version": driver}
    rdma = read_rdma(FixtureProbe(files=files))
    assert (rdma.dma_buf, rdma.works) == (dma_buf, dma_buf)


def test_every_pci_id_is_a_gpu_of_the_catalog():
    for device, name in names()["gpu_pci"].items():
        assert gpu_name_by_pci("0x10de", f"0x{device.upper()}") == name
        assert gpu_by_name(name).key is not None
    assert gpu_name_by_pci("0x1002", "0x2330") is None


@pytest.mark.parametrize(
    ("speed", "generation"),
    [
        ("2.5 GT/s PCIe", 1),
        ("8.0 GT/s PCIe", 3),
        ("16 GT/s", 4),
        ("32.0 GT/s PCIe", 5),
        ("64.0 GT/s PCIe", 6),
        ("", None),
    ],
)
def test_pcie_generation(speed, generation):
    assert pcie_generation(speed) == generation
