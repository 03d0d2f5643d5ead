"""Test that a run folder loses nothing: bad numbers, bad files and changed recipes stop a run before they cost one."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from meshkit.config.experiment import load
from meshkit.errors import ConfigError, RunError, TraceError
from meshkit.runs.metrics import read_metrics
from meshkit.verbs.train import trainer

pytestmark = pytest.mark.usefixtures("programs_kept")
EXPERIMENT = Path(__file__).parents[3] / "configs" / "experiments" / "mlp.toml"
CPU = ["cluster=cpu8", "mesh.fsdp=8", "train.steps=2", "checkpoint.every=1", "train.evaluate_every=0"]


def run(out, *overrides, console=None):
    return trainer.train(load(EXPERIMENT, [*CPU, *overrides]), out, console=console or Console(quiet=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run(folder := tmp_path_factory.mktemp("trained"))
    return folder


@pytest.fixture
def finished(tmp_path, trained):
    return shutil.copytree(trained, tmp_path / "run")


def checkpoints(folder):
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoints(finished):
    before = checkpoints(finished)
    with pytest.raises(RunError, match=r"at step 4.*\n.*\n.*last good checkpoint is kept"):
        run(finished, "train.steps=6", "optimizer.learning_rate=1e38", "checkpoint.every=10")
    assert checkpoints(finished) == before
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON")) for line in lines)


def test_when_no_checkpoint_is_intact_every_attempt_is_refused_and_nothing_is_lost(finished):
    for manifest in (finished / "checkpoints").glob("*/meshkit.json"):
        manifest.write_text('{"files": 5}')
    metrics = (finished / "metrics.jsonl").read_text()
    before = checkpoints(finished)
    for _ in range(2):
        with (
            pytest.warns(UserWarning, match="is corrupt"),
            pytest.raises(TraceError, match="none of the 2 checkpoints"),
        ):
            run(finished, "train.steps=3")
    assert (finished / "metrics.jsonl").read_text() == metrics
    assert checkpoints(finished) == before


def test_a_step_without_tokens_is_counted_in_examples(trained, tmp_path):
    (record, _) = read_metrics(trained / "metrics.jsonl")
    assert record["examples_per_s"] == pytest.approx(64 / record["step_time_s"])
    assert "tokens_per_s" not in record
    console = Console(width=200, file=io.StringIO())
    assert run(tmp_path / "run", console=console).tokens_per_s is None
    assert "examples/s" in console.file.getvalue()
    assert "tokens" not in console.file.getvalue()


def test_what_the_order_of_the_data_depends_on_cannot_change(finished):
    text = (finished / "experiment.toml").read_text()
    for change in ("train.seed=9", "data.seed=3", "train.global_batch=128"):
        with pytest.raises(ConfigError, match=change.split("=")[0]):
            run(finished, change)
    assert (finished / "experiment.toml").read_text() == text


def test_other_changes_of_the_recipe_are_told(finished, tmp_path):
    with open(tmp_path / "out.txt", "w") as log:
        run(finished, "train.steps=3", "optimizer.learning_rate=0.5", console=Console(file=log, width=200))
    told = (tmp_path / "out.txt").read_text()
    assert "optimizer.learning_rate was" in told
    assert "is now 0.5" in told


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_run_that_is_extended_is_told_which_learning_rates_change(tmp_path, schedule):
    sets = ["train.steps=4", "optimizer.warmup_steps=1", "optimizer.learning_rate=1e-3"]
    sets.append(f'optimizer.schedule="{schedule}"')
    run(tmp_path, *sets)
    console = Console(width=300, file=io.StringIO())
    run(tmp_path, *sets, "train.steps=6", console=console)
    rates = [f"{record['learning_rate']:.3g}" for record in read_metrics(tmp_path / "metrics.jsonl")]
    told = console.file.getvalue()
    assert "train.steps was 4 in this run and is now 6" in told
    said = f"the {schedule} now ends at step 6: step 5 has a learning rate of {rates[4]}, after {rates[3]} at step 4; "
    assert (said in told) == (schedule != "constant")
    assert ("and other rates from step 2 on" in told) == (schedule != "constant")
    assert schedule == "constant" or float(rates[4]) > float(rates[3])  # The rate rises again.


@pytest.mark.parametrize("content", [b"", b"not = = toml", b"\xff\xfe"])
def test_a_damaged_experiment_file_of_a_run_is_an_error_with_a_way_out(finished, content):
    (finished / "experiment.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"another --out"):
        run(finished, "train.steps=3")


def test_a_bad_line_of_the_metrics_costs_that_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n{"st\xff\n5\n{"a": 1}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_run_that_fails_early_leaves_the_experiment_of_the_run_alone(finished):
    text = (finished / "experiment.toml").read_text()
    with pytest.raises(ConfigError, match="no GPU is attached"):
        run(finished, "cluster=dgx_h100", "train.steps=3")
    assert (finished / "experiment.toml").read_text() == text
