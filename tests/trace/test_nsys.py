"""Test traces of Nsight Systems, real and made-up ones, against a plain loop that shares no code with the reader."""

import gzip
import random
import re
import shutil
import sqlite3
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

import meshkit as mk
from meshkit.cli import app
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.errors import TraceError
from meshkit.report.folder import read_report
from meshkit.trace.loose import find_traces, is_loose, open_loose
from meshkit.trace.nsys import Ranges, read_nsys
from meshkit.trace.operations import TraceFile, is_communication
from meshkit.trace.reader import read_trace
from meshkit.verbs.profile.profiler import TracedJob, measure_traces, profile_run
from tests.trace.nsys_files import SCHEMA, WARNING, Export, export_of, made

TRACES = Path(__file__).parent.parent / "data" / "traces"
MAXTEXT, PAX = TRACES / "maxtext_h100x4", TRACES / "pax_a100x4"
COLLECTIVE = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute")


def read(path):
    loose = open_loose(path)
    return loose, read_trace(loose.files, loose.program, chosen=range(100))


@pytest.fixture(scope="module")
def files():
    """Return the rows of each file of both runs, with the devices of its threads, which XLA starts in device order."""
    folder = PAX / "nvtx_gpu_proj_trace" / "trace.parquet"
    found = {MAXTEXT: [MAXTEXT / "nvtx_gpu_proj_trace" / "trace.parquet"], PAX: sorted(folder.iterdir())}
    rows = {run: [parquet.read_table(file).to_pylist() for file in paths] for run, paths in found.items()}
    threads = {run: [(n, t) for n, of in enumerate(rows[run]) for t in sorted({r["TID"] for r in of})] for run in rows}
    return {run: [(of, {t: i for i, (m, t) in enumerate(threads[run]) if m == n}) for n, of in enumerate(rows[run])]
            for run in rows}  # fmt: skip


H100 = TracedJob(MeshSpec.parse({"fsdp": 4}), Cluster.load("dgx_h100"))


@pytest.fixture(scope="module")
def maxtext():
    return measure_traces(MAXTEXT, H100)


@pytest.fixture(scope="module")
def measured(maxtext):
    return {MAXTEXT: maxtext.report, PAX: measure_traces(PAX, TracedJob()).report}


def executions(files):
    """Return (device, number) -> innermost thunks as (instruction, start, end) in ns, in order of start."""
    found = {}
    for rows, device_of in files:
        row_of = {row["RangeId"]: row for row in rows}
        holds = {row["ParentId"] for row in rows if "Thunk:" in row["Name"]}
        runs = defaultdict(lambda: defaultdict(list))
        for row in rows:
            if "Thunk:" not in row["Name"] or row["RangeId"] in holds:
                continue
            around = row
            while "XlaModule:" not in around["Name"]:
                around = row_of[around["ParentId"]]
            op, start = row["Name"].split("hlo_op=")[1].rstrip("#"), row["Projected Start"]
            runs[device_of[row["TID"]]][around["RangeId"]].append((start, start + row["Projected Duration"], op))
        for device, of in runs.items():
            for number, thunks in enumerate(sorted(sorted(thunks) for thunks in of.values())):
                found[device, number] = [(op, start, end) for start, end, op in thunks]
    return found


def union(spans):
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def length(spans):
    return sum(end - start for start, end in union(spans))


def in_both(some, others):
    return length(some) + length(others) - length([*some, *others])


def parts(found, device, number):
    """Return ns of one step, which ends where the next begins, and how many thunks run in it.

    The ns are window, compute, communication, overlapped and exposed.
    """
    begin, end = found[device, number][0][1], found[device, number + 1][0][1]
    every = [thunk for (of, _), thunks in found.items() if of == device for thunk in thunks]
    inside = [(op, max(a, begin), min(b, end)) for op, a, b in every if a < end and b > begin]
    communicates = [(a, b) for op, a, b in inside if COLLECTIVE.match(op)]
    computes = [(a, b) for op, a, b in inside if not COLLECTIVE.match(op)]
    overlapped = in_both(computes, communicates)
    communication = length(communicates)
    return [end - begin, length(computes), communication, overlapped, communication - overlapped], len(inside)


