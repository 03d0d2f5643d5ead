"""Define the variants of an experiment, and write each of them as `--set` values for its file.

A variant keeps the machines, the model and the global batch, so that step times can be compared. It chooses the mesh
(the sizes of the axes and their factors on the links), the number of micro-batches, the schedule and microbatches of a
pipeline, the recomputation policy of the backward pass, and options of XLA.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.rules import PRESETS, preset_rules
from meshkit.config.sections import PGLE_OPTION, PREDICTED, RematMix, plain_value
from meshkit.config.toml import inline
from meshkit.errors import ConfigError

# Presets that shard parameters over `fsdp` (or not at all) and tensors over `tensor`. `_WIDEST` has more axes.
_EXTENDED = ("data", "zero3", "fsdp", "hsdp", "fsdp_tensor", "fsdp_tensor_sequence", "fsdp_context", "fsdp_expert")
_WIDEST = "all"
_PIPELINE = "pipeline"  # The name of the pipeline axis in variants of an experiment without a pipeline.
_CANONICAL = (_PIPELINE, "data", "fsdp", "expert", "context", "tensor")
# A sequence of at least this length is worth sharding.
LONG_SEQUENCE = 16_384
# Policies of what layers keep for the backward pass. A model accepts the policies whose names it has. `down` is left
# out, because its output becomes the next layer's input, which is kept anyway.
REMATS: tuple[Any, ...] = (
    "none",
    "dots",
    ("query", "key", "value", "gate", "up"),
    ("query", "key", "value", "output"),
    ("query", "key", "value"),
    ("key", "value"),
    "full",
    RematMix(("key", "value"), ("gate", "up")),
    RematMix((), ("gate", "up")),
    RematMix(("key", "value"), ("query", "output", "gate", "up")),
    RematMix(("key", "value"), ("query", "gate", "up")),
    RematMix(("query", "key", "value"), ("gate", "up", "layer_input")),
    RematMix(("query", "key", "value"), ("gate", "layer_input")),
    RematMix(("query", "key", "value", "output"), ("layer_input",)),
    RematMix(("query", "key", "value"), ("up", "layer_input")),
    RematMix((), ("up",)),
)

# A stage keeps for the backward pass either only its input, or everything that `train.remat` keeps.
_RESIDUALS = ("recompute", "stash")

Options = tuple[tuple[str, Any], ...]
Size = tuple[str, int]  # A key of the cluster (`hosts` or `gpus_used_per_domain`), and the value that it gets.


@dataclass(frozen=True)
class PipelineChoice:
    """The values of `[pipeline]` that a search varies."""

    microbatches: int
    schedule: str
    virtual_stages: int = 1
    residuals: str = "recompute"


@dataclass(frozen=True)
class Variant:
    """One choice for everything that a search varies."""

    mesh: MeshSpec
    accumulate: int
    each_micro_batch: bool
    """Whether each micro-batch reduces gradients (and gathers weights): that takes less memory than once a step."""
    remat: Any
    options: Options = ()
    """XLA options and `train.pgle` as keys of the file, beyond the experiment's own; for a step that a function builds,
    arguments of the function."""
    stages: PipelineChoice | None = None

    def differences(self, other: Variant) -> int:
        """Return how many choices differ."""
        return sum(getattr(self, f.name) != getattr(other, f.name) for f in dataclasses.fields(self))

    def distance(self, other: Variant) -> float:
        """Return the distance of two variants with the same axes: moved factors of two + different options."""
        moved = 0.0
        for a, b in zip(self.mesh.axes, other.mesh.axes):
            moved += sum(abs(math.log2(a.number(link) / b.number(link))) for link in ("nvlink", "infiniband"))
        return moved / 2 + sum(a != b for a, b in zip(self.options, other.options))


@dataclass(frozen=True)
class Space:
    """The values that each choice may have."""

    base: Variant
    preset: str | None
    """The experiment's preset of rules; None if the experiment names no preset."""
    meshes: tuple[MeshSpec, ...]
    accumulates: tuple[int, ...]
    remats: tuple[Any, ...]
    options: tuple[Options, ...]
    vary_reduction: bool = False
    """Whether `each_micro_batch` may vary, because no rule of the experiment is about gradients."""
    pipeline: str | None = None
    virtual_stages: tuple[int, ...] = ()
    """The numbers of chunks of layers that a stage of an interleaved pipeline may have."""
    size: Size | None = None
    """None for the size of the experiment's own cluster."""

    def variants(self) -> Iterator[Variant]:
        """Yield every combination; the base may be among them."""
        for mesh, each in itertools.product(self.meshes, (False, True)):
            if stages := list(self._stages(mesh)):
                for stage, options in itertools.product([] if each else stages, self.options):
                    for remat in self._remats_within(stage):
                        yield Variant(mesh, 1, False, remat, options, stage)
                continue
            if each and not (self.vary_reduction and "fsdp" in mesh.axis_names):
                continue
            accumulates = [n for n in self.accumulates if n > 1 or not each]
            for accumulate, remat, options in itertools.product(accumulates, self.remats, self.options):
                yield Variant(mesh, accumulate, each, remat, options)

    def _stages(self, mesh: MeshSpec) -> Iterator[PipelineChoice]:
        ways = next((axis.size for axis in mesh.axes if axis.name == self.pipeline), 1)
        if ways == 1:
            return
        for microbatches, residuals in itertools.product((2 * ways, 4 * ways, 8 * ways, 16 * ways), _RESIDUALS):
            yield PipelineChoice(microbatches, "1f1b", 1, residuals)
            for chunks in self.virtual_stages:
                yield PipelineChoice(microbatches, "interleaved_1f1b", chunks, residuals)

    def _remats_within(self, stage: PipelineChoice) -> Sequence[Any]:
        """Return the remat policies for a stage; a recomputed stage has one, so that no layer runs a third time."""
        if stage.residuals == "stash":  # Only a scan over layers overlaps offloading with other layers.
            return [remat for remat in self.remats if not isinstance(remat, RematMix)]
        return ("none",) if "none" in self.remats else (self.base.remat,)

    def changed(self, experiment: Experiment, variant: Variant) -> Experiment:
        """Return the experiment with the variant's choices, as if loaded with `settings`.

        `experiment` must already have the variant's mesh. The variant's XLA options are left out, because no closed
        form uses them.

        Raises:
            ConfigError: the mesh and the micro-batches do not divide the batch.
        """
        train, rules = experiment.train, experiment.rules
        ways = math.prod(
            axis.size
            for axis in variant.mesh.axes
            if axis.name in rules.spec_for(("act_batch",), kind="activations")[0]
        )
        pieces = variant.stages.microbatches if variant.stages else variant.accumulate
        if train.global_batch % (ways * pieces):
            raise ConfigError(
                f"train.global_batch = {train.global_batch} is not divisible by {ways * pieces} ({ways} of the mesh x "
                f"{pieces} micro-batches)."
            )
        if variant.each_micro_batch:
            rules = dataclasses.replace(rules, gradients={"embed": "fsdp"})
        train = train.model_copy(update={"accumulate": variant.accumulate, "remat": variant.remat})
        pipeline = experiment.pipeline
        if variant.stages:
            pipeline = pipeline.model_copy(update=dataclasses.asdict(variant.stages))
        return dataclasses.replace(experiment, train=train, rules=rules, pipeline=pipeline)

    def settings(self, variant: Variant) -> tuple[str, ...]:
        """Return the values for `--set` that make a variant, without those that equal the experiment's."""
        base, found = self.base, ["cluster.{}={}".format(*self.size)] if self.size else []
        if self.size or variant.mesh != base.mesh:
            found.append(f"mesh={inline(variant.mesh.to_dict())}")
        known = {*base.mesh.axis_names, *(preset_axes(self.preset) if self.preset else ()), self.pipeline}
        if self.preset and not set(variant.mesh.axis_names) <= known:
            found.append(f"rules.preset={_WIDEST}")
        if variant.each_micro_batch != base.each_micro_batch:
            found.append('rules.gradients.embed="fsdp"')
        found += self._pipeline_settings(variant)
        if variant.accumulate != base.accumulate:
            found.append(f"train.accumulate={variant.accumulate}")
        if variant.remat != base.remat:
            found.append(f"train.remat={inline(plain_value(variant.remat))}")
        before = dict(base.options)
        return (*found, *(f"{name}={inline(v)}" for name, v in variant.options if before.get(name) != v))

    def _pipeline_settings(self, variant: Variant) -> list[str]:
        now, before = variant.stages, self.base.stages
        if now == before:
            return []
        if now is None:
            return ["pipeline="]
        axis = [f"pipeline.axis={inline(self.pipeline)}"] if before is None else []
        return [*axis, *(f"pipeline.{name}={inline(value)}" for name, value in dataclasses.asdict(now).items())]


