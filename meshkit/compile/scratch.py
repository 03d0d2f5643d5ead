"""Temporary folders and processes that do not outlive who made them, however that ends.

    <temporary folder>/meshkit-scratch-<random>    locked (flock) as long as a process that works in it lives

An end of any kind that Python hears ends the processes, then removes the folder. After SIGKILL the kernel ends the
processes (on Linux) and lets go of the lock, and whoever makes a folder next removes those that nobody holds.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "meshkit-scratch-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMOVE_S = 5.0  # for processes that were killed to be gone; what is left then goes at the next start


@dataclass
class _Scratch:
    """A folder that this process has made."""

    lock: int  # descriptor; also of the processes that work in it
    maker: int = field(default_factory=os.getpid)  # a fork of it removes nothing
    processes: set[subprocess.Popen] = field(default_factory=set)


_made: dict[Path, _Scratch] = {}
_changing = threading.Lock()
_ends = threading.Event()  # the interpreter does


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, removed with the block and the processes that were started in it.

    Raises:
        OSError: it cannot be made.
    """
    sweep()
    folder = _make()
    try:
        yield folder
    finally:
        _remove(folder)


def start_in(folder: Path, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen:
    """Starts a process whose temporary files, too, lie in a scratch folder, and which ends before that is removed.

    Args:
        folder: from `scratch_folder`.
        command: of a process that calls `die_with_parent`; gets the number of this one as its last word.
        environment: of the process.
        options: of `subprocess.Popen`.

    Raises:
        ProcessLookupError: the folder is gone already: nothing is started any more.
    """
    with _changing:  # `_remove` ends what was started, and nothing is started after it
        scratch = _made.get(folder)
        if scratch is None:
            raise ProcessLookupError(f"{folder} is gone")
        process = subprocess.Popen(
            [*command, str(os.getpid())],
            env={**environment, "TMPDIR": str(folder)},
            pass_fds=(scratch.lock,),
            **options,
        )
        scratch.processes = {p for p in scratch.processes if p.returncode is None} | {process}
        return process


def die_with_parent() -> None:
    """Asks Linux to end this process with the one that started it, which is the last argument; now if it is gone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(sys.argv[-1]):
            os.kill(os.getpid(), signal.SIGKILL)


def sweep() -> None:
    """Removes the scratch folders of this user that no living process holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # held, of another user, or gone by now
            lock = os.open(path, _FOLDER)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _make() -> Path:
    """A locked folder; again where another process swept it before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(folder, _FOLDER)
        except FileNotFoundError:  # swept by another process before it was locked
            continue
        with suppress(OSError):  # a file system without locks, where nothing is swept either
            fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), folder.stat()):
                with _changing:
                    if not _ends.is_set():
                        _made[folder] = _Scratch(lock)
                        return folder
                shutil.rmtree(folder, ignore_errors=True)
                raise ProcessLookupError("this process is ending")
        os.close(lock)


def _remove(folder: Path) -> None:
    with _changing:
        scratch = _made.pop(folder, None)
    if scratch is None:
        return
    for process in scratch.processes:
        process.kill()
    ends = time.monotonic() + _REMOVE_S
    for process in scratch.processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, ends - time.monotonic()))
    while folder.exists() and time.monotonic() < ends:  # what those processes have started may write for a moment
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.02)
    os.close(scratch.lock)


@atexit.register
def _remove_all() -> None:
    """Where a thread that nobody waits for any more is still in the block."""
    with _changing:
        _ends.set()
    for folder, scratch in list(_made.items()):
        if scratch.maker == os.getpid():
            _remove(folder)
