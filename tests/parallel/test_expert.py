"""Test that expert parallelism equals a dense mixture, drops by the documented rule, and moves the bytes it should."""

from __future__ import annotations

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.mesh import MeshSpec
from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.parallel import exchange, expert
from meshkit.parallel.expert import expert_layer
from meshkit.sharding import build_mesh, describe_devices, sharding_scope

BATCH, LENGTH, EMBED, MLP, EXPERTS, K = 8, 8, 16, 24, 8, 2

# fp32 sums differ as in tests/equivalence: sqrt(D) sqrt(N) u for sums of N terms through at most D of them. The longest
# sums run over BATCH * LENGTH = 64 tokens of a kernel's gradient. D = 16: gate, up, down, choices, forward and
# backward, in both the layer and the reference.
TOLERANCE = math.sqrt(16 * BATCH * LENGTH) * 2.0**-24

MESHES = {
    "expert 8": {"expert": 8},
    "expert 4 x tensor 2": {"expert": 4, "tensor": 2},
    "data 2 x expert 2 x tensor 2": {"data": 2, "expert": 2, "tensor": 2},
    "fsdp 2 x expert 4": {"fsdp": 2, "expert": 4},
    "context 2 x expert 2 x tensor 2": {"context": 2, "expert": 2, "tensor": 2},
    "outer 2 x expert 4": {"outer": 2, "expert": 4},
    "outer 4 x expert 2": {"outer": 4, "expert": 2},
    "outer 2 x expert 2 x tensor 2": {"outer": 2, "expert": 2, "tensor": 2},
    "fsdp 2 x outer 2 x expert 2": {"fsdp": 2, "outer": 2, "expert": 2},
}
TWO_LEVELS = {"groups": (1, 1)}
CASES = [
    *((name, {}) for name in MESHES if name != "expert 4 x tensor 2" and "outer" not in name),
    ("outer 2 x expert 4", TWO_LEVELS),
    pytest.param("outer 4 x expert 2", TWO_LEVELS, marks=pytest.mark.slow),
    pytest.param("outer 2 x expert 2 x tensor 2", TWO_LEVELS, marks=pytest.mark.slow),
    pytest.param("outer 4 x expert 2", TWO_LEVELS | {"capacity_factor": 4.0}, marks=pytest.mark.slow),
    ("fsdp 2 x outer 2 x expert 2", TWO_LEVELS | {"buffer_factor": 4.0, "parts": 2}),
    pytest.param("expert 4 x tensor 2", {"parts": 4}, marks=pytest.mark.slow),
    pytest.param("expert 4 x tensor 2", {}, marks=pytest.mark.slow),
    pytest.param("fsdp 2 x expert 4", {"capacity_factor": 4.0}, marks=pytest.mark.slow),
    ("expert 4 x tensor 2", {"capacity_factor": 4.0}),
]
RULES = {
    "act_batch": ("data", "fsdp", "outer", "expert"),
    "act_length": "context",
    "act_residual_length": ("context", "tensor"),
    "act_experts": ("outer", "expert"),
    "act_mlp": "tensor",
    "experts": ("outer", "expert"),
    "embed": "fsdp",
    "mlp": "tensor",
}


def scope(sizes: dict[str, int], **changes):
    names, shape = tuple(sizes), tuple(sizes.values())
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    rules = {name: (axes,) if isinstance(axes, str) else axes for name, axes in (RULES | changes).items()}
    return sharding_scope(mesh, ShardingRules({name: [a for a in axes if a in names] for name, axes in rules.items()}))


@pytest.fixture(scope="module")
def inputs():
    """Return (x, weights, kernels) and uneven choices: low experts are chosen far more often."""
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], (BATCH, LENGTH, EMBED))
    weights = jax.nn.softmax(jax.random.normal(keys[1], (BATCH, LENGTH, K)))
    scores = jax.random.normal(keys[2], (BATCH, LENGTH, EXPERTS)) - 0.3 * jnp.arange(EXPERTS)
    gate, up = (jax.random.normal(key, (EXPERTS, EMBED, MLP)) / math.sqrt(EMBED) for key in keys[3:5])
    down = jax.random.normal(keys[5], (EXPERTS, MLP, EMBED)) / math.sqrt(MLP)
    return (x, weights, (gate, up, down)), lax.top_k(scores, K)[1]


