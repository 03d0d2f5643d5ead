"""How a model's parameters correspond to the tensors of a file: names, and how dims are split, merged and transposed.

A layout is a table of rows, each of which works in both directions. A row names the dims on both sides, from which the
reshape and the transpose follow:

    Row("layers/attention/query/kernel", "model.layers.{layers}.self_attn.q_proj.weight",
        file="(heads head_dim) embed", ours="layers embed heads head_dim")

This row says that each layer has its own tensor. Its first dim is split in two dims, which follow `embed` in the model.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """A parameter, the tensors that hold it, and how their dims correspond."""

    path: str
    """Path of the parameter."""
    name: str
    """Name of the tensors, with a placeholder for each dim whose indices have tensors of their own."""
    file: str
    """Dims of one tensor; dims in parentheses are merged into one dim of the file."""
    ours: str
    """Dims of the parameter; the placeholders come first."""
    part: tuple[int, int] | None = None
    """(i, n): the file's dim `part` has n entries, of which the parameter is the i-th."""
    every: tuple[int, int] = (0, 1)
    """(i, n): the tensors' numbers at the first placeholder are i, n + i, 2 n + i, ..."""

    @property
    def stacked(self) -> list[str]:
        """Return the dims that are placeholders."""
        return re.findall(r"\{(\w+)\}", self.name)

    @property
    def groups(self) -> list[list[str]]:
        """Return the file's dims, each as the list of named dims that it merges."""
        return [(merged or single).split() for merged, single in re.findall(r"\(([^)]*)\)|(\S+)", self.file)]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the parameter."""
        return tuple(sizes[dim] for dim in self.ours.split())

    def file_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of each tensor in the file."""
        return tuple(math.prod(self._size(dim, sizes) for dim in group) for group in self.groups)

    def names(self, sizes: Mapping[str, int]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield (indices of the placeholders, name) of every tensor."""
        for index in itertools.product(*(range(sizes[dim]) for dim in self.stacked)):
            yield index, self.name_at(index)

    def name_at(self, index: tuple[int, ...]) -> str:
        """Return the tensor's name at some indices of the placeholders.

        Args:
            index: one index for each dim in `stacked`, in that order.

        Raises:
            ValueError: `index` has more or fewer entries than `stacked`.
        """
        first, step = self.every
        numbers = [n * step + first if at == 0 else n for at, n in enumerate(index)]
        return self.name.format(**dict(zip(self.stacked, numbers, strict=True)))

    def to_ours(self, tensor: Any, sizes: Mapping[str, int], ranges: Mapping[str, range]) -> np.ndarray:
        """Return a block of a tensor of the file, with the dims of `ours` except the placeholders.

        Args:
            tensor: an array, or an object that reads the part it is indexed with. The index has the block's range for
                each dim of the file. If the file merges dims of the model into one, the index cuts only the
                outermost of these: start and stop are those of its range, multiplied by the sizes of the others.
            sizes: sizes of all dims.
            ranges: ranges of the parameter's dims, without those of the placeholders.
        """
        flat, part = self._flat, self.part or (0, 0)
        ranges = {**ranges, "part": range(part[0], part[0] + 1)}
        lengths = {dim: self._size(dim, sizes) for dim in flat}
        index = []
        for outer, *merged in self.groups:
            each = math.prod(lengths[dim] for dim in merged)
            index.append(slice(ranges[outer].start * each, ranges[outer].stop * each))
            lengths[outer] = len(ranges[outer])
        outermost = {group[0] for group in self.groups}
        rest = (slice(None) if dim in outermost else slice(ranges[dim].start, ranges[dim].stop) for dim in flat)
        block = tensor[tuple(index)].reshape([lengths[dim] for dim in flat])[tuple(rest)]
        if self.part:
            block = block.squeeze(flat.index("part"))
            flat.remove("part")
        return block.transpose([flat.index(dim) for dim in self._inner])

    def to_file(self, value: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Return a whole tensor of the file: the inverse of `to_ours`.

        Args:
            value: the parameter at one index of the placeholders. Its dims are those of `ours` without placeholders.
                For a row with `part`, it has a new first dim, over the parts.
            sizes: sizes of all dims.
        """
        dims = ["part", *self._inner] if self.part else self._inner
        return value.transpose([dims.index(dim) for dim in self._flat]).reshape(self.file_shape(sizes))

    @property
    def _flat(self) -> list[str]:
        return [dim for group in self.groups for dim in group]

    @property
    def _inner(self) -> list[str]:
        return self.ours.split()[len(self.stacked) :]

    def _size(self, dim: str, sizes: Mapping[str, int]) -> int:
        return self.part[1] if self.part and dim == "part" else sizes[dim]


@dataclass(frozen=True)
class Layout:
    """The weights of one model as another library names them."""

    rows: tuple[Row, ...]
    """One row for each parameter, used to write, and to read files that have these names."""
    sizes: Mapping[str, int]
    """Size of each dim that the rows name."""
    config: Mapping[str, Any]
    """Contents of config.json, as written."""
    options: Mapping[str, Any]
    """The model's options, by its own names, with which a config.json must agree."""
    read_config: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Config.json -> options; raises ConfigError for features that the model does not have."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Option -> its key in config.json, for messages."""
    others: tuple[tuple[Row, ...], ...] = ()
    """Alternative tables to read files that lack a tensor of `rows`."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensor that may be in the files too -> the tensor that it must equal."""
    repeated: tuple[Row, ...] = ()
    """Rows that write a parameter a second time, under a name in `copies`."""
    computed: str | None = None
    """Pattern of tensors that may be in the files and are not read: the model computes them or has no use for them."""

    def rows_for(self, names: Mapping[str, Any]) -> tuple[Row, ...]:
        """Return the first table whose tensors are all in the files; `rows` if there is none.

        Args:
            names: a mapping whose keys are the names of tensors, such as `open_folder` returns.
        """
        for rows in (self.rows, *self.others):
            if all(name in names for row in rows for _, name in row.names(self.sizes)):
                return rows
        return self.rows
