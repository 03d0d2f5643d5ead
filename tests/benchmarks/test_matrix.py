"""Test that every shipped model plans on every shipped cluster, with hardly anything priced by its bytes alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from benchmarks.matrix import CLUSTERS, EXPERIMENTS, MODELS, plan_pair, unpriced_share
from meshkit.config.cluster import shipped_clusters
from meshkit.config.experiment import load_any
from meshkit.planning.planner import make_plan

pytestmark = pytest.mark.deviceless


def test_every_shipped_cluster_and_model_is_in_the_matrix():
    assert set(CLUSTERS) == set(shipped_clusters()) - {"cpu8"}
    models = lambda names: {load_any(str(EXPERIMENTS / f"{name}.toml"), ()).model.class_path for name in names}
    assert models(experiment for experiment, _ in MODELS.values()) == models(f.stem for f in EXPERIMENTS.glob("*.toml"))


def test_a_kernel_that_only_its_bytes_price_is_counted():
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    rows = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=NamedSharding(mesh, rows))

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=shape, compiler_params=plt.CompilerParams(num_warps=4))(x)

    on_each = jax.shard_map(step, mesh=mesh.abstract_mesh, in_specs=rows, out_specs=rows, check_vma=False)
    assert unpriced_share(make_plan(on_each, (x,), mesh=mesh, cluster=cluster)) > 0.01  # which the next test refuses
    assert unpriced_share(make_plan(lambda x: x * 2, (x,), mesh=mesh, cluster=cluster)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_every_model_plans_on_every_cluster(model, cluster):
    plan = plan_pair(model, cluster)
    assert plan.report.step.time_s
    assert unpriced_share(plan) <= 0.01
    assert not {"unknown_trip_count", "flops"} & {w.code for w in plan.report.warnings}
