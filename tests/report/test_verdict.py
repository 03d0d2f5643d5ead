"""Test that the first finding names the cause planted in a made-up trace, and that nothing else is named."""

from dataclasses import replace

import numpy as np
import pytest

from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.instructions import InstructionInfo
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.predict.network import collective_time_s
from meshkit.report.measured import quality_part
from meshkit.report.schema import HistoryPart
from meshkit.report.summarize import group_rows, summarize
from meshkit.report.verdict import Known, add_findings
from meshkit.trace.operations import TraceFile
from meshkit.trace.reader import read_trace
from meshkit.verbs.profile.profiler import find_stragglers
from tests.trace.trace_files import clock_text, collective, gpu_op, plane_text, program, write_planes

H100 = Cluster.load("dgx_h100")
STEPS = 4  # The last step is not measured.
BUSY = [("fusion.1", 0, 600), ("dot.2", 600, 1000)]  # This is a step of a millisecond that only computes.
GATHER = replace(collective("all-gather-start.1", "all-gather", "fsdp", payload_bytes=4 * 2**20), num_groups=1)
ACROSS = replace(
    collective("all-reduce-start.2", "all-reduce", "data", group_size=2, payload_bytes=8 * 2**20),
    link="infiniband",
    gpus_per_domain=1,
)
PAIR = [[0, 1]]


def ms(x):
    return pytest.approx(1e-3 * x)


def write(folder, devices, *, processes=None, clocks=None):
    """Write a file per process; `devices` is device -> the operations (name, start, end) of a step, or of each step."""
    files = []
    processes = processes or dict.fromkeys(devices, 0)
    for process in sorted(set(processes.values())):
        mine = [d for d in devices if processes[d] == process]
        texts = []
        for ordinal, device in enumerate(mine):
            steps = devices[device] if isinstance(devices[device][0], list) else [devices[device]] * STEPS
            begin, events = 0, []
            for ops in steps:
                for name, start, end in (op[:3] for op in ops):
                    if name.startswith("Memcpy"):
                        events.append((name, begin + start, begin + end, {"memcpy_details": "kind_src:pinned"}))
                    elif name != "end":
                        events.append(gpu_op(name, begin + start, begin + end))
                begin += max(end for _, _, end in ops)
            texts.append(plane_text(f"/device:GPU:{ordinal}", events))
        if clocks:
            texts.append(clock_text(clocks[process]))
        path = write_planes(folder / f"p{process}.pb", *texts)
        files.append(TraceFile(path, dict(enumerate(mine)), process))
    return files


def report_of(folder, devices, *, collectives=(), groups=PAIR, quality=None, history=None, at=None, cpu=False, **known):
    """Return the report of a made-up trace with its findings."""
    files = write(folder, devices, **(at or {}))
    of = program(*collectives, groups={c.name: np.array(groups) for c in collectives} if groups else {})
    trace = read_trace(files, of, rows=group_rows(of.distinct_collectives)[0], num_steps=STEPS)
    trace.facts.cpu = cpu
    cluster, instructions = known.get("cluster"), known.get("instructions") or {}
    report = summarize(trace.steps, source="profile", instructions=instructions, swept=trace)
    report = report.model_copy(
        update={
            "quality": quality_part(trace).model_copy(update=quality or {}),
            "stragglers": find_stragglers(trace, {f.process: f"n{f.process}" for f in files}),
        }
    )
    assert cluster is None or isinstance(cluster, Cluster)
    return add_findings(report, Known(trace, of, **known), history)


def scheduled(*instructions):
    return Schedule("jit_f", {"main": tuple(instructions)}, "main", "made")


def started(c, *between, waits=True):
    """Return a collective as XLA schedules it: started, work between, waited for."""
    begin = Instruction(c.name, "all-gather", "start", collective=c)
    done = Instruction(f"{c.name}-done", "all-gather-done", "done", starts=c.name)
    return [begin, *between, done] if waits else [replace(begin, kind="collective")]


WORK = Instruction("dot.2", "dot", "kernel")


