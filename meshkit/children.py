"""Child processes of Python, and temporary folders. Neither outlives the process that made it, however that ends.

    Child(module).ask(request)  -- a line of JSON on stdin ->  serve(answer), in `python -P -m module PARENT`
                               <- a line of JSON on stdout --

    <temporary folder>/meshkit-scratch-<random>    marked as ours, locked (flock) as long as a process works in it

Data that is too large for a line is in files in the child's folder. XLA aborts its process on some programs, and a
machine can run out of memory: then only the child dies, and only its request is lost.

If this process ends in a way that Python can handle, Python kills the children and the processes that they started
(XLA's `ptxas`), then removes the folders. After SIGKILL the kernel kills the children (on Linux) and releases the
locks. The next process that makes a folder removes all folders without a lock.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from meshkit.errors import MeshkitError
from meshkit.private import MARK

PREFIX = "meshkit-scratch-"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMOVE_S = 5.0  # Time for killed processes to end. The next `sweep` removes folders that are left then.
_LAST_S = 1.0  # Time from the end of a child's answers to its exit.
_KEPT_S = 60.0  # How long a child waits for its next request.
_KEPT_BYTES = 2 * 2**30  # A child that has used more memory is ended, which frees the memory.
_FIRST_OF_ALL = "1000"  # The oom_score_adj of the process to kill first, see proc(5).


class ChildFailed(Exception):
    """An exception in a child. Its text is `Type: text`, or the message if it is an error of meshkit."""


class ChildDied(ChildFailed):
    """A child ended before it answered; `how` is `SIGABRT`, or `exit code 1`."""

    def __init__(self, how: str, log: str):
        super().__init__(f"the process died ({how})")
        self.how, self.log = how, log


class Child:
    """A process that runs a module of meshkit, which calls `serve`; leaving its `with` block kills it, even at work.

    It has this process's import path, and ends with the thread that started it (on Linux). If memory runs out, it is
    the first process that the kernel kills.

    Args:
        environment: environment of the process, in which PYTHONPATH and TMPDIR are replaced.
        log: a file to which the process's output is appended; None takes a file in its folder.

    Raises:
        OSError: it cannot be started. If this process is ending, the error is a ProcessLookupError.
    """

    folder: Path
    """Folder for files that belong to requests and answers; it is removed with the process."""
    cpu_s: float = 0.0
    """CPU seconds of the last request. The start of the process counts toward the first request."""
    peak_rss_bytes: int = 0

    def __init__(self, module: str, environment: Mapping[str, str] = os.environ, log: Path | None = None):
        sweep()
        self._scratch = _make()
        self.folder = self._scratch.folder
        self._log = log or self.folder / "log"
        own = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "TMPDIR": str(self.folder)}
        try:
            with _changing, self._log.open("ab") as stderr:
                # No process starts after `_remove` has ended this folder's process.
                if self._scratch.folder not in _made:
                    raise ProcessLookupError("this process is ending")
                self._scratch.process = self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(os.getpid())],
                    env={**environment, **own},
                    pass_fds=(self._scratch.lock,),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    process_group=None if _serving.is_set() else 0,
                )
        except BaseException:
            _remove(self._scratch)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: Any, timeout_s: float | None = None) -> Any:
        """Return the answer to a request; both are JSON.

        Raises:
            ChildFailed, ChildDied: the child raised an exception, or ended.
            TimeoutError: the answer took longer than `timeout_s`; the process is ended.
        """
        self.send(request)
        return self.receive(timeout_s)

    def send(self, request: Any) -> None:
        """Send a request, whose answer `receive` waits for."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # `receive` reports a child that has died.
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the answer to the request that was sent; see `ask`."""
        assert self._process.stdout is not None
        self.cpu_s, line = 0.0, ""
        try:
            if not ready([self], timeout_s):
                self.close()
                raise TimeoutError
            line = self._process.stdout.readline()
        except ValueError:  # Another thread closed it.
            pass
        if not line.endswith("\n"):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LAST_S)
            log = self.log()
            self.close()
            code = self._process.wait()
            raise ChildDied(signal.Signals(-code).name if code < 0 else f"exit code {code}", log)
        said = json.loads(line)
        self.cpu_s, self.peak_rss_bytes = said["cpu_s"], said["peak_rss_bytes"]
        if "error" in said:
            raise ChildFailed(said["error"])
        return said["answer"]

    def log(self) -> str:
        """Return what the process has printed; after `close`, nothing if the log was in its folder."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def ended(self) -> bool:
        """Return whether the process is gone."""
        return self._process.poll() is not None

    def tidy(self) -> None:
        """Empty the log and the folder between two requests."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (MARK, self._log.name):
                path.unlink(missing_ok=True)
        os.truncate(self._log, 0)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when there is an answer, or when the process is dead."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def close(self) -> None:
        """End the process, whatever it is doing, and remove its folder."""
        _remove(self._scratch)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # The process may have died before it read the last request.
                if pipe is not None:
                    pipe.close()


class KeptChild:
    """A child that is kept for the next request, since starting Python and jax takes longer than many requests.

    `deciding` returns the environment variables that affect the child: if they change, a new child is started.
    """

    def __init__(self, module: str, deciding: Callable[[Mapping[str, str]], Mapping[str, str]] = dict):
        self._module, self._deciding, self._using = module, deciding, threading.Lock()
        self._child: Child | None = None
        self._like: tuple[Any, ...] = ()  # The settings of the child's start; the first is this process's id.
        self._starter: ThreadPoolExecutor | None = None
        self._idle: threading.Timer | None = None

    @contextmanager
    def use(self, environment: Mapping[str, str]) -> Iterator[Child]:
        """Provide the child for one request, with an empty log; start a new child if none has this environment.

        A caller that comes while the child is in use gets a temporary child. An exception in the block ends the child.
        """
        if not self._using.acquire(blocking=False):
            with Child(self._module, environment) as child:
                yield child
            return
        try:
            child = self._take(environment)
            try:
                yield child
            except BaseException:
                self._end()
                raise
            if child.peak_rss_bytes > _KEPT_BYTES:
                self._end()
            else:
                child.tidy()
                self._idle = threading.Timer(_KEPT_S, self._end_idle)
                self._idle.daemon = True
                self._idle.start()
        finally:
            self._using.release()

    def _take(self, environment: Mapping[str, str]) -> Child:
        if self._idle is not None:
            self._idle.cancel()
        like = (os.getpid(), os.getcwd(), sys.path[:], tempfile.gettempdir(), self._deciding(environment))
        if self._child is None or self._like != like or self._child.ended():
            self._end()
            if self._starter is None or like[:1] != self._like[:1]:
                # Linux ends a child with the thread that started it, so this thread stays.
                self._starter = ThreadPoolExecutor(1, "meshkit-children")
            self._child, self._like = self._starter.submit(Child, self._module, environment).result(), like
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _end_idle(self) -> None:
        if self._using.acquire(blocking=False):
            self._end()
            self._using.release()


def ready(children: Sequence[Child], timeout_s: float | None = None) -> list[Child]:
    """Wait until some child's `receive` would not block, and return all such children; none after the timeout."""
    # epoll forgets a descriptor that another thread closes, and would wait forever.
    with selectors.PollSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ, child)
        return [key.data for key, _ in selector.select(timeout_s)]


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the requests of the parent process until there are no more, or the parent is gone.

    An exception in `answer` is sent to the parent too. Everything printed meanwhile goes to stderr.
    """
    _die_with_parent()
    _serving.set()
    for number in (signal.SIGINT, signal.SIGTERM):  # The parent also gets these signals, and decides.
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # Only Linux has this file.
        Path("/proc/self/oom_score_adj").write_text(_FIRST_OF_ALL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    counted_s = 0.0
    for line in sys.stdin:
        try:
            said = {"answer": answer(json.loads(line))}
        except MeshkitError as error:
            said = {"error": error.message}
        except Exception as error:  # A bug, or an error of XLA: one line goes to the parent, the rest to the log.
            traceback.print_exc()
            said = {"error": f"{type(error).__name__}: {error}"}
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = used.ru_utime + used.ru_stime
        usage = {"cpu_s": cpu_s - counted_s, "peak_rss_bytes": peak_rss_bytes()}
        counted_s = cpu_s
        sys.stderr.flush()
        answers.write(json.dumps(said | usage) + "\n")
        answers.flush()


def peak_rss_bytes() -> int:
    """Return the most memory that this process has held, in bytes.

    On Linux `ru_maxrss` of getrusage(2) starts at the peak of the parent process; VmHWM of proc(5) does not.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _die_with_parent() -> None:
    """Ask Linux to end this process with its parent, whose id is the last argument; end now if the parent is gone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # From linux/prctl.h.
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(sys.argv[-1]):
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(eq=False)
class _Scratch:
    """A folder that this process has made."""

    folder: Path
    lock: int
    """The descriptor of the lock, which the process that works in the folder also holds."""
    process: subprocess.Popen | None = None
    maker: int = field(default_factory=os.getpid)
    """Id of the process that made the folder; forks of it must not remove the folder."""


_made: dict[Path, _Scratch] = {}
_changing = threading.Lock()
_ends = threading.Event()  # Set when the interpreter ends.
_serving = threading.Event()  # Set in a child: processes that it starts are in its group, and end with it.


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder that is removed after the block.

    Raises:
        OSError: it cannot be made.
    """
    sweep()
    scratch = _make()
    try:
        yield scratch.folder
    finally:
        _remove(scratch)


