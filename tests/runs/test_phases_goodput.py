"""Test goodput of attempts with known seconds: they add up to the wall time, and repeated steps are lost."""

import json
import math
import random
import subprocess
import sys
import threading
import time

import pytest

from meshkit.errors import ConfigError, RunError
from meshkit.runs.phases import GoodputLog, Phases, RunAttempt, goodput_of, read_attempts, read_goodput


def write(folder, began, resumed, last, *, marks=(), outcome=None, **seconds):
    (folder / "goodput").mkdir(exist_ok=True)
    record = {"began": began, "resumed_step": resumed, "last_step": last, "seconds": seconds}
    record |= {"marks": [list(m) for m in marks], "outcome": outcome}
    (folder / "goodput" / f"{began}.json").write_text(json.dumps(record))


def test_three_attempts(tmp_path):
    # This attempt ends at 1122 and takes 10 s a step.
    write(tmp_path, 1000.0, 0, 10, start=5, compile=15, step=100, save=2)
    # This attempt makes 2 steps again and ends at 1200.
    write(tmp_path, 1130.0, 8, 14, start=5, compile=1, restore=4, step=60)
    write(tmp_path, 1203.0, 14, 20, start=5, step=60)  # This attempt makes none again.
    found = read_goodput(tmp_path)
    assert (found.attempts, found.lost_steps) == (3, 2)
    assert found.wall_s == 1268 - 1000
    assert found.seconds["lost"] == pytest.approx(20)
    assert found.seconds["restart"] == 8 + 3
    assert found.seconds["step"] == pytest.approx(200)
    assert found.share == pytest.approx(200 / 268)


def test_what_was_done_since_the_checkpoint_is_lost_to_the_second(tmp_path):
    # There are five steps of 2 s until the checkpoint of step 5, then five of 8 s, and 3 s of waiting for data.
    mark = (5, {"start": 5.0, "step": 10.0, "data": 1.0})
    write(tmp_path, 0.0, 0, 10, marks=[mark], start=5, step=50, data=4)
    write(tmp_path, 60.0, 5, 7, start=1, step=20)
    found = read_goodput(tmp_path)
    assert found.seconds["lost"] == 40 + 3
    assert found.seconds["step"] == 10 + 20
    assert found.seconds["data"] == 1
    assert found.lost_steps == 5


def test_an_attempt_that_ends_before_its_first_step_counts(tmp_path):
    write(tmp_path, 0.0, 0, 6, start=2, step=60, marks=[(4, {"step": 40.0})])
    write(tmp_path, 70.0, None, 0, start=2, compile=3)  # The attempt was killed while it compiled.
    write(tmp_path, 80.0, 4, 6, start=2, restore=1, step=20)
    found = read_goodput(tmp_path)
    assert (found.attempts, found.lost_steps) == (3, 2)
    assert found.seconds["lost"] == 20
    assert found.seconds["restart"] == (70 - 62) + (80 - 75)
    assert found.wall_s == 103


def test_falling_back_to_an_older_checkpoint_loses_the_steps_of_all_attempts_since(tmp_path):
    write(tmp_path, 0.0, 0, 10, step=10, marks=[(4, {"step": 4.0}), (10, {"step": 10.0})], outcome="preempted")
    write(tmp_path, 10.0, 10, 16, step=6)
    write(tmp_path, 16.0, 4, 20, step=16)  # The checkpoint of step 10 was damaged.
    found = read_goodput(tmp_path)
    assert found.lost_steps == (10 - 4) + (16 - 10)
    assert found.seconds["lost"] == 12
    assert found.seconds["step"] == 20  # Each step that counts takes one second.


@pytest.mark.parametrize(("outcome", "restart"), [("done", 0), ("interrupted", 0), ("refused", 0),
                                                  ("preempted", 90), ("failed", 90), (None, 90)])  # fmt: skip
