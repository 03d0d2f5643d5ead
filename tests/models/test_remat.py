"""Test recomputation policies: each gives the same gradients, and each trades memory for FLOP as it says."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshkit.config import catalog
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.planner import Plan, plan_experiment
from meshkit.planning.resolved import make_train_step, resolve
from meshkit.sharding import build_mesh
from meshkit.step.state import describe_model
from models.llama import Llama
from models.remat import check_remat
from tests.hlo_text import printed

DEBUG = Path(__file__).parents[2] / "configs/experiments/llama_debug_cpu.toml"
POLICIES = ["none", "full", "dots", "offload", "offload_dots", ("projection",), ("gate", "up"), "everything_saveable"]


def gradients(policy):
    model = Llama(dtype=jnp.float32, remat=policy, layers=2, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(tokens)))

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.parametrize(
    "policy",  # tests/equivalence covers "full" and "dots" as well.
    [pytest.param(p, marks=[pytest.mark.slow] * (p in ("full", "dots"))) for p in POLICIES[1:]],
)
def test_gradients_do_not_depend_on_the_policy(policy):
    """The same operations on the same numbers are fused differently, for a few fp32 roundings of the largest entry."""
    for a, b in zip(jax.tree.leaves(gradients(policy)), jax.tree.leaves(cached_gradients()), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * 2.0**-24 * float(np.abs(b).max()))


@cache
def cached_gradients():
    return gradients("none")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("most", "remat policy 'most' is not one of none, full, dots"),
        ("gate", r"'gate' is a name for a list, not a policy: to keep it, write \['gate'\]"),
        (["gate", "gates"], r"remat = \['gate', 'gates'\] must name what to keep, each once"),
        (["gate", "gate"], "each once"),
        ([], "must name what to keep"),
        (["attention"], "each once: of query, key, value, output, gate, up, down"),
        ({"keep": ["gate"]}, r"offloads nothing: to keep without offloading, give a list, remat = \['gate'\]"),
        ({"offload": ["gate"], "drop": ["up"]}, "may have the keys keep and offload, and no other"),
        ({"keep": ["gate"], "offload": ["gate", "up"]}, "has gate in keep and in offload"),
        ({"keep": ["layer_input"], "offload": ["up"]}, r"remat.keep = \['layer_input'\] must name what to keep"),
        ({"offload": ["ups"]}, "must name what to offload, each once: of query, key, .*, layer_input"),
    ],
)
def test_a_policy_that_is_none_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        check_remat(policy)


@pytest.mark.parametrize("config", ["llama_debug_cpu", "moe_debug_cpu", "vit_cpu"])
def test_an_experiment_lists_what_is_kept(config):
    experiment = load(DEBUG.with_name(f"{config}.toml"), ['train.remat=["up", "down"]'])
    assert describe_model(resolve(experiment)).abstract_model().remat == ("up", "down")


@pytest.mark.parametrize(
    ("context", "collective"), [("ring", "ppermute"), ("ulysses", "all_to_all"), ("all_gather", "all_gather")]
)
def test_attention_over_a_cut_length_that_is_kept_moves_nothing_again(context, collective):
    """Its output and log-sum-exp are kept by name, so the backward pass exchanges no more than with `none`."""
    exchanges = {}
    for policy in ('"none"', '["attention"]', '"dots"', '["projection"]', '"full"'):
        mesh = ["mesh.fsdp=", "mesh.tensor=", "mesh.context=4", "rules.preset=data", "rules.logical.act_length=context"]
        rules = ["rules.logical.act_residual_length=context", f"model.context={context}", f"train.remat={policy}"]
        experiment = load(DEBUG, [*mesh, *rules])
        program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
        jaxpr = program.step.trace(program.abstract_state, program.abstract_batch).jaxpr
        exchanges[policy] = str(jaxpr).count(f"{collective}[")
    assert exchanges['["attention"]'] == exchanges['"dots"'] == exchanges['"none"']
    assert exchanges['"none"'] < exchanges['["projection"]'] == exchanges['"full"']


def test_an_experiment_that_lists_what_the_model_has_not_is_refused():
    experiment = load(DEBUG, ['train.remat=["gates"]'])
    with pytest.raises(ConfigError, match=r"Llama refuses its options: remat = \['gates'\] must name what to keep"):
        describe_model(resolve(experiment))


@pytest.mark.parametrize(
    ("wrong", "names"),
    [("train.remat=fulll", "remat policy 'fulll'"), ("model.preset=llama_debg", "preset 'llama_debg'")],
)
def test_an_option_that_the_model_refuses_is_pointed_at(wrong, names):
    with pytest.raises(ConfigError, match=names) as error:
        describe_model(resolve(load(DEBUG, [wrong])))
    assert wrong.split("=")[0] in str(error.value.at)


@cache
def planned(policy: str) -> Plan:
    sizes = ["model.embed=512", "model.mlp=2048", "model.head_dim=64", "model.layers=4", "train.sequence_length=1024"]
    cluster = ["cluster={name='dgx_h100',hosts=1}", "mesh.data=", "mesh.fsdp=8", "mesh.tensor=", 'rules.preset="fsdp"']
    return plan_experiment(load(DEBUG, [*sizes, *cluster, "train.global_batch=32", f"train.remat={policy}"]))


def matmul_flops(plan: Plan) -> float:
    return plan.report.step.hfu * plan.report.step.time_s


def said_of_host_memory(plan: Plan) -> list[str]:
    return [w.message for w in plan.report.warnings if w.code == "host_memory"]


FUSED = '"dots"'
NONE, FULL, DOTS, SOME = '"none"', '"full"', '["projection"]', '["gate", "up"]'
MIX = '{ keep = ["gate"], offload = ["up", "layer_input"] }'
OFFLOAD, OFFLOAD_DOTS = '"offload"', '"offload_dots"'
# The factors are layers, sequences of a GPU, tokens, embed, and the bytes of bf16.
LAYER_INPUTS = 4 * 4 * 1024 * 512 * 2


@pytest.mark.deviceless
@pytest.mark.slow
def test_the_inputs_of_layers_wait_in_host_memory():
    """Offloading has the FLOP of full recomputation in less GPU memory, and each input crosses the host link both ways.

    The scan moves one layer's more each way, which is not yet or no longer needed. XLA may drop either.
    """
    offload, full = planned(OFFLOAD), planned(FULL)
    assert matmul_flops(offload) == pytest.approx(matmul_flops(full), rel=1e-6)
    assert offload.compiled.memory["temp"] < full.compiled.memory["temp"]
    assert offload.compiled.host_peak_bytes == LAYER_INPUTS
    assert full.compiled.host_peak_bytes == 0
    (message,) = said_of_host_memory(offload)
    assert message.startswith("16.0 MiB per GPU are in host memory, 128 MiB of 1.82 TiB a host; ")
    (each,) = re.findall(r"; (\d+\.\d) MiB a step cross pcie5", message)
    assert 24 <= float(each) <= 32  # There are 4 layers of 4 MiB each, of which three or four cross each way.
    assert not said_of_host_memory(full)


@pytest.mark.deviceless
@pytest.mark.slow
def test_a_mix_recomputes_less_and_what_it_offloads_waits_in_pinned_host_memory():
    """No matmul of `gate` or `up` runs again, since they are kept or offloaded: the FLOP are those of the list.

    In the compiled module (memory space 5 is pinned host memory) wait the inputs of 4 layers and `up`, which is four
    times as wide.
    """
    mix, some = planned(MIX), planned(SOME)
    assert matmul_flops(mix) == pytest.approx(matmul_flops(some), rel=1e-6)
    assert mix.compiled.memory["temp"] < some.compiled.memory["temp"]
    assert mix.compiled.host_peak_bytes == LAYER_INPUTS * (1 + 2048 // 512)
    text = printed(mix.compiled.module)
    assert set(re.findall(r"bf16\[([\d,]+)\]\{[\d,]+:S\(5\)\}", text)) >= {"4,4,1024,512", "4,4,1024,2048"}


@pytest.mark.slow
@pytest.mark.deviceless
def test_what_is_kept_is_not_recomputed():
    """Policies that keep more recompute less and need more memory.

    With projections kept, only attention runs twice; with full recomputation everything does; two of seven kept are in
    between. With attention kept as well, nothing runs twice.
    """
    flops = {p: matmul_flops(planned(p)) for p in (NONE, DOTS, SOME, FULL, FUSED)}
    assert flops[NONE] < flops[DOTS] < flops[SOME] < flops[FULL]
    assert flops[FUSED] == pytest.approx(flops[NONE], rel=1e-6)
    memory = {p: planned(p).compiled.memory["temp"] for p in (NONE, DOTS, SOME, FULL, FUSED)}
    assert memory[FULL] < memory[SOME] < memory[DOTS] < memory[FUSED] < memory[NONE]


@pytest.mark.slow
@pytest.mark.deviceless
def test_projections_wait_in_host_memory():
    """The last layer's values need not come back, so XLA sees that its attention is there already and runs it once.

    Its share is two matmuls of 1024 x 1024 x 64 for 4 sequences and 8 heads, half of each under the causal mask.
    """
    offload, dots = planned(OFFLOAD_DOTS), planned(DOTS)
    attention = 4 * 8 * 2 * (2 * 1024 * 1024 * 64) / 2
    peak = catalog.gpu("h100_sxm").peak_flops["bf16"]
    assert matmul_flops(offload) == pytest.approx(matmul_flops(dots) - attention / peak, rel=1e-6)
    assert offload.compiled.memory["temp"] < dots.compiled.memory["temp"]
    assert offload.compiled.host_peak_bytes > LAYER_INPUTS
    assert said_of_host_memory(offload)
