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
from meshkit.config.precisions import PrecisionName
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
            raise ValueError(f"holds {show(name)}, which is not a valid name")
    if len(set(names)) < len(names):
        raise ValueError(f"= {show(names)} lists a name twice")


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
        message = f"train.remat.offload is empty; names that are only kept are written as a list, remat = {show(keep)}."
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
        default=None,
        examples=["dgx_h100"],
        description="name of a shipped cluster, whose keys the others here override; or, with gpu, a name of your own",
    )
    gpu: str = Field(examples=["h100_sxm"], description="key of a GPU in the catalog")
    hosts: Count = Field(default=1, description="number of hosts (machines)")
    gpus_per_host: Count = Field(description='GPUs of each host; with gpu = "cpu", its virtual devices')
    nvlink_domain_size: Count | None = Field(
        default=None,
        description="number of GPUs that reach each other over the scale-up fabric, also across hosts; default "
        "gpus_per_host",
    )
    gpus_used_per_domain: Count | None = Field(
        default=None, description="number of GPUs of each NVLink domain that the job uses; default all"
    )
    scale_up: Literal["nvlink", "pcie", "shared_memory"] = Field(
        default="nvlink",
        description="fabric between the GPUs of a domain; shared_memory goes through host memory, for GPUs "
        "without peer access",
    )
    nvlink_taper: Fraction = Field(
        default=1.0,
        description="scale-up bandwidth between hosts of one domain, as a fraction of the bandwidth inside a host",
    )
    nic: str | None = Field(default=None, examples=["ib_ndr"], description="key of a NIC in the catalog")
    nics_per_host: Count | None = Field(default=None, description="network ports of each host; default one per GPU")
    fabric: Literal["infiniband", "roce", "ethernet"] | None = Field(
        default=None, description="protocol of the network ports; by default the NIC's name tells it"
    )
    gpudirect_rdma: bool = Field(
        default=True, description="whether NICs and storage read GPU memory directly, not through host memory"
    )
    oversubscription: Annotated[float, Field(ge=1)] = Field(
        default=1.0,
        description="factor that divides the bandwidth of the scale-out network; 1 means no oversubscription",
    )
    storage_bytes_per_s: Positive | None = Field(
        default=None,
        examples=[20e9],
        description="bandwidth of checkpoint storage in bytes per second, all hosts together",
    )
    host_memory_bytes: Positive | None = Field(
        default=None, examples=[2e12], description="CPU memory of each host, in bytes; default unknown"
    )
    price_per_gpu_hour: NonNegative | None = Field(
        default=None, examples=[2.5], description="price of a GPU hour, in any currency"
    )
    calibration: str | None = Field(
        default=None, description="path of a calibration file, which `meshkit bench` or `meshkit rehearse` writes"
    )
    nvlink_switch: bool | None = Field(
        default=None,
        description="whether NVLink goes through a switch; default as in usual hosts of that GPU and size",
    )
    cpu_link: str | None = Field(
        default=None,
        description="catalog key of the link between a GPU and its CPU, such as pcie; default the link the GPU is"
        " built with",
    )
    gpu_spread: Annotated[float, Field(ge=0, le=0.15)] | None = Field(
        default=None,
        examples=[0.02],
        description="relative standard deviation of the GPUs' compute rates; default that of published fleets",
    )


class OverrideTable(TomlTable):
    """A rule for the parameters whose path matches a pattern."""

    path: Text = Field(description="pattern of parameter paths; ** matches any number of segments, * matches one")
    spec: Annotated[Any, WithJsonSchema({"type": "array", "items": _RULE_SCHEMA})] = Field(
        examples=[["fsdp", "replicated"]],
        description='one entry for each dim: a mesh axis, a list of them, or "replicated"',
    )


class RulesTable(TomlTable):
    """Which mesh axes shard which logical axes."""

    preset: str | None = Field(
        default=None, examples=["fsdp"], description="name of a preset of rules; the keys below override it"
    )
    logical: Annotated[dict[str, RuleValue], BeforeValidator(lambda v: from_pairs(v, ("rules", "logical")))] = Field(
        default={}, description="mesh axis, or list of mesh axes, that shards each logical axis"
    )
    compute: dict[str, RuleValue] = Field(
        default={}, description="rules that override rules.logical for the weights as the model computes with them"
    )
    gradients: dict[str, RuleValue] = Field(
        default={},
        description="rules that override rules.logical for gradient accumulators; gradients are reduced over an "
        "axis of act_batch after every micro-batch if it is named here, otherwise once a step",
    )
    optimizer: dict[str, RuleValue] = Field(
        default={}, description="rules that override rules.logical for optimizer state"
    )
    override: list[OverrideTable] = Field(
        default=[],
        examples=[[{"path": "**/kernel", "spec": ["fsdp", "replicated"]}]],
        description="rules for parameters by their paths; the first match wins, and wins over logical axes",
    )
    auto: AutoTable | None = Field(default=None, description="rule for parameters whose dims have no names")


