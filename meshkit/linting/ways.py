"""Find ragged all-to-alls that XLA runs by a slow or faulty implementation (a "way"), and price the other ways.

The input is a compiled program. The output is findings with the codes `ragged_way` and `ragged_fails`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from meshkit.compile.program import CompiledProgram
from meshkit.config.cluster import Cluster
from meshkit.hlo.schedule import Collective
from meshkit.linting.placements import Finding
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.network import collective_price
from meshkit.predict.pricing import Pricer
from meshkit.predict.ways import RAGGED, Way, WayChoice, ways
from meshkit.units import format_seconds

WAY, FAILS = "ragged_way", "ragged_fails"
# A warning needs another way that is faster by this factor, since prices of ways rest on single measurements.
_WORTH = 1.5
_FULL = 32  # In no measurement was the one-shot kernel faster with more than 32 slices a peer.
_OTHERS = ("one-shot", "device kernel", "sends")
_MORE_SLICES = "32 slices or more to each GPU, into which each expert's rows are split (as expert_layer does)"
_HINTS = {
    "device kernel": "[xla] xla_gpu_experimental_ragged_all_to_all_use_device_kernel = true and "
    "xla_gpu_experimental_enable_nccl_symmetric_buffers = true",
    "sends": "[xla] xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback = true and "
    "xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer = false",
    "plain": "a capacity_factor near 1, so that experts exchange by plain all-to-alls",
    "one-shot": "[xla] without xla_gpu_experimental_ragged_all_to_all_use_device_kernel",
}
_APART = "in parts: XLA gathers rows over the network and exchanges them inside each NVLink domain"


@dataclass
class _Exchange:
    """All ragged all-to-alls of a step over the same axes."""

    whole: Collective
    """One of these collectives, as the program requests it."""
    sample: Collective
    """The same collective as XLA runs it: unchanged, or only its part inside a domain."""
    way: Way
    count: float = 0
    seconds: float = 0.0
    others: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, whole: Collective, times: float, pricer: Pricer, cluster: Cluster) -> None:
        """Add a collective, with its seconds by each way that its group allows, and as a plain all-to-all."""
        self.count += times
        group = (whole.gpus_per_domain, whole.group_size // whole.gpus_per_domain, None)
        self.others["plain"] += times * collective_price("all-to-all", whole.payload_bytes, group, cluster, {}).seconds
        inside = whole.group_size == whole.gpus_per_domain
        for name in _OTHERS if inside else _OTHERS[1:]:
            self.others[name] += times * pricer.ragged_price(whole, ways()[name]).seconds


def way_findings(
    compiled: CompiledProgram, cluster: Cluster, assumptions: Assumptions, steps_per_call: int = 1
) -> list[Finding]:
    """Return the time of each kind of ragged all-to-all in a step, and its known problems.

    Args:
        assumptions: assumptions of the plan, which include the choice of ways.
        steps_per_call: training steps of one run of the program.

    Raises:
        ConfigError: the calibration that the cluster names cannot be read.
    """
    pricer, choice = Pricer(cluster, assumptions), assumptions.ragged
    found: list[Finding] = []
    for exchange in _exchanges(compiled, cluster, pricer, choice, steps_per_call):
        found += _failures(exchange, cluster, choice)
        found.append(_way_finding(exchange, cluster))
    return found


def apart_axes(collectives: Iterator[Collective]) -> frozenset[tuple[str, ...]]:
    """Return the axes whose ragged all-to-alls XLA split, so that the remaining groups cover only a part of them."""
    return frozenset(c.axes for c in collectives if c.collective == RAGGED and c.axes and not c.axes_complete)


def is_part(c: Collective, apart: frozenset[tuple[str, ...]]) -> bool:
    """Return whether a collective moves rows between domains for a ragged all-to-all that XLA split."""
    # XLA gives such a collective no source line.
    return c.axes in apart and not c.axes_complete and not c.source and c.collective in ("all-gather", "all-to-all")


def _exchanges(
    compiled: CompiledProgram, cluster: Cluster, pricer: Pricer, choice: WayChoice, steps: int
) -> list[_Exchange]:
    """Return one exchange for each set of axes; first those that XLA left whole, then those that it split."""
    walked = [(i.collective, times / steps, i) for i, times in compiled.schedule.walk() if i.collective is not None]
    apart = apart_axes(c for c, _, _ in walked)
    ragged = [(c, times, i) for c, times, i in walked if c.collective == RAGGED]
    found: dict[tuple[str, ...], _Exchange] = {}
    for c, times, i in ragged:
        if c.axes and c.axes not in apart:
            row = found.setdefault(c.axes, _Exchange(c, c, choice.way(c, cluster)))
            row.seconds += times * pricer.collective_s(i)
            row.add(c, times, pricer, cluster)
    for axes in sorted(apart):
        sample = next(c for c, _, _ in ragged if c.axes == axes)
        row = found[axes] = _Exchange(_whole(sample, compiled), sample, choice.way(sample, cluster))
        for c, times, i in walked:
            # A copy does not name its axes: it is counted only if there is just one split exchange.
            copy = c.collective == RAGGED and not c.axes and len(apart) == 1
            if copy or is_part(c, apart & {axes}) or (c.collective == RAGGED and c.axes == axes):
                row.seconds += times * pricer.collective_s(i)
            if is_part(c, apart & {axes}) and c.dtype[0] not in "su":  # Offsets are integers, and do not count.
                rows = c.payload_bytes // c.group_size
                row.add(replace(row.whole, dtype=c.dtype, payload_bytes=rows), times, pricer, cluster)
    return list(found.values())


def _whole(part: Collective, compiled: CompiledProgram) -> Collective:
    """Return the ragged all-to-all over whole axes, from the part that XLA left inside each domain."""
    sizes = dict(zip(compiled.placement.axis_names, compiled.placement.shape, strict=True))
    n = math.prod(sizes[a] for a in part.axes)
    slices = max(1, part.slices * part.group_size // n)
    return replace(part, group_size=n, gpus_per_domain=part.group_size, slices=slices, axes_complete=True, room=1.0)


def _failures(exchange: _Exchange, cluster: Cluster, choice: WayChoice) -> Iterator[Finding]:
    c = exchange.sample
    for problem in choice.problems(exchange.way, c, cluster):
        yield Finding(
            code=FAILS,
            severity=problem.severity,
            path=f"collective/{RAGGED}/{'+'.join(c.axes)}",
            message=f"{_named(c)}, jaxlib {choice.jaxlib}: {problem.says} ({problem.source})",
            hint=problem.hint,
        )


def _way_finding(exchange: _Exchange, cluster: Cluster) -> Finding:
    """Return a note or a warning about the way of an exchange, with the times of the other ways."""
    c, way, seconds = exchange.whole, exchange.way, exchange.seconds
    apart = not exchange.sample.axes_complete
    others = {
        name: s for name, s in exchange.others.items() if apart or name == "plain" or ways()[name].price != way.price
    }
    best = min(others, key=lambda name: others[name], default=None)
    slow = best is not None and seconds > _WORTH * others[best]
    told = "; ".join(f"{_WORDS[name]} would take {format_seconds(value)}" for name, value in others.items())
    how = _APART if apart else f"{_WORDS[way.name]}, {c.slices} slice{'s' * (c.slices > 1)} to each"
    message = f"{_named(c)}: {how}, {format_seconds(seconds)} a step ({exchange.count:g} times, if each runs alone)"
    message += f"; {told}" if told else ""
    if way.price in _MEASURED and (cluster.gpu.compute_capability or (0, 0))[0] != _BLACKWELL:
        message += f"; the rates of XLA's own kernels were measured on GB200, not on {cluster.gpu.name}"
    hint = None
    if slow and best is not None:
        few = way.price == "one-shot" and not apart and c.slices < _FULL
        hint = _MORE_SLICES if few else _HINTS["plain" if seconds > _WORTH * others["plain"] else best]
    return Finding(
        code=WAY,
        severity="warning" if slow else "note",
        path=f"collective/{RAGGED}/{'+'.join(c.axes)}",
        message=message,
        hint=hint,
        seconds=seconds,
    )


_MEASURED, _BLACKWELL = ("one-shot", "device kernel"), 10  # predict/nccl.toml has the sources
_WORDS = {
    "copy": "a copy",
    "device kernel": "XLA's device kernel",
    "one-shot": "XLA's one-shot kernel",
    "one-shot by pointers": "XLA's one-shot kernel by pointers",
    "puts": "NCCL's puts",
    "sends": "NCCL's sends",
    "refused": "refused by XLA, and priced as NCCL's sends",
    "plain": "a plain all-to-all of as many rows",
}


def _named(c: Collective) -> str:
    domains = c.group_size // c.gpus_per_domain
    where = "of one NVLink domain" if domains == 1 else f"of {domains} domains"
    return f"ragged all-to-all over {' x '.join(c.axes)} ({c.group_size} GPUs {where})"
