"""Test that the terminal and the page say what report.json says."""

import dataclasses
import gzip
import io
import json
import re
from base64 import b64decode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.predict.interval import StepInterval
from meshkit.report.schema import (
    FindingPart,
    KernelClassPart,
    KernelsPart,
    MemoryPart,
    MeshAxisPart,
    QualityPart,
    Report,
    StepPart,
    StragglerPart,
    StragglersPart,
    WindowPart,
)
from meshkit.report.summarize import Machines, cluster_part, training_cost
from meshkit.report.views.charts import common, lanes, step_to_draw
from meshkit.report.views.report import bar, render, write_html
from meshkit.report.views.words import LOOKS, Share, interval_text, memory_text, step_shares
from meshkit.step.program import StepFacts
from meshkit.timeline import DeviceStep, Timeline
from meshkit.units import GIB


@pytest.fixture
def empty():
    return Report(source="plan", window=WindowPart(steps=0, devices=0), step=StepPart())


def shown(renderable, width=80):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def test_terminal_fits_80_columns_and_says_the_numbers(report):
    text = shown(render(report))
    assert max(map(len, text.splitlines())) <= 80
    for expected in ("measured", "10.5 ms", "all-gather bf16", "infiniband", "60.0 GiB of 70.0 GiB", "no axis", "MFU"):
        assert expected in text


def test_terminal_leaves_out_what_is_unknown(empty):
    text = shown(render(empty))
    assert "MFU" not in text
    assert not re.search(r"^(step|mesh|memory) ", text, re.MULTILINE)
    assert "0 s" not in text


def test_virtual_devices_of_a_cpu_are_called_no_gpus(report, tmp_path):
    cluster = Cluster.load("cpu8", hosts=2)
    mesh = (MeshAxisPart(axis="fsdp", size=4, nvlink=2, infiniband=2),)
    machines = dataclasses.replace(Machines(Placement.from_shape(("fsdp",), (4,), gpus_per_domain=2)), cluster=cluster)
    training = training_cost(2.0, StepFacts(training_steps=1800), machines)
    rows = [r.model_copy(update={"link": "nvlink", "fabric": "shared_memory"}) for r in report.communication]
    parts = {"cluster": cluster_part(cluster), "mesh": mesh, "training": training, "communication": tuple(rows)}
    on_cpu = report.model_copy(update=parts)
    text = shown(render(on_cpu))
    assert "communication a step, per device" in text
    assert "of 70.0 GiB a device" in text
    assert "per GPU" in shown(render(report))
    page = write_html(on_cpu, tmp_path / "a.html").read_text().partition("<script")[0]
    beside = write_html(on_cpu, tmp_path / "b.html", other=on_cpu).read_text().partition("<script")[0]
    assert not re.search("GPU|nvlink", text + re.sub('data-key="[^"]*"', "", page + beside), re.IGNORECASE)
    assert "fsdp 4 (shared memory 2 x" in text
    assert re.search("for 1,800 steps *\n", text)


def test_a_step_without_tokens_counts_its_examples(report, tmp_path):
    step = report.step.model_copy(update={"tokens_per_s_per_gpu": None, "examples_per_s_per_gpu": 512.0})
    images = report.model_copy(update={"step": step})
    page = write_html(images, tmp_path / "a.html").read_text().partition("<script")[0]
    assert "512 examples/s per GPU" in shown(render(images))
    assert "examples/s per GPU" in page
    assert "tokens/s" not in shown(render(images)) + page


def test_no_line_of_a_log_ends_in_blanks_and_advice_stands_once(report):
    many = [
        FindingPart(code="host_bound", severity="warning", message=m, seconds=2.625e-5, hint="graphs") for m in "AB"
    ]
    text = str(render(report.model_copy(update={"findings": tuple(many)})))
    assert "! 26.2 us host_bound: A Try graphs.\n! 26.2 us host_bound: B\n" in text
    assert not re.search(r" $", text, re.MULTILINE)


@pytest.mark.parametrize("values", [(1, 0, 0, 0), (1e-9, 1, 1, 1), (0.3, 0.3, 0.3, 0.1), (1000, 1, 1, 1)])
def test_bar_has_its_width_and_shows_every_part(values):
    shares = [Share(key, key, v) for key, v in zip(("compute", "exposed", "other", "idle"), values)]
    text = bar(shares, sum(values), 40).plain
    assert 39 <= len(text) <= 40
    assert all((symbol in text) == (v > 0) for symbol, v in zip("█▓▒░", values))


