"""Plant hangs in gangs of 2 to 4 processes on CPU devices, and print a table of the messages that report them.

    Case -> gang with the plant -> the planted process writes when it got stuck -> message -> Found: seconds, right?

The table says `exact` where the message names the collective or phase and the missing process. It says `N candidates`
where the message lists collectives in which the processes may wait.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HERE = Path(__file__).parent
_LIMIT_S, _PATIENT_S = 10.0, 60.0  # limits of a step, and of phases that take long on a loaded machine
_LATE_S = 5.0  # a hang must be found at most this long after the limit
_PATIENCE_S = 240.0
_PORT = 61000
# Processes -> cluster, data axis, tensor axis.
_MESHES = {
    2: ("hosts=2,gpus_per_host=2", "{infiniband=2}", "2"),
    3: ("hosts=3,gpus_per_host=1", "{infiniband=3}", "1"),
    4: ("hosts=4,gpus_per_host=1", "{infiniband=2}", "{infiniband=2}"),
}
_NAMED = re.compile(r"(?:collective \d+ of \d+ of the step: |^    )(?P<name>\S+) \((?P<what>\S+ over [^)]*)\)", re.M)
_NAMES = re.compile(r"process \d+ is stuck in attempt|no progress for")
_FIRST = re.compile(rf"{_NAMES.pattern}|compiled a different step|ended first|MemoryError|RESOURCE_EXHAUSTED")


@dataclass(frozen=True)
class Case:
    """A hang to plant."""

    kind: str
    """`data`, `callback` and `hook` get stuck in the user's code. `program` compiles a different step in one process.
    `memory` lets a process run out of memory, which is no hang. Any other kind is the phase in which a process gets
    stuck."""
    rank: int
    """Rank of the process that gets stuck."""
    processes: int
    """Number of processes."""
    how: str = ""
    """`stops`: the process gets SIGSTOP. `keeps the interpreter`: it sleeps and holds the GIL. `device`: it asks its
    device for too much memory. Otherwise it sleeps."""
    step: int = 0
    """The first step at which a process gets stuck in a phase, or runs out of memory."""
    launcher: str = "local"
    """`local`: one launcher. `hosts`: a launcher for each process, as on several hosts. `none`: only environment
    variables join the processes into a gang, as under SLURM and MPI."""

    @property
    def name(self) -> str:
        return f"{self.kind}{f' ({self.how})' if self.how else ''}, rank {self.rank} of {self.processes}"

    @property
    def phase(self) -> str:
        """The phase of the planted process that the message must name."""
        return {"callback": "step", "program": "compile", "hook": "evaluate"}.get(self.kind, self.kind)

    @property
    def limit_s(self) -> float:
        """Seconds after which the hang should be found."""
        if self.kind == "memory":
            return 0.0
        if self.how == "stops" or self.phase in ("init", "data", "step", "evaluate", "check", "save"):
            return _LIMIT_S  # init and save keep the others waiting in the next step
        return _PATIENT_S


CASES = (
    *(Case("data", rank, 4) for rank in range(4)),
    Case("data", 1, 2, "keeps the interpreter"),
    Case("data", 0, 2, launcher="none"),
    Case("data", 1, 2, launcher="none"),
    Case("data", 2, 3, "keeps the interpreter", launcher="none"),
    Case("data", 0, 2, "stops", launcher="none"),
    Case("data", 0, 2, launcher="hosts"),
    Case("data", 1, 3, launcher="hosts"),
    Case("hook", 1, 2),
    Case("hook", 0, 3),
    Case("check", 1, 2),
    Case("save", 1, 2),
    Case("save", 0, 4),
    Case("start", 1, 3),
    Case("compile", 0, 2),
    Case("compile", 2, 3),
    Case("init", 0, 2),
    Case("restore", 1, 2),
    Case("end", 0, 2),
    Case("program", 1, 2),
    Case("program", 3, 4),
    Case("callback", 1, 2),
    Case("callback", 2, 4),
    Case("callback", 1, 2, "stops"),
    Case("callback", 0, 2, launcher="none"),
    Case("memory", 1, 2, step=3),
    Case("memory", 1, 2, "device", step=3),
    Case("memory", 1, 2, step=3, launcher="none"),
)


@dataclass(frozen=True)
class Found:
    """The message about a planted hang, and whether it is right."""

    case: Case
    seconds: float
    """Seconds from the hang to the message."""
    message: tuple[str, ...]
    """The lines of the message."""
    collectives: tuple[str, ...]
    """The collectives that the message names."""
    exact: bool
    """Whether the message lists no candidates."""
    wrong: str
    """What is wrong with the message; "" if nothing is."""


def run_case(case: Case, folder: Path, late_s: float = _LATE_S) -> Found:
    """Plant a hang in a new gang, and return its message.

    Args:
        case: the hang.
        folder: a folder for the run, which is replaced.
        late_s: seconds after the limit by which the message must be there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plant = {"kind": case.kind, "rank": case.rank, "how": case.how, "step": case.step, "mark": str(folder / "at")}
    env = os.environ | {
        "HANG_PLANT": json.dumps({**plant, "after": 30 // case.processes}),  # a third step or so
        "PYTHONPATH": os.pathsep.join([str(_HERE / "injected"), str(ROOT)]),
        "MESHKIT_STALL_TIMEOUT": " ".join(_limits(case)),
    }
    env.pop("XLA_FLAGS", None)  # the test that runs this may have set it
    hosts, data, tensor = _MESHES[case.processes]
    words = [str(_HERE / "experiment.toml"), "--out", str(folder / "run")]
    for text in (
        f'cluster={{gpu="cpu",{hosts},scale_up="shared_memory"}}',
        f"mesh.data={data}",
        f"mesh.tensor={tensor}",
    ):
        words += ["--set", text]
    start = _start_alone if case.launcher == "none" else _start_launchers
    started = start(case, words, env, folder)
    try:
        return _read(case, folder, started, late_s)
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill() if case.launcher == "none" else process.terminate()
                process.wait()


def _limits(case: Case) -> list[str]:
    patient = dict.fromkeys(("start", "compile", "restore", "init", "end"), _PATIENT_S)
    return [f"{_LIMIT_S:g}", *(f"{phase}={s:g}" for phase, s in patient.items()), f"stopped={_LIMIT_S:g}"]


def _start_launchers(case: Case, words: Sequence[str], env: dict[str, str], folder: Path) -> list[subprocess.Popen]:
    devices, started = "2" if case.processes == 2 else "1", []
    command = ["launch", "local", "--devices", devices, "--max-restarts", "0"]
    command += [word for text in _limits(case) for word in ("--stall-timeout", text)]
    parts = [["--processes", str(case.processes)]]
    if case.launcher == "hosts":
        shared = ["--processes", "1", "--hosts", str(case.processes), "--coordinator", _address()]
        parts = [[*shared, "--host-index", str(host)] for host in range(case.processes)]
    for host, part in enumerate(parts):
        with (folder / f"said{host}").open("wb") as said:
            process = [sys.executable, "-m", "meshkit", *command, *part, *words]
            started.append(subprocess.Popen(process, cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT))
    return started


def _address() -> str:
    return f"127.0.0.1:{_PORT + secrets.randbelow(4000)}"


def _start_alone(case: Case, words: Sequence[str], env: dict[str, str], folder: Path) -> list[subprocess.Popen]:
    """Start the processes as a launcher would that meshkit does not know."""
    shared = {
        "MESHKIT_COORDINATOR": _address(),
        "MESHKIT_NUM_PROCESSES": str(case.processes),
        "MESHKIT_SECRET": secrets.token_hex(32),
        "MESHKIT_JOIN_TIMEOUT": "120",
    }
    command = [sys.executable, "-m", "meshkit", "train", *words]
    started = []
    for rank in range(case.processes):
        of_rank = env | shared | {"MESHKIT_PROCESS_ID": str(rank)}
        with (folder / f"said{rank}").open("wb") as said:
            started.append(subprocess.Popen(command, cwd=ROOT, env=of_rank, stdout=said, stderr=said))
    return started


def _read(case: Case, folder: Path, started: Sequence[subprocess.Popen], late_s: float) -> Found:
    """Wait for the message and the end of the gang, and compare the message with what was planted."""
    deadline, at, said, ended = time.monotonic() + _PATIENCE_S, None, "", False
    if case.how == "stops" and case.launcher == "none":  # it does not end by itself
        started = [process for rank, process in enumerate(started) if rank != case.rank]
    while time.monotonic() < deadline and not ended:
        ended = all(process.poll() is not None for process in started)
        if at is None and (folder / "at").exists():
            at = json.loads((folder / "at").read_text())["time"]
        said = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("said*")))
        if _FIRST.search(said) and not ended:
            break
        time.sleep(0.05)
    now = time.time()
    while not ended and time.monotonic() < deadline:  # wait for the rest of the message, and for the end
        ended = all(process.poll() is not None for process in started)
        time.sleep(0.05)
    now = time.time() if case.kind == "memory" else now  # without memory, the processes must have ended in time
    said = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("said*")))
    message = _message(said)
    seconds = now - at if at is not None else 0.0  # a different program is reported before anything hangs
    return _judge(case, seconds, message, ended, late_s)


