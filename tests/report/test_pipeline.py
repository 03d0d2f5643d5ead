"""Test what a report says of a pipeline: the bubble of a step, useful FLOP, and the picture of the schedule."""

from __future__ import annotations

import numpy as np
import pytest

from meshkit.hlo.costs import Cost
from meshkit.hlo.instructions import InstructionInfo
from meshkit.hlo.pipeline_report import useful_flops
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.parallel.pipeline import Stack, make_report, make_tables
from meshkit.report.schema import CommunicationPart, Report, StepPart, WindowPart
from meshkit.report.summarize import pipeline_part, summarize
from meshkit.report.views.charts import schedule_chart
from meshkit.report.views.report import write_html
from meshkit.report.views.words import pipeline_lines
from meshkit.step.program import StepFacts
from meshkit.timeline import DeviceStep, Timeline

S, V, M, LAYERS = 4, 2, 8, 15
PERMUTES = {"axes": ("pipeline",), "collective": "collective-permute"}


def cost(*, shared_head=True, schedule="interleaved_1f1b", chunks=V, microbatches=M, layers=LAYERS):
    tables = make_tables(schedule, S, chunks, microbatches)
    return make_report(tables, Stack.of(layers, S, chunks), shared_head=shared_head)


def report(**step):
    rows = (
        CommunicationPart(**PERMUTES, count=38, time_s=0.2, exposed_s=0.05),
        CommunicationPart(**PERMUTES | {"axes": ("data",)}, count=1, time_s=9.0, exposed_s=9.0),
    )
    return Report(source="plan", window=WindowPart(steps=1, devices=1), step=StepPart(**step), communication=rows)


SOURCES = {
    "layer": "jit(train_step)/while/body/pipeline_tick/transpose(jvp(pipeline_stage))/while/body/dot_general",
    "slice": "jit(train_step)/while/body/pipeline_tick/dynamic_slice",
    "embedding": "jit(train_step)/while/body/pipeline_tick/pipeline_first/gather",
    "head": "jit(train_step)/while/body/pipeline_tick/jvp(pipeline_last)/dot_general",
    "optimizer": "jit(train_step)/adam/add",
}


@pytest.mark.parametrize("shared_head", [True, False])
def test_the_bubble_is_what_masked_work_took(shared_head):
    """Of M v + S - 1 = 19 ticks a way each stage needs 16, and of 16 places for layers 15 hold one.

    The embedding runs in 7 ticks of warm-up, 8 steady ones and once before them.
    """
    busy = {"layer": 4.0, "slice": 1.0, "embedding": 0.5, "head": 2.0, "optimizer": 8.0, "unknown": 1.0}
    instructions = {name: InstructionInfo("matmul", name, source, None) for name, source in SOURCES.items()}
    ends = np.cumsum(list(busy.values()))
    nothing = np.zeros((0, 2))
    compute, names = np.stack([ends - list(busy.values()), ends], axis=1), np.arange(len(busy))
    step = DeviceStep(0, 0, (0.0, 20.0), compute, names, nothing, np.zeros(0, int), nothing)
    facts = StepFacts(pipeline=cost(shared_head=shared_head))
    found = summarize(Timeline((step,), (), tuple(busy)), source="plan", facts=facts, instructions=instructions)
    layers, repeated = M * LAYERS / (19 * 2 * S), 1 if shared_head else S
    wanted = 5.0 * (1 - layers) + 0.5 * (1 - M / 16 / repeated) + 2.0 * (1 - 1 / repeated)
    assert found.step.bubble_s == pytest.approx(wanted)
    assert found.step.bubble_fraction == pytest.approx(wanted / 20)
    part = pipeline_part(facts.pipeline, report().communication)
    assert (part.permute_count, part.permute_s, part.permute_exposed_s) == (38, 0.2, 0.05)
    assert part.executed_over_useful == pytest.approx(1 / layers)
    assert (part.warmup_ticks, part.steady_ticks, part.drain_ticks, part.slots) == (7, 12, 7, 11)


def test_a_step_without_a_time_has_no_bubble():
    found = summarize(Timeline((), ()), source="plan", facts=StepFacts(pipeline=cost()))
    assert found.step.bubble_s is None
    assert found.pipeline.stages == S


def test_useful_flops_leave_out_what_a_pipeline_masks():
    def matmul(name):
        return Instruction(name, "dot", "kernel", source=SOURCES[name], cost=Cost(matmul_flops={"bf16": 10.0}))

    attention = Instruction("a", "custom-call", "kernel", source=SOURCES["layer"], cost=Cost(attention_flops=5.0))
    loop = Instruction("loop", "while", "while", bodies=("body",), trip_count=19)
    bodies = {"entry": (loop, matmul("optimizer")), "body": (matmul("layer"), attention)}
    found = useful_flops(Schedule("step", bodies, "entry", ""), cost())
    assert found == pytest.approx(10 + 19 * 15 * M * LAYERS / (19 * 2 * S))


def test_the_picture_has_two_rows_a_stage_and_masks_what_does_nothing():
    part = pipeline_part(cost(), ())
    z = schedule_chart(part)["data"][0]["z"]
    assert (len(z), {len(row) for row in z}) == (2 * S, {26})
    for row in z:
        assert sum(shade is None for shade in row) == 7  # Drain goes back only, and warm-up goes forward only.
        assert sum(shade == 0 for shade in row) == 3  # S - 1 ticks are masked.
        assert sorted(set(row) - {None, 0}) in ([1, 2], [3, 4])
    assert schedule_chart(part.model_copy(update={"picture": None})) is None


def test_cells_are_labelled_where_there_is_room():
    few, many = (schedule_chart(pipeline_part(cost(microbatches=m), ()))["data"][0] for m in (8, 64))
    assert few["texttemplate"] == "%{text}"
    assert "texttemplate" not in many


def test_a_large_picture_is_left_out():
    assert pipeline_part(cost().model_copy(update={"picture": (("",) * 50_001,) * S}), ()).picture is None


def test_the_page_and_the_terminal_show_it(tmp_path):
    step = StepPart(time_s=1.0, compute_s=0.9, exposed_s=0.1, bubble_s=0.25, bubble_fraction=0.25)
    found = report(**step.model_dump()).model_copy(update={"pipeline": pipeline_part(cost(), report().communication)})
    lines = pipeline_lines(found)
    assert all(len(line) <= 78 for line in lines)
    assert "bubble 250 ms, 25.0 % of the step" in "\n".join(lines)
    assert "38 permutes between stages: 200 ms, 50.0 ms exposed" in lines
    page = write_html(found, tmp_path / "report.html").read_text()
    assert "<h2>Pipeline</h2>" in page
    assert '"pipeline"' in page
    assert pipeline_lines(report()) == []
