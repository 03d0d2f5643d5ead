"""Compare mk.overlap with HolisticTraceAnalysis (HTA): `python -m benchmarks.hta_overlap --hta PYTHON FOLDER...`.

Each folder holds the Kineto traces (`*.json.gz`) of one job, such as those of HTA's own tests. PYTHON is the
interpreter of an environment that has HTA. There HTA prints its overlap and the kernel intervals that it was computed
from, and `mk.overlap` gets the same intervals. The last column comes from the file alone: it takes every kernel,
without HTA's filters.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import meshkit as mk

TOLERANCE = 0.1  # Percentage points.


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per trace; return 1 if the overlap of any trace differs by more than 0.1 percentage points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--hta", required=True, metavar="PYTHON")
    options = parser.parse_args(arguments)
    worst = 0.0
    print(f"{'trace':58s} {'kernels':>8s} {'HTA %':>8s} {'meshkit %':>10s} {'whole file %':>13s}")
    for folder in options.folders:
        for rank in _theirs(options.hta, folder):
            same = overlapped_percent(rank["compute"], rank["communication"])
            name = f"{folder.name} rank {rank['rank']}"
            kernels = len(rank["compute"]) + len(rank["communication"])
            if same is None or rank["overlap"] is None:
                print(f"{name:58s} {kernels:8d} {'-':>8s} {'-':>10s}  no communication")
                continue
            worst = max(worst, abs(same - rank["overlap"]))
            whole = overlapped_percent(*_from_file(folder, rank["file"]))
            print(f"{name:58s} {kernels:8d} {rank['overlap']:8.2f} {same:10.2f} {whole or 0.0:13.2f}")
    print(f"largest difference on the same intervals: {worst:.3f} points")
    return int(worst > TOLERANCE)


def overlapped_percent(compute: Sequence, communication: Sequence) -> float | None:
    """Return the share of the communication that overlaps with compute, in percent; spans are in microseconds."""
    spans = [np.asarray(s, float).reshape(-1, 2) * 1e-6 for s in (compute, communication)]
    if not len(spans[1]):
        return None
    both = np.concatenate(spans)
    found = mk.overlap(*spans, (both.min(), both.max()))
    return 100 * found.overlapped_s / found.communication_s if found.communication_s else None


def _theirs(python: str, folder: Path) -> list[dict]:
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    command = [python, "-c", _HTA, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{folder.name}: {done.stderr.strip().splitlines()[-1]}")
        return []
    return json.loads(done.stdout.strip().splitlines()[-1])


_HTA = """
import sys, json, math
from hta.trace_analysis import TraceAnalysis
from hta.utils.utils import get_kernel_type
analysis = TraceAnalysis(trace_dir=sys.argv[1])
found = analysis.get_comm_comp_overlap(visualize=False)
symbols = analysis.t.symbol_table.get_sym_table()
out = []
for rank, frame in analysis.t.traces.items():
    kernels = frame[frame["stream"].ne(-1)]
    kind = [get_kernel_type(symbols[n]) for n in kernels["name"]]
    ends = (kernels["ts"] + kernels["dur"]).tolist()
    spans = {"COMPUTATION": [], "COMMUNICATION": []}
    for k, a, b in zip(kind, kernels["ts"].tolist(), ends):
        if k in spans:
            spans[k].append((float(a), float(b)))
    number = float(found[found["rank"] == rank]["comp_comm_overlap_pctg"].iloc[0])
    out.append({"rank": int(rank), "overlap": None if math.isnan(number) else number, "compute": spans["COMPUTATION"],
                "communication": spans["COMMUNICATION"], "file": str(analysis.t.trace_files[rank])})
print(json.dumps(out))
"""


def _from_file(folder: Path, name: str) -> tuple[list, list]:
    """Return the compute and the communication kernels of a Kineto file, separated by their names."""
    file = Path(name) if Path(name).is_file() else folder / Path(name).name
    with gzip.open(file, "rt", encoding="utf-8", errors="replace") as f:
        events = json.load(f)["traceEvents"]
    spans: dict[bool, list] = {True: [], False: []}
    for event in events:
        if event.get("ph") != "X" or str(event.get("cat", "")).lower() != "kernel":
            continue
        start = float(event["ts"])
        spans[event["name"].lower().startswith("nccl")].append((start, start + float(event["dur"])))
    return spans[False], spans[True]


if __name__ == "__main__":
    raise SystemExit(main())
