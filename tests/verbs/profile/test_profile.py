"""Test capture and report of a small sharded program on eight CPU devices, in which every collective finds its axis."""

import gzip
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
import meshkit.trace.captured as captured_traces
import meshkit.verbs.profile.profiler as profiler
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError, TraceError
from meshkit.report.folder import feedback_part, read_report
from meshkit.report.measured import withhold_axes
from meshkit.report.summarize import check_invariants
from meshkit.step.program import StepFacts
from meshkit.trace.capture import Capture, CapturedStep, captured_memory, chosen_processes, program_bytes_of
from meshkit.trace.captured import read_records

DATA = Path(__file__).parents[2] / "data"

LAYERS, EMBED, MLP, BATCH = 3, 32, 64, 16


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def cluster():
    # There are two hosts of four, so that the outermost axis crosses domains.
    return Cluster.load({"name": "cpu_2x4", "gpu": "cpu", "hosts": 2, "gpus_per_host": 4, "scale_up": "shared_memory"})


@pytest.fixture(scope="module")
def step(mesh):
    """Return a compiled step with a scanned MLP, sharded over all three axes, and its arguments."""

    def put(shape, *spec):
        return jax.device_put(jnp.full(shape, 0.01), NamedSharding(mesh, PartitionSpec(*spec)))

    weights = (put((LAYERS, EMBED, MLP), None, "fsdp", "tensor"), put((LAYERS, MLP, EMBED), None, "tensor", "fsdp"))
    x = put((BATCH, EMBED), ("data", "fsdp"), None)

    def loss(weights, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w[0]) @ w[1], None), x, weights)
        return (x**2).mean()

    def train_step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), value

    compiled = jax.jit(train_step).lower(weights, x).compile()
    return compiled, weights, x


@pytest.fixture(scope="module")
def run(step, mesh, cluster, tmp_path_factory):
    """Return a run folder with steps 10 to 13 captured, the way the trainer does it."""
    folder = tmp_path_factory.mktemp("run")
    compiled, weights, x = step
    facts = StepFacts(model_flops=6.0e9, tokens=1024.0, training_steps=1000)
    capture = Capture(folder / "trace", CapturedStep(compiled, mesh, cluster, facts=facts), steps=(10, 13))
    for number in range(9, 16):
        capture.before(number, weights)
        weights, value = compiled(weights, x)
        capture.after(number, (weights, value))
    assert not capture.active
    return folder


@pytest.fixture(scope="module")
def report(run):
    return profiler.profile_run(run)


def test_a_profiled_run_holds_its_report(report, run):
    assert read_report(run) == report
    assert "measured step on 8 x cpu" in (run / "report.html").read_text()
    assert report.program.partitioner == "shardy"


def test_the_compiled_program_is_parsed_once(run, monkeypatch):
    parsed, real = [], captured_traces.Module
    monkeypatch.setattr(captured_traces, "Module", lambda m: parsed.append(m) or real(m))
    profiler.measure_run(run)
    assert len(parsed) == 1


def test_every_collective_is_on_its_axis(report):
    assert report.communication
    assert all(row.axes for row in report.communication)
    assert {axis for row in report.communication for axis in row.axes} == {"data", "fsdp", "tensor"}
    assert not [w for w in report.warnings if w.code == "unmapped_communication"]


