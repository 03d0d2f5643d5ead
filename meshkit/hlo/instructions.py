"""Describe instructions by their names: kind, model code and source line.

Traces and simulations contain names of instructions. `read_instructions` reads the descriptions from the compiled
program.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from meshkit.config.places import TOOLS
from meshkit.hlo.proto import (
    Computation,
    Fields,
    HloInstruction,
    Module,
    Shape,
    integer,
    messages,
    refusing_malformed,
    text,
    texts,
)

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
_LIBRARY_KINDS = (  # The name of a library's kernel, or of the custom call that runs it, contains one of these.
    ("attention", "fmha|flash|attention|sdpa|cudnn::fusion"),
    ("convolution", "conv(?!ert)"),
    ("matmul", "gemm|matmul|cublas|dot|nvjet"),
    ("sort", "sort|topk"),
)
_KERNEL_KINDS = (  # XLA compiles these kernels: `input_reduce_fusion_3`, `wrapped_transpose`.
    ("reduction", "reduce"),
    ("gather and scatter", "gather|scatter"),
    ("data movement", "^mem(?:cpy|set)|copy|slice|broadcast|concatenate|transpose|^(?:loop|wrapped)_(?:pad|iota)"),
    ("elementwise", "fusion|^wrapped_"),
)
_COMBINED = {"all-gather", "all-gather-start", "all-reduce", "all-reduce-start", "reduce-scatter"}
_PASSES = {"bitcast", "convert", "copy", "copy-done", "copy-start", "get-tuple-element", "reshape", "transpose"}
_DIGITS = re.compile(r"\d+")  # Names of one kind differ in their digits.
_OURS = re.compile(  # `lint`, `training` and `xla` are in programs that earlier versions captured.
    r"(?:^|/)meshkit/(?:\w+\.py$|(?:compile|config|integrations|lint|linting|parallel|sharding|step|trace|training|verbs|weights|xla)/)"
)
# These modules call the program, so callers above them do not belong to it.
_PLANNING = re.compile(r"(?:^|/)meshkit/(?:compile|planning|search|verbs)/")
# Packages with which a model is written. The line that calls them says more than a line inside them.
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_NOT_USERS = re.compile(
    rf"^<|(?:^|/)bin/[^/]*$|/lib/python[\d.]+/(?!(?:site|dist)-packages/)|{_INSTALLED.pattern}(?:{TOOLS})/|{_OURS.pattern}"
)
_NEARLY_ALL = 0.8
_TRANSFORMED = re.compile(r"\b(?!p?jit\()\w+\(([^()]*)\)")  # `jvp(Model)`; `jit(step)` names a function.
# Parts of op_name paths that control flow and recomputation add between the scopes of modules.
_BETWEEN = re.compile(
    r"(?:^|(?<=/))(?:while/(?:body|cond)|cond/branch_\d+_fun|closed_call|eval_jaxpr|checkpoint|rematted_computation"
    r"|shard_map|custom_[jv]+p_call(?:_jaxpr)?)(?=/|$)"
)
_CELL = re.compile(r"(?:^|/)ipykernel_\d+/\d+\.py$")  # An IPython kernel has one file per cell of a notebook.
_SHIPPED = "/meshkit/_shipped/models/"  # Models that a wheel brings along count as the user's code.


@dataclass(frozen=True)
class InstructionInfo:
    """Description of an instruction."""

    kind: str
    """The kind of its work: `matmul`, `attention`, `convolution`, `reduction`, `elementwise`, ..."""
    key: str
    """`kind|shape|op_name path|occurrence`, which survives a recompile, unlike the name."""
    source: str
    """The op_name path of the model code that caused it; "" if unknown."""
    line: str | None
    """`models/layers.py:90 from models/llama.py:123`: the innermost line outside libraries, and the line of another
    file that called it. An instruction without lines, such as the gather of a parameter, has those of the first user of
    its result. None if unknown."""
    arrays: int = 1
    """Number of arrays that a collective moves together."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """For a collective that XLA combined: layer and line where each array is made or, for a gather, used
    (`layers/mlp/gate_up models/llama.py:88`) -> bytes on one GPU, in descending order."""


@refusing_malformed("the program")
def read_instructions(module: Module, *, also: Iterable[str] = ()) -> dict[str, InstructionInfo]:
    """Return name -> description of every instruction of a compiled program that can run by itself.

    Args:
        also: names of instructions inside fusions to describe as well, since some kernels have such names.

    Raises:
        ProgramError: the program has an instruction that XLA does not make.
    """
    lines = SourceLines(module.stack_frames)
    computations = module.computations.values()
    inside = {_fused(i) for i in module.instructions.values()}
    line_of = {i: line for c in computations for i, line in _lines(c, lines)}
    origins = functools.cache(lambda computation: _Origins(computation, lines, origins))
    kind_of = functools.cache(lambda computation: _kind(computation.instructions))
    seen: Counter[str] = Counter()
    found = {}
    for computation in computations:
        if computation in inside:
            continue
        for i in computation.instructions:
            fused = _fused(i)
            kind = kind_of(fused) if fused else _kind([i])
            base = f"{kind}|{str(_result(i)).replace(' ', '')}|{plain_path(i.source)}"
            seen[base] += 1
            info = InstructionInfo(kind, f"{base}|{seen[base]}", i.source, line_of[i])
            moves = {i.opcode, *(j.opcode for c in i.called for j in c.instructions if i.opcode == "async-start")}
            if moves & _COMBINED and len(i.operands) > 1:
                causes = origins(computation).causes(i, gathers=bool(moves & {"all-gather", "all-gather-start"}))
                info = replace(info, arrays=len(i.operands), causes=causes)
            found[i.name] = info
    for name in set(also) & (module.instructions.keys() - found.keys()):
        i = module.instructions[name]
        kind = _kind([i])
        found[name] = InstructionInfo(kind, f"{kind}||{plain_path(i.source)}|inside", i.source, line_of[i])
    return found


def _lines(computation: Computation, lines: SourceLines) -> Iterator[tuple[HloInstruction, str | None]]:
    of_user: dict[HloInstruction, str] = {}  # The line of the first user of its result.
    for i in reversed(computation.order):
        line = lines.find(i.metadata) or of_user.get(i)
        yield i, line
        if line:
            of_user |= dict.fromkeys(i.operands, line)


class _Origins:
    """Origins and uses of the arrays of a combined collective, whose metadata describes only one of them.

    The state of a loop is followed from one iteration to the next. `inside` returns the origins of another computation.
    """

    def __init__(self, computation: Computation, lines: SourceLines, inside: Callable[[Computation], Any]):
        self._body, self._lines, self._inside = computation.order, lines, inside
        self._parameters = [i for i in self._body if i.opcode == "parameter"]
        # Operands of the root, by index, are the state of a loop's next iteration; empty for other computations.
        root = self._body[-1]
        self._handed_on = root.operands if len(self._parameters) == 1 and root.opcode == "tuple" else ()

    def causes(self, i: HloInstruction, *, gathers: bool) -> dict[str, int]:
        """Return cause -> bytes, in descending order: users of gathered arrays, and origins of other arrays."""
        found: Counter[str] = Counter()
        for n, operand in enumerate(i.operands):
            made, taken = self._made(operand), self._taken(i, n)
            found[(taken or made if gathers else made or taken) or "unknown"] += operand.shape.bytes
        return dict(found.most_common())

    def _made(self, i: HloInstruction) -> str:
        seen = set()
        while i not in seen:
            seen.add(i)
            if cause := self._text(i):
                return cause
            if i.opcode not in _PASSES or not i.operands:
                return ""
            i, index = i.operands[0], i.tuple_index
            if i.opcode == "parameter" and index < len(self._handed_on):
                i = self._handed_on[index]
        return ""

    def _taken(self, i: HloInstruction, n: int) -> str:
        done = [u for u in i.users if u.opcode.endswith("-done")]
        return self._used([g for of in (done or [i]) for g in _elements(of, n)])

    def _used(self, todo: list[HloInstruction]) -> str:
        """Return the first use of any of the arrays that is found."""
        seen: set[HloInstruction] = set()
        while todo:
            each = todo.pop(0)
            if each in seen:
                continue
            seen.add(each)
            for user in each.users:
                if user.opcode == "tuple":
                    places = [place for place, operand in enumerate(user.operands) if operand is each]
                    loops = [loop.called[0] for loop in user.users if loop.opcode == "while"]
                    inside = map(self._inside, loops)
                    if cause := next(filter(None, (body._used(body._carried(places)) for body in inside)), ""):
                        return cause
                    todo += self._carried(places) if user is self._body[-1] and self._handed_on else []
                elif user.opcode in _PASSES:
                    todo.append(user)
                elif cause := self._text(user):
                    return cause
        return ""

    def _carried(self, places: Sequence[int]) -> list[HloInstruction]:
        return [g for i in self._parameters for n in places for g in _elements(i, n)]

    def _text(self, i: HloInstruction) -> str:
        """Return the layer and line of an instruction; a fusion without them has those of its last instruction."""
        text = layer_and_line(i.source, self._lines.find(i.metadata))
        fused = _fused(i)
        return text or next(filter(None, map(self._text, reversed(fused.order) if fused else ())), "")


def _elements(of: HloInstruction, n: int) -> list[HloInstruction]:
    return [u for u in of.users if u.opcode == "get-tuple-element" and u.tuple_index == n]


class SourceLines:
    """The source lines of a module: files, locations and frames of a `StackFrameIndexProto`, whose ids begin at 1."""

    def __init__(self, index: Fields):
        self._files = dict(enumerate(texts(index, 1), 1))
        self._locations = {n: (integer(f, 1), integer(f, 3)) for n, f in enumerate(messages(index, 3), 1)}
        self._known: dict[int, str | None] = {}
        self._frames = {n: (integer(f, 1), integer(f, 2)) for n, f in enumerate(messages(index, 4), 1)}

    def find(self, metadata: Fields) -> str | None:
        """Return the lines of an instruction, each file with its last folder; see `InstructionInfo.line`."""
        if plain := text(metadata, 3):  # Earlier compilers write the file and line into each instruction.
            return None if _OURS.search(plain) else f"{_short(plain)}:{integer(metadata, 4)}"
        frame = integer(metadata, 15)
        if frame not in self._known:
            self._known[frame] = self._user_line(frame)
        return self._known[frame]

    def _user_line(self, frame: int) -> str | None:
        """Return the innermost line of a model or else of its library, and the line of another file that calls it."""
        innermost, found = None, list[tuple[str, int]]()
        for name, line in self._call_chain(frame):
            if _PLANNING.search(name):
                break
            if innermost is None:
                innermost = "" if _OURS.search(name) else f"{_short(name)}:{line}"
            if _SHIPPED in name or not _NOT_USERS.search(name):
                found.append((name, line))
        if not found:
            return innermost or None
        told = found if _is_own(found[0][0]) else [found[0], *(f for f in found[1:] if f not in self._entry)]
        own = [f for f in told if _is_own(f[0])]
        others = [f for f in own or told if f[0] != found[0][0]]
        return " from ".join(f"{_short(name)}:{line}" for name, line in [found[0], *others[:1]])

    @functools.cached_property
    def _entry(self) -> set[tuple[str, int]]:
        """Return the user's lines in nearly all call chains; some chains lack them, since jax caches traces."""
        inner = self._frames.keys() - {parent for _, parent in self._frames.values()}
        chains = [{f for f in self._call_chain(n) if _is_own(f[0]) and not _NOT_USERS.search(f[0])} for n in inner]
        counts = Counter(f for chain in chains for f in chain)
        return {f for f, count in counts.items() if count > _NEARLY_ALL * sum(map(bool, chains)) > 1}

    def _call_chain(self, frame: int) -> Iterator[tuple[str, int]]:
        """Yield (file, line) of a frame and of its callers."""
        while frame in self._frames:
            location, parent = self._frames[frame]
            file, line = self._locations.get(location, (0, 0))
            if file in self._files:
                yield self._files[file], line
            if parent >= frame:  # Parents come first; anything else would be a cycle.
                return
            frame = parent


