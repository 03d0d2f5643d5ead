"""Test checkpoints that cannot be read: they are tried again, then an error, but never renamed as corrupt."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.corruption.campaign import BEFORE, DAMAGED, abstract, random_state, same_bits, save_steps
from meshkit.cli import main
from meshkit.config.sections import CheckpointTable
from meshkit.errors import ConfigError, MeshkitError, RunError
from meshkit.verbs.checkpoint import manifest, store
from meshkit.verbs.checkpoint.manifest import MANIFEST
from meshkit.verbs.checkpoint.store import CheckpointStore

NOBODY = 65534


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_steps(folder)
    return folder


@pytest.fixture
def run(saved):
    """Yield a run folder of two checkpoints, which another user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="meshkit-test-"))
    folder.chmod(0o755)
    shutil.copytree(saved, folder / "checkpoints")
    for path in (folder / "checkpoints", *(folder / "checkpoints").rglob("*")):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    monkeypatch.setattr(manifest, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(store, "PAUSES_S", (0.0, 0.0, 0.0))


def restore(run, verify="own"):
    opened = CheckpointStore(run / "checkpoints", CheckpointTable(verify=verify))
    return opened.restore_latest(abstract(random_state(0)))


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@contextmanager
def as_nobody():
    """Enforce the files' permissions, which do not hold for root."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


@pytest.fixture
def storage(monkeypatch):
    """Return a function that makes reading manifests, contents or arrays fail a number of times."""

    def fail(where: str, error: BaseException, times: int) -> list[str]:
        met: list[str] = []

        def failing(real):
            def read(self, *args, **kwargs):
                is_meant = where != MANIFEST or Path(self).name == MANIFEST
                if is_meant and len(met) < times and (where == "restore" or f"/{DAMAGED}/" in str(self)):
                    met.append(str(self))
                    raise error
                return real(self, *args, **kwargs)

            return read

        if where == MANIFEST:
            monkeypatch.setattr(manifest, "read_regular", failing(manifest.read_regular))
        elif where == "contents":
            monkeypatch.setattr(manifest, "fingerprint", failing(manifest.fingerprint))
        else:
            handler = store.ocp.StandardCheckpointHandler
            monkeypatch.setattr(handler, "restore", failing(handler.restore))
        return met

    return fail


ERRORS = [OSError(number, os.strerror(number)) for number in (errno.EIO, errno.ESTALE, errno.ENOMEM, errno.EMFILE)] + [
    MemoryError()
]


@pytest.mark.parametrize("where", [MANIFEST, "contents", "restore"])
@pytest.mark.parametrize("error", ERRORS, ids=["EIO", "ESTALE", "ENOMEM", "EMFILE", "memory"])
def test_what_fails_for_a_while_is_read_again(run, storage, where, error):
    read_again(run, storage, where, error)


def test_what_tensorstore_fails_at_for_a_while_is_read_again(run, storage):
    read_again(run, storage, "restore", ValueError("NOT_FOUND [os_error_code='5']"))


def read_again(run, storage, where, error):
    met = storage(where, error, times=3)
    state = restore(run)
    assert len(met) == 3
    assert state is not None
    assert same_bits(state, random_state(DAMAGED))
    assert names(run) == [str(BEFORE), str(DAMAGED)]


@pytest.mark.parametrize(
    ("where", "verify"),
    [(MANIFEST, "own"), (MANIFEST, "full"), (MANIFEST, "off"), ("contents", "own"), ("contents", "full"),
     ("restore", "own"), ("restore", "full"), ("restore", "off")],
)  # fmt: skip
def test_what_fails_for_good_ends_with_4_and_renames_nothing(run, storage, where, verify):
    storage(where, OSError(errno.EIO, "Input/output error", "a file"), times=1000)
    with pytest.raises(
        RunError, match=rf"checkpoint {DAMAGED} cannot be read: Input/output error: a file; tried 4 "
    ) as e:
        restore(run, verify)
    assert e.value.exit_code == 4
    assert names(run) == [str(BEFORE), str(DAMAGED)]


@pytest.mark.parametrize("what", [MANIFEST, "state", "largest", "", ".."], ids=lambda w: w or "the checkpoint")
def test_a_permission_that_is_missing_ends_with_2_and_renames_nothing(run, what):
    checkpoint = run / "checkpoints" / str(DAMAGED)
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    (largest if what == "largest" else checkpoint / what).resolve().chmod(0)
    with as_nobody(), pytest.raises(ConfigError, match="may not be read: Permission denied") as e:
        restore(run)
    assert e.value.exit_code == 2
    (run / "checkpoints").chmod(0o755)
    assert names(run) == [str(BEFORE), str(DAMAGED)]


def test_a_restore_that_fails_over_damaged_files_is_of_a_corrupt_checkpoint(run, storage):
    """With verify = "off" nothing was compared before, so the failure makes it read the contents."""
    checkpoint = run / "checkpoints" / str(DAMAGED)
    largest = max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    storage("restore", OSError(errno.EIO, "Input/output error"), times=1)
    with pytest.warns(UserWarning, match="has other contents than were written"):
        state = restore(run, "off")
    assert state is not None
    assert np.asarray(jax.device_get(state.step)) == BEFORE
    assert names(run) == [str(BEFORE), f"{DAMAGED}.corrupt"]


@pytest.mark.parametrize(("mode", "code"), [(0o000, 2), (0o644, 0)])
def test_verify_tells_what_may_not_be_read_from_what_is_corrupt(run, mode, code, capsys):
    (run / "checkpoints" / str(DAMAGED) / MANIFEST).chmod(mode)
    with as_nobody():
        assert main(["checkpoint", "verify", str(run)]) == code
    said = capsys.readouterr().err
    assert ("cannot be read: Permission denied" in said) == (code == 2)
    assert "corrupt" not in said


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)], ids=["pipe", "dir", "loop"])
def test_what_is_no_file_is_damage_and_not_waited_for(run, put, monkeypatch):
    monkeypatch.setattr(manifest.time, "sleep", lambda _: pytest.fail("it was read again"))
    path = run / "checkpoints" / str(DAMAGED) / MANIFEST
    path.unlink()
    put(path)
    assert "no readable manifest" in manifest.find_corruption(path.parent)


def test_one_process_that_cannot_read_stops_all_of_them():
    failure = {"reason": "Stale file handle", "forbidden": False}
    every = [{"corruption": None, "seal": "a"}, {"failure": failure}, {"corruption": None, "seal": "a"}]
    assert store.first_problem(every) == (None, {"reason": "Stale file handle, found by process 1", "forbidden": False})
    assert store.first_problem([*every, {"corruption": "b is missing"}])[0] == "b is missing, found by process 3"
    assert isinstance(manifest.unreadable_error("it", failure, "x"), MeshkitError)