class AutoTable(TomlTable):
    """A rule for parameters without dim names: it shards the largest dim that the axes divide, but no small arrays."""

    axis: RuleValue = Field(
        examples=["fsdp"], description="mesh axis, or list of mesh axes, that shards the largest dim"
    )
    min_bytes: Natural = Field(default=2**20, description="global size in bytes below which an array is not sharded")


class ModelTable(TomlTable):
    """The model's class and its arguments: all keys except `class` and `preset` are passed to the class."""

    model_config = {**TomlTable.model_config, "extra": "allow"}
    class_path: Function = Field(alias="class", description="import path of the model's class, as pkg.mod:Class")
    preset: str | None = Field(
        default=None, description="name of one of the model's presets, which further keys override"
    )

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ProgramTrainTable(TomlTable):
    """The training loop around the user's own step."""

    steps: Count = Field(default=100, description="number of training steps")
    tokens_total: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        examples=[300 * 10**9],
        description="tokens of the whole training, from which its time and cost follow",
    )
    memory_fraction: Fraction = Field(default=0.92, description="fraction of GPU memory that JAX may allocate")
    pgle: Literal["off", "table", "predicted"] = Field(
        default="off",
        description="latencies by which XLA schedules a GPU's step: with off, XLA's own; with table, plan's prices of "
        "collectives inside a domain replace XLA's table; with predicted, plan's latencies on this cluster replace "
        "them all (profile-guided latency estimation without a profile), which takes three compiles",
    )


class TrainTable(ProgramTrainTable):
    """The training loop."""

    global_batch: Count = Field(description="number of sequences or examples in a step, over all devices")
    sequence_length: Count = Field(default=1, examples=[4096], description="number of tokens in a sequence")
    accumulate: Count = Field(default=1, description="number of micro-batches whose gradients a step adds up")
    precision: PrecisionName = Field(
        default="bf16",
        description="precision of compute: fp8, mxfp8 and nvfp4 are for linear layers, with bf16 for the rest, and "
        "nvfp4 is only for plans; parameters and optimizer state stay fp32 unless parameter_precision and [optimizer] "
        "say otherwise",
    )
    fp8_scaling: Literal["current", "delayed"] = Field(
        default="current",
        description="number by which fp8 scales a tensor: the tensor's own largest number, or (delayed) the largest of "
        "the 16 steps before",
    )
    parameter_precision: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="precision of parameters between steps; in bf16 an update below 1/256 of a parameter is lost."
        " Gradients and moments keep their own precision",
    )
    reduce_precision: Literal["fp32", "bf16"] = Field(default="fp32", description="precision of gradient reductions")
    remat: Remat = Field(
        default="none",
        examples=["full", ["gate", "up"], {"keep": ["key"], "offload": ["gate"]}],
        description="what the backward pass recomputes: none, full, or as a named policy says; a list of names "
        "recomputes everything else, and { keep = [names], offload = [names] } also holds the "
        "offloaded values in host memory",
    )
    derived_options: bool = Field(
        default=True,
        description="whether meshkit derives XLA's options from the step (combined messages, pipelined "
        "collectives, memory limit); with false only the options of [xla] are set, which reproduces "
        "the step of another program",
    )
    loss: Function | None = Field(
        default=None,
        description="function pkg.mod:fn, (model, batch, rng) -> (loss_sum, weight, metrics); default the loss of"
        " the next token",
    )
    evaluate_every: Natural = Field(default=0, description="number of steps between evaluations; 0 means never")
    evaluate_batches: Count = Field(default=4, description="number of held-out batches in an evaluation")
    seed: Natural = Field(default=0, description="random seed of initialization and dropout")
    log_every: Count = Field(default=1, description="number of steps between records of metrics")
    straggler_every: Natural = Field(
        default=100,
        description="number of steps between comparisons of the processes' own times, which name stragglers; 0 "
        "means never",
    )
    replica_check_every: Natural | None = Field(
        default=None,
        description="number of steps between bit-for-bit comparisons of replicas, in addition to the one before "
        "every checkpoint and snapshot; 0 means no comparison at all",
    )
    metrics: Function | None = Field(
        default=None,
        description="function pkg.mod:fn, (record) -> None, which a separate thread calls for every logged step",
    )
    hooks: list[Function] = Field(
        default=[],
        examples=[["package.module:name"]],
        description="list of pkg.mod:name, each a meshkit.Hook: a function that is called every so many steps",
    )
    tensorboard: bool = Field(
        default=False,
        description="whether metrics are also written for TensorBoard, into tensorboard/ of the run folder",
    )

    def check_runs(self, places: Places) -> None:
        """Refuse a precision that can be planned but not run.

        Raises:
            ConfigError: the precision is NVFP4.
        """
        if self.precision == "nvfp4":
            message = "NVFP4 can only be planned: jax's is for inference (jax issue 26944) and has gradients in bf16."
            raise places.error("train.precision", message, hint='precision = "mxfp8", or meshkit plan')

    @property
    def offloads(self) -> bool:
        """Return whether activations stay in host memory until the backward pass."""
        return isinstance(self.remat, RematMix) or str(self.remat).startswith("offload")


