"""What a published run had in place of the catalog's numbers: kernels.toml. Used when programs are simulated."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.published.frameworks import Framework
from benchmarks.published.rows import Row
from meshkit.config import catalog
from meshkit.config.calibration import SCHEMA
from meshkit.config.cluster import Cluster
from meshkit.config.toml import to_toml
from meshkit.predict.kernels import attention_full_clock

# Words of a row's source or container -> the cuDNN with published rates that is nearest to its image's: "" is the
# catalog's; of images until summer 2024 (Pax, A3 and JAX-Toolbox of March and April have 8.9.7: NVIDIA/JAX-Toolbox
# @dc31d2c4 and @06218556, .github/container/install-cudnn.sh, which later takes the newest); and of those until 2025.
_RELEASES = (
    (r"\b(26\.\d\d|2026)\b|nemo 26", ""),
    (r"NeMo 24\.07|NeMo long-sequence|r0\.8\.0|Llama 3 paper|JAX-Toolbox|gpu/a3/|paxml/", "cudnn_9_1"),
    ("", "cudnn_9_4"),
)


@dataclass(frozen=True)
class Kernels:
    """Names of tables of kernels.toml; "" where the catalog's numbers serve.

    Attributes:
        attention: of `[attention]`.
        variant: of `[variants]`.
    """

    attention: str = ""
    variant: str = ""


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))


def kernels_of(row: Row, framework: Framework) -> Kernels:
    """Those of a row's framework, GPU and source."""
    words = f"{row.say('gpu')} {row.source}"
    found = (name for name, v in _tables()["variants"].items() if re.search(v["words"], words, re.IGNORECASE))
    image = f"{row.source} {row.say('container')}"
    release = next(name for pattern, name in _RELEASES if re.search(pattern, image))
    return Kernels(row.say("attention_kernels") or framework.attention or release, next(found, ""))


def calibration_name(kernels: Kernels, gpu: str) -> str:
    """Of the calibration file by which a plan has a run's attention; "" where the catalog's serves."""
    return f"{kernels.attention}.{gpu}.toml" if _attention(kernels.attention, gpu) else ""


def calibration_text(name: str) -> str:
    """What stands in it: rates of a long run under the power cap, where those of the tables are at the full clock."""
    attention, key = name.split(".")[:2]
    found, gpu = _attention(attention, key), catalog.gpu(key)
    full = found["forward"] * gpu.peak_flops["bf16"]
    rates = {"forward": full, "backward": full * found["backward"]}
    rates = {way: float(f"{rate / attention_full_clock(gpu, way):.4g}") for way, rate in rates.items()}
    said = f"# Causal attention at 4k tokens by {attention} of benchmarks/published/kernels.toml, with its source.\n"
    return f"{said}\n{to_toml({'schema': SCHEMA, 'rates': {'attention_flops_per_s': rates}})}"


def write_calibration(experiment: str, folder: Path) -> None:
    """Puts the calibration that an experiment file names, if it does, beside it."""
    if found := re.search(r'^calibration = "(.+)"', experiment, re.MULTILINE):
        (folder / found[1]).write_text(calibration_text(found[1]), encoding="utf-8")


def _attention(name: str, gpu: str) -> dict[str, Any]:
    """Rates of a library's attention on a GPU; empty where the tables have none."""
    tables = _tables()["attention"].get(name, {}).values()
    return next((found for found in tables if gpu in found["gpus"]), {})


def adapted(cluster: Cluster, kernels: Kernels) -> Cluster:
    """The cluster with the numbers of these kernels, where the tables have them for its GPU."""
    gpu = cluster.gpu
    achieved = dict(gpu.achieved)
    if found := _attention(kernels.attention, gpu.key):
        achieved |= {"attention": found["forward"], "attention_backward": found["backward"]}
    variant = _tables()["variants"].get(kernels.variant)
    if variant and variant["gpu"] == gpu.key:
        matmuls = [name for name in achieved if name.startswith("matmul")]
        achieved |= {name: achieved[name] * variant["matmul"] for name in matmuls}
        gpu = replace(gpu, memory_bytes_per_s=gpu.memory_bytes_per_s * variant["memory"])
    return cluster.model_copy(update={"gpu": replace(gpu, achieved=achieved)})
