"""Test whose checkpoints they are: another run's are refused, and a writer that lost its folder commits nothing."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshkit.config.sections import CheckpointTable
from meshkit.errors import ConfigError
from meshkit.runs import owner as owning
from meshkit.runs.owner import take_run
from meshkit.step.state import TrainState
from meshkit.verbs.checkpoint import saving
from meshkit.verbs.checkpoint.checkpoints import find
from meshkit.verbs.checkpoint.manifest import read_manifest, remove_unfinished, write_manifest
from meshkit.verbs.checkpoint.store import CheckpointStore, run_of_checkpoints


def state_at(step):
    kernel = jnp.arange(64.0).reshape(16, 4) + step
    return TrainState(jnp.int32(step), {"kernel": kernel}, {"mu": kernel * 2}, {}, jnp.zeros(2, jnp.uint32))


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0))


def store_of(folder, owner, **options):
    return CheckpointStore(folder / "checkpoints", CheckpointTable(keep=2), owner=owner, **options)


def saved(folder, *steps, owner=None):
    store = store_of(folder, owner)
    for step in steps:
        store.save(state_at(step))
    store.wait()


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_of_another_run_is_refused_and_both_are_named(tmp_path):
    with take_run(tmp_path / "a") as a, take_run(tmp_path / "b") as b:
        saved(tmp_path / "a", 6, owner=a)
        saved(tmp_path / "b", 3, owner=b)
        assert read_manifest(tmp_path / "a" / "checkpoints" / "6").record["run"] == a.run
        (tmp_path / "a" / "checkpoints" / "6").rename(tmp_path / "b" / "checkpoints" / "6")
        with pytest.raises(
            ConfigError, match=f"checkpoint 6 belongs to run '{a.run}', but this folder belongs to run '{b.run}'"
        ):
            store_of(tmp_path / "b", b).restore_latest(ABSTRACT)
    assert checkpoints(tmp_path / "b") == ["3", "6"]


def test_an_old_checkpoint_without_a_run_is_restored_with_a_note(tmp_path):
    saved(tmp_path, 2, 3)
    for step in ("2", "3"):
        checkpoint = tmp_path / "checkpoints" / step
        record = read_manifest(checkpoint).record
        assert "run" not in record
        write_manifest(checkpoint, {key: value for key, value in record.items() if key != "previous"})
    said = []
    with take_run(tmp_path, known_run=lambda: run_of_checkpoints(tmp_path)) as owner:
        store = store_of(tmp_path, owner, say=said.append)
        restored = store.restore_latest(ABSTRACT)
        assert said == ["note: checkpoint 3 comes from an earlier version and names no run; it is taken as this run's"]
        np.testing.assert_array_equal(restored.params["kernel"], state_at(3).params["kernel"])
        store.save(state_at(4))
        store.wait()
    assert run_of_checkpoints(tmp_path) is None  # One of them names none.


@pytest.fixture
def fork(tmp_path):
    """Return two copies of a run with checkpoint 3, which went on to 6, and to 6 and 9 with other data."""
    with take_run(tmp_path / "a") as a:
        saved(tmp_path / "a", 3, owner=a)
        shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("owner"))
        saved(tmp_path / "a", 6, owner=a)
    with take_run(tmp_path / "b") as b:
        assert b.run == a.run
        store = store_of(tmp_path / "b", b, facts={"data": {"seed": 1}})
        for step in (6, 9):
            store.save(state_at(step))
        store.wait()
    return tmp_path / "a", tmp_path / "b"


def put(source, step, target, as_step=None):
    shutil.copytree(source / "checkpoints" / str(step), target / "checkpoints" / str(as_step or step))


def refused(folder):
    with (
        take_run(folder) as owner,
        pytest.raises(ConfigError, match="does not belong to the other checkpoints here") as error,
    ):
        store_of(folder, owner).restore_latest(ABSTRACT)
    return str(error.value)


def test_a_checkpoint_of_a_copy_of_the_run_is_refused(fork):
    a, b = fork
    put(b, 9, a)
    assert "it follows another checkpoint 6 than the one in this folder" in refused(a)
    assert checkpoints(a) == ["3", "6", "9"]
    state = {s.step: s.corruption for s in find(a, contents=True)}
    assert (state[3], state[6]) == (None, None)
    assert "follows another checkpoint 6" in state[9]
    assert all(s.corruption is None for s in find(b, contents=True))


def test_a_checkpoint_that_skips_one_that_is_there_is_refused(fork):
    """6 was made after 3, and now there is a 5 between them."""
    a, _ = fork
    with take_run(a) as owner:
        saved(a, 5, owner=owner)
    assert "it follows checkpoint 3, but the folder has checkpoint 5 between the two" in refused(a)


def test_the_first_checkpoint_of_a_copy_is_none_that_follows(fork, tmp_path):
    a, _ = fork
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_bytes((a / "run.json").read_bytes())
    with take_run(tmp_path / "new") as owner:
        saved(tmp_path / "new", 8, owner=owner)
    put(tmp_path / "new", 8, a)
    assert "it is the first one of its run, but the folder has an earlier checkpoint 6" in refused(a)


def test_a_checkpoint_without_identity_after_one_that_has_it_is_refused(tmp_path):
    saved(tmp_path / "old", 9)
    with take_run(tmp_path / "new") as owner:
        saved(tmp_path / "new", 6, owner=owner)
    manifest = tmp_path / "old" / "checkpoints" / "9" / "meshkit.json"
    record = {key: value for key, value in read_manifest(manifest.parent).record.items() if key != "previous"}
    write_manifest(manifest.parent, record)
    put(tmp_path / "old", 9, tmp_path / "new")
    assert "it names no run, but checkpoint 6 before it belongs to run '" in refused(tmp_path / "new")


def test_what_a_run_does_to_its_own_checkpoints_breaks_no_chain(tmp_path):
    """Older ones go, a damaged one is passed over and saved again, and one removed by hand is not missed."""
    with take_run(tmp_path) as owner:
        saved(tmp_path, 1, 2, 3, 4, owner=owner)  # Two of these are kept.
        assert checkpoints(tmp_path) == ["3", "4"]
        assert read_manifest(tmp_path / "checkpoints" / "3").record["previous"]["step"] == 2
    (tmp_path / "checkpoints" / "4" / "meshkit.json").write_text("{}")
    with take_run(tmp_path) as owner:
        store = store_of(tmp_path, owner)
        with pytest.warns(UserWarning, match="checkpoint 4 is corrupt"):
            assert int(store.restore_latest(ABSTRACT).step) == 3
        for step in (4, 5):
            store.save(state_at(step))
        store.wait()
    (tmp_path / "checkpoints" / "4" / "meshkit.json").write_text("{}")
    with take_run(tmp_path) as owner:
        assert int(store_of(tmp_path, owner).restore_latest(ABSTRACT).step) == 5
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    with take_run(tmp_path) as owner:
        assert int(store_of(tmp_path, owner).restore_latest(ABSTRACT).step) == 5


def test_checkpoints_alone_in_a_new_folder_go_on_as_the_run_that_they_are_of(tmp_path):
    with take_run(tmp_path / "a") as a:
        saved(tmp_path / "a", 5, 6, owner=a)
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "checkpoints").rename(tmp_path / "b" / "checkpoints")
    with take_run(tmp_path / "b", known_run=lambda: run_of_checkpoints(tmp_path / "b")) as b:
        assert b.run == a.run
        assert int(store_of(tmp_path / "b", b).restore_latest(ABSTRACT).step) == 6


def test_a_writer_whose_folder_was_taken_over_commits_and_removes_nothing(tmp_path, monkeypatch):
    with take_run(tmp_path) as owner:
        saved(tmp_path, 1, 2, owner=owner)
        said = []
        store = store_of(tmp_path, owner, say=said.append)
        write = saving.write_manifest

        def taken_over_meanwhile(*arguments):
            write(*arguments)
            assert owning.make_claim(tmp_path / "owner", 2, owning.this_process(0)) is not None

        monkeypatch.setattr(saving, "write_manifest", taken_over_meanwhile)
        store.save(state_at(3))
        store.saving.wait(60)
        store.check()
        assert "checkpoint 3 could not be saved" in said[0]
        assert "has taken it over" in said[0]
        assert checkpoints(tmp_path) == ["1", "2"]  # 1 would have gone with 3.
        with pytest.raises(ConfigError, match="may no longer write it"):
            store_of(tmp_path, owner)


def test_a_takeover_between_the_last_look_and_the_commit_lets_nothing_through(tmp_path, monkeypatch):
    """The new owner renames what is half written before it looks which checkpoints there are."""
    with take_run(tmp_path) as owner:
        store = store_of(tmp_path, owner, say=lambda line: None)
        monkeypatch.setattr(owner, "check", lambda: remove_unfinished(tmp_path / "checkpoints"))
        store.save(state_at(3))
        store.saving.wait(60)
        store.check()
        assert "No such file" in store.news()["checkpoint_error"]
    assert checkpoints(tmp_path) == []


def test_what_a_living_owner_has_half_written_stays(tmp_path):
    with take_run(tmp_path):
        (tmp_path / "checkpoints" / "4.partial-1-0").mkdir(parents=True)
        CheckpointStore(tmp_path / "checkpoints")
        assert checkpoints(tmp_path) == ["4.partial-1-0"]
    CheckpointStore(tmp_path / "checkpoints")
    assert checkpoints(tmp_path) == []


def test_two_owners_never_write_into_one_folder(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(saving.Saving, "start", lambda self, state: names.append(self.partial.name))
    for _ in range(2):
        with take_run(tmp_path) as owner:
            store_of(tmp_path, owner).save(state_at(4))
    assert names == ["4.partial-1-0", "4.partial-2-0"]
