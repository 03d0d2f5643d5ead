"""What a reader wants to know of an instruction: its shape, and by its name its kind, model code and source line.

A trace and a simulation name instructions; this table, read from the compiled program, says what they are. jaxlib 0.12
gives an instruction's shape as an object; 0.11 only prints it. Both become the same `Shape`.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from meshkit.hlo.proto import Attributes, Fields, attributes_of, integer, messages, text, texts

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
OTHER_KERNELS = "other kernels"
_LIBRARY_KINDS = (  # by what stands in the name of a library's kernel, or of the custom call that runs it
    ("attention", "fmha|flash|attention|sdpa|cudnn::fusion"),
    ("convolution", "conv(?!ert)"),
    ("matmul", "gemm|matmul|cublas|dot|nvjet"),
    ("sort", "sort|topk"),
)
_KERNEL_KINDS = (  # of kernels that XLA compiles: `input_reduce_fusion_3`, `wrapped_transpose`
    ("reduction", "reduce"),
    ("gather and scatter", "gather|scatter"),
    ("data movement", "^mem(?:cpy|set)|copy|slice|broadcast|concatenate|transpose|^(?:loop|wrapped)_(?:pad|iota)"),
    ("elementwise", "fusion|^wrapped_"),
)
_COMBINED = {"all-gather", "all-gather-start", "all-reduce", "all-reduce-start", "reduce-scatter"}
_PASSES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "get-tuple-element", "reshape", "transpose"}
_DIGITS = re.compile(r"\d+")  # what tells names of one kind apart
_WORKSPACE = re.compile(r"\((.+),[su]8\[\d+\]\)")
_OURS = re.compile(  # `lint`, `training` and `xla` are in programs that earlier versions captured
    r"(?:^|/)meshkit/(?:\w+\.py$|(?:compile|config|lint|linting|parallel|sharding|step|trace|training|verbs|weights|xla)/)"
)
_NOT_USERS = re.compile(rf"^<|(?:^|/)bin/[^/]*$|/site-packages/|/dist-packages/|/lib/python\d|{_OURS.pattern}")
_CELL = re.compile(r"(?:^|/)ipykernel_\d+/\d+\.py$")  # of a kernel that runs a notebook, one file a cell
_SHIPPED = "/meshkit/_shipped/models/"  # what a wheel brings along is a model's code all the same
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = ")
_BITS = re.compile(r"^[a-z]+?(\d+)")


@dataclass(frozen=True)
class Shape:
    """An array (dtype and dims), or a tuple of shapes (dtype `tuple`)."""

    dtype: str  # as XLA spells it: `bf16`, `f8e4m3fn`, `s32`, `pred`, `token`
    dims: tuple[int, ...] = ()  # sizes; () of a scalar, a token or a tuple
    parts: tuple[Shape, ...] = ()  # members of a tuple

    @property
    def bytes(self) -> int:
        """Bytes of an array or, summed, of a tuple; sub-byte types are packed."""
        if self.dtype == "tuple":
            return sum(p.bytes for p in self.parts)
        return math.ceil(math.prod(self.dims) * dtype_bits(self.dtype) / 8)

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def shape_of(instruction: Any) -> Shape:
    """The shape of an instruction's result, from its object where jaxlib has one, else from its text."""
    native = getattr(instruction, "shape", None)
    return _from_object(native) if native is not None else parse_shape(instruction.to_string())


def parse_shape(text: str) -> Shape:
    """The result shape of a printed instruction `%name = shape opcode(...)`."""
    return _parse(_result_text(_RESULT.sub("", text, count=1)))


def dtype_bits(name: str) -> int:
    """Bits of an element: 16 for bf16, 8 for pred and every f8, 4 for s4; 0 for a token."""
    if name == "pred":
        return 8
    m = _BITS.match(name)
    return int(m[1]) if m else 0


def _from_object(native: Any) -> Shape:
    if native.is_tuple():
        return Shape("tuple", parts=tuple(_from_object(s) for s in native.tuple_shapes()))
    if native.is_token():
        return Shape("token")
    return Shape(native.xla_element_type().name.lower(), tuple(native.dimensions()))


