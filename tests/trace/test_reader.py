"""Test how traces become device steps, in a GPU trace worked out by hand and in small ones with one trap each."""

from pathlib import Path

import numpy as np
import pytest

from meshkit.errors import TraceError
from meshkit.timeline import sweep
from meshkit.trace.operations import TracedProgram, TraceFile
from meshkit.trace.reader import read_trace, unusual
from tests.trace.trace_files import collective, gpu_op, plane_text, program, write_planes, write_trace

DATA = Path(__file__).parent.parent / "data"


ALL_GATHER = collective("all-gather-start.1", "all-gather", "data")
ALL_REDUCE = collective("all-reduce-start.1", "all-reduce", "model")


def read_synthetic(collectives, devices=None, **kwargs):
    file = TraceFile(DATA / "synthetic_2gpu_3step.xplane.pb", devices or {0: 0, 1: 1})
    return read_trace([file], program(*collectives), **kwargs)


def microseconds(value):
    return pytest.approx(value * 1e-6, rel=1e-9)


@pytest.mark.parametrize("num_steps", [None, 3])
def test_synthetic_gpu_trace_gives_the_hand_computed_numbers(num_steps):
    trace = read_synthetic([ALL_GATHER, ALL_REDUCE], num_steps=num_steps, first_step=10)
    assert trace.notes == ()
    assert [(s.device, s.step) for s in trace.timeline.steps] == [(0, 10), (0, 11), (1, 10), (1, 11)]
    for step in trace.timeline.steps:
        late = 5 * step.device  # GPU 1 joins its collectives 5 us later.
        found = sweep(step, 2)
        assert found.total.window_s == microseconds(150)
        assert found.total.compute_s == microseconds(65)
        assert found.total.communication_s == microseconds(80 - late)
        assert found.total.overlapped_s == microseconds(30 - late)
        assert found.total.exposed_s == microseconds(50)
        assert found.total.idle_s == microseconds(35)
        # 70-80 is shared; the all-gather alone is exposed at 50-70 (75 on GPU 1), the all-reduce alone at 80-100.
        assert found.sole_exposed_s[:2] == pytest.approx([(20 + late) * 1e-6, 20e-6])
        assert found.exposed_share_s.sum() == microseconds(50)
    assert sweep(trace.timeline.steps[0], 2).exposed_share_s[:2] == pytest.approx([25e-6, 25e-6])


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1959, 141.6, 126.7, 126.5, 126.6], {0: "warm-up", 1: "warm-up"}),  # These are ms of Pax on A100s.
        ([100, 101, 99, 100, 180, 100], {4: "outlier"}),
        ([100, 102, 98, 101, 99], {}),
        ([103, 95, 101, 99], {}),  # The others differ by more.
        ([500, 100], {}),
        ([500, 400, 100, 100], {0: "warm-up", 1: "warm-up"}),
        ([100, 20, 100, 20, 100, 20], {}),  # These windows are not steps.
        ([130, 120, 110, 100], {}),  # Steps get faster and faster, so the usual time is unknown.
    ],
)
def test_warm_up_and_outliers_are_told_from_the_usual_steps(times, expected):
    assert unusual(dict(enumerate(times))) == expected


def test_steps_of_executions_that_make_several_are_numbered_and_chosen():
    trace = read_synthetic([ALL_GATHER, ALL_REDUCE], first_step=5, steps_per_execution=4, chosen=range(6, 10))
    assert {(s.device, s.step) for s in trace.steps.steps} == {(0, 9), (1, 9)}
    assert [(out.step.step, out.why) for out in trace.left_out] == [(5, "not chosen")] * 2
    assert [n.code for n in trace.notes] == ["steps_left_out"]
    with pytest.raises(TraceError, match="no step is chosen of the 2"):
        read_synthetic([ALL_GATHER], chosen=range(9, 12))


def test_nccl_kernels_of_unknown_instructions_are_unmapped_communication():
    trace = read_synthetic([ALL_GATHER])
    found = sweep(trace.timeline.steps[0], 1)
    assert found.count.tolist() == [1, 1]
    assert found.share_s[-1] == microseconds(25)


def test_only_the_listed_devices_are_read_under_their_global_ids():
    trace = read_synthetic([ALL_GATHER, ALL_REDUCE], devices={1: 17})
    assert {s.device for s in trace.timeline.steps} == {17}


