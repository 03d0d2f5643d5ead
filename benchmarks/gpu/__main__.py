"""Run the measurements while time lasts, each in a process of its own, and write each result as soon as it is known.

    python -m benchmarks.gpu --out DIR --minutes 9 [--piece 1] [--only NAME] [--resume DIR] [--dry-run]
    python -m benchmarks.gpu --out DIR --rows     runs the trainings of trainings.py, and nothing else
    python -m benchmarks.gpu --plan [--gpu h200]  plans these trainings; this needs no GPU and comes first
    python -m benchmarks.gpu --score DIR --rows   compares these plans with the measured trainings
    python -m benchmarks.gpu --check              runs the checks that need no GPU
    python -m benchmarks.gpu --score DIR          writes a calibration, and predicted beside measured; needs no GPU

Measurements that are done in DIR, or in a folder that --resume names, are not repeated, so the same command continues
where the last one stopped. Failed measurements are tried again after all others. A crash, a hang or a device out of
memory costs one measurement only. The results of a piece are packed into DIR/pieceN.tar.gz, which is all that must be
copied back.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import time
import warnings
import zlib
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.gpu.measurements import MEASUREMENTS, ROWS, Measurement
from meshkit.discover.probe import read_nvml

RESULT, VALUES, LOG, PACKED = "result.json", "values.json", "log.txt", "piece{}.tar.gz"
MOST_BYTES = 15_000_000  # The largest archive of a piece.
_LAST_S = 10.0  # Reserved for packing.
# Seconds of a measurement at toy size, and the factor on its time limit, because CPUs are slow and shared.
_TOY_S, _TOY_PATIENCE = 1.0, 5
_LARGEST_BYTES = 20 * MOST_BYTES  # The largest file that may be packed; reading it takes a second.


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--piece", type=int, choices=range(1, 7), help="run only this piece; without it, run all")
    parser.add_argument("--rows", action="store_true", help="run or score the trainings of one GPU")
    parser.add_argument("--plan", action="store_true", help="plan these trainings and keep the predictions")
    parser.add_argument("--gpu", default="h100_sxm", help="the GPU to plan for")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--resume", type=Path, action="append", default=[], metavar="DIR", help="folder with results")
    parser.add_argument("--dry-run", action="store_true", help="print the list with expected seconds")
    parser.add_argument("--check", action="store_true", help="run the checks that need no GPU")
    parser.add_argument("--score", type=Path, metavar="DIR", help="compare predictions with a folder of results")
    parser.add_argument("--toy", action="store_true", help="run at a size for CPUs")
    args = parser.parse_args()
    known = ROWS if args.rows or args.plan else MEASUREMENTS
    if unknown := set(args.only) - {m.name for m in known}:
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}: --dry-run lists them")
    if missing := [str(d) for d in (*args.resume, args.score) if d and not d.is_dir()]:
        parser.error(f"there is no folder {', '.join(missing)}")
    chosen = [m for m in known if args.piece in (None, m.piece) and (not args.only or m.name in args.only)]
    if args.dry_run:
        print_list(chosen)
    elif args.plan:
        from benchmarks.gpu.rows import plan_all

        plan_all([m.options["name"] for m in chosen], args.gpu, blind_of(args.gpu))
    elif args.check:
        from benchmarks.gpu.checks import run_checks

        sys.exit(run_checks())
    elif args.score:
        from benchmarks.gpu.score_rows import score_rows
        from benchmarks.gpu.scoring import score
        from meshkit.errors import ConfigError

        try:
            print(score_rows(args.score) if args.rows else score(args.score))
        except ConfigError as e:
            parser.error(str(e))
    elif args.out is None:
        parser.error("--out DIR: where do results go?")
    elif not args.toy and isinstance(read_nvml(), str):
        parser.error("there is no NVIDIA GPU here; --toy runs the list at a size for CPUs")
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        sys.exit(run_all(chosen, args.out, time.monotonic() + 60 * args.minutes - _LAST_S, args.toy, args.resume))


def blind_of(gpu: str) -> Path:
    """Return the file with the plans that were made for a GPU before it ran anything."""
    return Path(__file__).parent / f"blind-{gpu}.json"


def print_list(chosen: Sequence[Measurement]) -> None:
    """Print the measurements with their expected seconds and their questions."""
    for m in chosen:
        print(f"{m.piece}  {m.expected_s:4.0f} s  {m.name:26s} {m.question}")
    for piece in sorted({m.piece for m in chosen}):
        print(f"piece {piece}: {sum(m.expected_s for m in chosen if m.piece == piece):.0f} s")


def run_all(chosen: Sequence[Measurement], out: Path, deadline: float, toy: bool, earlier: Sequence[Path] = ()) -> int:
    """Run the measurements that are not done and still fit into the time, the untried first and then the failed ones.

    All modules are imported here, once. Each measurement runs in a forked process that finds them imported and starts
    the device itself.

    Returns:
        1 if a measurement failed, else 0.
    """
    failed = 0
    found = {m.name: next((s for d in (out, *earlier) if (s := status_of(d / m.name))), None) for m in chosen}
    todo = sorted((m for m in chosen if found[m.name] != "done"), key=lambda m: found[m.name] is not None)
    for m in todo:
        with contextlib.suppress(Exception):  # The measurement's own process reports the error.
            m.load()
    try:
        for m in todo:
            left, needed = deadline - time.monotonic(), _TOY_S if toy else m.expected_s
            if left < needed:
                print(f"{m.name}: {left:.0f} s are left, and it takes {needed:.0f}", flush=True)
                continue
            print(f"{m.name} ...", end=" ", flush=True)
            result = measure(m, out, toy, min(m.limit_s * (_TOY_PATIENCE if toy else 1), left))
            print(f"{result['status']} in {result['seconds']:.0f} s", flush=True)
            failed |= result["status"] != "done"
    finally:
        print(table(out))
        for piece in sorted({m.piece for m in todo}):
            pack(out, piece)
    return failed


def status_of(folder: Path) -> str | None:
    """Return how the measurement of a folder ended; None if it has not."""
    path = folder / RESULT
    return json.loads(path.read_text(encoding="utf-8"))["status"] if path.exists() else None


def measure(m: Measurement, out: Path, toy: bool, limit_s: float) -> dict[str, Any]:
    """Run a measurement in a process of its own, kill the process at the limit, and return what it found until then."""
    folder = out / m.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began, status = time.monotonic(), "interrupted"
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(m, folder, toy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of forks, but no device or jax thread has started here.
        process.start()
    try:
        process.join(limit_s)
        code = process.exitcode
        if code is None:
            status = f"stopped after {limit_s:.0f} s"
        else:
            status = "done" if code == 0 else f"failed with exit code {code}"
    finally:
        _kill(process)
        values = folder / VALUES
        found = json.loads(values.read_text(encoding="utf-8")) if values.exists() else {}
        seconds = time.monotonic() - began
        result = {"name": m.name, "status": status, "seconds": seconds, "toy": toy}
        if status != "done":
            said = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
            result["log"] = said[-30:]
        _write(folder / RESULT, result | {"values": found})
    return result


def _in_child(m: Measurement, folder: Path, toy: bool) -> None:
    """Run a measurement, and write each part of the results to disk before the next part begins."""
    os.setsid()  # Everything that it starts ends with this session.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    found: dict[str, Any] = {}
    for part in m.run(folder, toy):
        found |= part
        _write(folder / VALUES, found)


def table(out: Path) -> str:
    """Return every number found so far, one line each."""
    lines = []
    for m in (*MEASUREMENTS, *ROWS):
        if (out / m.name / RESULT).exists():
            found = json.loads((out / m.name / RESULT).read_text(encoding="utf-8"))
            lines.append(f"{m.name}: {found['status']}, {found['seconds']:.0f} s")
            lines += [f"  {key} = {_short(value)}" for key, value in found["values"].items()]
    return "\n".join(lines)


def pack(out: Path, piece: int) -> Path:
    """Pack the files of a piece, small ones first, until the archive is full; return the archive."""
    target, total = out / PACKED.format(piece), 0
    folders = [out / m.name for m in (*MEASUREMENTS, *ROWS) if m.piece == piece]
    files = sorted((p for folder in folders for p in _kept(folder)), key=lambda p: p.stat().st_size)
    left_out = []
    with tarfile.open(target, "w:gz") as archive:
        for path in files:
            small = path.stat().st_size <= _LARGEST_BYTES
            size = len(zlib.compress(path.read_bytes(), 6)) + 1024 if small else 0
            if small and total + size <= MOST_BYTES:
                archive.add(path, path.relative_to(out))
                total += size
            else:
                left_out.append(str(path.relative_to(out)))
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB{', without ' if left_out else ''}{', '.join(left_out)}")
    return target


def _kept(folder: Path) -> list[Path]:
    """Return the files of a measurement that are worth copying: no checkpoints, and each trace only once."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return [p for p in files if "checkpoints" not in p.parts and not p.name.endswith(".trace.json.gz")]


def _kill(process: BaseProcess) -> None:
    """Kill a process and everything that it started."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):  # It has ended, or has not made its own group yet.
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    partial.replace(path)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


if __name__ == "__main__":
    main()
