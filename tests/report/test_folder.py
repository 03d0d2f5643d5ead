"""Test the files of a run folder: which stand beside each other, and how the run went."""

import json

import pytest

from meshkit.errors import TraceError
from meshkit.report.folder import find_prediction, read_report, write_folder
from meshkit.report.measured import read_history, summarize_metrics, trend_warnings


@pytest.fixture
def plan(report):
    return report.model_copy(update={"source": "plan", "window": report.window.model_copy(update={"steps": 1})})


def test_a_measurement_keeps_the_plan_of_its_folder(report, plan, timeline, tmp_path):
    write_folder(plan, tmp_path, timeline)
    assert read_report(tmp_path) == find_prediction(tmp_path) == plan
    written = write_folder(report, tmp_path, timeline)
    assert read_report(tmp_path) == written
    assert written.source == "profile"
    assert read_report(tmp_path / "plan.json") == find_prediction(tmp_path) == plan
    assert "predicted and measured" in (tmp_path / "report.html").read_text()
    write_folder(report, tmp_path, timeline)  # When it is written again, the plan is still there.
    assert "predicted and measured" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "trace.json.gz").is_file()


def test_a_measurement_without_a_plan_stands_alone(report, tmp_path):
    write_folder(report, tmp_path)
    assert find_prediction(tmp_path) is None
    assert not (tmp_path / "plan.json").exists()
    assert not (tmp_path / "trace.json.gz").exists()
    assert "predicted and" not in (tmp_path / "report.html").read_text().split("<section>")[0]


def test_another_prediction_can_be_given(report, plan, tmp_path):
    other = plan.model_copy(update={"program": plan.program.model_copy(update={"fingerprint": "other"})})
    write_folder(plan, tmp_path)
    write_folder(report, tmp_path, predicted=other)
    assert find_prediction(tmp_path) == other


def test_a_damaged_report_is_written_anew(report, tmp_path):
    (tmp_path / "report.json").write_text('{"schema": "mesh')  # An earlier version may have crashed.
    assert write_folder(report, tmp_path) == read_report(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_a_damaged_plan_is_one_clear_error(report, tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(TraceError, match=r"not a meshkit\.report/1"):
        write_folder(report, tmp_path)


def record(step, **values):
    return {"step": step, "loss": 10.0 / step, "step_time_s": 1.0 if step < 21 else 1.5, "note": "text", **values}


def test_history_of_a_run(report, tmp_path):
    records = [record(s) for s in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + '{"step": 31, "lo')
    written = write_folder(report, tmp_path)
    history = read_report(tmp_path).history
    assert history == written.history == read_history(tmp_path)
    assert history.steps == tuple(range(1, 31))
    assert list(history.values) == ["loss", "step_time_s"]
    assert history.values["loss"][1] == 5.0
    # The first step warms up; of the other 29, nine are the first third and nine are the last.
    assert history.trend["step_time_s"] == pytest.approx(0.5)
    (warning,) = (w for w in written.warnings if w.code == "step_time_trend")
    assert "50.0 % longer" in warning.message
    assert "history-profile" in (tmp_path / "report.html").read_text()


def test_a_long_history_is_thinned_out_evenly():
    history = summarize_metrics([record(s) for s in range(1, 10_001)])
    assert len(history.steps) <= 300
    assert len({b - a for a, b in zip(history.steps, history.steps[1:])}) == 1
    assert len(history.values["loss"]) == len(history.steps)


@pytest.mark.parametrize(("steps", "trend"), [(9, None), (10, pytest.approx(0.0))])
def test_a_trend_needs_nine_steps_beyond_the_first(steps, trend):
    history = summarize_metrics([record(s) for s in range(1, steps + 1)])
    assert history.trend["step_time_s"] == trend


@pytest.mark.parametrize(("steps", "grows"), [(29, True), (60, False)])
def test_a_short_or_even_run_is_no_warning(steps, grows):
    history = summarize_metrics([record(s) | ({} if grows else {"step_time_s": 1.0}) for s in range(1, steps + 1)])
    assert trend_warnings(history) == []


def test_a_metric_that_some_steps_lack_is_null_there():
    history = summarize_metrics([record(1), record(2, exposed_s=0.25), record(3)])
    assert history.values["exposed_s"] == (None, 0.25, None)


def test_no_metrics_no_history(tmp_path):
    assert read_history(tmp_path) is None
