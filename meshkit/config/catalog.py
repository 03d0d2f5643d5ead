"""Read GPUs, NICs and links from the catalog: data-sheet and measured numbers of hardware.

`catalog.toml` in this folder has the hardware numbers, each with its source. The CSV files beside it have tables of
measured rates.
"""

from __future__ import annotations

import csv
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One model of GPU, or a virtual CPU device (key `cpu`)."""

    key: str
    """Name in the catalog, such as `h100_sxm`."""
    name: str
    """Name that the driver reports."""
    compute_capability: tuple[int, int] | None
    """(major, minor); None for the CPU."""
    sms: int
    clock_hz: float
    memory_bytes: int
    """Memory that CUDA can allocate, without ECC and reserved pages."""
    memory_bytes_per_s: float
    l2_bytes: int
    peak_flops: Mapping[str, float]
    """Precision (fp32, tf32, bf16, fp16, fp8, mxfp8, nvfp4) -> dense FLOP/s; an absent precision is not supported."""
    achieved: Mapping[str, float]
    """Sustained fractions: of `peak_flops` for `matmul`, `burst` (a short run) and `attention`, of the peak bandwidth
    for `memory` and `nvlink`. `attention_backward` is the rate of a backward pass relative to a forward pass."""
    nvlink_generation: int | None
    """None without NVLink."""
    nvlink_links: int
    """NVLinks of one GPU; 0 without NVLink."""
    nvlink_bytes_per_s: float
    """Rate of all NVLinks of one GPU, one direction: links x the generation's rate per link."""
    pcie_generation: int
    pcie_bytes_per_s: float
    """Rate of a x16 slot of that generation, one direction."""
    target: Mapping[str, int | float]
    """Further numbers that describe the GPU to the compiler."""
    cpu_link: str = "pcie"
    """The link to the CPU with which the GPU is built: `pcie`, or a key of `cpu_links` such as `c2c_gh200`."""


@dataclass(frozen=True)
class Nic:
    """One kind of network port."""

    key: str
    bytes_per_s: float
    """Line rate of one port, one direction."""
    fabric: str
    """`infiniband`, `roce` or `ethernet`."""
    label: str
    """Name in reports, such as `infiniband_ndr`."""
    achieved: float
    """Sustained fraction of the line rate."""
    latency_s: float
    """Latency of one ring step of a large message (NCCL's Simple protocol)."""
    latency_small_s: float
    """Latency of one ring step of a small message (NCCL's LL protocol)."""
    pcie_generation: int
    """Newest generation that the adapter supports; the older one of adapter and host is used."""
    pcie_lanes: int
    rdma: bool
    """Whether the NIC reads and writes memory itself (InfiniBand, RoCE, iWARP) instead of using the kernel's TCP."""


@dataclass(frozen=True)
class CpuLink:
    """The link between one GPU and its host's CPU and memory."""

    key: str
    label: str
    bytes_per_s: float
    """Peak rate of one GPU, one direction."""
    achieved: float
    nvlinks: int
    """Number of the GPU's NVLinks that form this link; they connect to no other GPU."""
    host_memory_bytes_per_s: float
    """Bandwidth of the CPU memory behind the link: one GPU's share, reads plus writes."""


@functools.cache
def catalog() -> Mapping[str, Any]:
    """Return the whole catalog as plain tables; a GPU that is `like` another inherits its numbers and sources."""
    found = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
    for row in found["gpus"].values():
        if "like" in row:
            _inherit(row, found["gpus"][row.pop("like")])
    return found


