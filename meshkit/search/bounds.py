"""Compute lower bounds for a variant in closed form: its memory, its communication and its arithmetic.

    memory   parameters + moments + max(gradients, activations that the layers keep for the backward pass)
    link     by the network model: each weight gathered once, each gradient reduced once, the sums of activations
    compute  the model's matmuls at the GPU's peak

The compiled step needs more than each bound, so the bounds never rule out a variant that would win. `estimate_s` is a
guess of the step time from the same numbers, which only decides what is compiled first.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, AxisType

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import MeshSpec
from meshkit.config.precisions import PRECISIONS
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import RematMix
from meshkit.errors import ConfigError
from meshkit.planning.resolved import resolve
from meshkit.predict.kernels import compute_peak_flops, memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from meshkit.sharding.resolve import Placed, placements
from meshkit.step.loss import deferred_axes
from meshkit.step.muon import matrix_dims
from meshkit.step.pipelined import arrange_description, check_model, find_stack
from meshkit.step.program import count_model_flops
from meshkit.step.state import ModelDescription, describe_model
from meshkit.units import format_bytes

_RESIDUAL = "embed"
# The constants down to `_KEPT_OF_ALL` only order the compiles, and were fitted to plans of llama3_70b on 64 H100. The
# first three are exposed shares: of a weight's gather with one micro-batch, of this gather with several, and of an
# exchange of activations.
_WEIGHTS_SHOW, _WEIGHTS_SHOW_IN_LOOP, _ACTIVATIONS_SHOW = 0.05, 0.8, 0.9
_GATHERED_TWICE = 1.5  # A step gathers a weight twice and reduces it once; the bound counts one gather.
_LARGE_TOKENS, _SMALLER_MATMULS = 16_384, 0.03  # Below so many tokens per GPU, halving a micro-batch costs matmuls 3 %.
_KEPT_OF_ALL = 2.5  # Bytes of all outputs of a layer, relative to the bytes of its projections.
_LAYERS_IN_FLIGHT = 2  # The layers whose values are being copied to or from host memory at the same time.
# Bytes of memory traffic for one element of a weight in a micro-batch. It is gathered and read in bf16 in the forward
# and the backward pass (8), and its gradient is written and read (4) and added to an fp32 sum (8).
_WEIGHT_TRAFFIC = 20

_PLACES_KEPT = 8
_ALL_TWICE = ("full", "nothing_saveable", "offload")  # Policies that recompute whole layers.
_INPUT, _ALL_PROJECTIONS, _FUSED = "layer_input", "projection", "attention"  # Names of `models.remat`.

Where = Literal["keep", "offload", "drop"]
Shape = tuple[int, int]  # The GPUs of a group inside one NVLink domain, and the domains that the group spans.
# Arguments: a collective, its bytes and the shape of its groups.
CollectiveSeconds = Callable[[str, float, Shape], float]


@dataclass(frozen=True)
class Bound:
    """The lower bounds of one variant, and guesses from the same numbers."""

    state_bytes: int
    """Parameters and moments on one GPU."""
    needed_bytes: int
    """A lower bound of the peak memory of one GPU."""
    compute_s: float
    link_s: float
    estimate_s: float
    estimate_bytes: float
    host_bytes: float = 0.0
    host_s: float = 0.0
    """The seconds in which the host link copies the offloaded data in one direction."""
    recomputed_share: float = 0.0
    """The share of the layers' matmuls that the backward pass runs again."""

    @property
    def time_s(self) -> float:
        """Return a lower bound of the step time."""
        return max(self.compute_s, self.link_s, self.host_s)


