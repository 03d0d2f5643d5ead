"""Test how a folder of GPU results becomes tables and a calibration. All values here are made up."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.gpu import scoring
from meshkit.config import calibration, catalog
from meshkit.config.experiment import load
from meshkit.hlo.costs import Cost, Matmul
from meshkit.predict.kernels import kernel_work, measured_rates, memory_bytes_per_s
from meshkit.predict.pricing import arithmetic_left
from meshkit.report.schema import (
    CommunicationPart,
    KernelClassPart,
    KernelsPart,
    MemoryPart,
    Report,
    StepPart,
    WindowPart,
)
from tests.trace.h100 import run_folder

H100 = catalog.gpu("h100_sxm")
SQUARE = Matmul("bf16", 1, 8192, 8192, 8192)
# The model says that an H100 sustains these rates.
MATMUL = SQUARE.flops / kernel_work(Cost({"bf16": SQUARE.flops}, matmuls=(SQUARE,)), H100).alone_s
MEMORY = memory_bytes_per_s(H100)
MADE = {
    "card": {"gpu": "h100_sxm", "nvidia_smi": "made up", "versions": "meshkit 0.1.0, jax 0.11.2, jaxlib 0.11.2"},
    "matmul": {
        "bf16 8192 cubed burst_flops_per_s": MATMUL * 1.1,
        "bf16 8192 cubed sustained_flops_per_s": MATMUL,
        "bf16 power_w": 690.0,
        "fp8 8192 cubed sustained_flops_per_s": 1200e12,
        "bf16 llama3_8b up flops_per_s": 0.5 * MATMUL,
    },
    "copy": {"1048576 bytes_per_s": 1e12, "4294967296 bytes_per_s": 0.9 * MEMORY},
    "attention": {"4096 tokens": 16384, "4096 forward_flops_per_s": 500e12, "4096 backward_flops_per_s": 400e12},
    "small_kernels": {"rms norm s": 1e-4, "rms norm bytes_per_s": MEMORY / 2},
    "contention": {
        "matmul, 0 held: slowdown": 1.0,
        "matmul, 24 held: slowdown": 1 / arithmetic_left(H100, 24),
        "copy, 24 blocks stream: slowdown": 2.0,
        "copy, 24 blocks stream: streamed bytes_per_s": MEMORY / 2,
        "24 channels, beside nothing: bytes_per_s": 1000e9,
        "24 channels, beside copy: bytes_per_s": 800e9,
        "copy, 24 channels: slowdown": 1 / (1 - 1000e9 / MEMORY),
    },
    "xla_options": {
        "llama_1b, as meshkit sets them: step_s": 0.4,
        "llama_1b, no Triton matmuls: step_s": 0.5,
    },
    "bench": {"memory": MEMORY, "matmul bf16": 0.9 * MATMUL, "attention forward": 400e12},
    "live_captures": {"a step, captured s": 0.2, "captures": 4, "warnings": []},
    "preemption": {"exit code": 75, "verify exit code": 3},
    "kill_and_resume": {"killed exit code": -9, "equal": True},
    "out_of_memory": {"exit code": 4, "traceback": False, "remedy": True},
}


def report(source, step_s, compute_s, mfu_causal, peak_bytes, **kinds):
    classes = tuple(KernelClassPart(kind=kind, count=1, time_s=seconds) for kind, seconds in kinds.items())
    gathered = [("bf16", 2.0**30), ("mixed", 2.0**20)]  # The slower one is first; a trace may have the other order.
    communication = tuple(
        CommunicationPart(axes=("fsdp",), collective="all-gather", dtype=dtype, count=2, payload_bytes=size)
        for dtype, size in (gathered if source == "plan" else reversed(gathered))
    )
    return Report(
        source=source,
        window=WindowPart(steps=1, devices=1),
        step=StepPart(time_s=step_s, compute_s=compute_s, mfu_causal=mfu_causal),
        memory=MemoryPart(peak_bytes=peak_bytes),
        kernels=KernelsPart(classes=classes),
        communication=communication,
    )


def write(folder, name, values, toy=False, status="done"):
    (folder / name).mkdir(parents=True, exist_ok=True)
    result = {"name": name, "status": status, "seconds": 1.0, "toy": toy, "values": values}
    (folder / name / "result.json").write_text(json.dumps(result))


@pytest.fixture
def made(tmp_path):
    """Write a folder of made-up results, with plans and reports, and return its path."""
    for name, values in MADE.items():
        write(tmp_path, name, values)
    for name, values in {"train_llama_1b": {"step_time_s": 0.44, "compile_s": 20.0}, "rehearse_llama3_70b": {}}.items():
        write(tmp_path, name, values)
        report("plan", 0.42, 0.40, 0.5, 60_000_000_000, matmul=0.3, attention=0.1).write(tmp_path / name / "plan.json")
        report("profile", 0.50, 0.41, 0.44, 64_000_000_000, matmul=0.31, attention=0.12).write(
            tmp_path / name / "measured.json"
        )
    return tmp_path


def lines(text, name):
    """Return {what: (ratio, holds)} from the table of one measurement."""
    rows = text.split(f"(`{name}`)")[1].split("###")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if row.startswith("| ")]
    return {what: (ratio, holds) for what, _, _, ratio, holds in cells[1:]}


def test_every_question_has_a_table_of_predicted_measured_and_ratio(made):
    text = scoring.score(made)
    assert (made / "score.md").read_text() == text + "\n"
    trained, rehearsed = lines(text, "train_llama_1b"), lines(text, "rehearse_llama3_70b")
    # The step is 0.44 s without a trace and 0.50 s with one; the first counts.
    assert trained["step"] == ("1.048", "yes (within 10%)")
    assert trained["its compute"] == ("1.025", "yes (within 10%)")
    assert trained["mfu_causal"] == ("0.880", "no (at least 45%)")
    assert trained["peak of memory"] == ("1.067", "no (within 5%)")
    assert rehearsed["step"] == ("1.190", "no (within 10%)")
    assert rehearsed["matmul kernels"] == ("1.033", "yes (within 15%)")
    assert rehearsed["attention kernels"] == ("1.200", "no (within 15%)")
    assert rehearsed["the plan's collectives"] == ("", "yes")
    matmuls = lines(text, "matmul")
    assert matmuls["bf16 8192 cubed, sustained"][0] == "1.000"
    # The burst is also predicted faster than the sustained rate.
    assert 0.9 < float(matmuls["bf16 8192 cubed, burst"][0]) < 1.1
    assert 0.45 < float(matmuls["bf16 llama3_8b up"][0]) < 0.6
    assert matmuls["bf16 power_w"] == ("", "")
    assert lines(text, "copy")["4.00 GiB"][0] == "0.900"
    assert 0.8 < float(lines(text, "attention")["4096 forward"][0]) < 1.2
    assert lines(text, "small_kernels")["rms norm"][0] == "2.000"
    assert lines(text, "contention")["slowdown of a matmul, 24 held"][0] == "1.000"
    assert lines(text, "contention")["slowdown of a copy, 24 blocks stream"][0] == "1.000"
    # The ratio is to what the channels move alone.
    assert lines(text, "contention")["24 channels, beside copy"][0] == "0.800"
    assert lines(text, "contention")["slowdown of a copy, 24 channels"][0] == "1.000"
    assert lines(text, "bench") == {
        "memory": ("1.000", ""),
        "matmul bf16": ("0.900", ""),
        "attention forward": (lines(text, "bench")["attention forward"][0], ""),
    }
    assert 0.7 < float(lines(text, "bench")["attention forward"][0]) < 1.0
    assert lines(text, "live_captures")["a step, captured s"] == ("", "")
    assert lines(text, "xla_options")["llama_1b, no Triton matmuls: step_s"][0] == "1.250"
    assert lines(text, "preemption") == {"exit code": ("", "yes"), "verify exit code": ("", "no")}
    assert set(lines(text, "out_of_memory").values()) == {("", "yes")}
    assert text.splitlines()[-1].startswith("Of 17 promises 11 hold")


def test_the_calibration_is_one_that_a_plan_takes(made):
    scoring.score(made)
    found = calibration.load(made / "calibration.toml")
    assert found.rates.matmul_flops_per_s == pytest.approx({"bf16": MATMUL, "fp8": 1200e12})
    assert found.rates.attention_flops_per_s == {"forward": 500e12, "backward": 400e12}
    assert found.rates.memory_bytes_per_s == pytest.approx(0.9 * MEMORY)
    assert found.measured_on is not None
    assert (found.measured_on.gpu, found.measured_on.jaxlib) == ("h100_sxm", "0.11.2")
    experiment = load(scoring.LLAMA_1B, [f"cluster.calibration={made / 'calibration.toml'}"])
    assert measured_rates(experiment.cluster) == found.rates


def test_what_failed_is_said_and_what_is_missing_has_no_table(tmp_path):
    write(tmp_path, "card", MADE["card"])
    write(tmp_path, "matmul", {"bf16 8192 cubed sustained_flops_per_s": MATMUL}, status="stopped after 220 s")
    text = scoring.score(tmp_path)
    assert "It stopped after 220 s." in text
    assert lines(text, "matmul")["bf16 8192 cubed, sustained"][0] == "1.000"
    assert text.count("###") == 1


def test_a_run_on_cpu_devices_is_scored_with_nothing_predicted(tmp_path):
    write(tmp_path, "card", {"gpu": None, "nvidia_smi": "none", "checks": {"nvcc": "FAILED, none"}}, toy=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path), "--toy", "--only", "copy"]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    text = scoring.score(tmp_path)
    assert text.startswith("Measured on no GPU of the catalog")
    assert "- nvcc: FAILED, none" in text
    assert set(lines(text, "copy")) == {"64.0 KiB", "1.00 MiB"}
    assert {ratio for ratio, _ in lines(text, "copy").values()} == {""}
    found = calibration.load(tmp_path / "calibration.toml")
    assert found.rates.memory_bytes_per_s
    assert found.measured_on is not None
    assert found.measured_on.gpu == "cpu"


def test_a_training_is_read_from_its_trace_and_its_clock(tmp_path):
    write(tmp_path, "card", MADE["card"])
    write(tmp_path, "train_llama_1b", {"step_time_s": 0.7})  # The mean includes the steps that were traced.
    kinds = {"matmul": 0.344, "attention": 0.0727}
    report("plan", 0.516, 0.514, 0.5, 65_000_000_000, **kinds).write(tmp_path / "train_llama_1b/plan.json")
    run = run_folder(tmp_path / "train_llama_1b", "h100_llama_1b").rename(tmp_path / "train_llama_1b/run")
    clock = [{"step": i, "step_time_s": 0.55 if i < 18 else 0.7} for i in range(1, 26)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in clock))
    found = lines(scoring.score(tmp_path), "train_llama_1b")
    assert found["step"] == ("1.066", "yes (within 10%)")
    assert (found["matmul kernels"][0], found["attention kernels"][0]) == ("0.902", "1.579")


def test_a_peak_is_judged_by_the_plan_of_the_jaxlib_that_ran(made):
    folder = made / "rehearse_llama3_70b"
    for file, jaxlib, peak in (
        ("plan", "0.12.0.1", 50e9),
        ("plan-0.11.2", "0.11.2", 63e9),
        ("measured", "0.11.2", 64e9),
    ):
        path = folder / f"{file}.json"
        like = scoring.read_report(folder / f"{file.partition('-')[0]}.json")
        program = like.program.model_copy(update={"jaxlib": jaxlib})
        like.model_copy(update={"program": program, "memory": MemoryPart(peak_bytes=int(peak))}).write(path)
    found = lines(scoring.score(made), "rehearse_llama3_70b")
    assert found["peak of memory, planned by jaxlib 0.12.0.1, run by 0.11.2"] == ("1.280", "")
    assert found["peak of memory, planned by jaxlib 0.11.2"] == ("1.016", "yes (within 5%)")


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_plan_is_made_of_the_experiment_that_came_back(tmp_path):
    write(tmp_path, "card", MADE["card"])
    write(tmp_path, "small_trace", {"step_time_s": 0.01})
    cluster = "cluster={ gpu='h100_sxm', hosts=1, gpus_per_host=1, scale_up='nvlink', nic='ib_ndr', nics_per_host=1 }"
    experiment = load("configs/experiments/llama_debug_cpu.toml", [cluster, "mesh={ data = 1, fsdp = 1, tensor = 1 }"])
    (tmp_path / "small_trace/run").mkdir()
    (tmp_path / "small_trace/run/experiment.toml").write_text(replace(experiment, path=None).to_toml())
    text = scoring.score(tmp_path)
    planned = scoring.read_report(tmp_path / "small_trace/plan.json")
    assert planned.step.compute_s
    assert float(lines(text, "small_trace")["step"][0]) == pytest.approx(0.01 / planned.step.time_s, rel=1e-2)
