"""Test `meshkit bench`: verified collectives, the fit and files, on eight devices and on two processes with four."""

import io
import json
import math
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from meshkit.config import calibration
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.errors import ConfigError, RunError
from meshkit.predict.network import collective_time_s
from meshkit.verbs.bench import bencher
from meshkit.verbs.bench import measure as collectives
from meshkit.verbs.bench.bench_report import BenchReport, render, write_bench_html
from meshkit.verbs.bench.bencher import bench, fit_line, network_part
from meshkit.verbs.bench.measure import COPY_KIND, Kind, kinds, largest_size_bytes, make_case, measure

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENT = ROOT / "configs/experiments/llama_debug_cpu.toml"
SIZES = (1024, 262144)
BY_NAME = {kind.name: kind for kind in kinds("cpu")}
ROOTED = {"scatter", "gather", "reduce"}


def make_mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[BenchReport, Path]:
    out = tmp_path_factory.mktemp("bench")
    experiment = load(EXPERIMENT, ["mesh.data=", "mesh.fsdp=2", "mesh.tensor=4"])
    return bench(experiment, out, sizes=SIZES, case_budget_s=0.02, console=Console(quiet=True)), out


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("axis", ["outer", "inner"])
def test_every_collective_gives_what_numpy_gives(name, axis):
    mesh = make_mesh(outer=2, inner=4)
    case = make_case(BY_NAME[name], axis, mesh.shape[axis], 4096)
    found = measure(mesh, case, budget_s=0)
    assert found.wrong == 0
    roots = mesh.size // case.group_size if case.kind.root_only else mesh.size
    assert found.checked == roots * case.result_elements
    assert math.isfinite(found.time_s)
    assert found.time_s > 0


@pytest.mark.parametrize("name", [n for n in BY_NAME if n != "collective-permute"])
def test_groups_that_are_no_power_of_two(name):
    devices = np.array(jax.devices()[:6]).reshape(2, 3)
    mesh = jax.sharding.Mesh(devices, ("outer", "inner"))
    assert measure(mesh, make_case(BY_NAME[name], "inner", 3, 3000), budget_s=0).wrong == 0


def test_a_copy_stays_on_its_device():
    found = measure(make_mesh(x=8), make_case(COPY_KIND, None, 1, 4096), budget_s=0)
    assert (found.wrong, found.checked) == (0, 8 * 1024)


def test_large_results_are_checked_in_samples():
    case = make_case(BY_NAME["all-reduce"], "x", 8, 2**23)
    found = measure(make_mesh(x=8), case, budget_s=0)
    assert found.wrong == 0
    assert 8 * 2**19 < found.checked <= 8 * 2**20 < 8 * case.result_elements


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("all-reduce", lambda x, axis, n: jax.lax.psum(x, axis).at[3].add(1)),
        ("all-gather", lambda x, axis, n: jax.numpy.roll(jax.lax.all_gather(x, axis, tiled=True), x.size)),
        ("collective-permute", lambda x, axis, n: x),
        ("all-to-all", lambda x, axis, n: x),
    ],
)
def test_a_collective_that_errs_is_caught(name, run):
    kind: Kind = replace(BY_NAME[name], run=run)
    found = measure(make_mesh(x=8), make_case(kind, "x", 8, 4096), budget_s=0)
    assert found.wrong > 0


