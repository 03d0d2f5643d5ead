"""Write the shipped tables of kernel rates from published measurements.

    python -m benchmarks.kernel_rates --data DIR

    matmuls.csv             TFLOP/s of matmuls by GPU, precision and shape: of cuBLAS alone, because XLA calls it
    attention_rates.csv     share of the bf16 peak of fused attention by GPU, pass, mask and length: of cuDNN where it
                            was measured, and of FlashAttention-2 forward on A100

DIR holds gemm_aiconfigurator.csv.gz, sdpa_cudnn_frontend.csv and attention_fwd_aiconfigurator.csv.gz (tables of
ai-dynamo/aiconfigurator@095f58a51 and NVIDIA/cudnn-frontend@3929da2, Apache-2.0 and MIT). A cell of matmuls.csv is the
geometric mean over the wrappers that its row names, each of which is one row of the raw file; nothing is smoothed.

The script also prints the rates of a long run and of a burst, which the catalog has as `achieved.matmul` and
`achieved.burst`, and the time of the casts in fp8 rows. It prints the errors of the interpolation on shapes that the
table leaves out, and of one GPU's table on another GPU.

**The cast.** An fp8 row times a linear layer that gets bf16 and first casts its [m, k] operand. A compiled program has
its casts as kernels of their own, so the cast is subtracted from every fp8 row. It takes the same time for any n. So it
is what the times of rows with one [m, k] extrapolate to at n = 0, less the same for bf16 rows, which cast nothing.

**Burst and long run.** Rows without power are a few calls each. Kernels of less than a millisecond end before the power
controller acts; those of tens of milliseconds run at the power cap. The rate at the cap is the median over wrappers of
rows that take 10 ms or more, or reach 95 % of their power limit, with no dim below 2048. The burst rate is the ninth
decile of rows of 0.3 to 3 ms. predict/kernels.py says how much of this a training step sees. The bf16 and fp8 rows of
vLLM 0.24 are left out: their rates rise with the work where those of all other sources fall, which does not happen with
random operands.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import gzip
import io
import itertools
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshkit.config import catalog
from meshkit.hlo.costs import Matmul
from meshkit.predict.kernels import burst_flops_per_s, large_flops_per_s

GPUS = {"a100_sxm": "a100_80gb", "h100_sxm": "h100_sxm", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300",
        "gb200": "gb200", "gb300": "gb300"}  # fmt: skip
PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8"}
# Wrappers around cuBLAS: torch.nn.functional.linear in bf16, trtllm.cublas_scaled_mm in fp8. The older of
# TensorRT-LLM's versions on GB200 is 16 % slower than four other sources of that GPU, so only its rows with power are
# used, and only for the rate at the cap. No wrapper multiplies block-scaled operands by cuBLAS.
WRAPPERS = {"bf16": {"sglang_torch_linear", "torch_flow"}, "fp8": {"torch_flow"}}
# TFLOP/s of cuBLASLt for block-scaled square matmuls. The first two are of a B200, by torch._scaled_mm (pytorch/ao,
# pull 2427) and cuBLAS 13.1 (triton-lang/triton, pull 9044). The others are of an unnamed Blackwell, with kernels of
# 0.2 to 27 ms (triton, pull 9697).
CUBLASLT = [
    ("nvfp4", "pytorch/ao 2427", {2048: 1680, 3072: 3510, 4096: 4460, 6144: 5500, 8192: 5370}),
    ("mxfp8", "triton 9044", {8192: 2850}),
    ("nvfp4", "triton 9697", {8192: 5590, 16384: 4314, 32768: 4933}),
    ("mxfp8", "triton 9697", {8192: 2895, 16384: 2648, 32768: 2587}),
]
# Milliseconds of the forward matmuls, of the inputs' gradients and of the weights' gradients, for a layer of 4,096 and
# 16,384 on 15,872 tokens. TransformerEngine called cuBLASLt on a B300 SXM6 AC with random operands that were cast
# before, 100 times each (NVIDIA/TransformerEngine@1609c89, docs/examples/gemm_profiling). The rates in bf16 and fp8
# show that it was a long run.
TE_B300_MS = {"bf16": (4.250, 4.434, 4.418), "fp8": (2.158, 2.329, 2.325), "mxfp8": (2.365, 2.397, 2.400),
              "nvfp4": (1.254, 1.305, 1.205)}  # fmt: skip
TE_SHAPES = [[(15872, 12288, 4096), (15872, 4096, 4096), (15872, 16384, 4096), (15872, 4096, 16384)],
             [(15872, 4096, 12288), (15872, 4096, 4096), (15872, 4096, 16384), (15872, 16384, 4096)],
             [(4096, 12288, 15872), (4096, 4096, 15872), (4096, 16384, 15872), (16384, 4096, 15872)]]  # fmt: skip
OLDER = "1.3.0rc17"
ROWS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
COLUMNS = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 65536)
LARGE, LONG_S = (catalog.kernels()[name] for name in ("large_dim", "long_run_s"))
AT_CAP = 0.95
BURST_S = (0.3e-3, 3e-3)
ONSET_MS = (1, 2, 3, 5, 7, 10, 15)
CAST_COLUMNS = (512, 4096)  # Columns that show a cast; with more, the product takes nearly all of the time.
OUT = Path(__file__).resolve().parents[2] / "meshkit" / "config"

Shape = tuple[int, int, int]
# From (GPU, precision), shape and wrapper to TFLOP/s.
Rates = dict[tuple[str, str], dict[Shape, dict[str, float]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both tables, print their errors, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_rates", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the raw files")
    parser.add_argument("--check", action="store_true", help="print the errors of the shipped tables, write nothing")
    options = parser.parse_args(arguments)
    try:
        rates, caps, casts = read_matmuls(options.data / "gemm_aiconfigurator.csv.gz")
        charts = read_attention(options.data)
    except OSError as error:
        print(f"kernel_rates: {error}", file=sys.stderr)
        return 2
    if not options.check:
        (OUT / "matmuls.csv").write_text(matmul_table(rates), encoding="utf-8")
        (OUT / "attention_rates.csv").write_text(attention_table(charts), encoding="utf-8")
    print_caps(caps, rates)
    print_onset(rates)
    print_casts(casts)
    print_errors(rates)
    print_cublaslt()
    return 0


def _lines(path: Path) -> Iterator[dict[str, str]]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    yield from csv.DictReader(io.StringIO(text))


@dataclass(frozen=True)
class Row:
    """One row of the raw file, of cuBLAS."""

    key: tuple[str, str]
    """The GPU and the precision."""
    name: str
    """The name and version of the framework whose wrapper ran."""
    shape: Shape
    """The dims m, n and k."""
    seconds: float
    """The time of one call."""
    power: float | None
    """The power as a share of its limit; None if it was not measured."""
    plain: bool
    """Whether the rate is used for the table, and not only for the rate at the cap."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of the raw file that are used."""
    for row in _lines(path):
        precision = PRECISIONS.get(row["dtype"])
        if precision is None or (precision == "fp8" and row["kernel_source"] not in WRAPPERS["fp8"]):
            continue
        plain = row["kernel_source"] in WRAPPERS[precision] and row["version"] != OLDER
        power = float(row["power"]) / float(row["power_limit"]) if row["power"] else None
        if plain or power is not None:
            yield Row(
                (GPUS[row["system"]], precision),
                f"{row['framework']} {row['version']}",
                (int(row["m"]), int(row["n"]), int(row["k"])),
                2e-12 * int(row["m"]) * int(row["n"]) * int(row["k"]) / float(row["tflops"]),
                power,
                plain,
            )


