"""Errors of predictions by family, beside a trivial predictor; trends; memory. Ninth in the flow of the replay."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row
from meshkit.config import catalog

STILL = 0.01  # a measured change of tokens/s per GPU below this is noise


def groups(found: Iterable[Prediction], rows: Mapping[str, Row]) -> dict[tuple[str, ...], list[Prediction]]:
    """Correlated rows together: of one page, model and precision."""
    out: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for p in found:
        if p.error is not None:
            out[(p.family, rows[p.id].source, rows[p.id].say("model"), p.precision)].append(p)
    return dict(out)


def median_error(
    grouped: Mapping[tuple[str, ...], Sequence[Prediction]], error: Callable[[Prediction], float | None]
) -> float | None:
    """Median over groups of each group's median |error|."""
    medians = []
    for members in grouped.values():
        errors = [abs(e) for p in members if (e := error(p)) is not None]
        if errors:
            medians.append(statistics.median(errors))
    return statistics.median(medians) if medians else None


def trivial_predictor(found: Sequence[Prediction], rows: Mapping[str, Row]) -> dict[str, float]:
    """id -> error of a constant MFU, the median of the groups of all other frameworks."""
    utilization = {p.id: p.model_flops / (p.measured_s * p.num_gpus * peak) for p in found
                   if p.error is not None and p.model_flops and p.measured_s and p.num_gpus
                   and (peak := peak_flops(p))}  # fmt: skip
    grouped = groups(found, rows)
    errors: dict[str, float] = {}
    for family in {_framework(p.family) for p in found if p.error is not None}:
        others = [
            statistics.median(utilization[p.id] for p in members if p.id in utilization)
            for key, members in grouped.items()
            if _framework(key[0]) != family and any(p.id in utilization for p in members)
        ]
        if not others:
            continue
        constant = statistics.median(others)
        own = (p for p in found if _framework(p.family) == family and p.id in utilization)
        errors |= {p.id: utilization[p.id] / constant - 1 for p in own}
    return errors


def _framework(family: str) -> str:
    """`Megatron-Core, experts` -> `Megatron-Core`: the trivial predictor has seen neither."""
    return family.partition(",")[0]


def peak_flops(p: Prediction) -> float | None:
    """Dense peak of the row's precision on its GPU."""
    if p.gpu not in catalog.gpu_keys():
        return None
    peaks = catalog.gpu(p.gpu).peak_flops
    return peaks.get(p.precision, peaks.get("bf16", peaks.get("fp16")))


@dataclass(frozen=True)
class Trend:
    """Tokens/s per GPU from the smallest to the largest number of GPUs of one setting, as a change.

    Attributes:
        setting: what stays the same.
        gpus: smallest and largest number.
        measured, predicted: change of tokens/s per GPU between them.
        scatter: the largest measured change from one number of GPUs to the next that goes the other way.
    """

    setting: str
    gpus: tuple[int, int]
    measured: float
    predicted: float
    scatter: float = 0.0

    @property
    def right(self) -> bool | None:
        """Whether the sign is right; None where the measured change is noise and the predicted one small as well.

        Noise is what is below STILL, or below what the setting's own runs in between go the other way.
        """
        if abs(self.measured) < max(STILL, self.scatter):
            return None if abs(self.predicted) < 5 * STILL else False
        return (self.measured > 0) == (self.predicted > 0)


_SAME = ("model", "seq_len", "gpu", "tp", "pp", "cp", "micro_batch", "recompute", "precision")


def trends(found: Iterable[Prediction], rows: Mapping[str, Row]) -> list[Trend]:
    """The trend of every setting that was run on several numbers of GPUs."""
    settings: dict[tuple[str, ...], dict[int, Prediction]] = defaultdict(dict)
    for p in found:
        if p.error is not None and p.num_gpus and _tokens(rows[p.id]):
            settings[_setting(p, rows[p.id])][p.num_gpus] = p
    out = []
    for setting, members in settings.items():
        if len(members) > 1:
            (small, first), (large, last) = min(members.items()), max(members.items())
            pair = (first, last)
            measured = _change([_rate(p, p.measured_s, rows[p.id]) for p in pair])
            predicted = _change([_rate(p, p.predicted_s, rows[p.id]) for p in pair])
            scatter = _scatter([_rate(p, p.measured_s, rows[p.id]) for _, p in sorted(members.items())], measured)
            out.append(Trend(", ".join(filter(None, setting)), (small, large), measured, predicted, scatter))
    return sorted(out, key=lambda t: t.setting)


def _scatter(rates: Sequence[float], whole: float) -> float:
    changes = (_change(pair) for pair in pairwise(rates))
    return max((abs(change) for change in changes if change * whole < 0), default=0.0)


def _setting(p: Prediction, row: Row) -> tuple[str, ...]:
    """What two runs must have alike to differ in their size only: also the micro-batches that share a reduction."""
    said = re.findall(r"zero1=-?\d+|\beager\b|\bcompile\b", row.notes)[:1]
    replicas = (p.num_gpus or 1) / ((row.count("tp") or 1) * (row.count("pp") or 1) * (row.count("cp") or 1))
    each = (row.numbers.get("global_batch_seqs", 0)) / replicas
    names = [f"{name} {row.say(name)}" for name in ("seq_len", "tp", "pp", "cp", "micro_batch") if row.say(name)]
    words = [row.say(name) for name in ("model", "gpu", "recompute", "precision")]
    return (p.family, row.source.split()[-1], *words, *names, f"batch {each:g} a replica", *said)


def _tokens(row: Row) -> float:
    return row.numbers.get("global_batch_seqs", 0) * row.numbers.get("seq_len", 0)


def _rate(p: Prediction, seconds: float | None, row: Row) -> float:
    assert seconds
    assert p.num_gpus
    return _tokens(row) / (seconds * p.num_gpus)


def _change(pair: Sequence[float]) -> float:
    return pair[1] / pair[0] - 1
