"""Ports as Linux describes them, and the catalog's entry for each."""

import pytest

from meshkit.discover import FixtureProbe
from meshkit.discover.identify import gpu_by_name, gpu_name_by_pci, names, pcie_generation
from meshkit.discover.machine import read_nics, read_rdma

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
        ("2: INIT", "5: LinkUp", False, "INIT"),  # no subnet manager
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
