"""metrics.jsonl survives crashes and resumes."""

from __future__ import annotations

import json

from meshkit.training.metrics import MetricsLog, read_metrics


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
