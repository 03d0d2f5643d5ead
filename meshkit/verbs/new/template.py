"""The commented experiment file that `meshkit new` writes; what its keys mean is said where they are declared."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.emit import inline, string_text
from meshkit.config.rules import PRESETS, ShardingRules
from meshkit.config.sections import ExperimentTable

_TEXT = """\
# {title}
# `meshkit explain FILE` checks it, `meshkit plan FILE` predicts it without a GPU, `meshkit train FILE` runs it.
# Change a key for one command: --set train.steps=10 --set mesh.tensor=2
name = {name}

# The machines: a shipped name, or {{ file = "my_cluster.toml" }}, or every key inline.
# Shipped: {clusters}
cluster = {cluster}

[model]
class = {model}
{preset}

[mesh]                                      # {num_gpus} devices; the outermost axis first
# An axis of n is n ways inside an NVLink domain. One that spans both links: fsdp = {{ nvlink = 2, infiniband = 4 }}.
# "fill" takes what is left of a link.
{mesh}

[rules]                                     # logical axis of an array -> mesh axis, or a list of them
preset = "fsdp_tensor"                      # {presets}
[rules.logical]                             # what is here overrides the preset; it says:
{logical}
# act_residual_length = "tensor"            # sequence parallelism
# [[rules.override]]                        # by parameter path; wins over logical axes
# path = "**/router/kernel"
# spec = ["replicated", "replicated"]

[train]
global_batch = {batch}
sequence_length = {length}
steps = 200
# tokens_total = 1_000_000_000
# accumulate = 2
precision = "bf16"
# reduce_precision = "fp32"
# remat = "full"
# loss = "package.module:function"
evaluate_every = 100
seed = 0
# metrics = "package.module:function"
# tensorboard = true

[optimizer]
learning_rate = 3e-4
warmup_steps = 20
schedule = "cosine"
weight_decay = 0.1
clip = 1.0

[data]
source = "python-stdlib"

[checkpoint]
every = 0
keep = 2
# keep_every = 1000
# verify = "own"

[profile]
steps = [10, 12]
# processes = 8

# [pipeline]
# axis = "pipeline"                         # pipeline = {{ infiniband = 4 }} in [mesh]
# schedule = "interleaved_1f1b"
# virtual_stages = 2
# microbatches = 16

# [xla]
# xla_gpu_enable_latency_hiding_scheduler = true
"""
_COMMENT_COLUMN = 44
_WIDTH = 120
_SECTIONS = ExperimentTable.fields_by_key()


def new_experiment(
    name: str = "my_experiment",
    *,
    model: str = "models.llama:Llama",
    preset: str | None = "llama_debug",
    cluster: str = "cpu8",
    hosts: int | None = None,
) -> str:
    """The text of a commented experiment file that loads as it is.

    Args:
        name: of the experiment.
        model: import path of the model's class.
        preset: of the model; None for a model without presets.
        cluster: a shipped name, or a path.
        hosts: how many, where not as the cluster says.

    Raises:
        ConfigError: there is no such cluster.
    """
    machines = Cluster.load(cluster, hosts=hosts)
    is_shipped = cluster in shipped_clusters()
    table = {"name" if is_shipped else "file": cluster, "hosts": hosts}
    text = _TEXT.format(
        title=f"{name}: {model} on {machines.num_gpus} x {machines.gpu.name}.",
        name=string_text(name),
        clusters=", ".join(shipped_clusters()),
        cluster=inline(table if hosts is not None else cluster),
        model=string_text(model),
        preset=f"preset = {string_text(preset)}" if preset else '# preset = "small"',
        num_gpus=machines.num_gpus,
        mesh=_mesh(machines),
        presets=", ".join(PRESETS),
        logical=_preset_rows(),
        batch=2 * machines.num_gpus,
        length=128 if machines.is_cpu else 4096,
    )
    return "\n".join(_commented(text.splitlines())) + "\n"


def _commented(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with what a section or a key means behind those that say nothing yet."""
    keys: Mapping[str, FieldInfo] = {}
    for line in lines:
        header = re.fullmatch(r"(?:# )?\[(\w+)\]", line)
        key = re.fullmatch(r"(?:# )?(\w+) = [^#]*", line)
        meaning = keys.get(key[1]) if key else None
        if header:
            keys, meaning = ExperimentTable.table_at([header[1]]).fields_by_key(), _SECTIONS[header[1]]
        elif line.strip("# ").startswith("["):
            keys = {}
        yield from _with_comment(line, meaning) if meaning else (line,)


def _with_comment(line: str, field: FieldInfo) -> Iterator[str]:
    """The line and what the field means, with the values it may have where these are few."""
    choices = ", ".join(map(str, get_args(field.annotation))) if get_origin(field.annotation) is Literal else ""
    comment = f"{choices}: {field.description}" if choices else field.description or ""
    for part in textwrap.wrap(comment, _WIDTH - _COMMENT_COLUMN - len("# ")):
        yield f"{line:<{_COMMENT_COLUMN - 2}}  # {part}"
        line = ""


def _mesh(cluster: Cluster) -> str:
    """A mesh for any cluster: two ways of tensor parallelism where the domain is even, and the rest fully sharded."""
    tensor = 2 if cluster.gpus_used_per_domain % 2 == 0 else 1
    domains = cluster.num_nvlink_domains
    fsdp = inline({"nvlink": "fill", "infiniband": "fill"}) if domains > 1 else '"fill"'
    return f"data = 1\nfsdp = {fsdp}\ntensor = {tensor}"


def _preset_rows() -> str:
    """The rules of the preset that the file names, as comments."""
    rules = ShardingRules.preset("fsdp_tensor").to_dict()["logical"]
    return "\n".join(f"# {logical} = {inline(axes)}" for logical, axes in rules.items())
