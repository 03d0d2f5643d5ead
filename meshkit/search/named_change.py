"""Find the change that the verdict of a plan names, and the step time with this change.

A compiled change comes first: the fastest change with which the step fits, or faster options of XLA. Without one, the
effect of a change is estimated from the compiled program. If memory is free, the change is to keep activations that the
backward pass recomputes, and the closed forms of bounds.py give the additional memory. Otherwise the change is to move
axes of the mesh to other links.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from meshkit.config.experiment import Experiment, ProgramExperiment
from meshkit.config.sections import RematMix
from meshkit.config.toml import inline
from meshkit.predict.coverage import kernel_seconds_by_name
from meshkit.report.causes import Change, Planned, recomputes
from meshkit.report.schema import FindingPart, Report
from meshkit.search.bounds import Bounds
from meshkit.search.candidate import Settings
from meshkit.search.proposals import propose
from meshkit.search.variants import REMATS
from meshkit.units import format_bytes, format_seconds

_WORTH = 0.01  # A change that saves a smaller share of the step is not named.
_LONG = 70  # Longer settings are described in words.


def find_change(report: Report, experiment: Experiment | ProgramExperiment, planned: Planned) -> Change | None:
    """Return the change that the verdict names; None if no known change saves 1 % of the step.

    The report must already have the remedies and the alternative XLA options that were compiled for it.
    """
    if report.verdict is None or not report.step.time_s:
        return None
    return next(_changes(report, experiment, planned), None)


def _recomputed_s(planned: Planned, kind: str) -> float:
    seconds, known = kernel_seconds_by_name(planned.simulation.timeline), planned.instructions
    again = (s for name, s in seconds.items() if name in known and known[name].kind == kind
             and recomputes(name, known[name]))  # fmt: skip
    return sum(again) / planned.steps


def _changes(report: Report, experiment: Experiment | ProgramExperiment, planned: Planned) -> Iterator[Change]:
    time_s = report.step.time_s or 0.0
    for remedy in (report.memory.remedies or ())[:1]:
        yield Change(
            f"With {_in_short(remedy.settings, remedy.what)} it fits and takes {format_seconds(remedy.time_s)}."
        )
    if report.memory.fits is False:
        return
    for other in report.program.alternatives or ():
        if other.time_s and other.time_s < (1 - _WORTH) * time_s and (other.margin_bytes or 0) >= 0:
            took = f"it takes {format_seconds(other.time_s)}, {format_seconds(time_s - other.time_s)} less"
            yield Change(f"With {_in_short(other.settings, other.what)} {took}.")
    warned = {f.code: f for f in report.findings if f.severity == "warning"}
    if "recomputation" in warned and report.memory.fits:
        yield from _keep_more(report, experiment, planned, warned["recomputation"])
    if "exposed_communication" in warned:
        yield from _place_axes(report, experiment, warned["exposed_communication"])


def _in_short(settings: Settings, what: str) -> str:
    text = " and ".join(settings)
    return text if len(text) <= _LONG else f"other options ({what})"


def _compile_it(settings: Settings) -> str:
    return f"{' '.join(f"--set '{setting}'" for setting in settings)}, which `meshkit plan` then compiles"


def _keep_more(
    report: Report, experiment: Experiment | ProgramExperiment, planned: Planned, finding: FindingPart
) -> Iterator[Change]:
    time_s, free = report.step.time_s or 0.0, report.memory.margin_bytes or 0
    if isinstance(experiment, ProgramExperiment):
        kept = f"the step would take about {format_seconds(finding.step_s)} if all were kept"
        hint = "keeping more for the backward pass: `meshkit tune --vary program.options.KEY=[...]` compiles each value"
        yield Change(
            f"{format_bytes(free)} are free: {kept} (estimated).", finding.code, f"{hint} of an option of yours"
        )
        return
    bounds, matmuls_s, attention_s = Bounds(experiment), *(_recomputed_s(planned, k) for k in ("matmul", "attention"))
    now, again_s = bounds.bound(experiment), finding.seconds or 0.0
    found: list[tuple[float, float, object, Settings]] = []
    for policy, settings, changed in _keeping(experiment):
        there = bounds.bound(changed)
        less = 1 - there.recomputed_share / now.recomputed_share if now.recomputed_share else 0.0
        saved_s = again_s if policy is None or policy == "none" else matmuls_s * less
        saved_s += attention_s if policy == "dots" else 0.0
        more = there.estimate_bytes - now.estimate_bytes
        if saved_s >= _WORTH * time_s and more <= free:
            found.append((saved_s, more, policy, settings))
    for saved_s, more, policy, settings in sorted(found, key=lambda f: (-f[0], f[1])):
        if policy is not None and not bounds.remats([policy]):
            continue
        took = f"about {format_seconds(time_s - saved_s)} and {format_bytes(max(0.0, more))}"
        said = f"{format_bytes(free)} are free: {' and '.join(settings)} would take {took} (estimated)."
        yield Change(said, finding.code, _compile_it(settings))
        return


def _keeping(experiment: Experiment) -> Iterator[tuple[object, Settings, Experiment]]:
    """Yield (policy of `train.remat`, settings, changed experiment); with a pipeline the policy is None."""
    if experiment.pipeline.axis is not None:
        if experiment.pipeline.residuals == "recompute":
            pipeline = experiment.pipeline.model_copy(update={"residuals": "stash"})
            yield None, ('pipeline.residuals="stash"',), dataclasses.replace(experiment, pipeline=pipeline)
        return
    for policy in REMATS:
        if policy != experiment.train.remat and not isinstance(policy, RematMix):
            train = experiment.train.model_copy(update={"remat": policy})
            setting = inline(list(policy) if isinstance(policy, tuple) else policy)
            yield policy, (f"train.remat={setting}",), dataclasses.replace(experiment, train=train)


def _place_axes(report: Report, experiment: Experiment | ProgramExperiment, finding: FindingPart) -> Iterator[Change]:
    proposal = propose(report, experiment.mesh, experiment.cluster)
    if proposal.changed:
        now, then = format_seconds(proposal.seconds_now), format_seconds(proposal.seconds_proposed)
        took = f"communication would take {then} a step, not {now}"
        said = f"With {' and '.join(proposal.settings)}, {took}, if none overlaps (estimated)."
        yield Change(said, finding.code, _compile_it(proposal.settings))
