"""What the backward pass recomputes: policies of `jax.checkpoint` by name."""

from __future__ import annotations

from collections.abc import Callable

import jax

from models.layers import PROJECTION

_KEEPS_PROJECTIONS = ("dots", "dots_saveable", "dots_with_no_batch_dims_saveable")
_POLICIES = (*_KEEPS_PROJECTIONS, "everything_saveable", "nothing_saveable")


def check_remat(policy: str) -> str:
    """The policy itself.

    Raises:
        ValueError: `recompute` does not know it.
    """
    if policy not in ("none", "full", *_POLICIES):
        raise ValueError(f"remat policy '{policy}' is not one of none, full, {', '.join(_POLICIES)}.")
    return policy


def recompute(fn: Callable, policy: str) -> Callable:
    """fn under `jax.checkpoint`.

    Args:
        fn: a layer.
        policy: `none` (keep all), `full` (keep nothing but the input), `dots` (keep what projections give), or a name
            in jax.checkpoint_policies.
    """
    if policy == "none":
        return fn
    policies, chosen = jax.checkpoint_policies, None
    if policy == "dots":
        chosen = policies.save_only_these_names(PROJECTION)
    elif policy in _KEEPS_PROJECTIONS:
        # the matmul of a projection is inside a custom_vjp, where policies do not look: it goes by its name
        chosen = policies.save_from_both_policies(getattr(policies, policy), policies.save_only_these_names(PROJECTION))
    elif policy != "full":
        chosen = getattr(policies, policy)
    # A scan's body is compiled once for all layers, so nothing outside of it could be merged with what it recomputes.
    return jax.checkpoint(fn, policy=chosen, prevent_cse=False)
