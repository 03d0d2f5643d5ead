"""Test `[compression]` and `[local_sgd]` in an experiment: what a step computes, and that runs resume exactly."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.parallel.compression import WIRES
from meshkit.planning.resolved import make_train_step
from meshkit.runs.metrics import read_metrics
from meshkit.sharding import build_mesh
from meshkit.verbs.train import trainer

pytestmark = pytest.mark.usefixtures("programs_kept")
EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "mlp.toml"
BATCH = 16
TINY = [
    # fsdp shards kernels of 128 x 512 in two: 128 KiB a shard, so they travel compressed.
    *("model.embed=128", "model.mlp=512", "model.layers=4", f"train.global_batch={BATCH}"),
    *("cluster.gpus_per_host=4", "mesh.data=2", "mesh.fsdp=2", "train.precision=fp32", "train.steps=6"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.evaluate_every=0"),
]
COMPRESSED = ["compression.axis=data"]
LOCAL = ["local_sgd.axis=data", "local_sgd.every=3"]
UNIT_ROUNDOFF = 2.0**-24
# fp32 sums of up to 512 terms are in another order, through the 8 matmuls of forward and backward. Errors add up like a
# random walk, relative to the largest entry (see test_sharded_equals_single).
TOLERANCE = np.sqrt(8) * np.sqrt(512) * UNIT_ROUNDOFF  # This is 3.8e-6.


def experiment(*overrides):
    return load(EXPERIMENT, [*TINY, *overrides])


@functools.cache
def program_of(*overrides):
    spec = experiment(*overrides)
    return make_train_step(spec, build_mesh(spec.mesh, spec.cluster))


def batch_for(program, abstract=None):
    random = np.random.default_rng(0)
    abstract = abstract or program.abstract_step_batch
    return {k: jax.device_put(random.standard_normal(x.shape, np.float32), x.sharding) for k, x in abstract.items()}


@functools.cache
def plain_gradients():
    plain = program_of()
    return flat(plain.gradients(plain.init(), batch_for(plain))[1])


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize(("accumulate", "dtype"), [(1, "bf16"), (1, "int8"), (2, "fp8")])
def test_compressed_gradients_are_the_plain_ones_within_the_bound(accumulate, dtype):
    """The compressed gradient differs by at most 2 R e max|gradient of a replica|, for R = 2 replicas.

    Each replica errs by e max|its gradient|, and their sum by e max|sum|. A replica's gradient is of half the batch,
    divided by the size of all of it; it is no larger than the whole one where halves do not cancel, and 4 times leaves
    room for where they do.
    """
    compressed = program_of(f"train.accumulate={accumulate}", *COMPRESSED, f"compression.dtype={dtype}")
    found = flat(compressed.gradients(compressed.init(), batch_for(compressed))[1])
    for name, value in plain_gradients().items():
        error, largest = np.abs(found[name] - value).max(), np.abs(value).max()
        assert error <= 2 * 2 * WIRES[dtype].error * 4 * largest, name
        assert error > 10 * TOLERANCE * largest, name  # The error shows that the gradient traveled in few bits.


def test_residuals_are_carried_sharded_and_add_up():
    """compressed + residuals = plain, where residuals are in units of the sum over the batch."""
    program = program_of("train.accumulate=1", *COMPRESSED, "compression.dtype=int8")
    state, batch = program.init(), batch_for(program)
    found = flat(program.gradients(state, batch)[1])
    after, metrics = program.step(state, batch)
    left = flat(jax.tree.map(lambda r: r.sum(0), after.extra["residuals"]))
    for name, value in plain_gradients().items():
        whole = found[name] + left[name] / float(metrics["weight"])
        np.testing.assert_allclose(whole, value, rtol=0, atol=2 * TOLERANCE * np.abs(value).max(), err_msg=name)
    for made, like in zip(jax.tree.leaves(after.extra), jax.tree.leaves(program.abstract_state.extra)):
        assert made.sharding.is_equivalent_to(like.sharding, made.ndim)
        assert made.shape[0] == 2


def test_a_round_of_local_sgd_is_steps_of_each_replica_and_then_the_mean():
    """With outer learning rate 1 and no momentum, a round is two runs of three plain steps on half a batch each.

    AdamW turns the sign of a gradient into a step of learning_rate (3e-3), so an entry whose gradient is mere rounding
    error may go the other way at every step. All but one in a thousand agree to 1e-5.
    """
    outer = ["local_sgd.learning_rate=1.0", "local_sgd.momentum=0.0", "local_sgd.nesterov=false"]
    rounds = program_of(*LOCAL, *outer)
    replica = program_of(f"train.global_batch={BATCH // 2}", "mesh.data=1", "cluster.gpus_per_host=2")
    batches = batch_for(rounds, rounds.abstract_batch)
    given = {k: np.asarray(v) for k, v in batches.items()}
    after, metrics = rounds.step(rounds.init(), batches)
    ends, losses = [], np.zeros((2, 3))
    for r in range(2):
        state = replica.init()
        for h in range(3):
            rows = slice(r * BATCH // 2, (r + 1) * BATCH // 2)
            mine = {k: jax.device_put(v[h, rows], replica.abstract_batch[k].sharding) for k, v in given.items()}
            state, of_step = replica.step(state, mine)
            losses[r, h] = of_step["loss"]
        ends.append(flat(state.params))
    assert int(after.step) == 3
    np.testing.assert_allclose(metrics["loss"], losses.mean(0), rtol=1e-5)
    np.testing.assert_array_equal(metrics["weight"], [BATCH] * 3)
    for name, value in flat(after.params).items():
        difference = np.abs(value - (ends[0][name] + ends[1][name]) / 2)
        assert (difference > 1e-5).mean() < 1e-3, name
        assert difference.max() <= 3 * 2 * 3e-3, name


def test_one_step_a_round_with_sgd_is_data_parallelism(monkeypatch):
    """The mean of the replicas' parameters is a plain step with the mean of their gradients, the batch's gradient.

    This holds for every = 1, outer learning rate 1, no momentum, and inner SGD without clipping.
    """
    monkeypatch.setattr("meshkit.step.train_step.make_optimizer", lambda *_: optax.sgd(0.1))
    outer = ["local_sgd.axis=data", "local_sgd.every=1", "local_sgd.learning_rate=1.0", "local_sgd.momentum=0.0"]
    plain, rounds = program_of("train.seed=0"), program_of(*outer)
    batch = batch_for(plain)
    wanted = flat(plain.step(plain.init(), batch)[0].params)
    found, metrics = rounds.step(rounds.init(), rounds.stack([batch]))
    assert metrics["loss"].shape == (1,)
    for name, value in flat(found.params).items():
        # A step moves parameters by far less than their size, for a few of their roundings.
        atol = 4 * UNIT_ROUNDOFF * np.abs(value).max()
        np.testing.assert_allclose(value, wanted[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("staleness", [0, 1])
def test_replicas_keep_their_own_optimizer_state(staleness):
    rounds = program_of(*LOCAL, f"local_sgd.staleness={staleness}")
    state, _ = rounds.step(rounds.init(), batch_for(rounds, rounds.abstract_batch))
    for made, like in zip(jax.tree.leaves(state), jax.tree.leaves(rounds.abstract_state)):
        assert made.sharding.is_equivalent_to(like.sharding, made.ndim)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 3]
    assert all(x.shape[0] == 2 and not np.array_equal(x[0], x[1]) for x in moments)
    loss = rounds.evaluate(state, batch_for(rounds))
    assert np.isfinite(loss["loss_sum"])


@pytest.mark.parametrize(
    "savers", [[*COMPRESSED, "compression.dtype=int8"], [*LOCAL, "local_sgd.staleness=1"]], ids=["int8", "stale"]
)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path, savers):
    common = ["checkpoint.every=3", "train.evaluate_every=3", "train.evaluate_batches=1", *savers]

    def run(out, steps):
        trainer.train(experiment(*common, f"train.steps={steps}"), tmp_path / out, console=Console(quiet=True))
        return [r["loss"] for r in read_metrics(tmp_path / out / "metrics.jsonl")]

    straight = run("straight", 6)
    run("resumed", 3)
    assert run("resumed", 6) == straight
    assert len(straight) == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["local_sgd.axis=fsdp"], "cut the parameters over 'fsdp'"),
        (["compression.axis=fsdp"], "cut the parameters over 'fsdp'"),
        ([*LOCAL, "train.steps=7"], r"train.steps = 7 is not a multiple of the 3 steps"),
        ([*LOCAL, "checkpoint.every=4"], r"checkpoint.every = 4 is not a multiple"),
        ([*LOCAL, "profile.steps=[2,3]"], r"does not consist of whole rounds of 3 steps"),
        ([*LOCAL, *COMPRESSED], "there are no gradients to compress"),
    ],
)
def test_what_does_not_fit_is_one_sentence(overrides, message):
    with pytest.raises(ConfigError, match=message):
        program_of(*overrides)
