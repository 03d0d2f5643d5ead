"""Test compressed sums: their error is bounded, error feedback loses nothing, and the wire has the promised bytes."""

from __future__ import annotations

import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.parallel.compression import BLOCK, SMALLEST_BYTES, WIRES, Exchange, wire_elements, zero_residuals
from meshkit.step.loss import MicroBatches, reduce_replicas

SPECS = {"kernel": PartitionSpec("fsdp", None), "scale": PartitionSpec(None)}
# A shard has 24 / 2 x 70 = 840 elements, which is no multiple of 2 or 4 blocks.
SHAPES = {"kernel": (24, 70), "scale": (6,)}
REPLICAS = 4
UNIT_ROUNDOFF = 2.0**-24


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((REPLICAS, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def gradients(seed: int, scale: float = 1.0, replicas: int = REPLICAS) -> dict[str, np.ndarray]:
    """Return gradients over six decades, so that a block's largest element affects its smallest."""
    random = np.random.default_rng(seed)

    def one(shape):
        size = 10.0 ** random.uniform(-6, 0, (replicas, *shape))
        return (scale * size * random.standard_normal((replicas, *shape))).astype(np.float32)

    return {name: one(shape) for name, shape in SHAPES.items()}


def compressed_sum(given, residuals, *, mesh, dtype, specs=SPECS, also_over=(), smallest_bytes=SMALLEST_BYTES):
    """Return the sums over axis `data`, as a training step makes them, and the new residuals."""
    exchange = Exchange("data", mesh.shape["data"], WIRES[dtype], smallest_bytes)
    micro = MicroBatches(1, mesh, (*also_over, "data"), deferred=(*also_over, "data"))
    shards = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    return reduce_replicas(given, micro, shards, shards, jnp.float32, exchange=exchange, residuals=residuals)


def summed(mesh, dtype, **options):
    return jax.jit(functools.partial(compressed_sum, mesh=mesh, dtype=dtype, **{"smallest_bytes": 256, **options}))


def start(replicas: int = REPLICAS):
    return zero_residuals({name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}, replicas)


def largest_of_block(shards: np.ndarray, replicas: int) -> np.ndarray:
    """Return max|x| of each element's block, for [..., n] shards cut into chunks and blocks as they are exchanged."""
    n = shards.shape[-1]
    padded = np.zeros((*shards.shape[:-1], wire_elements(n, replicas)), shards.dtype)
    padded[..., :n] = np.abs(shards)
    largest = padded.reshape(*shards.shape[:-1], -1, BLOCK).max(axis=-1)
    return np.repeat(largest, BLOCK, axis=-1)[..., :n]


@pytest.mark.parametrize("dtype", WIRES)
def test_the_error_of_every_element_is_bounded_by_its_blocks(mesh, dtype):
    """|error| <= e (sum over replicas of max|block of gradient| + max|block of the exchanged sum|).

    e is the relative rounding error of the dtype; bf16 needs no blocks, but is bounded by them as well. The exchanged
    sum differs from the true one by the first quantization, so its block may be larger by that much. fp32 arithmetic
    adds R + 3 roundings.
    """
    given = gradients(0)
    total, nothing = summed(mesh, dtype)(given, None)
    assert nothing is None
    shards = given["kernel"].reshape(REPLICAS, 2, -1)  # fsdp cuts the first dim in two.
    error = WIRES[dtype].error
    of_replicas = largest_of_block(shards, REPLICAS)
    first = error * of_replicas.sum(0)
    of_sum = largest_of_block(np.abs(shards.sum(0)) + first, REPLICAS)
    bound = first + error * of_sum + (REPLICAS + 3) * UNIT_ROUNDOFF * of_replicas.sum(0)
    found = np.abs(np.asarray(total["kernel"]).reshape(2, -1) - shards.astype(np.float64).sum(0))
    assert np.all(found <= bound)
    # The error shows that the sum traveled in few bits.
    assert found.max() > UNIT_ROUNDOFF * np.abs(shards).max() * REPLICAS


@pytest.mark.parametrize("dtype", WIRES)
def test_small_arrays_are_summed_in_fp32(mesh, dtype):
    given = gradients(1)
    total, _ = summed(mesh, dtype)(given, None)
    true = given["scale"].astype(np.float64).sum(0)
    np.testing.assert_allclose(
        total["scale"], true, rtol=0, atol=REPLICAS * UNIT_ROUNDOFF * np.abs(given["scale"]).max()
    )


@pytest.mark.parametrize("dtype", WIRES)
def test_nothing_is_lost_with_error_feedback(mesh, dtype):
    """For every element and step, compressed sum + residuals after = gradients + residuals before.

    In fp32 each of about 2 R + 4 additions of numbers up to R max|x| rounds once, relative to that size.
    """
    step, residuals = summed(mesh, dtype), start()
    for seed in range(4):
        given = gradients(seed)
        before = {k: given[k].astype(np.float64).sum(0) + np.asarray(residuals[k]).sum(0) for k in given}
        total, residuals = step(given, residuals)
        for name in given:
            after = np.asarray(total[name], np.float64) + np.asarray(residuals[name]).sum(0)
            tolerance = (2 * REPLICAS + 4) * UNIT_ROUNDOFF * REPLICAS * np.abs(given[name]).max()
            np.testing.assert_allclose(after, before[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["constant", "random"])
@pytest.mark.parametrize("dtype", WIRES)
def test_the_mean_error_vanishes_as_one_over_t_with_error_feedback_and_stays_without(mesh, dtype, kind):
    """After T steps the error of the mean is |sum of residuals| / T, and residuals stay below twice a step's bound.

    That bound is e (R max|g| + max|sum|) <= 2 e R max|g|, times 1 + e + e^2 ... since a residual is itself part of the
    next sum. Without feedback, a constant gradient errs the same way at every step.
    """
    steps = 64
    with_feedback, without = summed(mesh, dtype), summed(mesh, dtype)
    residuals, corrected, biased, true = start(), 0.0, 0.0, 0.0
    largest = 0.0
    for t in range(steps):
        given = gradients(t if kind == "random" else 0)
        total, residuals = with_feedback(given, residuals)
        corrected += np.asarray(total["kernel"], np.float64)
        biased += np.asarray(without(given, None)[0]["kernel"], np.float64)
        true += given["kernel"].astype(np.float64).sum(0)
        largest = max(largest, np.abs(given["kernel"]).max())
    error = WIRES[dtype].error
    bound = 2 * error * REPLICAS * largest / (1 - 2 * error) / steps
    # In fp32 each step rounds its sums independently; the mean of them errs no more than one step does.
    bound += (2 * REPLICAS + 4) * UNIT_ROUNDOFF * REPLICAS * largest
    assert np.abs(corrected - true).max() / steps <= bound
    if kind == "constant":
        given = gradients(0)
        one_step = np.asarray(without(given, None)[0]["kernel"], np.float64) - given["kernel"].astype(np.float64).sum(0)
        assert np.abs(biased - true).max() / steps == pytest.approx(np.abs(one_step).max(), rel=1e-3)
        assert np.abs(corrected - true).max() < np.abs(biased - true).max() / 8


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_zeros_stay_zeros_and_bad_numbers_stay_visible(mesh, dtype):
    zeros = jax.tree.map(np.zeros_like, gradients(0))
    total, left = summed(mesh, dtype)(zeros, start())
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves((total, left)))
    for bad in (np.nan, np.inf):
        given = gradients(0)
        given["kernel"][1, 3, 5] = bad
        total, _ = summed(mesh, dtype)(given, None)
        assert not np.isfinite(total["kernel"][3, 5])


def test_further_axes_are_summed_in_fp32_before():
    mesh = jax.make_mesh((2, 2, 2), ("data", "host", "fsdp"), axis_types=(AxisType.Auto,) * 3)
    given = gradients(0, replicas=4)
    specs = {name: PartitionSpec("data", *spec) for name, spec in SPECS.items()}
    left = {k: jax.device_put(r, NamedSharding(mesh, specs[k])) for k, r in start(2).items()}
    total, left = summed(mesh, "int8", also_over=("host",))(given, left)
    after = np.asarray(total["kernel"], np.float64) + np.asarray(left["kernel"]).sum(0)
    # Every sum is up to 4 max|x|, with a dozen roundings.
    np.testing.assert_allclose(
        after, given["kernel"].sum(0), rtol=0, atol=12 * UNIT_ROUNDOFF * 4 * np.abs(given["kernel"]).max()
    )
    assert left["kernel"].sharding.is_equivalent_to(NamedSharding(mesh, specs["kernel"]), 3)


@pytest.mark.deviceless
@pytest.mark.parametrize(("dtype", "element"), [("bf16", "bf16"), ("int8", "s8"), ("fp8", "f8e4m3fn")])
def test_the_bytes_across_infiniband_are_the_closed_form(dtype, element):
    """Each element of a GPU's shard (padded) moves 2 (R-1)/R bytes of the dtype, and each block as much in fp32.

    Small arrays are summed in fp32. On two hosts of 8 H100, R = 2 over InfiniBand with one GPU per domain in each
    group, so all wire bytes cross it.
    """
    pytest.importorskip("jax_cuda12_plugin", reason="the `plan` extra is not installed")
    from meshkit.planning.planner import make_plan

    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 8})
    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
    shapes = {"a": (1024, 4096), "b": (100, 4000), "n": (4096,)}
    specs = {"a": PartitionSpec("fsdp"), "b": PartitionSpec(), "n": PartitionSpec()}

    def array(name):
        sharding = NamedSharding(mesh, PartitionSpec("data", *specs[name]))
        return jax.ShapeDtypeStruct((2, *shapes[name]), jnp.float32, sharding=sharding)

    given = {name: array(name) for name in shapes}
    step = functools.partial(compressed_sum, mesh=mesh, dtype=dtype, specs=specs)
    made = make_plan(step, (given, given), mesh=mesh, cluster=cluster)
    rows = made.report.communication
    elements = wire_elements(1024 * 4096 // 8, 2) + wire_elements(100 * 4000, 2)
    assert elements == 1024 * 4096 // 8 + 400384  # 400 000 elements are padded to 2 x 782 blocks.
    scales = 0 if dtype == "bf16" else 4 * elements // BLOCK
    itemsize = 2 if dtype == "bf16" else 1
    payloads: dict[str, float] = defaultdict(float)
    for row in rows:
        payloads[row.collective or ""] += row.payload_bytes or 0
    assert payloads == {
        "all-to-all": itemsize * elements + scales,
        "all-gather": itemsize * elements + scales,
        "all-reduce": 4 * 4096,
    }
    sent = {r.dtype: r.payload_bytes for r in rows if r.collective == "all-to-all"}
    assert sent.pop(element) == itemsize * elements
    assert sent in ({}, {"f32": scales})
    wire = 2 * (2 - 1) / 2 * (itemsize * elements + scales + 4 * 4096)
    assert sum(r.wire_bytes_infiniband or 0 for r in rows) == pytest.approx(wire)
    assert sum(r.wire_bytes_nvlink or 0 for r in rows) == 0
