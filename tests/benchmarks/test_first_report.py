"""Test that `python -m benchmarks.first_report` runs the guide's program and that its page adds up."""

import ast
import re
from pathlib import Path

from benchmarks.first_report import guides_program, readmes_commands

PAGE = Path(__file__).parents[2] / "benchmarks" / "first_report.md"


def test_the_foreign_model_is_the_guides():
    program = guides_program()
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)}
    assert {"mk.shard_model", "mk.sharded_step", "mk.profile", "mk.abstract", "mk.plan"} <= called
    lines = [line for line in program.split("import meshkit as mk")[-1].splitlines() if "mk." in line]
    assert len(lines) <= 15


def test_readme_has_the_commands():
    assert [command.split()[1] for command in readmes_commands()] == ["new", "explain", "plan", "train", "plan"]


def test_the_minutes_are_the_sum_of_the_seconds():
    text = PAGE.read_text(encoding="utf-8").split("## From a clone")[0]
    rows = [(command, float(s)) for command, s in re.findall(r"^\| `(.*?)` \| ([\d.]+) \|", text, re.MULTILINE)]
    commands = [command for command, _ in rows]
    assert commands[3:-2] == readmes_commands()
    seconds = [s for _, s in rows]
    first, foreign = map(float, re.findall(r"([\d.]+) (?:minutes|to that)", text))
    at = next(i for i, command in enumerate(commands) if command.startswith("meshkit plan"))
    assert abs(sum(seconds[: at + 1]) / 60 - first) < 0.06
    assert abs((sum(seconds[:3]) + seconds[-1]) / 60 - foreign) < 0.06


def test_the_clone_is_in_the_record():
    clone = PAGE.read_text(encoding="utf-8").split("## From a clone")[1]
    assert re.search(r"\| `pip download .*`.* MB in \d+ files", clone)
    assert "| `make demo` |" in clone
