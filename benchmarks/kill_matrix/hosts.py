"""Measure what the loss of a host costs. Each launcher runs one process, as on hosts that share a file system.

    python -m benchmarks.kill_matrix.hosts

Every row is a run of its own. It has the seconds from the fault until a remaining launcher reports it, and until the
first new step. The losses are compared with an undisturbed run. With two hosts, lost launchers are started again at
once. With three hosts, nobody starts them again.

Where the network is cut or slow, each of the two launchers has a network namespace (this needs root and `ip`). The link
between them is down for CUT_S seconds, or a thread forwards its frames at SLOW_BYTES_PER_S. With the slow network, the
processes compare their step times every four steps.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from benchmarks.kill_matrix.cells import baseline
from benchmarks.kill_matrix.gang import EXPERIMENT, Gate, Launch, are_gone, send
from benchmarks.kill_matrix.network import ADDRESSES, two_hosts
from meshkit.config.experiment import Experiment
from meshkit.distributed.certificates import make_certificates, write_certificates
from meshkit.distributed.roll_call import free_port
from models.mlp import Mirrored

MEMORY_ALONE = ("--set", "checkpoint.every=0", "--set", "checkpoint.snapshot_every=2")
DISK_TOO = ("--set", "checkpoint.every=8", "--set", "checkpoint.snapshot_every=2")
DISK_ALONE = ("--set", "checkpoint.every=2", "--set", "checkpoint.snapshot_every=0")
THREE_HOSTS = EXPERIMENT.with_name("three_hosts.toml")
GATE = Gate("save", 1, 16)  # before process 1 copies the state of step 16
SPARE = (*MEMORY_ALONE, "--set", "launch.spares=1")
CUT_S, SLOW_BYTES_PER_S = 30.0, 20e3
COMPARED = (*MEMORY_ALONE, "--set", "train.straggler_every=4")
FAULTS = {
    "process 1 is killed": (MEMORY_ALONE, ()),
    "host 1 is lost": (MEMORY_ALONE, (1,)),
    "host 0 is lost": (MEMORY_ALONE, (0,)),
    "both hosts are lost": (DISK_TOO, (0, 1)),
}
SLOW = "SLOW_EXAMPLES_S"
DRAIN = (
    *SPARE,
    *("--set", "launch.drain=true", "--set", "train.straggler_every=4"),
    *("--set", 'data.source="benchmarks.kill_matrix.hosts:slow_examples"'),
)


class SeveralHosts:
    """The launchers of a job, of which process 1 has gates.

    Args:
        folder: the folder for all files.
        options: options of all launchers.
        count: number of hosts of the job.
        spares: number of additional launchers, which are spares.
        experiment: the experiment file.
        network: names of network namespaces, one for each launcher; None for loopback.
        slow: the launcher whose process reads data slowly, see `slow_examples`; None for none.
        gates: attempt -> gate of process 1.
    """

    def __init__(
        self,
        folder: Path,
        options: tuple[str, ...],
        count: int,
        spares: int,
        experiment: Path,
        network: tuple[str, ...] | None,
        slow: int | None,
        gates: Mapping[int, Gate],
    ):
        step = {DISK_TOO: 8, DISK_ALONE: GATE.step - 2}.get(options)
        self._checkpoint = folder / "run" / "checkpoints" / str(step) if step else None
        self._copies = options != DISK_ALONE
        address = ADDRESSES[0] if network else "127.0.0.1"
        write_certificates(folder / "mtls", make_certificates([address]))
        job = ("--hosts", str(count), "--coordinator", f"{address}:{free_port()}", "--max-restarts", "3", *options)
        self.launches = [
            Launch(
                folder / f"host{host}",
                gates if host == GATE.rank else {},
                (*job, "--host-index", str(host)),
                experiment,
                processes=1,
                out=folder / "run",
                variables={"MESHKIT_MTLS": str(folder / "mtls"), **({SLOW: "0.2"} if host == slow else {})},
                prefix=("ip", "netns", "exec", network[host]) if network else (),
            )
            for host in range(count + spares)
        ]
        self._count = count

    def wait_for_gate(self) -> None:
        """Return when process 1 waits before its snapshot of step 16, and earlier copies and checkpoints are whole."""
        self.launches[GATE.rank].wait_for_mark(0, "at")
        for launch in self.launches[: self._count * self._copies]:
            launch.wait(lambda launch=launch: launch.copied_step() >= GATE.step - 2, "the copies of step 14")
        if self._checkpoint is not None:
            self.launches[0].wait(self._checkpoint.exists, f"the checkpoint {self._checkpoint}")

    def lose(self, *hosts: int) -> None:
        """Kill the launchers of these hosts, and with them their processes and the snapshots in their memory."""
        pids = [pid for host in hosts for pid in self.launches[host].ranks().values()]
        for host in hosts:
            process = self.launches[host].process
            assert process is not None
            process.kill()
            process.wait()
        self.launches[0].wait(lambda: are_gone(pids), "the end of the processes of a lost host")

    def replace(self, *hosts: int) -> None:
        """Start new launchers of these hosts."""
        for host in hosts:
            self.launches[host].start()

    def found(self, began: float, host: int = 0) -> float:
        """Return the seconds from `began` until a launcher reports that the attempt has ended on another host."""
        launch = self.launches[host]
        launch.wait(lambda: "attempt 0 ended on another host" in launch.said or None, "a report of the fault")
        return time.monotonic() - began

    def kill_process(self) -> None:
        """Kill process 1, but not its launcher."""
        send(self.launches[1].ranks()[1], signal.SIGKILL)

    def end(self, *but: int) -> list[tuple[int, float]]:
        """Return the losses once all launchers have ended well, except those of the hosts `but`.

        Raises:
            RuntimeError: a launcher has failed.
        """
        codes = [launch.end() for host, launch in enumerate(self.launches) if host not in but]
        if any(codes):
            raise RuntimeError(f"the launchers ended with {codes}:\n{self.said[-6000:]}")
        return self.launches[0].losses()

    @property
    def said(self) -> str:
        """The output of all launchers so far."""
        return "".join(launch.said for launch in self.launches)


@contextmanager
def several_hosts(
    folder: Path,
    options: tuple[str, ...],
    count: int = 2,
    *,
    spares: int = 0,
    experiment: Path = EXPERIMENT,
    network: tuple[str, ...] | None = None,
    slow: int | None = None,
    gates: Mapping[int, Gate] = MappingProxyType({0: GATE}),
) -> Iterator[SeveralHosts]:
    """Yield the started launchers of a job, and kill what is left of them at the end."""
    made = SeveralHosts(folder, options, count, spares, experiment, network, slow, gates)
    try:
        for launch in made.launches:
            launch.start()
        yield made
    finally:
        for launch in made.launches:
            launch.kill()


def slow_examples(*, seed: int, experiment: Experiment) -> Mirrored:
    """Return a `[data] source` that waits before each example, for as many seconds as SLOW_EXAMPLES_S says."""
    return _Slow(seed, experiment.model.options["embed"])


class _Slow(Mirrored):
    def __getitem__(self, index: int) -> dict:
        time.sleep(float(os.environ.get(SLOW, "0")))
        return super().__getitem__(index)


def _measure_cut(folder: Path, alone: list[tuple[int, float]]) -> str:
    """Return the row of a link between two hosts that is cut for a while. No process or launcher is killed."""
    with two_hosts() as network, several_hosts(folder, MEMORY_ALONE, network=network.names) as hosts:
        hosts.wait_for_gate()
        began = time.monotonic()
        network.set_link("down")
        hosts.launches[GATE.rank].let_go(0)
        found = hosts.found(began)
        time.sleep(max(0.0, began + CUT_S - time.monotonic()))
        network.set_link("up")
        return _row(f"the network is cut for {CUT_S:.0f} s", hosts, began, found, alone)


def _measure_slow(folder: Path, alone: list[tuple[int, float]]) -> str:
    """Return the row of a link between two hosts that is slow until the end."""
    with two_hosts() as network, several_hosts(folder, COMPARED, network=network.names) as hosts:
        hosts.wait_for_gate()
        began = time.monotonic()
        network.bytes_per_s = SLOW_BYTES_PER_S
        hosts.launches[GATE.rank].let_go(0)
        words = lambda: " ".join(hosts.launches[0].said.replace("[0]", "").split())  # The console breaks lines.
        hosts.launches[0].wait(lambda: "no process is late" in words(), "a report of slow steps")
        found = time.monotonic() - began
        return _row(f"the network has {SLOW_BYTES_PER_S / 1000:.0f} kB/s", hosts, began, found, alone)


def _measure_unreplaced(fault: str, folder: Path, options: tuple[str, ...], alone: list[tuple[int, float]]) -> str:
    """Return the row of a job of three hosts that loses host 2 for good."""
    with several_hosts(folder, options, 3, spares=int(options == SPARE), experiment=THREE_HOSTS) as hosts:
        hosts.wait_for_gate()
        began = time.monotonic()
        hosts.lose(2)
        return _row(fault, hosts, began, hosts.found(began), alone, 2)


def _row(
    fault: str, hosts: SeveralHosts, began: float, found: float | None, alone: list[tuple[int, float]], *lost: int
) -> str:
    """Wait for the first new step and for the end of the run, and return the row of the fault."""
    made = lambda: max((step for step, _ in hosts.launches[0].losses()), default=0)
    hosts.launches[0].wait(lambda: made() > GATE.step or None, "a new step")
    again = time.monotonic() - began
    losses = hosts.end(*lost)
    same = "the same, bit for bit" if losses == alone else f"within {_difference(losses, alone):.0e}"
    after = max((int(words.split()[0]) for words in hosts.said.split("after step ")[1:]), default=GATE.step)
    reported = "-" if found is None else f"{found:.1f}"
    return f"| {fault} | {reported} | {again:.1f} | {GATE.step - after} | {same} |"


def _difference(losses: list[tuple[int, float]], alone: list[tuple[int, float]]) -> float:
    """Return the largest relative difference between the losses of the same steps."""
    return max(abs(a - b) / abs(b) for (_, a), (_, b) in zip(losses, alone, strict=True))


def _measure(fault: str, folder: Path, alone: list[tuple[int, float]]) -> str:
    options, lost = FAULTS[fault]
    with several_hosts(folder, options) as hosts:
        hosts.wait_for_gate()
        began = time.monotonic()
        if lost:
            hosts.lose(*lost)
            hosts.replace(*lost)
        else:
            hosts.kill_process()
        found = hosts.found(began, 1 if lost == (0,) else 0) if len(lost) < 2 else None
        return _row(fault, hosts, began, found, alone)


def main() -> None:
    """Print a row for every fault."""
    with tempfile.TemporaryDirectory(prefix="meshkit-hosts-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        alone = baseline(Path(scratch) / "alone")
        print("| fault | s until reported | s until a new step | steps lost | losses |\n|---|---|---|---|---|")
        for i, fault in enumerate(FAULTS):
            print(_measure(fault, Path(scratch) / str(i), alone), flush=True)
        if os.geteuid() == 0:
            print(_measure_cut(Path(scratch) / "cut", alone), flush=True)
            print(_measure_slow(Path(scratch) / "slow", alone), flush=True)
        with several_hosts(Path(scratch) / "three", (), 3, experiment=THREE_HOSTS) as hosts:
            hosts.launches[GATE.rank].wait_for_mark(0, "at")
            hosts.launches[GATE.rank].let_go(0)
            alone = hosts.end()
        for fault, options in (("host 2 of 3 is lost, a spare waits", SPARE), ("host 2 of 3 is lost", MEMORY_ALONE)):
            print(_measure_unreplaced(fault, Path(scratch) / fault, options, alone), flush=True)
    print(f"load average at the end: {os.getloadavg()[0]:.0f}; {os.cpu_count()} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
