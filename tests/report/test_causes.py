"""Test that the verdict of a made-up plan names its one cause, and without a cause says what bounds the step."""

from dataclasses import replace

import pytest

import meshkit as mk
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.instructions import InstructionInfo
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.predict.coverage import NOT_PREDICTED
from meshkit.predict.simulate import simulate
from meshkit.report.causes import Planned, add_plan_findings
from meshkit.report.schema import MemoryPart, PipelinePart, Warning_
from meshkit.report.summarize import Machines, summarize_simulation
from meshkit.report.views.report import write_html
from meshkit.step.program import StepFacts
from tests.report.conftest import make_collective

CLUSTER = Cluster.load("dgx_h100", hosts=2)
GIB = 2**30
FITS = MemoryPart(fits=True, margin_bytes=12 * GIB)
SCATTER = make_collective("reduce-scatter.1", "reduce-scatter", link="infiniband", size=16, per_domain=8, payload=2**28)
SMALL = make_collective("all-reduce.1", "all-reduce", size=8, per_domain=8, payload=2**14)
OF_MEASUREMENTS = ("waiting", "wait for", "clock", "outlier", "capture", "host", "meshkit")


def info(kind="matmul", source="jit(step)/mlp/dot", line=None):
    return InstructionInfo(kind, f"{kind}|1", source, line)


def made(seconds, **more):
    return made_of(seconds, **more)[0]


def made_of(seconds, *, memory=FITS, steps=1, parts=None, infos=None, warnings=()):
    """Return the plan of kernels and of blocking collectives with their seconds, and what the plan is made from."""
    of = {c.name: c for c in (SCATTER, SMALL)}
    instructions, took, known = [], {}, {"dot.1": info(), **(infos or {})}
    for i, (name, s) in enumerate(seconds):
        c = of.get(name)
        name = f"{name}-{i}" if c else name
        took[name] = s * steps
        cost = None if c else Cost(matmul_flops={"bf16": 0.7 * s * steps * 989.4e12} if name == "dot.1" else {})
        c = c and replace(c, name=name)
        instructions.append(Instruction(name, "dot", "collective" if c else "kernel", cost=cost, collective=c))
        known |= {name: info("collective", line="models/llama.py:116")} if c else {}
    schedule = Schedule("jit_step", {"main": tuple(instructions)}, "main", "made")
    simulation = simulate(schedule, CLUSTER, seconds=lambda i: took[i.name])
    report = summarize_simulation(
        simulation, schedule, source="plan", machines=Machines(cluster=CLUSTER), facts=StepFacts(steps_per_call=steps),
        instructions=known, warnings=warnings,
    ).model_copy(update={"memory": memory})  # fmt: skip
    report = report.model_copy(
        update={"step": report.step.model_copy(update=(parts or {}).pop("step", {})), **(parts or {})}
    )
    planned = Planned(simulation, schedule, known, CLUSTER, steps)
    return add_plan_findings(report, planned), planned


@pytest.mark.parametrize("steps", [1, 4])
def test_exposed_communication_with_its_row_its_line_and_the_step_without_it(steps):
    report = made([("dot.1", 0.8), ("reduce-scatter.1", 0.15), ("all-reduce.1", 0.05)], steps=steps)
    assert report.verdict == (
        "20.0 % of the step of 1.00 s is exposed communication. Most of it is the reduce-scatter bf16 over fsdp on "
        "InfiniBand (layers, models/llama.py:116), 150 ms; without it the step would take 850 ms. It fits, with 12.0 "
        "GiB a GPU to spare."
    )


def test_what_the_step_loses_is_in_the_findings_with_where_it_stands():
    report = made([("dot.1", 0.8), ("reduce-scatter.1", 0.15), ("all-reduce.1", 0.05)])
    (found,) = report.findings
    assert (found.code, found.severity, found.seconds) == ("exposed_communication", "warning", pytest.approx(0.2))
    assert found.evidence == ("step.exposed_s",)
    assert found.step_s == report.step.all_overlapped_s == pytest.approx(0.8, rel=1e-5)
    assert found.message.startswith("20.0 % of the step is exposed communication. Most of it is the reduce-scatter")


