"""A row of a JAX run as the experiment file that `meshkit plan` takes. Second in the flow.

A file `experiments/ID.toml` beside this module is the row's own, if it is of as many GPUs, tokens and sequences as the
row; its comment says what comes from where. Any other row becomes a file from its columns alone, with our model of the
stated dims and the options that meshkit derives. What a row leaves unsaid is assumed by a rule for all rows and stands
in the note; a row without what no rule can say has a reason instead of a file.
"""

from __future__ import annotations

import math
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.published.rows import Row
from meshkit.config import catalog
from meshkit.config.toml import to_toml

KEPT = Path(__file__).with_name("experiments")
UNSAID = "# Not stated:"  # of a kept file: begins what decides the time and its source does not say

# Words of the `gpu` column -> a GPU of the catalog; the first that matches.
_GPUS = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"GH200", "gh200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100.*(PCIe|NVL)", "h100_pcie"),
    (r"H100", "h100_sxm"),
    (r"A100.*40", "a100_40gb"),
    (r"A100", "a100_80gb"),
    (r"V100.*32", "v100_32gb"),
    (r"V100", "v100"),
    (r"P100", "p100"),
)
# Words of the `network` column -> a NIC of the catalog; a count of ports beside it is a host's.
_NETWORKS = (
    (r"TCPXO", "tcpxo_200"),
    (r"TCPX", "tcpx_200"),
    (r"EFA.*400", "efa_400"),
    (r"EFA", "efa_100"),
    (r"RoCE.*\b100|\b100.*RoCE", "roce_100"),
    (r"RoCE|RDMA.*400", "roce_400"),
    (r"XDR|CX8|ConnectX-8", "ib_xdr"),
    (r"NDR|CX7|ConnectX-7|\b400", "ib_ndr"),
    (r"HDR|ConnectX-6|\b200", "ib_hdr"),
    (r"EDR|\b100", "ib_edr"),
)
_PORTS = re.compile(r"\b(\d{1,2}) ?x ?(?=[A-Za-z]|[1-8]00)")  # `8x HDR200`, `4x200G`
# What hosts of a GPU are sold with: NVIDIA's reference systems (DGX P100 to DGX B300, NVL72).
_REFERENCE = {"p100": ("ib_edr", 4), "v100": ("ib_edr", 4), "v100_32gb": ("ib_edr", 8), "a100_40gb": ("ib_hdr", None),
              "a100_80gb": ("ib_hdr", None), "b300": ("ib_xdr", None), "gb300": ("ib_xdr", None)}  # fmt: skip
_EFA = {"a100_40gb": 4, "a100_80gb": 4, "h100_sxm": 32, "h200": 32}  # AWS's ports of a host: p4d, p5; others one a GPU
_RACKS, _RACK_GPUS = ("gb200", "gb300"), (72, 64)  # of an NVL72: whole racks, else the 64 of powers of two
# The largest number of a column that is planned.
_MOST = {"n_gpus": 2**17, "seq_len": 2**24, "layers": 2000, "hidden": 2**18, "ffn": 2**20, "heads": 2**12,
         "vocab": 2**22, "global_batch_seqs": 2**24, "micro_batch": 2**20, "gpus_per_node": 2**10,
         "experts": 2**12, "experts_per_token": 2**9, "head_dim": 2**12, "vpp": 2**8, "kv_heads": 2**12}  # fmt: skip
