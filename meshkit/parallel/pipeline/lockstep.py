"""1F1B in one program: forward and backward of different microbatches in one tick.

    tick    gradient of the embedding                            (of what the tick before sent out of the first layer)
            gradients from the next stage arrive                 permute, hidden under the forward chunk
            forward chunk, its output sent on                    permute, hidden under the backward chunk
            embedding of the microbatch of the next tick
            backward chunk; behind the last layer first the loss

Every device runs the same operations in the same tick, so collectives over any axis are legal anywhere, and nothing
here is differentiated through: the loop carries the gradients that it accumulates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.parallel.pipeline.report import TICK
from meshkit.parallel.pipeline.residuals import Residuals, make_residuals
from meshkit.parallel.pipeline.schedules import Phase, Tables
from meshkit.parallel.pipeline.worker import Sums, Worker, add, pick, put, where

State = dict[str, Any]


class Lockstep:
    """The ticks of one device.

    Args:
        worker: of the device.
        tables: of a 1F1B schedule.
        residuals: what a stage keeps of a microbatch between its forward and its backward.
    """

    def __init__(self, worker: Worker, tables: Tables, residuals: Residuals):
        self.worker, self.tables = worker, tables
        self.residuals = make_residuals(residuals, worker.run_stage)
        self.inputs = _ticks(tables)

    def gradients(self, zeros: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Sums, Any, Any]:
        """This device's part of the sums, and of the gradients of stages (arrays [v, ...]) and of outer parameters.

        Args:
            zeros: empty accumulators of both, like the weights.
        """
        state = self._start(zeros)
        for start, stop, phases in _groups(self.tables.phases):
            state = self._scan(state, start, stop, phases)
        state = self._return(state, self.inputs["after"])
        return state["sums"], state["weights"], state["outer"]

    def _start(self, zeros: Callable[[Any, Any], tuple[Any, Any]]) -> State:
        w = self.worker
        x = w.enter(w.outer, 0)
        nothing = jax.tree.map(jnp.zeros_like, x)
        zero = jax.ShapeDtypeStruct((), jnp.int32)  # traced as in a tick, so that the same values are residuals
        kept = jax.eval_shape(lambda c, m: self.residuals.forward(w.chunk_of(w.weights, c), x, c, m)[2], zero, zero)
        weights, outer = zeros(w.weights, w.outer)
        return {
            "entering": x,
            "received": nothing,
            "gradient": nothing,
            "kept": jax.tree.map(lambda a: jnp.zeros((self.tables.slots, *a.shape), a.dtype), kept),
            "weights": weights,
            "outer": outer,
            "sums": w.empty_sums(x),
        }

    def _scan(self, state: State, start: int, stop: int, phases: tuple[Phase, ...]) -> State:
        """Ticks start <= t < stop: phases one after the other, over and over."""
        period = sum(p.ticks for p in phases)
        inputs = jax.tree.map(lambda a: jnp.asarray(a[start:stop]), self.inputs["ticks"])

        def one(state, inputs):
            begin = 0
            for phase in phases:
                part = jax.tree.map(lambda a: a[begin : begin + phase.ticks], inputs)  # noqa: B023 run at once
                carried = {name: state[name] for name in _carried(phase)}
                fixed = {name: value for name, value in state.items() if name not in carried}
                state = fixed | lax.scan(self._tick(phase, fixed), carried, part)[0]
                begin += phase.ticks
            return state, None

        if stop - start == period:
            return one(state, inputs)[0]
        groups = (stop - start) // period
        return lax.scan(one, state, jax.tree.map(lambda a: a.reshape(groups, period, *a.shape[1:]), inputs))[0]

    def _tick(self, phase: Phase, fixed: State):
        def tick(carried: State, now: Any) -> tuple[State, None]:
            now = dict(now)
            for side in ("forward", "backward"):
                now[side] = {k: a[self.worker.stage] for k, a in now[side].items()}
            state, arriving = fixed | carried, None
            if phase.backward:
                arriving = self.worker.pass_on(state["gradient"], -1)
                if not phase.forward:
                    arriving = lax.optimization_barrier(arriving)
                if phase.outer:
                    state = self._return(state, now["returned"])
            if phase.forward:
                state, sent = self._forward(state, now["forward"])
                # Backward waits for forward and for its gradient at once: without, the gradient's permute starts behind
                # forward, if what else is to be done before backward takes as long, or so the compiler thinks.
                now["backward"], sent, arriving = lax.optimization_barrier((now["backward"], sent, arriving))
                state["received"] = self.worker.pass_on(sent, 1)
                if phase.outer:
                    state["entering"] = self.worker.enter(self.worker.outer, now["next"])
            weights = ()
            if phase.backward:
                state, weights = self._backward(state, now, arriving, scored=phase.outer and phase.forward)
            # Waited for together with the backward chunk's gradients, before those are added up: the permute has all of
            # that chunk to hide under, and nothing else.
            moving = [name for name in ("received", "gradient") if name in carried]
            moved, weights = lax.optimization_barrier(([state[name] for name in moving], weights))
            state |= dict(zip(moving, moved))
            if phase.backward:
                state["weights"] = self._added(state["weights"], weights, now["backward"])
            return {name: state[name] for name in carried}, None

        return jax.named_scope(TICK)(tick)

    def _return(self, state: State, returned: Any) -> State:
        """Takes the gradient that left the first layer in the tick before into the outer parameters'."""
        w, microbatch = self.worker, returned["microbatch"]
        mine = returned["valid"] & (w.stage == 0)
        _, pull = jax.vjp(lambda outer: w.enter(outer, microbatch), w.outer)
        gradient = jax.tree.map(lambda g: jnp.where(mine, g, 0), state["gradient"])
        return state | {"outer": _add(state["outer"], pull(gradient)[0], returned["valid"])}

    def _forward(self, state: State, now: Any) -> tuple[State, Any]:
        """The state after a forward chunk, and the activations to send on."""
        w, chunk = self.worker, now["chunk"]
        x = where((w.stage == 0) & (chunk == 0), state["entering"], state["received"])
        weights = w.chunk_of(w.weights, chunk)
        y, (loss_sum, metrics), kept = self.residuals.forward(weights, x, chunk, now["microbatch"])
        state = state | {
            "kept": jax.tree.map(lambda a, k: put(a, k, now["slot"]), state["kept"], kept),
            "sums": add(state["sums"], now["valid"], loss=loss_sum, stages=metrics),
        }
        return state, y

    def _backward(self, state: State, now: Any, arriving: Any, *, scored: bool) -> tuple[State, Any]:
        """The state after a backward chunk, and the gradients of its weights, not yet in the state's."""
        w, back = self.worker, now["backward"]
        chunk, valid = back["chunk"], back["valid"]
        kept = jax.tree.map(lambda a: pick(a, back["slot"]), state["kept"])
        y, pull = self.residuals.backward(w.chunk_of(w.weights, chunk), kept, chunk, back["microbatch"])
        gradient = arriving
        if scored:
            state, gradient = self._score(state, y, now["scored"], arriving)
        weights, x = pull((gradient, jnp.where(valid, 1.0, 0.0)))
        return state | {"gradient": x}, weights

    def _added(self, totals: Any, weights: Any, back: Any) -> Any:
        """Accumulators [v, ...] with the gradients of one chunk."""

        def one(total, g):
            g = jnp.where(back["valid"], g, 0).astype(total.dtype)
            return put(total, pick(total, back["chunk"]) + g, back["chunk"])

        return jax.tree.map(one, totals, weights)

    def _score(self, state: State, y: Any, scored: Any, arriving: Any) -> tuple[State, Any]:
        """The loss of the microbatch that is behind the last layer; the gradient that each stage goes on with."""
        w = self.worker
        valid, microbatch = scored["valid"], scored["microbatch"]
        mine = valid & (w.stage == w.last)

        def run(outer, y):
            return w.score(outer, y, microbatch, mine)

        loss_sum, pull, (weight, metrics) = jax.vjp(run, w.outer, y, has_aux=True)
        # Where the vocabulary lies over the pipeline, the others' parts follow from the last stage's loss alone.
        outer, gradient = pull(jnp.where(mine, 1.0, 0.0))
        state = state | {
            "outer": _add(state["outer"], outer, valid if w.shared_head else mine),
            "sums": add(state["sums"], mine, loss=loss_sum, weight=weight, last=metrics),
        }
        return state, where(mine, gradient, arriving)


