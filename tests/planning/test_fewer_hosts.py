"""Test with how many hosts a job can go on: they must divide the mesh, the batch and every sharded parameter."""

from meshkit.config.experiment import load
from meshkit.planning.planner import experiments_with_fewer_hosts

FILE = "benchmarks/kill_matrix/three_hosts.toml"
SIX = ("cluster.hosts=6", "mesh.fsdp={infiniband=6}", "launch.min_hosts=1", "train.global_batch=60")


def hosts(*overrides):
    return [smaller.cluster.hosts for smaller in experiments_with_fewer_hosts(load(FILE, overrides))]


def test_a_number_that_divides_no_parameter_is_passed_over():
    assert hosts(*SIX) == [4, 3, 2, 1]  # 5 divides the batch of 60, but not the 12 of `embed`.
    assert hosts(*SIX, "train.global_batch=12") == [4, 3, 2, 1]
    assert hosts(*SIX, "train.global_batch=6", "train.accumulate=1") == [3, 2, 1]  # 4 does not divide the batch.


def test_no_number_below_min_hosts_is_tried_and_none_without_it():
    assert hosts(*SIX, "launch.min_hosts=3") == [4, 3]
    assert hosts(*SIX, "launch.min_hosts=") == []
