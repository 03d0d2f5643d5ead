"""Test schedules read from handwritten HLO, one file for each form, against results worked out by hand.

The mesh is data 2 over InfiniBand x tensor 4 on NVLink. Arrays are fp32 unless a name says otherwise.
"""

import contextlib
from pathlib import Path

import pytest

from meshkit.config.mesh import Placement
from meshkit.errors import ProgramError
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import read_program, read_schedule
from meshkit.hlo.proto import Module, read_fields
from tests.hlo_text import parse_hlo, serialized_hlo

FILES = Path(__file__).parent.parent / "data" / "hlo"
PLACEMENT = Placement.from_shape(("data", "tensor"), (2, 4), gpus_per_domain=4)
BOTH, DATA, TENSOR = ("data", "tensor"), ("data",), ("tensor",)


def read(name):
    return read_schedule(parse_hlo((FILES / f"{name}.hlo").read_text()), PLACEMENT)


def counted(schedule):
    """Return instruction name -> (kind, how often it runs), without those that take no time."""
    return {i.name: (i.kind, times) for i, times in schedule.walk() if i.kind != "free"}


def communication(schedule):
    """Return instruction name -> (kind, collective, axes, link, payload bytes)."""
    return {
        i.name: (i.kind, c.collective, c.axes, c.link, c.payload_bytes)
        for i, _ in schedule.walk()
        if (c := i.collective) is not None
    }


def test_loops_multiply_and_what_is_peeled_off_counts_once():
    """With 5 iterations inside 3, the all-reduce runs 15 times in the loop and once, peeled, before it."""
    schedule = read("loops")
    runs = counted(schedule)
    assert {n: runs[n] for n in ("sum", "peeled", "outer", "inner", "next", "next.1")} == {
        "sum": ("collective", 15),
        "peeled": ("collective", 1),
        "outer": ("while", 1),
        "inner": ("while", 3),
        "next": ("kernel", 15),
        "next.1": ("kernel", 3),
    }
    assert "lt" not in runs  # XLA runs a loop of known length without its condition.


def test_a_loop_of_unknown_length_runs_once_and_is_named():
    schedule = read("loops")
    assert schedule.notes == {"unknown trip count": ["until"]}
    assert counted(schedule)["doubled"] == ("kernel", 1)


def test_branches_and_calls():
    schedule = read("branches")
    main = {i.name: i for i in schedule.computations[schedule.entry]}
    assert (main["chosen"].kind, main["chosen"].bodies) == ("conditional", ("short", "long"))
    assert (main["called"].kind, main["called"].bodies) == ("call", ("callee",))
    assert schedule.notes == {"conditional": ["chosen"]}
    # A sum reads two arrays of 4 KiB and writes one.
    assert {i.cost.bytes_accessed for i in schedule.computations["long"] if i.cost} == {3 * 4096}


def test_every_asynchronous_form_is_a_start_and_its_done():
    schedule = read("asynchronous")
    assert communication(schedule) == {
        "gather": ("start", "all-gather", BOTH, "infiniband", 8 * 4096),  # The payload is the result.
        "scatter_start": ("start", "reduce-scatter", BOTH, "infiniband", 4096),  # The payload is the operand.
        "exchange_start": ("start", "all-to-all", TENSOR, "nvlink", 4096),
        "permute": ("start", "collective-permute", TENSOR, "nvlink", 4096),
    }
    main = schedule.computations[schedule.entry]
    assert {i.name: i.starts for i in main if i.kind == "done"} == {
        "gathered": "gather",
        "scattered": "scatter_start",  # The update between the two is passed through.
        "exchanged": "exchange_start",
        "permuted": "permute",
        "sliced": "slice_start",
    }
    (slices,) = [i for i in main if i.name == "slice_start"]
    # One of 80 rows of 4 KiB is read and written, and the index is read, but not the stack.
    assert (slices.kind, slices.cost.bytes_accessed) == ("start", 2 * 4096 + 4)


def test_the_source_is_the_models_path():
    sources = {i.name: i.source for i, _ in read("asynchronous").walk()}
    assert sources["gather"] == "jit(step)/layers/gather"
    assert sources["scatter_start"] == ""


def test_blocking_and_combined_collectives():
    """A start that XLA marks synchronous blocks; a combined collective is one collective of both arrays."""
    schedule = read("blocking")
    assert communication(schedule) == {
        "plain": ("collective", "all-reduce", DATA, "infiniband", 4096),
        "sync": ("collective", "all-reduce", DATA, "infiniband", 4096),
        "combined": ("start", "all-gather", BOTH, "infiniband", 8 * (4096 + 512 * 2)),
    }
    (combined,) = [i.collective for i, _ in schedule.walk() if i.name == "combined"]
    assert combined.dtype == "mixed"
    assert combined.key.split("|")[3] == "f32[1024],bf16[512]"


