"""Read the output of `nvidia-smi`: the matrix of `topo -m`, and GPUs on machines without the Python binding of NVML.

The tool separates the columns of the matrix by tabs, and underlines the header even in a pipe. The matrix may also come
from a copied text, which often has spaces in place of tabs, so two cells may have grown together. A cell that is not in
the legend is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.config.files import integer, short
from meshkit.discover.probe import Probe, Snapshot, check_snapshot, short_bus
from meshkit.discover.topology import (
    Connection,
    FoundGpu,
    FoundNic,
    Match,
    Topology,
    assume_gpu,
    gpu_by_name,
    gpus_by_nvlinks,
    stand_in_notes,
    with_domains,
)
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
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GREP_PREFIX = re.compile(r"^\d+[:-]", re.MULTILINE)
_GPU = re.compile(r"GPU[0-9]{1,4}", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV[1-9][0-9]?", re.ASCII)
_AFFINITY = re.compile(r"N/A|[0-9]+([-,][0-9]+)*", re.ASCII)
_LEGEND = re.compile(r"^\s*(NIC[0-9]+):\s*(\S+)\s*$", re.ASCII)
_NAMED = re.compile(r"^\s*(?:Device|GPU) [0-9]{1,4}: *([^(\[]{3,80}?)\s*(?:\(UUID.*)?$", re.ASCII)
_PROSE_LINES = 6  # Lines above a header: the command, a code fence, a heading.
_AFFINITY_HEADERS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_OLD_NAMES = {"SOC": "SYS"}  # Drivers before 2017 print this name.
_LARGEST = 512
_MOST_MATRICES = 64
_AS_PRINTED = "the output as the tool printed it"
_WITH_TABS = "the output with its tabs, as in: nvidia-smi topo -m > topo.txt"
_WHOLE = "the whole output of the tool"


@dataclass(frozen=True)
class Matrix:
    """One matrix of `nvidia-smi topo -m`."""

    line: int
    """The line of its header, from 1."""
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    """The kernel's names if the legend has them, else the names in the matrix."""
    cells: Mapping[tuple[str, str], str]
    """(device, device) -> `X`, `NV18`, `PIX`, ..."""
    numa: Mapping[str, int | None]
    """GPU -> NUMA node; None where the tool prints N/A."""
    gpu_names: tuple[str, ...]
    """GPU models in the text after the matrix: `Device 0: ...` of CUDA's samples, `GPU 0: ...` of `nvidia-smi -L`."""
    heading: tuple[str, ...]
    """The lines above the matrix, nearest first; they may name a GPU model."""

    @property
    def connections(self) -> tuple[Connection, ...]:
        """The connections, with GPUs as `gpu0`, `gpu1`, ... in the order of the matrix."""
        called = {name: f"gpu{i}" for i, name in enumerate(self.gpus)} | {name: name for name in self.nics}
        order = [*self.gpus, *self.nics]
        found = []
        for i, a in enumerate(order):
            for b in order[i + 1 :]:
                cell = self.cells[a, b]
                kind, links = ("NV", int(cell[2:])) if cell.startswith("NV") else (cell, 0)
                found.append(Connection(called[a], called[b], kind, links))
        return tuple(found)


def read_matrix(matrix: Matrix, source: str) -> Topology:
    """Return the Topology of a matrix; the text around it or else the number of NVLinks identifies the GPUs."""
    links = matrix.connections
    totals = _nvlinks_per_gpu([f"gpu{i}" for i in range(len(matrix.gpus))], links)
    called = matrix.gpu_names[0] if len(matrix.gpu_names) == 1 else None
    match = gpu_by_name(called) if called else Match()
    gpus = tuple(
        FoundGpu(
            id=f"gpu{i}",
            name=called,
            key=match.key,
            stand_in=match.stand_in,
            numa=matrix.numa.get(name),
            nvlinks_total=totals.get(f"gpu{i}"),
        )
        for i, name in enumerate(matrix.gpus)
    )
    nics = tuple(FoundNic(name, numa=_nic_numa(matrix, name)) for name in matrix.nics)
    numa = sorted({g.numa for g in gpus if g.numa is not None})
    found = Topology(source, gpus, nics, tuple((0, n) for n in numa), links)
    if called:
        found = found.warn(f"the text around the matrix calls the GPUs {called}.")
    return stand_in_notes(assume_gpu(with_domains(found), heading=matrix.heading))


