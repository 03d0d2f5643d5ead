"""One machine through a Probe, as a Topology: GPUs by NVML or nvidia-smi, ports and slots by Linux's sysfs.

Which NVLink domain each device of a job is in, the machines say themselves: every process publishes one record (text)
with the identities of its own GPUs; all processes read all records. GPUs with the same identity share a domain. Nothing
is guessed from processes or ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from meshkit.config.bounded import integer, short
from meshkit.discover.nvidia_smi import MATRIX_QUERY, Matrix, parse_matrices, read_smi
from meshkit.discover.probe import GpuState, Probe, Snapshot, check_snapshot
from meshkit.discover.topology import (
    Connection,
    FoundGpu,
    FoundNic,
    PcieLink,
    Rdma,
    Topology,
    gpu_by_name,
    nic_by_pci,
    nic_by_rate,
    pcie_generation,
    stand_in_notes,
    with_domains,
)
from meshkit.errors import ConfigError, TraceError

_NODES = "/sys/devices/system/node"
_INFINIBAND = "/sys/class/infiniband"
_PCI = "/sys/bus/pci/devices"
_FIRST_IDLE_STATE = 5  # P0 to P3 run at full speed; from P5 on the driver lowers the PCIe generation
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
_LONGEST_RECORD = 2**20
_RECORD = TypeAdapter(dict[NonNegativeInt, str])
_SAME_VERSION = "the same version of meshkit in every process"


def discover(probe: Probe, *, network: bool = True) -> Topology:
    """What the machine behind a probe is.

    Args:
        probe: the machine.
        network: whether to look at network adapters and paths to them, which takes commands that run for seconds.

    Raises:
        TraceError: an answer is damaged (a bundle that was edited, a tool that prints something new).
    """
    answers = probe.nvml()
    has_nvml = isinstance(answers, Mapping)
    snapshot = check_snapshot(answers, at=f"{probe.name}: nvml") if has_nvml else read_smi(probe)
    nics, warnings = read_nics(probe) if network else ((), ())
    if snapshot is None or not snapshot.gpus:
        why = "the NVIDIA driver lists none" if has_nvml else str(answers)
        return Topology(probe.name, nics=nics, numa_nodes=_numa_nodes(probe), warnings=warnings, nothing_here=why)
    matrix, problems = None, ()
    if network or not has_nvml:
        matrix, problems = _matrix(probe, len(snapshot.gpus), required=not has_nvml)
    printed = {frozenset((c.a, c.b)): c for c in matrix.connections} if matrix else {}
    gpus = tuple(_gpu(gpu, probe, matrix) for gpu in snapshot.gpus)
    fabric = tuple(f"{gpu.id}: {gpu.fabric_problem}." for gpu in gpus if gpu.fabric_problem)
    found = Topology(
        source=probe.name,
        gpus=gpus,
        nics=nics,
        numa_nodes=_numa_nodes(probe),
        connections=(*_between_gpus(snapshot, gpus, printed), *_to_nics(gpus, nics, printed)),
        rdma=read_rdma(probe) if network else Rdma(),
        nics_listed=network,
        scale_up=None if _peer_access(snapshot) else "shared_memory",
        warnings=(*warnings, *problems, *fabric),
    )
    found = stand_in_notes(with_domains(found))
    if any(domain.spans_hosts for domain in found.domains):
        why = "the NVLink domain has a fabric identity, so GPUs of other hosts may be in it; bundles of all hosts tell."
        found = found.warn(why)
    return found


def _gpu(gpu: GpuState, probe: Probe, matrix: Matrix | None) -> FoundGpu:
    """A GPU as found, with why the NVLink fabric has not taken it, if so."""
    match = gpu_by_name(gpu.name)
    numa = integer(_first_line(probe, f"{_PCI}/{gpu.bus}/numa_node"))
    if numa is None and matrix is not None:
        numa = matrix.numa.get(f"GPU{gpu.index}")
    fabric = gpu.fabric
    on_switch = any(link.remote == "switch" for link in gpu.nvlinks)
    problem = None
    if fabric is not None and on_switch and fabric.state in ("not_started", "in_progress"):
        problem = f"its registration with the NVLink fabric is {fabric.state.replace('_', ' ')}"
    elif fabric is not None and fabric.state == "completed" and fabric.status:
        problem = f"its registration with the NVLink fabric failed (NVML status {fabric.status})"
    return FoundGpu(
        id=f"gpu{gpu.index}",
        name=short(gpu.name),
        key=match.key,
        stand_in=match.stand_in,
        bus=gpu.bus,
        numa=numa,
        memory_bytes=gpu.memory_bytes,
        pcie=gpu.pcie,
        nvlinks=gpu.nvlinks,
        fabric=fabric.identity if fabric is not None and fabric.state == "completed" and not problem else None,
        fabric_problem=problem,
        idle=(gpu.performance_state or 0) >= _FIRST_IDLE_STATE,
    )


def _matrix(probe: Probe, num_gpus: int, *, required: bool) -> tuple[Matrix | None, tuple[str, ...]]:
    """nvidia-smi's matrix, and what is wrong with it where NVML makes up for it."""
    text = probe.run(*MATRIX_QUERY)
    if text is None:
        return None, ()
    try:
        matrix = parse_matrices(text, at=f"{probe.name}: nvidia-smi topo -m")[0]
        if len(matrix.gpus) != num_gpus:
            what = f"`nvidia-smi topo -m` lists {len(matrix.gpus)} GPUs, but the driver has {num_gpus}."
            raise TraceError(what, at=probe.name, hint="running both by hand to see")
    except TraceError as error:
        if required:
            raise
        return None, (f"the matrix of nvidia-smi is left out: {error.message}",)
    return matrix, ()


