"""The cluster of a published run, from the words of its row. Second in the flow of the replay."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from benchmarks.published.rows import Row

# Words of the `gpu` column -> a GPU of the catalog; the first that matches.
_GPUS = (
    (r"GB300", "gb300"),
    (r"GB200", "gb200"),
    (r"GH200", "gh200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100.*PCIe", "h100_pcie"),
    (r"H100", "h100_sxm"),
    (r"A100.*40", "a100_40gb"),
    (r"A100", "a100_80gb"),
    (r"V100", "v100"),
    (r"P100", "p100"),
)
# Words of the `network` column -> a NIC of the catalog, ports per host (None: one per GPU).
_NETWORKS = (
    (r"TCPX(?!O).*4x200G", ("tcpx_200", 4)),
    (r"TCPXO.*8x200G", ("tcpxo_200", 8)),
    (r"4x100Gb RoCE", ("roce_100", 4)),
    (r"8x ?HDR200", ("ib_hdr", None)),
    (r"4x ?ConnectX-7", ("ib_ndr", 4)),
    (r"NDR|ConnectX-7|\bCX7\b", ("ib_ndr", None)),
    (r"RoCE 400G per GPU", ("roce_400", None)),
    (r"RDMA 400 Gb/s|RoCE ?v?2", ("roce_400", None)),
)
_PER_NODE = re.compile(r"([\d.]+)\s*Gb(?:ps|/s).*(?:per node|as stated)", re.IGNORECASE)
# What hosts of a GPU are sold with: NVIDIA's reference systems (DGX P100 to DGX B300, NVL72).
_REFERENCE = {
    "p100": ("ib_edr", 4),
    "v100": ("ib_edr", 4),
    "a100_40gb": ("ib_hdr", None),
    "a100_80gb": ("ib_hdr", None),
    "b300": ("ib_xdr", None),
    "gb300": ("ib_xdr", None),
}
_RACK = ("gb200", "gb300")
_RACK_GPUS = (72, 64)  # of an NVL72: whole racks, else the 64 of it that power-of-two meshes use


@dataclass
class Machines:
    """A cluster table of an experiment, with what had to be assumed.

    Attributes:
        table: keys of `[cluster]`.
        domain: GPUs that share NVLink.
    """

    table: dict[str, Any]
    domain: int
    assumed: list[str] = field(default_factory=list)


def find_machines(row: Row, gpus: int) -> Machines | str:
    """The first `gpus` GPUs of a row's cluster; a sentence why not, where its GPU is unknown."""
    words = row.say("gpu")
    key = next((key for pattern, key in _GPUS if re.search(pattern, words, re.IGNORECASE)), None)
    if key is None:
        return f"GPU '{words}' is not in the catalog" if words else "the GPU is not stated"
    assumed = []
    if "variant" in words:
        assumed.append(f"A100 variant not stated: {key}")
    per_host = row.count("gpus_per_node") or (4 if key in _RACK else 8)
    rack = key in _RACK and gpus > per_host
    domain = min(next((n for n in _RACK_GPUS if gpus % n == 0), _RACK_GPUS[-1]) if rack else per_host, gpus)
    if gpus % domain:
        return f"{gpus} GPUs are not whole domains of {domain}"
    hosts = max(1, gpus // per_host)
    table: dict[str, Any] = {"gpu": key, "hosts": hosts, "gpus_per_host": min(per_host, gpus)}
    if domain > table["gpus_per_host"]:
        table["nvlink_domain_size"] = domain
    if gpus > domain:
        nic, ports, guess = _network(row.say("network"), key)
        table |= {"nic": nic, "nics_per_host": ports or per_host}
        assumed += [f"network not stated: {table['nics_per_host']} x {nic} a host"] if guess else []
    return Machines(table, domain, assumed)


def _network(words: str, gpu: str) -> tuple[str, int | None, bool]:
    """(NIC, ports per host, whether that is a guess)."""
    for pattern, (nic, ports) in _NETWORKS:
        if re.search(pattern, words, re.IGNORECASE):
            return nic, ports, "not stated" in words
    if found := _PER_NODE.search(words):
        return _ports(float(found[1]))
    nic, ports = _REFERENCE.get(gpu, ("ib_ndr", None))
    return nic, ports, True


def _ports(gigabits: float) -> tuple[str, int | None, bool]:
    """A host's total rate as ports of the largest size that divides it."""
    for nic, rate in (("ib_ndr", 400.0), ("ib_hdr", 200.0), ("ib_edr", 100.0)):
        if gigabits % rate == 0 and gigabits / rate >= 4:
            return nic, int(gigabits // rate), False
    return "ib_edr", max(1, round(gigabits / 100)), False