def _nvlinks_per_gpu(gpus: Sequence[str], links: Sequence[Connection]) -> dict[str, int]:
    """Return the active NVLinks of each GPU: with a switch the largest cell of its row, without one the row's sum."""
    rows = {g: [c.nvlinks for c in links if g in (c.a, c.b) and c.kind == "NV"] for g in gpus}
    if not any(rows.values()):
        return {}
    direct = bool(gpus_by_nvlinks(max(sum(row) for row in rows.values())))
    return {g: sum(row) if direct else max(row, default=0) for g, row in rows.items()}


def _nic_numa(matrix: Matrix, nic: str) -> int | None:
    """Return the NUMA node of the GPUs that a NIC reaches without the link between sockets."""
    near = {matrix.numa.get(g) for g in matrix.gpus if matrix.cells[g, nic] not in ("SYS", "X")}
    return near.pop() if len(near) == 1 else None


def parse_matrices(text: str, *, at: str = "nvidia-smi topo -m") -> tuple[Matrix, ...]:
    """Return every matrix in a text; there may be other text around them.

    Args:
        at: the place that an error names, to which the line number is added.

    Raises:
        TraceError: there is no matrix, or one is damaged.
    """
    lines = _ANSI.sub("", text).split("\n")
    # If every line has a line number from `grep -n`, these numbers are removed.
    if all(_GREP_PREFIX.match(line) for line in lines if line.strip()):
        lines = [_GREP_PREFIX.sub("", line) for line in lines]
    found, index = [], 0
    while index < len(lines):
        if not _is_header(lines[index]):
            index += 1
            continue
        matrix, index = _parse_one(lines, index, at)
        found.append(matrix)
        if len(found) > _MOST_MATRICES:
            raise TraceError(f"there are more than {_MOST_MATRICES} matrices.", at=at, hint="the matrix of one machine")
    if not found:
        what = "the text has no matrix of `nvidia-smi topo -m`."
        raise TraceError(what, at=at, hint="the whole output, from the line of GPU0 GPU1 ... on")
    return tuple(found)


def _is_header(line: str) -> bool:
    tokens = line.split()
    if not tokens or not tokens[0].startswith("GPU") or not (line[:1].isspace() or "CPU Affinity" in line):
        return False
    return len(tokens) == 1 or tokens[1] == "CPU" or not _CELL.fullmatch(tokens[1])


def _parse_one(lines: Sequence[str], start: int, at: str) -> tuple[Matrix, int]:
    """Return the matrix whose header is `lines[start]`, and the index of the line after the matrix."""
    top = f"{at}:{start + 1}"
    names, affinities = _header(lines[start], top)
    rows: dict[str, list[str]] = {}
    numa: dict[str, int | None] = {}
    index = start + 1
    while index < len(lines) and lines[index].strip() and len(rows) < len(names):
        where = f"{at}:{index + 1}"
        name, cells, rest = _row(lines[index], names, affinities, where)
        if name in rows:
            raise TraceError(f"row {name} appears twice.", at=where, hint=_AS_PRINTED)
        rows[name] = cells
        if _GPU.fullmatch(name):
            numa[name] = integer(re.split("[-,]", rest[1])[0]) if len(rest) > 1 else None
        index += 1
    missing = [name for name in names if name not in rows]
    if missing:
        what = f"the matrix has {len(names)} columns and {len(rows)} rows; {missing[0]} has no row."
        raise TraceError(what, at=top, hint=_WHOLE)
    cells = {(a, b): rows[a][j] for a in names for j, b in enumerate(names)}
    _check_symmetry(names, cells, top)
    called, gpu_names = _legend(names, lines[index:])
    matrix = Matrix(
        line=start + 1,
        gpus=tuple(name for name in names if _GPU.fullmatch(name)),
        nics=tuple(called[name] for name in names if not _GPU.fullmatch(name)),
        cells={(called[a], called[b]): cell for (a, b), cell in cells.items()},
        numa=numa,
        gpu_names=gpu_names,
        heading=tuple(reversed(lines[max(0, start - _PROSE_LINES) : start])),
    )
    return matrix, index


