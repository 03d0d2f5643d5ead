"""Load an experiment: one file with machines, mesh, rules and model, with which every command starts.

`load()` reads the TOML, applies the overrides, validates every table and resolves the mesh on the cluster. Without jax,
it checks that each section fits the mesh, the rules and the other sections. An error names file, line and key, and what
to try.

`[pipeline]` implies rules. Its axis shards the layers of every stacked parameter. With `head = "vocab_parallel"` it
also shards the vocabulary, as the outermost of the vocabulary's axes. It may shard nothing else.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshkit.config import catalog
from meshkit.config.cluster import Cluster, load_table, shipped_clusters
from meshkit.config.fewer_hosts import fit_to_hosts
from meshkit.config.files import Override, TomlDocument, as_table
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.config.places import Places
from meshkit.config.precisions import PRECISIONS
from meshkit.config.rules import PRESETS, ShardingRules, preset_rules
from meshkit.config.sections import (
    PGLE_OPTION,
    PREDICTED,
    TABLE,
    TABLE_OPTION,
    CheckpointTable,
    ClusterTable,
    CompressionTable,
    DataTable,
    ExperimentTable,
    FailuresTable,
    LaunchTable,
    LintTable,
    LocalSgdTable,
    ModelTable,
    OptimizerTable,
    PipelineTable,
    ProfileTable,
    ProgramExperimentTable,
    ProgramTable,
    ProgramTrainTable,
    RulesTable,
    TrainTable,
    plain_value,
)
from meshkit.config.site import check_files
from meshkit.config.toml import (
    Key,
    SpecError,
    TomlTable,
    check_plain,
    did_you_mean,
    dotted,
    to_toml,
    unknown_key,
    validate,
)
from meshkit.config.user_code import find_experiment
from meshkit.config.xla_options import check_xla_options
from meshkit.errors import ConfigError
from meshkit.redaction import has_credentials, is_secret_name

__all__ = ["Experiment", "ProgramExperiment", "experiment_json_schema", "load", "load_any"]
PROGRAMS = (".bin", ".mlir", ".pb")  # Endings of files that hold a program, see meshkit.integrations.exported.

# Keys of [optimizer] that only AdamW has.
ADAMW_KEYS = ("algorithm", "weight_decay", "dtype", "b1", "b2", "eps", "momentum")


@dataclass(frozen=True, kw_only=True)
class ExperimentFile:
    """The sections that every experiment file has, with every default filled in."""

    name: str
    cluster: Cluster
    mesh: MeshSpec
    rules: ShardingRules
    profile: ProfileTable
    failures: FailuresTable
    lint: LintTable
    xla: Mapping[str, Any]
    path: Path | None = field(default=None, compare=False)
    document: TomlDocument | None = field(default=None, compare=False, repr=False)

    def error(self, key: str, message: str, hint: str | None = None) -> ConfigError:
        """Return an error about a dotted key, which points at the place where the key was written."""
        return self.places.error(key, message, hint)

    def where(self, key: str) -> str:
        """Return the place where a dotted key was written."""
        return self.places.where(key)

    @property
    def file(self) -> str:
        """Return the path or name by which a command line names the experiment."""
        return str(self.path or self.name)

    @property
    def placement(self) -> Placement:
        """Return the GPU, domain and host of each partition of the mesh."""
        return self.mesh.placement(self.cluster)

    @property
    def places(self) -> Places:
        """Return the places where the keys were written."""
        return Places(self.document)

    @property
    def search_paths(self) -> list[Path]:
        """Return the folders searched for modules: working directory, the file's folder, and its parents except `/`.

        For an experiment inside the package, it is the working directory alone.
        """
        found = [Path.cwd()]
        if self.path is None or Path(__file__).resolve().parents[1] in self.path.resolve().parents:
            return found
        nearest, *above = self.path.resolve().parents
        folders = [nearest, *(folder for folder in above if folder != folder.parent)]
        return found + [folder for folder in folders if folder != found[0]]

    def to_dict(self) -> dict[str, Any]:
        """Return the tables of the resolved file."""
        raise TypeError("a file is an Experiment or a ProgramExperiment")

    def to_toml(self) -> str:
        """Return the resolved file as TOML, which loads as an equal experiment."""
        return to_toml(self.to_dict())


@dataclass(frozen=True, kw_only=True)
class ProgramExperiment(ExperimentFile):
    """An experiment with the user's own training step. If the file has no `[rules]`, `rules` is empty."""

    program: ProgramTable
    train: ProgramTrainTable

    def to_dict(self) -> dict[str, Any]:
        """Return the tables of the resolved file."""
        tables = {
            "name": self.name,
            "cluster": self.cluster.to_dict(),
            "mesh": self.mesh.to_dict(),
            "program": _plain(self.program),
            "rules": self.rules.to_dict() if self.has_rules else {},
            "train": _plain(self.train),
            "profile": _plain(self.profile),
            "failures": _plain(self.failures),
            "lint": {"allow": [_plain(item) for item in self.lint.allow] or None},
            "xla": dict(self.xla),
        }
        return {key: value for key, value in tables.items() if _says_something(value)}

    @property
    def has_rules(self) -> bool:
        """Return whether the file has rules for the sharding of its parameters."""
        return bool(self.rules.logical or self.rules.overrides)


