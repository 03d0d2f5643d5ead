"""What Megatron-Core moves between matmuls: closed forms by hand, and what of a program they take the place of."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.published.experiments import Run
from benchmarks.published.experts import CAST_SHARE
from benchmarks.published.transformer_engine import (
    Moved,
    as_dropped,
    as_launched,
    drops_scores,
    is_counted,
    launches,
    layer_moves,
    logits_s,
    passes_logits,
)
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import kernel_work, memory_bytes_per_s
from tests.benchmarks.published_rows import changed

EIGHT, SEVENTY = "nemo2504-llama3.1-8b-bf16-8", "nemo2504-llama3.1-70b-fp8-64"
CURRENT = "mbridge-26.02-LLAMA3_70B-DGX-H100-64-FP8"
LARGE = "mbridge-26.06-LLAMA3.1_405B-DGX-GB200-256-MXFP8"
QWEN, OSS = "mbridge-26.06-Qwen3_30B_a3B-DGX-B300-8-MXFP8", "mbridge-26.04-GPT-DGX-GB200-64-BF16"
GPT = "nemo2411-gpt3-175b-bf16-128"


def run_of(name: str, **cells: object) -> tuple[Run, Cluster]:
    run = changed(name, **cells)
    return run, Cluster.load(run.machines.table)


def loosely(value: float) -> Any:
    return pytest.approx(value)


def moved(plain: float, cast: float = 0.0, turned: float = 0.0) -> Moved:
    return Moved(*(loosely(i) for i in (plain, cast, turned)))


def slower(h: float) -> tuple[float, float]:
    """What the bytes of two norms count more, forward and backward, at 0.77 of memory's peak."""
    more = 0.9 / 0.77 - 1
    return 2 * 4 * more * h, 2 * 6 * more * h


def test_sixteen_bits_over_two_context_parallel_gpus():
    """Llama 3 8B (h 4096, keys 1024, f 14,336): two norms and residuals, both rotations, SwiGLU, ring attention."""
    forward, back = layer_moves(*run_of(EIGHT))
    ring, ring_back = 9.5 * 4096 + 10 * 1024, 11.5 * 4096 + 27 * 1024
    norms, norms_back = slower(4096)
    assert forward == moved(norms + 2 * (4 + 6) * 4096 + 8 * 4096 + 8 * 1024 + 6 * 14_336 + ring)
    assert back == moved(norms_back + 2 * (6 + 6) * 4096 + 8 * 4096 + 12 * 1024 + 10 * 14_336 + ring_back)


def plain_70b(ways: int) -> tuple[float, float]:
    h, k, f = 8192 / ways, 1024 / ways, 28_672 / ways
    norms, norms_back = slower(h)
    return norms + 20 * h + 8 * h + 8 * k + 6 * f, norms_back + 24 * h + 8 * h + 12 * k + 10 * f


@pytest.mark.parametrize(
    ("name", "cells", "ways", "scaling"),
    [(SEVENTY, {}, 4, "delayed"), (SEVENTY, {"tp": 1}, 1, "delayed"), (CURRENT, {}, 4, "current")],
)
def test_eight_bits_on_hopper_want_both_layouts(name, cells, ways, scaling):
    """Norms cast with delayed scaling, and find the largest value for the cast behind them with current scaling."""
    forward, back = layer_moves(*run_of(name, **cells))
    plain, plain_back = plain_70b(ways)
    h, k, f = 8192 / ways, 1024 / ways, 28_672 / ways
    largest = 2 if scaling == "current" else 0
    norms = 2 * h * (3 if scaling == "current" else -1)
    assert forward == moved(plain + norms + largest * (h + f), cast=4 * (h + f))
    out = h + 2 * k + 2 * f
    if ways == 1:
        assert back == moved(plain_back, cast=4 * (out + 2 * h), turned=2 * 8192)
    else:  # four tensors are gathered in one layout, and transposed whole
        assert back == moved(plain_back + (3 + largest) * 2 * h + largest * out, cast=4 * out, turned=4 * 8192)


