"""Rows of mixtures of experts: public dims, a stage of all replicas that share experts, what Megatron adds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.published import reduction
from benchmarks.published.experiments import resolve
from benchmarks.published.experts import (
    as_in_megatron,
    beside_s,
    copies,
    exchange_s,
    heads_norms_s,
    is_routing,
    operators_s,
    passes_s,
    quantization_s,
    window_s,
)
from benchmarks.published.holdings import framework_peak_bytes
from benchmarks.published.ours import casts_weights
from benchmarks.published.recipes import Recipe, find_recipe
from benchmarks.published.replay import family_of
from benchmarks.published.rows import parse_row
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.schedule import Collective
from meshkit.predict.kernels import memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from tests.benchmarks.published_rows import CELLS, changed

QWEN = "mbridge-26.02-Qwen3_30B_a3B-DGX-B200-8-MXFP8"
OVERLAPPED = "mbridge-26.06-Qwen3_30B_a3B-DGX-GB300-8-MXFP8"
GPT = "mbridge-26.04-GPT-DGX-GB300-64-BF16"


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [  # their names: 30.5 and 3.3 billion, 235 and 22, 117 and 5.1, 314 and 86
        (QWEN, 30.5, 3.3),
        ("mbridge-26.08-Qwen3_235B_a22B-DGX-GB200-256-MXFP8", 235.0, 22.0),
        ("mbridge-26.04-GPT-DGX-GB200-64-BF16", 117.0, 5.1),
        ("nemo-grok1-bf16-512", 314.0, 86.0),
    ],
)
def test_public_dims_give_the_published_number_of_parameters(name, billions, active):
    """2 %: biases and norms are left out, and names are rounded; the table of the vocabulary counts once as active."""
    run = changed(name)
    s = run.shape
    assert s.parameters() / 1e9 == pytest.approx(billions, rel=0.02)
    attention = 12.0 * s.layers * s.heads * s.head_dim * run.length * s.attended(run.length)
    assert (s.model_flops(1, run.length) - attention) / 6e9 == pytest.approx(active, rel=0.1)
    assert not run.configured
    assert any("forced to be even" in text for text in run.assumed)
    assert family_of(run) == "Megatron-Core, experts"


def test_a_stage_has_every_replica_that_shares_its_experts(tmp_path):
    """grok1 on 512 GPUs: 8 replicas of tensor 4 x context 2 on each of 8 stages; 64 GPUs are compiled."""
    run = changed("nemo-grok1-bf16-512")
    assert (run.data, run.experts, run.micro_batches) == (8, 8, 128)
    (tmp_path / "stage.toml").write_text(run.toml)
    experiment = load(tmp_path / "stage.toml")
    assert math.prod(experiment.mesh.shape) == experiment.cluster.num_gpus == 64
    assert experiment.train.global_batch == 8
    assert run.document["model"]["capacity_factor"] == 1.0, "an even load, nothing dropped"
    assert framework_peak_bytes(run) is None


def test_experts_that_tensor_parallel_gpus_hold_whole_are_not_matched():
    assert "expert tensor parallelism 1" in str(
        resolve(parse_row(CELLS["mbridge-26.04-Qwen3_235B_a22B-DGX-H100-256-FP8"], "x"))
    )


@pytest.mark.parametrize(
    ("name", "part"),
    [("mbridge-26.04-Kimi_K2-DGX-GB300-256-MXFP8", "MLA"), ("mbridge-26.04-Nemotron_3_Nano-DGX-H100-16-FP8", "Mamba")],
)
def test_a_part_of_a_model_that_ours_have_not_is_named(name, part):
    assert part in str(resolve(parse_row(CELLS[name], "x")))


def _schedule(*kernels: Instruction) -> Schedule:
    return Schedule("m", {"e": kernels}, "e", "x")


def test_the_router_has_16_bit_operands_and_experts_8():
    run = changed(QWEN)
    router = Instruction("r", "fusion", "kernel", "moe/router", Cost({"f32_highest": 8.0}))
    expert = Instruction("x", "fusion", "kernel", "moe/experts",
                         Cost({"bf16": 4.0}, matmuls=(Matmul("bf16", 1, 1, 1, 2),)))  # fmt: skip
    head = Instruction("h", "fusion", "kernel", "logits/head", Cost({"bf16": 4.0}))
    found = as_in_megatron(run, _schedule(router, expert, head)).computations["e"]
    assert [dict(i.cost.matmul_flops) for i in found if i.cost] == [{"bf16": 8.0}, {"f8e4m3fn": 4.0}, {"bf16": 4.0}]
    assert found[1].cost
    assert found[1].cost.matmuls[0].dtype == "f8e4m3fn"
    back = replace(expert, source="transpose(jvp(layers))/moe/experts")
    (found,) = as_in_megatron(run, _schedule(back)).computations["e"]
    assert found.cost
    assert dict(found.cost.matmul_flops) == {"f8e4m3fn_highest": 4.0}
    plain = as_in_megatron(changed(QWEN, precision="BF16"), _schedule(expert)).computations["e"]
    assert plain == (expert,)


def test_every_second_layer_attends_to_a_window_at_the_time_that_cudnn_takes():
    """4 sequences of 64 heads are as many queries as cuDNN's 2 of 128: 0.21 ms forward, 0.465 backward."""
    run = changed("mbridge-26.04-GPT-DGX-GB200-64-BF16")
    cluster = Cluster.load(run.machines.table)
    assert window_s(run, cluster) == pytest.approx(0.5 * (0.21e-3 + 0.465e-3))
    assert window_s(changed(QWEN), cluster) == 0.0
    hopper = changed("mbridge-26.04-GPT-DGX-H100-64-BF16")
    assert window_s(hopper, Cluster.load(hopper.machines.table)) == pytest.approx(0.5 * 4096 * 64 * 0.668e-9, rel=0.01)
    attention = Instruction("a", "custom-call", "kernel", cost=Cost(attention_flops=1.0))
    (found,) = as_in_megatron(run, _schedule(attention)).computations["e"]
    assert found.cost
    assert found.cost.attention_flops == 0.5


