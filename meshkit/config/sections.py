"""The sections of an experiment file and the keys of a cluster file, as frozen pydantic models.

Each key is declared once, here, with its type, default and meaning. The models validate files and hold the values that
the rest of meshkit uses. `meshkit schema experiment` prints their schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from meshkit.config.places import Places
from meshkit.config.rules import from_pairs
from meshkit.config.toml import (
    FUNCTION_PATTERN,
    NAME_PATTERN,
    SpecError,
    TomlTable,
    dotted,
    kind,
    show,
    unknown_key,
)

# XLA options that give the scheduler a profile or a table of collectives; `train.pgle` is a short form for them.
PGLE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
TABLE_OPTION = "xla_gpu_experimental_collective_perf_table_path"
PREDICTED, TABLE = "predicted", "table"


@dataclass(frozen=True)
class RematMix:
    """`train.remat` as a table: two lists of names of values that the model marks; no name is in both."""

    keep: tuple[str, ...]
    """Values that stay on the GPU until the backward pass."""
    offload: tuple[str, ...]
    """Values that stay in host memory until the backward pass."""

    def to_dict(self) -> dict[str, list[str]]:
        """Return the table in the form of a file, which models also take."""
        kept = {"keep": list(self.keep)} if self.keep else {}
        return {**kept, "offload": list(self.offload)}


Count = Annotated[int, Field(gt=0, le=2**31)]
Natural = Annotated[int, Field(ge=0, le=2**53)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Function = Annotated[str, Field(pattern=FUNCTION_PATTERN)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Text = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# A section with this field must name an axis in a file; None means that the file has no such section.
SectionAxis = Annotated[Name | None, WithJsonSchema({"type": "string", "pattern": NAME_PATTERN})]

_FACTOR = {"oneOf": [{"type": "integer", "minimum": 1}, {"const": "fill"}]}
_AXIS_SCHEMA = {
    "oneOf": [
        *_FACTOR["oneOf"],
        {
            "type": "object",
            "properties": {"nvlink": _FACTOR, "infiniband": _FACTOR},
            "additionalProperties": False,
            "minProperties": 1,
        },
    ]
}
_RULE_SCHEMA = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_NAME_SCHEMA = {"type": "string", "pattern": NAME_PATTERN}
_NAMES_SCHEMA = {"type": "array", "items": _NAME_SCHEMA, "minItems": 1, "uniqueItems": True}
_MIX_SCHEMA = {
    "type": "object",
    "properties": {"keep": {**_NAMES_SCHEMA, "minItems": 0}, "offload": _NAMES_SCHEMA},
    "required": ["offload"],
    "additionalProperties": False,
}
_REMAT = ("train", "remat")
_REMAT_SCHEMA = {"anyOf": [_NAME_SCHEMA, _NAMES_SCHEMA, _MIX_SCHEMA]}
_OPTION_SCHEMA = {"type": ["string", "integer", "number", "boolean"]}

# Values with several forms are checked by their own parsers (MeshSpec.parse, ShardingRules), because pydantic's errors
# on unions name every branch.
MeshAxisValue = Annotated[Any, WithJsonSchema(_AXIS_SCHEMA)]
RuleValue = Annotated[Any, WithJsonSchema(_RULE_SCHEMA)]
Option = Annotated[Any, WithJsonSchema(_OPTION_SCHEMA)]


def _policy_or_names(value: Any) -> str | tuple[str, ...] | RematMix:
    if isinstance(value, dict):
        return _mix(value)
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        given = "an empty list" if names == [] else kind(value)
        raise ValueError(f"must be the name of a policy, or a list of names to keep, not {given}")
    _check_names(names)
    return value if isinstance(value, str) else tuple(names)


def _check_names(names: Sequence[Any]) -> None:
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
            raise ValueError(f"holds {show(name)}, which is no name")
    if len(set(names)) < len(names):
        raise ValueError(f"= {show(names)} has a name twice")


def _mix(value: Mapping[str, Any]) -> RematMix:
    for key in value:
        if key not in _MIX_SCHEMA["properties"]:
            raise unknown_key(_MIX_SCHEMA["properties"], (*_REMAT, key), value[key])
    keep, offload = value.get("keep", []), value.get("offload", [])
    for key, names in (("keep", keep), ("offload", offload)):
        try:
            if not isinstance(names, list | tuple):
                raise ValueError(f"must be a list of names, not {kind(names)}")
            _check_names(names)
        except ValueError as error:
            message, hint = f"{dotted((*_REMAT, key))} {error}.", f'{key} = ["gate"]'
            raise SpecError(message, key=(*_REMAT, key), value=names, hint=hint) from None
    if not offload:
        message = f"train.remat.offload names nothing: what only keeps is a list, remat = {show(keep)}."
        raise SpecError(message, key=(*_REMAT, "offload"), hint='offload = ["gate"]')
    _check_names([*keep, *offload])
    return RematMix(tuple(keep), tuple(offload))


def plain_value(value: Any) -> Any:
    """Return the value of a key as a plain TOML value."""
    if isinstance(value, RematMix):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _number_or_list(value: Any) -> Any:
    if isinstance(value, list):
        if value and all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in value):
            return value
    elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ValueError(f"must be a number of processes or a list of them, not {show(value)}")


_PROCESSES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "exclusiveMinimum": 0},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
    ]
}
Processes = Annotated[int | list[int], PlainValidator(_number_or_list), WithJsonSchema(_PROCESSES_SCHEMA)]
Remat = Annotated[str | tuple[str, ...] | RematMix, PlainValidator(_policy_or_names), WithJsonSchema(_REMAT_SCHEMA)]


class ClusterTable(TomlTable):
    """The machines: all keys of a cluster file."""

    name: str | None = Field(
        default=None, examples=["dgx_h100"], description="a shipped cluster that the other keys override, or a label"
    )
    gpu: str = Field(examples=["h100_sxm"], description="a GPU of the catalog")
    hosts: Count = Field(default=1, description="machines")
    gpus_per_host: Count = Field(description='GPUs of a machine; virtual devices with gpu = "cpu"')
    nvlink_domain_size: Count | None = Field(
        default=None,
        description="GPUs that reach each other over the scale-up fabric; default gpus_per_host; may span hosts",
    )
    gpus_used_per_domain: Count | None = Field(default=None, description="how many of them the job uses; default all")
    scale_up: Literal["nvlink", "pcie", "shared_memory"] = Field(
        default="nvlink",
        description="the fabric inside a domain; shared_memory: through host memory, where GPUs lack peer access",
    )
    nvlink_taper: Fraction = Field(default=1.0, description="scale-up bandwidth beyond the host, relative to inside it")
    nic: str | None = Field(default=None, examples=["ib_ndr"], description="a NIC of the catalog")
    nics_per_host: Count | None = Field(default=None, description="ports of a machine; default one per GPU")
    fabric: Literal["infiniband", "roce", "ethernet"] | None = Field(
        default=None, description="what the ports speak; default as the NIC is named"
    )
    gpudirect_rdma: bool = Field(default=True, description="whether NICs read GPU memory without the host")
    oversubscription: Annotated[float, Field(ge=1)] = Field(
        default=1.0, description="of the scale-out network; 1 = none"
    )
    storage_bytes_per_s: Positive | None = Field(
        default=None, examples=[20e9], description="of checkpoints, over all hosts"
    )
    host_memory_bytes: Positive | None = Field(
        default=None, examples=[2e12], description="of a host's CPUs; default unknown"
    )
    price_per_gpu_hour: NonNegative | None = Field(default=None, examples=[2.5], description="in any currency")
    calibration: str | None = Field(default=None, description="a file of `meshkit bench`")
    nvlink_switch: bool | None = Field(
        default=None,
        description="whether NVLink goes through a switch; default as hosts of that GPU and size are built",
    )
    cpu_link: str | None = Field(
        default=None, description="between a GPU and its CPU, of the catalog: pcie, ...; default as the GPU comes"
    )
    gpu_spread: Annotated[float, Field(ge=0, le=0.15)] | None = Field(
        default=None,
        examples=[0.02],
        description="standard deviation of the GPUs' compute rates; default as in published fleets",
    )


class OverrideTable(TomlTable):
    """A rule for the parameters whose path matches a pattern."""

    path: Text = Field(description="parameter path; ** is any depth, * one segment")
    spec: Annotated[Any, WithJsonSchema({"type": "array", "items": _RULE_SCHEMA})] = Field(
        examples=[["fsdp", "replicated"]],
        description='a mesh axis, a list of them, or "replicated" for each dim',
    )


class RulesTable(TomlTable):
    """Which mesh axes shard which logical axes."""

    preset: str | None = Field(
        default=None, examples=["fsdp"], description="a named table of rules, which what follows overrides"
    )
    logical: Annotated[dict[str, RuleValue], BeforeValidator(lambda v: from_pairs(v, ("rules", "logical")))] = Field(
        default={}, description="logical axis = mesh axis, or a list of them"
    )
    compute: dict[str, RuleValue] = Field(
        default={}, description="overrides logical for the weights as the model computes with them"
    )
    gradients: dict[str, RuleValue] = Field(
        default={},
        description="overrides logical for accumulators of gradients; an axis of act_batch named here is reduced over "
        "every micro-batch, another one once a step",
    )
    optimizer: dict[str, RuleValue] = Field(default={}, description="overrides logical for optimizer state")
    override: list[OverrideTable] = Field(
        default=[],
        examples=[[{"path": "**/kernel", "spec": ["fsdp", "replicated"]}]],
        description="rules by parameter path; the first match wins over logical axes",
    )
    auto: AutoTable | None = Field(default=None, description="a rule for parameters without dim names")


class AutoTable(TomlTable):
    """A rule for parameters without dim names: it shards the largest dim that the axes divide, not small arrays."""

    axis: RuleValue = Field(examples=["fsdp"], description="a mesh axis, or a list of them")
    min_bytes: Natural = Field(default=2**20, description="smaller arrays stay whole; bytes of the global array")


class ModelTable(TomlTable):
    """The model's class and its arguments; keys other than these two are passed to the class."""

    model_config = {**TomlTable.model_config, "extra": "allow"}
    class_path: Function = Field(alias="class", description="import path, pkg.mod:Class")
    preset: str | None = Field(default=None, description="of the model; further keys override it")

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ProgramTrainTable(TomlTable):
    """The training loop around the user's own step."""

    steps: Count = Field(default=100, description="how many")
    tokens_total: Annotated[int, Field(gt=0)] | None = Field(
        default=None, examples=[300 * 10**9], description="of the whole training, for its time and cost"
    )
    memory_fraction: Fraction = Field(default=0.92, description="of GPU memory that the client may take")
    pgle: Literal["off", "table", "predicted"] = Field(
        default="off",
        description="what XLA schedules GPUs by: its own latencies; those with plan's prices of collectives inside a "
        "domain in place of its table; or those that plan predicts for this cluster (profile-guided latency estimation "
        "without a profile; three compiles)",
    )


