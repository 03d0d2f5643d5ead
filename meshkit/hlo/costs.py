"""What one HLO instruction does: matmul FLOP, attention FLOP, bytes of device memory.

Counts, not seconds: `predict.kernels` prices them for a GPU.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshkit.hlo.instructions import Shape, dtype_bits, shape_of

SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element"}
_LOOP = "kind=kLoop"
_HOST_MEMORY = ":S(5)"
_HIGHEST = re.compile(r'operand_precision=\{highest|"operand_precision":\s*\["HIGHEST|algorithm=dot_f32_f32_f32')
_GEMM = re.compile(r"__cublas\$(?!triangular)|__cudnn\$.*[Gg]emm")
# A complex multiply-add is four of its parts.
_PARTS_OF = {"c64": "f32", "c128": "f64"}
_ALONG = re.compile(r"dimensions=\{(\d+)\}")
_CALL_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\[\]]*)\]')
_CALL_BATCH = re.compile(r'"lhs_batch_dimensions":\s*\[([^\[\]]*)\]')
_DOT_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_RHS_CONTRACTED = re.compile(r"rhs_contracting_dims=\{([\d,]*)\}")
_DOT_BATCH = re.compile(r"lhs_batch_dims=\{([\d,]*)\}")
_START_INDEX = re.compile(r"start_index_map=\{([\d,]*)\}")
_SCATTERED = re.compile(r"scatter_dims_to_operand_dims=\{([\d,]*)\}")
_LAYOUT = re.compile(r"= \w+\[[\d,]*\]\{(\d+)")  # the dim whose elements are neighbours in memory
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^{}]*?"dimensions":\s*\[([^\[\]]*)\]')
# Custom calls that tell the compiler something and run nothing.
FREE_CALLS = frozenset(
    {
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "CreateBuffer",
        "LayoutConstraint",
        "NopReturnToken",
        "Pin",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "Sharding",
        "Unpin",
    }
)
# One pass over their operands and results: memory traffic is all of their price. XLA's TopK (k up to 16) keeps the best
# in registers while it reads; a threefry hash writes as fast as memory takes it.
STREAMING_CALLS = frozenset({"__gpu$TopK", "cu_threefry2x32_ffi"})
# What the plan of XLA's bitonic sort (openxla/xla, ir_emitter_unnested.cc, EmitSort) takes for a tile: four elements
# of each of a block's 1024 threads, as far as its 48 KiB of static shared memory hold them.
_TILE_ELEMENTS = 4 * 1024
_SECTOR_BYTES = 32  # the least that a GPU's memory is asked for
_BLOCK_THREADS = 128
# Integer operations, an instruction for each element and 32 bits; to shift 64 bits by 32, as hashes of random numbers
# do, is a choice of registers.
_INTEGER = {"add", "subtract", "multiply", "and", "or", "xor", "not"}
_SHIFTS = {"shift-left", "shift-right-logical", "shift-right-arithmetic"}
_BLOCK_ELEMENTS = 4 * _BLOCK_THREADS  # that a block of a loop fusion makes: four for each of its threads
_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class Matmul:
    """One matmul on one GPU: `batch` products of [m, k] by [k, n], operands of XLA's element type `dtype`."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """2 per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Cost:
    """Work of one instruction on one GPU."""

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    """Dtype of the operands -> FLOP (2 per multiply-add)."""
    attention_flops: float = 0.0  # FLOP of fused attention that is executed (half of the square when causal)
    attention_backward: bool = False  # whether that is a backward pass
    bytes_accessed: float = 0.0  # device memory read and written, slices counted as slices
    host_bytes: float = 0.0  # bytes that cross to or from host memory
    priced_by: str = "roofline"  # `roofline`, or `bytes` where only memory traffic is known (an opaque custom call)
    matmuls: tuple[Matmul, ...] = ()  # shapes of those among `matmul_flops` that have one (a convolution has none)
    attention_queries: int = 0  # of all sequences and heads; 0 where unknown
    attention_length: int = 0  # keys that a query sees without a mask; 0 where unknown
    attention_head_dim: int = 0  # of the fused attention; 0 where unknown
    attention_causal: bool = False  # whether half of the square is skipped
    joined_bytes: float = 0.0  # device memory read and written to join a matmul's operands before it begins
    turned_bytes: float = 0.0  # and to transpose those in fp8, where cuBLAS multiplies no others
    launches: int = 1  # kernels that it is
    blocks: float = 0.0  # blocks of threads that it starts, of a loop or a scatter; 0 where unknown
    sectors: float = 0.0  # of memory that a look-up across rows asks for
    added: tuple[float, float] = (0.0, 0.0)  # elements of a scatter, one by one: along memory; each in its own line
    transposed: float = 0.0  # elements that a kernel of its own transposes
    compared: tuple[int, int, float] = (0, 0, 0.0)  # of a sort: steps in tiles, elements of a tile, and of all
    integers: float = 0.0  # instructions on 32-bit integers, of a fusion that hashes (random numbers); 0 of others

    @property
    def multiplies(self) -> bool:
        """Whether there is work for tensor cores."""
        return bool(self.matmul_flops or self.attention_flops)


