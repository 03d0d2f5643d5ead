"""Which checkpoints stay: the newest, those of every so many steps, and all that were set aside."""

from __future__ import annotations

import pytest

from meshkit.verbs.checkpoint.manifest import (
    kept_steps,
    remove_step,
    remove_unfinished,
    set_aside,
    step_folder,
    steps_aside,
    whole_steps,
)


@pytest.mark.parametrize(
    ("keep", "keep_every", "kept"),
    [(1, 0, {50}), (2, 0, {40, 50}), (2, 20, {20, 40, 50}), (1, 30, {30, 50}), (9, 0, {10, 20, 30, 40, 50})],
)
def test_the_newest_and_every_so_many_are_kept(keep, keep_every, kept):
    assert kept_steps([10, 20, 30, 40, 50], keep=keep, keep_every=keep_every) == kept


@pytest.fixture
def folder(tmp_path):
    for name in ("9", "10", "10.partial-4", "9.orbax-checkpoint-tmp-1", "8.deleting", "7.corrupt", "notes"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_names_say_what_a_folder_is(folder):
    assert whole_steps(folder) == [10, 9]
    assert steps_aside(folder) == [7]
    assert step_folder(folder / "10.partial-4") is None
    assert step_folder(folder / "notes") is None


def test_what_was_left_half_written_is_removed_and_nothing_else(folder):
    remove_unfinished(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["10", "7.corrupt", "9", "notes"]


def test_setting_aside_overwrites_nothing(folder):
    (folder / "7.corrupt" / "evidence").touch()
    for _ in range(2):
        (folder / "7").mkdir()
        set_aside(folder, 7)
    assert steps_aside(folder) == [7, 7, 7]
    assert (folder / "7.corrupt" / "evidence").exists()
    assert sorted(p.name for p in folder.glob("7*")) == ["7.corrupt", "7.corrupt-2", "7.corrupt-3"]


def test_a_removal_that_is_cut_short_leaves_no_half_checkpoint(folder, monkeypatch):
    (folder / "9" / "file").touch()
    monkeypatch.setattr("shutil.rmtree", lambda *a, **k: None)  # killed here
    remove_step(folder, 9)
    assert whole_steps(folder) == [10]
    monkeypatch.undo()
    remove_unfinished(folder)
    assert not (folder / "9.deleting").exists()
