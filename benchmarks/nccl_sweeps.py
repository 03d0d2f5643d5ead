"""The network model beside measured collectives: `python -m benchmarks.nccl_sweeps [--csv FILE] [--table] [--rows]`.

Headline: each system is predicted with the model's two fitted numbers refitted on the other systems. All else in the
model is published by NCCL, NVIDIA or the vendor. `--csv` reads other sweeps with the same columns; `--table` adds the
comparison with XLA's own collective table.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import meshkit
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.predict.network import collective_time_s, nccl_constants

DATA = Path(__file__).parent.parent / "tests" / "data"
SWEEPS, TABLE = DATA / "nccl_sweeps.csv", DATA / "xla_collective_table.csv.gz"
BANDS = (("< 1 MiB", 0, 2**20), ("1 to 16 MiB", 2**20, 2**24), (">= 16 MiB", 2**24, 2**63))
TURNAROUND = tuple(np.arange(0, 0.65, 0.05))
LAUNCH_S = tuple(np.arange(0, 42.5e-6, 2.5e-6))

_CLUSTERS = {
    "V100": "dgx1_v100",
    "A100": "dgx_a100",
    "H100": "dgx_h100",
    "H200": "hgx_h200",
    "GB200": "gb200_nvl72",
    "GB300": "gb300_nvl72",
    "B200": "dgx_b200",
}
_COLLECTIVES = {
    "alltoall": "all-to-all",
    "sendrecv": "collective-permute",
    "permute": "collective-permute",
    "broadcast": "collective-broadcast",
}
# aws/aws-ofi-nccl 01666ec, src/platform-aws.cpp: the plugin tells NCCL of 75 us on p4d and p5, of 100 Gb/s cards,
# and of 35 us since. A system that is named by the four cards of a p5 GPU together ("8x400G EFA") has the 75.
_EFA_OLD = ("A100", "H100")
_XLA_CLUSTERS = {"sm_90": "dgx_h100", "sm_100_B200": "dgx_b200", "sm_100_GB200": "gb200_nvl72", "sm_103": "gb300_nvl72"}


@dataclass(frozen=True)
class Row:
    """One measured collective."""

    system: str
    gpu: str
    collective: str
    payload_bytes: int
    measured_s: float
    gpus_per_domain: int
    domains: int
    cluster: Cluster
    nvls: bool = True

    def predicted_s(self, fitted: Mapping[str, float] | None = None) -> float:
        """What the model says of it."""
        return collective_time_s(
            self.collective,
            payload_bytes=self.payload_bytes,
            gpus_per_domain=self.gpus_per_domain,
            domains=self.domains,
            cluster=self.cluster,
            nvls=self.nvls,
            fitted=fitted,
        )


def read_sweeps(path: Path = SWEEPS) -> tuple[list[Row], dict[str, str]]:
    """Rows of a sweep file, and why systems of it could not be read."""
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            try:
                rows.append(_row(record))
            except (ValueError, meshkit.ConfigError) as error:
                skipped[record["system"]] = str(error)
    return rows, skipped


def _row(record: Mapping[str, str]) -> Row:
    gpu, cluster, g, k = describe(record["system"])
    name = record["collective"].replace("_perf", "").replace("_", "-").lower()
    algorithm = record.get("algo", "")
    return Row(
        system=f"{record['system']} [{record.get('source', '').split('/')[0].split('@')[0]}]",
        gpu=gpu,
        collective=_COLLECTIVES.get(name.replace("-", ""), name),
        payload_bytes=int(record["bytes"]),
        measured_s=float(record["time_us"]) * 1e-6,
        gpus_per_domain=g,
        domains=k,
        cluster=cluster,
        nvls=not (algorithm.lower().startswith("ring") or "NVLS_ENABLE=0" in algorithm),
    )


def describe(system: str) -> tuple[str, Cluster, int, int]:
    """GPU, cluster, GPUs per domain and domains of a system that is named like "B200 x32, 4 nodes, 8x50GB/s EFAv4".

    Raises:
        ValueError: no GPU or no number of GPUs in the name.
    """
    gpu = next((key for key in sorted(_CLUSTERS, key=len, reverse=True) if key in system.upper()), None)
    n, hosts = _counts(system)
    if gpu is None or n is None:
        raise ValueError(f"no GPU, or no number of them, in '{system}'")
    shipped = Cluster.load(_CLUSTERS[gpu])
    if shipped.nvlink_domain_size > shipped.gpus_per_host:  # racks: the name need not tell hosts
        domains = -(-n // shipped.nvlink_domain_size)
        return gpu, Cluster.load(_CLUSTERS[gpu], hosts=shipped.hosts * domains), n // domains, domains
    hosts = hosts or -(-n // shipped.gpus_per_host)
    if n % hosts:
        raise ValueError(f"{n} GPUs on {hosts} hosts in '{system}'")
    keys: dict[str, object] = {"hosts": hosts}
    port = re.search(r"(\d+)\s*x\s*(?:[ENHX]DR\s*(\d+)|(\d+)\s*(GB/s|Gb?\b))", system, re.IGNORECASE)
    if hosts > 1 and port:
        rate = int(port[2] or port[3]) * (8 if (port[4] or "").upper() == "GB/S" else 1)
        prefix = "roce" if re.search("roce|ethernet", system, re.IGNORECASE) else "ib"
        keys |= {"nics_per_host": int(port[1]), "nic": _nic(prefix, rate)}
    cluster = Cluster.load({"name": _CLUSTERS[gpu], **keys})
    if "EFA" in system and hosts > 1:
        cluster = cluster.model_copy(update={"nic": _efa(cluster, old=gpu in _EFA_OLD), "fabric": "ethernet"})
    return gpu, cluster, n // hosts, hosts


def _efa(cluster: Cluster, *, old: bool) -> catalog.Nic:
    """AWS EFA of the rate of a cluster's ports."""
    assert cluster.nic is not None
    key = f"efa_{round(cluster.nic.bytes_per_s * 8 / 1e9)}"
    if key not in catalog.nic_keys():
        raise ValueError(f"the catalog has no {key}")
    nic, old_nic = catalog.nic(key), catalog.nic("efa_100")
    return replace(nic, latency_s=old_nic.latency_s, latency_small_s=old_nic.latency_small_s) if old else nic


