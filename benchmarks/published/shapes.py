"""The dims of a row's model: those it states, public ones (models.toml), usual ratios. Part of experiments.py."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.published.rows import Row

_GATED = re.compile(r"llama|internlm|qwen|mistral|gemma|yi-", re.IGNORECASE)
_EXPERTS = re.compile(r"moe|mixtral|deepseek|grok|a\d+b|kimi|gpt.oss|nemotron_3", re.IGNORECASE)
_UNTIED = re.compile(r"nemotron4", re.IGNORECASE)


@dataclass
class Notes:
    """What a source does not say, as it is assumed."""

    assumed: list[str] = field(default_factory=list)

    def assume(self, text: str) -> None:
        """A stated assumption that hardly matters."""
        self.assumed.append(text)

    def doubt(self, text: str) -> None:
        """An assumption that decides the time: the row is not fully configured."""
        self.assumed.append("!" + text)


@dataclass(frozen=True)
class Shape:
    """The decoder of a row.

    Attributes:
        gated: SwiGLU with three matrices, else two and a GELU.
        head_size: of a head; 0 for hidden / heads.
        experts, experts_per_token: 0 for a dense one; `ffn` is the width of one expert.
        window: of attention in every second layer; 0 for none.
        biased: linear layers and experts have biases, and gates are clamped.
        normed: heads of queries and keys have a norm.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    head_size: int = 0
    experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    biased: bool = False
    normed: bool = False

    @property
    def head_dim(self) -> int:
        """Of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def keys(self) -> int:
        """Width of all keys; of all values too."""
        return self.kv_heads * self.head_dim

    def layer_parameters(self) -> int:
        """Of the matmuls of a layer, but for experts; with the router."""
        blocks = self.experts if self.experts else (3 if self.gated else 2) * self.ffn
        return self.hidden * (2 * self.head_dim * (self.heads + self.kv_heads) + blocks)

    def expert_parameters(self) -> int:
        """Of all experts of a layer."""
        return self.experts * self.hidden * 3 * self.ffn

    def parameters(self, layers: int | None = None) -> int:
        """All matrices, with tables of the vocabulary."""
        tables = 1 if self.tied else 2
        layer = self.layer_parameters() + self.expert_parameters()
        return (layers or self.layers) * layer + tables * self.vocab * self.hidden

    def model_flops(self, tokens: float, length: int) -> float:
        """6 N tokens + 12 layers heads head_dim length tokens, N of the experts that a token goes to."""
        active = self.expert_parameters() * self.experts_per_token / self.experts if self.experts else 0
        matmul = self.layers * (self.layer_parameters() + active) + self.vocab * self.hidden
        attention = 12.0 * self.layers * self.heads * self.head_dim * length
        return 6.0 * matmul * tokens + attention * self.attended(length) * tokens

    def attended(self, length: int) -> float:
        """Share of the scores of full causal attention that there are: a window leaves less in every second layer."""
        if not self.window or self.window >= length:
            return 1.0
        return 0.5 + 0.5 * self.window * (length - self.window / 2) / (length * length / 2)


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))


def find_shape(row: Row, notes: Notes) -> Shape | str:
    """The dims of a row's model, or the sentence why they are not known."""
    model = row.say("model")
    for words, part in _tables()["missing"].items():
        if re.search(words, model, re.IGNORECASE):
            return f"a mixture of experts with {part}"
    found = (m for m in _tables()["models"].values() if re.search(m["words"], model, re.IGNORECASE))
    known: dict[str, Any] = next(found, {})
    if not known and ((row.count("ep") or 1) > 1 or _EXPERTS.search(model)):
        return "a mixture of experts, whose dims and balance of routing the row does not state"

    def dim(name: str) -> int | None:
        return row.count(name) or known.get(name)

    layers, hidden, heads = dim("layers"), dim("hidden"), dim("heads")
    if not layers or not hidden:
        return f"layers and hidden size of {model or 'the model'} are not stated"
    if not heads:
        heads = max(1, hidden // 128)
        notes.doubt(f"heads not stated: {heads} of 128")
    kv_heads = dim("kv_heads") or heads
    head_dim = known.get("head_dim", 0)
    if (hidden % heads and not head_dim) or heads % kv_heads:
        return f"hidden {hidden}, heads {heads} and kv_heads {kv_heads} do not divide"
    vocab = dim("vocab")
    if not vocab:
        vocab = 51_200
        notes.assume(f"vocabulary not stated: {vocab}")
    gated = bool(known or _GATED.search(model))
    ffn = dim("ffn") or _ffn(row, layers, hidden, heads, kv_heads, vocab, gated, notes)
    tied = not gated and not _UNTIED.search(model)
    if known:
        notes.assume(f"dims: {known['source']}; routing forced to be even")
    experts = (known.get(name, 0) for name in ("experts", "experts_per_token", "window"))
    parts = {name: known.get(name, False) for name in ("biased", "normed")}
    return Shape(layers, hidden, heads, kv_heads, ffn, vocab, gated, tied, head_dim, *experts, **parts)


def _ffn(row: Row, layers, hidden, heads, kv_heads, vocab, gated: bool, notes: Notes) -> int:
    """The width of the feed-forward block that gives the stated number of parameters; else the usual ratio."""
    usual = round(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden
    total = row.numbers.get("params_b", 0) * 1e9
    attention = hidden * 2 * (hidden // heads) * (heads + kv_heads)
    left = (total - (2 if gated else 1) * vocab * hidden) / layers - attention
    found = round(left / ((3 if gated else 2) * hidden) / 64) * 64
    ffn = found if total and found > 0 else usual
    notes.assume(f"ffn not stated: {ffn}" + (", which gives the stated number of parameters" if ffn == found else ""))
    return ffn
