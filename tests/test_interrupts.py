"""Ctrl-C at a random moment of a plan ends it with 130, soon; no process and no folder is left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MLP = Path(__file__).parents[1] / "configs" / "experiments" / "mlp.toml"
PLAN = ["plan", str(MLP), "--set", "cluster=dgx_h100", "--no-cache"]
START = "from meshkit.cli import main; print('started', flush=True); code = main(); print('done'); exit(code)"
LONGEST_S = 6.0  # of such a plan on a quiet core; the last moment that is tried


def processes_of(session):
    """Return the processes of a session that are no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, of_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(of_session) == session and state != "Z":
                found.append(entry.name)
    return found


def interrupted_after(seconds, folder):
    """Return how a plan ended and in how long; None where it had ended before."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", START, *PLAN],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(seconds)
        if process.poll() is not None:
            return None
        began = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        printed, said = process.communicate(timeout=20)
        if printed.endswith("done\n"):
            return None
        took = time.monotonic() - began
        while (left := processes_of(process.pid)) and time.monotonic() - began < 2:  # what is killed is gone soon
            time.sleep(0.02)
        return process.returncode, took, said, left


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("count", "seed"), [(3, 0), pytest.param(50, 1, marks=pytest.mark.slow)], ids=["a few", "fifty"]
)
def test_an_interrupt_ends_a_plan_at_once_and_whole(tmp_path, count, seed):
    seeded, heard, slowest = random.Random(seed), 0, 0.0
    for number in range(count):
        found = interrupted_after(LONGEST_S * (number + seeded.random()) / count, tmp_path)
        if found is None:
            continue
        code, seconds, said, left = found
        heard += 1
        assert (code, left, list(tmp_path.iterdir())) == (130, [], []), said
        assert "bug of ours" not in said
        slowest = max(slowest, seconds)
    assert heard
    print(f"{heard} interrupts, the slowest heard in {slowest:.2f} s")
