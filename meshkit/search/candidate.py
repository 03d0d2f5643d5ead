"""Define a candidate: a changed experiment with its lower bound and, once it is planned, its outcome.

changes of any kind -> Candidate(settings) -> bound (closed forms) -> outcome (a plan) -> fastest_first
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshkit.planning.warnings import HOST_MEMORY_EXCEEDED
from meshkit.predict.interval import StepInterval
from meshkit.report.schema import LinkName, Part, Report
from meshkit.search.bounds import Bound
from meshkit.search.variants import Variant

Settings = tuple[str, ...]

Status = Literal["fits", "does_not_fit", "error"]


class OutcomeRow(Part):
    """The collectives of a step that have the same kind, mesh axes, link and group shape, added up."""

    axes: tuple[str, ...]
    link: LinkName | None = None
    collective: str | None = None
    dtype: str | None = None
    group_size: int | None = None
    count: float
    payload_bytes: float | None = None
    time_s: float | None = None
    exposed_s: float | None = None


class Outcome(Part):
    """The result of planning one variant of an experiment.

    Attributes:
        settings: values for `--set` that make the variant; empty for the unchanged experiment.
        status: `fits`, `does_not_fit` (the times then assume that it fits), or `error`.
        mesh: axis -> its value in `[mesh]`, as TOML.
        stage: why it was compiled: `base`, `estimate` (the closed forms ranked it first), `neighbour` (it differs in
            one choice from one of the best variants so far).
        peak_bytes: the program's peak memory.
        host_bytes: the program's host memory for one GPU; None if it uses none.
        estimate_s: the step time that the closed forms estimated.
        rows: the communication of the step.
        error: why the variant could not be planned.
    """

    settings: Settings
    status: Status
    mesh: dict[str, str] = {}
    stage: str | None = None
    num_gpus: int | None = None
    time_s: float | None = None
    time_interval: StepInterval | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    exposed_s: float | None = None
    idle_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    peak_bytes: int | None = None
    margin_bytes: int | None = None
    host_bytes: int | None = None
    pool_bytes: int | None = None
    fingerprint: str | None = None
    lower_s: float | None = None
    compile_s: float | None = None
    wall_s: float | None = None
    estimate_s: float | None = None
    rows: tuple[OutcomeRow, ...] = ()
    error: str | None = None

    @property
    def fits(self) -> bool:
        return self.status == "fits"


@dataclass(eq=False)
class Candidate:
    """A changed experiment (or a user's step that is built with other choices) and its outcome."""

    settings: Settings = ()
    """The changes as values for `--set`; empty for the unchanged experiment."""
    variant: Variant | None = None
    what: str = ""
    group: str = ""
    parts: tuple[Candidate, ...] = ()
    """The single changes that this one combines."""
    bound: Bound | None = None
    """The lower bounds in closed form; None if there are none."""
    guess_s: float | None = None
    """Estimated step time in seconds, by which candidates are sorted before they are planned: the bound's estimate, or
    more if the step may not fit."""
    stage: str | None = None
    """Why it is planned; see `Outcome`."""
    outcome: Outcome | None = None

    @property
    def time_s(self) -> float | None:
        """Return the seconds of its step, once it is planned."""
        return self.outcome.time_s if self.outcome else None

    @property
    def gpu_seconds(self) -> float:
        """Return the GPU seconds of its step; 0 until it is planned."""
        return (self.time_s or 0.0) * (self.outcome.num_gpus or 0 if self.outcome else 0)

    @property
    def fits(self) -> bool:
        """Return whether its plan fits and has a step time."""
        return self.outcome is not None and self.outcome.fits and self.time_s is not None


def fastest_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that fit, the fastest first."""
    return sorted((c for c in candidates if c.fits), key=lambda c: (c.time_s or 0.0, c.settings))


def make_outcome(
    report: Report, settings: Settings, mesh: dict[str, str], wall_s: float, host_bytes: int = 0
) -> Outcome:
    """Return the outcome from a plan's report; its status is `fits` if both GPU and host memory can hold the step."""
    fits = report.memory.fits is not False and not any(w.code == HOST_MEMORY_EXCEEDED for w in report.warnings)
    return Outcome.from_sources(
        report.step,
        report.memory,
        report.compile,
        settings=settings,
        status="fits" if fits else "does_not_fit",
        mesh=mesh,
        num_gpus=report.cluster.num_gpus,
        host_bytes=host_bytes or None,
        fingerprint=report.program.fingerprint,
        wall_s=wall_s,
        rows=tuple(map(OutcomeRow.from_sources, report.communication)),
    )


def mesh_text(outcome: Outcome) -> str:
    """Return the mesh as text, such as `fsdp 4x8 tensor 2`: 4x8 are 4 GPUs in each of 8 NVLink domains."""
    words = []
    for name, text in outcome.mesh.items():
        value = tomllib.loads(f"axis = {text}")["axis"]
        factors = value if isinstance(value, dict) else {"nvlink": value}
        inside, across = factors.get("nvlink", 1), factors.get("infiniband", 1)
        if (inside, across) != (1, 1):
            words.append(f"{name} {inside}" + (f"x{across}" if across != 1 else ""))
    return " ".join(words) or "one GPU"
