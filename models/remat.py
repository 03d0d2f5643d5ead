"""Choose which values the backward pass of a layer recomputes, keeps on the GPU, or fetches back from host memory.

A model marks values by `checkpoint_name`. This module turns the names into policies of `jax.checkpoint`:

| `train.remat`                                | kept on the GPU                | kept in host memory | recomputed     |
|----------------------------------------------|--------------------------------|---------------------|----------------|
| `"none"`                                     | all                            |                     |                |
| `["projection"]`                             | the outputs of all projections |                     | all else       |
| `"dots"`                                     | projections, fused attention   |                     | all else       |
| `["gate", "up"]`                             | the outputs of `gate` and `up` |                     | all else       |
| `["attention"]`                              | results of fused attention     |                     | all else       |
| `{ keep = ["key"], offload = ["gate"] }`     | `key`                          | `gate`              | all else       |
| `"full"`                                     | the input of the layer         |                     | the layer      |
| `"offload_dots"`                             |                                | projection outputs  | all else       |
| `"offload"`                                  |                                | the layer's input   | the layer      |

The results of fused attention (cuDNN's, ring or Ulysses) are its output and log-sum-exp, with which it does not run
again. The input of a layer is kept on the GPU unless the table says otherwise; `{ offload = ["layer_input"] }` moves it
to host memory. Any other string names a policy in `jax.checkpoint_policies` without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from meshkit.parallel.blocks import ATTENTION
from models.layers import PROJECTION
from models.offload import scan_offloaded
from models.options import nearest

PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")  # names of a transformer layer's projections
PROJECTIONS += ("query_down", "query_up", "kv_down", "kv_up")  # and of latent attention's
LAYER_INPUT = "layer_input"
_KEEPS_PROJECTIONS = ("dots_saveable", "dots_with_no_batch_dims_saveable")
_FUSED_FORWARD = "dot_product_attention_fwd"  # of jax._src.cudnn.fused_attention_stablehlo
_OFFLOADED = {"offload": LAYER_INPUT, "offload_dots": PROJECTION}
_POLICIES = ("none", "full", "dots", *_OFFLOADED, *_KEEPS_PROJECTIONS, "everything_saveable", "nothing_saveable")


@dataclass(frozen=True)
class Mix:
    """A policy that keeps some values on the GPU and some in host memory.

    Attributes:
        keep, offload: names of values; no name is in both.
    """

    keep: tuple[str, ...]
    offload: tuple[str, ...]


Policy = str | tuple[str, ...] | Mix


def check_remat(policy: str | Sequence[str] | Mapping[str, Sequence[str]], context: str = "") -> Policy:
    """Return the policy; a list of names becomes a tuple, a table of two lists becomes a `Mix`.

    Args:
        policy: the user's policy.
        context: the model's kind of context parallelism; a model without one has no name `attention`.

    Raises:
        ValueError: `recompute` does not know the policy; a list is empty, has an unknown name, or has a name twice; a
            table has other keys than `keep` and `offload`, offloads nothing, or names something in both.
    """
    known = (*PROJECTIONS, PROJECTION, ATTENTION) if context else (*PROJECTIONS, PROJECTION)
    if isinstance(policy, Mapping):
        return _check_mix(policy, known)
    if isinstance(policy, str):
        if policy in known:
            raise ValueError(f"remat = '{policy}' is a name for a list, not a policy: to keep it, write ['{policy}'].")
        if policy not in _POLICIES:
            all_known = f"is not one of {', '.join(_POLICIES)}, or a list of names."
            raise ValueError(f"remat policy '{policy}' {all_known}{nearest(policy, _POLICIES)}")
        return policy
    names = tuple(policy)
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(f"remat = {list(names)} must name what to keep, each once: of {', '.join(known)}.")
    return names


def _check_mix(policy: Mapping[str, Sequence[str]], known: Sequence[str]) -> Mix:
    if not set(policy) <= {"keep", "offload"}:
        raise ValueError(f"remat = {dict(policy)} may have the keys keep and offload, and no other.")
    keep, offload = (tuple(policy.get(key, ())) for key in ("keep", "offload"))
    if not offload:
        raise ValueError(f"remat offloads nothing: to keep without offloading, give a list, remat = {list(keep)}.")
    for key, names, may in (("keep", keep, known), ("offload", offload, (*known, LAYER_INPUT))):
        if len(set(names)) < len(names) or not set(names) <= set(may):
            raise ValueError(f"remat.{key} = {list(names)} must name what to {key}, each once: of {', '.join(may)}.")
    if both := [name for name in keep if name in offload]:
        raise ValueError(f"remat has {', '.join(both)} in keep and in offload: it lies in one memory only.")
    return Mix(keep, offload)


def recompute(fn: Callable, policy: Policy, scanned: bool = True) -> Callable:
    """Return fn under `jax.checkpoint`.

    Args:
        fn: a layer: (its input, parameters...) -> anything.
        policy: a policy of the module's table, as `check_remat` returns it.
        scanned: the layers are a loop of the program.
    """
    if policy == "none":
        return fn
    offloads_input = policy == "offload" or (isinstance(policy, Mix) and LAYER_INPUT in policy.offload)
    layer = _with_named_input(fn) if offloads_input else fn
    # The backward pass of a scan is a loop of its own: XLA cannot merge its recomputation with the forward loop.
    return jax.checkpoint(layer, policy=_policy(policy), prevent_cse=not scanned)


def run_layers(layer: Callable, x: Any, stacked: Any, policy: Policy, scanned: bool = True) -> tuple[Any, Any]:
    """Run `jax.lax.scan(layer, x, stacked)` under the policy; offloaded values move while other layers compute.

    Args:
        layer: (x, parameters of one layer) -> (x, values).
        x: input of the first layer.
        stacked: parameters of all layers; the first dim is over layers.
        policy: as `check_remat` returns it.
        scanned: the layers are a loop of the program; otherwise each layer has its own instructions.

    Raises:
        ValueError: the policy offloads, and the layers are no loop.
    """
    if not isinstance(policy, Mix) and policy not in _OFFLOADED:
        return jax.lax.scan(recompute(layer, policy, scanned), x, stacked, unroll=not scanned)
    if not scanned:
        raise ValueError(f"remat = {policy!r} offloads, which needs scan_layers = true.")
    if isinstance(policy, Mix):
        keep, offload = policy.keep, policy.offload
    else:
        keep, offload = (), (_OFFLOADED[policy],)
    named = _with_named_input(layer) if LAYER_INPUT in offload else layer
    kept = jax.checkpoint(
        named, policy=jax.checkpoint_policies.save_only_these_names(*keep, *offload), prevent_cse=False
    )
    return scan_offloaded(recompute(layer, policy), kept, x, stacked)


def _policy(policy: Policy) -> Callable | None:
    """Return the policy as the callable that jax.checkpoint takes; None recomputes everything."""
    policies = jax.checkpoint_policies
    if policy == "full":
        return None
    if isinstance(policy, Mix):
        return _offload(policy.keep, policy.offload)
    if not isinstance(policy, str):
        return _keeping_fused(policy, policies.save_only_these_names(*policy))
    if policy in _OFFLOADED:
        return _offload((), (_OFFLOADED[policy],))
    if policy == "dots":
        return _keeping_fused((ATTENTION,), policies.save_only_these_names(PROJECTION, ATTENTION))
    if policy in _KEEPS_PROJECTIONS:
        # policies do not look inside a custom_vjp, where the matmul of a projection is: its name selects the output
        return policies.save_from_both_policies(getattr(policies, policy), policies.save_only_these_names(PROJECTION))
    return getattr(policies, policy)


def _offload(keep: Sequence[str], offload: Sequence[str]) -> Callable:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(keep),
        names_which_can_be_offloaded=list(offload),
        offload_src="device",
        offload_dst="pinned_host",
    )
    return _keeping_fused(keep, policy)


def _keeping_fused(keep: Sequence[str], policy: Callable) -> Callable:
    """Return the policy; if it keeps `attention`, also keep results of cuDNN's kernel, which jax does not name."""
    if ATTENTION not in keep:
        return policy
    return lambda primitive, *avals, **params: (
        primitive.name.startswith(_FUSED_FORWARD) or policy(primitive, *avals, **params)
    )


def _with_named_input(fn: Callable) -> Callable:
    """Return fn with its first argument named, so that a policy can say where it stays until the backward pass."""

    def named(x, *rest):
        return fn(jax.tree.map(lambda leaf: checkpoint_name(leaf, LAYER_INPUT), x), *rest)

    return named