def test_a_trace_of_another_program_is_refused():
    with pytest.raises(TraceError, match=r"no operation of the program 'jit_g'.*programs in it: jit_f"):
        read_trace([TraceFile(DATA / "synthetic_2gpu_3step.xplane.pb", {0: 0})], TracedProgram("jit_g"))


@pytest.mark.parametrize("content", [b"not a protobuf at all", b"\x0a\xff\xff\xff\xff\x0f"])
def test_garbage_is_refused(tmp_path, content):
    file = tmp_path / "x.xplane.pb"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=r"not a profiler trace|no operation of the program"):
        read_trace([TraceFile(file, {0: 0})], program())


def cpu_op(op, start, end, run=1, **stats):
    stats = {"_pt": 1, "_p": int(start * 1000), "run_id": run, "device_ordinal": 0} | stats
    return (op, start, end, {"hlo_op": op, "hlo_module": "jit_f"} | stats)


def cpu_end(op, started, at):
    return (f"end: {op}", at, at, {"_ct": 1, "_c": int(started * 1000)})


def read_one(file, collectives=(), **known):
    trace = read_trace([file], program(*collectives, **known))
    assert len(trace.timeline.steps) == 1
    return trace, trace.timeline.steps[0]


def test_a_loop_is_not_compute(tmp_path):
    events = [cpu_op("while.3", 0, 100), cpu_op("fusion", 0, 10), cpu_op("all-gather-start.1", 10, 100)]
    _, step = read_one(write_trace(tmp_path / "x", "/host:CPU", events), [ALL_GATHER])
    assert sweep(step, 1).total.exposed_s == microseconds(90)


def test_a_loop_of_any_name_is_not_compute_where_the_program_says_so(tmp_path):
    events = [cpu_op("layers", 0, 100), cpu_op("fusion", 0, 10), cpu_op("all-gather-start.1", 10, 100)]
    file = write_trace(tmp_path / "x", "/host:CPU", events)
    _, step = read_one(file, [ALL_GATHER], containers={"layers"})
    assert sweep(step, 1).total.compute_s == microseconds(10)


def test_work_handed_to_a_thread_pool_ends_at_its_marker(tmp_path):
    # The thunk's own event is 1 us long, but the pool worked for 50.
    events = [cpu_op("dot.1", 0, 1), cpu_end("dot.1", 0, 50), cpu_op("add", 60, 61), cpu_end("add", 60, 60.5)]
    _, step = read_one(write_trace(tmp_path / "x", "/host:CPU", events))
    assert sweep(step, 0).total.compute_s == microseconds(50.5)


def test_executions_are_cut_by_run_id_where_there_is_one(tmp_path):
    events = [cpu_op("add", t, t + 4, run=run) for t, run in ((0, -7), (10, -6), (30, -5))]
    file = write_trace(tmp_path / "x", "/host:CPU", events)
    trace = read_trace([file], program())
    assert [s.window[1] for s in trace.timeline.steps] == pytest.approx([10e-6, 20e-6])


def test_copies_are_neither_compute_nor_idle(tmp_path):
    events = [gpu_op("fusion", 0, 10), ("MemcpyD2D", 5, 20, {"memcpy_details": "x"}), gpu_op("fusion.2", 30, 40)]
    _, step = read_one(write_trace(tmp_path / "x", "/device:GPU:0", events))
    total = sweep(step, 0).total
    assert (total.compute_s, total.other_s, total.idle_s) == (microseconds(20), microseconds(10), microseconds(10))


def test_a_copy_that_carries_out_a_collective_is_communication(tmp_path):
    permute = collective("collective-permute-start.1", "collective-permute", "data")
    events = [gpu_op("fusion", 0, 10), gpu_op(permute.name, 10, 30, name="MemcpyP2P", memcpy_details="x")]
    _, step = read_one(write_trace(tmp_path / "x", "/device:GPU:0", events), [permute])
    assert sweep(step, 1).share_s[0] == microseconds(20)


