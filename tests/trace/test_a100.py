"""Kernel intervals of a real 4 x A100 FSDP run: the numbers that its analysis by others gave."""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

import meshkit as mk

TRACES = Path(__file__).parent.parent / "data" / "traces"
STEADY = (2, 3, 4)


def execution(gpu, number):
    """(compute, communication, window) of one execution; spans in seconds."""
    spans = {"compute": [], "communication": []}
    with gzip.open(TRACES / f"a100x4_fsdp_gpu{gpu}.csv.gz", "rt") as f:
        for row in csv.DictReader(f):
            if int(row["execution"]) == number:
                # relative to the first integer nanosecond: an epoch would leave a float no room
                spans.setdefault(row["category"], []).append((int(row["start_ns"]), int(row["end_ns"])))
    origin = min(start for rows in spans.values() for start, _ in rows)
    arrays = {k: (np.array(v, np.int64).reshape(-1, 2) - origin) * 1e-9 for k, v in spans.items()}
    end = max(a.max() for a in arrays.values() if len(a))
    return arrays["compute"], arrays["communication"], (0.0, end)


def test_execution_2_of_gpu_0():
    found = mk.overlap(*execution(0, 2))
    names = ("window", "compute", "communication", "overlapped", "exposed", "idle")
    in_ms = [1e3 * getattr(found, f"{name}_s") for name in names]
    assert in_ms == pytest.approx([127.31, 120.62, 7.80, 4.47, 3.33, 3.36], abs=0.006)  # the truth has two decimals


def test_overlapped_share_of_the_steady_executions():
    found = [mk.overlap(*execution(gpu, number)) for gpu in (0, 1) for number in STEADY]
    shares = [100 * f.overlapped_s / f.communication_s for f in found]
    assert (min(shares), max(shares)) == pytest.approx((51.8, 62.7), abs=0.06)  # one decimal is given
