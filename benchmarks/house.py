"""Measure how much of meshkit a reader has to carry: lines, words, and the files that `plan` and `train` walk through.

    python -m benchmarks.house [--before CHECKOUT] [--suite]

prints a table, one column for this checkout and one for CHECKOUT (`git worktree add --detach DIR COMMIT` makes one).
`--suite` also runs the default tests of each and prints their seconds, which hold on a quiet machine only.

    python -m benchmarks.house walk plan configs/experiments/llama3_8b.toml --no-cache --out runs/plan

prints the files that one command enters, in child processes too. A file counts once one of its functions is called;
what runs only while a module is imported (decorators, tables) does not. A visit is a run of functions of one file, in
the order in which functions are first called; a climb is a visit to a higher row of the import contract than the one
before it, where a reader has to go back up.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WALKS = {
    "plan": ("plan", "configs/experiments/llama3_8b.toml", "--no-cache"),
    "train": ("train", "configs/experiments/llama_debug_cpu.toml", "--set", "train.steps=40"),
}
# Python imports this in every process that has its folder on PYTHONPATH. It notes the first call of every function.
_RECORDER = """
import os, sys, time
_seen, _folder, _package = set(), os.environ["WALK_FOLDER"], os.environ["WALK_PACKAGE"]
def _importing():
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(_package) and "__main__" not in code.co_filename:
            return frame.f_globals["__name__"] != "__main__"
        frame = frame.f_back
    return False
def _start(code, offset):
    if code.co_flags & 1 and code.co_filename.startswith(_package) and code not in _seen:
        if _importing():
            return None
        _seen.add(code)
        with open(os.path.join(_folder, str(os.getpid())), "a") as file:
            file.write(f"{time.monotonic_ns()} {code.co_filename}\\n")
    return sys.monitoring.DISABLE
sys.monitoring.use_tool_id(4, "walk")
sys.monitoring.register_callback(4, sys.monitoring.events.PY_START, _start)
sys.monitoring.set_events(4, sys.monitoring.events.PY_START)
"""


def walk(arguments: Sequence[str], checkout: Path) -> list[str]:
    """Return the files below `checkout`/meshkit that `meshkit ARGUMENTS` visits, in order.

    A file appears again each time the walk comes back to it.
    """
    package = checkout / "meshkit"
    with tempfile.TemporaryDirectory() as folder:
        site, found = Path(folder, "site"), Path(folder, "found")
        site.mkdir()
        found.mkdir()
        (site / "sitecustomize.py").write_text(_RECORDER, encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(site), str(checkout), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "WALK_FOLDER": str(found), "WALK_PACKAGE": f"{package}{os.sep}"}
        command = [sys.executable, "-m", "meshkit", *arguments]
        done = subprocess.run(command, env=env, cwd=checkout, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)
        lines = [line for file in found.iterdir() for line in file.read_text(encoding="utf-8").splitlines()]
    calls = sorted((int(when), file) for when, _, file in (line.partition(" ") for line in lines))
    return [str(Path(file).relative_to(package)) for file, _ in groupby(file for _, file in calls)]


def climbs(visits: Sequence[str], checkout: Path) -> int:
    """Return how often a walk goes from a row of the import contract to a higher one."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    row_of = {name: i for i, row in enumerate(contract["layers"]) for name in re.split(r" [:|] ", row)}
    rows = [row_of.get(Path(file).parts[0].removesuffix(".py"), 0) for file in visits]
    return sum(after < before for before, after in pairwise(rows))


def measure(checkout: Path, suite: bool) -> dict[str, int]:
    """Return the figures of a checkout by name.

    Args:
        checkout: root of a work tree.
        suite: also run the default tests, as `make test` does.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True)
    files = [checkout / name for name in listed.stdout.splitlines()]

    def total(folder: str, suffix: str, count: Callable[[str], int]) -> int:
        inside = [f for f in files if f.is_relative_to(checkout / folder) and f.suffix == suffix and f.is_file()]
        return sum(count(f.read_text(encoding="utf-8")) for f in inside)

    found = {f"lines of {name}": total(name, ".py", lambda text: text.count("\n")) for name in _FOLDERS}
    found["words of README"] = total("README.md", ".md", lambda text: len(text.split()))
    found["words of docs"] = total("docs", ".md", lambda text: len(text.split()))
    found["words of benchmarks"] = total("benchmarks", ".md", lambda text: len(text.split()))
    for name, arguments in WALKS.items():
        with tempfile.TemporaryDirectory() as out:
            visits = walk([*arguments, "--out", f"{out}/run"], checkout)
        counts = Counter(visits)
        found[f"{name}: files"] = len(counts)
        found[f"{name}: climbs"] = climbs(visits, checkout)
        for file in ("config/user_code.py", "step/state.py"):
            found[f"{name}: visits of {file}"] = counts[file]
    if suite:
        found["suite: seconds"] = _suite_seconds(checkout)
    return found


_FOLDERS = ("meshkit", "models", "benchmarks", "tests")


def _suite_seconds(checkout: Path) -> int:
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", "auto", "--maxprocesses", "4"]
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    subprocess.run([*command, "--dist", "loadfile"], cwd=checkout, env=env, check=True, stdout=subprocess.DEVNULL)
    return round(time.perf_counter() - start)


def main(arguments: Sequence[str]) -> None:
    """Print the table, or the files of one walk."""
    if arguments[:1] == ["walk"]:
        visits = walk(arguments[1:], ROOT)
        files = sorted(set(visits))
        print(*files, f"{len(files)} files, {climbs(visits, ROOT)} climbs", sep="\n")
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house")
    parser.add_argument("--before", type=Path, help="root of another checkout, for a second column")
    parser.add_argument("--suite", action="store_true", help="run the default tests of each, too")
    options = parser.parse_args(arguments)
    checkouts = [options.before.resolve(), ROOT] if options.before else [ROOT]
    columns = [measure(checkout, options.suite) for checkout in checkouts]
    print("| | before | now |" if options.before else "| | now |", "|" + "---|" * (1 + len(columns)), sep="\n")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(f"{column[name]:,}" for column in columns) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
