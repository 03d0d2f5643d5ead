"""Test training end to end on a tiny Llama: learning, resuming, signals, and the contents of a run folder."""

from __future__ import annotations

import io
import os
import signal
import time
from dataclasses import replace

import chex
import pytest
from jax.errors import JaxRuntimeError
from rich.console import Console

import meshkit as mk
from meshkit.cli import main
from meshkit.compile.attached import CompiledStep
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.runs.metrics import read_metrics
from meshkit.step import train_step
from meshkit.verbs.train import trainer
from tests.verbs.tiny_llama import EXPERIMENT, TINY

pytestmark = pytest.mark.usefixtures("programs_kept")


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return tmp_path / "corpus"


def run(corpus, out, *overrides, **options):
    spec = load(EXPERIMENT, [*TINY, f"data.source={corpus}", *overrides])
    return trainer.train(spec, out, console=Console(quiet=True), **options)


@pytest.fixture
def traced_once(monkeypatch):
    """Make a second trace of the step or of the evaluation, which is a silent recompile, an error."""
    chex.clear_trace_counter()
    for name in ("train", "evaluate"):
        traced = chex.assert_max_traces(getattr(train_step.StepFunctions, name), 1)
        monkeypatch.setattr(train_step.StepFunctions, name, traced)


def losses(out) -> list[float]:
    return [r["loss"] for r in read_metrics(out / "metrics.jsonl")]


DELAYED = ['train.precision="fp8"', 'train.fp8_scaling="delayed"']


@pytest.mark.parametrize("precision", [[], pytest.param(DELAYED, marks=pytest.mark.slow)])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(corpus, tmp_path, precision):
    """Dropout draws masks by the number of the step, and delayed scales depend on the steps before."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    every = ["checkpoint.every=3", *precision]
    whole = run(corpus, straight, "train.steps=7", *every)
    run(corpus, resumed, "train.steps=3", *every)
    result = run(corpus, resumed, "train.steps=7", *every)
    assert result.resumed_step == 3
    assert losses(resumed) == losses(straight)
    assert (result.step, result.loss) == (7, whole.loss)
    assert whole.loss < losses(straight)[0]

    again = run(corpus, resumed, "train.steps=7", *every)  # Nothing is left to do.
    assert (again.step, again.resumed_step, again.loss) == (7, 7, whole.loss)
    assert len(losses(resumed)) == 7


def test_a_run_folder_holds_what_the_contract_says(corpus, tmp_path, traced_once):
    out = tmp_path / "run"
    result = run(corpus, out, "train.steps=4", "train.evaluate_every=2", "profile.steps=[2,3]")
    assert load(out / "experiment.toml").train.steps == 4
    records = read_metrics(out / "metrics.jsonl")
    for record in records:  # These counters need no trace: they say where a step's time went on the host.
        parts = (record["data_wait_s"], record["device_wait_s"], record["host_s"])
        assert min(parts) >= 0
        assert record["device_wait_s"] <= record["step_time_s"]
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert {"loss", "step_time_s", "tokens_per_s", "mfu", "grad_norm", "learning_rate", "weight"} <= set(records[0])
    assert records[0]["weight"] == 8 * 32
    assert records[0]["mfu"] is None  # A virtual CPU device has no peak.
    assert [r["step"] for r in records if "evaluation_loss" in r] == [2, 4]
    assert result.evaluation_loss == records[-1]["evaluation_loss"]
    assert (out / "trace" / "capture-p0.json").is_file()
    assert result.to_dict()["schema"] == "meshkit.train/1"


def test_a_captured_step_is_printed_once_and_stands_in_every_line_from_then_on(corpus, tmp_path):
    log, printed = tmp_path / "run" / "metrics.jsonl", io.StringIO()
    known = lambda: [r["captured_step"] for r in read_metrics(log) if "captured_step" in r]

    def watch(step):
        time.sleep(0.05)
        if len(known()) == 2:
            step.stop()

    spec = load(EXPERIMENT, [*TINY, f"data.source={corpus}", "train.steps=900", "train.log_every=3", "profile.every=5"])
    trainer.train(spec, tmp_path / "run", hooks=[mk.Hook(watch, every=3)], console=Console(file=printed, width=120))
    assert known()[:2] == [5, 5]
    last = read_metrics(log)[-1]
    late = ""
    if "late_device" in last:
        late = f", device {last['late_device']} is late by {last['late_share']:.1%} of the step"
    line = f"captured step 5: {last['exposed_share']:.1%} of the step is exposed communication{late}".replace("%", " %")
    assert printed.getvalue().count("captured step") == 1
    assert line in printed.getvalue().splitlines()


@pytest.mark.parametrize(
    ("number", "error", "every", "saved"),
    [
        (signal.SIGTERM, trainer.Preempted, 0, True),
        (signal.SIGINT, KeyboardInterrupt, 100, True),
        (signal.SIGINT, KeyboardInterrupt, 0, False),
    ],
)
def test_a_signal_stops_after_the_step(corpus, tmp_path, number, error, every, saved):
    def send(step):
        if step.number == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(error) as caught:
        run(corpus, tmp_path / "run", "train.steps=9", f"checkpoint.every={every}", hooks=[mk.Hook(send)])
    done = losses(tmp_path / "run")
    assert len(done) < 9
    assert ([p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [str(len(done))]) == saved
    if number == signal.SIGTERM:
        assert caught.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_folder_of_another_model_is_refused(corpus, tmp_path):
    run(corpus, tmp_path, "train.steps=1")
    with pytest.raises(ConfigError, match=r"this run has model.mlp = 64, but the experiment now says 128"):
        run(corpus, tmp_path, "train.steps=1", "model.mlp=128")


class _Lost:
    """An array of a step that failed on the device: whoever reads it hears why, as jax has it."""

    def is_ready(self):
        return True

    def __array__(self, *_, **__):
        raise JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 389.77GiB with allocator GPU_0_bfc on device 0."
            " [executable_name='jit_train_step'] [tf-allocator-allocation-error='']"
        )

    block_until_ready = __float__ = __array__


@pytest.mark.parametrize("where", ["metrics", "evaluation", "capture", "checkpoint"])
def test_a_step_that_does_not_fit_ends_with_a_remedy_wherever_jax_says_so(corpus, tmp_path, monkeypatch, capsys, where):
    def step(state, batch):
        return state, {"loss": _Lost() if where == "metrics" else 1.0}

    def lost(*_):
        return _Lost().block_until_ready()

    monkeypatch.setattr(trainer, "compile_step", lambda *_: CompiledStep(step, {}, 0.0))
    if where == "evaluation":
        make = lambda *args: replace(train_step.build_train_step(*args), evaluate=lost)
        monkeypatch.setattr(trainer, "build_train_step", make)
    if where == "capture":
        monkeypatch.setattr(trainer, "planned_capture", lost)
    if where == "checkpoint":
        monkeypatch.setattr(trainer.CheckpointStore, "save", lost)
    sets = [*TINY, f"data.source={corpus}", "profile.steps=", "train.steps=2", "train.evaluate_every=1"]
    sets += ["checkpoint.every=1"]
    options = [word for value in sets for word in ("--set", value)]
    assert main(["train", str(EXPERIMENT), *options, "--out", str(tmp_path / "run")]) == 4
    said = capsys.readouterr().err
    assert "too little memory for jit_train_step, which asked for 390 GiB at once" in said
    assert "\n  try `meshkit plan" in said
    assert "Traceback" not in said
