"""Programs of an older XLA as today's reads them. The compile itself needs that XLA: benchmarks/older_xla."""

import dataclasses

import pytest

from benchmarks.older_xla.programs import in_fp8, with_groups
from meshkit.hlo import proto as wire
from meshkit.hlo.costs import Cost, Matmul
from meshkit.hlo.schedule import Instruction, Schedule


def _key(n: int) -> bytes:
    return bytes((n,)) if n < 128 else bytes((n & 127 | 128, n >> 7))


def _field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return _key(number << 3) + bytes((value,))
    return _key(number << 3 | 2) + bytes((len(value),)) + value


def _module(device_list: bytes) -> bytes:
    instruction = _field(1, b"all-gather") + _field(87, device_list) + _field(2, b"all-gather-start")
    computation = _field(1, b"main") + _field(2, _field(1, b"p") + _field(35, 7)) + _field(2, instruction)
    return _field(1, _field(1, b"jit_step") + _field(3, computation) + _field(2, b"main"))


def _groups(module: bytes) -> list[list[int]]:
    (computation,) = wire.messages(wire.read_fields(module), 3)
    *_, fields = wire.messages(computation, 2)
    assert wire.text(fields, 1) == "all-gather"
    assert wire.text(fields, 2) == "all-gather-start"
    return [wire.ints(group, 1) for group in wire.messages(fields, 49)]


@pytest.mark.parametrize(
    ("iota", "expected"),
    [
        # [2,4]<=[8] and [4,2]<=[2,4]T(1,0), as XLA prints them
        (_field(1, 2) + _field(2, 4) + _field(3, b"\x08") + _field(4, b"\x00"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (
            _field(1, 4) + _field(2, 2) + _field(3, b"\x02\x04") + _field(4, b"\x01\x00"),
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
    ],
    ids=["in order", "transposed"],
)
def test_iota_device_lists_are_written_out(iota, expected):
    assert _groups(with_groups(_module(_field(2, iota)))) == expected


def test_explicit_device_lists_are_kept():
    explicit = _field(1, _field(1, b"\x00\x02")) + _field(1, _field(1, b"\x01\x03"))
    assert _groups(with_groups(_module(explicit))) == [[0, 2], [1, 3]]


def test_matmuls_of_gradients_are_priced_in_fp8():
    def matmul(dtype: str) -> Instruction:
        m = Matmul(dtype, 1, 64, 256, 128)
        return Instruction("dot", "custom-call", "kernel", cost=Cost({dtype: m.flops}, matmuls=(m,)))

    copy = Instruction("copy", "copy", "kernel", cost=Cost(bytes_accessed=8.0))
    schedule = Schedule("step", {"main": (matmul("f16"), matmul("f8e4m3fn"), matmul("bf16"), copy)}, "main", "f")
    gradient, *others = in_fp8(schedule).computations["main"]
    assert gradient.cost == dataclasses.replace(
        matmul("f8e5m2").cost,  # pyright: ignore[reportArgumentType]
        matmul_flops={"f8e5m2": 2.0 * 64 * 256 * 128},
    )
    assert others == [matmul("f8e4m3fn"), matmul("bf16"), copy]
