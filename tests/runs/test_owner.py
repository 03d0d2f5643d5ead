"""Test that one writer owns a run folder: others are refused by name, the dead are replaced, and then fenced off."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from meshkit.errors import ConfigError, RunError
from meshkit.runs import owner
from meshkit.runs.owner import RunOwner, is_owned, take_run

LATER = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(owner, "LINGER_S", 0.3)
    for name in (owner.LAUNCH_VARIABLE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def other():
    """Yield another process of this machine."""
    process = subprocess.Popen(LATER, stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def claimed(folder, token=7, **changes):
    """Return the claim of another process to the folder."""
    (folder / "owner").mkdir()
    claim = folder / "owner" / f"{token}.json"
    claim.write_text(json.dumps(owner.this_process(0) | changes))
    return claim


def of(process):
    return {"pid": process.pid, "started": owner.process_start(process.pid)[0]}


def names(folder):
    return sorted(path.name for path in (folder / "owner").iterdir())


def test_a_folder_is_held_and_given_back(tmp_path):
    with take_run(tmp_path / "new") as held:
        assert names(tmp_path / "new") == ["1.json"]
        assert is_owned(tmp_path / "new")
        held.check()
        held.watch()
    assert names(tmp_path / "new") == ["1.released.json"]
    assert not is_owned(tmp_path / "new")
    with pytest.raises(ConfigError, match="may no longer write it: it was given back"):
        held.check()  # A save in the background would call this.
    with take_run(tmp_path / "new") as again:
        assert (again.token, again.run) == (2, held.run)
    assert names(tmp_path / "new") == ["2.released.json"]


def test_a_living_owner_is_named(tmp_path, other):
    claimed(tmp_path, attempt=3, **of(other))
    with pytest.raises(ConfigError) as refused:
        take_run(tmp_path)
    assert refused.value.exit_code == 2
    host = owner.this_process(0)["host"]
    assert f"another job has this run folder: process {other.pid} on host '{host}' (attempt 3)" in str(refused.value)
    assert names(tmp_path) == ["7.json"]


def test_a_dead_owner_of_this_machine_is_taken_over_at_once(tmp_path, other):
    claimed(tmp_path, **of(other))
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # A zombie is dead.
    began = time.monotonic()
    assert take_run(tmp_path).token == 8
    assert time.monotonic() - began < 2
    assert names(tmp_path) == ["8.json"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
def test_a_number_that_another_process_has_by_now_is_no_owner(tmp_path, other):
    claimed(tmp_path, pid=other.pid, started=of(other)["started"] - 1)
    assert take_run(tmp_path).token == 8


def test_the_next_attempt_of_a_launch_waits_for_the_one_before(tmp_path, other, monkeypatch):
    monkeypatch.setenv(owner.LAUNCH_VARIABLE, "one")
    claimed(tmp_path, attempt=0, **of(other))
    said = []
    ends = threading.Timer(1.5, other.communicate)
    ends.start()
    assert take_run(tmp_path, attempt=1, say=said.append).token == 8
    assert other.poll() is not None
    assert f"waiting for process {other.pid}" in said[0]
    ends.join()


def test_an_attempt_before_that_does_not_end_may_be_tried_again(tmp_path, other, monkeypatch):
    monkeypatch.setenv(owner.LAUNCH_VARIABLE, "one")
    monkeypatch.setattr(owner, "LEASE_S", 0.5)
    claimed(tmp_path, attempt=0, **of(other))
    with pytest.raises(RunError, match="the attempt before this one has not ended"):
        take_run(tmp_path, attempt=1)


def test_an_owner_on_another_host_is_dead_after_its_lease(tmp_path):
    claim = claimed(tmp_path, boot="another")
    os.utime(claim, (0, time.time() - owner.LEASE_S - 5))
    assert take_run(tmp_path).token == 8


def test_an_owner_on_another_host_is_waited_for_as_long_as_its_lease(tmp_path, monkeypatch):
    claimed(tmp_path, boot="another")
    monkeypatch.setattr(owner, "LEASE_S", 1.5)
    assert take_run(tmp_path).token == 8


def test_an_owner_on_another_host_that_gives_a_sign_is_named(tmp_path):
    claim = claimed(tmp_path, boot="another", host="far")
    beat = threading.Timer(0.5, os.utime, [claim])
    beat.start()
    with pytest.raises(ConfigError, match=r"process \d+ on host 'far'"):
        take_run(tmp_path)
    beat.join()


def test_an_owner_that_cannot_be_read_has_the_folder_for_its_lease(tmp_path, monkeypatch):
    claimed(tmp_path).write_text("")
    monkeypatch.setattr(owner, "LEASE_S", 0.5)
    assert take_run(tmp_path).token == 8


def test_of_many_at_once_one_has_the_folder(tmp_path):
    def attempt(_):
        with ExitStack() as around:
            try:
                held = around.enter_context(take_run(tmp_path))
            except ConfigError as error:
                return str(error)
            time.sleep(2)
            held.check()
            return held.token

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(attempt, range(8)))
    assert [f for f in found if isinstance(f, int)] == [1]
    assert all("another job has this run folder" in f for f in found if f != 1)


def test_who_was_taken_for_dead_writes_no_more(tmp_path):
    with take_run(tmp_path) as first:
        assert owner.make_claim(tmp_path / "owner", 2, owner.this_process(0)) is not None
        for ask in (first.check, first.watch):  # The second asks without using the file system.
            with pytest.raises(
                ConfigError, match=r"owner 1 .* may no longer write it: process \d+ .* has taken it over"
            ):
                ask()
    assert names(tmp_path) == ["2.json"]  # The new owner has not given it back.


def test_a_sign_of_life_finds_out_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "BEAT_S", 0.05)
    with take_run(tmp_path) as first:
        claim = tmp_path / "owner" / "1.json"
        os.utime(claim, (0, 0))
        deadline = time.monotonic() + 10
        while claim.stat().st_mtime == 0:
            assert time.monotonic() < deadline
        claim.unlink()
        said = ""
        while not said and time.monotonic() < deadline:
            try:
                first.watch()
            except ConfigError as error:
                said = str(error)
        assert "1.json is gone" in said


def test_a_number_that_was_removed_is_not_made_again(tmp_path):
    """A late process that read an old number finds the number after it free again."""
    claimed(tmp_path, token=9)
    assert owner.make_claim(tmp_path / "owner", 8, owner.this_process(0)) is None
    (tmp_path / "owner" / "9.json").rename(tmp_path / "owner" / "9.released.json")
    assert owner.make_claim(tmp_path / "owner", 9, owner.this_process(0)) is None
    assert names(tmp_path) == ["9.released.json"]


def test_a_run_keeps_its_identity_and_may_have_one_already(tmp_path):
    known = "12345678-1234-1234-1234-123456789abc"
    with take_run(tmp_path / "a") as made, take_run(tmp_path / "b", known_run=lambda: known) as found:
        assert json.loads((tmp_path / "a" / "run.json").read_text())["run"] == made.run != known
        assert json.loads((tmp_path / "b" / "run.json").read_text())["run"] == found.run == known
    (tmp_path / "a" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="the identity of this run cannot be read"):
        take_run(tmp_path / "a")
    assert not is_owned(tmp_path / "a")
    (tmp_path / "a" / "run.json").unlink()
    os.mkfifo(tmp_path / "a" / "run.json")
    with pytest.raises(ConfigError, match="the identity of this run cannot be read"):
        take_run(tmp_path / "a")


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the run folder cannot be used: "):
        take_run(tmp_path / "file")


def test_the_other_processes_of_a_gang_rely_on_the_first(tmp_path):
    with RunOwner("run", 3) as follower:
        follower.check()
        follower.watch()
    assert list(tmp_path.iterdir()) == []
