"""Experiment: one file that says what machines, mesh, rules and model; every verb starts from it.

`load()` reads the TOML, lays the overrides over it, validates every table, resolves the mesh on the cluster and checks
what can be checked without jax. An error names file, line and key, and what to try.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from meshkit.config.cluster import Cluster, as_table, load_table
from meshkit.config.document import Document
from meshkit.config.emit import to_toml
from meshkit.config.locate import split_key
from meshkit.config.mesh import MeshSpec
from meshkit.config.overrides import apply_overrides
from meshkit.config.paths import absolute_paths
from meshkit.config.pipelines import check_alone, check_pipeline, pipeline_rules
from meshkit.config.problems import SpecError, did_you_mean
from meshkit.config.rules import ShardingRules, preset_rules
from meshkit.config.schema import experiment_json_schema
from meshkit.config.secrets import check_secrets
from meshkit.config.sections import (
    PGLE_OPTION,
    PREDICTED,
    Allowed,
    CheckpointSpec,
    CompressionSpec,
    DataSpec,
    LintSpec,
    LocalSgdSpec,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    ProfileSpec,
    RematMix,
    TrainSpec,
)
from meshkit.config.site import check_files
from meshkit.config.tables import ExperimentTable, TrainTable
from meshkit.config.validate import check_plain, validate
from meshkit.errors import ConfigError

__all__ = ["Experiment", "experiment_json_schema", "load"]


@dataclass(frozen=True)
class Experiment:
    """A resolved experiment: every default filled in, the mesh resolved on the cluster."""

    name: str
    cluster: Cluster
    mesh: MeshSpec
    rules: ShardingRules
    model: ModelSpec
    train: TrainSpec
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    data: DataSpec = field(default_factory=DataSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    profile: ProfileSpec = field(default_factory=ProfileSpec)
    local_sgd: LocalSgdSpec = field(default_factory=LocalSgdSpec)
    compression: CompressionSpec = field(default_factory=CompressionSpec)
    pipeline: PipelineSpec = field(default_factory=PipelineSpec)
    lint: LintSpec = field(default_factory=LintSpec)
    xla: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = field(default=None, compare=False)
    document: Document | None = field(default=None, compare=False, repr=False)

    def error(self, key: str, message: str, hint: str | None = None) -> ConfigError:
        """An error about a key (dotted), pointing at where it was written."""
        path = split_key(key)
        at = self.document.where(path) if self.document else key
        return SpecError(message, key=path, hint=hint, at=at)

    @property
    def search_paths(self) -> list[Path]:
        """Where the model's module is looked for.

        The working directory, the folder of the file, and its parents up to the one that holds the module.
        """
        found = [Path.cwd()]
        if self.path is None:
            return found
        top = self.model.class_path.partition(":")[0].partition(".")[0]
        parents = list(self.path.resolve().parents)
        holds = [index for index, folder in enumerate(parents) if _holds_module(folder, top)]
        folders = parents[: holds[0] + 1] if holds else parents[:1]
        return found + [folder for folder in folders if folder != found[0]]

    def to_dict(self) -> dict[str, Any]:
        """The tables of the resolved file."""
        model = {"class": self.model.class_path, "preset": self.model.preset, **self.model.options}
        sections = {key: _plain(getattr(self, key)) for key in ("train", "optimizer", "data", "checkpoint", "profile")}
        sections |= {
            key: _plain(spec) for key in ("local_sgd", "compression", "pipeline") if (spec := getattr(self, key)).axis
        }
        if self.lint.allow:
            sections["lint"] = {"allow": [_plain(item) for item in self.lint.allow]}
        tables = {
            "name": self.name,
            "cluster": self.cluster.to_dict(),
            "model": model,
            "mesh": self.mesh.to_dict(),
            "rules": self.rules.to_dict(),
            **sections,
            "xla": dict(self.xla),
        }
        return {key: value for key, value in tables.items() if _says_something(value)}

    def to_toml(self) -> str:
        """The resolved file; it loads back to an equal experiment."""
        return to_toml(self.to_dict())


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of a file, with `key=value` overrides laid over it.

    Raises:
        ConfigError: what the user wrote is wrong; the message names file, line and key, and what to try.
    """
    document = Document.read(path)
    try:
        check_plain(document.table)
        check_secrets(document.table)
        table = absolute_paths((), document.table, document.path.parent)
        table, parsed = apply_overrides(table, overrides)
        document = document.with_overrides(table, parsed)
        check_secrets(table, parsed)
        check_files(table)
        return _build(document, table)
    except SpecError as error:
        raise document.locate(error) from None


