"""The text of `nvidia-smi topo -m`: its grammar, strictly.

The tool separates columns by tabs and underlines the header even when nobody watches; a copy of it often has spaces
instead, where two cells may have grown together. Anything that is not a cell of the legend is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshkit.discover.damage import integer, short
from meshkit.errors import TraceError

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GREP_PREFIX = re.compile(r"^\d+[:-]", re.MULTILINE)
_GPU = re.compile(r"GPU[0-9]{1,4}", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*", re.ASCII)
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV[1-9][0-9]?", re.ASCII)
_AFFINITY = re.compile(r"N/A|[0-9]+([-,][0-9]+)*", re.ASCII)
_LEGEND = re.compile(r"^\s*(NIC[0-9]+):\s*(\S+)\s*$", re.ASCII)
_NAMED = re.compile(r"^\s*(?:Device|GPU) [0-9]{1,4}: *([^(\[]{3,80}?)\s*(?:\(UUID.*)?$", re.ASCII)
_PROSE_LINES = 6  # above a header: the command, a code fence, a heading
_AFFINITY_HEADERS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_OLD_NAMES = {"SOC": "SYS"}  # drivers before 2017
_LARGEST = 512
_MOST_MATRICES = 64


@dataclass(frozen=True)
class Matrix:
    """One matrix of `nvidia-smi topo -m`.

    Attributes:
        line: of its header, from 1.
        gpus, nics: device names, the NICs as the kernel calls them where the legend tells.
        cells: (device, device) -> `X`, `NV18`, `PIX`, ...
        numa: GPU -> NUMA node, None where the tool prints N/A.
        gpu_names: what the text that follows calls the GPUs: `Device 0: ...` of CUDA's samples, `GPU 0: ...` of
            `nvidia-smi -L`.
        heading: the lines just above, nearest first; prose, which may name a model.
    """

    line: int
    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: Mapping[tuple[str, str], str]
    numa: Mapping[str, int | None] = field(default_factory=dict)
    gpu_names: tuple[str, ...] = ()
    heading: tuple[str, ...] = ()


def parse_matrices(text: str, *, at: str = "nvidia-smi topo -m") -> tuple[Matrix, ...]:
    """Every matrix in a text, which may have prose around them.

    Args:
        text: of one or more runs of the tool.
        at: what an error points to; the line is added.

    Raises:
        TraceError: there is none, or one is damaged.
    """
    lines = _ANSI.sub("", text).split("\n")
    if all(_GREP_PREFIX.match(line) for line in lines if line.strip()):  # a part of a file that grep -n printed
        lines = [_GREP_PREFIX.sub("", line) for line in lines]
    found, index = [], 0
    while index < len(lines):
        if _is_header(lines[index]):
            matrix, index = _parse_one(lines, index, at)
            found.append(matrix)
            if len(found) > _MOST_MATRICES:
                raise TraceError(
                    f"there are more than {_MOST_MATRICES} matrices.", at=at, hint="the one of one machine"
                )
        else:
            index += 1
    if not found:
        raise TraceError(
            "there is no matrix of `nvidia-smi topo -m` in the text.",
            at=at,
            hint="the whole output, from the line of GPU0 GPU1 ... on",
        )
    return tuple(found)


def _is_header(line: str) -> bool:
    tokens = line.split()
    if not tokens or not tokens[0].startswith("GPU") or not (line[:1].isspace() or "CPU Affinity" in line):
        return False
    return len(tokens) == 1 or tokens[1] == "CPU" or not _CELL.fullmatch(tokens[1])


def _parse_one(lines: Sequence[str], start: int, at: str) -> tuple[Matrix, int]:
    names, affinities = _header(lines[start], f"{at}:{start + 1}")
    rows: dict[str, list[str]] = {}
    numa: dict[str, int | None] = {}
    index = start + 1
    while index < len(lines) and lines[index].strip() and len(rows) < len(names):
        where = f"{at}:{index + 1}"
        name, cells, rest = _row(lines[index], names, affinities, where)
        if name in rows:
            raise TraceError(f"row {name} is there twice.", at=where, hint="the output as the tool printed it")
        rows[name] = cells
        if _GPU.fullmatch(name):
            numa[name] = integer(re.split("[-,]", rest[1])[0]) if len(rest) > 1 else None
        index += 1
    missing = [name for name in names if name not in rows]
    if missing:
        raise TraceError(
            f"the matrix has {len(names)} columns and {len(rows)} rows; {missing[0]} has no row.",
            at=f"{at}:{start + 1}",
            hint="the whole output of the tool",
        )
    cells = {(a, b): rows[a][j] for a in names for j, b in enumerate(names)}
    _check_symmetry(names, cells, f"{at}:{start + 1}")
    return _with_legend(names, cells, numa, lines, index, start + 1), index


def _header(line: str, where: str) -> tuple[list[str], list[str]]:
    """Device columns and affinity columns."""
    affinities = [name for name in _AFFINITY_HEADERS if " ".join(name.split()) in " ".join(line.split())]
    devices = re.split(r"\bCPU\s+Affinity\b|\bNUMA\s+Affinity\b", line)[0].split()
    for name in devices:
        if not (_GPU.fullmatch(name) or (_DEVICE.fullmatch(name) and not name.startswith("GPU"))):
            raise TraceError(
                f"'{short(name)}' is no column of the matrix; two columns may have grown together.",
                at=where,
                hint="the output with its tabs, as in: nvidia-smi topo -m > topo.txt",
            )
    many = len(devices) > _LARGEST
    repeated = None if many else next((name for name in devices if devices.count(name) > 1), None)
    if many or repeated:
        problem = f"the matrix has {len(devices)} columns" if many else f"column {repeated} is there twice"
        raise TraceError(f"{problem}.", at=where, hint="the output as the tool printed it")
    return devices, affinities


def _row(line: str, names: Sequence[str], affinities: Sequence[str], where: str) -> tuple[str, list[str], list[str]]:
    """Name, cells and affinity cells of a row."""
    tokens = [cell.strip() for cell in line.split("\t")] if "\t" in line.strip() else line.split()
    name, cells, rest = tokens[0], tokens[1 : 1 + len(names)], tokens[1 + len(names) :]
    if name not in names:
        raise TraceError(
            f"row '{short(name)}' is none of the columns {names[0]} to {names[-1]}.",
            at=where,
            hint="the output as the tool printed it",
        )
    cells = [_OLD_NAMES.get(cell, cell) for cell in cells]
    for column, cell in zip(names, cells):
        if not _CELL.fullmatch(cell):
            raise TraceError(
                f"'{short(cell)}' in row {name}, column {column}, is no cell of the legend "
                "(X SYS NODE PHB PXB PIX NV#); cells may have grown together.",
                at=where,
                hint="the output with its tabs, as in: nvidia-smi topo -m > topo.txt",
            )
    if len(cells) < len(names):
        raise TraceError(
            f"row {name} has {len(cells)} cells, but the matrix has {len(names)} columns.",
            at=where,
            hint="the whole output of the tool",
        )
    return name, cells, _affinities(name, rest, affinities, where, by_tabs="\t" in line.strip())


def _affinities(name: str, rest: list[str], affinities: Sequence[str], where: str, *, by_tabs: bool) -> list[str]:
    """The affinity cells of a GPU's row, empty ones as "" (without tabs they cannot be told); NICs have none."""
    if len(rest) > len(affinities):
        rest = [*rest[:2], *(cell for cell in rest[2:] if cell)]  # the tool writes two tabs before a last N/A
    while rest and not rest[-1]:
        rest = rest[:-1]
    if len(rest) > len(affinities) or (rest and not _GPU.fullmatch(name)):
        raise TraceError(
            f"row {name} has more cells than the matrix has columns.",
            at=where,
            hint="the output as the tool printed it",
        )
    if rest and not by_tabs and len(rest) < min(2, len(affinities)):
        raise TraceError(
            f"row {name} has {len(rest)} of the {len(affinities)} cells of {', '.join(affinities)}.",
            at=where,
            hint="the output with its tabs, as in: nvidia-smi topo -m > topo.txt",
        )
    for cell in rest:
        if cell and not _AFFINITY.fullmatch(cell):
            raise TraceError(
                f"'{short(cell)}' in row {name} is no affinity: a list such as 0-51,104-155, or N/A.",
                at=where,
                hint="the output as the tool printed it",
            )
    return rest


