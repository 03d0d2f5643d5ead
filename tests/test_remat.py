"""Recomputation policies: the same gradients by each, and what each trades memory and FLOP for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshkit.planner import Plan, plan_experiment
from meshkit.spec.experiment import load
from models.llama import Llama
from models.remat import check_remat

DEBUG = Path(__file__).parent.parent / "configs/experiments/llama_debug_cpu.toml"
POLICIES = ["none", "full", "dots", "offload", "offload_dots", ("gate", "up"), "everything_saveable"]


def gradients(policy):
    model = Llama(dtype=jnp.float32, remat=policy, layers=2, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(tokens)))

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_gradients_do_not_depend_on_the_policy(policy):
    """The same operations on the same numbers, fused differently: a few fp32 roundings of the largest entry."""
    for a, b in zip(jax.tree.leaves(gradients(policy)), jax.tree.leaves(cached_gradients()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * 2.0**-24 * float(np.abs(b).max()))


@cache
def cached_gradients():
    return gradients("none")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("most", "remat policy 'most' is not one of none, full, dots"),
        ("gate", r"'gate' is a projection, not a policy; to keep its output: \['gate'\]"),
        (["gate", "gates"], r"remat = \['gate', 'gates'\] must name projections, each once"),
        (["gate", "gate"], "each once"),
        ([], "must name projections"),
    ],
)
def test_a_policy_that_is_none_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        check_remat(policy)


@cache
def planned(policy: str) -> Plan:
    sizes = ["model.embed=512", "model.mlp=2048", "model.head_dim=64", "model.layers=4", "train.sequence_length=1024"]
    cluster = ["cluster={name='dgx_h100',hosts=1}", "mesh.data=", "mesh.fsdp=8", "mesh.tensor=", 'rules.preset="fsdp"']
    return plan_experiment(load(DEBUG, [*sizes, *cluster, "train.global_batch=32", f"model.remat={policy}"]))


def matmul_flops(plan: Plan) -> float:
    return plan.report.step.hfu * plan.report.step.time_s


def instructions(plan: Plan):
    return [i for computation in plan.schedule.computations.values() for i in computation if i.cost]


NONE, FULL, DOTS, SOME, OFFLOAD, OFFLOAD_DOTS = (
    '"none"',
    '"full"',
    '"dots"',
    '["gate", "up"]',
    '"offload"',
    '"offload_dots"',
)


@pytest.mark.deviceless
def test_what_is_kept_is_not_recomputed():
    """FLOP: none and dots recompute no matmul of a projection (dots only attention); full all of them; two of seven
    projections kept is in between. Memory goes the other way."""
    flops = {p: matmul_flops(planned(p)) for p in (NONE, DOTS, SOME, FULL)}
    assert flops[NONE] < flops[DOTS] < flops[SOME] < flops[FULL]
    memory = {p: planned(p).compiled.memory["temp"] for p in (NONE, DOTS, SOME, FULL)}
    assert memory[FULL] < memory[SOME] < memory[DOTS] < memory[NONE]


@pytest.mark.deviceless
@pytest.mark.parametrize(("policy", "like"), [(OFFLOAD, FULL), (OFFLOAD_DOTS, DOTS)])
def test_what_is_offloaded_leaves_the_gpu_and_crosses_the_host_link(policy, like):
    """The same FLOP as the policy that keeps the same on the GPU, less device memory, and bytes over the host link."""
    assert matmul_flops(planned(policy)) == pytest.approx(matmul_flops(planned(like)), rel=1e-6)
    assert planned(policy).compiled.memory["temp"] < planned(like).compiled.memory["temp"]
    assert sum(i.cost.host_bytes for i in instructions(planned(policy))) > 0
    assert sum(i.cost.host_bytes for i in instructions(planned(like))) == 0