def test_mxfp8_casts_both_layouts_at_once_but_what_userbuffers_gather():
    forward, back = layer_moves(*run_of(LARGE))
    h, k, f = 16_384 / 4, 1024 / 4, 53_248 / 4
    assert forward == moved(28 * h + 8 * k + 6 * f, cast=(2 + 2 + 2 / 32) * (3 * h + f))
    cast = 4.0625 * (h + 2 * k + 2 * f) + 6.0625 * 2 * h
    assert back == moved(32 * h + 12 * k + 10 * f, cast=cast)
    blocking = layer_moves(*run_of(LARGE, precision="NVFP4"))
    assert blocking == (moved(28 * h + 8 * k + 6 * f), moved(32 * h + 12 * k + 10 * f)), "casts are in blocks.py"


def test_one_layout_on_blackwell_with_a_scale_of_a_tensor():
    forward, back = layer_moves(*run_of("mbridge-25.11-LLAMA3_8B-DGX-B200-8-FP8-CS"))
    norms, norms_back = slower(4096)
    plain = norms + 28 * 4096 + 8 * 1024 + 6 * 14_336
    assert forward == moved(plain + 3 * 2 * 4096 + 5 * (4096 + 14_336)), "norms find largest values"
    assert back == moved(
        norms_back + 32 * 4096 + 12 * 1024 + 10 * 14_336 + 5 * (2 * 4096 + 4096 + 2 * 1024 + 2 * 14_336)
    )


def test_attention_of_layers_with_experts():
    """Qwen3 30B (h 2048, q 4096, k 512): queries of 8 heads a key are copied, both norms' sums, and that of the router;
    casts of attention's two linear layers. GPT-OSS adds residuals and rotates by operators, which experts.py counts."""
    forward, back = layer_moves(*run_of(QWEN))
    h, q, k = 2048, 4096, 512
    block = 2 + 2 + 2 / 32
    norms, norms_back = slower(h)
    assert forward == moved(norms + 2 * (4 + 6) * h + 8 * q + 8 * k, cast=block * (h + q))
    assert back == moved(norms_back + (2 * (6 + 6) + 6) * h + 8 * q + 12 * k, cast=block * (q + 2 * k + h))
    assert launches(*run_of(QWEN)) == (2 + 2 + 4 + 2, 4 + 3 + 3 + 2)
    h, q, k = 2880, 4096, 512
    assert layer_moves(*run_of(OSS)) == (moved(8 * h + 4 * q + 4 * k), moved(30 * h + 4 * q + 8 * k))
    assert launches(*run_of(OSS)) == (2 + 2, 4 + 3 + 1)
    h, q, k = 2048, 4096, 512  # current scaling on Hopper: both layouts at once, the largest value found by the norm
    forward, back = layer_moves(*run_of("mbridge-26.04-Qwen3_30B_a3B-DGX-H100-16-FP8"))
    assert forward == moved(norms + 20 * h + 8 * q + 8 * k + 2 * q, cast=4 * (h + q))
    assert back == moved(norms_back + 30 * h + 8 * q + 12 * k + 2 * (q + 2 * k + h), cast=4 * (q + 2 * k + h))


def test_what_experts_and_their_router_do_is_theirs():
    run, cluster = run_of(QWEN)
    product = Cost({"bf16": 1e12}, matmuls=(Matmul("bf16", 1, 1, 1, 1),), joined_bytes=1e6)
    names = ("attention/mul", "moe/reduce_sum", "moe/router/top_k", "moe/experts/mul")
    kernels = (Instruction(n, "f", "kernel", f"jvp(layers)/{n}", Cost(bytes_accessed=1e6)) for n in names)
    dots = (Instruction(n, "f", "kernel", f"jvp(layers)/{n}", product) for n in ("attention/dot", "moe/experts/dot"))
    loops = tuple(Instruction(n, "while", "while", bodies=("body",), trip_count=4) for n in ("there",))
    schedule = Schedule("step", {"main": loops, "body": (*kernels, *dots)}, "main", "f")
    found = as_launched(run, schedule, cluster).computations["body"]
    kept = {i.name: i.cost.joined_bytes for i in found if i.cost and "." not in i.name}
    assert kept == {"moe/router/top_k": 0, "moe/experts/mul": 0, "attention/dot": 0, "moe/experts/dot": 1e6}