_PLAIN = re.compile(r"gpt|opt|bloom|palm|falcon|mpt|nemotron", re.IGNORECASE)  # two matrices and a GELU
_EXPERTS = re.compile(r"moe|mixtral|deepseek|grok|kimi|gpt.oss|\d+x\d+b|[-_ ]a\d+b\b", re.IGNORECASE)
_NO_DECODER = re.compile(r"\bt5|bert|\bvit\b|diffusion|resnet|clip|whisper|flux|dit\b", re.IGNORECASE)
# Words for what a layer keeps, of MaxText (get_remat_policy), Praxis (AutodiffCheckpointType) and in general, as
# `train.remat`; the longest that stands in the cell.
_QKV, _DOTS = ["query", "key", "value"], ["projection"]
_FLASH = [*_QKV, "output", "gate", "up", "down", "attention"]
_POLICIES: Mapping[str, Any] = {
    "none": "none",
    "no ": "none",
    "full": "full",
    "save_nothing": "full",
    "dots": _DOTS,
    "selective": _DOTS,
    "minimal": _DOTS,
    "minimal_flash": _FLASH,
    "minimal_with_context": _FLASH,
    "minimal_offloaded": "offload_dots",
    "save_dot": _DOTS,
    "save_dot_only": _DOTS,
    "save_dot_with_no_batch_dim": _DOTS,
    "save_qkv": _QKV,
    "save_qkv_proj": _QKV,
    "qkv_proj_offloaded": {"keep": [], "offload": _QKV},
    "save_out_proj": ["output"],
    "save_qkv_out_proj": [*_QKV, "output"],
    "save_qkvo": [*_QKV, "output"],
    "save_dot_except_mlp": [*_QKV, "output"],
    "save_dot_with_context_except_mlp": [*_QKV, "output", "attention"],
    "save_dot_except_mlpwi": [*_QKV, "output", "down"],
}


class Unplannable(Exception):
    """Why a row has no experiment file, as its note says it."""


@dataclass
class Run:
    """The experiment of a row.

    Attributes:
        text: of the file.
        document: its tables.
        assumed: what the row does not say and hardly matters.
        unsaid: what it does not say and decides the time.
        kept: whether the file stands in `experiments/`.
    """

    text: str
    document: dict[str, Any]
    assumed: list[str] = field(default_factory=list)
    unsaid: list[str] = field(default_factory=list)
    kept: bool = False

    @property
    def configured(self) -> str:
        """`fully` or `partly`."""
        return "partly" if self.unsaid else "fully"

    @property
    def note(self) -> str:
        """What is assumed, or where that stands."""
        kept = ["what is assumed stands in experiments/" + self.document["name"] + ".toml"] if self.kept else []
        return "; ".join([*(f"not stated: {text}" for text in self.unsaid), *self.assumed, *kept])


def experiment_of(row: Row) -> Run:
    """Return the experiment of a row of a JAX run.

    Raises:
        Unplannable: the row lacks a column that no rule can fill, or holds what no experiment file can say.
    """
    for name, most in _MOST.items():
        if (value := row.numbers.get(name, 0)) > most or value < 0:
            raise Unplannable(f"column {name} = {value:g} is not between 0 and {most:,}")
    return _kept(row) or _generated(row)


def _kept(row: Row) -> Run | None:
    path = KEPT / f"{row.id}.toml"
    if not re.fullmatch(r"[\w.-]+", row.id) or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    document = tomllib.loads(text)
    cluster, train = document["cluster"], document["train"]
    own = {"n_gpus": cluster["hosts"] * cluster["gpus_per_host"], "seq_len": train["sequence_length"],
           "global_batch_seqs": train["global_batch"]}  # fmt: skip
    if any((row.count(name) or value) != value for name, value in own.items()):
        return None
    unsaid = [line.removeprefix(UNSAID).strip() for line in text.splitlines() if line.startswith(UNSAID)]
    return Run(text, document, unsaid=unsaid, kept=True)


