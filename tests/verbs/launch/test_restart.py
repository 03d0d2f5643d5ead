"""Test that two processes x four devices train with the losses of an undisturbed run, though one is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENT = "configs/experiments/llama_debug_cpu.toml"
SETS = [
    'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}',
    *("mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4", "profile.steps="),
    *("train.steps=12", "train.evaluate_every=0", "optimizer.warmup_steps=2", "checkpoint.every=2"),
]


def start(out, *options):
    words = [word for text in SETS for word in ("--set", text)]
    gang = ["--processes", "2", "--devices", "4", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "meshkit", "launch", "local", *gang, EXPERIMENT, *words, "--out", str(out)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(out):
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def last_step(out):
    try:
        return losses(out)[-1][0]
    except (OSError, ValueError, IndexError):
        return 0


def gangs_of(out):
    """Return ids of the processes that train into a folder, or wait to, by attempt and rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"train" in words and str(out).encode() in words:
                variables = dict(v.split(b"=", 1) for v in (entry / "environ").read_bytes().split(b"\0") if v)
                attempt, rank = (int(variables[name]) for name in (b"MESHKIT_ATTEMPT", b"MESHKIT_PROCESS_ID"))
                found.setdefault(attempt, {})[rank] = int(entry.name)
        except (OSError, KeyError):
            continue
    return found


def processes_of(out):
    """Return the processes of the present attempt."""
    gangs = gangs_of(out)
    return gangs[min(gangs)] if gangs else {}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
@pytest.mark.parametrize("options", [(), ("--no-standby",)])
def test_a_killed_process_changes_no_loss(tmp_path, options):
    alone = start(tmp_path / "alone")
    _, said = alone.communicate(timeout=300)
    assert alone.returncode == 0, said

    killed = start(tmp_path / "killed", "--max-restarts", "1", *options)
    try:
        deadline = time.monotonic() + 200
        while last_step(tmp_path / "killed") < 3 or (not options and len(gangs_of(tmp_path / "killed").get(1, {})) < 2):
            assert time.monotonic() < deadline
            assert killed.poll() is None
            time.sleep(0.02)
        waiting = gangs_of(tmp_path / "killed").get(1)
        os.kill(processes_of(tmp_path / "killed")[1], signal.SIGKILL)
        while (gangs := gangs_of(tmp_path / "killed")).keys() != {1} or len(gangs[1]) < 2:
            assert time.monotonic() < deadline
            assert killed.poll() is None
            time.sleep(0.02)
        assert (gangs[1] == waiting) == (not options)  # Those who waited have taken over.
        _, said = killed.communicate(timeout=300)
    finally:
        killed.kill()
    assert killed.returncode == 0, said
    assert "process 1 ended first: killed by SIGKILL" in said
    assert "resuming" in said
    assert "trains again" in said
    assert losses(tmp_path / "killed") == losses(tmp_path / "alone")  # The losses agree bit for bit.
    assert gangs_of(tmp_path / "killed") == {}
    logs = {path.name for path in (tmp_path / "killed" / "logs").iterdir()}
    assert logs == {"attempt0", "attempt1", "launcher"}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
@pytest.mark.parametrize("told", [0, 1])
def test_one_process_that_is_told_to_stop_stops_all_after_the_same_step(tmp_path, told):
    """A scheduler may signal one host alone: the checkpoint is whole, and the run goes on from it bit for bit."""
    alone = start(tmp_path / "alone")
    _, said = alone.communicate(timeout=300)
    assert alone.returncode == 0, said

    stopped = start(tmp_path / "stopped")
    try:
        deadline = time.monotonic() + 200
        while last_step(tmp_path / "stopped") < 3:
            assert time.monotonic() < deadline
            assert stopped.poll() is None
            time.sleep(0.02)
        os.kill(processes_of(tmp_path / "stopped")[told], signal.SIGTERM)
        _, said = stopped.communicate(timeout=200)
    finally:
        stopped.kill()
    assert stopped.returncode == 75, said
    again = start(tmp_path / "stopped")
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert losses(tmp_path / "stopped") == losses(tmp_path / "alone")
