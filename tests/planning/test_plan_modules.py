"""Test plans of nnx.jit'ed steps that take modules and optimizers, and the warning where the update is dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile.lowering import over_arrays
from meshkit.planning.planner import make_plan

RULES = mk.ShardingRules({}, auto={"axis": "fsdp", "min_bytes": 0})
WIDE, ROWS = 256, 512


class Theirs(nnx.Module):
    """A model that knows nothing of meshkit, with dropout and running statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, WIDE, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDE, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(WIDE, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(self.norm(jax.nn.relu(self.up(x)))))


def loss_of(model, x):
    return jnp.mean((model(x) - x) ** 2)


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, gradients)
    return loss


def make():
    model = Theirs(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def lay_out(modules, mesh):
    """Return the modules with every array where the rules put it; abstract arrays stay abstract."""
    state = nnx.state(modules)

    def one(array, sharding):
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return jax.device_put(array, sharding)

    nnx.update(modules, jax.tree.map(one, state, mk.shardings(state, mesh, RULES)))
    return modules


@pytest.fixture(scope="module")
def target():
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    return cluster, mk.build_mesh(mk.MeshSpec.parse({"fsdp": 8}), cluster, devices=mk.describe_devices(cluster))


def batch(mesh):
    return jax.ShapeDtypeStruct((ROWS, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))


def in_bytes(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def rows_of(report):
    return {(r.collective, r.dtype): (r.count, r.payload_bytes) for r in report.communication}


@pytest.mark.deviceless
def test_an_nnx_step_is_planned_whole_with_its_state_overwritten(target):
    """The same step, written as a function of states, gives the same program, so the same bytes and collectives."""
    cluster, mesh = target
    model, optimizer = lay_out(nnx.eval_shape(make), mesh)
    theirs = make_plan(train_step, (model, optimizer, batch(mesh)), mesh=mesh, cluster=cluster)

    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def functional(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    ours = make_plan(functional, (state, batch(mesh)), mesh=mesh, cluster=cluster)
    assert rows_of(theirs.report) == rows_of(ours.report)
    assert theirs.compiled.traced_flops == ours.compiled.traced_flops
    assert theirs.compiled.memory["alias"] == ours.compiled.memory["alias"]
    assert theirs.compiled.memory["alias"] >= in_bytes(nnx.state((model, optimizer))) / 8
    assert not [w for w in theirs.report.warnings if w.code == "dead_update"]


@pytest.mark.deviceless
def test_concrete_modules_and_plain_steps_are_planned_as_abstract_ones_under_jit(target):
    cluster, mesh = target
    attached = mk.build_mesh(mk.MeshSpec.parse({"fsdp": 8}), mk.Cluster.load("cpu8"))
    concrete = lay_out(make(), attached)
    before = jax.tree.map(lambda a: a, nnx.state(concrete, nnx.Param))
    abstract = lay_out(nnx.eval_shape(make), mesh)
    first = make_plan(train_step, (*concrete, batch(mesh)), mesh=mesh, cluster=cluster)
    second = make_plan(train_step, (*abstract, batch(mesh)), mesh=mesh, cluster=cluster)
    wrapped = make_plan(lambda x, pair: train_step(*pair, x), (batch(mesh), abstract), mesh=mesh, cluster=cluster)
    assert rows_of(first.report) == rows_of(second.report) == rows_of(wrapped.report)
    assert first.compiled.memory == second.compiled.memory
    assert wrapped.compiled.memory["alias"] == 0  # Nobody said that a plain function overwrites its arguments.
    assert not [w for w in wrapped.report.warnings if w.code == "dead_update"]
    # The step was planned, but it did not run.
    assert jax.tree.all(jax.tree.map(np.array_equal, before, nnx.state(concrete, nnx.Param)))


@pytest.mark.deviceless
def test_a_step_that_drops_its_update_is_warned_of(target):
    cluster, mesh = target
    modules = lay_out(nnx.eval_shape(make), mesh)
    half = jax.jit(lambda model, optimizer, x: train_step(model, optimizer, x))
    report = mk.plan(half, (*modules, batch(mesh)), mesh=mesh, cluster=cluster)
    (warning,) = [w for w in report.warnings if w.code == "dead_update"]
    whole = mk.plan(train_step, (*modules, batch(mesh)), mesh=mesh, cluster=cluster)
    assert report.step.time_s < whole.step.time_s
    assert "new values of f32[256,64], f32[64,256]" in warning.message
    assert "its update is dead code" in warning.message

    @jax.jit
    def measured(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        # The gradients are used, but the update is not.
        return loss, sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

    clipped = mk.plan(measured, (*modules, batch(mesh)), mesh=mesh, cluster=cluster)
    assert [w.code for w in clipped.warnings].count("dead_update") == 1
    forward = mk.plan(jax.jit(loss_of), (modules[0], batch(mesh)), mesh=mesh, cluster=cluster)
    gradients = mk.plan(nnx.value_and_grad(loss_of), (modules[0], batch(mesh)), mesh=mesh, cluster=cluster)
    assert not [w for r in (forward, gradients) for w in r.warnings if w.code == "dead_update"]


def test_the_pure_step_computes_what_the_nnx_step_does_in_place():
    x = jax.random.normal(jax.random.key(1), (ROWS, 64))
    model, optimizer = make()
    pure, (donated, kept) = over_arrays(train_step, (model, optimizer, x))
    copies = jax.tree.map(jnp.copy, donated)
    # The model and the optimizer are donated, but the batch is not.
    assert [leaf.shape for leaf in kept.values()] == [x.shape]
    (loss,), changed = pure(copies, kept)
    assert loss == train_step(model, optimizer, x)
    for mine, theirs in zip(changed.values(), jax.tree.leaves(nnx.state([model, optimizer])), strict=True):
        same = jax.random.key_data(mine) == jax.random.key_data(theirs) if mine.dtype == "key<fry>" else mine == theirs
        assert same.all()


def test_static_arguments_shared_modules_and_tree_mode_are_understood():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    @functools.partial(nnx.jit, static_argnums=2, graph=False, graph_updates=False)
    def doubled(linear, x, how):
        assert how == "kernel"
        linear.kernel[...] = linear.kernel[...] * 2
        return linear(x).sum()

    pure, given = over_arrays(doubled, (model, jnp.ones((2, 4)), "kernel"))
    _, changed = pure(*given)
    # Without graph updates, only what did change is returned.
    assert [leaf.shape for leaf in changed.values()] == [(4, 4)]
    np.testing.assert_array_equal(changed.popitem()[1], 2 * model.kernel[...])

    shared, given = over_arrays(lambda a, b: a.kernel.set_value(b.kernel[...] + 1), (model, model))
    assert len(given[1]) == 2
    assert [leaf.shape for leaf in shared(*given)[1].values()] == [(4, 4)]


class Trainer(nnx.Module):
    """A module whose step is a method."""

    def __init__(self):
        self.model, self.optimizer = make()

    @functools.partial(nnx.jit, donate_argnums=0)
    def step(self, x):
        return train_step(self.model, self.optimizer, x)


def test_the_module_of_a_method_is_an_argument_too():
    trainer, x = Trainer(), jnp.ones((ROWS, 64))
    pure, given = over_arrays(trainer.step, (x,))
    assert [leaf.shape for leaf in given[1].values()] == [x.shape]
    _, changed = jax.eval_shape(pure, *given)
    assert len(changed) == len(jax.tree.leaves(nnx.state(trainer)))


@pytest.mark.deviceless
@pytest.mark.parametrize("cached", [False, True], ids=["closure", "cached_partial"])
def test_a_step_that_hides_its_modules_is_refused_with_a_way_out(target, cached):
    cluster, mesh = target
    modules = make()
    step = nnx.cached_partial(train_step, *modules) if cached else lambda x: train_step(*modules, x)
    with pytest.raises(
        mk.ProgramError, match=r"module that is not among its arguments(.|\n)*try mk.plan\(step, \(model"
    ):
        mk.plan(step, (batch(mesh),), mesh=mesh, cluster=cluster)


def test_jax_decides_what_its_own_jit_is_a_function_of():
    step = jax.jit(lambda model, x: model(x))
    args = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
    assert over_arrays(step, args) == (step, args)


def test_an_nnx_step_is_profiled_as_it_is_compiled(tmp_path):
    cluster = mk.Cluster.load("cpu8")
    spec = mk.MeshSpec.parse({"fsdp": 8})
    mesh = mk.build_mesh(spec, cluster)
    x = jax.device_put(jax.random.normal(jax.random.key(1), (ROWS, 64)), NamedSharding(mesh, PartitionSpec("fsdp")))
    model, optimizer = lay_out(make(), mesh)
    whole, its_optimizer = make()
    expected = [float(train_step(whole, its_optimizer, np.asarray(x))) for _ in range(5)]
    found = [float(train_step(model, optimizer, x)) for _ in range(2)]
    compiled = train_step.lower(model, optimizer, x).compile()
    with mk.profile(tmp_path, program=compiled, mesh=mesh, cluster=cluster, mesh_spec=spec) as capture:
        found += [float(compiled(model, optimizer, x)) for _ in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert capture.report.window.steps == 2