def _result_text(text: str) -> str:
    """The leading shape of `text`: up to the bracket that closes a tuple, or the first space."""
    if not text.startswith("("):
        return text.split(" ", 1)[0]
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: position + 1]
    return text


@functools.lru_cache(maxsize=65536)
def _parse(text: str) -> Shape:
    text = re.sub(r"/\*[^*/]*\*/|\{[^{}]*\}", "", text).strip()
    if text.startswith("("):
        return Shape("tuple", parts=tuple(_parse(part) for part in _members(text[1:-1])))
    found = _ARRAY.match(text)
    if not found:
        return Shape("token" if text.startswith("token") else text)
    return Shape(found[1], tuple(int(d.strip(" <=")) for d in found[2].split(",") if d.strip(" <=")))


def _members(text: str) -> list[str]:
    """The members of a printed tuple: split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]


@dataclass(frozen=True)
class InstructionInfo:
    """What an instruction is."""

    kind: str  # of its work: `matmul`, `attention`, `convolution`, `reduction`, `elementwise`, ...
    key: str  # `kind|shape|op_name path|occurrence`; survives a recompile, which the name does not
    source: str  # op_name path of the model code that caused it; "" if unknown
    line: str | None
    """`models/layers.py:90 from models/llama.py:123`: the innermost line of that code that is no library's, and the
    line of another file that led there; of an instruction without any, such as the gather of a parameter, that of
    what takes its result; None if unknown."""
    arrays: int = 1  # of a collective: how many it moves together
    causes: Mapping[str, int] = field(default_factory=dict)
    """Of a collective that XLA combined of several: where each array comes from, or for what it is gathered
    (`models/llama.py:88 attention/dot_general`) -> bytes on one GPU, the most first."""


def read_instructions(module: Any, *, also: Iterable[str] = ()) -> dict[str, InstructionInfo]:
    """Name -> what it is, of every instruction of a compiled HloModule that can run by itself.

    Args:
        module: the program.
        also: names, of which those inside of fusions are wanted too: some kernels are called by them.
    """
    attributes = attributes_of(module)
    lines = SourceLines(attributes.stack_frames)
    bodies = {name: [attributes.of(i) for i in attributes.order(name)] for name in attributes.computations}
    kinds = {name: _kind(body) for name, body in bodies.items()}
    inside = {_fused(at) for body in bodies.values() for at in body}
    line_of = {name: line for body in bodies.values() for name, line in _lines(body, lines)}
    origins = functools.cache(lambda name: _Origins(name, bodies, lines, origins))
    seen: Counter[str] = Counter()
    found = {}
    for computation in module.computations():
        if computation.name in inside:
            continue
        for i in computation.instructions():
            at = attributes.of(i.name)
            kind = kinds.get(_fused(at) or "") or _kind([at])
            shape = _result(str(shape_of(i)).replace(" ", ""), at)
            base = f"{kind}|{shape}|{_plain_path(at.source)}"
            seen[base] += 1
            info = InstructionInfo(kind, f"{base}|{seen[base]}", at.source, line_of[i.name])
            moves = {at.opcode, *(a.opcode for name in at.called for a in bodies[name] if at.opcode == "async-start")}
            if moves & _COMBINED and len(at.operands) > 1:
                gathers = bool(moves & {"all-gather", "all-gather-start"})
                causes = origins(computation.name).of(at, [shape_of(o).bytes for o in i.operands()], gathers=gathers)
                info = replace(info, arrays=len(at.operands), causes=causes)
            found[i.name] = info
    missing = set(also) - found.keys()
    for at in (at for body in bodies.values() for at in body) if missing else ():
        if at.name in missing:
            kind = _kind([at])
            key = f"{kind}||{_plain_path(at.source)}|inside"
            found[at.name] = InstructionInfo(kind, key, at.source, line_of[at.name])
    return found


def _lines(body: Sequence[Attributes], lines: SourceLines) -> Iterator[tuple[str, str | None]]:
    """The instructions of a computation, in order, with their lines; see `InstructionInfo.line`."""
    of_user: dict[int, str] = {}  # id -> the line of the first that takes its result
    found = []
    for at in reversed(body):
        line = lines.of(at.metadata) or of_user.get(at.id)
        found.append((at.name, line))
        if line:
            of_user |= dict.fromkeys(at.operands, line)
    return reversed(found)


class _Origins:
    """Where the arrays of a combined collective come from and go to; its own metadata is that of one of them.

    Args:
        name: of the computation that they are looked for in. What a loop gets, or hands to its next turn, is followed.
        bodies: the computations of a module, each in order.
        lines: of the module.
        inside: the same of another computation.
    """

    def __init__(
        self, name: str, bodies: Mapping[str, Sequence[Attributes]], lines: SourceLines, inside: Callable[[str], Any]
    ):
        self._bodies, self._body, self._lines, self._inside = bodies, bodies[name], lines, inside
        self._by_id = {at.id: at for at in self._body}
        self._users: dict[int, list[Attributes]] = {}
        for at in self._body:
            for operand in dict.fromkeys(at.operands):
                self._users.setdefault(operand, []).append(at)
        self._parameters = [at for at in self._body if at.opcode == "parameter"]
        # what the root hands to the next turn, by its place; nothing where this is no body of a loop
        root = self._body[-1]
        self._handed_on = root.operands if len(self._parameters) == 1 and root.opcode == "tuple" else []

    def of(self, at: Attributes, sizes: Sequence[int], *, gathers: bool) -> dict[str, int]:
        """Cause -> bytes, the most first: of what is gathered its user, of what is reduced its maker."""
        found: Counter[str] = Counter()
        for n, (operand, size) in enumerate(zip(at.operands, sizes)):
            made, taken = self._made(operand), self._taken(at, n)
            found[(taken or made if gathers else made or taken) or "unknown"] += size
        return dict(found.most_common())

    def _made(self, id_: int) -> str:
        """What computed an array."""
        seen = set()
        while id_ in self._by_id and id_ not in seen:
            seen.add(id_)
            at = self._by_id[id_]
            if cause := self._text(at):
                return cause
            if at.opcode not in _PASSES or not at.operands:
                return ""
            id_, index = at.operands[0], at.tuple_index
            before = self._by_id.get(id_)
            if before is not None and before.opcode == "parameter" and index < len(self._handed_on):
                id_ = self._handed_on[index]
        return ""

    def _taken(self, at: Attributes, n: int) -> str:
        """What takes array `n` of a result."""
        done = [u for u in self._users.get(at.id, ()) if u.opcode.endswith("-done")]
        return self._used([g for of in (done or [at]) for g in self._elements(of, n)])

    def _used(self, todo: list[Attributes]) -> str:
        """What uses the first of some arrays that anything uses."""
        seen: set[int] = set()
        while todo:
            each = todo.pop(0)
            if each.id in seen:
                continue
            seen.add(each.id)
            for user in self._users.get(each.id, ()):
                if user.opcode == "tuple":
                    places = [place for place, id_ in enumerate(user.operands) if id_ == each.id]
                    loops = [loop.called[0] for loop in self._users.get(user.id, ()) if loop.opcode == "while"]
                    inside = map(self._inside, loops)
                    if cause := next(filter(None, (body._used(body._carried(places)) for body in inside)), ""):
                        return cause
                    todo += self._carried(places) if user is self._body[-1] and self._handed_on else []
                elif user.opcode in _PASSES:
                    todo.append(user)
                elif cause := self._text(user):
                    return cause
        return ""

    def _carried(self, places: Sequence[int]) -> list[Attributes]:
        """What the body of a loop takes of what it is handed."""
        return [g for at in self._parameters for n in places for g in self._elements(at, n)]

    def _elements(self, of: Attributes, n: int) -> list[Attributes]:
        """Member `n` of a tuple."""
        taken = (u for u in self._users.get(of.id, ()) if u.opcode == "get-tuple-element")
        return [u for u in taken if u.tuple_index == n]

    def _text(self, at: Attributes) -> str:
        """Line and path of an instruction; of a fusion that has none, those of the last in it that has."""
        line = (self._lines.of(at.metadata) or "").rpartition(" from ")[2]
        path = "/".join([part for part in at.source.split("/") if not part.startswith("jit(")][-2:])
        text = " ".join(text for text in (line, path) if text)
        inside = reversed(self._bodies.get(_fused(at) or "", ()))
        return text or next(filter(None, map(self._text, inside)), "")


class SourceLines:
    """The source lines of a module: its tables of files, locations and frames.

    Args:
        index: `StackFrameIndexProto`; ids in it count from 1.
    """

    def __init__(self, index: Fields):
        self._files = dict(enumerate(texts(index, 1), 1))
        self._locations = {n: (integer(f, 1), integer(f, 3)) for n, f in enumerate(messages(index, 3), 1)}
        self._frames = {n: (integer(f, 1), integer(f, 2)) for n, f in enumerate(messages(index, 4), 1)}

    def of(self, metadata: Fields) -> str | None:
        """Lines of an instruction, each file with its last folder; see `InstructionInfo.line`."""
        if plain := text(metadata, 3):  # programs of earlier compilers
            return None if _OURS.search(plain) else f"{_short(plain)}:{integer(metadata, 4)}"
        return self._user_line(integer(metadata, 15))

    def _user_line(self, frame: int) -> str | None:
        """The innermost line in user code, and the line of the next file that led there; else a library's innermost."""
        innermost, own = None, []
        for name, line in self._from_inside(frame):
            users = _SHIPPED in name or not _NOT_USERS.search(name)
            if innermost is None:
                innermost = "" if _OURS.search(name) else f"{_short(name)}:{line}"
            if users and all(name != other for other, _ in own):
                own.append((name, line))
            if len(own) == 2:
                break
        return " from ".join(f"{_short(name)}:{line}" for name, line in own) or innermost or None

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