def test_sizes_and_counts_are_those_of_nccl_tests():
    assert make_case(BY_NAME["all-reduce"], "x", 8, 4096).count == 1024
    gather = make_case(BY_NAME["all-gather"], "x", 8, 4096)
    assert (gather.count, gather.operand_elements, gather.result_elements) == (128, 128, 1024)
    scatter = make_case(BY_NAME["reduce-scatter"], "x", 8, 4096)
    assert (scatter.count, scatter.operand_elements, scatter.result_elements) == (128, 1024, 128)
    assert make_case(BY_NAME["all-to-all"], "x", 3, 4096).size_bytes == 4092  # The size is in whole pieces.
    assert make_case(BY_NAME["all-gather"], "x", 8, 1).size_bytes == 32  # This is one element of each device.
    assert make_case(BY_NAME["barrier"], "x", 8, 4096).size_bytes == 4


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all-reduce", 2 * 7 / 8),
        ("all-gather", 7 / 8),
        ("reduce-scatter", 7 / 8),
        ("all-to-all", 7 / 8),
        ("scatter", 7 / 8),
        ("gather", 7 / 8),
        ("reduce", 1),
        ("collective-broadcast", 1),
        ("collective-permute", 1),
        ("barrier", None),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(name, factor):
    assert BY_NAME[name].bus_factor(8) == factor