def test_a_combined_collective_is_named_by_what_its_arrays_are_for(tmp_path):
    causes = {"models/llama.py:88 attention/dot": 6200, "models/llama.py:116 mlp/dot": 3300, "x": 400, "y": 100}
    known = {GATHER.name: replace(info("jit(f)/mlp/dot"), arrays=24, causes=causes)}
    report = report_of(tmp_path, exposed(), collectives=[GATHER], instructions=known)
    (op,) = report.communication[0].ops
    assert op.causes == {cause: pytest.approx(n / 10_000 * op.payload_bytes) for cause, n in causes.items()}
    parts = "24 arrays: 62.0 % models/llama.py:88 attention/dot, 33.0 % models/llama.py:116 mlp/dot, 2 others"
    assert parts in report.findings[0].message
    assert parts.replace("2 others", "4.0 % x, 1 other") == op.combined_text()
    assert op.model_copy(update={"causes": {"x": 400.0}}).combined_text() == "x"


def exposed(c=GATHER, *, compute=600, until=1000):
    """Return work on both devices, then a collective that is exposed as a whole."""
    ops = [("fusion.1", 0, compute), (c.name, compute, until)]
    return {0: ops, 1: ops}


def late(device_1=(0, 800)):
    """Return operations in which device 0 waits in its collective for device 1."""
    end = [(GATHER.name, 800, 850), ("dot.2", 850, 1000)]
    return {
        0: [("fusion.1", 0, 500), (GATHER.name, 500, 850), end[1]],
        1: [("fusion.1", *device_1), *end],
    }


def info(source):
    return InstructionInfo("matmul", "matmul|x", source, "models/llama.py:116")


def model_us(c, payload=None):
    return 1e6 * collective_time_s(
        c.collective, payload_bytes=payload or c.payload_bytes, gpus_per_domain=c.gpus_per_domain,
        domains=c.group_size // c.gpus_per_domain, cluster=H100,
    )  # fmt: skip


def small(count=40, each=10):
    """Return many gathers of 64 KiB, one after another."""
    gathers = [
        replace(collective(f"all-gather-start.{i}", "all-gather", "fsdp", payload_bytes=2**16), key=f"k{i}")
        for i in range(count)
    ]
    ops = [("fusion.1", 0, 600), *((c.name, 600 + each * i, 600 + each * (i + 1)) for i, c in enumerate(gathers))]
    return {0: ops, 1: ops}, gathers


