"""Runs the measurements while time lasts, each in a process of its own, the result written at once.

    python -m benchmarks.gpu --out DIR --minutes 9 [--piece 1] [--only NAME] [--dry-run]

What has a result in DIR is not run again, so the same command goes on where the last one stopped. A crash, a hang or a
device out of memory costs one measurement. What it leaves is packed into DIR/results.tar.gz.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.measurements import MEASUREMENTS, Measurement

RESULT, LOG, PACKED = "result.json", "log.txt", "results.tar.gz"
MOST_BYTES = 15_000_000  # of the packed results; a file larger than a tenth of it is left out
_LAST_S = 10.0  # for packing


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--piece", type=int, choices=(1, 2, 3), help="only these; all in order without it")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true", help="print the list with expected seconds")
    parser.add_argument("--toy", action="store_true", help="at a size for CPUs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only) - {m.name for m in MEASUREMENTS}:
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}")
    chosen = [m for m in MEASUREMENTS if args.piece in (None, m.piece) and (not args.only or m.name in args.only)]
    if args.dry_run:
        print_list(chosen)
    elif args.one:
        make_one(next(m for m in MEASUREMENTS if m.name == args.one), args.out / args.one, args.toy)
    else:
        run_all(chosen, args.out, time.monotonic() + 60 * args.minutes - _LAST_S, args.toy)


def print_list(chosen: list[Measurement]) -> None:
    """The list, with what is expected of each."""
    for m in chosen:
        print(f"{m.piece}  {m.expected_s:4.0f} s  {m.name:26s} {m.question}")
    for piece in sorted({m.piece for m in chosen}):
        print(f"piece {piece}: {sum(m.expected_s for m in chosen if m.piece == piece):.0f} s")


def run_all(chosen: list[Measurement], out: Path, deadline: float, toy: bool) -> None:
    """Runs what has no result yet and still has the time it is expected to take."""
    for m in chosen:
        folder = out / m.name
        if (folder / RESULT).exists():
            continue
        left = deadline - time.monotonic()
        if left < (1 if toy else m.expected_s):
            print(f"{m.name}: {left:.0f} s are left, and it takes {m.expected_s:.0f}", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{m.name} ...", end=" ", flush=True)
        found = run_one(m, out, min(m.limit_s, left), toy)
        print(f"{found['status']} in {found['seconds']:.0f} s", flush=True)
        _write(folder / RESULT, found)
    print(table(out))
    pack(out)


def run_one(m: Measurement, out: Path, limit_s: float, toy: bool) -> dict[str, Any]:
    """Makes one measurement in another process, and kills all of it at the limit."""
    folder, began = out / m.name, time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--one", m.name, *(["--toy"] if toy else [])]
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
            status = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:.0f} s"
        finally:
            _kill(process)
    values = folder / "values.json"
    found = json.loads(values.read_text(encoding="utf-8")) if status == "done" and values.exists() else {}
    tail = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    result = {"name": m.name, "status": status, "seconds": time.monotonic() - began, "values": found}
    return result if status == "done" else {**result, "log": tail}


def make_one(m: Measurement, folder: Path, toy: bool) -> None:
    """Makes a measurement in this process."""
    _write(folder / "values.json", m.run(folder, toy))


def table(out: Path) -> str:
    """Every number found so far, a line each."""
    lines = []
    for m in MEASUREMENTS:
        if (out / m.name / RESULT).exists():
            found = json.loads((out / m.name / RESULT).read_text(encoding="utf-8"))
            lines.append(f"{m.name}: {found['status']}, {found['seconds']:.0f} s")
            lines += [f"  {key} = {_short(value)}" for key, value in found["values"].items()]
    return "\n".join(lines)


def pack(out: Path) -> Path:
    """Everything small that lies in the folder, as one archive."""
    target, total = out / PACKED, 0
    with tarfile.open(target, "w:gz") as archive:
        files = sorted((p for p in out.rglob("*") if p.is_file() and p != target), key=lambda p: p.stat().st_size)
        for path in files:
            size = path.stat().st_size
            if size <= MOST_BYTES // 10 and total + size <= 3 * MOST_BYTES and "checkpoints" not in path.parts:
                archive.add(path, path.relative_to(out))
                total += size
    size = target.stat().st_size
    print(f"{target}: {size / 1e6:.2f} MB{'' if size <= MOST_BYTES else ', too large to travel'}")
    return target


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    partial.replace(path)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


if __name__ == "__main__":
    main()
