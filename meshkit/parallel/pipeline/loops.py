"""The loops over a schedule's ticks, and what a stage keeps from its forward pass to its backward pass.

Evaluation is a loop of forward ticks. Training (`Lockstep`) runs forward and backward of different microbatches (1F1B)
in one tick, so that its memory does not grow with the number of microbatches. A tick runs in this order:

    tick    gradient of the embedding                            of the gradient that left the first layer before
            receive gradients from the next stage                permute, hidden under the forward chunk
            forward chunk, then send its output                  permute, hidden under the backward chunk
            embedding of the microbatch of the next tick
            backward chunk                                       the last chunk runs head and loss first

Every device runs the same operations in the same tick, so collectives over any axis are legal anywhere. jax does not
differentiate through the loop, which itself carries the gradients that it accumulates.

| residuals | kept per chunk in flight | recomputed |
|---|---|---|
| `recompute` | its input | the whole chunk |
| `stash` | its output, and all that its derivative needs | nothing (but what the stage itself recomputes) |
| a policy of `jax.checkpoint_policies` | its output, its input, and what the policy saves | the rest |

A derivative needs the weights as well. They are not kept: backward reads the chunk's weights again, as forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.errors import ConfigError
from meshkit.parallel.pipeline.schedules import TICK, Phase, Tables
from meshkit.parallel.pipeline.worker import Sums, Worker, add, pick, put, where

# (weights, x, chunk, microbatch) -> ((activations, loss_sum), metrics)
Stage = Callable[..., tuple[tuple[Any, Any], Any]]
Residuals = str | Callable[..., Any]
State = dict[str, Any]


def find_policy(residuals: Residuals) -> Callable[..., Any] | None:
    """Return the policy that `residuals` names; None for `recompute` and `stash`.

    Raises:
        ConfigError: no such policy.
    """
    if callable(residuals):
        return residuals
    if residuals in ("recompute", "stash"):
        return None
    policy = getattr(jax.checkpoint_policies, residuals, None)
    if policy is None or residuals.startswith(("_", "save_")):
        raise ConfigError(
            f"there are no residuals '{residuals}' of a pipeline.",
            hint='"recompute", "stash", or a policy of jax.checkpoint_policies, as "dots_saveable"',
        )
    return policy


@dataclass(frozen=True)
class Recompute:
    """Keeps a chunk's input."""

    stage: Stage

    def forward(self, weights: Any, x: Any, chunk: Any, microbatch: Any) -> tuple[Any, Any, Any]:
        """Return activations, (loss_sum, metrics), and what to keep.

        Args:
            weights: the chunk's arrays [chunk_layers, ...].
        """
        (y, loss_sum), metrics = self.stage(weights, x, chunk, microbatch)
        return y, (loss_sum, metrics), x

    def backward(self, weights: Any, kept: Any, chunk: Any, microbatch: Any) -> tuple[Any, Callable[..., Any]]:
        """Return activations, and the function from gradients of activations and loss_sum to those of weights and x."""

        def run(weights, x):
            return self.stage(weights, x, chunk, microbatch)[0]

        (y, _), pull = jax.vjp(run, weights, kept)
        return y, pull


@dataclass
class Stash:
    """Keeps a chunk's output and all that its derivative needs.

    With a policy of `jax.checkpoint`, it keeps the output, the input, and what the policy saves.
    """

    stage: Stage
    policy: Callable[..., Any] | None = None
    _tree: Any = field(default=None, repr=False)
    _weights: list[int | None] = field(default_factory=list, repr=False)
    _keys: list[Any] = field(default_factory=list, repr=False)

    def forward(self, weights: Any, x: Any, chunk: Any, microbatch: Any) -> tuple[Any, Any, Any]:
        """Return what `Recompute.forward` does."""

        def run(weights, x):
            return self.stage(weights, x, chunk, microbatch)

        wrapped = run if self.policy is None else jax.checkpoint(run, policy=self.policy)
        (y, loss_sum), pull, metrics = jax.vjp(wrapped, weights, x, has_aux=True)
        leaves, self._tree = jax.tree.flatten(pull)
        given = jax.tree.leaves(weights)
        self._weights = [next((i for i, w in enumerate(given) if w is leaf), None) for leaf in leaves]
        rest = [leaf for leaf, i in zip(leaves, self._weights) if i is None]
        self._keys = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in rest]
        return y, (loss_sum, metrics), (y, [jax.random.key_data(r) if _is_key(r) else r for r in rest])

    def backward(self, weights: Any, kept: Any, chunk: Any, microbatch: Any) -> tuple[Any, Callable[..., Any]]:
        """Return what `Recompute.backward` does."""
        y, rest = kept
        whole = iter([r if k is None else jax.random.wrap_key_data(r, impl=k) for r, k in zip(rest, self._keys)])
        given = jax.tree.leaves(weights)
        leaves = [next(whole) if i is None else given[i] for i in self._weights]
        return y, jax.tree.unflatten(self._tree, leaves)


