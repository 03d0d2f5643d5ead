"""Count the work of one HLO instruction: matmul FLOP, attention FLOP, bytes of device memory.

`predict.kernels` turns the counts into seconds on a GPU.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshkit.hlo.proto import Computation, HloInstruction, Shape, dtype_bits, integer, ints, message, text

SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element"}
_BLOCK_SCALED_CALL = "__cudnn$blockScaledDot"
_GEMM = re.compile(r"__cublas\$(?!triangular)|__cudnn\$.*[Gg]emm|" + re.escape(_BLOCK_SCALED_CALL))
# Complex dtype -> dtype of its parts. A complex multiply-add is four real ones.
_PARTS_OF = {"c64": "f32", "c128": "f64"}
# Enum values of a precision, and of an algorithm, in `PrecisionConfig`.
_HIGHEST, _DOT_F32_F32_F32 = 2, 11
# Custom calls that give the compiler a hint and run nothing.
FREE_CALLS = frozenset({
    "AllocateBuffer", "AssumeGatherIndicesInBound", "CreateBuffer", "LayoutConstraint", "NopReturnToken", "Pin",
    "SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding", "Unpin",
})  # fmt: skip
# Custom calls whose price is their memory traffic alone: one pass over operands and results. XLA's TopK (k up to 16)
# keeps the best values in registers while it reads. A threefry hash writes at the rate of memory.
STREAMING_CALLS = frozenset({"__gpu$TopK", "cu_threefry2x32_ffi"})
# The tile of XLA's bitonic sort (openxla/xla, ir_emitter_unnested.cc, EmitSort): four elements for each of a block's
# 1024 threads, or fewer if its 48 KiB of static shared memory are full.
_TILE_ELEMENTS = 4 * 1024
_SECTOR_BYTES = 32  # A GPU's memory serves no smaller request.
_BLOCK_THREADS = 128
# Integer operations, with one instruction per element and 32 bits. A shift of 64 bits by 32, as in hashes for random
# numbers, needs no instruction.
_INTEGER = {"add", "subtract", "multiply", "and", "or", "xor", "not"}
_SHIFTS = {"shift-left", "shift-right-logical", "shift-right-arithmetic"}
_BLOCK_ELEMENTS = 4 * _BLOCK_THREADS  # Each thread of a loop fusion makes four elements.
_SHARED_BYTES = 48 * 1024
_WARP = 32
_ALIGNED_BYTES = 16  # An asynchronous copy to shared memory needs this alignment.
_NARROW = {"bf16", "f16"}


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
        """FLOP, 2 per multiply-add."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class Cost:
    """Work of one instruction on one GPU."""

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    """Dtype of the operands -> FLOP (2 per multiply-add)."""
    attention_flops: float = 0.0
    """Executed FLOP of fused attention, half of the square when causal."""
    attention_backward: bool = False
    bytes_accessed: float = 0.0
    """Bytes of device memory read and written; of an array that is read through slices, only the slices."""
    host_bytes: float = 0.0
    priced_by: str = "roofline"
    """`roofline`, or `bytes` where only memory traffic is known (an opaque custom call)."""
    matmuls: tuple[Matmul, ...] = ()
    """Shapes of the `matmul_flops`; a convolution has none."""
    attention_queries: int = 0
    """Queries of all sequences and heads; 0 if unknown."""
    attention_length: int = 0
    """Keys that a query sees without a mask; 0 if unknown."""
    attention_head_dim: int = 0
    """Head size of the fused attention; 0 if unknown."""
    attention_causal: bool = False
    """Whether half of the square is skipped."""
    attention_window: int = 0
    """Keys that a query of a causal attention sees at most; 0 for all."""
    attention_sequences: int = 1
    """Largest number of sequences packed one after the other in a row; the actual number is not in the program."""
    attention_padded: bool = False
    """Whether the length of each sequence is an argument."""
    joined_bytes: float = 0.0
    """Bytes of device memory read and written to concatenate a matmul's operands before it begins."""
    turned_bytes: float = 0.0
    """Bytes of device memory read and written to transpose fp8 operands for cuBLAS."""
    launches: int = 1
    """Kernels that the instruction launches."""
    blocks: float = 0.0
    """Blocks of threads that a loop or a scatter starts; 0 if unknown."""
    results: int = 1
    """Number of results of a fusion that are as large as its largest result."""
    sectors: float = 0.0
    """Memory sectors that a look-up with indices into the minor dim reads."""
    added: tuple[float, float] = (0.0, 0.0)
    """Elements that a scatter adds one by one: (with indices into other dims, with indices into the minor dim)."""
    transposed: float = 0.0
    """Elements that a transposing kernel moves; 0 for loop and Triton fusions."""
    column_elements: float = 0.0
    """Elements that a kernel sums over columns, see `_column_elements`."""
    tile_reduces: int = 0
    """Successive reductions of the rows that a Triton kernel holds; 0 for other kernels."""
    unaligned_bytes: float = 0.0
    """Bytes of a matmul's operands whose rows are no multiple of 16 bytes."""
    convolves: bool = False
    scalar_flops: float = 0.0
    """FLOP of convolutions that run without tensor cores."""
    depthwise_products: float = 0.0
    """Multiply-adds of depthwise convolutions (of one channel each)."""
    compared: tuple[int, int, float] = (0, 0, 0.0)
    """For a sort: (comparing steps inside tiles, elements of a tile, elements of an operand)."""
    integers: float = 0.0
    """32-bit integer instructions of a fusion that hashes (random numbers); 0 for others."""

    @property
    def multiplies(self) -> bool:
        """Whether there is work for tensor cores."""
        return bool(self.matmul_flops or self.attention_flops)