def planted():
    """Yield (code, a part of the message, devices, what else is known)."""
    yield "waiting_for_peers", "100.0 % of it for GPU 1", late(), {"collectives": [GATHER]}
    yield "waiting_for_peers", "GPU 1 (process 1 on n1). GPU 1 is 300 us a step behind", late(), {
        "collectives": [GATHER], "at": {"processes": {0: 0, 1: 1}, "clocks": {0: 10**18, 1: 10**18 + 48 * 10**7}},
    }  # fmt: skip
    yield (
        "waiting_for_peers",
        "GPU 1 is 300 us a step behind the usual one: 300 us idle between steps.",
        late((300, 800)),
        {"collectives": [GATHER]},
    )
    yield (
        "waiting_for_peers",
        "300 us in fusion.1 (800 us, usually 500 us).",
        late(),
        {"collectives": [GATHER], "groups": None},
    )
    yield "slow_link", "instead of the network model's", exposed(), {"collectives": [GATHER], "cluster": H100}
    yield "slow_link", "over data", exposed(ACROSS, compute=200), {"collectives": [ACROSS], "cluster": H100}
    devices, gathers = small()
    yield "small_collectives", "40 times a step", devices, {"collectives": gathers, "cluster": H100}
    large = replace(GATHER, name="all-gather-start.99", dtype="f32")
    devices = {d: [*ops[:1], (large.name, 500, 560), *ops[1:]] for d, ops in devices.items()}
    yield "small_collectives", "64.0 KiB on average", devices, {"collectives": [*gathers, large]}
    adjacent = scheduled(WORK, *started(GATHER))
    yield "serialized_by_xla", "right after its start", exposed(), {"collectives": [GATHER], "schedule": adjacent}
    blocking = scheduled(WORK, *started(GATHER, waits=False))
    yield "synchronous_collectives", "synchronous", exposed(), {"collectives": [GATHER], "schedule": blocking}
    yield "synchronous_collectives", "xla_gpu_disable_async_collectives = ALLGATHER", exposed(), {
        "collectives": [GATHER], "schedule": blocking, "options": {"xla_gpu_disable_async_collectives": "ALLGATHER"},
    }  # fmt: skip
    yield "exposed_communication", "exposed for 400 us", exposed(), {
        "collectives": [GATHER], "schedule": scheduled(*started(GATHER, WORK)),
    }  # fmt: skip
    gaps = [(f"fusion.{i}", 10 * i, 10 * i + 6) for i in range(100)] + [("end", 0, 1000)]
    yield "host_bound", "between kernels", {0: gaps, 1: gaps}, {}
    pause = [*BUSY, ("end", 0, 1400)]
    yield "host_bound", "400 us between steps", {0: pause, 1: pause}, {}
    fed = [*BUSY, ("MemcpyH2D", 1350, 1400), ("end", 0, 1400)]
    yield "input_wait", "350 us for its input", {0: fed, 1: fed}, {}
    history = HistoryPart(steps=(1, 2, 3), values={"data_wait_s": (3.5e-4, 3.6e-4, None)})
    yield "input_wait", "until the batch arrives", {0: pause, 1: pause}, {"history": history}
    again = {"dot.2": info("jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot_general")}
    yield "recomputation", "40.0 % of the compute", {0: BUSY, 1: BUSY}, {"instructions": again}
    clone = [("fusion.1", 0, 800), ("fusion.1.remat2", 800, 1000)]
    yield "recomputation", "200 us a step", {0: clone, 1: clone}, {}
    dot = replace(WORK, cost=Cost(matmul_flops={"bf16": 2e10}, bytes_accessed=1e6))
    yield "low_rate_kernels", "dot.2 (models/llama.py:116) takes", {0: BUSY, 1: BUSY}, {
        "schedule": scheduled(dot), "cluster": H100, "instructions": {"dot.2": info("jit(f)/dot_general")},
    }  # fmt: skip
    slow = [*BUSY[:1], ("dot.2", 600, 9000)]
    yield (
        "outlier_steps",
        "Step 1 takes 9.00 ms, the usual one 1.00 ms; most of the difference is compute",
        {d: [BUSY, slow, BUSY, BUSY] for d in (0, 1)},
        {},
    )
    stall = [*BUSY, ("end", 0, 5000)]
    yield "outlier_steps", "most of the difference is idle time", {d: [BUSY, stall, BUSY, BUSY] for d in (0, 1)}, {}
    yield "capture_overhead", "without a trace it takes 700 us", {0: BUSY, 1: BUSY}, {
        "quality": {"overhead_s": 3e-4}, "untraced_step_s": 7e-4,
    }  # fmt: skip
    copied = [*BUSY, ("MemcpyD2H", 1000, 1300)]
    yield "exposed_copies", "300 us a step", {0: copied, 1: copied}, {}


PLANTED = list(planted())


def test_there_are_enough_of_them():
    assert len(PLANTED) >= 20


@pytest.mark.parametrize(
    ("code", "says", "devices", "known"), PLANTED, ids=[f"{i}-{p[0]}" for i, p in enumerate(PLANTED)]
)
def test_the_first_finding_names_what_was_planted(code, says, devices, known, tmp_path):
    report = report_of(tmp_path, devices, **known)
    first = report.findings[0]
    assert (first.code, first.severity) == (code, "warning"), [f.message for f in report.findings]
    assert says in first.message
    assert first.message in report.verdict
    assert ("the step would take" in report.verdict) == (code not in ("capture_overhead", "outlier_steps"))
    assert first.hint
    assert first.evidence
    assert first.step_s is not None
    assert 0 < first.step_s <= report.step.time_s
    assert [f.seconds for f in report.findings] == sorted((f.seconds for f in report.findings), reverse=True)


def test_warm_up_and_outliers_are_in_no_number_but_their_own(tmp_path):
    slow = [("fusion.1", 0, 600), ("dot.2", 600, 1100)]
    stall = [*BUSY, ("end", 0, 5000)]
    devices = {device: [slow, BUSY, stall, BUSY] for device in (0, 1)}
    report = report_of(tmp_path, devices)
    assert (report.window.steps, report.step.time_s, report.spread.time_s.max) == (1, ms(1), ms(1))
    assert [(s.step, s.left_out) for s in report.per_step] == [(0, "warm-up"), (1, None), (2, "outlier")]
    assert report.per_step[2].time_s == ms(5)
    assert {k.name: k.busy_s for c in report.kernels.classes for k in c.ops} == {"fusion.1": ms(0.6), "dot.2": ms(0.4)}