def _inherit(row: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Add to a row the numbers of `base` that it lacks, with their sources."""
    said = {number for numbers in row["sources"].values() for number in numbers}
    kept = {source: [n for n in numbers if n not in said] for source, numbers in base["sources"].items()}
    sources = {source: numbers for source, numbers in kept.items() if numbers}
    row.update({**base, **row, "sources": sources | row["sources"]})


def gpu_keys() -> tuple[str, ...]:
    """Return the key of every GPU in the catalog."""
    return tuple(catalog()["gpus"])


def nic_keys() -> tuple[str, ...]:
    """Return the key of every NIC in the catalog."""
    return tuple(catalog()["nics"])


def cpu_link_keys() -> tuple[str, ...]:
    """Return the key of every link between GPU and CPU: `pcie`, and the catalog's `cpu_links`, which are not PCIe."""
    return ("pcie", *catalog()["cpu_links"])


@functools.cache
def gpu(key: str) -> Gpu:
    """Return the GPU of that key; KeyError if the catalog has none."""
    row = _numbers("gpus", key)
    capability = row.pop("compute_capability", None)
    generation = row.pop("nvlink_generation", None)
    return Gpu(
        key=key,
        compute_capability=tuple(capability) if capability else None,
        nvlink_generation=generation,
        nvlink_bytes_per_s=row["nvlink_links"] * nvlink_bytes_per_s(generation) if generation else 0.0,
        pcie_bytes_per_s=pcie_bytes_per_s(row["pcie_generation"]),
        **row,
    )


@functools.cache
def nic(key: str) -> Nic:
    """Return the NIC of that key; KeyError if the catalog has none."""
    return Nic(key=key, **_numbers("nics", key))


@functools.cache
def cpu_link(key: str, *, pcie_generation: int, gpus_per_host: int) -> CpuLink:
    """Return the CPU link of that key; `pcie` is a x16 slot of a host whose GPUs share the host's memory equally.

    Raises:
        KeyError: the catalog has no such link or, for `pcie`, no such generation.
    """
    if key != "pcie":
        return CpuLink(key=key, **_numbers("cpu_links", key))
    memory = host_memory(pcie_generation) / gpus_per_host
    rate, achieved = pcie_bytes_per_s(pcie_generation), fabric("pcie")["achieved"]
    return CpuLink(key, f"pcie{pcie_generation}", rate, achieved, 0, memory)


def nvlink_bytes_per_s(generation: int) -> float:
    """Return the rate of one NVLink of that generation, one direction, in bytes/s."""
    return catalog()["nvlink"][str(generation)]["bytes_per_s"]


def nvswitch(nvlink_generation: int) -> Mapping[str, Any] | None:
    """Return the NVSwitch of an NVLink generation (ports, whether it reduces and multicasts), or None."""
    found = [row for row in catalog()["nvswitch"].values() if row["nvlink_generation"] == nvlink_generation]
    return found[0] if found else None


def cube_mesh(nvlink_generation: int) -> list[list[int]] | None:
    """Return the NVLinks between each pair of GPUs of an 8-GPU host without a switch; None if all pairs are alike."""
    row = catalog()["cube_mesh"].get(str(nvlink_generation))
    return row["links"] if row else None


def pcie_bytes_per_s(generation: int, lanes: int = 16) -> float:
    """Return the peak bytes/s of a slot with this many lanes, one direction; KeyError for an unknown generation."""
    return catalog()["pcie_bytes_per_s"][str(generation)] * lanes / 16


def host_memory(pcie_generation: int) -> float:
    """Return the bytes/s of host memory in a two-socket host of that PCIe generation, reads plus writes."""
    return catalog()["host_memory_bytes_per_s"][str(pcie_generation)]


def reserved() -> Mapping[str, int]:
    """Return the constants (bytes, channels) of GPU memory outside of the program: context, NCCL, cuDNN, allocator."""
    return {name: value for name, value in catalog()["reserved"].items() if name != "sources"}


def failures() -> Mapping[str, Any]:
    """Return the defaults for failures: how often hosts fail, what a failure costs, and how fast storage is."""
    return {name: value for name, value in catalog()["failures"].items() if name != "sources"}


def published_failures_per_gpu_day() -> dict[str, float]:
    """Return study -> failures per GPU and day; the first study is the default."""
    row = failures()
    return {
        name: found["failures"] / found["hosts"] / row["gpus_per_host"] / (found["hours"] / 24)
        for name, found in row["published"].items()
    }


def fabric(name: str) -> Mapping[str, float]:
    """Return the latencies and the sustained share of a fabric: `nvlink`, `pcie`, `host_memory`, ..."""
    return catalog()["fabrics"][name]


def _numbers(table: str, key: str) -> dict[str, Any]:
    return {name: value for name, value in catalog()[table][key].items() if name != "sources"}


@functools.cache
def measured_table(name: str) -> tuple[Mapping[str, str], ...]:
    """Return the rows of a CSV file beside this module: matmuls.csv, attention_rates.csv or intervals.csv."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def kernels() -> Mapping[str, Any]:
    """Return the kernel model's constants for all GPUs: charts of fused attention, NCCL's share, spread of GPUs."""
    return catalog()["kernels"]
