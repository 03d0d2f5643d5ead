"""The order of stacked layers in a pipeline, and the way back to the model's order.

A model stacks its layers in arrays [layers, ...]. A pipeline of S stages with v chunks each cuts their first dim over
its mesh axis, so the layers of a stage must be contiguous. Position (stage, chunk, place) of an arranged array
[S * v * chunk_layers, ...] holds layer `place` of virtual stage chunk * S + stage. With one chunk and layers that
divide evenly, that is the model's order.

With uneven counts, short virtual stages are padded with inactive layers. These are zeros; their outputs are ignored and
their gradients are zero. `restore` undoes order and padding, so checkpoints do not depend on the pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshkit.errors import ConfigError


@dataclass(frozen=True)
class Stack:
    """How many layers each virtual stage has."""

    stages: int
    counts: tuple[int, ...]
    """Layers of each of the v S virtual stages, in the order in which a microbatch visits them."""

    @classmethod
    def of(cls, layers: int, stages: int, virtual_stages: int = 1, layout: str | Sequence[int] | None = None) -> Stack:
        """Return a Stack whose layers are distributed evenly, or by a layout.

        Args:
            layout: layers of each virtual stage: numbers, or a text for `parse_layout`. By default all are equal.
                If the layers do not divide, the last and first stages, which also have head and embedding, get fewer.

        Raises:
            ConfigError: more virtual stages than layers, or a layout that does not fit.
        """
        parts = stages * virtual_stages
        if parts > layers:
            chunks = f" x {virtual_stages} virtual stages" if virtual_stages > 1 else ""
            raise ConfigError(
                f"{stages} stages{chunks} need at least {parts} layers, and the model has {layers}.",
                hint=_fewer(layers, stages, virtual_stages),
            )
        if layout is None:
            return cls(stages, _even(layers, parts))
        counts = parse_layout(layout) if isinstance(layout, str) else tuple(layout)
        if len(counts) != parts:
            raise ConfigError(
                f"the pipeline layout has {len(counts)} parts, but {stages} stages x {virtual_stages} virtual stages "
                f"are {parts}."
            )
        if sum(counts) != layers or min(counts) < 1:
            raise ConfigError(
                f"the pipeline layout places {sum(counts)} layers ({'|'.join(map(str, counts))}), each part needs at "
                f"least one, and the model has {layers}."
            )
        return cls(stages, counts)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return sum(self.counts)

    @property
    def virtual_stages(self) -> int:
        """v, the number of chunks of each stage."""
        return len(self.counts) // self.stages

    @property
    def chunk_layers(self) -> int:
        """Layers that every chunk computes, inactive ones included."""
        return max(self.counts)

    @property
    def size(self) -> int:
        """First dim of an arranged array."""
        return len(self.counts) * self.chunk_layers

    @property
    def padded(self) -> bool:
        """Whether some layers are inactive."""
        return self.size != self.layers

    @cached_property
    def table(self) -> np.ndarray:
        """int32 [v, S, chunk_layers]: the number of the model's layer at a place, -1 for an inactive layer."""
        starts = np.cumsum([0, *self.counts[:-1]])
        places = np.arange(self.chunk_layers)
        rows = [np.where(places < n, start + places, -1) for n, start in zip(self.counts, starts)]
        return np.array(rows, np.int32).reshape(self.virtual_stages, self.stages, self.chunk_layers)

    @cached_property
    def order(self) -> np.ndarray:
        """int32 [size]: the number of the model's layer at a position of an arranged array, -1 for an inactive one."""
        return self.table.swapaxes(0, 1).reshape(-1)

    @property
    def natural(self) -> bool:
        """Whether arranged arrays equal the model's own."""
        return bool(np.array_equal(self.order, np.arange(self.layers)))

    def arrange(self, tree: Any) -> Any:
        """Return arrays [layers, ...] in the pipeline's order, [size, ...]; numpy arrays stay numpy arrays.

        Raises:
            ConfigError: an array with another number of layers.
        """
        if self.natural:
            return self._checked(tree, self.layers)
        return jax.tree.map(self._arrange_one, self._checked(tree, self.layers))

    def restore(self, tree: Any) -> Any:
        """Undo `arrange`.

        Raises:
            ConfigError: an array that is not arranged for this pipeline.
        """
        if self.natural:
            return self._checked(tree, self.size)
        where = np.argsort(np.where(self.order < 0, self.layers, self.order), kind="stable")[: self.layers]
        return jax.tree.map(lambda x: x[where], self._checked(tree, self.size))

    def abstract(self, tree: Any) -> Any:
        """Return the ShapeDtypeStructs of what `arrange` returns; shardings are kept."""

        def abstract_leaf(x):
            return jax.ShapeDtypeStruct((self.size, *x.shape[1:]), x.dtype, sharding=getattr(x, "sharding", None))

        return jax.tree.map(abstract_leaf, self._checked(tree, self.layers))

    def _arrange_one(self, x):
        module = np if isinstance(x, np.ndarray) else jnp
        rows = module.take(x, np.maximum(self.order, 0), axis=0)
        inactive = (self.order < 0).reshape(-1, *[1] * (x.ndim - 1))
        return module.where(inactive, module.zeros((), x.dtype), rows) if self.padded else rows

    def _checked(self, tree: Any, size: int) -> Any:
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not x.shape or x.shape[0] != size:
                raise ConfigError(
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')} has shape {tuple(x.shape)}, but a stack "
                    f"of {size} layers is wanted."
                )
        return tree


