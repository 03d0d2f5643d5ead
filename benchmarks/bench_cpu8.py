"""`meshkit bench` on eight virtual CPU devices, in one process or in two with four each.

    python -m benchmarks.bench_cpu8 --out DIR [--processes 2] [--set mesh.tensor=8 ...]

Results with machine and versions: bench_cpu8.md.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

EXPERIMENT = Path(__file__).resolve().parents[1] / "configs/experiments/llama_debug_cpu.toml"
TWO_HOSTS = [
    "cluster={gpu='cpu', hosts=2, gpus_per_host=4, scale_up='shared_memory'}",
    "mesh.fsdp=",
    "mesh.data={infiniband=2}",
    "mesh.tensor=4",
]
ONE_PROCESS = ["mesh.data=", "mesh.fsdp=2", "mesh.tensor=4"]


def run(out: str, overrides: list[str], processes: int, process: int, port: int) -> None:
    """One process of the benchmark; the first prints."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    from rich.console import Console

    from meshkit.bencher import bench, render
    from meshkit.spec.experiment import load

    report = bench(load(EXPERIMENT, overrides), out)
    if process == 0:
        Console(width=80).print(render(report, title=f"{processes} process(es)", rows=False))


def main() -> int:
    """Starts the processes and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--set", action="append", dest="overrides")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    overrides = args.overrides or (ONE_PROCESS if args.processes == 1 else TWO_HOSTS)
    if args.process is not None or args.processes == 1:
        run(args.out, overrides, args.processes, args.process or 0, args.port)
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.bench_cpu8", *sys.argv[1:], "--port", str(port), "--process"]
    started = [subprocess.Popen([*command, str(process)]) for process in range(args.processes)]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