def wait_s(found, numbers, *, clocked):
    """Return mean seconds that a device waits in a step: until the last has come, or longer than the quickest."""
    total, steps = 0, 0
    for number in numbers:
        instances = defaultdict(list)
        for (_, of), thunks in found.items():
            seen = defaultdict(int)
            for op, start, end in thunks if of == number else ():
                if COLLECTIVE.match(op):
                    seen[op] += 1
                    instances[op, seen[op]].append((start, end))
            steps += of == number
        for spans in instances.values():
            assert len(spans) == 4
            last, least = max(a for a, _ in spans), min(b - a for a, b in spans)
            total += sum(min(max(last - a, 0), b - a) if clocked else b - a - least for a, b in spans)
    return total * 1e-9 / steps


@pytest.mark.parametrize(("run", "thunks", "mapped"), [(MAXTEXT, 980, 1), (PAX, 2610, 0)])
def test_times_and_counts_are_those_of_a_plain_loop(run, thunks, mapped, files, tmp_path):
    if not mapped:  # Without the dump, only the names of ranges are known.
        shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("dump"))
    found, (loose, trace) = executions(files[run]), read(run if mapped else tmp_path / "run")
    assert (loose.module is None) == (not mapped)
    counts = defaultdict(list)
    for step, swept in zip(trace.steps.steps, trace.sweeps):
        total, (ns, count) = swept.total, parts(found, step.device, step.step)
        ours = (total.window_s, total.compute_s, total.communication_s, total.overlapped_s, total.exposed_s)
        assert ours == pytest.approx([1e-9 * each for each in ns], abs=1e-9)
        own = found[step.device, step.step]
        assert swept.count.sum() == sum(bool(COLLECTIVE.match(op)) for op, *_ in own)
        counts[step.device].append(count)
    assert counts == {device: [thunks] * 4 for device in range(4)}
    assert trace.facts.kernels == dict.fromkeys(range(4), thunks)
    assert not trace.facts.odd_counts
    assert (trace.facts.mapped_share, trace.facts.discarded) == (mapped, 0)


@pytest.mark.parametrize(("run", "numbers", "clocked"), [(MAXTEXT, (1, 2, 3), True), (PAX, (2, 3), False)])
def test_waiting_is_that_of_a_plain_loop(run, numbers, clocked, files, measured):
    report = measured[run]
    assert report.stragglers.method == ("clocked" if clocked else "clock_free")
    waited = sum(row.wait_s for row in report.communication)
    assert waited == pytest.approx(wait_s(executions(files[run]), numbers, clocked=clocked), abs=1e-9)
    assert [s.step for s in report.per_step if not s.left_out] == list(numbers)


def test_maxtext_on_four_h100s_is_late_by_the_gradient_of_its_embedding(files, measured):
    report, found = measured[MAXTEXT], executions(files[MAXTEXT])
    scatter_ms = {key: sum(b - a for op, a, b in of if op == "input_scatter_fusion") / 1e6 for key, of in found.items()}
    usual = range(1, 4)
    slowest = max(range(4), key=lambda device: sum(scatter_ms[device, number] for number in usual))
    longest = {
        device: [n for n in usual if max(range(4), key=lambda d: scatter_ms[d, n]) == device] for device in range(4)
    }
    assert (slowest, longest) == (1, {0: [], 1: [2, 3], 2: [], 3: [1]})
    assert [round(scatter_ms[1, number], 1) for number in usual] == [57.1, 68.5, 63.7]
    slow, waiting = report.findings[:2]
    assert (slow.code, waiting.code) == ("low_rate_kernels", "waiting_for_peers")
    assert waiting.message == (
        "82.6 % of the exposed communication, 15.4 ms a step, is waiting for peers, 70.2 % of it for GPU 1 (process 0 "
        "on maxtext_h100x4). GPU 1 is 13.8 ms a step behind the usual one, in 66.7 % of the steps: 13.8 ms in "
        "input_scatter_fusion (layers/embeddings.py:84; 57.1 ms to 68.5 ms, usually 49.3 ms). GPU 3 is 4.30 ms a step "
        "behind the usual one: 4.12 ms in input_scatter_fusion (layers/embeddings.py:84; 48.3 ms to 61.3 ms, usually "
        "49.3 ms)."
    )
    assert re.fullmatch(  # The rest depends on the price of a kernel.
        r"\d+ kernels run at less than half of their expected rate on NVIDIA H100 80GB HBM3, which costs 5\d.\d ms a "
        r"step; input_scatter_fusion \(layers/embeddings.py:84\) takes 2\d{3}.\d x as long as expected. Without that, "
        rf"the step would take [67]\d.\d ms. 14.8 % of the step is exposed communication. {re.escape(waiting.message)}",
        report.verdict,
    )
    for finding in (slow, waiting):
        assert "one-hot matmul in place of the scatter-add" in finding.hint
        assert "clock" not in finding.message
    assert [s.left_out for s in report.per_step] == ["warm-up", None, None, None]


