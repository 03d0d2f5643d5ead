"""Test reading files of unknown origin: gzip that would fill the memory, and names that lead out of their folder."""

import gzip
import lzma
import os
import tracemalloc

import pytest

from meshkit.config.files import (
    find_deep_key,
    gunzip,
    inside,
    open_regular,
    read_bounded,
    read_regular,
    unxz,
    write_file,
)
from meshkit.errors import ConfigError, TraceError
from meshkit.report.folder import read_report
from meshkit.runs.metrics import read_metrics
from meshkit.trace.measured import write_pgle


def test_gzip_content_comes_back():
    text = bytes(range(256)) * 10_000
    assert gunzip(gzip.compress(text), len(text)) == text
    two = gzip.compress(b"one") + gzip.compress(b"two") + bytes(100)
    assert gunzip(two, 6) == b"onetwo"
    assert unxz(lzma.compress(text), len(text)) == text


PACKED = pytest.mark.parametrize(
    ("pack", "unpack"),
    [(lambda data: gzip.compress(data, 1), gunzip), (lambda data: lzma.compress(data, preset=0), unxz)],
    ids=["gzip", "xz"],
)


@PACKED
def test_a_bomb_is_refused_before_it_is_unpacked(pack, unpack):
    bomb = pack(bytes(64 * 2**20))
    assert len(bomb) < 2**20
    tracemalloc.start()
    with pytest.raises(ValueError, match="unpacks to more than 8 MiB"):
        unpack(bomb, 8 * 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 2**20  # The limit of 8 MiB is exceeded only by the pieces that are being copied.


def test_a_bomb_far_below_the_bound_is_refused_too():
    bomb = gzip.compress(bytes(128 * 2**20))
    with pytest.raises(ValueError, match=rf"more than 64 MiB, more than 100 times its {len(bomb)} bytes"):
        gunzip(bomb, 2**33)


@PACKED
@pytest.mark.parametrize("cut", [5, 30, -4])
def test_what_is_cut_short_is_refused(cut, pack, unpack):
    data = pack(bytes(range(256)) * 100)
    with pytest.raises(ValueError, match="ends before its content does"):
        unpack(data[:cut], 2**20)


@pytest.mark.parametrize("unpack", [gunzip, unxz])
def test_what_is_not_packed_is_refused(unpack):
    with pytest.raises(ValueError, match=r"not (gzip|xz) data"):
        unpack(b"not packed at all", 2**20)


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


def test_a_pipe_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a named pipe, not a regular file"):
        open_regular(tmp_path / "pipe")
    for read in (read_bounded, lambda path, _: read_metrics(path), lambda path, _: read_report(path)):
        with pytest.raises((ConfigError, TraceError, OSError), match="named pipe"):
            read(tmp_path / "pipe", "topology")


def test_a_pipe_in_the_place_of_a_file_to_write_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pgle.pbtxt")
    with pytest.raises(TraceError, match="cannot be written"):
        write_pgle(tmp_path / "pgle.pbtxt", {"fusion.1": 1e-6})
    (tmp_path / "there").write_text("longer than what comes")
    write_file(tmp_path / "there", "é")
    assert (tmp_path / "there").read_text(encoding="utf-8") == "é"


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/tty", "/dev/null"])
def test_a_device_is_no_file(path):
    with pytest.raises(OSError, match=r"a device, not a regular file|No such device"):
        read_regular(path)


def test_sizes_are_bounded_before_reading(tmp_path):
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 2**40)
    with pytest.raises(OSError, match="larger than 1 MiB"):
        read_regular(tmp_path / "huge", 2**20)
    with pytest.raises(OSError, match="larger than 1 GiB"):
        read_metrics(tmp_path / "huge")
    with pytest.raises(TraceError, match="larger than 64 MiB"):
        read_report(tmp_path / "huge")
    with pytest.raises(TraceError, match="larger than 4 MiB"):
        read_bounded(tmp_path / "huge", "topology")
    (tmp_path / "full").write_bytes(bytes(2**20))
    assert read_regular(tmp_path / "full", 2**20) == bytes(2**20)


@pytest.mark.parametrize("piece", ["a", "a.", "a .", '"', "'", '"a".', ' "', "a b ", '"\\"', "a.b.c "])
def test_a_deep_key_is_sought_in_linear_time(piece):
    find_deep_key(piece * (4 * 2**20 // len(piece)))


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ("x = [1.5, 2.5]" * 50, None),
        ("a" + ".a" * 30, None),
        ("\n# yes\n[a" + ".a" * 32 + "]", 3),
        ("x = {'a'" + '."b.c"' * 32 + " = 1}", 1),
        ("x = '" + "." * 100 + "'", None),
    ],
)
def test_where_a_deep_key_is(toml, line):
    assert find_deep_key(toml) == line
