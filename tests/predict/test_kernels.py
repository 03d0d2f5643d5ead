"""Test seconds of a kernel: the roofline by hand, and the measured rates of a calibration in it."""

from dataclasses import replace

import pytest

import meshkit as mk
from meshkit.config import calibration, catalog
from meshkit.config.calibration import Calibration, MeasuredOn, Rates
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.kernels import (
    attention_share,
    calibration_note,
    full_clock,
    kernel_work,
    measured_rates,
    step_gain,
)
from meshkit.predict.simulate import simulate

H100 = mk.Cluster.load("dgx_h100").gpu
BF16, TF32 = (H100.peak_flops[p] * H100.achieved["matmul"] for p in ("bf16", "tf32"))
FP8 = H100.peak_flops["fp8"] * H100.achieved["matmul_fp8"]
FULL = full_clock(H100, "bf16")
# These are the full clock's rates over those of a long run.
FORWARD, BACKWARD = ((FULL / power ** (-1 / 2.92)) ** 1.3 for power in (0.79, 0.65))
ATTENTION = H100.peak_flops["bf16"] * H100.achieved["attention"] / FORWARD  # This is the rate of a long run.
ATTENTION_BACK = ATTENTION * H100.achieved["attention_backward"] * FORWARD / BACKWARD
MEMORY = H100.memory_bytes_per_s * H100.achieved["memory"]


def calibrated(folder, rates, gpu="h100_sxm"):
    machine = MeasuredOn(gpu=gpu, scale_up="nvlink", devices=8, date="2026-11-21", jax="0.12.0.1", jaxlib="0.12.0")
    path = calibration.write(folder / "calibration.toml", Calibration((), machine, rates))
    return mk.Cluster.load("dgx_h100", calibration=str(path))


def seconds_of(cost, cluster):
    """Return the seconds on an average GPU; `slowest` is tested with the simulator."""
    schedule = Schedule("test", {"entry": (Instruction("k", "fusion", "kernel", cost=cost),)}, "entry", "0")
    compute = simulate(schedule, cluster, assumptions=Assumptions(slowest=False)).timeline.steps[0].compute
    return float((compute[:, 1] - compute[:, 0]).sum())


@pytest.mark.parametrize(
    ("cost", "seconds"),
    [
        (Cost({"bf16": 1e12}), 1e12 / BF16),
        (Cost({"f8e4m3fn": 1e12}), 1e12 / FP8),
        (Cost({"f32": 1e12}), 1e12 / TF32),
        (Cost({"bf16": 1e12, "f32": 1e12}), 1e12 / BF16 + 1e12 / TF32),
        (Cost(attention_flops=1e12), 1e12 / ATTENTION),
        (Cost(attention_flops=1e12, attention_backward=True), 1e12 / ATTENTION_BACK),
        (Cost({"bf16": 1e6}, bytes_accessed=1e9), 1e9 / MEMORY),
    ],
)
def test_the_slower_of_compute_and_memory(cost, seconds):
    assert kernel_work(cost, H100).alone_s == pytest.approx(seconds)


def test_host_memory_is_reached_as_fast_as_the_link_of_all_gpus_at_once_sustains():
    cluster = mk.Cluster.load("dgx_h100")
    link = cluster.offload_link()
    assert seconds_of(Cost(host_bytes=1e9), cluster) == pytest.approx(1e9 / (link.bytes_per_s * link.achieved))


def test_half_the_matmul_rate_is_twice_the_time_of_what_is_bound_by_it(tmp_path):
    cluster = calibrated(tmp_path, Rates(matmul_flops_per_s={"bf16": BF16 / 2}))
    plain = mk.Cluster.load("dgx_h100")
    twice = 2 * seconds_of(Cost({"bf16": 1e12}), plain)
    assert seconds_of(Cost({"bf16": 1e12}), cluster) == pytest.approx(twice, rel=1e-3)  # The launch stays the same.
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
        (Rates(matmul_flops_per_s={"tf32": 1e14}), Cost({"f32": 1e12}), 0.01),
        (Rates(matmul_flops_per_s={"fp32": 1e13}), Cost({"f32_highest": 1e12}), 0.1),
        (Rates(attention_flops_per_s={"forward": 1e14}), Cost(attention_flops=1e12), 0.01),
        (Rates(attention_flops_per_s={"backward": 1e14}), Cost(attention_flops=1e12, attention_backward=True), 0.01),
        (Rates(memory_bytes_per_s=1e12), Cost(bytes_accessed=1e9), 1e-3),
        # A rate never exceeds the peak.
        (
            Rates(matmul_flops_per_s={"bf16": 1e20}),
            Cost({"bf16": 1e12}),
            1e12 / H100.peak_flops["bf16"],
        ),
        (Rates(memory_bytes_per_s=1e20), Cost(bytes_accessed=1e9), 1e9 / H100.memory_bytes_per_s),
    ],
)
def test_measured_rates_come_first_and_never_exceed_a_peak(rates, cost, seconds):
    assert kernel_work(cost, H100, rates).alone_s == pytest.approx(seconds)