# From (GPU, precision) and log2 of an operand's elements to the seconds of its cast.
Casts = Mapping[tuple[str, str], Mapping[int, float]]


def casts_of(rows: Iterable[Row]) -> Casts:
    """Return the times of casts: the time of rows of one [m, k] without columns, less that of bf16 rows.

    The median is taken over rows with the same size of [m, k].
    """
    points: dict[tuple[str, str, int, int], list[tuple[int, float]]] = defaultdict(list)
    for r in rows:
        m, n, k = r.shape
        if r.plain and CAST_COLUMNS[0] <= n <= CAST_COLUMNS[1]:
            points[(*r.key, m, k)].append((n, r.seconds))
    sizes: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for (gpu, precision, m, k), found in points.items():
        if len({n for n, _ in found}) >= 4:
            sizes[gpu, precision, (m * k).bit_length() - 1].append(_intercept(found) / (m * k))
    casts: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for (gpu, precision, size), each in sorted(sizes.items()):
        if precision != "bf16" and sizes.get((gpu, "bf16", size)):
            launch = statistics.median(sizes[gpu, "bf16", size])
            casts[gpu, precision][size] = (statistics.median(each) - max(0.0, launch)) * 2**size
    return casts


def cast_s(elements: int, casts: Mapping[int, float]) -> float:
    """Return the seconds of casting `elements` elements, by interpolation.

    Beyond the largest known size they are proportional to the elements.
    """
    seconds = np.interp(math.log2(elements), sorted(casts), [math.log(casts[size]) for size in sorted(casts)])
    return math.exp(seconds) * max(1.0, elements / 2 ** max(casts))


