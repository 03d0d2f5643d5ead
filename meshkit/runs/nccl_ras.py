"""Ask NCCL's RAS service which ranks do not answer or are behind, while a job hangs.

    environment of the job -> ask() -> answer -> read_answer() -> NcclCommunicator -> describe() -> a line of the hang

From NCCL 2.28.7 on the answer is JSON. An older release's answer is not read, but kept as evidence. jax accepts older
releases, but a new installation gets the newest one. The service counts the collectives that the host has launched,
except those in CUDA graphs. A lower count says which rank is behind, and not why.

Another job can own the socket. So an answer is reported only if it names processes of this launcher and no others of
this machine. Of the answer's texts, the message contains only names that match a pattern.

This module imports no jax, because a launcher, which also asks, has none.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated

from pydantic import BaseModel, NonNegativeInt, StringConstraints

from meshkit.distributed.environment import split_address

_QUESTION = b"CLIENT PROTOCOL 2\nTIMEOUT 1\nSET FORMAT json\nVERBOSE STATUS\n"
MOST_S, MOST_BYTES = 3.0, 4 << 20
_FIRST_S, _MOST_NAMED = 0.5, 4
_Name = Annotated[str, StringConstraints(pattern="^[0-9A-Za-z_]{1,30}$")]


class NcclRank(BaseModel):
    """A rank of a communicator, with the service's names of fields; a missing rank has no counts."""

    rank: NonNegativeInt
    host: str
    pid: int
    status: dict[str, object]
    """Flags: a missing rank is `unresponsive`, and after a minute `considered_dead`."""
    collective_counts: dict[_Name, int] = {}


class NcclCommunicator(BaseModel):
    """A communicator, with the service's names of fields."""

    hash: _Name
    """NCCL_DEBUG=INFO prints it too."""
    size: int
    ranks: list[NcclRank]
    missing_ranks: list[NcclRank]


class _Answer(BaseModel):
    communicators: list[NcclCommunicator]


def ask(environment: Mapping[str, str]) -> str:
    """Return what the service of a job with this environment answers within `MOST_S`, at most `MOST_BYTES`.

    It is "" if the environment turns the service off, or if nothing answers.
    """
    if environment.get("NCCL_RAS_ENABLE", "").strip() == "0":
        return ""
    address = environment.get("NCCL_RAS_ADDR", "").strip() or "localhost:28028"
    received = bytearray()
    # In a thread, since a look-up of the host's name has no limit.
    asking = threading.Thread(target=_receive, args=(address, received), name="meshkit-ras", daemon=True)
    asking.start()
    asking.join(MOST_S)
    return received[:MOST_BYTES].decode(errors="replace")


def _receive(address: str, received: bytearray) -> None:
    until = time.monotonic() + MOST_S
    with suppress(OSError, ValueError):
        while time.monotonic() < until:
            # All processes of a machine listen on the same port, and the kernel chooses one of them for a connection.
            # If that one is stopped and does not answer, a new connection may get another one.
            with suppress(TimeoutError), socket.create_connection(split_address(address), timeout=_FIRST_S) as channel:
                channel.sendall(_QUESTION)
                while time.monotonic() < until and len(received) < MOST_BYTES and (more := channel.recv(1 << 16)):
                    received += more
                    channel.settimeout(MOST_S)
                return


def read_answer(answer: str) -> list[NcclCommunicator]:
    """Return the communicators of an answer, the largest first; [] if it is not JSON, or is cut."""
    try:  # lines that acknowledge the question come first
        told = _Answer.model_validate_json(answer[answer.index("\n{") :])
    except ValueError:
        return []
    return sorted(told.communicators, key=lambda c: -c.size)


def describe(answer: str, processes: Mapping[int, int]) -> str:
    """Return a line on the worst communicator of an answer; "" if none has a problem, or if it may be another job's.

    The worst is the largest one with missing ranks, or else the largest one whose counts differ.

    Args:
        answer: from `ask`.
        processes: PID of each process here, or of the leader of its session -> its number in the job.
    """
    found = read_answer(answer)
    known = _find_processes([r for c in found for r in (*c.ranks, *c.missing_ranks)], processes)
    told = [(c, clauses) for c in found if (clauses := _clauses(c, known))]
    if not known or not told:
        return ""
    worst, clauses = min(told, key=lambda each: not each[0].missing_ranks)
    more = f" (one of {len(told)} communicators with a problem)" if len(told) > 1 else ""
    return f"NCCL's RAS: communicator {worst.hash} of {worst.size} ranks: {'; '.join(clauses)}{more}"


def _find_processes(ranks: Sequence[NcclRank], processes: Mapping[int, int]) -> dict[tuple[str, int], int]:
    """Map the host and PID of each rank on this machine to its process in the job; {} if a rank has none in it."""
    here = {host for host in {r.host for r in ranks} if _is_here(host)}
    found = {}
    for host, pid in {(r.host, r.pid) for r in ranks if r.host in here}:
        with suppress(OSError, OverflowError):  # it has ended
            found[host, pid] = processes.get(pid, processes.get(os.getsid(pid), -1))
    return {} if -1 in found.values() else found


def _is_here(host: str) -> bool:
    """Return whether an address is one of this machine's."""
    with suppress(OSError, ValueError):
        kind, _, _, _, address = socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
            return True
    return False


def _clauses(communicator: NcclCommunicator, known: Mapping[tuple[str, int], int]) -> list[str]:
    clauses, ranks = [], communicator.ranks
    if dead := [r for r in communicator.missing_ranks if r.status.get("considered_dead")]:
        clauses.append(f"{_named(dead, known)} {'is' if len(dead) == 1 else 'are'} considered dead")
    alive = [r for r in communicator.missing_ranks if not r.status.get("considered_dead")]
    if silent := [r for r in alive if r.status.get("unresponsive")]:
        clauses.append(f"{_named(silent, known)} gave no answer")
    names = ranks[0].collective_counts if ranks else {}
    if different := [name for name in names if len({r.collective_counts.get(name, 0) for r in ranks}) > 1]:
        count = lambda r: r.collective_counts.get(different[0], 0)
        groups = [(n, [*each]) for n, each in groupby(sorted(ranks, key=lambda r: (count(r), r.rank)), count)]
        most = max(groups, key=lambda group: (len(group[1]), group[0]))
        texts = []
        for launched, same in [*groups[:2], *groups[2:][-1:]]:
            who = f"{len(same)} ranks" if launched == most[0] and len(same) > 1 else _named(same, known)
            texts.append(f"{who} {'has' if len(same) == 1 else 'have'} launched {launched}")
        texts[0] += f" {different[0]}"
        others = ", ".join(different[1 : 1 + _MOST_NAMED])
        clauses.append(", ".join(texts) + (f" (also different: {others})" if others else ""))
    return clauses


def _named(ranks: Sequence[NcclRank], known: Mapping[tuple[str, int], int]) -> str:
    """Return `rank 3 (process 1)`, or `ranks 3 and 4`: ranks count within their communicator, processes in the job."""
    process = lambda r: f" (process {known[r.host, r.pid]})" if (r.host, r.pid) in known else ""
    shown = [f"{r.rank}{process(r)}" for r in ranks[:_MOST_NAMED]]
    if len(ranks) > _MOST_NAMED:
        shown.append(f"{len(ranks) - _MOST_NAMED} more")
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
