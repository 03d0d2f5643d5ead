"""Test that a round of local SGD equals its definition in numpy, and that only the outer gradient crosses the axis."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment
from meshkit.step.local_sgd import LocalSgd, wait_before_backward

REPLICAS, EVERY, ROUNDS, BATCH = 4, 3, 5, 8
IN, OUT = 6, 10
RATE, DECAY = 0.05, 0.5  # These are of the inner optimizer, SGD with momentum, whose state stays with the replica.
SPECS = {"bias": PartitionSpec(), "kernel": PartitionSpec(None, "fsdp")}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((REPLICAS, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def inner_step(params, velocity, batch, beside):
    """Return parameters, velocity and loss after a step of least squares by SGD with momentum."""
    x, y = batch

    def loss(params):
        value = jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)
        return value if beside is None else wait_before_backward(value, beside)

    value, gradients = jax.value_and_grad(loss)(params)
    velocity = jax.tree.map(lambda v, g: DECAY * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity, {"loss": value}


def inner_step_by_hand(params, velocity, batch):
    x, y = batch
    error = x @ params["kernel"] + params["bias"] - y
    gradients = {"kernel": 2 * x.T @ error / error.size, "bias": 2 * error.sum(0) / error.size}
    velocity = {k: DECAY * velocity[k] + gradients[k] for k in params}
    return {k: params[k] - RATE * velocity[k] for k in params}, velocity, np.mean(error**2)


def rounds_by_hand(params, batches, *, learning_rate, momentum, nesterov, staleness):
    """Return anchor and losses by the formulas of the module's docstring, in fp64, replica by replica."""
    anchor = {k: v.astype(np.float64) for k, v in params.items()}
    zeros = {k: np.zeros_like(v) for k, v in anchor.items()}
    outer, before, velocities = zeros, zeros, [zeros] * REPLICAS
    losses = np.zeros((len(batches), EVERY, REPLICAS))
    for t, (x, y) in enumerate(batches):
        ends = []
        for r in range(REPLICAS):
            w = anchor
            for h in range(EVERY):
                w, velocities[r], losses[t, h, r] = inner_step_by_hand(w, velocities[r], (x[h, r], y[h, r]))
            ends.append(w)
        measured = {k: anchor[k] - np.mean([w[k] for w in ends], axis=0) for k in anchor}
        gradient = before if staleness else measured
        outer = {k: momentum * outer[k] + gradient[k] for k in anchor}
        direction = {k: gradient[k] + momentum * outer[k] if nesterov else outer[k] for k in anchor}
        anchor = {k: anchor[k] - learning_rate * direction[k] for k in anchor}
        before = measured
    return anchor, losses


def problem():
    random = np.random.default_rng(0)
    params = {"kernel": random.standard_normal((IN, OUT)), "bias": random.standard_normal(OUT)}
    shape = (ROUNDS, EVERY, REPLICAS, BATCH)
    x, y = random.standard_normal((*shape, IN)), random.standard_normal((*shape, OUT))
    params, x, y = jax.tree.map(lambda a: a.astype(np.float32), (params, x, y))
    return params, list(zip(x, y))


def run(local, params, batches):
    """Return anchor, outer state and losses [rounds, H, R] after all rounds, each state where its shardings say."""
    shardings = {k: NamedSharding(local.mesh, s) for k, s in SPECS.items()}
    anchor = jax.tree.map(jax.device_put, params, shardings)
    outer = jax.tree.map(jax.device_put, local.init(anchor), local.outer_shardings(anchor))
    velocity = jax.jit(lambda: local.replicate(jax.tree.map(jnp.zeros_like, params)))()
    step = jax.jit(functools.partial(local.outer_step, inner_step))
    losses = []
    for batch in batches:
        anchor, outer, velocity, metrics = step(anchor, outer, velocity, batch)
        losses.append(metrics["loss"])
    return anchor, outer, np.stack(losses)


# In fp32, a round is EVERY steps of a few dot products of up to BATCH * OUT = 80 terms. Rounding errors add up like a
# random walk over ROUNDS * EVERY steps, and the inner steps contract them. They are relative to the largest entry.
TOLERANCE = 4 * np.sqrt(ROUNDS * EVERY) * np.sqrt(BATCH * OUT) * 2.0**-24


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("learning_rate", "momentum", "nesterov"), [(1.0, 0.0, False), (0.7, 0.9, True), (0.5, 0.6, False)]
)
def test_rounds_equal_their_definition(mesh, learning_rate, momentum, nesterov, staleness):
    params, batches = problem()
    outer = {"learning_rate": learning_rate, "momentum": momentum, "nesterov": nesterov, "staleness": staleness}
    anchor, _, losses = run(LocalSgd(mesh, "data", EVERY, SPECS, **outer), params, batches)
    wanted, wanted_losses = rounds_by_hand(params, batches, **outer)
    for name, value in wanted.items():
        np.testing.assert_allclose(anchor[name], value, rtol=0, atol=TOLERANCE * np.abs(value).max())
        assert anchor[name].sharding.is_equivalent_to(NamedSharding(mesh, SPECS[name]), value.ndim)
    np.testing.assert_allclose(losses, wanted_losses, rtol=TOLERANCE)


