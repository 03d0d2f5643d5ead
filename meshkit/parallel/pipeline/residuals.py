"""What a stage keeps of its forward pass until its backward pass.

| residuals | kept per chunk in flight | recomputed |
|---|---|---|
| `recompute` | its input | the whole chunk |
| `stash` | all that its derivative needs | nothing (but what the stage itself recomputes) |
| a policy of `jax.checkpoint_policies` | its input, and what the policy saves | the rest |

A derivative needs the weights as well. They are not kept: backward takes the chunk's weights as it did forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from meshkit.errors import ConfigError

# (weights, x, chunk, microbatch) -> ((activations, loss_sum), metrics)
Stage = Callable[..., tuple[tuple[Any, Any], Any]]
Residuals = str | Callable[..., Any]


def find_policy(residuals: Residuals) -> Callable[..., Any] | None:
    """The policy that `residuals` names; None for `recompute` and `stash`.

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
            f"no residuals '{residuals}' of a pipeline.",
            hint='"recompute", "stash", or a policy of jax.checkpoint_policies, as "dots_saveable"',
        )
    return policy


@dataclass(frozen=True)
class Recompute:
    """Keeps a chunk's input."""

    stage: Stage

    def forward(self, weights: Any, x: Any, chunk: Any, microbatch: Any) -> tuple[Any, Any, Any]:
        """Activations, (loss_sum, metrics), and what to keep."""
        (y, loss_sum), metrics = self.stage(weights, x, chunk, microbatch)
        return y, (loss_sum, metrics), x

    def backward(self, weights: Any, kept: Any, chunk: Any, microbatch: Any) -> tuple[Any, Callable[..., Any]]:
        """Activations, and (their gradient, that of loss_sum) -> gradients of weights and x."""

        def run(weights, x):
            return self.stage(weights, x, chunk, microbatch)[0]

        (y, _), pull = jax.vjp(run, weights, kept)
        return y, pull


@dataclass
class Stash:
    """Keeps what the derivative of a chunk needs, and its activations.

    Attributes:
        policy: of `jax.checkpoint`; None keeps all.
    """

    stage: Stage
    policy: Callable[..., Any] | None = None
    _tree: Any = field(default=None, repr=False)
    _weights: list[int | None] = field(default_factory=list, repr=False)
    _keys: list[Any] = field(default_factory=list, repr=False)

    def forward(self, weights: Any, x: Any, chunk: Any, microbatch: Any) -> tuple[Any, Any, Any]:
        """What `Recompute.forward` gives."""

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
        """What `Recompute.backward` gives."""
        y, rest = kept
        whole = iter([r if k is None else jax.random.wrap_key_data(r, impl=k) for r, k in zip(rest, self._keys)])
        given = jax.tree.leaves(weights)
        leaves = [next(whole) if i is None else given[i] for i in self._weights]
        return y, jax.tree.unflatten(self._tree, leaves)


def make_residuals(residuals: Residuals, stage: Stage) -> Recompute | Stash:
    """The keeper that `residuals` asks for.

    Raises:
        ConfigError: no such residuals.
    """
    policy = find_policy(residuals)
    return Recompute(stage) if residuals == "recompute" else Stash(stage, policy)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
