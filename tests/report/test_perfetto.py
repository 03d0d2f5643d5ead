"""Test that the trace for Perfetto follows the rules of its JSON importer, and that its totals are the report's."""

import gzip
import itertools
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from meshkit.report.views.perfetto import write_perfetto
from meshkit.timeline import DeviceStep, Timeline, exposed_spans, sweep

_US = 1e-6


@pytest.fixture
def document(timeline, tmp_path):
    file = write_perfetto(timeline, tmp_path, title="a run", sources={"gemm": "models/x.py:7"})
    assert file.name == "trace.json.gz"
    return json.loads(gzip.decompress(file.read_bytes()))


def complete(document):
    return [e for e in document["traceEvents"] if e["ph"] == "X"]


def test_events_have_what_the_format_asks(document):
    # In the Trace Event Format, X has name, ts and dur in us, and M names processes and threads.
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["pid"], int)
        assert event["name"]
        if event["ph"] == "X":
            assert isinstance(event["tid"], int)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in complete(document)}
    processes = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert processes == {0: "GPU 0", 1: "GPU 1"}


def test_events_of_a_thread_do_not_overlap(document):
    # Perfetto drops complete events of one thread that overlap without nesting.
    by_thread = defaultdict(list)
    for event in complete(document):
        by_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        # The tolerance is a thousandth of a ns.
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))


def test_tracks_and_annotations(document):
    tracks = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    # The two all-gathers overlap, so the second one is on a further track.
    assert tracks == {
        "steps", "compute", "exposed communication", "fsdp · nvlink", "fsdp · nvlink (2)", "data · infiniband",
        "no axis", "copies",
    }  # fmt: skip
    gather = next(e for e in complete(document) if e["name"] == "all-gather.1")
    assert gather["args"] == {
        "step": 5,
        "collective": "all-gather",
        "axes": ["fsdp"],
        "link": "nvlink",
        "fabric": "nvlink4_nvswitch",
        "dtype": "bf16",
        "group_size": 4,
        "payload_bytes": 2**20,
        "source": "layers/all-gather.1",
    }
    assert {e["args"].get("source") for e in complete(document) if e["name"] == "gemm"} == {"models/x.py:7"}


def test_totals_are_the_reports(document, report):
    def mean_s(track):
        # There are 2 devices with 2 steps each.
        return sum(e["dur"] for e in complete(document) if e["cat"] == track) * _US / 4

    step = report.step
    tolerance = 1e-9  # In seconds; each of a few spans is rounded to a nanosecond.
    assert mean_s("steps") == pytest.approx(step.time_s, abs=tolerance)
    assert mean_s("exposed communication") == pytest.approx(step.exposed_s, abs=tolerance)
    assert mean_s("compute") == pytest.approx(step.compute_s, abs=tolerance)  # Compute spans do not overlap here.
    busy = sum(row.busy_s for row in report.communication)
    on_axes = [mean_s(c) for c in ("fsdp · nvlink", "data · infiniband", "no axis")]
    assert sum(on_axes) == pytest.approx(busy, abs=3 * tolerance)


def test_steps_follow_each_other(document):
    steps = [e for e in complete(document) if e["cat"] == "steps" and e["pid"] == 1]
    assert [(e["name"], e["ts"], e["dur"]) for e in steps] == [("step 5", 0, 11_000), ("step 6", 11_000, 11_000)]


def test_waiting_is_annotated_where_it_is_known(timeline, tmp_path):
    steps = tuple(replace(s, transfer_s=np.full(len(s.communication), 5e-4)) for s in timeline.steps)
    file = write_perfetto(replace(timeline, steps=steps), tmp_path / "x.json.gz")
    events = complete(json.loads(gzip.decompress(file.read_bytes())))
    gather = next(e for e in events if e["name"] == "all-gather.1")
    assert (gather["args"]["transfer_us"], gather["args"]["wait_us"]) == (500, 1500)  # The span has 2 ms.


def test_what_does_not_fit_is_left_out_and_said(timeline, tmp_path):
    file = write_perfetto(timeline, tmp_path, max_events=15)  # A device step has 7 events.
    document = json.loads(gzip.decompress(file.read_bytes()))
    assert (document["otherData"]["device_steps"], document["otherData"]["device_steps_left_out"]) == (2, 2)
    assert {e["args"]["step"] for e in complete(document)} == {5}


def test_the_same_timeline_makes_the_same_file(timeline, tmp_path):
    files = [write_perfetto(timeline, tmp_path / name) for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_no_steps_no_file(tmp_path):
    assert write_perfetto(Timeline((), ()), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_exposed_parts_add_up_however_sums_round():
    # Spans last from picoseconds to milliseconds, and no binary fraction holds any of them exactly.
    rng = np.random.default_rng(0)
    at = np.cumsum(rng.lognormal(-12, 2, 4000))
    compute, communication = at[:2000].reshape(-1, 2), at[rng.permutation(4000)[:2000]].reshape(-1, 2)
    communication.sort(axis=1)
    communication = communication[np.diff(communication, axis=1)[:, 0] < 0.1 * at[-1]]
    step = DeviceStep(
        device=0,
        step=0,
        window=(0.0, float(at[-1])),
        compute=compute,
        compute_op=np.zeros(1000, int),
        communication=communication,
        collective=np.zeros(len(communication), int),
        copies=np.zeros((0, 2)),
    )
    drawn = np.diff(exposed_spans(step)).sum()
    assert drawn == pytest.approx(sweep(step, 1).total.exposed_s, rel=1e-9)
