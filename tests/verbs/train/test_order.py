"""Test the collectives of a compiled step between processes, in their order; programs that differ are refused."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import meshkit as mk
from meshkit.errors import ConfigError
from meshkit.verbs.train.order import order_of_step, refuse_difference

CLUSTER = mk.Cluster.load("cpu8", gpus_per_host=8)
SPEC = mk.MeshSpec.parse({"data": 2, "tensor": 4})


@pytest.fixture(scope="module")
def program():
    """Return a program with an all-reduce over tensor, a callback, a gather over data and a sum over both.

    A device reduces 8 x 1 fp32 over tensor and gathers 4 x 1 over data.
    """
    mesh = mk.build_mesh(SPEC, CLUSTER)

    def body(x):
        x = jnp.sin(lax.psum(x, "tensor"))
        x = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        x = lax.all_gather(jnp.cos(x), "data")
        return lax.psum(jnp.sin(x).sum(), ("data", "tensor"))

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("data", "tensor"), out_specs=P(), check_vma=False))
    return step.lower(jax.ShapeDtypeStruct((8, 4), jnp.float32)).compile()


def order_of(program, devices_each):
    """Return the order as if each process drove so many devices of the mesh."""
    devices = [SimpleNamespace(process_index=i // devices_each) for i in range(8)]
    driven = SimpleNamespace(devices=np.array(devices, object).reshape(2, 4))
    order = order_of_step(program, cast(jax.sharding.Mesh, driven), SPEC.placement(CLUSTER))
    assert order is not None
    return order


def test_four_processes_of_two_devices(program):
    """On mesh [data 2, tensor 4], a row of tensor is two processes; a column of data joins 0 with 2 and 1 with 3."""
    order = order_of(program, 2)
    assert [(c.collective, set(c.axes)) for c in order.collectives] == [
        ("all-reduce", {"tensor"}),
        ("all-gather", {"data"}),
        ("all-reduce", {"data", "tensor"}),
    ]
    groups = [order.groupings[c.grouping] for c in order.collectives]
    assert groups == [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3),)]
    assert [c.payload_bytes for c in order.collectives] == [4 * 1 * 4, 2 * 4 * 1 * 4, 4]
    assert [c.after_callback for c in order.collectives] == [False, True, False]
    assert all("test_order.py:" in c.line for c in order.collectives)


def test_what_stays_within_a_process_keeps_no_other_waiting(program):
    """With four devices a process, tensor is inside of each."""
    order = order_of(program, 4)
    assert [set(c.axes) for c in order.collectives] == [{"data"}, {"data", "tensor"}]
    assert order_of(program, 8).collectives == ()


def said(order, *, without=()):
    rows = zip(order.signature, order.collectives)
    told = [[row, str(c)] for i, (row, c) in enumerate(rows) if i not in without]
    assert json.loads(json.dumps(told)) == told  # What process 0 hears equals what it says itself.
    return told


def test_programs_that_differ_arerefuse_differenced_with_the_collective_at_which_they_part(program):
    mine = order_of(program, 2)
    with pytest.raises(ConfigError, match=r"process 2 of 4 compiled a different step than process 0") as error:
        refuse_difference([said(mine), said(mine), said(mine, without={1}), said(mine)])
    gather, total = mine.collectives[1:]
    assert f"collective 2 is {total} in process 2, and {gather} in process 0" in error.value.message
    with pytest.raises(ConfigError, match=r"processes 1, 3 of 4 .*: collective 3 is none in process 1"):
        refuse_difference([said(mine), said(mine, without={2}), said(mine), said(mine, without={2})])


def test_an_attempt_of_the_same_launch_takes_the_order_that_was_read_before(program, tmp_path, monkeypatch):
    """A line that only the file has shows it; another launch, and another split of devices, read their own order."""
    devices = [SimpleNamespace(process_index=i // 2) for i in range(8)]
    driven = cast(jax.sharding.Mesh, SimpleNamespace(devices=np.array(devices, object).reshape(2, 4)))
    order = lambda: order_of_step(program, driven, SPEC.placement(CLUSTER), tmp_path)
    monkeypatch.setenv("MESHKIT_LAUNCH", "one")
    first = order()
    assert first is not None
    marked = replace(first, collectives=(replace(first.collectives[0], line="marked"), *first.collectives[1:]))
    marked.write(tmp_path)
    assert order() == marked
    monkeypatch.setenv("MESHKIT_LAUNCH", "another")
    other = order()
    assert other is not None
    assert other.collectives == first.collectives
    monkeypatch.setenv("MESHKIT_LAUNCH", "one")
    driven.devices[0, 0].process_index = 3
    assert order() != marked
