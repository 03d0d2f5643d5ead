"""Why a measured time lies outside of the bounds of its prediction, as facts of its row. Part of replay.py.

A note names the side, by how much, and how far the bounds are apart; then what is known of the row that may decide it:
what its source leaves unsaid, which numbers of the model were not measured, what its page's other rows suggest. What is
none of these is "not explained". REASONS is the only place where causes are named.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.published.experiments import Run
from meshkit.config import catalog
from meshkit.hlo.module import Schedule

if TYPE_CHECKING:
    from benchmarks.published.replay import Prediction

NARROW = 0.05  # bounds that are closer than this leave the answer to compute
_SHORT_S = 30e-6  # kernels as short as what a host takes to launch one from PyTorch, several times over
_MUCH_ATTENTION = 0.25
_SPREAD = 0.03


@dataclass(frozen=True)
class Case:
    """A row outside of its bounds.

    Attributes:
        slower: measured above the upper bound; else below the lower one.
        kernel_s: mean duration of a kernel of the compiled program.
        how: what the measured time is derived from.
    """

    run: Run
    measured_s: float
    predicted_s: float
    hidden_s: float
    blocking_s: float
    kernel_s: float
    how: str

    @property
    def slower(self) -> bool:
        """The side."""
        return self.measured_s > self.blocking_s

    @property
    def width(self) -> float:
        """How far the bounds are apart."""
        return self.blocking_s / self.hidden_s - 1


def outside_note(case: Case) -> str:
    """The sentence of a row whose measured time is outside of its bounds."""
    bound = case.blocking_s if case.slower else case.hidden_s
    gap = abs(case.measured_s / bound - 1)
    side = "slower than with every collective exposed" if case.slower else "faster than with every collective hidden"
    text = f"measured {gap:.1%} {side} ({bound:.4g} s)"
    if case.width < NARROW:
        error = case.predicted_s / case.measured_s - 1
        text += f"; the bounds are {case.width:.1%} apart, so that the error of compute decides ({error:+.1%})"
    found = [said for reason in REASONS if (said := reason(case))]
    return f"{text}: {', '.join(found) or 'not explained'}"


def _unsaid(case: Case) -> str:
    doubts = [text[1:].partition(" not stated")[0] for text in case.run.assumed if text.startswith("!")]
    return f"its source does not say: {', '.join(doubts)}" if doubts else ""


def _network(case: Case) -> str:
    guessed = any("network not stated" in text for text in case.run.assumed)
    return "its network is not stated" if guessed and case.width >= NARROW else ""


def _carried(case: Case) -> str:
    """Sustained matmul rates that the catalog assumes like another GPU's."""
    gpu = str(case.run.machines.table["gpu"])
    name = "achieved.matmul_fp8" if case.run.precision == "fp8" else "achieved.matmul"
    return f"the sustained matmul rate of {gpu} is assumed like that of another GPU" if name in _assumed(gpu) else ""


@functools.cache
def _assumed(gpu: str) -> frozenset[str]:
    text = Path(catalog.__file__).with_name("catalog.toml").read_text(encoding="utf-8")
    sources = tomllib.loads(text)["gpus"][gpu].get("sources", {})
    return frozenset(key for name, keys in sources.items() if name.startswith("carried") for key in keys)


def _variant(case: Case) -> str:
    variant = case.run.kernels.variant
    if variant == "h100_500w":
        return "what its GPUs sustain under a cap of 500 W is derived, not measured"
    return ""


def _attention(case: Case) -> str:
    """Much of the work at a rate that is recalled."""
    run, s = case.run, case.run.shape
    square = 12.0 * s.layers * s.heads * s.head_dim * run.length / 2
    share = square / (s.model_flops(1, run.length) - square)
    if share < _MUCH_ATTENTION or not run.kernels.attention:
        return ""
    return f"attention is {share:.0%} of its FLOP, at a rate that is recalled (kernels.toml)"


def _short_kernels(case: Case) -> str:
    if case.kernel_s > _SHORT_S or not case.slower:
        return ""
    return f"its kernels take {case.kernel_s * 1e6:.0f} us on average: a host that launches slower decides"


