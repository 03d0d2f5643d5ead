"""How Megatron ran experts, or NVFP4: recipes.toml, by the row's page. Part of experiments.py, third in the flow.

A page gives parallelism and batch; the recipe beside it, of the same release, says what moved the tokens, what
overlapped, which kernels were fused and what was recomputed. A row without one ran Megatron's defaults (NCCL's
all-to-all, no overlap).
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.rows import Row

_PATTERNS = ("source", "model", "gpu", "precision")


@dataclass(frozen=True)
class Recipe:
    """What recipes.toml says of a row; the defaults are Megatron-Core's.

    Attributes:
        dispatcher: `alltoall`, a copy of a token for each of its experts, or `hybridep`, one for each GPU.
        overlapped: the exchange of a micro-batch runs beside the layers of another.
        fused: activation, bias and casts are epilogues of the experts' matmuls.
        grouped: all experts of a GPU in one call, whose tokens are sorted by expert first.
        capacity: every expert takes as many rows, and what is above is dropped: rows are whole tiles of a cast.
        recomputes: modules whose forward pass runs twice.
        reduce: dtype in which gradients travel.
        overlaps_weights: they are gathered under the next forward pass; else behind the optimizer, beside nothing.
        attention: of kernels.toml; "" for the framework's.
        graph: what CUDA graphs replay: `none`, `parts` or `all`.
        cast_reads: times that a cast to NVFP4 reads an operand.
        regressed: what its page says against its own number; "" for nothing.
        why: where this is from; "" for the defaults.
    """

    dispatcher: str = "alltoall"
    overlapped: bool = False
    fused: bool = False
    grouped: bool = True
    capacity: bool = False
    recomputes: tuple[str, ...] = ()
    reduce: str = "fp32"
    overlaps_weights: bool = True
    attention: str = ""
    graph: str = "none"
    cast_reads: int = 3
    regressed: str = ""
    why: str = ""


@functools.cache
def _tables() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("recipes.toml").read_text(encoding="utf-8"))["recipes"]


def find_recipe(row: Row) -> Recipe:
    """The first recipe whose patterns are all found in a row; Megatron's defaults where there is none."""
    words = {"source": row.source, **{name: row.say(name) for name in _PATTERNS[1:]}}
    for table in _tables():
        found = all(re.search(table[name], words[name], re.IGNORECASE) for name in _PATTERNS if name in table)
        if found and table.get("ways") in (None, row.count("ep")):
            known = {key: value for key, value in table.items() if key not in (*_PATTERNS, "ways")}
            return Recipe(**{**known, "recomputes": tuple(known.get("recomputes", ()))})
    return Recipe()
