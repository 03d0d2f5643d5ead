"""`python -m benchmarks.goodput`: costs of failures -> predicted goodput of drawn failures -> a soak with them.

    costs    an undisturbed run, and a soak with another seed                    -> costs.json
    predict  costs.json, seed -> the goodput that the simulator expects          -> predictions.csv
    soak     the same seed: the run itself                                       -> soaks.csv, goodput.md

Commit the predictions before a soak runs. Without an argument, all three parts run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.goodput.soak import EVERY, MEAN_S, SECONDS, Hit, Soak, ends_launcher, schedule, soak
from benchmarks.kill_matrix.cells import FAULTS
from benchmarks.kill_matrix.table import machine
from meshkit.predict.failures import Costs, Spent, play
from meshkit.runs.phases import read_attempts

SEEDS, ALONE_STEPS = (31, 32), 300
COSTS_SEED, COSTS_S = 2, 720.0
_COSTS, _PREDICTED, _SOAKS, _PAGE = "costs.json", "predictions.csv", "soaks.csv", "goodput.md"


def measure_costs(scratch: Path) -> dict[str, Any]:
    """Return the fields of `Costs`, from an undisturbed run and from a soak of COSTS_S seconds with its own seed.

    As in the soak that is predicted, some failures come before processes wait for the next attempt.
    """
    alone = soak(scratch / "alone", [], steps=ALONE_STEPS)
    assert alone.first_s is not None
    (attempt,) = read_attempts(scratch / "alone" / "run")
    seconds, saves = attempt.seconds, ALONE_STEPS // EVERY
    before_last = dict(attempt.marks)[ALONE_STEPS]["save"]  # a mark is set when a save begins
    blocked_s = before_last / (saves - 1)
    hits = soak(scratch / "other", schedule(COSTS_SEED), seconds=COSTS_S).hits
    step_s = (seconds["step"] + seconds["data"]) / ALONE_STEPS
    return {
        "step_s": step_s,
        "step_share": seconds["step"] / (seconds["step"] + seconds["data"]),
        "blocked_s": blocked_s,
        "write_s": max(0.0, seconds["save"] - before_last - blocked_s),
        "first_s": alone.first_s - step_s,
        **_costs_of_failures(hits, step_s),
        "hits": [asdict(hit) for hit in hits],
    }


def _costs_of_failures(hits: list[Hit], step_s: float) -> dict[str, dict[str, float]]:
    """Return two tables of mean times: `detection_s` by fault, and `up_s` by kind of restart.

    `up_s` is the time from the detection until the next attempt can make a step.
    """
    detection, up = defaultdict(list), defaultdict(list)
    for hit in hits:
        detection[_fault(hit.kind)].append(hit.detection_s)
        if hit.up_s is not None:
            up[_restart(hit.kind)].append(hit.up_s - step_s)
    mean = lambda found: {name: statistics.mean(values) for name, values in sorted(found.items())}
    return {"detection_s": mean(detection), "up_s": mean(up)}


def _fault(kind: str) -> str:
    fault, rank = FAULTS[kind]
    return f"{fault}, launcher" if rank is None else fault


def _restart(kind: str) -> str:
    return "launcher starts again" if ends_launcher(kind) else "same launcher"


def predict(costs: dict[str, Any], seed: int) -> Spent:
    """Return how the simulator expects the time of the soak with that seed to be spent."""
    known = Costs(
        step_s=costs["step_s"],
        blocked_s=costs["blocked_s"],
        write_s=costs["write_s"],
        detection_s=0.0,
        restart_s=0.0,
        first_s=costs["first_s"],
    )
    timed = [
        failure._replace(
            detection_s=costs["detection_s"][_fault(failure.kind)],
            up_s=costs["up_s"][_restart(failure.kind)],
            saves=FAULTS[failure.kind][0] == "term",
        )
        for failure in schedule(seed)
    ]
    return play(known, EVERY, timed, until_s=SECONDS)


def main() -> None:
    """Run the chosen parts, and write their files beside this one or into `--out`."""
    parser = argparse.ArgumentParser(prog="benchmarks.goodput", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("costs", "predict", "soak"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    chosen = parser.parse_args()
    out: Path = chosen.out
    with tempfile.TemporaryDirectory(prefix="meshkit-goodput-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        if chosen.what in (None, "costs"):
            (out / _COSTS).write_text(json.dumps(measure_costs(Path(scratch)), indent=2) + "\n")
        costs = json.loads((out / _COSTS).read_text())
        for seed in chosen.seeds:
            if chosen.what in (None, "predict"):
                _keep(out / _PREDICTED, _predicted_row(costs, seed))
            if chosen.what in (None, "soak"):
                _keep(
                    out / _SOAKS,
                    _measured_row(costs, seed, soak(Path(scratch) / f"soak{seed}", schedule(seed), seconds=SECONDS)),
                )
    if chosen.what in (None, "soak") and (out / _SOAKS).exists():
        text = _page(out)
        (out / _PAGE).write_text(text)
        print(text)


def _predicted_row(costs: dict[str, Any], seed: int) -> dict[str, Any]:
    spent = predict(costs, seed)
    share = spent.goodput * costs["step_share"]
    return {"seed": seed, "every": EVERY, "goodput": round(share, 4), "attempts": spent.attempts,
            "lost_steps": spent.lost_steps}  # fmt: skip


def _measured_row(costs: dict[str, Any], seed: int, found: Soak) -> dict[str, Any]:
    goodput, own = found.goodput, _own_costs(costs, found)
    ups = [hit.up_s for hit in found.hits if hit.up_s is not None]
    return {"seed": seed, "every": EVERY, "goodput": round(goodput.seconds["step"] / SECONDS, 4),
            "failures": len(found.hits), "lost_steps": goodput.lost_steps, "launches": found.launches,
            "skipped": found.skipped, "restart_s": round(statistics.mean(ups), 2),
            "detection_s": round(statistics.mean(hit.detection_s for hit in found.hits), 2),
            "launcher_mib": "{:.0f} to {:.0f}".format(*(b / 2**20 for b in found.launcher_bytes)),
            "left": "; ".join(found.left) or "nothing",
            "own_costs": round(predict(own, seed).goodput * own["step_share"], 4), "load": round(os.getloadavg()[1], 1),
            "seconds": json.dumps({k: round(v, 1) for k, v in asdict(goodput)["seconds"].items()})}  # fmt: skip


def _own_costs(costs: dict[str, Any], found: Soak) -> dict[str, Any]:
    """Return the costs with the soak's own times of steps, detection and restarts, where it had such failures."""
    step_s = found.step_s / costs["step_share"]
    own = _costs_of_failures(found.hits, step_s)
    first_s = costs["first_s"] if found.first_s is None else found.first_s - step_s
    each = {name: costs[name] | own[name] for name in own}
    return costs | each | {"step_s": step_s, "first_s": first_s}