def make_space(
    experiment: Experiment,
    *,
    axes: Sequence[str] | None,
    logical_axes: set[str],
    remats: Sequence[Any],
    can_pipeline: bool = False,
    size: Size | None = None,
) -> Space:
    """Return the variants of an experiment; if `axes` is None, those over the axes that its rules know.

    Raises:
        ConfigError: no rule of the experiment knows one of the axes.
    """
    preset = _preset(experiment)
    names = _axis_names(experiment, preset, axes, logical_axes, can_pipeline)
    train = experiment.train
    pipeline, stages = experiment.pipeline, None
    if pipeline.axis is not None:
        stages = PipelineChoice(pipeline.microbatches, pipeline.schedule, pipeline.virtual_stages, pipeline.residuals)
    base = Variant(experiment.mesh, train.accumulate, False, train.remat, stages=stages)
    accumulates = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= train.global_batch]
    return Space(
        base=base,
        preset=preset,
        meshes=tuple(meshes_over(experiment.cluster, names, experiment.mesh.axis_names)),
        accumulates=tuple(sorted({train.accumulate, *accumulates})),
        remats=tuple(dict.fromkeys((train.remat, *remats))),
        options=((), *_option_sets(experiment)),
        vary_reduction=preset is not None and not experiment.rules.gradients,
        pipeline=pipeline.axis or (_PIPELINE if _PIPELINE in names else None),
        virtual_stages=(2, 4, 5),
        size=size,
    )


