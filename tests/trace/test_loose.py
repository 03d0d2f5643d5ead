"""Test traces without a run folder: where they are found, their program, and where its executions begin."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

from meshkit.errors import TraceError
from meshkit.report.measured import withhold_axes
from meshkit.report.summarize import summarize
from meshkit.timeline import sweep
from meshkit.trace.loose import find_traces, is_loose, open_loose
from meshkit.trace.operations import TraceFile, found_windows
from meshkit.trace.reader import read_trace
from tests.trace.trace_files import collective, gpu_op, plane_text, profile_traces, program, write_planes

DATA = Path(__file__).parent.parent / "data"
SYNTHETIC = DATA / "synthetic_2gpu_3step.xplane.pb"
GEMM = DATA / "traces" / "tracelens_jax08_gemm.xplane.pb"


def read(path):
    loose = open_loose(path)
    return loose, read_trace(loose.files, loose.program)


def test_kernels_alone_tell_collectives_by_their_kind():
    loose, trace = read(SYNTHETIC)
    assert (loose.program.module, loose.module) == ("jit_f", None)
    found = trace.sweeps[0]
    kinds = {c.collective: i for i, c in enumerate(trace.steps.collectives)}
    assert found.total.window_s == pytest.approx(150e-6)
    assert found.total.exposed_s == pytest.approx(50e-6)
    assert found.exposed_share_s[[kinds["all-gather"], kinds["all-reduce"]]] == pytest.approx([25e-6, 25e-6])
    assert [n.code for n in loose.notes] == ["steps_found", "no_program"]
    assert trace.facts.mapped_share == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "all-gather"),
        ("ncclSymkDevKernel_ReduceScatter_LD_Sum_f32", "reduce-scatter"),
        ("ncclDevKernel_SendRecv", "send-recv"),
        ("rcclGenericKernel", "unknown"),
        ("void stream_executor::gpu::AllReduceKernelImpl<float, (xla::ReductionKind)0>(float*)", "all-reduce"),
        ("_ZN15stream_executor3gpu30RaggedAllToAllDeviceKernelImplILl16EEEv11ncclDevComm", "ragged-all-to-all"),
        ("stream_executor::gpu::MultiGpuBarrierWithNcclKernelImpl<2>", "unknown"),
        ("multimem_all_reduce_kernel", "all-reduce"),
        ("void deep_ep::internode::dispatch<true, 4>(int4*)", "all-to-all"),
    ],
)
def test_kernels_of_libraries_are_communication_by_collective(tmp_path, name, kind):
    events = [event for t in (0, 100, 200) for event in (("gemm", t, t + 50, {}), (name, t + 40, t + 90, {}))]
    path = write_planes(tmp_path / "x.xplane.pb", plane_text("/device:GPU:0", events))
    loose, trace = read(path)
    assert "No kernel names its program" in loose.notes[0].message
    assert len(trace.steps.steps) == 2
    (mine,) = np.flatnonzero(trace.sweeps[0].count)
    assert trace.steps.collectives[mine].collective == kind
    assert sweep(trace.steps.steps[0], len(trace.steps.collectives)).total.exposed_s == pytest.approx(40e-6)


def test_copies_of_amd_are_copies(tmp_path):
    events = [
        e for t in (0, 100, 200) for e in (("gemm", t, t + 50, {}), ("__amd_rocclr_copyBuffer.kd", t + 60, t + 90, {}))
    ]
    path = write_planes(tmp_path / "x.xplane.pb", plane_text("/device:GPU:0", events))
    total = read(path)[1].sweeps[0].total
    assert (total.compute_s, total.other_s) == (pytest.approx(50e-6), pytest.approx(30e-6))


def test_collectives_that_cuda_graphs_hide_withhold_the_axes(tmp_path):
    seen, hidden = (collective(f"all-reduce.{i}", "all-reduce", "data") for i in (1, 2))
    events = []
    for t in (0, 100, 200):
        events += [gpu_op("fusion", t, t + 40), gpu_op(seen.name, t + 40, t + 50)]
        events.append(("a_kernel_without_a_name", t + 50, t + 90, {"cuda_graph_id": 7}))
    path = write_planes(tmp_path / "x.xplane.pb", plane_text("/device:GPU:0", events))
    known = program(seen, hidden, expected={seen.name: 1, hidden.name: 1})
    trace = read_trace([TraceFile(path, {0: 0})], known, rows=np.arange(3), num_steps=3)
    assert (trace.facts.mapped_share, trace.facts.hidden, trace.facts.believes_axes) == (1, [hidden.name], False)
    report = withhold_axes(summarize(trace.steps, source="profile", swept=trace), trace)
    assert "1 collectives of the program ran inside CUDA graphs" in report.warnings[0].message
    assert [row.time_s is None for row in report.communication] == [False, True]
    assert "so their time counts as compute" in next(n.message for n in trace.notes if n.code == "command_buffers")


def test_of_programs_of_one_name_the_one_with_the_most_time_is_the_step():
    loose, trace = read(GEMM)  # Eight programs are called jit_dot.
    assert (loose.program.module, loose.program.program_id) == ("jit_dot", 49)
    assert loose.read.schedule.fingerprint
    # jax's reader is independent of ours.
    plane = ProfileData.from_file(str(GEMM)).find_plane_with_name("/device:GPU:0")
    events = [(e.start_ns, e.end_ns, dict(e.stats).get("program_id")) for line in plane.lines for e in line.events]
    mine = sorted(begin for begin, _, program in events if program == 49)
    kernels = len(mine) // 3
    for i, (step, swept) in enumerate(zip(trace.steps.steps, trace.sweeps, strict=True)):
        window = mine[kernels * i], mine[kernels * (i + 1)]
        assert step.window[1] == pytest.approx((window[1] - window[0]) * 1e-9, rel=1e-6)
        busy = sum(max(0, min(end, window[1]) - max(begin, window[0])) for begin, end, _ in events)
        assert swept.total.compute_s + swept.total.other_s == pytest.approx(busy * 1e-9, rel=1e-6)
    assert [n.code for n in trace.notes] == []
    assert {s.device for s in trace.steps.steps} == {0}
    assert trace.facts.kernels_mapped_share > 0.99


def test_tensorflow_on_two_of_eight_v100s_has_no_step_and_no_verdict(tmp_path):
    path = DATA / "traces" / "tensorflow_v100x8.xplane.pb.gz"
    (tmp_path / "x.xplane.pb").write_bytes(gzip.decompress(path.read_bytes()))
    planes = ProfileData.from_file(str(tmp_path / "x.xplane.pb")).planes  # an independent reader
    trace, report = read(path)[1], profile_traces(path)
    busiest = {step.device: (step, swept) for step, swept in zip(trace.steps.steps, trace.sweeps) if step.device != 1}
    assert busiest.keys() == {4, 6}  # GPU 1 gets copies alone.
    for plane in planes:
        step, swept = busiest.get(int(plane.name[-1]), (None, None))
        events = [(e.start_ns, e.end_ns, e.name.startswith("Memcpy")) for line in plane.lines for e in line.events]
        if step is None:
            continue
        begin, until = min(a for a, *_ in events), max(b for _, b, _ in events)
        covered, reach = 0.0, begin
        for start, end in sorted((a, b) for a, b, copies in events if not copies):
            covered += max(0.0, end - max(start, reach))
            reach = max(reach, end)
        assert step.window[1] == pytest.approx((until - begin) * 1e-9, abs=1e-9)
        assert swept.total.compute_s == pytest.approx(covered * 1e-9, abs=1e-9)
        assert (len(step.compute), len(step.copies)) == (665, len(events) - 665)
    assert report.findings == ()
    assert report.verdict == (
        "No verdict: No period was found in the operations of GPU 4, so its whole trace, 119 ms, counts as one step."
    )
    assert [w.code for w in report.warnings][:2] == ["steps_found", "no_program"]


def test_streams_that_are_called_by_what_they_do_not_run_mislead_nobody(tmp_path):
    """The streams' labels give 3.17 s of exposed communication, but what ran gives 1.02 s (marin#8053, made small).

    NCCL's kernels run on the stream of the compute, next to matmuls on one that is called after NCCL.
    """
    reduce = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    events, streams = [], {"gemm": "Stream #38(NCCL)", reduce: "Stream #7(Compute)", "fusion": "Stream #7(Compute)"}
    for step in range(4):
        at = 10e6 * step  # Times are in us.
        events.append(("fusion", at, at + 4e6, {}))
        events.append((reduce, at + 4e6, at + 7.17e6, {}))  # It takes 3.17 s.
        events.append(("gemm", at + 5.02e6, at + 10e6, {}))  # It starts 1.02 s after the collective.
    path = write_planes(tmp_path / "x.xplane.pb", plane_text("/device:GPU:0", events, streams))
    total = read(path)[1].sweeps[0].total
    assert total.communication_s == pytest.approx(3.17)
    assert total.exposed_s == pytest.approx(1.02)
    assert total.overlapped_s == pytest.approx(2.15)
    assert total.compute_s == pytest.approx(8.98)


def test_folders_as_jax_lays_them_out(tmp_path):
    runs = [tmp_path / "plugins" / "profile" / name for name in ("2026_01_01_00_00_00", "2026_01_02_00_00_00")]
    for run in runs:
        run.mkdir(parents=True)
        shutil.copy(SYNTHETIC, run / "host.xplane.pb")
    (runs[1] / "host2.xplane.pb.gz").write_bytes(gzip.compress(SYNTHETIC.read_bytes()))
    (runs[1] / "host.xplane.pb.gz").write_bytes(b"a packed copy, which is not looked at")
    for folder in (tmp_path, tmp_path / "plugins", tmp_path / "plugins" / "profile"):
        assert is_loose(folder)
        files, others = find_traces(folder)
        assert [f.name for f in files] == ["host.xplane.pb", "host2.xplane.pb.gz"]
        assert others == runs[:1]
    loose, trace = read(tmp_path)
    assert {s.device for s in trace.steps.steps} == {0, 1, 2, 3}  # Both files call their devices 0 and 1.
    assert dict(loose.hosts) == {0: "host", 1: "host2"}
    codes = [n.code for n in loose.notes]
    assert codes == ["steps_found", "no_program", "assumed_order", "other_profiles"]


def session(folder, name, trace, host="host"):
    """Return the folder of a session that jax would have left below a folder."""
    made = folder / "plugins" / "profile" / name
    made.mkdir(parents=True, exist_ok=True)
    shutil.copy(trace, made / f"{host}.xplane.pb")
    return made


def test_traces_below_the_folder_of_a_run_are_found(tmp_path):
    """MaxText's RUN/tensorboard is found from RUN and from the folder of its runs."""
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "0" / "default").mkdir(parents=True)
    older, newer = (session(run / "tensorboard", f"2026_01_0{day}_00_00_00", SYNTHETIC) for day in (1, 2))
    for folder in (tmp_path, tmp_path / "runs", run, run / "tensorboard"):
        assert is_loose(folder)
        assert find_traces(folder) == ([newer / "host.xplane.pb"], [older])
    assert "This is the newest profile, 2026_01_02_00_00_00; 1 others" in open_loose(run).notes[-1].message
    with pytest.raises(TraceError, match=r"no trace .* below; it holds 1 entries \(0\)"):
        open_loose(run / "checkpoints")


