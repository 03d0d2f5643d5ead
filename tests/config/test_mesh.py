"""Test the mesh grammar: parsing, `fill`, the closed form of the order of GPUs, and errors of invalid meshes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.mesh import MeshAxis, MeshSpec, Placement
from meshkit.errors import ConfigError


def closed_form(spec, cluster, coordinates):
    """Return the GPU at mesh coordinates, computed one axis at a time as the grammar says.

    An axis index is `ib_index * nvlink + nvlink_index`; domain and place inside it are row-major, outermost axis first.
    """
    domain = local = 0
    for axis, index in zip(spec.axes, coordinates):
        ib_index, nvlink_index = divmod(index, axis.nvlink)
        domain = domain * axis.infiniband + ib_index
        local = local * axis.nvlink + nvlink_index
    return domain * cluster.gpus_used_per_domain + local


MESHES = [
    ("dgx_h100", 8, {"data": {"infiniband": 2}, "fsdp": {"nvlink": 2, "infiniband": 4}, "tensor": 4}),
    ("dgx_h100", 2, {"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2}),
    ("dgx_h100", 64, {"fsdp": {"nvlink": 8, "infiniband": 64}}),
    ("dgx_h100", 4, {"a": {"nvlink": 2, "infiniband": 2}, "b": {"nvlink": 4, "infiniband": 2}, "c": 1}),
    ("gb200_nvl72", 36, {"data": {"infiniband": "fill"}, "tensor": "fill"}),
    ("cpu8", 1, {"data": 2, "fsdp": 2, "tensor": 2}),
]


@pytest.mark.parametrize(("name", "hosts", "mesh"), MESHES)
def test_device_order_is_the_closed_form(name, hosts, mesh):
    cluster = Cluster.load(name, hosts=hosts)
    spec = MeshSpec.parse(mesh).resolve(cluster)
    order = spec.device_order(cluster)
    assert order.shape == spec.shape
    for coordinates in itertools.product(*map(range, spec.shape)):
        assert order[coordinates] == closed_form(spec, cluster, coordinates)


@st.composite
def factored(draw, n, axes):
    """Draw factors of n, one per axis."""
    factors = [1] * axes
    while n > 1:
        prime = next(p for p in itertools.count(2) if n % p == 0)
        factors[draw(st.integers(0, axes - 1))] *= prime
        n //= prime
    return factors


@st.composite
def shipped_cluster_and_mesh(draw, name):
    """Draw a shipped cluster with any number of domains and of GPUs used of each, and any mesh that fits it."""
    one = Cluster.load(name)
    domains = draw(st.integers(1, 64)) if one.nic or one.is_cpu else 1
    used = draw(st.one_of(st.just(one.nvlink_domain_size), st.integers(1, one.nvlink_domain_size)))
    cluster = Cluster.load(name, hosts=domains * one.hosts_per_domain, gpus_used_per_domain=used)
    axes = draw(st.integers(1, 5))
    inside, across = draw(factored(used, axes)), draw(factored(domains, axes))
    mesh = {f"axis{i}": {"nvlink": a, "infiniband": b} for i, (a, b) in enumerate(zip(inside, across))}
    return cluster, MeshSpec.parse(mesh).resolve(cluster)


def groups(placement, spec, link):
    """Return [groups, members] partitions that differ only in the factors of one link, for all sets of axes at once.

    Each axis is split into its InfiniBand and its NVLink factor, which gives two sets of dims; a group runs over one
    set.
    """
    split = [factor for axis in spec.axes for factor in (axis.infiniband, axis.nvlink)]
    ids = np.arange(placement.num_partitions).reshape(split)
    across, inside = range(0, len(split), 2), range(1, len(split), 2)
    outer, inner = (across, inside) if link == "nvlink" else (inside, across)
    members = math.prod(split[i] for i in inner)
    return ids.transpose(*outer, *inner).reshape(-1, members)


@pytest.mark.parametrize("name", shipped_clusters())
@settings(max_examples=200)
@given(data=st.data())
def test_every_group_is_on_the_link_that_the_spec_says(name, data):
    cluster, spec = data.draw(shipped_cluster_and_mesh(name))
    placement = spec.placement(cluster)
    assert sorted(placement.gpus) == list(range(cluster.num_gpus))
    for axis, (_, ids) in enumerate(lines(placement, spec)):
        domains = placement.domains[ids]
        nvlink, infiniband = spec.axes[axis].nvlink, spec.axes[axis].infiniband
        by_domain = domains.reshape(-1, infiniband, nvlink)
        assert (by_domain == by_domain[:, :, :1]).all()  # Each NVLink group lies inside one domain.
        distinct = np.sort(by_domain[:, :, 0], axis=1)
        assert (np.diff(distinct, axis=1) > 0).all()  # Each group spans exactly the declared number of domains.
    inside = placement.domains[groups(placement, spec, "nvlink")]
    assert (inside == inside[:, :1]).all()
    across = groups(placement, spec, "infiniband")
    assert (np.sort(placement.domains[across], axis=1) == np.arange(cluster.num_nvlink_domains)).all()
    # The arrays agree with the answer for each single GPU.
    some = range(0, placement.num_partitions, 1 + placement.num_partitions // 8)
    assert [placement.domains[i] for i in some] == [cluster.domain_of(int(placement.gpus[i])) for i in some]
    assert [placement.hosts[i] for i in some] == [cluster.host_of(int(placement.gpus[i])) for i in some]
    if cluster.nic:  # GPUs that talk across domains sit on the same rail, which is the same place in their hosts.
        rails = placement.rails[across]
        assert (rails == rails[:, :1]).all()
        assert rails.max() < cluster.nics_per_host
        assert [placement.rails[i] for i in some] == [cluster.rail_of(int(placement.gpus[i])) for i in some]
    else:
        assert placement.rails is None


def lines(placement, spec):
    """Yield the size of each axis and the partitions of each of its groups, in order along the axis."""
    ids = np.arange(placement.num_partitions).reshape(spec.shape)
    for i, size in enumerate(spec.shape):
        yield size, np.moveaxis(ids, i, -1).reshape(-1, size)


@pytest.mark.parametrize(
    ("overrides", "rails"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"nics_per_host": 4}, [0, 0, 1, 1, 2, 2, 3, 3]),
        ({"nics_per_host": 16}, [0, 2, 4, 6, 8, 10, 12, 14]),
        ({"nics_per_host": 1}, [0] * 8),
        ({"nvlink_domain_size": 4}, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_rails_are_the_ports_of_a_host(overrides, rails):
    cluster = Cluster.load("dgx_h100", hosts=3, **overrides)
    assert [cluster.rail_of(gpu) for gpu in range(24)] == rails * 3


def test_rails_when_part_of_a_domain_is_used():
    # 66 GPUs are 16 hosts and a half, in each of two domains.
    cluster = Cluster.load("gb200_nvl72", hosts=36, gpus_used_per_domain=66)
    placement = MeshSpec.parse({"a": {"infiniband": 2}, "b": 66}).placement(cluster)
    assert placement.rails.reshape(2, 66).tolist() == [[i % 4 for i in range(66)]] * 2
    assert placement.hosts.max() == 18 + 16


def test_inner_axes_stay_inside_a_host_where_a_domain_spans_several():
    cluster = Cluster.load("gb200_nvl72", gpus_used_per_domain=64)
    placement = MeshSpec.parse({"fsdp": 16, "tensor": 4}).placement(cluster)
    hosts = placement.hosts.reshape(16, 4)
    assert (hosts == hosts[:, :1]).all()
    assert len(set(hosts[:, 0])) == 16


@pytest.mark.parametrize("hosts", [1, 2, 64, 8192])
def test_placement_of_1_to_65536_gpus(hosts):
    cluster = Cluster.load("dgx_h100", hosts=hosts)
    spec = MeshSpec.parse({"data": {"infiniband": "fill"}, "fsdp": 4, "tensor": 2})
    placement = spec.placement(cluster)
    assert placement.num_partitions == 8 * hosts
    np.testing.assert_array_equal(placement.rails.reshape(hosts, 8), np.tile(np.arange(8), (hosts, 1)))
    one = Cluster.load("dgx_h100", gpus_used_per_domain=1)
    assert MeshSpec.parse({"data": 1}).placement(one).gpus.tolist() == [0]


def test_device_order_of_65536_gpus():
    cluster = Cluster.load("dgx_h100", hosts=8192)
    spec = MeshSpec.parse(
        {"data": {"infiniband": 64}, "fsdp": {"nvlink": 2, "infiniband": 128}, "tensor": {"nvlink": 4}}
    ).resolve(cluster)
    order = spec.device_order(cluster)
    data, fsdp, tensor = np.indices(spec.shape)
    ib_fsdp, nv_fsdp = np.divmod(fsdp, 2)
    assert order.size == 65536
    np.testing.assert_array_equal(order, (data * 128 + ib_fsdp) * 8 + nv_fsdp * 4 + tensor)


@st.composite
def cluster_and_mesh(draw):
    """Draw a mesh of up to 4 axes and the cluster that it fits."""
    factors = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4))
    per_domain, domains = math.prod(a for a, _ in factors), math.prod(b for _, b in factors)
    cluster = Cluster.load({"gpu": "h100_sxm", "gpus_per_host": per_domain, "hosts": domains, "nic": "ib_ndr"})
    return cluster, {f"axis{i}": {"nvlink": a, "infiniband": b} for i, (a, b) in enumerate(factors)}


@settings(max_examples=100)
@given(cluster_and_mesh())
def test_any_mesh_is_a_permutation_in_the_order_of_the_grammar(drawn):
    cluster, mesh = drawn
    spec = MeshSpec.parse(mesh).resolve(cluster)
    order = spec.device_order(cluster)
    assert sorted(order.reshape(-1)) == list(range(cluster.num_gpus))
    for coordinates in itertools.islice(itertools.product(*map(range, spec.shape)), 64):
        assert order[coordinates] == closed_form(spec, cluster, coordinates)


@settings(max_examples=100)
@given(cluster_and_mesh())
def test_to_dict_round_trips(drawn):
    _, mesh = drawn
    spec = MeshSpec.parse(mesh)
    assert MeshSpec.parse(spec.to_dict()) == spec
    assert list(spec.to_dict()) == list(mesh)


def test_an_integer_means_nvlink():
    assert MeshSpec.parse({"tensor": 4}) == MeshSpec.parse({"tensor": {"nvlink": 4}})
    assert MeshSpec.parse({"tensor": 4}).axes == (MeshAxis("tensor", 4, 1),)


def test_fill_takes_what_is_left_of_its_link():
    cluster = Cluster.load("dgx_h100", hosts=6)
    spec = MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": {"nvlink": "fill", "infiniband": "fill"}, "tensor": 2})
    assert spec.resolve(cluster).axes[1] == MeshAxis("fsdp", 4, 3)
    with pytest.raises(ConfigError, match="no size before `fill` is resolved"):
        _ = spec.shape


def test_placement():
    cluster = Cluster.load("dgx_h100", hosts=4)
    placement = MeshSpec.parse({"a": {"nvlink": 2, "infiniband": 4}, "b": 4}).placement(cluster)
    assert placement.num_partitions == 32
    assert placement.fabric == {"nvlink": "nvlink4_nvswitch", "infiniband": "infiniband_ndr"}
    np.testing.assert_array_equal(placement.domains, placement.gpus // 8)
    np.testing.assert_array_equal(placement.hosts, [cluster.host_of(gpu) for gpu in placement.gpus])


def test_placement_when_a_domain_spans_hosts():
    cluster = Cluster.load("gb200_nvl72", hosts=36, gpus_used_per_domain=64)
    placement = MeshSpec.parse({"a": {"infiniband": 2}, "b": 64}).placement(cluster)
    np.testing.assert_array_equal(placement.hosts, [cluster.host_of(gpu) for gpu in placement.gpus])
    assert placement.hosts.max() == 33


def test_placement_from_a_shape():
    placement = Placement.from_shape(("a", "b"), (2, 4), gpus_per_domain=4)
    assert list(placement.domains) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert list(Placement.from_shape(("a",), (4,)).domains) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("mesh", "message", "hint"),
    [
        (
            {"tensor": 16},
            "axis 'tensor' asks for 16 GPUs on NVLink, but an NVLink domain has 8.",
            "mesh.tensor = { nvlink = 8, infiniband = 2 }",
        ),
        (
            {"data": {"infiniband": 2}, "fsdp": 4, "tensor": 16},
            "axis 'tensor' asks for 16 GPUs on NVLink, but an NVLink domain has 8.",
            "mesh.tensor = 2",
        ),
        (
            {f"a{i}": 16 for i in range(40)},
            "axis 'a0' asks for 16 GPUs on NVLink, but an NVLink domain has 8.",
            "mesh.a0 = { infiniband = 2 }",
        ),
        (
            {"data": {"infiniband": "fill"}, "tensor": 16},
            "axis 'tensor' asks for 16 GPUs on NVLink, but an NVLink domain has 8.",
            "mesh.tensor = 8",
        ),
        (
            {"data": {"infiniband": 4}, "tensor": 8},
            "axis 'data' asks for 4 NVLink domains, but the cluster has 2.",
            "mesh.data = { infiniband = 2 }, or more hosts",
        ),
        (
            {"data": {"infiniband": 2}, "fsdp": 4, "tensor": 4},
            "the NVLink factors of the mesh multiply to 16 (fsdp 4 x tensor 4), but an NVLink domain uses 8 GPUs.",
            "mesh.fsdp = 2",
        ),
        (
            {"tensor": 8},
            "the InfiniBand factors of the mesh multiply to 1, but the cluster has 2 NVLink domains.",
            "mesh.tensor = { nvlink = 8, infiniband = 2 }",
        ),
        (
            {"data": {"infiniband": 2}, "fsdp": "fill", "tensor": 3},
            "the NVLink factors of the mesh multiply to 3, but an NVLink domain uses 8 GPUs, which it does not divide.",
            "mesh.tensor = 8",
        ),
        ({"a": "fill", "b": "fill"}, "axes 'a' and 'b' both say \"fill\" on NVLink; it may stand once per link.", None),
        ({"replicated": 2}, "'replicated' cannot name a mesh axis: it is reserved.", None),
        ({"": 2}, "a mesh axis needs a name.", None),
        ({}, "[mesh] has no axes.", None),
        ({"a": {}}, "axis 'a' names no link.", None),
        ({"a": {"nvlnk": 2}}, "axis 'a' has no link 'nvlnk'.", "'nvlink'"),
        ({"a": 0}, 'mesh.a must be a positive integer, "fill", or a table of nvlink and infiniband; not 0.', None),
        ({"a": {"nvlink": -2}}, 'mesh.a.nvlink must be a positive integer or "fill"; not -2.', None),
        (
            {"a": True},
            'mesh.a must be a positive integer, "fill", or a table of nvlink and infiniband; not the boolean true.',
            None,
        ),
        (
            {"a": 2.0},
            'mesh.a must be a positive integer, "fill", or a table of nvlink and infiniband; not the number 2.0.',
            None,
        ),
    ],
)
def test_what_is_refused(mesh, message, hint):
    with pytest.raises(ConfigError, match=r".") as caught:
        MeshSpec.parse(mesh).resolve(Cluster.load("dgx_h100", hosts=2))
    assert caught.value.message == message
    assert caught.value.hint == hint or (hint is None and caught.value.hint)
    assert caught.value.at
