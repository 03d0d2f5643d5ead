"""Test the vocabulary-parallel loss, with which no GPU ever holds a whole row of logits."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshkit.compile.program import compile_absent
from meshkit.config.experiment import load
from meshkit.planning.resolved import make_train_step
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.loss import cross_entropy
from tests.hlo_text import printed

DEBUG = Path(__file__).parents[2] / "configs/experiments/llama_debug_cpu.toml"
# No other dim has these sizes, so a dim of VOCAB in the compiled program is the vocabulary and nothing else.
VOCAB, BATCH, LENGTH, TENSOR = 1360, 8, 64, 8
SIZES = [
    f"model.vocab={VOCAB}", f"train.global_batch={BATCH}", f"train.sequence_length={LENGTH}", "train.evaluate_every=0",
    "model.kv_heads=8", 'rules.preset="fsdp_tensor_sequence"',
]  # fmt: skip


def shapes(hlo: str) -> list[tuple[int, ...]]:
    """Return the dims of every array that a module's text mentions, those inside of fusions included."""
    return [tuple(map(int, dims.split(","))) for dims in re.findall(r"\b(?:pred|[subf]+\d+\w*)\[([\d,]+)\]", hlo)]


def whole_logits(hlo: str) -> set[tuple[int, ...]]:
    """Return shapes with a whole vocabulary beside at least one GPU's tokens."""
    smallest = VOCAB * LENGTH  # This is the size for one sequence.
    return {s for s in shapes(hlo) if VOCAB in s and np.prod(s) >= smallest and s != (VOCAB, 128) and s != (128, VOCAB)}


@pytest.mark.deviceless
def test_a_step_for_absent_gpus_holds_no_whole_logits():
    """On 2 x 8 H100 with tensor over the NVLink domain, this covers forward, backward and optimizer."""
    cluster = ["cluster={name='dgx_h100',hosts=2}", "mesh.data=", "mesh.fsdp={infiniband=2}", f"mesh.tensor={TENSOR}"]
    experiment = load(DEBUG, [*SIZES, *cluster])
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    program = make_train_step(experiment, mesh)
    args = (program.abstract_state, program.abstract_batch)
    compiled = compile_absent(program.step, args, mesh=mesh, cluster=experiment.cluster)
    hlo = printed(compiled.module)
    assert any(VOCAB // TENSOR in s and LENGTH in s for s in shapes(hlo)), "logits in pieces"
    assert not whole_logits(hlo)


def test_a_step_on_devices_holds_no_whole_logits():
    mesh = ["mesh.data=", "mesh.fsdp=", f"mesh.tensor={TENSOR}"]
    experiment = load(DEBUG, [*SIZES, *mesh])
    program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
    hlo = program.step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    assert any(VOCAB // TENSOR in s and LENGTH in s for s in shapes(hlo)), "logits in pieces"
    assert not whole_logits(hlo)


def test_whole_logits_are_found_where_the_vocabulary_is_not_cut():
    """The search of this file finds whole logits where there is no tensor axis."""
    mesh = ["mesh.data=", "mesh.fsdp=8", "mesh.tensor=", 'rules.preset="fsdp"']
    experiment = load(DEBUG, [*SIZES, *mesh])
    program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
    hlo = program.step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    assert whole_logits(hlo)


def test_cross_entropy_and_its_gradient_are_those_of_one_device():
    """Both are fp32 sums over 1360 logits in another order: sqrt(1360) u = 2.2e-6 of the largest entry."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("tensor",), axis_types=(AxisType.Auto,))
    logits = jax.random.normal(jax.random.key(0), (4, LENGTH, VOCAB)) * 5
    targets = jax.random.randint(jax.random.key(1), (4, LENGTH), 0, VOCAB)

    def mean(logits):
        return cross_entropy(logits, targets).mean()

    cut = jax.device_put(logits, NamedSharding(mesh, PartitionSpec(None, None, "tensor")))
    (loss, gradient), (expected, expected_gradient) = (jax.jit(jax.value_and_grad(mean))(x) for x in (cut, logits))
    tolerance = np.sqrt(VOCAB) * 2.0**-24
    np.testing.assert_allclose(loss, expected, rtol=tolerance)
    largest = float(np.abs(expected_gradient).max())
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=tolerance * largest)