def cost_of(instruction: HloInstruction) -> Cost:
    """Return the work of one scheduled instruction; control flow has none, since its body's instructions have it."""
    op = instruction.opcode
    if op == "fusion":
        return _fusion(instruction)
    if op == "custom-call":
        return _custom_call(instruction)
    if op == "copy":
        return cost_of_copy(instruction)
    flops, matmuls = _matmul_work(instruction)
    sort = _sort_of(instruction)
    moved = _plain_bytes(instruction) + sort.again_bytes
    return Cost(flops, bytes_accessed=moved, matmuls=matmuls, launches=sort.passes, compared=sort.compared)


def cost_of_copy(instruction: HloInstruction) -> Cost:
    """Return the work of a copy: a read and a write on the device, or one transfer over the link to host memory."""
    (source, *_) = instruction.operands
    size = float(source.shape.bytes)
    if instruction.shape.on_host or source.shape.on_host:
        return Cost(host_bytes=size)
    return Cost(bytes_accessed=2.0 * size)


def cost_of_start(start: HloInstruction) -> Cost:
    """Return the work of the instruction that an asynchronous start wraps; a slice copy may go to the host."""
    cost = cost_of(start.called[0].root)
    if start.shape.on_host and not cost.matmul_flops:
        return Cost(host_bytes=cost.bytes_accessed / 2)
    return cost


def _fusion(instruction: HloInstruction) -> Cost:
    if not instruction.called:
        return Cost(bytes_accessed=_plain_bytes(instruction))
    computation = instruction.called[0]
    body = computation.instructions
    inner = [_custom_call(i) for i in body if i.opcode == "custom-call"]
    flops, matmuls = _matmuls_in(computation)
    moved = sum(_parameter_bytes(i) for i in body if i.opcode == "parameter") + _root_bytes(instruction, body)
    joined, turned = (sum(map(count, body)) for count in (_joined_bytes, _turned_bytes))
    loop = text(instruction.fields, 11) == "kLoop"
    along, apart = (sum(counts) for counts in zip(*map(_added, body)))
    results = _results(body)
    blocks = max(map(_elements, _roots(body))) / _BLOCK_ELEMENTS if loop else _joining_blocks(body)
    tiled = instruction.configured("fusion_backend_config", "kind") == "__triton"
    attention = next((c for c in inner if c.attention_flops), Cost())
    sorts = [_sort_of(i) for i in body if i.opcode == "sort"]
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
        results=results,
        transposed=0.0 if loop or tiled else _transposed(body, results),
        column_elements=0.0 if loop or tiled else _column_elements(body),
        tile_reduces=sum(i.opcode == "reduce" for i in body) if tiled and _keeps_rows(body) else 0,
        unaligned_bytes=sum(_unaligned_bytes(i) for i in body if i.opcode == "dot"),
        compared=sort.compared,
        integers=sum(map(_integers, _roots(body))) if any(map(_hashes, body)) else 0.0,
    )