def _message(said: str) -> list[str]:
    """Return the lines of the message: the first line that names the hang, and those below it."""
    lines = said.splitlines()
    # A launcher also says that a process has ended, because another one has named the hang.
    found = (i for pattern in (_NAMES, _FIRST) for i, line in enumerate(lines) if pattern.search(line))
    first = next(found, len(lines))
    last = next((i for i, line in enumerate(lines[first + 1 :], first + 1) if "evidence: " in line), first + 3)
    return [line for line in lines[first : last + 1] if line.strip()]


def _judge(case: Case, seconds: float, message: list[str], ended: bool, late_s: float) -> Found:
    text, wrong = "\n".join(message), []
    collectives = tuple(f"{m['name']}: {m['what']}" for m in _NAMED.finditer(text))
    exact = "candidate" not in text
    named = rf"process(es)? {case.rank}\b"
    if case.kind == "program":
        wrong += [] if re.search(named, text) and len(re.findall(r"collective \d+ is ", text)) == 1 else ["not named"]
    elif case.kind == "memory":
        wrong += [] if "memory" in text.lower() or "lost another" in text else ["not reported"]
    else:
        if not re.search(named, text):
            wrong.append("the planted process is not named")
        silent = case.launcher == "none" and case.how  # a process that cannot answer has no phase
        if not silent and f"process {case.rank}" in text and f"in phase '{case.phase}'" not in text:
            wrong.append(f"no phase '{case.phase}'")
        if case.phase in ("data", "evaluate", "save") and not (exact and len(collectives) == 1) and not silent:
            wrong.append("no exact collective")
        if len(collectives) > 3:
            wrong.append(f"{len(collectives)} candidates")
        if not silent and "get_stuck" not in text:
            wrong.append("no stack")
    if seconds > case.limit_s + late_s:
        wrong.append(f"found after {seconds:.1f} s")
    if len(message) > 12:
        wrong.append(f"{len(message)} lines")
    if not ended:
        wrong.append("the gang goes on")
    return Found(case, seconds, tuple(message), collectives, exact, "; ".join(wrong))