def opcode(instruction: Any) -> str:
    """`kAllGather` as HLO text spells it: `all-gather`."""
    name = instruction.opcode.name
    return _OPCODES.get(name) or _OPCODES.setdefault(name, re.sub(r"(?<!^)(?=[A-Z])", "-", name[1:]).lower())


_OPCODES: dict[str, str] = {"kAllToAll": "all-to-all", "kRaggedAllToAll": "ragged-all-to-all", "kTopK": "topk"}


class CostModel:
    """Costs of the instructions of one module.

    Args:
        computations: name -> computation, of the whole module.
        called: instruction -> names of the computations it calls.
    """

    def __init__(self, computations: Mapping[str, Any], called: Any):
        self._computations, self._called = computations, called
        self._matmuls: dict[str, tuple[Counter, tuple[Matmul, ...]]] = {}

    def cost(self, instruction: Any) -> Cost:
        """Work of one scheduled instruction (not of control flow, which its body's instructions carry)."""
        op = opcode(instruction)
        if op == "fusion":
            return self._fusion(instruction)
        if op == "custom-call":
            return self._custom_call(instruction)
        if op == "copy":
            return self.copy(instruction)
        flops, matmuls = _matmul_work(instruction)
        sort = _sort_of(instruction)
        moved = _plain_bytes(instruction, op) + sort.again_bytes
        return Cost(flops, bytes_accessed=moved, matmuls=matmuls, launches=sort.passes, compared=sort.compared)

    def copy(self, instruction: Any) -> Cost:
        """Work of a copy: on the device read and write, to or from host memory (space 5) once over the host link."""
        (source, *_) = instruction.operands()
        size = float(shape_of(source).bytes)
        if _HOST_MEMORY in instruction.to_string() or _HOST_MEMORY in source.to_string():
            return Cost(host_bytes=size)
        return Cost(bytes_accessed=2.0 * size)

    def asynchronous(self, start: Any, root: Any) -> Cost:
        """Work of an asynchronous operation, given its start and what that wraps; a slice copy may go to the host."""
        cost = self.cost(root)
        if _HOST_MEMORY in start.to_string() and not cost.matmul_flops:
            return Cost(host_bytes=cost.bytes_accessed / 2)
        return cost

    def _fusion(self, instruction: Any) -> Cost:
        (name,) = self._called(instruction)[:1] or (None,)
        if name is None:
            return Cost(bytes_accessed=_plain_bytes(instruction, "fusion"))
        body = list(self._computations[name].instructions())
        inner = [self._custom_call(i) for i in body if opcode(i) == "custom-call"]
        flops, matmuls = self._matmuls_in(name)
        moved = sum(_parameter_bytes(i) for i in body if opcode(i) == "parameter") + _root_bytes(instruction, body)
        joined, turned = (sum(map(count, body)) for count in (_joined_bytes, _turned_bytes))
        loop = _LOOP in instruction.to_string()
        along, apart = (sum(counts) for counts in zip(*map(_added, body)))
        blocks = max(map(_elements, _roots(body))) / _BLOCK_ELEMENTS if loop else _joining_blocks(body)
        attention = next((c for c in inner if c.attention_flops), Cost())
        sorts = [_sort_of(i) for i in body if opcode(i) == "sort"]
        sort = max(sorts, default=_Sort())
        return replace(
            attention,
            matmul_flops=flops,
            attention_flops=sum(c.attention_flops for c in inner),
            bytes_accessed=moved + sort.again_bytes,
            matmuls=matmuls,
            priced_by="bytes" if any(c.priced_by == "bytes" for c in inner) else "roofline",
            joined_bytes=joined,
            turned_bytes=turned,
            launches=sort.passes if sorts else (2 if joined else 1),
            blocks=blocks + (along + apart) / _BLOCK_ELEMENTS,
            sectors=sum(map(_sectors, body)),
            added=(along, apart),
            transposed=0.0 if loop else float(max((_elements(i) for i in body if opcode(i) == "transpose"), default=0)),
            compared=sort.compared,
            integers=sum(map(_integers, _roots(body))) if any(map(_hashes, body)) else 0.0,
        )

    def _matmuls_in(self, name: str) -> tuple[Counter, tuple[Matmul, ...]]:
        """FLOP by dtype of every matmul in a computation and in those it calls, and the matmuls that have a shape."""
        if name not in self._matmuls:
            total: Counter = Counter()
            shapes: list[Matmul] = []
            for i in self._computations[name].instructions():
                for flops, matmuls in (_matmul_work(i), *map(self._matmuls_in, self._called(i))):
                    total.update(flops)
                    shapes += matmuls
            self._matmuls[name] = total, tuple(shapes)
        return self._matmuls[name]

    def _custom_call(self, instruction: Any) -> Cost:
        text = instruction.to_string()
        target = custom_call_target(text)
        moved = sum(shape_of(o).bytes for o in instruction.operands()) + _result_bytes(shape_of(instruction))
        if "fmha" in target:
            return replace(_attention(instruction, text, target), bytes_accessed=moved)
        flops, matmuls = _matmul_work(instruction)
        known = flops or target in STREAMING_CALLS or target in FREE_CALLS
        return Cost(flops, bytes_accessed=moved, matmuls=matmuls, priced_by="roofline" if known else "bytes")