def _matmuls_in(computation: Computation) -> tuple[Counter, tuple[Matmul, ...]]:
    """Return FLOP by dtype of all matmuls in a computation and those it calls, and the matmuls that have a shape."""
    total: Counter = Counter()
    shapes: list[Matmul] = []
    pending, seen = [computation], {computation}
    while pending:
        for i in pending.pop().instructions:
            flops, matmuls = _matmul_work(i)
            total.update(flops)
            shapes += matmuls
            pending += [c for c in i.called if c not in seen]
            seen.update(i.called)
    return total, tuple(shapes)


def _custom_call(instruction: HloInstruction) -> Cost:
    target = instruction.target
    moved = sum(o.shape.bytes for o in instruction.operands) + _result_bytes(instruction.shape)
    if "fmha" in target:
        return replace(_attention(instruction), bytes_accessed=moved)
    flops, matmuls = _matmul_work(instruction)
    known = flops or target in STREAMING_CALLS or target in FREE_CALLS
    found = Cost(flops, bytes_accessed=moved, matmuls=matmuls, priced_by="roofline" if known else "bytes")
    if "__cudnn$conv" not in target:
        return found
    return replace(found, convolves=True, **_without_tensor_cores(instruction))


def _matmul_work(instruction: HloInstruction) -> tuple[dict[str, float], tuple[Matmul, ...]]:
    """Return the FLOP by dtype of a matmul or a convolution (or of such a call of cuBLAS or cuDNN), and its shape."""
    op, target = instruction.opcode, instruction.target
    if op == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution(instruction), ()
    if op not in ("dot", "scaled-dot", "ragged-dot") and not (op == "custom-call" and _GEMM.search(target)):
        return {}, ()
    out, lhs = instruction.shape, instruction.operands[0].shape
    out = out.parts[0] if out.parts else out
    contracted, _, batch = _dot_dims(instruction)
    k = math.prod(lhs.dims[d] for d in contracted)
    batches = math.prod(lhs.dims[d] for d in batch)
    m = lhs.elements // max(1, k * batches)
    n = out.elements // max(1, batches * m)
    parts = 4 if lhs.dtype in _PARTS_OF else 1
    dtype = _matmul_dtype(_PARTS_OF.get(lhs.dtype, lhs.dtype), instruction)
    matmul = Matmul(dtype, parts * batches, m, n, k)
    return {matmul.dtype: matmul.flops}, (matmul,)


def _dot_dims(dot: HloInstruction) -> tuple[list[int], list[int], list[int]]:
    """Return the contracted dims of a matmul's left and right operands, and the batch dims of the left one."""
    if dot.target == _BLOCK_SCALED_CALL:  # Its operands are [batch, m, k] and [batch, n, k], or both without a batch.
        inner = len(dot.operands[0].shape.dims) - 1
        left, right, batch = [inner], [inner], list(range(inner - 1))
    elif dot.opcode == "custom-call":
        said = dot.configured("dot_dimension_numbers") or {}
        names = ("lhs_contracting_dimensions", "rhs_contracting_dimensions", "lhs_batch_dimensions")
        left, right, batch = ([int(d) for d in said.get(name, ())] for name in names)
    else:
        numbers = message(dot.fields, 30) or message(message(dot.fields, 90), 1)
        left, right, batch = (ints(numbers, number) for number in (1, 2, 3))
    return left, right, batch


class _Sort(NamedTuple):
    """The kernels of a sort, the bytes that all but the first read and write again, and the comparisons in tiles."""

    passes: int = 1
    again_bytes: float = 0.0
    compared: tuple[int, int, float] = (0, 0, 0.0)


def _sort_of(instruction: HloInstruction) -> _Sort:
    """Return the sort of an instruction; any other instruction counts as one kernel."""
    if instruction.opcode != "sort":
        return _Sort()
    operands = [o.shape for o in instruction.operands]
    passes, steps, tile = sort_passes(operands, next(iter(instruction.dimensions), 0))
    compared = (steps, tile, float(operands[0].elements))
    return _Sort(passes, 2.0 * (passes - 1) * sum(s.bytes for s in operands), compared)


