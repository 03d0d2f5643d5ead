"""Test the communication contract: which collectives a strategy explains, and how much is too much."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile.program import Rematerialization, compile_absent, read_rematerializations
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.schedule import Collective
from meshkit.linting.examine import (
    SCALARS,
    WITHIN,
    collective_findings,
    explain_collectives,
    rematerialization_findings,
)
from meshkit.sharding.constrain import Activation
from meshkit.sharding.resolve import Placed
from meshkit.sharding.strategy import AxisRoles, Strategy, make_weights

SIZES = {"data": 2, "fsdp": 4, "context": 2, "expert": 2, "tensor": 2}
LAYERS, EMBED, MLP, VOCAB, BATCH, LENGTH = 3, 64, 256, 1024, 16, 960
BASE = {"act_batch": ["data", "fsdp"], "embed": "fsdp"}
TENSOR = {"mlp": "tensor", "vocab": "tensor", "act_mlp": "tensor", "act_vocab": "tensor"}
CONTEXT = {"act_length": "context", "act_residual_length": "context"}
SHAPES = {
    "up": (("layers", "embed", "mlp"), (LAYERS, EMBED, MLP)),
    "norm": (("layers", "embed"), (LAYERS, EMBED)),
    "table": (("vocab", "embed"), (VOCAB, EMBED)),
}
ACTIVATIONS = {
    ("act_batch", "act_residual_length", "act_embed"): (BATCH, LENGTH, EMBED),
    ("act_batch", "act_length", "act_embed"): (BATCH, LENGTH, EMBED),
    ("act_batch", "act_length", "act_mlp"): (BATCH, LENGTH, MLP),
    ("act_batch", "act_length", "act_kv_heads", None): (BATCH, LENGTH, 2, 16),
    ("act_batch", "act_length", "act_heads", None): (BATCH, LENGTH, 8, 16),
    ("act_batch", "act_length", "act_vocab"): (BATCH, LENGTH, VOCAB),
}


def strategy(logical=None, *, tables=None, **options):
    rules = mk.ShardingRules(BASE | (logical or {}), **(tables or {}))
    roles = AxisRoles.read(rules)

    def placed(kind):
        return [
            Placed(path, shape, "float32", names, rules.spec_for(names, kind=kind), "logical")
            for path, (names, shape) in SHAPES.items()
        ]

    activations = [
        Activation(names, shape, "bfloat16", rules.spec_for(names, kind="activations"), ())
        for names, shape in ACTIVATIONS.items()
    ]
    kinds = ("parameters", "compute", "gradients", "optimizer")
    return Strategy(
        sizes=SIZES,
        roles=roles,
        weights=make_weights({kind: placed(kind) for kind in kinds}, roles),
        statistics=(),
        activations=activations,
        tokens=BATCH * LENGTH,
        compute_bytes=2,
        **options,
    )


def moved(kind, axes, shapes, source="jit(train_step)/layers/mlp"):
    """Return a collective over the axes, with operands such as `bf16[64,16]`."""
    size = 1
    for axis in axes:
        size *= SIZES[axis]
    widths = {"bf16": 2, "f32": 4, "s32": 4, "s8": 1}
    payload = 0
    for shape in shapes.split(" "):
        dtype, _, dims = shape.partition("[")
        elements = 1
        for dim in filter(None, dims.rstrip("]").split(",")):
            elements *= int(dim)
        payload += elements * widths[dtype]
    return Collective(
        name=kind,
        key=f"{kind}|{'+'.join(axes)}|x|{shapes.replace(' ', ',')}|{source}|1",
        collective=kind,
        axes=tuple(axes),
        axes_complete=True,
        link="nvlink",
        fabric=None,
        dtype="x",
        group_size=size,
        num_groups=1,
        gpus_per_domain=size,
        payload_bytes=payload * (size if kind == "all-gather" else 1),
        source=source,
    )


def schedule(*collectives, times=1):
    """Return a step that runs the collectives in a loop."""
    body = tuple(Instruction(f"c{i}", c.collective, "collective", collective=c) for i, c in enumerate(collectives))
    loop = Instruction("loop", "while", "while", bodies=("body",), trip_count=times)
    return Schedule("step", {"entry": (loop,), "body": body}, "entry", "0")


def with_kernel(shape):
    """Return the plain strategy of a model with one stacked kernel, embed over fsdp."""
    declared = strategy()
    placed = [Placed("up", shape, "float32", ("layers", "embed", "mlp"), ((), ("fsdp",), ()), "logical")]
    weights = make_weights(dict.fromkeys(("parameters", "compute", "gradients", "optimizer"), placed), declared.roles)
    return replace(declared, weights=weights)


def reasons(strategy, *collectives, times=1):
    return [row.explanation for row in explain_collectives(schedule(*collectives, times=times), strategy)]


# One GPU holds shards: of a layer's `up`, embed over fsdp (64 / 4 = 16) and mlp over tensor (256 / 2 = 128).
EXPLAINED = [
    ("gathers of a layer", {}, {}, ("all-gather", ["fsdp"], "bf16[16,256]"), "weights, gathered over fsdp in the"),
    ("of the whole stack", {}, {}, ("all-gather", ["fsdp"], "bf16[3,16,256]"), "weights, gathered over fsdp in the"),
    ("with tensor shards", TENSOR, {}, ("all-gather", ["fsdp"], "bf16[16,128]"), "weights, gathered over fsdp in the"),
    ("scattered gradients", {}, {}, ("reduce-scatter", ["fsdp"], "f32[64,256]"), "gradients, reduced over fsdp once"),
    ("replicas of HSDP", {}, {}, ("all-reduce", ["data"], "f32[16,256]"), "gradients, reduced over data once a step"),
    ("combined gradients", {}, {}, ("all-reduce", ["data"], "f32[4160]"), "gradients, reduced over data once a step"),
    (
        "with every micro-batch",
        {},
        {"accumulate": 4},
        ("all-reduce", ["data"], "f32[16,256]"),
        "gradients, reduced over data with every micro-batch",
    ),
    (
        "in accumulators that fsdp does not cut yet",
        {"act_batch": ["data", "fsdp", "expert"], "experts": "expert", "act_experts": "expert"},
        {"accumulate": 4, "deferred": frozenset({"data", "fsdp"})},
        ("all-reduce", ["expert"], "f32[64,256]"),
        "gradients, reduced over expert with every micro-batch",
    ),
    ("token ids", {}, {}, ("all-gather", ["fsdp"], "s32[2,960]"), "token ids over fsdp"),
    ("row-parallel sums", TENSOR, {}, ("all-reduce", ["tensor"], f"bf16[2,{LENGTH},{EMBED}]"), "tensor parallelism"),
    ("logsumexp", TENSOR, {}, ("all-reduce", ["tensor"], f"f32[2,{LENGTH}]"), "vocabulary over tensor"),
    (
        "sequence gather",
        TENSOR | {"act_residual_length": "tensor"},
        {},
        ("all-gather", ["tensor"], f"bf16[2,{LENGTH // 2},{EMBED}]"),
        "sequence parallelism over tensor",
    ),
    (
        "sequence scatter",
        TENSOR | {"act_residual_length": "tensor"},
        {},
        ("reduce-scatter", ["tensor"], f"bf16[2,{LENGTH},{EMBED}]"),
        "sequence parallelism over tensor",
    ),
    ("keys and values", CONTEXT, {}, ("all-gather", ["context"], "bf16[2,480,2,16]"), "keys and values over context"),
    ("ring", CONTEXT, {}, ("collective-permute", ["context"], "bf16[2,480,2,16]"), "ring attention over context"),
    ("Ulysses", CONTEXT, {}, ("all-to-all", ["context"], "bf16[2,480,8,16]"), "Ulysses over context"),
    (
        "context gradients",
        CONTEXT,
        {},
        ("all-reduce", ["context"], "f32[16,256]"),
        "gradients, reduced over context once a step",
    ),
    (
        "tokens to experts",
        {"act_batch": ["data", "fsdp", "expert"], "experts": "expert", "act_experts": "expert"},
        {},
        ("ragged-all-to-all", ["expert"], "bf16[4096,64]"),
        "token dispatch and combine over expert",
    ),
    (
        "embedding gradient",
        {},
        {},
        ("all-to-all", ["fsdp"], f"bf16[2,{LENGTH},{EMBED}]"),
        "gradient of the embedding over fsdp",
    ),
    (
        "outer step",
        {},
        {"local_sgd": "data"},
        ("all-reduce", ["data"], "f32[16,256]"),
        "local SGD: weights averaged over data",
    ),
    (
        "compressed chunks",
        {},
        {"compression": "data"},
        ("all-to-all", ["data"], "s8[28000]"),
        "compressed gradients over data",
    ),
    ("scalars", {}, {}, ("all-reduce", ["data", "tensor"], "f32[7]"), SCALARS),
    ("a permute that stays", {}, {}, ("collective-permute", [], "bf16[64,2560]"), WITHIN),  # Every pair is (i, i).
]


@pytest.mark.parametrize(
    ("logical", "options", "collective", "says"), [c[1:] for c in EXPLAINED], ids=[c[0] for c in EXPLAINED]
)
def test_what_a_strategy_declares_is_explained(logical, options, collective, says):
    (reason,) = reasons(strategy(logical, **options), moved(*collective))
    assert reason is not None
    assert reason.startswith(says)


ZERO = {"logical": {"act_batch": "data", "embed": "data"}, "tables": {"compute": {"embed": "replicated"}}}


def test_zero_gathers_weights_and_scatters_gradients_once_a_step():
    found = reasons(
        strategy(**ZERO),
        moved("all-gather", ["data"], "bf16[32,256]"),
        moved("reduce-scatter", ["data"], "f32[64,256]"),
    )
    assert found == ["gradients, reduced over data once a step", "weights, gathered over data once a step"]


def test_an_optimizer_in_shards_gathers_what_it_updated():
    declared = strategy({"act_batch": "data", "embed": "replicated"}, tables={"optimizer": {"embed": "data"}})
    (reason,) = reasons(declared, moved("all-gather", ["data"], "f32[32,256]"))
    assert reason == "updated weights, gathered over data after the optimizer"


# Each row holds the rules, the collective, and the cause that the message guesses.
UNEXPLAINED = {
    "an activation over the batch": (
        {},
        ("all-gather", ["fsdp"], "bf16[2,960,64]"),
        "an activation is gathered over fsdp, which shards the batch",
    ),
    "full logits": (TENSOR, ("all-gather", ["tensor"], "bf16[2,960,512]"), "heads, hidden or vocabulary"),
    "a weight over tensor": (
        TENSOR,
        ("all-gather", ["tensor"], "bf16[16,128]"),
        "up, or an array of its size, is gathered over tensor",
    ),
    "a weight where sequence parallelism gathers": (
        TENSOR | {"act_residual_length": "tensor"},
        ("all-gather", ["tensor"], "bf16[16,128]"),
        "up, or an array of its size, is gathered over tensor",
    ),
    "hidden over context": (
        CONTEXT,
        ("all-gather", ["context"], "bf16[2,480,256]"),
        "gathered over context, which shards the sequence",
    ),
    "shards over two axes": (
        CONTEXT,
        ("collective-permute", ["fsdp", "context"], "bf16[9,1000]"),
        "moves shards between two layouts",
    ),
}


@pytest.mark.parametrize(("logical", "collective", "cause"), list(UNEXPLAINED.values()), ids=list(UNEXPLAINED))
def test_what_it_does_not_declare_is_a_finding_with_a_guess(logical, collective, cause):
    (found,) = collective_findings(explain_collectives(schedule(moved(*collective), times=5), strategy(logical)))
    assert (found.code, found.severity) == ("unexplained_collective", "warning")
    assert found.path == f"collective/{collective[0]}/{'+'.join(collective[1])}"
    assert f"5 {collective[0]} over" in found.message
    assert cause in found.message
    assert found.message.endswith("at layers/mlp")


def test_a_gradient_reduced_whole_though_it_is_kept_in_shards():
    declared = with_kernel((LAYERS, 1024, 4096))
    (found,) = collective_findings(
        explain_collectives(schedule(moved("all-reduce", ["fsdp"], "f32[1024,4096]")), declared)
    )
    assert "the gradient of up is reduced whole, although fsdp keeps it in shards" in found.message


def test_more_than_the_closed_form_is_a_finding():
    """A layer of 4096 x 4096 bf16 is 32 MiB; three layers may be gathered three times (288 MiB), here 20 times."""
    declared = with_kernel((LAYERS, 4096, 4096))
    gather = moved("all-gather", ["fsdp"], "bf16[1024,4096]")
    assert collective_findings(explain_collectives(schedule(gather, times=3 * LAYERS), declared)) == []
    (found,) = collective_findings(explain_collectives(schedule(gather, times=20), declared))
    assert "640 MiB a step, where weights, gathered over fsdp" in found.message
    assert "take at most 288 MiB" in found.message


def test_micro_batches_raise_the_bound_and_deferred_axes_do_not():
    def bound(**options):
        rows = explain_collectives(schedule(moved("reduce-scatter", ["fsdp"], "f32[64,256]")), strategy(**options))
        return rows[0].bound_bytes

    once = bound()
    assert bound(accumulate=4) == 4 * once
    assert bound(accumulate=4, deferred=frozenset({"fsdp"})) == once


def test_a_round_of_local_sgd_is_counted_by_the_step():
    """A round is four steps and one outer step: a step counts a fourth of both, of the outer step's 4 P bytes too."""
    declared = strategy(local_sgd="data", steps_per_call=4)
    inner, outer = moved("all-gather", ["fsdp"], "bf16[16,256]"), moved("all-reduce", ["data"], "f32[16,256]")
    body = Instruction("gather", inner.collective, "collective", collective=inner)
    loop = Instruction("loop", "while", "while", bodies=("body",), trip_count=4)
    meet = Instruction("meet", outer.collective, "collective", collective=outer)
    rows = explain_collectives(Schedule("round", {"entry": (loop, meet), "body": (body,)}, "entry", "0"), declared)
    found = {row.collective: (row.count, row.payload_bytes) for row in rows}
    assert found == {"all-gather": (1, 64 * 256 * 2), "all-reduce": (0.25, 16 * 256 * 4 / 4)}
    (bound,) = (row.bound_bytes for row in rows if row.collective == "all-reduce")
    weights = sum(math.prod(shape) for _, shape in SHAPES.values()) / SIZES["fsdp"]
    assert bound == 4 * weights / 4


