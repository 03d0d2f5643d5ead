"""`make kill-matrix`: run every fault in every phase, and write `matrix.csv` and a page. Goes on where it stopped."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.kill_matrix.cells import CELLS, Cell, Row, baseline, run_cell
from benchmarks.kill_matrix.gang import Launch
from benchmarks.kill_matrix.table import machine, page, read_rows, write_rows

_EXPLAINS = """\
2 processes x 4 CPU devices over gloo train a perceptron of two layers for 24 steps, with a checkpoint every 4 steps.
The phases `start` and `compile` belong to a first attempt, `restore` to the checkpoint of step 8, and `step`, `save`
and `commit` to step 12. The process waits in the phase. The fault hits it once its pulse, the phase that it publishes
in shared memory, names the phase. For `commit`, process 0 waits just before the rename that completes the checkpoint.

A cell has the seconds until the last process of the gang is gone / the seconds until the next attempt's first step is
made, both from the fault, and the number of restarts. After SIGTERM, which ends the launch with exit code 75, and after
kill -9 of the launcher, the same command runs again. Each process starts a daemon that only SIGKILL ends; no daemon may
be left. An exception in the commit itself (process 0) costs that checkpoint but no restart: the run reports it and goes
on.

Part of the seconds is set by the supervisor: 1 s of grace for the other processes after a failure, 5 s after a SIGTERM
to one process; 10 s until a stopped process counts as stuck, and up to 1 s for its stack. The rest depends on the
machine. After a SIGTERM a step takes 0.3 s, and in a process that is woken for its stack 1.5 s, so that the run does
not end before the fault takes effect.
"""


def main() -> int:
    """Run the cells that have no result yet, and write the results after each cell.

    Returns:
        The exit code: 1 if a cell is not as promised, else 0.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.kill_matrix", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--only", default="", help="in an existing matrix, rerun the cells whose name has this text")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    whole, partial = chosen.out / "matrix.csv", chosen.out / "matrix.partial.csv"
    rows = {(row.fault, row.phase): row for row in read_rows(whole if chosen.only else partial)}
    wanted = [c for c in CELLS if chosen.only in c.name and (chosen.only or (c.fault, c.phase) not in rows)]
    if not wanted and chosen.only:
        parser.error(f"no cell has '{chosen.only}' in its name")
    with tempfile.TemporaryDirectory(prefix="meshkit-kill-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        alone = Path(scratch) / "alone"
        losses = baseline(alone, ("--set", "checkpoint.keep=9")) if wanted else []
        for i, cell in enumerate(wanted):
            row = run_or_say(cell, Path(scratch), alone, losses)
            rows[row.fault, row.phase] = row
            write_rows(whole if chosen.only else partial, list(rows.values()))
            print(f"{i + 1}/{len(wanted)} {cell.name}: {row.detection_s} s, {row.recovery_s} s {row.wrong}", flush=True)
    anew = f" Only the cells of '{chosen.only}', which ran last, had that load." if chosen.only else ""
    text = f"# Kill matrix\n\n`make kill-matrix`: {machine()}{anew}\n\n{_EXPLAINS}\n{page(list(rows.values()))}"
    (chosen.out / "matrix.md").write_text(text)
    if not chosen.only:
        partial.replace(whole)
    return int(any(row.wrong for row in rows.values()))


def run_or_say(cell: Cell, scratch: Path, alone: Path, losses: list[tuple[int, float]]) -> Row:
    """Run a cell in a folder of its own, and return its result. A cell that hangs also has one."""
    folder = scratch / cell.name.replace(" ", "_").replace(",", "")
    try:
        return run_cell(cell, folder, alone, losses)
    except TimeoutError as error:
        print(Launch(folder).said if (folder / "said").exists() else "", file=sys.stderr)
        return Row(cell.fault, cell.phase, float("inf"), None, 0, "", False, str(error).splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
