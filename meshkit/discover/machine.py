"""Describe one machine as a Topology through a Probe: GPUs from NVML or nvidia-smi, ports and slots from Linux's sysfs.

A running job learns the NVLink domain of each device from the hardware, not from process numbers. Every process
publishes one record (text) with the domain identities of its own GPUs, and all processes read all records. GPUs with
the same identity share a domain.

A probe bundle records the queries of discovery and the machine's answers. It is a folder (or tar) with `bundle.json`,
`nvml.json`, `files.json` and `commands.json`, or a folder of such folders, one for each host. It contains no private
names. Identities that discovery needs are replaced by pseudonyms that are equal on every host, and others are removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import socket
import struct
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from meshkit.config.files import LARGEST_FILE_BYTES, decode, gunzip, integer, read_bounded, short
from meshkit.discover.nvidia_smi import MATRIX_QUERY, Matrix, parse_matrices, read_smi
from meshkit.discover.probe import BUNDLE_HINT, FixtureProbe, GpuState, Probe, RecordingProbe, Snapshot, check_snapshot
from meshkit.discover.topology import (
    Connection,
    FoundGpu,
    FoundNic,
    PcieLink,
    Rdma,
    Topology,
    gpu_by_name,
    merge,
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
_FIRST_IDLE_STATE = 5  # P0 to P3 run at full speed; from P5 on the driver lowers the PCIe generation.
_RATE = re.compile(r"([0-9]{1,4}(?:\.[0-9])?) Gb/sec(?: \([0-9]+X ([A-Z]+[0-9]*)\))?", re.ASCII)
_STATE = re.compile(r"[0-9]: *([A-Za-z_]+)", re.ASCII)
_BUS = re.compile(r"^PCI_SLOT_NAME=(\S+)", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_KERNEL = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})", re.ASCII)
_PEER_MEMORY = (  # NCCL looks for the module here.
    "/sys/module/nvidia_peermem/version",
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
_DMA_BUF_KERNEL = (5, 12)  # From this kernel on, RDMA takes dma-buf memory.
_GIGABIT = 10**9
_MOST_PORTS = 512
_LONGEST_RECORD = 2**20
_RECORD = TypeAdapter(dict[NonNegativeInt, str])
_SAME_VERSION = "the same version of meshkit in every process"
SCHEMA = "meshkit.topo-bundle/1"
_NAMES = ("bundle.json", "nvml.json", "files.json", "commands.json")
_MOST_MEMBERS = 40_000
_LARGEST_BUNDLE_BYTES = 64 * 2**20
_HEADER_BYTES = 1024  # Each member of a tar has a header and a padded last block.
_TAR_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, struct.error, OverflowError)
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)
_PRIVATE = (  # Port GUID or IPv6, MAC, IPv4; a PCI address (0000:17:00.0) matches none of them.
    (re.compile(r"\b(?:[0-9a-f]{4}:){3,7}[0-9a-f]{4}\b", re.IGNORECASE), "0000:0000:0000:0000"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5,19}[0-9a-f]{2}\b", re.IGNORECASE), "00:00:00:00:00:00"),
    (re.compile(r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b"), "0.0.0.0"),
    (re.compile(r"(?im)^.*\bserial\b.*$"), ""),
)
_KERNEL_VERSION = re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)?")


def discover(probe: Probe, *, network: bool = True) -> Topology:
    """Return the Topology of the machine behind a probe.

    Args:
        network: whether to look at network adapters and paths to them, which takes commands that run for seconds.

    Raises:
        TraceError: an answer cannot be read (an edited bundle, or a tool with a new output format).
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
        connections=(*_gpu_connections(snapshot, gpus, printed), *_nic_connections(gpus, nics, printed)),
        rdma=read_rdma(probe) if network else Rdma(),
        nics_listed=network,
        scale_up=None if _peer_access(snapshot) else "shared_memory",
        warnings=(*warnings, *problems, *fabric),
    )
    found = stand_in_notes(with_domains(found))
    if any(domain.spans_hosts for domain in found.domains):
        why = "the NVLink domain has a fabric identity, so GPUs of other hosts may be in it; record those hosts too."
        found = found.warn(why)
    return found