def _header(line: str, where: str) -> tuple[list[str], list[str]]:
    affinities = [name for name in _AFFINITY_HEADERS if name in " ".join(line.split())]
    devices = re.split(r"\bCPU\s+Affinity\b|\bNUMA\s+Affinity\b", line)[0].split()
    for name in devices:
        if not (_GPU.fullmatch(name) or (_DEVICE.fullmatch(name) and not name.startswith("GPU"))):
            what = f"'{short(name)}' is not a column of the matrix; two columns may have grown together."
            raise TraceError(what, at=where, hint=_WITH_TABS)
    if len(devices) > _LARGEST:
        raise TraceError(f"the matrix has {len(devices)} columns.", at=where, hint=_AS_PRINTED)
    repeated = next((name for name in devices if devices.count(name) > 1), None)
    if repeated:
        raise TraceError(f"column {repeated} appears twice.", at=where, hint=_AS_PRINTED)
    return devices, affinities


def _row(line: str, names: Sequence[str], affinities: Sequence[str], where: str) -> tuple[str, list[str], list[str]]:
    by_tabs = "\t" in line.strip()
    tokens = [cell.strip() for cell in line.split("\t")] if by_tabs else line.split()
    name, cells, rest = tokens[0], tokens[1 : 1 + len(names)], tokens[1 + len(names) :]
    if name not in names:
        what = f"row '{short(name)}' is not one of the columns {names[0]} to {names[-1]}."
        raise TraceError(what, at=where, hint=_AS_PRINTED)
    cells = [_OLD_NAMES.get(cell, cell) for cell in cells]
    for column, cell in zip(names, cells):
        if not _CELL.fullmatch(cell):
            raise TraceError(
                f"'{short(cell)}' in row {name}, column {column}, is not a cell of the legend "
                "(X SYS NODE PHB PXB PIX NV#); cells may have grown together.",
                at=where,
                hint=_WITH_TABS,
            )
    if len(cells) < len(names):
        what = f"row {name} has {len(cells)} cells, but the matrix has {len(names)} columns."
        raise TraceError(what, at=where, hint=_WHOLE)
    return name, cells, _affinities(name, rest, affinities, where, by_tabs=by_tabs)


def _affinities(name: str, rest: list[str], affinities: Sequence[str], where: str, *, by_tabs: bool) -> list[str]:
    """Return the affinity cells of a GPU's row; NICs have none. An empty cell (visible only with tabs) is ""."""
    if len(rest) > len(affinities):
        rest = [*rest[:2], *(cell for cell in rest[2:] if cell)]  # The tool writes two tabs before a last N/A.
    while rest and not rest[-1]:
        rest = rest[:-1]
    if len(rest) > len(affinities) or (rest and not _GPU.fullmatch(name)):
        raise TraceError(f"row {name} has more cells than the matrix has columns.", at=where, hint=_AS_PRINTED)
    if rest and not by_tabs and len(rest) < min(2, len(affinities)):
        what = f"row {name} has {len(rest)} of the {len(affinities)} cells of {', '.join(affinities)}."
        raise TraceError(what, at=where, hint=_WITH_TABS)
    for cell in rest:
        if cell and not _AFFINITY.fullmatch(cell):
            what = f"'{short(cell)}' in row {name} is not an affinity, such as 0-51,104-155 or N/A."
            raise TraceError(what, at=where, hint=_AS_PRINTED)
    return rest


