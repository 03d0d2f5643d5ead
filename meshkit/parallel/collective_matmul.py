"""Matmuls that overlap with the collectives of sequence parallelism, piece by piece.

Between transformer blocks, sequence parallelism cuts activations along `length`, over the axis that cuts the kernels
inside the blocks. So a column-parallel matmul waits for an all-gather of its input, and a reduce-scatter follows a
row-parallel matmul. Here each GPU's chunk of the length is split into PIECES, and one piece is sent while another is
multiplied (Wang et al., ASPLOS 2023). Collectives replace the paper's permutes: behind an NVSwitch they move bytes at
3 to 5 times the rate of NCCL's send and receive, see predict/nccl.toml. Over an axis of n GPUs:

    gather_matmul    x [batch, length/n, embed] -> x kernel [batch, length, columns/n], for several kernels at once
    matmul_scatter   x [batch, length, rows/n]  -> sum over the axis of x kernel [batch, length/n, embed]

Each is the other's backward pass. The pieces move as many bytes together as one collective would. Only these
collectives and their matmuls run in a `jax.shard_map`; the partitioner places the gradients of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from meshkit.errors import ConfigError
from meshkit.sharding import current_scope
from meshkit.sharding.constrain import mesh_here, shard_map_here

PIECES = 4  # per chunk; the first piece's transfer is exposed, and more pieces would make the matmuls too small
_BATCH, _LENGTH = 0, 1  # dims of every activation here


@dataclass(frozen=True)
class Cut:
    """The mesh axis that cuts the length between blocks and the kernels inside, and the axes that cut the batch."""

    mesh: Any
    axis: str
    batch: tuple[str, ...]

    @property
    def size(self) -> int:
        """Number of chunks."""
        return self.mesh.shape[self.axis]

    def activation(self, dim: int | None) -> PartitionSpec:
        """Return the spec of [batch, length, ...]: the batch is cut, and `dim`, unless None, is cut over the axis."""
        return PartitionSpec(self.batch or None, *([] if dim is None else [*[None] * (dim - 1), self.axis]))

    def kernel(self, dim: int) -> PartitionSpec:
        """Return the spec of a kernel that only the axis cuts, along `dim`: FSDP's shards are gathered first."""
        return PartitionSpec(*[None] * dim, self.axis)

    def pin(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Constrain x to this spec."""
        return lax.with_sharding_constraint(x, NamedSharding(mesh_here(self.mesh), spec))

    def local(self, fn: Callable, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec]) -> Callable:
        """Return fn as it runs on each GPU's shards.

        The shard_map is manual over every axis. Were it manual over one axis only, the partitioner would gather the
        batch before each collective.

        Args:
            fn: takes and returns one GPU's shards, and may communicate over the mesh's axes by name.
            in_specs, out_specs: a spec for each argument of fn, and for each array of the tuple that fn returns.
        """
        return shard_map_here(fn, self.mesh, tuple(in_specs), tuple(out_specs))


def matmul_cut(length: int, *kernel_dims: tuple[str, int]) -> Cut | None:
    """Return the cut of a sequence-parallel matmul under the scope's rules; None without sequence parallelism.

    Args:
        length: length of the activation.
        kernel_dims: for each kernel, the logical axis and size of the dim that tensor parallelism cuts.

    Raises:
        ConfigError: the rules cut `act_residual_length`, but not as these matmuls need it.
    """
    scope = current_scope()
    if scope is None:
        return None
    batch, whole, residual = (
        scope.rules.spec_for((name,), kind="activations")[0]
        for name in ("act_batch", "act_length", "act_residual_length")
    )
    if residual == whole or math.prod(scope.mesh.shape[a] for a in residual) == 1:
        return None
    if whole or len(residual) != 1:
        raise ConfigError(
            f"collective_matmul needs act_residual_length cut over one axis and act_length over none, not over "
            f"{list(residual)} and {list(whole)}.",
            hint="collective_matmul = false beside context parallelism",
        )
    cut = Cut(scope.mesh, residual[0], batch)
    for name, size in (("act_residual_length", length), *kernel_dims):
        kind = "activations" if name.startswith("act_") else "parameters"
        (axes,) = scope.rules.spec_for((name,), kind=kind)
        hint = f'rules.logical.{name} = "{cut.axis}", or collective_matmul = false'
        if axes != residual:
            raise ConfigError(
                f"collective_matmul needs {name} cut over '{cut.axis}', not over {list(axes)}.", hint=hint
            )
        if size % cut.size:
            raise ConfigError(f"collective_matmul cannot cut {name} = {size} {cut.size} ways.", hint=hint)
    return cut


def gather_matmul(
    cut: Cut, x: Float[Array, "batch length embed"], kernels: Sequence[Float[Array, "embed ..."]]
) -> tuple[jax.Array, ...]:
    """Return the product of x, gathered along length, and each kernel.

    Args:
        cut: its axis cuts x along length, and each kernel along its first output dim.
        x: the input of all products.
        kernels: matmuls run in x's dtype; the gradient of a kernel has the kernel's dtype.

    Returns:
        [batch, length, ...] for each kernel, in x's dtype: the length is whole, the dim after it is cut over the axis.
    """
    casts = tuple(lax.stop_gradient(cut.pin(k.astype(x.dtype), cut.kernel(1))) for k in kernels)
    return _gather_matmul(cut, cut.pin(x, cut.activation(_LENGTH)), tuple(kernels), casts)


def matmul_scatter(
    cut: Cut, x: Float[Array, "batch length *rows"], kernel: Float[Array, "*rows embed"], contracted: int
) -> Float[Array, "batch length embed"]:
    """Return x times kernel, summed over the axis; each GPU keeps its chunk of the length.

    Args:
        cut: its axis cuts x along dim 2, and the kernel along dim 0.
        x, kernel: their product is contracted over rows.
        contracted: number of dims of rows.

    Returns:
        The sum in x's dtype, its length cut over the axis.
    """
    cast = lax.stop_gradient(cut.pin(kernel.astype(x.dtype), cut.kernel(0)))
    return _matmul_scatter(cut, contracted, cut.pin(x, cut.activation(2)), kernel, cast)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_matmul(cut, x, kernels, casts):
    return _gather_matmul_forward(cut, x, kernels, casts)[0]


def _gather_matmul_forward(cut, x, kernels, casts):
    *outputs, whole = _gathered(cut, x, casts, 1)
    return tuple(outputs), (whole, casts, [jnp.zeros((), k.dtype) for k in kernels])


def _gather_matmul_backward(cut, residuals, gradients):
    x, casts, likes = residuals
    gradients = [g.astype(x.dtype) for g in gradients]
    dx = _scattered(cut, gradients, [_transpose(k, 1) for k in casts], [k.ndim - 1 for k in casts])
    dkernels = [_dot(x, g, (0, 1), (0, 1), like.dtype) for g, like in zip(gradients, likes)]
    return dx, tuple(dkernels), None


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul_scatter(cut, contracted, x, kernel, cast):
    del kernel  # an argument only so that it gets a gradient
    return _scattered(cut, [x], [cast], [contracted])


def _matmul_scatter_forward(cut, contracted, x, kernel, cast):
    return _scattered(cut, [x], [cast], [contracted]), (x, cast, jnp.zeros((), kernel.dtype))


def _matmul_scatter_backward(cut, contracted, residuals, g):
    x, cast, like = residuals
    g = cut.pin(g.astype(x.dtype), cut.activation(_LENGTH))
    dx, whole = _gathered(cut, g, [_transpose(cast, contracted)], cast.ndim - contracted)
    return dx, _dot(x, whole, (0, 1), (0, 1), like.dtype), None


_matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def _gathered(cut: Cut, x: jax.Array, kernels: Sequence[jax.Array], contracted: int) -> tuple[jax.Array, ...]:
    """Return the product of the gathered x and each kernel, and then the gathered x itself."""

    def local(x, *kernels):
        gathered, products = [], []
        for number, piece in enumerate(_split(x, _LENGTH)):
            # A piece is sent once the piece before it has arrived and the one before that is multiplied.
            piece = _after(piece, *gathered[-1:], *(products[-2] if number > 1 else ()))
            gathered.append(lax.all_gather(piece, cut.axis, axis=_LENGTH))
            dims = _last(gathered[-1], contracted)
            products.append([_dot(gathered[-1], k, dims, range(contracted), x.dtype) for k in kernels])
        return tuple(_join_chunks(pieces) for pieces in (*zip(*products), gathered))

    ins = (cut.activation(_LENGTH), *[cut.kernel(contracted)] * len(kernels))
    return cut.local(local, ins, (*[cut.activation(2)] * len(kernels), cut.activation(None)))(x, *kernels)


def _scattered(cut: Cut, xs: Sequence[jax.Array], kernels: Sequence[jax.Array], contracted: Sequence[int]):
    """Return the products of each x and its kernel, summed over these pairs and over the axis, cut along length."""

    def local(*arrays):
        pieces_of = [_split_chunks(x, cut.size) for x in arrays[: len(xs)]]
        reduced: list[jax.Array] = []
        for pieces in zip(*pieces_of):
            pairs = zip(pieces, arrays[len(xs) :], contracted)
            sums = [_dot(x, kernel, _last(x, dims), range(dims), x.dtype) for x, kernel, dims in pairs]
            part = _after(sum(sums[1:], sums[0]), *reduced[-1:])
            reduced.append(lax.psum_scatter(part, cut.axis, scatter_dimension=_LENGTH))
        return (jnp.concatenate(reduced, axis=_LENGTH),)

    ins = (*[cut.activation(2)] * len(xs), *[cut.kernel(0)] * len(kernels))
    return cut.local(local, ins, (cut.activation(_LENGTH),))(*xs, *kernels)[0]


def _after(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return x, but only after the others: otherwise XLA merges the pieces' collectives, or delays all matmuls."""
    return lax.optimization_barrier((x, *others))[0]


def _split(x: jax.Array, dim: int) -> list[jax.Array]:
    """Split x along a dim into PIECES, or into the largest divisor of PIECES that divides the dim."""
    return jnp.split(x, math.gcd(PIECES, x.shape[dim]), axis=dim)


def _split_chunks(x: jax.Array, ways: int) -> list[jax.Array]:
    """Return [batch, length, ...] as pieces [batch, ways, rows, ...], each with some rows of every GPU's chunk."""
    x = x.reshape(x.shape[_BATCH], ways, x.shape[_LENGTH] // ways, *x.shape[2:])
    return _split(x, 2)


def _join_chunks(pieces: Sequence[jax.Array]) -> jax.Array:
    """Undo `_split_chunks`."""
    x = jnp.concatenate(pieces, axis=2)
    return x.reshape(x.shape[_BATCH], x.shape[1] * x.shape[2], *x.shape[3:])


def _transpose(kernel: jax.Array, contracted: int) -> jax.Array:
    """Return [inputs..., outputs...] as [outputs..., inputs...]."""
    return jnp.transpose(kernel, (*range(contracted, kernel.ndim), *range(contracted)))


def _dot(a, b, a_dims, b_dims, dtype) -> jax.Array:
    numbers = ((tuple(a_dims), tuple(b_dims)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=dtype)


def _last(x: jax.Array, n: int) -> range:
    return range(x.ndim - n, x.ndim)
