"""Test replica groups in every form that XLA keeps, and how their ids map to axes and links."""

import numpy as np
import pytest

from meshkit.config.mesh import Placement
from meshkit.errors import ProgramError
from meshkit.hlo.proto import HloInstruction
from meshkit.hlo.schedule import group_shape, read_groups
from tests.hlo_text import parse_hlo

# These spellings mean the same: groups along the second axis of a 2 x 4 mesh.
ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
COLUMNS = [[0, 4], [1, 5], [2, 6], [3, 7]]
EVERYONE = [list(range(8))]
MODULE = """HloModule m, num_partitions=8
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}}
ENTRY %main (x: f32[64]) -> f32[64] {{
  %x = f32[64] parameter(0)
  ROOT %c = f32[64] {}
}}
"""


def groups_of(text, partitions=8):
    """Return the groups of a collective, through the message in which a compiled program keeps them."""
    if "pairs" in text:
        op = f"collective-permute(%x), channel_id=1, {text}"
    else:
        op = f"all-reduce(%x), channel_id=1, {text}{', ' if text else ''}use_global_device_ids=true, to_apply=%add"
    return read_groups(parse_hlo(MODULE.format(op)).instructions["c"], partitions).tolist()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ROWS),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}", ROWS),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ROWS),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", COLUMNS),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data'}", COLUMNS),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'data','tensor'}", EVERYONE),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['data'=2,'tensor'=4] {'tensor':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # The ids in the mesh's order are 0 2 4 6 along the first row and 1 3 5 7 along the second.
        (
            "replica_groups=mesh['data'=2,'tensor'=4], device_ids=([4,2]T(1,0)) {'data'}",
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        ("replica_groups=mesh['data'=2,'tensor'=2,'x'=2], device_ids=([2,4]T(1,0)) {'x'}", COLUMNS),
        ("replica_groups={}", EVERYONE),
        ("", EVERYONE),
        ("source_target_pairs={{0,1},{1,2}}", [[0, 1], [1, 2]]),
    ],
)
def test_forms(text, groups):
    assert groups_of(text) == groups


def test_three_dimensional_iota():
    assert groups_of("replica_groups=[8,2]<=[2,2,4]T(0,2,1)", 16)[:3] == [[0, 4], [1, 5], [2, 6]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({92: [b"\x08\x01\x10\x80\x80\x80\x80\x10\x1a\x05\x80\x80\x80\x80\x10"]}, "more than a program can have"),
        ({92: [b"\x08\x02\x10\x04\x1a\x01\x07"]}, "cannot be read"),
        ({49: [b"\x0a\x05\x80\x80\x80\x80\x10"]}, "has partitions 4294967296 to"),
        ({49: [b"\x0a\x0a" + b"\xff" * 9 + b"\x01"]}, "c has partitions|cannot be read"),
    ],
)
def test_groups_that_no_program_has(fields, message):
    with pytest.raises(ProgramError, match=message):
        read_groups(HloInstruction("c", "all-reduce", fields), 8)


def test_a_partition_that_the_mesh_lacks():
    with pytest.raises(ProgramError, match="partition 8, but the mesh has 8"):
        group_shape(np.array([[0, 8]]), Placement.from_shape(("x",), (8,)))


def test_groups_of_unequal_size_are_an_error():
    with pytest.raises(ProgramError, match=r"collective c cannot be read: .*of unequal size: \[1, 2\]"):
        groups_of("replica_groups={{0,1},{2}}", 3)


def placement():
    """Return data 2 over InfiniBand x fsdp 4 (2 on NVLink x 2 over InfiniBand): 4 domains of 2 GPUs."""
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
