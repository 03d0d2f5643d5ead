"""Test programs that are hard to compile without a GPU by compiling them for absent GPUs."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile import options
from meshkit.compile.options import CompileChoices
from meshkit.compile.program import compile_absent
from meshkit.config.catalog import gpu, gpu_keys
from meshkit.config.cluster import Cluster
from tests.hlo_text import printed
from tests.releases import BEFORE_0_12

pytestmark = pytest.mark.deviceless
GPUS = [key for key in gpu_keys() if gpu(key).compute_capability is not None]


def host_of(key):
    """Return a cluster of one host with eight GPUs of a kind (four of GB200 and GB300)."""
    scale_up = "nvlink" if gpu(key).nvlink_links else "pcie"
    per_host = 4 if key.startswith("g") else 8
    return Cluster.load({"gpu": key, "hosts": 1, "gpus_per_host": per_host, "scale_up": scale_up})


def compiled(step, shapes, *, cluster="dgx_h100", hosts=1, mesh=None, wants_mesh=False, xla=None):
    """Return a program, its text and its schedule; arrays are sharded by their first dim over the first mesh axis."""
    cluster = mk.Cluster.load(cluster, hosts=hosts) if isinstance(cluster, str) else cluster
    mesh = mk.build_mesh(mk.MeshSpec.parse(mesh or {"data": "fill"}), cluster, devices=mk.describe_devices(cluster))
    spec = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=spec) for shape, dtype in shapes]
    choices = CompileChoices(xla or {})
    program = compile_absent(step(mesh) if wants_mesh else step, args, mesh=mesh, cluster=cluster, choices=choices)
    return program, printed(program.module), program.schedule


def on_each_gpu(function):
    """Return a function from a mesh to a shard_map of the function over the GPUs."""
    spec = PartitionSpec("data")
    return lambda mesh: jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


@pytest.mark.parametrize(
    "key", [pytest.param(k, marks=() if k in ("a100_80gb", "rtx_pro_6000") else pytest.mark.slow) for k in GPUS]
)
def test_every_gpu_of_the_catalog_compiles(key):
    """The program has a matmul, an exponential (libdevice) and a sum over all GPUs."""
    cluster = host_of(key)
    program, _, schedule = compiled(lambda x: jnp.exp(x @ x.T).sum(), [((1024, 256), jnp.float32)], cluster=cluster)
    assert program.peak_bytes < cluster.gpu.memory_bytes
    assert {i.collective.collective for i, _ in schedule.walk() if i.collective} >= {"all-reduce"}
    assert sum(sum(i.cost.matmul_flops.values()) for i, _ in schedule.walk() if i.cost) == pytest.approx(
        2 * 1024 * 1024 * 256 / cluster.num_gpus
    )


def test_a_sort_that_asks_the_driver_for_scratch_space_compiles():
    """XLA chooses CUB's radix sort from 65536 elements on, and CUB asks the driver for scratch space."""
    _, text, _ = compiled(lambda x: jnp.sort(x, axis=1), [((8, 65536), jnp.float32)])
    assert "cub" not in text.lower()
    assert "sort(" in text


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_a100_hides_its_collectives_because_it_is_told_to(told):
    """By default XLA issues every collective of an A100 synchronously."""

    def step(x, w):
        # The first output is a sum over the GPUs; the matmuls of the second do not wait for it.
        return x.T @ x, jnp.tanh(x @ w) @ w

    shapes = [((4096, 4096), jnp.bfloat16), ((4096, 4096), jnp.bfloat16)]
    xla = None if told else {"xla_gpu_enable_latency_hiding_scheduler": False}
    _, _, schedule = compiled(step, shapes, cluster="dgx_a100", xla=xla)
    kinds = {i.kind for i, _ in schedule.walk() if i.collective}
    assert ("start" in kinds) == told


@pytest.mark.parametrize("window", [None, 128])
def test_cudnn_attention_needs_no_cudnn(window):
    def attention(q, k, v):
        def loss(q, k, v):
            fused = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            return fused(q, k, v, local_window_size=window and (window - 1, 0)).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    shapes = [((8, 512, 4, 64), jnp.bfloat16)] * 3
    _, text, schedule = compiled(on_each_gpu(attention), shapes, wants_mesh=True)
    assert "__cudnn$fmhaSoftmaxBackward" in text
    # Causal attention has half of 4 b h s^2 d FLOP forward and 2.5 times that backward; a window has its band without
    # the corner.
    seen = 512 * window - window**2 / 2 if window else 512**2 / 2
    forward = 4 * 1 * 4 * seen * 64
    assert {i.cost.attention_window for i, _ in schedule.walk() if i.cost and i.cost.attention_flops} == {window or 0}
    assert sum(i.cost.attention_flops for i, _ in schedule.walk() if i.cost) == pytest.approx(3.5 * forward)


def test_a_pallas_kernel_is_compiled_and_named():
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def kernel(x):
        return pl.pallas_call(
            double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), compiler_params=plt.CompilerParams(num_warps=4)
        )(x)

    _, text, schedule = compiled(on_each_gpu(kernel), [((1024, 128), jnp.float32)], wants_mesh=True)
    assert "triton" in text
    (call,) = [i for i, _ in schedule.walk() if i.kind == "kernel" and i.cost and i.cost.priced_by == "bytes"]
    assert call.cost.bytes_accessed == 2 * 1024 * 128 * 4 / 8
    assert any("triton" in name for name in schedule.notes["opaque custom call"])