def _gpu(gpu: GpuState, probe: Probe, matrix: Matrix | None) -> FoundGpu:
    """Return a GPU; if it is not registered with the NVLink fabric, `fabric_problem` has the reason."""
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
    """Return nvidia-smi's matrix, and warnings; an unusable matrix is an error only if it is `required`."""
    text = probe.run_command(*MATRIX_QUERY)
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
        return None, (f"the matrix of nvidia-smi is ignored: {error.message}",)
    return matrix, ()


def _gpu_connections(
    snapshot: Snapshot, gpus: tuple[FoundGpu, ...], printed: Mapping[frozenset[str], Connection]
) -> list[Connection]:
    """Return the NVLink and PCI paths between GPUs: NVLinks from NVML, else nvidia-smi's path, else NVML's PCI path."""
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
            if not links and line is None and peer is not None and peer.nvlink:  # In a VM the other end is hidden.
                links = min(a.active_nvlinks or 0, b.active_nvlinks or 0)
            if links:
                found.append(Connection(a.id, b.id, "NV", links))
            elif line is not None and not (line.kind == "NV" and no_nvlink):
                found.append(line)
            elif peer is not None and peer.ancestor:
                found.append(Connection(a.id, b.id, peer.ancestor))
    return found


def _peer_access(snapshot: Snapshot) -> bool:
    """Return False if it is known that no GPU can read another GPU's memory, so transfers use host memory."""
    peers = [peer for gpu in snapshot.gpus for peer in gpu.peers]
    return not peers or any(peer.nvlink is not False or peer.pci is not False for peer in peers)


def _nic_connections(
    gpus: tuple[FoundGpu, ...], nics: tuple[FoundNic, ...], printed: Mapping[frozenset[str], Connection]
) -> list[Connection]:
    """Return the paths from GPUs to NICs: nvidia-smi's path, else a path that follows from the NUMA nodes."""
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
    """Return the NUMA nodes with processors. On a Grace host the memory of a GPU is a node without processors."""
    names = [name for name in probe.list_dir(_NODES) if name.startswith("node")]
    found = {integer(name.removeprefix("node")) for name in names if _first_line(probe, f"{_NODES}/{name}/cpulist")}
    return tuple((0, number) for number in sorted(n for n in found if n is not None))


def read_nics(probe: Probe) -> tuple[tuple[FoundNic, ...], tuple[str, ...]]:
    """Return the ports of RDMA adapters, and warnings about them."""
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
                rate = f"{nic.bits_per_s / _GIGABIT:g} Gb/s" if nic.bits_per_s else "an unknown rate"
                warnings.append(f"port {nic.id} has {rate}, which no NIC of the catalog has.")
    return tuple(nics), tuple(warnings)


def _read_port(probe: Probe, device: str, port: str, name: str) -> FoundNic:
    """Return one port of an RDMA device, as the kernel describes it in sysfs."""
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
        # `integer` returns None for the kernel's -1, which means "no NUMA node".
        numa=integer(_first_line(probe, f"{slot}/numa_node")),
        pcie=PcieLink(
            pcie_generation(_first_line(probe, f"{slot}/current_link_speed")),
            integer(_first_line(probe, f"{slot}/current_link_width")) or None,
            pcie_generation(_first_line(probe, f"{slot}/max_link_speed")),
            integer(_first_line(probe, f"{slot}/max_link_width")) or None,
        ),
    )


def read_rdma(probe: Probe) -> Rdma:
    """Return whether NICs can read GPU memory here."""
    if not probe.list_dir(_INFINIBAND):
        return Rdma()
    peer = any(probe.read_file(path) is not None for path in _PEER_MEMORY)
    return Rdma(peer, _dma_buf(probe), _acs_bridges(probe))


def _dma_buf(probe: Probe) -> bool | None:
    """Return whether the driver's open kernel modules are loaded on a kernel that supports RDMA with dma-buf memory."""
    driver = probe.read_file("/proc/driver/nvidia/version")
    kernel = _KERNEL.match(_first_line(probe, "/proc/sys/kernel/osrelease"))
    if driver is None or kernel is None:
        return None
    return "Open Kernel Module" in driver and (int(kernel[1]), int(kernel[2])) >= _DMA_BUF_KERNEL