def test_gpus_broadcast_natively():
    (kind,) = [k for k in kinds("gpu") if k.name == "collective-broadcast"]
    assert kind.emulated is None
    mesh = make_mesh(x=8)
    spec = jax.sharding.PartitionSpec("x")
    run = jax.shard_map(lambda x: kind.run(x, "x", 8), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(run).trace(jax.ShapeDtypeStruct((64,), np.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "collective_broadcast" in text
    assert {k.name for k in kinds("gpu") if k.emulated} == {*ROOTED, "barrier"}


def test_operands_on_device_and_host_are_alike():
    made = jax.jit(collectives.make_operand, static_argnums=1)(jax.numpy.int32(70_000), 20_000)
    np.testing.assert_array_equal(made, collectives.operand_values(70_000, np.arange(20_000)))


def test_the_fit_finds_a_line_in_spite_of_outliers():
    sizes = 4.0 ** np.arange(5, 15)
    times = 20e-6 + sizes / 3e9
    times[4] *= 5
    line = fit_line(list(sizes), list(times))
    assert line is not None
    # Errors below 0.1 % have equal weights, so the line may be off by about as much.
    assert line.latency_s == pytest.approx(20e-6, rel=5e-3)
    assert line.bytes_per_s == pytest.approx(3e9, rel=5e-3)
    assert line.residual_median < 5e-3


def test_the_fit_stays_physical():
    sizes = [1e3, 1e4, 1e5, 1e6]
    for times in ([4e-5, 3e-5, 2e-5, 1e-5], [2e-5] * 4, [1e-9, 1e-6, 1e-4, 1e-2]):
        line = fit_line(sizes, times)
        assert line is not None
        assert line.latency_s >= 0
        assert 0 < line.bytes_per_s < math.inf
        assert math.isfinite(line.residual_median)
    assert fit_line([1e3], [1e-5]) is None
    assert fit_line([1e3, 1e3], [1e-5, 2e-5]) is None


def test_times_that_do_not_grow_are_fitted_at_every_size():
    sizes = 4.0 ** np.arange(5, 15)
    noise = 1 + 0.05 * np.cos(3 * np.arange(10))  # The largest size took less time than the smallest.
    for times in (np.full(10, 2e-5), 2e-5 * noise, 2e-5 * noise * np.linspace(1.1, 0.9, 10)):
        line = fit_line(list(sizes), list(times))
        assert line is not None
        fitted = line.latency_s + sizes / line.bytes_per_s
        assert fitted / times == pytest.approx(1, abs=2 * line.residual_p90 + 2e-3)
        assert line.residual_p90 < 0.15
        assert max(sizes / times) <= line.bytes_per_s < math.inf


def test_a_bench_measures_every_axis_and_collective(measured):
    report, _ = measured
    assert report.wrong == 0
    seen = {(row.axes, row.collective, row.size_bytes) for row in report.rows}
    for axis in ("fsdp", "tensor"):
        for name in set(BY_NAME) - {"barrier"}:
            assert {size for axes, n, size in seen if (axes, n) == ((axis,), name)} == set(SIZES)
        assert ((axis,), "barrier", 4) in seen
    assert {size for axes, name, size in seen if name == "copy"} == set(SIZES)
    assert all(row.emulated for row in report.rows if row.collective in ROOTED)
    for row in report.rows:
        if row.collective == "all-reduce":
            n = row.group_size
            assert row.algorithm_bandwidth_bytes_per_s == pytest.approx(row.size_bytes / row.time_s)
            assert row.bus_bandwidth_bytes_per_s == pytest.approx(2 * (n - 1) / n * row.size_bytes / row.time_s)


def test_the_fit_is_reported_with_its_residual(measured):
    report, _ = measured
    assert {(f.collective, f.gpus_per_domain) for f in report.fits} == {
        (name, n) for name in set(BY_NAME) - {"barrier"} for n in (2, 4)
    }
    assert all(math.isfinite(f.residual_median) and f.points == len(SIZES) for f in report.fits)
    assert report.residual_median is not None
    assert math.isfinite(report.residual_median)


def test_rates_are_measured(measured):
    rates = measured[0].rates
    assert rates.matmul_flops_per_s["fp32"] > 0
    assert set(rates.attention_flops_per_s) == {"forward", "backward"}
    assert rates.memory_bytes_per_s is not None


def test_its_json_is_read_back(measured):
    report, out = measured
    text = (out / "bench.json").read_text()
    assert json.loads(text)["schema"] == "meshkit.bench/1"
    assert BenchReport.model_validate_json(text) == report
    assert set(json.loads(text)) <= set(BenchReport.model_json_schema(mode="serialization")["properties"])


def test_its_calibration_leaves_out_what_xla_does_not_have(measured):
    report, out = measured
    found = calibration.load(out / "calibration.toml")
    assert found == report.calibration()
    assert {f.collective for f in found.fits} == set(calibration.COLLECTIVES) - {"collective-broadcast"}
    exact = found.find("nvlink", "all-reduce", 4, 1)
    assert exact is not None
    assert (exact.gpus_per_domain, exact.domains) == (4, 1)
    assert found.measured_on is not None
    assert found.measured_on.devices == 8
    assert found.rates.matmul_flops_per_s == report.rates.matmul_flops_per_s


def test_a_cluster_file_can_name_its_calibration(measured):
    report, out = measured
    cluster = load(EXPERIMENT, [f"cluster={{name='cpu8', calibration='{out}/calibration.toml'}}"]).cluster
    (fitted,) = [f for f in report.fits if f.collective == "all-gather" and f.gpus_per_domain == 4]
    seconds = collective_time_s("all-gather", payload_bytes=2**20, gpus_per_domain=4, cluster=cluster)
    assert seconds == pytest.approx(fitted.latency_s + 3 / 4 * 2**20 / fitted.bytes_per_s)


def test_what_gpus_say_of_the_network_model(measured, tmp_path):
    """With rows like an H100's, the constants stand in the report, on the page, and in the calibration."""
    report, _ = measured
    assert report.network is None  # There is no NCCL between CPUs.
    cluster = Cluster.load("dgx_h100")
    (template, *_) = (row for row in report.rows if row.collective == "all-reduce")
    made = [
        template.model_copy(
            update={
                "collective": kind,
                "gpus_per_domain": 8,
                "size_bytes": size,
                "time_s": 1.2 * collective_time_s(kind, payload_bytes=size, gpus_per_domain=8, cluster=cluster),
            }
        )
        for kind in ("all-reduce", "all-gather")
        for size in (2**n for n in range(12, 31, 2))
    ]
    network = network_part([*made, *(row for row in report.rows if row.emulated)], cluster)
    assert network is not None
    assert network.points == len(made)
    assert network.error_after < network.error_before
    told = report.model_copy(update={"network": network})
    kept = told.calibration().network
    assert kept is not None
    assert kept.constants == {one.name: one.value for one in network.constants}
    out = io.StringIO()
    Console(width=80, file=out).print(render(told))
    assert f"{network.points} collectives: median error" in out.getvalue()
    assert "nvlink_rate" in write_bench_html(told, tmp_path / "bench.html").read_text()


def test_the_terminal_has_eighty_columns(measured):
    out = io.StringIO()
    Console(width=80, file=out).print(render(measured[0], title="debug"))
    text = out.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for word in ("#wrong", "busbw", "emulated by all-gather", "all of them equal numpy's", "matmul fp32"):
        assert word in text


def test_the_page_plots_bus_bandwidth_against_size(measured):
    _, out = measured
    page = (out / "bench.html").read_text()
    figures = json.loads(page.split('id="figures">')[1].split("</script>")[0])
    assert set(figures) == {"axis-0", "axis-1", "copy"}
    marks = [d for d in figures["axis-0"]["data"] if d["mode"] == "lines+markers"]
    assert len(marks) == len(set(BY_NAME) - {"barrier"})
    assert marks[0]["x"] == list(SIZES)
    assert figures["axis-0"]["layout"]["xaxis"]["type"] == "log"
    assert "http" not in page.split('id="plotly"')[0].replace("http-equiv", "")


def test_a_spent_budget_leaves_out_sizes_and_says_so():
    experiment = load(EXPERIMENT, ["mesh.data=", "mesh.fsdp=2", "mesh.tensor=4"])
    report = bench(experiment, None, sizes=[1024], budget_s=0.0, rates=False, console=Console(quiet=True))
    assert not report.rows
    assert report.residual_median is None
    assert any(w.code == "budget" and "1.00 KiB" in w.message for w in report.warnings)


def test_a_size_that_does_not_fit_says_so(monkeypatch):
    def exhaust(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 64.00GiB.")

    monkeypatch.setattr(bencher, "measure", exhaust)
    with pytest.raises(RunError, match=r"asked for 64\.0 GiB at once[\s\S]*try smaller --sizes"):
        bench(load(EXPERIMENT), None, sizes=[1024], rates=False, console=Console(quiet=True))


def test_no_size_is_an_error():
    with pytest.raises(ConfigError, match="sizes of at least 1 byte"):
        bench(load(EXPERIMENT), None, sizes=[], console=Console(quiet=True))


def test_sizes_end_where_memory_does():
    mesh = make_mesh(x=8)
    assert largest_size_bytes(mesh, 2**40) == 2**26
    assert largest_size_bytes(mesh, 2**26) == 2**26 // 8 // 2 // 4


PROCESS = """
    import sys
    import jax

    process, port = int(sys.argv[1]), sys.argv[2]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    from rich.console import Console
    from meshkit.verbs.bench.bencher import bench
    from meshkit.config.experiment import load

    cluster = "cluster={gpu='cpu', hosts=2, gpus_per_host=4, scale_up='shared_memory'}"
    experiment = load(sys.argv[3], [cluster, "mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4"])
    bench(experiment, sys.argv[4], sizes=[1024, 65536], case_budget_s=0.0, rates=False, console=Console(quiet=True))
    assert len(jax.local_devices()) == 4
    jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_of_four_devices(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "process.py"
    script.write_text(textwrap.dedent(PROCESS))
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(process), str(port), str(EXPERIMENT), str(tmp_path)],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=120)[0] for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0, 0], "\n".join(outputs)
    report = BenchReport.model_validate_json((tmp_path / "bench.json").read_text())
    assert report.wrong == 0
    assert (report.devices.processes, report.devices.count) == (2, 8)
    assert {(row.axes, row.link, row.domains) for row in report.rows if row.axes} == {
        (("data",), "infiniband", 2),
        (("tensor",), "nvlink", 1),
    }
    every = {row.collective for row in report.rows}
    assert every == {*BY_NAME, "copy"}
    for row in report.rows:
        # Those of all devices are counted, not only of the first process's.
        if row.collective in ("all-reduce", "copy"):
            assert row.checked == 8 * row.count
    found = calibration.load(tmp_path / "calibration.toml")
    assert found.find("infiniband", "all-reduce", 1, 2) is not None
