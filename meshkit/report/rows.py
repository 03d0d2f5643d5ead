"""Means over the device steps: rows of communication, and compute by kind of work.

Collectives of one row have axes, link, kind, dtype and group shape in common; kernels of one kind what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshkit.config.cluster import Cluster
from meshkit.hlo.instructions import OTHER_KERNELS, InstructionInfo, kind_of_kernel
from meshkit.hlo.schedule import Collective
from meshkit.predict.algorithms import wire_factor
from meshkit.report.schema import CommunicationPart, KernelClassPart, KernelPart, KernelsPart, OpPart
from meshkit.timeline import KernelTotals, Sweep, Timeline
from meshkit.units import format_percent

UNMAPPED = "unmapped"
_MAX_KERNELS = 25  # a kind's instructions that are kept by name; the rest are in its sums


def row_key(c: Collective) -> tuple:
    """What the collectives of one row have in common."""
    return (
        c.axes,
        c.axes_complete,
        c.link,
        c.fabric,
        c.collective,
        c.dtype,
        c.group_size,
        c.num_groups,
        c.gpus_per_domain,
        c.replica_groups,
    )


def group_rows(collectives: Sequence[Collective]) -> tuple[np.ndarray, list[list[int]]]:
    """The row of every collective, and the collectives of every row.

    Returns:
        [n + 1] row of each collective, the last for communication that maps to no instruction (a row of its own);
        and for each row its collectives.
    """
    rows: dict[tuple, list[int]] = {}
    for i, collective in enumerate(collectives):
        rows.setdefault(row_key(collective), []).append(i)
    groups = [*rows.values(), []]
    row_of = np.full(len(collectives) + 1, len(groups) - 1, np.intp)
    for row, members in enumerate(groups):
        row_of[members] = row
    return row_of, groups


def communication_rows(
    timeline: Timeline,
    sweeps: Sequence[Sweep],
    row_of: np.ndarray,
    groups: Sequence[Sequence[int]],
    instructions: Mapping[str, InstructionInfo] | None = None,
    cluster: Cluster | None = None,
) -> tuple[CommunicationPart, ...]:
    """Mean rows over the device steps, the most exposed first; collectives that never ran are left out.

    Args:
        timeline: what is summarized.
        sweeps: of its device steps.
        row_of, groups: from `group_rows`.
        instructions: name of a collective -> what is known of what caused it.
        cluster: whose links bound the bus bandwidth, where known.
    """
    if not sweeps:
        return ()
    mean = {
        name: np.mean([getattr(s, name) for s in sweeps], axis=0)
        for name in ("share_s", "exposed_share_s", "sole_exposed_s", "busy_s", "count")
    }
    for name in ("transfer_s", "exposed_wait_s"):
        known = [value for s in sweeps if (value := getattr(s, name)) is not None]
        mean[name] = np.mean(known, axis=0) if len(known) == len(sweeps) else np.full(len(row_of), np.nan)
    rows = [_row(timeline.collectives, members, mean, instructions or {}, cluster) for members in groups[:-1]]
    unmapped = len(timeline.collectives)
    if mean["count"][unmapped] > 0:
        rows.append(CommunicationPart(axes=(), **_seconds([unmapped], mean)))
    return tuple(sorted((r for r in rows if r.count), key=lambda r: (-(r.exposed_s or 0), -(r.time_s or 0), r.axes)))


def _row(
    collectives: Sequence[Collective],
    members: Sequence[int],
    mean: dict[str, np.ndarray],
    instructions: Mapping[str, InstructionInfo],
    cluster: Cluster | None,
) -> CommunicationPart:
    first = collectives[members[0]]
    payload = _whole(sum(float(mean["count"][i]) * collectives[i].payload_bytes for i in members))
    wire = payload * wire_factor(first.collective, first.group_size)
    across = wire * infiniband_share(first)
    seconds = _seconds(members, mean)
    linked, grouped = first.link or None, first.group_size or None
    moving_s = seconds["busy_s"] if seconds["transfer_s"] is None else seconds["transfer_s"]
    return CommunicationPart.of(
        first,
        link=linked,
        group_size=grouped,
        num_groups=grouped and first.num_groups,
        gpus_per_domain=linked and first.gpus_per_domain,
        dtype=first.dtype or None,
        payload_bytes=grouped and payload,
        wire_bytes=grouped and _whole(wire),
        wire_bytes_nvlink=linked and _whole(wire - across),
        wire_bytes_infiniband=linked and _whole(across),
        bus_bandwidth_bytes_per_s=wire / moving_s if wire and moving_s else None,
        bus_bandwidth_peak_bytes_per_s=peak_bus_bandwidth_bytes_per_s(first, cluster) if wire else None,
        ops=_ops(collectives, members, mean, instructions),
        **seconds,
    )


def _seconds(members: Sequence[int], mean: dict[str, np.ndarray]) -> dict:
    total = {name: float(values[list(members)].sum()) for name, values in mean.items()}
    transfer_s, waited_s = (None if np.isnan(total[name]) else total[name] for name in ("transfer_s", "exposed_wait_s"))
    return {
        "count": _whole(total["count"]),
        "time_s": total["share_s"],
        "overlapped_s": _difference(total["share_s"], total["exposed_share_s"]),
        "exposed_s": total["exposed_share_s"],
        "sole_exposed_s": total["sole_exposed_s"],
        "exposed_wait_s": None if transfer_s is None or waited_s is None else min(waited_s, total["exposed_share_s"]),
        "busy_s": total["busy_s"],
        "transfer_s": transfer_s,
        "wait_s": None if transfer_s is None else max(0.0, total["busy_s"] - transfer_s),
    }


def _difference(whole: float, part: float) -> float:
    """What is left, without the rounding of the two sums: 1e-18 s is no overlap."""
    rest = whole - part
    return rest if rest > 1e-9 * whole else 0.0


def _ops(
    collectives: Sequence[Collective],
    members: Sequence[int],
    mean: dict[str, np.ndarray],
    instructions: Mapping[str, InstructionInfo],
) -> tuple[OpPart, ...]:
    ops = []
    for i in (i for i in members if mean["count"][i] > 0):
        each, info = collectives[i], instructions.get(collectives[i].name)
        payload = _whole(mean["count"][i] * each.payload_bytes)
        whole = sum(info.causes.values()) if info else 0
        part = OpPart.of(
            each,
            source=each.source or None,
            line=info.line if info else None,
            count=_whole(mean["count"][i]),
            payload_bytes=payload,
            busy_s=float(mean["busy_s"][i]),
            exposed_s=float(mean["exposed_share_s"][i]),
            arrays=info.arrays if info else 1,
            causes={cause: payload * n / whole for cause, n in info.causes.items()} if info and whole else {},
        )
        ops.append(part)
    return tuple(sorted(ops, key=lambda op: (-(op.exposed_s or 0), -(op.busy_s or 0), op.name)))


def combined_text(op: OpPart, most: int = 3) -> str:
    """`24 arrays: 62 % models/llama.py:88 attention/dot_general, ...`; "" of a collective of one.

    An origin that all arrays have stands alone.
    """
    whole = sum(op.causes.values())
    if not whole or op.arrays < 2:
        return ""
    if len(op.causes) == 1:
        return next(iter(op.causes))
    listed = [f"{format_percent(size / whole)} {cause}" for cause, size in list(op.causes.items())[:most]]
    rest = len(op.causes) - len(listed)
    return f"{op.arrays} arrays: {', '.join(listed)}" + (f", {rest} other{'s' * (rest > 1)}" if rest else "")


def infiniband_share(c: Collective) -> float:
    """Share of the wire bytes that leave the NVLink domain.

    A ring with g GPUs per domain leaves it on one of every g hops: 1 / g. An all-to-all has no ring: of the n - 1 peers
    of a GPU, n - g are in other domains.
    """
    if c.link != "infiniband" or c.group_size < 2:
        return 0.0
    if c.collective.endswith("all-to-all"):
        return (c.group_size - c.gpus_per_domain) / (c.group_size - 1)
    return 1.0 / max(1, c.gpus_per_domain)


def peak_bus_bandwidth_bytes_per_s(c: Collective, cluster: Cluster | None) -> float | None:
    """The bus bandwidth at which the links that a collective crosses carry their peak rate; None where unknown.

    Of the wire bytes of a GPU a share crosses InfiniBand (see `infiniband_share`), so that link is full at its rate
    divided by the share. What stays inside a domain is bounded by NVLink.
    """
    if cluster is None or cluster.is_cpu or c.group_size < 2:
        return None
    inside = cluster.link("nvlink", gpus=c.gpus_per_domain).bytes_per_s if c.gpus_per_domain > 1 else None
    if c.link != "infiniband":
        return inside
    across = cluster.link("infiniband").bytes_per_s / infiniband_share(c)
    return across if inside is None else min(across, inside)


def kernels_part(
    op_names: Sequence[str],
    totals: KernelTotals,
    instructions: Mapping[str, InstructionInfo],
    *,
    steps_per_execution: int = 1,
) -> KernelsPart | None:
    """Compute by kind, as means over the device steps; None where nothing is known of the kernels.

    The seconds of a kind are shares, as those of communication rows are: an instant at which k operations run gives 1/k
    to each, so that they add up to the step's `compute_s`.

    Args:
        op_names: names of instructions, or of kernels that could not be joined to one.
        totals: what each took, as means over executions of the program.
        instructions: what they are; without any, kinds are told by names.
        steps_per_execution: training steps in each execution.
    """
    if not op_names:
        return None
    known = [instructions.get(name) for name in op_names]
    unknown = {OTHER_KERNELS: UNMAPPED} if instructions else {}
    by_name = {name: kind_of_kernel(name) for name, info in zip(op_names, known) if info is None}
    kind_of = [info.kind if info else unknown.get(by_name[n], by_name[n]) for n, info in zip(op_names, known)]
    kinds = list(dict.fromkeys(kind_of))
    kind_of_op = np.array([kinds.index(kind) for kind in kind_of], np.intp)
    time_s, busy_s, count = (
        np.pad(v, (0, len(known) - len(v))) / steps_per_execution for v in (totals.time_s, totals.busy_s, totals.count)
    )
    classes = [
        KernelClassPart(
            kind=kind,
            count=_whole(float(count[kind_of_op == k].sum())),
            time_s=float(time_s[kind_of_op == k].sum()),
            busy_s=float(busy_s[kind_of_op == k].sum()),
            ops=_kernel_ops(op_names, known, np.flatnonzero(kind_of_op == k), busy_s, count),
        )
        for k, kind in enumerate(kinds)
    ]
    return KernelsPart(classes=tuple(sorted((c for c in classes if c.count), key=lambda c: -(c.time_s or 0))))


def _kernel_ops(
    op_names: Sequence[str], known: Sequence[InstructionInfo | None], members: np.ndarray, busy_s, count
) -> tuple[KernelPart, ...]:
    """The instructions of one kind with the most busy seconds; what has the same name is one."""
    chosen: list[int] = members.tolist()
    first = {op_names[i]: i for i in reversed(chosen)}
    number = {name: n for n, name in enumerate(first)}
    index = [number[op_names[i]] for i in chosen]
    seconds, runs = (np.bincount(index, weights=values[members]).tolist() for values in (busy_s, count))
    most = sorted(((-seconds[n], name, runs[n]) for name, n in number.items() if runs[n]))[:_MAX_KERNELS]
    parts = []
    for busy, name, total in most:
        info = known[first[name]]
        source = (info.source or None) if info else None
        parts.append(KernelPart.of(info, name=name, source=source, count=_whole(total), busy_s=-busy))
    return tuple(parts)


def _whole(x: float) -> int | float:
    """An int where the value is one (a count, bytes), so that 3 prints as 3; a mean of unequal devices is a float."""
    nearest = round(float(x))
    return nearest if abs(x - nearest) <= 1e-9 * max(1.0, abs(x)) else float(x)
