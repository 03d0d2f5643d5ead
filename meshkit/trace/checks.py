"""How much of a trace could be used, and what its reader has to be told.

Nothing that was lost goes by in silence: what the profiler dropped, kernels without a name, devices and processes
without a trace, collectives that ran more or less often than the program says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from meshkit.hlo.collective import Collective
from meshkit.timeline import Sweep
from meshkit.units import format_percent, format_seconds

if TYPE_CHECKING:
    from meshkit.trace.skew import Skew

COMMAND_BUFFERS_FLAG = "--xla_gpu_enable_command_buffer="  # the empty value turns CUDA graphs off
MOST_UNMAPPED = 0.02  # share of communication above which numbers by axis are not believed
_MOST_RESIDUAL = 0.2  # share of the median wait that aligned clocks may be wrong by
_LEAST_RESIDUAL = 0.01  # share of a collective's median duration by which they may be wrong where nobody waits


@dataclass(frozen=True)
class Note:
    """What a reader of the numbers must know; `seconds` is a mean per device step."""

    code: str
    message: str
    seconds: float | None = None


@dataclass
class Facts:
    """Sums over everything that was read; seconds are of the operations' own durations.

    Attributes:
        device_steps: device steps that were swept.
        events, dropped, discarded: operations read, lost by the profiler (None: unsaid), with impossible times.
        graph_s, lost_communication_s: inside CUDA graphs without a name, and the communication among it.
        fused_s: in kernels that compute and communicate at once.
        compute_s, mapped_compute_s: kernels that compute, and those whose instruction is known.
        communication_s, mapped_s, on_axes_s: communication; whose instruction is known; that also lies on mesh axes.
        partial_steps: executions that were not seen on every device.
        missing_devices: devices without an operation of the program.
        odd_executions: device -> executions, where they are not those that were captured.
        odd_counts: collectives that ran more or less often than the program says: name -> (expected, seen).
        namesakes: programs in a trace that bear the name of the one that is measured, itself included.
        damaged: process -> what is wrong with its trace.
        problems: what the profiler says itself.
    """

    device_steps: int = 0
    events: int = 0
    dropped: int | None = None
    discarded: int = 0
    graph_s: float = 0.0
    lost_communication_s: float = 0.0
    fused_s: float = 0.0
    compute_s: float = 0.0
    mapped_compute_s: float = 0.0
    communication_s: float = 0.0
    mapped_s: float = 0.0
    on_axes_s: float = 0.0
    partial_steps: int = 0
    missing_devices: list[int] = field(default_factory=list)
    odd_executions: dict[int, int] = field(default_factory=dict)
    odd_counts: dict[str, tuple[int, float]] = field(default_factory=dict)
    namesakes: int = 0
    damaged: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def mapped_share(self) -> float | None:
        """Share of the communication whose instruction is known; None without any."""
        return self.mapped_s / self.communication_s if self.communication_s else None

    @property
    def axis_mapped_share(self) -> float | None:
        """Share of the communication that lies on mesh axes; None without any."""
        return self.on_axes_s / self.communication_s if self.communication_s else None

    @property
    def kernels_mapped_share(self) -> float | None:
        """Share of the compute whose instruction is known; None without any."""
        return self.mapped_compute_s / self.compute_s if self.compute_s else None

    @property
    def believes_axes(self) -> bool:
        """Whether enough communication is mapped to say anything by axis."""
        share = self.mapped_share
        return share is None or 1 - share <= MOST_UNMAPPED

    def counts(self, expected: Mapping[str, int], collectives: Sequence[Collective], sweeps: Sequence[Sweep]) -> None:
        """Compares how often collectives ran with what the program says."""
        if not sweeps or not expected:
            return
        seen = np.stack([s.count[:-1] for s in sweeps])
        for i, collective in enumerate(collectives):
            wanted = expected.get(collective.name)
            if wanted is not None and (seen[:, i] != wanted).any():
                self.odd_counts[collective.name] = (wanted, float(seen[:, i].mean()))


def notes_of(facts: Facts, skew: Skew) -> list[Note]:
    """Everything in the facts that is not as it should be."""
    each = max(1, facts.device_steps)
    found = [
        _graphs(facts, each),
        _unmapped_kernels(facts, each),
        _fused(facts, each),
        *_lost(facts),
        *_devices(facts),
        _counts(facts),
        _clocks(skew),
    ]
    return [note for note in found if note is not None]


def _graphs(facts: Facts, each: int) -> Note | None:
    if not facts.graph_s:
        return None
    message = (
        "Kernels ran inside CUDA graphs, where the trace does not say which instruction they belong to; capture "
        f"with XLA_FLAGS={COMMAND_BUFFERS_FLAG} to see them by axis (which changes the step time a little)."
    )
    return Note("command_buffers", message, facts.graph_s / each)


def _unmapped_kernels(facts: Facts, each: int) -> Note | None:
    share = facts.kernels_mapped_share
    if share is None or 1 - share <= MOST_UNMAPPED:
        return None
    message = f"{format_percent(1 - share)} of the compute belong to no instruction of the program."
    return Note("unmapped_kernels", message, (facts.compute_s - facts.mapped_compute_s) / each)


def _fused(facts: Facts, each: int) -> Note | None:
    if not facts.fused_s:
        return None
    message = "Kernels that compute and communicate at once count as both, so their communication as overlapped."
    return Note("fused_kernels", message, facts.fused_s / each)


def _lost(facts: Facts) -> list[Note | None]:
    found: list[Note | None] = []
    if facts.dropped:
        message = f"The profiler dropped {facts.dropped} events: seconds are missing from these numbers."
        found.append(Note("dropped_events", message))
    if facts.discarded:
        message = f"{facts.discarded} events have impossible times and were left out: the trace is damaged."
        found.append(Note("discarded_events", message))
    if facts.problems:
        found.append(Note("profiler_messages", f"The profiler says: {'; '.join(dict.fromkeys(facts.problems))[:500]}"))
    if facts.damaged:
        first, reason = next(iter(facts.damaged.items()))
        message = (
            f"The traces of {len(facts.damaged)} processes cannot be used ({_some(facts.damaged)}); process {first}: "
            f"{reason}"
        )
        found.append(Note("damaged_traces", message))
    return found


def _devices(facts: Facts) -> list[Note | None]:
    found: list[Note | None] = []
    if facts.namesakes > 1:
        message = (
            f"{facts.namesakes} programs of the same name ran in the trace, and cannot be told apart in the steps."
        )
        found.append(Note("namesakes", message))
    if facts.missing_devices:
        message = f"Devices {_some(facts.missing_devices)} have no operation of the program in their trace."
        found.append(Note("missing_devices", message))
    if facts.odd_executions:
        device, seen = next(iter(facts.odd_executions.items()))
        message = (
            f"{len(facts.odd_executions)} devices have another number of executions than were captured (device "
            f"{device}: {seen}): events are missing, or the program also ran outside of the steps."
        )
        found.append(Note("executions", message))
    if facts.partial_steps:
        message = f"{facts.partial_steps} executions were not seen on every device and are left out."
        found.append(Note("partial_steps", message))
    return found


def _counts(facts: Facts) -> Note | None:
    if not facts.odd_counts:
        return None
    name, (wanted, seen) = next(iter(facts.odd_counts.items()))
    message = (
        f"{len(facts.odd_counts)} collectives ran more or less often than the program says ({name}: {seen:g} a step in "
        f"place of {wanted}): events are missing, or one collective is several kernels."
    )
    return Note("collective_counts", message)


def _clocks(skew: Skew) -> Note | None:
    clocks = skew.clocks
    if clocks is None or clocks.residual_s is None or skew.method == "clocked" or skew.median_wait_s is None:
        return None
    message = (
        f"The clocks of {clocks.count} processes agree to {format_seconds(clocks.residual_s)} only, against a median "
        f"wait of {format_seconds(skew.median_wait_s)}: waiting is told by the shortest instance, not by start times."
    )
    return Note("clocks", message)


def clocks_are_good(residual_s: float, median_wait_s: float, median_s: float) -> bool:
    """Whether aligned clocks can tell who came last, or are wrong by too little of a collective to matter."""
    return residual_s <= max(_MOST_RESIDUAL * median_wait_s, _LEAST_RESIDUAL * median_s)


def _some(values) -> str:
    listed = sorted(values)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