def test_biases_and_dropout_of_gpt_3():
    """No rotation: attention takes the joint output, which FlashAttention 2 takes apart and joins again."""
    forward, back = layer_moves(*run_of(GPT))
    h = 12_288 / 4
    norms, norms_back = slower(h)
    assert forward == moved(norms + 2 * (4 + 7) * h + 4 * 4 * h + 4 * 3 * h)
    assert back == moved(norms_back + 2 * (6 + 6 + 2 + 5) * h + (6 + 2) * 4 * h + 4 * 3 * h)


@pytest.mark.parametrize(("source", "gpu"), [("v3.1", "H100-80GB SXM"), ("v4.1", "B200")])
def test_gelu_of_transformer_engines_own_layer_casts(source, gpu):
    """MLPerf's GPT-3, by TransformerEngine before v2.0: both layouts on any GPU, no dropout."""
    run, cluster = run_of(GPT, source=f"MLPerf Training {source}", gpu=gpu, precision="fp8", micro_batch=2)
    forward, back = layer_moves(run, cluster)
    h, taken_apart = 12_288 / 4, 4 * 3 if run.kernels.attention.startswith("flash") else 0
    norms, norms_back = slower(h)
    assert forward == moved(norms + (2 * (4 + 6) + taken_apart + 3 * 4 - 2) * h, cast=4 * h)
    wanted = moved(
        norms_back + (2 * (6 + 6 + 2) + taken_apart + 2 * 3) * h, cast=(4 * 3 + 6 * 4) * h, turned=4 * 12_288 + 4 * h
    )
    assert back == wanted
    logits = run.tokens * run.shape.vocab / 4
    assert logits_s(run, cluster) * memory_bytes_per_s(cluster.gpu) / logits == loosely(52 if source == "v3.1" else 32)


@pytest.mark.parametrize(
    ("name", "cells", "wanted"),
    [
        (EIGHT, {}, (2 + 2 + 1 + 4, 4 + 2 + 1 + 3)),  # norms, residuals, activation; rotations and what is copied
        (SEVENTY, {}, (9 + 2, 10 + 4 + 4)),  # casts, and what is gathered turned
        (CURRENT, {}, (9 + 3 * 2 + 2 * 2, 10 + 3 * 4 + 4)),  # norms find largest values
        (LARGE, {}, (9 + 4, 10 + 4)),
        (GPT, {}, (5 + 1, 7 + 2 + 2 + 1 + 1)),  # gradients of biases, dropout's
        (GPT, {"source": "MLPerf Training v3.1", "precision": "fp8"}, (5 + 1 + 9, 7 + 2 + 3 + 5 + 6)),
    ],
)
def test_kernels_that_a_layer_launches(name, cells, wanted):
    assert launches(*run_of(name, **cells)) == wanted


def test_dropout_of_a_recipe_with_micro_batches_of_one():
    one, two = (layer_moves(*run_of("nemo2407-GPT3-175B-512", micro_batch=i)) for i in (1, 2))
    assert [a.plain - b.plain for a, b in zip(one, two)] == [loosely(2 * 3072), loosely(10 * 3072)]


