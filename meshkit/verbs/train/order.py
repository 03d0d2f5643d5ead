"""List a compiled step's collectives between the processes of a job, in the order in which every process enters them.

    compiled step -> schedule and participants (hlo) -> StepOrder -> hang/step.json in the run folder, to name hangs
                                                     -> all processes compare their orders before the first step

Processes whose programs differ in a collective would wait for each other forever, and no launcher can detect that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshkit.config.mesh import Placement
from meshkit.distributed.join import Agreement
from meshkit.distributed.roll_call import named
from meshkit.errors import ConfigError, ProgramError
from meshkit.hlo.instructions import read_instructions, short_line
from meshkit.hlo.module import Module, read_program
from meshkit.runs.hang import StepCollective, StepOrder, read_order
from meshkit.runs.owner import LAUNCH_VARIABLE
from meshkit.trace.capture import serialized_module

_FRAME = re.compile(r"stack_frame_id=\d+")  # an index into a table above the first computation
_COMPARE_S = 1800.0  # seconds; long, because processes may finish compiling at different times
_MOST_TOLD = 2000  # only the first so many collectives of a process are compared one by one


def order_of_step(
    program: Any, mesh: jax.sharding.Mesh, placement: Placement, folder: Path | None = None
) -> StepOrder | None:
    """Return the order of a compiled step's collectives between processes.

    Args:
        program: the compiled step.
        mesh: the mesh of attached devices for which the step was compiled.
        placement: the placement of the step's partitions.
        folder: the run folder. Its order is used if an earlier attempt of this launch wrote it for the same program.

    Returns:
        The order. None if the HLO has a form that this version cannot read; a hang then gets no named collective.
    """
    processes = np.array([d.process_index for d in mesh.devices.flat])
    read_from = _digest(program, os.environ.get(LAUNCH_VARIABLE), processes.tolist(), placement)
    known = read_order(folder) if folder is not None and LAUNCH_VARIABLE in os.environ else None
    if known is not None and known.read_from == read_from:
        return known
    module = Module(serialized_module(program))
    try:
        read, infos = read_program(module, placement), read_instructions(module)
    except ProgramError:
        return None
    if read.schedule is None:
        return None
    groupings: dict[tuple[tuple[int, ...], ...], int] = {}
    found, called = [], False
    for i, _ in read.schedule.walk():
        called |= i.opcode == "custom-call" and "callback" in i.source.rpartition("/")[2]
        if i.collective is None or i.kind == "done":
            continue
        c = i.collective
        groups = {tuple(sorted({int(p) for p in processes[group]})) for group in read.participants[c.name]}
        between = tuple(sorted(group for group in groups if len(group) > 1))
        if not between:
            continue
        info = infos.get(c.name.partition("/")[0])
        line = short_line(info.line) if info is not None and info.line else c.source
        link = ", ".join(filter(None, (c.link, c.fabric)))
        index = groupings.setdefault(between, len(groupings))
        found.append(StepCollective(c.name, c.collective, c.axes, link, c.payload_bytes, line, index, called))
        called = False
    return StepOrder(int(processes.max()) + 1, tuple(groupings), tuple(found), read_from)


def _digest(program: Any, *facts: Any) -> str:
    """Hash a compiled step without its tables, whose order changes when the step is loaded from a compilation cache."""
    _, begin, text = program.as_text().partition("\n%")
    return hashlib.sha256((repr(facts) + begin + _FRAME.sub("", text)).encode()).hexdigest()


def agree_on_order(order: StepOrder | None, folder: Path) -> None:
    """Raise an error in all processes of a job if their steps differ in a collective. Process 0 writes its order.

    Args:
        order: the order of this process's step.
        folder: the run folder, into which process 0 writes its order.

    Raises:
        ConfigError: a process has another program than process 0; names it, and where the programs differ first.
        RunError: a process did not answer.
    """
    line = Agreement("program")
    if line.rank == 0 and order is not None:
        order.write(folder)
    signature = [] if order is None else order.signature
    mine = hashlib.sha256(json.dumps(signature).encode()).hexdigest()
    if not line.reach("fingerprint", mine, lambda said: len(set(said)) == 1, timeout_s=_COMPARE_S):
        rows = [[row, str(c)] for row, c in zip(signature, order.collectives if order else ())]
        line.reach("collectives", rows[:_MOST_TOLD], refuse_difference, timeout_s=_COMPARE_S)


def refuse_difference(said: Sequence[Sequence[Any]]) -> None:
    """Raise an error that names the processes whose program differs from that of process 0.

    Args:
        said: for each process, a (signature, text for messages) pair for each of its collectives.

    Raises:
        ConfigError: always.
    """
    first = said[0]
    others = [p for p, theirs in enumerate(said) if [row for row, _ in theirs] != [row for row, _ in first]]
    if others:
        theirs = said[others[0]]
        index = next((i for i, (a, b) in enumerate(zip(first, theirs)) if a[0] != b[0]), min(len(first), len(theirs)))
        texts = [side[index][1] if index < len(side) else "none" for side in (theirs, first)]
        where = f"collective {index + 1} is {texts[0]} in process {others[0]}, and {texts[1]} in process 0"
    else:
        where = f"they differ after the first {_MOST_TOLD} collectives"
    who = f"process{'es' * (len(others) > 1)} {named(others)}" if others else "a process"
    raise ConfigError(
        f"{who} of {len(said)} compiled a different step than process 0, and each would wait for the other: {where}.",
        at="the compiled step",
        hint="the same code, configuration and versions on all hosts; nothing in the model that depends on the process",
    )
