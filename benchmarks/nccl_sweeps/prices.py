"""Measure the CPU time of pricing a collective, in microseconds: `python -m benchmarks.nccl_sweeps.prices`.

The script prices six kinds over four groups of four shipped clusters, at six sizes. `first` is the first price of a
group of GPUs, which also computes the links and what NCCL's tuner expects of them. `new size` is a later price of the
same group, and `again` the same price once more, since no price is kept. `calibrated` is the same with the constants of
a calibration. `tables` is one price of another cluster, made before all others, which loads the tables.

Each price is made on `--copies` of the cluster that have no price yet. The least of them counts, because other work on
the machine only adds to it. The table also has the time of the first copy, whose code and data may be out of the
processor's caches: it takes three to five times as long.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import meshkit as mk
from meshkit.config.calibration import Calibration, NetworkConstants, load_cached, write
from meshkit.predict.refit import shipped_constants

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
CLUSTERS = {"dgx_h100": 32, "dgx_a100": 32, "dgx_b200": 32, "gb200_nvl72": 36}
SIZES = (2**10, 2**14, 2**18, 2**22, 2**26, 2**30)


def price_s(cluster: mk.Cluster, kind: str, g: int, k: int, size: int) -> float:
    """Return the CPU seconds of one price."""
    began = time.thread_time()
    mk.collective_time_s(kind, payload_bytes=size, gpus_per_domain=g, domains=k, cluster=cluster)
    return time.thread_time() - began


def calibrated(cluster: mk.Cluster, folder: str) -> mk.Cluster:
    """Return the cluster with a calibration that has every constant, as shipped."""
    network = NetworkConstants(constants=shipped_constants(cluster), points=1, error_before=0.0, error_after=0.0)
    path = write(Path(folder) / f"{cluster.name}.toml", Calibration((), network=network))
    load_cached(str(path))
    return cluster.model_copy(update={"calibration": str(path)})


def prices(cluster: mk.Cluster, copies: int, found: dict[str, list[list[float]]], kind_of_cluster: str) -> None:
    """Add the CPU seconds of every price of a cluster, on each copy, to `found`."""
    inside = cluster.gpus_used_per_domain
    for kind in KINDS:
        for g, k in ((inside, 1), (inside, 2), (1, 2), (2, 1)):
            same = [cluster.model_copy() for _ in range(copies)]
            for n, size in enumerate(SIZES):
                each = [price_s(copy, kind, g, k, size) for copy in same]
                found[("new size" if n else "first") + kind_of_cluster].append(each)
                found["again" + kind_of_cluster].append([price_s(copy, kind, g, k, size) for copy in same])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=7)
    copies, found = parser.parse_args().copies, defaultdict[str, list[list[float]]](list)
    found["tables"].append([price_s(mk.Cluster.load("hgx_h200"), KINDS[0], 8, 1, SIZES[0])])
    with tempfile.TemporaryDirectory() as folder:
        for name, hosts in CLUSTERS.items():
            cluster = mk.Cluster.load(name, hosts=hosts)
            prices(cluster, copies, found, "")
            prices(calibrated(cluster, folder), copies, found, ", calibrated")
    print("| | prices | median, us | 99 %, us | first copy: median, us | 99 %, us |\n|---|---|---|---|---|---|")
    for row, each in found.items():
        cells = []
        for seconds in (sorted(map(min, each)), sorted(taken[0] for taken in each)):
            cells += [statistics.median(seconds), seconds[int(0.99 * (len(seconds) - 1))]]
        print(f"| {row} | {len(each)} | {' | '.join(f'{cell * 1e6:.0f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
