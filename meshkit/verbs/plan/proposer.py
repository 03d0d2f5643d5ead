"""propose: which link each mesh axis belongs on, by what it moves.

The sizes of the axes stay as they are, so the program stays the same; only their factors on NVLink and InfiniBand
change, and with them which GPUs are neighbours. Every assignment that the cluster allows is priced with the network
model, from the rows of a report.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.toml_text import inline
from meshkit.errors import ConfigError
from meshkit.predict.network import collective_time_s
from meshkit.report.schema import Report
from meshkit.units import format_bytes, format_seconds

# A gain below this share of the communication is within what the network model gets wrong.
_WORTH = 0.01

Shape = tuple[int, int]  # GPUs of a group inside a domain, domains it spans


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes in a step, on one GPU."""

    axes: tuple[str, ...]  # mesh axes that a group covers whole
    collective: str  # HLO opcode
    payload_bytes: float  # of one of them: the operand; of an all-gather, the result
    count: float = 1  # how many a step
    shape: Shape | None = None
    """Of the group, where it does not follow from whole axes: priced the same wherever the axes are."""


@dataclass(frozen=True)
class Proposal:
    """The best assignment of a mesh's axes to links."""

    axes: tuple[MeshAxis, ...]  # the mesh's, with the proposed factors, in the same order
    seconds_now: float  # communication of a step as the mesh is, if nothing of it overlaps
    seconds_proposed: float  # the same with `axes`
    reason: str  # one sentence
    changed: tuple[str, ...] = ()  # axes whose factors are others than now; empty where the mesh is best as it is

    @property
    def mesh(self) -> MeshSpec:
        """The proposed mesh."""
        return MeshSpec(self.axes)

    @property
    def settings(self) -> tuple[str, ...]:
        """What to give to `--set` to have it: `mesh.tensor=8`, one per changed axis."""
        return tuple(f"mesh.{axis.name}={inline(axis.to_plain())}" for axis in self.axes if axis.name in self.changed)


def propose(source: Report | Sequence[Traffic], mesh: MeshSpec, cluster: Cluster) -> Proposal:
    """The fastest assignment of the axes' factors to NVLink and InfiniBand, and why.

    Args:
        source: a report of that mesh, or what it moves.
        mesh: with its axes' sizes, which stay.
        cluster: its links price the collectives.

    Returns:
        The present assignment unless another is more than 1 % faster; of equal ones that with the fewest changes.

    Raises:
        ConfigError: the mesh does not fit the cluster, or is not the one that the report or the traffic is about.
    """
    now = mesh.resolve(cluster)
    if isinstance(source, Report):
        _check_mesh(source, now)
    rows = traffic_of(source) if isinstance(source, Report) else tuple(source)
    _check_axes(rows, now)
    prices = CollectivePrices(cluster)
    spent = {
        candidate: [_row_seconds(row, candidate, prices) for row in rows] for candidate in assignments(now, cluster)
    }
    best = min(spent, key=lambda candidate: (sum(spent[candidate]), len(_changes(now, candidate))))
    seconds_now, seconds_best = sum(spent[now]), sum(spent[best])
    if seconds_best >= seconds_now * (1 - _WORTH):
        return Proposal(now.axes, seconds_now, seconds_now, _why_not(len(spent), seconds_now, cluster))
    reason = _why(rows, spent[now], spent[best], now, best)
    return Proposal(best.axes, seconds_now, seconds_best, reason, _changes(now, best))


