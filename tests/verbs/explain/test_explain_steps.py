"""Test `mk.lint` and `mk.explain` of steps without an experiment: any function that `mk.plan` takes."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.linting.examine import examine_step

SPEC = mk.MeshSpec.parse({"data": 2, "fsdp": 4})
RULES = mk.ShardingRules({"act_batch": ["data", "fsdp"]}, auto={"axis": "fsdp", "min_bytes": 1024})
X = jnp.ones((512, 64))


class Theirs(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def make():
    model = Theirs(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss(model, x):
    return jnp.mean((model(mk.constrain(x, "act_batch", None)) - x) ** 2)


@pytest.fixture(scope="module")
def target():
    cluster = mk.Cluster.load("dgx_h100")
    return {"mesh": mk.build_mesh(SPEC, cluster, devices=mk.describe_devices(cluster)), "cluster": cluster}


def found(step, args, target, rules=RULES):
    return {f.code: f for f in mk.lint(step, args, rules=rules, **target)}


def test_a_modules_step_is_linted_each_time_it_is_asked_for(target):
    step, args = mk.sharded_step(loss, target["mesh"], RULES), (*mk.abstract(make, target["mesh"], RULES), X)
    first = mk.explain(step, args, rules=RULES, compile=False, **target)
    # jax remembers the step, so it must be traced anew.
    again = mk.explain(step, args, rules=RULES, compile=False, **target)
    assert first == again
    assert first.findings == ()
    assert [p.path for p in first.parameters] == ["first/bias", "first/kernel", "last/bias", "last/kernel"]
    assert [a.logical_axes for a in first.activations] == [("act_batch", None)]
    assert first.parameters_bytes_per_gpu == 4 * (64 * 256 * 2 // 4 + 256 // 4 + 64)
    assert first.optimizer_bytes_per_gpu == pytest.approx(2 * first.parameters_bytes_per_gpu, abs=8)
    assert "nothing looks wrong in 4 parameters, 1 activations" in str(first)
    assert "collectives were not checked" in first._repr_html_()


def test_what_is_wrong_with_an_own_loop_is_said(target):
    mesh = target["mesh"]
    rules = mk.ShardingRules({"act_batch": ["data", "fsdp"]}, overrides=[("w", ("fsdp", None))])

    @jax.jit
    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params))

    whole = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))}
    codes = found(step, (whole, X), target, rules)
    assert set(codes) == {"placed_otherwise", "unconstrained_activations"}
    assert "w [64, 64] has P(), but the rules say P('fsdp', None)" in str(codes["placed_otherwise"])
    codes = found(step, (mk.abstract(lambda: {"w": jnp.ones((64, 64))}, mesh, rules), X), target, rules)
    assert set(codes) == {"unconstrained_activations"}
    assert "XLA chooses" in found(step, ({"w": jnp.ones((64, 64))}, X), target, rules)["placed_otherwise"].message
    many = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.float32) for i in range(9)}
    (sums,) = [f for f in mk.lint(lambda p, x: x, (many, X), rules=rules, **target) if f.code == "unmatched_parameter"]
    assert sums.message.startswith("9 of 9 parameters have no dim names")
    assert sums.hint.startswith('auto={"axis": "fsdp"} of the rules')  # There is no file whose table could be named.
    none = mk.ShardingRules({"act_batch": "data"})
    assert found(step, (whole, X), target, none)["idle_axis"].path == "fsdp"


def test_bytes_are_bounded_in_the_types_of_the_state_and_by_its_micro_batches(target):
    mesh = target["mesh"]
    for dtype, accumulate, gathered in ((jnp.bfloat16, 1, 3 * 2), (jnp.float32, 1, 3 * 4), (jnp.bfloat16, 4, 12 * 2)):
        params = mk.abstract(lambda d=dtype: {"w": jnp.ones((2, 64, 64), d)}, mesh, RULES)
        seen = examine_step(lambda p, x: x @ p["w"][0], (params, X), rules=RULES, accumulate=accumulate, **target)
        bounds = [t.bound_bytes for t in seen.strategy.terms(frozenset({"fsdp"})) if t.words.startswith("weights")]
        assert bounds == [2 * 64 * 64 * gathered]


def test_a_state_of_linen_and_a_cluster_of_cpus(target):
    optimizer = optax.adam(1e-2)

    def made():
        params = {"params": {"dense": {"kernel": jnp.ones((64, 64))}}, "batch_stats": {"mean": jnp.zeros(64)}}
        return {"params": params, "opt_state": optimizer.init(params)}

    def of(params, x):
        return jnp.mean((mk.constrain(x, "act_batch", None) @ params["params"]["dense"]["kernel"]) ** 2)

    cluster = mk.Cluster.load("cpu8")
    mesh = mk.build_mesh(SPEC, cluster)
    step = mk.sharded_step(of, mesh, RULES, optimizer=optimizer)
    args = (mk.shard_model(made, mesh, RULES), X)
    explained = mk.explain(step, args, mesh=mesh, cluster=cluster, rules=RULES)
    assert explained.findings == ()
    assert explained.collectives_note == "collectives were not checked: cluster 'cpu8' has no GPUs"
    assert "params/params/dense/kernel" in {p.path for p in explained.parameters}
    with pytest.raises(mk.ConfigError, match="the mesh has 8 devices, but cluster 'dgx_h100' has 16 GPUs"):
        mk.lint(step, args, mesh=mesh, cluster=mk.Cluster.load("dgx_h100", hosts=2), rules=RULES)


@pytest.mark.deviceless
def test_each_collective_of_a_compiled_step_has_its_reason(target):
    args = (*mk.abstract(make, target["mesh"], RULES), X)
    explained = mk.explain(mk.sharded_step(loss, target["mesh"], RULES), args, rules=RULES, **target)
    assert explained.findings == ()
    reasons = {(row.collective, row.axes): row.explanation for row in explained.collectives}
    assert reasons["reduce-scatter", ("fsdp",)] == "gradients, reduced over fsdp once a step"
    assert explained.placement.settings == ()

    def bare(model, x):  # Without a constraint, XLA gathers the batch over the axis that shards the weights.
        return jnp.mean((model(x) - x) ** 2)

    explained = mk.explain(mk.sharded_step(bare, target["mesh"], RULES), args, rules=RULES, **target)
    assert "unconstrained_activations" in {f.code for f in explained.findings}