def test_counts_include_loop_iterations(report, step):
    # A device runs the body of a loop (forward, backward) once per layer, and everything else once.
    text = step[0].as_text()
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    expected = 0
    for computation in text.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%([\w.\-]+) \(", computation)
        collectives = re.findall(
            r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", computation
        )
        expected += len(collectives) * (LAYERS if name and name[1] in bodies else 1)
    assert expected > 0
    assert sum(row.count for row in report.communication) == expected


def test_links_follow_the_cluster(report):
    for row in report.communication:
        assert row.link == ("infiniband" if "data" in row.axes else "nvlink")
        assert row.fabric == "shared_memory"
    assert [(a.axis, a.nvlink, a.infiniband) for a in report.mesh] == [("data", 1, 2), ("fsdp", 2, 1), ("tensor", 2, 1)]


def test_window_and_step(report):
    # Four steps were captured; what follows the last is not in the trace, so it is not counted.
    assert (report.window.steps, report.window.devices) == (3, 8)
    assert (report.window.processes_seen, report.window.processes_expected) == (1, 1)
    assert report.step.time_s > 0
    assert report.step.exposed_s > 0
    assert report.step.mfu is None  # A CPU has no peak.
    assert report.step.bubble_s is None  # A trace does not say which slots of a pipeline were masked.
    assert report.step.tokens_per_s_per_gpu == pytest.approx(1024 / report.step.time_s / 8)
    assert report.spread.time_s.worst_step in (10, 11, 12)
    assert report.training.hours == pytest.approx(report.step.time_s * 1000 / 3600)


def test_loops_are_not_compute(run):
    # A `while` event covers its body; if it were compute, no collective inside it would be exposed.
    timeline = profiler.measure_run(run).timeline
    assert not [name for name in timeline.op_names if name.startswith("while")]
    for device_step in timeline.steps:
        longest = np.diff(device_step.compute, axis=1).max()
        assert longest < 0.9 * (device_step.window[1] - device_step.window[0])


def test_invariants_hold_and_json_round_trips(report, tmp_path):
    check_invariants(report)
    assert read_report(report.write(tmp_path)) == report
    assert "NaN" not in report.to_json()


def test_profile_context_gives_the_same_kind_of_report(step, mesh, cluster, report, tmp_path):
    compiled, weights, x = step
    with mk.profile(tmp_path, program=compiled, mesh=mesh, cluster=cluster, tokens=1024) as capture:
        for _ in range(3):
            weights, _ = compiled(weights, x)
    rows = {(r.axes, r.collective, r.dtype, r.count, r.payload_bytes) for r in capture.report.communication}
    assert rows == {(r.axes, r.collective, r.dtype, r.count, r.payload_bytes) for r in report.communication}
    assert capture.report.program.fingerprint == report.program.fingerprint
    assert capture.report.window.steps == 2
    assert capture.timeline.steps


def test_profile_context_keeps_nothing_of_a_block_that_failed(step, mesh, tmp_path):
    with pytest.raises(RuntimeError, match="boom"), mk.profile(tmp_path, program=step[0], mesh=mesh):
        raise RuntimeError("boom")
    with pytest.raises(TraceError, match="no captured trace"):
        profiler.profile_run(tmp_path)


def test_a_program_is_jitted_or_compiled(mesh, tmp_path):
    with pytest.raises(ConfigError, match="`program` is an int"), mk.profile(tmp_path, program=3, mesh=mesh):
        pass


def test_every_second_of_communication_is_attributed(report):
    quality = report.quality
    assert (quality.mapped_share, quality.axis_mapped_share, quality.kernels_mapped_share) == (1, 1, 1)
    assert quality.axes_withheld is False
    assert quality.dropped_events is None  # The profiler said nothing.


def test_steps_of_a_run_are_chosen_by_their_numbers(run):
    measured = profiler.measure_run(run, steps=range(11, 99))
    assert {step.step for step in measured.timeline.steps} == {11, 12}
    assert [(s.step, s.left_out) for s in measured.report.per_step] == [(10, "not chosen"), (11, None), (12, None)]
    assert "steps_left_out" in {w.code for w in measured.report.warnings}


def test_invariants_hold_on_every_step(run):
    measured = profiler.measure_run(run)
    for step, swept in zip(measured.trace.steps.steps, measured.trace.sweeps):
        t = swept.total
        assert t.compute_s + t.exposed_s + t.other_s + t.idle_s == pytest.approx(t.window_s, rel=1e-9)
        assert t.overlapped_s + t.exposed_s == pytest.approx(t.communication_s, rel=1e-9)
        assert swept.share_s.sum() == pytest.approx(t.communication_s, rel=1e-6)
        assert step.step in (10, 11, 12)


def test_waiting_and_transfer_split_what_was_busy(report):
    assert report.quality.wait_method == "clocked"  # All devices are in one process, so there is one clock.
    for row in report.communication:
        assert row.transfer_s + row.wait_s == pytest.approx(row.busy_s)
        assert row.bus_bandwidth_bytes_per_s == pytest.approx(row.wire_bytes / row.transfer_s)
    stragglers = report.stragglers
    assert {s.device for s in stragglers.devices} == {d.id for d in jax.devices()}
    waited = sum(row.wait_s for row in report.communication)
    assert sum(s.waited_s for s in stragglers.devices) == pytest.approx(8 * waited)
    assert sum(s.last_share * stragglers.instances for s in stragglers.devices) > 0


def test_kernels_add_up_to_the_compute(report):
    assert sum(k.time_s for k in report.kernels.classes) == pytest.approx(report.step.compute_s)
    assert "matmul" in {k.kind for k in report.kernels.classes}


def test_the_sidecar_says_what_was_captured(run):
    (record,) = read_records(run / "trace")
    assert record.links == {"data": "infiniband", "fsdp": "nvlink", "tensor": "nvlink"}
    assert record.domains == (0, 0, 0, 0, 1, 1, 1, 1)
    assert record.trace.bytes == (run / "trace" / record.trace.file).stat().st_size
    assert record.cost.stop_s > 0
    assert record.cost.traced_step_s > 0


def test_measured_costs_are_written_for_the_compiler(report, run):
    assert not (run / "calibration.toml").exists()  # Messages of some kB tell no bandwidth.
    names = set(re.findall(r'name: "([^"]+)" cost_us', (run / "pgle.pbtxt").read_text()))
    assert {op.name for row in report.communication for op in row.ops} <= names


def test_a_recompile_with_measured_costs_shows_what_it_was_before(run, report):
    option = {"xla_gpu_pgle_profile_file_or_directory_path": str(run / "pgle.pbtxt")}
    found = feedback_part(option)
    assert found.before_exposed_s == report.step.exposed_s
    assert found.before_fingerprint == report.program.fingerprint
    assert feedback_part({"xla_gpu_autotune_level": 4}) is None
    for no_report in ("/nowhere/x.pbtxt", "/dev/zero", "a\0b/x.pbtxt", "a" * 5000, 3):
        assert feedback_part({"xla_gpu_pgle_profile_file_or_directory_path": no_report}).before_time_s is None


@pytest.mark.parametrize(
    ("choice", "processes", "captured"),
    [(None, 16, None), (4, 16, (0, 4, 8, 12)), (3, 2, (0, 1)), ([7, 2, 7], 16, (2, 7)), ([], 4, ())],
)
def test_of_a_large_job_some_processes_capture(choice, processes, captured):
    assert chosen_processes(choice, processes) == captured


def test_a_process_that_the_job_does_not_have_cannot_capture():
    with pytest.raises(ConfigError, match=r"names process 9, but the job has 8"):
        chosen_processes([9], 8)


@pytest.mark.parametrize(("before", "first"), [(5, False), (9, True)])
def test_a_peak_is_told_from_one_before_the_first_step(step, before, first):
    devices = [SimpleNamespace(memory_stats=lambda n=n: {"bytes_limit": 20, "peak_bytes_in_use": n}) for n in (9, 7)]
    memory = captured_memory(devices, before, program_bytes_of(step[0]))
    assert (memory.pool_bytes, memory.peak_bytes, memory.before_steps) == (20, 9, first)
    assert memory.program_bytes is not None
    # The program needs at least a device's part of the weights.
    assert memory.program_bytes > sum(w.nbytes for w in step[1]) // 8
    assert program_bytes_of(SimpleNamespace()) is None  # The program of an own loop says nothing about its memory.


def test_a_process_that_is_not_chosen_captures_nothing(step, mesh, tmp_path):
    compiled, weights, x = step
    capture = Capture(tmp_path / "trace", CapturedStep(compiled, mesh), steps=(1, 1), processes=[3])
    capture.before(1, weights)
    assert not capture.active
    compiled(weights, x)
    capture.after(1)
    capture.stop()
    assert not list(tmp_path.iterdir())


def test_communication_that_maps_to_nothing_withholds_the_axes(run, report):
    measured = profiler.measure_run(run)
    facts = measured.trace.facts
    facts.mapped_s = 0.97 * facts.communication_s
    found = withhold_axes(report, measured.trace)
    everything, *known = found.communication
    assert everything.axes == ()
    assert everything.exposed_s == report.step.exposed_s
    assert {row.axes for row in known} == {row.axes for row in report.communication}
    assert all(row.time_s is None and row.payload_bytes for row in known)
    assert [w.message for w in found.warnings if "3.0 % of the communication" in w.message]
    assert "--xla_gpu_enable_command_buffer=" in found.warnings[0].message
    check_invariants(found)
    facts.mapped_s = 0.99 * facts.communication_s
    assert withhold_axes(report, measured.trace) is report


def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def trace_of(run):
    return next((run / "trace").rglob("*.xplane.pb"))


def edit_sidecar(run, **changes):
    file = run / "trace" / "capture-p0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def unsigned(run):
    """Make the capture one whose record does not know its trace's digest."""
    edit_sidecar(run, trace=None)


def cut_trace(run):
    trace_of(run).write_bytes(trace_of(run).read_bytes()[: trace_of(run).stat().st_size // 3])


def cut_unsigned_trace(run):
    unsigned(run)
    cut_trace(run)


def flipped_trace(run):
    content = bytearray(trace_of(run).read_bytes())
    content[len(content) // 2] ^= 1
    trace_of(run).write_bytes(content)


def empty_trace(run):
    trace_of(run).write_bytes(b"")


def empty_unsigned_trace(run):
    unsigned(run)
    empty_trace(run)


def html_trace(run):
    unsigned(run)
    trace_of(run).write_text("<html><body>404</body></html>")


def another_trace(run):
    trace_of(run).write_bytes((DATA / "synthetic_2gpu_3step.xplane.pb").read_bytes())


def another_unsigned_trace(run):
    unsigned(run)
    another_trace(run)


def two_traces(run):
    unsigned(run)
    shutil.copy(trace_of(run), trace_of(run).with_name("other.xplane.pb"))


def no_trace(run):
    trace_of(run).unlink()


def no_trace_folder(run):
    shutil.rmtree(run / "trace")


def no_sidecar(run):
    (run / "trace" / "capture-p0.json").unlink()


def broken_sidecar(run):
    (run / "trace" / "capture-p0.json").write_text("{")


def empty_sidecar(run):
    (run / "trace" / "capture-p0.json").write_text("")


def sidecar_without_module(run):
    edit_sidecar(run, module=None)


def sidecar_of_no_process(run):
    edit_sidecar(run, process=3)


def devices_off_the_mesh(run):
    edit_sidecar(run, devices=[{"id": 77, "ordinal": 0}])


def devices_not_in_the_trace(run):
    unsigned(run)
    edit_sidecar(run, devices=[{"id": i, "ordinal": 100 + i} for i in range(8)])


def mesh_of_another_shape(run):
    file = json.loads((run / "trace" / "capture-p0.json").read_text())
    edit_sidecar(run, mesh=file["mesh"] | {"shape": [2, 2, 4]})


def more_processes_than_any_job_has(run):
    edit_sidecar(run, processes=2_000_000_000)


def a_process_that_captured_and_cannot_be(run):
    edit_sidecar(run, captured_processes=[2**62])


def a_mesh_of_no_devices(run):
    file = json.loads((run / "trace" / "capture-p0.json").read_text())
    edit_sidecar(run, mesh=file["mesh"] | {"shape": [-2, -2, 2]})


def a_device_beyond_any_array(run):
    edit_sidecar(run, devices=[{"id": 0, "ordinal": 2**64}])


def cluster_of_a_file(run):
    secret = run / "id_rsa"
    secret.write_text("BEGIN PRIVATE KEY\n")
    edit_sidecar(run, cluster={"file": str(secret)})


def one_process_twice(run):
    shutil.copy(run / "trace" / "capture-p0.json", run / "trace" / "capture-p1.json")


def processes_of_different_steps(run):
    edit_sidecar(run, processes=2)
    file = json.loads((run / "trace" / "capture-p0.json").read_text())
    (run / "trace" / "capture-p1.json").write_text(json.dumps(file | {"process": 1, "first_step": 20}))


def processes_of_the_same_devices(run):
    edit_sidecar(run, processes=2)
    file = json.loads((run / "trace" / "capture-p0.json").read_text())
    (run / "trace" / "capture-p1.json").write_text(json.dumps(file | {"process": 1}))


def processes_of_different_programs(run):
    edit_sidecar(run, processes=2)
    file = json.loads((run / "trace" / "capture-p0.json").read_text())
    (run / "trace" / "capture-p1.json").write_text(json.dumps(file | {"process": 1, "module": "jit_other"}))


def corrupt_program(run):
    (run / "trace" / "program-p0.hlo.pb.gz").write_bytes(b"not gzip")


def cut_program(run):
    file = run / "trace" / "program-p0.hlo.pb.gz"
    file.write_bytes(file.read_bytes()[:2000])


def wrong_program(run):
    (run / "trace" / "program-p0.hlo.pb.gz").write_bytes(gzip.compress(b"not a module"))


def other_module(run):
    edit_sidecar(run, module="jit_other")


DAMAGES = [
    (cut_trace, r"this trace is cut short: it has \d+ bytes of the \d+"),
    (cut_unsigned_trace, "not a profiler trace, or is cut short"),
    (flipped_trace, r"not the one that process 0 wrote: its \d+ bytes differ"),
    (empty_trace, "cut short: it has 0 bytes"),
    (empty_unsigned_trace, r"the trace is empty \(0 bytes\)"),
    (html_trace, "not a profiler trace"),
    (another_trace, "this trace is cut short"),
    (another_unsigned_trace, "no operation of the program 'jit_train_step'.*programs in it: jit_f"),
    (two_traces, r"process 0 has 2 traces \(other.xplane.pb"),
    (no_trace, "process 0 left no trace"),
    (no_trace_folder, "no captured trace in this run"),
    (no_sidecar, "there is no captured trace"),
    (broken_sidecar, "does not describe a capture"),
    (empty_sidecar, "does not describe a capture"),
    (sidecar_without_module, "does not describe a capture: module"),
    (sidecar_of_no_process, "there is no process 3 of 1"),
    (devices_off_the_mesh, r"devices \[77\] of the process are not on the mesh"),
    (devices_not_in_the_trace, "no operation of the program 'jit_train_step' on devices"),
    (mesh_of_another_shape, r"mesh of shape \(2, 2, 4\)"),
    (more_processes_than_any_job_has, "processes Input should be less than or equal to 1048576"),
    (a_process_that_captured_and_cannot_be, "captured_processes.0 Input should be less than 1048576"),
    (a_mesh_of_no_devices, "mesh.shape.0 Input should be greater than 0"),
    (a_device_beyond_any_array, "devices.0.ordinal Input should be less than 2147483648"),
    (cluster_of_a_file, "cluster Value error, holds the machines of the capture, and may not name a file"),
    (one_process_twice, "two files describe the capture of one process"),
    (processes_of_different_steps, r"captured different steps \(4 from step 10, 4 from step 20\)"),
    (processes_of_the_same_devices, "two processes captured device 0"),
    (processes_of_different_programs, "captured different programs or meshes"),
    (corrupt_program, "captured program cannot be read"),
    (cut_program, "captured program cannot be read"),
    (wrong_program, "captured program cannot be read"),
    (other_module, "captured program is 'jit_train_step', but the capture is of 'jit_other'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_capture_is_one_clear_error(run, tmp_path, damage, message):
    folder = copied(run, tmp_path)
    damage(folder)
    with pytest.raises(TraceError, match=message):
        profiler.profile_run(folder)


def test_a_calibration_of_another_machine_is_not_looked_for(run, tmp_path):
    folder = copied(run, tmp_path)
    cluster = json.loads((folder / "trace" / "capture-p0.json").read_text())["cluster"]
    edit_sidecar(folder, cluster=cluster | {"calibration": "/nowhere/calibration.toml"})
    assert profiler.profile_run(folder).step == profiler.profile_run(run).step


def without_longest_thread(content):
    """Return the trace without the fullest line of its CPU plane."""
    (plane,) = [p for p in read_fields(content) if b"/host:CPU" in p[1][:200]]
    longest = max((f for f in read_fields(plane[1]) if f[0] == 3), key=lambda f: len(f[1]))
    kept = [f for f in read_fields(plane[1]) if f is not longest and f != longest]
    others = [f for f in read_fields(content) if f is not plane and f != plane]
    return b"".join(written(n, v) for n, v in [*others, (1, b"".join(written(*f) for f in kept))])


def read_fields(content):
    """Return (number, bytes) of the messages and (number, int) of the numbers of a message."""
    found, at = [], 0
    while at < len(content):
        key, at = varint(content, at)
        value, at = varint(content, at)
        if key & 7 == 2:
            found.append((key >> 3, content[at : at + value]))
            at += value
        else:
            found.append((key >> 3, value))
    return found


def varint(content, at):
    value = shift = 0
    while True:
        byte, at = content[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def written(number, value):
    if isinstance(value, int):
        return encoded(number << 3) + encoded(value)
    return encoded(number << 3 | 2) + encoded(len(value)) + value


def encoded(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def test_a_trace_that_lost_a_part_is_refused_or_measured_with_a_warning(run, tmp_path):
    folder = copied(run, tmp_path)
    unsigned(folder)
    whole = trace_of(folder).read_bytes()
    trace_of(folder).write_bytes(without_longest_thread(whole))
    try:
        said = {w.code for w in profiler.profile_run(folder).warnings}
    except TraceError as error:  # That thread had most of a device.
        said = {error.message}
    refusal = "no execution of the program was seen on all devices."
    assert said & {"collective_counts", "executions", "missing_devices", refusal}


def test_missing_processes_are_said(run, tmp_path):
    folder = copied(run, tmp_path)
    file = folder / "trace" / "capture-p0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processes": 4}))
    report = profiler.profile_run(folder)
    assert (report.window.processes_seen, report.window.processes_expected) == (1, 4)
    assert [w.message for w in report.warnings if "3 of 4 processes are missing (1, 2, 3)" in w.message]


def test_a_missing_run_is_one_clear_error(tmp_path):
    with pytest.raises(TraceError, match="no such run folder"):
        profiler.profile_run(tmp_path / "nowhere")
