"""Replica groups in every form XLA prints, mapped to axes and links by ids alone."""

import numpy as np
import pytest

from meshkit.errors import ProgramError
from meshkit.spec.mesh import Placement
from meshkit.xla.groups import group_shape, parse_groups

# One meaning, five spellings: groups along the second axis of a 2 x 4 mesh.
ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
COLUMNS = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x", ROWS),
        ("replica_groups=[2,4]<=[8], x", ROWS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, x", ROWS),
        ("replica_groups=@mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, x", ROWS),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", COLUMNS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}", COLUMNS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data','tensor'}", [list(range(8))]),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replica_groups={}, x", [list(range(8))]),
        ("no groups at all", [list(range(8))]),
        ("source_target_pairs={{0,1},{1,2}}", [[0, 1], [1, 2]]),
    ],
)
def test_forms(text, groups):
    assert parse_groups(text, 8).tolist() == groups


def test_three_dimensional_iota():
    assert parse_groups("replica_groups=[8,2]<=[2,2,4]T(0,2,1)", 16).tolist()[:3] == [[0, 4], [1, 5], [2, 6]]


@pytest.mark.parametrize("text", ["replica_groups=what(1,2)", "replica_groups={{0,1},{2}}"])
def test_unknown_forms_are_errors(text):
    with pytest.raises(ProgramError, match="groups"):
        parse_groups(text, 4)


def placement():
    """data 2 over InfiniBand x fsdp 4 = 2 on NVLink x 2 over InfiniBand: 4 domains of 2."""
    return Placement.from_shape(("data", "fsdp"), (2, 4), gpus_per_domain=2)


@pytest.mark.parametrize(
    ("groups", "axes", "complete", "link", "per_domain"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",), True, "infiniband", 2),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], ("fsdp",), False, "nvlink", 2),
        ([[0, 2], [1, 3], [4, 6], [5, 7]], ("fsdp",), False, "infiniband", 1),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], ("data",), True, "infiniband", 1),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ("data", "fsdp"), True, "infiniband", 2),
        ([[i] for i in range(8)], (), True, "nvlink", 1),
    ],
)
def test_axes_and_link(groups, axes, complete, link, per_domain):
    shape = group_shape(np.array(groups), placement())
    assert (shape.axes, shape.axes_complete, shape.link, shape.gpus_per_domain) == (axes, complete, link, per_domain)
    assert shape.group_size * shape.num_groups == 8


def test_a_permute_belongs_to_the_axis_it_moves_along():
    ring = np.array([[i, (i + 1) % 4] for i in range(4)] + [[4 + i, 4 + (i + 1) % 4] for i in range(4)])
    shape = group_shape(ring, placement(), permute=True)
    assert (shape.axes, shape.link, shape.group_size, shape.num_groups) == (("fsdp",), "infiniband", 4, 2)
