"""Test the plan of a pipelined training step: the debug Llama on 16 absent H100s."""

from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment
from meshkit.report.views.words import pipeline_lines

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]  # Compiling takes half a minute.

CONFIG = Path(__file__).parents[2] / "configs/experiments/llama_pipeline_cpu.toml"
ON_H100S = ["cluster={name='dgx_h100',hosts=2}", "mesh.pipeline={infiniband=2}", "mesh.fsdp=4"]
SCHEDULE = "pipeline={axis='pipeline',schedule='interleaved_1f1b',virtual_stages=2,microbatches=4}"
TICKS = 2 * 4 + 2 - 1  # There are M v + S - 1 ticks.


@pytest.fixture(scope="module")
def plan():
    return plan_experiment(load(CONFIG, [*ON_H100S, SCHEDULE, "model.layers=8", "model.heads=8"]))


def test_every_collective_is_explained(plan):
    assert not [f for f in plan.lint.findings if f.code == "unexplained_collective"]


def test_the_report_tells_the_schedule_and_its_permutes(plan):
    part = plan.report.pipeline
    assert (part.stages, part.virtual_stages, part.microbatches, part.padding_layers) == (2, 2, 4, 0)
    assert part.permute_count == 2 * TICKS
    assert 0 <= part.permute_exposed_s <= part.permute_s
    assert len(pipeline_lines(plan.report)) == 4


def test_the_bubble_is_inside_of_compute(plan):
    """The bubble is below the schedule's share of compute, since embedding, head and optimizer wait for nobody."""
    step, part = plan.report.step, plan.report.pipeline
    assert 0 < step.bubble_s < part.bubble_fraction * step.compute_s
    assert step.bubble_fraction == pytest.approx(step.bubble_s / step.time_s)


def test_hfu_counts_no_masked_work(plan):
    """Everything is recomputed once except the head, so executed useful FLOP are almost 4/3 of the model's."""
    step = plan.report.step
    assert step.mfu < step.hfu < 4 / 3 * step.mfu * 1.01
