"""Discovery: one machine through a Probe, as a Topology."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshkit.discover.damage import integer, short
from meshkit.discover.identify import gpu_by_name
from meshkit.discover.matrix import Matrix, parse_matrices
from meshkit.discover.nvml import GpuState, Snapshot, check_snapshot
from meshkit.discover.probe import Probe, first_line
from meshkit.discover.smi import MATRIX_QUERY, read_smi
from meshkit.discover.sysfs import numa_of, read_nics, read_rdma
from meshkit.discover.topology import (
    Connection,
    FoundGpu,
    FoundNic,
    NvLink,
    PcieLink,
    Rdma,
    Topology,
)
from meshkit.discover.wiring import connections, stand_in_notes, with_domains
from meshkit.errors import TraceError

_NODES = "/sys/devices/system/node"
_FIRST_IDLE_STATE = 5  # P0 to P3 run at full speed; from P5 on the driver lowers the PCIe generation


def discover(probe: Probe, *, network: bool = True) -> Topology:
    """What the machine behind a probe is.

    Args:
        probe: the machine.
        network: whether to look at network adapters and paths to them, which takes commands that run for seconds.

    Raises:
        TraceError: an answer is damaged (a bundle that was edited, a tool that prints something new).
    """
    answers = probe.nvml()
    snapshot = check_snapshot(answers, at=f"{probe.name}: nvml") if isinstance(answers, Mapping) else read_smi(probe)
    nics, warnings = read_nics(probe) if network else ((), ())
    if snapshot is None or not snapshot.gpus:
        why = answers if isinstance(answers, str) else "the NVIDIA driver lists none"
        return Topology(probe.name, nics=nics, numa_nodes=_numa_nodes(probe), warnings=warnings, nothing_here=why)
    has_nvml = isinstance(answers, Mapping)
    needs_matrix = network or not has_nvml
    matrix, problem = _matrix(probe, len(snapshot.gpus), required=not has_nvml) if needs_matrix else (None, ())
    gpus = tuple(_gpu(gpu, probe, matrix) for gpu in snapshot.gpus)
    found = Topology(
        source=probe.name,
        gpus=gpus,
        nics=nics,
        numa_nodes=_numa_nodes(probe),
        connections=(*_between_gpus(snapshot, gpus, matrix), *_to_nics(gpus, nics, matrix)),
        rdma=read_rdma(probe) if network else Rdma(),
        nics_listed=network,
        scale_up=None if _peer_access(snapshot) else "shared_memory",
        warnings=(*warnings, *problem, *_gpu_warnings(gpus)),
    )
    return _rack_warning(stand_in_notes(with_domains(found)))


def _gpu(gpu: GpuState, probe: Probe, matrix: Matrix | None) -> FoundGpu:
    match = gpu_by_name(gpu.name)
    numa = numa_of(probe, gpu.bus)
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
        pcie=PcieLink(**gpu.pcie.model_dump()),
        nvlinks=tuple(NvLink(x.active, x.version, x.remote, x.remote_bus) for x in gpu.nvlinks),
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
            raise TraceError(
                f"`nvidia-smi topo -m` lists {len(matrix.gpus)} GPUs, but the driver has {num_gpus}.",
                at=probe.name,
                hint="running both by hand to see",
            )
    except TraceError as error:
        if required:
            raise
        return None, (f"the matrix of nvidia-smi is left out: {error.message}",)
    return matrix, ()


def _between_gpus(snapshot: Snapshot, gpus: tuple[FoundGpu, ...], matrix: Matrix | None) -> tuple[Connection, ...]:
    """NVLink and PCI paths between GPUs: NVML's, and nvidia-smi's where NVML is silent."""
    printed = {frozenset((c.a, c.b)): c for c in connections(matrix)} if matrix else {}
    ids = {gpu.bus: gpu.id for gpu in gpus}
    found = []
    for i, a in enumerate(gpus):
        peers = {f"gpu{peer.index}": peer for peer in snapshot.gpus[i].peers}
        for b in gpus[i + 1 :]:
            direct = sum(link.active and ids.get(link.remote_bus or "") == b.id for link in a.nvlinks)
            switched = [sum(x.active and x.remote == "switch" for x in g.nvlinks) for g in (a, b)]
            peer, line = peers.get(b.id), printed.get(frozenset((a.id, b.id)))
            links = direct or (min(switched) if peer is None or peer.nvlink is not False else 0)
            if not links and line is None and peer is not None and peer.nvlink:  # a guest does not see the other end
                links = min(a.active_nvlinks or 0, b.active_nvlinks or 0)
            if links:
                found.append(Connection(a.id, b.id, "NV", links))
            elif line is not None and not (line.kind == "NV" and peer is not None and peer.nvlink is False):
                found.append(line)
            elif peer is not None and peer.ancestor:
                found.append(Connection(a.id, b.id, peer.ancestor))
    return tuple(found)


def _peer_access(snapshot: Snapshot) -> bool:
    """Whether GPUs can read each other's memory, as far as is known; else they meet in the host's."""
    peers = [peer for gpu in snapshot.gpus for peer in gpu.peers]
    return not peers or any(peer.nvlink is not False or peer.pci is not False for peer in peers)


def _to_nics(gpus: tuple[FoundGpu, ...], nics: tuple[FoundNic, ...], matrix: Matrix | None) -> tuple[Connection, ...]:
    """Paths from GPUs to NICs: nvidia-smi's, else what the NUMA nodes tell."""
    printed = {frozenset((c.a, c.b)): c for c in connections(matrix)} if matrix else {}
    found = []
    for gpu in gpus:
        for nic in nics:
            known = printed.get(frozenset((gpu.id, nic.id.split(".")[0])))
            if known is not None:
                found.append(Connection(gpu.id, nic.id, known.kind))
            elif gpu.numa is not None and nic.numa is not None:
                found.append(Connection(gpu.id, nic.id, "NODE" if gpu.numa == nic.numa else "SYS"))
    return tuple(found)


def _numa_nodes(probe: Probe) -> tuple[tuple[int, int], ...]:
    """Nodes with processors; the memory of a GPU on a Grace host is a node without."""
    names = [name for name in probe.list_dir(_NODES) if name.startswith("node")]
    nodes = sorted(
        number
        for name in names
        if (number := integer(name.removeprefix("node"))) is not None and first_line(probe, f"{_NODES}/{name}/cpulist")
    )
    return tuple((0, number) for number in nodes)


def _gpu_warnings(gpus: tuple[FoundGpu, ...]) -> list[str]:
    return [f"{gpu.id}: {gpu.fabric_problem}." for gpu in gpus if gpu.fabric_problem]


def _rack_warning(found: Topology) -> Topology:
    if not any(domain.spans_hosts for domain in found.domains):
        return found
    why = "the NVLink domain has a fabric identity, so GPUs of other hosts may be in it; bundles of all hosts tell."
    return replace(found, warnings=(*found.warnings, why))