def test_every_part_of_a_bar_has_a_mark_of_its_own():
    # A pipe has no colour, so the parts of one bar differ by their mark.
    memory = ["parameters", "optimizer", "gradients", "activations", "temporary", "rest", "cudnn", "fragmentation"]
    run = [key for key in LOOKS if key.startswith("goodput.")]
    for keys in (
        ["compute", "exposed", "other", "idle"],
        run,
        [*memory, "context", "nccl", "reserved", "free"],
    ):
        marks = [bar([Share(key, key, 1)], 1, 1).plain for key in keys]
        assert len(set(marks)) == len(keys)


def test_terminal_tells_waiting_kinds_and_quality(report):
    rows = tuple(
        r.model_copy(update={"wait_s": 0.25 * r.busy_s, "transfer_s": 0.75 * r.busy_s}) for r in report.communication
    )
    parts = {
        "communication": rows,
        "kernels": KernelsPart(classes=(KernelClassPart(kind="matmul", count=1, time_s=6e-3, busy_s=6e-3),)),
        "quality": QualityPart(
            events=1234, mapped_share=0.99, clocks=2, clock_residual_s=1e-5, wait_method="clock_free"
        ),
        "stragglers": StragglersPart(
            devices=(StragglerPart(device=3, host="node7", caused_wait_s=2e-3, last_share=0.5),)
        ),
    }
    text = shown(render(report.model_copy(update=parts)))
    assert max(map(len, text.splitlines())) <= 80
    assert "25.0 % (by the shortest duration in each)" in text
    assert "GPU 3 on node7: others waited 2.00 ms a step, last in 50.0 % of collectives" in text
    assert re.search(r"matmul +6\.00 ms +100\.0 %", text)
    assert "1,234 operations, 99.0 % of communication mapped, 2 clocks within 10.0 us" in text


def test_page_is_self_contained_and_escaped(report, timeline, tmp_path):
    text = write_html(report, tmp_path / "a" / "report.html", timeline).read_text()
    assert "<script>alert(1)</script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    page = re.sub(r'<script type="text/plain" id="plotly">.*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)
    packed = re.search(r'id="plotly">(.*?)</script>', text, re.DOTALL)[1]
    assert b"Plotly" in gzip.decompress(b64decode(packed))


def figures_of(text):
    return json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1].replace("<\\/", "</"))


def test_charts_hold_the_numbers_of_the_report(report, timeline, tmp_path):
    text = write_html(report, tmp_path / "report.html", timeline).read_text()
    figures = figures_of(text)
    drawn = {trace["name"]: trace["x"][0] for trace in figures["step"]["data"]}
    assert drawn == {s.label: pytest.approx(1e3 * s.value) for s in step_shares(report.step)}
    exposed = next(t for t in figures["communication"]["data"] if t["name"] == "exposed")
    assert sum(exposed["x"]) == pytest.approx(1e3 * report.step.exposed_s)
    assert {"memory", "timeline-profile-0", "timeline-profile-1"} <= set(figures)
    assert set(re.findall(r'<div id="([\w-]+)" class="chart', text)) == set(figures)
    assert "10.5 ms" in text


def test_two_reports_stand_side_by_side(report, timeline, tmp_path):
    predicted = report.model_copy(update={"source": "plan"})
    text = write_html(predicted, tmp_path / "x.html", timeline, other=report, other_timeline=timeline).read_text()
    assert "Predicted and measured step" in text
    figures = figures_of(text)
    assert figures["step"]["data"][0]["y"] == ["predicted", "measured"]
    assert {"timeline-plan-0", "timeline-profile-0"} <= set(figures)


def test_an_empty_report_has_a_page(empty, tmp_path):
    assert "The trace has no whole step." in write_html(empty, tmp_path / "x.html").read_text()


def test_lanes_of_a_step(timeline):
    found = {lane.name: lane for lane in lanes(timeline, timeline.steps[0])}
    assert list(found) == ["compute", "exposed", "data · infiniband", "fsdp · nvlink", "no axis", "copies"]
    np.testing.assert_allclose(found["exposed"].spans, [(4e-3, 6e-3), (8e-3, 9e-3)])
    assert found["compute"].labels == ["fusion", "gemm"]
    assert found["fsdp · nvlink"].labels == ["all-gather.1 (all-gather bf16)", "all-gather.2 (all-gather bf16)"]