def test_rates_of_another_gpu_are_not_used_and_the_note_says_so(tmp_path):
    cluster = calibrated(tmp_path, Rates(matmul_flops_per_s={"fp32": 1e9}), gpu="cpu")
    assert measured_rates(cluster) == Rates()
    note = calibration_note(cluster) or ""
    assert "measured on 8 x cpu on 2026-11-21: nothing; its rates are not for a h100_sxm" in note


def test_the_note_names_the_file_and_what_it_gives(tmp_path):
    cluster = calibrated(tmp_path, Rates(matmul_flops_per_s={"bf16": 6e14}, memory_bytes_per_s=3e12))
    assert calibration_note(cluster) == (
        f"calibrated by {tmp_path}/calibration.toml, measured on 8 x h100_sxm on 2026-11-21: "
        "bf16 matmuls at 600 TFLOP/s, memory at 3.00 TB/s"
    )
    assert calibration_note(mk.Cluster.load("dgx_h100")) is None


def test_a_calibration_that_changed_is_read_again(tmp_path):
    cluster = calibrated(tmp_path, Rates(matmul_flops_per_s={"bf16": 1e14}))
    assert measured_rates(cluster).matmul_flops_per_s == {"bf16": 1e14}
    calibration.write(
        tmp_path / "calibration.toml", Calibration((), None, Rates(matmul_flops_per_s={"bf16": 2e14, "tf32": 1e14}))
    )
    assert measured_rates(cluster).matmul_flops_per_s == {"bf16": 2e14, "tf32": 1e14}


def attention(length, heads=64, causal=True, backward=False, sequences=1, head_dim=128):
    flops = 4.0 * sequences * heads * length**2 * head_dim * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return Cost(attention_flops=flops, attention_backward=backward, attention_queries=sequences * heads * length,
                attention_length=length, attention_head_dim=head_dim, attention_causal=causal)  # fmt: skip


def attention_flops_per_s(cost, gpu=H100, busy=0.0):
    """Return the rate at the full clock, as in benchmarks of single kernels."""
    return cost.attention_flops / kernel_work(cost, gpu, busy=busy).alone_s


@pytest.mark.parametrize(
    ("gpu", "sequences", "length", "causal", "backward", "tflops"),
    [  # These rows are of NVIDIA/cudnn-frontend@3929da2, benchmark/sdpa_benchmark_training: llama3.1, 64 heads, bf16.
        ("h200", 1, 2048, True, False, 484), ("h200", 1, 4096, True, False, 591), ("h200", 1, 16384, True, True, 579),
        ("h200", 1, 4096, False, True, 560), ("gb200", 2, 8192, True, False, 1574),
        ("gb200", 2, 4096, True, True, 1148),
        ("gb300", 2, 4096, True, False, 1703), ("gb300", 2, 8192, False, True, 1531),
    ],
)  # fmt: skip
def test_attention_is_as_fast_as_cudnn_was_measured(gpu, sequences, length, causal, backward, tflops):
    cost = attention(length, 64, causal, backward, sequences)
    # The rates have three digits.
    assert attention_flops_per_s(cost, catalog.gpu(gpu)) == pytest.approx(tflops * 1e12, rel=5e-3)


@pytest.mark.parametrize(
    ("heads", "backward", "tflops", "rel"),
    [
        # Llama 1B on an H100 with cuDNN 9.19 has 387 and 316 at the clock of its step, which keeps (1.146 / 1.255)^1.3
        # of the rate at the full one. The share is the mean of two cards' trainings, which differ by 4 % from it.
        ((32, 64), False, 435, 0.03),
        ((32, 64), True, 355, 0.03),
        ((32, 128), False, 619, 5e-3),  # Larger heads have their usual rates.
        ((32, 256), False, 619, 5e-3),
    ],
)
def test_small_heads_are_slower_on_hopper(heads, backward, tflops, rel):
    cost = attention(4096, heads[0], backward=backward, sequences=8, head_dim=heads[1])
    assert attention_flops_per_s(cost) == pytest.approx(tflops * 1e12, rel=rel)


