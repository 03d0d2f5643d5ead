"""How a model's parameters correspond to the tensors of a file: names, and how dims are split, merged and turned.

A layout is a table of rows that can be read in both directions. A row's dims carry names, so that what has to be done
is not written down but follows:

    Row("layers/attention/query/kernel", "model.layers.{layers}.self_attn.q_proj.weight",
        file="(heads head_dim) embed", ours="layers embed heads head_dim")

says that each layer has a tensor of its own, that its first dim is to be split in two, and that `embed` goes first.
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
    """Name of the tensors, with a placeholder for each dim that is taken apart into tensors of their own."""
    file: str
    """Dims of such a tensor, those that are one dim there in parentheses."""
    ours: str
    """Dims of the parameter, those of the placeholders first."""
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
        """Return the file's dims, each a list of named ones."""
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
            index: one for each of `stacked`, in its order.

        Raises:
            ValueError: more or fewer.
        """
        first, step = self.every
        numbers = [n * step + first if at == 0 else n for at, n in enumerate(index)]
        return self.name.format(**dict(zip(self.stacked, numbers, strict=True)))

    def to_ours(self, tensor: Any, sizes: Mapping[str, int], ranges: Mapping[str, range]) -> np.ndarray:
        """Return a block of a tensor with the parameter's dims, less those of the placeholders.

        Args:
            tensor: an array, or what reads the part of one that it is indexed with: no more is asked of it than the
                block's own share of every dim, or of the outermost one of those that are merged.
            sizes: of all dims.
            ranges: of the parameter's dims, those of the placeholders excepted.
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
            value: the parameter at one index of the placeholders, its other dims as `ours` has them; of a row with
                `part`, the parameters of all parts, stacked.
            sizes: of all dims.
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
    """One per parameter; what is written, and what is read if the files have these names."""
    sizes: Mapping[str, int]
    """Size of each dim that the rows name."""
    config: Mapping[str, Any]
    """Contents of config.json, as written."""
    options: Mapping[str, Any]
    """The options that a config.json must state for the weights to mean the same, by the model's own names."""
    read_config: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Config.json -> options; raises ConfigError for what the model cannot do."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Option -> the key of config.json that says it, for messages."""
    others: tuple[tuple[Row, ...], ...] = ()
    """Tables to read by, if the files have no tensor of some row of `rows`."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be there as well -> the tensor that they must be equal to."""
    repeated: tuple[Row, ...] = ()
    """Rows by which a parameter is written once more, under a name in `copies`."""
    computed: str | None = None
    """Pattern of names that may be there and are not read, since they follow from the config."""

    def rows_for(self, names: Mapping[str, Any]) -> tuple[Row, ...]:
        """Return the table that fits the names of some files best: the first whose tensors are all there, else `rows`.

        Args:
            names: whose keys are the names of tensors, as `open_folder` gives them.
        """
        for rows in (self.rows, *self.others):
            if all(name in names for row in rows for _, name in row.names(self.sizes)):
                return rows
        return self.rows
