"""Run every campaign, and every reader on inputs of 1, 2 and 4 MiB; a seeded tenth unless --all is given.

`make attack` runs it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import random
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.attack import linear
from benchmarks.attack.campaigns import CAMPAIGNS, SHOWN, save_for_ever
from benchmarks.attack.harness import Outcome, run, serve

_PAGE = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- make attack -->\n", "<!-- end of make attack -->"


def main() -> int:
    """Run the attacks, print those that failed and the tables, and return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="benchmarks.attack", description=__doc__)
    parser.add_argument("--all", action="store_true", help="run every attack, not the same tenth every time")
    parser.add_argument("--only", metavar="CAMPAIGN[:NUMBER]", help="run only one campaign, `linear`, or one attack")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    parser.add_argument("--child", choices=[*CAMPAIGNS, "linear"], help=argparse.SUPPRESS)
    parser.add_argument("--saver", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    campaigns = {**CAMPAIGNS, "linear": linear.CAMPAIGN}
    if chosen.child:
        serve(campaigns[chosen.child])
        return 0
    if chosen.saver:
        save_for_ever(chosen.saver)
        return 0
    only, _, number = (chosen.only or "").partition(":")
    numbers = {}
    for name, campaign in campaigns.items():
        every = range(campaign.count)
        few = random.Random(name).sample(every, -(-campaign.count // 10)) if name != "linear" else every
        numbers[name] = sorted(every if chosen.all else few) if only in ("", name) else []
    if number:
        numbers[only] = [int(number)]
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        longest_first = sorted((n for n in numbers if numbers[n]), key=lambda n: -len(numbers[n]))
        futures = {name: pool.submit(_campaign, name, numbers[name], campaigns[name].limit_s) for name in longest_first}
        found = {name: futures[name].result() for name in campaigns if name in futures}
    failed = [(name, o) for name, outcomes in found.items() for o in outcomes if not o.held]
    for name, outcome in failed:
        print(f"FAILED {name}:{outcome.number} {outcome.name}\n    {outcome.said}\n")
    text = tables(found, time.monotonic() - began, everything=chosen.all)
    print(text)
    if chosen.write:
        page = _PAGE.read_text(encoding="utf-8")
        head, rest = page.split(_BEGIN)
        _PAGE.write_text(f"{head}{_BEGIN}{text}{_END}{rest.split(_END)[1]}", encoding="utf-8")
    return int(bool(failed))


def _campaign(name: str, numbers: list[int], limit_s: float) -> list[Outcome]:
    found = []
    # Each reader gets a process of its own, so that memory held for another reader does not count as its own.
    each = [[number] for number in numbers] if name == "linear" else [numbers]
    for outcome in (outcome for part in each for outcome in run(name, part, limit_s)):
        found.append(outcome)
        if not outcome.held or len(found) % 50 == 0:
            print(f"{name}: {len(found)} of {len(numbers)}" + ("" if outcome.held else f", {outcome.number} FAILED: "
                  f"{outcome.name}: {outcome.said[:200]}"), file=sys.stderr, flush=True)  # fmt: skip
    return found


def tables(found: dict[str, list[Outcome]], seconds: float, *, everything: bool) -> str:
    """Return the counts of the campaigns and the seconds of the readers as Markdown."""
    extent = "everything" if everything else "a tenth"
    lines = [f"{datetime.date.today()}, {extent}, {seconds / 60:.0f} minutes:\n"]
    lines += ["| attacks | tried | held | failed | outcomes | slowest | memory |", "|---|---|---|---|---|---|---|"]
    for name, outcomes in found.items():
        if name == "linear" or not outcomes:
            continue
        held = sum(o.held for o in outcomes)
        said = ", ".join(f"{n} {what}" for what, n in Counter(o.said for o in outcomes if o.held).most_common())
        slowest, memory = max(o.cpu_s for o in outcomes), max(o.memory_bytes for o in outcomes)
        lines.append(
            f"| {SHOWN[name]} | {len(outcomes)} | {held} | {len(outcomes) - held} | {said} | {slowest:.1f} s "
            f"| {memory / 2**20:.0f} MiB |"
        )
    return "\n".join(lines) + "\n" + (linear.table(found["linear"]) if found.get("linear") else "")


if __name__ == "__main__":
    sys.exit(main())
