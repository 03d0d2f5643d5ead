"""Measure the seconds of a restart, part by part: `python -m benchmarks.restart [--repeats N] [--only with|without]`.

Two processes of 4 CPU devices train the debug Llama with a snapshot in memory after every step. Rank 1 is killed (kill
-9) once the run has made 12 steps, and, with processes on standby, once these have imported everything that they need.
The launcher prints the duration of each part. The very first run fills the cache of executables. A cell is the median
of the repeats. Load averages (1 minute) are those at the kill; with more load than cores, all parts take proportionally
longer.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.kill_matrix.gang import PATIENCE_S, ROOT, Launch, cpu_s, resident_bytes, send

_EXPERIMENT = ROOT / "configs" / "experiments" / "llama_debug_cpu.toml"
_SETS = (
    'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}',
    *("mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4", "profile.steps=", "train.steps=2000"),
    *("train.evaluate_every=0", "checkpoint.snapshot_every=1"),
)
_KILL_AT, _QUIET_S = 12, 2.0
_LINE = re.compile(r"trains again (?P<total>[\d.]+) s after the failure: (?P<parts>.*)")
_PART = re.compile(r"(?P<name>[a-z ]+) (?P<seconds>[\d.]+) s(?:, |$)")


def restart(folder: Path, *, standby: bool) -> tuple[dict[str, float], float]:
    """Kill rank 1 of a run in a folder and wait until the run trains again.

    Returns:
        the seconds of each part, with their sum as `all`, and the load average at the kill.

    Raises:
        TimeoutError: the run did not reach the kill, or did not train again.
    """
    sets = tuple(word for text in _SETS for word in ("--set", text))
    options = sets if standby else (*sets, "--no-standby")
    launch = Launch(folder, None, options, _EXPERIMENT, injects=False)
    launch.start()
    try:
        launch.wait(lambda: len(launch.losses()) >= _KILL_AT, f"step {_KILL_AT}", 2 * PATIENCE_S)
        if standby:
            launch.wait(lambda: _all_wait(launch), "the processes on standby")
            print(f"  on standby: {[resident_bytes(pid) // 10**6 for pid in launch.standby().values()]} MB", flush=True)
        load = os.getloadavg()[0]
        send(launch.ranks()[1], signal.SIGKILL)
        found = launch.wait(lambda: _LINE.search(launch.said), "a step after the failure")
    finally:
        launch.kill()
    parts = {part["name"]: float(part["seconds"]) for part in _PART.finditer(found["parts"])}
    return parts | {"all": float(found["total"])}, load


def _all_wait(launch: Launch) -> bool:
    """Return whether two processes are on standby and have nothing more to do before they are needed."""
    pids = list(launch.standby().values())
    before = [cpu_s(pid) for pid in pids]
    time.sleep(_QUIET_S)
    return len(pids) == 2 and min(before) > 1.0 and before == [cpu_s(pid) for pid in pids]


def main() -> None:
    """Run the restarts alternately and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="restarts of each kind")
    parser.add_argument("--only", choices=("with", "without"), help="only with, or without, processes on standby")
    asked = parser.parse_args()
    kinds = (asked.only,) if asked.only else ("without", "with")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    loads: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="meshkit-restart-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        for repeat in range(asked.repeats):
            for kind in kinds:
                parts, load = restart(Path(scratch, f"{kind}{repeat}"), standby=kind == "with")
                found[kind].append(parts)
                loads[kind].append(load)
                print(f"{kind} standby: {parts['all']:.2f} s, load {load:.1f}", flush=True)
    print(f"\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPUs, medians of {asked.repeats}\n")
    print(table(found, loads))


def table(found: dict[str, list[dict[str, float]]], loads: dict[str, list[float]]) -> str:
    """Return the table: the seconds of each part, with a column for each kind of restart."""
    names = dict.fromkeys(name for runs in found.values() for parts in runs for name in parts)
    median = lambda runs, name: statistics.median(parts.get(name, 0.0) for parts in runs)
    rows = [[name, *(f"{median(runs, name):.2f}" for runs in found.values())] for name in names]
    rows += [["load averages", *(" to ".join(f"{f(of):.1f}" for f in (min, max)) for of in loads.values())]]
    head = [["part, s", *(f"{kind} standby" for kind in found)], ["---"] * (len(found) + 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [*head, *rows])


if __name__ == "__main__":
    main()