def _check_symmetry(names: Sequence[str], cells: Mapping[tuple[str, str], str], where: str) -> None:
    for i, a in enumerate(names):
        if cells[a, a] != "X":
            raise TraceError(
                f"{a} reaches itself by '{cells[a, a]}', not X: a cell is missing or too many.",
                at=where,
                hint="the output as the tool printed it",
            )
        for b in names[i + 1 :]:
            if cells[a, b] != cells[b, a] or cells[a, b] == "X":
                raise TraceError(
                    f"{a} reaches {b} by {cells[a, b]}, but {b} reaches {a} by {cells[b, a]}.",
                    at=where,
                    hint="the output as the tool printed it",
                )


def _with_legend(
    names: Sequence[str],
    cells: Mapping[tuple[str, str], str],
    numa: Mapping[str, int | None],
    lines: Sequence[str],
    index: int,
    line: int,
) -> Matrix:
    """The matrix with its NICs named by the legend that follows it, and what the text around it calls its GPUs."""
    legend: dict[str, str] = {}
    named: list[str] = []
    for text in lines[index:]:
        if _is_header(text):
            break
        match, gpu = _LEGEND.match(text), _NAMED.match(text)
        if match:
            legend.setdefault(match[1], match[2])
        if gpu:
            named.append(short(gpu[1]))
    called = {name: legend.get(name, name) for name in names}
    if len(set(called.values())) < len(called):  # a legend that names two NICs alike names none
        called = {name: name for name in names}
    return Matrix(
        line=line,
        gpus=tuple(name for name in names if _GPU.fullmatch(name)),
        nics=tuple(called[name] for name in names if not _GPU.fullmatch(name)),
        cells={(called[a], called[b]): cell for (a, b), cell in cells.items()},
        numa=dict(numa),
        gpu_names=tuple(dict.fromkeys(named)),
        heading=tuple(reversed(lines[max(0, line - 1 - _PROSE_LINES) : line - 1])),
    )
