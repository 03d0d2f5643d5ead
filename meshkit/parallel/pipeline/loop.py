"""GPipe and circular pipelines: a loop of forward ticks, differentiated by JAX.

The simplest pipeline there is, and the forward pass of evaluation. Its derivative keeps something of every tick, so
memory grows with the number of microbatches; the lockstep engine's does not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.parallel.pipeline.report import TICK
from meshkit.parallel.pipeline.residuals import Residuals, find_policy
from meshkit.parallel.pipeline.schedules import Tables
from meshkit.parallel.pipeline.worker import Sums, Worker, add, where


def loop_gradients(worker: Worker, tables: Tables, residuals: Residuals, accumulators: Any) -> tuple[Sums, Any, Any]:
    """This device's part of the sums, and of the gradients of stages (arrays [v, ...]) and of outer parameters.

    Gradients are summed over microbatches in the dtype of the weights that the loop is given: fp32 accumulators are
    weights cast to fp32 before it.
    """
    weights, outer = jax.tree.map(lambda x: x.astype(accumulators or x.dtype), (worker.weights, worker.outer))

    def loss(weights, outer):
        sums = loop_sums(worker, tables, weights, outer, residuals)
        return sums["loss"], sums

    (_, sums), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(weights, outer)
    return sums, *gradients


def loop_sums(worker: Worker, tables: Tables, weights: Any, outer: Any, residuals: Residuals = "stash") -> Sums:
    """This device's part of the sums of a forward pass.

    Args:
        worker: of the device.
        tables: of a schedule that runs all forwards first.
        weights, outer: parameters in whatever dtype; they are used in the worker's.
        residuals: what a derivative of this keeps of each tick; it recomputes the rest.
    """
    w, last, chunks = worker, worker.last, worker.stack.virtual_stages
    before = jax.tree.map(lambda a: a.dtype, (w.weights, w.outer))

    def tick(state: Any, now: Any, scored: bool) -> tuple[Any, None]:
        received, sums = state
        stages, outside = jax.tree.map(lambda a, dtype: a.astype(dtype), (weights, outer), before)
        scoring, entering = now["scored"], w.enter(outside, now["entering"])
        now = {k: a[w.stage] for k, a in now["forward"].items()}
        x = where((w.stage == 0) & (now["chunk"] == 0), entering, received)
        (y, loss_sum), metrics = w.run_stage(w.chunk_of(stages, now["chunk"]), x, now["chunk"], now["microbatch"])
        sums = add(sums, now["valid"], loss=loss_sum, stages=metrics)
        if scored:
            mine = scoring["valid"] & (w.stage == last)
            loss_sum, (weight, metrics) = w.score(outside, y, scoring["microbatch"], mine)
            sums = add(sums, mine, loss=loss_sum, weight=weight, last=metrics)
        return (lax.optimization_barrier(w.pass_on(y, 1)), sums), None

    def scan(state: Any, inputs: Any, scored: bool) -> Any:
        body = jax.named_scope(TICK)(lambda state, now: tick(state, now, scored))
        if residuals != "stash":
            body = jax.checkpoint(body, policy=find_policy(residuals))
        return lax.scan(body, state, inputs)[0]

    x = jax.tree.map(jnp.zeros_like, w.enter(w.outer, 0))
    state = (x, w.empty_sums(x))
    half = tables.ticks // 2
    inputs = jax.tree.map(lambda a: jnp.asarray(a[:half]), _ticks(tables))
    # Behind the last layer S ticks in a row of v S have a microbatch; no other tick runs the head.
    state = scan(state, jax.tree.map(lambda a: a[:last], inputs), False) if last else state
    if chunks == 1:
        return scan(state, jax.tree.map(lambda a: a[last:], inputs), True)[1]
    period, silent = (last + 1) * chunks, (last + 1) * (chunks - 1)
    groups = jax.tree.map(lambda a: a[last:].reshape(-1, period, *a.shape[1:]), inputs)

    def group(state: Any, inputs: Any) -> tuple[Any, None]:
        state = scan(state, jax.tree.map(lambda a: a[:silent], inputs), False)
        return scan(state, jax.tree.map(lambda a: a[silent:], inputs), True), None

    return lax.scan(group, state, groups)[0][1]


def _ticks(tables: Tables) -> dict[str, Any]:
    """What each tick reads of the tables: the stages' forwards, what enters the first layer, what leaves the last."""
    forward = tables.forward
    found = forward.valid[:, -1] & (forward.chunk[:, -1] == tables.virtual_stages - 1)
    scored = {"valid": found, "microbatch": np.where(found, forward.microbatch[:, -1], 0).astype(np.int32)}
    entering = np.where(*tables.entering, 0).astype(np.int32)
    return {"forward": vars(forward), "entering": entering, "scored": scored}