def _generated(row: Row) -> Run:
    run = Run("", {})
    gpus, length = _needed(row, "n_gpus"), _needed(row, "seq_len")
    cluster, domain = _cluster(row, gpus, run)
    model, train = _model(row, length, run), {}
    experts = model["class"].endswith("Moe")
    ways = _ways(row, gpus, experts, run)
    replicas = ways["data"] * ways["fsdp"] * ways["expert"]
    batch, count = _batch(row, replicas, run)
    rules: dict[str, Any] = {"preset": "all"}
    if ways["tensor"] > 1 and row.say("sp").lower() == "no":
        rules["logical"] = {"act_residual_length": "context" if ways["context"] > 1 else "replicated"}
    if count > 1 and ways["fsdp"] > 1 and ways["pipeline"] == 1:
        rules["gradients"] = {"embed": "fsdp"}  # gathered and scattered with every micro-batch, as FSDP does
    if ways["context"] > 1:
        model["context"] = "ring"
    train = {"global_batch": batch, "sequence_length": length, "precision": _precision(row, run),
             "reduce_precision": "bf16", "remat": _remat(row, run)}  # fmt: skip
    run.assumed.append("gradients reduced in bf16, XLA's options as meshkit derives them")
    if experts:
        train["loss"] = "models.moe:next_token_loss"
    name = re.sub(r"[^A-Za-z0-9_-]", "_", row.id)[:80]
    run.document = {"name": name if name[0].isalpha() else f"row_{name}", "cluster": cluster,
                    "mesh": _place(ways, domain), "rules": rules, "model": model, "train": train}  # fmt: skip
    if ways["pipeline"] > 1:
        run.document["pipeline"] = {"axis": "pipeline", "microbatches": count} | _schedule(row)
    elif count > 1:
        train["accumulate"] = count
    said = [f"{row.id}: {row.say('source')} {row.say('source_ref')}", *(f"Not stated: {text}." for text in run.unsaid),
            *(f"Assumed: {text}." for text in run.assumed)]  # fmt: skip
    lines = (part for text in said for part in textwrap.wrap(text, 116, break_on_hyphens=False) or [""])
    run.text = "".join(f"# {line}\n" for line in lines) + "\n" + to_toml(run.document)
    return run


def _needed(row: Row, name: str) -> int:
    if found := row.count(name):
        return found
    raise Unplannable(
        f"the column {name} is missing" if not row.say(name) else f"{name} '{row.say(name)[:40]}' is no number"
    )


