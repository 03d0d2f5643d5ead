"""Sums of gradients over one slow axis, sent in 8 or 16 bits per element.

An all-reduce cannot add values that have scales, so a compressed sum takes two other collectives. Each of the R
replicas cuts its gradient into R chunks and sends chunk r, quantized, to replica r (all-to-all). Replica r sums its
chunk in fp32, quantizes the sum and sends it to all (all-gather). If n is the number of elements of its shard, a GPU
sends 2 (R-1)/R n elements of the narrow dtype. An all-reduce in fp32 sends as many elements of 4 bytes.

**Quantization.** bf16 rounds to nearest. In int8 and fp8 (e4m3), the 256 elements of a block share one fp32 scale
s = max|x| / largest code, which adds 1.6 % to the bytes. The rounding error of an element x is at most

    bf16: |x| 2^-8      int8: s / 2 = max|x| / 254      fp8: max(|x| 2^-4, s 2^-10) <= max|x| / 16

so the error of an element of the sum is at most the total of the replicas' bounds, plus the bound for the sum's block.

**Error feedback** (Seide et al. 2014, 1-bit SGD; Karimireddy et al. 2019, arXiv:1901.09847). Each replica keeps its
rounding error in a residual and adds it to the next step's gradient. The owner of a chunk adds the error of the second
quantization to its own residual. So no part of a gradient is lost, only delayed: in every step, up to fp32 rounding,

    sum_r (gradient_r + residual_r) before  =  compressed sum + sum_r residual_r after

So the mean of T compressed sums differs from the mean of the true sums by (sum_r residual_r at step 0 - sum_r
residual_r at step T) / T. It vanishes as 1/T, because residuals stay bounded by the rounding error of a step.

Small arrays (norm scales, biases) are summed in fp32: rounding them saves little and harms training the most.
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
        dtype: the jax dtype.
        largest: the largest code, to which the largest element of a block is scaled; None: no scales.
        error: largest rounding error of an element, relative to the largest element of its block.
    """

    dtype: Any
    largest: float | None
    error: float

    def quantize(
        self, x: Float[Array, "*dims n"]
    ) -> tuple[Shaped[Array, "*dims n"], Float[Array, "*dims blocks"] | None]:
        """Return fp32 values as codes and scales of blocks; n is a multiple of BLOCK.

        A block with an infinity or a NaN gets a scale that is not finite, so the sum shows it.

        Args:
            x: fp32 values. For bf16, which has no scales, n may be any number.

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
            codes: [..., n], as `quantize` returns them.
            scales: fp32 [..., n / BLOCK]; None for bf16.
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
    """Return the residuals of the first step: fp32 zeros [replicas, ...] for each array or ShapeDtypeStruct [...]."""
    return jax.tree.map(lambda g: jnp.zeros((replicas, *g.shape), jnp.float32), gradients)


def wire_elements(size: int, replicas: int) -> int:
    """Return the number of elements exchanged for a shard: each of the R chunks is padded to whole blocks.

    Args:
        size: elements of one GPU's shard.
        replicas: R.
    """
    chunk = -(-size // (replicas * BLOCK)) * BLOCK
    return replicas * chunk


@dataclass(frozen=True)
class Exchange:
    """A compressed sum over the GPUs of one axis, for use inside a `shard_map`.

    Attributes:
        axis, replicas: the slow axis and its size.
        wire: the dtype to send.
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
            residual: the residual of the step before; None: no error feedback.

        Returns:
            The sum in fp32, the same on every GPU of the axis; and the new residual, None if none was given. The
            residual of a shard that is too small to compress is returned unchanged.
        """
        shape = gradient.shape
        if 4 * math.prod(shape) < self.smallest_bytes:
            return jax.lax.psum(gradient, self.axis), residual
        given = gradient if residual is None else gradient + residual[0]
        with jax.named_scope("compressed_sum"):
            total, left = self._quantized(given.reshape(-1))
        return total.reshape(shape), None if residual is None else left.reshape(1, *shape)

    def _quantized(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (the sum over the axis, this GPU's rounding error) of a vector."""
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
    """Return the codes behind a barrier: XLA replaces `fp32(bf16(x))` by x (excess precision), hiding the error."""
    return jax.lax.optimization_barrier(codes)