def test_a_pause_that_a_person_wanted_is_no_restart(tmp_path, outcome, restart):
    write(tmp_path, 0.0, 0, 10, step=10, outcome=outcome)
    write(tmp_path, 100.0, 10, 20, step=10)
    found = read_goodput(tmp_path)
    assert found.seconds["restart"] == restart
    assert found.wall_s == 20 + restart


def test_parts_add_up_to_the_wall_time_whatever_happened():
    """In random attempts no part is negative, and the sum is the wall time as timestamps tell it."""
    rng = random.Random(0)
    for _ in range(200):
        attempts, clock, saved = [], 1e9, [0]
        for _ in range(rng.randint(1, 8)):
            resumed = rng.choice(saved) if rng.random() < 0.8 else None
            last = resumed + rng.randint(0, 9) if resumed is not None else 0
            seconds = {p: rng.random() * 100 for p in ("start", "compile", "restore", "data", "step", "save")}
            marks = ()
            if resumed is not None and last > resumed and rng.random() < 0.7:
                at = rng.randint(resumed + 1, last)
                marks = ((at, {p: s * rng.random() for p, s in seconds.items()}),)
                saved.append(at)
            attempts.append(RunAttempt(clock, seconds, resumed, last, marks))
            clock += attempts[-1].wall_s + rng.random() * 30
        found = goodput_of(attempts)
        assert min(found.seconds.values()) >= 0
        assert math.fsum(found.seconds.values()) == found.wall_s
        # Timestamps of 1e9 s resolve 1.2e-7 s, and the beginning of each attempt is rounded to that.
        assert found.wall_s == pytest.approx(attempts[-1].began + attempts[-1].wall_s - 1e9, abs=1e-6)


def test_a_clock_that_runs_backwards_between_two_machines(tmp_path):
    write(tmp_path, 100.0, 0, 10, step=50)
    write(tmp_path, 120.0, 10, 20, step=50)  # By its own clock, it began before the first had ended.
    found = read_goodput(tmp_path)
    assert (found.wall_s, found.seconds["restart"]) == (100, 0)


def test_one_attempt_as_it_goes(tmp_path):
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    age = phases.seconds["start"]
    with GoodputLog(tmp_path, phases) as log:
        assert log.share() is None
        log.resumed(3)
        phases.enter("step", 4)
        now[0] = 7.0
        assert log.share() == pytest.approx(7 / (7 + age))
        log.made(4)
        log.mark(4)
        phases.enter("data", 5)
        now[0] = 8.0
        phases.count_as("step")  # Devices were still busy with step 4.
        phases.enter("step", 5)
    (found,) = read_attempts(tmp_path)
    assert found.outcome == "done"
    assert (found.resumed_step, found.last_step) == (3, 4)
    assert found.seconds == {"start": age, "step": 8.0}
    assert found.marks == ((4, {"start": age, "step": 7.0}),)
    assert read_goodput(tmp_path).wall_s == age + 8


def test_the_share_so_far_is_that_of_all_attempts(tmp_path):
    began = time.time() - 1e6  # This is before the start of this process, whose age counts as its start.
    write(tmp_path, began, 0, 10, step=100, start=20, marks=[(8, {"step": 80.0})])
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    log = GoodputLog(tmp_path, phases)
    log.resumed(8)
    phases.enter("step", 9)
    now[0] = 10.0
    log.made(9)
    log.write()
    assert log.share() == pytest.approx(read_goodput(tmp_path).share, rel=1e-9)
    assert read_goodput(tmp_path).seconds["lost"] == 20


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(KeyboardInterrupt("x"), "interrupted"), (RunError("x"), "failed"), (ValueError("x"), "failed"),
     (ConfigError("x"), "refused")],
)  # fmt: skip
def test_how_an_attempt_ended(tmp_path, error, outcome):
    def fail():
        with GoodputLog(tmp_path, Phases()):
            raise error

    with pytest.raises(type(error), match=str(error)):
        fail()
    assert read_attempts(tmp_path)[0].outcome == outcome