class OptimizerTable(TomlTable):
    """The optimizer (AdamW, Muon or the user's own) and its schedule."""

    class_path: Function | None = Field(
        default=None,
        alias="class",
        description="function pkg.mod:fn that returns an optax transformation; default AdamW",
    )
    algorithm: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon updates the matrices of layers by Muon and all other parameters by AdamW"
    )
    options: dict[str, Any] | None = Field(
        default=None, description="keyword arguments of the function that optimizer.class names"
    )
    learning_rate: Positive = Field(default=3e-4, description="peak learning rate")
    warmup_steps: Natural = Field(
        default=0, description="number of steps in which the learning rate rises from 0 to its peak"
    )
    weight_decay: NonNegative = Field(default=0.1, description="weight decay of AdamW and Muon")
    clip: NonNegative = Field(default=1.0, description="largest global norm of the gradients; 0 means no clipping")
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="precision of the first moment; the second stays fp32"
    )
    memory: Literal["device", "host"] = Field(
        default="device", description="memory that holds the optimizer state between steps"
    )
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="cosine", description="course of the learning rate after the warm-up"
    )
    b1: Decay = Field(default=0.9, description="decay rate of AdamW's first moment")
    b2: Decay = Field(default=0.95, description="decay rate of AdamW's second moment")
    eps: Positive = Field(default=1e-8, description="small number that AdamW adds to the denominator of an update")
    momentum: Decay = Field(default=0.95, description="decay rate of Muon's momentum")


class DataTable(TomlTable):
    """Where training examples come from."""

    source: Text = Field(
        default="python-stdlib",
        description="where examples come from: python-stdlib, a folder, a file, or a function pkg.mod:fn",
    )
    tokenizer: Text | None = Field(
        default=None, description="function pkg.mod:fn from a text to its token ids; default the text's bytes"
    )
    text_field: Text | None = Field(
        default=None, description='key of the text in the objects of a .jsonl file; default "text"'
    )
    seed: Natural = Field(default=0, description="random seed of the order of examples")
    validation_fraction: Decay = Field(
        default=0.05, description="fraction of the examples that is held out for evaluation"
    )


def _verify_of(value: Any) -> Any:
    """Accept booleans for `verify`: true means `own`, false means `off`."""
    return {True: "own", False: "off"}[value] if isinstance(value, bool) else value


class CheckpointTable(TomlTable):
    """When checkpoints are written."""

    every: Natural = Field(default=0, description="number of steps between checkpoints; 0 means none")
    keep: Count = Field(default=2, description="number of newest checkpoints that are kept")
    keep_every: Natural = Field(
        default=0, description="the checkpoints of every so many steps are kept as well; 0 means none"
    )
    verify: Annotated[Literal["full", "own", "off"], BeforeValidator(_verify_of)] = Field(
        default="own",
        description="contents that are compared with their hashes before a restore: full for all files in every "
        "process, own for a share of them in each process, off for names and sizes only",
    )
    snapshot_every: Natural = Field(
        default=0,
        description="number of steps between snapshots in host memory, which a restart by the same launchers "
        "reads; 0 means none",
    )
    initial: Text | None = Field(
        default=None, description="folder of safetensors in Hugging Face's layout, from which a new run starts"
    )


