"""Test two jobs with one --out: the second is refused and harms nothing, and after a kill it continues the first."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.verbs.checkpoint.manifest import read_manifest, whole_steps

ROOT = Path(__file__).parents[3]
SETS = ["cluster=cpu8", "mesh.fsdp=8", "checkpoint.every=5", "checkpoint.keep=3", "train.evaluate_every=0"]


def train(folder, steps):
    """Return the words of the command; a step waits, so that the first job leaves the CPU to the others."""
    (folder / "slow.py").write_text("import time, meshkit\nhook = meshkit.Hook(lambda step: time.sleep(0.05))\n")
    shutil.copy(ROOT / "configs/experiments/mlp.toml", folder)
    sets = [*SETS, f"train.steps={steps}", 'train.hooks=["slow:hook"]']
    return ["train", str(folder / "mlp.toml"), *(f"--set={text}" for text in sets), "--out", str(folder / "run")]


def wait_for_checkpoint(out, process, after=0):
    deadline = time.monotonic() + 120
    while max(whole_steps(out / "checkpoints"), default=0) <= after:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.multiprocess
def test_the_second_job_on_a_folder_is_turned_away_and_a_killed_one_is_taken_over(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "meshkit", *train(tmp_path, 1_000_000)]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        wait_for_checkpoint(out, first)
        assert main(train(tmp_path, 1_000_000)) == 2
        said = capsys.readouterr().err
        assert f"another job has this run folder: process {first.pid} on host" in said
        assert "Traceback" not in said
        os.kill(first.pid, signal.SIGSTOP)  # The process stops in the middle of whatever it writes.
        reached = whole_steps(out / "checkpoints")[0]
    finally:
        first.kill()
        first.communicate()
    assert main(train(tmp_path, reached + 10)) == 0
    assert "resuming" in capsys.readouterr().err
    lines = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, reached + 11))
    run = json.loads((out / "run.json").read_text())["run"]
    assert {read_manifest(p).record["run"] for p in (out / "checkpoints").iterdir()} == {run}
    assert [p.name for p in (out / "owner").iterdir()] == ["2.released.json"]