def _counts(system: str) -> tuple[int | None, int | None]:
    """GPUs and hosts that a name tells: "x16, 2 nodes", "2 nodes x 8", "16 GPUs"."""
    nodes = re.search(r"(\d+)\s*(?:nodes?|hosts?)\b", system)
    hosts = int(nodes[1]) if nodes else None
    product = re.search(r"(\d+)\s*(?:nodes?|hosts?)\s*x\s*(\d+)", system)
    if product:
        return int(product[1]) * int(product[2]), hosts
    patterns = (r"\bx\s*(\d+)", r"(\d+)\s*x\s*(?:GB|[VAHB])\d00", r"\b(\d+)\s*(?:[A-Z]+\d00\s*)?GPUs?\b")
    found = next(filter(None, (re.search(pattern, system) for pattern in patterns)), None)
    return (int(found[1]) if found else None), hosts


def _nic(prefix: str, gigabits: int) -> str:
    """The catalog's port of that rate."""
    infiniband = {100: "ib_edr", 200: "ib_hdr", 400: "ib_ndr", 800: "ib_xdr"}
    key = infiniband.get(gigabits) if prefix == "ib" else f"roce_{gigabits}"
    if key is None or key not in catalog.nic_keys():
        raise ValueError(f"the catalog has no {gigabits} Gb/s port")
    return key


def leave_one_out(rows: Sequence[Row], *, key: str = "system") -> tuple[np.ndarray, dict[str, dict[str, float]]]:
    """Signed relative errors, each with numbers fitted on rows of another `key`; and those numbers.

    The fit is least absolute log error over rows from 1 MiB up.
    """
    grid = [{"turnaround_steps": float(t), "launch_s": float(s)} for t, s in itertools.product(TURNAROUND, LAUNCH_S)]
    predicted = np.array([[row.predicted_s(fitted) for row in rows] for fitted in grid])
    ratio = predicted / np.array([row.measured_s for row in rows])
    misfit = np.abs(np.log(ratio))
    groups = np.array([getattr(row, key) for row in rows])
    counted = np.array([row.payload_bytes >= BANDS[1][1] for row in rows])
    errors, numbers = np.zeros(len(rows)), {}
    for group in dict.fromkeys(groups):
        others = counted & (groups != group)
        best = int(misfit[:, others].mean(axis=1).argmin()) if others.any() else 0
        numbers[str(group)] = grid[best] if others.any() else dict(nccl_constants()["fitted"])
        errors[groups == group] = ratio[best, groups == group] - 1
    return errors, numbers


def with_shipped_numbers(rows: Sequence[Row]) -> np.ndarray:
    """Signed relative errors with the numbers of nccl.toml."""
    return np.array([row.predicted_s() / row.measured_s - 1 for row in rows])


def in_band(rows: Sequence[Row], low: int, high: int) -> np.ndarray:
    """Which rows are of a size."""
    return np.array([low <= row.payload_bytes < high for row in rows], dtype=bool)


