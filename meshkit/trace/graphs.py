"""Kernels inside CUDA graphs -> the instructions that they are.

XLA:GPU replays runs of instructions as CUDA graphs, its command buffers, and the profiler then gives each kernel the
name of its command buffer in place of its instruction's. What a graph launches are the instructions of one stretch of
the program, in their order; so the order of its kernels is laid beside that of the program, as two texts are compared:

- a fusion's kernel bears the fusion's name, or that of an equal one which XLA compiled before;
- a library's kernel says what it does (a matmul, attention, a collective), and a copy or a memset that it is one.

What the comparison leaves over gets the instruction of its name, if there is one. All else stays without.
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
_CONTINUES = re.compile(r"splitKreduce", re.IGNORECASE)  # adds up what the kernel before it multiplied
_NUMBERS = ("partition-id", "replica-id")  # a memset of four bytes each
_NO_LIBRARY = re.compile(r"fusion|^wrapped_|^memcpy", re.IGNORECASE)  # a kernel of XLA's own, and a copy
_SLICES = re.compile(r"copy|slice")
MOST_CELLS = 30_000_000  # of one comparison: a graph of five thousand kernels; 0.3 GB for a second
# What a pair of a kernel and an instruction is worth.
_SAME_NAME, _SAME_WORK, _SAME_STEM, _SAME_KIND, _COPIES, _ANY_LIBRARY, _FILLS = 4.0, 3.8, 2.0, 3.0, 2.0, 0.8, 0.5
_AGAIN = 1.0  # at most, of a second kernel of one instruction
_LEFT_OUT, _UNKNOWN = 0.3, 0.5  # the cost of an instruction without a kernel, and of a kernel without an instruction
_TAKEN = 0.7  # what is left of a pair's worth where another graph has the instruction


def graph_nodes(module: Module, schedule: Schedule | None) -> tuple[GraphNode, ...]:
    """The instructions of a program that run on a GPU, in their order, what loops and calls run in their place.

    Args:
        module: the program.
        schedule: the same, read; None gives no nodes.
    """
    if schedule is None:
        return ()
    every = (i for i, _ in schedule.walk() if i.kind in ("kernel", "start", "collective") or i.opcode in _NUMBERS)
    return tuple(_node(i, module) for i in every)


def _node(i: Instruction, module: Module) -> GraphNode:
    """One instruction; of an asynchronous kernel that which it starts."""
    if i.collective is not None:
        name = i.name.rpartition("/")[2]  # of several that are started together, as the program names it
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
    """What a library's kernel or a custom call's target does: its kind, of attention with the direction."""
    kind = kind_of_kernel(name)
    return f"{kind} backward" if kind == "attention" and _BACKWARD.search(name) else kind


def _work(at: HloInstruction) -> Hashable:
    """What an instruction does, by opcode, shape and literal."""
    return (at.opcode, *(value for number in (3, 8) for value in at.fields.get(number, ()) if number in at.fields))


def name_graph_kernels(found: Operations, program: TracedProgram) -> None:
    """Gives the operations that ran inside graphs of a program their instruction; "" where it is not known.

    Args:
        found: of one file; its `labels` and `devices` are changed in place.
        program: whose `graph_nodes` the kernels are compared with.
    """
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
                if found.labels[of] is before[of] and hidden[of]:  # nobody needs it any more
                    known[of, name], found.labels[of] = of, new
                else:
                    known[of, name] = len(found.labels)
                    found.labels.append(new)
            label[at] = known[of, name]
        found.devices[device] = replace(ops, label=label)


def _is_hidden(label: Label) -> bool:
    """Whether an operation has the name of a command buffer in place of its instruction's."""
    return label.graph and (not label.op or bool(_COMMAND_BUFFER.match(label.op)) or is_container(label))


def _named(
    ops: DeviceOperations, rows: np.ndarray, labels: Sequence[Label], names: _Names
) -> Iterator[tuple[np.ndarray, str]]:
    """Operations of one label and node, as indices, with the name of their instruction.

    Args:
        rows: the operations to name, in time.
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
        if number < 0:  # nothing tells one node from another
            continue
        ids, start, count = np.unique(launch[at], return_index=True, return_counts=True)
        whole = at[launch[at] == ids[np.lexsort((start, -count))[0]]]  # the first launch of those with most kernels
        once = np.sort(np.unique(kind[whole], return_index=True)[1])
        order = kind[whole[once]].tolist()
        found |= zip(order, names.of(buffer, [label_of[k].name for k in order]))
    for k, at in enumerate(_parts(kind)):
        name = found.get(k)
        yield rows[at], names.by_name(label_of[k].name) if name is None else name


def _parts(number: np.ndarray) -> list[np.ndarray]:
    """Where each number of 0 ... n - 1 stands, in order."""
    return np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])


class _Names:
    """Compares the kernels of graphs with a program's instructions; each order of kernels once."""

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
        self._taken: dict[int, str] = {}  # instruction -> the command buffer that has it
        self._found: dict[tuple[str, ...], list[str]] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._more = np.where(self._library != "", np.float32(_ANY_LIBRARY), np.float32(0))

    def by_name(self, kernel: str) -> str:
        """The instruction whose kernel bears a name; "" if there is none."""
        i = self._by_kernel.get(kernel)
        return "" if i is None else self._nodes[i].name

    def of(self, buffer: str, kernels: Sequence[str]) -> list[str]:
        """The instruction of each kernel of a graph, in the order in which they ran; "" where it is not known."""
        key = (buffer, *kernels)
        if key not in self._found:
            found = self._compared(buffer, kernels) if self._nodes else [-1] * len(kernels)
            for i in found:
                self._taken.setdefault(i, buffer)
            self._found[key] = [self.by_name(k) if i < 0 else self._nodes[i].name for k, i in zip(kernels, found)]
        return self._found[key]

    def _worth(self, kernel: str) -> np.ndarray:
        """[instructions] what it is worth that a kernel is each."""
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
            pass  # no instruction begins with it
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
        """Of each kernel the instruction, -1 for none, so that pairs in order are worth the most."""
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
        best = np.zeros(count, np.float32)  # of what has been paired, where the last pair has this instruction
        back = np.full((len(kernels), count), -1, np.int32)  # the last pair's instruction before; -1 for a start
        paired = np.zeros((len(kernels), count), bool)
        started = np.zeros(count, bool)
        filled = False
        for j, row in enumerate(rows):
            worth = row[low:high] * np.where(taken, _TAKEN, 1.0)
            reach = np.where(started, best + place, -np.inf)  # from an earlier instruction to the next
            ahead = np.maximum.accumulate(reach)
            source = np.maximum.accumulate(np.where(reach == ahead, np.arange(count), 0))
            ahead, source = np.roll(ahead, 1), np.roll(source, 1)
            ahead[0] = -np.inf
            value = ahead - place + _LEFT_OUT
            fresh = value < -_UNKNOWN * j  # nothing before is worth as much as to begin here
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
