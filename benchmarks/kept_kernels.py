"""Measure the CPU seconds that kernels kept from earlier programs save in plans and in a search.

    python -m benchmarks.kept_kernels

Each command runs in a process of its own, alternately with and without kept kernels. The medians of three runs and
their ratio go to kept_kernels.md. A run "with" starts from a cache that holds the kernels of one plan of the unchanged
experiment, but none of its programs; the first plan and the search start from an empty cache. A run "without" keeps
nothing (`MESHKIT_CACHE=off`).
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
PLAN = ("plan", "configs/experiments/llama3_8b.toml")
SEARCH = ("tune", PLAN[1], "--candidates", "8", "--jobs", "1", "--out")
RUNS = 3


def cpu_s(command: tuple[str, ...], cache: Path | None) -> float:
    """Return the CPU seconds of a meshkit command and the compilers that it starts.

    Args:
        command: the arguments of meshkit.
        cache: the cache folder; None turns the cache off.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"MESHKIT_CACHE": str(cache or "off")}
    subprocess.run([sys.executable, "-m", "meshkit", *command], env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Time all commands and write the page."""
    lines = ["| command | with, s | without, s | ratio |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        empty, kept = folder / "empty", folder / "kept"
        empty.mkdir()
        cpu_s(PLAN, kept)
        for program in (kept / "programs").glob("*.program"):
            program.unlink()
        cases = {
            "the first plan": (PLAN, empty),
            "one of another `remat`": ((*PLAN, "--set", "train.remat=dots"), kept),
            "one of another batch": ((*PLAN, "--set", "train.global_batch=32"), kept),
            "a search of 8": (SEARCH, empty),
        }
        for name, (command, start) in cases.items():
            times: list[tuple[float, float]] = []
            for run in range(RUNS):
                cache = shutil.copytree(start, folder / f"{name} {run}".replace(" ", "-").replace("`", ""))
                ends = [str(folder / f"out-{name[:3]}-{run}-{i}") if command is SEARCH else "" for i in range(2)]
                both = [(*command, end) if end else command for end in ends]
                times.append((cpu_s(both[0], cache), cpu_s(both[1], None)))
            ours, without = (statistics.median(column) for column in zip(*times))
            ratio = statistics.median(a / b for a, b in times)
            lines.append(f"| {name} | {ours:.1f} | {without:.1f} | {ratio:.2f} |")
            print(lines[-1], flush=True)
    PAGE.write_text(
        "# Kernels of earlier programs\n\n"
        "How much CPU time do the kernels of earlier programs save? `python -m benchmarks.kept_kernels` measures the "
        f"CPU seconds\nof `meshkit {' '.join(PLAN)}`, of this plan with changes, and of `meshkit tune`, with these\n"
        f"kernels kept and with nothing kept. The runs alternate; the table has medians of {RUNS}.\n\n"
        + "\n".join(lines)
        + f"\n\njaxlib {version('jaxlib')}, {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d')}. "
        "Both ways give the same report except for the compile time\n"
        "(`tests/compile/test_cache.py` compares the programs).\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
