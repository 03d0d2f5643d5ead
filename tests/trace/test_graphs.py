"""Test that kernels inside CUDA graphs get their instructions back, in traces of an H100 and in small ones."""

import gzip
import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from jax.profiler import ProfileData
from typer.testing import CliRunner

from meshkit.cli import app
from meshkit.hlo.instructions import kind_of_kernel, read_instructions
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.simulate import step_pricer
from meshkit.report.folder import read_report
from meshkit.report.summarize import UNMAPPED, kernels_part
from meshkit.report.views.report import write_html
from meshkit.report.views.words import training_text
from meshkit.timeline import sweep
from meshkit.trace.captured import open_capture
from meshkit.trace.live import Watcher
from meshkit.trace.measured import kernel_runs, kernel_seconds, tensor_share, write_calibration
from meshkit.trace.operations import GraphNode
from meshkit.trace.reader import read_trace
from meshkit.verbs.profile.block import ProfileCapture
from meshkit.verbs.profile.profiler import measure_run
from tests.trace.h100 import run_folder
from tests.trace.trace_files import collective, profile_traces, program, write_trace


def raw_events(run):
    """Return (start ps, end ps, name, stats) of what ran on the GPU, ordered by time and read by jax."""
    found = []
    for plane in ProfileData.from_file(str(next(run.rglob("*.xplane.pb")))).planes:
        if plane.name.startswith("/device:GPU"):
            for event in (e for line in plane.lines for e in line.events):
                start, length = round(event.start_ns * 1000), round(event.duration_ns * 1000)
                found.append((start, start + length, event.name, dict(event.stats)))
    return sorted(found, key=lambda event: event[0])


def union_ps(spans, window):
    """Return the covered picoseconds of a window, as an integer."""
    total, reach = 0, window[0]
    for start, end in sorted((max(s, window[0]), min(e, window[1])) for s, e in spans):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total


