"""What found devices are: catalog entries by name, PCI id, port rate or NVLinks; domains; what a known machine adds.

    device names, ids, rates -> names.toml, catalog -> Match; Topology -> the same, with what all readers fill in

`names.toml` holds what vendors call the hardware; numbers come from the catalog alone.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from meshkit.config import catalog
from meshkit.discover.topology import Domain, Topology, connected

_GIGABIT = 1e9
_NVIDIA = "10de"
_FAMILY = re.compile(r"\b(P100|V100|A100|H100|H200|GH200|B200|GB200|B300|GB300)\b", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) ?GT/s", re.ASCII)


@dataclass(frozen=True)
class Match:
    """A catalog key, why it is only the nearest one (None where it is exact), and whether the GPU is a PCIe card."""

    key: str | None = None
    stand_in: str | None = None
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
            return Match(row["key"], row.get("stand_in"), row.get("pcie_card", False))
    exact = [key for key in catalog.gpu_keys() if catalog.gpu(key).name == name]
    return Match(exact[0]) if exact else Match()


def gpu_name_by_pci(vendor: str, device: str) -> str | None:
    """What the driver calls the GPU with these PCI ids (hexadecimal digits, with or without 0x)."""
    return names()["gpu_pci"].get(_hex(device)) if _hex(vendor) == _NVIDIA else None


def nic_by_pci(vendor: str, device: str) -> Match:
    """The catalog's NIC for PCI ids whose rate is fixed."""
    row = names()["nic_pci"].get(f"{_hex(vendor)}:{_hex(device)}")
    return Match(row["key"], row["stand_in"] or None) if row else Match()


def nic_by_rate(layer: str, bits_per_s: float, technology: str = "") -> Match:
    """The catalog's NIC with that line rate.

    Args:
        layer: `infiniband`, `ethernet` (RDMA over it), or `tcp`.
        bits_per_s: of the port.
        technology: the kernel's word for it (`NDR`), which distinguishes two InfiniBand ports of one rate.
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


def platform(texts: Sequence[str]) -> Mapping[str, Any] | None:
    """The known machine that a file's name or comment speaks of; None when it speaks of none, or of several."""
    joined = "\n".join(texts).lower()
    found = [row for row in names()["platform"] if re.search(row["pattern"], joined)]
    return found[0] if len(found) == 1 else None


def with_domains(found: Topology) -> Topology:
    """The same with NVLink domains: by fabric identity where GPUs have one, else by what NVLink connects."""
    if found.domains or not found.gpus:
        return found
    by_fabric: dict[str, list[str]] = {}
    for gpu in found.gpus:
        if gpu.fabric:
            by_fabric.setdefault(gpu.fabric, []).append(gpu.id)
    domains = [Domain(identity, tuple(ids), spans_hosts=True) for identity, ids in by_fabric.items()]
    wired = [g for g in found.gpus if not g.fabric]
    ids = {g.id for g in wired}
    edges = [(c.a, c.b) for c in found.connections if c.kind == "NV" and c.a in ids and c.b in ids]
    edges += itertools.pairwise(g.id for g in wired if g.on_switch)
    groups = [group for group in connected([g.id for g in wired], edges) if len(group) > 1]
    domains += [Domain(f"host.{i}" if len(groups) > 1 else "host", group) for i, group in enumerate(groups)]
    has_nvlink = bool(domains) or any(g.active_nvlinks for g in found.gpus)
    ids = {g.id for g in found.gpus}
    paths_known = any(c.a in ids and c.b in ids for c in found.connections)
    scale_up = found.scale_up or ("nvlink" if has_nvlink else "pcie" if paths_known else None)
    return replace(found, domains=tuple(domains), scale_up=scale_up)


def assume_gpu(found: Topology, *, heading: Sequence[str] = ()) -> Topology:
    """The same with a catalog key for GPUs that nothing names, if their NVLinks allow one; says so in a warning.

    Args:
        found: what is there.
        heading: prose that may name the model, which then must agree with the NVLinks.
    """
    if not found.gpus or any(g.key or g.name for g in found.gpus) or not found.scale_up:
        return found
    links = max((g.active_nvlinks or 0 for g in found.gpus), default=0)
    keys, family = gpus_by_nvlinks(links), _family(heading)
    if not keys:
        return found.warn(f"nothing says what the GPUs are, and no GPU of the catalog has {links} NVLinks.")
    seen = f"their {links} NVLinks" if links else "no NVLink between them"
    named = [key for key in keys if family and re.search(rf"\b{family}\b", catalog.gpu(key).name)]
    first, *rest = named or keys
    others = f" ({', '.join(rest)} would fit as well)" if rest else ""
    said = f"only the text above says what the GPUs are, {family}" if named else "nothing says what the GPUs are"
    stand_in = None if named and not rest else "assumed from the number of NVLinks"
    gpus = tuple(replace(g, key=first, stand_in=stand_in) for g in found.gpus)
    return replace(found, gpus=gpus).warn(f"{said}; from {seen}, {first} is assumed{others}.")


def _family(lines: Sequence[str]) -> str | None:
    """The GPU model that prose names, `H100`: of the first line that names any; None where that names several."""
    for line in lines:
        found = set(_FAMILY.findall(line))
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def apply_platform(found: Topology, row: Mapping[str, Any] | None) -> Topology:
    """The same with what is known of a vendor's machine filled in where the file is silent; says so in a warning."""
    if row is None:
        return found
    gpus, nics, domains = found.gpus, found.nics, found.domains
    key, nic, scale_up = row.get("gpu"), row.get("nic"), row.get("scale_up")
    filled = []
    if key and any(g.key is None for g in gpus):
        gpus = tuple(replace(g, key=key) if g.key is None else g for g in gpus)
        filled.append(f"gpu = {key}")
    if nic and any(n.key is None for n in nics):
        port = catalog.nic(nic)
        layer = "infiniband" if port.fabric == "infiniband" else "ethernet" if port.rdma else "tcp"
        bits = port.bytes_per_s * 8
        nics = tuple(
            replace(n, key=nic, layer=n.layer or layer, bits_per_s=n.bits_per_s or bits) if n.key is None else n
            for n in nics
        )
        filled.append(f"nic = {nic}")
    if scale_up and found.scale_up is None:
        domains = (Domain("host", tuple(g.id for g in gpus)),) if scale_up == "nvlink" and len(gpus) > 1 else ()
        filled.append(f"scale_up = {scale_up}")
    if not filled:
        return found
    found = replace(found, gpus=gpus, nics=nics, domains=domains, scale_up=found.scale_up or scale_up)
    return found.warn(f"the file does not say {', '.join(filled)}; known of {row['label']}.")


def stand_in_notes(found: Topology) -> Topology:
    """The same with a warning for each kind of GPU or NIC that the catalog has not exactly."""
    unknown = dict.fromkeys(gpu.name for gpu in found.gpus if gpu.key is None and gpu.name)
    inexact = dict.fromkeys((gpu.name, gpu.stand_in) for gpu in found.gpus if gpu.name and gpu.stand_in)
    ports = dict.fromkeys(nic.stand_in for nic in found.nics if nic.stand_in)
    return found.warn(
        *(f"the catalog has no GPU '{name}'." for name in unknown),
        *(f"{name} is {why}." for name, why in inexact),
        *(f"the ports are {why}." for why in ports),
    )


def _hex(text: str) -> str:
    return text.strip().lower().removeprefix("0x")
