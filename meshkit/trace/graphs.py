"""Find the instructions of kernels inside CUDA graphs.

XLA:GPU replays sequences of instructions as CUDA graphs, its command buffers. The profiler then labels each kernel with
its command buffer instead of its instruction. A graph launches consecutive instructions of the program in their order.
So the sequence of its kernels is aligned with the sequence of instructions, like two texts in a diff. Kernel names tell
which pairs are possible:

- a fusion's kernel has the fusion's name, or the name of an equal fusion that XLA compiled before;
- the name of a library's kernel tells its work (a matmul, attention, a collective);
- copies and memsets have names of their own.

A kernel that the alignment does not pair gets the instruction with its name, if there is one, else none.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshkit.hlo.instructions import kind_of_kernel
from meshkit.hlo.proto import HloInstruction, Module
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.trace.operations import (
    DeviceOperations,
    GraphNode,
    Label,
    Operations,
    TracedProgram,
    is_communication,
    is_container,
    kind_of_collective,
)

_COMMAND_BUFFER = re.compile(r"^command_buffer")
_STEM = re.compile(r"(?:[._]+(?:\d+|clone|remat\d*|peeled|double|buffer))+$")
_COPY = re.compile(r"^memcpy", re.IGNORECASE)
_FILL = re.compile(r"^memset", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bprop|bwd|compute_dot_do_o|convert_dq|reduce_head", re.IGNORECASE)
_CONTINUES = re.compile(r"splitKreduce", re.IGNORECASE)  # It adds up the partial results of the matmul before it.
_NUMBERS = ("partition-id", "replica-id")  # Each is a memset of four bytes.
_NO_LIBRARY = re.compile(r"fusion|^wrapped_|^memcpy", re.IGNORECASE)  # Names of XLA's own kernels, and of copies.
_SLICES = re.compile(r"copy|slice")
MOST_CELLS = 30_000_000  # Limit on kernels x instructions of an alignment: about 5,000 kernels, 0.3 GB and 1 s.
# The worth of pairing a kernel with an instruction. The alignment maximizes the sum of worths minus the costs below.
_SAME_NAME, _SAME_WORK, _SAME_STEM, _SAME_KIND, _COPIES, _ANY_LIBRARY, _FILLS = 4.0, 3.8, 2.0, 3.0, 2.0, 0.8, 0.5
_AGAIN = 1.0  # The most that a second kernel of one instruction is worth.
_LEFT_OUT, _UNKNOWN = 0.3, 0.5  # The costs of an instruction without a kernel, and of a kernel without an instruction.
_TAKEN = 0.7  # A pair's worth is multiplied by this if another graph has the instruction.


def graph_nodes(module: Module, schedule: Schedule | None) -> tuple[GraphNode, ...]:
    """Return a program's GPU instructions in order, those of loops and calls where they run; () without a schedule."""
    if schedule is None:
        return ()
    every = (i for i, _ in schedule.walk() if i.kind in ("kernel", "start", "collective") or i.opcode in _NUMBERS)
    return tuple(_node(i, module) for i in every)


def _node(i: Instruction, module: Module) -> GraphNode:
    """Return the node of one instruction; an `async-start` gives the node of the instruction that it starts."""
    if i.collective is not None:
        name = i.name.rpartition("/")[2]  # The schedule names collectives that start together `START/NAME`.
        return GraphNode(name, "", name, "", i.collective.collective, copies=False, fills=False)
    at = module.instructions[i.name]
    if at.opcode == "async-start":
        at = at.called[0].root
    inside = at.called[0].order if at.opcode == "fusion" else ()
    stem = _STEM.sub("", at.name)
    library = _library(at.target) if at.target else "sort" if at.opcode == "sort" else ""
    return GraphNode(
        name=at.name,
        kernel=re.sub(r"[^0-9A-Za-z_]", "_", at.name),
        work=(stem, *(_work(each) for each in (inside or [at]))),
        library=library,
        collective="",
        copies=bool(_SLICES.search(stem)) or at.opcode in ("copy", "copy-start"),
        fills="broadcast" in stem or at.opcode in ("broadcast", *_NUMBERS),
    )


def _library(name: str) -> str:
    """Return the kind of work of a library's kernel or a custom call's target, e.g. `matmul`, `attention backward`."""
    kind = kind_of_kernel(name)
    return f"{kind} backward" if kind == "attention" and _BACKWARD.search(name) else kind


def _work(at: HloInstruction) -> Hashable:
    """Return the opcode of an instruction with its shape and literal, fields 3 and 8 of HloInstructionProto."""
    return (at.opcode, *(value for number in (3, 8) for value in at.fields.get(number, ()) if number in at.fields))