def in_ps(seconds):
    return round(seconds * 1e12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the run folder and the measurement of each trace that is kept."""
    folders = {name: run_folder(tmp_path_factory.mktemp(name), name) for name in ("h100_debug", "h100_llama_1b")}
    return {name: (folder, measure_run(folder)) for name, folder in folders.items()}


@pytest.mark.filterwarnings("ignore:builtin type")
def test_a_plain_sweep_of_an_h100s_trace_gives_the_same_picoseconds(runs):
    run, measured = runs["h100_debug"]
    events = raw_events(run)
    first = [start for start, _, _, stats in events if stats.get("hlo_op") == "command_buffer_1"]
    launches = [a for i, a in enumerate(first) if i == 0 or a - first[i - 1] > 1_000_000_000]
    window = (launches[0], launches[1])

    def spans(wanted):
        return [(start, end) for start, end, name, stats in events if wanted(name, stats.get("hlo_op"))]

    def copies(name, op):  # These are slices of stacked arrays in the loops' bodies, and what crosses the host link.
        return name.lower().startswith("memcpy") and op in ("command_buffer_21", "command_buffer_115", None)

    compute_ps = union_ps(spans(lambda name, op: not copies(name, op)), window)
    busy_ps = union_ps(spans(lambda name, op: True), window)
    step = measured.report.step
    assert len(events) == 599
    assert (in_ps(step.time_s), in_ps(step.compute_s)) == (window[1] - window[0], compute_ps)
    assert (in_ps(step.other_s), in_ps(step.idle_s)) == (busy_ps - compute_ps, window[1] - window[0] - busy_ps)
    assert (in_ps(step.time_s), compute_ps, busy_ps) == (3_153_003_000, 465_934_000, 552_042_000)


@pytest.mark.parametrize("name", ["h100_debug", "h100_llama_1b"])
def test_every_kernel_of_a_graph_gets_its_instruction(runs, name):
    captured, trace = runs[name][1].captured, runs[name][1].trace
    assert (trace.facts.kernels_mapped_share, trace.facts.graph_s, trace.notes) == (1.0, 0.0, ())
    # The program says how often each runs, so an instruction that was mistaken for another would show.
    runs, nodes = captured.schedule.known_runs(), {n.name: n for n in captured.program.graph_nodes}
    seen = dict(zip(trace.timeline.op_names, trace.kernels.count.tolist()))
    compiled = {op: n for op, n in seen.items() if n and not nodes[op].library and not nodes[op].copies}
    assert len(compiled) > 80
    assert compiled == {op: runs[op] for op in compiled}
    assert {op for op in captured.program.kernels if runs.get(op)} == {op for op, n in seen.items() if n}


@pytest.mark.filterwarnings("ignore:builtin type")
def test_classes_of_a_real_training_are_those_of_its_kernels_names(runs):
    run, report = runs["h100_llama_1b"][0], runs["h100_llama_1b"][1].report
    kinds = {c.kind: c for c in report.kernels.classes}
    assert set(kinds) == {"matmul", "attention", "elementwise", "reduction", "data movement", "gather and scatter"}
    assert sum(c.time_s for c in kinds.values()) == pytest.approx(report.step.compute_s, rel=1e-12)
    events = raw_events(run)
    opens = [start for start, _, name, _ in events if name == "wrapped_convert"]
    named, memsets = Counter(), 0
    for start, end, name, _ in events:
        if opens[0] <= start < opens[-1]:
            named[kind_of_kernel(name)] += end - start
            memsets += end - start if name.startswith("Memset") else 0
    for kind in ("matmul", "attention"):  # The memsets of their workspaces are a thousandth.
        busy_ps = in_ps(kinds[kind].busy_s * report.window.steps)
        assert named[kind] < busy_ps < named[kind] + memsets < 1.01 * busy_ps
    attention = {op.name: op for op in kinds["attention"].ops}
    assert {name.rstrip(".0123456789") for name in attention} == {
        "dot_product_attention_fwd",
        "dot_product_attention_bwd",
    }
    assert all(op.line.startswith("models/attention.py:") for op in attention.values())


def test_the_process_beside_a_training_reads_a_gpus_trace_in_which_nobody_waits(runs, tmp_path):
    """Live captures do this; to the watcher these four steps are one, as it takes a trace for one step."""
    run, measured = runs["h100_llama_1b"]
    record, program = open_capture(run).record, tmp_path / "program.hlo.pb"
    program.write_bytes(gzip.decompress((run / "trace/program-p0.hlo.pb.gz").read_bytes()))
    mesh, devices = record.mesh, {d.ordinal: d.id for d in record.devices}
    watcher = Watcher(str(program), mesh.axes, mesh.shape, mesh.device_ids, devices)
    table = json.loads(json.dumps(watcher.table(str(run / "trace"))))
    assert (table["devices"], table["names"]) == ([0], [])
    assert table["compute_s"] / 4 == pytest.approx(measured.report.step.compute_s, rel=0.01)
    assert table["step_s"] / 4 == pytest.approx(measured.report.step.time_s, rel=0.01)
    assert watcher.judge([table]) == {"line": {"exposed_share": 0.0}, "late": None}


def test_a_library_calls_key_has_no_workspace(runs):
    known = read_instructions(runs["h100_llama_1b"][1].captured.module)
    assert known["custom-call.6"].key.startswith("matmul|bf16[32768,8192]|")
    assert known["dot_product_attention_fwd.0"].key.startswith("attention|(bf16[8,32,4096,64],f32[8,32,4096])|")


def test_a_plan_with_the_rates_of_a_real_training_gives_its_tensor_cores_their_seconds_again(runs, tmp_path):
    captured, trace = runs["h100_llama_1b"][1].captured, runs["h100_llama_1b"][1].trace
    schedule = captured.schedule
    file = write_calibration(tmp_path / "calibration.toml", captured, trace)
    calibrated = captured.cluster.model_copy(update={"calibration": str(file)})
    pricer = step_pricer(schedule, calibrated, Assumptions(contention=False, slowest=False))
    times, counts = kernel_seconds(trace, schedule), kernel_runs(trace, schedule)
    # These are ms of matmuls, and of attention by its power.
    busy = (310.8 + 0.72 * (0.79 * 45.3 + 0.65 * 69.5)) / 551.4
    assert tensor_share(trace, schedule, calibrated.gpu) == pytest.approx(busy, abs=0.005)
    found = {}
    # These are cuDNN's times, of heads of 64, for 16 layers.
    for kind, took_s in (("forward", 45.3e-3), ("backward", 69.5e-3)):
        priced = measured = 0.0
        for i in (i for body in schedule.computations.values() for i in body):
            if i.cost and i.cost.attention_flops and i.cost.attention_backward is (kind == "backward"):
                priced += counts[i.name] * pricer.work(i).arithmetic_s
                measured += counts[i.name] * times[i.name]
        assert measured == pytest.approx(took_s, rel=2e-3)
        found[kind] = priced / measured
    # The plan gives the tensor cores the share of the step that they had, and with it the clock.
    assert found == pytest.approx({"forward": 1.0, "backward": 1.0}, rel=0.01)


def test_hfu_of_a_real_training_is_what_its_layers_and_its_head_multiply(runs, tmp_path):
    step = runs["h100_llama_1b"][1].report.step
    width, tokens, length, layers = 2048, 8 * 4096, 4096, 16
    weights = layers * (2 * width**2 + 2 * width * 512 + 3 * width * 8192) + width * 128_256
    # Attention is causal; it runs forward, forward again, and backward for 2.5 times as much.
    attention = layers * 4.5 * 4 * tokens * length / 2 * width
    assert "MFU (HFU 51.8 %)" in write_html(runs["h100_llama_1b"][1].report, tmp_path / "x.html").read_text()
    assert step.hfu * step.time_s * 989.4e12 == pytest.approx(6 * weights * tokens + attention, rel=1e-3)


def test_a_bare_trace_has_classes_by_name_and_beside_its_program_instructions(runs, tmp_path):
    trace = tmp_path / "vm.xplane.pb"
    trace.write_bytes(next(runs["h100_llama_1b"][0].rglob("*.xplane.pb")).read_bytes())
    bare = profile_traces(trace)
    (tmp_path / "p.hlo.pb.gz").write_bytes((runs["h100_llama_1b"][0] / "trace/program-p0.hlo.pb.gz").read_bytes())
    beside, whole = profile_traces(trace), runs["h100_llama_1b"][1].report
    assert [w.code for w in bare.warnings] == ["steps_found", "no_program"]
    assert [w.code for w in beside.warnings] == ["steps_found", "gpu_of_trace"]
    assert beside.kernels == whole.kernels
    by_name, known = ({c.kind: c.time_s for c in r.kernels.classes} for r in (bare, whole))
    assert by_name.keys() == known.keys()
    assert by_name["matmul"] == pytest.approx(known["matmul"], rel=0.002)  # The memsets of workspaces are missing.


def test_a_run_without_a_plan_is_priced_by_its_captured_program(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["h100_llama_1b"][0], folder)
    inside = ProfileCapture(folder).report.predicted  # of `mk.profile`
    shown = CliRunner().invoke(app, ["profile", str(folder)]).stdout
    assert inside == read_report(folder).predicted
    assert inside.step.predicted_s == pytest.approx(inside.step.measured_s, rel=0.05)
    assert {"matmul", "attention"} <= {kind.kind for kind in inside.kernels}
    assert re.search(r"step time +\d+ ms +\d+ ms", shown)
    assert not (folder / "plan.json").exists()  # the next capture may be of another program


def test_what_is_said_of_a_trace_with_graphs(runs):
    debug, llama = (measured.report for _, measured in runs.values())
    found = {f.code: f for f in (*debug.findings, *llama.findings)}
    assert "graphs" not in found["host_bound"].hint  # The step used graphs.
    assert "on the GPU" in found["exposed_copies"].message
    assert "remat" in found["exposed_copies"].hint
    assert [w.code for w in debug.warnings] == ["one_step"]
    assert llama.warnings == ()
    assert any(f.code == "recomputation" for f in llama.findings)
    assert training_text(llama) == "13.8 s for 25 steps: less than 0.01 GPU hours"


@pytest.mark.parametrize(
    ("before_s", "added_s"),
    [((), None), ((0.19,), None), ((0.19, 0.003, 0.005, 0.003), 0.003153003 - 0.003), ((1,) * 5, 0.0)],
)
def test_what_a_capture_adds_is_told_from_steps_after_the_first(tmp_path, before_s, added_s):
    run = run_folder(tmp_path, "h100_debug")
    file, first = run / "trace/capture-p0.json", len(before_s) + 1
    file.write_text(file.read_text().replace('"first_step": 3', f'"first_step": {first}'))
    lines = [json.dumps({"step": i, "step_time_s": s}) for i, s in enumerate((*before_s, 0.05, 0.05), 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert measure_run(run).report.quality.overhead_s == pytest.approx(added_s)


def graph_events(kernels, *, launches=3, buffer="command_buffer_3", step_us=100):
    """Yield launches of one graph, with a kernel every 10 us, each after a kernel of its own."""
    stats = {"hlo_op": buffer, "hlo_module": "jit_f", "cuda_graph_id": 4}
    for launch in range(launches):
        t = launch * step_us
        yield ("fusion", t, t + 5, {"hlo_op": "fusion", "hlo_module": "jit_f"})
        for i, kernel in enumerate(kernels):
            node = {"cuda_graph_node_id": (4 << 32) + i, "correlation_id": launch + 1}
            yield (kernel, t + 10 * i + 5, t + 10 * i + 15, stats | node)


def node(name, work=None, *, library="", collective="", copies=False):
    kernel = "" if library or collective else name.replace(".", "_")
    return GraphNode(name, kernel, work or name, library, collective, copies=copies, fills=False)


GATHERS = [collective(f"all-gather-start.{i}", "all-gather", axis) for i, axis in enumerate(("data", "model"))]
NODES = (
    *(node("fusion"), node("loop_add_fusion.1", "add"), node("all-gather-start.0", collective="all-gather")),
    *(node("loop_add_fusion.2", "add"), node("custom-call.7", library="matmul")),
    *(node("all-gather-start.1", collective="all-gather"), node("custom-call.8", library="matmul")),
)


def read(tmp_path, kernels, **known):
    file = write_trace(tmp_path / "x", "/device:GPU:0", list(graph_events(kernels)))
    return read_trace([file], program(*GATHERS, graph_nodes=NODES, **known))


def test_collectives_and_library_kernels_of_a_graph_are_known_by_their_order(tmp_path):
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    kernels = ["loop_add_fusion_1", gather, "loop_add_fusion_1", "Memset 0", "nvjet_sm90_a", gather, "nvjet_sm90_a"]
    trace = read(tmp_path, kernels, expected={c.name: 1 for c in GATHERS})
    seen = dict(zip(trace.timeline.op_names, trace.kernels.count.tolist()))
    assert {op: n for op, n in seen.items() if n} == {
        "fusion": 1, "loop_add_fusion.1": 1, "loop_add_fusion.2": 1, "custom-call.7": 1, "custom-call.8": 1,
    }  # fmt: skip
    assert sweep(trace.timeline.steps[0], 2).count.tolist() == [1, 1, 0]
    assert (trace.facts.mapped_share, trace.facts.believes_axes, trace.notes) == (1.0, True, ())


def test_a_kernel_that_adds_up_a_split_matmul_belongs_to_the_one_before(tmp_path):
    nodes = (node("fusion"), node("custom-call.7", library="matmul"), node("custom-call.8", library="matmul"))
    kernels = ["nvjet_sm90_a", "nvjet_sm90_b_splitK", "void cublasLt::splitKreduce_kernel<32, 16, int>"]
    file = write_trace(tmp_path / "x", "/device:GPU:0", list(graph_events(kernels)))
    trace = read_trace([file], program(graph_nodes=nodes))
    seen = dict(zip(trace.timeline.op_names, trace.kernels.count.tolist()))
    assert (seen["custom-call.7"], seen["custom-call.8"]) == (1, 2)


def test_collectives_that_are_more_than_the_programs_withhold_the_axes(tmp_path):
    trace = read(tmp_path, ["ncclDevKernel_AllGather_RING_LL"] * 2 + ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL"])
    assert sweep(trace.timeline.steps[0], 2).count.tolist() == [1, 1, 1]
    assert not trace.facts.believes_axes
    assert "command_buffers" in [n.code for n in trace.notes]


def test_a_kernel_without_an_instruction_has_the_class_of_its_name(tmp_path):
    kernels = ["loop_add_fusion_1", "loop_subtract_fusion_9", "some_kernel"]
    trace = read(tmp_path, kernels)
    assert trace.facts.graph_s == pytest.approx(2 * 2 * 10e-6)  # There are two steps.
    part = kernels_part(trace.timeline.op_names, trace.kernels, dict.fromkeys(["fusion"]))
    assert {op.name for c in part.classes for op in c.ops if c.kind == UNMAPPED} == {"some_kernel"}
    by_name = kernels_part(trace.timeline.op_names, trace.kernels, {})
    assert {c.kind for c in by_name.classes} == {"elementwise", "other kernels"}


def test_nodes_that_cannot_be_told_apart_are_known_by_name_alone(tmp_path):
    events = [(name, a, b, {k: v for k, v in stats.items() if k != "cuda_graph_node_id"})
              for name, a, b, stats in graph_events(["loop_add_fusion_2", "nvjet_sm90_a"])]  # fmt: skip
    trace = read_trace([write_trace(tmp_path / "x", "/device:GPU:0", events)], program(graph_nodes=NODES))
    assert set(trace.timeline.op_names) == {"fusion", "loop_add_fusion.2", "nvjet_sm90_a"}


def test_a_copy_on_the_device_that_an_instruction_is_computes(tmp_path):
    known = {"hlo_module": "jit_f", "memcpy_details": "x"}
    events = [
        ("fusion", 0, 10, {"hlo_op": "fusion", "hlo_module": "jit_f"}),
        ("MemcpyD2D", 10, 30, known | {"hlo_op": "copy.3"}),
        ("MemcpyD2D", 30, 60, known | {"hlo_op": "slice-start"}),
        ("MemcpyD2H", 60, 100, known | {"hlo_op": "copy.3"}),
    ]
    trace = read_trace([write_trace(tmp_path / "x", "/device:GPU:0", events)], program(kernels={"copy.3"}))
    total = sweep(trace.timeline.steps[0], 0).total
    assert (total.compute_s, total.other_s) == pytest.approx((30e-6, 70e-6))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("loop_convert_fusion_12", "elementwise"),
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", "matmul"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void*)", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("sm80_xmma_conv_fprop_f16", "convolution"),
        ("input_reduce_fusion_3", "reduction"),
        ("memcpy32_post", "data movement"),
        ("void foo<int>()", "other kernels"),
    ],
)
def test_the_name_of_a_kernel_tells_its_kind(kernel, kind):
    assert kind_of_kernel(kernel) == kind


def test_an_order_too_long_to_compare_falls_back_to_names(monkeypatch, tmp_path):
    monkeypatch.setattr("meshkit.trace.graphs.MOST_CELLS", 1)
    trace = read(tmp_path, ["loop_add_fusion_1", "loop_add_fusion_1"])
    assert np.array(trace.kernels.count)[list(trace.timeline.op_names).index("loop_add_fusion.1")] == 2
