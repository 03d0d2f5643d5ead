"""Predict what links and parallelisms cost, and print the tables of docs/concepts/links.md.

Run it with `python -m benchmarks.links`.
"""

from __future__ import annotations

from typing import Any

import meshkit as mk
from meshkit.units import format_bytes, format_seconds

PAYLOAD_BYTES = 2**28
GROUP = 8
# Each entry has the name of a link, the cluster that uses it, and how many GPUs of each host are in the group.
LINKS: list[tuple[str, dict[str, Any], int]] = [
    ("NVLink through NVSwitch", {"name": "dgx_h100"}, 8),
    ("NVLink without a switch", {"name": "dgx_h100", "nvlink_switch": False}, 8),
    ("PCIe 5, peer to peer", {"name": "dgx_h100", "scale_up": "pcie"}, 8),
    ("PCIe 5, through host memory", {"name": "dgx_h100", "scale_up": "shared_memory"}, 8),
    ("InfiniBand, 400 Gb/s each", {"name": "dgx_h100", "hosts": 8}, 1),
    ("the same without GPUDirect", {"name": "dgx_h100", "hosts": 8, "gpudirect_rdma": False}, 1),
    ("RoCE, 400 Gb/s each", {"name": "cloud_h100_roce", "hosts": 8}, 1),
    ("kernel TCP, four 200 Gb/s a host", {"name": "cloud_h100_tcp", "hosts": 8}, 1),
]
# Llama 3 8B with 65,536 tokens a step on the group. With data parallelism each of the 8 replicas has an eighth of the
# tokens; with tensor and pipeline parallelism every GPU sees all of them.
PARAMETERS, LAYERS, EMBED, KEYS, TOKENS = 8.03e9, 32, 4096, 1024, 65_536
_EACH, _ALL = TOKENS // GROUP * EMBED * 2, TOKENS * EMBED * 2  # activations of [tokens, embed] in bf16
# Each entry has a parallelism, the formula of its payload, and its collectives: kind, bytes of one, number a step.
PARALLELISMS: list[tuple[str, str, list[tuple[str, float, int]]]] = [
    ("data", "4 N", [("all-reduce", 4 * PARAMETERS, 1)]),
    ("ZeRO-1", "2 N + 4 N", [("all-gather", 2 * PARAMETERS, 1), ("reduce-scatter", 4 * PARAMETERS, 1)]),
    (
        "FSDP, ZeRO-3",
        "2 x 2 N + 4 N",
        [
            ("all-gather", 2 * PARAMETERS / LAYERS, 2 * LAYERS),
            ("reduce-scatter", 4 * PARAMETERS / LAYERS, LAYERS),
        ],
    ),
    ("tensor", "4 L x 2 t e", [("all-reduce", _ALL, 4 * LAYERS)]),
    (
        "tensor and sequence",
        "8 L x 2 t e",
        [("all-gather", _ALL, 4 * LAYERS), ("reduce-scatter", _ALL, 4 * LAYERS)],
    ),
    (
        "context, keys gathered",
        "2 L x 4 t k",
        [("all-gather", 4 * TOKENS * KEYS, LAYERS), ("reduce-scatter", 4 * TOKENS * KEYS, LAYERS)],
    ),
    ("experts, 2 of them a token", "4 L x 4 t e / n", [("all-to-all", 2 * _EACH, 4 * LAYERS)]),
    ("pipeline, M = 32", "2 x 2 t e", [("collective-permute", _ALL / 32, 64)]),
    ("the same, M = 1 (naive)", "2 x 2 t e", [("collective-permute", _ALL, 2)]),
]


def links() -> list[list[str]]:
    """Return the rows of the table of links.

    Each row has the time of an all-gather over 8 GPUs, the time of a send from each GPU to one other, and the bytes per
    second that each GPU sends in the all-gather.
    """
    rows = []
    for name, described, inside in LINKS:
        cluster = mk.Cluster.load(described)
        gather, permute = (
            mk.collective_time_s(
                kind,
                payload_bytes=PAYLOAD_BYTES,
                gpus_per_domain=inside,
                domains=GROUP // inside,
                cluster=cluster,
            )
            for kind in ("all-gather", "collective-permute")
        )
        sent = PAYLOAD_BYTES * (GROUP - 1) / GROUP / gather
        rows.append([name, f"{1e3 * gather:.2g} ms", f"{1e3 * permute:.2g} ms", f"{sent / 1e9:.3g} GB/s"])
    return rows


def parallelisms() -> list[list[str]]:
    """Return the rows of the table of parallelisms: the payload, and its time inside one host and over 8 hosts."""
    cluster, rows = mk.Cluster.load("dgx_h100", hosts=8), []
    for name, formula, parts in PARALLELISMS:
        times = [
            sum(
                count
                * mk.collective_time_s(
                    kind, payload_bytes=size, gpus_per_domain=inside, domains=GROUP // inside, cluster=cluster
                )
                for kind, size, count in parts
            )
            for inside in (8, 1)
        ]
        payload = sum(size * count for _, size, count in parts)
        rows.append([name, formula, format_bytes(round(payload)), *(f"{format_seconds(t)}" for t in times)])
    return rows


def main() -> None:
    """Print both tables."""
    print("| link | all-gather | to one other | each sends |\n|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in links()))
    print("\n| parallelism | payload a step | of that model | NVLink | InfiniBand |\n|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(row)} |" for row in parallelisms()))


if __name__ == "__main__":
    main()
