"""Test that metrics.jsonl survives crashes and resumes."""

from __future__ import annotations

import json

import pytest

from meshkit.report.measured import read_history
from meshkit.runs.metrics import MetricsLog, read_metrics


def test_opening_drops_later_steps_and_a_broken_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "loss": 1.0 / s}) + "\n" for s in range(1, 6)) + '{"step": 6, "lo')
    log = MetricsLog(path, resumed_step=3)
    log.write({"step": 4, "loss": float("nan")})
    log.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4]
    assert read_metrics(path)[-1]["loss"] is None


def test_a_missing_file_is_made(tmp_path):
    MetricsLog(tmp_path / "metrics.jsonl", 0).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_lines_are_amended_while_others_are_added(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in (1, 2, 4):
        log.write({"step": step, "loss": 1.0 / step})
    log.amend({2: {"exposed_s": 0.5}, 3: {"exposed_s": 0.25}})
    log.write({"step": 5, "loss": 0.2})
    log.close()
    records = {r["step"]: r for r in read_metrics(path)}
    assert list(records) == [1, 2, 3, 4, 5]
    assert records[2] == {"step": 2, "loss": 0.5, "exposed_s": 0.5}
    assert records[3] == {"step": 3, "exposed_s": 0.25}  # This step had not been logged before.
    assert "exposed_s" not in records[4]


def test_amending_that_fails_leaves_the_log_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    log.write({"step": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space left"):
            log.amend({1: {"exposed_s": 0.5}})
    log.write({"step": 2})
    log.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_log_without_a_file_takes_everything(tmp_path):
    log = MetricsLog(None, 0)
    log.write({"step": 1})
    log.amend({1: {"exposed_s": 0.5}})
    log.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    ['{"step": 1e999}', '{"step": "1"}', '{"step": true}', '{"step": %s}' % ("9" * 5000), "[" * 10_000,
     '{"step": Infinity}', '{"step": NaN}', "1", '"step"', "\\ud800", '{"step": 1' + " " * 2**21 + "}"],
)  # fmt: skip
def test_a_line_that_is_no_record_is_left_out(tmp_path, line):
    (tmp_path / "m.jsonl").write_text(f'{line}\n{{"step": 7}}\n')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 7}]


@pytest.mark.parametrize(
    "number", ["Infinity", "-Infinity", "NaN", "1e308", "-1e308", "1e999", "9" * 400, "1" + "0" * 5000]
)
def test_numbers_that_no_sum_could_hold_are_unknown(tmp_path, number):
    lines = [f'{{"step": {n}, "loss": {number}, "step_time_s": {"1e-300" if n < 20 else "1e39"}}}' for n in range(40)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    history = read_history(tmp_path)
    assert history.steps == tuple(range(40))
    assert history.trend == {"step_time_s": None}
    assert "loss" not in history.values