def custom_call_target(text: str) -> str:
    """`custom_call_target` of a printed instruction; empty if it has none."""
    found = re.search(r'custom_call_target="([^"]*)"', text)
    return found[1] if found else ""


def _matmul_work(instruction: Any) -> tuple[dict[str, float], tuple[Matmul, ...]]:
    """FLOP by dtype of an instruction that is itself a matmul or a convolution, also by cuBLAS or cuDNN; its shape."""
    op = opcode(instruction)
    if op not in ("dot", "scaled-dot", "ragged-dot", "convolution", "custom-call"):
        return {}, ()
    text, out = instruction.to_string(), shape_of(instruction)
    out = out.parts[0] if out.parts else out
    target = custom_call_target(text)
    if op == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution(instruction, out, text, target), ()
    if op == "custom-call" and not _GEMM.search(target):
        return {}, ()
    patterns = (_CALL_CONTRACTED, _CALL_BATCH) if op == "custom-call" else (_DOT_CONTRACTED, _DOT_BATCH)
    contracted, batch = (_dims(pattern, text) for pattern in patterns)
    lhs = shape_of(instruction.operands()[0])
    k = math.prod(lhs.dims[d] for d in contracted)
    batches = math.prod(lhs.dims[d] for d in batch)
    m = math.prod(lhs.dims) // max(1, k * batches)
    n = math.prod(out.dims) // max(1, batches * m)
    parts = 4 if lhs.dtype in _PARTS_OF else 1
    matmul = Matmul(_matmul_dtype(_PARTS_OF.get(lhs.dtype, lhs.dtype), text), parts * batches, m, n, k)
    return {matmul.dtype: matmul.flops}, (matmul,)


class _Sort(NamedTuple):
    """Kernels of a sort, the bytes that all but the first read and write again, and its comparisons in tiles."""

    passes: int = 1
    again_bytes: float = 0.0
    compared: tuple[int, int, float] = (0, 0, 0.0)


def _sort_of(instruction: Any) -> _Sort:
    """What an instruction sorts; one kernel of anything else."""
    if opcode(instruction) != "sort":
        return _Sort()
    operands = [shape_of(o) for o in instruction.operands()]
    dim = _ALONG.search(instruction.to_string())
    passes, steps, tile = sort_passes(operands, int(dim[1]) if dim else 0)
    compared = (steps, tile, float(math.prod(operands[0].dims)))
    return _Sort(passes, 2.0 * (passes - 1) * sum(s.bytes for s in operands), compared)


