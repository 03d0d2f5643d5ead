"""Replica groups of a collective -> mesh axes and link.

XLA keeps groups in four forms, several of them in one module, and often loses the user's axis names. So every form is
turned into explicit partition ids, and the ids alone decide which axes and which link a group spans.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from meshkit.config.mesh import Placement
from meshkit.errors import ProgramError
from meshkit.hlo.proto import Attributes, Fields, integer, ints, message, messages

# Fields of HloInstructionProto (xla/service/hlo.proto).
_MOST_PARTITIONS = 2**22
_EXPLICIT, _PAIRS, _DEVICE_LIST, _IOTA_LIST, _MESH_LIST = 49, 52, 87, 92, 93


@dataclass(frozen=True)
class GroupShape:
    """What the groups of one collective have in common."""

    axes: tuple[str, ...]  # mesh axes along which members of a group differ
    axes_complete: bool  # whether a group spans these axes entirely
    link: str  # `infiniband` if any group crosses NVLink domains
    group_size: int  # members of a group
    num_groups: int
    gpus_per_domain: int  # members of one group that share a domain (the fewest, where groups differ)


def read_groups(attributes: Attributes, num_partitions: int) -> np.ndarray:
    """Groups of a collective as partition ids, shape [num_groups, group_size]; [pairs, 2] for a permute.

    Args:
        attributes: of the instruction that communicates.
        num_partitions: devices of the program; no groups at all means all of them.

    Raises:
        ProgramError: groups of unequal size, of more partitions than a program can have, or none that can be read.
    """
    try:
        groups = _groups(attributes, num_partitions)
    except (ValueError, IndexError, KeyError, ArithmeticError) as error:
        raise ProgramError(f"the groups of the collective {attributes.name} cannot be read: {error}.") from None
    if groups.size and not 0 <= groups.min() <= groups.max() < _MOST_PARTITIONS:
        raise ProgramError(f"the collective {attributes.name} has partitions {groups.min()} to {groups.max()}.")
    return groups


def _groups(attributes: Attributes, num_partitions: int) -> np.ndarray:
    """What `read_groups` reads."""
    fields = attributes.fields
    for listed in messages(fields, _MESH_LIST):
        return _mesh_groups(listed)
    lists = messages(fields, _DEVICE_LIST)
    for listed in (*messages(fields, _IOTA_LIST), *(m for each in lists for m in messages(each, 2))):
        return _iota(listed)
    explicit = (*messages(fields, _EXPLICIT), *(m for each in lists for m in messages(each, 1)))
    # of a `SourceTarget` too a zero is left out of the message
    groups = [[integer(m, 1), integer(m, 2)] for m in messages(fields, _PAIRS)] or [ints(m, 1) for m in explicit]
    if len({len(g) for g in groups}) > 1:
        sizes = sorted({len(g) for g in groups})
        raise ProgramError(f"the collective {attributes.name} has groups of unequal size: {sizes}.")
    return np.array(groups) if groups and groups[0] else np.arange(num_partitions)[None]


def group_shape(groups: np.ndarray, placement: Placement, *, permute: bool = False) -> GroupShape:
    """Axes, link and sizes of groups of partition ids on a placed mesh.

    Args:
        groups: [num_groups, group_size] partition ids, or [pairs, 2] for a permute.
        placement: the mesh, and the NVLink domain of each partition.
        permute: groups are (source, target) pairs; the group is then everything along the axes they move on.

    Raises:
        ProgramError: a partition that the mesh does not have.
    """
    if groups.max() >= placement.num_partitions:
        raise ProgramError(
            f"a collective has partition {groups.max()}, but the mesh has {placement.num_partitions} of them."
        )
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
        local = size // domains_spanned(placement, axes)
    else:
        local = size // (int(crossing.max()) + 1)
    return GroupShape(axes, size == span, link, size, count, max(1, local))


def domains_spanned(placement: Placement, axes: Collection[str]) -> int:
    """NVLink domains that the first line of the mesh along some axes spans."""
    table = placement.domains.reshape(placement.shape)
    return len(np.unique(table[tuple(slice(None) if name in axes else 0 for name in placement.axis_names)]))


def _iota(message: Fields) -> np.ndarray:
    """`[groups,size]<=[dims]T(order)`: ids counted through dims, transposed, cut into groups."""
    shape = (integer(message, 1), integer(message, 2))
    dims, order = ints(message, 3), ints(message, 4)
    ids = _counted(dims).reshape(dims)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _mesh_groups(listed: Fields) -> np.ndarray:
    """`mesh['x'=2,'y'=4] {'y'}`: groups along the selected axes; a sub-axis `'y':(1)2` selects part of one."""
    mesh = message(listed, 1)
    axes = messages(mesh, 1)
    ids = _device_ids(mesh, [integer(a, 2) for a in axes])
    dims: list[int] = []
    places: dict[tuple[int, int], int] = {}
    chosen = [_axis_part(m, axes) for m in messages(listed, 2)]
    for axis, described in enumerate(axes):
        size = integer(described, 2)
        begin = 1
        for before, part in sorted((b, p) for a, b, p in chosen if a == axis):
            if before > begin:
                dims.append(before // begin)
            places[axis, before] = len(dims)
            dims.append(part)
            begin = before * part
        if begin < size or not dims:
            dims.append(size // begin)
    selected = [places[a, b] for a, b, _ in chosen]
    rest = [i for i in range(len(dims)) if i not in selected]
    ids = ids.reshape(dims).transpose(rest + selected)
    return ids.reshape(-1, math.prod(dims[i] for i in selected))


def _axis_part(reference: Fields, axes: Sequence[Fields]) -> tuple[int, int, int]:
    """(axis, size of what is before the part, size of the part) of an `AxisRefProto`; a whole axis is one part."""
    axis = integer(reference, 1)
    for part in messages(reference, 2):
        return axis, integer(part, 1), integer(part, 2)
    return axis, 1, integer(axes[axis], 2)


def _device_ids(mesh: Fields, shape: Sequence[int]) -> np.ndarray:
    """Ids of a `MeshProto` in its order: listed, or counted through dims and transposed, or simply counted."""
    listed = ints(mesh, 2)
    if listed:
        return np.array(listed)
    for iota in messages(mesh, 3):
        return _counted(shape).reshape(ints(iota, 1)).transpose(ints(iota, 2)).reshape(-1)
    return _counted(shape)


def _counted(shape: Sequence[int]) -> np.ndarray:
    """As many ids as a shape has places."""
    count = math.prod(shape)
    if count > _MOST_PARTITIONS:
        raise ValueError(f"{count} partitions are more than a program can have")
    return np.arange(count)