def test_hosts_of_one_profile_are_put_together_by_time_and_program(tmp_path):
    newest = session(tmp_path / "a", "2026_01_02_00_00_09", SYNTHETIC)
    beside = session(tmp_path / "b", "2026_01_02_00_00_07", SYNTHETIC)
    earlier = [session(tmp_path / host, "2026_01_02_00_00_01", SYNTHETIC) for host in ("a", "b")]
    session(tmp_path / "a", "2026_01_02_00_00_08", SYNTHETIC, host="host2")
    files, others = find_traces(tmp_path)
    assert [f.parent.name[-2:] for f in files] == ["09", "08", "07"]
    assert (files[0].parent, files[2].parent) == (newest, beside)
    assert others == earlier
    message = next(n.message for n in open_loose(tmp_path).notes if n.code == "assumed_order")
    assert "of 3 sessions that began within a minute" in message


def test_a_program_that_is_whole_in_one_session_is_not_put_together_with_another_job(tmp_path):
    session(tmp_path / "a", "2026_01_02_00_00_00", GEMM)
    session(tmp_path / "b", "2026_01_02_00_00_01", GEMM)
    loose = open_loose(tmp_path)
    assert [f.path.parts[-5] for f in loose.files] == ["b"]
    assert [n.code for n in loose.notes] == ["steps_found", "other_profiles"]


