"""Find the cluster and the group's shape that a system's name in a sweep stands for.

    <name> [server] [(PCIe)] xN, M nodes, PORTS ...     "B200 x32, 4 nodes, 8x400G NDR", "L40S (PCIe) x8, 1 node"
    ... over D NVL72 domains | R racks | in different NVLink domains | of one NVL72           racks: GB200, GB300

Brackets may hold any text: numbers of GPUs, of nodes and of domains are read outside of them, but ports everywhere.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from meshkit.config import catalog
from meshkit.config.cluster import Cluster

# The first pattern that matches the name counts. Memory or a form factor tells variants of one GPU apart.
_GPUS = (
    (r"rtx[ _-]?pro[ _-]?6000", "rtx_pro_6000"),
    (r"rtx[ _-]?6000[ _-]?ada", "rtx_6000_ada"),
    *(
        (rf"(?<![a-z0-9]){name}(?![a-z0-9])", name)
        for name in ("l40s", "a10g", "gb300", "gb200", "gh200", "b300", "b200")
    ),
    (r"(?<![a-z0-9])h200(?![a-z0-9])", "h200"),
    (r"(?<![a-z0-9])h800(?![a-z0-9])", "h800"),
    (r"(?<![a-z0-9])h100(?![a-z0-9])(?=.*(pcie|nvl\b))", "h100_pcie"),
    (r"(?<![a-z0-9])h100(?![a-z0-9])", "h100_sxm"),
    (r"(?<![a-z0-9])a100(?![a-z0-9])(?=[^,]*(?<!\d)40 ?gb)", "a100_40gb"),
    (r"(?<![a-z0-9])a100(?![a-z0-9])", "a100_80gb"),
    (r"(?<![a-z0-9])v100(?![a-z0-9])(?=[^,]*(?<!\d)32 ?gb)", "v100_32gb"),
    (r"(?<![a-z0-9])v100(?![a-z0-9])", "v100"),
    (r"(?<![a-z0-9])p100(?![a-z0-9])", "p100"),
)
# Hosts as they are built. Other GPUs are PCIe cards in hosts of eight, and the name must give their ports.
_HOSTS: dict[str, dict[str, object]] = {
    "p100": {"name": "dgx1_p100"},
    "v100": {"name": "dgx1_v100"},
    "v100_32gb": {"name": "dgx1_v100", "gpu": "v100_32gb"},
    "a100_40gb": {"name": "dgx_a100", "gpu": "a100_40gb"},
    "a100_80gb": {"name": "dgx_a100"},
    "h100_sxm": {"name": "dgx_h100"},
    "h800": {"name": "hgx_h800"},
    "h200": {"name": "hgx_h200"},
    "gh200": {"gpu": "gh200", "gpus_per_host": 1, "nic": "ib_ndr"},
    "b200": {"name": "dgx_b200"},
    "b300": {"name": "dgx_b300"},
    "gb200": {"name": "gb200_nvl72"},
    "gb300": {"name": "gb300_nvl72"},
}
_CARDS_PER_HOST = 8
# AWS's plugin gives NCCL a latency of 75 us on p4d and p5, with 100 Gb/s cards, and of 35 us on later hosts
# (aws/aws-ofi-nccl 01666ec, src/platform-aws.cpp). A system whose name gives the four cards of a p5 GPU together
# ("8x400G EFA") has the 75 us.
_EFA_OLD = ("a100_40gb", "a100_80gb", "h100_sxm")
_INFINIBAND = {100: "ib_edr", 200: "ib_hdr", 400: "ib_ndr", 800: "ib_xdr"}
_RATES = {"E": 100, "H": 200, "N": 400, "X": 800}  # EDR, HDR, NDR, XDR
_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_NUMBER = rf"\b(\d+|{'|'.join(_WORDS)})"
_DOMAIN = r"(?:NVL\d+|NVLink)?\s*(?:domain|rack)s?\b"


@functools.cache
def describe(system: str) -> tuple[str, Cluster, int, int]:
    """Return the GPU, the cluster, the GPUs per NVLink domain and the domains of a system.

    Raises:
        ValueError: the name has no GPU or no number of GPUs, or its numbers do not fit together.
        ConfigError: the cluster is impossible.
    """
    gpu, before = _gpu(system)
    n, hosts = _counts(system, before)
    keys: dict[str, object] = dict(_HOSTS.get(gpu, {"gpu": gpu, "gpus_per_host": _CARDS_PER_HOST, "scale_up": "pcie"}))
    if re.search(r"no P2P|without P2P|P2P off|\bSHM\b", system, re.IGNORECASE):
        keys["scale_up"] = "shared_memory"
    elif re.search("PCIe", system, re.IGNORECASE) and not re.search("SXM|NVLink", system, re.IGNORECASE):
        keys["scale_up"] = "pcie"
    shipped = Cluster.load(keys)
    size = shipped.nvlink_domain_size
    if size > shipped.gpus_per_host:
        size = _domain_size(system, size)
        domains = _domains(system, hosts) or -(-n // size)
        keys |= {"nvlink_domain_size": size, "hosts": domains * size // shipped.gpus_per_host}
    else:
        per_domain = (
            None if re.search("rack", system, re.IGNORECASE) else _domains(system, hosts)
        )  # For these GPUs, a rack is no NVLink domain.
        domains = hosts or per_domain or -(-n // size)
        if per_domain not in (None, domains):
            raise ValueError(f"{domains} hosts are {domains} NVLink domains, not {per_domain}")
        keys["hosts"] = domains
        if gpu not in _HOSTS:
            size = keys["gpus_per_host"] = max(size, n // domains)
    if hosts and n > hosts * shipped.gpus_per_host and gpu in _HOSTS:
        raise ValueError(f"{n} GPUs do not fit on {hosts} x {shipped.gpus_per_host}")
    if hosts and n % hosts:
        raise ValueError(f"{n} GPUs do not divide by {hosts} hosts")
    if n % domains:
        raise ValueError(f"{n} GPUs do not divide by {domains} NVLink domains")
    if n // domains > size:
        raise ValueError(f"{n // domains} GPUs do not fit in an NVLink domain of {size}")
    if domains == 1:
        keys["gpus_used_per_domain"] = n
    elif shipped.nic is None and not _port(system):
        raise ValueError(f"no port in the name, and hosts of {gpu} have none of their own")
    else:
        keys |= _port(system)
    cluster = Cluster.load(keys)
    if "EFA" in system and domains > 1:
        cluster = cluster.model_copy(update={"nic": _efa(cluster, old=gpu in _EFA_OLD), "fabric": "ethernet"})
    return gpu, cluster, n // domains, domains


def assumed(system: str) -> str:
    """Return what `describe` took in place of a part of the name that the catalog lacks; blank if nothing."""
    return "GPUDirect-TCPX priced as TCPXO" if re.search("TCPX(?!O)", system, re.IGNORECASE) else ""


def _gpu(system: str) -> tuple[str, str]:
    """Return the GPU, and the part of the name before it."""
    for pattern, key in _GPUS:
        if found := re.search(pattern, system.lower()):
            return key, system[: found.start()]
    raise ValueError("no GPU of the catalog in the name")


def _counts(system: str, before: str) -> tuple[int, int | None]:
    """Return the GPUs and the hosts that a name gives: "x16, 2 nodes", "2 nodes x 8", "16 GPUs".

    `before` is the part of the name before its GPU.
    """
    text = re.sub(r"\([^)]*\)", "", system)
    nodes = re.search(rf"{_NUMBER}\s*(?:nodes?|hosts?|servers)\b", text, re.IGNORECASE)
    hosts = _number(nodes[1]) if nodes else None
    product = re.search(r"\b(?:nodes?|hosts?)\s*x\s*(\d+)", text)
    if product and hosts:
        return int(product[1]) * hosts, hosts
    found = (
        re.search(r"\bx\s*(\d+)", text)
        or re.search(r"\b(\d+)\s*x?\s*(?:NVIDIA\s*)?$", before)
        or re.search(r"\b(\d+)\s*GPUs?\b", text)
    )
    if not found:
        raise ValueError("no number of GPUs in the name")
    if not int(found[1]) or hosts == 0:
        raise ValueError(f"{found[1]} GPUs on {'unsaid' if hosts is None else hosts} hosts")
    return int(found[1]), hosts


def _number(word: str) -> int:
    return _WORDS.get(word.lower()) or int(word)


def _domain_size(system: str, usual: int) -> int:
    """Return the GPUs of a rack's NVLink domain: as in "NVL36", or `usual`."""
    found = re.search(r"\bNVL(\d+)", system)
    return int(found[1]) if found else usual


