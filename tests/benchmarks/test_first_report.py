"""What `python -m benchmarks.first_report` runs is the guide's program; its page adds up."""

import ast
import re
from pathlib import Path

from benchmarks.first_report import guides_program

PAGE = Path(__file__).parents[2] / "benchmarks" / "first_report.md"


def test_the_foreign_model_is_the_guides():
    program = guides_program()
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)}
    assert {"mk.shard_model", "mk.sharded_step", "mk.profile", "mk.abstract", "mk.plan"} <= called
    lines = [line for line in program.split("import meshkit as mk")[-1].splitlines() if "mk." in line]
    assert len(lines) <= 15


def test_the_minutes_are_the_sum_of_the_seconds():
    text = PAGE.read_text(encoding="utf-8")
    seconds = [float(s) for s in re.findall(r"\| ([\d.]+) \|", text)]
    first, foreign = map(float, re.findall(r"([\d.]+) (?:minutes|to that)", text))
    assert abs(sum(seconds[:5]) / 60 - first) < 0.06
    assert abs((sum(seconds[:3]) + seconds[-1]) / 60 - foreign) < 0.06