def test_a_run_folder_is_not_loose(tmp_path):
    run = tmp_path / "runs" / "mine"
    session(run / "trace", "p0", SYNTHETIC)
    assert is_loose(run)  # Nothing was recorded beside it.
    (run / "trace" / "capture-p0.json").write_text("{}")
    for path in (run, run / "trace", tmp_path / "runs", run / "report.json", run / "nowhere"):
        assert not is_loose(path)


def test_a_packed_trace_reads_as_the_plain_one(tmp_path):
    path = tmp_path / "x.xplane.pb.gz"
    path.write_bytes(gzip.compress(SYNTHETIC.read_bytes()))
    assert [s.total for s in read(path)[1].sweeps] == [s.total for s in read(SYNTHETIC)[1].sweeps]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the trace is empty \(0 bytes\)"),
        (b"not a protobuf at all", "not a profiler trace, or is cut short"),
        (SYNTHETIC.read_bytes()[:-5], "not a profiler trace, or is cut short"),
        (b'{"traceEvents": []}', r"this is JSON: a timeline .*, and meshkit reads XSpace"),
        (b"SQLite format 3\0" + bytes(100), "this SQLite file is damaged: file is not a database"),
        (b"PAR1" + bytes(100), "this Parquet file is damaged: "),
        (b"PK\3\4" + bytes(100), "this is an archive, as nsys-jax writes it"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        open_loose(path)


def test_json_that_is_no_file_of_a_run_is_a_trace_of_another_format(tmp_path):
    for name, loose in (("rank0.json", True), ("report.json", False)):
        (tmp_path / name).write_bytes(b'{"schemaVersion": 1, "traceEvents": []}')
        assert is_loose(tmp_path / name) == loose
    with pytest.raises(TraceError, match=r"this is JSON: a timeline .* of PyTorch's Kineto"):
        open_loose(tmp_path / "rank0.json")


def test_errors_say_what_is_missing(tmp_path):
    with pytest.raises(TraceError, match="there is no such trace"):
        open_loose(tmp_path / "x.xplane.pb")
    with pytest.raises(TraceError, match=r"this folder has no trace \(.*\) in it"):
        open_loose(tmp_path)
    (tmp_path / "x.xplane.pb.gz").write_bytes(b"nothing packed")
    with pytest.raises(TraceError, match="cannot be unpacked: it is not gzip data"):
        open_loose(tmp_path)
    (tmp_path / "x.xplane.pb.gz").write_bytes(gzip.compress(bytes(128 * 2**20)))
    with pytest.raises(TraceError, match=r"cannot be unpacked: it unpacks to more than 64 MiB"):
        open_loose(tmp_path)
    tpu = write_planes(tmp_path / "t.xplane.pb", plane_text("/device:TPU:0", [gpu_op("fusion", 0, 10)]))
    with pytest.raises(TraceError, match="a trace of TPUs, which meshkit does not read"):
        open_loose(tpu)
    host = write_planes(tmp_path / "h.xplane.pb", plane_text("/host:CPU", [("python", 0, 10, {})]))
    with pytest.raises(TraceError, match="no operation of a GPU or of XLA:CPU; 1 planes: /host:CPU"):
        open_loose(host)


def test_operations_without_a_duration_and_names_that_are_no_text_are_no_crash(tmp_path):
    path = write_planes(tmp_path / "a.xplane.pb", plane_text("/device:GPU:0", [gpu_op("fusion", 5, 5)]))
    assert read(path)[0].program.module == "jit_f"
    loop = write_planes(tmp_path / "b.xplane.pb", plane_text("/device:GPU:0", [gpu_op("while.3", 0, 10)]))
    with pytest.raises(TraceError, match="no operation of a GPU"):
        open_loose(loop)
    path = tmp_path / "c.xplane.pb"
    path.write_bytes(GEMM.read_bytes().replace(b"custom-call.1", b"custom-call\xf8\xf9"))
    loose, _ = read(path)
    assert [n.code for n in loose.notes] in (["steps_found"], ["steps_found", "no_program"])


def test_one_damaged_trace_of_several_is_said(tmp_path):
    shutil.copy(SYNTHETIC, tmp_path / "a.xplane.pb")
    (tmp_path / "b.xplane.pb").write_bytes(SYNTHETIC.read_bytes()[:-5])
    loose, trace = read(tmp_path)
    assert {s.device for s in trace.steps.steps} == {0, 1}
    assert "1 of 2 traces cannot be used; number 1: this file" in " ".join(n.message for n in loose.notes)


def windows(counts, *, first=0, last=None, once=()):
    """Return windows found in executions of 100 us with these counts of ops, from the events `first` to `last`."""
    events = []
    for execution in range(10):
        at = 100.0 * execution
        for op, times in enumerate(counts):
            for i in range(times):
                events.append((at + 10 * op + i, op))
    events = sorted(events)[first:last]
    start = np.array([t for t, _ in events])
    known = np.isin(np.arange(len(counts)), once)
    return found_windows(start, start + 0.5, np.array([op for _, op in events]), known)


@pytest.mark.parametrize("once", [(), (0, 1, 2, 4)])
@pytest.mark.parametrize(("first", "last"), [(0, None), (2, None), (0, -2), (2, -3), (4, None)])
def test_executions_are_found_in_traces_that_begin_and_end_inside_of_one(first, last, once):
    found = windows([1, 1, 1, 4, 1], first=first, last=last, once=once)
    assert 8 <= len(found) <= 9
    assert [b - a for a, b in found] == [100.0] * len(found)


def test_of_two_executions_of_a_known_program_the_first_is_a_step():
    assert windows([1, 1, 1, 4, 1], last=16, once=(0, 1, 2, 4)) == [(0.0, 100.0)]
    assert windows([1, 1, 1, 4, 1], last=8, once=(0, 1, 2, 4)) == [(0.0, 40.5)]


def test_two_captured_steps_give_one_as_long_as_their_record_says():
    # Its program is beside it.
    trace = Path(__file__).parents[1] / "data" / "traces" / "h100_debug" / "vm.xplane.pb.gz"
    loose = open_loose(trace)
    (swept,) = read_trace(loose.files, loose.program).sweeps
    assert swept.total.window_s == pytest.approx(3153.003e-6, abs=1e-9)
    assert swept.total.compute_s == pytest.approx(465.934e-6, abs=1e-9)


def test_loops_of_one_execution_are_not_steps():
    start = np.arange(14.0)
    op = np.array([0, 1, *[2, 3, 4] * 3, 5, 6, 7])
    assert found_windows(start, start + 1, op, np.zeros(8, bool)) == []


@pytest.mark.parametrize("executions", [1, 2])
def test_a_trace_without_a_period_gets_no_verdict_but_the_reason(executions, tmp_path):
    events = [
        gpu_op(f"fusion.{i}", 1000 * (6 * k + i), 1000 * (6 * k + i) + 50) for k in range(executions) for i in range(6)
    ]
    path = write_planes(tmp_path / "x.xplane.pb", plane_text("/device:GPU:0", events))
    report = profile_traces(path)
    notes = [w.message for w in report.warnings if w.code == "no_steps"]
    if executions == 1:  # A single execution is a step, as it is to `mk.live`.
        assert report.verdict.startswith("94.1 % of the step of 5.05 ms is idle.")
        assert not notes
        return
    assert report.findings == ()
    assert report.verdict == (
        "No verdict: No period was found in the operations of GPU 0, so its whole trace, 11.1 ms, counts as one step."
    )
    (note,) = notes
    assert note.startswith("No period was found in the operations of devices 0: the whole trace counts as one step.")
