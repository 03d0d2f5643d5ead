"""Measure how much training time snapshots in memory cost, with a copy of each on another host.

    python -m benchmarks.snapshots
    python -m benchmarks.snapshots --pairs 60 --every 20 --megabytes 32

Two launchers (`launch local`, one process each) stand for two hosts. Their workers run blocks of three steps in pairs;
one block of each pair takes a snapshot after its first step. Which block comes first alternates. The cost of a snapshot
is the mean difference of a pair, with its 95 % interval. It is printed as a share of the `--every` steps of which one
has a snapshot.

A block ends once its snapshot is whole on both hosts, so that its time includes the whole cost: the wait of the step,
and the hashes and copies that share the cores with the following steps. Other programs disturb this time. They disturb
the CPU time of a host's process and launcher less, so that is measured too. On this benchmark's CPU devices the steps
use every core, so time follows CPU time; a host of GPUs has cores to spare.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
_WIDTH, _SHORTEST_STEP_S, _SEED, _DRAWS = 1024, 1.0, 20261128, 10_000
_BLOCK = 3  # Steps. A snapshot is whole on both hosts before they end.


def main() -> None:
    """Start the two hosts and print what their first process has measured."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--pairs", type=int, default=60, help="pairs of blocks")
    given.add_argument("--every", type=int, default=20, help="checkpoint.snapshot_every, over which the cost is spread")
    given.add_argument("--megabytes", type=int, default=32, help="size of the state of each process")
    given.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.worker is not None:
        _work(options.worker, options.pairs, options.every, options.megabytes << 20)
        return
    with tempfile.TemporaryDirectory(prefix="meshkit-snapshots-") as folder:
        found = _measure(Path(folder), sys.argv[1:])
    for line in report(found):
        print(line)


def _measure(folder: Path, options: list[str]) -> dict[str, list[float]]:
    from meshkit.distributed.certificates import make_certificates, write_certificates
    from meshkit.distributed.roll_call import free_port

    write_certificates(folder / "mtls", make_certificates(["127.0.0.1"]))
    env = os.environ | {"MESHKIT_MTLS": str(folder / "mtls"), "PYTHONPATH": str(ROOT)}
    job = ["--processes", "1", "--devices", "1", "--hosts", "2", "--coordinator", f"127.0.0.1:{free_port()}"]
    job += ["--max-restarts", "1", "--out", str(folder / "run")]
    work = [sys.executable, "-m", "benchmarks.snapshots", "--worker", str(folder / "measured.json"), *options]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "meshkit", "launch", "local", *job, "--host-index", str(host), "--", *work],
            cwd=ROOT,
            env=env,
            stdout=subprocess.DEVNULL if host else None,
        )
        for host in range(2)
    ]
    try:
        codes = [process.wait() for process in started]
    finally:
        for process in started:
            process.terminate()
    if codes != [0, 0]:
        raise SystemExit(f"the two launchers ended with exit codes {codes}")
    return json.loads((folder / "measured.json").read_text())


def report(found: dict[str, list[float]]) -> list[str]:
    """Return lines with the cost of a snapshot, as a share of the steps that have one snapshot, with intervals.

    Args:
        found: lists of measurements by name. `with` and `without` are the seconds of a block, by pair; `with_cpu` and
            `without_cpu` are the CPU seconds of a process and its launcher; `with_launcher` and `without_launcher` are
            those of the launcher alone. `blocked` is the seconds that the step after a snapshot waits, `whole` the
            seconds until both hosts have the whole snapshot. `every` and `bytes` hold one number each.
    """
    every, step_s = found["every"][0], np.mean(found["without"]) / _BLOCK
    cpu_s, size = every * np.mean(found["without_cpu"]) / _BLOCK, found["bytes"][0] / 2**20
    return [
        f"{size:.0f} MiB a process; a snapshot every {every:.0f} steps of {step_s:.2f} s; {len(found['with'])} pairs",
        f"time: {_cost(found['with'], found['without'], every * step_s)}",
        f"CPU time: {_cost(found['with_cpu'], found['without_cpu'], cpu_s)}",
        f"CPU time of the launcher: {_cost(found['with_launcher'], found['without_launcher'], cpu_s)}",
        f"a snapshot blocks the step: {_cost(found['blocked'], [0.0] * len(found['blocked']), every * step_s)}",
        f"it is whole on both hosts {np.median(found['whole']):.2f} s after the step",
    ]