def test_collectives_inside_fusions_and_several_in_one_start():
    schedule = read("fused")
    assert communication(schedule) == {
        "triton_start": ("start", "all-reduce", BOTH, "infiniband", 1024),
        # The payload is the slice, not the stack.
        "in_place": ("collective", "reduce-scatter", BOTH, "infiniband", 4096),
        "group_start/gather": ("start", "all-gather", BOTH, "infiniband", 8 * 4096),
        "group_start": ("start", "all-reduce", TENSOR, "nvlink", 1024),
    }
    dones = [i.starts for i, _ in schedule.walk() if i.kind == "done"]
    assert dones == ["triton_start", "group_start"]  # A stream runs in order, so the last one is done when all are.
    # A trace names the start, or what it wraps.
    inside = {"reduce", "scatter", "gather", "reduce_in_group"}
    found = read_program(parse_hlo((FILES / "fused.hlo").read_text()), PLACEMENT).collectives
    assert set(found) == {"triton_start", "in_place", "group_start"} | inside


def test_transfers_between_gpus_and_to_the_host():
    schedule = read("transfers")
    main = {i.name: i for i in schedule.computations[schedule.entry]}
    assert communication(schedule) == {"send": ("start", "collective-permute", DATA, "infiniband", 4096)}
    assert main["recv"].kind == "free"  # Its time is that of the send.
    assert (main["received"].starts, main["sent"].starts) == ("send", "send")
    assert {n: main[n].cost.host_bytes for n in ("to_host", "fetched", "out")} == {
        "to_host": 4096,
        "fetched": 8192,
        "out": 4096,
    }
    assert main["to_host"].kind == "start"


def test_custom_calls_are_named_unless_they_run_nothing():
    schedule = read("custom_calls")
    main = {i.name: i for i in schedule.computations[schedule.entry]}
    assert (main["mine"].kind, main["mine"].cost.priced_by) == ("kernel", "bytes")
    assert main["mine"].cost.bytes_accessed == 2 * 4096
    assert {main[n].kind for n in ("marked", "buffer")} == {"free"}
    assert (main["stream"].kind, main["stream"].bodies) == ("call", ("side",))
    assert schedule.notes == {"opaque custom call": ["mine (my_kernel)"], "side stream": ["stream"]}


@pytest.mark.parametrize("file", sorted(FILES.glob("*.hlo")), ids=lambda f: f.stem)
def test_every_instruction_of_every_file_is_priced_or_free_or_named(file):
    schedule = read_schedule(parse_hlo(file.read_text()), PLACEMENT)
    named = {name.partition(" (")[0] for names in schedule.notes.values() for name in names}
    unaccounted = [
        i.name
        for i, _ in schedule.walk()
        if i.kind not in ("free", "done") and not (i.cost or i.collective or i.bodies) and i.name not in named
    ]
    assert unaccounted == []


def test_the_fingerprint_is_of_the_program_and_not_of_where_it_was_written():
    text = (FILES / "asynchronous.hlo").read_text()
    moved = text.replace("layers/gather", "blocks/gather")
    changed = text.replace("[1,8]<=[8]", "[2,4]<=[8]").replace("f32[8192]", "f32[4096]").replace("f32[128]", "f32[256]")
    same, other = (read_schedule(parse_hlo(t), PLACEMENT).fingerprint for t in (moved, changed))
    assert same == read("asynchronous").fingerprint
    assert other != same


def test_the_order_is_the_schedules():
    """The module lists `late` first, but its schedule, which XLA keeps beside it, runs `early` first."""
    text = """HloModule m, is_scheduled=true
ENTRY %main (x: f32[4]) -> (f32[4], f32[4]) {
  %x = f32[4] parameter(0)
  %early = f32[4] add(%x, %x)
  %late = f32[4] negate(%x)
  ROOT %o = (f32[4], f32[4]) tuple(%late, %early)
}
"""
    assert [i.name for i in parse_hlo(text).entry.order] == ["x", "early", "late", "o"]


@pytest.mark.parametrize("content", [b"\xff", b"not a module at all", b"\x0a\xff\x01short"])
def test_what_is_no_module_is_an_error(content):
    with pytest.raises(ProgramError, match="not a protocol buffer"):
        Module(content)


@pytest.mark.parametrize("file", sorted(FILES.glob("*.hlo")), ids=lambda f: f.stem)
def test_a_damaged_module_is_read_or_is_an_error(file):
    serialized = serialized_hlo(file.read_text())
    for at in range(0, len(serialized), 41):
        for damaged in (serialized[:at], serialized[:at] + b"\x7f" + serialized[at + 1 :]):
            with contextlib.suppress(ProgramError):
                module = Module(damaged)
                read_instructions(module)
                read_program(module, PLACEMENT)


