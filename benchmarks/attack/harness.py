"""Run attacks in child processes under a watchdog, which kills a child that hangs or uses too much memory.

The parent starts a child with a campaign and the numbers of its attacks. The child prepares the campaign once, then
runs the attacks one after the other and writes a line before and after each. The parent reads these lines. It kills a
child whose attack takes too long or too much memory, and a new child continues after that attack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_LIMIT_S, WALL_LIMIT_S = 5.0, 60.0  # Limits of one attack; the wall time allows for a shared machine.
MEMORY_LIMIT_BYTES = 2**30  # Limit of the process, jax included.
_PREPARE_LIMIT_S = 600.0
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).parents[2]


class Broken(Exception):
    """An attack succeeded; the message says what meshkit accepted or what happened."""


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str
    """A description of the damage and of what is damaged."""
    run: Callable[[], str]
    """A function that tries the attack and returns its outcome in a few words.

    It raises `Broken` if the attack gets through.
    """


@dataclass(frozen=True)
class Campaign:
    """A kind of attack."""

    count: int
    """The number of attacks; attack number i is the same in every run."""
    prepare: Callable[[Path], Callable[[int], Attack]]
    """A function from a folder of its own to a function that makes attack number i.

    It also reads undamaged inputs, so that no import counts as an attack's time.
    """
    limit_s: float = CPU_LIMIT_S
    """The CPU seconds that one attack may take."""


@dataclass
class Outcome:
    """The outcome of an attack."""

    number: int
    """The number of the attack in its campaign."""
    name: str
    """The name of the attack."""
    held: bool
    """Whether meshkit withstood the attack."""
    said: str
    """The outcome in a few words, or what went wrong."""
    cpu_s: float = 0.0
    """The CPU seconds of the attack."""
    memory_bytes: int = 0
    """The peak memory of the process during the attack."""


def run(name: str, numbers: Sequence[int], limit_s: float) -> Iterator[Outcome]:
    """Yield the outcomes of some attacks of a campaign."""
    left = list(numbers)
    while left:
        for outcome in _child(name, left, limit_s):
            left.remove(outcome.number)
            yield outcome


def _child(name: str, numbers: Sequence[int], limit_s: float) -> Iterator[Outcome]:
    """Yield the outcomes of one child, until it has run all attacks or had to be killed."""
    command = [sys.executable, "-m", "benchmarks.attack", "--child", name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MESHKIT_CACHE": "off", "PYTHONPATH": str(_ROOT)}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=_ROOT
    )
    assert child.stdin
    assert child.stdout
    child.stdin.write(json.dumps(list(numbers)))
    child.stdin.close()
    watch = _Watch(child.pid, limit_s)
    threading.Thread(target=watch.look, daemon=True).start()
    current: Outcome | None = None
    for line in child.stdout:
        said = json.loads(line)
        if "began" in said:
            current = Outcome(said["began"], said["name"], False, "")
            watch.begin()
        else:
            watch.end()
            yield Outcome(**said)
            current = None
    watch.end(gone=True)
    code = child.wait()
    if current is not None:
        current.said = watch.reason or f"the process ended with {code}"
        yield current
    elif code and not watch.reason:
        raise RuntimeError(f"the campaign {name} cannot be prepared: exit code {code}")
    elif watch.reason:
        raise RuntimeError(f"the campaign {name} cannot be prepared: {watch.reason}")


class _Watch:
    """A watchdog that kills a child whose attack takes too long or too much memory."""

    def __init__(self, pid: int, limit_s: float):
        self.reason = ""
        self._pid, self._limit_s = pid, limit_s
        self._since: tuple[float, float] | None = None  # CPU and wall time at the attack's begin.
        self._gone, self._started = False, time.monotonic()

    def begin(self) -> None:
        self._since = _cpu_s(self._pid), time.monotonic()

    def end(self, *, gone: bool = False) -> None:
        self._since, self._gone = None, gone
        self._started = time.monotonic()

    def look(self) -> None:
        """Watch the child until it is gone or has to be killed."""
        while not self._gone:
            time.sleep(0.05)
            since = self._since
            if since is None:
                too_long = time.monotonic() - self._started > _PREPARE_LIMIT_S
            else:
                cpu_s, wall_s = _cpu_s(self._pid) - since[0], time.monotonic() - since[1]
                too_long = cpu_s > self._limit_s or wall_s > max(WALL_LIMIT_S, 4 * self._limit_s)
            memory = _memory_bytes(self._pid)
            if (too_long or memory > MEMORY_LIMIT_BYTES) and not self._gone and self._since is since:
                self.reason = "a hang" if too_long else f"{memory / 2**20:.0f} MiB of memory"
                os.kill(self._pid, 9)  # It is our child and not yet waited for, so the PID is its own.
                return


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and of the children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) * _TICK


def _memory_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def serve(campaign: Campaign) -> None:
    """Run, as the child, the attacks whose numbers stdin has, and write the lines to the original stdout."""
    numbers = json.loads(sys.stdin.read())
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Other output goes to stderr.
    with tempfile.TemporaryDirectory(prefix="meshkit-attack-") as folder:
        make = campaign.prepare(Path(folder))
        for number in numbers:
            attack = make(number)
            lines.write(json.dumps({"began": number, "name": attack.name}) + "\n")
            before = time.process_time()
            try:
                held, said = True, attack.run()
            except Broken as error:
                held, said = False, str(error)
            except BaseException:
                held, said = False, "a traceback: " + traceback.format_exc()[-800:]
            outcome = Outcome(number, attack.name, held, said, time.process_time() - before, _peak_bytes())
            if held and (outcome.cpu_s > campaign.limit_s or outcome.memory_bytes > MEMORY_LIMIT_BYTES):
                outcome.held, outcome.said = False, f"{outcome.cpu_s:.1f} s, {outcome.memory_bytes >> 20} MiB"
            lines.write(json.dumps(asdict(outcome)) + "\n")


def _peak_bytes() -> int:
    """Return the peak memory of this process since the last call."""
    text = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def command(*words: str) -> str:
    """Run a meshkit command in this process and return what its exit code means.

    Raises:
        Broken: it printed a traceback, failed without a message, had an unknown exit code, or printed a raw escape.
    """
    code, text = captured(list(words))
    if code == 1 or "Traceback (most recent call last)" in text:
        raise Broken(f"a traceback: {text[-800:]}")
    if code not in (0, 2, 3, 4):
        raise Broken(f"exit code {code}: {text[-300:]}")
    if code == 2 and not text.strip():
        raise Broken("exit code 2 without a word")
    if "\x1b" in text:
        raise Broken("an escape on the terminal")
    return {0: "read", 2: "refused", 3: "read, a condition is not met", 4: "refused as a failure"}[code]


def captured(words: list[str]) -> tuple[int, str]:
    """Return the exit code of a command and everything that it printed, also from libraries below Python."""
    from meshkit.cli import main

    with tempfile.TemporaryFile() as file:
        kept = os.dup(1), os.dup(2)
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            code = main(words)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, old in zip((1, 2), kept):
                os.dup2(old, number)
                os.close(old)
        file.seek(0)
        return code, file.read(1 << 20).decode(errors="replace")
