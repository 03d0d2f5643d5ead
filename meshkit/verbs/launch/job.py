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
from meshkit.distributed.environment import OUT
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
    own: tuple[str, ...] = ()
    """A command in place of the training; it finds the run folder in MESHKIT_OUT."""

    @property
    def num_processes(self) -> int:
        return self.hosts * self.processes_per_host

    def command(self, python: Sequence[str]) -> tuple[str, ...]:
        """The command of every process."""
        if self.own:
            return ("env", f"{OUT}={self.out}", *self.own)
        sets = (word for text in self.overrides for word in ("--set", text))
        return (*python, "-m", "meshkit", "train", self.experiment, *sets, "--out", self.out)


def make_job(
    file: Path | None,
    overrides: Sequence[str],
    out: str | None,
    processes_per_host: int,
    max_restarts: int,
    *,
    own: tuple[str, ...] = (),
    machines: tuple[int | None, int] = (None, 8),
) -> Job:
    """The job of an experiment file on the hosts of its cluster, or of a command.

    Args:
        file: the experiment; None for a command on machines that are given.
        overrides: the `--set` options.
        out: the run folder; `runs/NAME` by default.
        processes_per_host: 1, or one for each GPU.
        max_restarts: attempts after the first one.
        own: a command in place of the training.
        machines: hosts, and GPUs of each, where there is no experiment.

    Raises:
        ConfigError: the processes cannot share a host's GPUs evenly, the cluster is one of virtual CPU devices, or
            nobody says how many hosts there are.
    """
    if file is not None:
        experiment = load(file, overrides)
        cluster = experiment.cluster
        if cluster.is_cpu:
            raise ConfigError(
                f"cluster '{cluster.name}' is one of virtual CPU devices, which need no other machines.",
                hint="meshkit launch local, or a cluster of GPUs",
            )
        hosts, gpus, name = cluster.hosts, cluster.num_gpus // cluster.hosts, job_name(experiment.name)
    else:
        given, gpus, name = machines[0], machines[1], command_name(own)
        if given is None:
            raise ConfigError("nothing says on how many hosts the command runs.", hint="--hosts 4 --gpus-per-host 8")
        hosts = given
    check_share(processes_per_host, gpus, "GPUs of a host", "--processes-per-host")
    return Job(
        name=name,
        experiment=file.as_posix() if file is not None else "",
        overrides=tuple(overrides),
        out=out or f"runs/{name}",
        hosts=hosts,
        gpus_per_host=gpus,
        processes_per_host=processes_per_host,
        max_restarts=max_restarts,
        own=own,
    )


def command_name(command: Sequence[str]) -> str:
    """The name of a job by its command: that of its script, or of the program."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return job_name(Path(script).stem)


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