def table(found: Sequence[Found]) -> str:
    """Return all cases as a Markdown table."""
    lines = ["| planted | launcher | found after s (limit) | said | |", "|---|---|---|---|---|"]
    for f in found:
        c = f.case
        by_name = "exact" if f.exact else f"{len(f.collectives)} candidate{'s' * (len(f.collectives) != 1)}"
        kind = {"program": "before the step", "memory": "its end"}.get(c.kind, by_name)
        what = f"{kind}: {', '.join(f.collectives) or f"phase '{c.phase}'"}"
        time_s = "-" if c.kind == "program" else f"{f.seconds:.1f} ({c.limit_s:g})"
        lines.append(f"| {c.name} | {c.launcher} | {time_s} | {what} | {f.wrong or 'right'} |")
    return "\n".join(lines)


def main() -> int:
    """Run the cases and print the table.

    Returns:
        The exit code: 1 if a message is not as promised, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.hangs", description="Plant hangs in gangs on CPU devices, and print a table of the messages."
    )
    parser.add_argument("--only", default="", help="the cases whose name has this text")
    parser.add_argument("--verbose", action="store_true", help="print every message, too")
    chosen = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="meshkit-hangs-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        for case in (c for c in CASES if chosen.only in f"{c.name}, {c.launcher}"):
            found.append(run_case(case, Path(scratch) / "case"))
            print(
                f"{case.name}, {case.launcher}: {found[-1].seconds:.1f} s {found[-1].wrong}",
                file=sys.stderr,
                flush=True,
            )
            if chosen.verbose or found[-1].wrong:
                print("\n".join(found[-1].message), file=sys.stderr, flush=True)
    right = sum(not f.wrong for f in found)
    print(f"{right} of {len(found)} hangs named as promised.\n\n{table(found)}")
    return int(right < len(found))


if __name__ == "__main__":
    sys.exit(main())
