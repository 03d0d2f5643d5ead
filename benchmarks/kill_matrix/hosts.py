"""Two launchers of a process each, as on two hosts that share a file system: what the loss of a host costs.

    python -m benchmarks.kill_matrix.hosts

Every row is a run of its own: seconds from the fault until the launcher that is left says so, and until the first new
step; both launchers are started again at once. The losses are compared with a run that is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.kill_matrix.cells import baseline
from benchmarks.kill_matrix.gang import EXPERIMENT, Gate, Launch, are_gone, send
from meshkit.distributed.certificates import make_certificates, write_certificates
from meshkit.distributed.roll_call import free_port

MEMORY_ALONE = ("--set", "checkpoint.every=0", "--set", "checkpoint.snapshot_every=2")
DISK_TOO = ("--set", "checkpoint.every=8", "--set", "checkpoint.snapshot_every=2")
DISK_ALONE = ("--set", "checkpoint.every=2", "--set", "checkpoint.snapshot_every=0")
THREE_HOSTS = EXPERIMENT.with_name("three_hosts.toml")
GATE = Gate("save", 1, 16)  # before process 1 copies the state of step 16
FAULTS = {
    "process 1 is killed": (MEMORY_ALONE, ()),
    "host 1 is lost": (MEMORY_ALONE, (1,)),
    "host 0 is lost": (MEMORY_ALONE, (0,)),
    "both hosts are lost": (DISK_TOO, (0, 1)),
}


class SeveralHosts:
    """The launchers of a job, with the gate of the first attempt at process 1.

    Args:
        folder: of all that they write.
        options: of all launchers.
        count: hosts of the job.
        spares: launchers beyond them.
        experiment: that they run.
    """

    def __init__(self, folder: Path, options: tuple[str, ...], count: int, spares: int, experiment: Path):
        step = {DISK_TOO: 8, DISK_ALONE: GATE.step - 2}.get(options)
        self._checkpoint = folder / "run" / "checkpoints" / str(step) if step else None
        self._copies = options != DISK_ALONE
        write_certificates(folder / "mtls", make_certificates(["127.0.0.1"]))
        job = ("--hosts", str(count), "--coordinator", f"127.0.0.1:{free_port()}", "--max-restarts", "3", *options)
        self.launches = [
            Launch(
                folder / f"host{host}",
                {0: GATE} if host == GATE.rank else {},
                (*job, "--host-index", str(host)),
                experiment,
                processes=1,
                out=folder / "run",
                variables={"MESHKIT_MTLS": str(folder / "mtls")},
            )
            for host in range(count + spares)
        ]
        self._count = count

    def wait_for_gate(self) -> None:
        """Returns when process 1 holds before its snapshot of step 16, and what came before that is whole."""
        self.launches[GATE.rank].wait_for_mark(0, "at")
        for launch in self.launches[: self._count * self._copies]:
            launch.wait(lambda launch=launch: launch.copied_step() >= GATE.step - 2, "the copies of step 14")
        if self._checkpoint is not None:
            self.launches[0].wait(self._checkpoint.exists, f"the checkpoint {self._checkpoint}")

    def lose(self, *hosts: int) -> None:
        """Their launchers go, and with them their processes and what they hold in memory."""
        pids = [pid for host in hosts for pid in self.launches[host].ranks().values()]
        for host in hosts:
            process = self.launches[host].process
            assert process is not None
            process.kill()
            process.wait()
        self.launches[0].wait(lambda: are_gone(pids), "the end of the processes of a lost host")

    def replace(self, *hosts: int) -> None:
        """Others take their places."""
        for host in hosts:
            self.launches[host].start()

    def kill_process(self) -> None:
        """Process 1 goes, and its launcher stays."""
        send(self.launches[1].ranks()[1], signal.SIGKILL)

    def end(self, *but: int) -> list[tuple[int, float]]:
        """The losses, once all launchers but some have ended well.

        Raises:
            RuntimeError: one has not.
        """
        codes = [launch.end() for host, launch in enumerate(self.launches) if host not in but]
        if any(codes):
            raise RuntimeError(f"the launchers ended with {codes}:\n{self.said[-6000:]}")
        return self.launches[0].losses()

    @property
    def said(self) -> str:
        """All that the launchers have printed."""
        return "".join(launch.said for launch in self.launches)


@contextmanager
def several_hosts(
    folder: Path, options: tuple[str, ...], count: int = 2, *, spares: int = 0, experiment: Path = EXPERIMENT
) -> Iterator[SeveralHosts]:
    """The launchers; nothing of them is left afterwards."""
    made = SeveralHosts(folder, options, count, spares, experiment)
    try:
        for launch in made.launches:
            launch.start()
        yield made
    finally:
        for launch in made.launches:
            launch.kill()


def _measure(fault: str, folder: Path, alone: list[tuple[int, float]]) -> str:
    options, lost = FAULTS[fault]
    with several_hosts(folder, options) as hosts:
        hosts.wait_for_gate()
        watching = hosts.launches[1 if lost == (0,) else 0]
        began = time.monotonic()
        if lost:
            hosts.lose(*lost)
            hosts.replace(*lost)
        else:
            hosts.kill_process()
        found = "-"
        if len(lost) < 2:
            watching.wait(lambda: "attempt 0 has ended elsewhere" in watching.said or None, "word of the fault")
            found = f"{time.monotonic() - began:.1f}"
        made = lambda: max((step for step, _ in hosts.launches[0].losses()), default=0)
        hosts.launches[0].wait(lambda: made() > GATE.step or None, "a new step")
        again = time.monotonic() - began
        same = "the same, bit for bit" if hosts.end() == alone else "DIFFERENT"
        after = max(int(words.split()[0]) for words in hosts.said.split("after step ")[1:])
    return f"| {fault} | {found} | {again:.1f} | {GATE.step - after} | {same} |"


def main() -> None:
    """Prints a row for every fault."""
    with tempfile.TemporaryDirectory(prefix="meshkit-hosts-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        alone = baseline(Path(scratch) / "alone")
        print("| fault | s until said | s until a new step | steps lost | losses |\n|---|---|---|---|---|")
        for i, fault in enumerate(FAULTS):
            print(_measure(fault, Path(scratch) / str(i), alone), flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.0f}; {os.cpu_count()} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
