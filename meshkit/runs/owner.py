"""Make one process the owner of a run folder, so that no two jobs write the same run.

    run.json                the ID of the run, which its checkpoints carry
    owner/7.json            the claim of the seventh owner; its mtime, which the owner renews, shows that it is alive
    owner/7.released.json   the seventh owner has released the folder

    process 0 -> no owner, or a released or dead one -> owner/8.json -> RunOwner -> checked before commits -> released
              -> the owner is alive -> wait for it if it is of the same gang, else raise an error that names it

The number is a fencing token. The file for a number can be made only once, the highest number owns the folder, and the
files of lower numbers are removed before the new owner does anything else. So an owner that was wrongly taken for dead
finds its file gone, and stops writing. An owner on this machine is dead when the kernel says so. An owner on another
machine counts as dead when it has not renewed its file for a lease. Times are those of the file system, which has the
same clock for all. A launcher renews the file for its processes too, since a library may hold their GIL for longer than
a lease.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshkit.config.files import open_regular, read_regular
from meshkit.errors import ConfigError, RunError

LAUNCH_VARIABLE = "MESHKIT_LAUNCH"
"""The identity that the attempts of one launch share."""
RUN_FILE, OWNER_FOLDER = "run.json", "owner"
_RUN_SCHEMA, _OWNER_SCHEMA = "meshkit.run/1", "meshkit.owner/1"
LEASE_S = 120.0  # long enough for a library that holds the GIL for a minute
BEAT_S, _POLL_S = 5.0, 0.2
LINGER_S = 5.0  # a killed process ends only after it has freed its memory
_LARGEST_BYTES = 1 << 16
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_CLAIM = re.compile(r"([0-9]{1,12})(\.released)?\.json", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True)
class _Claim:
    """The claim file of an owner."""

    token: int
    released: bool
    path: Path
    record: Mapping[str, Any]
    """The contents of the file; empty if it is being written or cannot be read."""

    def __str__(self) -> str:
        said = self.record
        if not said:
            return f"an owner whose {self.path.name} cannot be read"
        return f"process {said.get('pid')!r:.20} on host {said.get('host')!r:.80} (attempt {said.get('attempt')!r:.20})"

    def is_here(self, me: Mapping[str, Any]) -> bool:
        """Return whether the owner runs on this process's kernel and in its PID namespace."""
        keys = ("boot", "pid_namespace") if me["boot"] else ("host",)
        return bool(self.record) and all(self.record.get(key) == me[key] for key in keys)

    def is_before(self, me: Mapping[str, Any]) -> bool:
        """Return whether the owner belongs to an earlier attempt of this process's gang."""
        attempt = self.record.get("attempt")
        same = bool(me["launch"]) and self.record.get("launch") == me["launch"]
        return same and isinstance(attempt, int) and attempt < me["attempt"]

    def is_gone(self, me: Mapping[str, Any]) -> bool:
        """Return whether the owner has released the folder or is dead."""
        if self.released:
            return True
        if self.is_here(me):
            return not _runs(self.record.get("pid"), self.record.get("started"))
        try:
            return _age_s(self.path) > LEASE_S
        except FileNotFoundError:  # released or replaced just now
            return False


