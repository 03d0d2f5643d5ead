"""Test that the minimal step of Llama 1B trains as meshkit's step does, and measure both at toy size."""

import functools
import math

import jax
import pytest

from benchmarks.gpu import floor
from benchmarks.gpu.verbs import LLAMA_1B
from meshkit.config.experiment import load
from meshkit.planning.planner import absent_step


def parameters_of(model):
    """Return meshkit's parameters under the names and shapes that the minimal step uses."""
    layers = model["layers"]
    both = layers["attention"] | layers["mlp"]
    norms = {name: layers[name]["scale"] for name in ("attention_norm", "mlp_norm")}
    dims = {"query": (2, 128, -1), "key": (2, 128, -1), "value": (2, 128, -1), "output": (2, -1, 128)}
    matrices = {name: kernel["kernel"].reshape(dims.get(name, kernel["kernel"].shape)) for name, kernel in both.items()}
    return {"embedding": model["embedding"], "layers": matrices | norms, "norm": model["norm"]["scale"]}


@pytest.fixture(scope="module")
def batch():
    ids = jax.random.randint(jax.random.key(1), (4, 65), 0, 256)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": jax.numpy.ones((4, 64))}


def losses_of_meshkit(batch, *settings):
    """Return the first parameters and five losses of Llama 1B's experiment at toy size in fp32."""
    shape = ("train.global_batch=4", "train.sequence_length=64", "train.precision=fp32")
    toy = ("cluster={ gpu='cpu', hosts=1, gpus_per_host=1 }", "model.preset=llama_debug", "model.tied=true", *shape)
    experiment = load(LLAMA_1B, [*toy, *settings])
    mesh = floor.mk.build_mesh(experiment.mesh, experiment.cluster, devices=jax.devices()[:1])
    program = floor.make_train_step(experiment, mesh)
    state, losses = program.init(), []
    params = jax.tree.map(jax.numpy.copy, parameters_of(state.params))
    for _ in range(5):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return params, losses


@pytest.fixture(scope="module")
def own(batch):
    return losses_of_meshkit(batch)


@pytest.mark.parametrize(
    "way", [{}, {"unrolled": True, "cast_once": True}, {"wide": True}], ids=["scan", "loop", "wide"]
)
def test_the_floor_has_the_losses_of_meshkits_step(own, batch, way):
    params = jax.tree.map(jax.numpy.copy, own[0])
    c, losses = floor.replace(floor.TOY, **way), []
    state, step = (params, floor.optimizer().init(params)), floor.jitted(c)
    for _ in range(5):
        state, loss = step(state, batch["tokens"], batch["targets"])
        losses.append(float(loss))
    assert losses == pytest.approx(own[1], rel=2e-6)
    assert own[1][-1] < own[1][0] - 0.01


def test_an_unrolled_step_has_the_same_losses(own, batch):
    lean = losses_of_meshkit(batch, "model.scan_layers=false", "model.fp32_logits=false")
    assert lean[1] == pytest.approx(own[1], rel=2e-6)


def test_the_floor_has_as_many_parameters_as_llama_1b():
    of_meshkit = absent_step(load(LLAMA_1B)).abstract_state.params
    of_floor = jax.eval_shape(functools.partial(floor.init, floor.Llama()), jax.random.key(0))
    counts = [sum(math.prod(x.shape) for x in jax.tree.leaves(params)) for params in (of_meshkit, of_floor)]
    assert counts == [1_235_814_400] * 2


def test_both_are_measured_at_toy_size_and_a_case_that_fails_costs_no_other(tmp_path, monkeypatch, batch):
    monkeypatch.setattr(floor.mk, "prepare_platform", lambda *_, **__: None)  # jax has already started in this process.
    monkeypatch.setattr(floor, "first_batch", lambda *_: batch)
    cases = {"meshkit": (1.0, ()), "floor": (1.0, {}), "wrong": (1.0, ("train.remat=unknown",))}
    monkeypatch.setattr(floor, "CASES", cases)
    found = {key: value for part in floor.measure(tmp_path, toy=True) for key, value in part.items()}
    assert [key for key in found if "wrong" in key] == ["wrong: failed"]
    assert min(found[f"{case}: step_s"] for case in ("meshkit", "floor")) > 0
