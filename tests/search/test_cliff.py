"""Test the memory cliff of a step: compiles find it, a sentence tells it, and it is a finding where it is near."""

from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment
from meshkit.report.schema import CliffPart, CliffPoint, MemoryPart, Report, StepPart, WindowPart
from meshkit.search.cliff import cliff_text, find_cliff, with_cliff

GIB = 2**30
MLP = Path(__file__).parent.parent.parent / "configs" / "experiments" / "mlp.toml"
WIDE = ("cluster=dgx_h100", "model.embed=1024", "model.mlp=8192", "train.global_batch=131072")


def point(pool_gib, time_s, kernels=0, recomputed_s=0.0):
    return CliffPoint(
        pool_bytes=int(pool_gib * GIB),
        time_s=time_s,
        exposed_s=0.1,
        peak_bytes=50 * GIB,
        arena_bytes=40 * GIB,
        fits=True,
        recomputed_kernels=kernels,
        recomputed_s=recomputed_s,
    )


@pytest.mark.deviceless
def test_the_compiled_program_changes_where_the_limit_falls_below_what_it_takes():
    """There is no limit while there is room; beyond the cliff XLA recomputes, takes longer, and needs less."""
    experiment = load(MLP, WIDE)
    cliff = find_cliff(experiment, plan_experiment(experiment))
    before, beyond = cliff.before, cliff.beyond
    assert before is not None
    assert beyond is not None
    assert cliff.distance_bytes == cliff.points[0].pool_bytes - before.pool_bytes
    assert before.recomputed_kernels == 0 < beyond.recomputed_kernels
    assert beyond.time_s > before.time_s
    assert beyond.peak_bytes < before.peak_bytes
    assert beyond.arena_bytes - before.arena_bytes == beyond.peak_bytes - before.peak_bytes
    assert beyond.pool_bytes < before.pool_bytes < 1.03 * beyond.pool_bytes


@pytest.mark.parametrize(
    ("distance_gib", "found"), [(10, False), (1, True), (-4, True)], ids=["far", "near", "beyond it"]
)
def test_a_cliff_nearer_than_plans_know_a_peak_is_a_finding(distance_gib, found):
    """Plans may miss 1.15 of 50 GiB."""
    before, beyond = point(60 - distance_gib, 1.0), point(59.5 - distance_gib, 1.09, 12, 0.08)
    cliff = CliffPart(distance_bytes=distance_gib * GIB, before=before, beyond=beyond, points=(before, beyond))
    window, memory = WindowPart(steps=1, devices=1), MemoryPart(peak_bytes=50 * GIB)
    report = with_cliff(Report(source="plan", window=window, step=StepPart(time_s=1.0), memory=memory), cliff)
    assert report.memory.cliff == cliff
    assert [f.code for f in report.findings] == ["memory_cliff"] * found
    said = "4.00 GiB are missing" if distance_gib < 0 else f"{distance_gib:.3g}"
    assert said in cliff_text(cliff)
    assert "9.0 % longer" in cliff_text(cliff)
    assert "12 kernels run twice" in cliff_text(cliff)


def test_where_every_compile_is_on_one_side_there_is_no_distance():
    assert "no cliff was found" in cliff_text(CliffPart(points=(point(60, 1.0), point(40, 1.0))))
