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
from meshkit.config.cluster import Cluster

_TODAY = r"Megatron-Bridge 26|nemo 26"  # releases with a cuDNN that the catalog's attention was measured with
_JAX = ("MaxText", "Paxml")  # as a plan has them, with today's


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
    today = re.search(_TODAY, f"{row.source} {row.say('container')}") or framework.name in _JAX
    attention = row.say("attention_kernels") or framework.attention or ("" if today else "cudnn_2024")
    return Kernels(attention, next(found, ""))


def adapted(cluster: Cluster, kernels: Kernels) -> Cluster:
    """The cluster with the numbers of these kernels, where the tables have them for its GPU."""
    gpu = cluster.gpu
    achieved = dict(gpu.achieved)
    for found in _tables()["attention"].get(kernels.attention, {}).values():
        if gpu.key in found["gpus"]:
            achieved |= {"attention": found["forward"], "attention_backward": found["backward"]}
    variant = _tables()["variants"].get(kernels.variant)
    if variant and variant["gpu"] == gpu.key:
        matmuls = [name for name in achieved if name.startswith("matmul")]
        achieved |= {name: achieved[name] * variant["matmul"] for name in matmuls}
        gpu = replace(gpu, memory_bytes_per_s=gpu.memory_bytes_per_s * variant["memory"])
    return cluster.model_copy(update={"gpu": replace(gpu, achieved=achieved)})