class TrainTable(ProgramTrainTable):
    """The training loop."""

    global_batch: Count = Field(description="sequences or examples of a step, over all devices")
    sequence_length: Count = Field(default=1, examples=[4096], description="tokens of a sequence")
    accumulate: Count = Field(default=1, description="micro-batches of a step")
    precision: Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"] = Field(
        default="bf16",
        description="of compute (fp8, mxfp8, nvfp4: of linear layers, the rest bf16; nvfp4 in plans alone); "
        "parameters and optimizer state stay fp32 unless parameter_precision and [optimizer] say otherwise",
    )
    fp8_scaling: Literal["current", "delayed"] = Field(
        default="current",
        description="what fp8 scales a tensor by: its own largest number, or the largest of the 16 steps before",
    )
    parameter_precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="that parameters are kept in between steps; in bf16 an update below 1/256 of a parameter is lost. "
        "Gradients and moments stay as they are",
    )
    reduce_precision: Literal["fp32", "bf16"] = Field(default="fp32", description="of gradient reductions")
    remat: Remat = Field(
        default="none",
        examples=["full", ["gate", "up"], {"keep": ["key"], "offload": ["gate"]}],
        description="what the backward pass recomputes: none, full, a policy, or all but what a list of names keeps, "
        "or { keep = [names], offload = [names] }, those that wait in host memory",
    )
    derived_options: bool = Field(
        default=True,
        description="whether XLA's options follow from the step (combined messages, pipelined collectives, limit of "
        "memory); false leaves XLA's own, for a step as somebody else's [xla] alone has it",
    )
    loss: Function | None = Field(
        default=None, description="pkg.mod:fn, (model, batch, rng) -> (loss_sum, weight, metrics); default next token"
    )
    evaluate_every: Natural = Field(default=0, description="steps; 0 = never")
    evaluate_batches: Count = Field(default=4, description="of an evaluation")
    seed: Natural = Field(default=0, description="of initialization and dropout")
    log_every: Count = Field(default=1, description="steps")
    straggler_every: Natural = Field(
        default=100, description="steps between comparisons of what each process does itself; 0 = never"
    )
    replica_check_every: Natural | None = Field(
        default=None,
        description="steps between comparisons of replicas, bit for bit; default: before every checkpoint, which is "
        "done in any case but with 0 = never",
    )
    metrics: Function | None = Field(
        default=None, description="pkg.mod:fn, (record) -> None, called with every logged step in a thread of its own"
    )
    hooks: list[Function] = Field(
        default=[],
        examples=[["package.module:name"]],
        description="pkg.mod:name of meshkit.Hooks, functions that are called every so many steps",
    )
    tensorboard: bool = Field(default=False, description="metrics to TensorBoard as well, in tensorboard/ of the run")

    def check_runs(self, places: Places) -> None:
        """Refuse a precision that is for plans alone.

        Raises:
            ConfigError: it is NVFP4.
        """
        if self.precision == "nvfp4":
            message = "NVFP4 is for plans alone: jax's is for inference (jax issue 26944), with gradients in bf16."
            raise places.error("train.precision", message, hint='precision = "mxfp8", or meshkit plan')

    @property
    def offloads(self) -> bool:
        """Return whether activations stay in host memory until the backward pass."""
        return isinstance(self.remat, RematMix) or str(self.remat).startswith("offload")