def dense(x, weights, kernels, choices, kept: np.ndarray | bool = True):
    """Return every expert on every token, weighted, which is E / k times the work and moves nothing."""
    gate, up, down = kernels
    with jax.default_matmul_precision("highest"):
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
        out = jnp.einsum("btef,efd->bted", hidden, down)
        return jnp.einsum("btk,btke,bted->btd", weights * kept, jax.nn.one_hot(choices, EXPERTS), out), kept


def value_and_gradients(layer, arguments):
    """Return (loss, gradients) of a loss that weighs every output differently, and the choices that were kept."""
    r = jax.random.normal(jax.random.key(9), (BATCH, LENGTH, EMBED))

    def loss(arguments):
        y, kept = layer(*arguments)
        return jnp.sum(jnp.sin(y) * r), kept

    (value, kept), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)
    return (value, gradients), kept


def assert_equal(got, wanted, tolerance=TOLERANCE):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = np.abs(w).max() if w.ndim else BATCH * LENGTH  # The loss is a sum of terms near 1.
        assert np.abs(g - w).max() / scale < tolerance


@pytest.fixture(scope="module")
def reference(inputs):
    arguments, choices = inputs
    return value_and_gradients(lambda x, w, k: dense(x, w, k, choices), arguments)[0]


@pytest.mark.parametrize(("mesh", "options"), CASES, ids=str)
def test_equals_a_dense_mixture(mesh, options, inputs, reference):
    """Loss and every gradient agree; a capacity of EXPERTS / K = 4 times an even load always has room."""
    arguments, choices = inputs
    with scope(MESHES[mesh]):
        got, kept = value_and_gradients(lambda x, w, k: expert_layer(x, w, choices, k, **options), arguments)
    assert kept.all()
    assert_equal(got, reference)


def test_one_device_needs_no_mesh(inputs, reference):
    arguments, choices = inputs
    assert_equal(value_and_gradients(lambda x, w, k: expert_layer(x, w, choices, k), arguments)[0], reference)


