"""Test that the uses of a given step's arguments, its tokens and its model FLOP are found, or said to be unknown."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.errors import ConfigError

pytestmark = pytest.mark.deviceless
WIDTH, LAYERS, BATCH, LENGTH = 512, 4, 32, 128
WEIGHTS = LAYERS * WIDTH * WIDTH + 2 * 256 * WIDTH


@functools.cache
def absent():
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 8})
    return mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster)), cluster


def weights():
    keys = iter(jax.random.split(jax.random.key(0), 3))
    return {
        "table": jax.random.normal(next(keys), (256, WIDTH)),
        "layers": jax.random.normal(next(keys), (LAYERS, WIDTH, WIDTH)),
        "head": jax.random.normal(next(keys), (WIDTH, 256)),
    }


def loss(params, tokens):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, params["table"][tokens], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens).mean()


OPTIMIZER = optax.adam(1e-3)


def train_step(state, batch):
    params, moments = state
    updates, moments = OPTIMIZER.update(jax.grad(loss)(params, batch["tokens"]), moments)
    return optax.apply_updates(params, updates), moments


def shaped(tree, spec):
    mesh, _ = absent()

    def one(x):
        fits = x.ndim > 0 and x.shape[-1] % 8 == 0
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x) if fits else PartitionSpec())
        )

    return jax.tree.map(one, tree)


def arguments():
    params = jax.eval_shape(weights)
    state = shaped(
        (params, jax.eval_shape(OPTIMIZER.init, params)), lambda x: PartitionSpec(*(None,) * (x.ndim - 1), "fsdp")
    )
    batch = shaped(
        {"tokens": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}, lambda _: PartitionSpec(("data", "fsdp"))
    )
    return state, batch


def planned(program):
    mesh, cluster = absent()
    return mk.plan(program, mesh=mesh, cluster=cluster)


def check(report, batch=BATCH):
    assert report.memory.parameters_bytes == 4 * WEIGHTS // 8
    # The count of steps comes on top.
    assert report.memory.optimizer_bytes == pytest.approx(2 * 4 * WEIGHTS // 8, abs=8)
    # The factors are forward, and twice as much backward; the look-up is no matmul, and recomputation does not count.
    assert report.step.model_flops == 6 * batch * LENGTH * (LAYERS * WIDTH * WIDTH + 256 * WIDTH)
    assert report.step.tokens_per_s_per_gpu == pytest.approx(batch * LENGTH / report.step.time_s / 16)
    assert 0 < report.step.mfu < report.step.hfu


def test_plain_trees_are_told_apart():
    check(planned(mk.Program(jax.jit(train_step, donate_argnums=0), arguments())))


def test_shardings_may_be_those_of_jit_alone():
    state, batch = arguments()
    shardings = jax.tree.map(lambda x: x.sharding, (state, batch))
    step = jax.jit(train_step, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=0)
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
    check(planned(mk.Program(step, bare)))


def test_a_train_state_of_flax_and_boxed_parameters_are_told_apart():
    from flax import linen as nn
    from flax.training.train_state import TrainState

    params = {k: nn.Partitioned(v, (None,) * (v.ndim - 1) + ("fsdp",)) for k, v in arguments()[0][0].items()}
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),  # pyright: ignore[reportArgumentType]
        apply_fn=lambda: None,
        params=params,  # pyright: ignore[reportArgumentType]
        tx=OPTIMIZER,
        opt_state=arguments()[0][1],
    )

    def step(state, batch):
        grads = jax.grad(lambda p: loss(nn.meta.unbox(p), batch["tokens"]))(state.params)
        updates, moments = OPTIMIZER.update(nn.meta.unbox(grads), state.opt_state)
        return state.replace(params=optax.apply_updates(nn.meta.unbox(state.params), updates), opt_state=moments)

    check(planned(mk.Program(jax.jit(step), (state, arguments()[1]))))


def test_names_win_and_what_is_said_is_kept():
    (params, moments), batch = arguments()

    def step(moments, tokens, weights):
        return train_step((weights, moments), {"tokens": tokens})

    args = (moments, batch["tokens"], params)
    names = {"parameters": "2/**", "optimizer": ["0/**"]}
    report = planned(mk.Program(jax.jit(step), args, tokens=10.0, model_flops=1e12, names=names))
    assert report.memory.parameters_bytes == 4 * WEIGHTS // 8
    assert report.step.model_flops == 1e12
    (warning,) = [w for w in report.warnings if w.code == "given_flops"]
    assert re.search(r"states 1e\+12 model FLOP a step, [\d.]+ times the .* of its traced step", warning.message)


def test_a_name_that_matches_nothing_and_a_group_that_is_none_are_refused():
    step, args = jax.jit(train_step), arguments()
    with pytest.raises(ConfigError, match="'7/weights', which matches no array"):
        planned(mk.Program(step, args, names={"parameters": "7/weights"}))
    with pytest.raises(ConfigError, match="group 'weights'"):
        mk.Program(step, args, names={"weights": "0/**"})


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        return x @ self.layers


def test_modules_are_told_apart():
    mesh, _ = absent()
    rules = mk.ShardingRules({}, overrides=[("**", (None, "fsdp"))])

    def make():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda m: (m(x) ** 2).sum())(model))

    x = shaped(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32), lambda _: PartitionSpec(("data", "fsdp")))
    report = planned(mk.Program(step, (*mk.abstract(make, mesh, rules), x)))
    assert report.memory.parameters_bytes == 4 * WIDTH * WIDTH // 8
    assert report.memory.optimizer_bytes == pytest.approx(2 * 4 * WIDTH * WIDTH // 8, abs=8)
    # The step runs forward, and backward only for the gradient of the weights.
    assert report.step.model_flops == 4 * BATCH * WIDTH * WIDTH
