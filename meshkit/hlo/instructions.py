"""What a reader wants to know of an instruction by its name: kind, model code, source line.

A trace and a simulation name instructions; this table, read from the compiled program, says what they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.hlo.costs import custom_call_target, opcode
from meshkit.hlo.module import source_path

_MOVES = {
    "bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "copy", "dynamic-slice",
    "dynamic-update-slice", "get-tuple-element", "iota", "pad", "parameter", "reshape", "reverse", "slice", "transpose",
    "tuple",
}  # fmt: skip
_BY_OPCODE = (
    ("convolution", {"convolution"}),
    ("matmul", {"dot", "scaled-dot", "ragged-dot"}),
    ("sort", {"sort", "topk"}),
    ("gather and scatter", {"gather", "scatter"}),
    ("random numbers", {"rng-bit-generator", "rng", "rng-get-and-update-state"}),
    ("reduction", {"reduce", "reduce-window", "select-and-scatter"}),
)
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PLAIN_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_SHAPE = re.compile(r"=\s*(\((?:[^()]|\([^()]*\))*\)|\S+)\s+[\w\-]+\(")
_LAYOUT = re.compile(r"\{[^}]*\}|/\*[^*]*\*/|\s")
_NOT_USERS = re.compile(  # `training` and `xla` are in programs that earlier versions captured
    r"^<|(?:^|/)bin/[^/]*$|/site-packages/|/dist-packages/|/lib/python\d"
    r"|(?:^|/)meshkit/(?:\w+\.py$|(?:compile|config|lint|parallel|sharding|step|training|verbs|weights|xla)/)"
)


@dataclass(frozen=True)
class InstructionInfo:
    """What an instruction is."""

    kind: str  # of its work: `matmul`, `attention`, `convolution`, `reduction`, `elementwise`, `data movement`,
    key: str  # `kind|shape|op_name path|occurrence`; survives a recompile, which the name does not
    source: str  # op_name path of the model code that caused it; "" if unknown
    line: str | None
    """`models/layers.py:90 from models/llama.py:123`: the innermost line of that code that is no library's, and the
    line of another file that led there; None if unknown."""


def read_instructions(module: Any) -> dict[str, InstructionInfo]:
    """Name -> what it is, of every instruction of a compiled HloModule that can run by itself."""
    text = module.to_string()
    lines = StackFrames(text)
    computations = {c.name: c for c in module.computations()}
    inside = {name for c in computations.values() for i in c.instructions() for name in _fused(i)}
    kinds = _Kinds(computations)
    seen: Counter[str] = Counter()
    found = {}
    for name, computation in computations.items():
        if name in inside:
            continue
        for i in computation.instructions():
            printed = i.to_string()
            kind, source = kinds.of(i, printed), source_path(printed)
            base = f"{kind}|{_shape(printed)}|{_plain_path(source)}"
            seen[base] += 1
            found[i.name] = InstructionInfo(kind, f"{base}|{seen[base]}", source, lines.of(printed))
    return found


class StackFrames:
    """The source lines of a module: its printed tables of files, locations and frames.

    Args:
        text: the printed module.
    """

    def __init__(self, text: str):
        self._files = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M)}
        located = re.findall(r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _table(text, "FileLocations"), re.M)
        self._locations = {int(n): (int(file), int(line)) for n, file, line in located}
        framed = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.M
        )
        # XLA prints the parent's id plus one, so that the outermost frame (whose parent is 0) seems its own parent
        shift = int(bool(framed) and framed[0][2] == framed[0][0])
        self._frames = {int(n): (int(location), int(parent or 0) - shift) for n, location, parent in framed}

    def of(self, printed: str) -> str | None:
        """Lines of a printed instruction, each file with its last folder; see `InstructionInfo.line`."""
        if plain := _PLAIN_LINE.search(printed):  # programs of earlier compilers
            return f"{_short(plain[1])}:{plain[2]}"
        found = _FRAME.search(printed)
        return self._user_line(int(found[1])) if found else None

    def _user_line(self, frame: int) -> str | None:
        """The innermost line in user code, and the line of the next file that led there; else the innermost of all."""
        innermost, own = None, []
        for name, line in self._from_inside(frame):
            innermost = innermost or f"{_short(name)}:{line}"
            if not _NOT_USERS.search(name) and all(name != other for other, _ in own):
                own.append((name, line))
            if len(own) == 2:
                break
        return " from ".join(f"{_short(name)}:{line}" for name, line in own) or innermost

    def _from_inside(self, frame: int) -> Iterator[tuple[str, int]]:
        """(file, line) of a frame and of those that called it."""
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            if file in self._files:
                yield self._files[file], line
            if parent >= frame:  # parents come first; anything else would go round in circles
                return
            frame = parent


class _Kinds:
    def __init__(self, computations: Mapping[str, Any]):
        self._computations = computations
        self._known: dict[str, str] = {}

    def of(self, instruction: Any, printed: str) -> str:
        """The kind of an instruction, by what it or the computation that it fuses holds."""
        op = opcode(instruction)
        if op == "custom-call":
            return _custom_kind(custom_call_target(printed))
        fused = [name for name in _fused(instruction, printed) if name in self._computations]
        if not fused:
            return _kind([op])
        if fused[0] not in self._known:
            self._known[fused[0]] = self._fused_kind(fused[0])
        return self._known[fused[0]]

    def _fused_kind(self, name: str) -> str:
        inner = list(self._computations[name].instructions())
        custom = [_custom_kind(custom_call_target(i.to_string())) for i in inner if opcode(i) == "custom-call"]
        return next((kind for kind in custom if kind != "custom call"), None) or _kind([opcode(i) for i in inner])


def _kind(opcodes: Iterable[str]) -> str:
    held = set(opcodes)
    for kind, ops in _BY_OPCODE:
        if held & ops:
            return kind
    if "custom-call" in held:
        return "custom call"
    return "data movement" if held <= _MOVES else "elementwise"


def _custom_kind(target: str) -> str:
    lowered = target.lower()
    for kind, words in (
        ("attention", ("fmha", "flash", "attention")),
        ("convolution", ("conv",)),
        ("matmul", ("gemm", "matmul", "cublas", "dot")),
        ("sort", ("sort", "topk")),
    ):
        if any(word in lowered for word in words):
            return kind
    return "custom call"


def _fused(instruction: Any, printed: str | None = None) -> list[str]:
    if opcode(instruction) != "fusion":
        return []
    return _CALLED.findall(printed or instruction.to_string())


def _shape(printed: str) -> str:
    found = _SHAPE.search(printed)
    return _LAYOUT.sub("", found[1]) if found else ""


def _plain_path(source: str) -> str:
    """Without numeric suffixes; a bare name is an argument's, which differs with how the function was called."""
    return re.sub(r"[._]\d+(?=/|$)", "", source) if "/" in source else ""


def _table(text: str, title: str) -> str:
    """The lines of one of the module's printed tables, up to the next empty line or title."""
    found = re.search(rf"^{title}\n((?:\d+ .*\n?)*)", text, re.M)
    return found[1] if found else ""


def _short(path: str) -> str:
    return "/".join(path.rsplit("/", 2)[-2:])