def test_operands_are_cast_once_each():
    """Qwen3 30B, by hand: hidden 2048, experts of 768, 8 of them, 4096 tokens; 4 bytes. Attention's are elsewhere."""
    run = changed(QWEN)
    cluster = Cluster.load(run.machines.table)
    experts = 8 * (2048 + 768) + 8 * (2 * 768 + 2048)
    rate = cluster.gpu.memory_bytes_per_s * 0.68
    assert quantization_s(run, cluster) == pytest.approx(4 * 4096 * experts / rate)
    fused = changed(OVERLAPPED, gpu="B200", micro_batch=1)
    assert quantization_s(fused, cluster) == pytest.approx(4 * 4096 * 16 * 2048 / rate)
    hopper = changed("mbridge-26.04-Qwen3_30B_a3B-DGX-H100-16-FP8")
    there = Cluster.load(hopper.machines.table)
    moved = 6 * hopper.tokens * experts  # the largest value first, with current scaling
    assert quantization_s(hopper, there) == pytest.approx(moved / (there.gpu.memory_bytes_per_s * 0.388))
    assert quantization_s(changed(QWEN, precision="BF16"), cluster) == 0
    assert quantization_s(changed("nemo2504-llama3.1-8b-bf16-8", precision="fp8"), cluster) == 0


def test_casts_of_expert_weights_are_ours():
    run = changed(QWEN)
    size = 128 // 8 * 2048 * 768
    source = "jit(train_step)/jvp(layers)/while/body/moe/convert_element_type"
    cast = Instruction("loop_convert_fusion.1", "fusion", "kernel", source, Cost(bytes_accessed=6.0 * size))
    tokens = Instruction("loop_convert_fusion.2", "fusion", "kernel", source, Cost(bytes_accessed=1.7 * size))
    assert casts_weights(run)(cast)
    assert not casts_weights(run)(tokens)


def test_experts_are_reduced_among_fewer_replicas():
    """B300, Qwen3 235B: 32 replicas on each of 8 stages share experts 8 ways: 4 copies of each, 32 of the rest."""
    run = changed("mbridge-26.04.01-Qwen3_235B_a22B-DGX-B300-256-MXFP8")
    assert (run.data, run.experts, run.stage_layers) == (32, 8, 12)
    assert reduction.stage_experts(run) == 12 * 128 * 3 * 4096 * 1536 / 8
    cluster = Cluster.load(run.machines.table)
    total = reduction.gradients_s(run, cluster, 0.0, 0.0)
    owned = reduction.stage_experts(run)
    alone = sum(
        collective_time_s(kind, payload_bytes=size * owned, gpus_per_domain=1, domains=4, cluster=cluster)
        for kind, size in (("reduce-scatter", 2), ("all-gather", 2))
    )
    # buckets cost latency, the rest of the stage (a 12th of its weights) its own collectives
    assert alone < total < 1.5 * alone


