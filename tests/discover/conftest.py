"""Provide machines as NVML, sysfs and nvidia-smi would describe them, laid out as the vendors' data sheets say."""

import copy

import pytest

from meshkit.discover import FixtureProbe

IB = "/sys/class/infiniband"
ZERO = "0" * 32
RACK = "3f" * 16


def _bus(index: int) -> str:
    return f"0000:{0x10 + 16 * index:02x}:00.0"


def _gpu(index, count, name, links, *, version, remote="switch", cluster_uuid=ZERO, clique=0):
    return {
        "index": index,
        "name": name,
        "bus": _bus(index),
        "uuid": f"GPU-{index:08x}-1111-2222-3333-444455556666",
        "memory_bytes": 85520809984,
        "compute_capability": [9, 0],
        "performance_state": 0,
        "pcie": {"generation": 5, "width": 16, "max_generation": 5, "max_width": 16},
        "nvlinks": [{"active": True, "version": version, "remote": remote} for _ in range(links)],
        "fabric": {"state": "completed", "cluster_uuid": cluster_uuid, "clique_id": clique},
        "peers": [{"index": i, "nvlink": True, "pci": True, "ancestor": "SYS"} for i in range(count) if i != index],
    }


def _nic(files, name, bus, numa, *, state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", layer="InfiniBand"):
    files |= {
        f"{IB}/{name}/ports/1/state": state + "\n",
        f"{IB}/{name}/ports/1/phys_state": ("5: LinkUp" if "ACTIVE" in state else "3: Disabled") + "\n",
        f"{IB}/{name}/ports/1/rate": rate + "\n",
        f"{IB}/{name}/ports/1/link_layer": layer + "\n",
        f"{IB}/{name}/device/uevent": f"DRIVER=mlx5_core\nPCI_SLOT_NAME={bus}\nMODALIAS=pci:v000015B3\n",
        f"{IB}/{name}/device/numa_node": f"{numa}\n",
        f"{IB}/{name}/device/vendor": "0x15b3\n",
        f"{IB}/{name}/device/device": "0x1021\n",
        f"{IB}/{name}/device/current_link_speed": "32.0 GT/s PCIe\n",
        f"{IB}/{name}/device/current_link_width": "16\n",
        f"{IB}/{name}/device/max_link_speed": "32.0 GT/s PCIe\n",
        f"{IB}/{name}/device/max_link_width": "16\n",
    }


def _matrix(num_gpus, num_nics, cell):
    """Return a matrix as the tool prints it: tabs, underlined header, two tabs before the last N/A, legend of NICs."""
    names = [f"GPU{i}" for i in range(num_gpus)] + [f"NIC{i}" for i in range(num_nics)]
    half = num_gpus // 2
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for i, a in enumerate(names):
        cells = []
        for j, b in enumerate(names):
            x, y = (int(name[3:]) for name in (a, b))
            if i == j:
                cells.append(" X ")
            elif a[0] == b[0] == "G":
                cells.append(cell)
            elif a[0] == b[0] == "N":
                cells.append("NODE" if (x < half) == (y < half) else "SYS")
            else:
                cells.append("PIX" if x == y else "NODE" if (x < half) == (y < half) else "SYS")
        affinity = (
            f"\t{'0-51,104-155' if i < half else '52-103,156-207'}\t{int(i >= half)}\t\tN/A" if a[0] == "G" else ""
        )
        lines.append(f"{a}\t" + "\t".join(cells) + affinity)
    legend = ["", "Legend:", "", "  X    = Self", "", "NIC Legend:", ""]
    return "\n".join([*lines, *legend, *(f"  NIC{i}: mlx5_{i}" for i in range(num_nics)), ""])


def _hgx():
    """Return eight H100 behind NVSwitch, each with a 400 Gb/s port beside it."""
    files = {"/sys/devices/system/node/node0/cpulist": "0-51\n", "/sys/devices/system/node/node1/cpulist": "52-103\n"}
    files["/sys/devices/system/node/node2/cpulist"] = "\n"  # This NUMA node has memory only.
    for i in range(8):
        files[f"/sys/bus/pci/devices/{_bus(i)}/numa_node"] = f"{i // 4}\n"
        _nic(files, f"mlx5_{i}", f"0000:{0x18 + 16 * i:02x}:00.0", i // 4)
    files["/sys/module/nvidia_peermem/version"] = "570.1\n"
    files["/proc/sys/kernel/osrelease"] = "6.8.0-1021-secretcloud\n"
    files["/proc/driver/nvidia/version"] = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (builder@host17)\nGCC\n"
    )
    nvml = {
        "driver": "570.124.06",
        "gpus": [_gpu(i, 8, "NVIDIA H100 80GB HBM3", 18, version=4) for i in range(8)],
    }
    return files, {"nvidia-smi topo -m": _matrix(8, 8, "NV18")}, nvml


def _rack_host():
    """Return one host of an NVL72: four GB200 of a domain that spans hosts."""
    files = {"/sys/devices/system/node/node0/cpulist": "0-71\n", "/sys/devices/system/node/node1/cpulist": "72-143\n"}
    for i in range(4):
        files[f"/sys/bus/pci/devices/{_bus(i)}/numa_node"] = f"{i // 2}\n"
        _nic(files, f"mlx5_{i}", f"0002:{0x18 + 16 * i:02x}:00.0", i // 2)
    gpus = [_gpu(i, 4, "NVIDIA GB200", 18, version=5, cluster_uuid=RACK, clique=1) for i in range(4)]
    return files, {}, {"driver": "580.1", "gpus": gpus}


def _cards(peer_access=True):
    """Return two cards without NVLink, and a plain 100 Gb/s RoCE port."""
    files = {"/sys/devices/system/node/node0/cpulist": "0-23\n"}
    _nic(files, "mlx5_0", "0000:c1:00.0", 0, rate="100 Gb/sec (4X EDR)", layer="Ethernet")
    gpus = [_gpu(i, 2, "NVIDIA RTX PRO 6000 Blackwell Server Edition", 0, version=0) for i in range(2)]
    for gpu in gpus:
        gpu["fabric"] = None
        for peer in gpu["peers"]:
            peer |= {"nvlink": False, "pci": peer_access, "ancestor": "PHB"}
    return files, {}, {"driver": "580.1", "gpus": gpus}


class Machine:
    """Hold a machine that a test may break before it is asked."""

    def __init__(self, files, commands, nvml):
        self.files, self.commands, self.nvml = files, commands, copy.deepcopy(nvml)

    @property
    def gpus(self):
        return self.nvml["gpus"]

    def probe(self):
        return FixtureProbe(files=self.files, commands=self.commands, nvml=self.nvml)


@pytest.fixture
def hgx():
    return Machine(*_hgx())


@pytest.fixture
def rack_host():
    return Machine(*_rack_host())


@pytest.fixture
def cards():
    return Machine(*_cards())


@pytest.fixture
def cards_without_peer_access():
    return Machine(*_cards(peer_access=False))
