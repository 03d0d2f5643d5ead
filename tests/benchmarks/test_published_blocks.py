"""Rows in NVFP4: what TransformerEngine does beside its matmuls, in closed form; which layers multiply in four bits."""

from __future__ import annotations

import pytest

from benchmarks.published.blocks import as_mxfp8, as_nvfp4, cast_bytes, casts_s, travel_s
from benchmarks.published.experiments import resolve
from benchmarks.published.experts import CAST_SHARE
from benchmarks.published.rows import parse_row
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.schedule import Collective
from meshkit.predict.network import collective_time_s
from tests.benchmarks.published_rows import CELLS, changed

LARGE = "mbridge-26.02.01-LLAMA3.1_405B-DGX-GB300-256-NVFP4"
WHOLE = "mbridge-26.02-LLAMA3_70B-DGX-GB300-64-NVFP4"  # no tensor parallelism


def test_a_cast_moves_the_bytes_that_its_kernels_read_and_write():
    """bf16 in, four bits and a byte of scale for 16 elements out, twice; 2.12 reads for each dim, later ones once."""
    assert (cast_bytes(3), cast_bytes(2)) == (3 * 2 + 2 * 9 / 16, 2 * 2 + 2 * 9 / 16)
    run = changed(WHOLE)
    assert run.recipe.cast_reads == 3
    assert changed("mbridge-26.04-LLAMA3_70B-DGX-GB200-64-NVFP4").recipe.cast_reads == 2
    cluster = Cluster.load(run.machines.table)
    rate = CAST_SHARE * cluster.gpu.memory_bytes_per_s
    inputs = 2 * 8192 + 8192 + 28672
    outputs = 8192 + 2 * 1024 + 8192 + 2 * 28672 + 8192
    assert casts_s(run, cluster, forward=True) == pytest.approx(8192 * inputs * 7.125 / rate)
    assert casts_s(run, cluster, forward=False) == pytest.approx(8192 * outputs * 7.125 / rate)


def test_what_is_gathered_travels_in_four_bits():
    run = changed(LARGE)
    cluster = Cluster.load(run.machines.table)

    def one(kind: str, payload: float) -> float:
        return collective_time_s(kind, payload_bytes=payload, gpus_per_domain=4, cluster=cluster)

    size = 8192 * 16384
    forward, beside = travel_s(run, cluster, forward=True)
    expected = one("all-gather", size * 9 / 16) + one("reduce-scatter", size * 2) + one("all-reduce", 8)
    assert (forward, beside) == (pytest.approx(2 * expected), 0.0)
    backward, beside = travel_s(run, cluster, forward=False)
    assert backward == pytest.approx(2 * one("all-gather", size * 9 / 8) + 2 * one("all-reduce", 8))
    assert beside == pytest.approx(2 * one("all-gather", size * 9 / 16) + 2 * one("reduce-scatter", size * 2))
    alone = changed(WHOLE)
    assert travel_s(alone, Cluster.load(alone.machines.table), forward=True) == (0.0, 0.0)


def test_linear_layers_multiply_in_four_bits_and_the_output_head_in_sixteen():
    def matmul(name: str, source: str) -> Instruction:
        return Instruction(name, "fusion", "kernel", source, Cost({"bf16": 2.0}, matmuls=(Matmul("bf16", 1, 1, 1, 1),)))

    sent = Collective("g", "k", "all-gather", ("tensor",), True, "nvlink", None, "bf16", 4, 1, 8, 64)
    gather = Instruction("g", "all-gather", "collective", "", collective=sent)
    kernels = {
        "main": (matmul("head", "jvp(logits)/head/dot_general"), gather),
        "body": (matmul("down", "jvp(layers)/while/body/mlp/down/dot_general"), gather),
    }
    schedule = Schedule("m", kernels, "main", "x")
    found = as_nvfp4(changed(LARGE), schedule).computations
    assert [i.name for i in found["main"]] == ["head", "g"]
    assert [i.name for i in found["body"]] == ["down"], "what travels in a layer is counted in closed form"
    costs = {body[0].name: body[0].cost for body in found.values()}
    assert {name: set(c.matmul_flops) for name, c in costs.items() if c} == {"head": {"bf16"}, "down": {"f4e2m1fn"}}


def test_eight_bits_are_cast_elsewhere():
    run = changed(WHOLE, precision="mxfp8")
    assert casts_s(run, Cluster.load(run.machines.table), forward=True) == 0
    large = changed(LARGE, precision="mxfp8")
    assert travel_s(large, Cluster.load(large.machines.table), forward=True) == (0, 0)


@pytest.mark.parametrize(
    ("said", "dtype"), [("mxfp8", "mxfp8"), ("fp8-mx", "mxfp8"), ("fp8-cs (fp8-mx)", "f8e5m2_highest")]
)
def test_a_run_in_mxfp8_multiplies_its_eight_bits_at_mxfp8s_rates(said, dtype):
    name = "f8e5m2_highest"
    eight = Instruction("a", "fusion", "kernel", "", Cost({name: 2.0}, matmuls=(Matmul(name, 1, 1, 1, 1),)))
    schedule = Schedule("m", {"main": (eight,)}, "main", "x")
    (found,) = as_mxfp8(changed(WHOLE, precision=said), schedule).computations["main"]
    assert found.cost is not None
    assert set(found.cost.matmul_flops) == {m.dtype for m in found.cost.matmuls} == {dtype}


@pytest.mark.parametrize(
    ("name", "share", "reduce"),
    [
        ("tg-llama31-405b-nvfp4-256-pp16", 1.0, "bf16"),
        ("tg-llama31-405b-nvfp4-256-pp8", 1.0, "bf16"),
        ("tg-llama3-70b-nvfp4-256-0502", 0.0, "bf16"),
        (LARGE, 0.0, "bf16"),
        ("mlperf-v3.1-NVIDIA-eos_n64_ngc23.09_nemo-gpt3", 0.0, "bf16"),
        ("mlperf-v4.1-NVIDIA-eos_n32_ngc24.09_nemo-gpt3", 0.0, "fp32"),
    ],
)
def test_facts_that_were_looked_up(name, share, reduce):
    run = changed(name)
    assert (run.recomputed, run.framework.reduce, run.configured) == (share, reduce, True)


def test_some_layers_of_a_chunk_are_recomputed():
    cells = {"recompute": "recompute_num_layers=1", "pp": 8, "vpp": 4, "layers": 128, "model": "llama of 128 layers"}
    assert changed("tg-llama31-405b-nvfp4-256-pp16", **cells).recomputed == 0.25


def test_what_has_no_rates_is_said():
    row = {**CELLS[WHOLE], "gpu": "H100-80GB SXM"}
    assert resolve(parse_row(row, "x")) == "matmuls in NVFP4 on H100-80GB SXM are not modelled"