def _cost(with_one: list[float], without: list[float], spread_s: float) -> str:
    """Return the mean difference of pairs as a share of `spread_s`, with a 95 % interval from resampling the pairs."""
    shares = (np.array(with_one) - np.array(without)) / spread_s
    drawn = np.random.default_rng(_SEED).choice(shares, (_DRAWS, len(shares))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{shares.mean():+.2%} (95 % interval {low:+.2%} to {high:+.2%}), {shares.mean() * spread_s:.3f} s"


def _launcher_cpu_s() -> float:
    """Return the CPU time of this process's launcher so far."""
    reaper = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()
    launcher = Path(f"/proc/{reaper[1]}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(launcher[11]) + int(launcher[12])) / os.sysconf("SC_CLK_TCK")


def _work(out: Path, pairs: int, every: int, state_bytes: int) -> None:
    """Measure, as one process of two."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshkit.distributed.join import Agreement, join_gang
    from meshkit.step.state import TrainState
    from meshkit.verbs.checkpoint.snapshots import Snapshots

    rank, _ = join_gang()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    rows = state_bytes // (4 * _WIDTH)
    state = TrainState(
        step=jax.device_put(jnp.int32(0), NamedSharding(mesh, PartitionSpec())),
        params={"w": jax.jit(lambda: jnp.full((2, rows, _WIDTH), 1e-3), out_shardings=sharded)()},
        opt_state=(),
        variables={},
        rng=jax.device_put(np.zeros(2, np.uint32), NamedSharding(mesh, PartitionSpec())),
    )

    def make(products: int):
        def step(state: TrainState) -> TrainState:
            square = state.params["w"][:, :_WIDTH]
            x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ square), square)
            return replace(state, step=state.step + 1, params={"w": state.params["w"] + 1e-6 * jnp.mean(x)})

        return jax.jit(step, donate_argnums=0)

    def timed(step, state: TrainState) -> tuple[TrainState, float]:
        began = time.perf_counter()
        state = jax.block_until_ready(step(state))
        return state, time.perf_counter() - began

    # Both processes must run the same program, so they agree on the larger number of products that makes a step long
    # enough.
    probe, step = 8, make(8)
    state, _ = timed(step, state)
    state, seconds = timed(step, state)
    needed = max(probe, math.ceil(1.2 * probe * _SHORTEST_STEP_S / seconds))
    products = Agreement("benchmark").reach("products", needed, max, timeout_s=60)
    step = make(products)
    state, _ = timed(step, state)
    snapshots = Snapshots("benchmark", out.parent / "snapshots", print)
    found: dict[str, list[float]] = defaultdict(list)

    def block(state: TrainState, kind: str) -> TrainState:
        began, cpu_s, launcher_s = time.perf_counter(), time.process_time(), _launcher_cpu_s()
        for i in range(_BLOCK):
            state = jax.block_until_ready(step(state))
            if i == 0 and kind == "with":
                at = time.perf_counter()
                snapshots.take(state)
                found["blocked"].append(time.perf_counter() - at)
        if kind == "with":
            snapshots.close()
        found[kind].append(time.perf_counter() - began)
        found[f"{kind}_launcher"].append(_launcher_cpu_s() - launcher_s)
        found[f"{kind}_cpu"].append(time.process_time() - cpu_s + found[f"{kind}_launcher"][-1])
        return state

    for pair in range(pairs):
        for kind in ("with", "without") if pair % 2 else ("without", "with"):
            state = block(state, kind)
        at = time.perf_counter()
        snapshots.take(state)
        snapshots.close()
        found["whole"].append(time.perf_counter() - at)
    assert snapshots.enabled
    if rank == 0:
        out.write_text(json.dumps({**found, "every": [every], "bytes": [state_bytes]}))


if __name__ == "__main__":
    main()
