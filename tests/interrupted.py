"""Interrupt a plan with Ctrl-C after some seconds and look for what is left; for tests and for `benchmarks.attack`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MLP = Path(__file__).parents[1] / "configs" / "experiments" / "mlp.toml"
PLAN = ["plan", str(MLP), "--set", "cluster=dgx_h100", "--no-cache"]
START = "from meshkit.cli import main; print('started', flush=True); code = main(); print('done'); exit(code)"
LONGEST_S = 6.0  # Such a plan takes this long on a quiet core, which is the last moment that is tried.


def processes_of(session):
    """Return the processes of a session that are not zombies."""
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
    """Return how a plan ended and how long that took, or None where it had ended before."""
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
        os.killpg(process.pid, signal.SIGINT)  # A terminal also sends it to all of them.
        printed, said = process.communicate(timeout=20)
        if printed.endswith("done\n"):
            return None
        took = time.monotonic() - began
        while (left := processes_of(process.pid)) and time.monotonic() - began < 2:  # Killed processes are gone soon.
            time.sleep(0.02)
        return process.returncode, took, said, left
