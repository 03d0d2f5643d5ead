"""Test the warnings of a plan, on parts made up by hand."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as parquet
import pytest

from meshkit.compile.traced import TracedFlops
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.hlo.schedule import Collective, Instruction, Schedule
from meshkit.planning.planner import plan_experiment
from meshkit.planning.warnings import imbalance_warning, plan_warnings
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.pricing import Pricer
from meshkit.report.schema import MemoryPart, Report, StepPart, Warning_, WindowPart
from meshkit.report.views.words import step_text
from meshkit.step.program import StepFacts

ROOT = Path(__file__).parents[2]
TRACE = Path(__file__).parents[1] / "data/traces/pax_a100x4/nvtx_gpu_proj_trace/trace.parquet/pax_fsdp4_4proc_proc0"
EMPTY = Schedule("m", {"main": ()}, "main", "f")


def warned(*, compute=(), step_s=1.0, cluster="dgx_h100", precision=None, traced=None, notes=None, noted_s=None):
    spans = np.array(compute, float).reshape(-1, 2)
    step = SimpleNamespace(window=(0.0, step_s), compute=spans, compute_op=np.zeros(len(spans), int))
    simulation = SimpleNamespace(
        timeline=SimpleNamespace(steps=[step], op_names=("a",)),
        notes=notes or {},
        noted_s=noted_s or {},
        host_bytes=0,
    )
    flops = traced and TracedFlops(traced, traced, traced)
    compiled = SimpleNamespace(log=(), traced_flops=flops, dead_updates=(), symmetric_bytes=0)
    found = plan_warnings(
        compiled,  # pyright: ignore[reportArgumentType]
        EMPTY,
        simulation,  # pyright: ignore[reportArgumentType]
        MemoryPart(fits=True),
        Cluster.load(cluster),
        (),
        StepFacts(precision=precision),
    )
    return {w.code: w for w in found}


@pytest.mark.parametrize(
    ("cluster", "precision", "says"),
    [
        ("dgx_h100", "fp8", None),
        ("dgx_a100", "bf16", None),
        ("dgx_a100", None, None),
        ("dgx_a100", "fp8", "no fp8 matmuls: they run in bf16"),
        ("dgx1_v100", "fp8", "they run in fp16"),
    ],
)
def test_a_precision_that_the_gpu_does_not_multiply_in_is_named(cluster, precision, says):
    found = warned(cluster=cluster, precision=precision).get("precision")
    assert (found is None) if says is None else (found is not None and says in found.message)


def test_control_flow_has_its_seconds():
    found = warned(notes={"conditional": ["if.1"], "unknown trip count": ["while.2"]}, noted_s={"if.1": 0.25})
    assert found["conditional"].seconds == 0.25
    assert found["unknown_trip_count"].seconds is None


def test_a_step_of_kernels_that_are_too_small_is_named():
    """Two kernels of 0.9 us lack 1 us each of the 1.9 us that a kernel takes; one of 5 us lacks nothing."""
    compute = [(0, 0.9e-6), (2e-6, 2.9e-6), (4e-6, 9e-6)]
    found = warned(compute=compute, step_s=1e-5)["launch_bound"]
    assert found.seconds == pytest.approx(2e-6)
    assert "2 kernels a step are priced below the least time of any kernel" in found.message
    assert "launch_bound" not in warned(compute=compute, step_s=1e-3)


def test_the_least_that_a_kernel_takes_is_that_of_the_recorded_step():
    """On 4 A100s, a fifth of the kernels takes about this long, and hardly any takes less."""
    rows = [row for row in parquet.read_table(TRACE).to_pylist() if "Thunk:" in row["Name"]]
    computes = [row for row in rows if not re.search("all-gather|all-reduce|reduce-scatter", row["Name"])]
    seconds = np.array([row["Projected Duration"] for row in computes]) * 1e-9
    least = catalog.kernels()["least_s"]
    assert np.mean(seconds < 0.9 * least) < 0.05
    assert np.mean(np.abs(seconds / least - 1) < 0.1) > 0.2


def test_of_a_program_that_was_not_all_read_there_is_no_prediction():
    """A step of 1 s executes nothing, but the traced program needs 8 x 1e15 FLOP."""
    found = warned(traced=8e15)
    assert "has no price" in found["flops"].message
    step, window = StepPart(time_s=1.0, all_overlapped_s=0.9, all_exposed_s=1.1), WindowPart(steps=1, devices=1)
    report = Report(source="plan", window=window, step=step)
    assert step_text(report) == "1.00 s (900 ms if all communication hid, 1.10 s if none did)"
    refused = report.model_copy(update={"warnings": (Warning_(code="flops", message=""),)})
    assert step_text(refused) == "no prediction (more than 1.00 s): read the first warnings"


@pytest.mark.parametrize(("room", "dropped"), [(8.0, None), (1.5, "drops 25.0 % of its rows")])
def test_an_uneven_load_says_what_it_takes_and_what_is_dropped(room, dropped):
    """Of twice the rows, a buffer for 1.5 times them takes three quarters; an even load has no warning."""
    c = Collective("r", "r", "ragged-all-to-all", ("expert",), True, "nvlink", None, "bf16", 8, 1, 8, 2**26, room=room)
    body = (Instruction("r", "ragged-all-to-all", "collective", collective=c),)
    schedule, cluster = Schedule("m", {"main": body}, "main", "f"), Cluster.load("dgx_h100")
    assert imbalance_warning(schedule, cluster, Assumptions(), 1) == []
    (found,) = imbalance_warning(schedule, cluster, Assumptions(imbalance=2.0), 2)
    prices = [Pricer(cluster, Assumptions(imbalance=f)).collective_s(body[0]) for f in (1.0, 2.0)]
    assert found.seconds == pytest.approx((prices[1] - prices[0]) / 2)
    assert (dropped in found.message) if dropped else ("drops" not in found.message)
    (none,) = imbalance_warning(EMPTY, cluster, Assumptions(imbalance=2.0), 1)
    assert none.seconds == 0.0
    assert "this step has no ragged all-to-alls" in none.message


def test_an_imbalance_below_one_is_refused_before_anything_is_compiled():
    with pytest.raises(ConfigError, match=r"an imbalance of 0\.5 is not possible"):
        plan_experiment(load(ROOT / "configs/experiments/mixtral_8x7b.toml"), imbalance=0.5)