def test_a_combined_collective_is_taken_apart():
    rows = explain_collectives(schedule(moved("all-gather", ["fsdp"], "s32[2,960] bf16[16,256]")), strategy())
    assert {(row.explanation.split(",")[0].split(" over")[0], row.payload_bytes) for row in rows} >= {
        ("weights", 4 * 16 * 256 * 2)
    }
    assert sum(row.count for row in rows) == 1
    assert sum(row.payload_bytes for row in rows) == 4 * (1920 * 4 + 16 * 256 * 2)


WARNING = (
    "W1121 12:55:41.888550 8610 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler "
    "cannot go from sharding {a} to {b} efficiently for HLO operation "
    "%sharding_constraint.6 = f32[2,8,64]{2,1,0} copy(%x), "
    'metadata={op_name="jit(call)/call_exported/jit(exported_step)/jit(f)/embedding/sharding_constraint"}. As the last '
)


def test_xlas_warning_becomes_a_finding_once_and_its_trials_do_not():
    trial = WARNING.replace("%sharding_constraint.6", "%fake_parameter.2")
    (found,) = read_rematerializations("\n".join([trial, WARNING, "another line", WARNING]))
    assert found == Rematerialization("f32[2,8,64]", "jit(f)/embedding/sharding_constraint")


@pytest.mark.deviceless
def test_a_scatter_over_two_orders_of_axes_is_rematerialized(monkeypatch):
    """XLA cannot reshard a batch from [fsdp, data] to [data, fsdp] order where it scatters it into a table."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")  # The user's choice must not hide the warning.
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 4, "fsdp": 2}), cluster, devices=mk.describe_devices(cluster))

    def array(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    both = ("fsdp", "data")

    def step(table, ids, rows):
        with jax.named_scope("embedding"):
            rows = jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(both)))
            summed = jnp.zeros(table.shape).at[ids].add(rows, mode="drop")
            return jax.lax.with_sharding_constraint(summed, NamedSharding(mesh, PartitionSpec(None, "fsdp"))) + table

    args = (array((512, 64), None, "fsdp"), array((16, 8), both, dtype=jnp.int32), array((16, 8, 64), both))
    compiled = compile_absent(step, args, mesh=mesh, cluster=cluster)
    (found,) = rematerialization_findings(compiled)
    assert (found.code, found.severity) == ("involuntary_rematerialization", "warning")
    assert "embedding" in found.path
    assert "XLA replicates f32[2,8,64] on every GPU" in found.message
