"""Make the experiment file that `meshkit plan` takes from a row of a JAX run.

If `experiments/ID.toml` beside this module has as many GPUs, tokens and sequences as the row, it is the row's file; its
comment names the source of each setting. Any other row becomes a file from its columns alone, with our model of the
stated dims and the options that meshkit derives. What a row does not state is assumed by a rule for all rows and listed
in the note. A row that lacks what no rule can supply has a reason instead of a file.
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
# In a kept file, this begins a line on what decides the time but is not stated by the source.
UNSAID = "# Not stated:"

# Words of the `gpu` column, each with a GPU of the catalog; the first that matches counts.
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
# Words of the `network` column, each with a NIC of the catalog; a number of ports beside it is that of a host.
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
# The NICs of NVIDIA's reference systems by GPU (DGX P100 to DGX B300, NVL72).
_REFERENCE = {"p100": ("ib_edr", 4), "v100": ("ib_edr", 4), "v100_32gb": ("ib_edr", 8), "a100_40gb": ("ib_hdr", None),
              "a100_80gb": ("ib_hdr", None), "b300": ("ib_xdr", None), "gb300": ("ib_xdr", None)}  # fmt: skip
# Ports of an AWS host (p4d, p5); other AWS hosts have one a GPU.
_EFA = {"a100_40gb": 4, "a100_80gb": 4, "h100_sxm": 32, "h200": 32}
_RACKS, _RACK_GPUS = ("gb200", "gb300"), (72, 64)  # GPUs of an NVL72: whole racks, or 64 for powers of two.
# The largest number in each column that is planned.
_MOST = {"n_gpus": 2**17, "seq_len": 2**24, "layers": 2000, "hidden": 2**18, "ffn": 2**20, "heads": 2**12,
         "vocab": 2**22, "global_batch_seqs": 2**24, "micro_batch": 2**20, "gpus_per_node": 2**10,
         "experts": 2**12, "experts_per_token": 2**9, "head_dim": 2**12, "vpp": 2**8, "kv_heads": 2**12}  # fmt: skip
# Models whose feed-forward block has two matrices and a GELU.
_PLAIN = re.compile(r"gpt|opt|bloom|palm|falcon|mpt|nemotron", re.IGNORECASE)
_EXPERTS = re.compile(r"moe|mixtral|deepseek|grok|kimi|gpt.oss|\d+x\d+b|[-_ ]a\d+b\b", re.IGNORECASE)
_NO_DECODER = re.compile(r"\bt5|bert|\bvit\b|diffusion|resnet|clip|whisper|flux|dit\b", re.IGNORECASE)
# Words for what a layer keeps, with their `train.remat`: of MaxText (get_remat_policy), of Praxis
# (AutodiffCheckpointType) and in general. The longest word in the cell counts.
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
    """The reason why a row has no experiment file, as its note gives it."""


@dataclass
class Run:
    """The experiment of a row."""

    text: str
    """The text of the file."""
    document: dict[str, Any]
    """The tables of the file."""
    assumed: list[str] = field(default_factory=list)
    """Assumptions that hardly matter."""
    unsaid: list[str] = field(default_factory=list)
    """Assumptions that decide the time."""
    kept: bool = False
    """Whether the file is one of `experiments/`."""

    @property
    def configured(self) -> str:
        """`fully`, or `partly` if an assumption decides the time."""
        return "partly" if self.unsaid else "fully"

    @property
    def note(self) -> str:
        """The assumptions, or the place where they are written."""
        kept = ["what is assumed stands in experiments/" + self.document["name"] + ".toml"] if self.kept else []
        return "; ".join([*(f"not stated: {text}" for text in self.unsaid), *self.assumed, *kept])


def experiment_of(row: Row) -> Run:
    """Return the experiment of a row of a JAX run.

    Raises:
        Unplannable: the row lacks a column that no rule can supply, or has what no experiment file can express.
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
        rules["gradients"] = {"embed": "fsdp"}  # Gathered and scattered with every micro-batch, as FSDP does.
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
    """Return the `[cluster]` table, and the number of GPUs that share NVLink."""
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
    """Return the ports of a host by the words of its network; None stands for one a GPU."""
    if "EFA" in network:
        return _EFA.get(gpu)
    return max(map(int, _PORTS.findall(network)), default=None) or None


def _ways(row: Row, gpus: int, experts: bool, run: Run) -> dict[str, int]:
    """Return the size of each mesh axis, outermost first."""
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
    """Return the mesh with its innermost axes inside NVLink domains."""
    mesh: dict[str, Any] = {}
    room = domain
    for name, size in reversed(list(ways.items())):
        inside = math.gcd(size, room)
        room //= inside
        if size > 1:
            mesh[name] = {"nvlink": inside, "infiniband": size // inside} if size > inside else inside
    return dict(reversed(list(mesh.items()))) or {"data": 1}


def _batch(row: Row, replicas: int, run: Run) -> tuple[int, int]:
    """Return the sequences of a step, and its number of micro-batches."""
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
    """Return the `[model]` table: our decoder with the row's dims, and a shipped preset's where the row lacks them."""
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
    """Return the dims of the shipped preset whose name is in a model's name, or none."""
    from models.gpt import PRESETS as GPT
    from models.llama import PRESETS as LLAMA
    from models.moe import PRESETS as MOE

    words = re.sub(r"[^a-z0-9]", "", re.sub(r"\.\d", "", name.lower()))
    presets: Mapping[str, Any] = MOE if experts else {**LLAMA, **GPT}
    found = [key for key in presets if key.replace("_", "") in words]
    return vars(presets[max(found, key=len)]) if found else {}


def _kind(row: Row, dims: Mapping[str, Any], attention: int, run: Run) -> tuple[bool, bool]:
    """Return whether the feed-forward block has a gate, and whether the output head is the embedding.

    The model's name decides, unless it misses the stated number of parameters; then that number decides.
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
    """Return the width of the feed-forward block that gives the stated number of parameters, or the usual ratio."""
    total = row.numbers.get("params_b", 0) * 1e9
    left = (total - (1 if tied else 2) * vocab * embed) / layers - attention
    found = round(left / ((3 if gated else 2) * embed) / 64) * 64
    if total and found > 0:
        run.assumed.append(f"ffn {found}, which gives the stated number of parameters")
        return found
    usual = round(8 * embed / 3 / 256) * 256 if gated else 4 * embed
    run.unsaid.append(f"ffn: {usual}")
    return usual
