"""Test the measurements of one GPU at toy size on CPU devices, and what a crash or a hang costs."""

import json
import random
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import checks, contention
from benchmarks.gpu.kernels import ADDED
from benchmarks.gpu.measurements import MEASUREMENTS, ROWS, Measurement
from meshkit.config.experiment import load

NAMES = [m.name for m in MEASUREMENTS]
QUICK = ("matmul", "copy", "attention", "small_kernels", "contention")
OWN = "benchmarks/gpu/experiments/llama_1b.toml"


def found_by(name, folder):
    """Return the values that a measurement finds at toy size."""
    (m,) = (m for m in MEASUREMENTS if m.name == name)
    return {key: value for part in m.run(folder, toy=True) for key, value in part.items()}


def stood_in(monkeypatch, ends):
    """Replace the measurements with ones that run the given code for at most a second, and return them."""

    def run(m, folder, toy):
        exec(ends[m.name])
        return iter(())

    monkeypatch.setattr(Measurement, "run", run)
    monkeypatch.setattr(Measurement, "limit_s", 1.0)
    chosen = [Measurement(name, 1, 0.0, "", "") for name in ends]
    monkeypatch.setattr(runner, "MEASUREMENTS", chosen)
    return chosen


def test_a_piece_fits_nine_minutes_and_every_experiment_loads():
    assert len(NAMES) == len(set(NAMES))
    for piece in (1, 2, 3):
        assert sum(m.expected_s for m in MEASUREMENTS if m.piece == piece) <= 9 * 60 - 10
    for m in MEASUREMENTS:
        path = m.options.get("experiment", OWN)
        for gpu in ("h100_sxm", "h200"):
            assert load(path, [f"cluster.gpu={gpu}", *m.options.get("settings", ())]).cluster.gpu.key == gpu


