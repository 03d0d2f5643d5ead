"""One step of one GPU as lanes of spans to draw: compute, exposed, each axis's communication, copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshkit.report.views.words import axes_text
from meshkit.timeline import DeviceStep, Timeline, exposed_spans

_MAX_SPANS = 1500  # per lane: what a browser still pans smoothly
_RESOLUTION = 3000  # of a step: gaps shorter than this part of it are closed where there are too many spans
MAX_DEVICES = 8


@dataclass(frozen=True)
class Lane:
    """Spans that are drawn on one line.

    Attributes:
        name: what the axis of the chart says.
        kind: `compute`, `communication`, `exposed` or `copies`.
        spans: [n, 2] seconds from the start of the step.
        labels: [n] what each span is.
        exposed: [k, 2] the parts of communication under which nothing computes.
    """

    name: str
    kind: str
    spans: np.ndarray
    labels: Sequence[str]
    exposed: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))


def step_to_draw(timeline: Timeline) -> list[DeviceStep]:
    """One step of up to eight devices: the one whose slowest device is the median, so neither a hiccup nor luck."""
    numbers = sorted({s.step for s in timeline.steps})
    longest = {n: max(s.window[1] - s.window[0] for s in timeline.steps if s.step == n) for n in numbers}
    chosen = sorted(numbers, key=longest.__getitem__)[len(numbers) // 2]
    return sorted((s for s in timeline.steps if s.step == chosen), key=lambda s: s.device)[:MAX_DEVICES]


def lanes(timeline: Timeline, step: DeviceStep) -> list[Lane]:
    """The lanes of one device step, from top to bottom; lanes without spans are left out."""
    start = step.window[0]
    found = [_lane("compute", "compute", step.compute - start, step.compute_op, timeline.op_names, step)]
    exposed = exposed_spans(step)
    found.append(_lane("exposed", "exposed", exposed, None, (), step))
    names = [f"{c.name} ({c.collective} {c.dtype})" for c in timeline.collectives] + ["unmapped communication"]
    axes = [f"{axes_text(c.axes)} · {c.link}" for c in timeline.collectives] + [axes_text(())]
    present = list(dict.fromkeys(axes[i] for i in step.collective))
    for axis in sorted(present):
        mine = np.array([axes[i] == axis for i in step.collective], bool)
        spans = step.communication[mine] - start
        lane = _lane(axis, "communication", spans, step.collective[mine], names, step)
        found.append(replace(lane, exposed=_lane(axis, "exposed", common(spans, exposed), None, (), step).spans))
    found.append(_lane("copies", "copies", step.copies - start, None, (), step))
    return [lane for lane in found if len(lane.spans)]


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n, 2] where spans of a and spans of b both run; b is sorted and does not overlap itself.

    Spans of a may overlap each other: they are joined first.
    """
    if not len(a) or not len(b):
        return np.zeros((0, 2))
    a = a[np.argsort(a[:, 0], kind="stable")]
    ended = np.maximum.accumulate(a[:, 1])
    first = np.flatnonzero(np.r_[True, a[1:, 0] > ended[:-1]])
    joined = np.stack([a[first, 0], np.r_[ended[first[1:] - 1], ended[-1]]], axis=1)
    # every piece of the intersection starts where a span of one starts inside a span of the other
    starts = np.unique(np.r_[joined[:, 0], b[:, 0]])
    ends = np.minimum(*(_end_of_span_at(spans, starts) for spans in (joined, b)))
    return np.stack([starts, ends], axis=1)[ends > starts]


def _end_of_span_at(spans: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The end of the span that covers each time (disjoint, sorted); minus infinity where none does."""
    at = np.searchsorted(spans[:, 0], times, "right") - 1
    ends = np.where(at >= 0, spans[np.maximum(at, 0), 1], -np.inf)
    return np.where(ends > times, ends, -np.inf)


def _lane(
    name: str, kind: str, spans: np.ndarray, index: np.ndarray | None, names: Sequence[str], step: DeviceStep
) -> Lane:
    """Spans in time order, joined to their neighbours where there are too many to draw."""
    order = np.argsort(spans[:, 0], kind="stable")
    spans = spans[order]
    labels = [name] * len(spans) if index is None or not names else [names[int(i)] for i in index[order]]
    if len(spans) <= _MAX_SPANS:
        return Lane(name, kind, spans, labels)
    shortest = (step.window[1] - step.window[0]) / _RESOLUTION
    ended = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.r_[True, spans[1:, 0] - ended[:-1] > shortest])
    joined = np.stack([spans[first, 0], np.r_[ended[first[1:] - 1], ended[-1]]], axis=1)
    counts = np.diff(np.r_[first, len(spans)])
    texts = [labels[i] if n == 1 else f"{labels[i]} and {n - 1} more" for i, n in zip(first, counts)]
    return Lane(name, kind, joined, texts)
