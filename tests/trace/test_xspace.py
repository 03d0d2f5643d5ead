"""Test the reader of XSpace files against the runtime's own reader, and on files that no writer would write."""

import random
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

from meshkit.errors import TraceError
from meshkit.trace.operations import DROPPED, TraceFile, is_fused, read_operations
from meshkit.trace.protobuf import Buffer, WireError
from meshkit.trace.xspace import NO_VALUE, Events, event_spans, event_starts, read_xspace
from tests.trace.trace_files import clock_text, plane_text, write_planes

DATA = Path(__file__).parent.parent / "data"
SYNTHETIC = DATA / "synthetic_2gpu_3step.xplane.pb"
STATS = ("hlo_op", "hlo_module", "correlation_id", "program_id", "run_id", "memcpy_details", "_p", "step_num")


def assert_reads_as_the_runtime_does(path):
    """Check names, times and stats of every event of every line; return the number of events."""
    ours = read_xspace(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = list(ProfileData.from_file(str(path)).planes)
        assert [p.name for p in ours.planes] == [p.name for p in theirs]
        return sum(_assert_same_plane(ours, p, q) for p, q in zip(ours.planes, theirs))


def _assert_same_plane(space, plane, theirs):
    count = 0
    for line, other in zip(plane.lines, theirs.lines, strict=True):
        found = Events.joined(list(space.events(plane, line, STATS)), STATS)
        assert line.name == other.name
        for i, event in enumerate(other.events):
            assert plane.event_names.get(int(found.metadata[i])) == event.name
            start = line.timestamp_ns + found.offset_ps[i] / 1000
            assert (start, found.duration_ps[i] / 1000) == pytest.approx((event.start_ns, event.duration_ns), abs=1)
            stats = dict(event.stats)
            for name in STATS:
                value = int(found.stats[name][i])
                if name not in stats:
                    assert value == NO_VALUE
                elif isinstance(stats[name], str):
                    assert plane.text(value) == stats[name]
                else:
                    assert value % 2**64 == int(stats[name]) % 2**64
            count += 1
        assert len(found.metadata) == len(list(other.events))
    return count


@pytest.mark.parametrize(
    ("path", "events"), [(SYNTHETIC, 33), (DATA / "traces" / "tracelens_jax08_gemm.xplane.pb", 3782)]
)
def test_recorded_traces_read_as_the_runtime_reads_them(path, events):
    assert assert_reads_as_the_runtime_does(path) == events


ODD = {
    "strings in the event": 'stats{metadata_id:1 str_value:"dot.1"} stats{metadata_id:2 str_value:"jit_f"}',
    "negative number": "stats{metadata_id:5 int64_value:-7}",
    "64 bits": "stats{metadata_id:5 uint64_value:18446744073709551615}"
    " stats{metadata_id:7 int64_value:72057594037927936}",
    "double": "stats{metadata_id:4 double_value:3.0}",
    "long string": f'stats{{metadata_id:1 str_value:"{"x" * 300}"}} stats{{metadata_id:5 int64_value:9}}',
    "unknown stat": 'stats{metadata_id:99 str_value:"?"} stats{metadata_id:1 ref_value:2}',
    "no stats": "",
}


@pytest.mark.parametrize("stats", ODD.values(), ids=ODD.keys())
def test_values_of_any_type_and_size(tmp_path, stats):
    names = "".join(f'stat_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in enumerate(STATS, 1))
    events = f"events{{metadata_id:300 offset_ps:70000000000000 duration_ps:1 {stats}}} events{{metadata_id:1 {stats}}}"
    kinds = 'event_metadata{key:300 value{id:300 name:"k"}} event_metadata{key:1 value{id:1 display_name:"d"}}'
    plane = f'planes{{name:"/device:GPU:0" lines{{name:"Stream #1" timestamp_ns:5 {events}}} {kinds} {names}}}'
    assert assert_reads_as_the_runtime_does(write_planes(tmp_path / "x", plane)) == 2


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def message(field, content):
    return varint(field << 3 | 2) + varint(len(content)) + content


def number(field, value):
    return varint(field << 3) + varint(value)


def test_fields_in_any_order_read_right(tmp_path):
    # The event has its duration first, an unknown field before its stat, and the stat's value before its id.
    stat = number(7, 2) + number(1, 1)
    event = number(3, 9) + message(15, b"?") + message(4, stat) + number(2, 8) + number(1, 6)
    names = message(5, message(2, message(2, b"hlo_op") + number(1, 1)) + number(1, 1))
    names += message(5, number(1, 2) + message(2, number(1, 2) + message(2, b"dot.1")))
    kinds = message(4, message(2, message(2, b"kernel") + number(1, 6)) + number(1, 6))
    line = message(4, event) + number(3, 5) + message(2, b"Stream #1")
    path = tmp_path / "x"
    path.write_bytes(message(1, names + kinds + message(3, line) + message(2, b"/device:GPU:0")))
    assert assert_reads_as_the_runtime_does(path) == 1
    (label,) = read_operations(TraceFile(path, {0: 0})).labels
    assert (label.name, label.op) == ("kernel", "dot.1")


@pytest.mark.parametrize("seed", range(3))
def test_a_long_line_that_is_entered_at_many_places_has_the_same_events(tmp_path, seed):
    rng, count = random.Random(seed), 4_000
    stat = message(4, number(1, 5) + message(6, bytes(70)))
    plain = [number(1, 1) + number(2, 10**9 + i) + number(3, 10**i) + stat * (i % 3) for i in range(10)]
    lookalike = plain[0] + message(4, number(1, 5) + message(6, b'"\x7f\x08\x01\x10' * 20))
    others = [
        message(15, bytes(40)),
        number(14, 300),
        message(4, b""),
        message(4, plain[0] + message(15, bytes(2**15))),
    ]
    fields = [message(4, rng.choice(plain)) for _ in range(count)]
    for at in rng.sample(range(count), seed * 20):
        fields[at] = rng.choice([*others, message(4, lookalike)])
    path = tmp_path / "x"
    path.write_bytes(message(2, b"Stream #1") + b"".join(fields))
    buffer = Buffer.read(path)
    assert spans_of(buffer) == walked(buffer)
    if seed == 0:
        assert len(event_starts(buffer, 11, buffer.size)[0]) > 3_900
    for _ in range(15):  # A damaged file is an error, or gives what a walk field by field finds.
        buffer.memory[rng.randrange(buffer.size)] = rng.randrange(256)
        found = spans_of(buffer)
        assert found == walked(buffer)
        if found is None:
            buffer = Buffer.read(path)


def spans_of(buffer):
    """Return the begin and end of each event of a line, or None for a damaged one."""
    with suppress(WireError):
        return np.concatenate([np.stack(spans, axis=1) for spans in event_spans(buffer, 0, buffer.size)]).tolist()


def walked(buffer):
    """Return the same as `spans_of`, one field after the other."""
    at, found = 0, []
    with suppress(WireError):
        while at < buffer.size:
            after = buffer.skip(at, buffer.size)
            found += [list(value) for number, value in buffer.fields(at, after) if buffer.data[at] == 0x22]
            at = after
        return found


def test_what_the_profiler_says_about_itself_is_kept(tmp_path):
    text = plane_text("/device:GPU:0", [("k", 0, 1, {"hlo_op": "dot"})])
    path = write_planes(tmp_path / "x", text, 'warnings:"12 events were dropped" errors:"CUPTI failed" hostnames:"h"')
    found = read_operations(TraceFile(path, {0: 0}))
    assert (found.dropped, found.messages) == (12, ["CUPTI failed", "12 events were dropped"])


def test_events_with_impossible_times_are_discarded(tmp_path):
    day_us = 86_400e6
    events = [("k", 0, 1, {"hlo_op": "dot"}), ("k", 3 * day_us, 3 * day_us + 1, {"hlo_op": "dot"})]
    found = read_operations(TraceFile(write_planes(tmp_path / "x", plane_text("/device:GPU:0", events)), {0: 0}))
    assert (found.events, found.discarded) == (1, 1)


@pytest.mark.parametrize("since_ns", [0, 1_700_000_000_000_000_000])
def test_lines_that_count_from_the_epoch(tmp_path, since_ns):
    line = plane_text("/device:GPU:0", [("k", 5, 7, {"hlo_op": "dot"})])
    line = line.replace('name:"Stream', f'timestamp_ns:{since_ns + 1000} name:"Stream')
    path = write_planes(tmp_path / "x", line, clock_text(1_700_000_000_000_000_000))
    found = read_operations(TraceFile(path, {0: 3}))
    assert (found.clock_ns, found.discarded) == (1_700_000_000_000_000_000, 0)
    assert found.devices[3].start_ps.tolist() == [6_000_000]


def test_a_recorded_gpu_trace_joins_its_kernels():
    found = read_operations(TraceFile(DATA / "traces" / "tracelens_jax08_gemm.xplane.pb", {i: i for i in range(8)}))
    (operations,) = found.devices.values()  # Seven of its planes are of idle GPUs.
    labels = [found.labels[i] for i in operations.label]
    assert len(labels) == 54
    assert sum(bool(label.op) for label in labels) == 42
    assert {label.module for label in labels} == {"jit_broadcast_in_dim", "jit_dot", "jit_convert_element_type", ""}


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_an_error_or_a_valid_reading_never_a_crash(tmp_path, seed):
    rng, whole, path = random.Random(seed), SYNTHETIC.read_bytes(), tmp_path / "x"
    for _ in range(150):
        content = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.4 else whole)
        for _ in range(rng.randrange(4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            found = read_operations(TraceFile(path, {0: 0, 1: 1}))
        except TraceError:
            continue
        for device in found.devices.values():
            assert (device.end_ps >= device.start_ps).all()
            assert (device.start_ps[1:] >= device.start_ps[:-1]).all()


@pytest.mark.parametrize("piece", ["1 ", "dropped ", "9", "1" * 30 + " dropped "])
def test_a_message_of_megabytes_is_searched_for_dropped_events_in_linear_time(piece):
    found = [int(m[1] or m[2]) for m in DROPPED.finditer(piece * (2**20 // len(piece)))]
    assert all(n < 10**15 for n in found)


@pytest.mark.parametrize(("name", "fused"), [("void gemm_all_reduce<float>", True), ("AllGather" + "Matmul", True),
                                             ("gemm" * 2**18, False), ("allgather" * 2**17, False)])  # fmt: skip
def test_names_of_fused_kernels(name, fused):
    assert is_fused(name) is fused


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\x0a\x00" * 10_001, "more than 10,000 planes"), (b"\x0a\x84\xb5\x18" + b"\x1a\x02\x22\x00" * 100_001, "lines")],
)
def test_more_planes_or_lines_than_any_trace_has(tmp_path, content, message):
    """Each plane or line takes hundreds of times its bytes in memory."""
    (tmp_path / "x.xplane.pb").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_xspace(tmp_path / "x.xplane.pb")


def test_parts_are_joined_without_a_second_copy():
    def part(first):
        column = np.arange(first, first + 3)
        return Events(column, column + 10, column + 20, {"here": column + 30, "nowhere": np.full(3, NO_VALUE)})

    parts = [part(0), part(3)]
    events = Events.joined(parts, ["here", "nowhere"])
    assert parts == []
    assert events.metadata.tolist() == list(range(6))
    assert events.stats["here"].tolist() == list(range(30, 36))
    assert events.stats["nowhere"].tolist() == [NO_VALUE] * 6
    assert events.stats["nowhere"].strides == (0,)
    assert len(Events.joined([], ["here"]).stats["here"]) == 0
