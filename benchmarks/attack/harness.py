"""Runs attacks in child processes under a watchdog: nothing may crash, hang, grow, or be believed wrongly.

campaign, numbers of attacks -> child: prepare once, then one after the other -> a line before and after each
parent: reads the lines; ends a child whose attack takes too long or too much memory, and goes on behind it
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

CPU_LIMIT_S, WALL_LIMIT_S = 5.0, 60.0  # of one attack; the wall has room for a machine that others use as well
MEMORY_LIMIT_BYTES = 2**30  # of the process, with jax in it
_PREPARE_LIMIT_S = 600.0
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).parents[2]


class Broken(Exception):
    """An attack got through: what was believed, or what came of it."""


@dataclass(frozen=True)
class Attack:
    """One attack."""

    name: str  # what is done to what
    run: Callable[[], str]
    """Tries it and says what came of it in a word; raises `Broken` where it got through."""


@dataclass(frozen=True)
class Campaign:
    """A kind of attack.

    Attributes:
        count: how many attacks there are; number i is the same one in every run.
        prepare: a folder of its own -> a function that makes attack number i. Also reads what is undamaged, so that no
            import counts as an attack's time.
        limit_s: CPU seconds of one attack.
    """

    count: int
    prepare: Callable[[Path], Callable[[int], Attack]]
    limit_s: float = CPU_LIMIT_S


@dataclass
class Outcome:
    """What came of an attack."""

    number: int
    name: str
    held: bool
    said: str  # in a word; of a failure what happened
    cpu_s: float = 0.0
    memory_bytes: int = 0  # of the process at the most


def run(name: str, numbers: Sequence[int], limit_s: float) -> Iterator[Outcome]:
    """The outcomes of some attacks of a campaign."""
    left = list(numbers)
    while left:
        for outcome in _child(name, left, limit_s):
            left.remove(outcome.number)
            yield outcome


def _child(name: str, numbers: Sequence[int], limit_s: float) -> Iterator[Outcome]:
    """Outcomes of one child, until it is through or had to be ended."""
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
    """Ends a child whose attack takes too much."""

    def __init__(self, pid: int, limit_s: float):
        self.reason = ""
        self._pid, self._limit_s = pid, limit_s
        self._since: tuple[float, float] | None = None  # CPU and wall when the attack began
        self._gone, self._started = False, time.monotonic()

    def begin(self) -> None:
        self._since = _cpu_s(self._pid), time.monotonic()

    def end(self, *, gone: bool = False) -> None:
        self._since, self._gone = None, gone
        self._started = time.monotonic()

    def look(self) -> None:
        """Until the child is gone."""
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
                os.kill(self._pid, 9)  # our own child, not yet waited for
                return


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and of those that it waited for."""
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
    """The child: runs the attacks whose numbers stdin has, and says so on what stdout was."""
    numbers = json.loads(sys.stdin.read())
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever prints
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
    """The most memory that this process has had since the last call."""
    text = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def command(*words: str) -> str:
    """What a command of meshkit's does in this process: its exit code, or `Broken` for a bug.

    Raises:
        Broken: a traceback, an error without a word, or raw escapes on the terminal.
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
    """Exit code and all that was printed, also by libraries below Python."""
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
