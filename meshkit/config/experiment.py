"""Experiment: one file that says what machines, mesh, rules and model; every verb starts from it.

`load()` reads the TOML, lays the overrides over it, validates every table, resolves the mesh on the cluster and checks
what can be checked without jax. An error names file, line and key, and what to try.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshkit.config import catalog, checks
from meshkit.config.cluster import Cluster, load_table, shipped_clusters
from meshkit.config.document import TomlDocument, as_table
from meshkit.config.emit import to_toml
from meshkit.config.locate import split_key
from meshkit.config.mesh import MeshSpec
from meshkit.config.rules import PRESETS, ShardingRules, preset_rules
from meshkit.config.sections import (
    CheckpointTable,
    ClusterTable,
    CompressionTable,
    DataTable,
    ExperimentTable,
    LintTable,
    LocalSgdTable,
    ModelTable,
    OptimizerTable,
    PipelineTable,
    ProfileTable,
    RematMix,
    TrainTable,
)
from meshkit.config.shipped import find_experiment
from meshkit.config.site import check_files
from meshkit.config.validate import SpecError, TomlTable, check_plain, validate
from meshkit.errors import ConfigError

__all__ = ["Experiment", "experiment_json_schema", "load"]


@dataclass(frozen=True)
class Experiment:
    """A resolved experiment: every default filled in, the mesh resolved on the cluster.

    A file without `[local_sgd]`, `[compression]` or `[pipeline]` has one whose axis is None.
    """

    name: str
    cluster: Cluster
    mesh: MeshSpec
    rules: ShardingRules
    model: ModelTable
    train: TrainTable
    optimizer: OptimizerTable
    data: DataTable
    checkpoint: CheckpointTable
    profile: ProfileTable
    local_sgd: LocalSgdTable
    compression: CompressionTable
    pipeline: PipelineTable
    lint: LintTable
    xla: Mapping[str, Any]
    path: Path | None = field(default=None, compare=False)
    document: TomlDocument | None = field(default=None, compare=False, repr=False)

    def error(self, key: str, message: str, hint: str | None = None) -> ConfigError:
        """An error about a key (dotted), pointing at where it was written."""
        return SpecError(message, key=split_key(key), hint=hint, at=self.where(key))

    def where(self, key: str) -> str:
        """Where a key (dotted) was written."""
        return self.document.where(split_key(key)) if self.document else key

    @property
    def search_paths(self) -> list[Path]:
        """Where modules are looked for: the working directory, the folder of the file, and its parents but for `/`.

        Of an experiment that lies in the package, the working directory alone.
        """
        found = [Path.cwd()]
        if self.path is None or Path(__file__).resolve().parents[1] in self.path.resolve().parents:
            return found
        nearest, *above = self.path.resolve().parents
        folders = [nearest, *(folder for folder in above if folder != folder.parent)]
        return found + [folder for folder in folders if folder != found[0]]

    def to_dict(self) -> dict[str, Any]:
        """The tables of the resolved file."""
        axes = {key: getattr(self, key) for key in ("local_sgd", "compression", "pipeline")}
        own = self.optimizer.class_path is not None
        tables = {
            "name": self.name,
            "cluster": self.cluster.to_dict(),
            "model": {"class": self.model.class_path, "preset": self.model.preset, **self.model.options},
            "mesh": self.mesh.to_dict(),
            "rules": self.rules.to_dict(),
            "train": _plain(self.train),
            "optimizer": {k: v for k, v in _plain(self.optimizer).items() if not own or k not in checks.ADAMW_KEYS},
            **{key: _plain(getattr(self, key)) for key in ("data", "checkpoint", "profile")},
            **{key: _plain(section) for key, section in axes.items() if section.axis},
            "lint": {"allow": [_plain(item) for item in self.lint.allow] or None},
            "xla": dict(self.xla),
        }
        return {key: value for key, value in tables.items() if _says_something(value)}

    def to_toml(self) -> str:
        """The resolved file; it loads back to an equal experiment."""
        return to_toml(self.to_dict())


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of a file, or a shipped one by its name, with `key=value` overrides laid over it.

    Raises:
        ConfigError: what the user wrote is wrong; the message names file, line and key, and what to try.
    """
    document = TomlDocument.read(find_experiment(path))
    try:
        check_plain(document.table)
        checks.check_secrets(document.table)
        document = document.with_overrides(overrides)
        checks.check_secrets(document.table, document.overrides)
        check_files(document.table)
        return _build(document)
    except SpecError as error:
        raise document.locate(error) from None


