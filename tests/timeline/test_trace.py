"""Traces -> device steps: a GPU trace with hand-computed numbers, and small ones written for one trap each."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from jax.profiler import ProfileData

from meshkit.errors import TraceError
from meshkit.timeline.spans import overlap, sweep
from meshkit.timeline.trace import TraceFile, read_trace
from meshkit.xla.collective import Collective

DATA = Path(__file__).parent.parent / "data"


def collective(name, kind, axis):
    return Collective(
        name=name,
        key=f"{kind}|{axis}",
        collective=kind,
        axes=(axis,),
        axes_complete=True,
        link="nvlink",
        fabric=None,
        dtype="bf16",
        group_size=2,
        num_groups=1,
        gpus_per_domain=2,
        payload_bytes=1024,
    )


ALL_GATHER = collective("all-gather-start.1", "all-gather", "data")
ALL_REDUCE = collective("all-reduce-start.1", "all-reduce", "model")


def read_synthetic(collectives, devices=None, **kwargs):
    file = TraceFile(DATA / "synthetic_2gpu_3step.xplane.pb", devices or {0: 0, 1: 1})
    return read_trace([file], module_names={"jit_f"}, collectives_by_op={c.name: c for c in collectives}, **kwargs)


def microseconds(value):
    return pytest.approx(value * 1e-6, rel=1e-9)


@pytest.mark.parametrize("num_steps", [None, 3])
def test_synthetic_gpu_trace_gives_the_hand_computed_numbers(num_steps):
    trace = read_synthetic([ALL_GATHER, ALL_REDUCE], num_steps=num_steps, first_step=10)
    assert trace.notes == ()
    assert [(s.device, s.step) for s in trace.timeline.steps] == [(0, 10), (0, 11), (1, 10), (1, 11)]
    for step in trace.timeline.steps:
        late = 5 * step.device  # GPU 1 joins its collectives 5 us later
        found = sweep(step, 2)
        assert found.total.window_s == microseconds(150)
        assert found.total.compute_s == microseconds(65)
        assert found.total.communication_s == microseconds(80 - late)
        assert found.total.overlapped_s == microseconds(30 - late)
        assert found.total.exposed_s == microseconds(50)
        assert found.total.idle_s == microseconds(35)
        # 70-80 is shared; exposed: all-gather alone 50-70 (75 on GPU 1), all-reduce alone 80-100
        assert found.sole_exposed_s[:2] == pytest.approx([(20 + late) * 1e-6, 20e-6])
        assert found.exposed_share_s.sum() == microseconds(50)
    assert sweep(trace.timeline.steps[0], 2).exposed_share_s[:2] == pytest.approx([25e-6, 25e-6])


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
        read_trace(
            [TraceFile(DATA / "synthetic_2gpu_3step.xplane.pb", {0: 0})], module_names={"jit_g"}, collectives_by_op={}
        )


@pytest.mark.parametrize("content", [b"not a protobuf at all", b"\x0a\xff\xff\xff\xff\x0f"])
def test_garbage_is_refused(tmp_path, content):
    file = tmp_path / "x.xplane.pb"
    file.write_bytes(content)
    with pytest.raises(TraceError, match=r"not a profiler trace|no operation of the program"):
        read_trace([TraceFile(file, {0: 0})], module_names={"jit_f"}, collectives_by_op={})


def write_trace(path, plane, events):
    """An XSpace with one plane; events are (name, start_us, end_us, stats)."""
    keys = sorted({k for *_, stats in events for k in stats})
    names = list(dict.fromkeys(name for name, *_ in events))
    text = []
    for name, start, end, stats in events:
        values = "".join(
            f"stats{{metadata_id:{keys.index(k) + 1} "
            + (f'str_value:"{v}"' if isinstance(v, str) else f"int64_value:{v}")
            + "}"
            for k, v in stats.items()
        )
        offset, duration = int(start * 1e6), int((end - start) * 1e6)
        text.append(f"events{{metadata_id:{names.index(name) + 1} offset_ps:{offset} duration_ps:{duration} {values}}}")
    line = "Stream #7(Kernel)" if "GPU" in plane else "thread"
    meta = "".join(f'event_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in enumerate(names, 1))
    meta += "".join(f'stat_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in enumerate(keys, 1))
    proto = f'planes{{id:1 name:"{plane}" lines{{id:1 name:"{line}" {"".join(text)}}} {meta}}}'
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(proto))
    return TraceFile(path, {0: 0})


def gpu_op(op, start, end, name=None, **stats):
    return (name or op, start, end, {"hlo_op": op, "hlo_module": "jit_f"} | stats)


def cpu_op(op, start, end, run=1, **stats):
    stats = {"_pt": 1, "_p": int(start * 1000), "run_id": run, "device_ordinal": 0} | stats
    return (op, start, end, {"hlo_op": op, "hlo_module": "jit_f"} | stats)


def cpu_end(op, started, at):
    return (f"end: {op}", at, at, {"_ct": 1, "_c": int(started * 1000)})


def read_one(file, collectives=(), **kwargs):
    trace = read_trace([file], module_names={"jit_f"}, collectives_by_op={c.name: c for c in collectives}, **kwargs)
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
    # the thunk's own event is 1 us long; the pool worked for 50
    events = [cpu_op("dot.1", 0, 1), cpu_end("dot.1", 0, 50), cpu_op("add", 60, 61), cpu_end("add", 60, 60.5)]
    _, step = read_one(write_trace(tmp_path / "x", "/host:CPU", events))
    assert sweep(step, 0).total.compute_s == microseconds(50.5)


def test_executions_are_cut_by_run_id_where_there_is_one(tmp_path):
    events = [cpu_op("add", t, t + 4, run=run) for t, run in ((0, -7), (10, -6), (30, -5))]
    file = write_trace(tmp_path / "x", "/host:CPU", events)
    trace = read_trace([file], module_names={"jit_f"}, collectives_by_op={})
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


def test_a100_execution_equals_the_published_numbers():
    with gzip.open(DATA / "a100_fsdp_gpu0_execution2.csv.gz", "rt") as f:
        rows = [(r["category"], float(r["start_ns"]) * 1e-9, float(r["end_ns"]) * 1e-9) for r in csv.DictReader(f)]
    spans = {kind: np.array([(a, b) for k, a, b in rows if k == kind]) for kind in ("compute", "communication")}
    window = (min(a for _, a, _ in rows), max(b for *_, b in rows))
    found = overlap(spans["compute"], spans["communication"], window)
    in_ms = [
        1e3 * getattr(found, f"{k}_s") for k in ("window", "compute", "communication", "overlapped", "exposed", "idle")
    ]
    assert in_ms == pytest.approx([127.31, 120.62, 7.80, 4.47, 3.33, 3.36], abs=0.006)  # the truth has two decimals