def _build(document: Document, table: Mapping[str, Any]) -> Experiment:
    check_plain(table)
    checked = validate(ExperimentTable, table)
    cluster = load_table(as_table(checked.cluster), folder=document.path.parent)
    mesh = MeshSpec.parse(checked.mesh).resolve(cluster)
    rules = _build_rules(checked, mesh, document)
    model = dict(checked.model.model_extra or {})
    experiment = Experiment(
        name=checked.name or document.path.stem,
        cluster=cluster,
        mesh=mesh,
        rules=rules,
        model=ModelSpec(checked.model.class_path, checked.model.preset, model),
        train=TrainSpec(**(checked.train.model_dump() | {"remat": checked.train.remat})),
        optimizer=OptimizerSpec(**checked.optimizer.model_dump()),
        data=DataSpec(**checked.data.model_dump()),
        checkpoint=CheckpointSpec(**checked.checkpoint.model_dump()),
        profile=ProfileSpec(_step_range(checked.profile.steps, checked.train), checked.profile.processes),
        local_sgd=LocalSgdSpec(**checked.local_sgd.model_dump()) if checked.local_sgd else LocalSgdSpec(),
        compression=CompressionSpec(**checked.compression.model_dump()) if checked.compression else CompressionSpec(),
        pipeline=PipelineSpec(**checked.pipeline.model_dump()) if checked.pipeline else PipelineSpec(),
        lint=LintSpec(tuple(Allowed(**item.model_dump()) for item in checked.lint.allow)),
        xla=_xla_options(checked.xla),
        path=document.path,
        document=document,
    )
    _check_axis(experiment, "local_sgd")
    _check_axis(experiment, "compression")
    _check_rounds(experiment)
    _check_profile(experiment)
    check_pipeline(experiment.pipeline, rules, dict(zip(mesh.axis_names, mesh.shape)), experiment.train)
    check_alone(experiment.pipeline, experiment.local_sgd.axis, experiment.compression.axis)
    _check_division(experiment, "act_batch", "global_batch")
    _check_division(experiment, "act_length", "sequence_length")
    _check_division(experiment, "act_residual_length", "sequence_length")
    return experiment


def _build_rules(checked: ExperimentTable, mesh: MeshSpec, document: Document) -> ShardingRules:
    table = checked.rules
    preset = preset_rules(table.preset, mesh.axis_names) if table.preset is not None else {}
    logical = preset.get("logical", {})
    known = checked.pipeline and checked.pipeline.axis in mesh.axis_names  # else refused later, by its own key
    staged = pipeline_rules(checked.pipeline, {**logical, **table.logical}) if known else {}
    rules = ShardingRules(
        {**logical, **table.logical, **staged},
        overrides=[(override.path, override.spec) for override in table.override],
        compute={**preset.get("compute", {}), **table.compute},
        gradients={**preset.get("gradients", {}), **table.gradients},
        optimizer={**preset.get("optimizer", {}), **table.optimizer},
        auto=table.auto.model_dump() if table.auto else None,
        from_preset=(frozenset(logical) | frozenset(staged)) - frozenset(table.logical),
        where=document.where,
    )
    rules.check(mesh.axis_names)
    return rules


def _step_range(steps: list[int] | None, train: TrainTable) -> tuple[int, int] | None:
    if steps is None:
        return None
    first, last = steps
    if first < 1:
        hint = f"steps = [1, {max(1, last)}]"
        raise SpecError("profile.steps counts from 1.", key=("profile", "steps"), value=steps, hint=hint)
    if first > last or last > train.steps:
        problem = "ends before it begins" if first > last else f"goes beyond the {train.steps} steps of [train]"
        hint = f"steps = [{min(first, last, train.steps)}, {min(max(first, last), train.steps)}]"
        raise SpecError(f"profile.steps {problem}.", key=("profile", "steps"), value=steps, hint=hint)
    return first, last


