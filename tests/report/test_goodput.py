"""Test goodput in the report: the parts add up in report.json, on the terminal and on the page."""

import json
import math

import pytest
from rich.console import Console

from meshkit.report.folder import read_report, write_folder
from meshkit.report.goodput import goodput_part
from meshkit.report.schema import Report
from meshkit.report.views.report import render
from meshkit.report.views.words import goodput_summary
from meshkit.runs.phases import Goodput
from meshkit.verbs.train.cli import training_summary

SECONDS = {"start": 20.0, "compile": 60.0, "restore": 8.0, "init": 12.0, "data": 3.0, "step": 3000.0, "evaluate": 40.0,
           "save": 30.0, "end": 1.5, "lost": 200.0, "restart": 90.0, "a phase of a later version": 0.5}  # fmt: skip


@pytest.fixture
def run(report, tmp_path):
    """Return a run folder with the records of two attempts and a report."""
    (tmp_path / "goodput").mkdir()
    first = {"began": 1000.0, "resumed_step": 0, "last_step": 12, "outcome": None}
    first |= {"seconds": {"start": 5.0, "compile": 10.0, "step": 60.0, "save": 1.0, "data": 2.0}}
    first |= {"marks": [[10, {"step": 50.0, "data": 1.0}]]}
    second = {"began": 1090.0, "resumed_step": 10, "last_step": 20, "outcome": "done"}
    second |= {"seconds": {"start": 5.0, "compile": 1.0, "restore": 2.0, "step": 50.0, "end": 0.5}, "marks": []}
    for record in (first, second):
        (tmp_path / "goodput" / f"{record['began']:.3f}.json").write_text(json.dumps(record))
    write_folder(report, tmp_path)
    return tmp_path


def parts_of(found):
    return {k: v for k, v in found.items() if k.endswith("_s") and k != "wall_s"}


def test_parts_add_up_exactly():
    part = goodput_part(Goodput(math.fsum(SECONDS.values()), SECONDS, 3, 12)).model_dump()
    assert math.fsum(parts_of(part).values()) == part["wall_s"] == math.fsum(SECONDS.values())
    assert part["other_s"] == 2.0
    assert part["share"] == SECONDS["step"] / part["wall_s"]


def test_report_json_has_it(run):
    found = json.loads((run / "report.json").read_text())["goodput"]
    assert found["attempts"] == 2
    assert found["lost_steps"] == 2
    assert (found["step_s"], found["data_wait_s"], found["lost_s"], found["restart_s"]) == (100, 1, 11, 12)
    assert math.fsum(parts_of(found).values()) == found["wall_s"] == 1090 + 58.5 - 1000
    assert read_report(run).goodput.share == 100 / 148.5


def test_the_json_schema_has_it():
    schema = Report.model_json_schema(mode="serialization")
    assert "goodput" in schema["required"]
    assert {"share", "wall_s", "lost_s", "restart_s"} <= set(schema["$defs"]["GoodputPart"]["required"])


def test_the_terminal_shows_every_part(run):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(read_report(run)))
    text = console.export_text()
    console.file.close()
    block = text.split("goodput of the run")[1]
    for words in ("steps that count", "waiting for data", "blocked by checkpoints", "compile", "restore", "lost steps"):
        assert words in block
    assert "67.3 % of 2m 28s, 2 attempts, 2 steps made again" in block
    assert max(map(len, text.splitlines())) <= 80


def test_the_page_has_the_panel(run):
    text = (run / "report.html").read_text()
    assert "Goodput of the run" in text
    assert 'data-key="goodput.lost_s" data-value="11.0"' in text


def test_a_report_without_a_run_has_none(report, tmp_path):
    assert write_folder(report, tmp_path).goodput is None
    assert "Goodput" not in (tmp_path / "report.html").read_text()


def test_the_last_lines_of_a_training_say_every_part():
    goodput = Goodput(math.fsum(SECONDS.values()), SECONDS, 3, 12)
    text = goodput_summary(goodput)
    assert text.startswith("goodput 86.6 % of 57m 45s, 3 attempts, 12 steps made again: steps that count 50m 00s, ")
    assert "lost steps 3m 20s" in text
    assert goodput_summary(None) == ""

    class Result:
        loss, evaluation_loss, unigram_entropy_nats = 1.0, None, None
        step, wall_s, folder = 20, 58.0, "runs/x"

    Result.goodput = goodput
    first, second = training_summary(Result()).split("\n")
    assert first == text
    assert second.startswith("step 20 after 58 s: loss 1.000")