def _check_symmetry(names: Sequence[str], cells: Mapping[tuple[str, str], str], where: str) -> None:
    for i, a in enumerate(names):
        if cells[a, a] != "X":
            what = f"{a} reaches itself by '{cells[a, a]}', not by X: there is a cell too few or too many."
            raise TraceError(what, at=where, hint=_AS_PRINTED)
        for b in names[i + 1 :]:
            if cells[a, b] != cells[b, a] or cells[a, b] == "X":
                what = f"{a} reaches {b} by {cells[a, b]}, but {b} reaches {a} by {cells[b, a]}."
                raise TraceError(what, at=where, hint=_AS_PRINTED)


def _legend(names: Sequence[str], lines: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return kernel names of the columns, and GPU models, from the text between this matrix and the next one."""
    legend: dict[str, str] = {}
    gpu_names: list[str] = []
    for text in lines:
        if _is_header(text):
            break
        if match := _LEGEND.match(text):
            legend.setdefault(match[1], match[2])
        if gpu := _NAMED.match(text):
            gpu_names.append(short(gpu[1]))
    called = {name: legend.get(name, name) for name in names}
    if len(set(called.values())) < len(called):  # The legend gives two NICs one name, so it is ignored.
        called = {name: name for name in names}
    return called, tuple(dict.fromkeys(gpu_names))


def read_smi(probe: Probe) -> Snapshot | None:
    """Return nvidia-smi's answers in the form of NVML's; None if nvidia-smi is missing or fails.

    Raises:
        TraceError: its output has an unknown form.
    """
    text = probe.run_command(*GPU_QUERY)
    if text is None:
        return None
    at = "nvidia-smi --query-gpu"
    gpus = [_gpu(line, at) for line in text.split("\n") if line.strip()]
    fabric, links = _fabrics(probe), _nvlinks(probe)
    for gpu in gpus:
        gpu |= {"fabric": fabric.get(gpu["index"]), "nvlinks": links.get(gpu["index"], [])}
    return check_snapshot({"gpus": gpus}, at=at)


def _gpu(line: str, at: str) -> dict[str, Any]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_FIELDS.split(",")) or integer(cells[0]) is None:
        raise TraceError(f"'{short(line)}' does not describe a GPU.", at=at, hint="running it by hand to see")
    index, name, bus, memory, capability, state, *slot = cells
    mebibytes = integer(memory)
    known = tuple(integer(part) for part in capability.partition(".")[::2])
    return {
        "index": integer(index),
        "name": name,
        "bus": short_bus(bus),
        "memory_bytes": None if mebibytes is None else mebibytes * 2**20,
        "compute_capability": None if None in known else known,
        "performance_state": integer(state.removeprefix("P")),
        "pcie": dict(zip(("generation", "width", "max_generation", "max_width"), map(integer, slot))),
    }


def _fabrics(probe: Probe) -> dict[int, dict[str, Any]]:
    """Return the fabric identity by GPU; empty for older drivers, which do not know this query."""
    found = {}
    for line in (probe.run_command(*FABRIC_QUERY) or "").split("\n"):
        cells = [cell.strip() for cell in line.split(",")]
        index = integer(cells[0])
        if len(cells) == 3 and index is not None and _UUID.fullmatch(cells[1]) and integer(cells[2]) is not None:
            uuid = cells[1].replace("-", "").lower()
            found[index] = {"state": "completed", "cluster_uuid": uuid, "clique_id": integer(cells[2])}
    return found


def _nvlinks(probe: Probe) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    current: list[dict[str, Any]] = []
    for line in (probe.run_command(*NVLINK_QUERY) or "").split("\n"):
        gpu, link = _GPU_LINE.match(line), _LINK_LINE.match(line)
        if gpu:
            current = found.setdefault(int(gpu[1]), [])
        elif link:
            current.append({"active": link[1] != "<inactive>"})
    return found
