"""`meshkit launch local`: the gang of an experiment on this machine, kept going.

    experiment, N processes, M devices -> LocalPart -> environment of each process and attempt -> Supervisor
    attempt -> LocalGang -> first failure -> whole gang killed -> Verdict: done | stop with a code | restart

One process that fails leaves the others waiting in a collective for ever, and one that comes back alone cannot join
them. So an attempt ends as a whole, and the next one is a new gang with a new coordinator port.
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
from meshkit.distributed.certificates import certificates_for
from meshkit.distributed.environment import (
    COORDINATOR,
    JOIN_TIMEOUT,
    MTLS,
    SECRET,
    Gang,
    check_address,
    split_address,
    without_launchers,
)
from meshkit.distributed.roll_call import LOOPBACK, free_port
from meshkit.errors import DONE, INTERRUPTED, PREEMPTED, RUN_FAILED, ConfigError, RunError
from meshkit.runs.hang import FOLDER, MOST_LINES, Hang, Witness, name_hang, read_order, write_witnesses
from meshkit.runs.limits import STALL_TIMEOUT, Limits
from meshkit.runs.owner import LAUNCH_VARIABLE, LEASE_S, renewing
from meshkit.runs.phases import PULSE_VARIABLE, Pulse
from meshkit.runs.snapshots import COPY_VARIABLE, SNAPSHOTS, SNAPSHOTS_VARIABLE, SnapshotMemory
from meshkit.runs.standby import STANDBY_VARIABLE
from meshkit.verbs.launch.hosts import Elasticity, EndedElsewhere, Hosts
from meshkit.verbs.launch.processes import Ending, LocalGang, Member, Watchdog
from meshkit.verbs.launch.restart import Outage, Standby, Started

_JOIN_S = "120"
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
_POLL_S, _LOCK_POLL_S, _SHOWN_LINES = 0.02, 0.5, 15
_NEVER = float("inf")
# Two attempts in a row that reach no new step will not get there by a third.
_FRUITLESS_ATTEMPTS = 2
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
MOST_BYTES = 1 << 20
MOST_AT_ONCE, MOST_AT_THE_END = 4 << 20, 64 << 20
_MOST_OF_A_TRACEBACK = 60
_CHATTER = "[Gloo] Rank"  # a line for every group of processes that it connects: in the logs alone


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
    stall_timeout: tuple[str, ...] = ()
    """Limits that the processes are told; none for what the environment says."""
    virtual: bool = False
    """Whether the devices are virtual ones of the CPU."""
    hosts_meet: bool = False
    """Whether the launchers of several hosts have met, and copy snapshots."""
    elasticity: Elasticity = field(default_factory=Elasticity)
    """How the job goes on without hosts that it has lost."""

    @property
    def first_rank(self) -> int:
        return self.host_index * self.processes

    @property
    def coordinator_host(self) -> str:
        return split_address(self.coordinator)[0] if self.coordinator else LOOPBACK

    def environments(self, attempt: int, *, base: Mapping[str, str] | None = None) -> list[dict[str, str]]:
        """The environment of every process here.

        Args:
            attempt: its number.
            base: what they inherit; this process's environment by default.
        """
        inherited = without_launchers(os.environ if base is None else base)
        inherited["PYTHONUNBUFFERED"] = "1"  # the log of a process that is killed is whole
        if self.hosts == 1 or self.hosts_meet:  # whoever ends is seen; on a busy machine one may be late
            inherited.setdefault(JOIN_TIMEOUT, _JOIN_S)
        if self.stall_timeout:
            inherited[STALL_TIMEOUT] = " ".join(self.stall_timeout)
        if self.hosts_meet and self.hosts > 1:
            inherited[COPY_VARIABLE] = "1"
        if self.virtual:
            inherited |= _virtual_devices(inherited, self.devices)
        coordinator = self.coordinator or f"{LOOPBACK}:{free_port()}"
        is_alone = self.hosts == 1 and not self.hosts_meet
        secret = secrets.token_hex(32) if is_alone and self.mtls is None else None
        gangs = [self._gang(i, coordinator, attempt, secret) for i in range(self.processes)]
        return [inherited | gang.emit() for gang in gangs]

    def _gang(self, index: int, coordinator: str, attempt: int, secret: str | None) -> Gang:
        """Every process sees all GPUs (they reach each other through CUDA IPC) and drives its own."""
        ids = None if self.virtual else tuple(range(index * self.devices, (index + 1) * self.devices))
        number = attempt if self.attempt is None else self.attempt
        return Gang(coordinator, self.hosts * self.processes, self.first_rank + index, ids, number, self.mtls, secret)

    def shell_lines(self, command: Sequence[str]) -> list[str]:
        """Return the commands that would be started, for a shell."""
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

        Arguments and result are those of `Supervisor`. The logs go to `logs` of the folder; of several hosts
        to `logs/host0`, and so on.

        Raises:
            ConfigError: another launcher has the run folder, or the certificates cannot be written.
            RunError: it failed for good.
        """
        logs = folder / "logs" / (f"host{self.host_index}" if self.hosts > 1 else "")
        with only_launcher(logs, show), ExitStack() as stack:
            if self.mtls is not None:
                stack.enter_context(certificates_for(Path(self.mtls), [self.coordinator_host]))
            meet = self.hosts > 1 and policy.max_restarts
            hosts = stack.enter_context(self._launchers(folder, show)) if meet else None
            environments = self.environments if hosts is None else lambda _: self._of_attempt(hosts).environments(0)
            supervisor = Supervisor(
                command, environments, folder, policy, show, logs=logs, first_rank=self.first_rank, hosts=hosts
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
            self.processes,
            self.coordinator,
            os.environ.get(MTLS),
            show,
            folder / SNAPSHOTS,
            self.elasticity,
        )

    def _of_attempt(self, hosts: Hosts) -> LocalPart:
        """The part with what the launchers of all hosts have agreed on."""
        return replace(
            self,
            hosts=hosts.size,
            host_index=hosts.place,
            coordinator=hosts.coordinator,
            attempt=hosts.attempt,
            hosts_meet=True,
        )

    def _run_with(self, hosts: Hosts, supervisor: Supervisor, show: Callable[[str], None]) -> int:
        """Runs it, and tells the other hosts how it has ended."""
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
    """Stops unless the processes have as many devices together as the experiment's cluster, if there is one.

    Raises:
        ConfigError: they have more or fewer, or the part is none of the job, or its hosts could not meet.
    """
    if part.coordinator is not None:
        check_address(part.coordinator, at="--coordinator", name="--coordinator")
    most = part.hosts + part.elasticity.spares
    if min(part.processes, part.devices, part.hosts) < 1 or not 0 <= part.host_index < most:
        raise ConfigError(
            f"host {part.host_index} of {part.hosts} with {part.processes} processes x {part.devices} devices is no "
            "part of a job.",
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
            "several hosts cannot each make certificates of their own.",
            at="--mtls",
            hint="meshkit launch certificates DIR --host NAME, and MESHKIT_MTLS=DIR on every host",
        )
    if experiment is None:
        return
    cluster, started = experiment.cluster, part.hosts * part.processes * part.devices
    if part.elasticity != Elasticity() and part.hosts != cluster.hosts:
        raise ConfigError(
            f"[launch] replaces lost hosts, but --hosts {part.hosts} are not the {cluster.hosts} hosts of cluster "
            f"'{cluster.name}'.",
            at="--hosts",
            hint=f"--hosts {cluster.hosts}, one launcher for each host",
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


@dataclass(frozen=True)
class Policy:
    """The limits of the supervisor."""

    max_restarts: int = 3
    """Attempts after the first one."""
    save_grace_s: float = 120.0
    """Seconds that the processes get to save a checkpoint and end, once they are asked to stop."""
    failure_grace_s: float = 5.0
    """Seconds that the others get once one has saved and left, or has failed after a signal to all."""
    last_words_s: float = 1.0
    """Seconds that the others get once one has failed. They cannot save: that takes all of them."""
    pause_s: float = 1.0
    """Seconds between two attempts, the first of which has reached no new step."""
    limits: Limits = field(default_factory=Limits)
    """When a process that is alive counts as stuck."""
    standby: bool = False
    """Whether the processes of the next attempt are started while one trains: for `meshkit train`, which then waits."""


@dataclass(frozen=True)
class AttemptEnd:
    """The result of one attempt."""

    number: int
    """Restarts before it."""
    failed: Member | None = None
    """The process that failed first, or is stuck; None if none is."""
    received: signal.Signals | None = None
    """SIGTERM or SIGINT, where one has come."""
    endings: tuple[Ending, ...] = ()
    """How every process ended, those included that were killed with the rest."""
    stuck: str | None = None
    """Why it was called stuck; None where it ended by itself."""
    left: bool = False
    """Whether it ended with exit code 0 in the midst of its work, and so failed the others."""
    hang: Hang | None = None
    """Where one is stuck: what it and the others wait in."""
    witnesses: tuple[Witness, ...] = ()
    """The state of each process at that time."""
    where: str = ""
    """The activity of that process."""
    before_steps: bool = False
    """Whether none had reached the training loop, so that there was nothing to save."""
    outage: Outage | None = None
    """When it failed, if it did."""
    elsewhere: str = ""
    """Why another host has ended it, where one has."""


class Supervisor:
    """Runs a command as a gang until it is done, or nothing more can be done.

    Args:
        command: what every process runs.
        environments: attempt number -> the environment of each process; called for every attempt, so that each has
            a coordinator port of its own.
        folder: the run folder, whose `metrics.jsonl` shows progress.
        policy: restarts and graces.
        show: takes a line for the person who waits.
        logs: where `attempt0/rank0.log`, ... go; `logs` of the run folder by default.
        first_rank: of the processes here.
        hosts: the launchers of a job on several hosts, which restart together; None where this one is alone.
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
        hosts: Hosts | None = None,
    ):
        self.command, self.environments, self._folder = command, environments, folder
        self._policy, self._print, self._first_rank, self._hosts = policy, show, first_rank, hosts
        self._logs = logs or folder / "logs"
        self._signals: list[signal.Signals] = []
        self._launch = str(uuid.uuid4())
        self._snapshots: list[SnapshotMemory] = []  # of each process, from its first attempt to the end
        self._standby = Standby(self._started, self._logs / "standby")
        self._last_attempt = 0
        self._outage: Outage | None = None

    def run(self) -> int:
        """Attempts until the end.

        Returns:
            0 done; 2 or 3 as a process said; 75 preempted with a checkpoint saved; 130 interrupted.

        Raises:
            RunError: it failed for good: no restarts are left, or restarts bring no progress.
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
                    self._show(f"attempt {number} has ended elsewhere: {attempt.elsewhere}; all are stopped")
                else:
                    self._report(attempt.failed, attempt)
                    ending = attempt.failed.ending
                    assert ending is not None
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
        """One attempt from its start to its end, with nothing of it left running."""
        with ExitStack() as stack:
            logs = self._logs / f"attempt{number}"
            started = self._standby.take(logs, stack) or stack.enter_context(self._started(number, logs))
            gang, watchdog = started.gang, Watchdog(started.pulses, self._policy.limits)
            follower = Follower(gang.members[0].log)
            try:
                end = self._agreed(self.watch(number, gang, follower, watchdog))
                found_at = time.monotonic()
                if end.stuck is not None:  # and then no grace: what is stuck does not end by itself
                    end = self._examine(end, gang, watchdog.witnesses(gang))
                    follower.new_lines(last=True)  # stacks, of which the name of the hang has what matters
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
        """The processes of an attempt; with `waits_on` they go on once each has read a byte from that descriptor."""
        environments = self.environments(number)
        with ExitStack() as stack:
            pulses = tuple(stack.enter_context(closing(Pulse())) for _ in environments)
            self._snapshots += [SnapshotMemory() for _ in environments[len(self._snapshots) :]]
            told = [{PULSE_VARIABLE: str(pulse.path), LAUNCH_VARIABLE: self._launch} for pulse in pulses]
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
        """Until all are done, one has failed or is stuck (and why), or the grace after a signal is over."""
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
                if forwarded:  # the second signal: now
                    return AttemptEnd(number, received=self._signals[0])
                forwarded, deadline = len(self._signals), now + self._policy.save_grace_s
                gang.signal(self._signals[0])
                self._show(f"{self._signals[0].name}: passed on; up to {self._policy.save_grace_s:g} s to save and end")
            codes = {m.rank: m.ending.code for m in ended if m.ending is not None}
            if PREEMPTED in codes.values() and not saved:  # it has saved, together with the others, which now end too
                saved, deadline = True, min(deadline, now + self._policy.save_grace_s)
                stop_others_at = now + self._policy.failure_grace_s
            failures = [m for m in ended if codes.get(m.rank) not in (DONE, PREEMPTED)]
            left = [m for m in ended if codes.get(m.rank) == DONE and watchdog.has_left(m, gang)]
            if (failures or left) and not forwarded and not saved:
                first = min(failures + left, key=cause_first)
                return AttemptEnd(number, first, left=first in left)
            if any(codes[m.rank] != INTERRUPTED for m in failures):  # the others cannot save without it
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
        """Say how long the first step of an attempt took, and start those on standby while the attempt goes on."""
        if self._outage is not None:
            self._show(self._outage.line(starts, now))
            self._outage = None
        if goes_on and self._policy.standby and self._hosts is None and number < self._last_attempt:
            self._standby.start(number + 1)

    def _agreed(self, end: AttemptEnd) -> AttemptEnd:
        """Tells the other hosts how the attempt ended here; where it ended well, waits until it did so on all."""
        if self._hosts is None or end.elsewhere:
            return end
        if end.failed is not None:
            self._hosts.failed(f"process {end.failed.rank} failed ({_how(end)})")
            return end
        longest_s = self._policy.limits.of("end") if end.received is None else self._policy.failure_grace_s
        why = self._hosts.settle(longest_s) or ""
        return replace(end, elsewhere=why) if end.received is None else end

    def _examine(self, end: AttemptEnd, gang: LocalGang, witnesses: Sequence[Witness]) -> AttemptEnd:
        """Names the hang, and leaves what it was named by in the run folder."""
        order = read_order(self._folder)
        count = order.processes if order is not None else 0
        here = {w.process for w in witnesses}
        elsewhere = (Witness(p, note="its own launcher watches it") for p in range(count) if p not in here)
        everyone = tuple(sorted((*witnesses, *elsewhere), key=lambda w: w.process))
        write_witnesses(self._folder / FOLDER / f"attempt{end.number}.json", everyone)
        end = replace(end, hang=(hang := name_hang(everyone, order)), witnesses=everyone)
        missing = [(m, w) for m in gang.members for w in witnesses if m.rank == w.process and m.rank in hang.missing]
        if missing and end.failed not in [m for m, _ in missing]:  # stacks have said more than phases
            member, witness = missing[0]
            end = replace(end, failed=member, stuck=f"does not get on, {witness.where}")
        return end

    def _stop_others(self, gang: LocalGang, watchdog: Watchdog, now: float) -> float:
        """Passes on to the others the signal that one process got alone: before the training loop it ends without them.

        Returns:
            When they have to be gone; one that writes a checkpoint has the whole grace.
        """
        gang.signal(signal.SIGTERM)
        return _NEVER if watchdog.finishing(gang) else now + self._policy.failure_grace_s

    def _follow(self, gang: LocalGang, follower: Follower, *, last: bool = False) -> None:
        for line in follower.new_lines(last=last):
            if not line.startswith(_CHATTER):
                self._show(f"[{gang.members[0].rank}] {line}")

    def _show(self, line: str) -> None:
        """A terminal that is gone is no reason to stop; the logs have it all."""
        with suppress(OSError):
            self._print(line)

    def _pause(self, seconds: float) -> signal.Signals | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._signals:
            time.sleep(_POLL_S)
        return self._signals[0] if self._signals else None

    def _report(self, failed: Member, end: AttemptEnd) -> None:
        if end.stuck is not None:
            self._show(f"process {failed.rank} is stuck in attempt {end.number}: it {end.stuck}; all are stopped")
            if end.hang is not None:
                evidence = f"{self._folder / FOLDER / f'attempt{end.number}.json'}, {failed.log.parent}"
                for line in end.hang.lines(end.witnesses, evidence, MOST_LINES - 1):
                    self._show(line)
            return
        when = f"{failed.ended_s:.1f} s into attempt {end.number}"
        told = end.left or (failed.ending is not None and failed.ending.code < 0)  # else of its way out
        self._show(f"process {failed.rank} ended first: {_how(end)}, {when}{f', {end.where}' if told else ''}")
        for line in last_words(failed.log, _SHOWN_LINES):
            self._show(f"  | {line}")
        self._show(f"  its whole log: {failed.log}")

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keeps the processes' snapshots in memory from one attempt to the next; then they are gone."""
        try:
            yield
        finally:
            for memory in self._snapshots:
                memory.close()
            self._snapshots.clear()

    @contextmanager
    def _note_signals(self) -> Iterator[None]:
        """Notes SIGINT and SIGTERM, which the loop then passes on; the processes have sessions of their own.

        A closed terminal (SIGHUP) counts as SIGTERM, unless nohup or the like has it ignored.
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


def last_step(folder: Path) -> int:
    """The last step that the run's metrics.jsonl has; 0 where it has none."""
    for line in reversed(last_lines(folder / "metrics.jsonl", 5)):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # cut short by a crash, or no record
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record["step"]
    return 0


@contextmanager
def only_launcher(logs: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Keeps other launchers off a folder of logs. The kernel lets go of it with this process, however that ends.

    One of another host may be one that is gone, whose lock the file server keeps for its lease: it is waited for.

    Raises:
        ConfigError: another launcher has it, or it cannot be written.
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
                raise ConfigError(f"another launcher has this run folder: {who}.", at=str(logs), hint=hint)
            if not told:
                show(f"waiting for the launcher that has the run folder ({who}) to end, up to {LEASE_S:.0f} s")
            told = True
            time.sleep(_LOCK_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} {here}\n")
        file.flush()
        yield


def _is_locked(file: IO[str]) -> bool:
    """Whether another process has locked a file; if not, this one has. Where there are no locks, nobody has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # logs are not written over there either
        return False
    return False


def next_attempt(logs: Path) -> int:
    """The number of the next attempt: one after the last whose logs are there.

    Raises:
        ConfigError: the folder cannot be read.
    """
    try:
        names = [p.name.removeprefix("attempt") for p in logs.glob("attempt*")]
    except OSError as e:
        raise ConfigError(f"the folder of logs cannot be read: {e}.", at=str(logs)) from None
    return max((number + 1 for name in names if (number := integer(name)) is not None), default=0)


def cause_first(member: Member) -> tuple[int, float]:
    """Sorts failures seen at one look, the cause first.

    When a process is gone, jax aborts the others (SIGABRT), or they lose their connection to it (exit code 4).
    """
    assert member.ending is not None
    return {-signal.SIGABRT: 2, RUN_FAILED: 1}.get(member.ending.code, 0), member.ended_s


def _stopped(attempt: AttemptEnd) -> int:
    """The exit code of an attempt that no process has failed, or that a signal stopped.

    Raises:
        RunError: a process neither saved nor ended well.
    """
    if attempt.received == signal.SIGINT:
        return INTERRUPTED
    codes = {ending.code for ending in attempt.endings}
    if PREEMPTED in codes:  # a checkpoint is whole, or nobody says so
        return PREEMPTED
    if codes == {DONE}:
        return DONE
    if attempt.received is not None and attempt.before_steps:  # nothing was made since the last checkpoint
        return PREEMPTED
    bad = next(ending for ending in attempt.endings if ending.code != DONE)
    raise RunError(
        f"told to stop by SIGTERM, but a process did not save and end: {bad}.",
        hint="the same command, which resumes from the last checkpoint; a longer --grace if saving takes longer",
    )


def _how(attempt: AttemptEnd) -> str:
    """How the process that failed ended."""
    assert attempt.failed is not None
    if attempt.left:
        return "exit code 0 in the midst of its work, while the others went on"
    return "stuck" if attempt.stuck is not None else str(attempt.failed.ending)


def _failed(attempt: AttemptEnd, why: str) -> RunError:
    failed = attempt.failed
    if failed is None:
        return RunError(f"attempt {attempt.number} has ended elsewhere ({attempt.elsewhere}), {why}.")
    return RunError(
        f"process {failed.rank} failed ({_how(attempt)}) in attempt {attempt.number}, {why}.",
        at=str(failed.log),
        hint="the last lines of that log; the same command then resumes",
    )


class Follower:
    """Reads a log that grows, in whole lines; a line of more than a mebibyte comes in pieces.

    Of a log that grows faster than it is read every call takes a part: whoever follows has other things to look after.
    """

    def __init__(self, path: Path):
        self._path, self._offset, self._rest = path, 0, b""

    def new_lines(self, *, last: bool = False) -> list[str]:
        """The lines that came since the last call; with `last` also one that has no end."""
        try:
            with open_regular(self._path) as file:
                if last and file.seek(0, 2) - self._offset > MOST_AT_THE_END:  # the log has it all
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
    """The last non-empty lines of a file; none where there is no file. Reads its last mebibyte at most."""
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
    """Return the last words of a failed process: its last traceback if it ends with one, else `count` lines."""
    lines = [line for line in last_lines(path, _MOST_OF_A_TRACEBACK) if not line.startswith(_CHATTER)]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return lines[min(starts[-1], max(0, len(lines) - count)) :] if starts else lines[-count:]


def _printable(line: bytes) -> str:
    """Without what moves a terminal's cursor; of a line that was drawn over, the last drawing."""
    text = line.decode(errors="replace").rstrip("\r")
    return _CONTROL.sub("", text.rsplit("\r", 1)[-1])