def sort_passes(operands: Sequence[Shape], dim: int) -> tuple[int, int, int]:
    """Return (kernels, comparing steps of a tile in all of them, elements of a tile) of a sort along `dim`.

    The operands are sorted together, and each kernel reads and writes them once. XLA:GPU sorts bitonically (meshkit
    keeps CUB's radix sort off, see `compile.options`). A tile is as large as a block's shared memory and threads allow.
    Comparisons within a tile share a kernel; every wider comparison is a kernel of its own. With n elements along
    `dim`, stage s of the log2(n) stages compares elements 2^(s+1) - 1, 2^(s-1), ..., 1 apart. With a tile of 2^t
    elements, the stages below t are one kernel. Stage s >= t has s - t + 1 wide comparisons, and a kernel for the rest.
    """
    stages = (operands[0].dims[dim] - 1).bit_length()
    element_bytes = sum(dtype_bits(s.dtype) for s in operands) / 8
    tile = int(min(_TILE_ELEMENTS, _SHARED_BYTES / max(1.0, element_bytes), 2**stages))
    inside = tile.bit_length() - 1
    wide = stages - inside
    return 1 + wide * (wide + 3) // 2, inside * (inside + 1) // 2 + wide * inside, 2**inside


def _attention(instruction: HloInstruction) -> Cost:
    """Return the work of cuDNN's fused attention, without its bytes.

    The forward pass has two matmuls over the scores [b, h, s, s] (batch, heads, length, length): 2 b h s^2 (d + e)
    FLOP, with head size d for queries and keys and e for values. The backward pass has five matmuls, of which three are
    over d: 2 b h s^2 (3 d + 2 e), which is 2.5 times as much if d = e. A causal mask skips half (FlashAttention-2,
    section 3.1 and its FLOP formula in section 4.1), and a sliding window skips all but a band. If the lengths of
    sequences are arguments of the program, each counts with its maximum s.
    """
    backward = "Backward" in instruction.target
    scores = [int(d) for d in instruction.configured("intermediate_tensor_shape", "dimensions") or ()]
    head_dim, value_dim = instruction.operands[0].shape.dims[-1], instruction.operands[2].shape.dims[-1]
    mask = str(instruction.configured("mask_type"))
    causal = "CAUSAL" in mask
    multiplied = 3 * head_dim + 2 * value_dim if backward else head_dim + value_dim
    length = scores[-1] if scores else 0
    window = int(instruction.configured("sliding_window_length") or 0)
    flops = 2.0 * (math.prod(scores) if scores else 0) * multiplied * visible_share(length, causal, window)
    return Cost(
        attention_flops=flops,
        attention_backward=backward,
        attention_queries=math.prod(scores[:-1]),
        attention_length=length,
        attention_head_dim=head_dim,
        attention_causal=causal,
        attention_window=window if window < length else 0,
        attention_sequences=max(1, int(instruction.configured("max_seg_per_batch") or 1)),
        attention_padded="PADDING" in mask,
    )


def visible_share(length: int, causal: bool, window: int = 0) -> float:
    """Return the share of the square of queries and keys that a mask leaves, in the limit of many tokens.

    Args:
        causal: whether no query sees what comes after it.
        window: number of keys that a query sees with `causal`, its own and those before it; 0 for all of them.
    """
    if not causal:
        return 1.0
    band = min(window or length, length) / max(1, length)
    return band - band * band / 2


def _matmul_dtype(name: str, instruction: HloInstruction) -> str:
    """Return the operand type of a matmul.

    It is `f32_highest` if the program forbids TF32, and `f8..._highest` if it forbids cuBLAS's fast accumulation, which
    sums only inside tensor cores (XLA's PrecisionConfig has both settings). Block-scaled fp8 is `mxfp8`, also if the
    other operand is fp4, since the product then runs at the rate of fp8.
    """
    if instruction.opcode == "scaled-dot" or instruction.target == _BLOCK_SCALED_CALL:
        names = {o.shape.dtype[:2] for o in instruction.operands[:2]}
        return "mxfp8" if "f8" in names <= {"f8", "f4"} else name if names == {"f4"} else "bf16"
    if name != "f32" and not name.startswith("f8"):
        return name
    precision = message(instruction.fields, 51)
    called = instruction.configured("precision_config", "operand_precision") or ()
    highest = _HIGHEST in ints(precision, 1)[:1] or "HIGHEST" in called[:1]
    return f"{name}_highest" if highest or integer(precision, 2) == _DOT_F32_F32_F32 else name