def name_graph_kernels(found: Operations, program: TracedProgram) -> None:
    """Set, in place, the instruction of each operation that ran inside a program's graphs; "" if it is unknown."""
    own = program.owns(found.labels)
    hidden = np.array([mine and _is_hidden(label) for label, mine in zip(found.labels, own)], bool)
    if not hidden.any():
        return
    names, before = _Names(program.graph_nodes), tuple(found.labels)
    known: dict[tuple[int, str], int] = {}
    for device, ops in found.devices.items():
        rows = np.flatnonzero(hidden[ops.label])
        label = ops.label.copy()
        for at, name in _named(ops, rows, before, names) if len(rows) else ():
            of = int(ops.label[at[0]])
            if (of, name) not in known:
                new = before[of]._replace(op=name)
                if found.labels[of] is before[of] and hidden[of]:  # The old label is not needed: reuse its place.
                    known[of, name], found.labels[of] = of, new
                else:
                    known[of, name] = len(found.labels)
                    found.labels.append(new)
            label[at] = known[of, name]
        found.devices[device] = replace(ops, label=label)


def _is_hidden(label: Label) -> bool:
    """Return whether an operation ran in a graph, and its label has a command buffer, a container or no instruction."""
    return label.graph and (not label.op or bool(_COMMAND_BUFFER.match(label.op)) or is_container(label))


