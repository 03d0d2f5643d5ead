"""Notes of rows outside of their bounds: the side, by how much, and only causes that hold for the row."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from benchmarks.published.experiments import Run, resolve
from benchmarks.published.prefetch import prefetched
from benchmarks.published.reasons import Case, mean_kernel_s, outside_note, with_repeats
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import parse_row
from benchmarks.published.statistics import trivial_predictor
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Collective, Instruction, Schedule

HERE = Path(__file__).parent.parent
with (HERE / "data" / "published_runs.csv").open(encoding="utf-8") as file:
    CELLS = {cells["id"]: cells for cells in csv.DictReader(file)}


def case(name: str, measured: float, predicted: float, bounds: tuple[float, float], **more) -> Case:
    run = resolve(parse_row(CELLS[name], name))
    assert isinstance(run, Run), run
    return Case(run, measured, predicted, *bounds, **({"kernel_s": 1e-3, "how": ""} | more))


def test_a_note_names_the_side_and_by_how_much():
    slow = outside_note(case("mosaic-7b-s2048-h100_80gb-128-amp_bf16-mb6", 1.2, 0.9, (0.8, 1.0)))
    assert slow.startswith("measured 20.0% slower than with every collective exposed (1 s)")
    fast = outside_note(case("mosaic-7b-s2048-h100_80gb-128-amp_bf16-mb6", 0.6, 0.9, (0.8, 1.0)))
    assert fast.startswith("measured 25.0% faster than with every collective hidden (0.8 s)")
    assert "apart" not in fast


def test_close_bounds_leave_it_to_compute():
    note = outside_note(case("mosaic-1b-s2048-h100_80gb-16-amp_bf16-mb20", 1.0, 1.1, (1.09, 1.12)))
    assert "the bounds are 2.8% apart, so that the error of compute decides (+10.0%)" in note
    assert "network" not in note, "which no communication waits for"


def test_what_is_not_known_is_not_explained():
    note = outside_note(case("mosaic-7b-s8192-a100_80gb-8-amp_bf16-mb8", 1.2, 0.9, (0.8, 1.0)))
    assert note.endswith(": not explained")


@pytest.mark.parametrize(
    ("name", "words", "faster_too"),
    [
        ("nemo2504-llama3.1-70b-bf16-64", "does not say: recomputation", True),
        ("mosaic-70b-s2048-h100_80gb-256-amp_bf16-mb8", "its network is not stated", True),
        ("mbridge-26.06-LLAMA3.1_405B-DGX-GB300-256-MXFP8", "one for 32 elements", True),
        ("mbridge-26.04-GPT-DGX-GB200-64-BF16", "clamped activation", False),
        ("tt-8b-cp8", "ring attention", True),
        ("tt-8b-fsdp8-eager", "cap of 500 W", True),
        ("tt2506-llama3-70b-256-float8rowwise-asyncTP", "a scale for each row", False),
        ("maxtext-a3-llama2-7b-8", "the XLA of its time", False),
        ("mosaic-1b-s32768-h100_80gb-8-amp_fp8-mb1", "attention is 55% of its FLOP", True),
        ("simumax-b200-llama3_405b_l4_tp4_pp1_dp2_mbc4_cef", "measured on that machine", False),
        ("internevo-7b-tp1-z8-8", "not explained: what runs between", False),
    ],
)
def test_causes_hold_for_their_rows_alone(name, words, faster_too):
    assert words in outside_note(case(name, 2.0, 1.0, (0.9, 1.1)))
    assert (words in outside_note(case(name, 0.5, 1.0, (0.9, 1.1)))) is faster_too
    other = "tt-8b-cp8" if words in ("its network is not stated", "the XLA of its time") else "paxml-gpt3-5b-fp8-32"
    if "recomputation" not in words:
        assert words not in outside_note(case(other, 2.0, 1.0, (0.9, 1.1)))


def test_tflops_without_a_formula_could_be_another_time():
    """Llama 2 7B at 4096: 12 x 32 x 4096 x 4096 of 6 N + that, half of it not done."""
    note = outside_note(case("maxtext-a3-llama2-7b-8", 1.5, 1.2, (1.1, 1.3), how="of TFLOP/s, formula assumed"))
    n = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008) + 32_000 * 4096
    square = 12 * 32 * 4096 * 4096
    assert f"counted half it is {1.5 * (1 - square / 2 / (6 * n + square)):.4g} s" in note


def test_short_kernels_wait_for_their_host():
    assert "12 us on average" in outside_note(case("pax-126m-te-H100-64", 2.0, 1.0, (0.9, 1.1), kernel_s=12e-6))
    kernel = Instruction("k", "fusion", "kernel", cost=Cost())
    loop = Instruction("w", "while", "while", bodies=("b",), trip_count=4)
    schedule = Schedule("m", {"b": (kernel, kernel), "e": (loop, kernel)}, "e", "x")
    assert mean_kernel_s(schedule, 9.0) == 1.0


def test_runs_that_cannot_be_told_apart_say_what_else_is_published():
    def made(name: str, measured: float, gpu: str = "h100_sxm") -> Prediction:
        return Prediction(name, "s", "A", "bf16", gpu, 8, measured, 2.0, 0.0, 1.9, 2.1, note="n")

    notes = [p.note for p in with_repeats([made("a", 2.0), made("b", 3.0), made("c", 4.0, "h200")])]
    assert notes == ["n", "n; runs that this replay cannot tell apart are published at 2 to 3 s", "n"]


def _gather(name: str, axis: str = "fsdp") -> Instruction:
    collective = Collective(name, name, "all-gather", (axis,), True, "nvlink", None, "bf16", 8, 1, 8, 1024)
    return Instruction(name, "all-gather", "collective", collective=collective)


def test_fsdp_hides_what_the_iteration_does_not_need():
    """One gather is read by the second kernel, the other by nothing before the next iteration."""
    kernels = [Instruction(f"k{n}", "fusion", "kernel", cost=Cost()) for n in range(3)]
    body = (kernels[0], _gather("soon"), _gather("later"), _gather("blocks", "tensor"), *kernels[1:])
    loop = Instruction("w", "while", "while", bodies=("b",), trip_count=4)
    schedule = Schedule("m", {"b": body, "e": (loop, _gather("once"))}, "e", "x")
    found = prefetched(schedule, {"soon": frozenset({"k2"})}).computations
    assert [(i.name, i.kind) for i in found["b"]] == [
        ("k0", "kernel"), ("soon", "start"), ("later", "start"), ("blocks", "collective"), ("k1", "kernel"),
        ("soon.done", "done"), ("k2", "kernel"), ("later.done", "done"),
    ]  # fmt: skip
    assert found["e"][1].kind == "collective", "outside of a loop there is nothing to hide under"


def test_experts_do_not_teach_the_trivial_predictor_of_their_framework():
    rows = {n: parse_row({"id": n, "source": "s", "model": n}, n) for n in "abc"}
    made = [Prediction(n, "s", family, "bf16", "h100_sxm", 8, 1.0, 1.0, 0, 1, 1, model_flops=8 * 989e12 * mfu)
            for n, family, mfu in (("a", "M", 0.5), ("b", "M, experts", 0.2), ("c", "X", 0.4))]  # fmt: skip
    found = trivial_predictor(made, rows)
    assert found["b"] == pytest.approx(0.2 / 0.4 - 1, abs=0.01)
    assert found["c"] == pytest.approx(0.4 / 0.35 - 1, abs=0.01)


def test_every_committed_row_outside_of_its_bounds_says_why():
    with (HERE.parent / "benchmarks" / "published" / "predictions.csv").open(encoding="utf-8") as file:
        notes = [cells["note"] for cells in csv.DictReader(file)]
    outside = [note for note in notes if "every collective" in note]
    assert len(outside) > 100
    for note in outside:
        assert re.search(r"measured [\d.]+% (slower|faster) than with every collective \w+ \([\d.e+]+ s\).*: \w", note)
