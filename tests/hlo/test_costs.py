"""Test the costs of single instructions against values counted by hand."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshkit.config.mesh import Placement
from meshkit.hlo.costs import Matmul, sort_passes
from meshkit.hlo.module import read_schedule
from meshkit.hlo.proto import Module, Shape
from tests.hlo_text import parse_hlo

FILE = Path(__file__).parent.parent / "data" / "hlo" / "costs.hlo"


@pytest.fixture(scope="module")
def schedule():
    return read_schedule(parse_hlo(FILE.read_text()), Placement.from_shape(("data",), (8,)))


@pytest.fixture(scope="module")
def costs(schedule):
    return {i.name: i.cost for i in schedule.computations[schedule.entry] if i.cost}


@pytest.mark.parametrize(
    ("length", "bits", "passes", "steps", "tile"),
    [
        (1, 32, 1, 0, 1),
        (4096, 32, 1, 78, 4096),  # One tile holds all of it: 1 + 2 + ... + 12 steps.
        (4097, 32, 3, 90, 4096),  # After the tiles, one comparison is wide; then comes the rest of the stage.
        (65536, 32, 15, 126, 4096),  # After the tiles come 4 stages: (1 + 1) + (2 + 1) + (3 + 1) + (4 + 1).
        # 48 KiB hold 3072 elements of 16 bytes, so a tile is 2048 and 5 stages are beyond it.
        (65536, 128, 21, 121, 2048),
    ],
)
def test_a_sort_passes_over_its_arrays_for_each_comparison_that_no_tile_holds(length, bits, passes, steps, tile):
    dtype = {32: "f32", 128: "c128"}[bits]
    assert sort_passes([Shape(dtype, (8, length))], 1) == (passes, steps, tile)


def test_each_pass_of_a_sort_is_a_launch_and_reads_and_writes_everything(costs):
    """Of keys with values, 4 bytes each, 48 KiB hold 6144 pairs: a tile is 4096, and 65536 pairs take 15 passes."""
    both = 65536 * 8
    for name in ("sorted", "plain"):
        assert costs[name].launches == 15
        assert costs[name].bytes_accessed == pytest.approx(15 * 2 * both)
        assert costs[name].compared == (126, 4096, 65536)


def test_what_is_opaque_is_so_inside_a_fusion_too(costs, schedule):
    assert costs["wrapped"].priced_by == "bytes"
    named = schedule.notes["opaque custom call"]
    assert [n.partition(" ")[0] for n in named] == ["wrapped", "solved"]


@pytest.mark.parametrize(
    ("rows", "dtype", "unique", "noted"),
    [
        (32, jnp.bfloat16, False, "additions in bf16 to each element)"),
        (32, jnp.float32, False, None),  # The GPU has an atomic addition for it.
        (8192, jnp.bfloat16, False, None),
        (32, jnp.bfloat16, True, None),
    ],
)
def test_additions_in_16_bits_to_few_rows_are_noted(rows, dtype, unique, noted):
    def add(table, ids, updates):
        return table.at[ids].add(updates, unique_indices=unique)

    shapes = [((rows, 16), dtype), ((16384,), jnp.int32), ((16384, 16), dtype)]
    lowered = jax.jit(add).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).compiler_ir("hlo")
    module = Module(lowered.as_serialized_hlo_module_proto())
    found = read_schedule(module, Placement.from_shape(("data",), (1,))).notes.get("crowded scatter", [])
    assert [n.partition(" (512 ")[2] for n in found] == ([noted] if noted else [])


def test_a_triangular_solve_is_no_matmul(costs):
    assert (costs["solved"].priced_by, costs["solved"].matmul_flops) == ("bytes", {})


def test_what_only_streams_its_arrays_is_priced_by_them(costs):
    assert costs["best"].priced_by == "roofline"
    assert costs["best"].bytes_accessed == 64 * 64 * 4 + 2 * 64 * 4 * 4


def test_a_complex_multiply_add_is_four_of_its_parts(costs):
    assert costs["complex"].matmul_flops == {"f32": 4 * 2 * 32 * 32 * 16}


def test_a_look_up_reads_its_rows_or_a_sector_an_element_where_memory_lies_along_the_table(costs):
    rows, indices = 64 * 128 * 2, 64 * 4
    assert costs["looked_up"].bytes_accessed == 2 * rows + indices
    # The look-up meets a quarter of the table's sectors, some of them twice.
    table, met = 4096 * 128 * 2, 32 * 64 * 128
    assert costs["picked_out"].bytes_accessed == pytest.approx(table * (1 - math.exp(-met / table)) + rows + indices)
    assert (costs["picked_out"].sectors, costs["looked_up"].sectors) == (64 * 128, 0)


def test_a_scatter_reads_and_writes_the_rows_that_it_adds_to_and_not_its_table(costs):
    assert costs["scattered"].bytes_accessed == 64 * 128 * (2 + 2 * 4) + 64 * 4
    assert costs["scattered"].added == (64 * 128, 0)
    assert costs["scattered"].blocks == 64 * 128 / 512
    assert costs["scattered_across"].added == (0, 64 * 128)


def test_a_loop_starts_a_block_for_512_elements_of_its_largest_result(costs):
    assert costs["filled"].blocks == 1024 * 512 / 512
    assert costs["filled"].bytes_accessed == 1024 * 512 * 2 + 512 * 512 * 4


def test_what_joins_arrays_starts_blocks_of_its_largest_and_makes_four_elements_a_thread_along_memory_alone(costs):
    assert costs["put_apart"].blocks == 512 * 4 * 128 / 128
    assert costs["put_along"].blocks == 512 * 64 / 512


def test_a_transposition_counts_its_elements(costs):
    assert costs["transposed"].transposed == 64 * 256
    assert {costs[name].transposed for name in ("put_apart", "filled", "turned")} == {0}


HASH = """HloModule hash, is_scheduled=true