class OptimizerTable(TomlTable):
    """The optimizer (AdamW, Muon or the user's own) and its schedule."""

    class_path: Function | None = Field(
        default=None, alias="class", description="pkg.mod:fn, returns an optax transformation; default AdamW"
    )
    algorithm: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: of the matrices of layers, AdamW of all other parameters"
    )
    options: dict[str, Any] | None = Field(default=None, description="of that function")
    learning_rate: Positive = Field(default=3e-4, description="at its highest")
    warmup_steps: Natural = Field(default=0, description="from 0 to learning_rate")
    weight_decay: NonNegative = Field(default=0.1, description="of AdamW")
    clip: NonNegative = Field(default=1.0, description="largest global gradient norm; 0 = no clipping")
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="of the first moment; the second stays fp32")
    memory: Literal["device", "host"] = Field(default="device", description="where its state lives between steps")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="cosine", description="after the warm-up")
    b1: Decay = Field(default=0.9, description="decay of the first moment")
    b2: Decay = Field(default=0.95, description="decay of the second moment")
    eps: Positive = Field(default=1e-8, description="added to the denominator")
    momentum: Decay = Field(default=0.95, description="of Muon, decay of its moment")


class DataTable(TomlTable):
    """Where training examples come from."""

    source: Text = Field(default="python-stdlib", description="python-stdlib, a folder, a file, or pkg.mod:fn")
    tokenizer: Text | None = Field(default=None, description="pkg.mod:fn, from a text to its ids; default its bytes")
    text_field: Text | None = Field(default=None, description='of the objects in a .jsonl file; default "text"')
    seed: Natural = Field(default=0, description="of the order")
    validation_fraction: Decay = Field(default=0.05, description="held out for evaluation")