def test_an_mi300_between_two_matmuls_waits_for_its_host():
    report = measure_traces(TRACES / "tracelens_jax08_gemm.xplane.pb", TracedJob()).report
    assert report.verdict == (
        "13.4 % of the step of 727 us is idle. The GPU is idle 97.2 us between steps: the host is too slow to give it "
        "work. Without that, the step would take 630 us."
    )


def test_the_program_beside_an_export_is_priced(maxtext):
    gathers, scatters = (
        [
            next(row.busy_s for row in report.communication if (row.collective, row.dtype) == (kind, "bf16"))
            for report in (maxtext.report, maxtext.price())
        ]
        for kind in ("all-gather", "reduce-scatter")
    )
    assert [measured_s / priced_s for measured_s, priced_s in (gathers, scatters)] == pytest.approx([1.0, 1.0], abs=0.2)


def test_pax_on_four_a100s_blames_no_gpu(measured):
    report = measured[PAX]
    assert {s.step: s.left_out for s in report.per_step if s.left_out} == {0: "warm-up", 1: "warm-up"}
    found = {f.code: f for f in report.findings[:2]}
    assert found.keys() == {"low_rate_kernels", "host_bound"}
    assert found["low_rate_kernels"].hint.startswith("fewer and larger kernels")  # 1,892 kernels take 5 us each.
    assert "which the trace names" in next(w.message for w in report.warnings if w.code == "gpu_of_trace")
    assert sum(f.seconds for f in report.findings if f.code == "waiting_for_peers") < 1e-3
    assert not [d for d in report.stragglers.devices if d.late]
    assert not re.search("clock|ECC|temperature", " ".join(f.message for f in report.findings))
    assert report.verdict.startswith(
        "5.7 % of the step of 131 ms is idle. The GPU is idle 4.31 ms between steps and 3.18 ms between kernels: the "
        "host is too slow to give it work. Without that, the step would take 124 ms. "
    )
    assert re.search(
        r" on NVIDIA A100-SXM4-40GB, which costs 6.\d\d ms a step; input_reduce_fusion.130 ", report.verdict
    )
    every = measure_traces(PAX, TracedJob(), steps=range(5)).report
    assert every.verdict.startswith("No verdict: What counts as one step takes from ")


def overlap_of(thunks):
    """Return `mk.overlap` of one execution, up to its last thunk."""
    begin, end = thunks[0][1], max(end for *_, end in thunks)
    spans = {
        which: np.array([(a - begin, b - begin) for op, a, b in thunks if bool(COLLECTIVE.match(op)) == which]) * 1e-9
        for which in (False, True)
    }
    return mk.overlap(spans[False], spans[True], (0.0, (end - begin) * 1e-9))


def test_pax_has_the_numbers_that_its_analysis_by_others_gave(files):
    found = executions(files[PAX])
    names = ("window", "compute", "communication", "overlapped", "exposed", "idle")
    third = overlap_of(found[0, 2])
    in_ms = [1e3 * getattr(third, f"{name}_s") for name in names]
    # The analysis gives two decimals.
    assert in_ms == pytest.approx([127.31, 120.62, 7.80, 4.47, 3.33, 3.36], abs=0.006)
    steady = [overlap_of(found[device, number]) for device in (0, 1) for number in (2, 3, 4)]
    shares = [100 * each.overlapped_s / each.communication_s for each in steady]
    assert (min(shares), max(shares)) == pytest.approx((51.8, 62.7), abs=0.06)  # The analysis gives one decimal.


