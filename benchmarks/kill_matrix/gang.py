"""A launch under test: started, watched from outside through /proc, hit, and read afterwards."""

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
# For whatever has to come; a machine under load is 8 times slower than a quiet one.
PATIENCE_S = 240.0
# A process of a gang notes its memory after so many of its steps.
MEMORY_EVERY = 10
# A process under test raises an exception when it enters a phase after this signal; see injected/sitecustomize.py.
RAISE = signal.SIGUSR2


@dataclass(frozen=True)
class Gate:
    """Where the fault of an attempt comes; see injected/sitecustomize.py."""

    phase: str
    rank: int
    step: int = 0
    raises: bool = False
    holds: bool = True
    slow_s: float = 0.0


class Launch:
    """`meshkit launch local` of processes x 4 devices, in a folder of its own.

    Args:
        folder: where the run (`run/`), the marks of the gates and what the launcher says go.
        gates: attempt -> where its fault comes.
        options: of the launcher.
        experiment: that it runs.
        injects: whether something is injected into its processes.
        processes: of this launcher.
        out: run folder, of launchers that share one; `run` of the folder by default.
        variables: of its environment, beside those of this process.
        prefix: of its command, such as `ip netns exec NAME`.
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

    def start(self) -> None:
        """Starts it, or the same command again."""
        path = [str(_SITE)] * self._injects + [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = json.dumps({"folder": str(self._marks), "gates": self._gates, "memory_every": MEMORY_EVERY})
        env = os.environ | self._variables | {"PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(self.scratch)}
        env |= {"KILL_GATES": told} if self._injects else {}
        env.pop("XLA_FLAGS", None)  # of whatever test runs this
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
        """All that the launcher has printed."""
        return self._said.read_text(errors="replace")

    def mark(self, attempt: int, name: str) -> dict | None:
        """What a gate of an attempt has told, if it has."""
        try:
            return json.loads((self._marks / f"attempt{attempt}" / name).read_text())
        except (OSError, ValueError):
            return None

    def wait_for_mark(self, attempt: int, name: str) -> dict:
        """The same, once it has.

        Raises:
            TimeoutError: it does not come.
        """
        return self.wait(lambda: self.mark(attempt, name), f"{name} of attempt {attempt}")

    def let_go(self, attempt: int) -> None:
        """Lets the processes that hold at a gate go on."""
        (self._marks / f"attempt{attempt}").mkdir(parents=True, exist_ok=True)
        (self._marks / f"attempt{attempt}" / "go").touch()

    def wait[T](self, look: Callable[[], T | None], what: str, seconds: float = PATIENCE_S) -> T:
        """What `look` finds, once it finds something.

        Raises:
            TimeoutError: it does not.
        """
        deadline = time.monotonic() + seconds
        while (found := look()) is None or found is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come in {seconds:g} s; the launcher said:\n{self.said[-4000:]}")
            time.sleep(_LOOK_S)
        return found

    def end(self, seconds: float = PATIENCE_S) -> int:
        """The exit code, once there is one."""
        assert self.process is not None
        return self.process.wait(seconds)

    def attempt(self) -> int:
        """Return the number of the present attempt, of which a process must be alive."""
        return min(self._alive())

    def ranks(self) -> dict[int, int]:
        """Number of the process by rank, of those of the present attempt that are alive."""
        alive = self._alive()
        return alive[min(alive)] if alive else {}

    def standby(self) -> dict[int, int]:
        """The same of those that wait for the next attempt."""
        alive = self._alive()
        return alive[max(alive)] if len(alive) > 1 else {}

    def _alive(self) -> dict[int, dict[int, int]]:
        """Number of the process by attempt and rank: below a reaper, and leading its session."""
        assert self.process is not None
        found: dict[int, dict[int, int]] = {}
        parents = _parents()
        for pid, reaper in parents.items():
            if parents.get(reaper) == self.process.pid and _stat(pid)[3:4] == [str(pid)]:
                attempt, rank = (int(_variable(pid, f"MESHKIT_{name}") or -1) for name in ("ATTEMPT", "PROCESS_ID"))
                found.setdefault(attempt, {})[rank] = pid
        return found

    def helpers(self, attempt: int) -> list[int]:
        """Daemons that the processes of an attempt have left, see injected/sitecustomize.py."""
        return processes_with(str(self._marks / f"attempt{attempt}"))

    def pulse(self, rank: int) -> dict:
        """What a process says of itself; empty if nothing, or if it is gone."""
        pid = self.ranks().get(rank, 0)
        path = (_variable(pid, "MESHKIT_PULSE") or "").replace("/self/", f"/{pid}/")
        try:
            return json.JSONDecoder().raw_decode(Path(path).read_text())[0]  # the parts of its start stand behind it
        except (OSError, ValueError):
            return {}

    def copied_step(self) -> int:
        """Newest step of which every process's snapshot has a copy on another host; 0 for none."""
        return min((max(_copied_steps(pid), default=0) for pid in self.ranks().values()), default=0)

    def memory(self, attempt: int, rank: int) -> dict[int, int]:
        """Steps made in an attempt -> resident bytes of the process."""
        try:
            lines = (self._marks / f"attempt{attempt}" / f"memory{rank}.jsonl").read_text().splitlines()
        except OSError:
            return {}
        return {record["made"]: record["bytes"] for record in map(json.loads, lines)}

    def coordinator(self) -> str | None:
        """Where process 0 of the present attempt listens."""
        return next((_variable(pid, "MESHKIT_COORDINATOR") for pid in self.ranks().values()), None)

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss, of the whole run so far."""
        try:
            lines = (self.out / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [(r["step"], r["loss"]) for r in records]

    def kill(self) -> None:
        """Ends what is left of it."""
        if self.process is not None and self.process.poll() is None:
            for pid in [self.process.pid, *descendants(self.process.pid)]:
                send(pid, signal.SIGKILL)
            self.process.wait()


def send(pid: int, number: signal.Signals) -> None:
    """A signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Children of a process, their children, and so on."""
    parents, found = _parents(), [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def are_gone(pids: list[int]) -> bool:
    """Whether all have ended; what nobody has waited for yet counts as ended."""
    return all(_state(pid) in ("", "Z", "X") for pid in pids)


def processes_with(text: str) -> list[int]:
    """Processes whose command line has the text."""
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
    """Steps of a process's snapshots that another host has."""
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
    """CPU seconds of a process so far; 0 if it is gone."""
    words = _stat(pid)
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") if words else 0.0


def _stat(pid: int) -> list[str]:
    """From the state on."""
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
    """Resident memory of a process; 0 if it is gone."""
    words = _stat(pid)
    return int(words[21]) * os.sysconf("SC_PAGE_SIZE") if words else 0
