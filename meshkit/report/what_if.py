"""What if: a measured step again, with something in it mended.

One execution is replayed on all of its devices. Each goes through its own work and its collectives in order; a group
leaves a collective together, once its last member has come and the data is moved, so that no clocks are needed: who
came last is who did not wait. Of what a device saves, only what was exposed makes its step shorter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from meshkit.timeline import DeviceStep, exposed_spans
from meshkit.trace.operations import TracedProgram
from meshkit.trace.reader import Trace

_MOST_SPANS = 50_000  # of the step: a replay takes some microseconds for each


@dataclass(frozen=True)
class Mended:
    """What is different; collectives are indices into those of the timeline."""

    hidden: Collection[int] = ()  # run under compute
    transfer: Mapping[int, float] = field(default_factory=dict)  # seconds to move their data over those measured
    evenly: bool = False  # no device has more to do by itself than the median device


@dataclass(frozen=True)
class _Member:
    device: int
    before_s: float  # of its own work, until it came
    wait_s: float
    transfer_s: float
    exposed_s: float  # in which nothing else of its device ran


class Replay:
    """The step of a trace that takes the median time, to be replayed."""

    def __init__(self, trace: Trace, program: TracedProgram):
        whole: dict[int, list[DeviceStep]] = {}
        for step in trace.timeline.steps:
            whole.setdefault(step.step, []).append(step)
        most = max(map(len, whole.values()), default=0)
        times = sorted((_mean_s(steps), number) for number, steps in whole.items() if len(steps) == most)
        self._steps = whole[times[(len(times) - 1) // 2][1]] if times else []
        if sum(len(s.communication) for s in self._steps) > _MOST_SPANS:
            self._steps = []
        self._own_s: dict[int, float] = {}
        found: dict[tuple[int, int, int], list[_Member]] = {}
        starts: dict[tuple[int, int, int], float] = {}
        names = [c.name for c in trace.timeline.collectives]
        for step in self._steps:
            for key, start, member in self._members(step):
                name = names[key[0]] if key[0] >= 0 else ""
                found.setdefault((*key, _group_of(program, name, step.device)), []).append(member)
                starts.setdefault((*key, _group_of(program, name, step.device)), start)
        self._instances = [(key[0], found[key]) for key in sorted(found, key=starts.__getitem__)]

    def _members(self, step: DeviceStep):
        """(collective, its how-manieth time), its start, and the device's part in it, in time."""
        exposed = exposed_spans(step)
        edges = np.r_[0.0, exposed.ravel()]
        seconds = np.r_[0.0, np.stack([np.zeros(len(exposed)), np.diff(exposed, axis=1).ravel()], 1).ravel()].cumsum()
        order = np.argsort(step.communication[:, 0], kind="stable")
        start, end = step.communication[order].T
        self._own_s[step.device] = step.window[1] - step.window[0] - float(seconds[-1])
        moved = end - start if step.transfer_s is None else np.asarray(step.transfer_s)[order]
        moved = np.where(np.isnan(moved), end - start, np.minimum(moved, end - start))
        reach = np.r_[0.0, np.maximum.accumulate(end)[:-1]] if len(end) else end
        alone = np.maximum(start, reach), np.minimum(end, np.r_[start[1:], np.inf]) if len(end) else end
        sole = np.maximum(0.0, np.interp(alone[1], edges, seconds) - np.interp(alone[0], edges, seconds))
        before = start - np.interp(start, edges, seconds)
        times: dict[int, int] = {}
        for i, c in enumerate(step.collective[order].tolist()):
            times[c] = times.get(c, -1) + 1
            member = _Member(step.device, float(before[i]), float(end[i] - start[i] - moved[i]), float(moved[i]),
                             float(sole[i]))  # fmt: skip
            yield (c, times[c]), float(start[i]), member

    def ratio(self, mended: Mended) -> float | None:
        """The mended step over the measured one, as means over devices; None for a step too large to replay."""
        if not self._steps:
            return None
        own = sorted(self._own_s.values())
        usual = own[(len(own) - 1) // 2]
        less = {d: max(0.0, 1 - usual / s) if mended.evenly and s else 0.0 for d, s in self._own_s.items()}
        saved = dict.fromkeys(self._own_s, 0.0)
        for collective, members in self._instances:
            if collective in mended.hidden:
                for m in members:
                    saved[m.device] += m.exposed_s
                continue
            share = mended.transfer.get(collective, 1.0)
            early = {m.device: saved[m.device] + less[m.device] * m.before_s for m in members}
            alone = len(members) == 1  # or its peers were not seen
            ready = max((0.0 if alone else -m.wait_s) - early[m.device] for m in members)  # 0 is when the last came
            for m in members:
                gain = m.transfer_s * (1 - share) - early[m.device] - ready
                saved[m.device] += min(gain, m.exposed_s) if gain > 0 or m.exposed_s else 0.0
        measured = sum(s.window[1] - s.window[0] for s in self._steps)
        return 1 - sum(saved[d] + less[d] * self._own_s[d] for d in saved) / measured if measured else None


def _mean_s(steps: list[DeviceStep]) -> float:
    return sum(s.window[1] - s.window[0] for s in steps) / len(steps)


def _group_of(program: TracedProgram, name: str, device: int) -> int:
    """Which group of a collective a device is in; its own where that is unknown, or for a permute, which has pairs."""
    groups = program.groups.get(name)
    if groups is None or program.collectives[name].collective == "collective-permute":
        return -1 - device
    rows = np.flatnonzero((groups == device).any(axis=1))
    return int(rows[0]) if len(rows) else -1 - device
