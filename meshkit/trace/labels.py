"""What the operations of a trace are: compute, communication, copies, containers, or compute and communication at once.

An operation communicates if its HLO instruction does, or, where the trace has lost the instruction, if its kernel is
one of a communication library's; never because of the stream it ran on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from meshkit.hlo.collective import Collective
from meshkit.trace.operations import Label

COMPUTE, COMMUNICATION, COPY, CONTAINER, FUSED = range(5)

# ncclKernel (before 2.19), ncclDevKernel, ncclSymk (symmetric memory, 2.27); the other libraries that XLA can call
_COMMUNICATION_KERNEL = re.compile(r"^(?:void )?(?:nccl|nvshmem|rccl|msccl)", re.IGNORECASE)
_COMMUNICATION_OP = re.compile(
    r"^(?:all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter)\b"
)
_CONTAINER_OP = re.compile(r"^(?:while|conditional|call)(?:\.\d+)*$")
# a matmul and a collective in one kernel's name: gemm_all_reduce, AllGatherMatmul, ...
_MATMUL = r"(?:gemm|matmul)"
_COLLECTIVE = r"(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
_FUSED_KERNEL = re.compile(rf"{_MATMUL}.*{_COLLECTIVE}|{_COLLECTIVE}.*{_MATMUL}", re.IGNORECASE)


@dataclass(frozen=True)
class TracedProgram:
    """What must be known of a compiled program to read its trace.

    Attributes:
        module_names: names of the HLO module whose executions are the steps.
        collectives_by_op: instruction name -> what it communicates.
        containers: its loops, calls and conditionals, whose time is that of the operations inside.
        fused: its instructions that compute and communicate in one kernel.
        groups: instruction name -> [groups, members] global device ids, or [pairs, 2] of a collective-permute.
        expected: instruction name -> how often one execution runs it, where the program says.
    """

    module_names: Set[str]
    collectives_by_op: Mapping[str, Collective]
    containers: Set[str] = frozenset()
    fused: Set[str] = frozenset()
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    expected: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Classes:
    """One entry per label.

    Attributes:
        kind: COMPUTE, COMMUNICATION, COPY, CONTAINER or FUSED.
        collective: index into the timeline's collectives; -1 for none, or for one that maps to no instruction.
        op: index into the timeline's op names, of what computes; else -1.
        of_program: whether it is an operation of the program.
        lost: ran in a CUDA graph without a name.
    """

    kind: np.ndarray
    collective: np.ndarray
    op: np.ndarray
    of_program: np.ndarray
    lost: np.ndarray


def classify(
    labels: Sequence[Label],
    program: TracedProgram,
    index: Mapping[Collective, int],
    op_names: dict[str, int],
    known: dict[tuple, tuple[int, Collective | None]],
) -> Classes:
    """Decides about every label.

    Args:
        labels: of one file.
        program: what is known of the program.
        index: place of each collective in the timeline.
        op_names: names of operations that compute are added here.
        known: what was decided before, of other files; added to.
    """
    n = len(labels)
    classes = Classes(
        kind=np.zeros(n, np.int8),
        collective=np.full(n, -1, np.int32),
        op=np.full(n, -1, np.int32),
        of_program=np.array([label.module in program.module_names for label in labels], bool),
        lost=np.array([label.graph and not label.op for label in labels], bool),
    )
    for i, label in enumerate(labels):
        key = (label.name, label.op, label.copy, bool(classes.of_program[i]))
        decided = known.get(key)
        if decided is None:
            decided = known[key] = _kind(label, program, key[-1])
        kind, collective = decided
        classes.kind[i] = kind
        if collective is not None:
            classes.collective[i] = index[collective]
        if kind in (COMPUTE, FUSED):
            classes.op[i] = op_names.setdefault(label.op or label.name, len(op_names))
    return classes


def _kind(label: Label, program: TracedProgram, of_program: bool) -> tuple[int, Collective | None]:
    if (of_program and label.op in program.containers) or _CONTAINER_OP.match(label.op):
        return CONTAINER, None
    collective = program.collectives_by_op.get(label.op) if of_program else None
    if (of_program and label.op in program.fused) or _FUSED_KERNEL.search(label.name):
        return FUSED, collective
    if collective is not None or _COMMUNICATION_OP.match(label.op) or _COMMUNICATION_KERNEL.match(label.name):
        return COMMUNICATION, collective
    return (COPY if label.copy else COMPUTE), None
