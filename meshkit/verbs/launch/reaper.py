"""Stands between the launcher and one process of a gang, so that nothing which that process starts outlives either.

    launcher --socket--> reaper -> process of the gang -> its children, also in sessions of their own
    the socket ends (also by kill -9 of the launcher) -> SIGKILL to all of them

A program of its own, which imports nothing of meshkit: `python -I -S reaper.py DESCRIPTOR`. It reads one line from the
socket (the command, as JSON) and writes two: the number of the process; when it has ended, its exit code (or minus the
signal) and the time. The process is then left a zombie, so that nobody else gets its number. On Linux what has lost its
parent becomes a child of the reaper (PR_SET_CHILD_SUBREAPER), and a reaper that is killed takes the process with it
(PR_SET_PDEATHSIG). Elsewhere the reaper ends the process group of the process.

Not a control group: that needs a right which few jobs have, somebody who kills it when the launcher is gone, and one
that is left behind is in the way of the scheduler's own.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LINUX = sys.platform == "linux"
# What is left of a process that is gone, and cannot be killed: another user's, or storage that does not answer.
_LEAVE_S = 5.0
_KEPT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def keep(launcher: socket.socket) -> None:
    """Starts what the launcher says, tells of it, and ends it with all that it has started once the socket ends."""
    for number in _KEPT:  # a scheduler may signal every process of a job
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup's stays, and the process inherits it
            signal.signal(number, lambda *_: None)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    command = launcher.makefile("rb").readline()
    if not command:
        return
    try:
        process = _start(json.loads(command))
    except OSError as error:
        _tell(launcher, str(error))
        return
    _tell(launcher, str(process))
    ending = None
    while True:
        ready, _, _ = select.select([launcher, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
        if ending is None and (ending := _reap(process)) is not None:
            _tell(launcher, f"{ending} {time.monotonic()}")
        if launcher in ready:
            killed = _end(process, ending)
            if ending is None:
                _tell(launcher, f"{killed} {time.monotonic()}")
            return


def _start(command: list[str]) -> int:
    """The process, which leads a session of its own.

    Raises:
        OSError: the program is not there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if _LINUX:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reaper, (said, says) = os.getpid(), os.pipe()  # it closes when the program begins
    process = os.fork()
    if process == 0:
        try:
            os.setsid()
            if _LINUX:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == reaper:  # else it was gone before the kernel knew
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                    signal.signal(number, signal.SIG_DFL)
                os.execvp(command[0], command)
        except OSError as error:
            os.write(says, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(says)
    if wrong := os.read(said, 16):
        raise OSError(int(wrong), os.strerror(int(wrong)), command[0])
    os.close(said)
    return process


def _reap(process: int) -> int | None:
    """How the process has ended, if it has; what has ended of its orphans is forgotten."""
    try:
        while hasattr(os, "waitid"):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            if found.si_pid == process:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            os.waitpid(found.si_pid, 0)
        pid, status = os.waitpid(process, os.WNOHANG)  # macOS
        return os.waitstatus_to_exitcode(status) if pid else None
    except ChildProcessError:
        return None


def _end(process: int, ending: int | None) -> int | None:
    """SIGKILL to the process and all below it, until none is left.

    Returns:
        How the process has ended.
    """
    leave_at, pause_s = time.monotonic() + _LEAVE_S, 0.005
    _kill(os.killpg, process)
    while True:
        for pid in _below(os.getpid()):
            _kill(os.kill, pid)
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == process and ending is None:
                    ending = os.waitstatus_to_exitcode(found[1])
        except ChildProcessError:
            return ending
        if ending is not None and time.monotonic() > leave_at:
            return ending
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


def _below(pid: int) -> list[int]:
    """Children of a process, their children, and so on, as /proc has them."""
    parents, found = {}, [pid]
    for name in os.listdir("/proc") if _LINUX else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                    parents[int(name)] = int(file.read().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _kill(send: Callable[[int, int], None], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # nobody left, zombies only (macOS), or another user's
        send(number, signal.SIGKILL)


def _tell(launcher: socket.socket, line: str) -> None:
    with suppress(OSError):  # it is gone, which the next look at the socket says
        launcher.sendall(f"{line}\n".encode())


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    keep(channel)