def test_fp8_matmuls_are_counted_as_fp8():
    def step(x, w):
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)

    shapes = [((4096, 1024), jnp.float8_e4m3fn), ((1024, 1024), jnp.float8_e4m3fn)]
    _, _, schedule = compiled(step, shapes)
    flops = {}
    for i, _ in schedule.walk():
        for dtype, value in (i.cost.matmul_flops if i.cost else {}).items():
            flops[dtype] = flops.get(dtype, 0) + value
    assert flops == {"f8e4m3fn": 2 * 4096 * 1024 * 1024 / 8}


PIPELINED = {f"xla_gpu_pipeline_{k}": "COLLECTIVE_PIPELINING_MODE_ON" for k in ("all_gather", "reduce_scatter")}
BUFFERED = {"xla_gpu_enable_while_loop_double_buffering": True}


@pytest.mark.parametrize(
    ("layers", "xla"),
    [
        pytest.param(6, {}, marks=pytest.mark.slow, id="plain"),
        pytest.param(6, PIPELINED, marks=pytest.mark.slow, id="peeled"),
        pytest.param(6, PIPELINED | BUFFERED, id="double-buffered"),
        pytest.param(7, PIPELINED | BUFFERED, marks=pytest.mark.slow, id="double-buffered, odd"),
    ],
)
def test_every_layer_counts_once_however_xla_cuts_the_loop(layers, xla):
    """Pipelining peels off an iteration and double buffering halves the trips, but the work stays that of the layers.

    Each layer gathers a weight of 1024 x 1024 bf16 over 8 GPUs, and multiplies 256 / 8 rows by it.
    """
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"fsdp": 8}), cluster, devices=mk.describe_devices(cluster))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))

    def step(x, stack):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
            return jax.lax.with_sharding_constraint(jax.nn.relu(x @ w), rows), None

        return jax.lax.scan(layer, x, stack)[0]

    x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16, sharding=rows)
    stack = jax.ShapeDtypeStruct((layers, 1024, 1024), jnp.bfloat16, sharding=cut)
    program = compile_absent(step, (x, stack), mesh=mesh, cluster=cluster, choices=CompileChoices(xla))
    schedule = program.schedule
    flops = sum(times * sum(i.cost.matmul_flops.values()) for i, times in schedule.walk() if i.cost)
    gathered = sum(times * i.collective.payload_bytes for i, times in schedule.walk() if i.collective)
    assert flops == pytest.approx(layers * 2 * 256 / 8 * 1024 * 1024)
    assert gathered == layers * 1024 * 1024 * 2
    loops = [i.trip_count for i, _ in schedule.walk() if i.kind == "while"]
    assert math.prod(loops) < layers if xla else loops == [layers]


@pytest.mark.skipif(BEFORE_0_12, reason="jaxlib 0.11 has another option")
def test_symmetric_memory_of_collectives_is_counted_apart():
    """Collective memory holds the gathered array, 4 MiB, and what XLA packs beside it."""
    on = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
    step, shapes = (lambda x: jnp.tanh(x @ x)), [((1024, 1024), jnp.float32)]
    plain, symmetric = (compiled(step, shapes, xla=xla)[0] for xla in (None, on))
    assert plain.symmetric_bytes == 0
    assert symmetric.symmetric_bytes >= 4 * 2**20
    assert symmetric.peak_bytes == options.bytes_at_once(symmetric.memory) - symmetric.symmetric_bytes


@pytest.mark.skipif(BEFORE_0_12, reason="jaxlib 0.11 does not die of it")
def test_an_abort_of_xla_kills_its_own_process_and_says_what_to_try(monkeypatch):
    """Without meshkit's option, jaxlib 0.12 aborts on a scalar all-reduce over 64 GPUs that NVLink joins."""
    monkeypatch.setattr(options, "OPTIONS", ())
    with pytest.raises(mk.ProgramError, match=r"XLA's compiler died \(.*size mismatch.*\n  try .*collective_kernels"):
        compiled(
            lambda x: x.sum(),
            [((64, 8), jnp.float32)],
            cluster=mk.Cluster.load("gb200_nvl72", gpus_used_per_domain=64),
            mesh={"data": 64},
        )


@pytest.mark.skipif(not BEFORE_0_12, reason="jaxlib 0.12 does not die of it")
def test_a_crash_of_xla_kills_its_own_process_and_says_what_to_try():
    """jaxlib 0.11 fails on an argument without elements that is sharded over an axis."""

    def step(mesh):
        spec = PartitionSpec("data")
        whole = jax.shard_map(lambda empty, x: jnp.concatenate([empty, x]), mesh=mesh, in_specs=spec, out_specs=spec)
        return lambda x: whole(jnp.zeros((0, *x.shape[1:])), x)

    with pytest.raises(mk.ProgramError, match=r"XLA's compiler died \(SIGSEGV\): it said nothing\n  try jaxlib 0\.12"):
        compiled(step, [((64, 8), jnp.float32)], wants_mesh=True)