def _acs_bridges(probe: Probe) -> int | None:
    """Return how many bridges redirect peer traffic to the CPU (ACS); None if lspci does not show it without root."""
    text = probe.run_command("lspci", "-vvv")
    if text is None or "ACSCtl:" not in text:
        return None
    lines = [line for line in text.split("\n") if "ACSCtl:" in line]
    return sum("ReqRedir+" in line or "CmpltRedir+" in line for line in lines)


def _first_line(probe: Probe, path: str) -> str:
    return (probe.read_file(path) or "").strip().split("\n")[0].strip()


def local_identities(probe: Probe, *, host: str, visible: str | None = None) -> tuple[str, ...]:
    """Return the identity of the NVLink domain of each GPU that CUDA shows to this process, by CUDA ordinal.

    Args:
        host: a name that no other host of the job has (a boot id).
        visible: CUDA_VISIBLE_DEVICES, if it is set.

    Raises:
        ConfigError: no GPU can be queried, or CUDA_VISIBLE_DEVICES names a slice of a GPU.
    """
    found = discover(probe, network=False)
    if not found.gpus:
        raise ConfigError(
            f"the NVLink domain of the attached GPUs cannot be read: {found.nothing_here}.",
            hint="pip install nvidia-ml-py, on a machine with the NVIDIA driver",
        )
    # On a host without NVLink the host is the domain. If only some GPUs have NVLink, each other GPU is its own domain.
    identities = {gpu.id: f"{host}.{gpu.id}" if found.domains else f"{host}.host" for gpu in found.gpus}
    for domain in found.domains:
        identities |= dict.fromkeys(domain.gpus, domain.identity if domain.spans_hosts else f"{host}.{domain.identity}")
    by_index = [identities[gpu.id] for gpu in found.gpus]
    return tuple(by_index[i] for i in visible_gpus(probe, len(by_index), visible))


def visible_gpus(probe: Probe, count: int, visible: str | None) -> list[int]:
    """Return the NVML indices by CUDA ordinal; like CUDA, stop at the first unknown entry.

    Args:
        visible: CUDA_VISIBLE_DEVICES, if it is set.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names a slice of a GPU.
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
    """Return the record that a process publishes: the domain identity of each of its devices, by device id."""
    return json.dumps({str(device): identity for device, identity in sorted(identities.items())})


def domain_identities(records: Iterable[str], *, devices: Iterable[int] | None = None) -> dict[int, str]:
    """Return the identity of the NVLink domain of each device by id, from the records of all processes.

    Args:
        records: the result of `identity_record` in each process.
        devices: the ids that the records must contain; None for no check.

    Raises:
        ConfigError: a record is damaged, or a device is in two records or in none.
    """
    found: dict[int, str] = {}
    for process, text in enumerate(records):
        for device, identity in _read_record(text, process).items():
            if device in found:
                raise ConfigError(
                    f"device {device} was published by process {process} and by another one.",
                    hint="one process for each device; was a process started twice?",
                )
            found[device] = identity
    missing = sorted(set(devices) - set(found)) if devices is not None else []
    if missing:
        what = f"{len(missing)} devices have no NVLink identity, the first of them is {missing[0]}."
        raise ConfigError(what, hint=_SAME_VERSION)
    return found


def _read_record(text: str, process: int) -> dict[int, str]:
    try:
        return _RECORD.validate_json(text if len(text) <= _LONGEST_RECORD else "")
    except ValidationError:
        what = f"the NVLink identities that process {process} published cannot be read."
        raise ConfigError(what, hint=_SAME_VERSION) from None


def replay(path: Path) -> Topology:
    """Return the Topology of a recorded machine, or of several.

    Raises:
        ConfigError: there is no bundle.
        TraceError: the bundle is damaged.
    """
    members = _read_tar(path) if path.is_file() else _read_folder(path)
    hosts = sorted({name.rpartition("/")[0] for name in members if name.endswith("bundle.json")}, key=_natural)
    if not hosts:
        raise TraceError("there is no bundle.json in it.", at=str(path), hint=BUNDLE_HINT)
    probes = [_probe(members, host, str(path)) for host in hosts]
    return merge([discover(probe) for probe in probes], str(path))


def record(out: Path, probe: Probe) -> Topology:
    """Write a bundle of this machine's answers to discovery, without private names, and return its Topology.

    Args:
        out: a folder that does not exist or is empty, or a file that ends in .tar or .tar.gz.

    Raises:
        ConfigError: `out` exists, or cannot be written.
    """
    recording = RecordingProbe(probe)
    found = discover(recording)
    texts = {
        "bundle.json": {"schema": SCHEMA},
        "nvml.json": scrub_nvml(recording.answers),
        "files.json": {path: scrub_file(path, text) for path, text in sorted(recording.files.items())},
        "commands.json": {name: scrub_command(name, text) for name, text in sorted(recording.commands.items())},
    }
    _write(out, {name: json.dumps(value, indent=1) + "\n" for name, value in texts.items()})
    return found


def scrub_nvml(answers: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return NVML's answers with pseudonyms for the uuids of GPUs and fabric."""
    if isinstance(answers, str):
        return {"missing": scrub_text(answers)}
    gpus = []
    for gpu in answers.get("gpus", []):
        fabric = gpu.get("fabric")
        if fabric and fabric["cluster_uuid"].strip("0"):
            fabric = {**fabric, "cluster_uuid": pseudonym(fabric["cluster_uuid"])}
        uuid = "GPU-" + pseudonym(gpu["uuid"]) if gpu.get("uuid") else None
        gpus.append({**gpu, "uuid": uuid, "fabric": fabric})
    return {**answers, "gpus": gpus}


