"""Sums of gradients over one slow axis, in few bits on the wire.

A compressed sum is its own reduce-scatter and all-gather, because a network can only add what it does not have to
unpack: each of the R replicas cuts its gradient into R chunks and sends chunk r, quantized, to replica r (all-to-all);
r unpacks and sums its chunk in fp32, quantizes the sum and sends it to all (all-gather). On the wire a GPU sends
2 (R-1)/R n elements of the narrow dtype, n being the elements of its shard; an all-reduce in fp32 as many of 4 bytes.

**Quantization.** bf16: rounding to nearest. int8 and fp8 (e4m3): blocks of 256 elements share one fp32 scale
s = max|x| / largest code, 1.6 % on top of the elements. Rounding errs by at most

    bf16: |x| 2^-8      int8: s / 2 = max|x| / 254      fp8: max(|x| 2^-4, s 2^-10) <= max|x| / 16

so an element of the sum errs by at most that of each replica's block, added up, plus that of the block of their sum.

**Error feedback** (Seide et al. 2014, 1-bit SGD; Karimireddy et al. 2019, arXiv:1901.09847). What rounding took away is
kept in a residual and added to the next step's gradient. The error of the second quantization is kept by the owner of
the chunk, in its own residual. Nothing is lost then, only late: for every step t, exactly up to fp32 rounding,

    sum_r (gradient_r + residual_r) before  =  compressed sum + sum_r residual_r after

so the mean of T compressed sums differs from that of the true ones by (sum_r residual_r at 0 - at T) / T, which
vanishes as 1/T because residuals stay bounded by the rounding error of a step.

Small arrays (norm scales, biases) are summed in fp32: to round them saves nothing and they bear it the least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

BLOCK = 256
"""Elements that share a scale."""
SMALLEST_BYTES = 64 * 1024
"""Shards below this many bytes of fp32 are summed in fp32."""


@dataclass(frozen=True)
class Wire:
    """A dtype on the wire.

    Attributes:
        dtype: of jax.
        largest: the largest code, to which the largest element of a block is scaled; None where nothing is scaled.
        error: largest rounding error of an element, relative to the largest element of its block.
    """

    dtype: Any
    largest: float | None
    error: float

    def quantize(
        self, x: Float[Array, "*dims n"]
    ) -> tuple[Shaped[Array, "*dims n"], Float[Array, "*dims blocks"] | None]:
        """fp32 as codes and the scales of blocks; n is a multiple of BLOCK.

        A block with a number that is not finite has a scale that is not finite: it stays visible.

        Args:
            x: fp32. For bf16, which has no scales, n may be any number.

        Returns:
            Codes in `dtype`, and fp32 scales, one for each BLOCK elements along the last dim; None for bf16.
        """
        if self.largest is None:
            return _hide(x.astype(self.dtype)), None
        blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
        scales = jnp.max(jnp.abs(blocks), axis=-1) / self.largest
        codes = blocks / jnp.where(scales == 0, 1, scales)[..., None]
        codes = jnp.clip(codes, -self.largest, self.largest)  # a quotient may round to just beyond the largest code
        if jnp.issubdtype(self.dtype, jnp.integer):
            codes = jnp.round(codes)
        return _hide(codes.astype(self.dtype)).reshape(x.shape), scales

    def dequantize(self, codes: jax.Array, scales: jax.Array | None) -> jax.Array:
        """Return the fp32 numbers that codes stand for.

        Args:
            codes: [..., n], as `quantize` gives them.
            scales: fp32 [..., n / BLOCK]; None where nothing was scaled.
        """
        if scales is None:
            return codes.astype(jnp.float32)
        blocks = codes.astype(jnp.float32).reshape(*scales.shape, BLOCK)
        return (blocks * scales[..., None]).reshape(codes.shape)


WIRES = {
    "bf16": Wire(jnp.bfloat16, None, 2.0**-8),
    "int8": Wire(jnp.int8, 127.0, 1 / 254),
    "fp8": Wire(jnp.float8_e4m3fn, 448.0, 1 / 16),
}


def zero_residuals(gradients: Any, replicas: int) -> Any:
    """Residuals before the first step: fp32 zeros [replicas, ...] for each array [...] (or its ShapeDtypeStruct)."""
    return jax.tree.map(lambda g: jnp.zeros((replicas, *g.shape), jnp.float32), gradients)


def wire_elements(size: int, replicas: int) -> int:
    """Elements of a shard of `size` as they are exchanged: padded to a block in each of the R chunks.

    Args:
        size: elements of one GPU's shard.
        replicas: R, over whose GPUs the shard is summed.
    """
    chunk = -(-size // (replicas * BLOCK)) * BLOCK
    return replicas * chunk


@dataclass(frozen=True)
class Exchange:
    """How the GPUs of one axis sum what each of them holds; for use inside a `shard_map`.

    Attributes:
        axis, replicas: the slow axis and its size.
        wire: what travels.
        smallest_bytes: shards with fewer bytes are summed in fp32.
    """

    axis: str
    replicas: int
    wire: Wire
    smallest_bytes: int = SMALLEST_BYTES

    def sum(
        self, gradient: Float[Array, "*dims"], residual: Float[Array, "1 *dims"] | None
    ) -> tuple[Float[Array, "*dims"], Float[Array, "1 *dims"] | None]:
        """Return the sum over the axis of one GPU's fp32 shard, and its new residual.

        Args:
            gradient: this GPU's part of its replica's gradient.
            residual: of the step before, None for no error feedback.

        Returns:
            The sum in fp32, the same on every GPU of the axis; and the new residual, None if none was given. A shard
            that is too small to compress gets its residual back as it was.
        """
        shape = gradient.shape
        if 4 * math.prod(shape) < self.smallest_bytes:
            return jax.lax.psum(gradient, self.axis), residual
        given = gradient if residual is None else gradient + residual[0]
        with jax.named_scope("compressed_sum"):
            total, left = self._quantized(given.reshape(-1))
        return total.reshape(shape), None if residual is None else left.reshape(1, *shape)

    def _quantized(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(sum over the axis, what rounding took away here) of a vector."""
        wire, size = self.wire, x.size
        chunks = jnp.pad(x, (0, wire_elements(size, self.replicas) - size)).reshape(self.replicas, -1)
        codes, scales = wire.quantize(chunks)
        left = chunks - wire.dequantize(codes, scales)
        mine = jnp.sum(wire.dequantize(self._to_owners(codes), self._to_owners(scales)), axis=0)
        codes, scales = wire.quantize(mine)
        left = left.at[jax.lax.axis_index(self.axis)].add(mine - wire.dequantize(codes, scales))
        total = wire.dequantize(self._to_all(codes), self._to_all(scales))
        return total.reshape(-1)[:size], left.reshape(-1)[:size]

    def _to_owners(self, x: Any) -> Any:
        return None if x is None else jax.lax.all_to_all(x, self.axis, split_axis=0, concat_axis=0)

    def _to_all(self, x: Any) -> Any:
        return None if x is None else jax.lax.all_gather(x, self.axis)


def _hide(codes: jax.Array) -> jax.Array:
    """The codes behind a barrier: XLA takes `fp32(bf16(x))` for x (excess precision), and no error would be left."""
    return jax.lax.optimization_barrier(codes)
