"""Test plans of single operations: what is read from their HLO, each against a closed form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.hlo.costs import Matmul
from meshkit.planning.planner import make_plan
from meshkit.predict.assumptions import slowest_of
from meshkit.predict.kernels import shape_share
from meshkit.predict.nccl import model_constant
from tests.hlo_text import compiled_module

pytestmark = pytest.mark.deviceless


@pytest.fixture(scope="module")
def cluster():
    return mk.Cluster.load("dgx_h100", hosts=2)


@pytest.fixture(scope="module")
def mesh(cluster):
    spec = mk.MeshSpec.parse({"data": 4, "fsdp": {"nvlink": 2, "infiniband": 2}})
    return mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))


@pytest.fixture
def plan(cluster, mesh):
    def run(step, *args, **options):
        return make_plan(step, args, mesh=mesh, cluster=cluster, **options)

    return run


def array(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def kernels(plan):
    return [i for instructions in plan.schedule.computations.values() for i in instructions if i.cost]


def local(mesh, fn, inputs, output):
    return jax.shard_map(fn, mesh=mesh, in_specs=inputs, out_specs=output, check_vma=False)


# [1024, 64] f32 a GPU = 256 KiB on 16 GPUs; fsdp has n = 4 with 2 per domain, and data has n = 4 in one domain.
COLLECTIVES = {
    "all-reduce": (lambda x: jax.lax.psum(x, "fsdp"), ("fsdp", "infiniband", 4, 2, 2**18)),
    "all-gather": (lambda x: jax.lax.all_gather(x, "data"), ("data", "nvlink", 4, 4, 2**20)),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True),
        ("fsdp", "infiniband", 4, 2, 2**18),
    ),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "data", 0, 1, tiled=True), ("data", "nvlink", 4, 4, 2**18)),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        ("fsdp", "infiniband", 4, 2, 2**18),
    ),
}


@pytest.fixture(scope="module")
def collectives(cluster, mesh):
    """Return the plan of a step that makes each of them once, of an operand of its own."""

    def every(x):
        return [operation(x * (i + 2)) + 1 for i, (operation, _) in enumerate(COLLECTIVES.values())]

    shards = PartitionSpec(("data", "fsdp"))
    args = (array(mesh, (16 * 1024, 64), ("data", "fsdp")),)
    return make_plan(local(mesh, every, (shards,), shards), args, mesh=mesh, cluster=cluster)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_has_its_axes_link_and_bytes(collectives, name):
    (row,) = [r for r in collectives.report.communication if r.collective == name]
    _, expected = COLLECTIVES[name]
    axis, link, size, per_domain, payload = expected
    assert (row.axes, row.link, row.group_size, row.gpus_per_domain) == ((axis,), link, size, per_domain)
    assert (row.count, row.payload_bytes) == (1, payload)
    across = row.wire_bytes / per_domain if link == "infiniband" else 0
    assert row.wire_bytes_infiniband == pytest.approx(across)
    assert row.wire_bytes_nvlink + row.wire_bytes_infiniband == pytest.approx(row.wire_bytes)


def test_collectives_have_the_same_key_before_and_after_a_run(plan, mesh):
    """Collectives of the program for absent GPUs and of the one that runs on CPU devices are joined by key."""
    from meshkit.config.mesh import Placement
    from meshkit.hlo.module import read_program

    attached = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "fsdp"))

    def step_on(mesh):
        def step(x):
            with jax.named_scope("layer"):
                y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, PartitionSpec("data")))
                return y.sum()

        return step

    made = plan(step_on(mesh), array(mesh, (64, 8), "data"))
    x = array(attached, (64, 8), "data")
    compiled = jax.jit(step_on(attached)).lower(x).compile()
    measured = read_program(compiled_module(compiled), Placement.from_shape(("data", "fsdp"), (4, 2))).collectives
    planned = {op.key for row in made.report.communication for op in row.ops}
    assert planned
    assert planned == {c.key for c in measured.values()}


def test_programs_that_differ_in_a_loop_body_have_different_fingerprints(plan, mesh):
    def loop(fn):
        return lambda x: jax.lax.fori_loop(0, 3, lambda _, c: fn(c), x)

    x = array(mesh, (64, 64))
    prints = [plan(loop(fn), x).schedule.fingerprint for fn in (jnp.tanh, jnp.sin, jnp.tanh)]
    assert prints[0] == prints[2] != prints[1]


def test_a_slice_updated_in_place_costs_the_slice(plan, mesh):
    """acc[i] = tanh(acc[i]) in a loop reads one and writes one of the 64 slices, not the 64 MiB buffer."""

    def step(acc):
        return jax.lax.fori_loop(0, 64, lambda i, a: a.at[i].set(jnp.tanh(a[i])), acc)

    made = plan(jax.jit(step, donate_argnums=0), array(mesh, (64, 512, 512)))
    slice_bytes = 512 * 512 * 4
    heaviest = max(i.cost.bytes_accessed for i in kernels(made) if i.opcode == "fusion")
    assert heaviest == pytest.approx(2 * slice_bytes, rel=1e-3)


@pytest.mark.parametrize(("precision", "peak"), [("default", "tf32"), ("highest", "fp32")])
def test_fp32_matmuls_are_priced_by_what_they_run_as(plan, mesh, cluster, precision, peak):
    made = plan(lambda a, b: jnp.dot(a, b, precision=precision), array(mesh, (4096, 4096)), array(mesh, (4096, 4096)))
    gpu = cluster.gpu
    seconds = 2 * 4096**3 / (gpu.peak_flops[peak] * gpu.achieved["matmul"]) * slowest_of(cluster.num_gpus)
    seconds /= shape_share(Matmul("f32", 1, 4096, 4096, 4096), gpu, peak)
    assert made.report.step.compute_s == pytest.approx(seconds, abs=model_constant("kernel_gap_s"))


def test_convolutions_have_flops(plan, mesh):
    """A convolution has 2 x outputs x window x input features FLOP, over the 4 GPUs along data."""
    x = array(mesh, (32, 56, 56, 64), "data", dtype=jnp.bfloat16)
    w = array(mesh, (3, 3, 64, 128), dtype=jnp.bfloat16)
    dims = ("NHWC", "HWIO", "NHWC")
    made = plan(lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims), x, w)
    found = sum(sum(i.cost.matmul_flops.values()) for i in kernels(made))
    assert found == 2 * (32 // 4) * 56 * 56 * 128 * 3 * 3 * 64


# With groups and a stride, XLA convolves the input's gradient with its zeros, so that more is executed.
@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (3, 1), (1, 64)])
def test_gradients_of_convolutions_have_the_flops_that_are_traced(plan, mesh, stride, groups):
    """The gradients of input and kernel each multiply as often as the forward pass."""
    x, w = (array(mesh, shape, dtype=jnp.bfloat16) for shape in ((32, 56, 56, 64), (3, 3, 64 // groups, 64)))
    dims = ("NHWC", "HWIO", "NHWC")

    def step(x, w):
        def loss(x, w):
            y = jax.lax.conv_general_dilated(
                x, w, (stride, stride), "SAME", dimension_numbers=dims, feature_group_count=groups
            )
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.value_and_grad(loss, argnums=(0, 1))(x, w)

    made, length = plan(step, x, w), -(-56 // stride)
    expected = 3 * 2 * 32 * length * length * 64 * 3 * 3 * 64 / groups
    assert sum(sum(i.cost.matmul_flops.values()) for i in kernels(made)) == expected
    assert made.compiled.traced_flops.executed == expected


def test_arguments_keep_their_shardings_even_when_unused(plan, mesh):
    unused = array(mesh, (2**20, 16), "data")
    made = plan(lambda x, unused: x + 1, array(mesh, (16,)), unused)
    assert made.compiled.memory["argument"] == pytest.approx(2**20 * 16 * 4 / 4, rel=1e-3)


def test_a_steps_own_in_shardings_count(plan, mesh):
    rows = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(lambda x: x * 2, in_shardings=rows, out_shardings=rows)
    made = plan(step, jax.ShapeDtypeStruct((2**20, 16), jnp.float32))
    assert made.compiled.memory["argument"] == 2**20 * 16 * 4 / 4


def test_static_and_scalar_arguments(plan, mesh):
    step = functools.partial(jax.jit, static_argnums=1)(lambda x, power, scale: x**power * scale)
    made = plan(step, array(mesh, (64,)), 3, 0.5)
    assert made.report.step.time_s > 0


def test_bounds_hold_around_a_step_with_blocking_and_hidden_collectives(plan, mesh):
    def step(w, x):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
            return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, PartitionSpec("data"))), None

        return jax.lax.scan(layer, x, w)[0].sum()

    w = array(mesh, (4, 2048, 2048), None, "fsdp", dtype=jnp.bfloat16)
    made = plan(step, w, array(mesh, (4096, 2048), "data", dtype=jnp.bfloat16))
    found = made.report.step
    assert found.all_overlapped_s <= found.time_s <= found.all_exposed_s
    assert found.communication_s > 0
