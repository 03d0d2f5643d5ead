"""Two jobs with one --out: the second is turned away and harms nothing; after a kill it goes on where the first was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshkit.verbs.checkpoint.manifest import read_manifest, whole_steps

ROOT = Path(__file__).parents[3]
SETS = ["cluster=cpu8", "mesh.fsdp=8", "checkpoint.every=5", "checkpoint.keep=3", "train.evaluate_every=0"]


def start(out, steps, *options):
    words = [word for text in [*SETS, f"train.steps={steps}"] for word in ("--set", text)]
    command = [sys.executable, "-m", "meshkit", "train", "configs/experiments/mlp.toml", *words, *options]
    return subprocess.Popen(
        [*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def wait_for_checkpoint(out, process, after=0):
    deadline = time.monotonic() + 120
    while max(whole_steps(out / "checkpoints"), default=0) <= after:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.multiprocess
def test_the_second_job_on_a_folder_is_turned_away_and_a_killed_one_is_taken_over(tmp_path):
    first = start(tmp_path, 1_000_000)
    try:
        wait_for_checkpoint(tmp_path, first)
        second = start(tmp_path, 1_000_000)
        _, said = second.communicate(timeout=120)
        assert second.returncode == 2, said
        assert f"another job has this run folder: process {first.pid} on host" in said
        assert "Traceback" not in said
        os.kill(first.pid, signal.SIGSTOP)  # in the middle of whatever it writes
        reached = whole_steps(tmp_path / "checkpoints")[0]
    finally:
        first.kill()
        first.communicate()
    third = start(tmp_path, reached + 10)
    _, said = third.communicate(timeout=120)
    assert third.returncode == 0, said
    assert "resuming" in said
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, reached + 11))
    run = json.loads((tmp_path / "run.json").read_text())["run"]
    assert {read_manifest(p).record["run"] for p in (tmp_path / "checkpoints").iterdir()} == {run}
    assert [p.name for p in (tmp_path / "owner").iterdir()] == ["2.released.json"]