def test_an_attempt_that_is_killed_while_it_compiles_has_left_its_seconds(tmp_path):
    code = (
        "import os, sys, time, pathlib\n"
        "from meshkit.runs.phases import GoodputLog\n"
        "from meshkit.runs.phases import Phases\n"
        "phases = Phases()\n"
        "with GoodputLog(pathlib.Path(sys.argv[1]), phases):\n"
        "    phases.enter('compile')\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 60
        while not (found := read_attempts(tmp_path)) or found[0].seconds.get("compile", 0) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    (found,) = read_attempts(tmp_path)
    assert (found.outcome, found.resumed_step) == (None, None)


def test_a_file_that_a_killed_process_was_writing_is_gone_after_the_next_attempt(tmp_path):
    code = (
        "import os, pathlib, signal, sys\n"
        "from meshkit.runs.phases import GoodputLog, Phases\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "GoodputLog(pathlib.Path(sys.argv[1]), Phases()).write()\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert [path.suffix for path in (tmp_path / "goodput").iterdir()] == [".tmp"]
    GoodputLog(tmp_path, Phases()).write()
    assert [path.suffix for path in (tmp_path / "goodput").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "text",
    ["{", '{"began": 1}', "[]", "7", '{"began": NaN, "resumed_step": 0, "last_step": 0, "seconds": {}}', "[" * 100_000,
     '{"began": 1, "resumed_step": 0, "last_step": 0, "seconds": {"step": "x"}}', " " * (2**20 + 1)],
)  # fmt: skip
def test_what_cannot_be_read_is_left_out(tmp_path, text):
    assert read_goodput(tmp_path) is None
    (tmp_path / "goodput").mkdir()
    (tmp_path / "goodput" / "1.json").write_text(text)
    assert read_goodput(tmp_path) is None


def test_storage_that_hangs_does_not_keep_a_run_from_ending(tmp_path, monkeypatch):
    hangs, over = threading.Event(), threading.Event()
    with GoodputLog(tmp_path, Phases()) as log:
        log.resumed(0)
        monkeypatch.setattr("meshkit.runs.phases.os.replace", lambda *_: (hangs.set(), over.wait()))
        writer = threading.Thread(target=log.write)
        writer.start()
        assert hangs.wait(60)
    assert not over.is_set()
    over.set()
    writer.join()
    assert read_attempts(tmp_path)[0].outcome is None


def test_a_disk_that_is_full_stops_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshkit.runs.phases.os.replace", full)
    with GoodputLog(tmp_path, Phases()) as log:
        log.write()
    assert read_goodput(tmp_path) is None


def test_other_processes_write_nothing(tmp_path):
    with GoodputLog(None, Phases()) as log:
        log.resumed(0)
        log.write()
        assert log.share() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value", ["Infinity", "-Infinity", "NaN", "1e308", "1e999", "9" * 400, '"x"', "null", "[]", "{}"]
)
@pytest.mark.parametrize("key", ["began", "last_step", "resumed_step", "seconds", "marks"])
def test_a_record_with_numbers_that_no_sum_could_hold_is_left_out(tmp_path, key, value):
    good = {"began": "1.0", "last_step": "3", "resumed_step": "0", "seconds": '{"step": 2.0}', "marks": "[]"}
    (tmp_path / "goodput").mkdir()
    for name in ("1", "2"):
        changed = {"seconds": f'{{"step": {value}}}', "marks": f'[[{value}, {{"step": {value}}}]]'}.get(key, value)
        record = good if name == "1" else good | {key: changed}
        text = ", ".join(f'"{k}": {v}' for k, v in record.items())
        (tmp_path / "goodput" / f"{name}.json").write_text(f"{{{text}}}")
    found = read_goodput(tmp_path)
    assert found.attempts == (2 if (key, value) == ("resumed_step", "null") else 1)
    assert math.isfinite(found.wall_s)