def _convolution(instruction: HloInstruction) -> dict[str, float]:
    """Return the FLOP of a convolution: 2 x outputs x kernel elements per output feature.

    cuDNN's calls for all three directions have the FLOP of the forward convolution.
    """
    first, second = (o.shape for o in instruction.operands[:2])
    result = instruction.shape.parts[0] if instruction.shape.parts else instruction.shape
    output, kernel = result, second
    if "BackwardInput" in instruction.target:
        output = first
    elif "BackwardFilter" in instruction.target:
        output, kernel = second, result
    # Field 4 is the kernel's dim of output features.
    features = kernel.dims[integer(message(instruction.fields, 16), 4)]
    flops = 2.0 * output.elements * kernel.elements / max(1, features)
    return {_matmul_dtype(first.dtype, instruction): flops}


def _without_tensor_cores(convolution: HloInstruction) -> dict[str, float]:
    """Return the work that cuDNN runs without tensor cores: depthwise, or with channels that are no multiple of 8."""
    (flops,) = _convolution(convolution).values()
    groups = integer(convolution.fields, 50) or 1
    if groups > 1 and groups in convolution.operands[0].shape.dims:
        return {"depthwise_products": flops / 2}
    first, second = (o.shape for o in convolution.operands[:2])
    kernel = convolution.shape.parts[0] if "BackwardFilter" in convolution.target else second
    numbers = message(convolution.fields, 16)
    channels = [kernel.dims[integer(numbers, field)] for field in (3, 4)]
    return {"scalar_flops": flops} if first.dtype in _NARROW and any(c % 8 for c in channels) else {}


def _transposed(body: Sequence[HloInstruction], results: int) -> float:
    """Return the elements of a fusion's transposes: of all together if it has several results, else of the largest."""
    each = [_elements(i) for i in body if i.opcode == "transpose"]
    return float(sum(each) if results > 1 else max(each, default=0))


def _column_elements(body: Sequence[HloInstruction]) -> float:
    """Return the elements that a fusion sums along dims other than the minor one, if it also writes as many elements.

    If fewer elements than a warp has threads are adjacent, they always count, and idle threads count like elements.
    Other fusions read at the rate of memory.
    """
    written, narrow, wide = max(map(_elements, _roots(body)), default=0), 0.0, 0.0
    for reduce in (i for i in body if i.opcode == "reduce"):
        added = reduce.operands[0].shape
        if added.minor is not None and added.dims and added.minor not in reduce.dimensions:
            waiting = _WARP / _adjacent_elements(added, reduce.dimensions)
            narrow += added.elements * waiting if waiting > 1 else 0.0
            wide = max(wide, added.elements if written >= added.elements else 0.0)
    return max(narrow, wide)


def _adjacent_elements(shape: Shape, reduced: Sequence[int]) -> int:
    """Return the number of adjacent elements in memory before the first reduced dim."""
    kept = itertools.takewhile(lambda dim: dim not in reduced, shape.layout)
    return math.prod(shape.dims[dim] for dim in kept)


def _keeps_rows(body: Sequence[HloInstruction]) -> bool:
    """Return whether a fusion writes the rows that it reduces, and not only their reductions."""
    reduced = max((i.operands[0].shape.elements for i in body if i.opcode == "reduce"), default=0)
    return max(map(_elements, _roots(body)), default=0) >= reduced > 0


def _unaligned_bytes(dot: HloInstruction) -> float:
    shapes = [o.shape for o in dot.operands[:2]]
    rows = [s.dims[s.minor] * dtype_bits(s.dtype) if s.dims and s.minor is not None else 0 for s in shapes]
    return float(sum(s.bytes for s, bits in zip(shapes, rows) if bits % (8 * _ALIGNED_BYTES)))


def _plain_bytes(instruction: HloInstruction) -> float:
    op, operands = instruction.opcode, instruction.operands
    if op in SLICES:
        return 2.0 * instruction.shape.bytes
    if op == "dynamic-update-slice":
        return 2.0 * operands[1].shape.bytes
    if op == "scatter":
        return 3.0 * operands[-1].shape.bytes
    return float(instruction.shape.bytes + sum(o.shape.bytes for o in operands))


def _result_bytes(shape: Shape) -> int:
    """Return the bytes of results, without a custom call's scratch space (a trailing s8 or u8 vector)."""
    last = shape.parts[-1] if len(shape.parts) > 1 else None
    return shape.bytes - last.bytes if last and last.dtype in ("s8", "u8") else shape.bytes


