"""Temporary folders and processes end with who made them: at once where Python hears of it, else at the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshkit.compile import scratch
from meshkit.compile.scratch import PREFIX, scratch_folder, sweep

ROOT = Path(__file__).parents[2]
# A process that writes into its temporary folder as fast as it can, as a compiler does that dumps.
WRITER = """
import itertools, os, pathlib, sys, tempfile
from meshkit.compile.scratch import die_with_parent
die_with_parent()
for i in itertools.count():
    folder = pathlib.Path(tempfile.gettempdir(), f"dump{i % 50}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text("x" * 1000)
    if i == 100:
        print(os.getpid(), file=open(pathlib.Path(os.environ["SAYS"], str(os.getpid())), "w"))
"""
# What plans: a thread that nobody waits for is in the block when Ctrl-C comes.
PLANNER = """
import os, sys, threading, time
from meshkit.compile.scratch import scratch_folder, start_in
def compile():
    with scratch_folder() as folder:
        start_in(folder, [sys.executable, WRITER], os.environ).wait()
threading.Thread(target=compile, daemon=True).start()
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""
# What tunes: workers, each of which compiles.
TUNER = """
import sys, time
from meshkit.search import workers
workers.COMMAND = (PLANS,)
with workers.open_workers("x.toml", (), 2) as pool:
    pool.submit(("a=1",))
    pool.submit(("b=1",))
    try:
        pool.next()
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A temporary folder of its own, for this process and those it starts."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "says").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("SAYS", str(tmp_path / "says"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", None)
    writer, planner, tuner = (tmp_path / name for name in ("writer.py", "planner.py", "tuner.py"))
    writer.write_text(WRITER)
    planner.write_text(PLANNER.replace("WRITER", repr(str(writer))))
    worker = tmp_path / "worker.py"
    ignores = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    dies = "from meshkit.compile.scratch import die_with_parent\ndie_with_parent()\n"
    worker.write_text(ignores + dies + planner.read_text())
    tuner.write_text(TUNER.replace("PLANS", repr(str(worker))))
    return tmp_path


def left(place):
    return sorted(path.name for path in (place / "tmp").iterdir())


def wait_for(condition, what):
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
@pytest.mark.parametrize(("program", "compilers"), [("planner.py", 1), ("tuner.py", 2)])
def test_what_is_stopped_in_a_compile_leaves_no_process_and_no_folder(place, program, compilers, number):
    # as from a terminal: what a shell starts in the background, these tests among it, ignores SIGINT
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


def test_a_folder_that_is_in_use_and_those_of_others_stay(place):
    for name in ("meshkit-other", f"{PREFIX}file"):
        (place / "tmp" / name).touch()
    (place / "tmp" / f"{PREFIX}link").symlink_to(place)
    (place / "tmp" / f"{PREFIX}old").mkdir()
    with scratch_folder() as one, scratch_folder() as another:
        subprocess.run([sys.executable, "-c", "from meshkit.compile.scratch import sweep; sweep()"], check=True)
        assert one.is_dir()
        assert another.is_dir()
    assert left(place) == sorted(["meshkit-other", f"{PREFIX}file", f"{PREFIX}link"])
    assert (place / "says").is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user takes root")
def test_what_another_user_left_stays(place):
    (place / "tmp" / f"{PREFIX}theirs").mkdir()
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


def test_nothing_starts_in_a_folder_that_is_gone(place):
    with scratch_folder() as folder:
        pass
    with pytest.raises(ProcessLookupError):
        scratch.start_in(folder, [sys.executable, "-c", ""], {})


def test_who_was_started_by_a_process_that_is_gone_ends_at_once(place):
    code = textwrap.dedent("""
        import sys
        from meshkit.compile.scratch import die_with_parent
        die_with_parent()
        print("lives")
    """)
    alive, gone = (
        subprocess.run([sys.executable, "-c", code, str(pid)], capture_output=True, text=True)
        for pid in (os.getpid(), os.getpid() + 1)
    )
    assert (alive.stdout, alive.returncode) == ("lives\n", 0)
    if sys.platform == "linux":
        assert (gone.stdout, gone.returncode) == ("", -signal.SIGKILL)