def _intercept(points: Sequence[tuple[int, float]]) -> float:
    """Return the intercept of the line through points (x, y) with the least squares of relative errors."""
    weights = [1 / y**2 for _, y in points]
    mean_x, mean_y = (statistics.fmean([p[i] for p in points], weights) for i in (0, 1))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points))
    return mean_y - mean_x * slope / sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))


def read_matmuls(path: Path) -> tuple[Rates, Mapping[tuple[str, str], Mapping[str, list[float]]], Casts]:
    """Return cuBLAS's rates by shape, the rates at the cap by wrapper, and the casts, all by (GPU, precision).

    The cap limits the mean power of a loop, in which tensor cores rest while operands are cast. Matmuls alone would run
    slower at the cap, by the same law as in a step (`predict/kernels.py`, `step_gain`).
    """
    rates: Rates = defaultdict(lambda: defaultdict(dict))
    caps: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rows = list(read_rows(path))
    casts = casts_of(rows)
    for r in rows:
        m, n, k = r.shape
        seconds = r.seconds - (cast_s(m * k, casts[r.key]) if r.key in casts else 0.0)
        tflops = 2e-12 * m * n * k / seconds
        if not 0 < tflops < catalog.gpu(r.key[0]).peak_flops[r.key[1]] / 1e12:
            continue  # Nearly all of it is the cast.
        if r.plain:
            rates[r.key][r.shape][r.name] = tflops
        capped = r.power >= AT_CAP if r.power is not None else seconds >= LONG_S
        if capped and min(r.shape) >= LARGE:
            alone = tflops * (seconds / r.seconds) ** (1 / catalog.kernels()["power_exponent"])
            caps[r.key][r.name + (" at its power limit" if r.power is not None else "")].append(alone)
    return rates, caps, casts


def matmul_table(rates: Rates) -> str:
    """Return the text of matmuls.csv: new rows of cuBLAS, and the comment and OpenXLA's rows unchanged."""
    rows = []
    for (gpu, precision), table in sorted(rates.items()):
        names = sorted({name for found in table.values() for name in found})
        for m, n in itertools.product(ROWS, COLUMNS):
            cells = [table.get((m, n, k), {}) for k in COLUMNS]
            if any(cells):
                means = [f"{statistics.geometric_mean(c.values()):.4g}" if c else "" for c in cells]
                rows.append([gpu, precision, f"cuBLAS ({'; '.join(names)})", 1, m, n, "", *means])
    text = (OUT / "matmuls.csv").read_text(encoding="utf-8")
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    of_xla = [list(row.values()) for row in catalog.measured_table("matmuls.csv") if row["library"] == "XLA"]
    return _csv_text(comment, ["gpu", "precision", "library", "batch", "m", "n", 256, *COLUMNS], [*rows, *of_xla])


