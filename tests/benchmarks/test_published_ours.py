"""What of a compiled program is XLA's own doing, and the framework's is not; what eager PyTorch does beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.eager import between_matmuls, between_s, eager_s, layer_bytes, logits_s, step_s
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.ours import (
    casts_weights,
    fused_scores,
    has_wide_heads,
    is_filled,
    is_loop_copy,
    is_stacked_gradient,
    repeats,
    rerun,
)
from benchmarks.published.reduction import accumulation_s
from benchmarks.published.rows import parse_row
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s
from tests.benchmarks.published_rows import CELLS, changed

FORWARD, BACKWARD = "jit(train_step)/jvp(layers)/while/body/", "jit(train_step)/transpose(jvp(layers))/while/body/"
STACK, TAKE = "jit(dynamic_update_index_in_dim)/dynamic_update_slice", "jit(dynamic_index_in_dim)/dynamic_slice"


@pytest.mark.parametrize(
    ("name", "source", "elements", "each", "ours"),
    [
        ("loop_dynamic_update_slice_fusion.1", FORWARD + STACK, 1e6, 4, True),
        ("fusion-start.1", BACKWARD + TAKE, 1e6, 4, True),
        ("fusion-start.2", BACKWARD + STACK, 1e6, 8, False),  # adds gradients up
        ("loop_broadcast_fusion", "", 1e6, 4, True),
        # weights of the gate, 4096 x 14336, from fp32 to bf16; the activations of the same operator
        ("loop_convert_fusion.1", FORWARD + "mlp/gate_up/convert_element_type", 4096 * 14_336, 6, True),
        ("loop_convert_fusion.2", FORWARD + "mlp/gate_up/convert_element_type", 4096 * 14_336, 3, False),
        ("input_reduce_fusion.1", FORWARD + "mlp/reduce_sum", 4096 * 14_336, 4, False),
        ("loop_multiply_fusion", FORWARD + "mlp/mul", 4096 * 14_336, 6, False),
        ("input_reduce_fusion.2", FORWARD + "mlp/gate_up/reduce_max", 1e6, 2, False),  # no fp8
    ],
)
def test_what_a_framework_does_not_do(name, source, elements, each, ours):
    instruction = Instruction(name, "fusion", "kernel", source=source, cost=Cost(bytes_accessed=elements * each))
    casts = casts_weights(changed("nemo2504-llama3.1-8b-bf16-8"))
    assert (is_loop_copy(instruction) or is_filled(instruction) or casts(instruction)) is ours


def test_stacked_gradients_are_told_from_stacked_activations():
    def of(source: str) -> Instruction:
        return Instruction("fusion-start.2", "fusion", "kernel", source, Cost(bytes_accessed=8e6))

    assert is_stacked_gradient(of(BACKWARD + STACK))
    assert not is_stacked_gradient(of(FORWARD + STACK))
    assert not is_stacked_gradient(of(BACKWARD + TAKE))


def test_matmuls_that_add_to_gradients_take_a_share_of_their_bytes_longer():
    """0.57 of reading and writing them in fp32, 0.14 in 16 bits; experts' grouped calls were measured with it."""
    run = changed("nemo2504-llama3.1-8b-bf16-8")
    cluster = Cluster.load(run.machines.table)
    weights = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14_336
    rate = memory_bytes_per_s(cluster.gpu)
    assert run.framework.reduce == "bf16"
    assert accumulation_s(run, cluster) == pytest.approx(0.14 * 4 * weights / rate)
    wide = replace(run, framework=replace(run.framework, reduce="fp32"))
    assert accumulation_s(wide, cluster) == pytest.approx(0.57 * 8 * weights / rate)
    grok = changed("nemo-grok1-bf16-8")
    alone = 6144 * (2 * 128 * (48 + 8) + 8) / 4
    own = (8 / 2) * 3 * 6144 * 32_768 / 4
    assert not grok.recipe.grouped
    assert accumulation_s(grok, cluster) == pytest.approx(0.14 * 4 * (alone + own) / rate)
    for name in ("korthikanti-22B-selective", "megatron-sc21-39B", "internevo-7b-tp1-z8-8"):
        assert accumulation_s(changed(name), cluster) == 0.0, "a pass of its own adds them up"


def test_of_copies_that_xla_made_one_is_the_original():
    names = ("dot.1", "dot.1.remat", "dot.1.remat2", "dot.2.remat", "dot.2.remat2", "dot.3", "dot.30")
    body = tuple(Instruction(name, "fusion", "kernel") for name in names)
    again = repeats(Schedule("step", {"main": body}, "main", "f"))
    assert again == {"dot.1.remat", "dot.1.remat2", "dot.2.remat2"}