def sweep() -> None:
    """Remove the scratch folders of this user that no living process holds; skip folders without meshkit's mark."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # It is held, belongs to another user, or is gone by now.
            lock = os.open(path, _FOLDER)
            try:
                if os.fstat(lock).st_uid == os.geteuid() and (path / MARK).is_file():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _make() -> _Scratch:
    """Make a folder, lock it, then mark it: a folder with the mark but without a lock is left over."""
    with _changing:  # Finish before the interpreter ends.
        if _ends.is_set():
            raise ProcessLookupError("this process is ending")
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder, _FOLDER)
        with suppress(OSError):  # A file system without locks; nothing is swept there either.
            fcntl.flock(lock, fcntl.LOCK_SH)
        (folder / MARK).touch(mode=0o600)
        _made[folder] = _Scratch(folder, lock)
        return _made[folder]


def _remove(scratch: _Scratch) -> None:
    """End the process that works in a folder, then remove the folder; a second call does nothing."""
    with _changing:
        if _made.pop(scratch.folder, None) is None:
            return
    ends = time.monotonic() + _REMOVE_S
    if scratch.process is not None:
        _kill(scratch.process)
        with suppress(subprocess.TimeoutExpired):
            scratch.process.wait(_REMOVE_S)
    while scratch.folder.exists() and time.monotonic() < ends:  # The process's own children may write for a moment.
        shutil.rmtree(scratch.folder, ignore_errors=True)
        if scratch.folder.exists():
            time.sleep(0.02)
    os.close(scratch.lock)


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        if process.poll() is None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


@atexit.register
def end_all() -> None:
    """End all processes and remove all folders, even those of threads that the interpreter does not wait for."""
    with _changing:
        _ends.set()
    for scratch in list(_made.values()):
        if scratch.maker == os.getpid():
            _remove(scratch)
