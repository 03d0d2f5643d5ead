"""Test the page in a headless Chromium, at the width of a desk and of a phone; without one the tests are skipped."""

import dataclasses
import json
import re

import numpy as np
import pytest

from meshkit.report.compare import compare
from meshkit.report.goodput import goodput_part
from meshkit.report.schema import (
    FeedbackPart,
    FindingPart,
    HistoryPart,
    KernelClassPart,
    KernelPart,
    KernelsPart,
    QualityPart,
    StragglerPart,
    StragglersPart,
    TrainingPart,
)
from meshkit.report.views.report import write_html
from meshkit.runs.phases import Goodput
from meshkit.timeline import Timeline
from meshkit.units import format_bytes, format_count, format_flops, format_percent, format_rate, format_seconds
from tests.report.browser import Browser, find_chromium
from tests.report.conftest import make_step

WIDTHS = (1280, 390)
GOODPUT_S = {"start": 100.0, "compile": 300.0, "data": 20.0, "step": 38_000.0, "evaluate": 280.0, "save": 900.0,
             "lost": 800.0, "restart": 600.0}  # fmt: skip
NUMBERS = """[...document.querySelectorAll('[data-key]')].map(
    n => [n.dataset.document, n.dataset.key, n.dataset.value, n.textContent])"""
