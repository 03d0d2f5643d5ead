"""`meshkit launch local`: run the processes of an experiment on this machine, and restart them after failures.

    experiment, N processes, M devices -> LocalPart -> environment of each process and attempt -> Supervisor
    attempt -> LocalGang -> first failure -> whole gang killed -> AttemptEnd -> exit with a code | restart

When one process fails, the others wait in a collective forever, and a process that is restarted alone cannot join them.
So the processes of an attempt, the gang, end together. The next attempt has a new gang and a new coordinator port.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from meshkit.config.experiment import Experiment
from meshkit.config.files import integer, open_regular
from meshkit.config.sections import LaunchTable
from meshkit.distributed.certificates import certificates_for
from meshkit.distributed.environment import (
    ATTEMPT,
    COORDINATOR,
    JOIN_TIMEOUT,
    LOCAL_DEVICE_IDS,
    MTLS,
    NUM_PROCESSES,
    SECRET,
    Gang,
    check_address,
    split_address,
    without_launchers,
)
from meshkit.distributed.roll_call import LOOPBACK, free_port
from meshkit.errors import DONE, DRAINED, INTERRUPTED, PREEMPTED, RUN_FAILED, ConfigError, RunError
from meshkit.runs.hang import FOLDER, MOST_LINES, Hang, Witness, name_hang, read_order, write_witnesses
from meshkit.runs.limits import HANG_WATCH_S, STALL_TIMEOUT, Limits
from meshkit.runs.nccl_ras import ask, describe
from meshkit.runs.owner import LAUNCH_VARIABLE, LEASE_S, renewing
from meshkit.runs.phases import PULSE_VARIABLE, WATCHED_VARIABLE, Pulse
from meshkit.runs.snapshots import COPY_VARIABLE, SNAPSHOTS, SNAPSHOTS_VARIABLE, SPARE_VARIABLE, SnapshotMemory
from meshkit.runs.standby import STANDBY_VARIABLE
from meshkit.verbs.launch.hosts import EndedElsewhere, Hosts
from meshkit.verbs.launch.processes import STOPPED, Ending, LocalGang, Member, Watchdog
from meshkit.verbs.launch.restart import Outage, Standby, Started

_JOIN_S = "120"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_POLL_S, _LOCK_POLL_S, _SHOWN_LINES = 0.02, 0.5, 15
_NEVER = float("inf")
# The run fails after this many attempts in a row that reach no new step.
_FRUITLESS_ATTEMPTS = 2
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
MOST_BYTES = 1 << 20
MOST_AT_ONCE, MOST_AT_THE_END = 4 << 20, 64 << 20
_MOST_OF_A_TRACEBACK = 60
# A line of only this text is not shown. Gloo writes it piece by piece, so the lines of two threads may be mixed.
_CHATTER = re.compile(
    r"\d*(?:(?:\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of connected peer ranks is : )\d*)+"
)


@dataclass(frozen=True)
class LocalPart:
    """The processes of a job that this machine runs."""

    processes: int
    """Processes on this machine."""
    devices: int
    """Devices of each process."""
    hosts: int = 1
    """Machines of the job; each runs `processes` processes."""
    host_index: int = 0
    """Number of this machine, from 0."""
    coordinator: str | None = None
    """Host:port of the first process; None for this machine and a new port for every attempt."""
    attempt: int | None = None
    """Number of earlier restarts of the whole job; None if this launcher itself counts attempts."""
    mtls: str | None = None
    """Folder into which new certificates are written. With None the processes use the certificates of MESHKIT_MTLS, if
    it is set. With None, a job on one machine also gets a new secret for every attempt."""
    stall_timeout: tuple[str, ...] = ()
    """Limits for the processes' MESHKIT_STALL_TIMEOUT; if empty, they inherit the variable."""
    virtual: bool = False
    """Whether the devices are virtual ones of the CPU."""
    hosts_meet: bool = False
    """Whether the launchers of several hosts are connected (hosts.py), so that they restart together."""
    spare_file: str = ""
    """Path of a file that exists while a healthy spare launcher waits. A process that is late, or on a host whose error
    counters grow, then ends, so that the spare replaces its host. Empty for none."""
    launch: LaunchTable = field(default_factory=LaunchTable)
    """How the job goes on after it has lost hosts."""
    fewer_hosts: Callable[[], Sequence[int]] = tuple
    """At host 0, returns the smaller numbers of hosts with which the job can go on, the largest first."""

    @property
    def first_rank(self) -> int:
        return self.host_index * self.processes

    @property
    def coordinator_host(self) -> str:
        return split_address(self.coordinator)[0] if self.coordinator else LOOPBACK

    def environments(self, attempt: int, *, base: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """Return the environment of every process here.

        Args:
            attempt: the number of the attempt.
            base: the environment that the processes inherit; by default that of this process.
        """
        inherited = without_launchers(os.environ if base is None else base)
        inherited["PYTHONUNBUFFERED"] = "1"  # so that the log of a killed process is complete
        if self.hosts == 1 or self.hosts_meet:  # a busy machine starts processes late
            inherited.setdefault(JOIN_TIMEOUT, _JOIN_S)
        if self.stall_timeout:
            inherited[STALL_TIMEOUT] = " ".join(self.stall_timeout)
        if self.hosts_meet and self.hosts > 1:
            inherited[COPY_VARIABLE] = "1"
        if self.spare_file:
            inherited[SPARE_VARIABLE] = self.spare_file
        if self.virtual:
            inherited |= _virtual_devices(inherited, self.devices)
        coordinator = self.coordinator or f"{LOOPBACK}:{free_port()}"
        is_alone = self.hosts == 1 and not self.hosts_meet
        secret = secrets.token_hex(32) if is_alone and self.mtls is None else None
        gangs = [self._gang(i, coordinator, attempt, secret) for i in range(self.processes)]
        return [inherited | gang.emit() for gang in gangs]

    def _gang(self, index: int, coordinator: str, attempt: int, secret: str | None) -> Gang:
        """Return the `Gang` of one process, which sees all GPUs, as CUDA IPC requires, but drives only its own."""
        ids = None if self.virtual else tuple(range(index * self.devices, (index + 1) * self.devices))
        number = attempt if self.attempt is None else self.attempt
        return Gang(coordinator, self.hosts * self.processes, self.first_rank + index, ids, number, self.mtls, secret)

    def shell_lines(self, command: Sequence[str]) -> list[str]:
        """Return shell commands that start the same processes."""
        lines = []
        if self.mtls is not None:
            make = [sys.executable, "-m", "meshkit", "launch", "certificates", self.mtls]
            lines = [shlex.join([*make, "--host", self.coordinator_host])]
        elif self.hosts == 1:  # print a command, because a printed secret would be known
            lines = [f'export {SECRET}="$(openssl rand -hex 32)"']
        for environment in self.environments(0, base={}):
            variables = (f"{name}={value}" for name, value in environment.items() if name != SECRET)
            lines.append(shlex.join(["env", *variables, *command]))
        return lines

    def run(self, command: Sequence[str], folder: Path, policy: Policy, show: Callable[[str], None]) -> int:
        """Run the processes and restart them, as `Supervisor.run` does, with new certificates if `mtls` is set.

        Arguments and result are those of `Supervisor`. The logs are written to `logs` in the folder. With several hosts
        they are written to `logs/host0`, `logs/host1`, and so on.

        Raises:
            ConfigError: another launcher has the run folder, or the certificates cannot be written.
            RunError: the job failed for good.
        """
        logs = folder / "logs" / (f"host{self.host_index}" if self.hosts > 1 else "")
        with only_launcher(logs, show), ExitStack() as stack:
            if self.mtls is not None:
                stack.enter_context(certificates_for(Path(self.mtls), [self.coordinator_host]))
            meet = self.hosts > 1 and policy.max_restarts
            hosts = stack.enter_context(self._launchers(folder, show)) if meet else None
            environments = self.environments if hosts is None else lambda _: self._of_attempt(hosts).environments(0)
            host = self.host_index if self.hosts > 1 else None
            supervisor = Supervisor(
                *(command, environments, folder, policy, show),
                logs=logs,
                first_rank=self.first_rank,
                host=host,
                hosts=hosts,
            )
            if hosts is None:
                return supervisor.run()
            code = self._run_with(hosts, supervisor, show)
        if code == DONE and self.host_index == 0:
            shutil.rmtree(folder / SNAPSHOTS, ignore_errors=True)
        return code

    def _launchers(self, folder: Path, show: Callable[[str], None]) -> Hosts:
        assert self.coordinator is not None
        return Hosts(
            self.host_index,
            self.hosts,
            processes=self.processes,
            coordinator=self.coordinator,
            certificates=os.environ.get(MTLS),
            show=show,
            folder=folder,
            launch=self.launch,
            fewer=self.fewer_hosts,
        )

    def _of_attempt(self, hosts: Hosts) -> LocalPart:
        """Return this part with the size, place, coordinator and attempt that the launchers have agreed on."""
        return replace(
            self,
            hosts=hosts.size,
            host_index=hosts.place,
            coordinator=hosts.coordinator,
            attempt=hosts.attempt,
            hosts_meet=True,
            spare_file=hosts.spare_file if self.launch.drain else "",
        )

    def _run_with(self, hosts: Hosts, supervisor: Supervisor, show: Callable[[str], None]) -> int:
        """Run the supervisor, and tell the other hosts how it has ended."""
        try:
            code = supervisor.run()
        except EndedElsewhere as ended:
            show(str(ended))
            code = ended.code
        except BaseException:
            hosts.withdraw(RUN_FAILED)
            raise
        hosts.withdraw(code)
        return code


def check_part(part: LocalPart, experiment: Experiment | None) -> None:
    """Raise an error if the part is invalid, or does not fit the hosts and devices of the experiment's cluster.

    Raises:
        ConfigError: the job has another number of devices than the cluster, or with `[launch]` another number of
            hosts; a number of the part is out of range; or its hosts would have no common coordinator or certificates.
    """
    if part.coordinator is not None:
        check_address(part.coordinator, at="--coordinator", name="--coordinator")
    launch = experiment.launch if experiment is not None else LaunchTable()
    most = part.hosts + launch.spares
    if min(part.processes, part.devices, part.hosts) < 1 or not 0 <= part.host_index < most:
        raise ConfigError(
            f"host {part.host_index} of {part.hosts} with {part.processes} processes x {part.devices} devices is "
            "not a valid part of a job.",
            at="launch local",
            hint=f"--processes 1 or more, --devices 1 or more, --host-index from 0 to {most - 1}",
        )
    if part.hosts > 1 and part.coordinator is None:
        raise ConfigError(
            f"{part.hosts} hosts need one coordinator that all of them reach.",
            at="--hosts",
            hint="--coordinator HOST:PORT, with the name of the first host",
        )
    if part.hosts > 1 and part.mtls is not None:
        raise ConfigError(
            "--mtls makes certificates for one host, but several hosts must share them.",
            at="--mtls",
            hint="meshkit launch certificates DIR --host NAME, and MESHKIT_MTLS=DIR on every host",
        )
    if experiment is None:
        return
    cluster, started = experiment.cluster, part.hosts * part.processes * part.devices
    if launch.continues and part.hosts != cluster.hosts_used:
        raise ConfigError(
            f"[launch] replaces lost hosts, so --hosts must be {cluster.hosts_used}, the number of hosts of cluster "
            f"'{cluster.name}', not {part.hosts}.",
            at="--hosts",
            hint=f"--hosts {cluster.hosts_used}, one launcher for each host",
        )
    if started != cluster.num_gpus:
        whole = f"{part.hosts} hosts x " if part.hosts > 1 else ""
        raise ConfigError(
            f"{whole}{part.processes} processes x {part.devices} devices are {started}, but cluster '{cluster.name}' "
            f"has {cluster.num_gpus}.",
            at="--processes, --devices",
            hint=f"{_even_share(cluster.num_gpus, part)}, or a cluster of {started}",
        )


def _virtual_devices(env: Mapping[str, str], devices: int) -> dict[str, str]:
    """Return the variables that set the number of virtual CPU devices, replacing any number in `env`."""
    flags = [flag for flag in env.get("XLA_FLAGS", "").split() if flag.split("=")[0] != _DEVICE_COUNT_FLAG]
    return {
        "XLA_FLAGS": " ".join([*flags, f"{_DEVICE_COUNT_FLAG}={devices}"]),
        "JAX_NUM_CPU_DEVICES": "-1",  # jax's default: the number in XLA_FLAGS
        "JAX_PLATFORMS": "cpu",
    }


def _even_share(devices: int, part: LocalPart) -> str:
    processes = part.hosts * part.processes
    if devices % processes:
        return f"a number of processes that divides {devices}"
    return f"--processes {part.processes} --devices {devices // processes}"


@dataclass(frozen=True)
class Policy:
    """The limits of the supervisor."""

    max_restarts: int = 3
    """Attempts after the first one."""
    save_grace_s: float = 120.0
    """Seconds that the processes get to save a checkpoint and end, once they are asked to stop."""
    failure_grace_s: float = 5.0
    """Seconds that the other processes get to end after one has saved and ended, or has failed after a signal."""
    last_words_s: float = 1.0
    """Seconds that the other processes get to end after one has failed. Without that one they cannot save."""
    pause_s: float = 1.0
    """Seconds of pause after an attempt that has reached no new step."""
    limits: Limits = field(default_factory=Limits)
    """The limits after which a running process counts as stuck."""
    standby: bool = False
    """Whether to start the next attempt's processes while one trains. The command must be `meshkit train`."""


@dataclass(frozen=True)
class AttemptEnd:
    """The result of one attempt."""

    number: int
    """The number of the attempt, from 0, as in its folder of logs."""
    failed: Member | None = None
    """The process that failed first or is stuck; None if there is none."""
    received: signal.Signals | None = None
    """SIGTERM or SIGINT, if the launcher has received one."""
    endings: tuple[Ending, ...] = ()
    """How each process ended, including those killed by the launcher."""
    stuck: str | None = None
    """Why `failed` counts as stuck; None if it ended by itself."""
    left: bool = False
    """Whether `failed` ended with exit code 0 in the midst of its work, so that the others cannot go on."""
    hang: Hang | None = None
    """If `failed` is stuck: the collective or phase in which the processes wait."""
    witnesses: tuple[Witness, ...] = ()
    """If `failed` is stuck: the state of each process here at that time."""
    evidence: Path | None = None
    """If `failed` is stuck: the file with these states."""
    where: str = ""
    """The last reported activity of `failed`."""
    before_steps: bool = False
    """Whether no process had reached the training loop, so that there was nothing to save."""
    outage: Outage | None = None
    """The times of the failure, if there was one."""
    elsewhere: str = ""
    """Why another host has ended the attempt; empty if none has."""


class Supervisor:
    """Run a command as a gang, attempt after attempt, until it is done or a restart cannot help.

    Args:
        command: the command that every process runs.
        environments: attempt number -> the environment of each process. It is called for every attempt, so that each
            has its own coordinator port.
        folder: the run folder, whose `metrics.jsonl` shows progress.
        policy: limits on restarts and on times.
        show: prints a line for the user.
        logs: the folder for `attempt0/rank0.log`, ...; by default `logs` in the run folder.
        first_rank: the rank of the first process here.
        host: the number of this host in a job of several hosts, else None. With several hosts the processes name a
            hang themselves, so the launcher gives them additional time.
        hosts: the connection to the launchers of other hosts, which restart together; None if there are none.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Callable[[int], Sequence[Mapping[str, str]]],
        folder: Path,
        policy: Policy,
        show: Callable[[str], None],
        *,
        logs: Path | None = None,
        first_rank: int = 0,
        host: int | None = None,
        hosts: Hosts | None = None,
    ):
        self.command, self.environments, self._folder, self._host = command, environments, folder, host
        self._policy, self._print, self._first_rank, self._hosts = policy, show, first_rank, hosts
        self._logs = logs or folder / "logs"
        self._signals: list[signal.Signals] = []
        self._launch = str(uuid.uuid4())
        self._snapshots: list[SnapshotMemory] = []  # of each process, from its first attempt to the end
        self._standby = Standby(self._started, self._logs / "standby")
        self._last_attempt = 0
        self._outage: Outage | None = None

    def run(self) -> int:
        """Run attempts until the job is done or cannot go on.

        Returns:
            0: done. 2 or 3: a process ended with this code. 75: preempted with a checkpoint saved. 130: interrupted.

        Raises:
            RunError: the job failed for good: no restarts are left, or restarts bring no progress.
        """
        first = next_attempt(self._logs)
        best, fruitless = last_step(self._folder), 0
        self._last_attempt = first + self._policy.max_restarts
        with self._note_signals(), renewing(self._folder, self._launch), self._keeping(), self._standby:
            for number in range(first, self._last_attempt + 1):
                if self._hosts is not None:
                    self._hosts.meet(number, self._signals)
                attempt = self._attempt(number)
                if attempt.received is not None or (attempt.failed is None and not attempt.elsewhere):
                    return _stopped(attempt)
                if attempt.failed is None:
                    self._show(
                        f"attempt {number} ended on another host: {attempt.elsewhere}; all processes are stopped"
                    )
                else:
                    self._report(attempt.failed, attempt)
                    ending = attempt.failed.ending
                    assert ending is not None
                    if ending.code == DRAINED and self._hosts is not None:
                        self._hosts.step_back()
                    if not ending.is_restartable and attempt.stuck is None and not attempt.left:
                        return ending.code
                reached, self._outage = last_step(self._folder), attempt.outage
                best, fruitless = (reached, 0) if reached > best else (best, fruitless + 1)
                if fruitless >= _FRUITLESS_ATTEMPTS:
                    raise _failed(attempt, f"and {fruitless} attempts in a row have reached no step after {best}")
                if number == self._last_attempt:
                    raise _failed(attempt, f"and its {self._policy.max_restarts} restarts are used up")
                self._show(f"restart {number + 1 - first} of {self._policy.max_restarts}; step {reached} was reached")
                if (received := self._pause(self._policy.pause_s if fruitless else 0.0)) is not None:
                    return INTERRUPTED if received == signal.SIGINT else PREEMPTED
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, number: int) -> AttemptEnd:
        """Run one attempt. At its end none of its processes is left."""
        with ExitStack() as stack:
            logs = self._logs / f"attempt{number}"
            started = self._standby.take(logs, stack) or stack.enter_context(self._started(number, logs))
            wait_s = HANG_WATCH_S if self._host is not None else 0.0
            gang, watchdog = started.gang, Watchdog(started.pulses, self._policy.limits, wait_s=wait_s)
            follower = Follower(gang.members[0].log)
            try:
                end = self._agreed(self.watch(number, gang, follower, watchdog))
                found_at = time.monotonic()
                if end.stuck is not None:  # without a grace: a stuck process does not end by itself
                    end = self._examine(end, gang, watchdog.witnesses(gang))
                    follower.new_lines(last=True)  # skip the printed stacks, which the witnesses hold
                elif end.failed is not None or end.elsewhere:
                    gang.stop(self._policy.last_words_s)
            finally:
                gang.kill()
                self._follow(gang, follower, last=True)
            if end.failed is not None:
                failed_at = found_at if end.stuck is not None else gang.began + end.failed.ended_s
                end = replace(end, outage=Outage(failed_at, found_at, time.monotonic()))
            where = watchdog.where(end.failed, gang) if end.failed is not None else ""
            before_steps = watchdog.before_steps(gang)
        endings = tuple(m.ending for m in gang.members if m.ending is not None)
        return replace(end, endings=endings, where=where, before_steps=before_steps)

    @contextmanager
    def _started(self, number: int, logs: Path, waits_on: int | None = None) -> Iterator[Started]:
        """Start the processes of an attempt; with `waits_on` each first waits for a byte from that descriptor."""
        environments = self.environments(number)
        with ExitStack() as stack:
            pulses = tuple(stack.enter_context(closing(Pulse())) for _ in environments)
            self._snapshots += [SnapshotMemory() for _ in environments[len(self._snapshots) :]]
            ours = {LAUNCH_VARIABLE: self._launch, WATCHED_VARIABLE: str(len(environments))}
            told = [{**ours, PULSE_VARIABLE: str(pulse.path)} for pulse in pulses]
            told = [{**t, SNAPSHOTS_VARIABLE: memory.value} for t, memory in zip(told, self._snapshots)]
            waits = {} if waits_on is None else {STANDBY_VARIABLE: str(waits_on)}
            environments = [{**e, **of_process, **waits} for e, of_process in zip(environments, told)]
            shared = [(pulse.descriptor, *memory.descriptors) for pulse, memory in zip(pulses, self._snapshots)]
            shared = [descriptors + (() if waits_on is None else (waits_on,)) for descriptors in shared]
            if self._hosts is not None:
                stack.enter_context(self._hosts.sharing(self._snapshots))
            command, first_rank = self.command, self._first_rank
            if self._hosts is not None:
                command = [*command, *self._hosts.overrides]
                first_rank = self._hosts.place * len(environments)
            gang = stack.enter_context(LocalGang(command, environments, logs, first_rank, shared))
            yield Started(gang, pulses, environments[0].get(COORDINATOR))

    def watch(self, number: int, gang: LocalGang, follower: Follower, watchdog: Watchdog) -> AttemptEnd:
        """Wait until all are done, one fails or is stuck, another host ends the attempt, or a grace period is over."""
        forwarded, saved, deadline, stop_others_at = 0, False, _NEVER, _NEVER
        trains = False
        while True:
            ended = gang.poll()
            self._follow(gang, follower)
            now = time.monotonic()
            if not trains and not forwarded and (starts := watchdog.starts()) is not None:
                trains = True
                self._trains(number, starts, now, goes_on=not ended)
            if len(self._signals) > forwarded:
                if forwarded:  # a second signal ends the attempt at once
                    return AttemptEnd(number, received=self._signals[0])
                forwarded, deadline = len(self._signals), now + self._policy.save_grace_s
                gang.signal(self._signals[0])
                self._show(
                    f"{self._signals[0].name} is passed on; processes have {self._policy.save_grace_s:g} s to end"
                )
            codes = {m.rank: m.ending.code for m in ended if m.ending is not None}
            if PREEMPTED in codes.values() and not saved:  # all processes have saved, and the others now end too
                saved, deadline = True, min(deadline, now + self._policy.save_grace_s)
                stop_others_at = now + self._policy.failure_grace_s
            failures = [m for m in ended if codes.get(m.rank) not in (DONE, PREEMPTED)]
            left = [m for m in ended if codes.get(m.rank) == DONE and watchdog.has_left(m, gang)]
            if (failures or left) and not forwarded and not saved:
                first = min(failures + left, key=cause_first)
                return AttemptEnd(number, first, left=first in left)
            if any(codes[m.rank] != INTERRUPTED for m in failures):  # the others cannot save without the failed one
                deadline = min(deadline, now + self._policy.failure_grace_s)
            if not gang.running or now > deadline:
                return AttemptEnd(number, received=self._signals[0] if forwarded else None)
            if now > stop_others_at:
                deadline, stop_others_at = min(deadline, self._stop_others(gang, watchdog, now)), _NEVER
            if self._hosts is not None and not forwarded and not saved and (why := self._hosts.news()) is not None:
                return AttemptEnd(number, elsewhere=why)
            if not forwarded and not saved and (stuck := watchdog.look(gang)) is not None:
                return AttemptEnd(number, stuck.member, stuck=stuck.why)
            time.sleep(_POLL_S)

    def _trains(self, number: int, starts: Sequence[Mapping[str, float]], now: float, *, goes_on: bool) -> None:
        """Once all processes have made a step, print the length of the outage, if any, and start the standby gang."""
        if self._outage is not None:
            self._show(self._outage.line(starts, now))
            self._outage = None
        if goes_on and self._policy.standby and self._hosts is None and number < self._last_attempt:
            self._standby.start(number + 1)

    def _agreed(self, end: AttemptEnd) -> AttemptEnd:
        """Tell the other hosts how the attempt ended here. If it ended well, wait until it has ended on all hosts."""
        if self._hosts is None or end.elsewhere:
            return end
        if end.failed is not None:
            self._hosts.failed(f"process {end.failed.rank} failed ({_how(end)})")
            return end
        longest_s = self._policy.limits.of("end") if end.received is None else self._policy.failure_grace_s
        why = self._hosts.settle(longest_s) or ""
        return replace(end, elsewhere=why) if end.received is None else end

    def _examine(self, end: AttemptEnd, gang: LocalGang, witnesses: Sequence[Witness]) -> AttemptEnd:
        """Return the end with the name of the hang. Write the states of the processes here into the run folder."""
        job = gang.environments[0]
        name = f"attempt{end.number}" if self._host is None else f"attempt{job[ATTEMPT]}-host{self._host}"
        evidence = self._folder / FOLDER / f"{name}.json"
        answer, line = _nccl_says(gang, witnesses)
        write_witnesses(evidence, witnesses, answer)
        elsewhere = int(job.get(NUM_PROCESSES, 0)) > len(gang.members)
        hang = name_hang(witnesses, read_order(self._folder), elsewhere=elsewhere)
        if line:
            hang = replace(hang, details=(*hang.details, f"  {line}"))
        end = replace(end, hang=hang, witnesses=tuple(witnesses), evidence=evidence)
        missing = [(m, w) for m in gang.members for w in witnesses if m.rank == w.process and m.rank in hang.missing]
        if missing and end.failed not in [m for m, _ in missing]:  # the stacks show who holds up the job
            member, witness = missing[0]
            end = replace(end, failed=member, stuck=f"makes no progress, {witness.where}")
        return end

    def _stop_others(self, gang: LocalGang, watchdog: Watchdog, now: float) -> float:
        """Send SIGTERM to all running processes.

        They may not know of the preemption: a process that ends at SIGTERM before its training loop tells no other.

        Returns:
            The time by which they must have ended; infinity if one writes a checkpoint, to leave it the whole grace.
        """
        gang.signal(signal.SIGTERM)
        return _NEVER if watchdog.finishing(gang) else now + self._policy.failure_grace_s

    def _follow(self, gang: LocalGang, follower: Follower, *, last: bool = False) -> None:
        for line in follower.new_lines(last=last):
            if not _CHATTER.fullmatch(line):
                self._show(f"[{gang.members[0].rank}] {line}")

    def _show(self, line: str) -> None:
        """Print a line. A closed terminal is ignored, because the run and its logs do not need it."""
        with suppress(OSError):
            self._print(line)

    def _pause(self, seconds: float) -> signal.Signals | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals:
            time.sleep(_POLL_S)
        return self._signals[0] if self._signals else None

    def _report(self, failed: Member, end: AttemptEnd) -> None:
        if end.stuck is not None:
            self._show(
                f"process {failed.rank} is stuck in attempt {end.number}: it {end.stuck}; all processes are stopped"
            )
            if end.hang is not None:
                for line in end.hang.lines(end.witnesses, f"{end.evidence}, {failed.log.parent}", MOST_LINES - 1):
                    self._show(line)
            return
        when = f"{failed.ended_s:.1f} s into attempt {end.number}"
        told = end.left or (failed.ending is not None and failed.ending.code < 0)  # otherwise the phase is `end`
        self._show(f"process {failed.rank} ended first: {_how(end)}, {when}{f', {end.where}' if told else ''}")
        for line in last_words(failed.log, _SHOWN_LINES):
            self._show(f"  | {line}")
        self._show(f"  its whole log: {failed.log}")

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep the processes' snapshots in memory through all attempts, and free them at the end."""
        try:
            yield
        finally:
            for memory in self._snapshots:
                memory.close()
            self._snapshots.clear()

    @contextmanager
    def _note_signals(self) -> Iterator[None]:
        """Record SIGINT and SIGTERM. `watch` passes them on to the processes, which run in sessions of their own.

        A closed terminal (SIGHUP) counts as SIGTERM, unless SIGHUP is ignored, as under nohup.
        """
        meanings = {n: n for n in (signal.SIGINT, signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            meanings[signal.SIGHUP] = signal.SIGTERM
        note = lambda number, _: self._signals.append(meanings[signal.Signals(number)])
        before = {number: signal.signal(number, note) for number in meanings}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _nccl_says(gang: LocalGang, witnesses: Sequence[Witness]) -> tuple[str, str]:
    """Return the answer of NCCL's RAS service and a line on it; both are "" without GPUs, or without an answer.

    If a process was stopped, the service is not asked. That process was continued to print its stack, so the service
    would count what it does now, not what it did in the hang.
    """
    environment = gang.environments[0]
    if LOCAL_DEVICE_IDS not in environment or any(STOPPED in w.note for w in witnesses):
        return "", ""
    answer = ask(environment)
    return answer, describe(answer, {m.pid: m.rank for m in gang.members})


def last_step(folder: Path) -> int:
    """Return the last step in the run's metrics.jsonl; 0 if there is none."""
    for line in reversed(last_lines(folder / "metrics.jsonl", 5)):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut short by a crash, or not a record
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record["step"]
    return 0


@contextmanager
def only_launcher(logs: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Lock a folder of logs against other launchers. The kernel releases the lock when this process ends.

    If the lock is held from another host, this waits: the file server keeps the lock of a dead launcher for a lease.

    Raises:
        ConfigError: another launcher has the folder, or it cannot be written.
    """
    here, until, told = f"on host {socket.gethostname()}", time.monotonic() + LEASE_S, False
    try:
        logs.mkdir(parents=True, exist_ok=True)
        file = (logs / "launcher").open("a+")
    except OSError as e:
        raise ConfigError(f"the folder of logs cannot be written: {e}.", at=str(logs), hint="another --out") from None
    with file:
        while _is_locked(file):
            file.seek(0)
            who = file.read(200).strip() or "unknown"
            if who.endswith(here) or time.monotonic() > until:
                hint = "another --out, or the same command when that one has ended"
                raise ConfigError(f"another launcher uses this run folder: {who}.", at=str(logs), hint=hint)
            if not told:
                show(f"waiting for the launcher that uses the run folder ({who}) to end, up to {LEASE_S:.0f} s")
            told = True
            time.sleep(_LOCK_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} {here}\n")
        file.flush()
        yield


def _is_locked(file: IO[str]) -> bool:
    """Try to lock a file; return whether another process has locked it. False too where locks are not supported."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks; even so no log is overwritten, because logs are opened with "x"
        return False
    return False


def next_attempt(logs: Path) -> int:
    """Return the number of the next attempt: one more than the last attempt that has logs.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        names = [p.name.removeprefix("attempt") for p in logs.glob("attempt*")]
    except OSError as e:
        raise ConfigError(f"the folder of logs cannot be read: {e}.", at=str(logs)) from None
    return max((number + 1 for name in names if (number := integer(name)) is not None), default=0)


def cause_first(member: Member) -> tuple[int, float]:
    """Return a sort key for the failures found by one poll, which puts their cause first.

    After a process has ended, jax aborts the others (SIGABRT), or they lose their connection to it (exit code 4).
    """
    assert member.ending is not None
    return {-signal.SIGABRT: 2, RUN_FAILED: 1}.get(member.ending.code, 0), member.ended_s


def _stopped(attempt: AttemptEnd) -> int:
    """Return the exit code of an attempt that a signal stopped, or in which no process failed.

    Raises:
        RunError: a process neither saved nor ended well.
    """
    if attempt.received == signal.SIGINT:
        return INTERRUPTED
    codes = {ending.code for ending in attempt.endings}
    if PREEMPTED in codes:  # a process exits with this code only when the checkpoint is complete
        return PREEMPTED
    if codes == {DONE}:
        return DONE
    if attempt.received is not None and attempt.before_steps:  # no step was made since the last checkpoint
        return PREEMPTED
    bad = next(ending for ending in attempt.endings if ending.code != DONE)
    raise RunError(
        f"told to stop by SIGTERM, but a process did not save and end: {bad}.",
        hint="the same command, which resumes from the last checkpoint; a longer --grace if saving takes longer",
    )


def _how(attempt: AttemptEnd) -> str:
    """Describe how the failed process ended."""
    assert attempt.failed is not None
    if attempt.left:
        return "exit code 0 before its work was done, while the others went on"
    return "stuck" if attempt.stuck is not None else str(attempt.failed.ending)


def _failed(attempt: AttemptEnd, why: str) -> RunError:
    failed = attempt.failed
    if failed is None:
        return RunError(f"attempt {attempt.number} ended on another host ({attempt.elsewhere}), {why}.")
    return RunError(
        f"process {failed.rank} failed ({_how(attempt)}) in attempt {attempt.number}, {why}.",
        at=str(failed.log),
        hint="the last lines of that log; the same command then resumes",
    )


class Follower:
    """Read the new lines of a growing log. A line of more than a mebibyte is returned in pieces.

    Each call reads a limited number of bytes, so that a log which grows fast does not keep the caller from other work.
    """

    def __init__(self, path: Path):
        self._path, self._offset, self._rest = path, 0, b""

    def new_lines(self, *, last: bool = False) -> list[str]:
        """Return the lines since the last call; with `last` also a final line without a newline."""
        try:
            with open_regular(self._path) as file:
                if last and file.seek(0, 2) - self._offset > MOST_AT_THE_END:  # skip the older part
                    self._offset, self._rest = file.tell() - MOST_AT_THE_END, b""
                file.seek(self._offset)
                data = file.read(MOST_AT_THE_END if last else MOST_AT_ONCE)
        except OSError:
            data = b""
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (last or len(self._rest) >= MOST_BYTES):
            lines, self._rest = [*lines, self._rest], b""
        return [_printable(line) for line in lines]


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last non-empty lines of a file; none if it cannot be read. Reads at most its last mebibyte."""
    try:
        with open_regular(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_BYTES))
            data = file.read()
    except OSError:
        return []
    lines = [_printable(line) for line in data.split(b"\n")]
    return [line for line in lines if line.strip()][-count:]


def last_words(path: Path, count: int) -> list[str]:
    """Return the last `count` lines of a failed process's log, or more if its last traceback begins before them."""
    lines = [line for line in last_lines(path, _MOST_OF_A_TRACEBACK) if not _CHATTER.fullmatch(line)]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return lines[min(starts[-1], max(0, len(lines) - count)) :] if starts else lines[-count:]


def _printable(line: bytes) -> str:
    """Return the text without terminal control codes; of a progress line redrawn in place, the last state."""
    text = line.decode(errors="replace").rstrip("\r")
    return _CONTROL.sub("", text.rsplit("\r", 1)[-1])
