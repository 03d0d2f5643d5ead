"""Test manifests on disk: every changed byte is noticed, parts are shared out exactly once, old ones are removed."""

from __future__ import annotations

import json
import math

import pytest

from meshkit.verbs.checkpoint.manifest import (
    MANIFEST,
    find_corruption,
    fingerprints,
    kept_steps,
    read_manifest,
    remove_step,
    remove_unfinished,
    set_aside,
    share_of_files,
    step_folder,
    steps_aside,
    whole_steps,
    write_manifest,
)


@pytest.fixture
def checkpoint(tmp_path):
    """Return a folder of three files with its manifest."""
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    for name, size in (("state/d/a", 300), ("state/b", 20), ("state/empty", 0)):
        (folder / name).write_bytes(bytes(size))
    files = fingerprints(folder, [p for p in folder.rglob("*") if p.is_file()], sync=True)
    write_manifest(folder, {"step": 7, "arrays": {"params/w": "float32[5]"}, "files": files})
    return folder


def test_it_is_json_with_versions_and_a_hash_of_every_file(checkpoint):
    record = json.loads((checkpoint / MANIFEST).read_text())
    assert set(record["files"]) == {"state/d/a", "state/b", "state/empty"}
    assert {"jax", "jaxlib", "orbax-checkpoint", "meshkit", "python"} <= set(record["versions"])
    assert read_manifest(checkpoint).step == 7
    assert len(read_manifest(checkpoint).seal) == 64
    assert find_corruption(checkpoint) is None
    assert not list(checkpoint.glob("*.tmp"))


def test_no_bit_of_the_manifest_changes_unseen(checkpoint):
    path, whole = checkpoint / MANIFEST, (checkpoint / MANIFEST).read_bytes()
    # The seal at the end is tested byte by byte.
    for at in [*range(0, len(whole), 7), *range(len(whole) - 90, len(whole))]:
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert MANIFEST in (find_corruption(checkpoint) or ""), at
    for length in range(0, len(whole), 101):
        path.write_bytes(whole[:length])
        assert MANIFEST in (find_corruption(checkpoint) or ""), length


def test_a_checkpoint_under_the_name_of_another_step_is_found(checkpoint):
    checkpoint.rename(checkpoint.with_name("9"))
    assert find_corruption(checkpoint.with_name("9")) == "meshkit.json has step 7, but the folder is called 9"
    checkpoint.with_name("9").rename(checkpoint.with_name("7.corrupt-2"))
    assert find_corruption(checkpoint.with_name("7.corrupt-2")) is None


def test_an_older_schema_is_named(checkpoint):
    (checkpoint / MANIFEST).write_text('{"schema": "meshkit.checkpoint/1", "step": 7, "files": {}}')
    assert "has schema meshkit.checkpoint/1, not meshkit.checkpoint/2" in (find_corruption(checkpoint) or "")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_file_is_in_one_share_and_shares_are_of_like_size(count):
    sizes = {f"f{i}": (i * 7919) % 1000 for i in range(50)}
    shares = [share_of_files(sizes, i, count) for i in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    # The distribution is greedy, so no share is larger than another by more than one file.
    assert max(loads) - min(loads) <= max(sizes.values())
    assert math.isclose(sum(loads), sum(sizes.values()))


def test_a_change_is_found_by_the_process_whose_share_it_is_in(checkpoint):
    content = bytearray((checkpoint / "state/d/a").read_bytes())
    content[5] ^= 4
    (checkpoint / "state/d/a").write_bytes(content)
    found = [find_corruption(checkpoint, share=(i, 3)) for i in range(3)]
    assert [f for f in found if f] == ["state/d/a has other contents than were written"]
    assert find_corruption(checkpoint, contents=False) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"files": {"../../other": (5, "a" * 64)}}, "names ../../other, which is not in the checkpoint"),
        ({"files": {"/etc/hosts": (5, "a" * 64)}}, "names /etc/hosts, which is not in the checkpoint"),
        ({"files": {}}, "lists no files"),
        ({"files": {"state/b": 5}}, "lists no files"),
        ({"arrays": [1]}, "lists no files"),
        ({"step": "soon"}, "lists no files"),
    ],
)
def test_a_manifest_that_is_sealed_and_makes_no_sense_is_refused(checkpoint, change, says):
    write_manifest(checkpoint, {"step": 7, "arrays": {}, "files": {"state/b": (20, "a" * 64)}} | change)
    assert find_corruption(checkpoint) == f"no readable manifest: meshkit.json {says}"


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
    monkeypatch.setattr("shutil.rmtree", lambda *a, **k: None)  # The process is killed here.
    remove_step(folder, 9)
    assert whole_steps(folder) == [10]
    monkeypatch.undo()
    remove_unfinished(folder)
    assert not (folder / "9.deleting").exists()
