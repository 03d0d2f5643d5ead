"""What replicas do once a step: buckets, broadcasts and copies, against sums by hand and InternEvo's own table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import reduction
from benchmarks.published.corrections import CORRECTIONS, Step
from benchmarks.published.experiments import Run
from benchmarks.published.housekeeping import housekeeping_s, largest_s, tied_s, weight_bytes
from meshkit.config.cluster import Cluster
from meshkit.predict.kernels import memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import arithmetic_left
from tests.benchmarks.published_rows import changed


def cluster_of(run: Run) -> Cluster:
    return Cluster.load(run.machines.table)


def test_the_last_bucket_is_beside_nothing():
    """10 buckets of 1 s under 20 s of backward: 9 of them in 18 s, which they slow, and the last one alone."""
    cluster = cluster_of(changed("internevo-7b-tp1-z8-1024"))
    left = arithmetic_left(cluster.gpu, 16)
    assert left == cluster.gpu.achieved["contended"]  # the law of a plan
    assert reduction._beside(1.0, 10, 20.0, cluster) == pytest.approx(9 * (1 - left) + 1)
    assert reduction._beside(1.0, 10, 5.0, cluster) == pytest.approx(9 - 4.5 + 1), "they outlast a short one"
    assert reduction._beside(1.0, 10, 0.0, cluster) == 10, "without overlap, one after the other"


def test_buckets_hold_what_the_framework_says():
    """InternEvo: 2^29 elements of 7.3e9 parameters. Megatron-Core: 40e6, or 1e6 for each of 64 replicas."""
    run = changed("internevo-7b-tp1-z8-1024")
    size = reduction.stage_parameters(run)
    assert reduction._buckets(run, size) == round(size / 2**29) == 14
    name = "mbridge-26.04-GPT-DGX-{}-64-BF16"
    core, few = (changed(name.format(gpu)) for gpu in ("B300", "H100"))  # H100: four stages
    assert (core.data * core.context, few.data * few.context) == (64, 16)
    assert (reduction._buckets(core, 12.8e9), reduction._buckets(few, 12.8e9)) == (200, 320)
    assert reduction._buckets(changed("simumax-b200-llama3_70b_l12_tp4_pp1_dp2_mbc8_cef"), 12.8e9) == 1


def test_recipes_of_bridge_and_nemo_2_set_buckets_of_128_mi():
    """At any number of replicas; those of GPT-OSS leave it to Megatron-Core, but for GB200's, and so does NeMo 1."""
    for name, count in (
        ("nemo2504-llama3.1-8b-bf16-128", 100),
        ("mbridge-26.04-LLAMA3_70B-DGX-GB200-64-MXFP8", 100),
        ("mbridge-26.04.01-Qwen3_235B_a22B-DGX-B300-256-MXFP8", 100),
        ("mbridge-26.04-GPT-DGX-GB200-64-BF16", 100),
        ("mbridge-26.04-GPT-DGX-GB300-64-BF16", 210),
        ("nemo2407-LLAMA2-70B-64", 336),
    ):
        run = changed(name)
        assert reduction._buckets(run, 100 * 2**27) == count, name
        bare = replace(run, framework=replace(run.framework, bucket_parameters=0))
        assert reduction._buckets(bare, 100 * 2**27) == 1, name


def test_every_tensor_is_broadcast_by_its_owner():
    """9 tensors a layer (two of them biases, two of norms) and 3 more: 291, which fewer owners flatten."""
    run = changed("internevo-7b-tp1-z-1-1024")
    sizes = reduction._tensor_sizes(run)
    assert len(sizes) == 32 * 9 + 3
    assert sum(sizes) == pytest.approx(run.shape.parameters(), rel=1e-3)
    few = changed("internevo-7b-tp1-z-1-64")
    one = collective_time_s(
        "collective-broadcast", payload_bytes=2 * sum(sizes) / 64, gpus_per_domain=8, domains=8, cluster=cluster_of(few)
    )
    assert reduction._broadcasts_s(few, cluster_of(few)) == pytest.approx(64 * one)


@pytest.mark.parametrize(
    ("gpus", "in_host", "over_all"),  # tokens/s of a GPU with zero1=8 and zero1=-1, 16,384 tokens a step
    [(64, 3944, 3690), (128, 3928, 3571), (256, 3920, 3209), (512, 3835, 2861)],
)
def test_what_zero_over_all_gpus_costs(gpus, in_host, over_all):
    """InternLM/InternEvo@c628a8c, doc/en/train_performance.md: half of its rows are in no file here.

    The broadcasts over all GPUs, less those inside a host, and less the optimizer's share that is not repeated. 0.1 s:
    5 % of a step's tokens/s, the scatter of that table between rows that should be equal (16 to 256 GPUs) being 1 %.
    """
    world = changed("internevo-7b-tp1-z-1-64", n_gpus=gpus, dp=gpus, global_batch_seqs=8 * gpus)
    host = changed("internevo-7b-tp1-z8-16", n_gpus=gpus, dp=gpus, global_batch_seqs=8 * gpus)
    more = reduction._broadcasts_s(world, cluster_of(world)) - reduction._broadcasts_s(host, cluster_of(host))
    assert more == pytest.approx(16_384 / over_all - 16_384 / in_host, abs=0.05 * 16_384 / over_all)