@dataclass(frozen=True, kw_only=True)
class Experiment(ExperimentFile):
    """An experiment with meshkit's own training step.

    If the file has no `[local_sgd]`, `[compression]` or `[pipeline]`, the axis of that section is None.
    """

    model: ModelTable
    train: TrainTable
    optimizer: OptimizerTable
    data: DataTable
    checkpoint: CheckpointTable
    launch: LaunchTable
    local_sgd: LocalSgdTable
    compression: CompressionTable
    pipeline: PipelineTable

    def to_dict(self) -> dict[str, Any]:
        """Return the tables of the resolved file."""
        axes = {key: getattr(self, key) for key in ("local_sgd", "compression", "pipeline")}
        own = self.optimizer.class_path is not None
        tables = {
            "name": self.name,
            "cluster": self.cluster.to_dict(),
            "model": {"class": self.model.class_path, "preset": self.model.preset, **self.model.options},
            "mesh": self.mesh.to_dict(),
            "rules": self.rules.to_dict(),
            "train": _plain(self.train),
            "optimizer": {k: v for k, v in _plain(self.optimizer).items() if not own or k not in ADAMW_KEYS},
            **{key: _plain(getattr(self, key)) for key in ("data", "checkpoint", "launch", "profile", "failures")},
            **{key: _plain(section) for key, section in axes.items() if section.axis},
            "lint": {"allow": [_plain(item) for item in self.lint.allow] or None},
            "xla": dict(self.xla),
        }
        return {key: value for key, value in tables.items() if _says_something(value)}


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment:
    """Return the experiment of a file, or a shipped experiment by name, with `key=value` overrides applied.

    Raises:
        ConfigError: the file or an override is wrong, or the file has a `[program]`; the message names file, line and
            key, and what to try.
    """
    experiment = load_any(path, overrides)
    if isinstance(experiment, ProgramExperiment):
        raise experiment.error(
            "program",
            "[program] names a training step of your own, but this command runs meshkit's.",
            hint="`meshkit launch local -- python train.py` for your own script, and `meshkit profile RUN --plan "
            "runs/plan` to compare it with this file's plan",
        )
    return experiment


