"""Goodput of attempts with known seconds: they add up to the wall time, and repeated steps are lost."""

import json

import pytest

from meshkit.training.goodput import GoodputLog, read_goodput
from meshkit.training.phases import Phases


def write(folder, began, resumed, last, **seconds):
    (folder / "goodput").mkdir(exist_ok=True)
    record = {"began": began, "resumed_step": resumed, "last_step": last, "seconds": seconds}
    (folder / "goodput" / f"{began}.json").write_text(json.dumps(record))


def test_three_attempts(tmp_path):
    write(tmp_path, 1000.0, 0, 10, start=5, compile=15, step=100, save=2)  # ends at 1122, 10 s a step
    write(tmp_path, 1130.0, 8, 14, start=5, compile=1, restore=4, step=60)  # 2 steps again; ends at 1200
    write(tmp_path, 1203.0, 14, 20, start=5, step=60)  # none again
    found = read_goodput(tmp_path)
    assert (found.attempts, found.lost_steps) == (3, 2)
    assert found.wall_s == pytest.approx(1268 - 1000)
    assert found.seconds["lost"] == pytest.approx(20)
    assert found.seconds["restart"] == pytest.approx(8 + 3)
    assert found.seconds["step"] == pytest.approx(200)
    assert found.share == pytest.approx(200 / 268)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s)


def test_one_attempt_as_it_goes(tmp_path):
    now = [0.0]
    phases = Phases(clock=lambda: now[0])
    age = phases.seconds["start"]
    log = GoodputLog(tmp_path, phases, 3)
    phases.enter("step", 4)
    now[0] = 7.0
    log.update()
    found = read_goodput(tmp_path)
    assert found.seconds["step"] == pytest.approx(7)
    assert found.wall_s == pytest.approx(7 + age)
    now[0] = 8.0
    log.update()  # too soon
    assert read_goodput(tmp_path) == found
    log.update(now=True)
    assert read_goodput(tmp_path).seconds["step"] == pytest.approx(8)


def test_what_cannot_be_read_is_left_out(tmp_path):
    assert read_goodput(tmp_path) is None
    (tmp_path / "goodput").mkdir()
    (tmp_path / "goodput" / "1.json").write_text("{")
    (tmp_path / "goodput" / "2.json").write_text('{"began": 1}')
    assert read_goodput(tmp_path) is None


def test_other_processes_write_nothing(tmp_path):
    GoodputLog(None, Phases(), 0).update(now=True)
    assert list(tmp_path.iterdir()) == []