def scrub_file(path: str, text: str) -> str:
    """Return a file of the machine, reduced to the parts that discovery reads."""
    if path.endswith("/uevent"):
        return "".join(line + "\n" for line in text.split("\n") if line.startswith("PCI_SLOT_NAME="))
    if path == "/proc/driver/nvidia/version":
        # The rest of the line has the name of the kernel's builder.
        return scrub_text(text.split("\n")[0].split("(")[0].strip()) + "\n"
    if path == "/proc/sys/kernel/osrelease":
        match = _KERNEL_VERSION.match(text)
        return match[0] + "\n" if match else ""
    return scrub_text(text)


def scrub_command(name: str, text: str) -> str:
    """Return the output of a command, reduced to the parts that discovery reads."""
    if name.startswith("lspci"):
        return "".join("\t" + line.strip() + "\n" for line in text.split("\n") if "ACSCtl:" in line)
    return scrub_text(text)


def scrub_text(text: str) -> str:
    """Return the text with pseudonyms for uuids, and without addresses, GUIDs, serial numbers and this host's name."""
    text = _UUID.sub(lambda match: pseudonym(match[0]), text)
    for pattern, plain in _PRIVATE:
        text = pattern.sub(plain, text)
    for name in {socket.gethostname(), socket.gethostname().split(".")[0]}:
        if len(name) > 2:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "host", text)
    return text


def pseudonym(identity: str) -> str:
    """Return 32 hexadecimal digits that replace an identity, the same on every host."""
    plain = identity.lower().removeprefix("gpu-").replace("-", "")
    return hashlib.sha256(f"meshkit:{plain}".encode()).hexdigest()[:32]


def _write(out: Path, texts: Mapping[str, str]) -> None:
    as_tar = out.name.endswith((".tar", ".tar.gz", ".tgz"))
    try:
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise ConfigError(f"{out} exists, and `topo record` never overwrites.", hint="another path")
        (out.parent if as_tar else out).mkdir(parents=True, exist_ok=True)
        if not as_tar:
            for name, text in texts.items():
                (out / name).write_text(text, encoding="utf-8")
            return
        with tarfile.open(out, "w" if out.suffix == ".tar" else "w:gz") as archive:
            for name, text in texts.items():
                info = tarfile.TarInfo(name)  # A fresh TarInfo has no user and no time of this machine.
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}.", hint="another path") from None