def test_sqlite_and_parquet_of_one_run_give_equal_reports(files, measured, tmp_path):
    ((rows, device_of),) = files[MAXTEXT]
    run = export_of(rows, device_of).write(tmp_path / f"{MAXTEXT.name}.sqlite")
    shutil.copytree(MAXTEXT / "dump", tmp_path / "dump")
    report = measure_traces(run, H100).report
    assert report == measured[MAXTEXT]
    options = ["--mesh", "fsdp=4", "--cluster", "dgx_h100", "--out", str(tmp_path / "out")]
    said = CliRunner().invoke(app, ["profile", str(run), *options])
    assert (said.exit_code, said.exception) == (0, None)
    assert report.verdict in " ".join(said.stdout.split())
    assert read_report(tmp_path / "out").model_copy(update={"predicted": None, "warnings": ()}) == report.model_copy(
        update={"warnings": ()}
    )


def test_processes_of_one_export_are_devices_of_one_clock(tmp_path):
    loose, trace = read(made().write(tmp_path / "x.sqlite"))
    assert (loose.program.module, loose.program.program_id) == ("jit_f", 7)
    assert [(s.device, s.step) for s in trace.steps.steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    total = trace.sweeps[0].total
    us = (total.window_s, total.compute_s, total.communication_s, total.exposed_s)
    assert us == pytest.approx((10e-6, 6e-6, 4e-6, 3e-6))
    assert trace.steps.op_names == ("dot.1",)
    gpu = {"gpu_device_name": "H100", "compute_cap_major": 9, "compute_cap_minor": 0, "memory_size": 80 * 10**9}
    assert trace.facts.hardware == gpu
    assert trace.facts.kernels == {0: 2, 1: 2}


def test_thunks_outside_of_their_module_get_that_of_their_neighbours(tmp_path):
    inside, apart = (read_nsys(TraceFile(made(apart=a).write(tmp_path / "x.sqlite"), {0: 0})) for a in (False, True))
    assert set(apart.labels) == {*inside.labels, *(each for each in apart.labels if not each.module)}
    labels, of = inside.devices[0].label.tolist(), apart.devices[0].label.tolist()
    assert [inside.labels[i] for i in labels[:-1]] == [apart.labels[i] for i in of[:-1]]
    assert inside.devices[0].run[:-1].tolist() == apart.devices[0].run[:-1].tolist() == [-1, 0, 0, 1, 1, 2]
    # Nothing comes after it.
    assert (apart.labels[of[-1]].op, apart.labels[of[-1]].module) == ("all-gather-start.2", "")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET rowid = rowid * 1000000000",
        "UPDATE NVTX_EVENTS SET end = end + 0.5",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 'none, 7' WHERE graphNodeId IS NULL",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = printf('%.*c', 1000000, 'x') WHERE rowid < 4",
        """INSERT INTO NVTX_EVENTS (rowid, start, eventType, globalTid, text)
           VALUES (-5, 9223372036854775807, 59, 0, 'Thunk:#hlo_op=dot.1#')""",
    ],
)
def test_odd_cells_and_rows_without_dense_ids_change_nothing(change, tmp_path):
    usual, odd = made(), made()
    odd.database.executescript(change)
    paths = [e.write(tmp_path / f"{name}.sqlite") for name, e in (("usual", usual), ("odd", odd))]
    found = [read_nsys(TraceFile(path, {0: 0, 1: 1})) for path in paths]
    named = [{d: [f.labels[i] for i in ops.label.tolist()] for d, ops in f.devices.items()} for f in found]
    assert named[0] == named[1]
    totals = [[s.total for s in read(path)[1].sweeps] for path in paths]
    assert totals[0] == totals[1]