def _csv_text(comment: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    out.write(comment)
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    return out.getvalue()


# From (GPU, library, pass, mask) and length to the share of the peak.
Charts = dict[tuple[str, str, str, str], dict[int, float]]


def read_attention(folder: Path) -> Charts:
    """Return the shares of the bf16 peak at head_dim 128 with all multiprocessors busy, as in predict/kernels.py."""
    charts: Charts = {}
    gpus = {"NVIDIA H200": "h200", "NVIDIA GB200": "gb200", "NVIDIA GB300": "gb300"}
    for r in _lines(folder / "sdpa_cudnn_frontend.csv"):
        plain = r["model_name"] == "llama3.1" and r["data_type"] == "bfloat16" and r["deterministic_bwd"] == "False"
        if plain and not r["sliding_window_size"]:
            queries = int(r["batch_size"]) * int(r["num_q_heads"]) * int(r["q_seqlen"])
            mask = "causal" if r["attn_mask"] == "top_left" else "full"
            version = f"cuDNN {r['cudnn_backend_version'][0]}.{r['cudnn_backend_version'][1:3]}"
            key = (gpus[r["gpu_name"]], version, {"fwd": "forward", "bwd": "backward"}[r["profile_pass"]], mask)
            charts.setdefault(key, {})[int(r["q_seqlen"])] = _filled(key[0], float(r["tflops"]), queries)
    found: dict[int, list[float]] = defaultdict(list)
    for r in _lines(folder / "attention_fwd_aiconfigurator.csv.gz"):
        heads, length = int(r["num_heads"]), int(r["isl"])
        queries = int(r["batch_size"]) * heads * length
        if (r["system"] == "a100_sxm" and r["kernel_source"] == "flash_attention" and r["head_dim"] == "128"
                and r["num_key_value_heads"] in ("8", str(heads)) and queries >= 128 * 1000):  # fmt: skip
            found[length].append(_filled("a100_80gb", float(r["tflops_causal"]), queries))
    key = ("a100_80gb", "FlashAttention-2 (sglang 0.5.9, 0.5.10)", "forward", "causal")
    charts[key] = {length: statistics.median(v) for length, v in sorted(found.items()) if length & (length - 1) == 0}
    return charts


def _filled(key: str, tflops: float, queries: int) -> float:
    gpu, blocks = catalog.gpu(key), queries / catalog.kernels()["attention_queries_per_block"]
    return tflops * 1e12 / gpu.peak_flops["bf16"] * (blocks + gpu.sms) / blocks


def attention_table(charts: Charts) -> str:
    """Return the text of attention_rates.csv."""
    comment = (
        "# Share of the bf16 peak of fused attention in bf16, head_dim 128, by length, were every multiprocessor busy\n"
        "# (predict/kernels.py: attention_share). FLOP are those executed: half of the square under a causal mask.\n"
        "# Written by `python -m benchmarks.kernel_rates` from NVIDIA/cudnn-frontend@3929da2, benchmark/\n"
        "# sdpa_benchmark_training (llama3.1: 64 heads, 8 of keys) and ai-dynamo/aiconfigurator@095f58a51, 2026-11-22\n"
    )
    rows = ([*key, n, f"{share:.3f}"] for key, chart in sorted(charts.items()) for n, share in sorted(chart.items()))
    return _csv_text(comment, ["gpu", "library", "pass", "mask", "length", "share"], rows)


def print_caps(caps: Mapping[tuple[str, str], Mapping[str, list[float]]], rates: Rates) -> None:
    """Print the rate that each GPU sustains, by wrapper and their median, and the rate of a burst."""
    print("| GPU | precision | TFLOP/s in a long run | share of the peak | by wrapper | burst | share of the peak |")
    print("|---|---|---|---|---|---|---|")
    for (key, precision), found in sorted(caps.items()):
        medians = {name: statistics.median(values) for name, values in found.items() if len(values) >= 10}
        cap = statistics.median(medians.values())
        each = ", ".join(f"{name} {value:.0f}" for name, value in sorted(medians.items()))
        peak = catalog.gpu(key).peak_flops[precision] / 1e12
        burst = burst_of(rates[key, precision])
        print(f"| {key} | {precision} | {cap:.0f} | {cap / peak:.3f} | {each} | {burst:.0f} | {burst / peak:.3f} |")


def print_onset(rates: Rates) -> None:
    """Print how much faster short kernels are than long ones, and how much slower small dims are than large ones.

    The rates of a wrapper are relative to its kernels of 15 ms or more, and to those with no dim below 4096.
    """
    by_time, by_dim = defaultdict(list), defaultdict(list)
    for (gpu, _), table in rates.items():
        series: dict[str, list[tuple[Shape, float]]] = defaultdict(list)
        for shape, found in table.items():
            for name, tflops in found.items():
                series[name].append((shape, tflops))
        for rows in series.values():
            times: dict[int, list[float]] = defaultdict(list)
            dims: dict[int, list[float]] = defaultdict(list)
            for shape, tflops in rows:
                took = 2e-12 * math.prod(shape) / tflops
                if min(shape) >= LARGE:
                    times[bisect.bisect(ONSET_MS, took * 1e3)].append(tflops)
                if BURST_S[0] <= took <= BURST_S[1]:
                    dims[min(4096, 1 << (min(shape).bit_length() - 1))].append(tflops)
            long_run, large = statistics.median(times[len(ONSET_MS)]), statistics.median(dims[4096])
            for n, found in times.items():
                if gpu != "a100_80gb":  # The cap does not slow its matmuls.
                    by_time[n].append(statistics.median(found) / long_run)
            for n, found in dims.items():
                by_dim[n].append(statistics.median(found) / large)
    print("\n| over the rate of a long run, or of large dims | median | least | most | series |\n|---|---|---|---|---|")
    named = [(f"{a} to {b} ms", by_time[n]) for n, (a, b) in enumerate(itertools.pairwise((0, *ONSET_MS)))]
    for label, found in [*named, *((f"least dim {n}", by_dim[n]) for n in (512, 1024, 2048))]:
        print(f"| {label} | {statistics.median(found):.3f} | {min(found):.3f} | {max(found):.3f} | {len(found)} |")


def burst_of(table: Mapping[Shape, Mapping[str, float]]) -> float:
    """Return the TFLOP/s that one in ten large shapes of short kernels exceeds: the median over wrappers."""
    by_wrapper: dict[str, list[float]] = defaultdict(list)
    for (m, n, k), found in table.items():
        for name, tflops in found.items():
            if min(m, n, k) >= LARGE and BURST_S[0] <= 2e-12 * m * n * k / tflops <= BURST_S[1]:
                by_wrapper[name].append(tflops)
    return statistics.median(statistics.quantiles(values, n=10)[-1] for values in by_wrapper.values())


def print_casts(casts: Casts) -> None:
    """Print the picoseconds of casting an element, by the elements of the operand."""
    sizes = (22, 24, 26, 28, 30)
    print(f"\n| GPU | {' | '.join(f'2^{size}' for size in sizes)} |\n|---|{'---|' * len(sizes)}")
    for (gpu, precision), found in casts.items():
        cells = " | ".join(f"{found[size] / 2**size * 1e12:.2f}" for size in sizes)
        print(f"| {gpu}, {precision} | {cells} |")


def print_cublaslt() -> None:
    """Print cuBLASLt's block-scaled matmuls beside the rates of the fp8 table, and the rates sustained on a B300."""
    print("\n| square matmul of | precision | cuBLASLt, TFLOP/s | from | B200, by fp8's table | over it |")
    print("|---|---|---|---|---|---|")
    for precision, source, rates in CUBLASLT:
        for size, measured in rates.items():
            rate = burst_flops_per_s(Matmul(precision, 1, size, size, size), catalog.gpu("b200"), precision) / 1e12
            print(f"| {size} | {precision} | {measured} | {source} | {rate:.0f} | {rate / measured - 1:+.0%} |")
    print("\n| B300, a layer's matmuls | TFLOP/s | over fp8 | catalog, long run | burst of these shapes |")
    print("|---|---|---|---|---|")
    flops = [sum(2 * m * n * k for m, n, k in each) for each in TE_SHAPES]
    gpu, fp8 = catalog.gpu("b300"), sum(TE_B300_MS["fp8"])
    for precision, times in TE_B300_MS.items():
        shapes = [(2 * m * n * k, Matmul(precision, 1, m, n, k)) for each in TE_SHAPES for m, n, k in each]
        burst = sum(flops) / sum(f / burst_flops_per_s(matmul, gpu, precision) for f, matmul in shapes) / 1e12
        cap = large_flops_per_s(gpu, precision) / 1e12
        rate = sum(flops) / sum(times) / 1e9
        print(f"| {precision} | {rate:.0f} | {fp8 / sum(times):.3f} | {cap:.0f} | {burst:.0f} |")


def print_errors(rates: Rates) -> None:
    """Print errors of burst rates: of shapes that the table leaves out, and of GPUs priced by another one's table."""
    print("\n| GPU | precision | shapes not in the table | median error | 90 % within | by another GPU's table |")
    print("|---|---|---|---|---|---|")
    for (key, precision), table in sorted(rates.items()):
        errors, others = [], defaultdict(list)
        for shape, found in table.items():
            true = statistics.geometric_mean(found.values()) * 1e12
            matmul = Matmul(precision, 1, *shape)
            if shape[0] not in ROWS or not {*shape[1:]} <= {*COLUMNS}:
                errors.append(abs(burst_flops_per_s(matmul, catalog.gpu(key), precision) / true - 1))
            for other in {k for k, p in rates if p == precision} - {key}:
                if _same_generation(key, other):
                    found_s = burst_flops_per_s(matmul, catalog.gpu(key), precision, measured=other)
                    others[other].append(abs(found_s / true - 1))
        ninth = sorted(errors)[int(0.9 * len(errors))] if errors else math.nan
        by = ", ".join(f"{name} {statistics.median(v):.1%}" for name, v in sorted(others.items()))
        print(f"| {key} | {precision} | {len(errors)} | {statistics.median(errors):.1%} | {ninth:.1%} | {by} |")


def _same_generation(a: str, b: str) -> bool:
    major = [(catalog.gpu(key).compute_capability or (0,))[0] for key in (a, b)]
    return major[0] == major[1] or 8 in major


if __name__ == "__main__":
    sys.exit(main())