@pytest.mark.parametrize("operand", [1, 2, 3])
def test_an_instruction_takes_what_stands_before_it(operand):
    """Instructions cannot form a cycle: `b` (id 2) takes `a` (1), itself, or an unknown instruction."""
    a, b = b"\x0a\x01a\x98\x02\x01", b"\x0a\x01b\x98\x02\x02\xa0\x02" + bytes([operand])
    computation = b"\x0a\x01c\x12\x06" + a + b"\x12\x09" + b + b"\x28\x01\x30\x02"
    module = b"\x12\x01c\x1a" + bytes([len(computation)]) + computation
    if operand == 1:
        assert [i.name for i in Module(module).entry.root.operands] == ["a"]
    else:
        with pytest.raises(ProgramError, match=rf"\({len(module)} bytes\) cannot be read: KeyError: {operand}"):
            Module(module)


def test_fields_of_the_wire_format():
    """The message has field 1 as varint 300, field 2 bytes, field 3 of 4 and field 4 of 8 bytes, and field 1 again."""
    message = b"\x08\xac\x02" + b"\x12\x02hi" + b"\x1d\x01\x00\x00\x00" + b"\x21" + bytes(8) + b"\x08\x05"
    assert read_fields(message) == {1: [300, 5], 2: [b"hi"], 3: [b"\x01\x00\x00\x00"], 4: [bytes(8)]}


LOOP = """
HloModule counted, is_scheduled=true

%fused_add (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %s = s32[] constant({step})
  ROOT %n = s32[] add(%s, %p)
}}

%fused_compare (q: s32[]) -> pred[] {{
  %q = s32[] parameter(0)
  %l = s32[] constant({limit})
  ROOT %c = pred[] compare({compare}
}}

%body (state: (f32[8], s32[])) -> (f32[8], s32[]) {{
  %state = (f32[8], s32[]) parameter(0)
  %x = f32[8] get-tuple-element(%state), index=0
  %i = s32[] get-tuple-element(%state), index=1
  %twice = f32[8] add(%x, %x)
  %held = s32[] copy(%i)
  %next = s32[] fusion(%held), kind=kLoop, calls=%fused_add
  ROOT %out = (f32[8], s32[]) tuple(%twice, %next)
}}

%condition (cstate: (f32[8], s32[])) -> pred[] {{
  %cstate = (f32[8], s32[]) parameter(0)
  %ci = s32[] get-tuple-element(%cstate), index=1
  ROOT %go = pred[] fusion(%ci), kind=kLoop, calls=%fused_compare
}}

ENTRY %main (a: f32[8], b: s32[]) -> f32[8] {{
  %a = f32[8] parameter(0)
  %b = s32[] parameter(1)
  %zero = s32[] constant({start})
  %begin = s32[] copy({begin})
  %init = (f32[8], s32[]) tuple(%a, %begin)
  %loop = (f32[8], s32[]) while(%init), condition=%condition, body=%body, backend_config={config}
  ROOT %r = f32[8] get-tuple-element(%loop), index=0
}}
"""
CONFIG = '{"known_induction_variable":{"tuple_index":"1"}}'
LESS = "%q, %l), direction=LT"


@pytest.mark.parametrize(
    ("start", "step", "limit", "compare", "trips"),
    [
        (0, 1, 3, LESS, 3),
        (1, 1, 4, LESS, 3),
        (-2, 1, 4, LESS, 6),
        (0, 2, 7, LESS, 4),
        (0, 1, 3, "%q, %l), direction=LE", 4),
        (0, 1, 3, "%l, %q), direction=GT", 3),
        (0, 1, 3, "%l, %q), direction=GE", 4),
        (5, 1, 3, LESS, 0),
    ],
)
def test_a_loop_without_a_trip_count_is_counted_by_its_counter(start, step, limit, compare, trips):
    """Collective pipelining takes iterations out of a loop, and XLA then forgets how many are left."""
    text = LOOP.format(start=start, step=step, limit=limit, compare=compare, begin="%zero", config=CONFIG)
    schedule = read_schedule(parse_hlo(text), PLACEMENT)
    (loop,) = [i for i, _ in schedule.walk() if i.kind == "while"]
    assert loop.trip_count == trips
    assert "unknown trip count" not in schedule.notes


@pytest.mark.parametrize(
    ("begin", "compare"), [("%b", LESS), ("%zero", "%q, %q), direction=LT"), ("%zero", "%q, %l), direction=NE")]
)
def test_a_loop_that_nobody_can_count_is_noted(begin, compare):
    text = LOOP.format(start=0, step=1, limit=3, compare=compare, begin=begin, config=CONFIG)
    schedule = read_schedule(parse_hlo(text), PLACEMENT)
    assert schedule.notes["unknown trip count"] == ["loop"]