def _named(
    ops: DeviceOperations, rows: np.ndarray, labels: Sequence[Label], names: _Names
) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the indices of all operations with the same label and graph node, and the name of their instruction.

    Args:
        rows: the operations to name, sorted by time.
    """
    launch, node = ops.nodes[rows].T if ops.nodes is not None else np.full((2, len(rows)), -1)
    label = ops.label[rows]
    number = np.unique(node, return_inverse=True)[1]
    _, first, kind = np.unique(number * len(labels) + label, return_index=True, return_inverse=True)
    label_of = [labels[i] for i in label[first].tolist()]
    graphs: dict[tuple[str, int], int] = {}
    of_kind = [(each.op, n >> 32) for each, n in zip(label_of, node[first].tolist())]
    for i in np.argsort(first).tolist():
        graphs.setdefault(of_kind[i], len(graphs))
    graph = np.array([graphs[key] for key in of_kind])[kind]
    found: dict[int, str] = {}
    for (buffer, number), at in zip(graphs, _parts(graph)):
        if number < 0:  # The trace has no node ids.
            continue
        ids, start, count = np.unique(launch[at], return_index=True, return_counts=True)
        whole = at[launch[at] == ids[np.lexsort((start, -count))[0]]]  # The launch with the most kernels.
        once = np.sort(np.unique(kind[whole], return_index=True)[1])
        order = kind[whole[once]].tolist()
        found |= zip(order, names.instructions(buffer, [label_of[k].name for k in order]))
    for k, at in enumerate(_parts(kind)):
        name = found.get(k)
        yield rows[at], names.instruction_named(label_of[k].name) if name is None else name


def _parts(number: np.ndarray) -> list[np.ndarray]:
    return np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])


class _Names:
    """Aligns the kernels of graphs with a program's instructions; each sequence of kernels is aligned once."""

    def __init__(self, nodes: Sequence[GraphNode]):
        self._nodes = nodes
        self._by_kernel = {node.kernel: i for i, node in reversed(list(enumerate(nodes))) if node.kernel}
        self._kernels = np.array([node.kernel for node in nodes], object)
        self._stems = np.array([_STEM.sub("", node.kernel) for node in nodes], object)
        works: dict[Hashable, int] = {}
        self._work = np.array([works.setdefault(node.work, len(works)) for node in nodes], np.int64)
        self._library = np.array([node.library for node in nodes], object)
        self._collective = np.array([node.collective for node in nodes], object)
        self._copies, self._fills, self._several = (
            np.array([getattr(node, name) for node in nodes], bool) for name in ("copies", "fills", "several")
        )
        self._taken: dict[int, str] = {}  # Instruction -> the command buffer that has it.
        self._found: dict[tuple[str, ...], list[str]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._more = np.where(self._library != "", np.float32(_ANY_LIBRARY), np.float32(0))

    def instruction_named(self, kernel: str) -> str:
        """Return the instruction whose kernel has this name; "" if there is none."""
        i = self._by_kernel.get(kernel)
        return "" if i is None else self._nodes[i].name

    def instructions(self, buffer: str, kernels: Sequence[str]) -> list[str]:
        """Return the instruction of each kernel of a graph, in execution order; "" for a kernel where it is unknown."""
        key = (buffer, *kernels)
        if key not in self._found:
            found = self._compared(buffer, kernels) if self._nodes else [-1] * len(kernels)
            for i in found:
                self._taken.setdefault(i, buffer)
            self._found[key] = [
                self.instruction_named(k) if i < 0 else self._nodes[i].name for k, i in zip(kernels, found)
            ]
        return self._found[key]

    def _worth(self, kernel: str) -> np.ndarray:
        """Return [instructions] the worth of pairing a kernel with each instruction."""
        if kernel in self._rows:
            return self._rows[kernel]
        worth = np.zeros(len(self._nodes), np.float32)
        named = self._by_kernel.get(kernel)
        if named is not None:
            worth[self._work == self._work[named]] = _SAME_WORK
            worth[self._kernels == kernel] = _SAME_NAME
        elif _COPY.match(kernel):
            worth[self._copies] = _COPIES
        elif _CONTINUES.search(kernel):
            pass  # It is only ever a further kernel of an instruction, never the first.
        elif _FILL.match(kernel):
            worth[self._library != ""] = _FILLS
            worth[self._fills] = _COPIES
        elif is_communication(kernel):
            kind = kind_of_collective(Label(kernel, "", "", copy=False, graph=True))
            of_kind = (self._collective == kind) | ((kind in ("", "send-recv")) & (self._collective != ""))
            worth[of_kind] = _SAME_KIND
        else:
            worth[self._library == _library(kernel)] = _SAME_KIND
        if named is None:
            same = self._stems == _STEM.sub("", kernel)
            worth[same] = np.maximum(worth[same], _SAME_STEM)
        self._rows[kernel] = worth
        return worth

    def _compared(self, buffer: str, kernels: Sequence[str]) -> list[int]:
        """Return the index of each kernel's instruction by the alignment with the highest sum; -1 for none.

        All are -1 if the alignment would need more than `MOST_CELLS`.
        """
        rows = [self._worth(kernel) for kernel in kernels]
        exact = [np.flatnonzero(row >= _SAME_WORK) for row in rows]
        near = np.concatenate(exact) if any(map(len, exact)) else np.arange(len(self._nodes))
        low, high = max(0, near.min() - len(kernels)), near.max() + len(kernels) + 1
        taken = np.array([self._taken.get(i, buffer) != buffer for i in range(low, min(high, len(self._nodes)))])
        several, libraries, count = self._several[low:high], self._more[low:high], len(taken)
        foreign = [not _NO_LIBRARY.search(kernel) for kernel in kernels]
        if count * len(kernels) > MOST_CELLS:
            return [-1] * len(kernels)
        place = np.arange(count, dtype=np.float32) * _LEFT_OUT
        best = np.zeros(count, np.float32)  # The highest sum of an alignment whose last pair has this instruction.
        back = np.full((len(kernels), count), -1, np.int32)  # The instruction of the previous pair; -1 if none.
        paired = np.zeros((len(kernels), count), bool)
        started = np.zeros(count, bool)
        filled = False
        for j, row in enumerate(rows):
            worth = row[low:high] * np.where(taken, _TAKEN, 1.0)
            # Each instruction between two pairs costs _LEFT_OUT: the difference of their places, added here and
            # subtracted below.
            reach = np.where(started, best + place, -np.inf)
            ahead = np.maximum.accumulate(reach)
            source = np.maximum.accumulate(np.where(reach == ahead, np.arange(count), 0))
            ahead, source = np.roll(ahead, 1), np.roll(source, 1)
            ahead[0] = -np.inf
            value = ahead - place + _LEFT_OUT
            fresh = value < -_UNKNOWN * j  # An alignment that begins with this pair has a higher sum.
            new = worth + np.where(fresh, -_UNKNOWN * j, value)
            origin = np.where(fresh, -1, source)
            second = _AGAIN if not _FILL.match(kernels[j]) else 0.2
            again = worth if filled else np.minimum(np.maximum(worth, libraries if foreign[j] else 0), second)
            more = several & started & (again > 0) & (best + again > new)
            again = best + again
            new, origin = np.where(more, again, new), np.where(more, np.arange(count), origin)
            left = np.where(started, best - _UNKNOWN, -np.inf)
            pair = ((worth > 0) | more) & (new >= left)
            best = np.where(pair, new, np.where(started, left, 0.0))
            paired[j], back[j] = pair, origin
            started |= pair
            filled = bool(_FILL.match(kernels[j]))
        found = [-1] * len(kernels)
        if not started.any():
            return found
        at = int(np.argmax(np.where(started, best, -np.inf)))
        for j in range(len(kernels) - 1, -1, -1):
            if paired[j, at]:
                found[j] = int(low) + at
                at = int(back[j, at])
                if at < 0:
                    break
        return found