def test_the_recipe_beside_a_page_says_how_its_experts_ran():
    found = {name: changed(name).recipe for name in (QWEN, OVERLAPPED, GPT, "nemo-grok1-bf16-512")}
    assert (found[QWEN].dispatcher, found[QWEN].overlapped, found[QWEN].graph) == ("alltoall", False, "parts")
    assert (found[OVERLAPPED].dispatcher, found[OVERLAPPED].overlapped) == ("hybridep", True)
    assert found[OVERLAPPED].fused
    assert found[GPT].recomputes == ()
    assert changed("mbridge-26.04-GPT-DGX-H100-64-BF16").recipe.recomputes == ("layernorm", "moe_act")
    assert changed("mbridge-26.04-GPT-DGX-B200-64-BF16").recipe.dispatcher == "hybridep"
    assert changed("nemo-grok1-bf16-512").framework.attention == "flash2"
    elsewhere = parse_row(
        {**CELLS["nemo-grok1-bf16-512"], "source_ref": "togethercomputer/together-dgxc", "source": ""}, "x"
    )
    assert find_recipe(elsewhere) == Recipe(), "another publisher's runs have Megatron's defaults"


def test_a_number_that_its_page_calls_a_regression_is_not_predicted():
    row = parse_row(CELLS["mbridge-26.06.01-GPT-DGX-GB200-64-MXFP8"], "x")
    assert "regression" in str(resolve(row))


def test_a_token_goes_once_to_a_gpu_that_has_several_of_its_experts():
    """8 of 128: all alone on 128 GPUs, one copy on one; on 8 GPUs a GPU is left out with 1 in 3."""
    run = changed(QWEN)
    assert [copies(run, n) for n in (1, 128)] == pytest.approx([1, 8])
    assert copies(run, 8) == pytest.approx(8 * (1 - math.prod((112 - i) / (128 - i) for i in range(8))))


def test_tokens_travel_as_the_recipe_says():
    run = changed(OVERLAPPED)
    cluster = Cluster.load(run.machines.table)
    received = 8 * 4096 * 2048 * 2 * copies(run, 8)
    hybrid = exchange_s(run, cluster)
    assert type(hybrid) is float  # numpy's False is not `False`, which notes of rows ask for
    told = collective_time_s("all-gather", payload_bytes=8 * 8 * 4096 * 128, gpus_per_domain=8, cluster=cluster)
    assert hybrid == pytest.approx(2 * received / 546e9 + 2 * received / 569e9 + told)
    plain = changed(OVERLAPPED, source="Megatron-Bridge 26.02 ", gpu="B200", gpus_per_node=8)
    every = {
        "payload_bytes": 8 * 8 * 4096 * 2048 * 2,
        "gpus_per_domain": 8,
        "cluster": Cluster.load(plain.machines.table),
    }
    with_rows = 2 * collective_time_s("all-to-all", **{**every, "payload_bytes": 8 * 8 * 4096 * 2})
    with_rows += collective_time_s("all-gather", **{**every, "payload_bytes": 128 * 8 * 8})
    assert exchange_s(plain, every["cluster"]) == pytest.approx(
        4 * collective_time_s("all-to-all", **every) + with_rows
    )
    assert beside_s(run, cluster, 4 * hybrid) == pytest.approx(hybrid * 32 / 152 + hybrid / run.micro_batches)
    assert beside_s(plain, every["cluster"], 1.0) == exchange_s(plain, every["cluster"])


def test_tensor_parallel_gpus_send_their_own_tokens_and_gather_the_rows():
    """grok1: tensor 4, 2 hosts' worth of experts; a quarter of 4,096 tokens to 2 experts each, 8,192 rows gathered."""
    run = changed("nemo-grok1-bf16-512")
    cluster = Cluster.load(run.machines.table)
    rows = 8192 / 2 / 4 * 2 * 6144 * 2
    travel = 4 * collective_time_s("all-to-all", payload_bytes=rows, gpus_per_domain=2, domains=4, cluster=cluster)
    gathers = sum(
        2 * collective_time_s(kind, payload_bytes=4 * rows, gpus_per_domain=4, cluster=cluster)
        for kind in ("all-gather", "reduce-scatter")
    )
    assert exchange_s(run, cluster) == pytest.approx(travel + gathers)


def test_heads_of_queries_and_keys_are_normed_at_the_rate_of_cudnn():
    """Qwen3 30B, 4,096 tokens: 131,072 heads of queries in 16 and 27 us on a GB200, an eighth more of keys."""
    run = changed("mbridge-25.11-Qwen3_30B_a3B-DGX-GB200-8-FP8-MX", micro_batch=1)
    cluster = Cluster.load(run.machines.table)
    assert heads_norms_s(run, cluster) == pytest.approx(43e-6 * 9 / 8, rel=0.02)
    assert heads_norms_s(changed(GPT), cluster) == 0.0
    hopper = changed("mbridge-26.04-Qwen3_30B_a3B-DGX-H100-16-FP8")
    slower = Cluster.load(hopper.machines.table)
    memory = 10 * 4096 * 36 * 128 / memory_bytes_per_s(slower.gpu)
    assert memory < heads_norms_s(hopper, slower) < 1.1 * memory, (
        "an H100's memory is slower than the kernel on an H200"
    )