def _formula(case: Case) -> str:
    """TFLOP/s without the formula."""
    if "formula assumed" not in case.how:
        return ""
    run, s = case.run, case.run.shape
    square = 12.0 * s.layers * s.heads * s.head_dim * run.length
    causal = case.measured_s * (1 - square / 2 / s.model_flops(1, run.length))
    return f"its page gives TFLOP/s without the formula: with causal attention counted half it is {causal:.4g} s"


def _said(text: str, family: str, *, slower: bool | None = None, when: Callable[[Run], bool] = lambda run: True):
    """A reason that holds for rows of a family, on one side or both."""

    def reason(case: Case) -> str:
        fits = re.fullmatch(family, case.run.framework.name) and when(case.run)
        return text if fits and slower in (None, case.slower) else ""

    return reason


def _says(words: str) -> Callable[[Run], bool]:
    def when(run: Run) -> bool:
        text = f"{run.row.source} {run.row.say('precision')} {run.row.say('network')} {run.row.notes}"
        return re.search(words, text, re.IGNORECASE) is not None

    return when


REASONS: Sequence[Callable[[Case], str]] = (
    _unsaid,
    _network,
    _formula,
    _said("the XLA of its time hides less than today's (README.md)", "MaxText|Paxml", slower=True,
          when=_says(r"TCPX|Pax")),
    _variant,
    _carried,
    _said("how its ring attention overlaps is not stated", "torchtitan", when=lambda run: run.context > 1),
    _said("a scale for each row is predicted as one for each tensor", "torchtitan", slower=True, when=_says("rowwise")),
    _said("MXFP8's scales, one for 32 elements, are predicted as one for each tensor", "Megatron-Core",
          when=lambda run: not run.shape.experts and _says(r"MXFP8|FP8-MX")(run)),
    _said("which dispatcher moved its tokens, and what of it hid, is not stated", "Megatron-Core",
          when=lambda run: run.shape.experts > 0 and not run.recipe.why),
    _said("kernels of its experts are launched one by one, by a host whose time is not modelled", "Megatron-Core",
          slower=True, when=lambda run: bool(run.recipe.why) and run.recipe.graph != "all"),
    _said("its biases and clamped activation are counted as eager PyTorch runs them, the rest is not explained",
          "Megatron-Core", slower=True, when=lambda run: run.shape.biased),
    _said("not explained: what runs between its matmuls is counted from its source, its matmuls' own rate is not known",
          "InternEvo|vTrain|Megatron-LM", slower=True),
    _said("not explained: its matmuls are those measured on that machine", "SimuMax", slower=True),
    _said("which of its layers ran in fp8 is not stated", "MosaicML", slower=False,
          when=lambda run: run.precision == "fp8"),
    _attention,
    _short_kernels,
)  # fmt: skip


def mean_kernel_s(schedule: Schedule, compute_s: float) -> float:
    """Mean duration of a kernel of a program whose kernels take so long."""
    kernels = sum(times for i, times in schedule.walk() if i.cost is not None and i.collective is None and not i.bodies)
    return compute_s / max(1, kernels)


def with_repeats(found: Sequence[Prediction]) -> list[Prediction]:
    """Predictions whose note says so where runs that the replay cannot tell apart are published at other times."""
    alike: dict[tuple[object, ...], list[float]] = {}
    for p in found:
        if p.predicted_s and p.measured_s:
            alike.setdefault(_key(p), []).append(p.measured_s)
    return [_with_spread(p, alike.get(_key(p), [])) for p in found]


def _key(p: Prediction) -> tuple[object, ...]:
    return p.family, p.precision, p.gpu, p.num_gpus, f"{p.predicted_s or 0:.5g}"


def _with_spread(p: Prediction, times: Sequence[float]) -> Prediction:
    if p.inside is not False or not times or max(times) < (1 + _SPREAD) * min(times):
        return p
    text = f"runs that this replay cannot tell apart are published at {min(times):.4g} to {max(times):.4g} s"
    return replace(p, note=f"{p.note}; {text}")