def _between_gpus(
    snapshot: Snapshot, gpus: tuple[FoundGpu, ...], printed: Mapping[frozenset[str], Connection]
) -> list[Connection]:
    """NVLink and PCI paths between GPUs: NVML's, and nvidia-smi's where NVML is silent."""
    ids = {gpu.bus: gpu.id for gpu in gpus}
    found = []
    for i, a in enumerate(gpus):
        peers = {f"gpu{peer.index}": peer for peer in snapshot.gpus[i].peers}
        for b in gpus[i + 1 :]:
            peer, line = peers.get(b.id), printed.get(frozenset((a.id, b.id)))
            no_nvlink = peer is not None and peer.nvlink is False
            links = sum(link.active and ids.get(link.remote_bus or "") == b.id for link in a.nvlinks)
            if not links and not no_nvlink:
                links = min(sum(x.active and x.remote == "switch" for x in gpu.nvlinks) for gpu in (a, b))
            if not links and line is None and peer is not None and peer.nvlink:  # a guest does not see the other end
                links = min(a.active_nvlinks or 0, b.active_nvlinks or 0)
            if links:
                found.append(Connection(a.id, b.id, "NV", links))
            elif line is not None and not (line.kind == "NV" and no_nvlink):
                found.append(line)
            elif peer is not None and peer.ancestor:
                found.append(Connection(a.id, b.id, peer.ancestor))
    return found


def _peer_access(snapshot: Snapshot) -> bool:
    """Whether GPUs can read each other's memory, as far as is known; else they go through the host's."""
    peers = [peer for gpu in snapshot.gpus for peer in gpu.peers]
    return not peers or any(peer.nvlink is not False or peer.pci is not False for peer in peers)