@pytest.mark.parametrize("planted", PLANTED, ids=[f"{i}-{p[0]}" for i, p in enumerate(PLANTED)])
def test_a_finding_costs_what_the_step_without_it_is_shorter_by(planted, tmp_path):
    report = report_of(tmp_path, planted[2], **planted[3])
    for f in report.findings:
        if f.step_s is not None and f.code != "outlier_steps":  # Outliers are in no other number.
            assert f.seconds == pytest.approx(report.step.time_s - f.step_s), f.message


def test_what_mending_saves_nothing_is_no_finding(tmp_path):
    """Device 0 is alone in the all-gather for 300 us; if it were hidden, it would only wait for device 1 earlier."""
    last = [(ACROSS.name, 900, 1000)]
    devices = {
        0: [("fusion.1", 0, 400), (GATHER.name, 400, 700), ("dot.2", 700, 900), *last],
        1: [("fusion.1", 0, 700), (GATHER.name, 400, 700), ("dot.2", 700, 900), *last],
    }
    report = report_of(tmp_path, devices, collectives=[GATHER, ACROSS])
    # These are 15 % of the step.
    assert [row.exposed_s for row in report.communication] == pytest.approx([150e-6, 100e-6])
    assert [f.code for f in report.findings] == ["exposed_communication"]
    assert "over data is exposed for 100 us" in report.findings[0].message


def test_devices_that_are_late_in_turn_are_compared_from_one_collective_to_the_next(tmp_path):
    """Both have as much to do, one before the first collective and the other before the second."""
    ends = [(GATHER.name, 500, 600), (ACROSS.name, 900, 1000)]
    devices = {
        0: [("fusion.1", 0, 200), (GATHER.name, 200, 600), ("dot.2", 600, 900), ends[1]],
        1: [("fusion.1", 0, 500), ends[0], ("dot.2", 600, 700), (ACROSS.name, 700, 1000)],
    }
    report = report_of(tmp_path, devices, collectives=[GATHER, ACROSS])
    assert (report.findings[0].code, report.findings[0].step_s) == ("waiting_for_peers", pytest.approx(500e-6))
    assert report.findings[0].seconds == pytest.approx(500e-6)


def healthy():
    yield "compute alone", {0: BUSY, 1: BUSY}, {}
    hidden = [*BUSY, (GATHER.name, 100, 500)]
    yield "all hidden", {0: hidden, 1: hidden}, {"collectives": [GATHER]}
    little = [("fusion.1", 0, 980), (GATHER.name, 980, 1000)]
    yield "a little exposed", {0: little, 1: little}, {
        "collectives": [GATHER], "cluster": H100, "schedule": scheduled(WORK, *started(GATHER)),
    }  # fmt: skip
    uneven = {0: [("fusion.1", 0, 960), (GATHER.name, 960, 1000)], 1: [("fusion.1", 0, 980), (GATHER.name, 980, 1000)]}
    yield "devices that differ by little", uneven, {"collectives": [GATHER]}
    some = [("fusion.1", 0, 950), ("fusion.1.remat", 950, 970), ("MemcpyH2D", 980, 985), ("end", 0, 1000)]
    yield "a little of everything", {0: some, 1: some}, {"quality": {"overhead_s": 1e-5}, "untraced_step_s": 9.9e-4}


@pytest.mark.parametrize(("devices", "known"), [pytest.param(*rest, id=name) for name, *rest in healthy()])
def test_nothing_is_more_than_a_note_where_nothing_is_wrong(devices, known, tmp_path):
    report = report_of(tmp_path, devices, **known)
    assert [f for f in report.findings if f.severity != "note"] == []
    assert report.verdict.startswith("Nothing stands out in a step of 1.00 ms: ")


