"""What PyTorch's FSDP and MosaicML's eager models move between matmuls, in closed form."""

from __future__ import annotations

import pytest

from benchmarks.published.experiments import Run
from benchmarks.published.fsdp import (
    as_eager,
    as_engine,
    as_wide,
    engine_logits_s,
    is_carried,
    is_counted,
    is_engine,
    layer_launches,
    layer_moves,
    rest_s,
    scatters_wide,
    with_fsdp,
)
from benchmarks.published.transformer_engine import Moved, logits_s
from benchmarks.published.transformer_engine import layer_moves as engine_moves
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Collective, Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s
from tests.benchmarks.published_rows import changed

LARGE, PURE = "mosaic-13b-s1024-a100_80gb-8-amp_bf16-mb40", "mosaic-7b-s512-a100_40gb-8-bf16-mb48"
EIGHT_BITS, TITAN = "mosaic-3b-s512-h100_80gb-8-amp_fp8-mb40", "tt-8b-fsdp128-compile"
WIDE = "mosaic-7b-s2048-h100_80gb-128-amp_bf16-mb6"
BRIDGE = "mbridge-25.11-LLAMA3_8B-DGX-H100-8-FP8-CS"
LAYERS = "jit(train_step)/while/body/jvp(layers)/while/body/"


def run_of(name: str) -> tuple[Run, Cluster]:
    run = changed(name)
    return run, Cluster.load(run.machines.table)


def moved(plain: float, cast: float = 0.0) -> Moved:
    return Moved(pytest.approx(plain), pytest.approx(cast), 0.0)  # pyright: ignore[reportArgumentType]


def test_operators_of_a_layer_of_13b():
    """h 5120, f 4 h, 12 h^2 weights: norms 4 (half more, eager.py), residuals 6, GELU 4; torch 2.1 stops before
    the last residual."""
    run, _ = run_of(LARGE)
    assert is_counted(run)
    h, shard = 5120, 12 * 5120**2 / (40 * 1024) / 8
    forward, again, back = layer_moves(run)
    assert forward == moved(40 * h + 6 * shard)
    assert again == moved(34 * h)
    assert back == moved((30 + 12 + 12) * h + 24 * h + 2 * 9 * h + 16 * shard)


def test_torch_1_13_runs_whole_layers_again():
    assert layer_moves(run_of(PURE)[0])[1] == moved(40 * 4096)


def test_transformer_engine_casts_inputs_gradients_and_weights():
    """No gradient of a bias is a kernel of its own."""
    h, weights = 2560, 12 * 2560**2 / (40 * 512)
    forward, _, back = layer_moves(run_of(EIGHT_BITS)[0])
    assert forward == moved(40 * h + 6 * weights / 8, cast=4 * (7 * h + weights))
    assert back == moved(78 * h + 16 * weights / 8, cast=4 * 9 * h)


def test_kernels_of_a_layer():
    """Two norms, residuals, GELU, a shard cast; back two a norm, one a bias, the join; shards cast, divided, cast."""
    assert layer_launches(run_of(LARGE)[0]) == (6, 4, 4 + 2 + 1 + 1 + 4 + 3)
    assert layer_launches(run_of(PURE)[0])[1] == 5
    assert layer_launches(run_of(EIGHT_BITS)[0])[::2] == (6 + 4 * 5, 15 + 4 * 3)


def test_gradients_of_2024_travel_in_fp32():
    """7B on 128 H100s: cast 6 and divided 8, joined 4 as ever; shards divided 8. A scatter has twice the bytes."""
    run, cluster = run_of(WIDE)
    assert scatters_wide(run)
    assert not any(scatters_wide(run_of(name)[0]) for name in (LARGE, PURE, EIGHT_BITS, TITAN))
    h, weights = 4096, 12 * 4096**2 / run.tokens
    assert layer_moves(run)[2] == moved((30 + 12 + 12) * h + 24 * h + 2 * 9 * h + (6 + 8) * weights / 128)
    found = with_fsdp(run, step_of(run.shape.layers - 1), cluster)
    assert bytes_of(found, "backward.body")["attention2.fsdp.plain"] == pytest.approx((4 + 6 + 8) * 12 * h**2)
    assert layer_launches(run)[2] == layer_launches(run_of(LARGE)[0])[2] - 1

    def scatter(kind: str, dtype: str) -> Instruction:
        sent = Collective("s", "", kind, ("fsdp",), True, "infiniband", None, dtype, 128, 1, 8, 100)
        return Instruction(f"{kind}.{dtype}", kind, "start", collective=sent)

    body = (scatter("reduce-scatter", "bf16"), scatter("reduce-scatter", "f32"), scatter("all-gather", "bf16"))
    wide = as_wide(Schedule("test", {"entry": body}, "entry", "")).computations["entry"]
    assert [i.collective.payload_bytes for i in wide if i.collective] == [200, 100, 100]


