"""Run `meshkit bench` on eight virtual CPU devices, in one process or in two with four devices each.

    python -m benchmarks.bench_cpu8 --out DIR [--processes 2] [--set mesh.tensor=8 ...]

bench_cpu8.md has results, with the machine and the versions.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

from meshkit.distributed.environment import COORDINATOR, NUM_PROCESSES, PROCESS_ID

EXPERIMENT = Path(__file__).resolve().parents[1] / "configs/experiments/llama_debug_cpu.toml"
TWO_HOSTS = [
    "cluster={gpu='cpu', hosts=2, gpus_per_host=4, scale_up='shared_memory'}",
    "mesh.fsdp=",
    "mesh.data={infiniband=2}",
    "mesh.tensor=4",
]
ONE_PROCESS = ["mesh.data=", "mesh.fsdp=2", "mesh.tensor=4"]


def run(out: str, overrides: list[str]) -> None:
    """Run one process of the benchmark; the environment says which. The first process prints the report."""
    from meshkit.config.experiment import load
    from meshkit.distributed.join import is_first_process, join_gang, keep_stdout
    from meshkit.sharding.mesh import prepare_platform

    keep_stdout()
    processes = join_gang()[1]
    experiment = load(EXPERIMENT, overrides)
    prepare_platform(experiment.cluster)
    from rich.console import Console

    from meshkit.verbs.bench.bench_report import render
    from meshkit.verbs.bench.bencher import bench

    report = bench(experiment, out)
    if is_first_process():
        Console(width=80).print(render(report, title=f"{processes} process(es)", rows=False))


def main() -> int:
    """Start the processes, wait for them, and return the highest exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--set", action="append", dest="overrides")
    args = parser.parse_args()
    overrides = args.overrides or (ONE_PROCESS if args.processes == 1 else TWO_HOSTS)
    if args.processes == 1 or PROCESS_ID in os.environ:
        run(args.out, overrides)
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gang = {COORDINATOR: f"127.0.0.1:{free.getsockname()[1]}", NUM_PROCESSES: str(args.processes)}
    command = [sys.executable, "-m", "benchmarks.bench_cpu8", *sys.argv[1:]]
    started = [
        subprocess.Popen(command, env=os.environ | gang | {PROCESS_ID: str(process)})
        for process in range(args.processes)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
