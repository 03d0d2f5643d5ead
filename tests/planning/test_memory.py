"""Test predicted memory: what the compiler does not count, the parts of the peak, the verdict, and the remedies."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshkit.compile.child import live_bytes
from meshkit.compile.program import CompiledProgram
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.mesh import Placement
from meshkit.hlo.module import Instruction, Schedule
from meshkit.hlo.proto import Shape
from meshkit.hlo.schedule import Collective
from meshkit.planning.planner import memory_part
from meshkit.planning.warnings import outside_warning
from meshkit.predict.memory import cudnn_workspace_bytes, nccl_bytes, reserved_memory
from meshkit.search import bounds
from meshkit.search import proposals as remedies
from meshkit.search.bounds import Bounds
from meshkit.search.candidate import Outcome
from meshkit.search.proposals import changes, find_remedies
from meshkit.step.program import StepFacts
from tests.hlo_text import parse_hlo
from tests.search.made_up import MadeUpWorkers

MIB, GIB = 2**20, 2**30
CONNECTION = 12 * MIB  # 10 MiB are to receive and 2 MiB to send: NCCL_DEBUG_SUBSYS=ALLOC, nccl#1685.
HOST = Cluster.load("dgx_h100")
TWO_HOSTS = Cluster.load("dgx_h100", hosts=2)


def collective(kind, axes=("data",), *, group_size=8, per_domain=8, groups=1):
    return Collective(
        name=f"{kind}.1",
        key=kind,
        collective=kind,
        axes=axes,
        axes_complete=True,
        link="nvlink" if per_domain == group_size else "infiniband",
        fabric=None,
        dtype="bf16",
        group_size=group_size,
        num_groups=groups,
        gpus_per_domain=per_domain,
        payload_bytes=1024,
    )


def schedule(*collectives):
    instructions = tuple(Instruction(c.name, c.collective, "collective", collective=c) for c in collectives)
    return Schedule("m", {"main": instructions}, "main", "f")


# This program uses nothing of cuDNN.
NO_MODULE = parse_hlo("HloModule m\n\nENTRY e {\n  ROOT x = f32[] parameter(0)\n}\n")


@pytest.mark.parametrize(
    ("members", "cluster", "expected"),
    [
        # There are a ring of 24 channels, and the switch's buffers for 8 GPUs.
        ([collective("all-gather")], HOST, 24 * CONNECTION + 8 * 32 * MIB),
        # An all-reduce adds two trees.
        ([collective("all-gather"), collective("all-reduce")], HOST, 3 * 24 * CONNECTION + 8 * 32 * MIB),
        # There are 16 channels across domains; with one GPU in each, its switch has nothing to reduce.
        ([collective("reduce-scatter", per_domain=1, group_size=2)], TWO_HOSTS, 16 * CONNECTION),
        # There are 32 channels to each of 7 peers.
        ([collective("all-to-all")], HOST, 7 * 32 * CONNECTION),
        # There is one neighbour, and across domains the network has shared buffers.
        ([collective("collective-permute")], HOST, 32 * CONNECTION),
        ([collective("collective-permute", per_domain=1, group_size=2)], TWO_HOSTS, 512 * MIB),
    ],
)
def test_buffers_of_a_communicator_are_counted_by_connection(members, cluster, expected):
    assert nccl_bytes(members, cluster) == expected


def test_an_all_to_all_of_8_h100_takes_what_was_measured():
    """Each GPU took 4.34 - 1.06 GB (nccl#1685); the count leaves out a seventh, which NCCL has beside connections."""
    assert nccl_bytes([collective("all-to-all")], HOST) == pytest.approx(4.34e9 - 1.06e9, rel=0.15)


@pytest.mark.parametrize(
    ("queries", "keys", "workspace"),
    [  # XLA compiled these programs on an H100 (jaxlib 0.11.2, cuDNN 9.19): dQ, dK and the workspace beside them.
        ((16, 8, 128, 16), (16, 4, 128, 16), 2_162_944),
        ((8, 32, 4096, 64), (8, 8, 4096, 64), 541_065_472),
        ((1, 32, 8192, 128), (1, 8, 8192, 128), 269_484_288),
        ((4, 8, 8192, 128), (4, 2, 8192, 128), 269_484_288),
        ((1, 64, 8192, 128), (1, 8, 8192, 128), 538_968_320),
        ((1, 4, 131072, 128), (1, 1, 131072, 128), 538_968_320),
        ((1, 8, 1024, 128), (1, 8, 1024, 128), 256 + 8 * 1024 * (4 * 128 + 4)),  # Each head has keys of its own.
    ],
)
def test_attentions_workspace_is_what_cudnn_asked_for(queries, keys, workspace):
    assert cudnn_workspace_bytes(Shape("bf16", queries), Shape("bf16", keys)) == workspace


def test_collectives_over_the_same_groups_share_a_communicator():
    one = schedule(collective("all-gather"), collective("all-reduce"), collective("all-reduce"))
    two = schedule(collective("all-gather"), collective("all-reduce", ("fsdp",), group_size=4, per_domain=4, groups=2))
    alone = schedule(collective("all-reduce", group_size=1, per_domain=1))
    counts = [reserved_memory(NO_MODULE, s, HOST, GIB).communicators for s in (one, two, alone)]
    assert counts == [1, 2, 0]


def compiled(temp, *, live=None, argument=10 * GIB):
    memory = {"argument": argument, "output": argument, "alias": argument, "temp": temp, "generated_code": 0}
    return CompiledProgram(b"", Placement.from_shape(("data",), (1,)), memory, 0, 0, 0, "shardy", (), (), live=live)


def verdict(program, *, fraction=0.92, used=(), **known):
    return memory_part(program, NO_MODULE, schedule(*used), HOST, memory_fraction=fraction, facts=StepFacts(**known))


def test_the_margin_is_what_is_left_in_the_pool():
    m = verdict(compiled(5 * GIB))
    assert m.peak_bytes == 15 * GIB
    assert m.fragmentation_bytes == 128 * MIB
    assert m.reserved_bytes == m.fragmentation_bytes + m.context_bytes
    assert m.margin_bytes == m.pool_bytes - m.peak_bytes - m.fragmentation_bytes
    assert m.fits


def test_a_pool_that_leaves_no_room_for_nccl_is_judged_by_what_is_left():
    """0.99 of 79.1 GiB leaves 0.8 GiB, and NCCL alone wants more, so the whole pool cannot be had."""
    m = verdict(compiled(5 * GIB), fraction=0.99, used=[collective("all-to-all")])
    outside = m.context_bytes + m.nccl_bytes
    assert m.capacity_bytes - m.pool_bytes < outside
    assert m.margin_bytes == m.capacity_bytes - outside - m.peak_bytes - m.fragmentation_bytes


def test_symmetric_memory_lies_beside_the_pool():
    """XLA counts it among the temporaries, but the client takes it from what memory_fraction leaves."""
    plain = verdict(compiled(5 * GIB))
    m = verdict(replace(compiled(5 * GIB), symmetric_bytes=GIB))
    assert m.peak_bytes == plain.peak_bytes - GIB
    assert m.reserved_bytes == plain.reserved_bytes + GIB
    assert m.margin_bytes == plain.margin_bytes + GIB
    beside = m.capacity_bytes - m.pool_bytes - m.context_bytes
    more = verdict(replace(compiled(20 * GIB), symmetric_bytes=beside + GIB))
    assert more.margin_bytes == more.pool_bytes - GIB - more.peak_bytes - more.fragmentation_bytes


@pytest.mark.parametrize("used", [(), (collective("all-to-all"),)])
@pytest.mark.parametrize("symmetric", [0, GIB])
@pytest.mark.parametrize("fraction", [0.92, 0.99])
def test_what_lies_outside_of_the_pool_is_said(used, symmetric, fraction):
    """With the memory_fraction that a warning names, the step fits as the plan says."""
    program = replace(compiled(5 * GIB), symmetric_bytes=symmetric)
    m = verdict(program, fraction=fraction, used=used)
    found = [w.message for w in outside_warning(symmetric, m)]
    too_much = m.context_bytes + m.nccl_bytes + symmetric > m.capacity_bytes - m.pool_bytes
    assert too_much == (fraction == 0.99 and bool(used or symmetric))
    assert bool(found) == bool(too_much or symmetric)
    counted = [float(number) for text in found for number in re.findall(r"memory_fraction = ([\d.]+)", text)]
    assert len(counted) == too_much
    for fits_with in counted:
        again = verdict(program, fraction=fits_with, used=used)
        assert m.margin_bytes - 0.001 * m.capacity_bytes <= again.margin_bytes <= m.margin_bytes
        assert "counts with" not in "".join(w.message for w in outside_warning(symmetric, again))


def test_one_byte_too_much_does_not_fit():
    m = verdict(compiled(5 * GIB))
    full = verdict(compiled(5 * GIB + m.margin_bytes))
    assert (full.margin_bytes, full.fits) == (0, True)
    assert verdict(compiled(5 * GIB + m.margin_bytes + 1)).fits is False


def test_a_small_block_wastes_no_more_than_itself():
    assert verdict(compiled(MIB)).fragmentation_bytes == MIB


def test_the_parts_of_the_peak_add_up():
    live = {"forward": 3 * GIB, "backward": 2 * GIB, "carried": GIB, "argument": 10 * GIB, "other": 0}
    m = verdict(
        compiled(8 * GIB, live=live), parameters_bytes=4 * GIB, optimizer_bytes=6 * GIB, gradients_bytes=2 * GIB
    )
    assert (m.activations_bytes, m.gradients_bytes) == (3 * GIB, GIB)  # There are no more gradients than loops carry.
    parts = (m.parameters_bytes, m.optimizer_bytes, m.gradients_bytes, m.activations_bytes, m.temporary_bytes)
    assert sum(parts) == m.peak_bytes
    batch = verdict(compiled(8 * GIB, argument=11 * GIB), parameters_bytes=4 * GIB, optimizer_bytes=6 * GIB)
    assert batch.temporary_bytes == 9 * GIB  # This includes the other argument.
    unknown = verdict(compiled(8 * GIB), gradients_bytes=2 * GIB)
    assert (unknown.activations_bytes, unknown.temporary_bytes) == (None, 6 * GIB)


MODULE = """HloModule jit_step
%body.1 (param.2: (s32[], bf16[64])) -> (s32[], bf16[64]) {
  %param.2 = (s32[], bf16[64]) parameter(0)
  %i.1 = s32[] get-tuple-element(%param.2), index=0
  %x.1 = bf16[64] get-tuple-element(%param.2), index=1
  %add.9 = bf16[64] add(%x.1, %x.1), metadata={op_name="jit(step)/transpose(jvp(layers))/while/body/add"}
  ROOT %t.1 = (s32[], bf16[64]) tuple(%i.1, %add.9)
}
%other.3 (param.3: (s32[], bf16[64])) -> (s32[], bf16[64]) {
  ROOT %param.3 = (s32[], bf16[64]) parameter(0)
}
%condition.1 (param.5: (s32[], bf16[64])) -> pred[] {
  %param.5 = (s32[], bf16[64]) parameter(0)
  ROOT %true.1 = pred[] constant(true)
}
%condition.2 (param.6: (s32[], bf16[64])) -> pred[] {
  %param.6 = (s32[], bf16[64]) parameter(0)
  ROOT %true.2 = pred[] constant(true)
}
%stash.1 (param.7: bf16[64]) -> bf16[64] {
  %param.7 = bf16[64] parameter(0)
  ROOT %stash.2 = bf16[64] negate(%param.7), metadata={op_name="jit(step)/jvp(layers)/while/body/dynamic_update_slice"}
}
ENTRY %main.6 (param.4: bf16[64]) -> bf16[64] {
  %param.4 = bf16[64] parameter(0), metadata={op_name="w"}
  %zero = s32[] constant(0)
  %t = (s32[], bf16[64]) tuple(%zero, %param.4)
  %while.20 = (s32[], bf16[64]) while(%t), condition=%condition.1, body=%other.3, metadata={op_name="jit(step)/jvp(layers)/while"}
  %while.21 = (s32[], bf16[64]) while(%while.20), condition=%condition.2, body=%body.1, metadata={op_name="jit(step)/transpose(jvp(layers))/while"}
  %x = bf16[64] get-tuple-element(%while.21), index=1
  %start.3 = ((bf16[64]), bf16[64], u32[]) async-start(%x), calls=%stash.1
  %done.3 = bf16[64] async-done(%start.3)
  ROOT %all-gather.9 = bf16[64] all-gather(%x), dimensions={0}
}
"""  # noqa: E501
LIVE = """HloLiveRange (max 113):
  Live ranges at 92 (peak):
    all-gather.9{1}: 2097152 bytes (cumulative: 2097152 bytes)
    param.2{1}: 1572864 bytes (cumulative: 3670016 bytes)
    param.4{}: 1000000 bytes (cumulative: 4670016 bytes)
    while.20{2}: 786432 bytes (cumulative: 5456448 bytes)
    add.9{}: 524288 bytes (cumulative: 5980736 bytes)
    stash.2{}: 65536 bytes (cumulative: 6046272 bytes)
  Stack trace breakdown for peak usage: 9 568 332 bytes
    while.20{2}: 1 bytes
"""


def test_live_ranges_are_told_apart_by_what_made_them(tmp_path):
    """What an asynchronous start wraps counts as well, as the copies of activations that a loop of layers keeps."""
    module = parse_hlo(MODULE)
    assert live_bytes(tmp_path, module) is None
    (tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations-live-range.txt").write_text(LIVE)
    assert live_bytes(tmp_path, module) == {
        "forward": 786_432 + 65_536,
        "backward": 524_288,
        "carried": 1_572_864,
        "argument": 1_000_000,
        "other": 2_097_152,
    }


# ----------------------------------------------------------------------------------------------------------- remedies

LLAMA_8B = "configs/experiments/llama3_8b.toml"
TIGHT = (
    'cluster={ name = "dgx_h100", hosts = 2 }',
    "mesh={ data = { infiniband = 2 }, fsdp = 8 }",
    'rules={ preset = "hsdp" }',
    'train={ global_batch = 128, sequence_length = 8192, remat = "none" }',
)


def test_the_mildest_of_each_kind_comes_first():
    experiment = load(LLAMA_8B, TIGHT)
    found = list(changes(experiment, Bounds(experiment)))
    by_group = {
        group: [c.settings for c in found if c.group == group] for group in dict.fromkeys(c.group for c in found)
    }
    assert by_group["remat"] == [('train.remat="dots"',), ('train.remat="full"',)]
    assert by_group["micro-batches"][0] == _MICRO
    assert by_group["fsdp"] == [("mesh={ data = 1, fsdp = { nvlink = 8, infiniband = 2 } }",)]
    assert by_group["host"] == [('optimizer.memory="host"',)]
    assert {"moments", "tensor"} <= set(by_group)
    for change in found:
        load(LLAMA_8B, (*TIGHT, *change.settings))


@pytest.mark.parametrize("fitting", [("remat", "tensor", "fsdp", "micro-batches"), ("host",), ()])
def test_three_that_fit_are_kept_the_fastest_first(monkeypatch, fitting):
    """The plans are made up: a change of one of these kinds fits, and longer settings give faster steps."""
    overrides = (*TIGHT, 'train.remat="full"')  # With full recomputation, closed forms leave every kind of change.
    experiment = load(LLAMA_8B, overrides)
    group_of = {c.settings: c.group for c in changes(experiment, Bounds(experiment))}

    def outcome(settings):
        status = "fits" if group_of[settings] in fitting else "does_not_fit"
        return Outcome(settings=settings, status=status, time_s=1 / len(str(settings)), peak_bytes=1)

    MadeUpWorkers(outcome).install(monkeypatch)
    told = []
    found = find_remedies(LLAMA_8B, overrides, jobs=2, done=told.append)
    kinds = [group_of[r.settings] for r in found]
    assert len(found) == min(3, len(fitting))
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) <= set(fitting)
    assert [r.time_s for r in found] == sorted(r.time_s for r in found)
    assert len(told) <= remedies.TRIES


def test_two_changes_at_once_come_after_all_that_are_one():
    experiment = load(LLAMA_8B, TIGHT)
    found = list(changes(experiment, Bounds(experiment)))
    (both,) = [c for c in found if c.settings == ('train.remat="full"', *_MICRO)]
    assert (both.group, both.what) == (
        "remat, micro-batches",
        "recompute every layer; 2 micro-batches, gradients reduced with each",
    )
    order, waiting = [], list(found)
    while waiting:
        order.append(remedies.next_change(waiting, order))
    pairs = [bool(c.parts) for c in order]
    assert pairs == sorted(pairs)
    assert any(pairs)


_MICRO = ("train.accumulate=2", 'rules.gradients.embed="fsdp"')


def test_changes_that_cannot_be_enough_are_not_compiled(monkeypatch):
    """The state of 8B parameters takes more than a GPU of 2 GiB has, whatever else changes."""
    monkeypatch.setattr(bounds, "pool_bytes", lambda _: 2 * GIB)
    monkeypatch.setattr(remedies, "open_workers", lambda *_: pytest.fail("a change that cannot be enough is compiled"))
    assert find_remedies(LLAMA_8B, TIGHT, jobs=1) == ()
