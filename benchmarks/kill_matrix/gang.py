"""Start a launch under test, watch it from outside through /proc, hit its processes, and read its results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshkit.runs.snapshots import Slot

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = Path(__file__).with_name("experiment.toml")
_SITE = Path(__file__).with_name("injected")
_LOOK_S = 0.01
# Time limit of every wait. A machine under load is 8 times slower than a quiet one.
PATIENCE_S = 240.0
# Number of steps after which a process writes down its memory, again and again.
MEMORY_EVERY = 10
# A process under test raises an exception when it enters a phase after this signal; see injected/sitecustomize.py.
RAISE = signal.SIGUSR2


@dataclass(frozen=True)
class Gate:
    """The place of an attempt's fault; see injected/sitecustomize.py.

    Attributes:
        phase: the phase in which the fault comes.
        rank: rank of the process that is hit.
        step: the first step at which the fault may come.
        raises: whether the process itself raises an exception at the gate.
        holds: whether the process waits at the gate until `Launch.let_go`.
        slow_s: seconds that are added to each later step of this process.
    """

    phase: str
    rank: int
    step: int = 0
    raises: bool = False
    holds: bool = True
    slow_s: float = 0.0


class Launch:
    """A `meshkit launch local` with 4 devices for each process, in a folder of its own.

    Args:
        folder: the folder for the run (`run`), the marks of the gates, and the launcher's output.
        gates: attempt -> the gate of its fault.
        options: further options of the launcher.
        experiment: the experiment file.
        injects: whether the processes import injected/sitecustomize.py.
        processes: number of processes.
        out: the run folder, if several launchers share it; by default `run` in `folder`.
        variables: environment variables that are added to those of this process.
        prefix: words before the command, such as `ip netns exec NAME`.
    """

    def __init__(
        self,
        folder: Path,
        gates: Mapping[int, Gate] | None = None,
        options: tuple[str, ...] = (),
        experiment: Path = EXPERIMENT,
        *,
        injects: bool = True,
        processes: int = 2,
        out: Path | None = None,
        variables: Mapping[str, str] | None = None,
        prefix: tuple[str, ...] = (),
    ):
        self.folder, self.out, self._options, self._experiment = folder, out or folder / "run", options, experiment
        self._processes, self._variables, self._prefix = processes, variables or {}, prefix
        self._gates = {str(k): asdict(gate) for k, gate in (gates or {}).items()}
        self._marks, self._said = folder / "marks", folder / "said"
        self.scratch = folder / "tmp"
        self._injects = injects
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen | None = None
        self.starts = 0

    def start(self) -> None:
        """Start the launcher. After its end, this starts the same command again."""
        self.starts += 1
        path = [str(_SITE)] * self._injects + [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = json.dumps({"folder": str(self._marks), "gates": self._gates, "memory_every": MEMORY_EVERY})
        env = os.environ | self._variables | {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(self.scratch)}
        env |= {"KILL_GATES": told} if self._injects else {}
        env.pop("XLA_FLAGS", None)  # the test that runs this may have set it
        command = [
            sys.executable,
            "-m",
            "meshkit",
            "launch",
            "local",
            "--processes",
            str(self._processes),
            "--devices",
            "4",
        ]
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                [*self._prefix, *command, *self._options, str(self._experiment), "--out", str(self.out)],
                cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """The output of the launcher so far."""
        return self._said.read_text(errors="replace")

    def mark(self, attempt: int, name: str) -> dict | None:
        """Return the mark that an attempt has written under this name; None until then."""
        try:
            return json.loads((self._marks / f"attempt{attempt}" / name).read_text())
        except (OSError, ValueError):
            return None

    def wait_for_mark(self, attempt: int, name: str) -> dict:
        """Wait until an attempt has written a mark under this name, and return it.

        Raises:
            TimeoutError: no mark is written in time.
        """
        return self.wait(lambda: self.mark(attempt, name), f"{name} of attempt {attempt}")

    def let_go(self, attempt: int) -> None:
        """Let the processes that wait at a gate of an attempt go on."""
        (self._marks / f"attempt{attempt}").mkdir(parents=True, exist_ok=True)
        (self._marks / f"attempt{attempt}" / "go").touch()

    def wait[T](self, look: Callable[[], T | None], what: str, seconds: float = PATIENCE_S) -> T:
        """Return the first result of `look` that is neither None nor False.

        Args:
            look: called again and again.
            what: what is waited for, for the message.
            seconds: the time limit.

        Raises:
            TimeoutError: there is no such result in time.
        """
        deadline = time.monotonic() + seconds
        while (found := look()) is None or found is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come in {seconds:g} s; the launcher said:\n{self.said[-4000:]}")
            time.sleep(_LOOK_S)
        return found

    def end(self, seconds: float = PATIENCE_S) -> int:
        """Wait until the launcher ends, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it does not end in time.
        """
        assert self.process is not None
        return self.process.wait(seconds)

    def attempt(self) -> int:
        """Return the number of the present attempt. One of its processes must be alive."""
        return min(self._alive())

    def ranks(self) -> dict[int, int]:
        """Return rank -> PID of the processes of the present attempt that are alive."""
        alive = self._alive()
        return alive[min(alive)] if alive else {}

    def standby(self) -> dict[int, int]:
        """Return rank -> PID of the processes that wait for the next attempt."""
        alive = self._alive()
        return alive[max(alive)] if len(alive) > 1 else {}

    def _alive(self) -> dict[int, dict[int, int]]:
        """Return attempt -> rank -> PID of all living processes: the children of reapers that lead a session."""
        assert self.process is not None
        found: dict[int, dict[int, int]] = {}
        parents = _parents()
        for pid, reaper in parents.items():
            if parents.get(reaper) == self.process.pid and _stat(pid)[3:4] == [str(pid)]:
                attempt, rank = (int(_variable(pid, f"MESHKIT_{name}") or -1) for name in ("ATTEMPT", "PROCESS_ID"))
                found.setdefault(attempt, {})[rank] = pid
        return found

    def helpers(self, attempt: int) -> list[int]:
        """Return the PIDs of the daemons that an attempt's processes have started; see injected/sitecustomize.py."""
        return processes_with(str(self._marks / f"attempt{attempt}"))

    def pulse(self, rank: int) -> dict:
        """Return the pulse that a process has published; {} if it has published none or is gone."""
        pid = self.ranks().get(rank, 0)
        path = (_variable(pid, "MESHKIT_PULSE") or "").replace("/self/", f"/{pid}/")
        try:
            return json.JSONDecoder().raw_decode(Path(path).read_text())[0]  # the parts of its start follow
        except (OSError, ValueError):
            return {}

    def copied_step(self) -> int:
        """Return the step up to which other hosts have copies of all processes' snapshots; 0 if there is none."""
        return min((max(_copied_steps(pid), default=0) for pid in self.ranks().values()), default=0)

    def memory(self, attempt: int, rank: int) -> dict[int, int]:
        """Return number of steps made in an attempt -> resident bytes of a process after them."""
        try:
            lines = (self._marks / f"attempt{attempt}" / f"memory{rank}.jsonl").read_text().splitlines()
        except OSError:
            return {}
        return {record["made"]: record["bytes"] for record in map(json.loads, lines)}

    def coordinator(self) -> str | None:
        """Return the address at which process 0 of the present attempt listens; None if no process is alive."""
        return next((_variable(pid, "MESHKIT_COORDINATOR") for pid in self.ranks().values()), None)

    def losses(self) -> list[tuple[int, float]]:
        """Return step and loss of every step of the run so far."""
        try:
            lines = (self.out / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [(r["step"], r["loss"]) for r in records]

    def kill(self) -> None:
        """Kill the launcher and all its descendants, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                send(pid, signal.SIGKILL)
            self.process.wait()


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return the PIDs of a process's children, their children, and so on."""
    parents, found = _parents(), [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def are_gone(pids: list[int]) -> bool:
    """Return whether all these processes have ended. A zombie counts as ended."""
    return all(_state(pid) in ("", "Z", "X") for pid in pids)


def processes_with(text: str) -> list[int]:
    """Return the PIDs of the processes whose command line contains a text."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (words := _stat(int(entry.name))):
            found[int(entry.name)] = int(words[1])
    return found


def _copied_steps(pid: int) -> list[int]:
    """Return the steps of a process's snapshots of which another host has a copy."""
    steps = []
    for path in (_variable(pid, "MESHKIT_SNAPSHOTS") or "").replace("/self/", f"/{pid}/").split(os.pathsep):
        with suppress(OSError), open(path, "rb") as file:
            slot = Slot(file.fileno())
            if slot.said_copied() and (record := slot.record()) is not None:
                steps.append(record["step"])
    return steps


def _state(pid: int) -> str:
    words = _stat(pid)
    return words[0] if words else ""


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used; 0 if it is gone."""
    words = _stat(pid)
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if words else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; [] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def _variable(pid: int, name: str) -> str | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((v.decode().split("=", 1)[1] for v in variables if v.startswith(f"{name}=".encode())), None)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it is gone."""
    words = _stat(pid)
    return int(words[21]) * os.sysconf("SC_PAGE_SIZE") if words else 0
