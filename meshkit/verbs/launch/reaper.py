"""Run one process of a job for the launcher, and kill it and all its descendants when the launcher ends.

    launcher --socket--> reaper -> process of the job -> its children, also in sessions of their own
    the socket is closed (also by kill -9 of the launcher) -> SIGKILL to the process and all its descendants

This is a separate program, which imports nothing of meshkit: `python -I -S reaper.py DESCRIPTOR`. It reads one line
from the socket: the command, as JSON. It writes two lines: the process's PID, and when the process has ended, its exit
code (or minus the signal) and the time. If the process cannot be started, it writes only the text of the error.

On Linux the ended process stays a zombie, so that its PID is not reused. Orphaned descendants become children of the
reaper (PR_SET_CHILD_SUBREAPER), and the process is killed when the reaper is killed (PR_SET_PDEATHSIG). On other
systems the reaper kills only the process group.

A control group (cgroup) is not used. It needs rights that few jobs have, and a process like this one would still have
to kill it when the launcher is gone. A leftover group would also get in the way of the scheduler's groups.
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
# Seconds to wait for descendants that cannot be killed: another user's, or in a call to storage that does not answer.
_LEAVE_S = 5.0
_SWALLOWED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def keep(launcher: socket.socket) -> None:
    """Run the command that the launcher sends, report its start and end, and kill it when the socket is closed."""
    for number in _SWALLOWED:  # a scheduler may signal every process of a job, and the reaper must go on
        # An empty handler is not inherited by the job's process, as SIG_IGN would be. So the process only ignores the
        # signals that were ignored before, as under nohup.
        if signal.getsignal(number) != signal.SIG_IGN:
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
    """Start the process in a session of its own, and return its PID.

    Raises:
        OSError: the program is not there.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if _LINUX:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reaper, (said, says) = os.getpid(), os.pipe()  # the pipe closes when the program begins
    process = os.fork()
    if process == 0:
        try:
            os.setsid()
            if _LINUX:
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == reaper:  # else the reaper ended before prctl
                for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
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
    """Return the exit code (or minus the signal) of the process if it has ended, and reap ended orphans."""
    try:
        while hasattr(os, "waitid"):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            if found.si_pid == process:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            os.waitpid(found.si_pid, 0)
        pid, status = os.waitpid(process, os.WNOHANG)  # macOS before Python 3.13, without waitid
        return os.waitstatus_to_exitcode(status) if pid else None
    except ChildProcessError:
        return None


def _end(process: int, ending: int | None) -> int | None:
    """Send SIGKILL to the process and all its descendants, until none is left.

    Once the process itself has ended, descendants that are left after `_LEAVE_S` are given up.

    Returns:
        The exit code of the process, or minus the signal.
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
    """Return the PIDs of all descendants of a process, from /proc."""
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
    # The errors mean that no process is left, or only zombies (on macOS) or processes of another user.
    with suppress(ProcessLookupError, PermissionError):
        send(number, signal.SIGKILL)


def _tell(launcher: socket.socket, line: str) -> None:
    with suppress(OSError):  # a closed socket is noticed by the next select
        launcher.sendall(f"{line}\n".encode())


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    keep(channel)
