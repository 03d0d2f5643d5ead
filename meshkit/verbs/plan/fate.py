"""What a recomputation policy does to the outputs of a layer's projections, for closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshkit.config.sections import RematMix

Where = Literal["keep", "offload", "drop"]
_ALL_TWICE = ("full", "nothing_saveable", "offload")  # policies that run all of a layer twice
_INPUT = "layer_input"  # as `models.remat` calls it


@dataclass(frozen=True)
class Fate:
    """What becomes of values, by name.

    Attributes:
        named: names that are kept on the GPU.
        offloaded: names that go to host memory.
        others: what becomes of all else.
        input_leaves: whether the input of a layer waits in host memory.
    """

    named: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    others: Where = "drop"
    input_leaves: bool = False

    @classmethod
    def of(cls, remat: str | Sequence[str] | RematMix | Any) -> Fate:
        """The fate under a policy of `train.remat`."""
        if isinstance(remat, RematMix):
            return cls(frozenset(remat.keep), frozenset(remat.offload), "drop", _INPUT in remat.offload)
        if not isinstance(remat, str):
            return cls(frozenset(remat))
        if remat == "offload_dots":
            return cls(others="offload")
        return cls(others="drop" if remat in _ALL_TWICE else "keep", input_leaves=remat == "offload")

    def where(self, path: str) -> Where:
        """What becomes of the output of the projection whose parameter has this path."""
        parts = set(path.split("/"))
        if parts & self.offloaded:
            return "offload"
        return "keep" if parts & self.named else self.others