def _xla_options(table: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in table.items():
        if not name.startswith("xla_"):
            hint = f"xla_{name.removeprefix('--').removeprefix('xla_')}"
            raise SpecError(f"'{name}' is no XLA option.", key=("xla", name), value=value, hint=hint)
        if not isinstance(value, bool | int | float | str):
            raise SpecError(
                f"xla.{name} must be a string, a number, true or false.",
                key=("xla", name),
                value=value,
                hint="one plain value",
            )
    return dict(table)


def _check_axis(experiment: Experiment, section: str) -> None:
    """The axis that replicas meet over must be one of the mesh that cuts the batch."""
    axis = getattr(experiment, section).axis
    known = experiment.mesh.axis_names
    if axis is not None and axis not in known:
        hint = did_you_mean(axis, known)
        message = f"{section}.axis names mesh axis '{axis}', but the mesh has {', '.join(known)}."
        raise SpecError(message, key=(section, "axis"), value=axis, hint=hint)
    batch = experiment.rules.mapping("activations").get("act_batch", ())
    if axis is not None and axis not in batch:
        message = f"{section}.axis = '{axis}' does not cut the batch (act_batch: {', '.join(batch) or 'replicated'})."
        raise SpecError(message, key=(section, "axis"), value=axis, hint="an axis of act_batch")


def _check_profile(experiment: Experiment) -> None:
    """XLA schedules by one profile."""
    if experiment.train.pgle == PREDICTED and PGLE_OPTION in experiment.xla:
        message = f'train.pgle = "{PREDICTED}" asks for predicted latencies, and xla.{PGLE_OPTION} names measured ones.'
        hint = "the measured ones alone: without train.pgle"
        raise SpecError(message, key=("train", "pgle"), value=PREDICTED, hint=hint)


def _check_rounds(experiment: Experiment) -> None:
    """With local SGD everything happens between rounds: what counts steps must count whole ones."""
    local, every = experiment.local_sgd, experiment.local_sgd.every
    if local.axis is None:
        return
    if experiment.compression.axis is not None:
        message = "local_sgd exchanges parameters once a round, and no gradients that compression could compress."
        raise SpecError(message, key=("compression", "axis"), hint="one of the two sections")
    if experiment.optimizer.memory == "host":
        message = "local_sgd needs the optimizer's state on the GPU all through a round."
        raise SpecError(message, key=("optimizer", "memory"), value="host", hint='memory = "device"')
    train, checkpoint, profile = experiment.train, experiment.checkpoint, experiment.profile.steps
    counts = {
        ("train", "steps"): train.steps,
        ("train", "evaluate_every"): train.evaluate_every,
        ("train", "replica_check_every"): train.replica_check_every,
        ("checkpoint", "every"): checkpoint.every,
    }
    for key, value in counts.items():
        if value % every:
            nearest = max(1, round(value / every)) * every
            message = f"{'.'.join(key)} = {value} is no multiple of the {every} steps of a round (local_sgd.every)."
            raise SpecError(message, key=key, value=value, hint=f"{key[1]} = {nearest}")
    if profile is not None and ((profile[0] - 1) % every or profile[1] % every):
        first = (profile[0] - 1) // every * every + 1
        message = f"profile.steps = {list(profile)} does not hold whole rounds of {every} steps (local_sgd.every)."
        raise SpecError(message, key=("profile", "steps"), hint=f"steps = [{first}, {-(-profile[1] // every) * every}]")


def _check_division(experiment: Experiment, logical: str, key: str) -> None:
    """The dim that `[train]` sizes must divide over the mesh axes that shard it, and the batch over micro-batches."""
    axes = experiment.rules.mapping("activations").get(logical, ())
    sizes = dict(zip(experiment.mesh.axis_names, experiment.mesh.shape))
    ways = math.prod(sizes[axis] for axis in axes)
    parts = [f"{axis} {sizes[axis]}" for axis in axes]
    for word, count in (
        ("accumulate", experiment.train.accumulate),
        ("microbatches", experiment.pipeline.microbatches),
    ):
        if key == "global_batch" and count > 1:
            ways *= count
            parts.append(f"{word} {count}")
    value = getattr(experiment.train, key)
    if value % ways:
        shown = f"{ways} ({' x '.join(parts)})" if len(parts) > 1 else f"{ways} ({parts[0]})"
        lower, upper = value // ways * ways, -(-value // ways) * ways
        hint = f"{key} = {upper}" + (f" or {lower}" if lower else "")
        message = f"train.{key} = {value} does not divide by {shown}."
        raise SpecError(message, key=("train", key), value=value, hint=hint)


def _holds_module(folder: Path, top: str) -> bool:
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def _says_something(value: Any) -> bool:
    return any(item is not None for item in value.values()) if isinstance(value, dict) else value is not None


def _plain(spec: Any) -> dict[str, Any]:
    values = {item.name: getattr(spec, item.name) for item in fields(spec)}
    return {key: _plain_value(value) for key, value in values.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, RematMix):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value