def sort_passes(operands: Sequence[Shape], dim: int) -> tuple[int, int, int]:
    """(kernels, comparing steps of a tile in all of them, elements of a tile) of a sort along `dim` of these arrays.

    The arrays move together, and each kernel is a round trip of device memory.

    XLA:GPU sorts bitonically (meshkit keeps CUB's radix sort off, see `compile.options`). Comparisons within a tile, as
    large as a block's shared memory and threads allow, share a kernel; every wider one is a kernel of its own.
    Stage s of the log2(n) stages compares elements 2^(s+1) - 1, 2^(s-1), ..., 1 apart. With a tile of 2^t elements the
    stages below t are one kernel, and stage s >= t is s - t + 1 wide comparisons and one kernel for the rest.

    Args:
        operands: arrays of equal dims; their element types decide how large a tile can be.
        dim: index of the dim that is sorted.
    """
    stages = (operands[0].dims[dim] - 1).bit_length()
    element_bytes = sum(dtype_bits(s.dtype) for s in operands) / 8
    tile = int(min(_TILE_ELEMENTS, _SHARED_BYTES / max(1.0, element_bytes), 2**stages))
    inside = tile.bit_length() - 1
    wide = stages - inside
    return 1 + wide * (wide + 3) // 2, inside * (inside + 1) // 2 + wide * inside, 2**inside


def _dims(pattern: re.Pattern[str], text: str) -> list[int]:
    found = pattern.search(text)
    return [int(d.strip(' "')) for d in found[1].split(",") if d.strip(' "')] if found else []