def test_lanes_show_their_exposed_parts(timeline):
    found = {lane.name: lane.exposed * 1e3 for lane in lanes(timeline, timeline.steps[0])}
    np.testing.assert_allclose(found["fsdp · nvlink"], [(4, 6)])  # The two all-gathers are at 3-5 and 4-6 ms.
    np.testing.assert_allclose(found["data · infiniband"], [(5, 6), (8, 9)])
    assert not len(found["no axis"])  # It is at 7-7.5, under compute.
    assert not len(found["compute"])


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12), st.lists(st.integers(1, 9), max_size=12)
)
def test_what_two_sets_of_spans_have_in_common(spans, gaps):
    # In whole units, a may overlap itself, while b is disjoint and sorted.
    a = np.array([(start, start + length) for start, length in spans], float).reshape(-1, 2)
    edges = np.cumsum(gaps[: len(gaps) // 2 * 2]).astype(float)
    b = edges.reshape(-1, 2)
    found = common(a, b)

    def inside(rows):
        return {unit for start, end in rows for unit in range(int(start), int(end))}

    assert inside(found) == inside(a) & inside(b)
    assert (found[:, 1] > found[:, 0]).all()
    assert (found[1:, 0] >= found[:-1, 1]).all()


def test_thousands_of_spans_are_joined_without_losing_time():
    starts = np.arange(50_000) * 1e-5
    step = DeviceStep(
        device=0,
        step=0,
        window=(0.0, 0.5),
        compute=np.stack([starts, starts + 0.9e-5], axis=1),
        compute_op=np.zeros(50_000, int),
        communication=np.zeros((0, 2)),
        collective=np.zeros(0, int),
        copies=np.zeros((0, 2)),
    )
    (lane,) = lanes(Timeline((step,), (), ("fusion",)), step)
    assert lane.labels == ["fusion and 49999 more"]
    np.testing.assert_allclose(lane.spans, [(0.0, starts[-1] + 0.9e-5)])


def test_the_step_that_is_drawn_is_the_median_one(timeline):
    assert [s.device for s in step_to_draw(timeline)] == [0, 1]


@pytest.mark.parametrize(
    ("calibrated", "said"),
    [
        (True, "990 ms to 1.17 s (holds for 80 % of comparable runs, "),
        (False, "990 ms to 1.17 s (holds for 80 % of comparable runs, all of one publisher, "),
    ],
)
def test_the_interval_is_one_sentence(report, calibrated, said):
    part = StepInterval(p50_s=(1.0, 1.1), p80_s=(0.99, 1.17), stratum="dense", calibrated=calibrated, rows=9)
    text = interval_text(report.model_copy(update={"step": StepPart(time_interval=part)}))
    assert text == f"{said}see docs/concepts/validation.md)"


@pytest.mark.parametrize(
    ("peak_gib", "text"),
    [
        (20, "20.0 GiB of 72.0 GiB a GPU, 512 MiB reserved: fits, 51.5 GiB free"),
        (80, "80.0 GiB of 72.0 GiB a GPU, 512 MiB reserved: does not fit, 8.50 GiB too much"),
    ],
)
def test_the_line_of_memory_adds_up(report, peak_gib, text):
    margin = 72 * GIB - peak_gib * GIB - GIB // 2
    parts = {"pool_bytes": 72 * GIB, "peak_bytes": peak_gib * GIB, "margin_bytes": margin, "fits": margin >= 0}
    assert memory_text(report.model_copy(update={"memory": MemoryPart(**parts)})) == text


def test_why_there_is_no_interval_stands_where_it_would(report, timeline, tmp_path):
    why = "2 groups of comparable runs (experts, hopper, 16 bit), 4 are needed for 80 %"
    step = report.step.model_copy(update={"time_interval_reason": why})
    plan = report.model_copy(update={"step": step})
    assert interval_text(plan) == f"no interval: {why}"
    assert "no interval: 2 groups of comparable runs" in " ".join(shown(render(plan)).split())
    assert f"no interval: {why}" in write_html(plan, tmp_path / "report.html", timeline).read_text()
    assert interval_text(report) == ""
