"""Test the package from outside: public names, the cost of importing, and a notebook that has already used jax."""

import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import meshkit as mk


def run(code, **kwargs):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **kwargs)


@pytest.mark.parametrize("name", mk.__all__)
def test_public_names_are_there(name):
    assert getattr(mk, name).__doc__


@pytest.mark.deviceless
def test_a_notebook_that_has_used_jax_can_plan_a_lambda():
    code = """
import jax, jax.numpy as jnp
print(jax.devices(), jnp.ones(3).sum())
import meshkit as mk
from jax.sharding import NamedSharding, PartitionSpec as P
cluster = mk.Cluster.load("dgx_h100", hosts=2)
spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2})
mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp", "tensor")))
report = mk.plan(lambda x: x @ x, (x,), mesh=mesh, cluster=cluster)
print("seconds", report.step.time_s)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("seconds")[1]) > 0


def test_the_wheel_holds_every_tracked_file_of_the_package():
    root = Path(__file__).parents[1]
    folders = ["meshkit", "models", "configs/experiments"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout to compare with")
    packed = {f.distribution_path for f in WheelBuilder(str(root)).recurse_included_files()}
    tracked = listed.stdout.splitlines()
    assert packed == {f if f.startswith("meshkit/") else f"meshkit/_shipped/{f}" for f in tracked}
