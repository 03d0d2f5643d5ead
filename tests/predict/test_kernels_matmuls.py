"""Test rates of matmuls by shape: the measured table, between its rows, beyond its ends, and on other GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.config import catalog
from meshkit.hlo.costs import Cost, Matmul
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.kernels import (
    burst_flops_per_s,
    full_clock,
    kernel_work,
    large_flops_per_s,
    precision_of,
    shape_share,
    step_gain,
)

H100, A100, B200 = (catalog.gpu(key) for key in ("h100_sxm", "a100_80gb", "b200"))
EXPONENT = catalog.kernels()["power_exponent"]


def share(batch, m, n, k, gpu=H100, precision="bf16"):
    return shape_share(Matmul(precision, batch, m, n, k), gpu, precision)


def rate(m, n, k, gpu, precision):
    return burst_flops_per_s(Matmul(precision, 1, m, n, k), gpu, precision) / 1e12


@pytest.mark.parametrize(
    ("gpu", "precision", "shape", "tflops"),
    [  # Rows of gemm_perf.parquet: bf16 is the geometric mean of two wrappers of cuBLAS, and fp8 is without the cast.
        (H100, "bf16", (4096, 4096, 4096), 779.3),
        (H100, "fp8", (8192, 8192, 1024), 1103.9),
        (A100, "bf16", (2048, 4096, 1024), 193.0),
        (B200, "bf16", (4096, 4096, 1024), 1409),
    ],
)
def test_the_rows_of_the_table_come_back(gpu, precision, shape, tflops):
    assert rate(*shape, gpu=gpu, precision=precision) == pytest.approx(tflops, rel=0.002)


@pytest.mark.parametrize(("size", "tflops"), [(2048, 1680), (3072, 3510), (4096, 4460), (6144, 5500), (8192, 5370)])
def test_nvfp4_takes_what_fp8_takes_over_as_many_bytes(size, tflops):
    """The rates are torch._scaled_mm's, which is cuBLASLt's, on a B200 (pytorch/ao, pull 2427), not in the table."""
    assert rate(size, size, size, B200, "nvfp4") == pytest.approx(tflops, rel=0.07)
    assert rate(size, size, size, B200, "nvfp4") == pytest.approx(2 * rate(size, size, size // 2, B200, "fp8"))
    assert precision_of(B200, "f4e2m1fn") == "nvfp4"
    assert precision_of(H100, "f4e2m1fn") == "bf16"


@pytest.mark.parametrize(("precision", "tflops"), [("bf16", 1463), ("fp8", 2814)])
def test_a_long_run_is_what_transformerengine_measures_of_cublaslt(precision, tflops):
    """A B300 ran each matmul of a layer 100 times in a row (NVIDIA/TransformerEngine@1609c89, gemm_profiling).

    The card is another than the catalog's, so the rates agree within the standard deviation of a fleet's.
    """
    spread = catalog.kernels()["gpu_spread"]
    assert large_flops_per_s(catalog.gpu("b300"), precision) / 1e12 == pytest.approx(tflops, rel=spread)


@pytest.mark.parametrize(("precision", "tflops"), [("mxfp8", 2677), ("nvfp4", 5094)])
def test_a_long_run_in_blocks_is_that_card_s_share_of_fp8(precision, tflops):
    """The rates are the same page's over its fp8; shares in the catalog have three digits, the least is 0.373."""
    b300 = catalog.gpu("b300")
    found = large_flops_per_s(b300, precision) / large_flops_per_s(b300, "fp8")
    assert found == pytest.approx(tflops / 2814, rel=2 * 0.0005 / 0.373)


def test_mxfp8_in_a_burst_is_cublaslts():
    """cuBLAS 13.1 reached these rates on a B200 (triton-lang/triton, pulls 9044 and 9697)."""
    assert 2850 < rate(8192, 8192, 8192, B200, "mxfp8") < 2895
    assert precision_of(B200, "mxfp8") == "mxfp8"


def test_a_long_run_takes_the_smaller_of_the_burst_and_the_cap():
    """A matmul that does not draw the power that throttles a GPU runs as fast for a week as for a millisecond."""
    cap = large_flops_per_s(H100, "bf16") / 1e12
    fast, slow = (4096, 4096, 4096), (2048, 2048, 512)
    assert rate(*fast, H100, "bf16") > cap > rate(*slow, H100, "bf16")
    assert share(1, *fast) == 1.0
    assert share(1, *slow) == pytest.approx(rate(*slow, H100, "bf16") / cap)
    burst = shape_share(Matmul("bf16", 1, *fast), H100, "bf16", "burst")
    assert burst == pytest.approx(rate(*fast, H100, "bf16") / (H100.peak_flops["bf16"] / 1e12 * H100.achieved["burst"]))


def test_every_table_says_which_library_it_is_of():
    for row in catalog.measured_table("matmuls.csv"):
        assert row["library"].startswith("cuBLAS (") or row["library"] == "XLA", row
    assert {row["library"].split()[0] for row in catalog.measured_table("attention_rates.csv")} == {
        "cuDNN", "FlashAttention-2"}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "precision", "shape", "tflops"),
    [  # The shipped table leaves out these rows of gemm_perf.parquet.
        (H100, "bf16", (3072, 7168, 5120), 749.8), (H100, "fp8", (2560, 5120, 10240), 1419.1),
        (A100, "bf16", (4096, 7168, 5120), 260.1), (B200, "bf16", (3072, 7168, 5120), 1578.8),
        (B200, "fp8", (2560, 5120, 10240), 3080.6),
    ],
)  # fmt: skip
def test_shapes_between_those_of_the_table(gpu, precision, shape, tflops):
    # The casts that were subtracted from fp8's rows are known to 4 % of a rate.
    uncertain = {"bf16": 0.06, "fp8": 0.08}[precision]
    assert rate(*shape, gpu=gpu, precision=precision) == pytest.approx(tflops, rel=uncertain)


