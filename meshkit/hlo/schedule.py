"""Represent a compiled program in the order in which it runs: module.py makes a Schedule, and the simulator reads it.

Replica groups of collectives have four forms, of which one module may use several, and XLA often loses the user's axis
names. So every form is turned into explicit partition ids, and only the ids decide which axes and which link a group
spans (`read_groups`, `group_shape`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshkit.config.mesh import Placement
from meshkit.errors import ProgramError
from meshkit.hlo.costs import Cost
from meshkit.hlo.proto import Fields, HloInstruction, integer, ints, message, messages, refusing_malformed

_MOST_PARTITIONS = 2**22
# Fields of HloInstructionProto (xla/service/hlo.proto) that have replica groups.
_FORMS = _EXPLICIT, _PAIRS, _DEVICE_LIST, _IOTA_LIST, _MESH_LIST = 49, 52, 87, 92, 93


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program: its kind, its bytes, and the devices that it connects."""

    name: str
    """The HLO instruction's name, unique within its program."""
    key: str
    """`opcode|axes|dtype|shapes|op_name path|occurrence`, which survives a recompile."""
    collective: str
    """The HLO opcode without `-start` (`all-gather`, `collective-permute`, ...)."""
    axes: tuple[str, ...]
    """Mesh axes along which the participants of a group differ; () when they map to no axis."""
    axes_complete: bool
    """False if the groups cover only part of an axis."""
    link: str
    """The slowest link that a group crosses: `nvlink` or `infiniband`; "" if no cluster is known."""
    fabric: str | None
    """The hardware of that link (`nvlink4_nvswitch`, `shared_memory`, ...); None if unknown."""
    dtype: str
    """Element type on the wire, as XLA spells it; `mixed` for a combined collective of several types."""
    group_size: int
    """Participants of a group; 0 if only the name of a kernel is known."""
    num_groups: int
    gpus_per_domain: int
    """Participants of one group that share an NVLink domain."""
    payload_bytes: int
    """Bytes of one instance on one GPU: of the operand or, for an all-gather, of the result."""
    source: str = ""
    """The op_name path of the model code that caused it."""
    replica_groups: str | None = None
    """`{0,1},{2,3}`, if no known mesh has axes for the groups."""
    grouped: bool = False
    """Whether NCCL runs it in the kernel of another collective that starts with it over the same GPUs."""
    slices: int = 0
    """Slices of a ragged all-to-all that each member sends to each member; 0 if unknown, or for other collectives."""
    room: float = 1.0
    """Size of the larger buffer of a ragged all-to-all divided by the size of the smaller one."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of a schedule."""

    name: str
    opcode: str
    """The opcode as XLA prints it; an asynchronous instruction has the opcode of what it starts."""
    kind: str
    """`kernel`, `collective` (blocks), `start` and `done` (asynchronous), `while`, `conditional`, `call`, `free` (no
    time)."""
    source: str = ""
    cost: Cost | None = None
    """Work on one GPU; None for control flow and communication."""
    collective: Collective | None = None
    starts: str | None = None
    """For `done`, the name of the start that it waits for."""
    bodies: tuple[str, ...] = ()
    """Computations that it runs: the body of a loop, the branches of a conditional."""
    trip_count: int | None = None
    """Iterations of a loop; None if XLA does not know."""


