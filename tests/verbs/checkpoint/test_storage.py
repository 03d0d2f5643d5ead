"""Test a disk that is full or cannot be written: training goes on, says so, and saves again when it can."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.corruption.campaign import abstract, random_state, same_bits
from meshkit.config.experiment import load
from meshkit.config.sections import CheckpointTable
from meshkit.errors import ConfigError
from meshkit.runs.metrics import read_metrics
from meshkit.verbs.checkpoint import saving
from meshkit.verbs.checkpoint import store as store_module
from meshkit.verbs.checkpoint.store import CheckpointStore
from meshkit.verbs.train import trainer

EXPERIMENT = Path(__file__).parents[3] / "configs" / "experiments" / "mlp.toml"


def mount(*words):
    return subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)


@pytest.fixture
def small_disk(tmp_path):
    """Yield the folder of a file system of 2 MiB, of which a checkpoint takes about a tenth."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        made = mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", folder)
    except OSError as error:
        pytest.skip(f"needs mount: {error}")
    if made.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder):
    """Leave at most 16 KiB, which is room to begin a checkpoint but not to end it."""
    with contextlib.suppress(OSError):
        (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - (16 << 10)))


def save(store, step):
    store.save(random_state(step))
    store.saving.wait(60)
    store.check()


def test_a_full_disk_costs_one_checkpoint_and_no_state(small_disk):
    said = []
    store = CheckpointStore(small_disk / "checkpoints", CheckpointTable(keep=1), say=said.append)
    save(store, 10)
    assert said == []
    filler = small_disk / "filler"
    fill(small_disk)
    save(store, 20)
    assert "checkpoint 20 could not be saved; the newest is 10: No space left on device" in said[0]
    assert "No space left on device" in store.news()["checkpoint_error"]
    assert [p.name for p in store.folder.iterdir()] == ["10"]  # What was half written gives its space back.
    filler.unlink()
    save(store, 30)
    assert len(said) == 1
    fresh = CheckpointStore(small_disk / "checkpoints")
    assert fresh.steps() == [30]
    restored = fresh.restore_latest(abstract(random_state(0)))
    assert restored is not None
    assert same_bits(restored, random_state(30))


def test_a_disk_that_turns_read_only_is_said_and_can_still_be_read(small_disk):
    said = []
    store = CheckpointStore(small_disk / "checkpoints", say=said.append)
    save(store, 10)
    assert mount("-o", "remount,ro", small_disk).returncode == 0
    save(store, 20)
    assert "checkpoint 20 could not be saved; the newest is 10: Read-only file system" in said[0]
    with pytest.raises(ConfigError, match=r"the folder of checkpoints cannot be written: Read-only file system\."):
        CheckpointStore(small_disk / "checkpoints", CheckpointTable(every=1))
    restored = CheckpointStore(small_disk / "checkpoints").restore_latest(abstract(random_state(0)))
    assert restored is not None
    assert same_bits(restored, random_state(10))
    assert mount("-o", "remount,rw", small_disk).returncode == 0
    save(store, 30)
    assert store.steps() == [30, 10]


def test_a_training_goes_on_over_a_full_disk_and_says_so_in_terminal_and_metrics(small_disk, tmp_path, capsys):
    """The disk is full from step 2 to 4."""
    sets = ["cluster=cpu8", "mesh.fsdp=8", "model.embed=32", "model.mlp=64", "train.evaluate_every=0", "train.steps=6"]
    full = tmp_path / "full"
    full.mkdir()
    (full / "checkpoints").symlink_to(small_disk)
    filler, update = small_disk / "filler", trainer.StepProgress.update

    def fill_and_free(self, record):
        update(self, record)
        if record["step"] == 2:
            fill(small_disk)
        if record["step"] == 4:
            filler.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.StepProgress, "update", fill_and_free)
        result = trainer.train(load(EXPERIMENT, [*sets, "checkpoint.every=1"]), full, console=Console(stderr=True))
    assert result.step == 6
    said, records = capsys.readouterr().err, read_metrics(full / "metrics.jsonl")
    assert "could not be saved" in said
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    failed = [r["checkpoint_error"] for r in records if "checkpoint_error" in r]
    assert failed
    assert all("No space left on device" in text for text in failed)
    assert CheckpointStore(small_disk).steps()[0] == 6