def _domains(system: str, hosts: int | None) -> int | None:
    """Return the NVLink domains or racks that a name gives; None if it gives none."""
    text = re.sub(r"\([^)]*\)", "", system)
    if re.search(rf"\b(?:different|separate)\s+{_DOMAIN}", text, re.IGNORECASE):
        if hosts is None:
            raise ValueError("different NVLink domains, and no number of nodes in the name")
        return hosts
    found = re.search(rf"{_NUMBER}\s*x?\s*(?:{_DOMAIN}|NVL\d+)", text, re.IGNORECASE)
    if found:
        return _number(found[1])
    return 1 if re.search(rf"\b(?:same|single)\s+(?:{_DOMAIN}|NVL\d+)", text, re.IGNORECASE) else None


def _port(system: str) -> dict[str, object]:
    """Return the cluster's keys for the network ports that a name gives: "8x400G RoCE", "4x HDR200", "NDR"."""
    port = re.search(r"(\d+)\s*x\s*(?:[ENHX]DR\s*(\d+)|(\d+)\s*(GB/s|G[Bb]?(?:ps|it|/s)?\b))", system)
    speed = re.search(r"(?:(\d+)\s*x\s*)?\b([ENHX])DR\b", system)
    if port:
        rate = int(port[2] or port[3]) * (8 if port[4] == "GB/s" else 1)
        number = port[1]
    elif speed:
        rate, number = _RATES[speed[2]], speed[1]
    else:  # The rate is the one that such hosts come with.
        return {"fabric": "roce"} if re.search("RoCE", system, re.IGNORECASE) else {}
    if re.search("TCPX", system, re.IGNORECASE):
        key = f"tcpxo_{rate}"
    elif re.search(r"\bTCP\b", system, re.IGNORECASE):
        key = f"tcp_{rate}"
    elif re.search("roce|ethernet", system, re.IGNORECASE):
        key = f"roce_{rate}"
    else:
        key = _INFINIBAND.get(rate, "")
    if key not in catalog.nic_keys():
        raise ValueError(f"the catalog has no {rate} Gb/s port")
    keys: dict[str, object] = {"nic": key}
    return keys | ({"nics_per_host": int(number)} if number else {})


def _efa(cluster: Cluster, *, old: bool) -> catalog.Nic:
    """Return AWS EFA with the rate of a cluster's ports; `old` gives it the older latency."""
    assert cluster.nic is not None
    key = f"efa_{round(cluster.nic.bytes_per_s * 8 / 1e9)}"
    if key not in catalog.nic_keys():
        raise ValueError(f"the catalog has no {key}")
    nic, old_nic = catalog.nic(key), catalog.nic("efa_100")
    return replace(nic, latency_s=old_nic.latency_s, latency_small_s=old_nic.latency_small_s) if old else nic