class FailuresTable(TomlTable):
    """How often hosts fail and what it costs, for `plan --failures`; defaults are published values (catalog)."""

    per_host_day: Positive | None = Field(
        default=None,
        examples=[0.0038],
        description="failures per host and day that end the job; default Llama 3's rate per GPU, times gpus_per_host",
    )
    host_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, examples=[0.78], description="fraction of failures after which a host must be replaced"
    )
    detection_s: NonNegative | None = Field(
        default=None, examples=[100], description="seconds from a failure until the last process has ended"
    )
    restart_s: NonNegative | None = Field(
        default=None,
        examples=[660],
        description="seconds from the end of the last process until the next attempt can make a step, without "
        "reading the state",
    )
    repair_hours: Positive | None = Field(
        default=None, examples=[24], description="hours until a lost host is back as a spare"
    )


class LaunchTable(TomlTable):
    """The hosts with which `launch local --hosts N --max-restarts K` goes on after it has lost one."""

    spares: Natural = Field(
        default=0,
        description="number of launchers beyond the mesh's hosts; one of them replaces a host that is lost",
    )
    min_hosts: Count | None = Field(
        default=None,
        examples=[1],
        description="smallest number of hosts that may go on, on a smaller mesh; default all",
    )
    wait_s: NonNegative = Field(
        default=60.0, description="seconds that the other hosts wait for a lost host before they go on without it"
    )
    drain: bool = Field(
        default=False,
        description="whether a spare replaces a host that is late twice in a row or whose error counters grow; it does "
        "so at the next snapshot",
    )
    hosts: Count | None = Field(
        default=None,
        examples=[1],
        description="number of hosts that are left, fewer than the mesh uses; cluster, mesh and accumulation are "
        "adapted to it",
    )

    @property
    def continues(self) -> bool:
        """Return whether the job goes on without a lost host: with a spare, or with fewer hosts."""
        return bool(self.spares or self.min_hosts)


class ProfileTable(TomlTable):
    """Which steps are captured."""

    steps: Annotated[list[Natural], Field(min_length=2, max_length=2), AfterValidator(tuple)] | None = Field(
        default=None, examples=[[1, 3]], description="first and last step that are captured"
    )
    processes: Processes | None = Field(
        default=None,
        examples=[4, [0, 8]],
        description="processes that capture: a number of them, spread evenly over the job, or a list; default all",
    )
    every: Natural = Field(
        default=0,
        description="number of steps between captures of one step in all processes, which tell during the run "
        "what communication is exposed and which process the others wait for; 0 means never",
    )


class LocalSgdTable(TomlTable):
    """Local SGD (DiLoCo): replicas step independently and synchronize every few steps by an outer optimizer."""

    axis: SectionAxis = Field(examples=["data"], description="mesh axis whose replicas step independently")
    every: Count = Field(default=1, description="number of steps between two synchronizations")
    learning_rate: Positive = Field(default=0.7, description="learning rate of the outer optimizer")
    momentum: Decay = Field(default=0.9, description="momentum of the outer optimizer")
    nesterov: bool = Field(default=True, description="whether the outer optimizer's momentum is Nesterov's")
    staleness: Literal[0, 1] = Field(
        default=0,
        description="1 applies the outer update of the previous round, so that its exchange overlaps with a "
        "round; 0 applies the update of the round itself",
    )


class CompressionTable(TomlTable):
    """Compressed gradients: they are reduced over one axis in fewer bits."""

    axis: SectionAxis = Field(examples=["data"], description="mesh axis over which gradients are reduced in fewer bits")
    dtype: Literal["bf16", "fp8", "int8"] = Field(default="bf16", description="type of the values that are sent")
    error_feedback: bool = Field(
        default=True, description="whether the rounding error is added to the next step's gradients"
    )