def _to_nics(
    gpus: tuple[FoundGpu, ...], nics: tuple[FoundNic, ...], printed: Mapping[frozenset[str], Connection]
) -> list[Connection]:
    """Paths from GPUs to NICs: nvidia-smi's, else by NUMA node."""
    found = []
    for gpu in gpus:
        for nic in nics:
            known = printed.get(frozenset((gpu.id, nic.id.split(".")[0])))
            if known is not None:
                found.append(Connection(gpu.id, nic.id, known.kind))
            elif gpu.numa is not None and nic.numa is not None:
                found.append(Connection(gpu.id, nic.id, "NODE" if gpu.numa == nic.numa else "SYS"))
    return found


def _numa_nodes(probe: Probe) -> tuple[tuple[int, int], ...]:
    """Nodes with processors; the memory of a GPU on a Grace host is a node without."""
    names = [name for name in probe.list_dir(_NODES) if name.startswith("node")]
    found = {integer(name.removeprefix("node")) for name in names if _first_line(probe, f"{_NODES}/{name}/cpulist")}
    return tuple((0, number) for number in sorted(n for n in found if n is not None))


def read_nics(probe: Probe) -> tuple[tuple[FoundNic, ...], tuple[str, ...]]:
    """Ports of RDMA adapters, and what is odd about them."""
    nics: list[FoundNic] = []
    warnings: list[str] = []
    for device in filter(_NAME.fullmatch, probe.list_dir(_INFINIBAND)[:_MOST_PORTS]):
        ports = [port for port in probe.list_dir(f"{_INFINIBAND}/{device}/ports") if _NAME.fullmatch(port)]
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
    """One port of an RDMA device, from what the kernel says of it in sysfs."""
    folder, slot = f"{_INFINIBAND}/{device}/ports/{port}", f"{_INFINIBAND}/{device}/device"
    rate = _RATE.match(_first_line(probe, f"{folder}/rate"))
    state = _STATE.match(_first_line(probe, f"{folder}/state"))
    physical = _STATE.match(_first_line(probe, f"{folder}/phys_state"))
    layer = {"InfiniBand": "infiniband", "Ethernet": "ethernet"}.get(_first_line(probe, f"{folder}/link_layer"))
    bits = round(float(rate[1]) * _GIGABIT) if rate else None
    match = nic_by_pci(_first_line(probe, f"{slot}/vendor"), _first_line(probe, f"{slot}/device"))
    if rate and layer and bits and not match.key:
        match = nic_by_rate(layer, bits, rate[2] or "")
    bus = _BUS.search(probe.read_file(f"{slot}/uevent") or "")
    said = state[1].upper() if state else None
    up = None if said is None else said == "ACTIVE"
    if up is False and physical and physical[1].lower() != "linkup":
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
        numa=integer(_first_line(probe, f"{slot}/numa_node")),  # -1, "no NUMA", is None too
        pcie=PcieLink(
            pcie_generation(_first_line(probe, f"{slot}/current_link_speed")),
            integer(_first_line(probe, f"{slot}/current_link_width")) or None,
            pcie_generation(_first_line(probe, f"{slot}/max_link_speed")),
            integer(_first_line(probe, f"{slot}/max_link_width")) or None,
        ),
    )


def read_rdma(probe: Probe) -> Rdma:
    """Whether NICs can read GPU memory here."""
    if not probe.list_dir(_INFINIBAND):
        return Rdma()
    peer = any(probe.read_file(path) is not None for path in _PEER_MEMORY)
    return Rdma(peer, _dma_buf(probe), _acs_bridges(probe))


def _dma_buf(probe: Probe) -> bool | None:
    """The open kernel modules of the driver export GPU memory as dma-buf, on a kernel that takes it."""
    driver = probe.read_file("/proc/driver/nvidia/version")
    kernel = _KERNEL.match(_first_line(probe, "/proc/sys/kernel/osrelease"))
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


def _first_line(probe: Probe, path: str) -> str:
    """The first line of a file, stripped; empty where there is none."""
    return (probe.read_file(path) or "").strip().split("\n")[0].strip()


