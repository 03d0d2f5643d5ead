"""Functions that the scripts of this folder share: a loss, and the printing of bytes and differences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean of -log p(label), in nats."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))


def report(whole: Any, cut: Any, expected: Any, got: Any) -> float:
    """Print the bytes per device and the largest difference, and return that difference.

    It is relative to the largest entry of its leaf.

    Args:
        whole: the variables on one device.
        cut: the variables over the mesh.
        expected: the result of a step with `whole`; the first leaf is the loss.
        got: the result of the same step with `cut`.
    """
    before, after = (sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree)) for tree in (whole, cut))
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got))]
    worst = max(float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)) for a, b in pairs)
    print(f"variables on a device: {before:,} bytes before, {after:,} after")
    print(f"loss {float(pairs[0][0]):.6f} before, {float(pairs[0][1]):.6f} after; largest difference {worst:.1e}")
    return worst
