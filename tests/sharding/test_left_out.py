"""Test axes that do not divide a dim: the most pieces that fit, one warning with numbers, an error in strict mode."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import meshkit as mk

RULES = mk.ShardingRules({"act_batch": ["fsdp", "tensor"]})


@pytest.fixture(scope="module")
def mesh():
    return mk.build_mesh(mk.MeshSpec.parse({"fsdp": 4, "tensor": 2}), mk.Cluster.load("cpu8"))


def constrained(mesh, rules, size):
    with mk.sharding_scope(mesh, rules):
        return jax.jit(lambda x: mk.constrain(x, "act_batch"))(jnp.zeros(size)).sharding.spec


@pytest.mark.parametrize(
    ("size", "kept"),
    [(16, ("fsdp", "tensor")), (12, "fsdp"), (6, "tensor"), (7, ())],
    ids=["both", "fsdp", "tensor", "none"],
)
@pytest.mark.filterwarnings("ignore:'act_batch' has size")
def test_the_axes_that_divide_a_dim_cut_it(mesh, size, kept):
    assert constrained(mesh, RULES, size) == (PartitionSpec(kept) if kept else PartitionSpec())


def test_one_warning_says_what_was_left_out_with_the_numbers(mesh):
    with pytest.warns(UserWarning, match="left out|do not divide") as caught:
        constrained(mesh, RULES, 6)
    assert [str(w.message) for w in caught] == [
        (
            "'act_batch' has size 6, which the 8 GPUs of mesh axis 'fsdp' x 'tensor' do not divide: "
            "only 'tensor' can shard it"
        )
    ]
    with pytest.warns(UserWarning, match="every GPU holds all of it"):
        constrained(mesh, RULES, 7)


def test_strict_rules_stop_at_an_axis_that_does_not_divide(mesh):
    with pytest.raises(mk.ConfigError, match="size 6, which the 8 GPUs"):
        constrained(mesh, dataclasses.replace(RULES, strict=True), 6)
