"""The terminal and the page say what report.json says."""

import gzip
import io
import json
import re
from base64 import b64decode

import numpy as np
import pytest
from rich.console import Console

from meshkit.report.html import write_html
from meshkit.report.lanes import lanes, step_to_draw
from meshkit.report.schema import Report, StepPart, WindowPart
from meshkit.report.terminal import bar, render
from meshkit.report.view import Share, step_shares
from meshkit.timeline.spans import DeviceStep, Timeline


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


def test_terminal_prints_a_dash_for_what_is_unknown(empty):
    text = shown(render(empty))
    assert re.search(r"MFU +-", text)
    assert re.search(r"step +-", text)
    assert "0 s" not in text


@pytest.mark.parametrize("values", [(1, 0, 0, 0), (1e-9, 1, 1, 1), (0.3, 0.3, 0.3, 0.1), (1000, 1, 1, 1)])
def test_bar_has_its_width_and_shows_every_part(values):
    shares = [Share(key, key, v) for key, v in zip(("compute", "exposed", "other", "idle"), values)]
    text = bar(shares, sum(values), 40).plain
    assert 39 <= len(text) <= 40
    assert all((symbol in text) == (v > 0) for symbol, v in zip("█▓▒░", values))


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
    assert drawn == {s.label: pytest.approx(1e3 * s.value) for s in step_shares(report)}
    exposed = next(t for t in figures["communication"]["data"] if t["name"] == "exposed")
    assert sum(exposed["x"]) == pytest.approx(1e3 * report.step.exposed_s)
    assert {"memory", "timeline-profile-0", "timeline-profile-1"} <= set(figures)
    assert set(re.findall(r'<div id="([\w-]+)" class="chart', text)) == set(figures)
    assert "10.5 ms" in text


def test_two_reports_stand_side_by_side(report, timeline, tmp_path):
    predicted = report.model_copy(update={"source": "plan"})
    text = write_html(predicted, tmp_path / "x.html", timeline, other=report, other_timeline=timeline).read_text()
    assert "Predicted beside measured step" in text
    figures = figures_of(text)
    assert figures["step"]["data"][0]["y"] == ["predicted", "measured"]
    assert {"timeline-plan-0", "timeline-profile-0"} <= set(figures)


def test_an_empty_report_has_a_page(empty, tmp_path):
    assert "No step was seen." in write_html(empty, tmp_path / "x.html").read_text()


def test_lanes_of_a_step(timeline):
    found = {lane.name: lane for lane in lanes(timeline, timeline.steps[0])}
    assert list(found) == ["compute", "exposed", "data · infiniband", "fsdp · nvlink", "no axis", "copies"]
    np.testing.assert_allclose(found["exposed"].spans, [(4e-3, 6e-3), (8e-3, 9e-3)])
    assert found["compute"].labels == ["fusion", "gemm"]
    assert found["fsdp · nvlink"].labels == ["all-gather.1 (all-gather bf16)", "all-gather.2 (all-gather bf16)"]


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
