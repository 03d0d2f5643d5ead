"""Test meshkit's own folders: they are made, marked and closed to others, and other people's are left alone."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshkit.private import MARK, NotPrivate, private_folder


def why(folder):
    with pytest.raises(NotPrivate) as caught:
        private_folder(folder)
    return str(caught.value)


def test_one_is_made_with_those_above_it_and_found_again(tmp_path):
    folder = tmp_path / "a" / "b"
    assert private_folder(folder) == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.listdir(folder) == [MARK]
    (folder / "x").touch()
    assert private_folder(folder) == folder


def test_many_at_once_agree(tmp_path):
    def make(number):
        (private_folder(tmp_path / "new") / str(number)).touch()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(64)))
    assert len(os.listdir(tmp_path / "new")) == 65


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_one_that_others_may_enter_is_refused_and_keeps_its_mode(tmp_path, mode):
    private_folder(tmp_path / "ours").chmod(mode)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(mode)
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        assert why(folder) == f"others may enter it (mode {mode:04o}, not 0700)"
        assert folder.stat().st_mode & 0o777 == mode


def test_one_with_files_that_meshkit_did_not_make_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    assert private_folder(folder) == folder  # The folder is empty.
    (folder / MARK).unlink()
    (folder / "thesis.tex").touch()
    assert why(folder) == "there are files in it, and meshkit did not make it"
    assert os.listdir(folder) == ["thesis.tex"]


def test_a_link_and_a_file_are_refused_and_links_above_are_followed(tmp_path):
    private_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert why(tmp_path / "link") == "it is a link"
    assert private_folder(tmp_path / "link" / "below") == tmp_path / "real" / "below"
    (tmp_path / "file").touch()
    assert why(tmp_path / "file") == "Not a directory"
    assert why(tmp_path / "file" / "below")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user takes root")
def test_one_of_another_user_is_refused(tmp_path):
    os.chown(private_folder(tmp_path / "theirs"), 12345, -1)
    assert why(tmp_path / "theirs") == "it belongs to another user (uid 12345)"
