"""Test `checkpoint.initial`: a new run starts from the weights of a folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import meshkit as mk
from meshkit.compile.attached import CompiledStep
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step, resolve
from meshkit.verbs.checkpoint.store import CheckpointStore
from meshkit.verbs.train import trainer
from meshkit.weights import files
from meshkit.weights.files import write_weights
from tests.weights.weight_files import (
    assert_same_bits,
)

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
TINY = [
    *("model.layers=1", "model.embed=16", "model.mlp=24", "model.heads=4", "model.kv_heads=2", "model.head_dim=8"),
    *("train.global_batch=8", "train.sequence_length=16", "train.steps=1", "profile.steps="),
]


def test_a_new_run_starts_from_the_weights_and_a_resumed_one_does_not(tmp_path, monkeypatch):
    begun = []

    def step(state, batch):
        begun.append(state)
        return state, {"loss": jax.numpy.ones(())}

    monkeypatch.setattr(trainer, "compile_step", lambda *_: CompiledStep(step, {}, 0.0))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)

    def run(out):
        begun.clear()
        trainer.train(spec, tmp_path / out, console=Console(quiet=True))
        return begun[0]

    folder = tmp_path / "weights"
    sets = [*TINY, "train.steps=2", f"data.source={tmp_path / 'corpus'}", f"checkpoint.initial={folder}"]
    spec = load(EXPERIMENT, sets)
    layout, program = files.layout_of(resolve(spec)), make_train_step(spec, mk.build_mesh(spec.mesh, spec.cluster))
    wanted = jax.tree.map(
        lambda x: jax.device_put(np.full(x.shape, 0.5, np.float32), x.sharding), program.abstract_state.params
    )
    write_weights(wanted, folder, layout)
    first = run("new")
    assert_same_bits(first.params, wanted)
    assert jax.tree.map(lambda x: x.sharding, first.params) == jax.tree.map(lambda x: x.sharding, wanted)

    later = replace(first, step=first.step + 1, params=jax.tree.map(lambda x: x + 1, first.params))
    store = CheckpointStore(tmp_path / "resumed" / "checkpoints")
    store.save(later)
    store.close()
    os.replace(folder, tmp_path / "gone")
    assert_same_bits(run("resumed").params, later.params)
    with pytest.raises(ConfigError, match="there is no folder"):
        run("without")
    assert not (tmp_path / "without" / "experiment.toml").exists()  # A corrected experiment may use the folder.


def test_only_parameters_depend_on_the_seed():
    """`first_state` relies on it: optimizer state, and all but the random stream, are the same for any weights."""
    states = []
    for seed in (0, 1):
        spec = load(EXPERIMENT.with_name("mlp.toml"), ["cluster=cpu8", "mesh.fsdp=8", f"train.seed={seed}"])
        states.append(make_train_step(spec, mk.build_mesh(spec.mesh, spec.cluster)).init())
    a, b = ((s.step, s.opt_state, s.variables) for s in states)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_a_model_without_a_layout_says_so():
    spec = load(EXPERIMENT.with_name("mlp.toml"), ["cluster=cpu8", "mesh.fsdp=8", "checkpoint.initial=/nowhere"])
    program = make_train_step(spec, mk.build_mesh(spec.mesh, spec.cluster))
    with pytest.raises(ConfigError, match=r"MLP has no method hf_layout\(\)"):
        files.first_state(program, spec.checkpoint.initial)