def test_gradients_are_copied_into_buckets():
    """InternEvo: in and out, reads and writes of 2 bytes each."""
    run = changed("internevo-7b-tp1-z8-8")
    gpu = cluster_of(run).gpu
    expected = 8 * reduction.stage_parameters(run) / (gpu.memory_bytes_per_s * gpu.achieved["memory"])
    assert reduction.copies_s(run, cluster_of(run)) == pytest.approx(expected)
    assert reduction.copies_s(changed("simumax-b200-llama3_70b_l12_tp4_pp1_dp2_mbc8_cef"), cluster_of(run)) == 0


def test_interleaved_stages_reduce_chunk_by_chunk():
    """GPT-3 of NeMo, 12 chunks on 8 stages: a twelfth of its gradients is beside nothing, the others are under 7.3."""
    run = changed("nemo2411-gpt3-175b-bf16-2048")
    cluster = cluster_of(run)
    assert (run.stages, run.chunks) == (8, 12)
    lost = 1 - arithmetic_left(cluster.gpu, 16)
    short = reduction._by_chunks(run, cluster, (1.2, 10.0), (0.0, 10.0), 24)
    assert short == pytest.approx(0.1 + 1.1 * lost), "what is beside compute slows it"
    long = reduction._by_chunks(run, cluster, (120.0, 1.0), (0.0, 1.0), 24)
    assert long == pytest.approx(10.0 + 110.0 - 8 * 11 / 12), "and outlasts it"
    gathered = reduction._by_chunks(run, cluster, (0.0, 1.0), (2.4, 12.0), 24)
    assert gathered == pytest.approx(0.1 + 0.1 * lost + 2.2 * lost), "one bucket is beside nothing"


def test_weights_of_a_recipe_are_gathered_behind_its_optimizer():
    """405B in NVFP4 on GB200, Megatron-Bridge v0.4.2 and v0.5.0: all of the gather, where v0.4.0 hides most of it."""
    name = "mbridge-26.04.01-LLAMA3.1_405B-DGX-GB200-256-NVFP4"
    run = changed(name)
    cluster = cluster_of(run)
    assert (run.data, run.chunks, run.recipe.overlaps_weights) == (4, 8, False)
    count = reduction._buckets(run, reduction.stage_parameters(run))
    gather = count * reduction._priced(
        run, cluster, "all-gather", 2 * reduction.stage_parameters(run) / count, run.data
    )
    beside = replace(run, recipe=replace(run.recipe, overlaps_weights=True))
    blocking, hidden = (reduction.gradients_s(r, cluster, 100.0, 100.0) for r in (run, beside))
    lost = 1 - arithmetic_left(cluster.gpu, 16)
    first = gather / 8 / round(count / 8)  # of the first chunk's buckets one is beside nothing
    assert blocking - hidden == pytest.approx((gather - first) * (1 - lost))
    for other in (name.replace("GB200", "GB300"), "mbridge-26.04-LLAMA3_70B-DGX-GB200-64-NVFP4"):
        assert changed(other).recipe.overlaps_weights


def _filled_and_drained_s(stages: int, chunks: int, micro_batches: int, send_s: float) -> float:
    """Interleaved 1F1B op by op, a chunk forward 1 s and backward 2 s, each send between stages so many seconds."""
    total, done = chunks * micro_batches, {}

    def turn(k: int) -> tuple[int, int]:
        return k // stages % chunks, k // (stages * chunks) * stages + k % stages

    queues, free = [], [0.0] * stages
    for rank in range(stages):
        warm = min(total, 2 * (stages - rank - 1) + (chunks - 1) * stages)
        ops = [("f", *turn(k)) for k in range(warm)]
        for k in range(total):
            ops += [("f", *turn(k + warm))] if k + warm < total else []
            ops.append(("b", chunks - 1 - turn(k)[0], turn(k)[1]))
        queues.append(ops)
    while any(queues):
        for rank, ops in enumerate(queues):
            while ops:
                way, chunk, batch = ops[0]
                place, last = chunk * stages + rank, chunks * stages - 1
                before = (
                    ("f", last, batch) if way == "b" and place == last else (way, place + (way == "b" or -1), batch)
                )
                if before[1] >= 0 and before not in done:
                    break
                sent = send_s if before[1] >= 0 and before[1] != place else 0.0
                start = max(free[rank], done.get(before, 0.0) + sent)
                free[rank] = done[way, place, batch] = start + (1 if way == "f" else 2)
                ops.pop(0)
    return max(free)


