"""Test plans of real programs, compiled for absent GPUs, whose collectives equal the closed form."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.report.summarize import check_invariants

pytestmark = pytest.mark.deviceless

EMBED, MLP, ROWS = 2048, 8192, 1024
BF16, F32 = 2, 4


def mlp_step(mesh, weights, hidden, output):
    """Return one step of y = relu(x w1) w2 with given layouts of gathered weights, hidden and output activations."""

    def constrain(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def loss(params, x):
        w1, w2 = (constrain(w, s) for w, s in zip(params, weights))
        y = constrain(constrain(jax.nn.relu(x @ w1), hidden) @ w2, output)
        return (y.astype(jnp.float32) ** 2).sum()

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return value, jax.tree.map(lambda w, g: w - g, params, gradients)

    return step


def arguments(mesh, w1, w2, x):
    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    return (array((EMBED, MLP), w1), array((MLP, EMBED), w2)), array((ROWS, EMBED), x)


def rows_of(report):
    return {(r.axes, r.link, r.collective, r.dtype): (r.count, r.payload_bytes) for r in report.communication}


@pytest.fixture(scope="module")
def under_fsdp():
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    mesh = mk.build_mesh(
        mk.MeshSpec.parse({"fsdp": {"nvlink": 8, "infiniband": 2}}), cluster, devices=mk.describe_devices(cluster)
    )
    whole, rows = PartitionSpec(), PartitionSpec("fsdp")
    step = mlp_step(mesh, (whole, whole), rows, rows)
    return mk.plan(step, arguments(mesh, rows, rows, rows), mesh=mesh, cluster=cluster)


def test_mlp_under_fsdp_moves_the_closed_form(under_fsdp):
    """Under FSDP over n = 16 GPUs, a step moves this on each GPU.


    - Each weight is gathered once (forward and backward share it): 2 all-gathers of EMBED x MLP bf16.
    - Each gradient is reduced and scattered once, in bf16: EMBED x MLP bf16 twice.
    - The scalar loss is summed once: 1 all-reduce of one f32.

    XLA combines collectives until their results reach 30 MiB. Two gathers have results of 32 MiB each and stay two; two
    reduce-scatters have results of 2 MiB each and become one.
    """
    report = under_fsdp
    weight = EMBED * MLP * BF16
    assert rows_of(report) == {
        (("fsdp",), "infiniband", "all-gather", "bf16"): (2, 2 * weight),
        (("fsdp",), "infiniband", "reduce-scatter", "bf16"): (1, 2 * weight),
        (("fsdp",), "infiniband", "all-reduce", "f32"): (1, F32),
    }
    gather = next(r for r in report.communication if r.collective == "all-gather")
    assert gather.wire_bytes == 2 * weight * 15 / 16
    assert gather.wire_bytes_infiniband == gather.wire_bytes / 8
    assert (gather.group_size, gather.num_groups, gather.gpus_per_domain) == (16, 1, 8)
    check_invariants(report)


def test_mlp_under_tensor_parallelism_moves_the_closed_form():
    """Megatron's MLP over 8 GPUs on NVLink, with 2 replicas over InfiniBand, moves this in a step on each GPU.


    - Forward, the partial outputs of the row-parallel matmul are summed over `tensor`: 1 all-reduce of ROWS/2 x EMBED
      bf16 (x needs no gradient, so the backward sum of the column-parallel matmul does not exist).
    - For data parallelism, both gradients' shards, 2 x EMBED x MLP / 8 bf16, are summed over `data`. Each is 4 MiB, so
      XLA combines the two into 1 all-reduce.
    - The scalar loss is summed over `data`: 1 all-reduce of one f32 (replicas along `tensor` already agree).
    """
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    mesh = mk.build_mesh(
        mk.MeshSpec.parse({"data": {"infiniband": 2}, "tensor": 8}), cluster, devices=mk.describe_devices(cluster)
    )
    column, row, batch = PartitionSpec(None, "tensor"), PartitionSpec("tensor", None), PartitionSpec("data")
    step = mlp_step(mesh, (column, row), PartitionSpec("data", "tensor"), PartitionSpec("data", None))
    report = mk.plan(step, arguments(mesh, column, row, batch), mesh=mesh, cluster=cluster)
    assert rows_of(report) == {
        (("tensor",), "nvlink", "all-reduce", "bf16"): (1, ROWS // 2 * EMBED * BF16),
        (("data",), "infiniband", "all-reduce", "bf16"): (1, 2 * EMBED * MLP // 8 * BF16),
        (("data",), "infiniband", "all-reduce", "f32"): (1, F32),
    }


def test_matmul_flops_equal_the_closed_form(under_fsdp):
    """There are five matmuls (forward 2; backward dW1, dW2, dH) of 2 x ROWS x EMBED x MLP FLOP, over 16 GPUs."""
    peak = mk.Cluster.load("dgx_h100").gpu.peak_flops["bf16"]
    executed = under_fsdp.step.hfu * under_fsdp.step.time_s * peak
    assert executed == pytest.approx(5 * 2 * ROWS * EMBED * MLP / 16, rel=1e-9)


def test_scan_counts_every_iteration():
    """A loop has 5 row-parallel layers, each of which needs only its own columns of the sum: 5 reduce-scatters."""
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"tensor": 8}), cluster, devices=mk.describe_devices(cluster))

    def step(weights, x):
        def layer(x, w):
            y = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, "tensor"))) @ w
            return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec())), None

        return jax.lax.scan(layer, x, weights)[0]

    weights = jax.ShapeDtypeStruct(
        (5, 512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(None, "tensor"))
    )
    x = jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    report = mk.plan(step, (weights, x), mesh=mesh, cluster=cluster)
    assert rows_of(report) == {(("tensor",), "nvlink", "reduce-scatter", "bf16"): (5, 5 * 4096 * 512 * BF16)}


def test_scalar_all_reduce_over_64_gpus_compiles():
    """jaxlib 0.12 aborts on this program unless its collective kernels are off."""
    cluster = mk.Cluster.load("dgx_h100", hosts=8)
    mesh = mk.build_mesh(
        mk.MeshSpec.parse({"data": {"nvlink": 8, "infiniband": 8}}), cluster, devices=mk.describe_devices(cluster)
    )
    x = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    report = mk.plan(lambda x: x.sum(), (x,), mesh=mesh, cluster=cluster)
    assert [(r.collective, r.payload_bytes) for r in report.communication] == [("all-reduce", F32)]


def test_callbacks_are_refused_with_a_way_out():
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))

    def noisy(x):
        jax.debug.print("{}", x)
        return x + 1

    with pytest.raises(mk.ProgramError, match=r"calls back into Python.*\n.*try the step without its callbacks"):
        mk.plan(noisy, (x,), mesh=mesh, cluster=cluster)


def test_a_wrong_option_names_itself():
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    wrong = {"xla_gpu_enable_latency_hiding_schedular": True}
    with pytest.raises(mk.ConfigError, match=r"refuses the option xla_gpu_.*_schedular.*\n.*\n  try "):
        mk.plan(lambda x: x + 1, (x,), mesh=mesh, cluster=cluster, options=wrong)