def _build(document: TomlDocument) -> Experiment:
    """The experiment of a document: every table checked, the mesh resolved, the rules made."""
    check_plain(document.table)
    checked = validate(ExperimentTable, document.table)
    cluster = load_table(as_table(checked.cluster), folder=document.path.parent)
    mesh = MeshSpec.parse(checked.mesh).resolve(cluster)
    rules = _build_rules(checked, mesh, document)
    checks.check_sections(checked, mesh, rules)
    return Experiment(
        name=checked.name or document.path.stem,
        cluster=cluster,
        mesh=mesh,
        rules=rules,
        model=checked.model,
        train=checked.train,
        optimizer=checked.optimizer,
        data=checked.data,
        checkpoint=checked.checkpoint,
        profile=checked.profile,
        local_sgd=checked.local_sgd or LocalSgdTable(axis=None),
        compression=checked.compression or CompressionTable(axis=None),
        pipeline=checked.pipeline or PipelineTable(axis=None, microbatches=1),
        lint=checked.lint,
        xla=checked.xla,
        path=document.path,
        document=document,
    )


def _build_rules(checked: ExperimentTable, mesh: MeshSpec, document: TomlDocument) -> ShardingRules:
    """The rules of the file over those of its preset, and those that a pipeline adds."""
    table = checked.rules
    preset = preset_rules(table.preset, mesh.axis_names) if table.preset is not None else {}
    logical = preset.get("logical", {})
    known = checked.pipeline and checked.pipeline.axis in mesh.axis_names  # else refused later, by its own key
    staged = checks.pipeline_rules(checked.pipeline, {**logical, **table.logical}) if known else {}
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


def _says_something(value: Any) -> bool:
    """Whether a key or section belongs into the resolved file."""
    return any(item is not None for item in value.values()) if isinstance(value, dict) else value is not None


def _plain(section: TomlTable) -> dict[str, Any]:
    """The keys of a section with the values that a file has."""
    return {key: _plain_value(getattr(section, name)) for name, key in _keys(section)}


def _keys(section: TomlTable) -> Iterator[tuple[str, str]]:
    """Name and key in the file of every field."""
    return ((name, field.alias or name) for name, field in type(section).model_fields.items())


def _plain_value(value: Any) -> Any:
    """A value as TOML has it."""
    if isinstance(value, RematMix):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def experiment_json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of an experiment file."""
    schema = ExperimentTable.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "meshkit experiment"
    schema["properties"]["cluster"] |= _cluster_schema()
    schema["$defs"]["RulesTable"]["properties"]["preset"]["enum"] = sorted(PRESETS)
    return schema


def _cluster_schema() -> dict[str, Any]:
    """A name, a path, or a table; a table with `name` or `file` needs no further key."""
    table = ClusterTable.model_json_schema()
    properties = table["properties"]
    properties["gpu"]["enum"] = list(catalog.gpu_keys())
    properties["nic"]["enum"] = list(catalog.nic_keys())
    properties["file"] = {"type": "string", "description": "a cluster file that the other keys override"}
    table["anyOf"] = [{"required": ["name"]}, {"required": ["file"]}, {"required": table.pop("required")}]
    return {"oneOf": [{"type": "string", "examples": list(shipped_clusters())}, table]}