def load_any(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Experiment | ProgramExperiment:
    """Load any experiment: what `load` accepts, a file with a `[program]`, or a program that jax or XLA wrote."""
    is_program = Path(path).suffix in PROGRAMS
    document = _program_file(Path(path), overrides) if is_program else TomlDocument.read(find_experiment(path))
    try:
        check_plain(document.table)
        check_secrets(document.table)
        document = document.with_overrides(overrides)
        check_secrets(document.table, document.overrides)
        check_files(document.table)
        experiment = _build(document)
        changes = _changes_for_hosts(experiment) if isinstance(experiment, Experiment) else []
    except SpecError as error:
        raise document.locate(error) from None
    return load_any(path, [*overrides, *changes]) if changes else experiment


def _changes_for_hosts(experiment: Experiment) -> list[str]:
    """Return the overrides that make the experiment fit `launch.hosts`; none if its mesh uses just that many hosts."""
    hosts, cluster = experiment.launch.hosts, experiment.cluster
    if hosts in (None, cluster.hosts_used):
        return []
    replicas = (experiment.local_sgd.axis, experiment.compression.axis)
    parts = (cluster, experiment.mesh, experiment.rules, experiment.train, experiment.pipeline)
    return fit_to_hosts(hosts, *parts, replicas)


def _program_file(path: Path, overrides: Sequence[str]) -> TomlDocument:
    """Return an experiment for a program from a file, on the cluster and the mesh that the overrides name."""
    if missing := [key for key in ("cluster", "mesh") if not any(text.startswith(key) for text in overrides)]:
        hint = "--cluster dgx_h100 --mesh '{ fsdp = 8 }' of `meshkit plan`, or --set cluster=... --set mesh=..."
        raise ConfigError(f"a program from a file needs a {' and a '.join(missing)}.", at=str(path), hint=hint)
    table = {"program": {"make": "meshkit.integrations.exported:make", "options": {"file": str(path.absolute())}}}
    return TomlDocument(path.absolute(), str(path), to_toml(table), table)


def _build(document: TomlDocument) -> Experiment | ProgramExperiment:
    check_plain(document.table)
    known = {**ExperimentTable.model_fields, **ProgramExperimentTable.model_fields}
    for section in sorted(document.table.keys() - known):
        raise unknown_key(known, (section,), document.table[section])
    if "program" in document.table:
        return _build_program(document)
    checked = validate(ExperimentTable, document.table)
    shared = _shared_sections(checked, document)
    rules = _build_rules(checked.rules, checked.pipeline, shared["mesh"], document)
    check_sections(checked, shared["mesh"], rules)
    return Experiment(
        rules=rules,
        model=checked.model,
        train=checked.train,
        optimizer=checked.optimizer,
        data=checked.data,
        checkpoint=checked.checkpoint,
        launch=checked.launch,
        local_sgd=checked.local_sgd or LocalSgdTable(axis=None),
        compression=checked.compression or CompressionTable(axis=None),
        pipeline=checked.pipeline or PipelineTable(axis=None, microbatches=1),
        **shared,
    )


def _build_program(document: TomlDocument) -> ProgramExperiment:
    for section in ExperimentTable.model_fields:
        if section in document.table and section not in ProgramExperimentTable.model_fields:
            message = f"[{section}] configures meshkit's training step, but [program] names a step of your own."
            raise SpecError(message, key=(section,), hint=f"without [{section}], or without [program]")
    train = document.table.get("train")
    for key in train if isinstance(train, Mapping) else ():
        if key in TrainTable.model_fields and key not in ProgramTrainTable.model_fields:
            message = f"train.{key} configures meshkit's training step, but [program] names a step of your own."
            raise SpecError(message, key=("train", key), hint=f"program.options, for {document.table['program']}")
    checked = validate(ProgramExperimentTable, document.table)
    shared = _shared_sections(checked, document)
    _check_latencies(checked.train.pgle, checked.xla)
    rules = _build_rules(checked.rules or RulesTable(), None, shared["mesh"], document)
    return ProgramExperiment(rules=rules, program=checked.program, train=checked.train, **shared)


def _shared_sections(checked: ExperimentTable | ProgramExperimentTable, document: TomlDocument) -> dict[str, Any]:
    check_xla_options(checked.xla, {name for name in checked.xla if document.is_overridden(("xla", name))})
    cluster = load_table(as_table(checked.cluster), folder=document.path.parent)
    mesh = MeshSpec.parse(checked.mesh).resolve(cluster)
    shared = {key: getattr(checked, key) for key in ("profile", "failures", "lint", "xla")}
    about = {"name": checked.name or document.path.stem, "path": document.path, "document": document}
    return {"cluster": cluster, "mesh": mesh, **shared, **about}


def _build_rules(
    table: RulesTable, pipeline: PipelineTable | None, mesh: MeshSpec, document: TomlDocument
) -> ShardingRules:
    preset = preset_rules(table.preset, mesh.axis_names) if table.preset is not None else {}
    logical = preset.get("logical", {})
    known = pipeline and pipeline.axis in mesh.axis_names  # An unknown axis is refused later, at its own key.
    staged = pipeline_rules(pipeline, {**logical, **table.logical}) if known else {}
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
    return any(item is not None for item in value.values()) if isinstance(value, dict) else value is not None


def _plain(section: TomlTable) -> dict[str, Any]:
    fields = type(section).model_fields.items()
    return {field.alias or name: plain_value(getattr(section, name)) for name, field in fields}


def experiment_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an experiment file."""
    schema = ExperimentTable.model_json_schema(by_alias=True)
    other = ProgramExperimentTable.model_json_schema(by_alias=True)
    schema["$defs"] |= {name: one for name, one in other["$defs"].items() if name not in schema["$defs"]}
    schema["properties"]["program"] = other["properties"]["program"]
    schema["properties"]["train"] = {
        "description": "the training",
        "anyOf": [{"$ref": f"#/$defs/{t}"} for t in ("TrainTable", "ProgramTrainTable")],
    }
    schema["required"] = ["cluster", "mesh"]
    schema["oneOf"] = [{"required": ["model", "train"]}, {"required": ["program"]}]
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "meshkit experiment"
    schema["properties"]["cluster"] |= _cluster_schema()
    schema["$defs"]["RulesTable"]["properties"]["preset"]["enum"] = sorted(PRESETS)
    return schema


def _cluster_schema() -> dict[str, Any]:
    """Return the schema of `cluster`: a name, a path or a table; a table with `name` or `file` needs no other key."""
    table = ClusterTable.model_json_schema()
    properties = table["properties"]
    properties["gpu"]["enum"] = list(catalog.gpu_keys())
    properties["nic"]["enum"] = list(catalog.nic_keys())
    properties["file"] = {"type": "string", "description": "a cluster file that the other keys override"}
    table["anyOf"] = [{"required": ["name"]}, {"required": ["file"]}, {"required": table.pop("required")}]
    return {"oneOf": [{"type": "string", "examples": list(shipped_clusters())}, table]}


def check_secrets(table: Mapping[str, Any], overrides: Sequence[Override] = ()) -> None:
    """Refuse URLs with a password, and strings of `[model]` or `[program]` under a key that is named like a secret.

    The overrides have been applied to the table, where a URL may look like a path. So their raw text is checked, too.

    Raises:
        SpecError: a value is refused; the message names the key without its value.
    """
    pending: list[tuple[Key, Any]] = [((), table), *((o.key, o.raw) for o in overrides)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend(((*path, str(key)), item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend(((*path, str(index)), item) for index, item in enumerate(value))
        elif isinstance(value, str):
            named = path[:1] in (("model",), ("program",)) and is_secret_name(path[-1])
            if named or has_credentials(value):
                what = "is named like a secret" if named else "is a URL with a password"
                raise SpecError(
                    f"{dotted(path)} {what}, and an experiment file is copied into every run folder.",
                    key=path,
                    hint="an environment variable, which the model's own code reads",
                )


def pipeline_rules(table: PipelineTable | None, logical: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules that a pipeline adds to `[rules.logical]`, or replaces there.

    Returns:
        `layers` -> mesh axes and, if the head is sharded too, `vocab` -> mesh axes. The pipeline's axis is first
        (outermost).

    Raises:
        ConfigError: the rules shard `layers` over another axis, or `vocab` over the pipeline's axis although the head
            is replicated.
    """
    if table is None:
        return {}
    rules = ShardingRules(logical).mapping("parameters")
    axis, layers, vocab = table.axis, rules.get("layers", ()), rules.get("vocab", ())
    if layers not in ((), (axis,)):
        raise SpecError(
            f"the rules cut the layers over {' x '.join(layers)}, but the pipeline cuts them over '{axis}'.",
            key=("rules", "logical", "layers"),
            value=list(layers),
            hint=f'layers = "{axis}", or no rule for it',
        )
    added: dict[str, Any] = {"layers": [axis]}
    if table.head == "vocab_parallel":
        added["vocab"] = [axis, *(a for a in vocab if a != axis)]
    elif axis in vocab:
        raise SpecError(
            f"the rules cut the vocabulary over the pipeline's axis '{axis}', but its head is replicated.",
            key=("rules", "logical", "vocab"),
            value=list(vocab),
            hint='pipeline.head = "vocab_parallel", or a rule without that axis',
        )
    return added


def check_sections(table: ExperimentTable, mesh: MeshSpec, rules: ShardingRules) -> None:
    """Refuse sections that are wrong for every model.

    Raises:
        SpecError: a section is wrong; the message names the key and what to set.
    """
    sizes = mesh.sizes
    cut = rules.mapping("activations")
    _check_captured_steps(table)
    _check_optimizer(table.optimizer)
    _check_launch(table)
    for section in ("local_sgd", "compression"):
        if (found := getattr(table, section)) is not None:
            _check_replica_axis(section, found.axis, sizes, cut.get("act_batch", ()))
    _check_rounds(table)
    _check_scaling(table)
    _check_latencies(table.train.pgle, table.xla)
    if table.pipeline is not None:
        _check_pipeline(table, table.pipeline, rules, sizes)
    micro_batches = {"accumulate": table.train.accumulate}
    if table.pipeline is not None:
        micro_batches["microbatches"] = table.pipeline.microbatches
    for logical, key, pieces in (
        ("act_batch", "global_batch", micro_batches),
        ("act_length", "sequence_length", {}),
        ("act_residual_length", "sequence_length", {}),
    ):
        ways = {axis: sizes[axis] for axis in cut.get(logical, ())} | {k: n for k, n in pieces.items() if n > 1}
        _check_division(key, getattr(table.train, key), ways)


def _check_optimizer(table: OptimizerTable) -> None:
    if table.class_path is None and table.options is not None:
        message = "optimizer.options are arguments of the function that optimizer.class names, but no class is given."
        raise SpecError(message, key=("optimizer", "options"), hint='optimizer.class = "optax:lion"')
    if table.algorithm != "muon" and table.momentum != OptimizerTable.model_fields["momentum"].default:
        message = (
            "optimizer.momentum applies to Muon alone; the moments of adamw decay by optimizer.b1 and optimizer.b2."
        )
        raise SpecError(message, key=("optimizer", "momentum"), hint='optimizer.algorithm = "muon"')
    said = next((key for key in ADAMW_KEYS if key in table.model_fields_set), None)
    if table.class_path is not None and said is not None:
        message = f"optimizer.{said} applies to AdamW alone, but optimizer.class names {table.class_path}."
        hint = f"its own arguments in [optimizer.options], without optimizer.{said}"
        raise SpecError(message, key=("optimizer", said), hint=hint)


def _check_launch(table: ExperimentTable) -> None:
    launch, key = table.launch, ("launch", "drain")
    if launch.drain and not launch.spares:
        message = "launch.drain lets a spare replace a host, but launch.spares = 0."
        raise SpecError(message, key=key, value=True, hint="launch.spares = 1")
    if launch.drain and not table.checkpoint.snapshot_every:
        message = "launch.drain replaces a host at a snapshot, but checkpoint.snapshot_every = 0 takes none."
        raise SpecError(message, key=key, value=True, hint="checkpoint.snapshot_every = 20")


def _check_latencies(pgle: str, xla: Mapping[str, object]) -> None:
    if (named := {PREDICTED: PGLE_OPTION, TABLE: TABLE_OPTION}.get(pgle)) in xla:
        message = f'train.pgle = "{pgle}" asks for predicted latencies, but xla.{named} names measured ones.'
        hint = "the measured ones alone, without train.pgle"
        raise SpecError(message, key=("train", "pgle"), value=pgle, hint=hint)


def _check_captured_steps(table: ExperimentTable) -> None:
    if table.profile.steps is None:
        return
    (first, last), key = table.profile.steps, ("profile", "steps")
    value, steps = [first, last], table.train.steps
    if first < 1:
        raise SpecError("profile.steps counts from 1.", key=key, value=value, hint=f"steps = [1, {max(1, last)}]")
    if first > last or last > steps:
        problem = "ends before it begins" if first > last else f"goes beyond the {steps} steps of [train]"
        hint = f"steps = [{min(first, last, steps)}, {min(max(first, last), steps)}]"
        raise SpecError(f"profile.steps {problem}.", key=key, value=value, hint=hint)


def _check_replica_axis(section: str, axis: str, known: Mapping[str, int], batch: Sequence[str]) -> None:
    key = (section, "axis")
    if axis not in known:
        message = f"{section}.axis names mesh axis '{axis}', but the mesh has {', '.join(known)}."
        raise SpecError(message, key=key, value=axis, hint=did_you_mean(axis, known))
    if axis not in batch:
        message = f"{section}.axis = '{axis}' does not cut the batch (act_batch: {', '.join(batch) or 'replicated'})."
        hint = did_you_mean(axis, batch) if batch else f'act_batch = "{axis}" below [rules.logical]'
        raise SpecError(message, key=key, value=axis, hint=hint)


def _check_rounds(table: ExperimentTable) -> None:
    """Refuse sections and keys that local SGD excludes, and counts of steps that are not whole rounds of local SGD."""
    if table.local_sgd is None:
        return
    every = table.local_sgd.every
    if table.optimizer.algorithm == "muon":
        message = "local_sgd steps on replicas of the parameters, which Muon's exchange of matrices does not support."
        raise SpecError(message, key=("optimizer", "algorithm"), hint='optimizer.algorithm = "adamw"')
    if table.compression is not None:
        message = "local_sgd exchanges parameters once a round, so there are no gradients to compress."
        raise SpecError(message, key=("compression", "axis"), hint="one of the two sections")
    if table.train.parameter_precision != "fp32":
        message = "local_sgd adds up differences of parameters, which are too small for bf16."
        raise SpecError(message, key=("train", "parameter_precision"), hint='parameter_precision = "fp32"')
    if table.optimizer.memory == "host":
        message = "local_sgd needs the optimizer's state on the GPU during the whole round."
        raise SpecError(message, key=("optimizer", "memory"), value="host", hint='memory = "device"')
    counts = {
        ("train", "steps"): table.train.steps,
        ("train", "evaluate_every"): table.train.evaluate_every,
        ("train", "replica_check_every"): table.train.replica_check_every or 0,
        ("checkpoint", "every"): table.checkpoint.every,
        ("checkpoint", "snapshot_every"): table.checkpoint.snapshot_every,
    }
    for key, value in counts.items():
        if value % every:
            nearest = max(1, round(value / every)) * every
            message = f"{'.'.join(key)} = {value} is not a multiple of the {every} steps of a round (local_sgd.every)."
            raise SpecError(message, key=key, value=value, hint=f"{key[1]} = {nearest}")
    first, last = table.profile.steps or (1, every)
    if (first - 1) % every or last % every:
        message = (
            f"profile.steps = {[first, last]} does not consist of whole rounds of {every} steps (local_sgd.every)."
        )
        hint = f"steps = [{(first - 1) // every * every + 1}, {-(-last // every) * every}]"
        raise SpecError(message, key=("profile", "steps"), hint=hint)


def _check_scaling(table: ExperimentTable) -> None:
    """Refuse delayed scaling where no scale is used, or where the history of a tensor would be lost or averaged."""
    if table.train.fp8_scaling == "current":
        return
    key, value, hint = ("train", "fp8_scaling"), "delayed", 'fp8_scaling = "current"'
    if table.train.precision != "fp8":
        message = f'delayed scaling is for fp8, but train.precision = "{table.train.precision}".'
        raise SpecError(message, key=key, value=value, hint='precision = "fp8"')
    if table.pipeline is not None:
        message = "the stages of a pipeline do not hand on the history that delayed scaling keeps of each tensor."
        raise SpecError(message, key=key, value=value, hint=hint)
    if table.local_sgd is not None:
        message = "the replicas of local_sgd do not agree on the history that delayed scaling keeps of each tensor."
        raise SpecError(message, key=key, value=value, hint=hint)


def _check_division(key: str, value: int, ways: Mapping[str, int]) -> None:
    product = math.prod(ways.values())
    if value % product:
        parts = " x ".join(f"{name} {size}" for name, size in ways.items())
        lower, upper = value // product * product, -(-value // product) * product
        hint = f"{key} = {upper}" + (f" or {lower}" if lower else "")
        message = f"train.{key} = {value} is not divisible by {product} ({parts})."
        raise SpecError(message, key=("train", key), value=value, hint=hint)


def _check_pipeline(
    table: ExperimentTable, pipeline: PipelineTable, rules: ShardingRules, sizes: Mapping[str, int]
) -> None:
    """Refuse an axis that is unknown or shards other dims, and sizes or keys that the pipeline cannot have."""
    axis, count, accumulate = pipeline.axis or "", pipeline.microbatches, table.train.accumulate
    if axis not in sizes:
        message = f"pipeline.axis names mesh axis '{axis}', but the mesh has {', '.join(sizes)}."
        raise SpecError(message, key=("pipeline", "axis"), value=axis, hint=did_you_mean(axis, sizes))
    _check_pipeline_rules(axis, rules)
    _check_schedule(pipeline, sizes[axis])
    if PRECISIONS[table.train.precision].block:
        message = "XLA cannot partition block-scaled matmuls inside of a pipeline's stage."
        raise SpecError(message, key=("train", "precision"), hint='precision = "fp8", or no [pipeline]')
    if accumulate > 1:
        message = f"a pipeline adds up its {count} microbatches itself: train.accumulate must be 1."
        hint = f"train.accumulate = 1 and pipeline.microbatches = {count * accumulate}"
        raise SpecError(message, key=("train", "accumulate"), value=accumulate, hint=hint)
    for section in ("local_sgd", "compression"):
        if (other := getattr(table, section)) is not None:
            message = f"a pipeline reduces its gradients itself, once a step, so it cannot be used with [{section}]."
            raise SpecError(message, key=(section, "axis"), value=other.axis, hint="one of the two sections")


def _check_pipeline_rules(axis: str, rules: ShardingRules) -> None:
    """Refuse rules that shard other dims over the pipeline's axis, or gradient accumulators over batch axes."""
    for table in ("logical", "compute", "gradients", "optimizer"):
        for logical, axes in (getattr(rules, table) or {}).items():
            if axis in axes and logical not in ("layers", "vocab"):
                written = table != "logical" or logical in rules.explicit
                raise SpecError(
                    f"the pipeline's axis '{axis}' holds different layers, so it cannot cut {logical} as well.",
                    key=("rules", table, logical) if written else ("pipeline", "axis"),
                    value=list(axes) if written else axis,
                    hint=f"{logical} without '{axis}'" + ("" if written else ", or another axis for the pipeline"),
                )
    batch = rules.mapping("activations").get("act_batch", ())
    for logical, axes in (rules.gradients or {}).items():
        cut = [a for a in axes if a in batch]
        if cut:
            raise SpecError(
                f"a pipeline reduces gradients over {', '.join(cut)} once a step and keeps whole accumulators, so "
                f"rules.gradients cannot cut {logical} over it.",
                key=("rules", "gradients", logical),
                value=list(axes),
                hint="no rule for it; parameters, moments and reduced gradients are cut without it",
            )


def _check_schedule(pipeline: PipelineTable, stages: int) -> None:
    chunks, microbatches = pipeline.virtual_stages, pipeline.microbatches
    if chunks == 1:
        return
    if pipeline.schedule == "1f1b":
        raise SpecError(
            f"schedule '1f1b' has one virtual stage on each stage, not {chunks}.",
            key=("pipeline", "virtual_stages"),
            value=chunks,
            hint='schedule = "interleaved_1f1b", or virtual_stages = 1',
        )
    if microbatches % stages:
        below, above = microbatches // stages * stages, -(-microbatches // stages) * stages
        raise SpecError(
            f"{microbatches} microbatches are not a multiple of the {stages} stages, which {chunks} virtual stages "
            "need.",
            key=("pipeline", "microbatches"),
            value=microbatches,
            hint=f"microbatches = {below} or {above}" if below else f"microbatches = {above}",
        )