def _verify_of(value: Any) -> Any:
    """Accept booleans for `verify`: true means `own`, false means `off`."""
    return {True: "own", False: "off"}[value] if isinstance(value, bool) else value


class CheckpointTable(TomlTable):
    """When checkpoints are written."""

    every: Natural = Field(default=0, description="steps; 0 = none")
    keep: Count = Field(default=2, description="how many of the latest")
    keep_every: Natural = Field(default=0, description="also keep those of every so many steps; 0 = none")
    verify: Annotated[Literal["full", "own", "off"], BeforeValidator(_verify_of)] = Field(
        default="own",
        description="before a restore, compare contents with their hashes: every process all files, "
        "every process its share of them, or only names and sizes",
    )
    snapshot_every: Natural = Field(
        default=0,
        description="steps between snapshots in host memory, which a restart by the same launchers reads; 0 = none",
    )
    initial: Text | None = Field(
        default=None, description="a folder of safetensors, in Hugging Face's layout, that a new run starts from"
    )


class FailuresTable(TomlTable):
    """How often hosts fail and what it costs, for `plan --failures`; defaults are published values (catalog)."""

    per_host_day: Positive | None = Field(
        default=None,
        examples=[0.0038],
        description="failures of a host in a day that end the job; default as Llama 3's, by GPUs of a host",
    )
    host_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, examples=[0.78], description="share of them after which a host is replaced"
    )
    detection_s: NonNegative | None = Field(
        default=None, examples=[100], description="seconds from a failure until the last process is gone"
    )
    restart_s: NonNegative | None = Field(
        default=None,
        examples=[660],
        description="seconds from then until the next attempt can make a step, reading the state left out",
    )
    repair_hours: Positive | None = Field(
        default=None, examples=[24], description="hours until a lost host is back, as a spare"
    )