def _parameter_bytes(parameter: HloInstruction) -> float:
    """Return the bytes that a fusion reads of one parameter.

    Of a parameter that is read through slices, the slices count; of one that is updated in place, nothing; of any
    other, the whole array, once.
    """
    uses: list[tuple[HloInstruction, HloInstruction]] = []
    stack = [parameter]
    while stack:
        value = stack.pop()
        for user in value.users:
            if user.opcode in _VIEWS or (user.opcode == "dynamic-update-slice" and _is_read_on(user, value)):
                stack.append(user)
            else:
                uses.append((user, value))
    total = 0.0
    for user, value in uses:
        of_this = user.operands[0].name == value.name
        if user.opcode == "gather" and of_this:
            total += _gathered_bytes(user, value)
        elif user.opcode in SLICES and of_this:
            total += user.shape.bytes
        elif not (user.opcode in ("dynamic-update-slice", "scatter") and of_this):
            return float(parameter.shape.bytes)
    return total if uses else float(parameter.shape.bytes)


def _is_read_on(update: HloInstruction, array: HloInstruction) -> bool:
    """Return whether something else reads the result of an update in place, so that all of the array is read."""
    return update.operands[0].name == array.name and any(u.opcode != "tuple" for u in update.users)


def _gathered_bytes(gather: HloInstruction, table: HloInstruction) -> float:
    """Return the bytes that a look-up reads: its result or, if it reads `_sectors` at random, the distinct ones."""
    sectors, table_bytes = _sectors(gather), table.shape.bytes
    if not sectors:
        return float(gather.shape.bytes)
    return -table_bytes * math.expm1(-_SECTOR_BYTES * sectors / table_bytes)


def _sectors(gather: HloInstruction) -> float:
    """Return the sectors that a look-up with indices into the minor dim reads, one for each element; 0 for others."""
    if gather.opcode != "gather":
        return 0.0
    across = gather.operands[0].shape.minor in ints(message(gather.fields, 33), 3)
    return float(gather.shape.elements) if across else 0.0


def _added(scatter: HloInstruction) -> tuple[float, float]:
    """Return the `added` of a `Cost`: elements that a scatter adds to positions that several additions may share."""
    # With unique indices (field 69) no additions collide.
    if scatter.opcode != "scatter" or integer(scatter.fields, 69):
        return 0.0, 0.0
    elements = float(scatter.operands[-1].shape.elements)
    across = scatter.operands[0].shape.minor in ints(message(scatter.fields, 48), 3)
    return (0.0, elements) if across else (elements, 0.0)


def additions_by_swap(instruction: HloInstruction) -> tuple[float, str]:
    """Return the mean number of additions to one element of a 16-bit array, and its dtype; 0 without additions.

    XLA uses no atomic addition for these dtypes: each addition is a compare-and-swap, repeated until no other thread
    came first (openxla/xla#26371). With unique indices no addition waits.
    """
    inner = instruction.called[0].instructions if instruction.opcode == "fusion" and instruction.called else ()
    adding = [(i.operands[0].shape, i.operands[-1].shape) for i in (instruction, *inner) if any(_added(i))]
    found = [(more.elements / array.elements, array.dtype) for array, more in adding if array.dtype in ("bf16", "f16")]
    return max(found, default=(0.0, ""))


def _results(body: Sequence[HloInstruction]) -> int:
    """Return the number of a fusion's results that are as large as its largest; 1 if it reads no large array."""
    if not any(i.opcode == "parameter" and i.shape.elements >= _BLOCK_ELEMENTS for i in body):
        return 1
    sizes = [_elements(r) for root in _roots(body) for r in (root.operands if root.opcode == "tuple" else (root,))]
    return sizes.count(max(sizes))


def _joining_blocks(body: Sequence[HloInstruction]) -> float:
    """Return the blocks of a fusion that concatenates; along the minor dim a thread makes four elements, else one."""
    blocks = 0.0
    for joined in map(_viewed, _roots(body)):
        if joined.opcode == "concatenate":
            along = joined.shape.minor in joined.dimensions
            largest = max(o.shape.elements for o in joined.operands)
            blocks = max(blocks, largest / (_BLOCK_ELEMENTS if along else _BLOCK_THREADS))
    return blocks