def traffic_of(report: Report) -> tuple[Traffic, ...]:
    """The communication rows of a report; what covers no whole axis keeps the shape of its groups."""
    rows = []
    for row in report.communication:
        if not row.collective or not row.group_size or not row.count:
            continue  # communication that maps to no instruction: nothing is known of its shape
        inside = row.gpus_per_domain or row.group_size
        whole = bool(row.axes) and row.axes_complete is not False
        shape = None if whole else (inside, max(1, row.group_size // inside))
        rows.append(Traffic(row.axes, row.collective, (row.payload_bytes or 0) / row.count, row.count, shape))
    return tuple(rows)


def assignments(mesh: MeshSpec, cluster: Cluster) -> Iterator[MeshSpec]:
    """Every way to factor the axes, at their sizes, into the cluster's domains and the GPUs used of one."""

    def factor(sizes: tuple[int, ...], inside: int, across: int) -> Iterator[tuple[int, ...]]:
        if not sizes:
            if inside == across == 1:
                yield ()
            return
        for nvlink in _divisors(math.gcd(sizes[0], inside)):
            infiniband = sizes[0] // nvlink
            if across % infiniband == 0:
                for rest in factor(sizes[1:], inside // nvlink, across // infiniband):
                    yield nvlink, *rest

    for factors in factor(mesh.shape, cluster.gpus_used_per_domain, cluster.num_nvlink_domains):
        axes = zip(mesh.axes, factors)
        yield MeshSpec(tuple(MeshAxis(axis.name, nvlink, axis.size // nvlink) for axis, nvlink in axes))


def _divisors(n: int) -> Iterator[int]:
    return (d for d in range(1, n + 1) if n % d == 0)


def _check_mesh(report: Report, mesh: MeshSpec) -> None:
    """Stops where a report is of another mesh; one without rows of its mesh is taken as it is."""
    sizes = {axis.axis: axis.size for axis in report.mesh}
    expected = mesh.sizes
    if sizes and sizes != expected:
        raise ConfigError(f"the report is of a mesh {sizes}, not of {expected}.", hint="a plan of the same experiment")


def _check_axes(rows: Sequence[Traffic], mesh: MeshSpec) -> None:
    """Stops at traffic over an axis that the mesh has not."""
    for name in {name for row in rows if row.shape is None for name in row.axes} - set(mesh.axis_names):
        raise ConfigError(
            f"there is traffic over axis '{name}', which the mesh has not.", hint="the mesh of the report"
        )


class CollectivePrices:
    """Seconds of collectives by the network model, each asked for once."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._known: dict[tuple[str, float, Shape], float] = {}

    def seconds(self, collective: str, payload_bytes: float, shape: Shape) -> float:
        """Seconds of one collective in groups of that shape."""
        key = collective, payload_bytes, shape
        if key not in self._known:
            self._known[key] = collective_time_s(
                collective,
                payload_bytes=payload_bytes,
                gpus_per_domain=shape[0],
                domains=shape[1],
                cluster=self._cluster,
            )
        return self._known[key]


def group_shape(axes: Sequence[str], mesh: MeshSpec) -> Shape:
    """The shape of groups that cover mesh axes whole."""
    found = [axis for axis in mesh.axes if axis.name in axes]
    inside = math.prod(axis.number("nvlink") for axis in found)
    return inside, math.prod(axis.number("infiniband") for axis in found)


def _row_seconds(row: Traffic, mesh: MeshSpec, prices: CollectivePrices) -> float:
    """Seconds of all collectives of a row, one after the other."""
    shape = row.shape or group_shape(row.axes, mesh)
    return row.count * prices.seconds(row.collective, row.payload_bytes, shape)


def _changes(now: MeshSpec, other: MeshSpec) -> tuple[str, ...]:
    """Names of the axes whose factors differ."""
    return tuple(old.name for old, new in zip(now.axes, other.axes) if old != new)


def _why_not(assignments: int, seconds: float, cluster: Cluster) -> str:
    """Why the mesh is best as it is, in one sentence."""
    if assignments == 1:
        domains = cluster.num_nvlink_domains
        where = f"{domains} NVLink domain{'s' if domains > 1 else ''} of {cluster.gpus_used_per_domain} GPUs"
        return f"no other assignment of axes of these sizes fits {where}."
    if seconds == 0:
        return "there is no communication to place."
    return (
        f"of the {assignments} assignments with these axis sizes none is faster than the present one "
        f"({format_seconds(seconds)} of communication a step, if none overlaps)."
    )


def _why(
    rows: Sequence[Traffic], spent_now: Sequence[float], spent_best: Sequence[float], now: MeshSpec, best: MeshSpec
) -> str:
    """One sentence about the axes that gain most."""
    gains: dict[tuple[str, ...], float] = {}
    for row, before, after in zip(rows, spent_now, spent_best):
        gains[row.axes] = gains.get(row.axes, 0.0) + before - after
    axes = max(gains, key=lambda key: gains[key])
    moved = sum(row.payload_bytes * row.count for row in rows if row.axes == axes)
    row = next(row for row in rows if row.axes == axes)
    before, after = group_shape(row.axes, now), group_shape(row.axes, best)
    names = " and ".join(f"'{name}'" for name in axes)
    subject = f"axis {names}" if len(axes) == 1 else f"axes {names} together"
    verb = "moves" if len(axes) == 1 else "move"
    changed = [axis for axis in best.axes if axis.name in _changes(now, best)]
    setting = ", ".join(f"{axis.name} = {inline(axis.to_plain())}" for axis in changed)
    total = f"{format_seconds(sum(spent_best))} instead of {format_seconds(sum(spent_now))}"
    return (
        f"{subject} {verb} {format_bytes(moved)} a step on each GPU and would {_where(before, after)}; "
        f"with {setting} communication takes {total} a step, if none overlaps."
    )


def _where(before: Shape, after: Shape) -> str:
    """How a group comes to lie, as words behind `would`."""
    if after[1] == 1 < before[1]:
        return f"stay inside an NVLink domain instead of crossing {before[1]}"
    if before[1] != after[1]:
        return f"cross {after[1]} NVLink domains instead of {before[1]}"
    return f"keep {after[0]} GPUs of a group in each NVLink domain"