def short_line(line: str) -> str:
    """Return the more informative line of an `InstructionInfo.line`.

    For `models/layers.py:90 from models/llama.py:123`, it is the line of the layer, `models/llama.py:123`. If the
    second file is in another folder, such as a trainer that called the model, it is the first line.
    """
    inner, _, outer = line.partition(" from ")
    return outer if outer and outer.split("/")[0] == inner.split("/")[0] else inner


def _is_own(name: str) -> bool:
    """Return whether a file is the user's own, or a model that comes with meshkit."""
    return _SHIPPED in name or not _INSTALLED.search(name)


def _kind(body: Iterable[HloInstruction]) -> str:
    held = {i.opcode for i in body}
    custom = [_custom_kind(i.target) for i in body if i.opcode == "custom-call"]
    named = next((kind for kind in custom if kind != "custom call"), None)
    named = named or next((kind for kind, opcodes in _BY_OPCODE if held & opcodes), None)
    if named or custom:
        return named or "custom call"
    return "data movement" if held <= _MOVES else "elementwise"


def kind_of_kernel(name: str) -> str:
    """Return the kind of a kernel by its name, where its instruction is unknown."""
    return _kind_of_stem(_DIGITS.sub("0", name))


@lru_cache(maxsize=10_000)
def _kind_of_stem(stem: str) -> str:
    kind = _custom_kind(stem)
    return _first(_KERNEL_KINDS, stem, OTHER_KERNELS) if kind == "custom call" else kind