def _carried(phase: Phase) -> list[str]:
    """What a phase changes of the state; the rest is no part of its loop, where it would be copied."""
    names = ["sums"]
    if phase.forward:
        names += ["received", "kept", *(["entering"] if phase.outer else [])]
    if phase.backward:
        names += ["gradient", "weights", *(["outer"] if phase.outer else [])]
    return names


def _add(totals: Any, gradients: Any, valid: Any) -> Any:
    return jax.tree.map(lambda t, g: t + jnp.where(valid, g, 0).astype(t.dtype), totals, gradients)


def _ticks(tables: Tables) -> dict[str, Any]:
    """What each tick reads of the tables: `ticks`, every array with them first; `after`, what is left behind the last.

    Entering microbatches are those of the next tick, returned ones those of the tick before.
    """

    def at(pair: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        return {"valid": pair[0], "microbatch": pair[1].astype(np.int32)}

    returned = {k: np.concatenate([np.zeros(1, a.dtype), a]) for k, a in at(tables.returning).items()}
    entering = np.where(*tables.entering, 0).astype(np.int32)
    ticks = {
        "forward": vars(tables.forward),
        "backward": vars(tables.backward),
        "next": np.append(entering[1:], np.int32(0)),
        "scored": at(tables.scored),
        "returned": {k: a[:-1] for k, a in returned.items()},
    }
    return {"ticks": ticks, "after": {k: a[-1] for k, a in returned.items()}}


def _groups(phases: tuple[Phase, ...]) -> Iterator[tuple[int, int, tuple[Phase, ...]]]:
    """(start, stop, phases of one period): a pair of steady phases that repeats is one loop, not many copies."""
    i = 0
    while i < len(phases):
        pair = phases[i : i + 2]
        repeats = 1
        if [p.name for p in pair] == ["steady", "steady"]:
            while phases[i + 2 * repeats + 1 : i + 2 * repeats + 2] and _alike(
                pair, phases[i + 2 * repeats : i + 2 * repeats + 2]
            ):
                repeats += 1
            yield phases[i].start, phases[i + 2 * repeats - 1].stop, tuple(pair)
            i += 2 * repeats
        else:
            yield phases[i].start, phases[i].stop, (phases[i],)
            i += 1


def _alike(one: tuple[Phase, ...], other: tuple[Phase, ...]) -> bool:
    return [(p.name, p.ticks, p.outer) for p in one] == [(p.name, p.ticks, p.outer) for p in other]