def _joined_bytes(dot: HloInstruction) -> float:
    """Return the bytes read and written to concatenate operands of a fused matmul.

    On a machine with a GPU, XLA measures cuBLAS against its own kernel, which concatenates while it reads. For large
    matmuls it chooses cuBLAS, and another kernel concatenates the operands first (all 96 in a trace of Llama 3 8B on an
    H100).
    """
    operands = dot.operands if dot.opcode == "dot" else ()
    return 2.0 * sum(o.shape.bytes for o in operands if _viewed(o).opcode == "concatenate")


def _turned_bytes(dot: HloInstruction) -> float:
    """Return the bytes read and written to transpose a fused matmul's fp8 operands with a strided contracted dim."""
    if dot.opcode != "dot":
        return 0.0
    pairs = zip((o.shape for o in dot.operands), _dot_dims(dot))
    across = (s for s, inner in pairs if s.dtype.startswith("f8") and s.minor is not None and s.minor not in inner)
    return 2.0 * sum(s.bytes for s in across)


def _hashes(value: HloInstruction) -> bool:
    """Return whether an instruction mixes bits of an array, as for random numbers; other integers are indices."""
    shape = value.shape
    return value.opcode == "xor" and shape.dtype[0] in "su" and math.prod(shape.dims) > 1


def _integers(root: HloInstruction, elements: float | None = None) -> float:
    """Return the 32-bit integer instructions for one result of a fusion, or for `elements` of its elements.

    An operation runs once per element, however many other operations read it. But XLA emits the code of each part of a
    concatenation separately, so an operation that several parts share runs for each of them.
    """
    needed = float(_elements(root)) if elements is None else elements
    total, seen, stack = 0.0, set(), [root]
    while stack:
        value = stack.pop()
        if value.name in seen:
            continue
        seen.add(value.name)
        op = value.opcode
        total += needed * _issued(value, op)
        if op in SLICES:
            total += _integers(value.operands[0], min(needed, value.shape.elements))
        elif op in ("concatenate", "broadcast", "reduce", "pad", "dynamic-update-slice"):
            total += sum(map(_integers, value.operands))
        else:
            stack += value.operands
    return total


def _issued(value: HloInstruction, op: str) -> int:
    """Return the integer instructions per element of one operation; a rotation (two shifts and a join) is one."""
    dtype = value.shape.dtype
    if dtype[0] not in "su" or not (op in _INTEGER or op in _SHIFTS):
        return 0
    if op in _SHIFTS:
        rotates = [u for u in value.users if _rotates(u)]
        return 0 if dtype_bits(dtype) > 32 or (rotates and len(rotates) == len(value.users)) else 1
    return max(1, dtype_bits(dtype) // 32)


def _rotates(value: HloInstruction) -> bool:
    operands = value.operands
    shifted = sorted(o.opcode for o in operands) == ["shift-left", "shift-right-logical"]
    return value.opcode == "or" and shifted and len({o.operands[0].name for o in operands}) == 1


def _viewed(value: HloInstruction) -> HloInstruction:
    while value.opcode in ("bitcast", "reshape"):
        value = value.operands[0]
    return value


def _root_bytes(instruction: HloInstruction, body: Sequence[HloInstruction]) -> float:
    """Return the bytes that a fusion writes (only the update, if in place), and those that a scatter reads first."""
    roots = _roots(body)
    return _written(roots[0]) if len(roots) == 1 else float(_result_bytes(instruction.shape))


def _roots(body: Sequence[HloInstruction]) -> Sequence[HloInstruction]:
    return [i for i in body if not i.users]


def _elements(root: HloInstruction) -> int:
    """Return the number of elements of the largest result; for an in-place update, of the update."""
    op = root.opcode
    if op == "tuple":
        return max(map(_elements, root.operands), default=0)
    if op in ("bitcast", "reshape"):
        return _elements(root.operands[0])
    return (root.operands[1] if op == "dynamic-update-slice" else root).shape.elements


def _written(value: HloInstruction) -> float:
    op = value.opcode
    if op == "tuple":
        return sum(_written(o) for o in value.operands)
    if op in ("bitcast", "reshape"):
        return _written(value.operands[0])
    if op == "dynamic-update-slice":
        return float(value.operands[1].shape.bytes)
    if op == "scatter":
        result, updates = value.shape, value.operands[-1].shape
        rows = math.prod(updates.dims) * dtype_bits(result.dtype) / 8
        return 2.0 * min(rows, result.bytes)
    if op == "parameter":
        return 0.0
    return float(_result_bytes(value.shape))