def test_sends_that_fill_and_drain_an_interleaved_pipeline_are_beside_nothing():
    """A schedule run op by op takes 2 (stages times chunks - 1) sends longer, however many micro-batches there are."""
    for stages, chunks, batches in ((8, 12, 8), (4, 5, 32), (2, 2, 4)):
        plain = _filled_and_drained_s(stages, chunks, batches, 0.0)
        assert plain == pytest.approx(3 * (chunks * batches + stages - 1))
        more = _filled_and_drained_s(stages, chunks, batches, 0.05) - plain
        assert more == pytest.approx(2 * (stages * chunks - 1) * 0.05)
    sends = next(c.step for c in CORRECTIONS if c.name == "sends between stages: none")
    assert sends
    run = changed("nemo2411-gpt3-175b-fp8-512")
    at = Step(run, cluster_of(run), {})
    one = collective_time_s(
        "collective-permute", payload_bytes=2 * 2048 * 12_288 / 4, gpus_per_domain=1, domains=2, cluster=at.cluster
    )
    assert sends(at) == pytest.approx(2 * (8 * 12 - 1) * one)
    assert sends(replace(at, run=replace(run, chunks=1))) == pytest.approx(2 * run.micro_batches * one)


def test_gradients_and_weights_are_passed_over_once_a_step():
    """SimuMax's fp32 gradients: zeros 4, divided 8 where there are replicas; an owned weight to 16 bits 6."""
    several, one = (
        changed("simumax-b200-llama3_405b_l4_tp4_pp1_dp2_mbc4_cef"),
        changed("simumax-b200-llama3_405b_l4_tp8_pp1_dp1_mbc4_cef"),
    )
    for run, each in ((several, 12 + 6 / 2), (one, 4 + 6)):
        rate = memory_bytes_per_s(cluster_of(run).gpu)
        assert housekeeping_s(run, cluster_of(run)) == pytest.approx(reduction.stage_parameters(run) * each / rate)
    assert housekeeping_s(changed("internevo-7b-tp1-z-1-8"), cluster_of(one)) == 0, "its optimizer is in eager.py"


def test_gradients_of_experts_are_scaled_and_stepped_among_fewer_replicas():
    """Qwen3 235B, 32 replicas that share experts 8 ways: zeros, and scaled by 1/8 though the collective averages."""
    run = changed("mbridge-26.04.01-Qwen3_235B_a22B-DGX-B300-256-MXFP8")
    cluster, cast = cluster_of(run), 2 + 2 * (1 + 1 / 32)
    dense, owned = reduction.stage_parameters(run), reduction.stage_experts(run)
    linear = dense - run.shape.vocab * run.shape.hidden
    moved = dense * (2 + 12 / 32) + owned * (2 * 3 + 12 / 4) + (linear + owned) * cast
    assert housekeeping_s(run, cluster) == pytest.approx(moved / memory_bytes_per_s(cluster.gpu))
    alone = replace(run, experts=1)
    moved = dense * (2 + 12 / 32) + 8 * owned * (2 + 12 / 32) + (linear + 8 * owned) * cast
    assert housekeeping_s(alone, cluster) == pytest.approx(moved / memory_bytes_per_s(cluster.gpu)), "nothing to scale"


def test_the_precision_aware_optimizer_copies_nothing():
    """Qwen3 235B on GB200 in bf16: zeros, and scaled gradients of experts; v2.2 of NeMo copies, @6f2c6fd not."""
    run = changed("mbridge-25.11-Qwen3_235B_a22B-DGX-GB200-256-BF16")
    assert run.precision == "bf16"
    assert not run.whole
    cluster, dense, owned = cluster_of(run), reduction.stage_parameters(run), reduction.stage_experts(run)
    rate = memory_bytes_per_s(cluster.gpu)
    assert housekeeping_s(run, cluster) == pytest.approx((2 * dense + 2 * 3 * owned) / rate)
    nemo = changed("nemo2504-llama3.1-70b-bf16-64")
    whole = reduction.stage_parameters(nemo)
    moved = housekeeping_s(nemo, cluster_of(nemo)) * memory_bytes_per_s(cluster_of(nemo).gpu)
    assert moved == pytest.approx(whole * (2 + 12 / (nemo.data * nemo.context)))
    later = changed("nemo2505-llama3.1-405b-gb200-bf16-128")
    moved = housekeeping_s(later, cluster_of(later)) * memory_bytes_per_s(cluster_of(later).gpu)
    assert moved == pytest.approx(reduction.stage_parameters(later) * 2)


