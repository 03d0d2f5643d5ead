"""What one GPU is asked: on CPU devices at toy size, through the same code; and what a crash or a hang costs."""

import json
import subprocess
import sys
import tarfile
import time

import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu.measurements import MEASUREMENTS, Measurement
from meshkit.config.experiment import load

NAMES = [m.name for m in MEASUREMENTS]
QUICK = ("matmul", "copy", "attention", "small_kernels", "contention")


def test_a_piece_fits_nine_minutes_and_every_experiment_loads():
    assert len(NAMES) == len(set(NAMES))
    for piece in (1, 2, 3):
        assert sum(m.expected_s for m in MEASUREMENTS if m.piece == piece) <= 9 * 60
    for m in MEASUREMENTS:
        options = dict(m.options)
        own = "benchmarks/gpu/experiments/llama_1b.toml"
        path = f"configs/experiments/{options['experiment']}.toml" if "experiment" in options else own
        assert load(path, options.get("settings", ())).train.steps


def test_the_list_is_printed_and_nothing_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "none"), "--dry-run", "--piece", "1"])
    runner.main()
    printed = capsys.readouterr().out
    assert "train_llama_1b" in printed
    assert "piece 1:" in printed
    assert not (tmp_path / "none").exists()


def test_a_crash_and_a_hang_cost_one_measurement_each_and_the_rest_is_kept(tmp_path, monkeypatch, capsys):
    ends = {"crash": "import os; os.abort()", "hang": "import time; time.sleep(600)", "good": "raise SystemExit"}
    real = subprocess.Popen

    def started(command, **options):
        return real([sys.executable, "-c", ends[command[command.index("--one") + 1]]], **options)

    monkeypatch.setattr(runner.subprocess, "Popen", started)
    monkeypatch.setattr(Measurement, "limit_s", 1.0)
    chosen = [Measurement(name, 1, 0.0, "", "") for name in ends]
    monkeypatch.setattr(runner, "MEASUREMENTS", chosen)
    runner.run_all(chosen, tmp_path, time.monotonic() + 60, toy=True)
    said = {name: json.loads((tmp_path / name / runner.RESULT).read_text())["status"] for name in ends}
    assert said == {"crash": "failed with exit code -6", "hang": "stopped after 1 s", "good": "done"}
    with tarfile.open(tmp_path / runner.PACKED) as archive:
        assert "crash/result.json" in archive.getnames()
    runner.run_all(chosen, tmp_path, time.monotonic() + 60, toy=True)  # all have a result: nothing is started again
    assert "..." not in capsys.readouterr().out.split(runner.PACKED)[-1]


def test_what_there_is_no_time_for_is_not_begun(tmp_path, capsys):
    runner.run_all([Measurement("long", 1, 500.0, "", "")], tmp_path, time.monotonic() + 100, toy=False)
    assert "long: 100 s are left, and it takes 500" in capsys.readouterr().out
    assert not (tmp_path / "long").exists()


@pytest.mark.parametrize("name", QUICK)
def test_kernels_are_measured_at_toy_size(name, tmp_path):
    (m,) = (m for m in MEASUREMENTS if m.name == name)
    found = m.run(tmp_path, toy=True)
    assert all(value > 0 for key, value in found.items() if key.endswith(("flops_per_s", "slowdown", " s")))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_verbs_are_measured_at_toy_size(name, tmp_path):
    (m,) = (m for m in MEASUREMENTS if m.name == name)
    found = m.run(tmp_path, toy=True)
    assert found.get("equal", True) is True
    assert found.get("exit code", 75) == 75
    assert json.dumps(found)


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("m", [m for m in MEASUREMENTS if m.function == "verbs:rehearse"], ids=lambda m: m.name)
def test_what_is_rehearsed_fits_one_h100(m):
    from meshkit.verbs.plan.planner import plan_experiment

    options = dict(m.options)
    memory = plan_experiment(
        load(f"configs/experiments/{options['experiment']}.toml", options["settings"])
    ).report.memory
    assert memory.fits
