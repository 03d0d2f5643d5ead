"""What Linux says of network adapters, PCI devices and GPUDirect RDMA."""

from __future__ import annotations

import re

from meshkit.discover.damage import integer
from meshkit.discover.identify import nic_by_pci, nic_by_rate, pcie_generation
from meshkit.discover.probe import Probe, existing, first_line
from meshkit.discover.topology import FoundNic, PcieLink, Rdma

INFINIBAND = "/sys/class/infiniband"
PCI = "/sys/bus/pci/devices"
_RATE = re.compile(r"([0-9]{1,4}(?:\.[0-9])?) Gb/sec(?: \([0-9]+X ([A-Z]+[0-9]*)\))?", re.ASCII)
_STATE = re.compile(r"[0-9]: *([A-Za-z_]+)", re.ASCII)
_BUS = re.compile(r"^PCI_SLOT_NAME=(\S+)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_KERNEL = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})", re.ASCII)
_PEER_MEMORY = (  # where NCCL looks for it
    "/sys/module/nvidia_peermem/version",
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
_DMA_BUF_KERNEL = (5, 12)  # from it on, RDMA takes dma-buf memory
_GIGABIT = 10**9
_MOST_PORTS = 512


def read_nics(probe: Probe) -> tuple[tuple[FoundNic, ...], tuple[str, ...]]:
    """Ports of RDMA adapters, and what is odd about them."""
    nics: list[FoundNic] = []
    warnings: list[str] = []
    for device in probe.list_dir(INFINIBAND)[:_MOST_PORTS]:
        ports = [port for port in probe.list_dir(f"{INFINIBAND}/{device}/ports") if _NAME.fullmatch(port)]
        if not _NAME.fullmatch(device):
            continue
        for port in ports:
            nic = _read_port(probe, device, port, device if len(ports) == 1 else f"{device}.{port}")
            nics.append(nic)
            if nic.active is False:
                warnings.append(f"port {nic.id} is {nic.state}, so nothing can use it.")
            elif nic.key is None:
                rate = f"{nic.bits_per_s / _GIGABIT:g} Gb/s" if nic.bits_per_s else "a rate that is not known"
                warnings.append(f"port {nic.id} has {rate}, which no NIC of the catalog has.")
    return tuple(nics), tuple(warnings)


def _read_port(probe: Probe, device: str, port: str, name: str) -> FoundNic:
    folder, slot = f"{INFINIBAND}/{device}/ports/{port}", f"{INFINIBAND}/{device}/device"
    rate = _RATE.match(first_line(probe, f"{folder}/rate"))
    state = _STATE.match(first_line(probe, f"{folder}/state"))
    physical = _STATE.match(first_line(probe, f"{folder}/phys_state"))
    words = {"InfiniBand": "infiniband", "Ethernet": "ethernet"}
    layer = words.get(first_line(probe, f"{folder}/link_layer"))
    up = None if state is None else state[1].upper() == "ACTIVE"
    bits = round(float(rate[1]) * _GIGABIT) if rate else None
    fixed = nic_by_pci(first_line(probe, f"{slot}/vendor"), first_line(probe, f"{slot}/device"))
    match = nic_by_rate(layer, bits, rate[2] or "") if rate and layer and bits and not fixed.key else fixed
    bus = _BUS.search(probe.read_file(f"{slot}/uevent") or "")
    said = state[1].upper() if state else None
    if up is False and physical and physical[1].lower() not in ("linkup",):
        said = f"{said} ({physical[1]})"
    return FoundNic(
        id=name,
        layer=layer,
        key=match.key,
        stand_in=match.stand_in,
        bits_per_s=bits,
        active=up,
        state=said,
        bus=bus[1].lower() if bus else None,
        numa=integer(first_line(probe, f"{slot}/numa_node")),  # -1, "no NUMA", is None too
        pcie=read_slot(probe, slot),
    )


def read_slot(probe: Probe, folder: str) -> PcieLink:
    """The PCIe link of a device, from its folder in sysfs."""
    return PcieLink(
        pcie_generation(first_line(probe, f"{folder}/current_link_speed")),
        integer(first_line(probe, f"{folder}/current_link_width")) or None,
        pcie_generation(first_line(probe, f"{folder}/max_link_speed")),
        integer(first_line(probe, f"{folder}/max_link_width")) or None,
    )


def numa_of(probe: Probe, bus: str) -> int | None:
    """The NUMA node of a PCI device; None where the machine does not say."""
    return integer(first_line(probe, f"{PCI}/{bus}/numa_node"))


def read_rdma(probe: Probe) -> Rdma:
    """Whether NICs can read GPU memory here."""
    if not probe.list_dir(INFINIBAND):
        return Rdma()
    peer = existing(probe, _PEER_MEMORY)
    return Rdma(peer, _dma_buf(probe), _acs_bridges(probe))


def _dma_buf(probe: Probe) -> bool | None:
    """The open kernel modules of the driver export GPU memory as dma-buf, on a kernel that takes it."""
    driver = probe.read_file("/proc/driver/nvidia/version")
    kernel = _KERNEL.match(first_line(probe, "/proc/sys/kernel/osrelease"))
    if driver is None or kernel is None:
        return None
    return "Open Kernel Module" in driver and (int(kernel[1]), int(kernel[2])) >= _DMA_BUF_KERNEL


def _acs_bridges(probe: Probe) -> int | None:
    """Bridges whose access control redirects peer traffic to the CPU; None where lspci may not look (needs root)."""
    text = probe.run("lspci", "-vvv")
    if text is None or "ACSCtl:" not in text:
        return None
    lines = [line for line in text.split("\n") if "ACSCtl:" in line]
    return sum("ReqRedir+" in line or "CmpltRedir+" in line for line in lines)