def test_a_head_between_costs_its_exponentials_and_an_a100_hides_them():
    shares = [1 / attention_share(attention(4096, head_dim=d), H100) for d in (128, 96, 64, 32)]
    beside = shares[2] - shares[0]
    assert shares[1] == pytest.approx(shares[0] + beside / 3)
    assert shares[3] == pytest.approx(shares[0] + 3 * beside)
    a100 = catalog.gpu("a100_80gb")
    assert attention_share(attention(4096, head_dim=64), a100) == attention_share(attention(4096), a100)


def test_a_fill_takes_as_long_as_its_blocks_take_to_start():
    """Llama 3 8B on an H100 filled 2.1 GB of bf16 in 1.261 ms, and fp32 at the rate of memory."""
    elements = 32 * 8192 * 4096
    narrow, wide = (Cost(bytes_accessed=float(elements * size), blocks=elements / 512) for size in (2, 4))
    assert kernel_work(narrow, H100).alone_s == pytest.approx(1.261e-3, rel=0.01)
    assert kernel_work(wide, H100).alone_s == pytest.approx(4 * elements / MEMORY)


@pytest.mark.parametrize(
    ("gpu", "made", "seconds"),
    [
        ("h100_sxm", "joined_bytes", 1e9 / MEMORY),
        ("h100_sxm", "turned_bytes", 0.5e9 * 0.255 / (132 * 1.98e9)),
        ("b200", "turned_bytes", 0.0),
    ],
)
def test_operands_are_made_before_a_matmul_begins(gpu, made, seconds):
    found = catalog.gpu(gpu)
    alone, with_it = (kernel_work(Cost({"bf16": 1e12}, **kinds), found).alone_s for kinds in ({}, {made: 1e9}))
    assert with_it == pytest.approx(alone + seconds)


@pytest.mark.parametrize(
    ("cost", "microseconds"),
    [
        # Llama 8B, tensor 4: the tokens of a quarter of the table.
        (Cost(bytes_accessed=1.08e9, sectors=131072 * 4096 / 4), 1085.0),
        (Cost(bytes_accessed=7.4e8, sectors=8192 * 4096), 261.0),  # Llama 8B, fsdp 16.
        (Cost(bytes_accessed=1.48e9, sectors=8192 * 8192), 527.0),  # Llama 70B.
        (Cost(bytes_accessed=2.0 * 8192 * 32768, transposed=8192 * 32768), 260.0),  # fp8 activations of Llama 1B.
        (Cost(bytes_accessed=2.0 * 2048 * 32768, transposed=2048 * 32768), 68.5),
        (Cost(bytes_accessed=2.0 * 4096 * 14336 * 4, transposed=4096 * 14336), 166.0),  # In fp32, memory decides.
        (Cost(bytes_accessed=4.03e8, blocks=131072 * 4), 318.0),  # Heads of 4, 1 and 1 are joined.
        (Cost(bytes_accessed=5.6e5, compared=(90, 4096, 8192)), 39.6),  # This is the mean of 35.6 and 43.6, by payload.
    ],
)
def test_kernels_that_memory_does_not_decide_take_what_an_h100_took(cost, microseconds):
    """One card took these times on 2026-11-22, kernel by kernel of programs of `benchmarks/gpu`."""
    assert kernel_work(cost, H100).alone_s * 1e6 == pytest.approx(microseconds, rel=0.09)


@pytest.mark.parametrize(
    ("elements", "microseconds"),
    [((33554432.0, 0.0), 61.3), ((67108864.0, 0.0), 114.7), ((0.0, 33554432.0), 447.8)],
)
def test_additions_of_a_scatter_are_made_in_the_cache_one_by_one(elements, microseconds):
    """The same card added gradients to tables of which 256 rows were hit, so that memory decides nothing.

    The rates are another H100's (catalog, `atomics`).
    """
    cost = Cost(bytes_accessed=2 * sum(elements), added=elements, blocks=sum(elements) / 512)
    assert kernel_work(cost, H100).alone_s * 1e6 == pytest.approx(microseconds, rel=0.13)