def test_a_matmul_is_never_ours():
    cost = Cost(matmul_flops={"bf16": 1.0}, bytes_accessed=4096 * 14_336 * 6)
    source = FORWARD + "mlp/gate_up/convert_element_type"
    assert not casts_weights(changed("nemo2504-llama3.1-8b-bf16-8"))(
        Instruction("dot", "fusion", "kernel", source, cost)
    )


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("megatron-sc21-39B", True),
        ("vtrain-multi-055", True),
        ("internevo-7b-flops-full-32-mb8x1", True),
        ("internevo-7b-tp1-z8-8", False),  # keeps everything
        ("korthikanti-22B-selective", False),
        ("mosaic-13b-s8192-a100_40gb-8-bf16-mb1", True),  # torch 1.13
        ("mosaic-13b-s8192-a100_80gb-8-amp_bf16-mb5", False),  # stops early
        ("kempner-02-7B-2", False),
    ],
)
def test_a_recomputed_layer_runs_whole_where_the_framework_does_so(name, again):
    """Its last matmul and the reduction behind it come twice in a forward pass, once in a backward pass."""
    parts = ("mlp/up/dot_general", "mlp/down/dot_general", "mlp/down/dot_general")
    kinds = (("dot.1", "kernel"), ("dot.2", "kernel"), ("reduce", "start"))
    body = [Instruction(name, "f", kind, FORWARD + part, Cost()) for (name, kind), part in zip(kinds, parts)]
    body += [Instruction("done", "f", "done", starts="reduce")]
    body += [Instruction("dot.3", "f", "kernel", BACKWARD + "mlp/down/dot_general", Cost())]
    found = rerun(changed(name), Schedule("step", {"main": tuple(body)}, "main", "f")).computations["main"]
    more = [(i.name, i.starts) for i in found if i.name.endswith(".rerun")]
    assert more == ([("dot.2.rerun", None), ("reduce.rerun", None), ("done.rerun", "reduce.rerun")] if again else [])
    assert len(found) == len(body) + len(more)


@pytest.mark.parametrize(("precision", "ours"), [("fp8", True), ("FP8-CS", False)])
def test_delayed_scaling_finds_largest_values_on_the_way(precision, ours):
    """Current scaling reads activations twice; weights are cast once a step in both."""
    run = resolve(parse_row({**CELLS["nemo2504-llama3.1-70b-fp8-64"], "precision": precision}, "x"))
    assert isinstance(run, Run)
    source = FORWARD + "attention/output/reduce_max"
    largest = Instruction("input_reduce_fusion.1", "fusion", "kernel", source=source, cost=Cost(bytes_accessed=2e6))
    assert casts_weights(run)(largest) is ours
    weights = Cost(bytes_accessed=5 * 8192 * 8192 / 4)
    source = FORWARD + "attention/output/convert_element_type"
    assert casts_weights(run)(Instruction("loop_convert_fusion", "fusion", "kernel", source=source, cost=weights))


def test_eager_operators_pass_memory_one_by_one():
    """Llama 3 8B (h 4096, keys 1024, f 14,336) without tensor parallelism, by hand; selective: the forward pass twice.

    The page has the same job compiled: 5,762 and 6,667 tokens/s a GPU, 0.39 s a step apart. 20 %: what the operators
    write may stay in the L2 cache, and the compiled one saves launches too.
    """
    run = changed("tt-8b-fsdp8-eager")
    forward, backward = layer_bytes(run)
    both = 16 * (4096 + 1024) + 4 * 4096
    assert forward == 2 * (32 + 2) * 4096 + both + 4 * 14_336
    assert backward == 2 * 82 * 4096 + both + 8 * 14_336
    rate = 2.4e12 * 0.9  # of Meta's H100 with HBM2e
    cluster = Cluster.load("dgx_h100")
    found = eager_s(run, cluster) * cluster.gpu.memory_bytes_per_s * cluster.gpu.achieved["memory"] / rate
    assert found == pytest.approx(2 * 8192 * 32 * (2 * forward + backward) / rate)
    assert found == pytest.approx(2 * 8192 / 5762 - 2 * 8192 / 6667, rel=0.2)
    assert eager_s(changed("tt-8b-fsdp128-compile"), cluster) == 0
    assert eager_s(changed("internevo-7b-tp1-z8-8"), cluster) == 0


GPU = Cluster.load({"gpu": "a100_80gb", "hosts": 1, "gpus_per_host": 8})


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # h 8192, f 32768, 64 heads of 2048 tokens, tensor 8: 26 h + (4 h + 4 f + 9 a s) / 8; back 52 h + (14 h + 8 f
        # + 11 a s) / 8 and the forward pass again
        ("megatron-sc21-39B", 8192 * 380_928, 8192 * (653_312 + 380_928)),
        # h 6144, f 24576, sequence parallel: an eighth of everything; of the scores (9 a s + 4 h) / 8 again
        ("korthikanti-22B-selective", 8192 * 182_784, 8192 * (249_344 + 6144 * 8 / 8 + 150_528)),
        # h 4096, f 11008: 50 h + 6 f; back 86 h + 10 f, and 36 h of norms and residuals again
        ("internevo-7b-tp1-z8-8", 4096 * 270_848, 4096 * (462_336 + 147_456)),
        ("internevo-7b-flops-full-32-mb8x1", 16_384 * 270_848, 16_384 * (462_336 + 270_848)),
        ("nemo2504-llama3.1-8b-bf16-8", 0.0, 0.0),
    ],
)
def test_passes_between_matmuls_are_those_that_the_framework_s_source_has(name, forward, backward):
    """A byte of a norm counts half more, since those of apex and torch have 0.6 of memory's peak and not 0.9."""
    rate = memory_bytes_per_s(GPU.gpu)
    found = between_s(changed(name), GPU)
    assert found == pytest.approx((forward / rate, backward / rate), rel=1e-6)


