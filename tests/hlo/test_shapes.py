"""Test how shapes of a module are read, and their sizes in bytes."""

import pytest

from meshkit.errors import ProgramError
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.proto import Module, Shape
from tests.hlo_text import parse_hlo

MODULE = """HloModule m

ENTRY e {{
  %x = f32[4] parameter(0)
  ROOT %a = {} custom-call(%x), custom_call_target="t"
}}
"""


@pytest.mark.parametrize(
    ("text", "shape", "size"),
    [
        ("bf16[4,8]", Shape("bf16", (4, 8)), 64),
        ("f32[]", Shape("f32"), 4),
        ("pred[3]", Shape("pred", (3,)), 3),
        ("s4[3]{0:E(4)}", Shape("s4", (3,)), 2),
        ("f8e4m3fn[16]", Shape("f8e4m3fn", (16,)), 16),
        ("f8e8m0fnu[16]", Shape("f8e8m0fnu", (16,)), 16),
        ("f4e2m1fn[16]", Shape("f4e2m1fn", (16,)), 8),
        ("c64[2]", Shape("c64", (2,)), 16),
        ("u16[2]", Shape("u16", (2,)), 4),
        ("f32[<=8,2]", Shape("f32", (8, 2)), 64),
        ("token[]", Shape("token"), 0),
        (
            "((bf16[2,4], f32[2]), (bf16[2,8], f32[4]), u32[])",
            Shape(
                "tuple",
                parts=(
                    Shape("tuple", parts=(Shape("bf16", (2, 4)), Shape("f32", (2,)))),
                    Shape("tuple", parts=(Shape("bf16", (2, 8)), Shape("f32", (4,)))),
                    Shape("u32"),
                ),
            ),
            16 + 8 + 32 + 16 + 4,
        ),
    ],
)
def test_shapes_and_their_bytes(text, shape, size):
    found = parse_hlo(MODULE.format(text)).instructions["a"].shape
    assert found == shape
    assert found.bytes == size


@pytest.mark.parametrize(
    ("text", "minor", "on_host"),
    [
        ("f32[2,4,8]", 2, False),
        ("f32[2,4,8]{1,2,0}", 1, False),
        ("f32[]", None, False),
        ("f32[2,4]{1,0:S(5)}", 1, True),
        ("(f32[2,4]{1,0:S(5)}, f32[2,4]{1,0})", None, True),
        ("(f32[2,4]{1,0:S(1)}, f32[2,4]{1,0})", None, False),
    ],
)
def test_the_layout_says_what_lies_along_memory_and_in_which(text, minor, on_host):
    found = parse_hlo(MODULE.format(text)).instructions["a"].shape
    assert (found.minor, found.on_host) == (minor, on_host)


def test_a_shape_of_endless_tuples_is_an_error():
    shape = b""
    for _ in range(5000):
        shape = b"\x10\x0d\x22" + _varint(len(shape)) + shape
    instruction = b"\x0a\x01a\x1a" + _varint(len(shape)) + shape + b"\x98\x02\x01"
    computation = b"\x0a\x01c\x12" + _varint(len(instruction)) + instruction + b"\x28\x01\x30\x01"
    module = Module(b"\x12\x01c\x1a" + _varint(len(computation)) + computation)
    with pytest.raises(ProgramError, match="RecursionError"):
        read_instructions(module)


def _varint(n):
    return bytes([n & 127 | 128, *_varint(n >> 7)]) if n > 127 else bytes([n])
