"""Test that files named by a checkpoint's manifest or a capture's record stay in their folder, whoever wrote them."""

from types import SimpleNamespace

import pytest

from meshkit.errors import TraceError
from meshkit.trace.captured import trace_file
from meshkit.verbs.checkpoint.manifest import (
    find_corruption,
    fingerprint,
    remove_unfinished,
    steps_aside,
    whole_steps,
    write_manifest,
)

ARRAYS = {"w": "float32[1]"}


def checkpoint(tmp_path, names):
    """Return a checkpoint of step 5 whose manifest has a right seal, these names, and their right hashes."""
    folder = tmp_path / "checkpoints" / "5"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "data").write_text("data")
    (tmp_path / "secret").write_text("secret")
    (folder / "up").symlink_to("../..")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "inner").symlink_to("state/data")
    files = {name: list(fingerprint(folder / name)) for name in names}
    write_manifest(folder, {"step": 5, "arrays": ARRAYS, "files": files})
    return folder


@pytest.mark.parametrize("name", ["../../secret", "state/../../../secret", "/etc/hostname", "link", "up/secret"])
def test_a_manifest_that_names_a_file_elsewhere_is_no_checkpoint(tmp_path, name):
    assert "which is not in the " in find_corruption(checkpoint(tmp_path, ["state/data", name]))


def test_a_manifest_of_files_of_its_own_is_one(tmp_path):
    assert find_corruption(checkpoint(tmp_path, ["state/data", "inner"])) is None


@pytest.mark.parametrize("name", ["../secret.xplane.pb", "/etc/passwd", "link.xplane.pb", ""])
def test_a_capture_that_names_a_trace_elsewhere_is_refused(tmp_path, name):
    folder = tmp_path / "trace"
    folder.mkdir()
    (tmp_path / "secret.xplane.pb").write_bytes(b"")
    (folder / "link.xplane.pb").symlink_to(tmp_path / "secret.xplane.pb")
    record = SimpleNamespace(process=0, trace=SimpleNamespace(file=name))
    with pytest.raises(TraceError, match="which is not in this folder"):
        trace_file(folder, record)


def test_a_capture_names_its_own_trace(tmp_path):
    (tmp_path / "own.xplane.pb").write_bytes(b"")
    record = SimpleNamespace(process=0, trace=SimpleNamespace(file="own.xplane.pb"))
    assert trace_file(tmp_path, record) == tmp_path / "own.xplane.pb"


@pytest.mark.parametrize(
    "name", ["\N{SUPERSCRIPT TWO}", "1\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT FIVE}", "05", " 5", "9" * 200, "5 "]
)
def test_a_folder_with_other_digits_is_no_checkpoint(tmp_path, name):
    for suffix in ("", ".corrupt", ".partial"):
        (tmp_path / f"{name}{suffix}").mkdir()
    (tmp_path / "7").mkdir()
    assert (whole_steps(tmp_path), steps_aside(tmp_path)) == ([7], [])
    remove_unfinished(tmp_path)
    assert (tmp_path / f"{name}.partial").is_dir()
