"""How much of a trace could be used, and what a reader of its numbers must know.

Nothing that was lost goes by in silence: what the profiler dropped, kernels without a name, devices and processes
without a trace, collectives that ran more or less often than the program says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshkit.hlo.schedule import Collective
from meshkit.timeline import Sweep
from meshkit.trace.skew import Skew
from meshkit.units import format_percent, format_seconds

COMMAND_BUFFERS_FLAG = "--xla_gpu_enable_command_buffer="  # the empty value turns CUDA graphs off
MOST_UNMAPPED = 0.02  # share of communication above which numbers by axis are not believed


@dataclass(frozen=True)
class Note:
    """What a reader of the numbers must know; `seconds` is a mean per device step."""

    code: str
    message: str
    seconds: float | None = None


@dataclass
class Facts:
    """Sums over everything that was read; seconds are of the operations' own durations."""

    device_steps: int = 0  # device steps that were swept
    events: int = 0  # operations read
    dropped: int | None = None  # operations lost by the profiler; None where it does not say
    discarded: int = 0  # operations with impossible times
    graph_s: float = 0.0  # inside CUDA graphs without a name
    graphs: bool = False  # kernels ran inside CUDA graphs
    copies_s: float = 0.0
    own_copies_s: float = 0.0  # of it on the GPU itself, by instructions of the program
    fused_s: float = 0.0  # in kernels that compute and communicate at once
    compute_s: float = 0.0
    mapped_compute_s: float = 0.0  # in kernels that compute and whose instruction is known
    communication_s: float = 0.0
    own_s: float = 0.0  # of it not in other programs, which run between the executions of the one that is measured
    mapped_s: float = 0.0  # in communication whose instruction is known
    on_axes_s: float = 0.0  # in communication that also lies on mesh axes
    partial_steps: int = 0  # executions that were not seen on every device
    missing_devices: list[int] = field(default_factory=list)  # devices without an operation of the program
    odd_executions: dict[int, int] = field(default_factory=dict)
    """Device -> executions, where they are not those that were captured."""
    odd_counts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Collectives that ran more or less often than the program says: name -> (expected, seen)."""
    namesakes: int = 0  # programs in a trace that bear the name of the one that is measured, itself included
    cpu: bool = False  # the devices are CPUs
    hardware: dict[str, int | float | str] = field(default_factory=dict)  # what a trace says of its GPUs
    kernels: dict[int, float] = field(default_factory=dict)  # device -> operations in a step, as a mean
    step_s: float = 0.0  # the median device step
    damaged: dict[int, str] = field(default_factory=dict)  # process -> what is wrong with its trace
    messages: list[str] = field(default_factory=list)  # what the profiler says itself

    @property
    def mapped_share(self) -> float | None:
        """Share of the program's communication whose instruction is known; None without any."""
        return self.mapped_s / self.own_s if self.own_s else None

    @property
    def axis_mapped_share(self) -> float | None:
        """Share of the program's communication that lies on mesh axes; None without any."""
        return self.on_axes_s / self.own_s if self.own_s else None

    @property
    def kernels_mapped_share(self) -> float | None:
        """Share of the compute whose instruction is known; None without any."""
        return self.mapped_compute_s / self.compute_s if self.compute_s else None

    @property
    def believes_axes(self) -> bool:
        """Whether enough communication is mapped to say anything by axis."""
        share = self.mapped_share
        return not self.hidden and (share is None or 1 - share <= MOST_UNMAPPED)

    @property
    def hidden(self) -> list[str]:
        """Collectives that the program runs, and that were not seen where CUDA graphs hide what runs in them."""
        return [name for name, (_, seen) in self.odd_counts.items() if not seen] if self.graph_s else []

    def counts(self, expected: Mapping[str, int], collectives: Sequence[Collective], sweeps: Sequence[Sweep]) -> None:
        """Compares how often collectives ran with what the program says."""
        if not sweeps or not expected:
            return
        seen = np.stack([s.count[:-1] for s in sweeps])
        for i, collective in enumerate(collectives):
            wanted = expected.get(collective.name)
            if wanted is not None and (seen[:, i] != wanted).any():
                self.odd_counts[collective.name] = (wanted, float(seen[:, i].mean()))


