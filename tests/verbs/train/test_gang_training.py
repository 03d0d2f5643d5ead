"""Test one process and two, and two meshes: the same examples in the same order, and losses equal to rounding."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from meshkit.cli import main
from meshkit.runs.metrics import read_metrics
from meshkit.weights.files import open_folder

ROOT = Path(__file__).parents[3]
EXPERIMENT = "configs/experiments/llama_debug_cpu.toml"
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
# With this eps an AdamW step is linear in a gradient, so the rounding of a gradient stays small.
SETS = [
    'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}',
    *("model.layers=2", "model.embed=32", "model.mlp=64", "model.heads=4", "model.kv_heads=4", "model.head_dim=8"),
    *("train.global_batch=8", "train.sequence_length=32", "train.precision=fp32", "train.evaluate_every=0"),
    *("optimizer.eps=1.0", "optimizer.learning_rate=0.1", "optimizer.warmup_steps=0", "optimizer.schedule=constant"),
    *("checkpoint.every=3", "checkpoint.keep=9", "profile.steps=", "mesh.fsdp=", "train.steps=6"),
    "profile.every=2",
    "train.loss=tests.verbs.train.ordered_loss:loss",
    'train.hooks=["tests.verbs.train.ordered_loss:called"]',
]
FOUR_BY_TWO = ["mesh.data={nvlink=2, infiniband=2}", "mesh.tensor=2"]
TWO_BY_FOUR = ["mesh.data={infiniband=2}", "mesh.tensor=4"]
EIGHT = ["mesh.data={nvlink=4, infiniband=2}", "mesh.tensor=1"]
# A loss is the mean of 256 sums over 256 logits, each behind 2 layers of 7 matmuls and the head, in fp32. Sums in
# another order differ by the root of their length (at most 256 terms), one after the other like a random walk.
TOLERANCE = np.sqrt(15) * np.sqrt(256) * 2.0**-24


def words(out, mesh):
    return [EXPERIMENT, *(w for text in (*SETS, *mesh) for w in ("--set", text)), "--out", str(out)]


def alone(out, mesh):
    assert main(["train", *words(out, mesh)]) == 0


def gang(out, mesh):
    command = ["launch", "local", "--processes", "2", "--devices", "4", *words(out, mesh)]
    done = subprocess.run([sys.executable, "-m", "meshkit", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def continued(run, folder, resume, mesh):
    """Return the folder of a copied run, resumed after its third step."""
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "checkpoints" / "6")
    resume(folder, mesh)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gang")
    alone(folder / "one", FOUR_BY_TWO)
    gang(folder / "two", FOUR_BY_TWO)
    return folder


def saved_state(run, step):
    """Return all arrays of a checkpoint as numpy's, as orbax reads them on other machines than those that saved."""
    at, handler = epath.Path(run / "checkpoints" / str(step) / "state"), ocp.PyTreeCheckpointHandler()
    tree = handler.metadata(at).tree
    item = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), tree)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    return handler.restore(at, args=ocp.args.PyTreeRestore(item=item, restore_args=how))


def calls(run):
    """Return step -> how many processes have called the hook after it."""
    return {r["step"]: r["called"] for r in read_metrics(run / "metrics.jsonl") if "called" in r}


def compare(a, b):
    first, second = read_metrics(a / "metrics.jsonl"), read_metrics(b / "metrics.jsonl")
    assert [r["step"] for r in first] == [r["step"] for r in second] == [1, 2, 3, 4, 5, 6]
    assert [r["examples"] for r in first] == [r["examples"] for r in second]
    np.testing.assert_allclose([r["loss"] for r in first], [r["loss"] for r in second], rtol=TOLERANCE)
    assert first[-1]["loss"] < first[0]["loss"]  # The loss falls, so the steps do something.


def test_a_step_that_two_processes_capture_is_read_while_they_train(runs):
    """Only the first capture is read: on a debug model reading takes more than the steps that are left are worth."""
    (seconds,) = [r["straggler_cpu_s"] for r in read_metrics(runs / "two" / "metrics.jsonl") if "straggler_cpu_s" in r]
    assert seconds > 0


def test_every_process_calls_a_hook(runs):
    assert calls(runs / "one") == {2: 1, 4: 1, 6: 1}
    assert calls(runs / "two") == {2: 2, 4: 2, 6: 2}


def test_two_processes_train_as_one(runs):
    compare(runs / "one", runs / "two")


def test_a_run_of_one_process_goes_on_with_two_on_another_mesh(runs, tmp_path):
    compare(runs / "one", continued(runs / "one", tmp_path / "moved", gang, TWO_BY_FOUR))


def test_a_run_of_two_processes_goes_on_with_one_on_another_mesh(runs, tmp_path):
    compare(runs / "one", continued(runs / "two", tmp_path / "moved", alone, EIGHT))


def test_a_gang_that_resumes_equals_one_that_was_not_interrupted_bit_for_bit(runs, tmp_path):
    resumed = continued(runs / "two", tmp_path / "resumed", gang, FOUR_BY_TWO)
    losses = [[r["loss"] for r in read_metrics(run / "metrics.jsonl")] for run in (runs / "two", resumed)]
    assert losses[0] == losses[1]
    np.testing.assert_equal(*(saved_state(run, 6) for run in (runs / "two", resumed)))
    assert calls(resumed) == calls(runs / "two")


def test_the_verbs_read_what_two_processes_saved(runs, tmp_path, capsys):
    for verb in ("list", "verify"):
        assert main(["checkpoint", verb, str(runs / "two")]) == 0
        assert capsys.readouterr().err.count("intact") == 2
    words = ["--trust", "--out", str(tmp_path / "weights"), "--step", "3"]
    assert main(["checkpoint", "export", str(runs / "two"), *words]) == 0
    written = open_folder(tmp_path / "weights")["model.embed_tokens.weight"].values[...]
    np.testing.assert_array_equal(written, saved_state(runs / "two", 3)["params"]["embedding"])
