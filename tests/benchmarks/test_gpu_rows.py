"""Test that every file of a one-GPU training loads, and that two of them run at toy size and are scored."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu.trainings import TRAININGS
from meshkit.config.experiment import load

OWN = "benchmarks/gpu/experiments/llama_1b.toml"


@pytest.mark.parametrize("gpu", ["h100_sxm", "h200"])
def test_every_training_is_a_file_of_one_gpu(gpu):
    for name, training in TRAININGS.items():
        loaded = load(OWN, [f"cluster.gpu={gpu}", *training.model, *training.train])
        assert (loaded.cluster.num_gpus, loaded.cluster.gpu.key) == (1, gpu), name
        assert training.program is None or not (training.model or training.train), name


def test_every_training_was_planned_blind_and_fits():
    planned = json.loads(runner.blind_of("h100_sxm").read_text(encoding="utf-8"))
    assert set(planned) == set(TRAININGS)
    assert [name for name, plan in planned.items() if plan.get("fits") is not True] == []


@pytest.mark.slow
def test_rows_are_measured_and_scored_against_their_plans(tmp_path, capsys, monkeypatch):
    """The command runs in a process of its own, because no device may have started there."""
    names = ("row_llama_8b", "row_lstm")
    chosen = [argument for name in names for argument in ("--only", name)]
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--toy", "--rows", "--minutes", "5"]
    assert subprocess.run([*command, *chosen], stdout=subprocess.DEVNULL).returncode == 0
    for name in names:
        found = json.loads((tmp_path / name / "result.json").read_text())["values"]
        assert found["before_s"] > 0
        assert found["after_s"] > 0
        assert found["losses"][-1] < found["losses"][0]
    monkeypatch.setattr(sys, "argv", ["gpu", "--score", str(tmp_path), "--rows"])
    capsys.readouterr()
    runner.main()
    said = capsys.readouterr().out
    assert "| `llama_8b` |" in said
    assert "| `lstm` |" in said
    assert "Blind errors of 2 steps: median" in said
    assert (tmp_path / "rows.md").read_text() in said