def _custom_kind(target: str) -> str:
    return _first(_LIBRARY_KINDS, target, "custom call")


def _first(kinds: Iterable[tuple[str, str]], name: str, otherwise: str) -> str:
    return next((kind for kind, words in kinds if re.search(words, name, re.IGNORECASE)), otherwise)


def _fused(i: HloInstruction) -> Computation | None:
    return i.called[0] if i.opcode == "fusion" and i.called else None


def _result(i: HloInstruction) -> Shape:
    """Return the shape of an instruction's result; for a library call, without the workspace."""
    *results, last = i.shape.parts or (i.shape,)
    if not i.target or not results or last.dtype not in ("s8", "u8") or len(last.dims) != 1:
        return i.shape
    return Shape("tuple", parts=tuple(results)) if len(results) > 1 else results[0]


def plain_path(source: str) -> str:
    """Return a path without numeric suffixes; "" for the bare name of an argument, which depends on the call."""
    return re.sub(r"[._]\d+(?=/|$)", "", source) if "/" in source else ""


def layer_of(source: str) -> str:
    """Return the path of modules in an op_name path: its scopes without jax's additions.

    For `jit(step)/transpose(jvp(Model))/while/body/checkpoint/layers/mlp/down/dot_general`, it is
    `Model/layers/mlp/down`. For a combined operation, it has each path once. It is "" if no module has a scope, as with
    nnx.
    """
    shared, *combined = re.split(r"(?:^|(?<=/))\((?=.*\)$)", source, maxsplit=1)
    ends = combined[0][:-1].split(":") if combined else [""]
    return ", ".join(filter(None, dict.fromkeys(_scopes(shared + end) for end in ends)))


def _scopes(path: str) -> str:
    """Return the scopes of one op_name path; its last part is the operation."""
    path, before = path.rpartition("/")[0], ""
    while path != before:
        path, before = _TRANSFORMED.sub(r"\1", path), path
    parts = _BETWEEN.sub("", path).split("/")
    # `bd,df->bf` is an einsum.
    return "/".join(part for part in parts if part and "(" not in part and "->" not in part)


def layer_and_line(source: str, line: str | None, most: int | None = None) -> str:
    """Return `layers/attention/output models/llama.py:116`; if no scope names a module, the line and the operation.

    Args:
        source: an op_name path, "" if unknown.
        line: see `InstructionInfo.line`.
        most: number of parts at the end of the layer's path that are kept; None for all.
    """
    layer, short = layer_of(source), short_line(line or "")
    layer = "/".join(layer.split("/")[-(most or 0) :])
    operation = source.rstrip(")").rpartition("/")[2]
    return " ".join(text for text in ((layer, short) if layer else (short, operation)) if text)


def _short(path: str) -> str:
    if _CELL.search(path):
        return "notebook"
    return "/".join(path.rsplit("/", 2)[-2:])
