"""Find the instructions of kernels inside CUDA graphs.

XLA:GPU replays runs of instructions as CUDA graphs, its command buffers. The profiler then gives each kernel the name
of its command buffer in place of its instruction's. A graph launches the instructions of one stretch of the program, in
their order. So the order of its kernels is aligned with that of the program, as in a comparison of two texts:

- a fusion's kernel has the fusion's name, or that of an equal fusion which XLA compiled before;
- a library's kernel tells its work (a matmul, attention, a collective), and a copy or a memset that it is one.

A kernel that the comparison leaves over gets the instruction of its name, if there is one. All others have none.
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
_CONTINUES = re.compile(r"splitKreduce", re.IGNORECASE)  # This kernel adds up the products of the kernel before it.
_NUMBERS = ("partition-id", "replica-id")  # Each is a memset of four bytes.
_NO_LIBRARY = re.compile(r"fusion|^wrapped_|^memcpy", re.IGNORECASE)  # XLA's own kernels, and copies.
_SLICES = re.compile(r"copy|slice")
MOST_CELLS = 30_000_000  # Cells of one comparison: a graph of five thousand kernels; 0.3 GB for a second.
# The worth of a pair of a kernel and an instruction.
_SAME_NAME, _SAME_WORK, _SAME_STEM, _SAME_KIND, _COPIES, _ANY_LIBRARY, _FILLS = 4.0, 3.8, 2.0, 3.0, 2.0, 0.8, 0.5
_AGAIN = 1.0  # The most for a second kernel of one instruction.
_LEFT_OUT, _UNKNOWN = 0.3, 0.5  # The costs of an instruction without a kernel, and of a kernel without an instruction.
_TAKEN = 0.7  # The remaining share of a pair's worth if another graph has the instruction.


def graph_nodes(module: Module, schedule: Schedule | None) -> tuple[GraphNode, ...]:
    """Return a program's instructions on a GPU in order, bodies of loops and calls in place; none without schedule."""
    if schedule is None:
        return ()
    every = (i for i, _ in schedule.walk() if i.kind in ("kernel", "start", "collective") or i.opcode in _NUMBERS)
    return tuple(_node(i, module) for i in every)


def _node(i: Instruction, module: Module) -> GraphNode:
    """Return the node of one instruction; for an asynchronous kernel, of the one that it starts."""
    if i.collective is not None:
        name = i.name.rpartition("/")[2]  # The program names several that start together so.
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
    """Return the work of a library's kernel or a custom call's target: its kind; for attention, with the direction."""
    kind = kind_of_kernel(name)
    return f"{kind} backward" if kind == "attention" and _BACKWARD.search(name) else kind


def _work(at: HloInstruction) -> Hashable:
    return (at.opcode, *(value for number in (3, 8) for value in at.fields.get(number, ()) if number in at.fields))


def name_graph_kernels(found: Operations, program: TracedProgram) -> None:
    """Give operations of a file that ran inside a program's graphs their instructions, in place; "" where unknown."""
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
                if found.labels[of] is before[of] and hidden[of]:  # Nobody needs the old label any more.
                    known[of, name], found.labels[of] = of, new
                else:
                    known[of, name] = len(found.labels)
                    found.labels.append(new)
            label[at] = known[of, name]
        found.devices[device] = replace(ops, label=label)


def _is_hidden(label: Label) -> bool:
    """Return whether an operation has the name of a command buffer in place of its instruction's."""
    return label.graph and (not label.op or bool(_COMMAND_BUFFER.match(label.op)) or is_container(label))


def _named(
    ops: DeviceOperations, rows: np.ndarray, labels: Sequence[Label], names: _Names
) -> Iterator[tuple[np.ndarray, str]]:
    """Yield the operations of one label and node, as indices, with their instruction's name; `rows` are in time."""
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
        if number < 0:  # Nothing distinguishes the nodes.
            continue
        ids, start, count = np.unique(launch[at], return_index=True, return_counts=True)
        whole = at[launch[at] == ids[np.lexsort((start, -count))[0]]]  # The first launch with the most kernels.
        once = np.sort(np.unique(kind[whole], return_index=True)[1])
        order = kind[whole[once]].tolist()
        found |= zip(order, names.instructions(buffer, [label_of[k].name for k in order]))
    for k, at in enumerate(_parts(kind)):
        name = found.get(k)
        yield rows[at], names.instruction_named(label_of[k].name) if name is None else name


def _parts(number: np.ndarray) -> list[np.ndarray]:
    return np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])


class _Names:
    """Compares the kernels of graphs with a program's instructions, each order of kernels once."""

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
        """Return the instruction whose kernel has a name; "" if there is none."""
        i = self._by_kernel.get(kernel)
        return "" if i is None else self._nodes[i].name

    def instructions(self, buffer: str, kernels: Sequence[str]) -> list[str]:
        """Return the instruction of each kernel of a graph, in the order in which they ran; "" where unknown."""
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
        """Return [instructions] the worth of pairing a kernel with each."""
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
            pass  # No instruction's name begins with it.
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
        """Return the instruction of each kernel, -1 for none, so that pairs in order have the most worth."""
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
        best = np.zeros(count, np.float32)  # The best sum of pairs whose last pair has this instruction.
        back = np.full((len(kernels), count), -1, np.int32)  # The instruction of the pair before; -1 for a start.
        paired = np.zeros((len(kernels), count), bool)
        started = np.zeros(count, bool)
        filled = False
        for j, row in enumerate(rows):
            worth = row[low:high] * np.where(taken, _TAKEN, 1.0)
            reach = np.where(started, best + place, -np.inf)  # Going from an earlier instruction to the next.
            ahead = np.maximum.accumulate(reach)
            source = np.maximum.accumulate(np.where(reach == ahead, np.arange(count), 0))
            ahead, source = np.roll(ahead, 1), np.roll(source, 1)
            ahead[0] = -np.inf
            value = ahead - place + _LEFT_OUT
            fresh = value < -_UNKNOWN * j  # Starting here is worth more than anything before.
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
