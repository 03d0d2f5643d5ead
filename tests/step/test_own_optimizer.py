"""Test `optimizer.class`: where it is found, its state, sharded like parameters, and steps equal to one device's."""

import json
import sys

import jax
import numpy as np
import pytest

import meshkit as mk
from meshkit.cli import main
from meshkit.config.experiment import load
from meshkit.planning.resolved import resolve
from meshkit.step.train_step import make_optimizer

OWN = """
import optax
from flax import nnx

def mine(learning_rate, decay: float, *, nesterov=False) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=decay, nesterov=nesterov)

def unsaid(learning_rate):
    return optax.sgd(learning_rate)

def model(learning_rate) -> nnx.Module: ...

def rateless() -> optax.GradientTransformation: ...

def raises(learning_rate) -> optax.GradientTransformation:
    raise RuntimeError("no memory of that")
"""
ADAFACTOR = ["optimizer.class=optax:adafactor", "optimizer.options={min_dim_size_to_factor=16, momentum=0.9}"]


def test_adafactor_trains_sharded_as_on_one_device(tmp_path, capsys):
    found = []
    for name, mesh in (("eight", "{fsdp=8}"), ("one", "{fsdp=1}")):
        words = [*ADAFACTOR, "train.steps=3", f"mesh={mesh}", "optimizer.learning_rate=1e-2"]
        words += [] if name == "eight" else ['cluster={name="cpu8", gpus_used_per_domain=1}']
        sets = [part for word in words for part in ("--set", word)]
        assert main(["train", "mlp", *sets, "--out", str(tmp_path / name)]) == 0, capsys.readouterr().err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append([json.loads(line)["loss"] for line in lines])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3)
    again = load(tmp_path / "eight" / "experiment.toml")
    assert again.optimizer.class_path == "optax:adafactor"
    assert again.optimizer.options == {"min_dim_size_to_factor": 16, "momentum": 0.9}


def test_rows_and_columns_are_cut_as_the_parameter_is():
    experiment = load("mlp", ["mesh={fsdp=4, tensor=2}", 'rules.preset="fsdp_tensor"', *ADAFACTOR])
    program = mk.make_train_step(experiment, mk.build_mesh(experiment.mesh, experiment.cluster))
    cut = {
        jax.tree_util.keystr(path): (x.shape, tuple(x.sharding.spec))
        for path, x in jax.tree_util.tree_leaves_with_path(program.abstract_state.opt_state)
        if "up" in jax.tree_util.keystr(path) and "v_" in jax.tree_util.keystr(path)
    }
    assert {name.split(".")[1][:5]: spec for name, (_, spec) in cut.items()} == {
        "v_row": ("fsdp",), "v_col": ("tensor",),
    }  # fmt: skip


def optimizer_of(words):
    spec = resolve(load("mlp", words))
    return make_optimizer(spec.optimizer, spec.optimizer_class, spec.train.steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_opt.py").write_text(OWN)
    yield folder
    sys.modules.pop("own_opt", None)


@pytest.fixture
def beside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_a_function_beside_the_experiment_is_taken(beside):
    words = ["optimizer.class=own_opt:mine", "optimizer.options={decay=0.9}", "optimizer.clip=0"]
    state = optimizer_of(words).init({"w": np.ones(3)})
    assert "trace" in str(state)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.class=own_opt:unsaid"], "not annotated to return an optax.GradientTransformation"),
        (["optimizer.class=own_opt:model"], "not annotated to return"),
        (["optimizer.class=os:system"], "belongs to Python itself"),
        (["optimizer.class=own_opt:rateless"], "takes no `learning_rate`"),
        (["optimizer.class=own_opt:mine"], "needs the option 'decay'"),
        (["optimizer.class=own_opt:raises"], "raised RuntimeError: no memory of that"),
        (["optimizer.class=own_opt:mine", "optimizer.options={dekay=1}"], "takes no option 'dekay'"),
        (["optimizer.options={a=1}"], "but no class is given"),
        (["optimizer.class=optax:lion", "optimizer.b1=0.9"], "applies to AdamW alone"),
    ],
)
def test_what_is_no_optimizer_is_one_message(beside, words, said):
    with pytest.raises(mk.ConfigError, match=said) as caught:
        optimizer_of(words)
    assert "optimizer" in (caught.value.at or "")


def test_declared_roots_hold_but_for_optax(beside, tmp_path, monkeypatch):
    (tmp_path / "roots").mkdir()
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(tmp_path / "roots"))
    assert optimizer_of(["optimizer.class=optax:lion"])
    with pytest.raises(mk.ConfigError, match="outside of the folders"):
        optimizer_of(["optimizer.class=own_opt:mine"])


def test_a_pipeline_refuses_rows_and_columns():
    experiment = load("llama_pipeline_cpu", ["optimizer.class=optax:adafactor"])
    with pytest.raises(mk.ConfigError, match="which stages of a pipeline cannot share out"):
        mk.make_train_step(experiment, mk.build_mesh(experiment.mesh, experiment.cluster))