fused (a: u32[64], b: u32[64]) -> u32[128] {
  a = u32[64] parameter(0)
  b = u32[64] parameter(1)
  sum = u32[64] add(a, b)
  five = u32[] constant(5)
  fives = u32[64] broadcast(five), dimensions={}
  rest = u32[] constant(27)
  rests = u32[64] broadcast(rest), dimensions={}
  up = u32[64] shift-left(sum, fives)
  down = u32[64] shift-right-logical(sum, rests)
  rotated = u32[64] or(up, down)
  mixed = u32[64] xor(rotated, sum)
  wide = u64[64] convert(sum)
  both = u64[64] multiply(wide, wide)
  high = u64[64] shift-right-logical(both, wide)
  other = u32[64] convert(high)
  ROOT parts = u32[128] concatenate(mixed, other), dimensions={0}
}

indices (a: u32[64]) -> u32[64] {
  a = u32[64] parameter(0)
  ROOT next = u32[64] add(a, a)
}

ENTRY main (a: u32[64], b: u32[64]) -> u32[64] {
  a = u32[64] parameter(0)
  b = u32[64] parameter(1)
  hashed = u32[128] fusion(a, b), kind=kLoop, calls=fused
  ROOT indexed = u32[64] fusion(a), kind=kLoop, calls=indices
}
"""


def test_integers_of_a_hash_count_and_those_of_indices_do_not():
    """One part adds, rotates and mixes (3), the other adds and multiplies in 64 bits (1 + 2)."""
    schedule = read_schedule(parse_hlo(HASH), Placement.from_shape(("data",), (1,)))
    costs = {i.name: i.cost for i in schedule.computations[schedule.entry] if i.cost}
    assert (costs["hashed"].integers, costs["indexed"].integers) == (64 * (3 + 3), 0)


def test_an_array_that_is_updated_in_place_and_read_on_is_read(costs):
    """The last gradients are put into a stack on the way to the sum of its squares."""
    assert costs["normed"].bytes_accessed == (32 + 1) * 128 * 4 + 4 + 4
    assert costs["stacked"].bytes_accessed == 2 * 128 * 4 + 4


def test_a_fused_matmul_joins_its_operands_for_cublas_and_turns_those_in_fp8(costs):
    assert (costs["joined"].joined_bytes, costs["joined"].launches) == (2 * 64 * 48 * 2, 2)
    assert costs["turned"].turned_bytes == 2 * 64 * 32
    assert costs["joined"].turned_bytes == costs["turned"].joined_bytes == costs["complex"].joined_bytes == 0.0


COLUMNS = """HloModule columns, is_scheduled=true