def test_logits_and_optimizer():
    run, cluster = run_of(LARGE)
    owned = (40 * 12 * 5120**2 + 50_368 * 5120) / 8
    moved_bytes = (34 - 14) * 3 * 40 * 1024 * 50_368 + (92 - 32) * owned
    assert rest_s(run, cluster) == pytest.approx(moved_bytes / memory_bytes_per_s(cluster.gpu))
    run, cluster = run_of(EIGHT_BITS)  # metrics in 16 bits: 14 bytes, as in ours
    owned = (32 * 12 * 2560**2 + 50_368 * 2560) / 8
    assert rest_s(run, cluster) == pytest.approx(60 * owned / memory_bytes_per_s(cluster.gpu))


def step_of(trips: int) -> Schedule:
    """One layer before the loop over the others, as XLA peels it; its backward pass in a loop of its own."""

    def layer(where: str, backward: bool) -> tuple[Instruction, ...]:
        way = LAYERS.replace("jvp(layers)", "transpose(jvp(layers))") if backward else LAYERS
        attention = Cost(attention_flops=1.0, attention_backward=backward)
        return (
            Instruction(f"norm{where}", "fusion", "kernel", f"{way}mul", Cost(bytes_accessed=9)),
            Instruction(f"attention{where}", "fusion", "kernel", f"{way}attention", attention),
            Instruction(f"copy.{where}", "copy", "kernel", "", Cost(bytes_accessed=8)),
        )

    rest = (
        Instruction("loop_broadcast_fusion.1", "fusion", "kernel", "jit(train_step)", Cost(bytes_accessed=7)),
        Instruction("loss", "fusion", "kernel", "jit(train_step)/jvp()/reduce_sum", Cost(bytes_accessed=6)),
    )
    loops = tuple(
        Instruction(name, "while", "while", "", None, bodies=(f"{name}.body",), trip_count=trips)
        for name in ("forward", "backward")
    )
    bodies = {"forward.body": layer("1", False), "backward.body": layer("2", True)}
    entry = (*layer("0", False), *layer("3", True), *loops, *rest)
    return Schedule("test", {"entry": entry, **bodies}, "entry", "")


def bytes_of(schedule: Schedule, name: str) -> dict[str, float]:
    return {i.name: i.cost.bytes_accessed for i in schedule.computations[name] if i.cost}


def test_passes_take_the_place_of_xlas_in_every_layer():
    run, cluster = run_of(LARGE)
    found = as_eager(run, step_of(119), cluster)  # 40 layers of 3 micro-batches
    forward, _, back = (run.tokens * m.plain for m in layer_moves(run))
    assert bytes_of(found, "forward.body") == {"attention1.eager.plain": pytest.approx(forward), "attention1": 0}
    assert bytes_of(found, "backward.body") == {"attention2.eager.plain": pytest.approx(back), "attention2": 0}
    assert set(bytes_of(found, "entry")) == {
        "attention0.eager.plain", "attention0", "attention3.eager.plain", "attention3", "loss",
    }  # fmt: skip


def test_fsdps_own_passes_and_what_xlas_loops_carry():
    """FSDP2 copies weights out of every gather, and gradients in and to fp32; zeros and copies are XLA's."""
    run, cluster = run_of(TITAN)
    layers = run.shape.layers * run.micro_batches
    found = with_fsdp(run, step_of(layers - 1), cluster)
    weights = 4096 * (2 * 128 * (32 + 8) + 3 * 14_336)
    assert bytes_of(found, "forward.body")["attention1.fsdp.plain"] == pytest.approx(4 * weights)
    assert bytes_of(found, "backward.body")["attention2.fsdp.plain"] == pytest.approx(10 * weights)
    entry = step_of(2).computations["entry"]
    assert [i.name for i in entry if is_carried(i)] == ["copy.0", "copy.3", "loop_broadcast_fusion.1"]


def test_megatron_cores_fsdp_launches_what_its_stages_do():
    run, cluster = run_of(BRIDGE)
    assert is_engine(run)
    assert not is_engine(run_of(TITAN)[0])
    found = as_engine(run, step_of(run.shape.layers * run.micro_batches - 1), cluster)
    forward, back = engine_moves(run, cluster)
    for where, moves in (("1", forward), ("2", back)):
        passes = bytes_of(found, "forward.body" if where == "1" else "backward.body")
        assert set(passes) == {f"attention{where}", f"attention{where}.engine.plain", f"attention{where}.engine.cast"}
        assert passes[f"attention{where}.engine.plain"] == pytest.approx(run.tokens * moves.plain)
    assert engine_logits_s(run, cluster) == pytest.approx(run.micro_batches * logits_s(run, cluster))
