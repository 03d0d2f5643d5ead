"""The commented experiment file that `meshkit new` writes."""

from __future__ import annotations

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.emit import inline, string_text
from meshkit.config.rules import PRESETS, ShardingRules

_TEXT = """\
# {title}
# `meshkit explain FILE` checks it, `meshkit plan FILE` predicts it without a GPU, `meshkit train FILE` runs it.
# Change a key for one command: --set train.steps=10 --set mesh.tensor=2
name = {name}

# The machines: a shipped name, or {{ file = "my_cluster.toml" }}, or every key inline.
# Shipped: {clusters}
cluster = {cluster}

[model]
class = {model}              # package.module:Class, found from here or from the folder you work in
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
{batch:<44}# sequences, over all devices
sequence_length = {length}
steps = 200
# tokens_total = 1_000_000_000              # for the time and the cost of the whole training
# accumulate = 2                            # micro-batches of a step
precision = "bf16"                          # of compute; parameters and optimizer state stay fp32
# reduce_precision = "fp32"                 # of gradient reductions
# remat = "full"                            # recompute activations in the backward pass: "none", "full" or a policy,
                                            # all but ["gate", "up"], or {{ keep = ["key"], offload = ["query"] }}
# loss = "package.module:function"          # (model, batch, rng) -> (loss_sum, weight, metrics); default next token
evaluate_every = 100                        # 0 = never
seed = 0
# metrics = "package.module:function"       # called with every logged step; tensorboard = true writes them there

[optimizer]                                 # AdamW
learning_rate = 3e-4
warmup_steps = 20
schedule = "cosine"                         # constant, cosine, linear
weight_decay = 0.1
clip = 1.0                                  # of the global gradient norm; 0 = none

[data]
source = "python-stdlib"                    # or a folder of text, a token file, "package.module:function"

[checkpoint]
every = 0                                   # steps; 0 = none
keep = 2                                    # the newest
# keep_every = 1000                         # and those of every so many steps
# verify = "own"                            # before a restore: "full", "own" (each process its share) or "off"

[profile]
steps = [10, 12]                            # first and last step that are captured
# processes = 8                             # of a large job: so many of them, or a list; default all

# [pipeline]                                # layers in stages over a mesh axis: pipeline = {{ infiniband = 4 }}
# axis = "pipeline"
# schedule = "interleaved_1f1b"             # gpipe, circular, 1f1b, interleaved_1f1b
# virtual_stages = 2                        # chunks of layers on each stage
# microbatches = 16                         # of a step; they take the place of accumulate

# [xla]                                     # options of the compiler, by their names
# xla_gpu_enable_latency_hiding_scheduler = true
"""


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
    return _TEXT.format(
        title=f"{name}: {model} on {machines.num_gpus} x {machines.gpu.name}.",
        name=string_text(name),
        clusters=", ".join(shipped_clusters()),
        cluster=inline(table if hosts is not None else cluster),
        model=string_text(model),
        preset=f"preset = {string_text(preset)}                    # further keys override it"
        if preset
        else '# preset = "small"',
        num_gpus=machines.num_gpus,
        mesh=_mesh(machines),
        presets=", ".join(PRESETS),
        logical=_preset_rows(),
        batch=f"global_batch = {2 * machines.num_gpus}",
        length=128 if machines.is_cpu else 4096,
    )


def _mesh(cluster: Cluster) -> str:
    """A mesh for any cluster: two ways of tensor parallelism where the domain is even, and the rest fully sharded."""
    tensor = 2 if cluster.gpus_used_per_domain % 2 == 0 else 1
    domains = cluster.num_nvlink_domains
    fsdp = inline({"nvlink": "fill", "infiniband": "fill"}) if domains > 1 else '"fill"'
    return f"data = 1\nfsdp = {fsdp}\ntensor = {tensor}"


def _preset_rows() -> str:
    rules = ShardingRules.preset("fsdp_tensor").to_dict()["logical"]
    return "\n".join(f"# {logical} = {inline(axes)}" for logical, axes in rules.items())
