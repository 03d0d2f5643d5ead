"""Run gangs of small Python children, without jax, for the tests of the supervisor."""

import os
import sys
import textwrap
import time
from pathlib import Path

from meshkit.verbs.launch.local import Policy, Supervisor

FAST = Policy(max_restarts=2, save_grace_s=10, failure_grace_s=0.3, pause_s=0.01)
PRELUDE = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["RANK_"]), int(os.environ["ATTEMPT_"])
def step(n):
    with open("metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": n}) + "\\n")
def wait():
    while True: time.sleep(0.05)
def mark(name):
    open(name, "w").close()
def until(name):
    while not os.path.exists(name): time.sleep(0.01)
def pulse(phase):
    from meshkit.runs.phases import Phases
    global phases
    phases = Phases().__enter__()
    phases.enter(phase, 5)
def done():
    phases.__exit__()
    sys.exit(0)
"""


class Run:
    """Run a supervisor of small Python children in a folder, and keep what it shows."""

    def __init__(self, folder, body, *, processes=2, policy=FAST):
        self.folder, self.shown = folder, []
        self.show = self.shown.append
        code = f"import os; os.chdir({str(folder)!r})" + PRELUDE + textwrap.dedent(body)
        self.supervisor = Supervisor(
            [sys.executable, "-c", code],
            lambda attempt: [{**os.environ, "RANK_": str(i), "ATTEMPT_": str(attempt)} for i in range(processes)],
            folder,
            policy,
            lambda line: self.show(line),
        )

    def __call__(self):
        return self.supervisor.run()

    @property
    def text(self):
        return "\n".join(self.shown)


def alive(file):
    """Return whether the process whose id a child wrote down still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{int(file.read_text())}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # It was gone before, or between opening and reading.
        return False
    return state != "Z"


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)