class Bounds:
    """The closed forms of one model on one cluster.

    Raises:
        ConfigError: the model cannot be imported, or does not accept its options.
    """

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._spec = resolve(experiment)
        self.model: ModelDescription = describe_model(self._spec)
        self._layers, self._copies, self._model_flops = _work(self.model, experiment)
        cluster, precision = experiment.cluster, experiment.train.precision
        self._peak = compute_peak_flops(cluster.gpu, precision) or math.inf
        self._sustained = self._peak * cluster.gpu.achieved["matmul"]
        self._cluster = cluster
        host = cluster.offload_link()
        self._host_bytes_per_s = host.bytes_per_s * host.achieved
        self._seconds_of = collective_seconds(cluster)
        self._placed: deque[tuple[tuple, Mapping[str, Sequence[Placed]]]] = deque(maxlen=_PLACES_KEPT)

    @property
    def logical_axes(self) -> set[str]:
        """Return the logical axes of the model's parameters."""
        one = AbstractMesh((1,), ("one",))
        found = placements(self.model.params, one, ShardingRules({}))  # pyright: ignore[reportArgumentType]
        return {name for leaf in found for name in leaf.logical_axes or () if name}

    @property
    def can_pipeline(self) -> bool:
        """Return whether the layers can become pipeline stages with the other settings of the experiment."""
        experiment = self._experiment
        if experiment.pipeline.axis is not None:
            return True
        if experiment.local_sgd.axis or experiment.compression.axis or experiment.train.loss:
            return False
        with contextlib.suppress(ConfigError):
            check_model(self._spec.model_class, self.model)
            return True
        return False

    def remats(self, policies: Sequence[Any]) -> list[Any]:
        """Return the policies (values of `train.remat`) that the model accepts, in order."""
        if not self.model.takes_remat:
            return []
        found = []
        for policy in policies:
            with contextlib.suppress(ConfigError):
                train = self._spec.train.model_copy(update={"remat": policy})
                describe_model(replace(self._spec, train=train))
                found.append(policy)
        return found

    def bound(self, variant: Experiment) -> Bound:
        """Return the bounds of a variant.

        The variant must have the experiment's model, cluster, precision, batch and sequence length, and a resolved
        mesh.

        Raises:
            ConfigError: mesh axes do not divide a dim, or one mesh axis is on two dims.
        """
        types = (AxisType.Auto,) * len(variant.mesh.shape)
        mesh: Any = AbstractMesh(variant.mesh.shape, variant.mesh.axis_names, axis_types=types)
        places = self._places(variant, mesh)
        sizes = variant.mesh.sizes
        deferred = deferred_axes(variant.rules, mesh) if variant.train.accumulate > 1 else ()
        token_axes = _token_axes(variant)
        tokens = variant.train.global_batch * variant.train.sequence_length
        tokens /= math.prod(sizes[a] for a in token_axes)
        pieces = variant.train.accumulate * (variant.pipeline.microbatches if variant.pipeline.axis else 1)
        state = _state_bytes(places, sizes, variant)
        held = _gradient_bytes(places, sizes, variant, deferred)
        whole = _whole_weights_bytes(places["compute"], sizes, variant, deferred)
        kept = self._kept(places["compute"], sizes, variant, tokens / pieces)
        moved = self._moved(places, variant, token_axes, tokens)
        moved["exchanges"] = self._exchanges(places["compute"], variant, tokens, kept.recomputed_share)
        stages = sizes.get(variant.pipeline.axis or "", 1)
        bubble = (stages - 1) / (variant.pipeline.microbatches * variant.pipeline.virtual_stages)
        flops = self._model_flops / self._cluster.num_gpus * (1 + bubble)
        logits = 2 * 4 * tokens / pieces * _vocabulary(places["compute"], sizes)
        recompute = (1 + kept.recomputed_share / 3) * self._places_over_layers(stages, variant.pipeline.virtual_stages)
        smaller = max(0.0, math.log2(_LARGE_TOKENS * pieces / tokens))
        work_s = flops / self._sustained * recompute * (1 + _SMALLER_MATMULS * smaller)
        host_s = kept.host_bytes / self._host_bytes_per_s  # For one micro-batch, in one direction.
        # Layers that exchange activations are not double-buffered, so the copies in one direction are exposed.
        waiting_s = host_s if moved["activations"] or moved["exchanges"] else 0.0
        return Bound(
            state_bytes=int(state),
            needed_bytes=int(state + whole + max(held, kept.least_bytes)),
            compute_s=flops / self._peak,
            link_s=self._slowest_link_s(moved, variant.mesh),
            estimate_s=work_s
            + pieces * (_host_shows_s(host_s, flops / self._sustained / 3 / pieces, work_s / pieces) + waiting_s)
            + self._communication_guess_s(moved, variant, deferred)
            + pieces * self._weights_pass_s(places["compute"], sizes, token_axes),
            estimate_bytes=state + whole + held + kept.guess_bytes + logits,
            host_bytes=kept.host_bytes,
            host_s=pieces * host_s,
            recomputed_share=kept.recomputed_share,
        )

    def _places_over_layers(self, stages: int, chunks: int) -> float:
        """Return the layers that a pipeline computes, with padding to equal chunks, divided by the model's layers."""
        places = stages * chunks
        return places * -(-self._layers // places) / self._layers if self._layers else 1.0

    def _weights_pass_s(self, leaves: Sequence[Placed], sizes: Mapping[str, int], token_axes: Sequence[str]) -> float:
        """Return the seconds of one micro-batch in which memory streams the weights and the gradient sums."""
        elements = sum(_local(leaf, sizes, token_axes) for leaf in leaves)
        return _WEIGHT_TRAFFIC * elements / memory_bytes_per_s(self._cluster.gpu)

    def _slowest_link_s(self, moved: Mapping[str, Sequence[_Payload]], mesh: MeshSpec) -> float:
        links = {"nvlink": 0.0, "infiniband": 0.0}
        for payload in (*moved["weights"], *moved["activations"]):
            link = "infiniband" if group_shape(payload.axes, mesh)[1] > 1 else "nvlink"
            links[link] += self._price(payload, mesh)
        return max(links.values())

    def _communication_guess_s(
        self, moved: Mapping[str, Sequence[_Payload]], variant: Experiment, deferred: Sequence[str]
    ) -> float:
        shown = (*moved["activations"], *moved["exchanges"])
        seconds = _ACTIVATIONS_SHOW * sum(self._price(payload, variant.mesh) for payload in shown)
        for payload in moved["weights"]:
            times = 1 if set(payload.axes) <= set(deferred) else variant.train.accumulate
            shows = _WEIGHTS_SHOW if times == 1 else _WEIGHTS_SHOW_IN_LOOP
            if variant.pipeline.axis is not None:  # A pipeline gathers before all micro-batches and reduces after them.
                shows = 1.0
            seconds += _GATHERED_TWICE * self._price(payload, variant.mesh) * times * shows
        return seconds

    def _places(self, variant: Experiment, mesh: Any) -> Mapping[str, Sequence[Placed]]:
        stages = variant.pipeline
        key = variant.mesh, variant.rules, stages.axis, stages.virtual_stages, stages.layout
        found = next((placed for known, placed in self._placed if known == key), None)
        if found is None:
            stack = find_stack(stages, self._spec.model_class, mesh, self.model)
            params = (arrange_description(self.model, stack) if stack else self.model).params
            kinds = ("parameters", "optimizer", "compute", "gradients")
            found = {kind: placements(params, mesh, variant.rules, kind=kind) for kind in kinds}
            self._placed.append((key, found))
        return found

    def _kept(self, leaves: Sequence[Placed], sizes: Mapping[str, int], variant: Experiment, tokens: float) -> _Kept:
        """Return the bytes that scanned layers keep for the backward pass.

        They are those of one micro-batch, or in a pipeline those of all micro-batches in flight.
        """
        remat, stages = variant.train.remat, variant.pipeline
        policy = _Policy.from_remat(remat)
        if not self._layers:
            return _Kept(0.0, 0.0, 0.0 if remat == "none" else 1.0)
        # A scan step may have several layers of several kinds, so each array counts its own stack. `inner` counts kept
        # elements per token inside layers, and `outer` counts kept outputs to the residual stream.
        width, scanned = _residual_width(leaves), 1
        inner, outer, work, kept_work, attended = 0.0, 0.0, 0.0, 0.0, 0.0
        away, away_outer = 0.0, 0  # The parts of `inner` and `outer` in host memory.
        for leaf in leaves:
            names = leaf.logical_axes or ()
            if "layers" not in names or len(names) < 3 or _RESIDUAL not in names:
                continue
            stack = leaf.shape[names.index("layers")]
            scanned = max(scanned, stack)
            work += math.prod(leaf.shape)
            first, *rest = [i for i, name in enumerate(names) if name != "layers"]
            made = stack * math.prod(leaf.shape[i] / math.prod(sizes[a] for a in leaf.spec[i]) for i in rest)
            if _FUSED in policy.named and "query" in leaf.path.split("/"):
                attended += made  # The output of attention has the size of its queries.
            if (where := policy.where(leaf.path)) == "drop":
                continue
            kept_work += math.prod(leaf.shape)
            if names[first] == _RESIDUAL:
                inner, away = (inner, away + made) if where == "offload" else (inner + made, away)
            else:  # The output is added to the residual stream and has its width.
                outer, away_outer = (outer, away_outer + stack) if where == "offload" else (outer + stack, away_outer)
        (residual,) = variant.rules.spec_for(("act_residual_length",), kind="activations")
        (length,) = variant.rules.spec_for(("act_length",), kind="activations")
        width /= math.prod(sizes[a] for a in residual if a not in length)
        each = tokens * PRECISIONS[variant.train.precision].item_bytes
        everything = _KEPT_OF_ALL if remat in ("none", "everything_saveable") else 1.0
        # The backward pass does not need outputs that are added to the residual stream, so the bound leaves them out.
        stays = 0 if policy.input_leaves else scanned
        host = each * (away + width * (away_outer + scanned - stays))
        guess = each * (width * (stays + outer) + inner + attended) * everything
        guess += _LAYERS_IN_FLIGHT * host / scanned
        again = 1 - kept_work / work if work else 1.0
        if stages.axis is None:
            return _Kept(each * (width * stays + inner), guess, again, host)
        ways, chunks = sizes[stages.axis], stages.virtual_stages
        flying = min((chunks + 1) * ways - 1, 2 * chunks * stages.microbatches) / (ways * chunks)
        if stages.residuals == "recompute":  # All chunks keep inputs; the recomputed chunk keeps what the policy says.
            return _Kept(0.0, each * width * flying * ways * chunks + guess / (ways * chunks), 1 + again)
        return _Kept(0.0, guess * flying, again)

    def _moved(
        self, places: Mapping[str, Sequence[Placed]], variant: Experiment, token_axes: Sequence[str], tokens: float
    ) -> dict[str, list[_Payload]]:
        """Return the least communication of a step: of weights over token axes, of activations over the other axes."""
        sizes = variant.mesh.sizes
        bytes_each = PRECISIONS[variant.train.precision].item_bytes
        reduce_bytes = PRECISIONS[variant.train.reduce_precision].item_bytes
        gathered: dict[tuple[str, ...], float] = defaultdict(float)
        scattered: dict[tuple[str, ...], float] = defaultdict(float)
        reduced: dict[tuple[str, ...], float] = defaultdict(float)
        other: set[str] = set()
        for leaf in places["parameters"]:
            names = leaf.logical_axes or (None,) * len(leaf.shape)
            axes = [a for name, dim in zip(names, leaf.spec) for a in dim if name != "experts"]
            own = {a for name, dim in zip(names, leaf.spec) for a in dim if name == "experts"}
            cut = tuple(a for a in axes if a in token_axes)
            rest = math.prod(sizes[a] for a in (*axes, *own) if a not in cut)
            other |= {a for a in axes if a not in token_axes and len(leaf.shape) > 1 and a != variant.pipeline.axis}
            elements = math.prod(leaf.shape) / rest
            if math.prod(sizes[a] for a in cut) > 1:
                gathered[cut] += elements * bytes_each
                scattered[cut] += elements * reduce_bytes
            whole = tuple(a for a in token_axes if a not in cut and a not in own)
            if math.prod(sizes[a] for a in whole) > 1:
                shards = math.prod(sizes[a] for a in cut)
                reduced[whole] += elements * reduce_bytes / shards
        weights = [_Payload("all-gather", axes, payload) for axes, payload in gathered.items()]
        weights += [_Payload("reduce-scatter", axes, payload) for axes, payload in scattered.items()]
        weights += [_Payload("all-reduce", axes, payload) for axes, payload in reduced.items()]
        activations = []
        axes = tuple(a for a in variant.mesh.axis_names if a in other and sizes[a] > 1)
        width = _residual_width(places["parameters"])
        if axes and self._layers and width:
            # Tensor parallelism (Megatron) sums a layer's activations twice in the forward and twice in the backward
            # pass. Each sum is an all-gather and a reduce-scatter.
            layers = self._layers / sizes.get(variant.pipeline.axis or "", 1)
            activations.append(_Payload("all-reduce", axes, 4 * layers * tokens * width * bytes_each))
        return {"weights": weights, "activations": activations}

    def _exchanges(
        self, leaves: Sequence[Placed], variant: Experiment, tokens: float, recomputed_share: float
    ) -> list[_Payload]:
        """Return the all-to-alls of a step that bring tokens to their experts and back.

        They are no bound, since an exchange may send one copy of a token to several experts, or drop tokens.
        """
        stacks, axes = {}, set()
        for leaf in leaves:
            names = leaf.logical_axes or ()
            if "experts" in names[:-1]:  # The last dim has the scores of a router, which sends no tokens.
                dim = names.index("experts")
                stacks[leaf.path.rpartition("/")[0]] = math.prod(leaf.shape[:dim])
                axes |= set(leaf.spec[dim])
        over = tuple(a for a in variant.mesh.axis_names if a in axes and variant.mesh.sizes[a] > 1)
        if not over:
            return []
        # There and back in the forward and in the backward pass; recomputation brings the tokens there once more.
        times = (4 + recomputed_share) * sum(stacks.values()) / variant.mesh.sizes.get(variant.pipeline.axis or "", 1)
        bytes_each = PRECISIONS[variant.train.precision].item_bytes
        sent = times * tokens * self._copies * _residual_width(leaves) * bytes_each
        return [_Payload("all-to-all", over, sent)]

    def _price(self, payload: _Payload, mesh: MeshSpec) -> float:
        return self._seconds_of(payload.collective, payload.bytes, group_shape(payload.axes, mesh))


@dataclass(frozen=True)
class _Policy:
    """How a recomputation policy treats the outputs of a layer's projections and of its attention."""

    named: frozenset[str] = frozenset()
    """Names of outputs that stay on the GPU."""
    offloaded: frozenset[str] = frozenset()
    """Names of outputs that are offloaded to host memory."""
    others: Where = "drop"
    """The treatment of all other outputs."""
    input_leaves: bool = False
    """Whether the input of a layer is offloaded to host memory."""

    @classmethod
    def from_remat(cls, remat: str | Sequence[str] | RematMix | Any) -> _Policy:
        if isinstance(remat, RematMix):
            return cls(frozenset(remat.keep), frozenset(remat.offload), "drop", _INPUT in remat.offload)
        if not isinstance(remat, str):
            return cls(frozenset(remat))
        if remat == "offload_dots":
            return cls(others="offload")
        named = frozenset({_FUSED} if remat == "dots" else ())
        return cls(named, others="drop" if remat in _ALL_TWICE else "keep", input_leaves=remat == "offload")

    def where(self, path: str) -> Where:
        # A projection's path contains the name of fused attention, but that name does not keep the projection's output.
        parts = {*path.split("/"), _ALL_PROJECTIONS} - {_FUSED}
        if parts & self.offloaded:
            return "offload"
        return "keep" if parts & self.named else self.others


@dataclass(frozen=True)
class _Kept:
    """A lower bound and a guess of the bytes that layers keep, and the share of their matmuls that runs twice."""

    least_bytes: float
    guess_bytes: float
    recomputed_share: float
    host_bytes: float = 0.0


@dataclass(frozen=True)
class _Payload:
    """A collective over whole mesh axes; `bytes` is the size of its operand, or of its result for an all-gather."""

    collective: str
    axes: tuple[str, ...]
    bytes: float


def _work(model: ModelDescription, experiment: Experiment) -> tuple[int, int, float]:
    """Return the number of layers, of experts per token (1 if the model does not say it), and of FLOP in a step."""
    tokens = experiment.train.global_batch * experiment.train.sequence_length
    made = model.abstract_model()
    params = [leaf for leaf in jax.tree.leaves(model.params) if hasattr(leaf, "shape")]
    flops = count_model_flops(made, params, tokens, experiment.train.sequence_length)
    layers = made.attention_shape()[0] if hasattr(made, "attention_shape") else 0  # pyright: ignore
    copies = getattr(getattr(made, "config", None), "experts_per_token", 1)
    return layers, copies, flops.model_flops_causal or 0.0


def _residual_width(leaves: Sequence[Placed]) -> int:
    """Return the width of the residual stream: the largest one, as narrower latents may have the same name."""
    named = ((leaf.logical_axes or (), leaf.shape) for leaf in leaves)
    return max((shape[n.index(_RESIDUAL)] for n, shape in named if "layers" in n and _RESIDUAL in n), default=0)


def _token_axes(variant: Experiment) -> tuple[str, ...]:
    (batch,) = variant.rules.spec_for(("act_batch",), kind="activations")
    (length,) = variant.rules.spec_for(("act_length",), kind="activations")
    return (*batch, *length)


def _local(leaf: Placed, sizes: Mapping[str, int], without: Sequence[str] = ()) -> float:
    """Return the elements that one GPU would have of an array if the axes in `without` did not shard it."""
    return math.prod(leaf.shape) / math.prod(sizes[a] for axes in leaf.spec for a in axes if a not in without)


def _state_bytes(places: Mapping[str, Sequence[Placed]], sizes: Mapping[str, int], variant: Experiment) -> float:
    optimizer = variant.optimizer
    kept = PRECISIONS[variant.train.parameter_precision].item_bytes
    state = kept * sum(_local(leaf, sizes) for leaf in places["parameters"])
    if optimizer.memory == "host" or optimizer.class_path is not None:
        return state
    first = PRECISIONS[optimizer.dtype].item_bytes
    for leaf in places["optimizer"]:
        by_muon = optimizer.algorithm == "muon" and matrix_dims(leaf.logical_axes or ()) is not None
        state += (first if by_muon else first + 4) * _local(leaf, sizes)  # Muon has no second moment.
    return state


def _gradient_bytes(
    places: Mapping[str, Sequence[Placed]], sizes: Mapping[str, int], variant: Experiment, deferred: Sequence[str]
) -> float:
    """Return the bytes of gradients: fp32 sums over micro-batches, or the reduction's dtype without accumulation."""
    if variant.train.accumulate == 1:
        each = PRECISIONS[variant.train.reduce_precision].item_bytes
        return each * sum(_local(leaf, sizes) for leaf in places["optimizer"])
    return 4 * sum(_local(leaf, sizes, deferred) for leaf in places["gradients"])


def _whole_weights_bytes(
    leaves: Sequence[Placed], sizes: Mapping[str, int], variant: Experiment, deferred: Sequence[str]
) -> float:
    """Return the bytes of weights that are gathered once over deferred axes and then held for the whole step."""
    cut = [leaf for leaf in leaves if any(a in deferred for axes in leaf.spec for a in axes)]
    return PRECISIONS[variant.train.precision].item_bytes * sum(_local(leaf, sizes, deferred) for leaf in cut)


def _vocabulary(leaves: Sequence[Placed], sizes: Mapping[str, int]) -> float:
    """Return the width of one GPU's logits; 0 if no parameter has a vocabulary."""
    dims = (dim for leaf in leaves for dim in zip(leaf.logical_axes or (), leaf.shape, leaf.spec))
    return max((size / math.prod(sizes[a] for a in axes) for name, size, axes in dims if name == "vocab"), default=0.0)


def _host_shows_s(host_s: float, forward_s: float, all_s: float) -> float:
    """Guess the exposed seconds of copies to the host (forward pass) and back (backward pass).

    The exposed seconds are the excess over the compute of each pass.
    """
    return max(0.0, host_s - forward_s) + max(0.0, host_s - (all_s - forward_s))


def pool_bytes(experiment: Experiment) -> int:
    """Return the bytes of a GPU's memory that the program may take."""
    return int(experiment.cluster.gpu.memory_bytes * experiment.train.memory_fraction)


def host_pool_bytes(experiment: Experiment) -> float | None:
    """Return one GPU's part of its host's memory; None if unknown."""
    cluster = experiment.cluster
    return cluster.host_memory_bytes and cluster.host_memory_bytes / cluster.gpus_used_per_host


def ruled_out(experiment: Experiment, bound: Bound) -> tuple[str, str] | None:
    """Return which memory is too small (`memory` or `host_memory`) and a text with the numbers; None if it may fit."""
    pool, there = pool_bytes(experiment), host_pool_bytes(experiment)
    if bound.needed_bytes > pool:
        return "memory", f"{format_bytes(bound.needed_bytes)} at least, of {format_bytes(pool)}"
    if there is not None and bound.host_bytes > there:
        return "host_memory", f"{format_bytes(bound.host_bytes)} a GPU at least, of {format_bytes(there)}"
    return None


def collective_seconds(cluster: Cluster) -> CollectiveSeconds:
    """Return a function that predicts the seconds of one collective by the network model, and caches the result.

    Returns:
        A function of an HLO opcode, the bytes on one GPU (the operand; for an all-gather the result) and the shape of a
        group. It raises ConfigError if the network model cannot predict the collective.
    """

    @functools.cache
    def seconds(collective: str, payload_bytes: float, shape: Shape) -> float:
        inside, domains = shape
        return collective_time_s(
            collective, payload_bytes=payload_bytes, gpus_per_domain=inside, domains=domains, cluster=cluster
        )

    return seconds


def group_shape(axes: Sequence[str], mesh: MeshSpec) -> Shape:
    """Return (GPUs inside a domain, domains) of groups over whole mesh axes; (1, 1) if the mesh has none of them."""
    found = [axis for axis in mesh.axes if axis.name in axes]
    inside = math.prod(axis.number("nvlink") for axis in found)
    return inside, math.prod(axis.number("infiniband") for axis in found)