def _cluster(row: Row, gpus: int, run: Run) -> tuple[dict[str, Any], int]:
    """The `[cluster]` table, and how many GPUs share NVLink."""
    words = row.say("gpu")
    if not words:
        raise Unplannable("the column gpu is missing")
    found = (key for pattern, key in _GPUS if re.search(pattern, words, re.IGNORECASE))
    key = words if words in catalog.gpu_keys() else next(found, None)
    if key is None or key == "cpu":
        raise Unplannable(f"GPU '{words[:40]}' is not in the catalog")
    per_host = min(row.count("gpus_per_node") or (4 if key in _RACKS else 8), gpus)
    rack = key in _RACKS and gpus > per_host
    domain = min(next((n for n in _RACK_GPUS if gpus % n == 0), _RACK_GPUS[-1]) if rack else per_host, gpus)
    if gpus % per_host or gpus % domain:
        raise Unplannable(f"{gpus} GPUs are not whole hosts of {per_host} or NVLink domains of {domain}")
    table: dict[str, Any] = {"gpu": key, "hosts": gpus // per_host, "gpus_per_host": per_host}
    if domain > per_host:
        table["nvlink_domain_size"] = domain
    if gpus > domain:
        network = row.say("network")
        known = next((nic for pattern, nic in _NETWORKS if re.search(pattern, network, re.IGNORECASE)), None)
        nic, ports = (known, _ports(network, key)) if known else _REFERENCE.get(key, ("ib_ndr", None))
        table |= {"nic": nic, "nics_per_host": ports or per_host}
        if not known:
            run.assumed.append(f"network not stated: {table['nics_per_host']} x {nic} a host")
    return table, domain


def _ports(network: str, gpu: str) -> int | None:
    """Ports of a host by the words of its network; None for one a GPU."""
    if "EFA" in network:
        return _EFA.get(gpu)
    return max(map(int, _PORTS.findall(network)), default=None) or None


def _ways(row: Row, gpus: int, experts: bool, run: Run) -> dict[str, int]:
    """Mesh axis -> its size, outermost first."""
    tensor, context, stages, expert = (row.count(name) or 1 for name in ("tp", "cp", "pp", "ep"))
    expert = expert if experts else 1
    replicas, rest = divmod(gpus, tensor * context * stages)
    if rest or not replicas or replicas % expert:
        raise Unplannable(f"{gpus} GPUs do not divide by tp {tensor} x cp {context} x pp {stages} x ep {expert}")
    data, fsdp = row.count("dp"), row.count("fsdp")
    cut = replicas // expert
    if fsdp is None and data is None:
        run.unsaid.append(f"degree of sharding: all {cut} replicas")
    if fsdp is None:
        fsdp = cut // data if data and cut % data == 0 else cut
    fsdp = math.gcd(fsdp, cut)
    if data and data * fsdp not in (cut, replicas) and data != cut:
        run.unsaid.append(f"dp {data} x fsdp {row.say('fsdp')} are not {cut}: taken as {cut // fsdp} x {fsdp}")
    return {
        "pipeline": stages,
        "data": cut // fsdp,
        "fsdp": fsdp,
        "expert": expert,
        "context": context,
        "tensor": tensor,
    }


def _place(ways: dict[str, int], domain: int) -> dict[str, Any]:
    """The mesh with its innermost axes inside NVLink domains."""
    mesh: dict[str, Any] = {}
    room = domain
    for name, size in reversed(list(ways.items())):
        inside = math.gcd(size, room)
        room //= inside
        if size > 1:
            mesh[name] = {"nvlink": inside, "infiniband": size // inside} if size > inside else inside
    return dict(reversed(list(mesh.items()))) or {"data": 1}


def _batch(row: Row, replicas: int, run: Run) -> tuple[int, int]:
    """Sequences of a step, and its micro-batches."""
    total, micro = row.count("global_batch_seqs"), row.count("micro_batch")
    if not total:
        if not micro:
            raise Unplannable("the columns global_batch_seqs and micro_batch are missing")
        return micro * replicas, 1
    if total % replicas:
        raise Unplannable(f"global_batch_seqs {total} is not a multiple of {replicas} replicas")
    if not micro:
        return total, row.count("pp") or 1
    if total % (micro * replicas):
        run.unsaid.append(
            f"micro_batch {micro} does not divide the {total // replicas} sequences of a replica: all at once"
        )
        return total, 1
    return total, total // (micro * replicas)


def _schedule(row: Row) -> dict[str, Any]:
    chunks = row.count("vpp") or 1
    return {"schedule": "interleaved_1f1b", "virtual_stages": chunks} if chunks > 1 else {"schedule": "1f1b"}


def _precision(row: Row, run: Run) -> str:
    words = row.say("precision").lower()
    if not words:
        run.unsaid.append("precision: bf16")
        return "bf16"
    if re.search(r"mx|fp4|int|e8m0", words):
        raise Unplannable(f"precision '{words[:40]}' is none that an experiment file can say")
    if re.search(r"fp8|float8|e4m3", words):
        return "fp8"
    return "fp32" if re.search(r"fp32|tf32|float32", words) and "bf16" not in words else "bf16"


def _remat(row: Row, run: Run) -> Any:
    words = row.say("recompute").lower()
    if words in ("no", "off", "false", "-"):
        return "none"
    if words.startswith("none"):
        return "none"
    plain = re.sub(r"[ ,-]+", "_", words)
    found = [name for name in _POLICIES if name in words or name.replace(" ", "_") in plain]
    if found:
        return _POLICIES[max(found, key=len)]
    run.unsaid.append(f"recomputation{f' ({words[:60]})' if words else ''}: outputs of matmuls kept")
    return _DOTS


def _model(row: Row, length: int, run: Run) -> dict[str, Any]:
    """The `[model]` table: our decoder of the row's dims, and of a shipped preset's where the row lacks them."""
    name = row.say("model")
    if _NO_DECODER.search(name):
        raise Unplannable(f"model '{name[:40]}' is no decoder of text")
    has_experts = (row.count("ep") or 1) > 1 or (row.count("experts") or 0) > 1 or _EXPERTS.search(name) is not None
    known = _preset(name, has_experts)
    columns = {"layers": "layers", "embed": "hidden", "heads": "heads", "kv_heads": "kv_heads", "mlp": "ffn",
               "vocab": "vocab", "experts": "experts", "experts_per_token": "experts_per_token",
               "head_dim": "head_dim"}  # fmt: skip
    dims: dict[str, Any] = {key: row.count(column) or known.get(key) for key, column in columns.items()}
    taken = [columns[key] for key, value in dims.items() if value and not row.count(columns[key]) and key != "head_dim"]
    if taken:
        run.assumed.append(f"{', '.join(taken)} of the public model")
    for key in ("layers", "embed", *(("mlp", "experts", "experts_per_token") if has_experts else ())):
        if not dims[key]:
            raise Unplannable(f"the column {columns[key]} is missing")
    layers, embed = dims["layers"], dims["embed"]
    heads = dims["heads"] or max(1, embed // 128)
    if not dims["heads"]:
        run.unsaid.append(f"heads: {heads} of 128")
    kv_heads, vocab = dims["kv_heads"] or heads, dims["vocab"] or 32_000
    if not dims["vocab"]:
        run.assumed.append("a vocabulary of 32,000")
    if (embed % heads and not dims["head_dim"]) or heads % kv_heads:
        raise Unplannable(f"hidden {embed}, heads {heads} and kv_heads {kv_heads} do not divide")
    head_dim = dims["head_dim"] or embed // heads
    sizes = {"vocab": vocab, "embed": embed, "layers": layers, "heads": heads, "kv_heads": kv_heads}
    if has_experts:
        run.assumed.append("an even load of the experts")
        return {"class": "models.moe:Moe", "preset": "mixtral_8x7b", **sizes, "mlp": dims["mlp"], "head_dim": head_dim,
                "experts": dims["experts"], "experts_per_token": dims["experts_per_token"],
                "capacity_factor": 1.0}  # fmt: skip
    attention = 2 * embed * head_dim * (heads + kv_heads)
    gated, tied = _kind(row, dims, attention, run)
    mlp = dims["mlp"] or _width(row, layers, embed, vocab, attention, gated, tied, run)
    if gated:
        return {"class": "models.llama:Llama", "preset": "llama3_8b", **sizes, "mlp": mlp, "head_dim": head_dim,
                "tied": tied}  # fmt: skip
    return {"class": "models.gpt:GPT", "preset": "gpt_debug", **sizes, "mlp": mlp, "length": length, "tied": tied}


def _preset(name: str, experts: bool) -> Mapping[str, Any]:
    """The dims of a shipped preset whose name stands in a model's."""
    from models.gpt import PRESETS as GPT
    from models.llama import PRESETS as LLAMA
    from models.moe import PRESETS as MOE

    words = re.sub(r"[^a-z0-9]", "", re.sub(r"\.\d", "", name.lower()))
    presets: Mapping[str, Any] = MOE if experts else {**LLAMA, **GPT}
    found = [key for key in presets if key.replace("_", "") in words]
    return vars(presets[max(found, key=len)]) if found else {}


def _kind(row: Row, dims: Mapping[str, Any], attention: int, run: Run) -> tuple[bool, bool]:
    """Whether the feed-forward block has a gate, and the output head is the embedding.

    By the model's name; where that misses the stated number of parameters, by that number.
    """
    plain = _PLAIN.search(row.say("model")) is not None
    usual = (not plain, plain)
    total = row.numbers.get("params_b", 0) * 1e9
    if not total or not dims["mlp"] or not dims["vocab"]:
        return usual

    def off(kind: tuple[bool, bool]) -> float:
        gated, tied = kind
        layer = attention + (3 if gated else 2) * dims["embed"] * dims["mlp"]
        return abs((dims["layers"] * layer + (1 if tied else 2) * dims["vocab"] * dims["embed"]) / total - 1)

    best = min(((gated, tied) for gated in (True, False) for tied in (True, False)), key=off)
    if off(usual) <= off(best) + 0.03:
        return usual
    run.assumed.append(f"{'a gated' if best[0] else 'a plain'} feed-forward block by the number of parameters")
    return best


def _width(row: Row, layers, embed, vocab, attention, gated: bool, tied: bool, run: Run) -> int:
    """The width of the feed-forward block that gives the stated number of parameters; else the usual ratio."""
    total = row.numbers.get("params_b", 0) * 1e9
    left = (total - (1 if tied else 2) * vocab * embed) / layers - attention
    found = round(left / ((3 if gated else 2) * embed) / 64) * 64
    if total and found > 0:
        run.assumed.append(f"ffn {found}, which gives the stated number of parameters")
        return found
    usual = round(8 * embed / 3 / 256) * 256 if gated else 4 * embed
    run.unsaid.append(f"ffn: {usual}")
    return usual