def test_cuda_graphs_are_detected(tmp_path):
    events = [
        gpu_op("fusion", 0, 10),
        ("ncclDevKernel_AllReduce", 10, 30, {"cuda_graph_id": 5}),
        ("gemm", 30, 40, {"cuda_graph_id": 5}),
    ]
    file = write_trace(tmp_path / "x", "/device:GPU:0", [*events, gpu_op("fusion.9", 50, 51)])
    trace, step = read_one(file)
    note = trace.notes[0]
    assert (note.code, note.seconds) == ("command_buffers", microseconds(30))
    assert "--xla_gpu_enable_command_buffer=" in note.message
    assert sweep(step, 0).count.tolist() == [1]


def test_kernels_that_compute_and_communicate_at_once_are_both(tmp_path):
    events = [gpu_op("fusion", 0, 10), gpu_op("custom-call.7", 10, 40, name="cutlass_gemm_all_reduce_kernel")]
    file = write_trace(tmp_path / "x", "/device:GPU:0", [*events, gpu_op("fusion.9", 50, 60)])
    trace, step = read_one(file)
    total = sweep(step, 0).total
    assert (total.compute_s, total.communication_s, total.exposed_s) == (microseconds(50), microseconds(30), 0)
    assert trace.facts.fused_s == microseconds(30)
    assert [n.code for n in trace.notes] == ["fused_kernels"]


def test_seconds_that_are_told_are_of_the_usual_steps(tmp_path):
    """The first of five steps takes nine times as long, and what overlaps in it is not counted."""
    fused = {"name": "cutlass_gemm_all_reduce_kernel"}
    events, now = [], 0
    for longer in (9, 1, 1, 1, 1, 1):  # What follows the last step is not in it.
        events += [gpu_op("fusion", now, now + 10 * longer)]
        events += [gpu_op("custom-call.7", now + 10 * longer, now + 40 * longer, **fused)]
        now += 50 * longer
    trace = read_trace([write_trace(tmp_path / "x", "/device:GPU:0", events)], program())
    assert [out.why for out in trace.left_out] == ["warm-up"]
    facts = trace.facts
    usual = len(trace.steps.steps)
    assert (facts.device_steps, facts.fused_s) == (usual, pytest.approx(usual * 30e-6))
    assert facts.compute_s == pytest.approx(usual * 40e-6)
    assert trace.notes[-1].seconds == microseconds(30)


def test_an_instruction_of_the_program_can_be_fused(tmp_path):
    events = [gpu_op("fusion", 0, 10), gpu_op(ALL_GATHER.name, 10, 40), gpu_op("fusion.9", 50, 60)]
    file = write_trace(tmp_path / "x", "/device:GPU:0", events)
    _, step = read_one(file, [ALL_GATHER], fused={ALL_GATHER.name})
    found = sweep(step, 1)
    assert (found.total.overlapped_s, found.share_s[0]) == (microseconds(30), microseconds(30))


def test_a_trace_that_is_all_graphs_names_the_flag(tmp_path):
    events = [("ncclDevKernel_AllReduce", 0, 10, {"cuda_graph_id": 5}), ("gemm", 10, 20, {"cuda_graph_id": 5})]
    file = write_trace(tmp_path / "x", "/device:GPU:0", events)
    with pytest.raises(TraceError, match=r"inside CUDA graphs.*(?s:.)*--xla_gpu_enable_command_buffer="):
        read_one(file)


def three_executions(lost=()):
    """Return three executions of a program that gathers twice, without the events in `lost`."""
    events = []
    for i in range(3):
        t = 100 * i
        events += [gpu_op("fusion", t, t + 10), gpu_op(ALL_GATHER.name, t + 10, t + 30)]
        events += [gpu_op(ALL_GATHER.name, t + 40, t + 60), gpu_op("fusion.2", t + 60, t + 90)]
    return [event for i, event in enumerate(events) if i not in lost]


@pytest.mark.parametrize(
    ("lost", "codes"),
    [
        ((), []),
        ((2,), ["collective_counts"]),
        ((4, 5, 6, 7), ["executions"]),
    ],
)
def test_events_that_are_missing_are_noticed(tmp_path, lost, codes):
    file = write_trace(tmp_path / "x", "/device:GPU:0", three_executions(lost))
    trace = read_trace(
        [file],
        program(ALL_GATHER, expected={ALL_GATHER.name: 2}),
        num_steps=3,
    )
    assert [n.code for n in trace.notes] == codes