def read_xla_table(path: Path = TABLE) -> list[Row]:
    """Rows of XLA's own table of all-gather, all-reduce, reduce-scatter, all-to-all, permute, from 16 MiB."""
    clusters = {key: Cluster.load(name) for key, name in _XLA_CLUSTERS.items()}
    rows = []
    with gzip.open(path, "rt", newline="") as file:
        for record in csv.DictReader(file):
            if int(record["tensor_bytes"]) < BANDS[2][1]:
                continue
            key, cluster = record["device_key"], clusters[record["device_key"]]
            n = int(record["group_size"] or cluster.gpus_used_per_domain)
            slow = key == "sm_103" and (record["n_groups"] in ("", "1", "2", "4")) and _eight_gpus(record)
            rows.append(
                Row(
                    system=f"{key}{', 8 GPUs' if slow else ''}",
                    gpu=key,
                    collective=record["op"],
                    payload_bytes=int(record["tensor_bytes"]),
                    measured_s=float(record["time_us"]) * 1e-6,
                    gpus_per_domain=n,
                    domains=1,
                    cluster=cluster,
                )
            )
    return rows


def _eight_gpus(record: Mapping[str, str]) -> bool:
    """Whether a row of sm_103 is of the machine of 8 GPUs, not of a rack. Its permutes name no pattern."""
    if record["op"] == "collective-permute":
        return not record["cp_pattern"]
    return int(record["n_groups"]) * int(record["group_size"]) == 8


def summary_lines(rows: Sequence[Row], errors: np.ndarray, *, key: str = "system") -> list[str]:
    """A table in Markdown: median and 90th percentile of |error| by system and size band."""
    lines = ["| system | " + " | ".join(f"{name}: median, p90 (rows)" for name, _, _ in BANDS) + " |"]
    lines.append("|---" * (1 + len(BANDS)) + "|")
    names = np.array([getattr(row, key) for row in rows])
    for name in [*dict.fromkeys(names), "all"]:
        member = np.ones(len(rows), dtype=bool) if name == "all" else names == name
        cells = (_cell(errors[member & in_band(rows, low, high)]) for _, low, high in BANDS)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(errors: np.ndarray) -> str:
    if not len(errors):
        return ""
    size = np.abs(errors)
    return f"{np.median(size):.1%}, {np.percentile(size, 90):.1%} ({len(errors)})"


def table_lines(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown: XLA's table by operation and device, and signed median error."""
    errors = with_shipped_numbers(rows)
    lines = ["| operation | device | rows | median abs | p90 abs | median signed |", "|---|---|---|---|---|---|"]
    for operation in sorted({row.collective for row in rows}):
        for system in [*sorted({row.system for row in rows}), "all"]:
            member = np.array([row.collective == operation and system in (row.system, "all") for row in rows])
            found = errors[member]
            if len(found):
                size = np.abs(found)
                numbers = f"{np.median(size):.1%} | {np.percentile(size, 90):.1%} | {np.median(found):+.1%}"
                lines.append(f"| {operation} | {system} | {len(found)} | {numbers} |")
    return lines


def row_lines(rows: Sequence[Row], errors: np.ndarray) -> Iterable[str]:
    """Every row: measured, predicted, error."""
    yield "| system | bytes | measured us | predicted us | error |"
    yield "|---|---|---|---|---|"
    for row, error in zip(rows, errors, strict=True):
        us = row.measured_s * 1e6
        yield f"| {row.system} | {row.payload_bytes} | {us:.1f} | {us * (1 + error):.1f} | {error:+.1%} |"


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description="The network model beside measured collectives.")
    parser.add_argument(
        "--csv", type=Path, default=SWEEPS, help="sweeps with the columns of tests/data/nccl_sweeps.csv"
    )
    parser.add_argument("--table", action="store_true", help="also XLA's own collective table")
    parser.add_argument("--rows", action="store_true", help="also every row, with the shipped numbers")
    arguments = parser.parse_args()
    rows, skipped = read_sweeps(arguments.csv)
    print(
        f"meshkit {meshkit.__version__}, Python {platform.python_version()}, numpy {np.__version__}; {len(rows)} rows\n"
    )
    for system, why in skipped.items():
        print(f"left out: {system}: {why}")
    if not rows:
        return
    errors, numbers = leave_one_out(rows)
    print("\n".join(["Leave one system out (headline)", "", *summary_lines(rows, errors), ""]))
    for system, fitted in numbers.items():
        print(
            f"- without {system}: turnaround {fitted['turnaround_steps']:.2f} steps, "
            f"launch {fitted['launch_s'] * 1e6:.1f} us"
        )
    strict, _ = leave_one_out(rows, key="gpu")
    print("\n".join(["", "Leave one GPU model out", "", *summary_lines(rows, strict, key="gpu"), ""]))
    shipped = with_shipped_numbers(rows)
    print("\n".join(["Shipped numbers (nccl.toml)", "", *summary_lines(rows, shipped), ""]))
    if arguments.rows:
        print("\n".join(row_lines(rows, shipped)))
    if arguments.table:
        print("\n".join(["XLA's collective table, from 16 MiB, shipped numbers", "", *table_lines(read_xla_table())]))


if __name__ == "__main__":
    main()