def test_the_list_is_printed_and_nothing_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "none"), "--dry-run"])
    runner.main()
    printed = capsys.readouterr().out
    for m in MEASUREMENTS:
        assert f"{m.piece}  {m.expected_s:4.0f} s  {m.name}" in printed
    assert [f"piece {piece}:" in printed for piece in (1, 2, 3)] == [True] * 3
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "nothing", "--dry-run"], "no measurement is called nothing: --dry-run lists them"),
        (["--minutes", "9"], "--out DIR"),
        (["--score", "/nowhere"], "there is no folder /nowhere"),
        (["--out", "x", "--resume", "/nowhere"], "there is no folder /nowhere"),
        (["--score", "."], "there is no result of `card`"),
        (["--out", "x"], "there is no NVIDIA GPU here; --toy"),
    ],
)
def test_a_wrong_argument_is_one_message_and_exit_code_2(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    monkeypatch.setattr(runner, "read_nvml", lambda: "no driver")
    with pytest.raises(SystemExit) as raised:
        runner.main()
    assert raised.value.code == 2
    assert says in capsys.readouterr().err


def test_a_crash_and_a_hang_cost_one_measurement_each_and_what_they_found_is_kept(tmp_path, monkeypatch):
    said = f"open({str(tmp_path / 'hang/values.json')!r}, 'w').write('{{\"found\": 1}}')"
    ends = {
        "crash": "import os; os.kill(os.getpid(), 9)",
        "hang": f"import time; {said}; time.sleep(600)",
        "good": "raise SystemExit",
    }
    chosen = stood_in(monkeypatch, ends)
    runner.run_all(chosen, tmp_path, time.monotonic() + 60, toy=False)
    found = {name: json.loads((tmp_path / name / runner.RESULT).read_text()) for name in ends}
    assert {name: result["status"] for name, result in found.items()} == {
        "crash": "failed with exit code -9",
        "hang": "stopped after 1 s",
        "good": "done",
    }
    assert found["hang"]["values"] == {"found": 1}
    with tarfile.open(tmp_path / "piece1.tar.gz") as archive:
        assert {f"{name}/result.json" for name in ends} <= set(archive.getnames())


def test_the_next_call_does_what_is_missing_then_what_failed_and_not_what_is_done(tmp_path, monkeypatch, capsys):
    ends = {"fails": "raise SystemExit(1)", "done": "raise SystemExit", "new": "raise SystemExit"}
    chosen = stood_in(monkeypatch, ends)
    runner.run_all(chosen[:2], tmp_path / "first", time.monotonic() + 60, toy=False)
    capsys.readouterr()
    runner.run_all(chosen, tmp_path / "second", time.monotonic() + 60, toy=False, earlier=[tmp_path / "first"])
    begun = [line.split(" ...")[0] for line in capsys.readouterr().out.splitlines() if " ... " in line]
    assert begun == ["new", "fails"]
    runner.run_all(chosen[1:], tmp_path / "second", time.monotonic() + 60, toy=False, earlier=[tmp_path / "first"])
    assert " ... " not in capsys.readouterr().out


def test_what_there_is_no_time_for_is_not_begun(tmp_path, capsys):
    runner.run_all([Measurement("long", 1, 500.0, "", "")], tmp_path, time.monotonic() + 100, toy=False)
    assert "long: 100 s are left, and it takes 500" in capsys.readouterr().out
    assert not (tmp_path / "long").exists()


def test_a_call_ends_by_itself_before_its_minutes_are_over(tmp_path, monkeypatch):
    chosen = stood_in(monkeypatch, {"a": "import time; time.sleep(600)", "b": "import time; time.sleep(600)"})
    monkeypatch.setattr(Measurement, "limit_s", 500.0)
    began = time.monotonic()
    runner.run_all(chosen, tmp_path, began + 2, toy=False)
    assert time.monotonic() - began < 6
    assert json.loads((tmp_path / "a/result.json").read_text())["status"] == "stopped after 2 s"
    assert not (tmp_path / "b").exists()


@pytest.mark.multiprocess
def test_a_call_that_is_told_to_end_ends_its_measurement_and_packs_what_there_is(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--toy", "--only", "preemption"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "preemption/run.log").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert json.loads((tmp_path / "preemption/result.json").read_text())["status"] == "interrupted"
    assert "piece1" not in said
    assert (tmp_path / "piece3.tar.gz").exists()


def test_an_archive_is_small_enough_to_travel_and_holds_the_small_files_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "MEASUREMENTS", [Measurement("m", 2, 0.0, "", "")])
    monkeypatch.setattr(runner, "MOST_BYTES", 100_000)
    folder = tmp_path / "m/run/checkpoints"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"0")
    for name, size in (("result.json", 10), ("a.pb", 60_000), ("b.pb", 70_000)):
        (tmp_path / "m" / name).write_bytes(random.Random(0).randbytes(size))
    packed = runner.pack(tmp_path, 2)
    with tarfile.open(packed) as archive:
        assert sorted(archive.getnames()) == ["m/a.pb", "m/result.json"]
    assert packed.stat().st_size <= 100_000
    assert "without m/b.pb" in capsys.readouterr().out
    assert runner.PACKED.format(2) == packed.name


def test_what_travels_back_is_three_archives_each_under_16_mib():
    assert len({m.piece for m in MEASUREMENTS}) <= 8
    assert runner.MOST_BYTES < 16 * 2**20


@pytest.mark.parametrize("name", QUICK)
def test_kernels_are_measured_at_toy_size(name, tmp_path):
    found = found_by(name, tmp_path)
    assert all(value > 0 for key, value in found.items() if key.endswith(("flops_per_s", "slowdown", " s")))
    asked = {
        "matmul": ["bf16 128 cubed burst_flops_per_s", "fp8 llama3_8b attention output flops_per_s"],
        "attention": ["64 burst forward_flops_per_s", "64 burst backward_flops_per_s"],
        "small_kernels": [f"{name} s" for name in ADDED],
        "contention": ["copy, 24 channels: slowdown", "matmul, copies from the host: slowdown"],
    }
    assert set(asked.get(name, ())) <= set(found)


class Library:
    """Stand in for the library compiled from `hold.cu`: record each request and return made-up answers."""

    def __init__(self):
        self.begun, self.running = [], False

    def begin(self, held, streaming, channels, pace, limit_s):
        assert not self.running
        self.running = True
        self.begun.append((held, streaming, channels, pace.value))
        return 0

    def finish(self, block_ns):
        assert self.running
        self.running, (_, _, channels, pace) = False, self.begun[-1]
        block_ns._obj.value = 1e9 * channels
        return 1e9 * channels * min(pace, 40.0) or 5e9  # No block moves more than 40 bytes a ns.

    def begin_copies(self, times):
        return 0

    def finish_copies(self, times):
        return 55e9


