"""Replica groups of a collective -> mesh axes and link. Layer 4.

XLA prints groups in four forms, several of them in one module, and often loses the user's axis names. So every form is
turned into explicit partition ids, and the ids alone decide which axes and which link a group spans.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from meshkit.errors import ProgramError
from meshkit.spec.mesh import Placement

_MESH = re.compile(r"replica_groups=@?mesh\[([^\]]*)\](?:\s*\([^)]*\))?\s*\{([^}]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True)
class GroupShape:
    """What the groups of one collective have in common.

    Attributes:
        axes: mesh axes along which members of a group differ.
        axes_complete: whether a group spans these axes entirely.
        link: `infiniband` if any group crosses NVLink domains.
        group_size, num_groups: members of a group; groups.
        gpus_per_domain: members of one group that share a domain (the fewest, where groups differ).
    """

    axes: tuple[str, ...]
    axes_complete: bool
    link: str
    group_size: int
    num_groups: int
    gpus_per_domain: int


def parse_groups(text: str, num_partitions: int) -> np.ndarray:
    """Groups of an instruction as partition ids, shape [num_groups, group_size]; [pairs, 2] for a permute.

    Args:
        text: the instruction as XLA prints it.
        num_partitions: devices of the program; `replica_groups={}` means all of them.

    Raises:
        ProgramError: a form we do not know, or groups of unequal size.
    """
    if m := _MESH.search(text):
        return _mesh_groups(m[1], m[2])
    if m := _IOTA.search(text):
        shape, dims = _ints(m[1]), _ints(m[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(_ints(m[3])) if m[3] else ids).reshape(shape)
    if m := _PAIRS.search(text) or _EXPLICIT.search(text):
        groups = [_ints(g) for g in re.findall(r"\{([\d,]+)\}", m[1])]
        if len({len(g) for g in groups}) > 1:
            raise ProgramError(f"a collective has groups of unequal size: {m[0][:200]}")
        return np.array(groups) if groups else np.arange(num_partitions)[None]
    if "replica_groups" in text or "source_target_pairs" in text:
        raise ProgramError(f"replica groups in a form that this version does not know: {text[:300]}")
    return np.arange(num_partitions)[None]


def group_shape(groups: np.ndarray, placement: Placement, *, permute: bool = False) -> GroupShape:
    """Axes, link and sizes of groups of partition ids on a placed mesh.

    Args:
        groups: [num_groups, group_size] partition ids, or [pairs, 2] for a permute.
        placement: the mesh, and the NVLink domain of each partition.
        permute: groups are (source, target) pairs; the group is then everything along the axes they move on.
    """
    coords = np.stack(np.unravel_index(groups, placement.shape))  # [axis, group, member]
    differ = (coords != coords[:, :, :1]).any(axis=(1, 2))
    axes = tuple(name for name, d in zip(placement.axis_names, differ) if d)
    span = math.prod(size for size, d in zip(placement.shape, differ) if d)
    domains = np.sort(placement.domains[groups], axis=1)
    crossing = np.count_nonzero(np.diff(domains, axis=1), axis=1)  # domains of each group, less one
    link = "infiniband" if crossing.any() else "nvlink"
    size = span if permute else groups.shape[1]
    count = placement.num_partitions // span if permute else groups.shape[0]
    if permute:
        local = size // _domains_along(differ, placement)
    else:
        local = size // (int(crossing.max()) + 1)
    return GroupShape(axes, size == span, link, size, count, max(1, local))


def _domains_along(differ: np.ndarray, placement: Placement) -> int:
    """NVLink domains that the first line of the mesh along some axes spans."""
    table = placement.domains.reshape(placement.shape)
    return len(np.unique(table[tuple(slice(None) if d else 0 for d in differ)]))


def _mesh_groups(mesh: str, selected: str) -> np.ndarray:
    """`mesh['x'=2,'y'=4] {'y'}`: groups along the selected axes; a sub-axis `'y':(1)2` selects part of one."""
    axes = [(n, int(s)) for n, s in re.findall(r"'?([^'=,\s]+)'?=(\d+)", mesh)]
    dims: list[int] = []
    chosen: list[int] = []
    wanted = {n: (int(p or 1), int(s or 0)) for n, p, s in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", selected)}
    for name, size in axes:
        if name not in wanted:
            dims.append(size)
            continue
        before, part = wanted[name]
        part = part or size
        dims += [before, part, size // (before * part)]
        chosen.append(len(dims) - 2)
    ids = np.arange(math.prod(dims)).reshape(dims)
    rest = [i for i in range(len(dims)) if i not in chosen]
    return ids.transpose(rest + chosen).reshape(-1, math.prod(dims[i] for i in chosen))


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]
