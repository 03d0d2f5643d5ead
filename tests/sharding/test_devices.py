"""Test the order and the NVLink domains of attached and described devices."""

import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import numpy as np
import pytest

import meshkit as mk
from meshkit.sharding.mesh import cpu_timeouts, gpu_timeouts, order_by_domain


@dataclass(frozen=True)
class FakeGpu:
    id: int
    process_index: int


def cluster_of(domains, per_domain, **keys):
    return mk.Cluster.load("dgx_h100", hosts=domains, gpus_per_host=per_domain, nics_per_host=per_domain, **keys)


def test_devices_are_ordered_by_domain_whatever_their_processes():
    """Each GPU has a process, and ids are interleaved over two domains."""
    devices = [FakeGpu(i, i) for i in range(8)]
    identities = {i: "ab"[i % 2] for i in range(8)}
    ordered = order_by_domain(devices, identities, cluster_of(2, 4))
    assert [d.id for d in ordered] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_domain_may_span_processes():
    """A domain of two hosts, as in an NVL72, has one identity and two processes."""
    devices = [FakeGpu(i, i // 4) for i in range(8)]
    cluster = mk.Cluster.load("gb200_nvl72", hosts=2, gpus_per_host=4, nvlink_domain_size=8, gpus_used_per_domain=8)
    assert [d.id for d in order_by_domain(devices, dict.fromkeys(range(8), "x.1"), cluster)] == list(range(8))


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ("aaaabbbb", None),
        ("aaaaaaaa", "needs 2 NVLink domains with 4 GPUs each, but the attached GPUs form 1 domains"),
        ("aaabbbbb", "with 4 GPUs each"),
        ("aabbccdd", "form 4 domains of \\[2, 2, 2, 2\\] GPUs"),
    ],
)
def test_domains_that_differ_from_the_file_stop_the_mesh(domains, message):
    devices = [FakeGpu(i, 0) for i in range(8)]
    identities = dict(enumerate(domains))
    if message is None:
        assert len(order_by_domain(devices, identities, cluster_of(2, 4))) == 8
        return
    with pytest.raises(mk.ConfigError, match=message):
        order_by_domain(devices, identities, cluster_of(2, 4))


def test_a_domain_larger_than_the_file_says_stops_the_mesh():
    devices = [FakeGpu(i, 0) for i in range(12)]
    identities = dict(enumerate("aaaaaaaabbbb"))
    with pytest.raises(mk.ConfigError, match="says that an NVLink domain has 4 GPUs"):
        order_by_domain(devices, identities, cluster_of(2, 4))


def test_described_devices_carry_their_place():
    devices = mk.describe_devices(mk.Cluster.load("dgx_h100", hosts=2))
    assert [(d.id, d.process_index, d.domain) for d in devices] == [(i, i // 8, i // 8) for i in range(16)]
    assert {d.compute_capability for d in devices} == {"9.0"}


def test_the_mesh_of_the_issue_puts_tensor_inside_a_domain():
    """data is over InfiniBand, fsdp and tensor are on NVLink: index = data * 8 + fsdp * 2 + tensor."""
    cluster = mk.Cluster.load("dgx_h100", hosts=2)
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2})
    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(16).reshape(2, 4, 2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 2}


def test_attached_mesh_has_auto_axes_in_spec_order():
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 2, "fsdp": 2, "tensor": 2}), mk.Cluster.load("cpu8"))
    assert isinstance(mesh, jax.sharding.Mesh)
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    np.testing.assert_array_equal(mesh.device_ids.ravel(), range(8))


def test_a_small_cluster_takes_no_devices_from_what_comes_after_it():
    code = """
import jax, meshkit as mk
jax.config.update("jax_num_cpu_devices", 8)
mk.prepare_platform(mk.Cluster.load("cpu8", gpus_per_host=4))
assert len(jax.devices()) == 8
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("ours", "xlas"), [("600", 1200), ("5", 1200), ("3600.5", 7201), ("0", 10**6)])
def test_xlas_own_limits_on_cpu_devices_come_after_meshkits_and_are_numbers_that_it_takes(monkeypatch, ours, xlas):
    monkeypatch.setenv("MESHKIT_STALL_TIMEOUT", ours)
    flags = cpu_timeouts()
    assert set(flags.values()) == {300, xlas}
    env = os.environ | {"XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items())}
    code = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_xlas_own_limits_on_gpus_come_after_meshkits_and_are_flags_that_it_knows(monkeypatch):
    """A flag that XLA does not know aborts the process that starts it."""
    monkeypatch.setenv("MESHKIT_STALL_TIMEOUT", "90.5 compile=7")
    flags = gpu_timeouts()
    assert flags == {"xla_gpu_execution_terminate_timeout": "181s", "xla_gpu_nccl_termination_timeout_seconds": 181}
    env = os.environ | {"XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items())}
    code = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("MESHKIT_STALL_TIMEOUT", "0")
    assert gpu_timeouts() == {}


def test_gpus_that_are_not_attached_are_an_error_with_a_way_out():
    with pytest.raises(mk.ConfigError, match=r"no GPU is attached here.*\n.*meshkit plan"):
        mk.build_mesh(mk.MeshSpec.parse({"data": 8}), mk.Cluster.load("dgx_h100", hosts=1))


def test_too_few_devices_are_an_error():
    with pytest.raises(mk.ConfigError, match=r"needs 8 devices.*but 3 are given"):
        mk.build_mesh(mk.MeshSpec.parse({"data": 8}), mk.Cluster.load("cpu8"), devices=jax.devices()[:3])