@dataclass(frozen=True)
class Schedule:
    """A compiled program as its instructions run: computations in schedule order."""

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    """Name -> instructions, of the entry and everything that it reaches through control flow."""
    entry: str
    """Name of the computation that runs."""
    fingerprint: str
    """A hash that is equal for equal programs."""
    notes: Mapping[str, list[str]] = field(default_factory=dict)
    """Kind of problem -> names of instructions that could not be read or priced fully, some with details in
    parentheses."""

    def known_runs(self) -> dict[str, int]:
        """Return how often one execution runs each instruction: once, or once per iteration of the loops it is in.

        Instructions in a branch, or in a loop of unknown length, are left out.
        """
        found: dict[str, int] = {}
        unknown: set[str] = set()

        def visit(computation: str, times: int | None) -> None:
            for i in self.computations[computation]:
                if times is None:
                    unknown.add(i.name)
                else:
                    found[i.name] = found.get(i.name, 0) + times
                each = {"while": i.trip_count, "call": 1}.get(i.kind)
                inner = None if times is None or each is None else times * each
                for body in i.bodies:
                    visit(body, inner)

        visit(self.entry, 1)
        return {name: count for name, count in found.items() if name not in unknown}

    def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yield (instruction, number of runs) for a computation (None: the entry) and the computations that it runs.

        It walks every branch of a conditional, and one iteration of a loop of unknown length.
        """
        for i in self.computations.get(name or self.entry, ()):
            yield i, times
            for body in i.bodies:
                yield from self.walk(body, times * (1 if i.trip_count is None else i.trip_count))


@dataclass(frozen=True)
class GroupShape:
    """The axes, link and sizes that all groups of one collective share."""

    axes: tuple[str, ...]
    axes_complete: bool
    link: str
    """`infiniband` if any group crosses NVLink domains."""
    group_size: int
    num_groups: int
    gpus_per_domain: int
    """Members of one group that share a domain (the fewest, where groups differ)."""


def read_groups(instruction: HloInstruction, num_partitions: int) -> np.ndarray:
    """Return the groups of a collective as partition ids, shape [num_groups, group_size]; [pairs, 2] for a permute.

    Args:
        num_partitions: devices of the program, which form one group if the instruction lists no groups.

    Raises:
        ProgramError: the groups have unequal sizes or too many partitions, or cannot be read.
    """
    said = tuple((number, tuple(instruction.fields.get(number, ()))) for number in _FORMS)
    with refusing_malformed(f"the groups of the collective {instruction.name}"):
        groups = _groups(said, num_partitions)
    if groups.size and not 0 <= groups.min() <= groups.max() < _MOST_PARTITIONS:
        raise ProgramError(f"the collective {instruction.name} has partitions {groups.min()} to {groups.max()}.")
    return groups


@functools.lru_cache(maxsize=64)  # A program has few different groups, and some list thousands of partitions.
def _groups(said: tuple, num_partitions: int) -> np.ndarray:
    fields = dict(said)
    for listed in messages(fields, _MESH_LIST):
        return _mesh_groups(listed)
    lists = messages(fields, _DEVICE_LIST)
    for listed in (*messages(fields, _IOTA_LIST), *(m for each in lists for m in messages(each, 2))):
        return _iota(listed)
    explicit = (*messages(fields, _EXPLICIT), *(m for each in lists for m in messages(each, 1)))
    # A `SourceTarget` message omits a zero, like other messages.
    groups = [[integer(m, 1), integer(m, 2)] for m in messages(fields, _PAIRS)] or [ints(m, 1) for m in explicit]
    if len({len(g) for g in groups}) > 1:
        raise ValueError(f"they are of unequal size: {sorted({len(g) for g in groups})}")
    return np.array(groups) if groups and groups[0] else np.arange(num_partitions)[None]


def group_shape(groups: np.ndarray, placement: Placement, *, permute: bool = False) -> GroupShape:
    """Return the axes, link and sizes of groups of partition ids on a placed mesh.

    Args:
        groups: [num_groups, group_size] partition ids, or [pairs, 2] for a permute.
        placement: the mesh, and the NVLink domain of each partition.
        permute: whether the groups are (source, target) pairs; the group then spans the axes along which they move.

    Raises:
        ProgramError: the mesh does not have one of the partitions.
    """
    if groups.max() >= placement.num_partitions:
        raise ProgramError(
            f"a collective has partition {groups.max()}, but the mesh has {placement.num_partitions} of them."
        )
    coords = np.stack(np.unravel_index(groups, placement.shape))  # [axis, group, member]
    differ = (coords != coords[:, :, :1]).any(axis=(1, 2))
    axes = tuple(name for name, d in zip(placement.axis_names, differ) if d)
    span = math.prod(size for size, d in zip(placement.shape, differ) if d)
    domain_of = np.sort(placement.domains[groups], axis=1)
    crossing = np.count_nonzero(np.diff(domain_of, axis=1), axis=1)  # Number of domains of each group, minus one.
    link = "infiniband" if crossing.any() else "nvlink"
    size = span if permute else groups.shape[1]
    count = placement.num_partitions // span if permute else groups.shape[0]
    domains = domains_spanned(placement, axes) if permute else int(crossing.max()) + 1
    return GroupShape(axes, size == span, link, size, count, max(1, size // domains))


def domains_spanned(placement: Placement, axes: Collection[str]) -> int:
    """Return the number of NVLink domains that the mesh's first line along some axes spans."""
    table = placement.domains.reshape(placement.shape)
    return len(np.unique(table[tuple(slice(None) if name in axes else 0 for name in placement.axis_names)]))


def _iota(message: Fields) -> np.ndarray:
    """Return `[groups,size]<=[dims]T(order)`: ids counted through dims, transposed and split into groups."""
    shape = (integer(message, 1), integer(message, 2))
    dims, order = ints(message, 3), ints(message, 4)
    ids = _counted(dims).reshape(dims)
    return (ids.transpose(order) if order else ids).reshape(shape)


def _mesh_groups(listed: Fields) -> np.ndarray:
    """Return `mesh['x'=2,'y'=4] {'y'}`: groups along the selected axes; a sub-axis `'y':(1)2` selects part of one."""
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
    """Return (axis, size before the part, size of the part) of an `AxisRefProto`; a whole axis is one part."""
    axis = integer(reference, 1)
    for part in messages(reference, 2):
        return axis, integer(part, 1), integer(part, 2)
    return axis, 1, integer(axes[axis], 2)


def _device_ids(mesh: Fields, shape: Sequence[int]) -> np.ndarray:
    """Return the ids of a `MeshProto` in its order: listed, counted and transposed, or simply counted."""
    listed = ints(mesh, 2)
    if listed:
        return np.array(listed)
    for iota in messages(mesh, 3):
        return _counted(shape).reshape(ints(iota, 1)).transpose(ints(iota, 2)).reshape(-1)
    return _counted(shape)


def _counted(shape: Sequence[int]) -> np.ndarray:
    count = math.prod(shape)
    if count > _MOST_PARTITIONS:
        raise ValueError(f"{count} partitions are more than a program can have")
    return np.arange(count)