def _attention(instruction: Any, text: str, target: str) -> Cost:
    """A cuDNN fused attention, without its bytes.

    Forward is two matmuls over the [batch, heads, length, length] scores: 4 b h s^2 d; backward five, so 2.5 times;
    a causal mask skips half (FlashAttention-2, section 3.1 and its FLOP formula in section 4.1).
    """
    backward = "Backward" in target
    scores = _dims(_SCORES, text)
    head_dim = shape_of(instruction.operands()[0]).dims[-1]
    causal = bool(re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', text))
    flops = 4.0 * (math.prod(scores) if scores else 0) * head_dim * (0.5 if causal else 1.0)
    return Cost(
        attention_flops=flops * (2.5 if backward else 1.0),
        attention_backward=backward,
        attention_queries=math.prod(scores[:-1]),
        attention_length=scores[-1] if scores else 0,
        attention_head_dim=head_dim,
        attention_causal=causal,
    )


def _matmul_dtype(name: str, text: str) -> str:
    """Operand type of a matmul; `f32_highest` where the program forbids TF32, and `f8..._highest` where it forbids to
    sum in nothing but tensor cores (XLA's PrecisionConfig is cuBLAS's fast accumulation)."""
    return f"{name}_highest" if (name == "f32" or name.startswith("f8")) and _HIGHEST.search(text) else name


def _convolution(instruction: Any, result: Shape, text: str, target: str) -> dict[str, float]:
    """2 x outputs x (kernel window x input features): the kernel's elements per output feature.

    In all three directions of cuDNN's the FLOP are those of the forward convolution of output and kernel.
    """
    first, second = (shape_of(o) for o in instruction.operands()[:2])
    output, kernel = result, second
    if "BackwardInput" in target:
        output = first
    elif "BackwardFilter" in target:
        output, kernel = second, result
    labels = re.search(r"dim_labels=\w+_(\w+)->", text)
    position = labels[1].index("o") if labels else len(kernel.dims) - 1
    flops = 2.0 * math.prod(output.dims) * math.prod(kernel.dims) / max(1, kernel.dims[position])
    return {_matmul_dtype(first.dtype, text): flops}


def _plain_bytes(instruction: Any, op: str) -> float:
    operands = instruction.operands()
    if op in SLICES:
        return 2.0 * shape_of(instruction).bytes
    if op == "dynamic-update-slice":
        return 2.0 * shape_of(operands[1]).bytes
    if op == "scatter":
        return 3.0 * shape_of(operands[-1]).bytes
    return float(shape_of(instruction).bytes + sum(shape_of(o).bytes for o in operands))


def _result_bytes(shape: Shape) -> int:
    """Bytes of results, without a custom call's scratch space (a trailing s8 or u8 vector of several results)."""
    last = shape.parts[-1] if len(shape.parts) > 1 else None
    return shape.bytes - last.bytes if last and last.dtype in ("s8", "u8") else shape.bytes


def _parameter_bytes(parameter: Any) -> float:
    """Bytes that a fusion reads of one parameter.

    Read through slices: the slices. Updated in place: nothing. Any other use: the whole array, once.
    """
    uses: list[tuple[Any, Any]] = []
    stack = [parameter]
    while stack:
        value = stack.pop()
        for user in value.users():
            if opcode(user) in _VIEWS or (opcode(user) == "dynamic-update-slice" and _is_read_on(user, value)):
                stack.append(user)
            else:
                uses.append((user, value))
    total = 0.0
    for user, value in uses:
        of_this = user.operands()[0].name == value.name
        if opcode(user) == "gather" and of_this:
            total += _gathered_bytes(user, value)
        elif opcode(user) in SLICES and of_this:
            total += shape_of(user).bytes
        elif not (opcode(user) in ("dynamic-update-slice", "scatter") and of_this):
            return float(shape_of(parameter).bytes)
    return total if uses else float(shape_of(parameter).bytes)


def _is_read_on(update: Any, array: Any) -> bool:
    """Whether what an update in place makes of an array is read by something else, so that all of the array is."""
    return update.operands()[0].name == array.name and any(opcode(u) != "tuple" for u in update.users())


def _gathered_bytes(gather: Any, table: Any) -> float:
    """Bytes that a look-up reads of memory: its rows; across rows the sectors that it meets, at random, each once."""
    sectors, table_bytes = _sectors(gather), shape_of(table).bytes
    if not sectors:
        return float(shape_of(gather).bytes)
    return -table_bytes * math.expm1(-_SECTOR_BYTES * sectors / table_bytes)


def _sectors(gather: Any) -> float:
    """Sectors that a look-up asks for where neighbours in memory are of other rows: one for each element."""
    if opcode(gather) != "gather":
        return 0.0
    indexed, layout = _dims(_START_INDEX, gather.to_string()), _LAYOUT.search(gather.operands()[0].to_string())
    across = layout is not None and int(layout[1]) in indexed
    return float(math.prod(shape_of(gather).dims)) if across else 0.0


def _added(scatter: Any) -> tuple[float, float]:
    """Elements that a scatter adds to what others may add to: where rows lie along memory; across it."""
    text = scatter.to_string() if opcode(scatter) == "scatter" else ""
    if not text or "unique_indices=true" in text:
        return 0.0, 0.0
    indexed, layout = _dims(_SCATTERED, text), _LAYOUT.search(scatter.operands()[0].to_string())
    elements = float(math.prod(shape_of(scatter.operands()[-1]).dims))
    return (0.0, elements) if layout is not None and int(layout[1]) in indexed else (elements, 0.0)


def _joining_blocks(body: list[Any]) -> float:
    """Blocks of a fusion that joins arrays: of its largest, four elements a thread along memory, else one."""
    blocks = 0.0
    for joined in map(_viewed, _roots(body)):
        if opcode(joined) == "concatenate":
            (dim, *_), layout = _dims(_ALONG, joined.to_string()), _LAYOUT.search(joined.to_string())
            along = layout is not None and int(layout[1]) == dim
            largest = max(math.prod(shape_of(o).dims) for o in joined.operands())
            blocks = max(blocks, largest / (_BLOCK_ELEMENTS if along else _BLOCK_THREADS))
    return blocks


def _joined_bytes(dot: Any) -> float:
    """Bytes of reading and writing operands that a fused matmul joins from several arrays.

    Where there is a GPU XLA times its own kernel, which joins as it reads, against cuBLAS, and takes cuBLAS for large
    ones: another kernel joins them first (in a trace of Llama 3 8B on an H100 all 96 of them).
    """
    operands = dot.operands() if opcode(dot) == "dot" else ()
    return 2.0 * sum(shape_of(o).bytes for o in operands if opcode(_viewed(o)) == "concatenate")


def _turned_bytes(dot: Any) -> float:
    """Bytes of transposing the operands in fp8 of a fused matmul whose inner dim does not lie along memory."""
    if opcode(dot) != "dot":
        return 0.0
    inner = (_dims(pattern, dot.to_string()) for pattern in (_DOT_CONTRACTED, _RHS_CONTRACTED))
    return 2.0 * sum(shape_of(o).bytes for o, dims in zip(dot.operands(), inner) if _is_across(o, dims))


def _is_across(operand: Any, inner: list[int]) -> bool:
    layout = _LAYOUT.search(operand.to_string()) if shape_of(operand).dtype.startswith("f8") else None
    return layout is not None and int(layout[1]) not in inner


def _hashes(value: Any) -> bool:
    """Whether an instruction mixes bits of an array, as only random numbers are made; other integers are indices."""
    shape = shape_of(value)
    return opcode(value) == "xor" and shape.dtype[0] in "su" and math.prod(shape.dims) > 1


def _integers(root: Any, elements: float | None = None) -> float:
    """Instructions on 32-bit integers behind one result of a fusion, which computes what it needs of each element.

    An operation runs once for an element, however many read it; but XLA emits each part of a joined array on its own,
    so what several parts share runs in all of them.

    Args:
        root: the result.
        elements: of it that are needed; default all.
    """
    needed = float(_elements(root)) if elements is None else elements
    total, seen, stack = 0.0, set(), [root]
    while stack:
        value = stack.pop()
        if value.name in seen:
            continue
        seen.add(value.name)
        op = opcode(value)
        total += needed * _issued(value, op)
        if op in SLICES:
            total += _integers(value.operands()[0], min(needed, math.prod(shape_of(value).dims)))
        elif op in ("concatenate", "broadcast", "reduce", "pad", "dynamic-update-slice"):
            total += sum(map(_integers, value.operands()))
        else:
            stack += value.operands()
    return total


def _issued(value: Any, op: str) -> int:
    """Integer instructions for an element of one operation; a rotation, of two shifts and what joins them, is one."""
    dtype = shape_of(value).dtype
    if dtype[0] not in "su" or not (op in _INTEGER or op in _SHIFTS):
        return 0
    if op in _SHIFTS:
        rotates = [u for u in value.users() if _rotates(u)]
        return 0 if dtype_bits(dtype) > 32 or (rotates and len(rotates) == len(value.users())) else 1
    return max(1, dtype_bits(dtype) // 32)


def _rotates(value: Any) -> bool:
    operands = value.operands()
    shifted = sorted(opcode(o) for o in operands) == ["shift-left", "shift-right-logical"]
    return opcode(value) == "or" and shifted and len({o.operands()[0].name for o in operands}) == 1


def _viewed(value: Any) -> Any:
    while opcode(value) in ("bitcast", "reshape"):
        value = value.operands()[0]
    return value


def _root_bytes(instruction: Any, body: list[Any]) -> float:
    """Bytes that a fusion writes: of an in-place update, the update; a scatter reads what it adds to as well."""
    roots = _roots(body)
    if len(roots) != 1:
        return float(_result_bytes(shape_of(instruction)))
    return _written(roots[0])


def _roots(body: list[Any]) -> list[Any]:
    return [i for i in body if not i.users()]


def _elements(root: Any) -> int:
    """Elements of the largest result; of an in-place update, of the update."""
    op = opcode(root)
    if op == "tuple":
        return max(map(_elements, root.operands()), default=0)
    if op in ("bitcast", "reshape"):
        return _elements(root.operands()[0])
    return math.prod(shape_of(root.operands()[1] if op == "dynamic-update-slice" else root).dims)


def _written(value: Any) -> float:
    op = opcode(value)
    if op == "tuple":
        return sum(_written(o) for o in value.operands())
    if op in ("bitcast", "reshape"):
        return _written(value.operands()[0])
    if op == "dynamic-update-slice":
        return float(shape_of(value.operands()[1]).bytes)
    if op == "scatter":
        result, updates = shape_of(value), shape_of(value.operands()[-1])
        rows = math.prod(updates.dims) * dtype_bits(result.dtype) / 8
        return 2.0 * min(rows, result.bytes)
    if op == "parameter":
        return 0.0
    return float(_result_bytes(shape_of(value)))