def local_identities(probe: Probe, *, host: str, visible: str | None = None) -> tuple[str, ...]:
    """Identity of the NVLink domain of each GPU that CUDA shows to this process, by CUDA ordinal.

    Args:
        probe: this machine, or a recorded one.
        host: what no other host of the job calls itself (a boot id).
        visible: CUDA_VISIBLE_DEVICES, if it is set.

    Raises:
        ConfigError: no GPU can be asked, or CUDA_VISIBLE_DEVICES names one that is not there.
    """
    found = discover(probe, network=False)
    if not found.gpus:
        raise ConfigError(
            f"the NVLink domain of the attached GPUs cannot be read: {found.nothing_here}.",
            hint="pip install nvidia-ml-py, on a machine with the NVIDIA driver",
        )
    # without NVLink the host is the domain; a GPU that is alone among others is a domain of its own
    identities = {gpu.id: f"{host}.{gpu.id}" if found.domains else f"{host}.host" for gpu in found.gpus}
    for domain in found.domains:
        identities |= dict.fromkeys(domain.gpus, domain.identity if domain.spans_hosts else f"{host}.{domain.identity}")
    by_index = [identities[gpu.id] for gpu in found.gpus]
    return tuple(by_index[i] for i in visible_gpus(probe, len(by_index), visible))


def visible_gpus(probe: Probe, count: int, visible: str | None) -> list[int]:
    """NVML indices by CUDA ordinal; CUDA stops at the first entry that it does not know.

    Args:
        probe: the machine.
        count: its GPUs.
        visible: CUDA_VISIBLE_DEVICES, if it is set.

    Raises:
        ConfigError: it names a slice of a GPU.
    """
    if visible is None:
        return list(range(count))
    answers = probe.nvml() if "gpu-" in visible.lower() else None
    snapshot = check_snapshot(answers, at=probe.name) if isinstance(answers, Mapping) else None
    uuids = [(gpu.uuid or "").lower() for gpu in snapshot.gpus] if snapshot else []
    order = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = entry.lower() if entry.lower().startswith("gpu-") else None
        named = [i for i, uuid in enumerate(uuids) if gpu and uuid.startswith(gpu)]
        if entry.isascii() and entry.isdigit() and int(entry) < count:
            order.append(int(entry))
        elif len(named) == 1:
            order += named
        elif entry.upper().startswith("MIG"):
            raise ConfigError("a slice of a GPU (MIG) has no NVLink domain.", at=f"CUDA_VISIBLE_DEVICES={visible}")
        else:
            break
    return order


def identity_record(identities: Mapping[int, str]) -> str:
    """What a process publishes: the identities of its own devices, by the job's device id."""
    return json.dumps({str(device): identity for device, identity in sorted(identities.items())})


def domain_identities(records: Iterable[str], *, devices: Iterable[int] | None = None) -> dict[int, str]:
    """Device id -> identity of its NVLink domain, from the records of all processes.

    Args:
        records: one per process, as `identity_record` writes them.
        devices: the ids that must be there; any, where it is not given.

    Raises:
        ConfigError: a damaged record, a device in two records, a device in none.
    """
    found: dict[int, str] = {}
    for process, text in enumerate(records):
        for device, identity in _read_record(text, process).items():
            if device in found:
                raise ConfigError(
                    f"device {device} is published by process {process} and by another one.",
                    hint="one process for each device; is a process started twice?",
                )
            found[device] = identity
    missing = sorted(set(devices) - set(found)) if devices is not None else []
    if missing:
        raise ConfigError(
            f"{len(missing)} devices have no NVLink identity, the first is {missing[0]}.",
            hint=_SAME_VERSION,
        )
    return found


def _read_record(text: str, process: int) -> dict[int, str]:
    try:
        return _RECORD.validate_json(text if len(text) <= _LONGEST_RECORD else "")
    except ValidationError:
        what = f"the NVLink identities that process {process} published cannot be read."
        raise ConfigError(what, hint=_SAME_VERSION) from None