def test_what_a_collective_loses_beside_kernels_is_asked_at_the_pace_of_its_link_and_without(tmp_path, monkeypatch):
    library = Library()
    monkeypatch.setattr(contention, "build", lambda folder: library)
    real = contention.timed
    monkeypatch.setattr(contention, "timed", lambda program, operands, seconds: real(program, operands, 0.01))
    monkeypatch.setattr(contention, "compiled", lambda work, operands: lambda operands: 1.0)
    monkeypatch.setattr(contention.jax.random, "normal", lambda *_: None)
    found = {key: value for part in contention.measure(tmp_path, False) for key, value in part.items()}
    assert not library.running
    # NVLink asks each channel for 56 GB/s, but a block moves 40.
    assert found["24 channels, beside copy: bytes_per_s"] == pytest.approx(24 * 40e9)
    assert found["8 channels without a link, beside nothing: bytes_per_s"] == pytest.approx(8 * 40e9)
    assert found["copies from the host, beside matmul: bytes_per_s"] == 55e9
    assert {pace for *_, channels, pace in library.begun if channels == 24} == {1350 / 24, 1e6}
    assert found["copy, 8 blocks stream: streamed bytes_per_s"] > 0


@pytest.mark.deviceless
@pytest.mark.parametrize("name", checks.QUICK)
def test_what_a_card_is_asked_for_exists_here(name):
    pytest.importorskip("jax_plugins.xla_cuda12", reason="the `plan` extra is not installed")
    assert checks.outcome(checks.QUICK[name]).startswith("ok, ")


def test_what_a_plugin_lacks_is_named(monkeypatch, tmp_path):
    library = tmp_path / "xla_cuda_plugin.so"
    library.write_bytes(b"... enable_mock_nccl ...")
    monkeypatch.setattr(checks, "plugin_library", lambda: library)
    assert checks.outcome(checks.check_mock) == f"FAILED, {library} has no mock_gpu_topology"


def test_an_option_that_xla_lacks_is_named():
    from benchmarks.gpu.options import refused

    wrong = {"a": {"xla_gpu_no_such_option": 1}, "b": {"xla_gpu_cudnn_gemm_fusion_level": "high"}}
    assert refused(wrong) == [
        "xla_gpu_no_such_option: this XLA has no such option",
        "xla_gpu_cudnn_gemm_fusion_level: 'high' is not a whole number",
    ]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [name for name in NAMES if name not in QUICK])
def test_verbs_are_measured_at_toy_size(name, tmp_path):
    found = found_by(name, tmp_path)
    assert found.get("equal", True) is True
    assert found.get("exit code", 75) == (4 if name == "out_of_memory" else 75)
    assert found.get("remedy", True) is True
    assert found.get("traceback", False) is False
    assert found.get("verify exit code", 0) == 0
    assert json.dumps(found)


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "experiment", "fits"), [*checks.programs()], ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_is_rehearsed_or_trained_fits_one_h100(name, experiment, fits):
    checks.check_memory(experiment, fits)


def test_a_kernel_is_timed_for_the_seconds_that_are_given():
    from benchmarks.gpu import kernels

    def call(operands):
        time.sleep(0.01)
        return operands

    began = time.perf_counter()
    burst, sustained = kernels.timed(call, 1.0, 0.3)
    assert time.perf_counter() - began < 0.6
    assert 0.01 <= burst * kernels.REPEATS < 0.03
    assert 0.01 <= sustained * kernels.REPEATS < 0.03


def test_modules_of_measurements_start_no_device():
    """Processes fork after the modules are imported, and one process at a time uses the GPU."""
    modules = sorted({m.function.partition(":")[0] for m in (*MEASUREMENTS, *ROWS)})
    code = f"""
import importlib
from jax._src import xla_bridge
for name in {modules}:
    importlib.import_module("benchmarks.gpu." + name)
    assert not xla_bridge.backends_are_initialized(), name
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