def make_residuals(residuals: Residuals, stage: Stage) -> Recompute | Stash:
    """Return the Recompute or Stash that `residuals` names.

    Raises:
        ConfigError: no such residuals.
    """
    policy = find_policy(residuals)
    return Recompute(stage) if residuals == "recompute" else Stash(stage, policy)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def loop_sums(worker: Worker, tables: Tables) -> Sums:
    """Run only a schedule's forward work, and return this device's part of the sums of loss, weight and metrics."""
    w, last, chunks = worker, worker.last, worker.stack.virtual_stages

    def tick(state: Any, now: Any, scored: bool) -> tuple[Any, None]:
        received, sums = state
        scoring, entering = now["scored"], w.enter(w.outer, now["entering"])
        now = {k: a[w.stage] for k, a in now["forward"].items()}
        x = where((w.stage == 0) & (now["chunk"] == 0), entering, received)
        (y, loss_sum), metrics = w.run_stage(w.chunk_of(w.weights, now["chunk"]), x, now["chunk"], now["microbatch"])
        sums = add(sums, now["valid"], loss=loss_sum, stages=metrics)
        if scored:
            mine = scoring["valid"] & (w.stage == last)
            loss_sum, (weight, metrics) = w.score(w.outer, y, scoring["microbatch"], mine)
            sums = add(sums, mine, loss=loss_sum, weight=weight, last=metrics)
        return (lax.optimization_barrier(w.pass_on(y, 1)), sums), None

    def scan(state: Any, inputs: Any, scored: bool) -> Any:
        body = jax.named_scope(TICK)(lambda state, now: tick(state, now, scored))
        return lax.scan(body, state, inputs)[0]

    x = jax.tree.map(jnp.zeros_like, w.enter(w.outer, 0))
    state = (x, w.empty_sums(x))
    ticks = sum(p.ticks for p in tables.phases if p.forward)
    inputs = jax.tree.map(lambda a: jnp.asarray(a[:ticks]), _forward_ticks(tables))
    # With S stages of v chunks, a microbatch leaves the last layer in S of every v x S ticks, which alone run the head.
    state = scan(state, jax.tree.map(lambda a: a[:last], inputs), False) if last else state
    if chunks == 1:
        return scan(state, jax.tree.map(lambda a: a[last:], inputs), True)[1]
    period, silent = (last + 1) * chunks, (last + 1) * (chunks - 1)
    groups = jax.tree.map(lambda a: a[last:].reshape(-1, period, *a.shape[1:]), inputs)

    def group(state: Any, inputs: Any) -> tuple[Any, None]:
        state = scan(state, jax.tree.map(lambda a: a[:silent], inputs), False)
        return scan(state, jax.tree.map(lambda a: a[silent:], inputs), True), None

    return lax.scan(group, state, groups)[0][1]


def _forward_ticks(tables: Tables) -> dict[str, Any]:
    """Return the tables that forward ticks read: forward work, inputs of the first layer, outputs to score."""
    forward = tables.forward
    found = forward.valid[:, -1] & (forward.chunk[:, -1] == tables.virtual_stages - 1)
    scored = {"valid": found, "microbatch": np.where(found, forward.microbatch[:, -1], 0).astype(np.int32)}
    entering = np.where(*tables.entering, 0).astype(np.int32)
    return {"forward": vars(forward), "entering": entering, "scored": scored}


