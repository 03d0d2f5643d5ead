"""Ask NCCL's RAS service which ranks do not answer or are behind, while a job hangs.

    environment of the job -> ask() -> answer -> read_answer() -> NcclCommunicator -> describe() -> a line of the hang

Every process with NCCL 2.24 or later runs the service, and the processes of a machine share its socket. The answer is
text that differs between releases, or JSON from 2.28.7. The counts are of collectives that the host has launched, and
leave out those in CUDA graphs: a lower count says which rank is behind, and not why.

Another job can own the socket, so an answer is told only if it names processes of this launcher and no others of this
machine. Only numbers and names that match a pattern come from it into the message.

Imports no jax, since the launcher asks.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from meshkit.distributed.environment import split_address

ADDRESS, ENABLE = "NCCL_RAS_ADDR", "NCCL_RAS_ENABLE"
_DEFAULT_ADDRESS = "localhost:28028"
# One message: a server before 2.28.7 says that it does not know the third line, and goes on.
_QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
MOST_S, MOST_BYTES = 3.0, 4 << 20
_FIRST_S, _LAST_S = 0.5, 0.2
_MOST_RANKS, _MOST_GROUPS = 4, 3

_NAME, _HOST = r"[0-9a-f]{1,16}", r"[\w.:%-]{1,80}"
_PROCESS = rf"managed by process (?P<pid>\d{{1,9}}) on node (?P<host>{_HOST})"
_GROUP = re.compile(r"\s*(?P<group>\d+)\s+\d+\s+\d+\s+[\d-]+\s+(?P<size>\d{1,7})\s+\d+\s+[A-Z]+\s+[A-Z,]+", re.ASCII)
_HEADING = re.compile(rf"#(?P<group>\d+)-\d+ \((?P<name>{_NAME})\) (?P<what>[A-Z]+)", re.ASCII)
_DIFFERENT = re.compile(r"  Communicator ranks have different (?P<collective>\w{1,30}) operation counts", re.ASCII)
_LAUNCHED = r"(?:launched up to operation (?P<operation>\d{1,19})|not launched any operations)"
_RANKS = re.compile(rf"  (?P<number>\d{{1,7}}) ranks have {_LAUNCHED}", re.ASCII)
_RANK = re.compile(rf"  Rank (?P<rank>\d{{1,10}})(?P<launched> has {_LAUNCHED})? -- (?:.*{_PROCESS})?", re.ASCII)
_DEAD = re.compile(rf"  Process (?P<pid>\d{{1,9}}) on node (?P<host>{_HOST}) managing", re.ASCII)


@dataclass(frozen=True, order=True)
class CommunicatorRank:
    """A rank of a communicator, and its process."""

    number: int
    host: str = ""
    """The address of its machine; "" where the answer does not say it."""
    pid: int = 0
    """0 where the answer does not say it."""


@dataclass
class LaunchCount:
    """The ranks that have launched the same number of one collective."""

    launched: int
    number: int
    """How many ranks these are."""
    ranks: list[CommunicatorRank] = field(default_factory=list)
    """These ranks; [] where the answer only counts them."""


@dataclass
class NcclCommunicator:
    """A communicator as the service describes it: all of it in JSON, its problems in text."""

    name: str
    """NCCL's hash of it, as NCCL_DEBUG=INFO prints it."""
    size: int
    silent: list[CommunicatorRank] = field(default_factory=list)
    """Ranks whose process does not answer the service."""
    dead: list[CommunicatorRank] = field(default_factory=list)
    """Ranks whose process the service has given up, after a minute."""
    counts: dict[str, list[LaunchCount]] = field(default_factory=dict)
    """By collective, the lowest first."""

    @property
    def ranks(self) -> list[CommunicatorRank]:
        """Return all ranks that it names."""
        return [*self.silent, *self.dead, *(r for found in self.counts.values() for c in found for r in c.ranks)]


def ask(environment: Mapping[str, str]) -> str:
    """Return what the service of a job answers, `MOST_BYTES` at most; "" where nothing comes within `MOST_S`.

    Args:
        environment: of a process of the job.
    """
    if environment.get(ENABLE, "").strip() == "0":
        return ""
    answers: list[str] = []
    try:
        address = split_address(environment.get(ADDRESS, "").strip() or _DEFAULT_ADDRESS)
    except ValueError:
        return ""
    until = time.monotonic() + MOST_S - _LAST_S
    # In a thread, since a look-up of the host's name has no limit.
    asking = threading.Thread(target=lambda: answers.append(_ask(address, until)), name="meshkit-ras", daemon=True)
    asking.start()
    asking.join(MOST_S)
    return answers[0] if answers else ""