SHARES = {"share", "mfu", "hfu", "last_share", "mapped_share", "axis_mapped_share", "kernels_mapped_share"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    browser = Browser(executable, tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def kernels(report, factor):
    """Return two kinds of work that add up to the report's compute."""
    classes = []
    for kind, share in (("matmul", 0.75), ("a kind with a long name of its own", 0.25)):
        seconds = share * report.step.compute_s
        op = KernelPart(name=f"{kind[:6]}.1", key=f"{kind}|1", source="layers/mlp/" * 20, line="models/x.py:7", count=3,
                        busy_s=factor * seconds)  # fmt: skip
        classes.append(KernelClassPart(kind=kind, count=3, time_s=seconds, busy_s=seconds, ops=(op,)))
    return KernelsPart(classes=tuple(classes))


@pytest.fixture
def everything(report):
    """Return a measured report in which every optional part is known."""
    devices = [StragglerPart(device=1, process=0, host="node-with-a-long-name-0001.example.org", caused_wait_s=2e-3,
                             waited_s=1e-4, last_share=0.25, compute_s=5e-3)]  # fmt: skip
    steps = tuple(range(1, 41))
    history = HistoryPart(
        steps=steps,
        values={"step_time_s": tuple(0.01 + 1e-4 * (s % 3) for s in steps), "loss": tuple(5 / s for s in steps)},
        trend={"step_time_s": 0.01, "loss": -0.7},
    )
    quality = QualityPart(events=123456, mapped_share=0.995, axes_withheld=False, clocks=2, clock_residual_s=1.2e-5)
    parts = {
        "kernels": kernels(report, 1.0),
        "quality": quality,
        "stragglers": StragglersPart(method="clocked", instances=12, devices=tuple(devices)),
        "history": history,
        "feedback": FeedbackPart(before_time_s=0.012, before_exposed_s=0.004),
        "goodput": goodput_part(Goodput(41_000.0, GOODPUT_S, 3, 12)),
    }
    return report.model_copy(update=parts)


@pytest.fixture
def predicted(everything):
    """Return a prediction of another program that is half as long."""
    half = {key: value / 2 for key in ("time_s", "exposed_s", "compute_s") if (value := getattr(everything.step, key))}
    program = everything.program.model_copy(update={"fingerprint": "other"})
    parts = {"source": "plan", "step": everything.step.model_copy(update=half), "program": program, "history": None}
    parts |= {"kernels": kernels(everything, 0.5), "stragglers": None, "quality": None, "feedback": None}
    parts |= {"goodput": None}
    return everything.model_copy(update=parts)


@pytest.mark.parametrize("width", WIDTHS)
def test_page_renders_and_says_what_the_files_say(browser, everything, predicted, timeline, tmp_path, width):
    page = write_html(
        predicted, tmp_path / "report.html", other=everything, other_timeline=timeline, trace_file="trace.json.gz"
    )
    browser.open(page, width)
    assert browser.problems == []
    drawn = browser.evaluate(
        "[...document.querySelectorAll('.chart:not([hidden])')].map(n => !!n.querySelector('svg'))"
    )
    assert drawn
    assert all(drawn)
    check_no_overflow(browser, width)
    documents = {
        "predicted": json.loads(predicted.to_json()),
        "measured": json.loads(everything.to_json()),
        "compare": json.loads(compare(predicted, everything).to_json()),
    }
    check_numbers(browser.evaluate(NUMBERS), documents)


@pytest.mark.parametrize(("width", "longest"), [(1280, 4000), (390, 6000)])
def test_the_first_screen_says_why_and_the_rest_is_folded(browser, everything, timeline, tmp_path, width, longest):
    findings = [
        FindingPart(code=f"c{i}", severity=severity, message=f"Reason {i} <b>.", seconds=1e-3 / (i + 1), hint="less",
                    step_s=9e-3, evidence=("step.exposed_s",))
        for i, severity in enumerate(["warning"] * 4 + ["note"] * 3)
    ]  # fmt: skip
    rows = [row.model_copy(update={"exposed_wait_s": (row.exposed_s or 0) / 4}) for row in everything.communication]
    training = TrainingPart(steps=10**6, hours=35741.0, gpu_hours=1e6, cost=3.2e6)
    judged = everything.model_copy(update={
        "verdict": "Half of the step is exposed.", "findings": tuple(findings), "communication": tuple(rows),
        "training": training,
    })  # fmt: skip
    browser.open(write_html(judged, tmp_path / "report.html", timeline), width)
    assert browser.problems == []
    assert browser.evaluate("document.querySelector('main').innerText").startswith("Half of the step is exposed.")
    assert browser.evaluate("document.documentElement.scrollHeight") < longest
    assert browser.evaluate("document.querySelector('.verdict').getBoundingClientRect().top") < 100
    text = browser.evaluate("document.body.innerText")
    assert "4.1 years" in text
    assert "exposed waiting for peers" in text
    assert "3 that cost less" in text
    # Every fold can be reached and opened by keyboard, and its content is drawn.
    assert browser.evaluate("[...document.querySelectorAll('summary')].every(s => s.tabIndex >= 0)")
    browser.evaluate("document.querySelector('details[data-below] summary').focus()")
    for kind in ("keyDown", "keyUp"):
        browser.send(
            "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
        )
    browser.wait_for("document.querySelector('details[data-below]').open")
    browser.wait_for("document.querySelector('details[data-below] .chart svg').getBoundingClientRect().width > 200")
    check_no_overflow(browser, width)
    spilt = "[...document.querySelectorAll('.card b')].filter(n => n.scrollWidth > n.clientWidth + 1).length"
    assert browser.evaluate(spilt) == 0


def check_no_overflow(browser, width):
    """Check that no open fold makes the page wider than the screen; wider content scrolls in its own box."""
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    outside = browser.evaluate(
        "[...document.querySelectorAll('section, .card, h1, .note, .legend, footer, .chart')]"
        ".filter(n => n.getBoundingClientRect().right > innerWidth + 0.5).map(n => n.outerHTML.slice(0, 80))"
    )
    assert outside == []


def check_numbers(numbers, documents):
    """Check that every number of the page equals the file's, bit for bit, and is formatted correctly."""
    seen = set()
    for document, key, value, text in numbers:
        expected = value_at(documents[document], key)
        assert (json.loads(value) if value else None) == expected, key
        assert text == text_of(key, expected), key
        seen.add(f"{document}:{key}")
    for needed in (
        "measured:step.exposed_s",
        "measured:spread.time_s.p90",
        "measured:communication.0.exposed_s",
        "measured:stragglers.devices.0.caused_wait_s",
        "measured:quality.clock_residual_s",
        "measured:feedback.before_exposed_s",
        "measured:kernels.classes.1.time_s",
        "measured:memory.peak_bytes",
        "measured:goodput.lost_s",
        "measured:goodput.share",
        "predicted:step.time_s",
        "compare:step.time_s.ratio",
        "compare:kernel_ops.0.busy_s.b",
    ):
        assert needed in seen


def value_at(document, key):
    """Return the value at a path; `a+b` adds up."""
    found = [document]
    for part in key.split("."):
        found = [v[int(name)] if isinstance(v, list) else v[name] for v in found for name in part.split("+")]
    if len(found) == 1:
        return found[0]
    return None if None in found else sum(found)


def text_of(key, value):
    """Return the text of a value of this key, by the unit in its name."""
    *path, name = key.split(".")
    if name in ("a", "b", "min", "median", "p90", "max"):
        name = path[-1]
    if name == "ratio":
        return "-" if value is None else f"{value:.2f} x" if value < 100 else f"{value:.0f} x"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in SHARES:
        return format_percent(value)
    if name.endswith("bytes_per_s"):
        return format_rate(value)
    if name == "tokens_per_s_per_gpu":
        return format_count(value).strip()
    if name.endswith("_s"):
        return format_seconds(value)
    if "bytes" in name:
        return format_bytes(value)
    return f"{value:,}" if name == "events" else f"{value:g}"


def timeline_axis(browser):
    return browser.evaluate("[...document.querySelector('#timeline-profile-0')._fullLayout.xaxis.range]")


def point_of(browser, pixel_share):
    """Return a screen position inside the plot area of the first timeline, scrolled into view."""
    box = browser.evaluate(
        "(n => { n.scrollIntoView({block: 'center'}); const r = n.querySelector('.nsewdrag').getBoundingClientRect();"
        " return [r.left, r.top, r.width, r.height] })(document.querySelector('#timeline-profile-0'))"
    )
    return box[0] + box[2] * pixel_share, box[1] + box[3] / 12


@pytest.mark.parametrize("width", [1280, pytest.param(390, marks=pytest.mark.slow)])
def test_timeline_zooms_hovers_and_changes_device(browser, everything, timeline, tmp_path, width):
    page = write_html(everything, tmp_path / "report.html", timeline)
    browser.open(page, width)
    assert timeline_axis(browser) == [0, 10]  # The whole step is shown, in ms.
    x, y = point_of(browser, 0.2)  # 2 ms into the step is the first compute span, in the first of six lanes.
    browser.mouse("mouseMoved", x - 3, y)
    browser.mouse("mouseMoved", x, y)
    browser.wait_for("!!document.querySelector('#timeline-profile-0 .hovertext')")
    hover = browser.evaluate("document.querySelector('#timeline-profile-0 .hovertext').textContent")
    assert hover.startswith("fusion")
    assert "4 ms" in hover
    for _ in range(6):  # One turn of the wheel zooms by a tenth at most.
        browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-240)
    browser.wait_for("(([a, b]) => b - a < 8)(document.querySelector('#timeline-profile-0')._fullLayout.xaxis.range)")
    low, high = timeline_axis(browser)
    assert low < 2 < high  # Zooming keeps what is under the pointer.
    select = "document.querySelector('[data-timeline]')"
    browser.evaluate(f"(s => {{ s.selectedIndex = 1; s.dispatchEvent(new Event('change')) }})({select})")
    browser.wait_for("!!document.querySelector('#timeline-profile-1 svg')")
    assert browser.evaluate("document.querySelector('#timeline-profile-0').hidden") is True
    assert browser.problems == []


FILLED = """[...document.querySelectorAll('.timeline:not([hidden])')].flatMap(node => node.calcdata.map((points, i) => {
    const plot = node.querySelector('.nsewdrag').getBoundingClientRect().width;
    const bars = node.querySelectorAll('.barlayer .trace.bars')[i];
    const seen = ({ x, width }) => Math.max(0, Math.min(plot, x + width) - Math.max(0, x));
    const ink = [...bars.querySelectorAll('path')].map(p => seen(p.getBBox()) * getComputedStyle(p).opacity);
    return [points[0].trace.name, ink.reduce((a, b) => a + b, 0) / plot];
}))"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [700, 4000])  # The page does not draw as many as 4000 one by one.
def test_gaps_that_are_thinner_than_a_pixel_take_no_more_of_the_picture_than_of_the_step(
    browser, report, tmp_path, width, count
):
    """Gaps take 0.2 % of 10 ms, in the whole picture and zoomed; when zoomed far enough, each is drawn by itself."""
    starts = np.arange(count) * 10e-3 / count
    step = dataclasses.replace(
        make_step(), compute=np.stack([starts, starts + 0.998 * 10e-3 / count], 1), compute_op=np.zeros(count, int),
        communication=np.zeros((0, 2)), collective=np.zeros(0, int), copies=np.zeros((0, 2)),
    )  # fmt: skip
    browser.open(write_html(report, tmp_path / "a.html", Timeline((step,), (), ("fusion",))), width)
    for high in (2.2, 2.001):
        filled = dict(browser.evaluate(FILLED))
        assert filled["idle"] == pytest.approx(0.002, abs=0.002)
        assert filled["compute"] > 0.9
        browser.evaluate(
            f"Plotly.relayout(document.querySelector('.timeline'), {{'xaxis.range': [2, {high}]}}).then(() => 0)"
        )
    drawn = "document.querySelector('.timeline').data.at(-1).marker.opacity"
    assert browser.evaluate(f"Math.max(...{drawn})") == (1 if count == 700 else pytest.approx(0.002, abs=0.001))
    assert browser.problems == []


@pytest.mark.slow
def test_a_page_turns_narrow_with_its_window(browser, everything, timeline, tmp_path):
    page = write_html(everything, tmp_path / "report.html", timeline)
    browser.open(page, 1280)
    assert browser.evaluate("document.querySelector('#step')._fullLayout.yaxis.showticklabels") is True
    browser.send("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    browser.wait_for("!document.querySelector('#step')._fullLayout.yaxis.showticklabels")
    check_no_overflow(browser, 390)
    assert browser.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_of_nothing_known(browser, timeline, tmp_path, width):
    from meshkit.report.schema import Report, StepPart, WindowPart

    empty = Report(source="plan", window=WindowPart(steps=0, devices=0), step=StepPart())
    browser.open(write_html(empty, tmp_path / "report.html"), width)
    assert browser.problems == []
    assert re.search(r"The trace has no whole step", browser.evaluate("document.body.textContent"))
    check_no_overflow(browser, width)


def test_units_round_up_to_the_next_one():
    assert (format_seconds(0.99996), format_bytes(1023.99 * 2**20)) == ("1.00 s", "1.00 GiB")
    assert (format_count(999.99e3).strip(), format_flops(9.996e14)) == ("1.00 M", "1.00 PFLOP")
