"""What one collective instruction of a program moves, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program, with what it moves and where.

    Attributes:
        name: the HLO instruction name, unique within its program.
        key: `opcode|axes|dtype|shapes|op_name path|occurrence`; survives a recompile.
        collective: the HLO opcode without `-start` (`all-gather`, `collective-permute`, ...).
        axes: mesh axes along which the participants of a group differ; () when they map to no axis.
        axes_complete: False where the groups cover only part of an axis.
        link: the slowest link a group crosses: `nvlink` or `infiniband`.
        fabric: what that link is made of (`nvlink4_nvswitch`, `shared_memory`, ...); None if unknown.
        dtype: element type on the wire, as XLA spells it; `mixed` for a combined collective of several.
        group_size, num_groups, gpus_per_domain: participants of a group, groups, and participants of one group
            that share an NVLink domain.
        payload_bytes: bytes of one instance on one GPU (operand; result for all-gather).
        source: the op_name path of the model code that caused it.
    """

    name: str
    key: str
    collective: str
    axes: tuple[str, ...]
    axes_complete: bool
    link: str
    fabric: str | None
    dtype: str
    group_size: int
    num_groups: int
    gpus_per_domain: int
    payload_bytes: int
    source: str = ""
