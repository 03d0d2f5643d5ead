"""Test functions that a training calls every so many steps: when, with what, and how they fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

import meshkit as mk
from meshkit.cli import main
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.runs.metrics import read_metrics
from meshkit.verbs.train import trainer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guides" / "experiment-file.md").read_text(encoding="utf-8")
MLP = (ROOT / "configs" / "experiments" / "mlp.toml").read_text(encoding="utf-8")
SETS = ["cluster=cpu8", "mesh.fsdp=8", "train.evaluate_every=0", "train.steps=7"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a module beside an experiment file and returns a loader of the experiment."""
    file = tmp_path / "mine.toml"
    file.write_text(MLP)
    monkeypatch.chdir(ROOT)

    def write(module: str, source: str):
        (tmp_path / f"{module}.py").write_text(source)
        return lambda *sets: load(file, [*SETS, *sets])

    return write


def run(spec, out, **options):
    return trainer.train(spec, out, console=Console(quiet=True), **options)


def called_at(name: str, out: Path) -> list[int]:
    return [record["step"] for record in read_metrics(out / "metrics.jsonl") if name in record]


def test_the_hook_of_the_guide_is_called_after_the_same_steps_in_a_run_that_resumes(own, tmp_path):
    source = re.search(r"(?ms)^```python\n(# my_hooks\.py\n.*?)^```$", PAGE)
    assert source
    experiment = own("my_hooks", source[1])
    sets = ['train.hooks=["my_hooks:watched"]', "checkpoint.every=3", "checkpoint.keep=9"]
    run(experiment(*sets), tmp_path / "whole")
    assert called_at("loss_in_bits", tmp_path / "whole") == [2, 4, 6, 7]
    run(experiment(*sets, "train.steps=3", "optimizer.schedule=constant"), tmp_path / "resumed")
    assert called_at("loss_in_bits", tmp_path / "resumed") == [2, 3]
    run(experiment(*sets), tmp_path / "resumed")
    assert called_at("loss_in_bits", tmp_path / "resumed") == [2, 3, 4, 6, 7]
    for record in read_metrics(tmp_path / "whole" / "metrics.jsonl"):
        if "loss_in_bits" in record:
            assert record["loss_in_bits"] == record["loss"] / 0.693147


def test_a_hook_that_reads_no_number_is_called_before_anybody_has(own, tmp_path):
    """The devices may still be busy: training does not wait for them because there is a hook."""
    seen = []

    def look(step):
        seen.append((step.number, step.numbers is None, int(step.state.step), sorted(step.arrays)))

    run(own("none", "")(), tmp_path / "run", hooks=[mk.Hook(look, every=3)])
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(number, unread, step) for number, unread, step, _ in seen] == [(3, True, 3), (6, True, 6)]
    assert all(set(names) <= set(records[2]) for *_, names in seen)


def test_a_hook_comes_before_the_checkpoint_of_its_step(own, tmp_path):
    saved = []

    def look(step):
        saved.append([path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")])

    run(own("none", "")("train.steps=2", "checkpoint.every=2"), tmp_path / "run", hooks=[mk.Hook(look, every=2)])
    assert saved == [[]]
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_a_hook_can_end_a_run_which_saves_its_last_step(own, tmp_path):
    hook = mk.Hook(lambda step: step.stop() if step.metrics["loss"] < 1e9 else None, every=2)
    result = run(own("none", "")("checkpoint.every=100", "train.log_every=3"), tmp_path / "run", hooks=[hook])
    assert result.step == 2
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [2]
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def test_what_a_hook_of_the_file_raises_is_one_message_at_its_key(own, tmp_path, capsys):
    own("failing", "import meshkit as mk\ndef fail(step):\n    {}['here']\nhook = mk.Hook(fail, every=2)\n")
    words = [word for text in (*SETS, 'train.hooks=["failing:hook"]') for word in ("--set", text)]
    assert main(["train", str(tmp_path / "mine.toml"), *words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "meshkit: failing:hook, called after step 2, raised KeyError: 'here' (failing.py:3).\n  at " in said
    assert "train.hooks" in said
    assert "Traceback" not in said


def test_what_a_hook_of_the_caller_raises_is_passed_on(own, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(own("none", "")(), tmp_path / "run", hooks=[mk.Hook(lambda step: 1 // 0)])


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        (
            "bare",
            "def hook(step): pass",
            "bare:hook is a function, not a Hook.*\n.*train.hooks.*\n.*as the value",
        ),
        ("shell", "import os, meshkit\nhook = meshkit.Hook(os.system)", "shell:hook belongs to Python itself"),
        ("number", "import meshkit\nhook = meshkit.Hook(3)", "the fn of a Hook is an int, not a function"),
        ("half", "import meshkit\nhook = meshkit.Hook(print, every=0.5)", "the every of a Hook is 0.5, not a number"),
        (
            "taken",
            "import meshkit\nhook = meshkit.Hook(lambda step: step.add(loss=1))",
            "a step's record already has a key",
        ),
    ],
)
def test_a_hook_that_is_wrong(own, tmp_path, module, source, message):
    with pytest.raises(ConfigError, match=message):
        run(own(module, source)(f'train.hooks=["{module}:hook"]'), tmp_path / "run")