def test_the_verdict_says_where_the_step_goes_and_how_long_it_would_be(tmp_path):
    report = report_of(tmp_path, late(), collectives=[GATHER])
    assert report.verdict == (
        "20.0 % of the step of 1.00 ms is exposed communication. 75.0 % of the exposed communication, 150 us a step, "
        "is waiting for peers, 100.0 % of it for GPU 1 (process 0 on n0). GPU 1 is 300 us a step behind the usual one: "
        "300 us in fusion.1 (800 us, usually 500 us). If no GPU were slower than the median, the step would "
        "take 700 us."
    )


def test_virtual_devices_are_not_called_gpus(tmp_path):
    report = report_of(tmp_path, late(), collectives=[GATHER], cpu=True)
    assert "100.0 % of it for device 1 (" in report.verdict
    assert report.verdict.endswith(" If no device were slower than the median, the step would take 700 us.")
    assert "GPU" not in report.verdict
    assert report.findings[0].hint == "what else runs on its cores, or its share of the work"
    uneven = report_of(tmp_path, late(), collectives=[GATHER], groups=None, cpu=True)
    assert uneven.findings[0].hint == report.findings[0].hint


def test_virtual_devices_are_given_no_options_of_gpus(tmp_path):
    devices, gathers = small()
    gaps = [(f"fusion.{i}", 10 * i, 10 * i + 6) for i in range(100)] + [("end", 0, 1000)]
    for code, made, known in (("small_collectives", devices, {"collectives": gathers, "cluster": H100}),
                              ("host_bound", {0: gaps, 1: gaps}, {}),
                              ("exposed_communication", exposed(), {"collectives": [GATHER]})):  # fmt: skip
        on_gpus, on_cpus = (
            next(f.hint for f in report_of(tmp_path, made, cpu=cpu, **known).findings if f.code == code)
            for cpu in (False, True)
        )
        assert "xla_gpu" in on_gpus or "a faster link (`meshkit tune`)" in on_gpus
        assert not any(word in on_cpus for word in ("xla_gpu", "link", "meshkit tune"))


@pytest.mark.parametrize(
    ("dtype", "says"), [("f32", "one-hot matmul"), ("bf16", "one-hot matmul"), ("s32", "layout and precision")]
)
def test_a_scatter_add_of_floats_has_a_way_out_of_its_own(dtype, says, tmp_path):
    name = "input_scatter_fusion"
    slow = Instruction(name, "fusion", "kernel", cost=Cost(bytes_accessed=1e6))
    known = InstructionInfo(
        "gather and scatter", f"gather and scatter|{dtype}[32000,4096]|x", "jit(f)/scatter-add", None
    )
    ops = [("fusion.1", 0, 600), (name, 600, 1000)]
    report = report_of(tmp_path, {0: ops, 1: ops}, schedule=scheduled(slow), cluster=H100, instructions={name: known})
    assert says in next(f.hint for f in report.findings if f.code == "low_rate_kernels")


def test_what_if_replays_the_measured_timeline(tmp_path):
    hidden = report_of(tmp_path, exposed(), collectives=[GATHER]).findings[0]
    assert hidden.step_s == pytest.approx(600e-6)
    quick = report_of(tmp_path, exposed(), collectives=[GATHER], cluster=H100).findings[0]
    assert quick.step_s == pytest.approx((600 + model_us(GATHER)) * 1e-6)
    assert quick.seconds == pytest.approx((400 - model_us(GATHER)) * 1e-6)
    devices, gathers = small()
    combined = report_of(tmp_path, devices, collectives=gathers, cluster=H100).findings[0]
    assert combined.step_s == pytest.approx((600 + model_us(gathers[0], 40 * 2**16)) * 1e-6)


def test_exposed_waiting_is_apart_from_exposed_transfer_and_adds_up(tmp_path):
    under = {
        0: [("fusion.1", 0, 500), (GATHER.name, 500, 850), ("fusion.3", 600, 700), ("dot.2", 850, 1000)],
        1: [("fusion.1", 0, 800), (GATHER.name, 800, 850), ("fusion.3", 810, 820), ("dot.2", 850, 1000)],
    }
    (row,) = report_of(tmp_path, under, collectives=[GATHER]).communication
    assert row.exposed_wait_s == pytest.approx(100e-6)  # Device 0 waits for 300 us, 100 of them under fusion.3.
    assert row.exposed_s == pytest.approx((250 + 40) / 2 * 1e-6)
