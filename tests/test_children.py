"""Test that temporary folders and processes end with their maker, at once or at the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshkit.children import (
    PREFIX,
    Child,
    ChildDied,
    ChildFailed,
    KeptChild,
    peak_rss_bytes,
    ready,
    scratch_folder,
    sweep,
)
from meshkit.private import MARK

ROOT = Path(__file__).parents[1]
# This process writes into its temporary folder as fast as it can, as a compiler does that dumps.
WRITER = """
import itertools, os, pathlib, tempfile
from meshkit.children import serve
def answer(_):
    for i in itertools.count():
        folder = pathlib.Path(tempfile.gettempdir(), f"dump{i % 50}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_text("x" * 1000)
        if i == 100:
            print(os.getpid(), file=open(pathlib.Path(os.environ["SAYS"], str(os.getpid())), "w"))
serve(answer)
"""
# This program plans; a thread that nobody waits for is in the block when Ctrl-C comes.
PLANNER = """
import sys, threading, time
from meshkit.children import Child
def compile():
    with Child("writer") as child:
        child.ask({})
threading.Thread(target=compile, daemon=True).start()
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""
# This program tunes: each of its workers compiles.
WORKER = """
from meshkit.children import Child, serve
serve(lambda _: Child("writer").ask({}))
"""
TUNER = """
from meshkit.search import workers
workers.MODULE = "worker"
with workers.open_workers({"experiment": "x.toml"}, 2) as pool:
    pool.submit(("a=1",))
    pool.submit(("b=1",))
    try:
        pool.next()
    except KeyboardInterrupt:
        raise SystemExit(130)
"""
# This program answers, prints, raises and dies as it is told.
TOLD = """
import os, subprocess, sys, time
from meshkit.children import Child, serve
from meshkit.errors import ConfigError
def answer(request):
    print("asked for", request, flush=True)
    if request == "refuse":
        raise ConfigError("no.", hint="yes")
    if request == "raise":
        raise ValueError("of its own")
    if request == "end":
        sys.exit(3)
    if request == "start":
        return subprocess.Popen(["sleep", "600"]).pid
    if request == "start by another":
        return Child("told").ask("start")
    if request == "folder":
        return open(os.path.join(os.environ["TMPDIR"], "large"), "rb").read().decode()
    time.sleep(request)
    return [request]
serve(answer)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with a temporary folder in it, for this process and those that it starts."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "says").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("SAYS", str(tmp_path / "says"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {"writer": WRITER, "planner": PLANNER, "worker": WORKER, "tuner": TUNER, "told": TOLD}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def left(place):
    return sorted(path.name for path in (place / "tmp").iterdir())


def wait_for(condition, what):
    ends = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def children_of(pid):
    return [int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()]


def environment_of(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
@pytest.mark.parametrize(("program", "compilers"), [("planner.py", 1), ("tuner.py", 2)])
def test_what_is_stopped_in_a_compile_leaves_no_process_and_no_folder(place, program, compilers, number):
    # A terminal does this too: what a shell starts in the background, these tests among it, ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([sys.executable, str(place / program)])
    signal.signal(signal.SIGINT, before)
    wait_for(lambda: len(list((place / "says").iterdir())) == compilers, "nothing compiles")
    writers = [int(path.name) for path in (place / "says").iterdir()]
    process.send_signal(number)
    assert process.wait(30) == (130 if number == signal.SIGINT else -number)
    wait_for(lambda: not any(map(is_alive, writers)), "a compiler lives on")
    if number == signal.SIGKILL:
        assert left(place) != []
        wait_for(lambda: sweep() or left(place) == [], "it is not swept")
    assert left(place) == []


def test_a_child_is_kept_for_the_next_request_of_its_like(place):
    kept = KeptChild("told", lambda environment: {"LIKE": environment.get("LIKE", "")})

    def process(**more):
        with kept.use({**os.environ, **more}) as child:
            assert child.log() == ""  # The log is of this request alone.
            assert child.ask(0) == [0]
            (child.folder / "large").write_text("x")
            return child.fileno(), child.folder

    first = process()
    assert process(OTHER="1") == first
    assert not (first[1] / "large").exists()
    with kept.use(os.environ) as child, kept.use(os.environ) as another:  # Two are in use at a time.
        assert another.folder != child.folder == first[1]
    second = process(LIKE="1")
    assert second[1] != first[1]
    with pytest.raises(ChildFailed, match="of its own"), kept.use({**os.environ, "LIKE": "1"}) as child:
        child.ask("raise")
    assert process(LIKE="1")[1] != second[1]
    with pytest.raises(ChildDied, match="exit code 3"), kept.use({**os.environ, "LIKE": "1"}) as child:
        child.ask("end")
    assert child.ended()


def test_a_kept_child_outlives_the_thread_that_asks_and_ends_with_its_process(place):
    code = "import os; from concurrent.futures import ThreadPoolExecutor as T; from meshkit.children import KeptChild\n"
    code += "kept = KeptChild('told')\ndef ask():\n with kept.use(os.environ) as c: c.ask(0); return str(c.folder)\n"
    code += "found = {T(1).submit(ask).result() for _ in range(3)}; print(len(found), end='')"
    said = subprocess.run([sys.executable, "-c", code], check=True, cwd=place, capture_output=True, text=True)
    assert said.stdout == "1"
    assert left(place) == []


def test_a_folder_that_is_in_use_and_those_of_others_stay(place):
    for name in ("meshkit-other", f"{PREFIX}file"):
        (place / "tmp" / name).touch()
    (place / "tmp" / f"{PREFIX}link").symlink_to(place)
    for name in ("old", "mine"):
        (place / "tmp" / f"{PREFIX}{name}").mkdir()
        (place / "tmp" / f"{PREFIX}{name}" / "notes").write_text("x")
    (place / "tmp" / f"{PREFIX}old" / MARK).touch()
    with scratch_folder() as one, scratch_folder() as another:
        subprocess.run([sys.executable, "-c", "from meshkit.children import sweep; sweep()"], check=True)
        assert one.is_dir()
        assert another.is_dir()
    assert left(place) == sorted(["meshkit-other", f"{PREFIX}file", f"{PREFIX}link", f"{PREFIX}mine"])
    # It has the right name, but we did not make it.
    assert (place / "tmp" / f"{PREFIX}mine" / "notes").read_text() == "x"
    assert (place / "says").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user takes root")
def test_what_another_user_left_stays(place):
    (place / "tmp" / f"{PREFIX}theirs").mkdir()
    (place / "tmp" / f"{PREFIX}theirs" / MARK).touch()
    os.chown(place / "tmp" / f"{PREFIX}theirs", 12345, -1)
    sweep()
    assert left(place) == [f"{PREFIX}theirs"]


def test_folders_are_made_while_others_sweep(place):
    def use(_):
        with scratch_folder() as folder:
            (folder / "file").write_text("x")
            time.sleep(0.001)
            return (folder / "file").read_text()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(400))) == {"x"}
    assert left(place) == []


def test_the_memory_of_a_child_is_its_own(place):
    large = b"x" * 2**28
    assert peak_rss_bytes() > len(large)
    with Child("told") as child:
        child.ask(0)
        assert child.peak_rss_bytes < len(large)


def test_a_child_answers_one_request_after_the_other(place):
    with Child("told") as child:
        (child.folder / "large").write_text("x" * 100_000)
        assert child.ask("folder") == "x" * 100_000
        assert child.cpu_s > 0
        assert child.peak_rss_bytes > 2**20
        with pytest.raises(ChildFailed, match=r"^no\.$"):
            child.ask("refuse")
        with pytest.raises(ChildFailed, match=r"^ValueError: of its own$"):
            child.ask("raise")
        assert child.ask(0) == [0]  # The child goes on.
        assert "asked for raise" in child.log()
        assert "Traceback" in child.log()
    assert left(place) == []


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGABRT, "SIGABRT"), (None, "exit code 3")]
)
def test_a_child_that_dies_loses_its_own_request(place, number, how):
    """XLA sends SIGABRT, and the kernel sends SIGKILL where memory runs out."""
    with Child("told") as other, Child("told") as child:
        other.send(1)
        child.send(60 if number else "end")
        wait_for(lambda: "asked for" in child.log(), "nothing is asked")
        if number:
            (pid,) = [p for p in children_of(os.getpid()) if f"{child.folder}" in environment_of(p)]
            os.kill(pid, number)
        with pytest.raises(ChildDied, match=how) as died:
            child.receive()
        assert "asked for" in died.value.log
        with pytest.raises(ChildDied):
            child.ask(0)
        assert not child.folder.exists()
        assert ready([other]) == [other]
        assert other.receive() == [1]


def test_a_child_that_takes_too_long_is_ended(place):
    with Child("told") as child:
        with pytest.raises(TimeoutError):
            child.ask(60, timeout_s=0.1)
        assert not child.folder.exists()


@pytest.mark.parametrize("request_", ["start", "start by another"])
def test_what_a_child_has_started_ends_with_it(place, request_):
    with Child("told") as child:
        started = child.ask(request_)
        assert is_alive(started)
    wait_for(lambda: not is_alive(started), "it lives on")


def test_a_child_that_is_closed_in_the_middle_answers_nothing(place):
    with ThreadPoolExecutor(1) as pool, Child("told") as child:
        asked = pool.submit(child.ask, 60)
        wait_for(lambda: "asked for" in child.log(), "nothing is asked")
        child.close()
        with pytest.raises(ChildDied):
            asked.result(timeout=30)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which process is to be ended first")
def test_a_child_goes_before_others_where_memory_runs_out(place):
    with Child("told") as child:
        child.ask(0)
        (pid,) = [p for p in children_of(os.getpid()) if f"{child.folder}" in environment_of(p)]
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"


def test_who_was_started_by_a_process_that_is_gone_ends_at_once(place):
    alive, gone = (
        subprocess.run([sys.executable, str(place / "told.py"), str(pid)], input="0\n", capture_output=True, text=True)
        for pid in (os.getpid(), os.getpid() + 1)
    )
    assert json.loads(alive.stdout)["answer"] == [0]
    assert alive.returncode == 0
    if sys.platform == "linux":
        assert (gone.stdout, gone.returncode) == ("", -signal.SIGKILL)
