"""What can be told of a step from its communication alone: findings and a verdict, without any trace of compute.

report of what NCCL noted -> the causes of `verdict` that need no compute, of communication in place of what is exposed

What compute covers is unknown, so every second is one that the step loses at most.
"""

from __future__ import annotations

from meshkit.config.cluster import Cluster
from meshkit.hlo.schedule import Collective
from meshkit.predict.nccl import RING_TURNS
from meshkit.report.causes import JudgedReport, findings_of, named, slow_link, small_collectives, waiting
from meshkit.report.schema import CommunicationPart, FindingPart, OpPart, Report
from meshkit.units import format_percent, format_seconds


def judged_by_communication(report: Report, cluster: Cluster | None) -> Report:
    """A report without compute, with its findings and its verdict."""
    case = _Heard(report, cluster)
    if not case.time_s:
        return report
    findings = findings_of(case, (waiting, slow_link, small_collectives))
    if report.step.time_s is None:
        findings = tuple(f.model_copy(update={"message": f.message.replace(" a step", "")}) for f in findings)
    return report.model_copy(update={"findings": findings, "verdict": _verdict(case, findings)})


class _Heard(JudgedReport):
    """A report whose communication is looked at as if nothing hid any of it."""

    lost, waited = "communication", "wait_s"

    def __init__(self, report: Report, cluster: Cluster | None):
        rows = [
            row.model_copy(update={"exposed_s": row.busy_s, "exposed_wait_s": row.wait_s, "ops": _ops(i, row)})
            for i, row in enumerate(report.communication)
        ]
        self.all_s = sum(row.busy_s or 0.0 for row in rows)
        step = report.step.model_copy(
            update={"exposed_s": self.all_s, "time_s": report.step.time_s or self.all_s, "compute_s": None}
        )
        heard = report.model_copy(update={"communication": tuple(rows), "step": step})
        super().__init__(heard, cluster)
        self.told = report

    def of(self, row: CommunicationPart) -> list[Collective]:
        """One that has the mean size of the row's."""
        size = int((row.payload_bytes or 0.0) / row.count) if row.count else 0
        return [
            Collective(
                name=op.name, key="", collective=row.collective or "", axes=row.axes, axes_complete=False,
                link=row.link or "", fabric=row.fabric, dtype="", group_size=row.group_size or 0,
                num_groups=row.num_groups or 0, gpus_per_domain=row.gpus_per_domain or 0, payload_bytes=size,
            )
            for op in row.ops
        ]  # fmt: skip

    def model_s(self, c: Collective, *, count: float = 1.0) -> float | None:
        """None also where its GPUs' places are not known."""
        known = c.gpus_per_domain > 0 and c.collective in RING_TURNS
        return super().model_s(c, count=count) if known else None


def _ops(i: int, row: CommunicationPart) -> tuple[OpPart, ...]:
    return (OpPart(name=f"row {i}", key="", count=row.count),)


def _verdict(case: _Heard, findings: tuple[FindingPart, ...]) -> str:
    """What share of the step communication takes at most, most of which is what, and the two dearest causes."""
    time_s, quality = case.told.step.time_s, case.told.quality
    lost = quality.dropped_events if quality else None
    beside = f" ({lost:,} operations that were dropped not counted)" if lost else ""
    if time_s:
        share = format_percent(min(1.0, case.all_s / time_s))
        first = (
            f"Communication takes at most {share} of the step of {format_seconds(time_s)}{beside}: what of it compute "
        )
        first += "covers is unknown."
    else:
        first = (
            f"Communication took {format_seconds(case.all_s)} of a GPU's time{beside}: the step is unknown, and what "
        )
        first += "of it compute covers."
    largest = max(case.rows, key=lambda row: row.busy_s or 0.0)
    part = (largest.busy_s or 0.0) / case.all_s
    sentences = [first, f"{format_percent(part)} of it is {named(largest)}."]
    dear = [f.message for f in findings if f.severity == "warning"][:2]
    return " ".join([*sentences, *(dear or ["Nothing stands out in it."])])