def test_one_step_of_plain_sgd_and_an_outer_step_of_one_is_data_parallelism(mesh):
    """The mean of the replicas is one step with the mean gradient.

    This holds for every = 1, learning_rate = 1, momentum = 0 and a stateless inner step.
    """
    params, batches = problem()

    def plain(params, carry, batch, beside):
        after, _, metrics = inner_step(params, jax.tree.map(jnp.zeros_like, params), batch, beside)
        return after, carry, metrics

    local = LocalSgd(mesh, "data", 1, SPECS, learning_rate=1.0, momentum=0.0, nesterov=False)
    anchor, outer, wanted = params, local.init(params), params
    step = jax.jit(functools.partial(local.outer_step, plain))
    for x, y in batches:
        batch = x[:1], y[:1]
        anchor, outer, _, _ = step(anchor, outer, (), batch)
        joined = x[0].reshape(-1, IN), y[0].reshape(-1, OUT)
        wanted, _, _ = plain(wanted, (), joined, None)
    for name in wanted:
        np.testing.assert_allclose(
            anchor[name], wanted[name], rtol=0, atol=TOLERANCE * np.abs(np.asarray(wanted[name])).max()
        )


def test_the_first_round_of_stale_updates_leaves_the_anchor_and_keeps_what_it_measured(mesh):
    params, batches = problem()
    stale, outer, _ = run(LocalSgd(mesh, "data", EVERY, SPECS, staleness=1), params, batches[:1])
    assert all(np.array_equal(stale[k], params[k]) for k in params)
    fresh = LocalSgd(mesh, "data", EVERY, SPECS, learning_rate=1.0, momentum=0.0, nesterov=False)
    moved, _, _ = run(fresh, params, batches[:1])
    for name in params:
        mean = np.asarray(outer.pending[name]).mean(0)
        size = np.abs(params[name]).max()
        np.testing.assert_allclose(params[name] - mean, moved[name], rtol=0, atol=4 * 2.0**-24 * size)


@pytest.fixture(scope="module")
def absent():
    pytest.importorskip("jax_cuda12_plugin", reason="the `plan` extra is not installed")
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 8})
    return mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster)), cluster


def compiled_round(absent, staleness, size=1024):
    """Return [(collective, runs in a round)] over the slow axis, and the schedule, of a round on 2 x 8 H100."""
    from meshkit.compile.program import compile_absent

    mesh, cluster = absent
    specs = {"kernel": PartitionSpec(None, "fsdp"), "bias": PartitionSpec()}
    local = LocalSgd(mesh, "data", EVERY, specs, staleness=staleness)

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    params = {"kernel": array((size, size), *specs["kernel"]), "bias": array((size,))}
    outer = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(local.init, params),
        local.outer_shardings(params),
    )
    velocity = {k: array((2, *p.shape), "data", *specs[k]) for k, p in params.items()}
    batch = tuple(array((EVERY, 2, 64, size), None, "data", "fsdp") for _ in range(2))
    step = jax.jit(functools.partial(local.outer_step, inner_step), donate_argnums=(0, 1, 2))
    made = compile_absent(step, (params, outer, velocity, batch), mesh=mesh, cluster=cluster)
    schedule = made.schedule

    def walk(name, times):
        for i in schedule.computations[name]:
            if i.collective is not None and "data" in i.collective.axes:
                yield i.collective, times
            for body in i.bodies:
                yield from walk(body, times * (i.trip_count or 1))

    return list(walk(schedule.entry, 1)), schedule


@pytest.mark.deviceless
@pytest.mark.parametrize("staleness", [0, 1])
def test_only_the_outer_gradient_crosses_the_axis_once_a_round(absent, staleness):
    """A GPU's parameters cross in fp32 once per H steps: at the end of the round, or (stale) in H padded pairs."""
    found, _ = compiled_round(absent, staleness)
    elements = 1024 * 1024 // 8 + 1024
    piece = 2 * -(-elements // (2 * EVERY))
    payload = Counter()
    for collective, times in found:
        assert (collective.collective, collective.dtype, collective.link) == ("all-reduce", "f32", "infiniband")
        payload[times] += collective.payload_bytes
    assert payload == ({EVERY: 4 * piece} if staleness else {1: 4 * elements})


STALE_8B = [
    "model.layers=4",
    "mesh={data={infiniband=2},fsdp=8}",
    'rules.preset="fsdp"',
    "train.global_batch=32",
    "local_sgd={axis='data',every=10,staleness=1}",
]


@pytest.mark.deviceless
@pytest.mark.slow
def test_the_stale_exchange_of_a_llama_is_overlapped_whole():
    """All that crosses InfiniBand, except the loss and its weight (scalars), runs under the output head."""
    report = plan_experiment(load("configs/experiments/llama3_8b.toml", STALE_8B)).report
    rows = [r for r in report.communication if tuple(r.axes) == ("data",)]
    ops = [op for r in rows for op in r.ops if op.payload_bytes > 4096]
    # Some of it is in what XLA takes out of the loop over the steps.
    assert sum(op.count for op in ops) == pytest.approx(2)
    assert sum(op.exposed_s for op in ops) <= 0.01 * sum(op.busy_s for op in ops)
