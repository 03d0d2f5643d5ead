"""Capture -> report of a small sharded program on eight CPU devices: every collective finds its axis."""

import gzip
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit.profiler as profiler
from meshkit.errors import ConfigError, TraceError
from meshkit.report.schema import read_report
from meshkit.report.summarize import check_invariants
from meshkit.spec.cluster import Cluster
from meshkit.training.capture import Capture

LAYERS, EMBED, MLP, BATCH = 3, 32, 64, 16


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def cluster():
    # two hosts of four, so that the outermost axis crosses domains
    return Cluster.load({"name": "cpu_2x4", "gpu": "cpu", "hosts": 2, "gpus_per_host": 4, "scale_up": "shared_memory"})


@pytest.fixture(scope="module")
def step(mesh):
    """A compiled step with a scanned MLP, sharded over all three axes, and its arguments."""

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
    """A run folder with steps 10 to 13 captured, the way the trainer does it."""
    folder = tmp_path_factory.mktemp("run")
    compiled, weights, x = step
    work = {"model_flops": 6.0e9, "tokens": 1024.0, "training_steps": 1000}
    capture = Capture(folder / "trace", program=compiled, mesh=mesh, steps=(10, 13), cluster=cluster, work=work)
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


def test_every_collective_is_on_its_axis(report):
    assert report.communication
    assert all(row.axes for row in report.communication)
    assert {axis for row in report.communication for axis in row.axes} == {"data", "fsdp", "tensor"}
    assert not [w for w in report.warnings if w.code == "unmapped_communication"]


def test_counts_include_loop_iterations(report, step):
    # a device runs what is in the body of a loop (forward, backward) once per layer, and what is outside once
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
    # four steps were captured; what follows the last is not in the trace, so it is not counted
    assert (report.window.steps, report.window.devices) == (3, 8)
    assert (report.window.processes_seen, report.window.processes_expected) == (1, 1)
    assert report.step.time_s > 0
    assert report.step.exposed_s > 0
    assert report.step.mfu is None  # a CPU has no peak
    assert report.step.tokens_per_s_per_gpu == pytest.approx(1024 / report.step.time_s / 8)
    assert report.spread.time_s.worst_step in (10, 11, 12)
    assert report.training.hours == pytest.approx(report.step.time_s * 1000 / 3600)


def test_loops_are_not_compute(run):
    # a `while` event covers its body; were it compute, no collective inside it would be exposed
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
    with profiler.profile(tmp_path, program=compiled, mesh=mesh, cluster=cluster, tokens=1024) as capture:
        for _ in range(3):
            weights, _ = compiled(weights, x)
    rows = {(r.axes, r.collective, r.dtype, r.count, r.payload_bytes) for r in capture.report.communication}
    assert rows == {(r.axes, r.collective, r.dtype, r.count, r.payload_bytes) for r in report.communication}
    assert capture.report.program.fingerprint == report.program.fingerprint
    assert capture.report.window.steps == 2
    assert capture.timeline.steps


def test_profile_context_keeps_nothing_of_a_block_that_failed(step, mesh, tmp_path):
    with pytest.raises(RuntimeError, match="boom"), profiler.profile(tmp_path, program=step[0], mesh=mesh):
        raise RuntimeError("boom")
    with pytest.raises(TraceError, match="no captured trace"):
        profiler.profile_run(tmp_path)


def test_a_program_must_be_compiled(mesh, tmp_path):
    with (
        pytest.raises(ConfigError, match="needs the compiled program"),
        profiler.profile(tmp_path, program=jax.jit(lambda x: x), mesh=mesh),
    ):
        pass


def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def corrupt_trace(run):
    file = next((run / "trace").rglob("*.xplane.pb"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])


def corrupt_sidecar(run):
    (run / "trace" / "capture-p0.json").write_text("{")


def corrupt_program(run):
    (run / "trace" / "program-p0.hlo.pb.gz").write_bytes(b"not gzip")


def wrong_program(run):
    (run / "trace" / "program-p0.hlo.pb.gz").write_bytes(gzip.compress(b"not a module"))


def other_module(run):
    file = run / "trace" / "capture-p0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"module": "jit_other"}))


def no_trace(run):
    next((run / "trace").rglob("*.xplane.pb")).unlink()


def no_sidecar(run):
    (run / "trace" / "capture-p0.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt_trace, "not a profiler trace"),
        (corrupt_sidecar, "does not describe a capture"),
        (corrupt_program, "captured program cannot be read"),
        (wrong_program, "captured program cannot be read"),
        (other_module, "no operation of the program 'jit_other'.*programs in it: jit_train_step"),
        (no_trace, "left no trace"),
        (no_sidecar, "there is no captured trace"),
    ],
)
def test_a_damaged_capture_is_one_clear_error(run, tmp_path, damage, message):
    folder = copied(run, tmp_path)
    damage(folder)
    with pytest.raises(TraceError, match=message):
        profiler.profile_run(folder)


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