class Lockstep:
    """The ticks of a training step on one device."""

    def __init__(self, worker: Worker, tables: Tables, residuals: Residuals):
        self.worker, self.tables = worker, tables
        self.residuals = make_residuals(residuals, worker.run_stage)
        self.inputs = _ticks(tables)

    def gradients(self, zeros: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Sums, Any, Any]:
        """Return this device's part of the sums, of the gradients of its stage [chunks, ...], and of those of `outer`.

        `outer` has the parameters outside the stages' layers, such as those of the embedding and the head.
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
        zero = jax.ShapeDtypeStruct((), jnp.int32)  # indices are traced, as in a tick
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
        """Run the ticks start <= t < stop, which repeat these phases in order."""
        period = sum(p.ticks for p in phases)
        inputs = jax.tree.map(lambda a: jnp.asarray(a[start:stop]), self.inputs["ticks"])

        def run_phases(state, inputs):
            begin = 0
            for phase in phases:
                part = jax.tree.map(lambda a: a[begin : begin + phase.ticks], inputs)  # noqa: B023 run at once
                carried = {name: state[name] for name in _carried(phase)}
                fixed = {name: value for name, value in state.items() if name not in carried}
                state = fixed | lax.scan(self._tick(phase, fixed), carried, part)[0]
                begin += phase.ticks
            return state, None

        if stop - start == period:
            return run_phases(state, inputs)[0]
        groups = (stop - start) // period
        return lax.scan(run_phases, state, jax.tree.map(lambda a: a.reshape(groups, period, *a.shape[1:]), inputs))[0]

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
                # This barrier makes backward wait for forward and for the arriving gradient. Without it, the
                # compiler may estimate that the work between forward and backward hides the gradient's permute. It then
                # delays the permute until forward has ended.
                now["backward"], sent, arriving = lax.optimization_barrier((now["backward"], sent, arriving))
                state["received"] = self.worker.pass_on(sent, 1)
                if phase.outer:
                    state["entering"] = self.worker.enter(self.worker.outer, now["next"])
            weights = ()
            if phase.backward:
                state, weights = self._backward(state, now, arriving, scored=phase.outer and phase.forward)
            # One barrier waits for the permutes and for the chunk's weight gradients, which are added up after it. So
            # the permutes overlap with all of the backward chunk, and with nothing later.
            moving = [name for name in ("received", "gradient") if name in carried]
            moved, weights = lax.optimization_barrier(([state[name] for name in moving], weights))
            state |= dict(zip(moving, moved))
            if phase.backward:
                state["weights"] = self._added(state["weights"], weights, now["backward"])
            return {name: state[name] for name in carried}, None

        return jax.named_scope(TICK)(tick)

    def _return(self, state: State, returned: Any) -> State:
        """Add the embedding's gradients, from the gradient that left the first layer in the tick before."""
        w, microbatch = self.worker, returned["microbatch"]
        mine = returned["valid"] & (w.stage == 0)
        _, pull = jax.vjp(lambda outer: w.enter(outer, microbatch), w.outer)
        gradient = jax.tree.map(lambda g: jnp.where(mine, g, 0), state["gradient"])
        return state | {"outer": _add(state["outer"], pull(gradient)[0], returned["valid"])}

    def _forward(self, state: State, now: Any) -> tuple[State, Any]:
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
        def add_leaf(total, g):
            g = jnp.where(back["valid"], g, 0).astype(total.dtype)
            return put(total, pick(total, back["chunk"]) + g, back["chunk"])

        return jax.tree.map(add_leaf, totals, weights)

    def _score(self, state: State, y: Any, scored: Any, arriving: Any) -> tuple[State, Any]:
        """Run head and loss on the microbatch that left the last layer.

        Returns:
            The state, and the gradient of this stage's output. If this is the last stage and a microbatch left the last
            layer, the gradient comes from the loss. Otherwise it is `arriving`.
        """
        w = self.worker
        valid, microbatch = scored["valid"], scored["microbatch"]
        mine = valid & (w.stage == w.last)

        def run(outer, y):
            return w.score(outer, y, microbatch, mine)

        loss_sum, pull, (weight, metrics) = jax.vjp(run, w.outer, y, has_aux=True)
        # Stages may each hold a part of the head; the gradient of the last stage's loss reaches all of these parts.
        outer, gradient = pull(jnp.where(mine, 1.0, 0.0))
        state = state | {
            "outer": _add(state["outer"], outer, valid if w.shared_head else mine),
            "sums": add(state["sums"], mine, loss=loss_sum, weight=weight, last=metrics),
        }
        return state, where(mine, gradient, arriving)


def _carried(phase: Phase) -> list[str]:
    """Name the parts of the state that a phase changes. The others stay out of its loop, which would copy them."""
    names = ["sums"]
    if phase.forward:
        names += ["received", "kept", *(["entering"] if phase.outer else [])]
    if phase.backward:
        names += ["gradient", "weights", *(["outer"] if phase.outer else [])]
    return names


def _add(totals: Any, gradients: Any, valid: Any) -> Any:
    return jax.tree.map(lambda t, g: t + jnp.where(valid, g, 0).astype(t.dtype), totals, gradients)


def _ticks(tables: Tables) -> dict[str, Any]:
    """Return two entries: `ticks` has a row for each tick, and `after` has a microbatch.

    `after` is the microbatch whose gradient leaves the first layer in the last tick. In a row, `next` is the microbatch
    that enters the first layer one tick later. `returned` is the microbatch whose gradient left the first layer one
    tick earlier.
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
    """Yield (start, stop, phases of one period), so that repeated pairs of steady phases become one loop."""
    i = 0
    while i < len(phases):
        pair = phases[i : i + 2]
        repeats = 1
        if [p.name for p in pair] == ["steady", "steady"]:
            alike = [(p.name, p.ticks, p.outer) for p in pair]
            while alike == [(p.name, p.ticks, p.outer) for p in phases[i + 2 * repeats : i + 2 * repeats + 2]]:
                repeats += 1
            yield phases[i].start, phases[i + 2 * repeats - 1].stop, tuple(pair)
            i += 2 * repeats
        else:
            yield phases[i].start, phases[i].stop, (phases[i],)
            i += 1