def test_logits_and_the_optimizer_s_step_are_counted_beyond_those_of_our_program():
    """Megatron's 22B: 8,192 tokens of 6,400 logits, 2.75e9 parameters; InternEvo's 7B on 8 GPUs owns an eighth."""
    rate = memory_bytes_per_s(GPU.gpu)
    small, seven = changed("korthikanti-22B-selective"), changed("internevo-7b-tp1-z8-8")
    assert logits_s(small, GPU) == pytest.approx(8192 * 6400 * 38 / rate)
    assert logits_s(seven, GPU) == pytest.approx(4096 * 103_168 * 46 / rate)
    assert step_s(small, GPU) == pytest.approx(20 * (48 * 12 * 6144**2 + 51_200 * 6144) / 8 / rate)
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11_008)
    assert step_s(seven, GPU) == pytest.approx(30 * (layers + 2 * 103_168 * 4096) / 8 / rate)
    assert step_s(changed("nemo2504-llama3.1-8b-bf16-8"), GPU) == 0.0


def test_only_kernels_between_matmuls_make_way():
    matmul, plain = Cost(matmul_flops={"bf16": 1.0}), Cost(bytes_accessed=1e6)
    body = (
        Instruction("dot", "f", "kernel", FORWARD + "mlp/up/dot_general", matmul),
        Instruction("softmax", "f", "kernel", FORWARD + "attention/reduce_sum", plain),
        Instruction("stack", "f", "kernel", BACKWARD + STACK, plain),  # adds gradients up
        Instruction("reduce", "f", "collective", FORWARD + "mlp/down/dot_general"),
    )
    loop = Instruction("while", "while", "while", bodies=("body",), trip_count=48)
    head = Instruction("loss", "f", "kernel", "jit(train_step)/jvp()/reduce_sum", plain)
    schedule = Schedule("step", {"main": (loop, head), "body": body}, "main", "f")
    assert between_matmuls(changed("megatron-sc21-39B"), schedule) == {"softmax"}
    assert not between_matmuls(changed("nemo2504-llama3.1-8b-bf16-8"), schedule)


def test_a_row_says_whose_attention_it_ran():
    assert changed("nemo2411-gpt3-175b-bf16-128").kernels.attention == "flash2"
    assert changed("nemo2411-nemotron4-15b-bf16-128").kernels.attention == "cudnn_9_4"
    assert changed("nemo2407-GPT3-175B-128").kernels.attention == "cudnn_9_1"
    launched = changed("nemolauncher-LLAMA3-70B-64")
    assert (launched.kernels.attention, launched.chunks, launched.configured) == ("flash2", 10, True)


def test_scores_of_wide_heads_are_fused():
    """Nemotron 4 340B: 96 heads of 192 over 8 GPUs, 4,096 tokens: half the square of two matmuls, back 2.5 times."""
    run = changed("nemo2411-nemotron4-340b-bf16-256")
    assert has_wide_heads(run)
    assert not has_wide_heads(changed("nemo2411-gpt3-175b-bf16-128"))
    forward, backward = (
        tuple(Instruction(n, "fusion", "kernel", source=s + what, cost=Cost(bytes_accessed=8.0)) for n, what in names)
        for s, names in (
            (FORWARD, (("a", "attention/vmap(B->T)/dot_general"), ("b", "attention/vmap()/exp"), ("c", "mlp/mul"))),
            (BACKWARD, (("d", "attention/vmap()/neg"), ("e", "attention/output/dot_general"))),
        )
    )  # fmt: skip
    schedule = fused_scores(run, Schedule("s", {"f": forward, "b": backward}, "f", "x"))
    (one, kept), (back, also) = schedule.computations["f"], schedule.computations["b"]
    assert (kept.name, also.name) == ("c", "e")
    assert one.cost
    assert back.cost
    assert one.cost.attention_flops == 2 * 2 * 4096 * 4096 * 12 * 192 / 2
    assert (back.cost.attention_flops, back.cost.attention_backward) == (2.5 * one.cost.attention_flops, True)
    assert (one.cost.attention_queries, one.cost.attention_length, one.cost.bytes_accessed) == (12 * 4096, 4096, 0)
