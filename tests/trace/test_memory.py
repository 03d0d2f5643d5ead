"""Test how much memory reading a trace takes, and that the result does not depend on how much is read at a time."""

import gzip
import tracemalloc

import numpy as np

from benchmarks import trace_speed
from meshkit.config import files as bounded
from meshkit.trace import operations, xspace
from meshkit.trace.operations import TracedProgram, TraceFile
from meshkit.trace.reader import read_trace


def made(path, *, devices=1, layers=100, steps=5):
    """Write a trace with the stats that the CUDA collector gives a kernel; return it and its number of kernels."""
    kernels = trace_speed.trace_kernels(steps, layers)
    path.write_bytes(trace_speed.xspace(kernels, devices))
    return TraceFile(path, {i: i for i in range(devices)}), len(kernels) * devices


def test_reading_takes_less_than_the_trace_beside_it(tmp_path, monkeypatch):
    """The file's own bytes are not counted here."""
    file, events = made(tmp_path / "x.xplane.pb", layers=20, steps=100)
    monkeypatch.setattr(operations, "BLOCK", 1 << 11)
    monkeypatch.setattr(xspace, "CHUNK", 1 << 10)
    read_trace([file], TracedProgram(trace_speed.MODULE), num_steps=100)  # This imports what reading needs.
    tracemalloc.start()
    found = read_trace([file], TracedProgram(trace_speed.MODULE), num_steps=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.facts.events == events
    assert peak < 0.9 * file.path.stat().st_size


def test_the_memory_of_a_line_is_given_back_as_it_is_read(tmp_path):
    file, events = made(tmp_path / "x.xplane.pb", layers=20, steps=50)
    space = xspace.read_xspace(file.path)
    plane, buffer = space.planes[0], space.buffer
    names = plane.event_names.ids(beginning="loop")
    assert sum(len(e.metadata) for line in plane.lines for e in space.events(plane, line, ())) == events
    assert np.count_nonzero(buffer.bytes[: buffer.size]) < 0.1 * buffer.size
    assert plane.event_names.ids(beginning="loop") == names != {}


def test_pieces_of_any_size_say_the_same(tmp_path, monkeypatch):
    file, _ = made(tmp_path / "x.xplane.pb", devices=2, layers=20)
    whole = operations.read_operations(file)
    for block, chunk, stretch in ((64, 16, 700), (1000, 333, 1 << 18)):
        monkeypatch.setattr(operations, "BLOCK", block)
        monkeypatch.setattr(xspace, "CHUNK", chunk)
        monkeypatch.setattr(xspace, "STRETCH_BYTES", stretch)
        pieces = operations.read_operations(file)
        assert pieces.events == whole.events
        for device, ops in whole.devices.items():
            same = pieces.devices[device]
            assert (same.start_ps == ops.start_ps).all()
            assert (same.end_ps == ops.end_ps).all()
            assert (same.run == ops.run).all()
            assert [pieces.labels[i] for i in same.label] == [whole.labels[i] for i in ops.label]


def test_a_packed_trace_is_unpacked_piece_by_piece(tmp_path, monkeypatch):
    file, _ = made(tmp_path / "x.xplane.pb", layers=5)
    packed = tmp_path / "x.xplane.pb.gz"
    packed.write_bytes(gzip.compress(file.path.read_bytes()))
    for piece in (1000, 1 << 25):
        monkeypatch.setattr(bounded, "PIECE_BYTES", piece)
        buffer = xspace.read_xspace(packed).buffer
        assert bytes(buffer.data[: buffer.size]) == file.path.read_bytes()
        assert not buffer.bytes[buffer.size :].any()
