"""What the backward pass of a layer recomputes, what it keeps on the GPU, and what it fetches back from host memory.

A model marks values by `checkpoint_name`; here the names become policies of `jax.checkpoint`:

| `train.remat`           | kept on the GPU                 | kept in host memory | recomputed                  |
|-------------------------|---------------------------------|---------------------|-----------------------------|
| `"none"`                | all                             |                     |                             |
| `"dots"`                | the outputs of all projections  |                     | norms, attention, gates     |
| `["gate", "up"]`        | the outputs of these            |                     | all else                    |
| `["attention"]`         | of ring or Ulysses attention    |                     | all else                    |
| `"full"`                | the input of the layer          |                     | the layer                   |
| `"offload_dots"`        |                                 | what `dots` keeps   | norms, attention, gates     |
| `"offload"`             |                                 | the layer's input   | the layer                   |

Any other word is the name of a policy in `jax.checkpoint_policies` that takes no arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from meshkit.parallel.ring import ATTENTION
from models.layers import PROJECTION

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")  # of a transformer layer, each by its own name
LAYER_INPUT = "layer_input"
_KEEPS_PROJECTIONS = ("dots_saveable", "dots_with_no_batch_dims_saveable")
_OFFLOADED = {"offload": LAYER_INPUT, "offload_dots": PROJECTION}
_POLICIES = ("none", "full", "dots", *_OFFLOADED, *_KEEPS_PROJECTIONS, "everything_saveable", "nothing_saveable")

Policy = str | tuple[str, ...]


def check_remat(policy: str | Sequence[str], context: str = "") -> Policy:
    """The policy itself; a list of names as a tuple.

    Args:
        policy: as the user gave it.
        context: the model's context parallelism; `attention` is a name in that of `ring` and `ulysses`.

    Raises:
        ValueError: `recompute` does not know it, or it is a list that is empty, or holds an unknown name or one twice.
    """
    known = (*PROJECTIONS, ATTENTION) if context in ("ring", "ulysses") else PROJECTIONS
    if isinstance(policy, str):
        if policy in known:
            raise ValueError(f"remat = '{policy}' is what a list may name, not a policy: to keep it, ['{policy}'].")
        if policy not in _POLICIES:
            raise ValueError(f"remat policy '{policy}' is not one of {', '.join(_POLICIES)}, or a list of names.")
        return policy
    names = tuple(policy)
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(f"remat = {list(names)} must name what to keep, each once: of {', '.join(known)}.")
    return names


def recompute(fn: Callable, policy: Policy) -> Callable:
    """fn under `jax.checkpoint`.

    Args:
        fn: a layer: (its input, parameters...) -> anything.
        policy: of the table above, as `check_remat` returns it.
    """
    if policy == "none":
        return fn
    layer = _with_named_input(fn) if policy == "offload" else fn
    # A scan's body is compiled once for all layers, so nothing outside of it could be merged with what it recomputes.
    return jax.checkpoint(layer, policy=_policy(policy), prevent_cse=False)


def _policy(policy: Policy) -> Callable | None:
    """The callable that jax.checkpoint wants; None recomputes everything."""
    policies = jax.checkpoint_policies
    if policy == "full":
        return None
    if not isinstance(policy, str):
        return policies.save_only_these_names(*policy)
    if policy in _OFFLOADED:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_OFFLOADED[policy]],
            offload_src="device",
            offload_dst="pinned_host",
        )
    if policy == "dots":
        return policies.save_only_these_names(PROJECTION)
    if policy in _KEEPS_PROJECTIONS:
        # the matmul of a projection is inside a custom_vjp, where policies do not look: it goes by its name
        return policies.save_from_both_policies(getattr(policies, policy), policies.save_only_these_names(PROJECTION))
    return getattr(policies, policy)


def _with_named_input(fn: Callable) -> Callable:
    """fn that marks its first argument, so that a policy can say where it stays until the backward pass."""

    def named(x, *rest):
        return fn(jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_INPUT), x), *rest)

    return named