def test_what_a_failed_save_is_still_writing_is_removed_with_it(tmp_path, monkeypatch):
    """tensorstore's threads go on with other arrays after the first error, so a file appears while the folder goes."""
    monkeypatch.setattr(saving, "QUIET_S", 1.5)
    folder = tmp_path / "20.partial-1"
    folder.mkdir()
    ends = time.monotonic() + 0.3

    def write():
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):  # It is suppressed until the folder is gone.
                (folder / f"{time.monotonic_ns()}").write_bytes(b"x")

    def make_again():
        """Make the folder again a little later, when it has been gone for a moment."""
        write()
        for _ in range(3):
            time.sleep(0.1)
            (folder / "state").mkdir(parents=True, exist_ok=True)

    writer = threading.Thread(target=make_again)
    writer.start()
    saving.remove_failed(folder)
    writer.join()
    assert not folder.exists()


def test_what_is_made_again_later_goes_with_the_next_save_or_at_the_end(small_disk):
    store = CheckpointStore(small_disk / "checkpoints", CheckpointTable(keep=1), say=lambda _: None)
    fill(small_disk)
    save(store, 20)
    (small_disk / "filler").unlink()
    late = store.folder / "20.partial-0" / "state"
    for then in (lambda: save(store, 30), store.close):
        late.mkdir(parents=True)
        then()
        assert [p.name for p in store.folder.iterdir()] == ["30"]


@pytest.mark.parametrize("mine", [False, True])
def test_writes_that_nobody_waits_for_leave_no_traceback_and_the_users_own_do(tmp_path, caplog, mine):
    """Of many writes that fail on a full disk, orbax waits for the first alone."""
    CheckpointStore(tmp_path)
    file = "somewhere" if mine else tmp_path / "20.partial-1" / "state" / "ocdbt.process_0"

    async def write():
        raise ValueError(f'RESOURCE_EXHAUSTED: Error writing "step/0" in OCDBT database at local file "{file}"')

    async def save():
        several = [asyncio.ensure_future(write()), asyncio.gather(write(), write())]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await several[0]

    with pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        asyncio.run(save())
    gc.collect()
    assert ("was never retrieved" in caplog.text) == mine


def test_a_save_ends_when_the_last_array_does():
    done = []

    class Future:
        def __init__(self, name, error=None):
            self.name, self.error = name, error

        def result(self):
            done.append(self.name)
            if self.error:
                raise self.error

    with pytest.raises(OSError, match="full"):
        saving.wait_for_all([Future(1), Future(2, OSError("full")), Future(3, OSError("later")), Future(4)])
    assert done == [1, 2, 3, 4]


def test_a_part_that_takes_longer_than_a_save_may_is_none_for_anybody(tmp_path, monkeypatch):
    """The others have given up by then, and this process reports that its own part was slow."""
    said = []
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointTable(), say=said.append)
    save(store, 10)
    line = store.agreement
    monkeypatch.setattr(line, "size", 2)
    monkeypatch.setattr(line, "reach", lambda topic, mine, decide, timeout_s: decide([mine, {"files": {}}]))
    monkeypatch.setattr(store_module, "write_limit_s", lambda state_bytes: 0.001)
    save(store, 20)
    assert "checkpoint 20 could not be saved; the newest is 10: process 0: its part took 0 s to write" in said[0]
    assert "a save may take 0 s" in said[0]
    assert [p.name for p in store.folder.iterdir()] == ["10"]


@pytest.mark.parametrize(("state_bytes", "limit_s"), [(0, 600), (12e9, 600), (30e9, 1500), (1e12, 3600)])
def test_the_limit_of_a_save_goes_by_its_bytes(state_bytes, limit_s):
    assert store_module.write_limit_s(state_bytes) == limit_s