def test_gradients_of_gpt_oss_are_divided_by_tokens():
    """From v0.4.0 on: zeros, read and written; before, and in Qwen3's runs, those of experts alone."""
    for name, dense in (
        ("mbridge-26.02-GPT-DGX-B300-64-BF16", 1),
        ("mbridge-26.04-GPT-DGX-B300-64-BF16", 3),
        ("mbridge-26.04.01-GPT-DGX-H100-64-BF16", 3),
        ("mbridge-25.11-Qwen3_235B_a22B-DGX-GB200-256-BF16", 1),
    ):
        run = changed(name)
        moved = housekeeping_s(run, cluster_of(run)) * memory_bytes_per_s(cluster_of(run).gpu)
        passes = dense * reduction.stage_parameters(run) + 3 * reduction.stage_experts(run)
        assert moved == pytest.approx(2 * passes), name


def test_weights_are_cast_once_a_step_or_kept_in_8_bits():
    name, mx = "mbridge-26.04-LLAMA3_70B-DGX-GB200-64-MXFP8", 2 + 2 * (1 + 1 / 32)
    for cells, each, sent in (
        ((name, {}), mx, 2),
        ((name, {"precision": "FP8"}), 0, 1),
        (("nemo2504-llama3.1-70b-fp8-64", {}), 2, 1),  # turned, on Hopper
        (("nemo2407-LLAMA2-70B-64", {}), 4, 2),  # cast and turned
        (("nemo2407-LLAMA2-70B-64", {"precision": "fp8 cs"}), 6, 2),
        (("nemo2504-llama3.1-70b-bf16-64", {}), 0, 2),
        (("mbridge-26.04-LLAMA3_70B-DGX-GB200-64-NVFP4", {}), 2 * 2 + 2 * (0.5 + 1 / 16), 2),
    ):
        run = changed(cells[0], **cells[1])
        assert weight_bytes(run, cluster_of(run)) == pytest.approx(each), cells
        assert reduction.gathered_bytes(run) == sent, cells


def test_tables_of_the_vocabulary_stay_in_16_bits():
    """Llama 3 8B with current scaling: two tables of 128,256 x 4,096 are neither turned nor gathered in 8 bits."""
    run = changed("mbridge-25.11-LLAMA3_8B-DGX-B200-8-FP8-CS")
    cluster, tables = cluster_of(run), 2 * run.shape.vocab * 4096
    assert reduction.table_parameters(run) == tables
    assert reduction.gathered_bytes(run) == 1
    size, vocab = reduction.stage_parameters(run), run.shape.vocab
    narrow = changed("mbridge-25.11-LLAMA3_8B-DGX-B200-8-FP8-CS", vocab=vocab // 2)
    one = replace(run.framework, bucket_parameters=0, overlaps_gradients=False)
    sent = [
        reduction.gradients_s(replace(r, framework=one), cluster, 0.0, 0.0)
        - reduction._priced(r, cluster, "reduce-scatter", 2 * reduction.stage_parameters(r), 8)
        for r in (run, narrow)
    ]
    for seconds, parameters, held in ((sent[0], size, tables), (sent[1], size - tables / 2, tables / 2)):
        wanted = reduction._priced(run, cluster, "all-gather", parameters - held + 2 * held, 8)
        assert seconds == pytest.approx(wanted)
    hopper = changed("nemo2504-llama3.1-70b-fp8-64")
    cluster = cluster_of(hopper)
    moved = housekeeping_s(hopper, cluster) * memory_bytes_per_s(cluster.gpu)
    copied = reduction.stage_parameters(hopper) * (2 + 12 / (hopper.data * hopper.context))
    assert moved - copied == pytest.approx(2 * hopper.stage_layers * hopper.shape.layer_parameters() / hopper.tensor)


def test_a_tied_embedding_and_largest_values_wait():
    run = changed("nemo2411-gpt3-175b-fp8-512")
    cluster = cluster_of(run)
    table = 51_200 * 12_288 / 4 * 2
    both = collective_time_s("all-reduce", payload_bytes=table, gpus_per_domain=1, domains=2, cluster=cluster)
    assert tied_s(run, cluster) == pytest.approx(both)
    assert tied_s(changed("nemo2504-llama3.1-70b-fp8-64"), cluster) == 0
    every = {"payload_bytes": 48.0, "gpus_per_domain": 8, "domains": 8, "cluster": cluster}
    assert largest_s(run, cluster) == pytest.approx(collective_time_s("all-reduce", **every)), "one layer a chunk"
    assert largest_s(changed("nemo2411-gpt3-175b-fp8-512", precision="FP8-CS"), cluster) == 0
    few = changed("nemo2407-GPT3-175B-512")  # two layers a chunk, among tensor-parallel GPUs
    every |= {"payload_bytes": 96.0, "gpus_per_domain": 4, "domains": 1}
    assert largest_s(few, cluster) == pytest.approx(collective_time_s("all-reduce", **every) / 2)
