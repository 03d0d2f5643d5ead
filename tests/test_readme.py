"""Test that the README's plan, library example and experiment file are correct."""

import re
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.config.experiment import load
from tests.releases import needs_pinned_jaxlib

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@needs_pinned_jaxlib  # Another XLA makes another program.
@pytest.mark.deviceless
@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_plan_shown_is_the_plan_printed(page, capsys):
    shown = next(
        b for b in re.findall(r"```\w+\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if "llama3_8b, pred" in b
    )
    assert main(["plan", str(ROOT / "configs/experiments/llama3_8b.toml")]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in shown.splitlines() if line and line != "..." and not line.startswith(("$", "planned in"))]
    assert [line for line in lines if line not in printed] == []


def test_the_explanation_shown_is_the_one_printed(capsys):
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    shown = next(b for b in re.findall(r"```text\n(.*?)```", tutorial, re.DOTALL) if "nothing looks wrong" in b)
    assert main(["explain", str(ROOT / "configs/experiments/llama_debug_cpu.toml")]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


@pytest.mark.deviceless
def test_the_library_example_runs(capsys):
    (code,) = blocks("python")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("('tensor',) nvlink all-reduce 33554432 ")


def test_the_experiment_loads(tmp_path):
    file = tmp_path / "e.toml"
    file.write_text(blocks("toml")[0])
    assert load(file).cluster.num_gpus == 16


def test_the_error_shown_is_the_error_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = next(b for b in blocks("text") if b.startswith("meshkit: axis"))
    assert main(["explain", "configs/experiments/llama3_8b.toml", "--set", "mesh.tensor=16"]) == 2
    printed = capsys.readouterr().err.splitlines()
    lines = shown.splitlines()
    assert (lines[0], lines[2]) == (printed[0], printed[2])