class RunOwner:
    """The right to write a run folder. A context manager, which releases the folder at its end.

    Args:
        run: the ID of the run.
        token: the number of this owner.
        claim: the claim file; None in all processes of a gang but the first, which owns the folder for all.
    """

    def __init__(self, run: str, token: int, claim: Path | None = None):
        self.run, self.token, self._claim = run, token, claim
        self._looked, self._lost, self._ends = time.monotonic(), "", threading.Event()
        self._thread = threading.Thread(target=self._beat, name="meshkit-owner", daemon=True)

    def __enter__(self) -> Self:
        if self._claim is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._lost = self._lost or "it was given back"  # a background save may check after this
        self._ends.set()
        if self._claim is not None:
            self._thread.join(timeout=BEAT_S)
            with suppress(OSError):  # another owner has taken the folder over
                _give_back(self._claim)

    def check(self) -> None:
        """Raise an error unless this owner still has the folder. Accesses the file system.

        Raises:
            ConfigError: another owner has taken the folder over.
            OSError: the file system does not answer.
        """
        if self._claim is None:
            return
        if not self._lost:
            self._look(self._claim)
        if self._lost:
            raise ConfigError(
                f"owner {self.token} of the run folder may no longer write it: {self._lost}.",
                at=str(self._claim.parent.parent),
                hint="the same command once the other job has ended, or another --out",
            )

    def watch(self) -> None:
        """Like `check`, but access the file system only if the background renewal is late. Cheap enough for each step.

        Raises:
            ConfigError: another owner has taken the folder over.
        """
        if self._lost or time.monotonic() - self._looked > 2 * BEAT_S:
            with suppress(OSError):
                self.check()

    def _look(self, claim: Path) -> None:
        """Renew the claim file, and set `_lost` if another owner has taken the folder over."""
        try:
            os.utime(claim)  # asks the file server, while a directory listing may come from the client's cache
            newest = _newest(claim.parent)
            if newest is not None and newest.token > self.token:
                self._lost = f"{newest} has taken it over"
        except FileNotFoundError:
            newest = _newest(claim.parent)
            self._lost = f"{newest} has taken it over" if newest is not None else f"{claim.name} is gone"
        self._looked = time.monotonic()

    def _beat(self) -> None:
        assert self._claim is not None
        while not self._ends.wait(BEAT_S) and not self._lost:
            with suppress(OSError):  # the storage may come back; if not, the lease ends
                self._look(self._claim)