def notes_of(facts: Facts, skew: Skew) -> Iterator[Note]:
    """Everything in the facts that is not as it should be."""
    each = max(1, facts.device_steps)
    if facts.graph_s:
        hidden = ""
        if facts.hidden:
            hidden = (
                f" {len(facts.hidden)} collectives of the program were not seen, and what they take counts as compute."
            )
        yield Note(
            "command_buffers",
            "Kernels ran inside CUDA graphs, where the trace does not say which instruction they belong to; capture "
            f"with XLA_FLAGS={COMMAND_BUFFERS_FLAG} to see them by axis (which changes the step time a little)."
            f"{hidden}",
            facts.graph_s / each,
        )
    share = facts.kernels_mapped_share
    if share is not None and 1 - share > MOST_UNMAPPED:
        message = f"{format_percent(1 - share)} of the compute belong to no instruction of the program."
        yield Note("unmapped_kernels", message, (facts.compute_s - facts.mapped_compute_s) / each)
    if facts.fused_s:
        message = "Kernels that compute and communicate at once count as both, so their communication as overlapped."
        yield Note("fused_kernels", message, facts.fused_s / each)
    yield from _lost(facts)
    yield from _executions(facts)
    yield from _shifted(facts, skew)
    clocks, wait_s = skew.clocks, skew.median_wait_s
    if clocks is not None and clocks.residual_s is not None and skew.method != "clocked" and wait_s is not None:
        message = (
            f"The clocks of {clocks.count} processes agree to {format_seconds(clocks.residual_s)} only, against a "
            f"median wait of {format_seconds(wait_s)}: waiting is told by the shortest instance, not by start times."
        )
        yield Note("clocks", message)


def _shifted(facts: Facts, skew: Skew) -> Iterator[Note]:
    """Processes whose clocks differ by whole steps: clocks of machines agree far better, so it is their steps."""
    clocks = skew.clocks
    if clocks is None or not clocks.from_epoch or not facts.step_s:
        return
    usual = np.sort(clocks.offset_s)[(clocks.count - 1) // 2]  # of a process, so not between two of them
    steps = (clocks.offset_s - usual) / facts.step_s
    shifted = {int(p): round(k) for p, k in zip(clocks.process, steps.tolist()) if round(k) and abs(k - round(k)) < 0.1}
    if shifted:
        process, by = next(iter(shifted.items()))
        yield Note(
            "shifted_steps",
            f"The traces of processes {some(shifted)} are shifted against the others: what is counted as one step "
            f"began {format_seconds(abs(by) * facts.step_s)} {'later' if by > 0 else 'earlier'} in process {process}, "
            f"{abs(by)} x the step. Waiting and stragglers are of different steps; capture the same steps everywhere.",
        )


def _lost(facts: Facts) -> Iterator[Note]:
    """What is missing from the trace, or damaged."""
    if facts.dropped:
        message = f"The profiler dropped {facts.dropped} events: seconds are missing from these numbers."
        yield Note("dropped_events", message)
    usual = float(np.median(list(facts.kernels.values()))) if facts.kernels else 0.0
    if fewer := {d: n for d, n in facts.kernels.items() if n < (1 - MOST_UNMAPPED) * usual}:
        device = min(fewer, key=lambda d: fewer[d])
        yield Note(
            "fewer_kernels",
            f"Devices {some(fewer)} have fewer operations a step than the others (device {device}: "
            f"{fewer[device]:,.0f}, the median {usual:,.0f}): the profiler dropped some, "
            "or their part of the program is another.",
        )
    if facts.discarded:
        message = f"{facts.discarded} events have impossible times and were left out: the trace is damaged."
        yield Note("discarded_events", message)
    if facts.messages:
        yield Note("profiler_messages", f"The profiler says: {'; '.join(dict.fromkeys(facts.messages))[:500]}")
    if facts.damaged:
        first, reason = next(iter(facts.damaged.items()))
        yield Note(
            "damaged_traces",
            f"The traces of {len(facts.damaged)} processes cannot be used ({some(facts.damaged)}); process {first}: "
            f"{reason}",
        )


def _executions(facts: Facts) -> Iterator[Note]:
    """Which executions of the program are not those that were captured."""
    if facts.namesakes > 1:
        message = (
            f"{facts.namesakes} programs of the same name ran in the trace, and cannot be told apart in the steps."
        )
        yield Note("namesakes", message)
    if facts.missing_devices:
        message = f"Devices {some(facts.missing_devices)} have no operation of the program in their trace."
        yield Note("missing_devices", message)
    if facts.odd_executions:
        device, seen = next(iter(facts.odd_executions.items()))
        yield Note(
            "executions",
            f"{len(facts.odd_executions)} devices have another number of executions than were captured (device "
            f"{device}: {seen}): events are missing, or the program also ran outside of the steps.",
        )
    if facts.partial_steps:
        message = f"{facts.partial_steps} executions were not seen on every device and are left out."
        yield Note("partial_steps", message)
    if facts.odd_counts:
        name, (wanted, found) = next(iter(facts.odd_counts.items()))
        yield Note(
            "collective_counts",
            f"{len(facts.odd_counts)} collectives ran more or less often than the program says ({name}: {found:g} a "
            f"step in place of {wanted}): events are missing, or one collective is several kernels.",
        )


def some(values: Iterable[int]) -> str:
    """The first of some numbers, in words."""
    listed = sorted(values)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