def test_each_launch_gets_the_innermost_range_around_it_on_its_thread():
    chance, ranges = random.Random(36), []

    def nest(thread, start, end, depth):
        ranges.append((thread, start, end))
        while depth and end - start > 4:
            inner = chance.randint(start + 1, end - 2)
            start = chance.randint(inner + 1, end - 1)
            nest(thread, inner, start, depth - 1)

    threads = [chance.randrange(1 << 56) for _ in range(40)]
    for thread in threads:
        for begin in range(0, 2000, 500):
            nest(thread, begin + chance.randrange(50), begin + 400, 4)
    chance.shuffle(ranges)
    thread, start, end = (np.array(column) for column in zip(*ranges))
    asked = [(chance.choice([*threads, 5]), chance.randint(-1, 2100)) for _ in range(3000)]
    found = Ranges(start, end, thread, start).innermost(*(np.array(column) for column in zip(*asked)))
    for (on, time), row in zip(asked, found.tolist()):
        around = [r for r in ranges if r[0] == on and r[1] <= time <= r[2]]
        innermost = max((r[1] for r in around), default=None)
        assert (start[row] if row >= 0 else None) == innermost
        assert row < 0 or end[row] >= time


def test_launching_threads_name_the_global_ids_of_devices(tmp_path):
    export = made()
    for process, device in ((30, 5), (31, 4)):
        name = f"XlaLauncher:#global={device},local=0,process={process},slice=0#"
        export.add("ThreadNames", {"nameId": export.string(name), "globalTid": process << 24 | 99})
    _, trace = read(export.write(tmp_path / "x.sqlite"))
    assert {s.device for s in trace.steps.steps} == {4, 5}


def test_kernels_in_graphs_are_told_by_their_nodes_and_what_nsys_warns_of_is_said(tmp_path):
    export = made()
    thread = 30 << 24 | 30
    export.range("Thunk:#hlo_op=command_buffer.3#", 1850, 1890, thread)
    export.kernel("loop_add_fusion", 19_200, 19_900, 0, at=1860, thread=thread, node=5 << 32 | 1)
    text = "12 CUDA events were dropped."
    export.add("DIAGNOSTIC_EVENT", {"timestamp": 1, "severity": WARNING, "text": text})
    path = export.write(tmp_path / "x.sqlite")
    found = read_nsys(TraceFile(path, {0: 0}))
    (label,) = (i for i, label in enumerate(found.labels) if label.graph)
    assert (found.labels[label].op, found.labels[label].name) == ("command_buffer.3", "loop_add_fusion")
    assert found.devices[0].nodes[found.devices[0].label == label].tolist() == [[15, 5 << 32 | 1]]
    notes = {note.code: note for note in read(path)[1].notes}
    assert "12 events" in notes["dropped_events"].message
    assert text in notes["profiler_messages"].message


def test_columns_of_a_recent_nsys_read_as_those_of_an_older_one(tmp_path):
    old = parquet.read_table(MAXTEXT / "nvtx_gpu_proj_trace" / "trace.parquet")
    start = old["Projected Start"].to_numpy()
    names = {"RangeId": "Range ID", "ParentId": "Parent ID", "PID": "PID", "TID": "TID"}
    columns = {recent: old[name] for name, recent in names.items()}
    columns |= {"Start": start, "End": start + old["Projected Duration"].to_numpy()}
    columns["Text"] = pa.array([name.removeprefix("TSL:") for name in old["Name"].to_pylist()])
    folder = tmp_path / "nvtx_gpu_proj_trace"
    folder.mkdir()
    parquet.write_table(pa.table(columns), folder / "trace.parquet")
    (loose, recent), (_, older) = read(tmp_path), read(MAXTEXT)
    assert [s.total for s in recent.sweeps] == [s.total for s in older.sweeps]
    assert "neither the trace nor a file beside it" in next(n.message for n in loose.notes if n.code == "no_program")


