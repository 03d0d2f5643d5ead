"""Test sharding rules on every kind of pytree: nnx state, linen boxes, plain containers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk

RULES = mk.ShardingRules(
    {"act_batch": "data", "embed": "fsdp", "mlp": "tensor"},
    overrides=[("**/bias", ("tensor",)), ("plain/w", ("fsdp", None))],
)


@pytest.fixture(scope="module")
def mesh():
    return mk.build_mesh(mk.MeshSpec.parse({"data": 2, "fsdp": 2, "tensor": 2}), mk.Cluster.load("cpu8"))


class Block(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.dense = nnx.Linear(8, 16, kernel_init=kernel, rngs=rngs)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return nn.Dense(16, kernel_init=init, name="dense")(x)


def test_nnx_metadata_and_path_overrides(mesh):
    with nnx.use_eager_sharding(False):
        state = nnx.state(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    found = mk.shardings(state, mesh, RULES)
    assert found["dense"]["kernel"].get_value() == NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    assert found["dense"]["bias"].get_value() == NamedSharding(mesh, PartitionSpec("tensor"))
    assert jax.tree.structure(found) == jax.tree.structure(state)


def test_linen_boxes_and_their_unboxed_siblings(mesh):
    variables = jax.eval_shape(LinenBlock().init, jax.random.key(0), jnp.zeros((2, 8)))
    found = mk.shardings(variables, mesh, RULES)
    assert found["params"]["dense"]["kernel"].spec == PartitionSpec("fsdp", "tensor")
    assert found["params"]["dense"]["bias"].spec == PartitionSpec("tensor")


def test_linen_logical_boxes(mesh):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 16)), ("embed", "mlp"))
    assert mk.shardings({"w": box}, mesh, RULES)["w"].spec == PartitionSpec("fsdp", "tensor")


def test_a_plain_tree_is_sharded_by_path_and_replicated_elsewhere(mesh):
    found = mk.shardings({"plain": {"w": jnp.zeros((4, 3)), "v": jnp.zeros(3)}, "step": 0}, mesh, RULES)
    assert found["plain"]["w"].spec == PartitionSpec("fsdp", None)
    assert found["plain"]["v"].spec == PartitionSpec(None)


def test_a_dim_that_does_not_divide_is_an_error(mesh):
    box = nn.LogicallyPartitioned(jnp.zeros((7, 16)), ("embed", "mlp"))
    message = r"dim 0 \('embed'\) of w has size 7, which the 2 GPUs of mesh axis 'fsdp'"
    with pytest.raises(mk.ConfigError, match=message):
        mk.shardings({"w": box}, mesh, RULES)


def test_an_override_of_the_wrong_rank_is_an_error(mesh):
    with pytest.raises(mk.ConfigError, match="names 2 dims, but the array has shape"):
        mk.shardings({"plain": {"w": jnp.zeros(4)}}, mesh, RULES)


def test_one_mesh_axis_twice_names_both_dims(mesh):
    box = nn.LogicallyPartitioned(jnp.zeros((8, 8)), ("embed", "embed"))
    with pytest.raises(mk.ConfigError, match="fsdp"):
        mk.shardings({"w": box}, mesh, RULES)


def test_a_rule_to_an_axis_the_mesh_lacks_is_an_error(mesh):
    with pytest.raises(mk.ConfigError, match="tensr"):
        mk.shardings({}, mesh, mk.ShardingRules({"mlp": "tensr"}))


def test_optimizer_mapping_overrides_parameters(mesh):
    rules = mk.ShardingRules({"embed": None, "mlp": "tensor"}, optimizer={"embed": ["data", "fsdp"]})
    box = nn.LogicallyPartitioned(jnp.zeros((8, 16)), ("embed", "mlp"))
    assert mk.shardings({"w": box}, mesh, rules)["w"].spec == PartitionSpec(None, "tensor")
    moments = mk.shardings({"w": box}, mesh, rules, kind="optimizer")
    assert moments["w"].spec == PartitionSpec(("data", "fsdp"), "tensor")


def test_a_model_is_born_sharded(mesh):
    """Each device holds its quarter of the kernel, and the values are those of an unsharded model."""
    model = mk.shard_model(lambda: Block(nnx.Rngs(0)), mesh, RULES)
    kernel = model.dense.kernel.get_value()
    assert {s.data.shape for s in kernel.addressable_shards} == {(4, 8)}
    with nnx.use_eager_sharding(False):
        whole = Block(nnx.Rngs(0)).dense.kernel.get_value()
    np.testing.assert_array_equal(kernel, whole)


def test_constrain_is_the_identity_outside_a_scope():
    x = jnp.ones((4, 8))
    assert mk.constrain(x, "act_batch", "act_embed") is x


def test_constrain_shards_inside_a_scope(mesh):
    def f(x):
        with mk.sharding_scope(mesh, RULES):
            return mk.constrain(x * 2, "act_batch", "mlp")

    assert jax.jit(f)(jnp.ones((4, 8))).sharding.spec == PartitionSpec("data", "tensor")


def test_constrain_wants_a_name_per_dim(mesh):
    with mk.sharding_scope(mesh, RULES), pytest.raises(mk.ConfigError, match="got 1 logical axes"):
        mk.constrain(jnp.ones((4, 8)), "act_batch")


def test_constrain_leaves_out_an_axis_that_does_not_divide(mesh):
    from meshkit.sharding.constrain import record_activations

    def f(x):
        with mk.sharding_scope(mesh, RULES):
            return mk.constrain(x, "act_batch", "mlp")

    with record_activations() as record:
        jax.eval_shape(f, jnp.ones((4, 3)))
    assert record[0].spec == (("data",), ())
    assert record[0].dropped == ("tensor",)


def test_shard_over_runs_on_local_shards(mesh):
    def f(x):
        with mk.sharding_scope(mesh, RULES):
            local = mk.shard_over(lambda x: jnp.full_like(x, x.shape[0]), [("act_batch", None)], ("act_batch", None))
            return local(x)

    np.testing.assert_array_equal(jax.jit(f)(jnp.ones((4, 3))), np.full((4, 3), 2.0))


@pytest.mark.parametrize(("cluster", "expected"), [("dgx_h100", "cudnn"), ("dgx1_v100", "xla"), ("cpu8", "xla")])
def test_attention_follows_the_target_not_the_attached_backend(cluster, expected):
    from meshkit.sharding import attention_implementation

    target = mk.Cluster.load(cluster, hosts=1)
    absent = mk.build_mesh(mk.MeshSpec.parse({"data": "fill"}), target, devices=mk.describe_devices(target))
    with mk.sharding_scope(absent, mk.ShardingRules({})):
        assert attention_implementation() == expected