def test_a_device_without_operations_is_said(tmp_path):
    file = write_trace(tmp_path / "x", "/device:GPU:0", three_executions())
    trace = read_trace([TraceFile(file.path, {0: 0, 1: 1})], program())
    assert [n.message for n in trace.notes] == ["Devices 1 have no operation of the program in their trace."]


def test_one_damaged_file_of_several_does_not_hide_the_others(tmp_path):
    good = write_trace(tmp_path / "x", "/device:GPU:0", three_executions())
    bad = tmp_path / "y"
    bad.write_bytes(good.path.read_bytes()[:-5])
    trace = read_trace([good, TraceFile(bad, {0: 1}, 1)], program())
    assert {s.device for s in trace.steps.steps} == {0}
    assert list(trace.facts.damaged) == [1]
    assert [n.code for n in trace.notes] == ["damaged_traces"]


def test_executions_are_matched_by_run_id_where_one_device_lost_the_first(tmp_path):
    def events(device, runs):
        return [cpu_op("add", 10 * r, 10 * r + 4, run=r, device_ordinal=device, _pt=device + 1) for r in runs]

    path = write_planes(tmp_path / "x", plane_text("/host:CPU", events(0, (5, 6, 7, 8)) + events(1, (6, 7, 8))))
    trace = read_trace([TraceFile(path, {0: 0, 1: 1})], program(), first_step=20)
    assert [(s.device, s.step) for s in trace.steps.steps] == [(0, 21), (0, 22), (1, 21), (1, 22)]
    assert [n.code for n in trace.notes] == ["partial_steps"]


def test_seconds_of_operations_add_up_to_compute(tmp_path):
    # There are two streams: the second half of `a` runs beside `b`.
    a, b = gpu_op("a", 0, 20), gpu_op("b", 10, 20)
    trace, _ = read_one(write_trace(tmp_path / "x", "/device:GPU:0", [a, b, gpu_op("c", 30, 40)]))
    by_name = dict(zip(trace.steps.op_names, trace.kernels.time_s))
    assert by_name == pytest.approx({"a": 15e-6, "b": 5e-6, "c": 10e-6})
    assert trace.kernels.time_s.sum() == pytest.approx(trace.sweeps[0].total.compute_s)


def test_what_is_not_kept_for_drawing_is_measured_all_the_same(monkeypatch, tmp_path):
    file = write_trace(tmp_path / "x", "/device:GPU:0", three_executions())
    whole = read_trace([file], program(ALL_GATHER))
    monkeypatch.setattr("meshkit.trace.reader.KEPT_SPANS", 4)
    some = read_trace([file], program(ALL_GATHER))
    assert [s.total for s in some.sweeps] == [s.total for s in whole.sweeps]
    assert (len(whole.timeline.steps), len(some.timeline.steps)) == (2, 1)


def test_programs_of_the_same_name_are_noticed(tmp_path):
    events = [gpu_op("fusion", 0, 10, program_id=1), gpu_op("fusion", 20, 30, program_id=2)]
    trace = read_trace([write_trace(tmp_path / "x", "/device:GPU:0", events)], program())
    assert [n.code for n in trace.notes] == ["namesakes"]


def test_waiting_is_unknown_where_communication_is_unmapped(tmp_path):
    def events(late):
        nccl = ("ncclDevKernel_SendRecv", 60, 70, {})
        return [gpu_op("fusion", 0, 10), gpu_op(ALL_GATHER.name, 10 + late, 50), nccl, gpu_op("fusion.2", 80, 90)]

    planes = [plane_text(f"/device:GPU:{d}", events(20 * d)) for d in range(2)]
    trace = read_trace(
        [TraceFile(write_planes(tmp_path / "x", *planes), {0: 0, 1: 1})],
        program(ALL_GATHER, groups={ALL_GATHER.name: np.array([[0, 1]])}),
    )
    for found in trace.sweeps:
        assert found.transfer_s[0] == microseconds(20)
        assert np.isnan(found.transfer_s[1])


def test_files_without_a_process_are_processes_of_their_own(tmp_path):
    files = [write_trace(tmp_path / str(i), "/device:GPU:0", three_executions()) for i in range(2)]
    files = [TraceFile(f.path, {0: i}) for i, f in enumerate(files)]
    trace = read_trace(
        files,
        program(ALL_GATHER, groups={ALL_GATHER.name: np.array([[0, 1]])}),
    )
    assert trace.skew.clocks.count == 2