# Options that change the program and that the plan does not derive: the latencies that XLA's scheduler uses, and the
# number of collectives that may be in flight.
BY_PRICES: Options = (("train.pgle", PREDICTED),)
TWO_AT_A_TIME: Options = (("xla.xla_gpu_experimental_parallel_collective_overlap_limit", 2),)
OPTION_SETS: tuple[Options, ...] = (TWO_AT_A_TIME, BY_PRICES, (*BY_PRICES, *TWO_AT_A_TIME))


@functools.cache
def preset_axes(preset: str) -> frozenset[str]:
    """Return the mesh axes that a preset names."""
    return frozenset(axis for table in preset_rules(preset).values() for axes in table.values() for axis in axes)


def _option_sets(experiment: Experiment) -> list[Options]:
    """Return the option sets that change the experiment: none with predicted latencies if it has them or a profile."""
    given = experiment.train.pgle == PREDICTED or PGLE_OPTION in experiment.xla
    return [some for some in OPTION_SETS if not (given and BY_PRICES[0] in some)]


def _preset(experiment: Experiment) -> str | None:
    """Return the preset that the file's rules name; None if they name none."""
    rules = experiment.document.table.get("rules", {}) if experiment.document else {}
    name = rules.get("preset") if isinstance(rules, Mapping) else None
    return name if isinstance(name, str) and name in PRESETS else None


def _axis_names(
    experiment: Experiment,
    preset: str | None,
    axes: Sequence[str] | None,
    logical_axes: set[str],
    can_pipeline: bool,
) -> tuple[str, ...]:
    """Return the axes that may be larger than 1, outermost first: in the file's order, new axes by `_CANONICAL`."""
    present = experiment.mesh.axis_names
    known = set(present) | (preset_axes(preset) if preset else set())
    if preset in _EXTENDED or preset == _WIDEST:
        known |= {"data", "fsdp", "tensor"}
        known |= {"expert"} if "experts" in logical_axes else set()
        known |= {"context"} if experiment.train.sequence_length >= LONG_SEQUENCE else set()
        known |= {_PIPELINE} if can_pipeline else set()
    if "experts" not in logical_axes:
        known -= {"expert"} - set(present)
    if preset and experiment.train.sequence_length < LONG_SEQUENCE and "context" not in present:
        known -= {"context"}
    if axes is not None:
        widest = preset_axes(_WIDEST) | {_PIPELINE} if preset in _EXTENDED or preset == _WIDEST else known
        for name in axes:
            if name not in known | widest:
                hint = f"of {', '.join(sorted(known | widest))}"
                raise ConfigError(f"no rule of the experiment knows a mesh axis '{name}'.", at="--axes", hint=hint)
        known = set(axes)
    chosen = [name for name in present if name in known or name in present]
    for name in (n for n in _CANONICAL if n in known and n not in present):
        later = [other for other in _CANONICAL[_CANONICAL.index(name) + 1 :] if other in chosen]
        chosen.insert(chosen.index(later[0]) if later else len(chosen), name)
    return tuple(chosen)


def meshes_over(cluster: Cluster, names: Sequence[str], present: Sequence[str]) -> Iterator[MeshSpec]:
    """Yield every way to share the GPUs of a domain, and the domains, among the axes.

    An axis of size 1 is left out. Axes in `present` stay, because rules may name them.
    """
    for inside in factorizations(cluster.gpus_used_per_domain, len(names)):
        for across in factorizations(cluster.num_nvlink_domains, len(names)):
            axes = [MeshAxis(*axis) for axis in zip(names, inside, across)]
            yield MeshSpec(tuple(axis for axis in axes if axis.size > 1 or axis.name in present))


def factorizations(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write n as a product of `parts` factors, in every order."""
    if parts < 2:
        yield from [(n,)] * parts or [()] * (n == 1)
        return
    for first in (d for d in range(1, n + 1) if n % d == 0):
        for rest in factorizations(n // first, parts - 1):
            yield first, *rest
