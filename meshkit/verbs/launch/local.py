"""`meshkit launch local`: the gang of an experiment on this machine.

experiment, N processes, M devices -> LocalPart -> environment of each process and attempt -> Supervisor
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from meshkit.config.experiment import Experiment
from meshkit.distributed.environment import (
    FIRST_PORT,
    JOIN_TIMEOUT,
    NUM_PORTS,
    SECRET,
    Gang,
    check_address,
    split_address,
    without_launchers,
)
from meshkit.errors import ConfigError, RunError
from meshkit.verbs.launch.certificates import certificates_for
from meshkit.verbs.launch.supervisor import Policy, Supervisor, only_launcher

_LOOPBACK = "127.0.0.1"
_JOIN_S = "120"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class LocalPart:
    """The processes of a job that this machine runs."""

    processes: int
    """Processes on this machine."""
    devices: int
    """Devices of each process."""
    hosts: int = 1
    """Machines of the job; each runs this many processes."""
    host_index: int = 0
    """Number of this machine, from 0."""
    coordinator: str | None = None
    """Host:port of the first process; None for a port of this machine, new for every attempt."""
    attempt: int | None = None
    """Restarts of the whole job before this, where something else restarts it."""
    mtls: str | None = None
    """Folder of certificates; None for what the environment says, and on one machine a new secret for every attempt."""
    virtual: bool = False
    """Whether the devices are virtual ones of the CPU."""

    @property
    def first_rank(self) -> int:
        return self.host_index * self.processes

    @property
    def coordinator_host(self) -> str:
        return split_address(self.coordinator)[0] if self.coordinator else _LOOPBACK

    def environments(self, attempt: int, *, base: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """The environment of every process here.

        Args:
            attempt: its number.
            base: what they inherit; this process's environment by default.
        """
        inherited = without_launchers(os.environ if base is None else base)
        inherited["PYTHONUNBUFFERED"] = "1"  # the log of a process that is killed is whole
        if self.hosts == 1:  # whoever ends is seen here; on a busy machine one may be late
            inherited.setdefault(JOIN_TIMEOUT, _JOIN_S)
        if self.virtual:
            inherited |= _virtual_devices(inherited, self.devices)
        coordinator = self.coordinator or f"{_LOOPBACK}:{free_port()}"
        secret = secrets.token_hex(32) if self.hosts == 1 and self.mtls is None else None
        gangs = [self._gang(i, coordinator, attempt, secret) for i in range(self.processes)]
        return [inherited | gang.emit() for gang in gangs]

    def _gang(self, index: int, coordinator: str, attempt: int, secret: str | None) -> Gang:
        """Every process sees all GPUs (they reach each other through CUDA IPC) and drives its own."""
        ids = None if self.virtual else tuple(range(index * self.devices, (index + 1) * self.devices))
        number = attempt if self.attempt is None else self.attempt
        return Gang(coordinator, self.hosts * self.processes, self.first_rank + index, ids, number, self.mtls, secret)

    def shell_lines(self, command: Sequence[str]) -> list[str]:
        """What would be started, as a shell takes it."""
        lines = []
        if self.mtls is not None:
            make = [sys.executable, "-m", "meshkit", "launch", "certificates", self.mtls]
            lines = [shlex.join([*make, "--host", self.coordinator_host])]
        elif self.hosts == 1:  # one that was printed would be none
            lines = [f'export {SECRET}="$(openssl rand -hex 32)"']
        for environment in self.environments(0, base={}):
            variables = (f"{name}={value}" for name, value in environment.items() if name != SECRET)
            lines.append(shlex.join(["env", *variables, *command]))
        return lines

    def run(self, command: Sequence[str], folder: Path, policy: Policy, show: Callable[[str], None]) -> int:
        """Starts the processes and keeps them going, as `Supervisor.run` does, with certificates made for them.

        Raises:
            ConfigError: another launcher has the run folder, or the certificates cannot be written.
            RunError: it failed for good.
        """
        logs = folder / "logs" / (f"host{self.host_index}" if self.hosts > 1 else "")
        with only_launcher(logs, show), ExitStack() as stack:
            if self.mtls is not None:
                stack.enter_context(certificates_for(Path(self.mtls), [self.coordinator_host]))
            supervisor = Supervisor(
                command, self.environments, folder, policy, show, logs=logs, first_rank=self.first_rank
            )
            return supervisor.run()


def check_part(part: LocalPart, experiment: Experiment | None) -> None:
    """Stops unless the processes have as many devices together as the experiment's cluster, if there is one.

    Raises:
        ConfigError: they have more or fewer, or the part is none of the job, or its hosts could not meet.
    """
    if part.coordinator is not None:
        check_address(part.coordinator, at="--coordinator", name="--coordinator")
    if min(part.processes, part.devices, part.hosts) < 1 or not 0 <= part.host_index < part.hosts:
        raise ConfigError(
            f"host {part.host_index} of {part.hosts} with {part.processes} processes x {part.devices} devices is no "
            "part of a job.",
            at="launch local",
            hint="--processes 1 or more, --devices 1 or more, --host-index from 0 to --hosts less 1",
        )
    if part.hosts > 1 and part.coordinator is None:
        raise ConfigError(
            f"{part.hosts} hosts need one coordinator that all of them reach.",
            at="--hosts",
            hint="--coordinator HOST:PORT, with the name of the first host",
        )
    if part.hosts > 1 and part.mtls is not None:
        raise ConfigError(
            "several hosts cannot each make certificates of their own.",
            at="--mtls",
            hint="meshkit launch certificates DIR --host NAME, and MESHKIT_MTLS=DIR on every host",
        )
    if experiment is None:
        return
    cluster, started = experiment.cluster, part.hosts * part.processes * part.devices
    if started != cluster.num_gpus:
        whole = f"{part.hosts} hosts x " if part.hosts > 1 else ""
        raise ConfigError(
            f"{whole}{part.processes} processes x {part.devices} devices are {started}, but cluster '{cluster.name}' "
            f"has {cluster.num_gpus}.",
            at="--processes, --devices",
            hint=f"{_even_share(cluster.num_gpus, part)}, or a cluster of {started}",
        )


def free_port() -> int:
    """A random port that nothing listens on, outside the range from which connections get theirs.

    Raises:
        RunError: none was found.
    """
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((_LOOPBACK, port))
            except OSError:
                continue
            return port
    raise RunError(f"no port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} is free on {_LOOPBACK}.")


def _virtual_devices(env: Mapping[str, str], devices: int) -> dict[str, str]:
    """XLA's count of CPU devices, instead of whatever count the environment has."""
    flags = [flag for flag in env.get("XLA_FLAGS", "").split() if flag.split("=")[0] != _DEVICE_COUNT_FLAG]
    return {
        "XLA_FLAGS": " ".join([*flags, f"{_DEVICE_COUNT_FLAG}={devices}"]),
        "JAX_NUM_CPU_DEVICES": "-1",  # jax's default: as XLA_FLAGS say
        "JAX_PLATFORMS": "cpu",
    }


def _even_share(devices: int, part: LocalPart) -> str:
    processes = part.hosts * part.processes
    if devices % processes:
        return f"a number of processes that divides {devices}"
    return f"--processes {part.processes} --devices {devices // processes}"