def test_rows_are_moved_and_worked_on_as_often_as_in_megatron():
    """By hand: 4 permutations of tokens and 8 sorts of rows, the gate's 16 bytes, the tiles of a cast, no bias."""
    run = changed(QWEN)
    cluster = Cluster.load(run.machines.table)
    peak, rate = cluster.gpu.memory_bytes_per_s, memory_bytes_per_s(cluster.gpu)
    moved = 4 * (4096 + 3 * 8 * 4096) * 2048 * 2 / (0.5 * peak)
    filled = 8 * 8 * 4096 * 2048 * 2 / rate
    gate = 8 * 4096 * 16 * 768 / rate
    assert passes_s(run, cluster) == pytest.approx(moved + filled)
    assert operators_s(run, cluster) == pytest.approx(gate)
    assert passes_s(changed(QWEN, precision="BF16"), cluster) == pytest.approx(moved)
    gpt = changed(GPT)
    tokens, rows = 4 * 4096, 4 * 4 * 4096
    plain = 4 * (tokens + 3 * rows) * 2880 * 2 / (0.5 * Cluster.load(gpt.machines.table).gpu.memory_bytes_per_s)
    whole = rows * (16 * 2880 + 9.5 * 2 * 2880 + 18 * 2880) + tokens * (20 * 2880 + 22 * (64 + 8) * 64)
    strided = rows * (13.5 * 2 * 2880 + 10 * 2880) + tokens * (8 * 2880 + 20 * (64 + 8) * 64)
    there = Cluster.load(gpt.machines.table)
    on_h100 = 10 * 8192 * 32768 / 1.4953e-3  # bytes/s of 132 multiprocessors at 1.98 GHz
    eager = whole / memory_bytes_per_s(there.gpu) + strided / (on_h100 * 152 * 2.07 / (132 * 1.98))
    assert passes_s(gpt, there) == pytest.approx(plain)
    assert operators_s(gpt, there) == pytest.approx(eager)
    again = changed(GPT, gpu="GB200")
    more = rows * (6 * 2880 + 4 * 2 * 2880) + tokens * 4 * 2880
    there = Cluster.load(again.machines.table)
    once = operators_s(replace(again, recipe=replace(again.recipe, recomputes=())), there)
    repeated = more / memory_bytes_per_s(there.gpu) + rows * 4 * 2 * 2880 / (on_h100 * 152 * 2.062 / (132 * 1.98))
    assert operators_s(again, there) - once == pytest.approx(repeated)


def test_what_moves_tokens_in_our_program_goes_and_matmuls_stay():
    source = "jit(train_step)/jvp(layers)/while/body/moe/experts/shard_map/"
    sent = Collective("a", "k", "all-to-all", ("expert",), True, "nvlink", None, "bf16", 8, 1, 8, 64)
    travel = Instruction("a", "all-to-all", "collective", source + "dispatch/all_to_all", collective=sent)
    turn = Instruction("t", "fusion", "kernel", source + "transpose", Cost(bytes_accessed=8.0))
    matmul = Instruction("m", "fusion", "kernel", source + "dot_general", Cost({"bf16": 4.0}))
    stack = Instruction("s", "fusion", "kernel", source + "dynamic_update_slice", Cost(bytes_accessed=8.0))
    norm = Instruction("n", "fusion", "kernel", "jvp(layers)/while/body/moe/reduce_sum", Cost(bytes_accessed=8.0))
    assert [is_routing(i) for i in (travel, turn, matmul, stack, norm)] == [True, True, False, False, False]


def test_a_grouped_call_takes_longer_than_a_batched_matmul():
    """H100, GPT-OSS, 1,024 rows of an expert: 1.13 times, and gradients of weights, whose inner dim they are, 1.52."""
    run = changed("mbridge-26.04-GPT-DGX-H100-64-BF16")

    def flops(k: int) -> float:
        matmul = Matmul("bf16", 16, 2880, 2880, k)
        kernel = Instruction(
            "x", "fusion", "kernel", "/moe/experts/dot_general", Cost({"bf16": 100.0}, matmuls=(matmul,))
        )
        (found,) = as_in_megatron(run, _schedule(kernel)).computations["e"]
        assert found.cost
        return found.cost.matmul_flops["bf16"]

    assert (flops(2880), flops(1024)) == (pytest.approx(113), pytest.approx(152))