class LaunchTable(TomlTable):
    """The hosts with which `launch local --hosts N --max-restarts K` goes on after it has lost one."""

    spares: Natural = Field(
        default=0, description="launchers beyond the hosts of the cluster; one of them replaces a host that is lost"
    )
    min_hosts: Count | None = Field(
        default=None, examples=[6], description="the fewest hosts that may go on, on a smaller mesh; default all"
    )
    wait_s: NonNegative = Field(
        default=60.0, description="seconds for a lost host to come back, before the others go on without it"
    )
    drain: bool = Field(
        default=False,
        description="whether a spare replaces a host, at its next snapshot, that is late twice in a row or whose error "
        "counters grow",
    )
    hosts: Count | None = Field(
        default=None,
        examples=[6],
        description="hosts that are left, fewer than the cluster has; cluster, mesh and accumulation are made to fit",
    )


class ProfileTable(TomlTable):
    """Which steps are captured."""

    steps: Annotated[list[Natural], Field(min_length=2, max_length=2), AfterValidator(tuple)] | None = Field(
        default=None, examples=[[1, 3]], description="first and last step that are captured"
    )
    processes: Processes | None = Field(
        default=None,
        examples=[4, [0, 8]],
        description="which processes capture: a number of them, evenly over the job, or a list; default all",
    )
    every: Natural = Field(
        default=0,
        description="steps between captures of one step by all processes, read at once, which say what is exposed and "
        "who is waited for; 0 = never",
    )


class LocalSgdTable(TomlTable):
    """Local SGD (DiLoCo): replicas step independently and synchronize every few steps by an outer optimizer."""

    axis: SectionAxis = Field(examples=["data"], description="the mesh axis whose replicas step on their own")
    every: Count = Field(default=1, description="steps between two meetings")
    learning_rate: Positive = Field(default=0.7, description="of the outer optimizer")
    momentum: Decay = Field(default=0.9, description="of the outer optimizer")
    nesterov: bool = Field(default=True, description="Nesterov's form of that momentum")
    staleness: Literal[0, 1] = Field(
        default=0, description="1: the outer update of the previous round is applied, so that it hides under a round"
    )


class CompressionTable(TomlTable):
    """Compressed gradients: they are reduced over one axis in fewer bits."""

    axis: SectionAxis = Field(
        examples=["data"], description="the mesh axis over which gradients are reduced compressed"
    )
    dtype: Literal["bf16", "fp8", "int8"] = Field(default="bf16", description="on the wire")
    error_feedback: bool = Field(default=True, description="whether what rounding lost is added to the next step")