def test_calls_of_nccl_outside_of_thunks_are_communication_and_reports_of_a_recipe_are_apart(tmp_path):
    old = parquet.read_table(MAXTEXT / "nvtx_gpu_proj_trace" / "trace.parquet").slice(0, 4000).to_pylist()
    ids = {row["RangeId"]: row for row in old}
    lost = next(row for row in old if "hlo_op=all-gather-start#" in row["Name"])
    lost |= {"Name": "NCCL:ncclGroupEnd", "ParentId": None}
    unknown = {**lost, "Name": "TSL:Thunk:#hlo_op=copy.1#", "TID": 1, "RangeId": max(ids) + 1}
    rows = [{**row, "Rank": rank} for rank in (0, 1) for row in [*old, unknown]]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "trace.parquet")
    found = read_nsys(TraceFile(tmp_path / "trace.parquet", dict(zip(range(8), range(8)))))
    assert sorted(found.devices) == list(range(8))
    seen = {found.labels[i] for of in found.devices.values() for i in of.label.tolist()}
    assert [(each.name, each.op) for each in seen if not each.module] == [("ncclGroupEnd", "")]
    assert is_communication("ncclGroupEnd")
    assert found.messages == ["2 ranges of XLA are on threads without a known GPU, and are left out."]
    one, other = found.devices[1], found.devices[5]
    assert (one.start_ps.tolist(), one.run.tolist()) == (other.start_ps.tolist(), other.run.tolist())


def test_folders_of_nsys_are_found(tmp_path):
    assert is_loose(MAXTEXT)
    assert [file.name[-5:] for file in find_traces(PAX)[0]] == ["proc0", "proc1", "proc2", "proc3"]
    for rank in (0, 1):
        folder = tmp_path / "job" / f"rank{rank}"
        folder.mkdir(parents=True)
        made().write(folder / "report.sqlite")
    loose = open_loose(tmp_path / "job")
    assert loose.hosts == {0: "report", 1: "report"}
    assert [len(file.devices) for file in loose.files] == [2, 2]
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "a.nsys-rep").write_bytes(b"QDSTRM")
    with pytest.raises(
        TraceError, match=r"holds 1 entries \(a.nsys-rep\).*\n.*\n.*nsys export --type sqlite a.nsys-rep"
    ):
        find_traces(tmp_path / "reports")
    with pytest.raises(TraceError, match=r"a report of Nsight Systems.*\n.*\n.*nsys export --type sqlite"):
        open_loose(tmp_path / "reports" / "a.nsys-rep")