def parse_layout(text: str) -> tuple[int, ...]:
    """Return the layers of each virtual stage from a text: `7|8*14|7`, or letters as Megatron's `Et*3|(tt|)*29,tL`.

    Parts are separated by `|`. A part is a number of layers, or letters: `t` a layer, `E` the embedding (first part
    only), `L` the loss (last part only). `x*n` repeats x n times: a letter, a group in parentheses, or a part that is a
    number. Blanks and commas are ignored.

    Raises:
        ConfigError: a text that is not such a layout.
    """
    plain = re.sub(r"[\s,]", "", text)
    flat = plain
    while (found := re.search(r"\(([^()]*)\)(?:\*(\d+))?", flat)) and len(flat) < 100_000:
        flat = flat[: found.start()] + found[1] * int(found[2] or 1) + flat[found.end() :]
    counts: list[int] = []
    parts = flat.split("|")
    for i, part in enumerate(parts):
        number = re.fullmatch(r"(\d+)(?:\*(\d+))?", part)
        if number:
            counts += [int(number[1])] * int(number[2] or 1)
            continue
        letters = re.sub(r"([EtL])\*(\d+)", lambda m: m[1] * int(m[2]), part)
        wrong = not re.fullmatch(r"E?t+L?", letters)
        if wrong or ("E" in letters and i) or ("L" in letters and i < len(parts) - 1):
            raise ConfigError(
                f"pipeline layout '{text}': part {i + 1}, '{part}', is not layers.",
                hint="numbers of layers as in 7|8*14|7, or letters as in Et*7|(t*8|)*14t*7L",
            )
        counts.append(letters.count("t"))
    return tuple(counts)


def _even(layers: int, parts: int) -> tuple[int, ...]:
    """Return counts that differ by at most one. The smaller ones are the last, the first, the last but one, etc."""
    most = -(-layers // parts)
    counts = [most] * parts
    ends = [i // 2 if i % 2 else parts - 1 - i // 2 for i in range(parts)]
    for i in ends[: most * parts - layers]:
        counts[i] -= 1
    return tuple(counts)


def _fewer(layers: int, stages: int, virtual_stages: int) -> str:
    if stages <= layers:
        return f"virtual_stages = {layers // stages}" if virtual_stages > 1 else f"{layers} stages at most"
    return f"at most {layers} stages"