def test_fp8_rows_have_no_cast_in_them():
    """The rates are of kernels in a step of Llama 1B in fp8 on one H100, whose tensor cores work for 0.584 of it.

    With the casts that the raw rows include, they would be 534, 779 and 725.
    """
    in_step = large_flops_per_s(H100, "fp8") / 1e12 * step_gain(full_clock(H100, "fp8"), 0.584)
    for k, tflops in ((512, 1083), (8192, 1574), (2048, 1548)):
        assert share(1, 32768, 2048, k, precision="fp8") * in_step == pytest.approx(tflops, rel=0.06)


def test_a_dim_costs_as_much_as_the_next_multiple_of_a_tile():
    """4097 columns take 33 tiles of 128, where 4096 take 32."""
    time = {n: n / share(1, 4096, n, 4096) for n in (4096, 4097, 4224)}
    assert time[4097] == pytest.approx(time[4224], rel=1e-3)
    assert time[4097] > time[4096]


def test_dims_beyond_the_table_are_further_waves():
    assert share(1, 65536, 4096, 1024) == pytest.approx(share(2, 32768, 4096, 1024))
    assert share(1, 8192, 28672, 8192) == pytest.approx(1.0)
    assert share(1, 8192, 28672, 65536) == pytest.approx(1.0)


def test_many_small_products_fill_a_gpu_that_one_does_not():
    assert share(64, 512, 512, 4096) > 2 * share(1, 512, 512, 4096)


def test_a_gpu_that_multiplies_slower_loses_less_to_a_short_loop():
    """A tile of an A100 takes 2.3 times as long, so the same loop over k starts up in a smaller part of it."""
    of_best = [rate(2048, 4096, 512, gpu, "bf16") / (gpu.peak_flops["bf16"] / 1e12) for gpu in (A100, H100)]
    assert of_best[0] > 1.03 * of_best[1]


def test_products_below_the_table_fall_as_openxla_measured():
    assert share(1, 256, 4096, 4096) < 0.9 * share(1, 512, 4096, 4096)
    assert share(16, 2048, 2048, 128) < share(16, 2048, 2048, 512)


@pytest.mark.parametrize(
    ("m", "k", "n", "measured"),
    [
        (4096, 7168, 16384, 0.742), (4096, 5120, 1536, 0.788), (4096, 1536, 24576, 0.697), (4096, 5120, 576, 0.497),
        (4096, 512, 32768, 0.618), (4096, 3072, 5120, 0.718), (4096, 2048, 7168, 0.681), (576, 4096, 5120, 0.596),
    ],
)  # fmt: skip
def test_an_a100_that_was_measured_by_others(m, k, n, measured):
    """The rates are of SimuMax 4dcaae5, configs/system/a100_pcie.json, which no constant of ours uses.

    They are relative to its large matmuls, 0.755 of peak (the card has 300 W). Its own noise over layouts of one size
    is 15 %.
    """
    assert share(1, m, n, k, A100) == pytest.approx(measured / 0.755, rel=0.25)


@given(st.integers(1, 64), *(st.integers(1, 20_000) for _ in range(3)))
def test_any_shape_has_a_share(batch, m, n, k):
    for gpu in (H100, A100, B200):
        assert 0.0 < share(batch, m, n, k, gpu) <= 1.0


@given(st.sampled_from(["bf16", "fp8", "tf32", "fp32"]), st.integers(7, 14))
def test_a_larger_square_is_never_much_slower(precision, power):
    """Each size is doubled; the table itself falls by up to 4 % where the GPU clocks down."""
    small, large = (share(1, n, n, n, precision=precision) for n in (2**power, 2 ** (power + 1)))
    assert large > 0.95 * small


def test_the_cpu_has_no_table():
    assert share(1, 64, 64, 64, catalog.gpu("cpu")) == 1.0


@pytest.mark.parametrize(("busy", "slower"), [(1.0, 0.91 ** (1 / EXPONENT - 1)), (0.5, 1 / 0.91)])
def test_promoted_sums_cost_less_under_the_power_cap_than_at_the_full_clock(busy, slower):
    """Work that does less at a clock draws less power, so that the clock is higher, by the same law as a step's."""
    plain, promoted = (
        kernel_work(Cost({dtype: 1e15}), H100, busy=busy).arithmetic_s for dtype in ("f8e4m3fn", "f8e4m3fn_highest")
    )
    assert promoted / plain == pytest.approx(slower)


@pytest.mark.parametrize(("key", "share"), [("h100_sxm", 0.91), ("h200", 0.94)])
def test_promoted_sums_take_the_share_of_each_card_that_was_published(key, share):
    """The shares are of torch._scaled_mm with and without fast accumulation (stas00/ml-engineering)."""
    gpu, at_once = catalog.gpu(key), Assumptions(sustained=False)
    plain, promoted = (
        kernel_work(Cost({dtype: 1e15}), gpu, assumptions=at_once).arithmetic_s
        for dtype in ("f8e4m3fn", "f8e4m3fn_highest")
    )
    assert plain / promoted == pytest.approx(share, rel=0.04)  # The two cards differ by 0.033.


def test_blackwell_sums_in_one_way():
    plain, promoted = (kernel_work(Cost({dtype: 1e15}), B200) for dtype in ("f8e5m2", "f8e5m2_highest"))
    assert plain == promoted
