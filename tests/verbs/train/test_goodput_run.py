"""Test goodput of a real run that is killed twice, once among its steps and once before them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshkit.report.goodput import goodput_part
from meshkit.runs.phases import read_attempts, read_goodput

ROOT = Path(__file__).parents[3]
SETS = ["train.steps=60", "checkpoint.every=4", "profile=", "train.evaluate_every=30", "train.sequence_length=32"]


def train(out, environment):
    words = [word for text in SETS for word in ("--set", text)]
    command = [sys.executable, "-m", "meshkit", "train", "configs/experiments/llama_debug_cpu.toml", *words]
    return subprocess.Popen(
        [*command, "--out", str(out), "--json"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )


def wait_for(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def newest_checkpoint(out):
    names = (path.parent.name for path in out.glob("checkpoints/*/meshkit.json"))
    return max((int(name) for name in names if name.isdigit()), default=0)


@pytest.mark.slow
def test_every_second_of_a_run_that_is_killed_twice(tmp_path):
    environment = {**os.environ, "MESHKIT_CACHE": str(tmp_path / "cache")}
    out = tmp_path / "run"
    began = time.time()
    process = train(out, environment)
    wait_for(lambda: newest_checkpoint(out) >= 4)
    process.kill()
    process.communicate()
    process = train(out, environment)
    wait_for(lambda: len(read_attempts(out)) == 2)  # This is so before it has a step.
    process.kill()
    process.communicate()
    process = train(out, environment)
    told = json.loads(process.communicate()[0])
    ended = time.time()
    assert process.returncode == 0
    found = read_goodput(out)
    assert told["goodput"] == found.to_dict()
    assert told["compile_cached"]  # The first attempt compiled it.
    first, second, third = read_attempts(out)
    assert (first.outcome, second.outcome, third.outcome) == (None, None, "done")
    assert (first.resumed_step, second.resumed_step) == (0, None)
    assert third.resumed_step >= 4
    assert third.resumed_step % 4 == 0
    assert found.attempts == 3
    # A record is a second old at most, so it may not know of the step whose checkpoint was written before the end.
    assert found.lost_steps == max(0, first.last_step - third.resumed_step)
    assert min(found.seconds.values()) >= 0
    assert math.fsum(found.seconds.values()) == found.wall_s
    # Our watch began before the first process and stopped after the last, and all in between is counted.
    assert found.wall_s <= ended - began
    assert found.wall_s == pytest.approx(third.began + third.wall_s - first.began, abs=1e-5)
    for phase in ("start", "compile", "init", "restore", "data", "step", "evaluate", "save", "restart"):
        assert found.seconds[phase] > 0, phase
    part = goodput_part(found)
    assert part.share == found.share
    shares = [json.loads(line)["goodput"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= share < 1 for share in shares)