def test_replicas_of_a_deferred_axis_keep_their_gradients_apart(inputs):
    """Accumulation maps the layer over a mesh axis that its rules do not name, over which nothing may be added up."""
    (x, weights, kernels), choices = inputs

    def gradient(layer):
        def one(x, weights, choices):
            return jax.grad(lambda k: jnp.sum(jnp.sin(layer(x, weights, k, choices))))(kernels)

        pieces = (a.reshape(2, BATCH // 2, *a.shape[1:]) for a in (x, weights, choices))
        return jax.jit(jax.vmap(one, spmd_axis_name="data"))(*pieces)

    with scope({"data": 2, "expert": 4}, act_batch="expert"):
        got = gradient(lambda x, w, k, c: expert_layer(x, w, c, k)[0])
    wanted = [
        jax.jit(jax.grad(lambda k, p=p: jnp.sum(jnp.sin(dense(x[p], weights[p], k, choices[p])[0]))))(kernels)
        for p in (slice(0, BATCH // 2), slice(BATCH // 2, None))
    ]
    assert_equal(got, jax.tree.map(lambda *a: jnp.stack(a), *wanted))


def ragged_by_gathering(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Return `lax.ragged_all_to_all` as its documentation defines it, from collectives that XLA:CPU has."""
    del recv_sizes
    me, ways = lax.axis_index(axis_name), lax.axis_size(axis_name)
    operands, begins, sizes, places = (
        lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    slices = input_offsets.shape[0] // ways
    row = jnp.arange(output.shape[0])
    for source in range(ways):
        for j in range(slices):
            i = me * slices + j
            inside = (row >= places[source, i]) & (row < places[source, i] + sizes[source, i])
            rows = operands[source].at[row - places[source, i] + begins[source, i]].get(mode="fill", fill_value=0)
            output = jnp.where(inside.reshape(-1, *[1] * (output.ndim - 1)), rows, output)
    return output


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"expert": 4}, {}),
        ({"fsdp": 2, "expert": 2, "tensor": 2}, {"buffer_factor": 1.0}),
        ({"outer": 2, "expert": 2}, TWO_LEVELS | {"buffer_factor": 1.0}),
    ],
    ids=str,
)
def test_the_ragged_exchange_moves_what_the_dense_one_does(sizes, options, inputs, monkeypatch):
    """The offsets and sizes for GPUs, run by the definition, give bit for bit what the padded exchange gives."""
    arguments, choices = inputs

    def run():
        with scope(sizes):
            return value_and_gradients(lambda x, w, k: expert_layer(x, w, choices, k, **options), arguments)

    padded = run()
    monkeypatch.setattr(expert.ExchangeLayout, "ragged", True)
    monkeypatch.setattr(exchange, "SLICES", 4)  # In the definition, each slice is a compiled loop of its own.
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_by_gathering)
    for ragged, wanted in zip(jax.tree.leaves(run()), jax.tree.leaves(padded), strict=True):
        np.testing.assert_array_equal(ragged, wanted)


def kept_by_hand(choices, ways: int, group_of, limit: int):
    """Return the kept choices: each sender takes all first choices, then second ones, until a group has its limit."""
    kept = np.zeros(choices.shape, bool)
    for source in np.split(np.arange(BATCH), ways):
        taken: dict[int, int] = {}
        for c in range(K):
            for token in np.ndindex(len(source), LENGTH):
                where = (source[token[0]], token[1], c)
                group = group_of(int(choices[where]))
                kept[where] = taken.get(group, 0) < limit
                taken[group] = taken.get(group, 0) + 1
    return kept


@pytest.mark.parametrize(
    ("options", "group_of", "limit"),
    [
        ({"capacity_factor": 0.6}, lambda e: e, 3),  # An expert has ceil(0.6 x 16 tokens x 2 / 8 experts) slots.
        ({"buffer_factor": 1.0}, lambda e: e // 2, 8),  # A GPU has ceil(1.0 x 16 tokens x 2 / 4 GPUs) rows.
    ],
    ids=["capacity", "buffer"],
)
def test_what_is_dropped_follows_the_rule(options, group_of, limit, inputs):
    arguments, choices = inputs
    kept = kept_by_hand(np.asarray(choices), 4, group_of, limit)
    assert 0.05 < 1 - kept.mean() < 0.6
    wanted, _ = value_and_gradients(lambda x, w, k: dense(x, w, k, choices, kept), arguments)
    with scope({"expert": 4}):
        got, got_kept = value_and_gradients(lambda x, w, k: expert_layer(x, w, choices, k, **options), arguments)
    np.testing.assert_array_equal(got_kept, kept)
    assert_equal(got, wanted)


def kept_in_two_stages(choices, outer: int, inner: int, room: int, group_of, limit: int):
    """The rule for one sequence a GPU: tokens find room for each of their blocks, then rows in the block for a group.

    A GPU of a block counts the tokens of all senders with its own place along the inner axis, sender by sender.
    """
    kept, per_block = np.zeros(choices.shape, bool), EXPERTS // outer
    for block, place in np.ndindex(outer, inner):
        arrived = []
        for source in range(outer):
            sequence = source * inner + place
            blocks = [list(dict.fromkeys(int(c) // per_block for c in token)) for token in choices[sequence]]
            order = [
                (nth, token) for nth in range(K) for token in range(LENGTH) if blocks[token][nth : nth + 1] == [block]
            ]
            arrived += [(sequence, token) for _, token in order[:room]]
        taken: dict[int, int] = {}
        for c in range(K):
            for where in ((*row, c) for row in arrived if choices[(*row, c)] // per_block == block):
                group = group_of(int(choices[where]) % per_block)
                kept[where] = taken.get(group, 0) < limit
                taken[group] = taken.get(group, 0) + 1
    return kept


@pytest.mark.parametrize(
    ("options", "room", "group_of", "limit"),
    [
        # Of 8 tokens with 2 blocks at most: ceil(0.6 x 8 x 2 / 2 blocks), then ceil(0.6 x 8 x 2 / 4 experts).
        ({"capacity_factor": 0.6}, 5, lambda e: e, 3),
        ({"buffer_factor": 0.6}, 5, lambda e: e, 3),  # an inner GPU holds one expert
    ],
    ids=["capacity", "buffer"],
)
def test_what_two_stages_drop_follows_the_rule(options, room, group_of, limit, inputs):
    arguments, choices = inputs
    kept = kept_in_two_stages(np.asarray(choices), 2, 4, room, group_of, limit)
    assert 0.05 < 1 - kept.mean() < 0.6
    wanted, _ = value_and_gradients(lambda x, w, k: dense(x, w, k, choices, kept), arguments)
    with scope({"outer": 2, "expert": 4}):
        layer = lambda x, w, k: expert_layer(x, w, choices, k, **TWO_LEVELS, **options)
        got, got_kept = value_and_gradients(layer, arguments)
    np.testing.assert_array_equal(got_kept, kept)
    assert_equal(got, wanted)


def test_a_limit_of_groups_shrinks_the_network_stage_and_loses_nothing(inputs):
    """Of 4 groups of 2 experts a token takes one: of 4 blocks it goes to one, so a GPU sends 2 of 8 rows to each."""
    arguments, choices = inputs
    choices = choices[..., :1] // 2 * 2 + jnp.arange(K)
    wanted, _ = value_and_gradients(lambda x, w, k: dense(x, w, k, choices), arguments)
    with scope({"outer": 4, "expert": 2}):
        layer = lambda x, w, k: expert_layer(x, w, choices, k, groups=(4, 1), buffer_factor=4.0)
        got, kept = value_and_gradients(layer, arguments)
    assert kept.all()
    assert_equal(got, wanted)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"expert": 8}, r"but act_experts has 'expert' \(8\)"),
        ({"outer": 1, "expert": 8}, r"but act_experts has 'outer' \(1\), 'expert' \(8\)"),
    ],
    ids=str,
)
def test_a_hierarchical_dispatch_needs_two_axes(sizes, message, inputs):
    (x, weights, kernels), choices = inputs
    with scope(sizes), pytest.raises(ConfigError, match=message):
        expert_layer(x, weights, choices, kernels, **TWO_LEVELS)


def test_parts_that_do_not_divide_the_tokens_are_refused(inputs):
    (x, weights, kernels), choices = inputs
    message = r"the 16 tokens of a GPU cannot be exchanged in 6 equal parts(.|\n)*dispatch_parts = 2"
    with scope({"expert": 4}), pytest.raises(ConfigError, match=message):
        expert_layer(x, weights, choices, kernels, parts=6)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"outer": 2, "expert": {"infiniband": 2}, "fsdp": 4}, "'outer' (2 over 1 NVLink domain), 'expert' (2 over 2"),
        (
            {"outer": {"nvlink": 2, "infiniband": 2}, "expert": 2, "fsdp": 2},
            "'outer' (4 over 2 NVLink domains), 'expert' (2",
        ),
    ],
    ids=str,
)
def test_two_axes_that_are_not_two_levels_are_refused_with_their_domains(mesh, message, inputs):
    (x, weights, kernels), choices = inputs
    cluster = Cluster.load("dgx_h100", hosts=2)
    absent = build_mesh(MeshSpec.parse(mesh), cluster, devices=describe_devices(cluster))
    names = {"act_batch": [*mesh], "experts": ["outer", "expert"], "act_experts": ["outer", "expert"]}
    x, weights, choices = (jnp.concatenate([a, a]) for a in (x, weights, choices))
    with sharding_scope(absent, ShardingRules(names)), pytest.raises(ConfigError, match=re.escape(message)):
        expert_layer(x, weights, choices, kernels, **TWO_LEVELS)


def test_axes_that_cut_experts_but_not_tokens_are_refused(inputs):
    (x, weights, kernels), choices = inputs
    message = r"mesh axis 'expert' cuts the experts \(act_experts\), but not the tokens"
    with scope({"data": 2, "expert": 4}, act_batch="data"), pytest.raises(ConfigError, match=message):
        expert_layer(x, weights, choices, kernels)


def test_experts_that_the_axes_do_not_divide_are_refused(inputs):
    (x, weights, kernels), choices = inputs
    kernels = tuple(k[:6] for k in kernels)
    with scope({"expert": 4}), pytest.raises(ConfigError, match=r"experts = 6 .* over 4 GPUs \(expert\)"):
        expert_layer(x, weights, choices % 6, kernels)


# The experiment has 2 x 8 H100s; fsdp 2 x expert 8.
MIXTRAL = Path(__file__).parents[2] / "configs/experiments/mixtral_8x7b.toml"
SIZES = {"layers": 2, "experts": 8, "embed": 4096, "k": 2, "sequences": 16, "length": 4096}
DROPLESS = "model.buffer_factor="


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("options", "exchanges"),
    [
        ((), 5),
        pytest.param((DROPLESS,), 5, marks=pytest.mark.slow),
        pytest.param((DROPLESS, "train.remat=none"), 4, marks=pytest.mark.slow),
        pytest.param((DROPLESS, "model.capacity_factor=1.5"), 5, marks=pytest.mark.slow),
    ],
    ids=["full, buffer", "full", "none", "full, capacity"],
)
def test_exchanges_of_the_compiled_step(options, exchanges):
    """Per GPU and layer there are 2 exchanges forward, 2 backward, and 1 more with a recomputed forward pass.

    Each moves tokens x k rows of the bf16 embedding at most, with a capacity all the slots. One exchange of an fp32 a
    row takes the gradients of the routing weights back.
    """
    from meshkit.planning.planner import plan_experiment

    experiment = load(MIXTRAL, [f"model.layers={SIZES['layers']}", *options])
    tokens, layers = SIZES["sequences"] * SIZES["length"] // 16, SIZES["layers"]
    slots, kind = tokens * SIZES["k"], "ragged-all-to-all"
    if capacity_factor := experiment.model.options.get("capacity_factor"):
        slots, kind = SIZES["experts"] * math.ceil(capacity_factor * slots / SIZES["experts"]), "all-to-all"
    plan = plan_experiment(experiment)
    ragged = [i.collective for i, _ in plan.schedule.walk() if i.collective and i.collective.collective == kind]
    assert {c.slices for c in ragged} == {exchange.SLICES if kind == "ragged-all-to-all" else 0}
    told = [w for w in plan.report.warnings if w.code == "ragged_way"]
    assert ["XLA's one-shot kernel, 32 slices to each" in w.message for w in told] == [True] * (not capacity_factor)
    rows = [r for r in plan.report.communication if r.collective == kind]
    found = {r.dtype: r for r in rows if r.axes != ("fsdp",)}  # The embedding's gradient has an exchange over fsdp.
    assert set(found) == {"bf16", "f32"}
    for dtype, count, row_bytes in (("bf16", exchanges * layers, 2 * SIZES["embed"]), ("f32", layers, 4)):
        row = found[dtype]
        assert (row.axes, row.link, row.group_size, row.gpus_per_domain) == (("expert",), "nvlink", 8, 8)
        assert (row.count, row.payload_bytes) == (count, count * slots * row_bytes)


@pytest.mark.deviceless
@pytest.mark.slow
def test_a_ragged_exchange_over_hosts_is_taken_apart_into_parts_of_known_size():
    """Of S bytes a GPU on 2 hosts, 3 dispatches gather 2 S each, and 2 combines exchange 2 S and copy S.

    Inside a host a part has the received rows' buffer, 1.5 S, for payload. Everything is explained.
    """
    from meshkit.planning.planner import plan_experiment

    axes = ["mesh.fsdp=", "mesh.expert={nvlink=8,infiniband=2}", "model.experts=16", "model.layers=1"]
    plan = plan_experiment(load(MIXTRAL, axes))
    s = SIZES["sequences"] * SIZES["length"] // 16 * SIZES["k"] * SIZES["embed"] * 2
    found = {
        (r.collective, r.axes, r.group_size): (r.count, r.payload_bytes)
        for r in plan.report.communication
        if r.dtype == "bf16"
    }
    assert found["all-gather", ("expert",), 2] == (3, 3 * 2 * s)
    assert found["all-to-all", ("expert",), 2] == (2, 2 * 2 * s)
    assert found["ragged-all-to-all", ("expert",), 8] == (5, 5 * 1.5 * s)
    assert found["ragged-all-to-all", (), 1] == (2, 2 * s)
    codes = {w.code: w for w in plan.report.warnings}
    assert "unexplained_collective" not in codes
    assert "16 GPUs of 2 domains): in parts" in codes["ragged_way"].message
    assert (codes["ragged_way"].seconds or 0.0) > 0
    assert "ragged_fails" not in codes


DEBUG = Path(__file__).parents[2] / "configs/experiments/moe_debug_cpu.toml"
OUTER_INNER = ["expert_outer", "expert"]


@pytest.mark.deviceless
@pytest.mark.parametrize("option", [pytest.param("capacity_factor", marks=pytest.mark.slow), "buffer_factor"])
def test_bytes_and_overlap_of_the_two_stages_of_a_compiled_step(option):
    """16 experts, 8 on each of two hosts, full remat: 3 dispatches and 2 combines a layer in each stage.

    A GPU sends C = tokens rows to each host, since every token may choose from both. Choices and weights take 8 k bytes
    a row in the forward pass and its recomputation; the gradients of weights take 4 k, and whether a choice was kept k.
    Inside a host an expert or a GPU has room for 1.5 times its even load. The shared expert's matmuls run during
    exchanges.
    """
    from meshkit.planning.planner import plan_experiment

    rules = f"rules.logical={{act_batch={OUTER_INNER},experts={OUTER_INNER},act_experts={OUTER_INNER}}}"
    plan = plan_experiment(load(DEBUG, [
        "cluster={name='dgx_h100',hosts=2}", "mesh={expert_outer={infiniband=2},expert=8}", rules, "model.layers=1",
        "model.experts=16", "model.shared_experts=1", "model.hierarchical_dispatch=true", f"model.{option}=1.5",
        "train.remat=full",
    ]))  # fmt: skip
    tokens, k, embed = 16 * 64 // 16, 2, 64
    outer = 2 * tokens
    inner = 8 * math.ceil(1.5 * tokens * k / 8)
    ragged = "all-to-all" if option == "capacity_factor" else "ragged-all-to-all"
    found = {
        (r.collective, r.axes, r.link, r.dtype): (r.count, r.payload_bytes)
        for r in plan.report.communication
        if "all-to-all" in r.collective
    }
    network, nvlink = (("expert_outer",), "infiniband"), (("expert",), "nvlink")
    assert found == {
        ("all-to-all", *network, "bf16"): (5, 5 * outer * embed * 2),
        ("all-to-all", *network, "s32"): (2, 2 * outer * 8 * k),
        ("all-to-all", *network, "f32"): (1, outer * 4 * k),
        ("all-to-all", *network, "s8"): (1, outer * k),
        (ragged, *nvlink, "bf16"): (5, 5 * inner * embed * 2),
        (ragged, *nvlink, "f32"): (1, inner * 4),
    }
    assert plan.lint is not None
    assert not [f for f in plan.lint.findings if f.severity == "error" or f.code == "unexplained_collective"]
    assert shared_matmuls_during_exchanges(plan.schedule) > 0


def shared_matmuls_during_exchanges(schedule) -> int:
    """How many matmuls of a shared expert stand between the start and the done of a layer's exchange."""
    count = 0
    for instructions in schedule.computations.values():
        running: set[str] = set()
        for i in instructions:
            if i.kind == "start" and i.collective and "all-to-all" in i.collective.collective:
                running.add(i.name)
            elif i.kind == "done":
                running.discard(i.starts)
            elif running and i.cost and i.cost.matmul_flops:
                count += bool(re.search(r"/moe/(gate_up|down)/", i.source))
    return count
