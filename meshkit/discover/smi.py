"""The GPUs as `nvidia-smi` prints them, for machines without NVML's binding."""

from __future__ import annotations

import re
from typing import Any

from meshkit.discover.damage import integer, short
from meshkit.discover.nvml import Snapshot, check_snapshot, short_bus, smi_bytes
from meshkit.discover.probe import Probe
from meshkit.errors import TraceError

_FIELDS = (
    "index,name,pci.bus_id,memory.total,compute_cap,pstate,"
    "pcie.link.gen.current,pcie.link.width.current,pcie.link.gen.max,pcie.link.width.max"
)
GPU_QUERY = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
FABRIC_QUERY = ("nvidia-smi", "--query-gpu=index,fabric.clusterUuid,fabric.cliqueId", "--format=csv,noheader")
NVLINK_QUERY = ("nvidia-smi", "nvlink", "-s")
MATRIX_QUERY = ("nvidia-smi", "topo", "-m")
_UUID = re.compile(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
_GPU_LINE = re.compile(r"^GPU ([0-9]{1,4}):", re.ASCII)
_LINK_LINE = re.compile(r"^\s+Link [0-9]{1,3}: (<inactive>|[0-9.]+ GB/s)", re.ASCII)


def read_smi(probe: Probe) -> Snapshot | None:
    """What nvidia-smi says, in the form of NVML's answers; None where it does not run.

    Raises:
        TraceError: it prints something else than it should.
    """
    text = probe.run(*GPU_QUERY)
    if text is None:
        return None
    at = "nvidia-smi --query-gpu"
    gpus = [_gpu(line, at) for line in text.split("\n") if line.strip()]
    fabric, links = _fabrics(probe), _nvlinks(probe)
    for gpu in gpus:
        gpu["fabric"] = fabric.get(gpu["index"])
        gpu["nvlinks"] = links.get(gpu["index"], [])
    return check_snapshot({"gpus": gpus}, at=at)


def _gpu(line: str, at: str) -> dict[str, Any]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_FIELDS.split(",")) or integer(cells[0]) is None:
        raise TraceError(f"'{short(line)}' is not the line of a GPU.", at=at, hint="running it by hand to see")
    index, name, bus, memory, capability, state, *slot = cells
    generation, width, max_generation, max_width = (integer(cell) for cell in slot)
    major, _, minor = capability.partition(".")
    known = (integer(major), integer(minor))
    return {
        "index": integer(index),
        "name": name,
        "bus": short_bus(bus),
        "memory_bytes": smi_bytes(integer(memory)),
        "compute_capability": None if None in known else known,
        "performance_state": integer(state.removeprefix("P")),
        "pcie": {"generation": generation, "width": width, "max_generation": max_generation, "max_width": max_width},
    }


def _fabrics(probe: Probe) -> dict[int, dict[str, Any]]:
    """Fabric identity by GPU, of drivers that know the question."""
    found = {}
    for line in (probe.run(*FABRIC_QUERY) or "").split("\n"):
        cells = [cell.strip() for cell in line.split(",")]
        index = integer(cells[0])
        if len(cells) == 3 and index is not None and _UUID.fullmatch(cells[1]) and integer(cells[2]) is not None:
            uuid = cells[1].replace("-", "").lower()
            found[index] = {"state": "completed", "cluster_uuid": uuid, "clique_id": integer(cells[2])}
    return found


def _nvlinks(probe: Probe) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    current: list[dict[str, Any]] = []
    for line in (probe.run(*NVLINK_QUERY) or "").split("\n"):
        gpu, link = _GPU_LINE.match(line), _LINK_LINE.match(line)
        if gpu:
            current = found.setdefault(int(gpu[1]), [])
        elif link:
            current.append({"active": link[1] != "<inactive>"})
    return found
