"""Gpu and Nic, and the catalog they are read from: data-sheet and measured numbers of hardware. Layer 1.

`catalog.toml` beside this module is the only place where hardware has numbers; each has a source there.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU (or a virtual CPU device, key `cpu`).

    Attributes:
        key: name in the catalog, `h100_sxm`.
        name: what the driver calls it.
        compute_capability: (major, minor); None for the CPU.
        sms, clock_hz, l2_bytes: streaming multiprocessors, boost clock, second-level cache.
        memory_bytes: what CUDA can allocate from, without ECC and reserved pages.
        memory_bytes_per_s: peak.
        peak_flops: dense FLOP/s by precision among fp32 tf32 bf16 fp16 fp8; absent = not supported.
        achieved: sustained fraction of a peak: `matmul` and `attention` (of peak_flops), `memory`, `nvlink`; and
            `attention_backward`, the rate of a backward pass relative to a forward one.
        nvlink_generation, nvlink_links: None and 0 where there is none.
        nvlink_bytes_per_s: all links of one GPU, one direction.
        pcie_generation, pcie_bytes_per_s: of a x16 slot, one direction.
        target: further numbers that compiling for it needs.
    """

    key: str
    name: str
    compute_capability: tuple[int, int] | None
    sms: int
    clock_hz: float
    memory_bytes: int
    memory_bytes_per_s: float
    l2_bytes: int
    peak_flops: Mapping[str, float]
    achieved: Mapping[str, float]
    nvlink_generation: int | None
    nvlink_links: int
    nvlink_bytes_per_s: float
    pcie_generation: int
    pcie_bytes_per_s: float
    target: Mapping[str, int | float]


@dataclass(frozen=True)
class Nic:
    """One kind of network port.

    Attributes:
        key: name in the catalog, `ib_ndr`.
        bytes_per_s: line rate of one port, one direction.
        fabric: `infiniband`, `roce` or `ethernet`.
        label: what a report calls it, `infiniband_ndr`.
        achieved: sustained fraction of the line rate.
        latency_s, latency_small_s: one ring step of a large (NCCL Simple) and of a small (NCCL LL) message.
    """

    key: str
    bytes_per_s: float
    fabric: str
    label: str
    achieved: float
    latency_s: float
    latency_small_s: float


@functools.cache
def catalog() -> Mapping[str, Any]:
    """The whole catalog as plain tables."""
    return tomllib.loads(resources.files("meshkit.spec").joinpath("catalog.toml").read_text(encoding="utf-8"))


def gpu_keys() -> tuple[str, ...]:
    """Every GPU of the catalog."""
    return tuple(catalog()["gpus"])


def nic_keys() -> tuple[str, ...]:
    """Every NIC of the catalog."""
    return tuple(catalog()["nics"])


@functools.cache
def gpu(key: str) -> Gpu:
    """The GPU of that key; KeyError if the catalog has none."""
    row = {name: value for name, value in catalog()["gpus"][key].items() if name != "sources"}
    capability = row.pop("compute_capability", None)
    return Gpu(
        key=key,
        compute_capability=tuple(capability) if capability else None,
        nvlink_generation=row.pop("nvlink_generation", None),
        pcie_bytes_per_s=catalog()["pcie_bytes_per_s"][str(row["pcie_generation"])],
        **row,
    )


@functools.cache
def nic(key: str) -> Nic:
    """The NIC of that key; KeyError if the catalog has none."""
    row = {name: value for name, value in catalog()["nics"][key].items() if name != "sources"}
    return Nic(key=key, **row)


def fabric(name: str) -> Mapping[str, float]:
    """Bandwidth (where it is not the GPU's own) and latency of a scale-up fabric: `nvlink`, `pcie`, `shared_memory`."""
    return catalog()["fabrics"][name]