def _keep(path: Path, row: dict[str, Any]) -> None:
    """Write a row into a table, in place of the row with the same seed and interval."""
    mine = (str(row["seed"]), str(row["every"]))
    rows = [r for r in _rows(path) if (r["seed"], r["every"]) != mine] + [row]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


_EXPLAINS = f"""\
2 processes x 4 CPU devices train for {SECONDS:g} s under the {len(FAULTS)} kinds of failures of the kill matrix.
Failures come at times drawn from the seed, {MEAN_S:g} s apart on average. Those that come while nothing runs have no
effect. Goodput is the share of the time that went into steps that count. The simulator takes its costs from other runs
(`costs.json`), and `predictions.csv` was written before the soak ran. "Own costs" is a later prediction with the step,
detection and restart times of the soak itself. What remains is the error of the simulator.

For seed 31 the costs came from failures that each came after a step. So a process always waited for the next attempt,
and the restarts were faster than the soak's. Since then the costs come from a soak with another seed.

The position of a failure between two checkpoints depends on every step before it. The costs of other runs cannot
predict it. With k steps between checkpoints, n failures lose k n / 2 steps, with a standard deviation of
k sqrt(n / 12): with k = {EVERY} and n = 40, 46 of 500 steps.

Each process starts a daemon that only SIGKILL ends. After the soak, "left" lists the files, processes and ports that
remain. "Launcher" is the resident memory of the launcher at the first failure, and the largest at any failure.
"""


def _page(out: Path) -> str:
    """Return the page that compares predictions with soaks."""
    predicted = {(row["seed"], row["every"]): row for row in _rows(out / _PREDICTED)}
    heads = (
        "seed",
        "checkpoint every",
        "failures",
        "predicted",
        "measured",
        "error, points",
        "own costs",
        "steps lost, predicted",
        "measured",
        "launcher, MiB",
        "left",
        "load",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in _rows(out / _SOAKS):
        expected = predicted[row["seed"], row["every"]]
        guess, found = 100 * float(expected["goodput"]), 100 * float(row["goodput"])
        cells = (
            row["seed"], row["every"], row["failures"], f"{guess:.1f} %", f"{found:.1f} %", f"{guess - found:+.1f}",
            f"{100 * float(row['own_costs']):.1f} %", expected["lost_steps"], row["lost_steps"], row["launcher_mib"],
            row["left"], row["load"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    table = "\n".join(lines)
    return f"# Goodput, predicted and measured\n\n`python -m benchmarks.goodput`: {machine()}\n\n{_EXPLAINS}\n{table}\n"


if __name__ == "__main__":
    main()