def test_attention_takes_longer_where_it_drops_scores():
    """NeMo 24.11's GPT-3 with FlashAttention 2, and 24.07's with cuDNN; 24.07's of 512 GPUs drops nothing."""
    body = (
        Instruction("attention", "f", "kernel", cost=Cost(attention_flops=1000.0)),
        Instruction("free", "f", "free"),
    )
    schedule = Schedule("step", {"main": body}, "main", "f")
    for name, longer in ((GPT, 0.728 / 0.695), ("nemo2407-GPT3-175B-128", 0.614 / 0.594)):
        run, _ = run_of(name)
        assert drops_scores(run)
        attention, other = as_dropped(run, schedule).computations["main"]
        assert attention.cost
        assert attention.cost.attention_flops == pytest.approx(1000 * longer)
        assert other == body[1]
    for name in ("nemo2407-GPT3-175B-512", SEVENTY, LARGE):
        assert not drops_scores(run_of(name)[0])


def test_passes_take_the_place_of_what_is_between_matmuls():
    """And of what XLA joins and turns for them; the loss's passes go by their size."""
    run, cluster = run_of(SEVENTY)
    product = Cost({"f8e4m3fn": 1e12}, matmuls=(Matmul("f8e4m3fn", 1, 1, 1, 1),), joined_bytes=1e6, turned_bytes=1e6)
    body = (
        Instruction("softmax", "f", "kernel", "jvp(layers)/reduce", Cost(bytes_accessed=1e6)),
        Instruction("dot", "f", "kernel", "jvp(layers)/dot_general", product),
    )
    loops = tuple(Instruction(n, "while", "while", bodies=(f"{n}.body",), trip_count=4) for n in ("there", "back"))
    logits = run.tokens * run.shape.vocab / 4
    loss = Instruction("loss", "f", "kernel", "jit(train_step)/jvp()/reduce_max", Cost(bytes_accessed=4 * logits))
    bodies = {"main": (*loops, loss), "there.body": body, "back.body": body}
    found = as_launched(run, Schedule("step", bodies, "main", "f"), cluster).computations
    assert [i.name for i in found["there.body"]] == ["there.plain", "there.cast", "dot"]
    assert [i.name for i in found["back.body"]] == ["back.plain", "back.cast", "back.turned", "dot"]
    plain, cast, turned, dot = (i.cost for i in found["back.body"])
    assert plain
    assert cast
    assert turned
    assert dot
    assert (dot.joined_bytes, dot.turned_bytes) == (0, 0)
    assert plain.launches + cast.launches + turned.launches == launches(run, cluster)[1]
    back = layer_moves(run, cluster)[1]
    rate = 0.388 * cluster.gpu.memory_bytes_per_s
    assert kernel_work(cast, cluster.gpu).alone_s == pytest.approx(8192 * back.cast / rate)
    assert kernel_work(turned, cluster.gpu).alone_s > 2 * 8192 * back.turned / memory_bytes_per_s(cluster.gpu)
    assert [passes_logits(run)(i) for i in (loss, body[0])] == [True, False]
    large = run_of(LARGE)
    (first, *_) = as_launched(large[0], Schedule("step", bodies, "main", "f"), large[1]).computations["there.body"][1:]
    wanted = 8192 * layer_moves(*large)[0].cast / (CAST_SHARE * large[1].gpu.memory_bytes_per_s)
    assert first.cost
    assert kernel_work(first.cost, large[1].gpu).alone_s == pytest.approx(wanted)


@pytest.mark.parametrize(("name", "each"), [(EIGHT, 32), (LARGE, 10), (GPT, 52)])
def test_a_logit_is_passed_over_as_the_recipe_s_loss_does(name, each):
    run, cluster = run_of(name)
    size = run.tokens * run.shape.vocab / run.tensor
    rate = 0.349375 * cluster.gpu.memory_bytes_per_s if name == LARGE else memory_bytes_per_s(cluster.gpu)
    assert logits_s(run, cluster) == pytest.approx(size * each / rate)  # a third of memory's peak on Blackwell
    assert is_counted(run)
    assert is_counted(run_of(QWEN)[0])
    assert not is_counted(run_of("internevo-7b-tp1-z8-8")[0])