def _ask(address: tuple[str, int], until: float) -> str:
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=min(_FIRST_S, left)) as channel:
                channel.sendall(_QUESTION)
                return _receive(channel, until)
        except TimeoutError:  # the kernel chose a process that does not run; the next connection may get another one
            continue
        except (OSError, ValueError, OverflowError):
            return ""
    return ""


def _receive(channel: socket.socket, until: float) -> str:
    """Return what comes before the end; part of it where the end does not come in time.

    Raises:
        OSError: nothing came.
    """
    received = bytearray()
    try:
        while len(received) < MOST_BYTES and (left := until - time.monotonic()) > 0:
            channel.settimeout(left if received else min(_FIRST_S, left))
            if not (more := channel.recv(1 << 16)):
                break
            received += more
    except OSError:
        if not received:
            raise
    return received[:MOST_BYTES].decode(errors="replace")


def read_answer(answer: str) -> list[NcclCommunicator]:
    """Return the communicators that an answer names, the largest first; [] where it is none.

    Args:
        answer: JSON or text, after the lines that acknowledge the question. It may be cut.
    """
    if not answer.startswith("SERVER PROTOCOL "):
        return []
    start = answer.find("\n{")
    if start < 0:
        found = _of_text(answer)
    else:
        found = []
        with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            found = [_of_json(said) for said in json.loads(answer[start:])["communicators"]]
    # NCCL 2.27.3 has been seen to print ranks from memory that it had not written.
    sound = [c for c in found if all(0 <= rank.number < c.size for rank in c.ranks)]
    return sorted(sound, key=lambda c: -c.size)


def _of_json(said: Mapping[str, Any]) -> NcclCommunicator:
    name, size = said["hash"].removeprefix("0x"), int(said["size"])
    if not re.fullmatch(_NAME, name):
        raise ValueError("no hash")
    communicator = NcclCommunicator(name, size)
    for missing in said["missing_ranks"]:
        if missing["status"]["considered_dead"] is True:
            communicator.dead.append(_rank(missing))
        elif missing["status"]["unresponsive"] is True:
            communicator.silent.append(_rank(missing))
    launched: dict[str, dict[int, list[CommunicatorRank]]] = {}
    for rank in said["ranks"]:
        for collective, count in rank["collective_counts"].items():
            if re.fullmatch(r"\w{1,30}", collective, re.ASCII):
                launched.setdefault(collective, {}).setdefault(int(count), []).append(_rank(rank))
    for collective, ranks in launched.items():
        communicator.counts[collective] = [LaunchCount(n, len(r), sorted(r)) for n, r in sorted(ranks.items())]
    return communicator


def _rank(said: Mapping[str, Any]) -> CommunicatorRank:
    return CommunicatorRank(int(said["rank"]), str(said["host"]), int(said["pid"]))


def _of_text(answer: str) -> list[NcclCommunicator]:
    """Read the report for people: a table of groups, then a section for each communicator that has a problem."""
    sizes: dict[str, int] = {}
    dead: set[tuple[str, int]] = set()
    found: dict[str, NcclCommunicator] = {}
    here, what, counts = None, "", None
    for line in answer.splitlines():
        if line[:1].isalpha():  # INCOMPLETE and DEAD have sections of processes before those of communicators
            here, what, counts = None, line.strip(), None
        elif heading := _HEADING.match(line):
            name, what, counts = heading["name"], heading["what"], None
            here = found.setdefault(name, NcclCommunicator(name, sizes.get(heading["group"], 0)))
        elif here is None:
            if row := _GROUP.fullmatch(line):
                sizes[row["group"]] = int(row["size"])
            elif what == "DEAD" and (process := _DEAD.match(line)):
                dead.add((process["host"], int(process["pid"])))
        elif what == "INCOMPLETE":
            if rank := _RANK.match(line):
                here.silent.append(_matched(rank))
        elif different := _DIFFERENT.match(line):
            counts = here.counts.setdefault(different["collective"], [])
        elif line.startswith("  Communicator"):  # another difference, such as that of status
            counts = None
        elif counts is not None:
            if ranks := _RANKS.match(line):
                counts.append(LaunchCount(int(ranks["operation"] or 0), int(ranks["number"])))
            elif (rank := _RANK.match(line)) and rank["launched"]:
                counts.append(LaunchCount(int(rank["operation"] or 0), 1, [_matched(rank)]))
            elif rank and counts:
                counts[-1].ranks.append(_matched(rank))
    for communicator in found.values():
        missing = communicator.silent
        communicator.dead = [r for r in missing if (r.host, r.pid) in dead]
        communicator.silent = [r for r in missing if (r.host, r.pid) not in dead]
        for counts in communicator.counts.values():
            counts.sort(key=lambda c: c.launched)
    return list(found.values())