add (a: f32[], b: f32[]) -> f32[] {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

grouped (a: f32[8,64,32,12]) -> f32[8,32,12] {
  a = f32[8,64,32,12] parameter(0)
  zero = f32[] constant(0)
  ROOT sums = f32[8,32,12] reduce(a, zero), dimensions={1}, to_apply=add
}

narrow (a: f32[8,64,32,12]) -> f32[8,64,12] {
  a = f32[8,64,32,12] parameter(0)
  zero = f32[] constant(0)
  ROOT sums = f32[8,64,12] reduce(a, zero), dimensions={2}, to_apply=add
}

ENTRY main (a: f32[8,64,32,12]) -> f32[8,64,12] {
  a = f32[8,64,32,12] parameter(0)
  wide = f32[8,32,12] fusion(a), kind=kInput, calls=grouped
  ROOT apart = f32[8,64,12] fusion(a), kind=kInput, calls=narrow
}
"""


def test_columns_are_as_narrow_as_what_lies_side_by_side():
    """Rows of 32 x 12 fill warps; rows of 12 leave 20 of their 32 threads without work."""
    schedule = read_schedule(parse_hlo(COLUMNS), Placement.from_shape(("data",), (1,)))
    costs = {i.name: i.cost for i in schedule.computations[schedule.entry] if i.cost}
    assert costs["wide"].column_elements == 0
    assert costs["apart"].column_elements == pytest.approx(8 * 64 * 32 * 12 * 32 / 12)


BLOCK_SCALED = """HloModule scaled, is_scheduled=true

ENTRY main (a: f8e4m3fn[2,64,96], b: f8e4m3fn[2,32,96], x: f8e8m0fnu[2,64,3], y: f8e8m0fnu[2,32,3]) -> bf16[64,32] {
  a = f8e4m3fn[2,64,96] parameter(0)
  b = f8e4m3fn[2,32,96] parameter(1)
  x = f8e8m0fnu[2,64,3] parameter(2)
  y = f8e8m0fnu[2,32,3] parameter(3)
  many = (bf16[2,64,32], u8[16]) custom-call(a, b, x, y), custom_call_target="__cudnn$blockScaledDot"
  c = f4e2m1fn[64,96] parameter(4)
  d = f4e2m1fn[32,96] parameter(5)
  z = f8e4m3fn[64,6] parameter(6)
  w = f8e4m3fn[32,6] parameter(7)
  ROOT one = bf16[64,32] custom-call(c, d, z, w), custom_call_target="__cudnn$blockScaledDot"
}
"""


def test_block_scaled_calls_contract_the_last_dim_of_both():
    schedule = read_schedule(parse_hlo(BLOCK_SCALED), Placement.from_shape(("data",), (1,)))
    costs = {i.name: i.cost for i in schedule.computations[schedule.entry] if i.cost}
    assert costs["many"].matmuls == (Matmul("mxfp8", 2, 64, 32, 96),)
    assert costs["one"].matmuls == (Matmul("f4e2m1fn", 1, 64, 32, 96),)
    assert costs["many"].priced_by == "roofline"
    assert costs["many"].bytes_accessed == 2 * (64 + 32) * (96 + 3) + 2 * 64 * 32 * 2