def test_a_sliding_window_takes_the_time_of_the_blocks_that_its_band_touches():
    """A band of 128 keys touches two blocks of 128 for each block of queries; a causal pass over 16k touches 64.5."""
    whole = attention(16384)
    band = replace(whole, attention_flops=2 * whole.attention_flops * (2**-7 - 2**-15), attention_window=128)
    found, causal = (kernel_work(cost, H100, busy=0.0).alone_s for cost in (band, whole))
    blocks = 2 / 64.5
    assert blocks < found / causal < 2 * blocks  # Short passes, of 512 tokens and fewer, are slower besides.
    wide = replace(band, attention_flops=whole.attention_flops * (1 - 2**-2), attention_window=8192)
    assert attention_flops_per_s(wide) == pytest.approx(attention_flops_per_s(whole), rel=0.02)


def test_below_the_measured_lengths_attention_falls_as_in_flashattention_3s_charts():
    half, whole = (attention_flops_per_s(attention(n, 16, sequences=16384 // n)) for n in (1024, 2048))
    assert half / whole == pytest.approx(0.792 / 0.934, rel=1e-3)


def test_a_gpu_without_a_chart_has_that_of_its_kind():
    of = [attention_share(attention(8192, 64), catalog.gpu(key)) for key in ("h100_sxm", "h200", "b200", "gb200")]
    assert of[0] == of[1]
    assert of[2] == pytest.approx(of[3], rel=1e-3)  # It has a few multiprocessors fewer.


@pytest.mark.parametrize(
    ("heads", "forward", "backward"),
    [(64, 0.594, 0.503), (32, 0.566, 0.488), (16, 0.494, 0.444), (8, 0.393, 0.380)],
)
def test_attention_of_few_heads_on_an_a100_as_measured_by_others(heads, forward, backward):
    """The rates are of SimuMax 4dcaae5, configs/system/a100_pcie.json, for 4k tokens.

    No constant uses them, except that they are one of three witnesses of the level. That card has 300 W and ours 400,
    so only ratios to 64 heads are compared, to 20 %.
    """
    a100 = mk.Cluster.load("dgx_a100").gpu
    for measured, of_64, back in ((forward, 0.594, False), (backward, 0.503, True)):
        found = attention_flops_per_s(attention(4096, heads, backward=back), a100)
        whole = attention_flops_per_s(attention(4096, 64, backward=back), a100)
        assert found / whole == pytest.approx(measured / of_64, rel=0.2)
    assert attention_flops_per_s(attention(4096, 64), a100) / 312e12 == pytest.approx(0.594, rel=0.07)


@pytest.mark.parametrize(
    ("length", "backward", "tflops"),
    [
        (4096, False, 487),
        (4096, True, 414),
        (8192, False, 529),
        (8192, True, 484),
        (32768, False, 589),
        (32768, True, 554),
    ],
)
def test_attention_alone_on_a_hot_card_is_as_slow_as_measured(length, backward, tflops):
    """One H100 with cuDNN 9.19 ran 32 heads of nothing else for seconds, at its power cap.

    Two constants are their mean loss against the full clock, so that the error of a length is its distance from the
    mean.
    """
    cost = attention(length, 32, backward=backward, sequences=max(1, 16384 // length))
    assert attention_flops_per_s(cost, busy=1.0) == pytest.approx(tflops * 1e12, rel=0.065)
    assert attention_flops_per_s(cost) > 1.03 * tflops * 1e12


def test_tensor_cores_that_rest_are_faster_when_they_work():
    """The gain of a step follows from the share of it in which tensor cores work, weighed by their power.

    On one H100, a step of Llama 1B has matmuls for 0.564 and attention for 0.082 and 0.126 of it, at 1.146 times the
    rate of a long run. In fp8 it has matmuls for 0.375 of it, at 1.271 times the rate.
    """
    attention_share = 0.72 * (0.79 * 0.082 + 0.65 * 0.126)  # The shares are weighed by power.
    assert step_gain(full_clock(H100, "bf16"), 1.0) == 1.0
    # The constant comes from this measurement.
    assert step_gain(full_clock(H100, "bf16"), 0.564 + attention_share) == pytest.approx(356.3 / 310.8, rel=0.002)
    assert step_gain(full_clock(H100, "fp8"), 0.375 + attention_share) == pytest.approx(1.271, rel=0.02)
    assert step_gain(full_clock(H100, "bf16"), 0.0) == pytest.approx(H100.achieved["burst"] / H100.achieved["matmul"])
    assert step_gain(full_clock(catalog.gpu("a100_80gb"), "bf16"), 0.5) == 1.0  # There is no clock to gain.


def test_each_assumption_has_its_own_effect():
    matmul = Cost({"bf16": 2.0 * 512**3}, matmuls=(Matmul("bf16", 1, 512, 512, 512),))
    everything, burst = (kernel_work(matmul, H100, assumptions=Assumptions(sustained=s)) for s in (True, False))
    assert everything.arithmetic_s == pytest.approx(burst.arithmetic_s)  # The matmul is too small for the power cap.
    large = Cost({"bf16": 2.0 * 4096**3}, matmuls=(Matmul("bf16", 1, 4096, 4096, 4096),))
    capped, free = (kernel_work(large, H100, assumptions=Assumptions(sustained=s)) for s in (True, False))
    assert capped.arithmetic_s > 1.05 * free.arithmetic_s
    flat = kernel_work(matmul, H100, assumptions=Assumptions(shapes=False))
    assert flat.arithmetic_s == pytest.approx(2 * 512**3 / BF16)
    assert flat.arithmetic_s < everything.arithmetic_s
    of_attention = attention(4096, 2)
    as_matmul = kernel_work(of_attention, H100, assumptions=Assumptions(attention=False))
    assert as_matmul.arithmetic_s == pytest.approx(of_attention.attention_flops / BF16)


def test_a_convolution_beside_a_matmul_is_priced_as_a_large_one():
    cost = Cost({"bf16": 1e12 + 2.0 * 512**3}, matmuls=(Matmul("bf16", 1, 512, 512, 512),))
    small = Cost({"bf16": 2.0 * 512**3}, matmuls=cost.matmuls)
    assert kernel_work(cost, H100).alone_s == pytest.approx(1e12 / BF16 + kernel_work(small, H100).alone_s)


def test_random_numbers_take_their_integer_instructions_where_memory_takes_less():
    """Each of 2^25 numbers takes 82 instructions, at 64 a clock of 132 multiprocessors at 1.98 GHz, beside 269 MB."""
    gpu = catalog.gpu("h100_sxm")
    cost = Cost(bytes_accessed=269e6, integers=82 * 2.0**25)
    assert kernel_work(cost, gpu).alone_s == pytest.approx(82 * 2**25 / (64 * gpu.sms * gpu.clock_hz))
    assert kernel_work(replace(cost, integers=2.0**25), gpu) == kernel_work(replace(cost, integers=0.0), gpu)


@pytest.mark.parametrize(
    ("cost", "micros", "rel"),
    [
        (Cost(bytes_accessed=93.2e-6 * 4.32e12, tile_reduces=1), 108.7, 0.05),  # This is an RMSNorm of 2,048 wide rows.
        (Cost(bytes_accessed=201_460_736, tile_reduces=3), 95.5, 0.05),  # This is a LayerNorm and its sum.
        (Cost(bytes_accessed=206_573_568, tile_reduces=4), 117.0, 0.05),
        # This is a bias's gradient.
        (Cost(bytes_accessed=1_034_960_900, column_elements=128 * 197 * 4096), 303.0, 0.05),
        (  # The rows of a ViT are 197 long.
            Cost({"bf16": 10_173_546_496.0}, bytes_accessed=262_246_400, unaligned_bytes=2.12e8),
            163.2,
            0.12,
        ),
        (  # There are three channels; the time is the mean of two passes.
            Cost({"bf16": 60_423_143_424.0}, convolves=True, scalar_flops=60_423_143_424.0),
            1449.0,
            0.06,
        ),
        (Cost({"bf16": 134_217_728.0}, convolves=True, depthwise_products=67_108_864), 593.0, 0.02),
    ],
)
def test_kernels_of_an_h200_take_what_they_took(cost, micros, rel):
    """The times are of single kernels of trainings on an H200, 27 November 2026, which the constants come from."""
    assert kernel_work(cost, catalog.gpu("h200"), busy=0.75).alone_s * 1e6 == pytest.approx(micros, rel=rel)


def test_a_convolution_takes_longer_than_a_matmul_of_its_work():
    """The factor holds both where multiplying and where moving decides."""
    flops = {"bf16": 463_856_467_968.0}
    for work in (Cost(flops), Cost(flops, bytes_accessed=1e11)):
        convolution = replace(work, convolves=True)
        assert kernel_work(convolution, H100).alone_s == pytest.approx(kernel_work(work, H100).alone_s / 0.86)


def test_a_small_matmul_in_fp32_takes_no_longer_than_tensor_cores_would_and_its_flop():
    """A router of 16,384 tokens to 8 experts took 32 us on an H200, and its bytes alone take 8."""
    router = Matmul("f32_highest", 1, 16_384, 8, 1024)
    seconds = kernel_work(Cost({router.dtype: router.flops}, matmuls=(router,)), catalog.gpu("h200")).alone_s
    assert 8e-6 < seconds < 40e-6