def _matched(rank: re.Match[str]) -> CommunicatorRank:
    return CommunicatorRank(int(rank["rank"]), rank["host"] or "", int(rank["pid"] or 0))


def describe(answer: str, processes: Mapping[int, int]) -> str:
    """Return a line on the worst communicator of an answer; "" where none has a problem, or it may be another job's.

    Args:
        answer: from `ask`.
        processes: the number in the job of each process here, by its process id; each leads a session.
    """
    found = read_answer(answer)
    known = _processes_of((r for c in found for r in c.ranks), processes)
    told = [(c, clauses) for c in found if (clauses := _clauses(c, known))]
    if not known or not told:
        return ""
    communicator, clauses = min(told, key=lambda each: not (each[0].dead or each[0].silent))
    more = f" (and {len(told) - 1} more communicators)" if len(told) > 1 else ""
    return f"NCCL's RAS: communicator 0x{communicator.name} of {communicator.size} ranks: {'; '.join(clauses)}{more}"


def _processes_of(ranks: Iterable[CommunicatorRank], processes: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """Return the process of the job for each host and process id; {} where one of this machine is not of the job."""
    pairs = {(r.host, r.pid) for r in ranks if r.host and r.pid > 0}
    here = {host for host in {host for host, _ in pairs} if _is_here(host)}
    found = {}
    for host, pid in pairs:
        if host in here:
            with suppress(OSError, OverflowError):  # it has ended
                session = os.getsid(pid)
                if session not in processes:
                    return {}
                found[host, pid] = processes[session]
    return found


def _is_here(host: str) -> bool:
    """Whether this machine has an address."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except (OSError, ValueError):
        return False
    return True


def _clauses(communicator: NcclCommunicator, known: Mapping[tuple[str, int], int]) -> list[str]:
    clauses = []
    if dead := communicator.dead:
        clauses.append(f"{_named(dead, known)} {'is' if len(dead) == 1 else 'are'} considered dead")
    if communicator.silent:
        clauses.append(f"{_named(communicator.silent, known)} gave no answer")
    different = [(collective, counts) for collective, counts in communicator.counts.items() if len(counts) > 1]
    if different:
        collective, counts = different[0]
        most = max(counts, key=lambda c: c.number)
        groups = []
        for group in [*counts[: _MOST_GROUPS - 1], counts[-1]] if len(counts) > _MOST_GROUPS else counts:
            is_named = group.ranks and (group is not most or group.number == 1)
            who = _named(group.ranks, known) if is_named else f"{group.number} ranks"
            groups.append(f"{who} {'has' if group.number == 1 else 'have'} launched {group.launched}")
        groups[0] += " collectives" if collective == "collective" else f" {collective}"  # not told apart before 2.26
        others = ", ".join(name for name, _ in different[1 : 1 + _MOST_RANKS])
        clauses.append(", ".join(groups) + (f" (also different: {others})" if others else ""))
    return clauses


def _named(ranks: Sequence[CommunicatorRank], known: Mapping[tuple[str, int], int]) -> str:
    """Return `rank 3 (process 1)`, or `ranks 3 and 4`: ranks count within their communicator, processes in the job."""
    shown = []
    for rank in ranks[:_MOST_RANKS]:
        process = known.get((rank.host, rank.pid))
        shown.append(f"{rank.number}" + (f" (process {process})" if process is not None else ""))
    if len(ranks) > _MOST_RANKS:
        shown.append(f"{len(ranks) - _MOST_RANKS} more")
    listed = " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