def test_small_messages_say_what_combining_them_would_save():
    report = made([("dot.1", 0.01), *[("all-reduce.1", 1e-4)] * 40])
    assert "28.6 % of the step of 14.0 ms is exposed communication." in report.verdict
    assert "40 times a step the all-reduce bf16 over fsdp moves 16.0 KiB on average: combined" in report.verdict


def test_recomputation():
    again = {"fusion.2": info("elementwise", "jit(step)/transpose/rematted_computation/mlp/mul")}
    report = made([("dot.1", 0.8), ("fusion.2", 0.2)], infos=again)
    assert report.verdict.startswith("20.0 % of the step of 1.00 s is recomputation of the forward pass. It fits")


def test_a_pipelines_bubble():
    shape = dict.fromkeys(PipelinePart.model_fields, 0) | {
        "axis": "pipeline", "schedule": "gpipe", "stages": 4, "microbatches": 8, "picture": None,
    }  # fmt: skip
    report = made([("dot.1", 1.0)], parts={"step": {"bubble_s": 0.27}, "pipeline": PipelinePart(**shape)})
    assert report.verdict.startswith(
        "27.0 % of the step of 1.00 s is the pipeline's bubble (4 stages, 8 microbatches)."
    )


def test_a_step_of_which_little_is_lost_says_what_bounds_it():
    report = made([("dot.1", 0.9), ("norm.1", 0.08), ("reduce-scatter.1", 0.02)], infos={"norm.1": info("reduction")})
    assert report.verdict == (
        "The step of 1.00 s is bound by compute, which takes 98.0 % of it (matmul 90.0 %, at 70.0 % of the "
        "GPU's peak; reduction 8.0 %); 2.0 % is exposed communication. It fits, with 12.0 GiB a GPU to spare."
    )


def test_what_does_not_fit_is_said_first(tmp_path):
    memory = MemoryPart(fits=False, margin_bytes=-3 * GIB, parameters_bytes=GIB, activations_bytes=70 * GIB)
    report = made([("dot.1", 0.8), ("reduce-scatter.1", 0.2)], memory=memory)
    assert report.verdict.startswith(
        "The step does not fit: 3.00 GiB a GPU too much. The largest part is activations, 70.0 GiB. 20.0 % of the step"
    )
    assert f'<p class="verdict">{report.verdict}</p>' in write_html(report, tmp_path / "a.html").read_text()
    assert report.to_dict()["verdict"] == report.verdict
    assert str(mk.render(report)).splitlines()[:3] == [
        "The step does not fit: 3.00 GiB a GPU too much. The largest part is activations,",
        "70.0 GiB. 20.0 % of the step of 1.00 s is exposed communication.",
        "",
    ]


def test_what_is_no_prediction_has_no_verdict_but_of_its_memory():
    plan = made([("dot.1", 1.0)])
    unread = plan.model_copy(update={"warnings": (Warning_(code=NOT_PREDICTED, message="not all was read"),)})
    assert add_plan_findings(unread, None).verdict is None


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("launch_bound", "the step is bound by launches, and no comparable run is"),
        ("unknown_trip_count", "how often a loop of the step runs is not known"),
    ],
)
def test_a_step_that_takes_longer_than_its_price_has_no_interval(code, why):
    assert made([("dot.1", 5e-4)]).step.time_interval is not None
    longer = Warning_(code=code, message="on a GPU it may take up to 438 us longer", seconds=4.38e-4)
    step = made([("dot.1", 5e-4)], warnings=[longer]).step
    assert (step.time_interval, step.time_interval_reason) == (None, why)


@pytest.mark.parametrize("exposed_s", [0.0, 0.1, 0.5])
def test_nothing_that_only_a_measurement_knows_is_named(exposed_s):
    report = made([("dot.1", 1.0), *([("reduce-scatter.1", exposed_s)] if exposed_s else [])])
    assert not [word for word in OF_MEASUREMENTS if word in report.verdict]
