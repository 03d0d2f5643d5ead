"""Test plans of twelve users' steps (their_steps.py): memory by the closed form, source lines, and losses."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshkit as mk
from meshkit.report.views.report import write_html
from tests.planning import their_steps
from tests.planning.their_steps import STEPS

# These weights are not parameters of the step's optimizer; each parameter has Adam's two moments.
FROZEN = {"lora_with_frozen_weights": 3 * 256 * 256}
# These layers must be on the page, with their lines, where name stacks have them: flax.linen writes them, nnx does not.
MODULES = {"linen_with_logical_rules": [f"Block/Dense_{n} planning/their_steps.py:" for n in (0, 1)]}
# fp32 sums run over at most 4,608 rows and columns in another order, through a depth of ten, as in tests/equivalence.
TOLERANCE = math.sqrt(10 * 4608) * 2**-24


@functools.cache
def absent(explicit):
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 8})
    types = AxisType.Explicit if explicit else AxisType.Auto
    return mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster), axis_types=types), cluster


def attached(devices, explicit):
    shape = (2, 4) if devices == 8 else (1, 1)
    types = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), ("data", "fsdp"), axis_types=types)


def made(step, mesh, *, interpret):
    options = {"interpret": interpret} if step is their_steps.a_pallas_kernel else {}
    return step(mesh, **options)


def placed(leaf, spec, mesh):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def on(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def places(args, specs, mesh):
    """Return arguments as shapes with their shardings; modules bring their own."""
    found = []
    for arg, spec in zip(args, specs):
        if spec is None:
            graph, state = nnx.split(arg)
            state = jax.tree.map(
                lambda v: v.replace(placed(v.get_value(), P(*(v.get_metadata().get("out_sharding") or ())), mesh)),
                state,
                is_leaf=lambda v: isinstance(v, nnx.Variable),
            )
            found.append(nnx.merge(graph, state))
        else:
            found.append(jax.tree.map(lambda leaf, s: placed(leaf, s, mesh), arg, spec))
    return tuple(found)


def bytes_of_a_gpu(tree):
    leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "sharding")]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


# The default suite has the steps whose idioms no other test in it plans.
NEW = (
    their_steps.explicit_axes,
    their_steps.a_mesh_that_is_set,
    their_steps.under_nnx_jit,
    their_steps.linen_with_logical_rules,
    their_steps.two_losses,
    their_steps.lora_with_frozen_weights,
)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=[pytest.mark.slow] * (make not in NEW)) for make in STEPS],
    ids=lambda step: step.__name__,
)
def test_it_is_planned_with_its_memory_its_lines_and_its_layers(make, tmp_path):
    mesh, cluster = absent(make is their_steps.explicit_axes)
    with jax.sharding.use_abstract_mesh(mesh):
        step, arguments, specs = made(make, mesh, interpret=False)
        args = places(jax.eval_shape(arguments) if specs[0] is not None else nnx.eval_shape(arguments), specs, mesh)
        report = mk.plan(step, args, mesh=mesh, cluster=cluster)
    state, memory = args[0], report.memory
    held = bytes_of_a_gpu(args[:-1])
    frozen = 4 * FROZEN.get(make.__name__, 0) // 8
    # Adam keeps two moments of each parameter, and counts steps.
    parameters = (held - frozen - 8) // 3 + frozen
    assert memory.parameters_bytes == pytest.approx(parameters, abs=16), state
    assert memory.parameters_bytes + memory.optimizer_bytes == held
    parts = (memory.gradients_bytes, memory.activations_bytes, memory.temporary_bytes)
    assert held + sum(part or 0 for part in parts) == memory.peak_bytes
    lines = {op.line for row in report.communication for op in row.ops}
    assert lines
    assert {line for line in lines if "their_steps.py:" not in (line or "")} == set()
    write_html(report, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert [layer for layer in MODULES.get(make.__name__, ()) if layer not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("make", STEPS, ids=lambda step: step.__name__)
def test_its_losses_on_eight_devices_are_those_of_one(make):
    found = []
    for devices in (1, 8):
        mesh = attached(devices, make is their_steps.explicit_axes)
        with jax.set_mesh(mesh):
            step, arguments, specs = made(make, mesh, interpret=True)
            args = arguments()
            if specs[0] is None:
                batch = jax.device_put(args[-1], on(mesh, specs[-1]))
                found.append([float(step(*args[:-1], batch)) for _ in range(3)])
                continue
            args = jax.device_put(args, on(mesh, specs))
            losses = []
            for _ in range(3):
                state, loss = step(*args)
                args = (state, *args[1:])
                losses.append(float(loss))
            found.append(losses)
    assert found[0][2] != found[0][0]  # The loss has changed, so the step trains.
    np.testing.assert_allclose(found[1], found[0], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.deviceless
def test_what_xla_dies_of_is_told_with_what_to_do():
    mesh, cluster = absent(explicit=False)
    step, arguments, specs = their_steps.experts_by_vmap(mesh, constrained=False)
    with pytest.raises(mk.ProgramError, match="HloShardingV3") as error:
        mk.plan(step, places(jax.eval_shape(arguments), specs, mesh), mesh=mesh, cluster=cluster)
    assert "with_sharding_constraint on the result that mixes" in str(error.value)