class PipelineTable(TomlTable):
    """Pipeline parallelism: the layers are cut into stages over one mesh axis."""

    axis: SectionAxis = Field(examples=["pipeline"], description="mesh axis along which the stages of the pipeline lie")
    microbatches: Count = Field(
        description="number of micro-batches into which a step's batch is cut; more make the bubble smaller"
    )
    schedule: Literal["1f1b", "interleaved_1f1b"] = Field(
        default="1f1b", description="order of forward and backward passes; interleaved_1f1b has virtual stages"
    )
    virtual_stages: Count = Field(
        default=1, description="number of chunks of layers on each stage; the bubble is divided by it"
    )
    residuals: Name = Field(
        default="recompute",
        description="what a stage keeps of a forward pass until its backward pass: recompute (its input), stash "
        "(all that train.remat keeps), or a policy of jax.checkpoint_policies",
    )
    head: Literal["vocab_parallel", "replicated"] = Field(
        default="vocab_parallel",
        description="vocab_parallel cuts embedding and output head over the stages; replicated keeps both whole "
        "on each",
    )
    layout: Text | None = Field(
        default=None,
        examples=["7|8*14|7"],
        description='number of layers in each virtual stage, as "7|8*14|7"; default as even as possible',
    )


class AllowTable(TomlTable):
    """A finding that is intended."""

    code: Name = Field(description="code of the finding, such as idle_axis")
    path: Text = Field(
        default="**", description="pattern of the finding's path; ** matches any number of segments, * matches one"
    )
    reason: Text = Field(description="why the finding is intended")


class LintTable(TomlTable):
    """The findings that the lint does not report."""

    allow: list[AllowTable] = Field(
        default=[],
        examples=[[{"code": "idle_axis", "reason": "..."}]],
        description="findings that are intended, so that they are not reported",
    )


class ProgramTable(TomlTable):
    """A training step of the user's own."""

    make: Function = Field(description="function pkg.mod:fn, (mesh, **options) -> meshkit.Program")
    options: dict[str, Any] = Field(default={}, description="keyword arguments of the function that program.make names")


# The sections that both kinds of experiment files have, each in its place among the others.
_ExperimentName = Annotated[Name | None, Field(description="name of the experiment; default the file's name")]
_Machines = Annotated[
    Any,
    WithJsonSchema({"type": ["string", "object"]}),
    Field(
        examples=["dgx_h100"],
        description="the machines: the name of a shipped cluster, the path of a cluster file, or a table",
    ),
]
_Axes = Annotated[dict[str, MeshAxisValue], Field(description="size of each mesh axis, the outermost axis first")]
_Captured = Annotated[ProfileTable, Field(description="steps that are captured")]
_Failures = Annotated[FailuresTable, Field(description="how often hosts fail, and what a failure costs")]
_Silenced = Annotated[LintTable, Field(description="findings that the lint does not report")]
_XlaOptions = Annotated[dict[str, Option], Field(description="options of XLA by their names")]


class ProgramExperimentTable(TomlTable):
    """A whole experiment file with a `[program]`."""

    name: _ExperimentName = None
    cluster: _Machines
    mesh: _Axes
    program: ProgramTable = Field(description="the user's own training step")
    rules: RulesTable | None = Field(default=None, description="sharding rules, which only the lint reads")
    train: ProgramTrainTable = Field(
        default=ProgramTrainTable.model_construct(), description="training loop around the user's own step"
    )
    profile: _Captured = ProfileTable.model_construct()
    failures: _Failures = FailuresTable.model_construct()
    lint: _Silenced = LintTable.model_construct()
    xla: _XlaOptions = {}


class ExperimentTable(TomlTable):
    """A whole experiment file."""

    name: _ExperimentName = None
    cluster: _Machines
    model: ModelTable = Field(description="class and options of the model")
    mesh: _Axes
    rules: RulesTable = Field(default=RulesTable.model_construct(), description="mesh axes that shard each array")
    train: TrainTable = Field(description="training loop")
    optimizer: OptimizerTable = Field(
        default=OptimizerTable.model_construct(), description="optimizer and learning rate"
    )
    data: DataTable = Field(default=DataTable.model_construct(), description="where examples come from")
    checkpoint: CheckpointTable = Field(
        default=CheckpointTable.model_construct(), description="when checkpoints are written"
    )
    profile: _Captured = ProfileTable.model_construct()
    failures: _Failures = FailuresTable.model_construct()
    launch: LaunchTable = Field(
        default=LaunchTable.model_construct(), description="how a job goes on after it has lost a host"
    )
    local_sgd: LocalSgdTable | None = Field(
        default=None, description="replicas that step independently and synchronize every few steps"
    )
    compression: CompressionTable | None = Field(
        default=None, description="gradients that are reduced over one mesh axis in fewer bits"
    )
    pipeline: PipelineTable | None = Field(default=None, description="layers in stages along one mesh axis")
    lint: _Silenced = LintTable.model_construct()
    xla: _XlaOptions = {}