def _kind(body: Iterable[Attributes]) -> str:
    """The kind of an instruction, or of one that fuses several."""
    held = {at.opcode for at in body}
    custom = [_custom_kind(at.target) for at in body if at.opcode == "custom-call"]
    named = next((kind for kind in custom if kind != "custom call"), None)
    named = named or next((kind for kind, opcodes in _BY_OPCODE if held & opcodes), None)
    if named or custom:
        return named or "custom call"
    return "data movement" if held <= _MOVES else "elementwise"


def kind_of_kernel(name: str) -> str:
    """What a kernel does by its name, where its instruction is not known."""
    return _kind_of_stem(_DIGITS.sub("0", name))


@lru_cache(maxsize=10_000)
def _kind_of_stem(stem: str) -> str:
    kind = _custom_kind(stem)
    return _first(_KERNEL_KINDS, stem, OTHER_KERNELS) if kind == "custom call" else kind


def _custom_kind(target: str) -> str:
    return _first(_LIBRARY_KINDS, target, "custom call")


def _first(kinds: Iterable[tuple[str, str]], name: str, otherwise: str) -> str:
    return next((kind for kind, words in kinds if re.search(words, name, re.IGNORECASE)), otherwise)


def _fused(at: Attributes) -> str | None:
    """The computation that a fusion runs."""
    return at.called[0] if at.opcode == "fusion" and at.called else None


def _result(shape: str, at: Attributes) -> str:
    """The shape of what an instruction computes: a library call's without its workspace, of whatever size."""
    found = _WORKSPACE.fullmatch(shape) if at.target else None
    if found is None:
        return shape
    return f"({found[1]})" if found[1].count("[") > 1 else found[1]


def _plain_path(source: str) -> str:
    """Without numeric suffixes; a bare name is an argument's, which differs with how the function was called."""
    return re.sub(r"[._]\d+(?=/|$)", "", source) if "/" in source else ""


def _short(path: str) -> str:
    if _CELL.search(path):
        return "notebook"
    return "/".join(path.rsplit("/", 2)[-2:])
