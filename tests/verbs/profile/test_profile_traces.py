"""Test `meshkit profile` of traces that plain jax.profiler has left: rows, warnings, options, and no unasked output."""

import gzip
import json
import re
import shutil
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from typer.testing import CliRunner

import meshkit as mk
from meshkit.cli import app
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError, TraceError
from meshkit.predict.network import collective_time_s
from meshkit.report.compare import compare
from meshkit.report.folder import read_report
from meshkit.report.summarize import check_invariants
from meshkit.trace import loose
from meshkit.trace.capture import Capture, CapturedStep
from meshkit.verbs.profile.profiler import TracedJob, measure_traces, profile_run
from tests.hlo_text import serialized_hlo
from tests.trace.trace_files import gpu_op, plane_text, profile_traces, write_planes

DATA = Path(__file__).parents[2] / "data"
SYNTHETIC = DATA / "synthetic_2gpu_3step.xplane.pb"
MESH = MeshSpec.parse({"data": 4, "tensor": 2})


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def step(mesh):
    """Return a jitted step with collectives over both axes, and its arguments."""

    def put(shape, *spec):
        return jax.device_put(jnp.full(shape, 0.01, jnp.float32), NamedSharding(mesh, PartitionSpec(*spec)))

    def loss(weights, x):
        return ((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2).sum()

    weights, x = (put((64, 64), None, "tensor"), put((64, 64), "tensor", None)), put((16, 64), "data", None)

    def update(weights, x):
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

    jitted = jax.jit(update, out_shardings=jax.tree.map(lambda w: w.sharding, weights))
    jax.block_until_ready(jitted(weights, x))
    return jitted, weights, x


def traced(folder, step, *, hlo=True):
    jitted, weights, x = step
    options = jax.profiler.ProfileOptions()
    options.enable_hlo_proto = hlo
    options.python_tracer_level = 0
    with jax.profiler.trace(str(folder), profiler_options=options):
        for _ in range(4):
            weights = jitted(weights, x)
        jax.block_until_ready(weights)
    (file,) = folder.rglob("*.xplane.pb")
    return file


@pytest.fixture(scope="module")
def file(step, tmp_path_factory):
    """Return a trace of four steps by jax.profiler with its defaults."""
    return traced(tmp_path_factory.mktemp("jax"), step)


def expected_groups(step, mesh):
    """Return the number of collectives with replica groups in the compiled step, as XLA prints it."""
    text = step[0].lower(*step[1:]).compile().as_text()
    kinds = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all)\(.*?(replica_groups=[^\s]+)", text)
    assert kinds
    return len(kinds)


def codes(report):
    return [w.code for w in report.warnings]


def test_rows_go_by_replica_groups_without_a_mesh(file, step, mesh):
    report = profile_traces(file)
    check_invariants(report)
    assert (report.window.steps, report.window.devices) == (3, 8)
    groups = {row.replica_groups for row in report.communication}
    assert groups <= {"{0,1},{2,3},{4,5},{6,7}", "{0,2,4,6},{1,3,5,7}"}
    assert len(groups) == 2
    assert all(row.axes == () and row.link is None and row.wire_bytes_nvlink is None for row in report.communication)
    assert sum(row.count for row in report.communication) == expected_groups(step, mesh)
    assert all(row.payload_bytes and row.bus_bandwidth_bytes_per_s for row in report.communication)
    assert codes(report) == ["steps_found", "no_mesh", "no_cluster"]
    assert "the executions of 'jit_update'" in report.warnings[0].message
    assert report.quality.mapped_share == 1
    assert report.quality.axis_mapped_share is None
    assert (report.mesh, report.cluster.gpu, report.program.jax) == ((), None, jax.__version__)
    assert report.stragglers.devices


def test_a_mesh_gives_axes_and_a_cluster_links(file):
    bare, meshed = profile_traces(file), profile_traces(file, mesh=MESH)
    cluster = Cluster.load(
        {"name": "cpu_4x2", "gpu": "cpu", "hosts": 4, "gpus_per_host": 2, "scale_up": "shared_memory"}
    )
    placed = profile_traces(file, mesh=MESH, cluster=cluster)
    assert meshed.step == bare.step == placed.step
    assert {row.axes for row in meshed.communication} == {("data",), ("tensor",)}
    assert {row.link for row in meshed.communication} == {None}
    assert {(row.axes, row.link) for row in placed.communication} == {
        (("data",), "infiniband"),
        (("tensor",), "nvlink"),
    }
    assert (codes(meshed), codes(placed)) == (["steps_found", "no_cluster"], ["steps_found"])
    linked = profile_traces(file, cluster=cluster)
    assert {(row.axes, row.group_size, row.link) for row in linked.communication} == {
        ((), 4, "infiniband"),
        ((), 2, "nvlink"),
    }
    assert codes(linked) == ["steps_found", "no_mesh"]


def test_a_jitted_step_that_is_another_program_in_its_second_call_is_told_of(mesh, tmp_path):
    @jax.jit
    def drifting(weights, x):
        return weights - jax.grad(lambda w: ((x @ w) ** 2).sum())(weights)

    weights, x = jnp.ones((64, 64)), jax.device_put(jnp.ones((16, 64)), NamedSharding(mesh, PartitionSpec("data")))
    with mk.profile(tmp_path, program=drifting, mesh=mesh) as capture:
        for _ in range(4):
            weights = drifting(weights, x)
    assert capture.report.window.steps < 3  # Four calls of one program would be three.
    assert "1 more of that name ran, since shapes or shardings" in capture.report.warnings[0].message


def test_a_mesh_or_cluster_of_another_size_is_refused(file):
    with pytest.raises(ConfigError, match=r"the mesh has 4 devices \(data 4\), but the program in the trace runs on 8"):
        profile_traces(file, mesh=MeshSpec.parse({"data": 4}))
    with pytest.raises(ConfigError, match="runs on 8 devices, but the cluster has 2"):
        profile_traces(file, cluster=Cluster.load("workstation_2xrtx"))


def test_without_hlo_the_program_is_looked_for_beside_the_trace(step, tmp_path):
    file = traced(tmp_path, step, hlo=False)
    bare = profile_traces(file)
    assert "no_program" in codes(bare)
    assert {row.collective for row in bare.communication} <= {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
    }
    assert all(row.group_size is None and row.payload_bytes is None for row in bare.communication)
    compiled = step[0].lower(*step[1:]).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    (tmp_path / "program.hlo.pb.gz").write_bytes(gzip.compress(module.as_serialized_hlo_module_proto()))
    (file.parent / "other.hlo_proto.pb").write_bytes(b"of somebody else")
    known = profile_traces(tmp_path, mesh=MESH)
    assert known.step == bare.step
    assert {row.axes for row in known.communication} == {("data",), ("tensor",)}


def test_a_captured_trace_alone_says_what_its_run_folder_says(step, mesh, tmp_path):
    jitted, weights, x = step
    compiled = jitted.lower(weights, x).compile()
    capture = Capture(tmp_path / "trace", CapturedStep(compiled, mesh), steps=(0, 3))
    for number in range(4):
        capture.before(number, weights)
        weights = compiled(weights, x)
        capture.after(number, weights)
    whole = profile_run(tmp_path)
    (file,) = (tmp_path / "trace").rglob("*.xplane.pb")
    assert not loose.is_loose(tmp_path)
    alone = profile_traces(file, mesh=MESH)
    assert alone.step == whole.step
    keys = ("axes", "collective", "count", "payload_bytes", "time_s", "exposed_s", "transfer_s", "group_size")
    assert [[getattr(r, k) for k in keys] for r in alone.communication] == [
        [getattr(r, k) for k in keys] for r in whole.communication
    ]


def test_the_program_is_parsed_once(file, monkeypatch):
    read, real = [], loose.Module
    monkeypatch.setattr(loose, "Module", lambda module: read.append(len(module)) or real(module))
    profile_traces(file)
    assert len(read) == 1


def test_profile_measures_jitted_functions_without_knowing_them(step, mesh, tmp_path):
    jitted, weights, x = step
    evaluate = jax.jit(lambda w, x: (x @ w[0]).sum())
    jax.block_until_ready((jitted(weights, x), evaluate(weights, x)))
    with mk.profile(tmp_path, mesh=mesh, tokens=64) as capture:
        for _ in range(4):
            weights = jitted(weights, x)
            evaluate(weights, x)
    # The machine decides which of the two takes more of the devices' time: where it has other work, either waits
    # longest.
    chosen = capture.report.warnings[0].message
    (first, most), (second, less) = re.findall(r"'?(jit_\w+?)'?(?:, which has)? ([\d.]+) %", chosen)
    assert {first, second} == {"jit_update", "jit__lambda"}
    assert float(most) >= float(less)
    report = capture.report_of("update")
    check_invariants(report)
    assert (report.window.steps, report.window.devices) == (3, 8)
    seconds = {row.axes: row.exposed_s for row in report.communication}
    assert set(seconds) == {("data",), ("tensor",), ()}  # The last is what the other program communicates.
    assert None not in seconds.values()
    assert report.quality.mapped_share == 1
    assert report.step.tokens_per_s_per_gpu == pytest.approx(64 / report.step.time_s / 8)
    assert "the executions of 'jit_update'" in report.warnings[0].message
    assert "Others: jit__lambda " in report.warnings[0].message
    assert report.verdict
    assert read_report(tmp_path).step == capture.report.step
    assert capture.timeline.steps
    other = capture.report_of("jit__lambda_")
    assert "the executions of 'jit__lambda'" in other.warnings[0].message
    assert other.program.fingerprint not in (None, report.program.fingerprint)
    with pytest.raises(TraceError, match="has no program 'train'"):
        capture.report_of("train")
    arguments = ["profile", str(tmp_path / "trace"), "--program", "update", "--json"]
    rows = json.loads(CliRunner().invoke(app, arguments).stdout)["communication"]
    assert any(row["replica_groups"] for row in rows)


def test_profile_of_a_jitted_function_takes_it_by_name(step, mesh, tmp_path):
    jitted, weights, x = step
    with pytest.raises(RuntimeError, match="boom"), mk.profile(tmp_path, program=jitted):
        raise RuntimeError("boom")
    assert not list(tmp_path.rglob("*.xplane.pb"))
    with mk.profile(tmp_path, program=jitted) as capture:
        for _ in range(3):
            weights = jitted(weights, x)
    assert capture.report.window.steps == 2
    assert {row.axes for row in capture.report.communication} == {()}


def test_nothing_is_written_unless_asked(file, tmp_path):
    before = sorted(file.parent.iterdir())
    done = CliRunner().invoke(app, ["profile", str(file), "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout)
    assert (said["schema"], said["predicted"]) == ("meshkit.report/1", None)
    assert sorted(file.parent.iterdir()) == before
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["profile", str(file.parent), "--mesh", "data=4, tensor=2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "report.json", "trace.json.gz"]
    assert {row.axes for row in read_report(out).communication} == {("data",), ("tensor",)}
    assert sorted(file.parent.iterdir()) == before


def test_an_experiment_names_mesh_and_cluster(file):
    root = Path(__file__).parents[3] / "configs" / "experiments"
    done = CliRunner().invoke(app, ["profile", str(file), "--experiment", str(root / "llama_debug_cpu.toml"), "--json"])
    report = json.loads(done.stdout)
    assert [(a["axis"], a["size"]) for a in report["mesh"]] == [("data", 2), ("fsdp", 2), ("tensor", 2)]
    assert {tuple(row["axes"]) for row in report["communication"]} == {("data", "fsdp"), ("tensor",)}
    assert {row["link"] for row in report["communication"]} == {"nvlink"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "data"], "is not a list of axes and their sizes"),
        (["--mesh", "data=2,data=2"], "is not a list of axes and their sizes"),
        (["--mesh", "data=0"], "must be a positive integer"),
        (["--mesh", "data=2", "--experiment", "x.toml"], "--experiment already names mesh and cluster"),
        (["--cluster", "nowhere"], "there is no shipped cluster"),
    ],
)
def test_options_that_say_nothing_are_one_clear_error(arguments, message):
    done = CliRunner().invoke(app, ["profile", str(SYNTHETIC), *arguments])
    assert isinstance(done.exception, ConfigError)
    assert message in done.exception.message


def test_steps_are_chosen():
    def shown(*arguments):
        return CliRunner().invoke(app, ["profile", str(SYNTHETIC), "--json", *arguments])

    for count, arguments in ((2, []), (2, ["--steps", "all"]), (1, ["--steps", "1,5-9"])):
        assert json.loads(shown(*arguments).stdout)["window"]["steps"] == count
    done = shown("--steps", "5-3")
    assert isinstance(done.exception, ConfigError)
    assert "'5-3' names no steps" in done.exception.message


def test_options_of_bare_traces_do_not_change_a_run_folder(tmp_path):
    (tmp_path / "trace").mkdir()
    done = CliRunner().invoke(app, ["profile", str(tmp_path), "--mesh", "data=2"])
    assert isinstance(done.exception, TraceError)
    assert "there is no captured trace; it is empty" in done.exception.message
    (tmp_path / "trace" / "capture-p0.json").write_text("{}")
    done = CliRunner().invoke(app, ["profile", str(tmp_path), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError)
    assert "--out is for a trace without a run folder" in done.exception.message
    done = CliRunner().invoke(app, ["profile", str(tmp_path / "nowhere"), "--mesh", "data=2"])
    assert isinstance(done.exception, TraceError)
    assert "no such trace or run folder" in done.exception.message


@pytest.mark.parametrize("name", ["synthetic_2gpu_3step.xplane.pb", "traces/tracelens_jax08_gemm.xplane.pb"])
def test_traces_of_gpus_make_whole_reports(name, tmp_path):
    shutil.copy(DATA / name, tmp_path)
    report = profile_traces(tmp_path, out=tmp_path / "out")
    assert report.step.time_s > 0
    assert "steps_found" in codes(report)
    assert all(row.link is None for row in report.communication)


def made(path, *, dot=300, gather=100, pause=0):
    """Return a trace of four steps: a fusion, a matmul, an exposed gather, a pause."""
    events = []
    for step in range(4):
        at = step * (500 + dot + gather + pause)
        events.append(gpu_op("loop_add_fusion", at, at + 500))
        events.append(gpu_op("gemm_fusion_dot.3", at + 500, at + 500 + dot))
        name = "ncclDevKernel_AllGather_RING_LL"
        events.append(gpu_op("all-gather-start", at + 500 + dot, at + 500 + dot + gather, name))
    return str(write_planes(path, plane_text("/device:GPU:0", events)))


@pytest.mark.parametrize(
    ("changed", "first", "verdict"),
    [
        (
            {"dot": 500},
            ("compute", "matmul"),
            "1.10 ms, 200 us (22.2 %) longer than the first: +200 us compute: matmul (300 us to 500 us, most in gemm",
        ),
        ({"gather": 400}, ("exposed communication", "all-gather"), "+300 us exposed communication: all-gather"),
        ({"pause": 250}, ("idle", "between steps"), "+250 us idle: between steps"),
        (
            {"dot": 100, "gather": 110},
            ("compute", "matmul"),
            "190 us (21.1 %) shorter than the first: -200 us compute: matmul",
        ),
        ({"dot": 301}, ("compute", "matmul"), "Both steps take 901 us."),
        (
            {"dot": 2100},
            ("compute", "matmul"),
            "takes 2.70 ms, 3 times as long as the first of 900 us: +1.80 ms compute",
        ),
    ],
)
def test_compare_names_what_became_slower_in_two_traces(tmp_path, changed, first, verdict):
    a, b = made(tmp_path / "a.xplane.pb"), made(tmp_path / "b.xplane.pb", **changed)
    done = CliRunner().invoke(app, ["compare", a, b, "--json"])
    found = json.loads(done.stdout)
    assert (found["parts"][0]["part"], found["parts"][0]["what"]) == first
    assert verdict in found["verdict"]
    total = sum((p["seconds"]["b"] or 0) - (p["seconds"]["a"] or 0) for p in found["parts"])
    assert total == pytest.approx(found["step"]["time_s"]["b"] - found["step"]["time_s"]["a"])
    shown = CliRunner().invoke(app, ["compare", a, b]).output
    assert " ".join(shown.split()).startswith(f"{found['verdict']} step")


def test_a_traced_program_is_priced_as_a_plan_of_it_where_its_gpus_are_named():
    """A step of a Llama of 1B on one H100 has no plan, but its trace holds the program."""
    file = DATA / "traces" / "h100_llama_1b" / "vm.xplane.pb.gz"
    measured = measure_traces(file, TracedJob(cluster=Cluster.load("dgx_h100")))
    priced = measured.price()
    assert priced is not None
    found = compare(priced, measured.report)
    by_trace = measure_traces(file, TracedJob())
    (note,) = [w.message for w in by_trace.report.warnings if w.code == "gpu_of_trace"]
    assert note == "Kernels are priced as on NVIDIA H100 80GB HBM3, which the trace names."
    alone = by_trace.price().step  # Nothing in it communicates, and one GPU has an interval of its own.
    assert (alone.time_s, alone.compute_s, alone.mfu) == (priced.step.time_s, priced.step.compute_s, priced.step.mfu)
    assert found.joined_by == "name"
    assert found.kernels_joined_share == pytest.approx(1, abs=0.01)
    ratios = [op.busy_s.ratio for op in found.kernel_ops if op.kind == "matmul" and op.busy_s.ratio]
    assert len(ratios) > 5
    assert statistics.median(ratios) == pytest.approx(1, abs=0.1)
    assert len(found.worst_ratios) == 10
    factors = [max(r.seconds.ratio, 1 / r.seconds.ratio) for r in found.worst_ratios]
    assert factors == sorted(factors, reverse=True)
    assert all(re.match(r"models/\w+.py:\d+", r.line) for r in found.worst_ratios)
    said = CliRunner().invoke(app, ["profile", str(file), "--cluster", "dgx_h100"])
    assert re.search(r"step time +\d+ ms +\d+ ms", said.stdout)
    assert re.search(r"single operations, worst ratios .* B / A\n.*\n.*models/\w+.py:\d+", said.stdout)


GATHERED = """HloModule jit_f, is_scheduled=true, num_partitions=2

ENTRY %main (x: bf16[8192,8192], w: bf16[8192,8192]) -> (bf16[8192,8192], bf16[16384,8192]) {
  %x = bf16[8192,8192] parameter(0)
  %w = bf16[8192,8192] parameter(1)
  %dot.1 = bf16[8192,8192] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot" source_file="model.py" source_line=7}
  %all-gather.2 = bf16[16384,8192] all-gather(%x), channel_id=1, replica_groups=[1,2]<=[2], use_global_device_ids=true, dimensions={0}, metadata={op_name="jit(f)/gather" source_file="model.py" source_line=9}
  ROOT %o = (bf16[8192,8192], bf16[16384,8192]) tuple(%dot.1, %all-gather.2)
}
"""  # noqa: E501
GATHERED_BYTES = 2 * 16384 * 8192


def gathers(folder, *, rate=1.0, late_us=0, outlier_us=0):
    """Return six steps of a matmul and a gather on two H100s: the gather at a share of its rate, one GPU late."""
    (folder / "program.hlo.pb").write_bytes(serialized_hlo(GATHERED))
    alone_us = 1e6 * collective_time_s(
        "all-gather", payload_bytes=GATHERED_BYTES, gpus_per_domain=2, domains=1, cluster=Cluster.load("dgx_h100")
    )
    planes = []
    for gpu in range(2):
        events, at = [], 0.0
        for number in range(6):
            dot = 1500 + (late_us if gpu else 0)
            begun = at + 1500 + late_us
            end = begun + alone_us / rate + (outlier_us if number == 3 else 0)
            events += [gpu_op("dot.1", at, at + dot), gpu_op("all-gather.2", at + dot, end)]
            at = end + 5
        named = 'stats{metadata_id:90 str_value:"NVIDIA H100 80GB HBM3"}'
        named += 'stat_metadata{key:90 value{id:90 name:"gpu_device_name"}}'
        planes.append(plane_text(f"/device:GPU:{gpu}", events)[:-1] + named + "}")
    return write_planes(folder / "x.xplane.pb", *planes), alone_us * 1e-6


def test_collectives_below_their_rate_are_found_with_their_line_size_and_link(tmp_path):
    file, alone_s = gathers(tmp_path, rate=0.6)
    measured = measure_traces(file, TracedJob(cluster=Cluster.load("dgx_h100")))
    (slow,) = [f for f in measured.report.findings if f.code == "slow_link"]
    assert slow.severity == "warning"
    said = "The all-gather bf16 over {0,1} (model.py:9) runs at 0.60 of NCCL's speed at its size, 256 MiB on nvlink4"
    assert slow.message.startswith(said)
    assert slow.seconds == pytest.approx(alone_s / 0.6 - alone_s, rel=0.01)
    found = compare(measured.price(), measured.report)
    (row,) = found.communication
    assert (row.replica_groups, row.transfer_s) == ("{0,1}", found.ops[0].transfer_s)
    assert found.ops[0].transfer_s.ratio == pytest.approx(1 / 0.6, rel=0.01)
    worst = found.worst_ratios[0]
    assert (worst.name, worst.kind, worst.line) == ("all-gather.2", "all-gather", "model.py:9")
    said = CliRunner().invoke(app, ["profile", str(file), "--cluster", "dgx_h100"]).stdout
    assert re.search(r"collectives, moving data .*\nall-gather.2 .* 1.67 x", said)
    said = json.loads(CliRunner().invoke(app, ["profile", str(file), "--cluster", "dgx_h100", "--json"]).stdout)
    ratios = said["predicted"]
    assert ratios["communication"][0]["replica_groups"] == "{0,1}"
    pairs = {"measured_s": row.transfer_s.b, "predicted_s": row.transfer_s.a, "ratio": row.transfer_s.ratio}
    for line in (ratios["communication"][0], ratios["collectives"][0]):
        assert pairs.items() <= line.items()
    assert {"name": "all-gather.2", "line": "model.py:9", "ratio": worst.seconds.ratio}.items() <= ratios[
        "worst_ratios"
    ][0].items()
    step = found.step["time_s"]
    assert (ratios["step"]["measured_s"], ratios["step"]["predicted_s"]) == (step.b, step.a)


@pytest.mark.parametrize(
    ("trace", "cluster", "said"),
    [
        ("maxtext_h100x4", Cluster.load("dgx_h100"), []),
        ("pax_a100x4", Cluster.load("dgx_a100", gpu="a100_40gb"), ["reduce-scatter-start, 67.6 MiB at 0.14"]),
    ],
)
def test_collectives_of_others_are_priced(trace, cluster, said):
    """Gathers and scatters take what the model says, except one of Pax that is slow on all four GPUs."""
    measured = measure_traces(DATA / "traces" / trace, TracedJob(cluster=cluster))
    found = [f.message for f in measured.report.findings if f.code == "slow_link"]
    assert len(found) == len(said)
    assert all(text in message for text, message in zip(said, found))
    rows = {(r.collective, r.dtype): r.transfer_s for r in compare(measured.price(), measured.report).communication}
    assert rows["all-gather", "bf16"].ratio == pytest.approx(1.48 if said else 0.97, abs=0.01)
    assert rows["reduce-scatter", "bf16"].ratio == pytest.approx(2.78 if said else 1.03, abs=0.01)


def test_a_late_device_makes_no_collective_slow(tmp_path):
    file, _ = gathers(tmp_path, late_us=1000)
    measured = measure_traces(file, TracedJob(cluster=Cluster.load("dgx_h100")))
    assert [f.code for f in measured.report.findings] == ["waiting_for_peers", "synchronous_collectives"]
    (op,) = compare(measured.price(), measured.report).ops
    assert op.transfer_s.ratio == pytest.approx(1, rel=0.01)
    assert op.busy_s.ratio > 1.2


def test_without_a_cluster_kernels_are_priced_on_the_gpu_that_the_trace_names(tmp_path):
    file, _ = gathers(tmp_path, rate=0.6)
    bare = measure_traces(file, TracedJob())
    assert "slow_link" not in [f.code for f in bare.report.findings]
    (note,) = [w.message for w in bare.report.warnings if w.code == "gpu_of_trace"]
    assert "collectives have no price, since their links are not known (--cluster names them)" in note
    priced, linked = bare.price(), measure_traces(file, TracedJob(cluster=Cluster.load("dgx_h100"))).price()
    assert (priced.step.time_s, priced.communication) == (None, ())
    assert priced.kernels == linked.kernels
    (kind,) = compare(priced, bare.report).kernels
    assert (kind.kind, kind.time_s.ratio) == ("matmul", pytest.approx(1, abs=0.2))


def test_tables_leave_out_the_outlier_that_is_named(tmp_path):
    file, alone_s = gathers(tmp_path, outlier_us=2000)

    def row(*steps):
        report = json.loads(CliRunner().invoke(app, ["profile", str(file), "--json", *steps]).stdout)
        named = "outlier_steps" in [f["code"] for f in report["findings"]]
        return named, report["communication"][0]["busy_s"], report["window"]["steps"]

    assert row() == (True, pytest.approx(alone_s, rel=1e-6), 4)
    assert row("--steps", "all") == (False, pytest.approx(alone_s + 0.002 / 5, rel=1e-6), 5)
    assert row("--steps", "3") == (False, pytest.approx(alone_s + 0.002, rel=1e-6), 1)