class PipelineTable(TomlTable):
    """Pipeline parallelism: the layers are cut into stages over one mesh axis."""

    axis: SectionAxis = Field(examples=["pipeline"], description="the mesh axis whose GPUs are the stages")
    microbatches: Count = Field(description="into which a step's batch is cut; the more, the smaller the bubble")
    schedule: Literal["1f1b", "interleaved_1f1b"] = Field(
        default="1f1b", description="who does what when; interleaved_1f1b has virtual stages"
    )
    virtual_stages: Count = Field(default=1, description="chunks of layers on each stage: the bubble divided by it")
    residuals: Name = Field(
        default="recompute",
        description="what a stage keeps of a forward pass until its backward pass: recompute (its input), stash "
        "(everything), or a policy of jax.checkpoint_policies",
    )
    head: Literal["vocab_parallel", "replicated"] = Field(
        default="vocab_parallel",
        description="vocab_parallel: embedding and output head are cut over the stages; replicated: whole on each",
    )
    layout: Text | None = Field(
        default=None,
        examples=["7|8*14|7"],
        description='layers of each virtual stage, as "7|8*14|7"; default as even as they go',
    )


class AllowTable(TomlTable):
    """A finding that is intended."""

    code: Name = Field(description="of the finding")
    path: Text = Field(default="**", description="of what it is about; ** is any depth, * one segment")
    reason: Text = Field(description="why it is meant")


class LintTable(TomlTable):
    """The findings that the lint does not report."""

    allow: list[AllowTable] = Field(
        default=[], examples=[[{"code": "idle_axis", "reason": "..."}]], description="findings that are meant"
    )


class ProgramTable(TomlTable):
    """A training step of the user's own."""

    make: Function = Field(description="pkg.mod:fn, (mesh, **options) -> meshkit.Program")
    options: dict[str, Any] = Field(default={}, description="of that function")


class ProgramExperimentTable(TomlTable):
    """A whole experiment file with a `[program]`."""

    name: Name | None = Field(default=None, description="default the file's name")
    cluster: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = Field(
        examples=["dgx_h100"], description="the machines: a shipped name, a path, or a table"
    )
    mesh: dict[str, MeshAxisValue] = Field(description="mesh axis = ways; outermost first")
    program: ProgramTable = Field(description="the training step")
    rules: RulesTable | None = Field(default=None, description="what shards what, for the lint alone")
    train: ProgramTrainTable = Field(default=ProgramTrainTable.model_construct(), description="the training around it")
    profile: ProfileTable = Field(default=ProfileTable.model_construct(), description="which steps are captured")
    failures: FailuresTable = Field(default=FailuresTable.model_construct(), description="of hosts, and what they cost")
    lint: LintTable = Field(default=LintTable.model_construct(), description="what the lint shall not report")
    xla: dict[str, Option] = Field(default={}, description="options of the compiler, by their names")


class ExperimentTable(TomlTable):
    """A whole experiment file."""

    name: Name | None = Field(default=None, description="default the file's name")
    cluster: Annotated[Any, WithJsonSchema({"type": ["string", "object"]})] = Field(
        examples=["dgx_h100"], description="the machines: a shipped name, a path, or a table"
    )
    model: ModelTable = Field(description="the model")
    mesh: dict[str, MeshAxisValue] = Field(description="mesh axis = ways; outermost first")
    rules: RulesTable = Field(default=RulesTable.model_construct(), description="what is sharded over which axis")
    train: TrainTable = Field(description="the training loop")
    optimizer: OptimizerTable = Field(default=OptimizerTable.model_construct(), description="AdamW")
    data: DataTable = Field(default=DataTable.model_construct(), description="where examples come from")
    checkpoint: CheckpointTable = Field(
        default=CheckpointTable.model_construct(), description="when checkpoints are written"
    )
    profile: ProfileTable = Field(default=ProfileTable.model_construct(), description="which steps are captured")
    failures: FailuresTable = Field(default=FailuresTable.model_construct(), description="of hosts, and what they cost")
    launch: LaunchTable = Field(default=LaunchTable.model_construct(), description="hosts that are lost and replaced")
    local_sgd: LocalSgdTable | None = Field(default=None, description="replicas that step on their own")
    compression: CompressionTable | None = Field(default=None, description="gradients in fewer bits over one axis")
    pipeline: PipelineTable | None = Field(default=None, description="layers in stages over one axis")
    lint: LintTable = Field(default=LintTable.model_construct(), description="what the lint shall not report")
    xla: dict[str, Option] = Field(default={}, description="options of the compiler, by their names")