def test_the_timeline_of_jax_is_read_from_the_trace_beside_it(tmp_path):
    shutil.copy(TRACES.parent / "synthetic_2gpu_3step.xplane.pb", tmp_path / "host.xplane.pb")
    timeline = tmp_path / "host.trace.json.gz"
    timeline.write_bytes(b"")
    assert find_traces(timeline) == ([tmp_path / "host.xplane.pb"], [])
    assert find_traces(tmp_path)[0] == [tmp_path / "host.xplane.pb"]
    (tmp_path / "perfetto_trace.json.gz").write_bytes(b"")
    assert find_traces(tmp_path / "perfetto_trace.json.gz")[0] == [tmp_path / "host.xplane.pb"]


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("rank0.pt.trace.json", "JSON: a timeline .* PyTorch's Kineto", "Holistic Trace Analysis"),
        ("plugins/profile/2026_01_01_00_00_00/host.trace.json.gz", "JSON: a timeline", r"the \*.xplane.pb beside it"),
        ("perfetto_trace.json.gz", "JSON: a timeline", r"the \*.xplane.pb beside it"),
        ("a.nsys-rep", "a report of Nsight Systems", "nsys export --type sqlite a.nsys-rep"),
        ("job.zip", "an archive, as nsys-jax writes it", "unpacking it"),
    ],
)
def test_a_folder_that_holds_other_formats_alone_says_what_they_are_and_where_to_go(name, what, hint, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_bytes(b"PK\3\4" if name == "job.zip" else b"never read")
    assert not is_loose(tmp_path)  # The command answers for a run folder.
    with pytest.raises(TraceError) as loose:
        find_traces(tmp_path)
    for error in (loose.value, CliRunner().invoke(app, ["profile", str(tmp_path)]).exception):
        words = " ".join(str(error).split())
        assert "trace (*.xplane.pb, *.sqlite of nsys, or trace.parquet of nsys-jax) in it" in words
        assert re.search(rf"{re.escape(Path(name).name)} is {what}.*{hint}", words)


def test_the_timeline_and_the_metrics_of_a_run_are_no_traces_of_other_formats(tmp_path):
    for name in ("report.json", "trace.json.gz", "metrics.jsonl"):
        (tmp_path / name).write_text('{"step": 1}')
    with pytest.raises(TraceError, match=r"holds 3 entries \(.*\)\.\n") as caught:
        profile_run(tmp_path)
    assert "meshkit train" in caught.value.hint


def test_a_timeline_is_told_by_its_first_bytes_without_being_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("meshkit.trace.xspace.Buffer.read", lambda path: pytest.fail("it was unpacked"))
    for name, pack in (("a.json", bytes), ("b.json.gz", gzip.compress), ("c.xplane.pb.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(b'\n{ "displayTimeUnit": "ns", "traceEvents": [' + b" " * 2**20))
        with pytest.raises(TraceError, match="this is JSON: a timeline"):
            open_loose(tmp_path / name)


def test_a_plane_whose_length_is_a_brace_is_no_json(tmp_path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(b"\x0a\x7b\x12\x79" + b'"' * 121)  # One plane of 123 bytes, the code of a brace.
    with pytest.raises(TraceError, match="no operation of a GPU"):
        open_loose(path)


def test_without_pyarrow_parquet_is_answered_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"pyarrow, which is not installed.*\n.*\n.*pip install 'meshkit\[nsys\]'"):
        open_loose(MAXTEXT)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("CREATE TABLE experiments (name TEXT)", r"no kernels of nsys \(no table .*KERNEL\); tables: experiments\."),
        ("CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT 1 AS start", "no kernels of nsys .* tables: none"),
        (SCHEMA, "nsys recorded no operation of a GPU"),
        (
            SCHEMA.replace("correlationId INTEGER, globalPid", "globalPid"),
            "has no column correlationId: .* another schema",
        ),
    ],
)
def test_other_databases_are_refused(schema, message, tmp_path):
    with pytest.raises(TraceError, match=message) as caught:
        open_loose(Export(schema).write(tmp_path / "x.sqlite"))
    assert caught.value.at == str(tmp_path / "x.sqlite")


def test_more_rows_than_a_file_has_room_for_are_refused(tmp_path):
    path = tmp_path / "x.sqlite"
    database = sqlite3.connect(path)
    database.executescript(SCHEMA.replace("NOT NULL", ""))
    database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start) VALUES (?)", [(0,)] * 10_000)
    database.commit()
    database.close()
    with pytest.raises(TraceError, match="KERNEL has more rows than this file has room for: it is damaged"):
        open_loose(path)


@pytest.mark.parametrize("kind", ["sqlite", "parquet"])
def test_damage_is_an_error_with_its_place_or_a_valid_reading(kind, tmp_path):
    path = made(range(20)).write(tmp_path / "x.sqlite")
    if kind == "parquet":
        old = parquet.read_table(PAX / "nvtx_gpu_proj_trace" / "trace.parquet" / "pax_fsdp4_4proc_proc0")
        parquet.write_table(old.slice(0, 300), path := tmp_path / "trace.parquet", compression="zstd")
    whole, seed = path.read_bytes(), random.Random(20261127)
    refused = 0
    for i in range(36):
        data = bytearray(whole[: seed.randrange(len(whole))] if i % 3 == 0 else whole)
        for _ in range(0 if i % 3 == 0 else 1 << seed.randrange(8)):
            data[seed.randrange(len(data))] = seed.randrange(256)
        path.write_bytes(data)
        with suppress(TraceError):
            read(path)
            continue
        refused += 1
    assert refused > 12


def test_parquet_of_others_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="not an nvtx_gpu_proj_trace of nsys: it has no column 'Name', but a"):
        open_loose(path)
    names = ("Projected Start", "Projected Duration", "RangeId", "ParentId", "PID", "TID")
    parquet.write_table(pa.table({"Name": ["train"], **{name: [1] for name in names}}), path)
    with pytest.raises(TraceError, match="has no ranges of XLA's thunks"):
        open_loose(path)
    parquet.write_table(pa.table({"Name": ["x"] * 10**6, **{name: [1] * 10**6 for name in names}}), path)
    with pytest.raises(TraceError, match="unpacks to more than any trace needs"):
        open_loose(path)