def _probe(members: Mapping[str, bytes], host: str, at: str) -> FixtureProbe:
    prefix = f"{host}/" if host else ""
    where = f"{at}/{host}" if host else at
    tables = {}
    for name in _NAMES:
        if prefix + name not in members:
            raise TraceError(f"the bundle has no {name}.", at=where, hint=BUNDLE_HINT)
        tables[name] = _json(members[prefix + name], f"{where}/{name}")
    if tables["bundle.json"].get("schema") != SCHEMA:
        raise TraceError(f"the bundle's schema is not {SCHEMA}.", at=f"{where}/bundle.json", hint=BUNDLE_HINT)
    for name in ("files.json", "commands.json"):
        wrong = next((key for key, text in tables[name].items() if not isinstance(text, str)), None)
        if wrong is not None:
            raise TraceError(f"'{short(wrong)}' is not text.", at=f"{where}/{name}", hint=BUNDLE_HINT)
    nvml = tables["nvml.json"]
    missing = nvml.get("missing")
    return FixtureProbe(
        files=tables["files.json"],
        commands=tables["commands.json"],
        nvml=short(missing, 200) if isinstance(missing, str) else nvml,
        name=where,
    )


def _json(data: bytes, at: str) -> dict[str, Any]:
    try:
        value = json.loads(decode(data, "bundle", at))
    except (ValueError, RecursionError) as error:
        why = short(str(error)) if isinstance(error, ValueError) else "nested too deeply"
        raise TraceError(f"it is not JSON: {why}.", at=at, hint=BUNDLE_HINT) from None
    if not isinstance(value, dict):
        raise TraceError("it is not a JSON object.", at=at, hint=BUNDLE_HINT)
    return value


def _read_folder(path: Path) -> dict[str, bytes]:
    if not path.is_dir():
        raise ConfigError("there is no such bundle.", at=str(path), hint="a folder or tar of `meshkit topo record`")
    found = {}
    try:
        folders = [path, *sorted(entry for entry in path.iterdir() if entry.is_dir())]
        for folder in folders[:_MOST_MEMBERS]:
            for name in _NAMES:
                if (folder / name).is_file():
                    key = name if folder == path else f"{folder.name}/{name}"
                    found[key] = read_bounded(folder / name, "bundle")
    except OSError as error:
        what = f"the bundle cannot be read: {error.strerror}."
        raise ConfigError(what, at=str(path), hint="a readable one") from None
    return found


def _read_tar(path: Path) -> dict[str, bytes]:
    """Return the members of a tar by name, read in memory without unpacking."""
    data = read_bounded(path, "bundle", _LARGEST_BUNDLE_BYTES)
    found: dict[str, bytes] = {}
    total = 0
    try:
        if data[:2] == b"\x1f\x8b":
            data = gunzip(data, _LARGEST_BUNDLE_BYTES + _HEADER_BYTES * _MOST_MEMBERS)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for number, member in enumerate(archive, 1):
                total += member.size
                if number > _MOST_MEMBERS:
                    message = f"the bundle has more than {_MOST_MEMBERS:,} members."
                    raise TraceError(message, at=str(path), hint=BUNDLE_HINT)
                if total > _LARGEST_BUNDLE_BYTES:
                    message = f"the bundle is larger than {_LARGEST_BUNDLE_BYTES >> 20} MiB."
                    raise TraceError(message, at=str(path), hint=BUNDLE_HINT)
                if member.size > LARGEST_FILE_BYTES:
                    message = f"{short(member.name)} in the bundle is larger than {LARGEST_FILE_BYTES >> 20} MiB."
                    raise TraceError(message, at=str(path), hint=BUNDLE_HINT)
                name = member.name.removeprefix("./")
                if member.isfile() and name.rpartition("/")[2] in _NAMES and name.count("/") <= 1:
                    file = archive.extractfile(member)
                    found[name] = file.read() if file else b""
    except _TAR_DAMAGE as error:
        raise TraceError(f"the bundle is not a tar: {short(str(error))}.", at=str(path), hint=BUNDLE_HINT) from None
    return found


def _natural(name: str) -> list:
    return [(int(part), "") if part.isdigit() and part.isascii() else (0, part) for part in re.split(r"([0-9]+)", name)]
