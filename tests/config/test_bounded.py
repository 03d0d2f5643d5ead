"""What somebody else made: gzip that would fill the memory, names that lead out of their folder."""

import gzip
import tracemalloc

import pytest

from meshkit.config.bounded import gunzip, inside


def test_gzip_content_comes_back():
    text = bytes(range(256)) * 10_000
    assert gunzip(gzip.compress(text), len(text)) == text
    two = gzip.compress(b"one") + gzip.compress(b"two") + bytes(100)
    assert gunzip(two, 6) == b"onetwo"


def test_a_bomb_is_refused_before_it_is_unpacked():
    bomb = gzip.compress(bytes(64 * 2**20), 1)
    assert len(bomb) < 2**20
    tracemalloc.start()
    with pytest.raises(ValueError, match="unpacks to more than 8 MiB"):
        gunzip(bomb, 8 * 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20  # the 8 MiB, and pieces on their way


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_what_is_cut_short_is_refused(cut):
    data = gzip.compress(bytes(range(256)) * 100)
    with pytest.raises(ValueError, match="ends before its content does"):
        gunzip(data[:cut], 2**20)


def test_what_is_no_gzip_is_refused():
    with pytest.raises(ValueError, match="no gzip data"):
        gunzip(b"not gzip at all", 2**20)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd", "", "x\0y", "out", "out/x", "deep/up/x"])
def test_names_that_lead_out(tmp_path, name):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "x").write_text("secret")
    (folder / "out").symlink_to(tmp_path)
    (folder / "deep" / "up").symlink_to("../..")
    assert inside(folder, name) is None


@pytest.mark.parametrize("name", ["x", "a/b/c", "link"])
def test_names_that_do_not(tmp_path, name):
    (tmp_path / "x").write_text("")
    (tmp_path / "link").symlink_to("x")
    assert inside(tmp_path, name) == tmp_path / name
