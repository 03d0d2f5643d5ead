"""Test that propose finds the fastest assignment of axes to links, for handmade traffic and by exhaustive search."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.errors import ConfigError
from meshkit.predict.network import collective_time_s
from meshkit.report.schema import CommunicationPart, MeshAxisPart, Report, StepPart, WindowPart
from meshkit.search.proposals import Traffic, assignments, propose, traffic_of

GIB = 2**30
HEAVY = Traffic(("tensor",), "all-reduce", GIB, 64)
LIGHT = Traffic(("data",), "all-reduce", GIB, 1)


@pytest.fixture(scope="module")
def cluster():
    return Cluster.load("dgx_h100", hosts=8)


def price(row, mesh, cluster):
    axes = [axis for axis in mesh.axes if axis.name in row.axes]
    shape = [math.prod(axis.number(link) for axis in axes) for link in ("nvlink", "infiniband")]
    return row.count * collective_time_s(
        row.collective, payload_bytes=row.payload_bytes, gpus_per_domain=shape[0], domains=shape[1], cluster=cluster
    )


def test_the_axis_that_moves_most_goes_inside_the_domain(cluster):
    mesh = MeshSpec.parse({"data": 8, "tensor": {"infiniband": 8}})
    found = propose([HEAVY, LIGHT], mesh, cluster)
    assert found.axes == (MeshAxis("data", 1, 8), MeshAxis("tensor", 8, 1))
    assert found.changed == ("data", "tensor")
    assert found.settings == ("mesh.data={ infiniband = 8 }", "mesh.tensor=8")
    assert found.seconds_now == pytest.approx(sum(price(row, mesh, cluster) for row in (HEAVY, LIGHT)))
    assert found.seconds_proposed == pytest.approx(sum(price(row, found.mesh, cluster) for row in (HEAVY, LIGHT)))
    assert found.seconds_proposed < found.seconds_now / 2
    assert found.reason.startswith(
        "axis 'tensor' moves 64.0 GiB a step on each GPU and would stay inside an NVLink domain instead of crossing 8; "
        "with data = { infiniband = 8 }, tensor = 8 communication takes "
    )
    assert found.reason.endswith(" a step, if none overlaps.")


def test_the_best_assignment_is_kept(cluster):
    mesh = MeshSpec.parse({"data": {"infiniband": 8}, "tensor": 8})
    found = propose([HEAVY, LIGHT], mesh, cluster)
    assert (found.axes, found.changed, found.settings) == (mesh.axes, (), ())
    assert found.seconds_now == found.seconds_proposed
    assert "of the 4 assignments with these axis sizes none is faster" in found.reason


def test_an_axis_may_be_split_over_both_links(cluster):
    """32-way tensor traffic does not fit a domain of 8, so as much of it as possible should."""
    mesh = MeshSpec.parse({"data": {"nvlink": 2}, "tensor": {"nvlink": 4, "infiniband": 8}})
    found = propose([HEAVY, LIGHT], mesh, cluster)
    assert found.axes == (MeshAxis("data", 1, 2), MeshAxis("tensor", 8, 4))
    assert "would cross 4 NVLink domains instead of 8" in found.reason


def test_axes_that_share_a_collective_are_named_together(cluster):
    mesh = MeshSpec.parse({"other": 8, "a": {"infiniband": 2}, "b": {"infiniband": 4}})
    found = propose([Traffic(("a", "b"), "all-gather", GIB, 8)], mesh, cluster)
    assert found.axes == (MeshAxis("other", 1, 8), MeshAxis("a", 2, 1), MeshAxis("b", 4, 1))
    assert found.reason.startswith("axes 'a' and 'b' together move 8.00 GiB a step")


def test_fill_is_resolved_before(cluster):
    mesh = MeshSpec.parse({"data": "fill", "tensor": {"infiniband": "fill"}})
    assert propose([HEAVY], mesh, cluster).settings == ("mesh.data={ infiniband = 8 }", "mesh.tensor=8")


def test_nothing_to_move_and_nothing_to_choose(cluster):
    mesh = MeshSpec.parse({"data": {"infiniband": 8}, "tensor": 8})
    assert propose([], mesh, cluster).reason == "there is no communication to place."
    one = Cluster.load("dgx_h100")
    alone = propose([HEAVY], MeshSpec.parse({"data": 1, "tensor": 8}), one)
    assert alone.reason == "no other assignment of axes of these sizes fits 1 NVLink domain of 8 GPUs."


def test_a_domain_of_part_of_a_rack():
    """An all-to-all sends to every peer, so half of it would leave the rack; a ring of 32 GPUs a rack has 32 NICs."""
    rack = Cluster.load("gb200_nvl72", hosts=36, gpus_used_per_domain=64)
    mesh = MeshSpec.parse({"data": 2, "expert": {"nvlink": 32, "infiniband": 2}})
    found = propose([Traffic(("expert",), "all-to-all", GIB, 100), LIGHT], mesh, rack)
    assert found.axes == (MeshAxis("data", 1, 2), MeshAxis("expert", 64, 1))
    ring = propose([Traffic(("expert",), "all-gather", GIB, 100), LIGHT], mesh, rack)
    assert not ring.changed


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=4),
    st.sampled_from([("dgx_h100", 8), ("gb200_nvl72", 72)]),
)
def test_assignments_are_all_that_fit(sizes, machine):
    """The expected assignments are every split of every axis whose products are right."""
    name, per_domain = machine
    total = math.prod(sizes)
    expected = [
        factors
        for factors in itertools.product(*([d for d in range(1, size + 1) if size % d == 0] for size in sizes))
        if per_domain % math.prod(factors) == 0
    ]
    for used in {math.prod(factors) for factors in expected}:
        hosts = total // used * Cluster.load(name).hosts
        cluster = Cluster.load(name, hosts=hosts, gpus_used_per_domain=used)
        first = next(factors for factors in expected if math.prod(factors) == used)
        mesh = MeshSpec(tuple(MeshAxis(f"a{i}", a, size // a) for i, (a, size) in enumerate(zip(first, sizes))))
        found = [tuple(axis.nvlink for axis in spec.axes) for spec in assignments(mesh, cluster)]
        assert sorted(found) == sorted(factors for factors in expected if math.prod(factors) == used)
        assert all(spec.resolve(cluster) == spec and spec.shape == mesh.shape for spec in assignments(mesh, cluster))


KINDS = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from("abc"), min_size=1), st.sampled_from(KINDS), st.integers(10, 32)), max_size=5
    )
)
def test_no_assignment_is_faster_than_the_proposed_one(drawn):
    cluster = Cluster.load("dgx_h100", hosts=8)
    mesh = MeshSpec.parse({"a": {"infiniband": 4}, "b": {"nvlink": 2, "infiniband": 2}, "c": 4})
    rows = [Traffic(tuple(sorted(axes)), kind, 2.0**exponent) for axes, kind, exponent in drawn]
    found = propose(rows, mesh, cluster)
    best = min(sum(price(row, spec, cluster) for row in rows) for spec in assignments(mesh, cluster))
    assert found.seconds_proposed <= found.seconds_now
    assert best <= found.seconds_proposed <= best / 0.99  # Gains below 1 % are not proposed.


def make_report(rows, mesh=()):
    return Report(
        source="plan", window=WindowPart(steps=1, devices=1), step=StepPart(), communication=rows, mesh=tuple(mesh)
    )


def make_row(**fields):
    base = {"axes": ("tensor",), "axes_complete": True, "collective": "all-reduce", "group_size": 8, "count": 4}
    return CommunicationPart(**base | {"gpus_per_domain": 1, "payload_bytes": 4 * GIB} | fields)


def test_the_rows_of_a_report_are_traffic():
    rows = [
        make_row(),
        make_row(axes=("data",), axes_complete=False, group_size=4, gpus_per_domain=2),
        make_row(axes=(), axes_complete=None, group_size=16, gpus_per_domain=8),
        make_row(axes=(), axes_complete=None, collective=None, group_size=None),
        make_row(count=0),
    ]
    assert traffic_of(make_report(rows)) == (
        Traffic(("tensor",), "all-reduce", GIB, 4),
        Traffic(("data",), "all-reduce", GIB, 4, shape=(2, 2)),
        Traffic((), "all-reduce", GIB, 4, shape=(8, 2)),
    )


def test_a_report_is_proposed_from_and_what_no_axis_explains_stays(cluster):
    mesh = MeshSpec.parse({"data": 8, "tensor": {"infiniband": 8}})
    parts = [MeshAxisPart(axis=axis.name, size=axis.size) for axis in mesh.axes]
    fixed = make_row(axes=(), group_size=16, gpus_per_domain=8, axes_complete=None)
    found = propose(make_report([make_row(), fixed], parts), mesh, cluster)
    alone = propose(make_report([make_row()], parts), mesh, cluster)
    assert found.axes == alone.axes == (MeshAxis("data", 1, 8), MeshAxis("tensor", 8, 1))
    extra = 4 * collective_time_s("all-reduce", payload_bytes=GIB, gpus_per_domain=8, domains=2, cluster=cluster)
    assert found.seconds_now - alone.seconds_now == pytest.approx(extra)
    assert found.seconds_proposed - alone.seconds_proposed == pytest.approx(extra)


@pytest.mark.parametrize(
    ("source", "mesh", "message"),
    [
        (
            [Traffic(("expert",), "all-to-all", 1)],
            {"data": 8, "tensor": {"infiniband": 8}},
            "traffic over axis 'expert'",
        ),
        ([HEAVY], {"data": 4, "tensor": {"infiniband": 8}}, "multiply to 4"),
        (
            make_report([], [MeshAxisPart(axis="data", size=64)]),
            {"data": 8, "tensor": {"infiniband": 8}},
            "of the mesh",
        ),
    ],
)
def test_what_is_refused(source, mesh, message, cluster):
    with pytest.raises(ConfigError, match=message):
        propose(source, MeshSpec.parse(mesh), cluster)


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_shipped_cluster_has_a_proposal(name):
    """A machine with a network gets four domains, and the heavy axis comes to lie inside a domain."""
    machine = Cluster.load(name)
    if machine.nic is not None or machine.is_cpu:
        machine = Cluster.load(name, hosts=4 * machine.hosts // machine.num_nvlink_domains)
    inside, across = machine.gpus_used_per_domain, machine.num_nvlink_domains
    mesh = MeshSpec.parse({"fsdp": {"infiniband": across} if across > 1 else 1, "tensor": inside})
    traffic = [Traffic(("fsdp",), "all-gather", 2**20), Traffic(("tensor",), "all-reduce", 2**28, 100)]
    best = propose(traffic, mesh, machine)
    assert best.mesh.shape == (across, inside)
    assert 0 < best.seconds_proposed <= best.seconds_now
    assert best.reason.endswith(".")


def test_65536_gpus_take_less_than_two_seconds():
    machine = Cluster.load("dgx_h100", hosts=8192)
    links = {"data": 16, "fsdp": 32, "expert": 4, "context": 2, "pipeline": 2}
    mesh = MeshSpec.parse({**{name: {"infiniband": n} for name, n in links.items()}, "tensor": 4, "inner": 2})
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    traffic = [Traffic((axis,), kind, 2.0**e) for axis in mesh.axis_names for kind in kinds for e in (10, 20, 27)]
    began = time.process_time()
    best = propose(traffic, mesh, machine)
    assert time.process_time() - began < 2
    assert math.prod(best.mesh.shape) == 65536
    assert best.seconds_proposed <= best.seconds_now
