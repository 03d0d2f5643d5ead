"""Derive the purpose of each mesh axis, and the communication that a strategy allows, as one term per reason.

    rules, placements, [train] -> Strategy -> terms(axes) -> the contract that `linting.examine` checks programs against

A term gives the collectives and mesh axes that it explains, and how many elements one collective may move (those of a
weight or an activation, sharded as declared). If it has a closed form, it also gives how many bytes all its collectives
together may move in a step. Collectives are matched by elements, not bytes: the dtype may differ (a norm is gathered in
fp32), but a 4096 x 14336 kernel always has the same number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshkit.config.rules import ShardingRules
from meshkit.sharding.constrain import Activation
from meshkit.sharding.resolve import STATES, Placed

# A collective of at most this payload is a scalar, a count or a norm, which no strategy names.
SCALAR_BYTES = 4096
# How often a step may gather the weights of a layer: in the forward, the recomputed forward and the backward pass.
GATHERS_A_STEP = 3
# Gradients up to this size may be all-reduced, although they are kept in shards: XLA combines them with other sums.
_SMALL_BYTES = 2**20
# XLA may flatten up to this many elements, sums of the loss and of metrics, into one array with the gradients.
_SCALARS = SCALAR_BYTES // 4
_LONGEST_TOP_K = 16
MUON_SCOPE = "muon"  # the named scope of Muon's instructions

ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER = "all-gather", "all-reduce", "reduce-scatter"
ALL_TO_ALL, RAGGED, PERMUTE = "all-to-all", "ragged-all-to-all", "collective-permute"

Axes = frozenset[str]
# Logical axes whose mesh axes are tensor or expert parallelism.
_TENSOR_ACTIVATIONS = ("act_heads", "act_kv_heads", "act_mlp", "act_vocab")
_TENSOR_PARAMETERS = ("heads", "kv_heads", "mlp", "vocab")
_EXPERTS = ("experts", "act_experts")


@dataclass(frozen=True)
class AxisRoles:
    """The purpose of each mesh axis, read from the rules."""

    batch: frozenset[str]
    """Axes that shard `act_batch`."""
    length: frozenset[str]
    """Axes that shard `act_length`."""
    residual: frozenset[str]
    """Axes that shard `act_residual_length` but not `act_length` (sequence parallelism)."""
    tensor: frozenset[str]
    """Axes that shard heads, mlp or vocab of activations, or of parameters if they do not shard the batch. A pipeline's
    axis, which shards layers and may shard the vocabulary, is not included."""
    expert: frozenset[str]
    """Axes that shard experts."""

    @classmethod
    def read(cls, rules: ShardingRules) -> AxisRoles:
        mapping = rules.mapping("activations")

        def cut(*names: str) -> frozenset[str]:
            return frozenset(a for name in names for a in mapping.get(name, ()))

        batch, length = cut("act_batch"), cut("act_length")
        tensor = cut(*_TENSOR_ACTIVATIONS) | (cut(*_TENSOR_PARAMETERS) - batch - cut("layers"))
        return cls(batch, length, cut("act_residual_length") - length, tensor - length, cut(*_EXPERTS))


@dataclass(frozen=True)
class Weight:
    """A parameter, and the mesh axes that cut it in each state."""

    path: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    cuts: Mapping[str, Axes]
    """Kind of state (`parameters`, `compute`, `gradients`, `optimizer`) -> mesh axes."""
    stays: Axes
    """Axes over which the weight is never gathered: tensor axes, and axes that shard its experts."""
    stack: int
    """Layers in one array, 1 if it is not stacked."""

    @property
    def size(self) -> int:
        """Elements of the whole array."""
        return math.prod(self.shape)

    @property
    def everywhere(self) -> Axes:
        """Axes that shard it in any state."""
        return frozenset().union(*self.cuts.values())


@dataclass(frozen=True)
class Payload:
    """One array of a collective, with its elements and bytes on one GPU (of an all-gather, those of its result)."""

    collective: str
    dtype: str
    elements: int
    rank: int
    bytes: int
    source: str = ""

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("f", "bf"))


@dataclass(frozen=True)
class Term:
    """One reason to communicate."""

    words: str
    kinds: frozenset[str]
    """HLO opcodes that it explains."""
    fits: Callable[[Payload], bool]
    """Returns whether this term may explain an array."""
    bound_bytes: float | None = None
    """Bytes that its collectives may move in a step; None if there is no closed form."""


@dataclass(frozen=True)
class StageRuns:
    """How often a step runs the stages of a pipeline, and the embedding and head around them."""

    axis: str
    """The mesh axis that shards the layers."""
    microbatches: int
    ticks: int
    """Forward ticks, in each of which a stage runs one chunk: M v + S - 1, for M microbatches, S stages and v chunks a
    stage. There are as many backward ticks."""
    outer_ticks: int
    """Most ticks in which the embedding, or the head, may run."""
    chunk_layers: int
    """Layers of one chunk, padding included."""
    layers: int

    @property
    def layer_runs(self) -> float:
        """Layers that one GPU runs in one direction, divided by the layers of the model."""
        return self.ticks * self.chunk_layers / self.layers


@dataclass(frozen=True)
class Strategy:
    """The properties of a step from which its allowed communication follows; see the module's docstring."""

    sizes: Mapping[str, int]
    roles: AxisRoles
    weights: Sequence[Weight]
    statistics: Sequence[Weight]
    """The model's other arrays."""
    activations: Sequence[Activation]
    tokens: int
    """Elements of the global batch, batch x length."""
    accumulate: int = 1
    steps_per_call: int = 1
    deferred: Axes = frozenset()
    """Axes over which gradients are reduced, and weights gathered, once a step."""
    compute_bytes: int = 4
    """Bytes of a weight's element on the wire."""
    reduce_bytes: int = 4
    """Bytes of a gradient's element on the wire."""
    block: int = 0
    """Elements of a weight that share one scale; scales are gathered too. 0 means no scales."""
    packed: int = 1
    """How many elements of a weight XLA gathers as one byte, if an element is shorter than a byte."""
    local_sgd: str | None = None
    """The axis of local SGD; None if it is off."""
    compression: str | None = None
    """The axis over which gradients are compressed; None if they are not."""
    compressed_bytes: int = 1
    """Bytes of an element of a compressed gradient."""
    orthogonalizes: Mapping[str, float] | None = None
    """For Muon, mesh axis -> fp32 elements that each GPU exchanges over it in a step; None for other optimizers."""
    stages: StageRuns | None = None
    """Runs of a pipeline's stages, with which activations are those of one microbatch; None without a pipeline."""

    def terms(self, over: Axes) -> Iterator[Term]:
        """Yield every reason to communicate over these axes, the most specific first."""
        if self.local_sgd and over == {self.local_sgd}:
            yield self._outer_step(over)
        if self.compression and over == {self.compression}:
            yield self._compressed(over)
        if self.stages and self.stages.axis in over and over <= self._stage_axes | {self.stages.axis}:
            yield from self._pipeline_terms(over)
        if self.orthogonalizes and any(over <= w.everywhere for w in self.weights):
            yield self._orthogonalized(over)
        yield from self._gathers(over)
        yield from self._reductions(over)
        if over <= self.roles.batch | self.roles.length | self.roles.residual | self.roles.expert:
            yield self._token_ids(over)
        if over <= self.roles.length:
            if any(over & w.cuts["gradients"] for w in self.weights):
                yield self._rows_for_columns(over, where="embed")
            yield from self._context(over)
        if over <= self.roles.tensor | self.roles.residual:
            yield from self._tensor(over)
        if over <= self.roles.expert:
            yield from self._experts(over)
        if over <= self.roles.batch | self.roles.length:
            yield self._rows_for_columns(over)

    def weight_of(self, part: Payload, over: Axes) -> Weight | None:
        """Return a weight that, whole over these axes, has as many elements as the part.

        Returns:
            The first weight that, as a whole or in one layer, has so many elements in some state without its cuts over
            these axes. If there is none, the first weight that has so many elements without any cuts. Otherwise None.
        """
        whole = (w for w in self.weights if part.elements in (w.size, w.size // w.stack))
        exact = (w for w in self.weights if part.elements in self._whole(w, over))
        return next(exact, None) or next(whole, None)

    def gathers_whole(self, part: Payload, over: Axes) -> bool:
        """Return whether a reduction moves a gradient whole although it is kept in shards."""
        return any(part.elements in self._whole(w, over) and over & w.cuts["gradients"] for w in self.weights)

    # -- weights and gradients

    def _gathers(self, over: Axes) -> Iterator[Term]:
        """Yield the gathers of weights stored in pieces: once a step, in both passes, or after the optimizer."""
        of = [w for w in self.weights if over <= w.everywhere - w.stays - self._pipeline]
        if not of:
            return
        stored = [w for w in of if over <= w.cuts["parameters"]]
        if not stored:
            words, uses, item = f"updated weights, gathered over {_names(over)} after the optimizer", 1, 4
        elif over & self.deferred or all(over.isdisjoint(w.cuts["compute"]) for w in stored):
            words, uses, item = f"weights, gathered over {_names(over)} once a step", 1, self.compute_bytes
        else:
            words = f"weights, gathered over {_names(over)} in the forward pass and again in the backward pass"
            uses, item = GATHERS_A_STEP * self.accumulate, self.compute_bytes
        bound = uses * sum(self._elements(w, over, "parameters") * (4 if w.size == max(w.shape, default=1) * w.stack
                           else item) for w in of)  # fmt: skip
        counts = {n for w in of for n in self._whole(w, over)}
        counts |= {n // self.block for n in counts} if self.block else set()
        packed = {n // self.packed for n in counts} if self.packed > 1 else set()
        fits = lambda p: p.elements in (counts if p.is_float else packed)
        yield Term(words, frozenset({ALL_GATHER, PERMUTE}), fits, bound)

    def _reductions(self, over: Axes) -> Iterator[Term]:
        """Yield the sums of gradients over axes of the batch or the length, as often as the step reduces them."""
        summed = self.roles.batch | self.roles.length | self.roles.residual | self.roles.expert | self._pipeline
        if not over <= summed or (self.local_sgd and over == {self.local_sgd}):
            return
        of = [
            w for w in (*self.weights, *self.statistics) if over.isdisjoint((w.stays | self._pipeline) & w.everywhere)
        ]
        once = self.deferred | self._pipeline
        uses = 1 if over <= once else self.accumulate
        # Reductions over other axes come before the deferred ones, in accumulators that the deferred axes do not shard.
        # Inside stages each run of a layer adds its part, so the pipeline's axis does not shard accumulators either.
        whole = over if over <= once else over | once
        each = [self._elements(w, whole, "gradients") for w in of]
        item = [max(self.reduce_bytes, 4 if "vocab" in w.names or len(w.shape) <= 2 else 0) for w in of]
        counts = {n for w in of for n in (*self._whole(w, over), *self._whole(w, whole))}
        kept = {n for w in of if over & w.cuts["gradients"] for n in self._whole(w, over)}
        total = sum(each)

        def fits(p: Payload) -> bool:
            if p.collective == ALL_REDUCE and p.elements in kept and p.bytes > _SMALL_BYTES:
                return False  # It moves twice the bytes of the reduce-scatter that the strategy declares.
            combined = p.rank == 1 and p.collective == ALL_REDUCE  # XLA flattens the arrays that it combines.
            return p.is_float and (p.elements in counts or (combined and p.elements <= total + _SCALARS))

        often = over <= once or (self.accumulate == 1 and not self.stages)
        words = f"gradients, reduced over {_names(over)} {'once a step' if often else 'with every micro-batch'}"
        bound = uses * sum(n * b * (1 if often else self._runs(w)) for w, n, b in zip(of, each, item))
        yield Term(words, frozenset({ALL_REDUCE, REDUCE_SCATTER}), fits, bound)

    def _outer_step(self, over: Axes) -> Term:
        total = sum(self._elements(w, over, "parameters") for w in self.weights)
        words = f"local SGD: weights averaged over {_names(over)} by the outer step"
        # The fp32 differences move once an outer step.
        return Term(words, frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER}),
                    lambda p: p.is_float and p.elements <= total + _SCALARS,
                    4 * total / self.steps_per_call)  # fmt: skip

    def _compressed(self, over: Axes) -> Term:
        total = sum(self._elements(w, over, "gradients") for w in self.weights)
        words = f"compressed gradients over {_names(over)}: chunks exchanged, their sums gathered"
        # Each of the two collectives moves every element once, and fp32 scales (at most one for 16 elements).
        bound = total * (self.compressed_bytes + 0.25)
        return Term(words, frozenset({ALL_TO_ALL, ALL_GATHER, ALL_REDUCE}), lambda p: p.elements <= 2 * total, bound)

    def _orthogonalized(self, over: Axes) -> Term:
        assert self.orthogonalizes is not None
        words = f"Muon over {_names(over)}: matrices exchanged for whole ones, or multiplied in pieces"
        kinds = frozenset({ALL_TO_ALL, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, PERMUTE})
        elements = [self.orthogonalizes.get(axis, 0.0) for axis in over]
        bound = 4 * sum(elements) if all(map(math.isfinite, elements)) else None
        return Term(words, kinds, lambda p: p.is_float and f"{MUON_SCOPE}/" in p.source, bound)

    def _elements(self, w: Weight, over: Axes, kind: str) -> int:
        return w.size // self._ways(w.cuts[kind] - over)

    def _whole(self, w: Weight, over: Axes) -> set[int]:
        """Return the element counts that a weight, or one layer of it, may have in a collective over these axes."""
        found = {self._elements(w, over, state) for state in STATES}
        return found | {n // w.stack for n in found}

    # -- activations

    def _tensor(self, over: Axes) -> Iterator[Term]:
        """Yield the sums of sharded matmuls' outputs, and the collectives of sequence parallelism around them."""
        whole = self._largest(over, lambda a: over.isdisjoint(a.axes))
        limit = max(whole, self._largest(over, lambda a: bool(over & a.axes)))
        kernels = max(1, sum(w.stack * self._runs(w) for w in self.weights if over & w.everywhere))
        # A sharded kernel needs one sum: of its output if it is row-parallel (again if that is recomputed), of its
        # input's gradient if it is column-parallel. With sequence parallelism a gather comes with each scatter, in fp32
        # where XLA gathers before it casts.
        moved = 2 * self.accumulate * kernels * whole
        bound = moved * self.compute_bytes if math.isfinite(moved) else None
        bound_fp32 = moved * 4 if math.isfinite(moved) else None
        few = 4 * self.tokens

        of_weights = {n for w in self.weights for n in (w.size, *self._whole(w, over))}
        exact = {math.prod(a.shape) // self._ways(a.axes - over) for a in self.activations}

        def up_to(largest: float) -> Callable[[Payload], bool]:
            return lambda p: p.elements <= largest

        def gathered(p: Payload) -> bool:
            return p.elements <= whole and (p.elements in exact or p.elements not in of_weights)

        names = _names(over)
        yield Term(f"vocabulary over {names}: maximum, sum and target of the logits", frozenset({ALL_REDUCE}),
                   lambda p: p.elements <= min(few, self._rows * 4), bound)  # fmt: skip
        yield Term(f"tensor parallelism over {names}: sums of row-parallel outputs and of input gradients",
                   frozenset({ALL_REDUCE}), lambda p: p.elements <= whole * self._combined(p), bound)  # fmt: skip
        if over & self.roles.residual:
            yield Term(f"sequence parallelism over {names}: gathered before a block's matmuls, scattered after them",
                       frozenset({ALL_GATHER}), gathered, bound_fp32)  # fmt: skip
            yield Term(f"sequence parallelism over {names}: gathered before a block's matmuls, scattered after them",
                       frozenset({REDUCE_SCATTER, PERMUTE, ALL_TO_ALL}), up_to(limit), bound_fp32)  # fmt: skip
        else:
            yield Term(
                f"collective matmul over {names}", frozenset({PERMUTE, REDUCE_SCATTER}), up_to(limit), bound_fp32
            )

    def _pipeline_terms(self, over: Axes) -> Iterator[Term]:
        """Yield the transfers between stages, and the collectives of the embedding and head that all stages share."""
        assert self.stages is not None
        names, axis, inside = _names(over), self.stages.axis, over - {self.stages.axis}
        rows = self._largest(self._stage_axes, lambda a: "act_embed" in a.logical_axes)
        stream = self._largest(frozenset(), lambda a: "act_residual_length" in a.logical_axes, default=rows)
        if not inside:
            words = f"activations and their gradients, passed on between the stages of {axis}"
            bound = 2 * self.stages.ticks * stream * self.compute_bytes if math.isfinite(rows) else None
            yield Term(words, frozenset({PERMUTE}), lambda p: p.is_float and p.elements <= rows, bound)
        # Maximum, sum and target of the logits.
        sums = 4 * self.tokens / self.stages.microbatches / self._ways(self.roles.batch)
        yield Term(f"vocabulary over {names}: maximum, sum and target of the logits", frozenset({ALL_REDUCE}),
                   lambda p: p.is_float and p.elements <= sums)  # fmt: skip
        # Rows of the embedding and outputs of the last stage each go once to all stages, their gradients once back.
        shared = 4 * self.stages.outer_ticks * stream * self.compute_bytes if math.isfinite(rows) else None
        yield Term(f"embedding and head of all stages over {names}: rows of the table, activations of the last stage",
                   frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER}),
                   lambda p: p.is_float and p.elements <= rows * self._combined(p), shared)  # fmt: skip

    def _context(self, over: Axes) -> Iterator[Term]:
        """Yield attention over a sharded sequence: gathered keys, blocks around a ring, or exchanged heads."""
        keys = self._largest(over, lambda a: "act_kv_heads" in a.logical_axes)
        queries = max(keys, self._largest(over, lambda a: "act_heads" in a.logical_axes))
        rows = max(queries, self._largest(over, lambda a: "act_embed" in a.logical_axes))
        keys, pieces, names = keys or queries, self._ways(over), _names(over)
        # Keys and values travel in one array. A ring or an exchange moves one GPU's block of it; the backward pass adds
        # the block's fp32 gradient as 16-bit words.
        yield Term(f"keys and values over {names}", frozenset({ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE}),
                   lambda p: p.is_float and p.elements <= 2 * keys)  # fmt: skip
        yield Term(f"ring attention over {names}: blocks passed on, and exchanged for causal balance",
                   frozenset({PERMUTE}), lambda p: p.elements <= max(2 * rows, 6 * keys) / pieces)  # fmt: skip
        yield Term(f"Ulysses over {names}: heads exchanged for positions", frozenset({ALL_TO_ALL}),
                   lambda p: p.elements <= 2 * queries / pieces)  # fmt: skip

    def _experts(self, over: Axes) -> Iterator[Term]:
        names = _names(over)
        yield Term(f"token dispatch and combine over {names}", frozenset({ALL_TO_ALL, RAGGED}), lambda p: True)
        held = self._largest(over, lambda a: "act_experts" in a.logical_axes, default=0)
        yield Term(f"token dispatch and combine over {names}, dense",
                   frozenset({ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER}),
                   lambda p: p.elements <= (held if p.is_float else _LONGEST_TOP_K * self.tokens))  # fmt: skip

    def _rows_for_columns(self, over: Axes, where: str = "") -> Term:
        """Return the term of a table's gradient; the op's path must contain `where`, which excludes similar ops."""
        named = any("act_embed" in a.logical_axes for a in self.activations)
        rows = self._largest(frozenset(), lambda a: not named or "act_embed" in a.logical_axes)
        words = f"gradient of the embedding over {_names(over)}: shards of tokens exchanged for shards of embed"
        return Term(words, frozenset({ALL_TO_ALL}), lambda p: p.elements <= rows and where in p.source,
                    2 * self.accumulate * rows * 4 if math.isfinite(rows) else None)  # fmt: skip

    def _token_ids(self, over: Axes) -> Term:
        return Term(f"token ids over {_names(over)}", frozenset({ALL_GATHER, ALL_TO_ALL, PERMUTE, ALL_REDUCE}),
                    lambda p: not p.is_float and p.elements <= 2 * self.tokens)  # fmt: skip

    def _largest(self, over: Axes, wanted: Callable[[Activation], bool], *, default: float | None = None) -> float:
        """Return the elements of the largest wanted activation on one GPU, whole over some axes.

        If no activation is wanted, return the default or, without a default, 0 (infinity if no activation is known).
        """
        found = [math.prod(a.shape) / self._ways(a.axes - over) for a in self.activations if wanted(a)]
        if not found:
            return default if default is not None else 0 if self.activations else math.inf
        return max(found)

    @property
    def _pipeline(self) -> Axes:
        return frozenset({self.stages.axis} if self.stages else ())

    @property
    def _stage_axes(self) -> Axes:
        return self.roles.tensor | self.roles.residual

    def _combined(self, p: Payload) -> int:
        """Return how many arrays XLA may combine: in a pipeline it flattens the sums around the layers of a tick."""
        return 4 if self.stages and p.rank == 1 else 1

    def _runs(self, w: Weight) -> float:
        """Return how often a pass over a micro-batch (in a pipeline, over all) uses a weight, as a mean over layers."""
        if self.stages is None:
            return 1
        return self.stages.layer_runs if w.stack > 1 else self.stages.outer_ticks

    @cached_property
    def _rows(self) -> float:
        batch = [a for a in self.activations if "act_batch" in a.logical_axes]
        ways = self._ways((self.roles.batch | self.roles.length) - self.deferred) if batch else 1
        return self.tokens / ways

    def _ways(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)


def make_weights(placed: Mapping[str, Sequence[Placed]], roles: AxisRoles) -> list[Weight]:
    """Return the weights of a model from its placements in each of STATES (`placements_by_state`), in their order."""
    made = []
    for states in zip(*(placed[state] for state in STATES)):
        p, names = states[0], states[0].logical_axes or (None,) * len(states[0].shape)
        by_dim = [frozenset().union(*(s.spec[dim] for s in states)) for dim in range(len(p.shape))]
        experts = {a for name, axes in zip(names, by_dim) if name == "experts" for a in axes}
        stacked = len(p.shape) > 1 and ((names[0] or "").endswith("layers") or not any(names))
        cuts = {kind: s.axes for kind, s in zip(STATES, states)}
        made.append(Weight(p.path, p.shape, names, cuts, roles.tensor | experts, p.shape[0] if stacked else 1))
    return made


def _names(axes: Iterable[str]) -> str:
    return " x ".join(sorted(axes))
