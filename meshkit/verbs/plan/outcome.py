"""What a plan of one variant of an experiment said: for searches, remedies and sweeps."""

from __future__ import annotations

import tomllib
from typing import Literal

from meshkit.predict.interval import StepInterval
from meshkit.report.schema import LinkName, Part, Report

HOST_MEMORY_EXCEEDED = "host_memory_exceeded"  # the code of a warning: what is offloaded has no room on a host
Status = Literal["fits", "does_not_fit", "error"]


class OutcomeRow(Part):
    """Communication of one kind over the same axes, link and shape of group: what of the step it is."""

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
    """What a plan of one variant of an experiment said.

    Attributes:
        settings: what to give to `--set`, in order, to have the variant; empty for the experiment as it is.
        status: `fits`, `does_not_fit` (its times are those if it did), or `error`.
        mesh: axis -> its value in `[mesh]`, as TOML.
        stage: why it was compiled: `base`, `estimate` (the closed forms put it first), `neighbour` (one choice away
            from the best so far).
        peak_bytes: of the program.
        host_bytes: of host memory for one GPU; None where nothing is there.
        estimate_s: what the closed forms expected of the step.
        rows: communication.
        error: of a variant that could not be planned.
    """

    settings: tuple[str, ...]
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
        """Whether it can run."""
        return self.status == "fits"


def outcome_of(
    report: Report, settings: tuple[str, ...], mesh: dict[str, str], wall_s: float, host_bytes: int = 0
) -> Outcome:
    """The outcome that a plan's report holds."""
    fits = report.memory.fits is not False and not any(w.code == HOST_MEMORY_EXCEEDED for w in report.warnings)
    return Outcome.of(
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
        rows=tuple(map(OutcomeRow.of, report.communication)),
    )


def mesh_text(outcome: Outcome) -> str:
    """`fsdp 4x8 tensor 2`: GPUs in a domain x domains, of each axis."""
    words = []
    for name, text in outcome.mesh.items():
        value = tomllib.loads(f"axis = {text}")["axis"]
        factors = value if isinstance(value, dict) else {"nvlink": value}
        inside, across = factors.get("nvlink", 1), factors.get("infiniband", 1)
        if (inside, across) != (1, 1):
            words.append(f"{name} {inside}" + (f"x{across}" if across != 1 else ""))
    return " ".join(words) or "one GPU"