def take_run(
    folder: Path,
    *,
    attempt: int = 0,
    known_run: Callable[[], str | None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> RunOwner:
    """Make this process the owner of a run folder, once its gang's last attempt or a silent owner's lease has ended.

    Args:
        folder: the run folder; made if missing.
        attempt: the attempt of this process's gang.
        known_run: returns the run ID that the checkpoints carry, or None; called by the owner if there is no run.json.
        say: prints a line about the owner for which this waits.

    Raises:
        ConfigError: another job has the folder, or it cannot be written.
        RunError: the attempt before this one does not end, or the storage does not answer.
    """
    try:
        owners = folder / OWNER_FOLDER
        owners.mkdir(parents=True, exist_ok=True)
        claim = _acquire(owners, this_process(attempt), say)
        try:
            return RunOwner(_identity(folder, known_run), int(claim.stem), claim)
        except BaseException:
            _give_back(claim)
            raise
    except OSError as error:
        passing = error.errno in _PASSING
        wrong, hint = (
            (RunError, "the same command, once the storage answers") if passing else (ConfigError, "another --out")
        )
        raise wrong(f"the run folder cannot be used: {error.strerror or error}.", at=str(folder), hint=hint) from None


@contextmanager
def renewing(folder: Path, launch: str) -> Iterator[None]:
    """Renew, inside the block, the claim of an owner that is a running process of this launch on this machine.

    Args:
        folder: the run folder, which need not exist yet.
        launch: the value of `LAUNCH_VARIABLE` for the processes of this launch.
    """

    def beat() -> None:
        me = this_process(0)
        while not ends.wait(BEAT_S):
            with suppress(OSError):  # the storage may come back; or the claim was released or replaced
                newest = _newest(folder / OWNER_FOLDER)
                if newest is None or newest.record.get("launch") != launch:
                    continue
                if newest.is_here(me) and not newest.is_gone(me):
                    os.utime(newest.path)

    ends = threading.Event()
    threading.Thread(target=beat, name="meshkit-lease", daemon=True).start()
    try:
        yield
    finally:
        ends.set()


def is_owned(folder: Path) -> bool:
    """Return whether a job owns a run folder now.

    Raises:
        OSError: the folder cannot be read. Or the owner is on another machine, and no file can be made in the folder
            to read the file system's clock.
    """
    newest = _newest(folder / OWNER_FOLDER)
    return newest is not None and not newest.is_gone(this_process(0))


def _acquire(owners: Path, me: Mapping[str, Any], say: Callable[[str], None]) -> Path:
    """Wait until the folder is free, and make the claim."""
    seen, beat, since, told = None, 0, 0.0, False
    while True:
        last = _newest(owners)
        if last is None or last.is_gone(me):
            if (claim := make_claim(owners, (last.token if last else 0) + 1, me)) is not None:
                return claim
            continue
        try:
            now = last.path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
        if last.path != seen:
            seen, beat, since = last.path, now, time.monotonic()
        waited_s, at = time.monotonic() - since, str(owners.parent)
        if last.is_before(me):
            if waited_s > LEASE_S:
                raise RunError(f"the attempt before this one has not ended in {waited_s:.0f} s: {last}.", at=at)
        elif (last.is_here(me) and waited_s > LINGER_S) or (not last.is_here(me) and now != beat):
            raise ConfigError(
                f"another job has this run folder: {last}.", at=at, hint="another --out, or the same when it has ended"
            )
        elif waited_s > LEASE_S and (claim := make_claim(owners, last.token + 1, me)) is not None:  # no sign of life
            return claim
        if not told and waited_s > 1:
            told = True
            say(f"waiting for {last}, which has the run folder, to end or be silent for {LEASE_S:.0f} s")
        time.sleep(_POLL_S)


def make_claim(owners: Path, token: int, me: Mapping[str, Any]) -> Path | None:
    """Make and return the claim with this number, and so own the folder; None if another process was first."""
    claim = owners / f"{token}.json"
    try:
        with open(claim, "x", encoding="utf-8") as file:
            json.dump({"schema": _OWNER_SCHEMA, "token": token, **me}, file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return None
    except BaseException:
        claim.unlink(missing_ok=True)
        raise
    if any(other.token >= token and other.path != claim for other in _claims(owners)):
        claim.unlink(missing_ok=True)  # higher numbers exist: this one could be made only because its file was removed
        return None
    for other in _claims(owners):
        if other.token < token:
            other.path.unlink(missing_ok=True)
    return claim


def _give_back(claim: Path) -> None:
    os.rename(claim, claim.with_suffix(".released.json"))


def _claims(owners: Path) -> list[_Claim]:
    found = [(_CLAIM.fullmatch(path.name), path) for path in (owners.iterdir() if owners.is_dir() else ())]
    return [_Claim(int(match[1]), match[2] is not None, path, _read(path)) for match, path in found if match]


def _newest(owners: Path) -> _Claim | None:
    return max(_claims(owners), key=lambda claim: (claim.token, not claim.released), default=None)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            record = json.loads(file.read(_LARGEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _identity(folder: Path, known_run: Callable[[], str | None]) -> str:
    """Return the ID of the run in a folder; write one into the folder if there is none."""
    path = folder / RUN_FILE
    if path.exists():
        try:
            record = json.loads(read_regular(path, _LARGEST_BYTES))
        except (OSError, ValueError, RecursionError):
            record = None
        run = record.get("run") if isinstance(record, dict) else None
        if not isinstance(run, str) or not _UUID.fullmatch(run):
            hint = "the file as it was, or no file: the run then gets the ID that all of its checkpoints carry"
            raise ConfigError("the identity of this run cannot be read.", at=str(path), hint=hint)
        return run
    known = known_run()
    run = known if known is not None and _UUID.fullmatch(known) else str(uuid.uuid4())
    partial = path.with_name(f"{RUN_FILE}.tmp")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"schema": _RUN_SCHEMA, "run": run}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return run


def this_process(attempt: int) -> dict[str, Any]:
    """Return the facts that identify this process among all processes of all machines."""
    job = os.environ.get("SLURM_JOB_ID")
    return {
        "host": socket.gethostname(),
        "boot": _text(Path("/proc/sys/kernel/random/boot_id")),
        "pid_namespace": _link(Path("/proc/self/ns/pid")),
        "pid": os.getpid(),
        "started": process_start(os.getpid())[0],
        "attempt": attempt,
        "launch": os.environ.get(LAUNCH_VARIABLE) or (f"SLURM job {job}" if job else ""),
    }


def _runs(pid: Any, started: Any) -> bool:
    """Return whether the process `pid` of this machine was started at `started`, and has not ended."""
    if not isinstance(pid, int) or pid < 1:
        return False
    began, state = process_start(pid)
    if began is not None:
        return began == started and state not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's process, whose start some systems hide
        pass
    return True


def process_start(pid: int) -> tuple[int | None, str]:
    """Return when a process was started, in ticks since boot, and its state; None and "" if /proc does not have it."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(words[19]), words[0]
    except (OSError, ValueError, IndexError):
        return None, ""


def _age_s(path: Path) -> float:
    """Return the seconds since a file was touched, by the clock of its file system."""
    with tempfile.NamedTemporaryFile(dir=path.parent) as now:
        os.utime(now.name)
        return os.stat(now.name).st_mtime - path.stat().st_mtime


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
