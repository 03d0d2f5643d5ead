"""Seconds of a kernel: the roofline by hand, and the measured rates of a calibration in it."""

import pytest

import meshkit as mk
from meshkit.spec import calibration
from meshkit.spec.calibration import Calibration, MeasuredOn, Rates
from meshkit.timeline.kernels import calibration_note, kernel_time_s, measured_rates
from meshkit.timeline.simulate import simulate
from meshkit.xla.costs import Cost
from meshkit.xla.hlo import Instruction, Schedule

H100 = mk.Cluster.load("dgx_h100").gpu
BF16, FP8, TF32 = (H100.peak_flops[p] * H100.achieved["matmul"] for p in ("bf16", "fp8", "tf32"))
ATTENTION = H100.peak_flops["bf16"] * H100.achieved["attention"]
MEMORY = H100.memory_bytes_per_s * H100.achieved["memory"]


def calibrated(folder, rates, gpu="h100_sxm"):
    machine = MeasuredOn(gpu, "nvlink", 8, "2026-11-21T12:00:00+00:00", "0.12.0.1", "0.12.0", "infiniband")
    path = calibration.write(folder / "calibration.toml", Calibration((), machine, rates))
    return mk.Cluster.load("dgx_h100", calibration=str(path))


def seconds_of(cost, cluster):
    schedule = Schedule("test", {"entry": (Instruction("k", "fusion", "kernel", cost=cost),)}, "entry", "0")
    compute = simulate(schedule, cluster).timeline.steps[0].compute
    return float((compute[:, 1] - compute[:, 0]).sum())


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost({"bf16": 1e12}), 1e12 / BF16),
        (Cost({"f8e4m3fn": 1e12}), 1e12 / FP8),
        (Cost({"f32": 1e12}), 1e12 / TF32),
        (Cost({"bf16": 1e12, "f32": 1e12}), 1e12 / BF16 + 1e12 / TF32),
        (Cost(attention_flops=1e12), 1e12 / ATTENTION),
        (Cost(attention_flops=1e12, attention_backward=True), 1e12 / ATTENTION / H100.achieved["attention_backward"]),
        (Cost({"bf16": 1e6}, bytes_accessed=1e9), 1e9 / MEMORY),
    ],
)
def test_the_slower_of_compute_and_memory(cost, seconds):
    assert kernel_time_s(cost, H100) == pytest.approx(seconds)


def test_host_memory_is_reached_as_fast_as_the_link_of_all_gpus_at_once_sustains():
    cluster = mk.Cluster.load("dgx_h100")
    link = cluster.offload_link()
    assert seconds_of(Cost(host_bytes=1e9), cluster) == pytest.approx(1e9 / (link.bytes_per_s * link.achieved))


def test_half_the_matmul_rate_is_twice_the_time_of_what_is_bound_by_it(tmp_path):
    cluster = calibrated(tmp_path, Rates({"bf16": BF16 / 2}))
    plain = mk.Cluster.load("dgx_h100")
    assert seconds_of(Cost({"bf16": 1e12}), cluster) == pytest.approx(2 * seconds_of(Cost({"bf16": 1e12}), plain))
    for untouched in (
        Cost({"f32": 1e12}),
        Cost({"f8e5m2": 1e12}),
        Cost(attention_flops=1e12),
        Cost(bytes_accessed=1e9),
    ):
        assert seconds_of(untouched, cluster) == pytest.approx(seconds_of(untouched, plain))


@pytest.mark.parametrize(
    ("rates", "cost", "seconds"),
    [
        (Rates({"tf32": 1e14}), Cost({"f32": 1e12}), 0.01),
        (Rates({"fp32": 1e13}), Cost({"f32_highest": 1e12}), 0.1),
        (Rates({}, {"forward": 1e14}), Cost(attention_flops=1e12), 0.01),
        (Rates({}, {"backward": 1e14}), Cost(attention_flops=1e12, attention_backward=True), 0.01),
        (Rates(memory_bytes_per_s=1e12), Cost(bytes_accessed=1e9), 1e-3),
        (Rates({"bf16": 1e20}), Cost({"bf16": 1e12}), 1e12 / H100.peak_flops["bf16"]),  # no more than the peak
        (Rates(memory_bytes_per_s=1e20), Cost(bytes_accessed=1e9), 1e9 / H100.memory_bytes_per_s),
    ],
)
def test_measured_rates_come_first_and_never_exceed_a_peak(rates, cost, seconds):
    assert kernel_time_s(cost, H100, rates) == pytest.approx(seconds)


def test_rates_of_another_gpu_are_not_used_and_the_note_says_so(tmp_path):
    cluster = calibrated(tmp_path, Rates({"fp32": 1e9}), gpu="cpu")
    assert measured_rates(cluster) == Rates()
    note = calibration_note(cluster) or ""
    assert "measured on 8 x cpu on 2026-11-21: nothing of it; its rates are not of a h100_sxm" in note


def test_the_note_names_the_file_and_what_it_gives(tmp_path):
    cluster = calibrated(tmp_path, Rates({"bf16": 6e14}, {}, 3e12))
    assert calibration_note(cluster) == (
        f"calibrated by {tmp_path}/calibration.toml, measured on 8 x h100_sxm on 2026-11-21: "
        "bf16 matmuls at 600 TFLOP/s, memory at 3.00 TB/s"
    )
    assert calibration_note(mk.Cluster.load("dgx_h100")) is None


def test_a_calibration_that_changed_is_read_again(tmp_path):
    cluster = calibrated(tmp_path, Rates({"bf16": 1e14}))
    assert measured_rates(cluster).matmul_flops_per_s == {"bf16": 1e14}
    calibration.write(tmp_path / "calibration.toml", Calibration((), None, Rates({"bf16": 2e14, "tf32": 1e14})))
    assert measured_rates(cluster).matmul_flops_per_s == {"bf16": 2e14, "tf32": 1e14}
