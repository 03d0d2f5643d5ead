"""What every launcher starts: the training of one experiment, on so many hosts, by so many processes a host.

experiment file + --set -> Job -> local gang, SLURM, JobSet, MPI
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshkit.config.experiment import load
from meshkit.errors import ConfigError, RunError

SAVE_S = 120  # from SIGTERM to the end of a job: for a checkpoint


@dataclass(frozen=True)
class Job:
    """A training run to start."""

    name: str
    """Name of the job, and of its run folder where none is given: lower-case letters, digits and `-`."""
    experiment: str
    """Path of the file, as the processes find it."""
    overrides: tuple[str, ...]
    """The `--set` options."""
    out: str
    """The run folder, on a file system that all hosts share."""
    hosts: int
    """Machines."""
    gpus_per_host: int
    """GPUs that the job uses of each."""
    processes_per_host: int = 1
    """1, or one for each GPU, or a number in between that divides them."""
    max_restarts: int = 3
    """Attempts after the first one."""

    @property
    def num_processes(self) -> int:
        return self.hosts * self.processes_per_host

    def train_command(self, python: Sequence[str]) -> tuple[str, ...]:
        """The command of every process."""
        sets = (word for text in self.overrides for word in ("--set", text))
        return (*python, "-m", "meshkit", "train", self.experiment, *sets, "--out", self.out)


def make_job(file: Path, overrides: Sequence[str], out: str | None, processes_per_host: int, max_restarts: int) -> Job:
    """The job of an experiment file on the hosts of its cluster.

    Raises:
        ConfigError: the processes cannot share a host's GPUs evenly, or the cluster is one of virtual CPU devices.
    """
    experiment = load(file, overrides)
    cluster = experiment.cluster
    if cluster.is_cpu:
        raise ConfigError(
            f"cluster '{cluster.name}' is one of virtual CPU devices, which need no other machines.",
            hint="meshkit launch local, or a cluster of GPUs",
        )
    gpus = cluster.num_gpus // cluster.hosts
    check_share(processes_per_host, gpus, "GPUs of a host", "--processes-per-host")
    name = job_name(experiment.name)
    return Job(
        name=name,
        experiment=file.as_posix(),
        overrides=tuple(overrides),
        out=out or f"runs/{name}",
        hosts=cluster.hosts,
        gpus_per_host=gpus,
        processes_per_host=processes_per_host,
        max_restarts=max_restarts,
    )


def check_share(processes: int, devices: int, what: str, at: str) -> None:
    """Stops unless so many processes can have equal shares of the devices.

    Raises:
        ConfigError: they cannot.
    """
    if processes < 1 or devices % processes:
        possible = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        raise ConfigError(
            f"{processes} processes cannot share {devices} {what} evenly.", at=at, hint=f"{at} {', '.join(possible)}"
        )


def job_name(text: str) -> str:
    """A name that SLURM, Kubernetes (a DNS label, with room for `-workers-0-511`) and file systems all take."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def submit(command: Sequence[str], text: str) -> str:
    """Hands a rendered job to the program that starts it: runs the command with the text as its input.

    Returns:
        What it printed.

    Raises:
        ConfigError: the program is not on this machine.
        RunError: it refused.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not on this machine's PATH.", hint="--dry-run, which prints what would be handed to it"
        )
    done = subprocess.run(list(command), input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"{program} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}.")
    return done.stdout.strip()
