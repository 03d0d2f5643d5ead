"""A row as an experiment file that meshkit plans. Fourth in the flow of the replay.

What a source leaves unsaid is assumed here, and said in the note; a row that lacks too much becomes a reason.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.published.frameworks import Framework, find_framework
from benchmarks.published.kernels import Kernels, calibration_name, kernels_of
from benchmarks.published.machines import Machines, find_machines
from benchmarks.published.recipes import Recipe, find_recipe
from benchmarks.published.rows import Row
from benchmarks.published.shapes import Notes, Shape, find_shape
from meshkit.config import catalog
from meshkit.config.toml import to_toml

_DOMAIN_KEYS = ("gpu", "hosts", "gpus_per_host", "nvlink_domain_size")
LAYERS = 4  # of the program of a pipeline stage; its loops are stretched to the row's own number afterwards


@dataclass(frozen=True)
class Run:
    """A row resolved: what is compiled, and what surrounds it.

    Attributes:
        micro_batches: of a step, on each replica.
        data: replicas that reduce gradients once a step (of a stage program), or the outer axis of a whole one.
        stage_layers, last_layers: of the fullest pipeline stage, and of the one that has the output head.
        document: the experiment file, as tables.
        assumed: what the source does not say.
        machines: of the whole run.
        experts: replicas that share the experts of a stage (expert parallelism).
        precision: of the linear layers: bf16, fp8 or nvfp4.
        recipe: how Megatron ran the experts, or layers in NVFP4.
        recomputed: share of layers whose forward pass runs twice, whole (Megatron's `recompute_num_layers` of a chunk).
        kernels: in place of the catalog's numbers.
        left_out: name of a correction that is not applied (corrections.py).
    """

    row: Row
    framework: Framework
    shape: Shape
    length: int
    gpus: int
    tensor: int
    context: int
    stages: int
    chunks: int
    data: int
    sharded: int
    micro_batch: int
    micro_batches: int
    stage_layers: int
    last_layers: int
    whole: bool
    document: dict[str, Any]
    machines: Machines
    assumed: tuple[str, ...] = ()
    experts: int = 1
    precision: str = "bf16"
    recipe: Recipe = field(default_factory=Recipe)
    recomputed: float = 0.0
    kernels: Kernels = field(default_factory=Kernels)
    left_out: str = ""

    @property
    def toml(self) -> str:
        """The experiment file."""
        return to_toml(self.document)

    @property
    def tokens(self) -> float:
        """Of a micro-batch on one GPU, those of a tensor-parallel replica together."""
        return self.micro_batch * self.length / self.context

    @property
    def handling(self) -> str:
        """`none`: what `meshkit plan` of the row's file gives; `adjusted`: compiled whole, then changed; `stage`: one
        stage of another framework."""
        if not self.whole:
            return "stage"
        return "adjusted" if self.framework.prefetches else "none"

    @property
    def model_flops(self) -> float:
        """FLOP of a step over all GPUs, as published ones are counted."""
        tokens = self.micro_batch * self.micro_batches * self.data * self.sharded * self.length
        return self.shape.model_flops(tokens, self.length)

    @property
    def configured(self) -> bool:
        """Whether the source states everything that decides the time."""
        return not any(text.startswith("!") for text in self.assumed)


def resolve(row: Row) -> Run | str:
    """The run of a row, or the sentence why it cannot be matched."""
    notes, framework = Notes([f"row corrected: {row.correction}"] if row.correction else []), find_framework(row)
    shape = find_shape(row, notes)
    if isinstance(shape, str):
        return shape
    precision = _precision(row, shape, notes)
    if precision not in ("bf16", "fp8", "nvfp4"):
        return precision
    framework = replace(framework, reduce=row.say("reduce") or framework.reduce)
    recipe = find_recipe(row) if shape.experts or precision == "nvfp4" else Recipe()
    if recipe.regressed:
        return f"by its page it is {recipe.regressed}"
    if recipe.why:
        framework = replace(framework, reduce=recipe.reduce, attention=recipe.attention or framework.attention)
        what = "experts" if shape.experts else "NVFP4"
        notes.assume(f"{what} as in the recipe beside the page: {recipe.why}")
    gpus, length = row.count("n_gpus"), row.count("seq_len")
    if not gpus or not length:
        return f"{'n_gpus' if not gpus else 'seq_len'} is not stated"
    tensor, context, stages = (row.count(name) or 1 for name in ("tp", "cp", "pp"))
    replicas, rest = divmod(gpus, tensor * context * stages)
    if rest or not replicas:
        return f"{gpus} GPUs do not divide by tp {tensor} x cp {context} x pp {stages}"
    sharded = row.count("fsdp") or _launched_sharding(row, framework)
    whole = stages == 1 and (framework.whole or (sharded or 1) > 1)
    if whole and sharded is None:
        sharded = replicas
        notes.doubt(f"degree of sharding not stated: {replicas}")
    sharded = math.gcd(sharded or 1, replicas) if whole else 1
    data = replicas // sharded
    experts = _expert_ways(row, shape, whole, data, tensor)
    if isinstance(experts, str):
        return experts
    batch = _batch(row, replicas, notes)
    if isinstance(batch, str):
        return batch
    micro_batch, micro_batches = batch
    machines = find_machines(row, gpus)
    if isinstance(machines, str):
        return machines
    notes.assumed += machines.assumed
    if precision == "nvfp4" and (whole or precision not in catalog.gpu(str(machines.table["gpu"])).peak_flops):
        where = "beside fully sharded parameters" if whole else f"on {row.say('gpu')}"
        return f"matmuls in NVFP4 {where} are not modelled"
    remat = _remat(row, framework, notes)
    if remat is None:
        return f"recomputation '{row.say('recompute')}' is not a policy that is known here"
    chunks = row.count("vpp") or 1
    if stages > 1 and chunks == 1 and _INTERLEAVED.search(row.notes):
        chunks = 2
        notes.doubt("chunks of the interleaved schedule not stated: 2")
    elif stages > 1 and not row.count("vpp"):
        notes.doubt("chunks of a stage not stated: 1")
    stage_layers, last_layers = split_layers(shape.layers, stages)
    if shape.layers % stages:
        text = f"{stage_layers} on the fullest stage, {last_layers} on that of the output head"
        notes.assume(f"{shape.layers} layers on {stages} stages: {text}")
    if row.say("attention") and "TE" in row.say("precision"):
        notes.doubt("the scores of unfused attention as XLA's kernels make them, not Transformer Engine's")
    if "SFT" in row.say("model"):
        notes.doubt("how much of a sequence is padding, which attention may skip, is not stated")
    common = (shape, precision, remat, length)
    if whole:
        cut = _even_ways(shape.hidden, sharded)
        fewer = machines if cut == sharded else find_machines(row, gpus // sharded * cut)
        if isinstance(fewer, str):
            return fewer
        if cut < sharded:
            notes.assume(
                f"{sharded} GPUs do not divide hidden {shape.hidden}: the program of {cut}, with as much on each"
            )
        ways = (data, cut, context, tensor)
        document = _whole(row, framework, common, fewer, ways, micro_batch, micro_batches)
    else:
        document = _stage(row, framework, common, machines, (stages, experts, context, tensor), micro_batch)
    return Run(row, framework, shape, length, gpus, tensor, context, stages, chunks, data, sharded, micro_batch,
               micro_batches, stage_layers, last_layers, whole, document, machines, tuple(notes.assumed), experts,
               precision, recipe, _recomputed_share(row, shape.layers / stages / chunks),
               Kernels() if "calibration" in document["cluster"] else kernels_of(row, framework))  # fmt: skip


def _recomputed_share(row: Row, layers: float) -> float:
    """Share of the layers of a chunk that Megatron recomputes whole (`recompute_method` block)."""
    found = _BLOCK.search(row.say("recompute"))
    return min(1.0, int(found[1]) / layers) if found else 0.0


def _expert_ways(row: Row, shape: Shape, whole: bool, data: int, tensor: int) -> int | str:
    """Replicas that share the experts of a stage: Megatron takes them from those of data parallelism."""
    ways = row.count("ep") or 1
    if not shape.experts or ways == 1:
        return 1
    if whole:
        return "experts that are cut beside fully sharded parameters are not replayed"
    if data % ways:
        return (
            f"experts are cut {ways} ways over {data} replicas of {tensor} tensor-parallel GPUs: such GPUs would hold "
            "whole experts each (expert tensor parallelism 1), where our model cuts every expert among them"
        )
    if shape.experts % ways:
        return f"{shape.experts} experts are not cut evenly over {ways} GPUs"
    return ways


def _even_ways(size: int, ways: int) -> int:
    """The most ways, up to these, that cut a size evenly."""
    return max(n for n in range(1, ways + 1) if size % n == 0 and (n == ways or ways % n == 0 or n % 8 == 0))


def _launched_sharding(row: Row, framework: Framework) -> int | None:
    """GPUs that share the parameters where NVIDIA's launcher says it: one host for 5b, sixteen for 175b.

    NVIDIA/dgxc-benchmarking@35a9aec, paxml/configure.sh (FSDP hosts of DCN_MESH_SHAPE); eight GPUs of a host always do.
    """
    if framework.name != "Paxml" or "dgxc" not in row.source.lower():
        return None
    return 128 if "175b" in row.say("model").lower() else 8


def split_layers(layers: int, stages: int) -> tuple[int, int]:
    """Layers of the fullest stage, and of the last one, which has the output head.

    Where they do not divide but two more would (126 on 16), embedding and head each stand for one, as in Llama 3's and
    Megatron's splits; otherwise the last stage is as full as any.
    """
    if layers % stages and (layers + 2) % stages == 0:
        return (layers + 2) // stages, (layers + 2) // stages - 1
    return -(-layers // stages), -(-layers // stages)


def _precision(row: Row, shape: Shape, notes: Notes) -> str:
    """`bf16`, `fp8` or `nvfp4`; a sentence why it is none of them."""
    words = row.say("precision").lower()
    if "fp4" in words:
        return "experts in NVFP4 are not modelled" if shape.experts else "nvfp4"
    if not words:
        return "the precision is not stated, and 8 bits are up to twice as fast as 16"
    if "not stated" in words:
        notes.assume("fp16 or bf16, which cost the same")
    if "two recipes" in words:
        notes.doubt("which of two fp8 recipes is not stated")
    return "fp8" if "fp8" in words or "float8" in words else "bf16"


def _batch(row: Row, replicas: int, notes: Notes) -> tuple[int, int] | str:
    """(micro-batch of a replica, micro-batches of a step)."""
    total, micro = row.count("global_batch_seqs"), row.count("micro_batch")
    if not total and not micro:
        return "neither global batch nor micro-batch is stated"
    if not micro:
        micro = 1
        notes.doubt("micro-batch not stated: 1")
    if not total:
        return micro, 1
    if total % replicas and total < replicas:
        return f"a global batch of {total} does not fill {replicas} replicas"
    each = total / replicas
    if each < micro or round(each / micro) * micro * replicas != total:
        notes.assume(f"{total} sequences are {each:g} for each replica, not whole micro-batches of {micro}: rounded")
    return (micro, max(1, round(each / micro))) if each >= micro else (max(1, int(each)), 1)


# What MaxText's policies keep (src/maxtext/layers/nnx_decoders.py, get_remat_policy) and, last, Pax's
# (praxis/layers/checkpoint_policy.py), by the names of our models.
_QKV = ["query", "key", "value"]
_MINIMAL_FLASH = [*_QKV, "output", "gate", "up", "down", "attention"]  # TransformerEngine names it `context`
_POLICIES: dict[str, str | list[str] | dict[str, list[str]]] = {
    "full": "full",
    "minimal": "dots",
    "minimal_flash": _MINIMAL_FLASH,
    "minimal_with_context": _MINIMAL_FLASH,
    "minimal_offloaded": "offload_dots",
    "save_dot_only": "dots",
    "save_qkv_proj": _QKV,
    "save_out_proj": ["output"],
    "save_qkv_out_proj": [*_QKV, "output"],
    "save_dot_except_mlp": [*_QKV, "output"],
    "save_dot_with_context_except_mlp": [*_QKV, "output", "attention"],
    "save_dot_except_mlpwi": [*_QKV, "output", "down"],
    "qkv_proj_offloaded": {"keep": [], "offload": _QKV},
    "save_dot_with_no_batch_dim": "dots",
    "save_nothing": "full",
}
_A3_ALL_REDUCE = {1: 128, 2: 64, 4: 512}  # MiB by hosts: 1vm.sh to 16vm.sh beside the page, 1024 from 8 hosts on
_LAUNCHERS = {
    "training/a3mega/": (128, 512, 64),
    "training/a4high/": (16384, 16384, 16384),
    "training/a3ultra/": (2048, 2048, 16),
    "training/a4/": (2048, 2048, 16),
    "JAX-Toolbox MaxText": (1024, 1024, 128),
}
_INTERLEAVED = re.compile(r"interleaved", re.IGNORECASE)
_BLOCK = re.compile(r"recompute_num_layers=(\d+)")


def _remat(row: Row, framework: Framework, notes: Notes) -> str | list[str] | dict[str, list[str]] | None:
    """What of a layer is kept, as `train.remat`; None where the row's words are not known."""
    words = row.say("recompute")
    low = words.lower()
    if not words and "none in config" in row.notes:
        notes.assume("recomputation: none in its configuration")
        return "none"
    if not words:
        recipes = "Megatron-Bridge" in row.source  # @00919dc and @01b2977, scripts/performance/configs/*/
        notes.doubt(
            "recomputation not stated: none" + (", as in nearly all recipes beside its page" if recipes else "")
        )
        return "none"
    if _BLOCK.search(words):
        return "none"  # whole layers, which replica.py counts twice
    named = [name for name in _POLICIES if re.search(rf"\b{name}\b", low)]
    if named and not low.startswith("none"):
        return _POLICIES[max(named, key=len)]
    if low.startswith("full"):
        return "full"
    if low.startswith("selective"):
        return _selective(framework, words, notes)
    if re.match(r"cpu offload", low):
        notes.doubt(f"'{words}' is taken as hidden")
        return "none"
    return "none" if low.startswith("none") else None


def _selective(framework: Framework, words: str, notes: Notes) -> str | list[str]:
    """Megatron's recomputes attention between the projections; PyTorch's per-op policy every second matmul."""
    if framework.name == "torchtitan":
        notes.assume("per-op checkpointing: every second matmul and attention are recomputed")
        return ["query", "value", "gate", "down"]
    if framework.name == "IBM fms-fsdp":
        notes.doubt("share of checkpointed blocks not stated: projections kept")
    return "dots"


def _model(row: Row, framework: Framework, shape: Shape, layers: int, length: int, context: int) -> dict[str, Any]:
    sizes = {"vocab": shape.vocab, "embed": shape.hidden, "mlp": shape.ffn, "layers": layers, "heads": shape.heads}
    options = _parts(row, framework, shape) | ({"context": "ring"} if context > 1 else {})
    if shape.experts:  # an even load fills every expert's slots, each with as many rows
        return {"class": "models.moe:Moe", "preset": "moe_debug", **sizes, "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim, "experts": shape.experts,
                "experts_per_token": shape.experts_per_token, "capacity_factor": 1.0, **options}  # fmt: skip
    if shape.gated:
        return {"class": "models.llama:Llama", "preset": "llama3_8b", **sizes, "kv_heads": shape.kv_heads,
                "head_dim": shape.head_dim, "tied": shape.tied, **options}  # fmt: skip
    attention = row.say("attention") or ("fused" if framework.fused_attention else "materialized")
    return {"class": "models.gpt:GPT", "preset": "gpt_debug", **sizes, "kv_heads": shape.kv_heads, "length": length,
            "tied": shape.tied, "attention": attention, **options}  # fmt: skip


def _parts(row: Row, framework: Framework, shape: Shape) -> dict[str, Any]:
    """What a JAX model's source has beyond its dims, as options of ours.

    MaxText: `use_iota_embed` in the launchers of both pages; `logits_dot_in_fp32` is in base.yml of efb6d9e, A3's, and
    off in NVIDIA's launcher. Pax's GPTs (google/paxml@7241216, contrib/gpu/scripts_gpu/configs.py): USE_BIAS, and
    EMBEDDING_LOOKUP_STYLE = 'matmul' of TransformerLmSpmdAdam; its Llama has neither. GPT5BBase there, from which
    dgxc-benchmarking@35a9aec derives its 5b (paxml_mod_configs.py), has input_dropout_prob = 0.1 of the repeated block.
    """
    if framework.name == "MaxText":
        return {"one_hot_lookup": True} | ({"fp32_head": True} if "gpu/a3/" in row.source else {})
    if framework.name != "Paxml" or shape.gated:
        return {}
    dropped = {"dropout": 0.1, "dropout_at": "inputs"} if re.search(r"\b5b", row.say("model")) else {}
    return {"one_hot_lookup": True, "bias": True, **dropped}


# XLA_PYTHON_CLIENT_MEM_FRACTION of the launchers beside the pages of JAX; XLA keeps within 95 % of it.
# dgxc-benchmarking@35a9aec maxtext/configure.sh, paxml/configure.sh (5b; 175b in fp8); maxtext@efb6d9e
# configs/a3/llama_2_7b/*vm.sh; gpu-recipes@748a454 helm charts; JAX-Toolbox@8ef90e8e maxtext/scripts/example_slurm.sub;
# paxml@7241216 contrib/gpu/scripts_gpu/run_pile_multinode.sh (126M), run_llama_boolq.sh, run_base_config_multinode.sh.
_POOLS = (
    ("gpu/a3/", "", 0.85),
    ("dgxc-benchmarking.*maxtext/", "", 0.94),
    ("gpu-recipes.*/a3mega/", "", 0.9),
    ("gpu-recipes", "", 0.98),
    ("projects/pax/", "126m|llama", 0.85),
    ("projects/|paxml/", "", 0.9),
)


# Whose launchers run the step once to profile it, and let XLA schedule it again by the profile:
# dgxc-benchmarking@35a9aec and @741c886, maxtext/configure.sh.
_PROFILED = "dgxc-benchmarking.*maxtext/"


def _launched(row: Row) -> dict[str, Any]:
    """What the launcher of a JAX row says: the share of memory that its client had, and whether XLA had a profile."""
    name = row.say("model").lower()
    shares = (f for where, model, f in _POOLS if re.search(where, row.source) and re.search(model, name))
    share = {"memory_fraction": found} if (found := next(shares, None)) else {}
    return share | ({"pgle": "predicted"} if re.search(_PROFILED, row.source) else {})


def _whole(row: Row, framework: Framework, common, machines: Machines, ways, micro_batch: int, count: int):
    shape, precision, remat, length = common
    data, sharded, context, tensor = ways
    mesh = place({"data": data, "fsdp": sharded, "context": context, "tensor": tensor}, machines.domain)
    rules: dict[str, Any] = {"preset": "all"}
    if tensor > 1 and not _sequence_parallel(row, framework):
        rules["logical"] = {"act_residual_length": "context" if context > 1 else "replicated"}
    if count > 1 and sharded > 1:
        rules["gradients"] = {"embed": "fsdp"}  # gathered and scattered with every micro-batch, as FSDP does
    train = {"global_batch": micro_batch * count * data * sharded, "sequence_length": length, "accumulate": count,
             "precision": precision, "reduce_precision": framework.reduce, "remat": remat,
             "derived_options": False, **_launched(row)}  # fmt: skip
    table, named = machines.table, calibration_name(kernels_of(row, framework), str(machines.table["gpu"]))
    if named and not framework.prefetches:  # the product's own; what others have is in Run.kernels
        table = table | {"calibration": named}
    return {"name": _name(row), "cluster": table, "mesh": mesh, "rules": rules,
            "model": _model(row, framework, shape, shape.layers, length, context), "train": train,
            "xla": dict(_options(row, framework))}  # fmt: skip


def _stage(row: Row, framework: Framework, common, machines: Machines, ways, micro_batch: int) -> dict[str, Any]:
    """One stage of one replica, with the tables of the vocabulary, for one micro-batch.

    With experts a stage of all replicas that share them, each with a micro-batch of its own.
    """
    shape, precision, remat, length = common
    stages, experts, context, tensor = ways
    gpus = experts * context * tensor
    inside = min(machines.domain, gpus)
    table = machines.table | {"hosts": max(1, gpus // machines.table["gpus_per_host"])}
    table["gpus_per_host"] = min(table["gpus_per_host"], gpus)
    if "nvlink_domain_size" in table:
        table["nvlink_domain_size"] = max(inside, table["gpus_per_host"])
    if gpus <= inside:  # no network in its program, so that runs of all sizes share it
        table = {key: value for key, value in table.items() if key in _DOMAIN_KEYS}
    rules: dict[str, Any] = {"preset": "all"}
    if tensor > 1 and not _sequence_parallel(row, framework):
        rules["logical"] = {"act_residual_length": "context" if context > 1 else "replicated"}
    layers = LAYERS if stages > 1 else shape.layers
    if shape.experts or precision == "nvfp4":  # ours multiply in 16 bits; experts.py and blocks.py price them in fewer
        precision = "bf16"
    train = {"global_batch": micro_batch * experts, "sequence_length": length, "precision": precision,
             "reduce_precision": "fp32", "remat": remat, "derived_options": False}  # fmt: skip
    mesh = place({"data": 1, "expert": experts, "context": context, "tensor": tensor}, inside)
    return {"name": "stage", "cluster": table, "mesh": mesh,
            "rules": rules, "model": _model(row, framework, shape, layers, length, context), "train": train,
            "xla": dict(framework.xla)}  # fmt: skip


def _sequence_parallel(row: Row, framework: Framework) -> bool:
    said = row.say("sp").lower()
    return said == "yes" or (not said and framework.sequence_parallel)


def place(sizes: dict[str, int], domain: int) -> dict[str, Any]:
    """The mesh with its innermost axes inside NVLink domains, as every framework numbers its GPUs."""
    mesh: dict[str, Any] = {}
    room = domain
    for name, size in reversed(sizes.items()):
        inside = math.gcd(size, room)
        room //= inside
        if size > 1:
            outside = size // inside
            mesh[name] = {"nvlink": inside, "infiniband": outside} if outside > 1 else inside
    return dict(reversed(mesh.items())) or {"data": 1}


def _options(row: Row, framework: Framework) -> dict[str, object]:
    """XLA options: the framework's, and those of the launchers of MaxText and Paxml, by precision and hosts.

    NVIDIA/dgxc-benchmarking@35a9aec, maxtext/configure.sh and paxml/configure.sh; on A3 the scripts of the row's page.
    """
    options = dict(framework.xla)
    mib = 2**20
    if "JAX-Toolbox Pax" in row.source:  # google/paxml@7241216, contrib/gpu/scripts_gpu/*.sh, which the page names
        few = 32 * mib if "126m" in row.say("model") else 51_200
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_all_reduce_combine_threshold_bytes": few}
    if framework.name == "Paxml" and "dgxc" in row.source.lower():
        options["xla_gpu_enable_triton_gemm"] = False
        options["xla_gpu_all_gather_combine_threshold_bytes"] = 512 * mib
        options["xla_gpu_all_reduce_combine_threshold_bytes"] = 512 * mib
        options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = 8 * mib
    if framework.name == "MaxText":
        hosts = (row.count("n_gpus") or 8) // 8
        options["xla_gpu_enable_triton_gemm"] = False
        options["xla_gpu_enable_while_loop_double_buffering"] = True
        if (thresholds := _combined_mib(row, hosts)) is not None:
            for name, size in zip(("all_gather", "all_reduce", "reduce_scatter"), thresholds, strict=True):
                options[f"xla_gpu_{name}_combine_threshold_bytes"] = size * mib
        elif "gpu/a3/" in row.source:
            options["xla_gpu_all_gather_combine_threshold_bytes"] = 128 * mib
            options["xla_gpu_all_reduce_combine_threshold_bytes"] = _A3_ALL_REDUCE.get(hosts, 1024) * mib
            options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = (128 if hosts >= 16 else 64) * mib
        elif "fp8" in row.say("precision"):
            options["xla_gpu_all_gather_combine_threshold_bytes"] = 512 * mib
            options["xla_gpu_all_reduce_combine_threshold_bytes"] = 1024 * mib
            options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = (4 if hosts >= 64 else 8) * mib
        else:
            options["xla_gpu_reduce_scatter_combine_threshold_bytes"] = (16 if hosts >= 64 else 32) * mib
    return options


def _combined_mib(row: Row, hosts: int) -> tuple[int, int, int] | None:
    """What the launcher beside a page of MaxText combines, MiB of gathers, all-reduces and scatters.

    NVIDIA/dgxc-benchmarking@741c886, maxtext/configure.sh; AI-Hypercomputer/gpu-recipes@748a454, helm charts of a3ultra
    and a3mega and values.yaml of a4high, and @5be5988, values.yaml of a4; NVIDIA/JAX-Toolbox@8ef90e8e, MaxText's page.
    """
    if "MaxText 25.04" in row.source:
        return 2048, 2048, (1 if hosts >= 64 else 2) * (32 if row.say("precision") == "fp8" else 16)
    found = (mib for words, mib in _LAUNCHERS.items() if words in row.source)
    return next(found, None)


def _name(row: Row) -> str:
    """The row's id as a name of an experiment file: letters, digits, `_` and `-`, a letter first."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", row.id)[:80] or "row"
    return name if name[0].isalpha() or name[0] == "_" else f"row_{name}"
