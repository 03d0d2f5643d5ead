"""Which catalog entry a found device is: by name, PCI id, port rate, or number of NVLinks.

`names.toml` holds what vendors call the hardware; numbers come from the catalog alone.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from meshkit.config import catalog

_GIGABIT = 1e9
_NVIDIA = "10de"
_FAMILY = re.compile(r"\b(P100|V100|A100|H100|H200|GH200|B200|GB200|B300|GB300)\b", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) ?GT/s", re.ASCII)


@dataclass(frozen=True)
class Match:
    """A catalog key, why it is only the nearest one (empty where it is exact), and whether the GPU is a PCIe card."""

    key: str | None = None
    stand_in: str = ""
    pcie_card: bool = False


@functools.cache
def names() -> Mapping[str, Any]:
    """The table of names."""
    text = resources.files("meshkit.discover").joinpath("names.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def gpu_by_name(name: str) -> Match:
    """The catalog's GPU for what the driver calls it."""
    for row in names()["gpu_name"]:
        if re.search(row["pattern"], name):
            return Match(row["key"], row.get("stand_in", ""), row.get("pcie_card", False))
    exact = [key for key in catalog.gpu_keys() if catalog.gpu(key).name == name]
    return Match(exact[0]) if exact else Match()


def gpu_name_by_pci(vendor: str, device: str) -> str | None:
    """What the driver calls the GPU with these PCI ids (hexadecimal digits, with or without 0x)."""
    if _hex(vendor) != _NVIDIA:
        return None
    return names()["gpu_pci"].get(_hex(device))


def nic_by_pci(vendor: str, device: str) -> Match:
    """The catalog's NIC for PCI ids whose rate is fixed."""
    row = names()["nic_pci"].get(f"{_hex(vendor)}:{_hex(device)}")
    return Match(row["key"], row["stand_in"]) if row else Match()


def nic_by_rate(layer: str, bits_per_s: float, technology: str = "") -> Match:
    """The catalog's NIC with that line rate.

    Args:
        layer: `infiniband`, `ethernet` (RDMA over it), or `tcp`.
        bits_per_s: of the port.
        technology: the kernel's word for it (`NDR`), which tells two InfiniBand ports of one rate apart.
    """
    prefix = {"infiniband": "ib_", "ethernet": "roce_", "tcp": "tcp_"}[layer]
    entries = [catalog.nic(key) for key in catalog.nic_keys() if key.startswith(prefix)]
    same = [n for n in entries if round(n.bytes_per_s * 8 / _GIGABIT) == bits_per_s / _GIGABIT]
    named = [n for n in same if technology and technology.lower() in n.label]
    return Match((named or same)[0].key) if same else Match()


def pcie_generation(speed: str) -> int | None:
    """The PCIe generation of a lane's rate as Linux and NCCL print it (`16.0 GT/s PCIe`); None for anything else."""
    match = _SPEED.match(speed.strip())
    return names()["pcie_generation"].get(match[1].removesuffix(".0")) if match else None


def gpus_by_nvlinks(links: int) -> tuple[str, ...]:
    """Catalog GPUs with that many NVLinks, the most common first."""
    order = names()["assume"]["order"]
    return tuple(key for key in order if key in catalog.gpu_keys() and catalog.gpu(key).nvlink_links == links)


def family_of(lines: Sequence[str]) -> str | None:
    """The GPU model that prose names, `H100`: of the first line that names any; None where that names several."""
    for line in lines:
        found = set(_FAMILY.findall(line))
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def platform(texts: Sequence[str]) -> Mapping[str, Any] | None:
    """The known machine that a file's name or comment speaks of; None when it speaks of none, or of several."""
    joined = "\n".join(texts).lower()
    found = [row for row in names()["platform"] if re.search(row["pattern"], joined)]
    return found[0] if len(found) == 1 else None


def _hex(text: str) -> str:
    return text.strip().lower().removeprefix("0x")
