"""Test plan with a cluster that names a calibration: kernels and collectives take its rates, and the plan says so."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.config import calibration
from meshkit.config.calibration import Calibration, Fit, MeasuredOn, Rates
from meshkit.predict.nccl import model_constant
from meshkit.predict.network import checkpoint_time_s
from meshkit.report.views.words import facts

pytestmark = pytest.mark.deviceless

N, GPUS = 8192, 8
MACHINE = MeasuredOn(
    gpu="h100_sxm",
    scale_up="nvlink",
    devices=8,
    date="2026-11-21T12:00:00+00:00",
    jax="0.12.0.1",
    jaxlib="0.12.0",
    fabric="infiniband",
)
GATHER = Fit(
    link="nvlink",
    collective="all-gather",
    gpus_per_domain=GPUS,
    domains=1,
    latency_s=1e-3,
    bytes_per_s=1e9,
    residual_median=0.1,
    points=9,
)


def planned(cluster):
    """Return the plan of weights gathered over 8 GPUs, then one matmul that is bound by compute."""
    mesh = mk.build_mesh(mk.MeshSpec.parse({"fsdp": GPUS}), cluster, devices=mk.describe_devices(cluster))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))

    def step(x, w):
        return x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))

    array = jax.ShapeDtypeStruct((N, N), jnp.bfloat16, sharding=sharding)
    return mk.plan(step, (array, array), mesh=mesh, cluster=cluster)


def test_the_calibration_file_goes_round_into_plan(tmp_path):
    plain = mk.Cluster.load("dgx_h100")
    rate = plain.gpu.peak_flops["bf16"] * plain.gpu.achieved["matmul"] / 2
    path = calibration.write(
        tmp_path / "calibration.toml", Calibration((GATHER,), MACHINE, Rates(matmul_flops_per_s={"bf16": rate}))
    )
    before, after = planned(plain), planned(mk.Cluster.load("dgx_h100", calibration=str(path)))
    # It takes twice as long, but for other compute, which no rate changes: less than the gap before a kernel.
    assert after.step.compute_s == pytest.approx(2 * before.step.compute_s, abs=model_constant("kernel_gap_s"))
    (row,) = after.communication
    assert row.busy_s == pytest.approx(GATHER.latency_s + row.wire_bytes / GATHER.bytes_per_s)
    (warning,) = [w for w in after.warnings if w.code == "calibration"]
    assert str(path) in warning.message
    assert "1 fits of collectives, bf16 matmuls at 341 TFLOP/s" in warning.message
    assert not any(w.code == "calibration" for w in before.warnings)


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({"storage_bytes_per_s": 20e9}, 112e9 / 20e9),
        # Eight slots of generation 5 at 0.8 of 63 GB/s carry 403 GB/s.
        ({"storage_bytes_per_s": 1e12}, 112e9 / (8 * 0.8 * 63.015e9)),
        # Without GPUDirect Storage a byte is written to host memory and read again: 0.8 x 614.4 GB/s / 2.
        ({"storage_bytes_per_s": 1e12, "gpudirect_rdma": False}, 112e9 / (0.8 * 614.4e9 / 2)),
        ({}, None),
    ],
)
def test_seconds_of_a_checkpoint(keys, seconds):
    cluster = mk.Cluster.load("dgx_h100", hosts=1, **keys)
    assert checkpoint_time_s(112e9, cluster) == (None if seconds is None else pytest.approx(seconds))
    assert checkpoint_time_s(None, cluster) is None


def test_the_headline_has_the_checkpoint_where_it_is_known():
    from meshkit.report.schema import Report, StepPart, TrainingPart, WindowPart

    window, step = WindowPart(steps=1, devices=8), StepPart()
    known = Report(source="plan", window=window, step=step, training=TrainingPart(checkpoint_s=5.6))
    assert ("checkpoint", "5.60 s to write") in facts(known)
    assert not [label for label, _ in facts(Report(source="plan", window=window, step=step)) if label == "checkpoint"]
