"""What frameworks hold at their peak, in closed form, against hand counts and against what runs have published."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.published.experiments import Run, resolve
from benchmarks.published.holdings import framework_peak_bytes, in_flight, kept_bytes
from benchmarks.published.replay import predict
from benchmarks.published.rows import measured_peak_bytes, measured_step_time_s, parse_row, read_rows
from tests.benchmarks.published_rows import CELLS, RUNS, changed

GIB = 2**30


def test_a_gpt_layer_keeps_what_korthikanti_counts():
    """Equation 2 of arXiv 2205.05198: s b h (10 + 24 / t + 5 a s / (h t)) bytes, of which 5 a s / (h t) are scores;
    with sequence parallelism, equation 4: s b h (34 + 5 a s / h) / t."""
    run = changed("korthikanti-22B-selective", recompute="none", sp="no")
    h, a, s, t = 6144, 64, 2048, 8
    assert run.framework.memory
    kept = kept_bytes(run, run.framework.memory)
    assert kept.layer == pytest.approx(h * (10 + 24 / t + 5 * a * s / (h * t)))
    sequence = changed("korthikanti-22B-selective", recompute="none", sp="yes")
    assert kept_bytes(sequence, run.framework.memory).layer == pytest.approx(h * (34 + 5 * a * s / h) / t)
    selective = changed("korthikanti-22B-selective", sp="yes")
    assert kept_bytes(selective, run.framework.memory).stored == pytest.approx(34 * h / t)


def test_stages_keep_as_many_micro_batches_as_are_left():
    run = changed("simumax-b200-llama3_405b_l4_tp1_pp2_dp4_mbc8_cef")
    assert [in_flight(run, stage) for stage in (0, 1)] == [2, 1]
    assert in_flight(changed("simumax-b200-llama3_405b_l4_tp1_pp2_dp4_mbc8_cef", vpp=2), 0) == 2 + 1 / 2
    assert in_flight(changed("simumax-b200-llama3_405b_l4_tp1_pp2_dp4_mbc8_cef", global_batch_seqs=4), 0) == 1


def test_megatron_by_hand():
    """Llama 3 405B, 4 layers, tensor parallelism 8, one replica: 2 + 4 + 12 bytes a parameter; 520,192 bytes a token
    and layer (2 x (4 norms' + q, o of 16,384, k, v of 1,024 each, 3 of 53,248)), cut by 8; empty gradients of a layer;
    logits at 6 bytes, or the last layer's gradients."""
    run = changed("simumax-b200-llama3_405b_l4_tp8_pp1_dp1_mbc4_cef")
    layer = 16_384 * (2 * 16_384 + 2 * 1024 + 3 * 53_248)
    parameters = (4 * layer + 2 * 128_256 * 16_384) / 8
    activations = 4 * 4096 * 520_192 / 8
    logits = 6 * 4096 * 128_256 / 8
    extra = max(logits, 2 * 4096 * 128_256 / 8 + 2 * 128_256 * 16_384 / 8)
    assert framework_peak_bytes(run) == pytest.approx(18 * parameters + activations + 2 * layer / 8 + extra, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "gibibytes", "means", "cells"),
    [
        # Of the same pages as rows of the file, but not in it. No number is fitted to one; some had been seen when it
        # was decided what a framework keeps.
        ("tt-8b-fsdp8-eager", 77.0, "reserved", {"notes": "compile"}),
        ("tt-8b-fsdp128-compile", 67.0, "reserved", {"notes": "eager"}),
        ("kempner-04-7B-4", 62.4, "allocated", {"n_gpus": 2, "fsdp": 2, "micro_batch": 2, "global_batch_seqs": 16}),
        ("kempner-04-7B-4", 45.9, "allocated", {"fsdp": 2, "tp": 2, "global_batch_seqs": 16}),
        ("kempner-04-7B-4", 27.6, "allocated", {"n_gpus": 32, "fsdp": 8, "tp": 4, "global_batch_seqs": 64}),
        ("kempner-09-13B-8", 88.5, "allocated", {"fsdp": 8, "tp": 1, "global_batch_seqs": 128}),
        ("kempner-09-13B-8", 36.3, "allocated", {"n_gpus": 32, "fsdp": 8, "global_batch_seqs": 128}),
        ("simumax-b200-llama3_70b_l12_tp4_pp1_dp2_mbc8_cef", 28.29, "allocated", {"tp": 8, "dp": 1}),
    ],
)
def test_runs_that_are_not_in_the_file(name, gibibytes, means, cells):
    """6 %: what is asked of the median."""
    assert framework_peak_bytes(changed(name, **cells), means) == pytest.approx(gibibytes * GIB, rel=0.06)


def test_published_peaks():
    """Asked: a median of at most 6 %. 10 % for each: what the allocator does on its own (1.03 to 1.09 reserved over
    allocated)."""
    errors = {}
    for row in read_rows(RUNS):
        if peak := measured_peak_bytes(row.notes, row.source):
            run = resolve(row)
            assert isinstance(run, Run)
            held = framework_peak_bytes(run, peak[1])
            assert held
            errors[row.id] = held / peak[0] - 1
    assert len(errors) == 33
    assert statistics.median(map(abs, errors.values())) < 0.06
    assert not {name for name, error in errors.items() if abs(error) > 0.1}


def test_a_row_that_its_source_contradicts_is_corrected():
    """KempnerForge's script runs experiment 02 with two sequences at a time; the row says four, like the others."""
    row = parse_row(CELLS["kempner-02-7B-2"], "x")
    run = resolve(row)
    assert isinstance(run, Run)
    assert (CELLS["kempner-02-7B-2"]["micro_batch"], run.micro_batch, run.micro_batches) == ("4", 2, 4)
    assert "mfu_bench.sh" in run.assumed[0]
    assert not parse_row(CELLS["kempner-04-7B-4"], "x").correction


def test_tflops_of_a3_are_counted_as_maxtext_did_when_they_were_published():
    """6 for every parameter and token, the look-up's and the norms' too; causal attention half; 4 x 4,096 tokens."""
    row = parse_row(CELLS["maxtext-a3-llama2-7b-128"], "x")
    parameters = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11_008 + 2 * 4096) + 2 * 32_000 * 4096 + 4096
    counted = 6 * parameters * 4 * 4096 + 12 * 32 * 4096 * 4096**2 * 4 / 2
    seconds, how = measured_step_time_s(row, 1e18)
    assert seconds == pytest.approx(counted / (375e12), rel=1e-4)
    assert "as its source counted them" in how
    assert "353fb83" in row.correction
    assert not parse_row(CELLS["maxtext-llama2-70b-bf16-64"], "x").correction


def test_a_peak_needs_no_program(tmp_path):
    found = predict(next(r for r in read_rows(RUNS) if r.id == "tt-405b-512-cp1"), tmp_path, compile_missing=False)
    assert found.predicted_s is None
    assert found.peak_bytes
    assert found.peak_means == "reserved"


def test_what_xla_compiles_has_xlas_peak():
    assert framework_peak_bytes(changed("maxtext-llama2-70b-bf16-64")) is None


def test_gigabytes_of_kempnerforge_are_gibibytes():
    assert measured_peak_bytes("mem/GPU 62.4 GB", "KempnerForge x") == (int(62.4 * GIB), "allocated", "mem/GPU 62.4 GB")
    assert measured_peak_bytes("mem/GPU 62.4 GB") == (62_400_000_000, "allocated", "mem/GPU 62.4 GB")
