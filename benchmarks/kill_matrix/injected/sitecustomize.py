"""Make a process of a gang under test wait at a gate, so that a fault hits it at exactly the intended moment.

    KILL_GATES (JSON, from the harness) -> gate of this attempt -> `at` is written, the process waits -> fault

Python imports this module in every process because of its name. meshkit has no code for it: the module wraps
`Phases.enter`, and an audit hook tells it of files and sockets.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_HOLDS_S = 120.0
_COMMIT = re.compile(r"/checkpoints/\d+$")
_CHECKPOINT_FILE = re.compile(r"/checkpoints/\d+/")


class InjectedError(Exception):
    """An exception that no code expects."""


class Gate:
    """The gate of an attempt, in one of its processes.

    After the gate, `slow_s` makes the steps of the process longer. Without it, the run could end before all processes
    have agreed to stop.

    Args:
        said: the fields of `gang.Gate`.
        folder: the folder for the attempt's marks.
        rank: rank of this process.
    """

    def __init__(self, said, folder, rank):
        self.phase, self.victim, self.step = said["phase"], said["rank"], said.get("step", 0)
        self.raises, self.holds, self.slow_s = said["raises"], said["holds"], said["slow_s"]
        self.folder, self.rank, self.passed, self.now = folder, rank, False, "start"
        self.saved = False
        self.lock = threading.Lock()

    def entered(self, phase, step):
        """Handle the start of a phase in the main thread of this process."""
        self.now = phase
        if self.passed and self.slow_s and phase == "step":
            time.sleep(self.slow_s)
        if self.phase == "commit" and self.victim and self.rank == self.victim:
            self.saved |= phase == "save" and step is not None and step >= self.step
            if self.saved and phase == "step":
                self.wait("committing")  # until a thread of process 0 commits the step before
                self.reach(self.raises)
        elif self.rank == self.victim and phase == self.phase and phase in ("compile", "step", "save"):
            self.reach(self.raises, step)

    def heard(self, event, arguments):
        """Handle an audit event, such as an opened file or a connected socket, from any thread."""
        if self.phase == "start" and event in ("socket.bind", "socket.connect") and self.rank == self.victim:
            port = os.environ["MESHKIT_COORDINATOR"].rsplit(":", 1)[1]
            if isinstance(arguments[1], tuple) and str(arguments[1][1]) == port:
                self.reach(self.raises)
        elif self.phase == "restore" and event == "open" and self.now == "restore" and self.rank == self.victim:
            if _CHECKPOINT_FILE.search(str(arguments[0])):
                self.reach(self.raises)
        elif self.phase == "commit" and event == "os.rename" and self.rank == 0:
            found = _COMMIT.search(str(arguments[1]))
            if found and int(found[0].rsplit("/", 1)[1]) >= self.step:
                if self.victim == 0:
                    self.reach(self.raises)
                elif not (self.folder / "committing").exists():
                    (self.folder / "committing").touch()
                    self.wait("go")

    def reach(self, raises, step=None):
        """Write the mark `at`, then raise or wait as the gate says. This happens once, from the gate's step on."""
        if step is not None and step < self.step:
            return
        with self.lock:
            if self.passed:
                return
            self.passed = True
        self.tell("at")
        if raises:
            raise InjectedError(f"an injected fault of process {self.rank} in {self.phase}")
        if self.holds:
            self.wait("go")

    def wait(self, name):
        deadline = time.monotonic() + _HOLDS_S
        while not (self.folder / name).exists() and time.monotonic() < deadline:
            time.sleep(0.002)

    def tell(self, name):
        part = self.folder / f"{name}.{self.rank}.part"
        part.write_text(json.dumps({"time": time.time(), "pid": os.getpid()}))
        part.rename(self.folder / name)


def note_memory(path, made):
    """Append the resident memory of this process after `made` steps to a file."""
    status = Path("/proc/self/status").read_text()
    with path.open("a") as file:
        file.write(json.dumps({"made": made, "bytes": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024}) + "\n")


def leave_helper(text):
    """Start a daemon in a session of its own, which only SIGKILL ends. No run may leave it behind."""
    code = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); os.fork() or time.sleep(3600)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, text], check=True)


def install(said, rank, attempt):
    """Wrap `Phases.enter` in this process, install the gate of this attempt, and start a daemon."""
    from meshkit.runs.phases import Phases

    folder = Path(said["folder"]) / f"attempt{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    here = said["gates"].get(str(attempt))
    gate = Gate(here, folder, rank) if here else None
    enter, told, made, asked = Phases.enter, [], [0], []
    signal.signal(signal.SIGUSR2, lambda *_: asked.append(True))

    def wrapped(self, phase, step=None, **named):
        if asked:
            raise InjectedError(f"an injected fault of process {rank} before {phase}")
        before = self.phase
        enter(self, phase, step, **named)
        if before == "step" and phase != "step":
            made[0] += 1
            if made[0] % said["memory_every"] == 0:
                note_memory(folder / f"memory{rank}.jsonl", made[0])
        if before == "step" and rank == 0 and not told:  # the first step of this attempt is made
            told.append(part := folder / "stepped.part")
            part.write_text(json.dumps({"time": time.time()}))
            part.rename(folder / "stepped")
        if gate:
            gate.entered(phase, step)

    Phases.enter = wrapped
    leave_helper(str(folder))
    if gate:
        sys.addaudithook(gate.heard)


if os.environ.get("KILL_GATES") and os.environ.get("MESHKIT_PULSE") and "train" in sys.orig_argv:
    install(
        json.loads(os.environ["KILL_GATES"]), int(os.environ["MESHKIT_PROCESS_ID"]), int(os.environ["MESHKIT_ATTEMPT"])
    )
