"""What one HLO instruction does: matmul FLOP, attention FLOP, bytes of device memory. Layer 4.

Counts, not seconds: `timeline.kernels` prices them for a GPU.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshkit.xla.shapes import Shape, shape_of

SLICES = {"dynamic-slice", "slice", "gather"}
_VIEWS = {"bitcast", "reshape", "get-tuple-element"}
_HOST_MEMORY = ":S(5)"
_NO_TF32 = re.compile(r'operand_precision=\{highest|"operand_precision":\s*\["HIGHEST|algorithm=dot_f32_f32_f32')
_GEMM = re.compile(r"__cublas\$|__cudnn\$.*[Gg]emm")
_K_DIMS = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^}]*?"dimensions":\s*\[([^\]]*)\]')


@dataclass(frozen=True)
class Cost:
    """Work of one instruction on one GPU.

    Attributes:
        matmul_flops: dtype of the operands -> FLOP (2 per multiply-add).
        attention_flops: FLOP of fused attention that is executed (half of the square when causal).
        attention_backward: whether that is a backward pass.
        bytes_accessed: device memory read and written, slices counted as slices.
        host_bytes: bytes that cross to or from host memory.
        priced_by: `roofline`, or `bytes` where only memory traffic is known (an opaque custom call).
    """

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    attention_flops: float = 0.0
    attention_backward: bool = False
    bytes_accessed: float = 0.0
    host_bytes: float = 0.0
    priced_by: str = "roofline"


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
        self._matmuls: dict[str, Counter] = {}

    def cost(self, instruction: Any) -> Cost:
        """Work of one scheduled instruction (not of control flow, which its body's instructions carry)."""
        op = opcode(instruction)
        if op == "fusion":
            return self._fusion(instruction)
        if op == "custom-call":
            return self._custom_call(instruction)
        if op == "copy":
            return self.copy(instruction)
        return Cost(self._matmul_of(instruction), bytes_accessed=_plain_bytes(instruction, op))

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
        attention = sum(c.attention_flops for c in inner)
        return Cost(
            self._matmuls_in(name),
            attention,
            any(c.attention_backward for c in inner),
            sum(_parameter_bytes(i) for i in body if opcode(i) == "parameter") + _root_bytes(instruction, body),
        )

    def _matmuls_in(self, name: str) -> Counter:
        """FLOP by dtype of every matmul in a computation and in those it calls."""
        if name not in self._matmuls:
            total: Counter = Counter()
            for i in self._computations[name].instructions():
                total.update(self._matmul_of(i))
                for inner in self._called(i):
                    total.update(self._matmuls_in(inner))
            self._matmuls[name] = total
        return self._matmuls[name]

    def _matmul_of(self, instruction: Any) -> dict[str, float]:
        op = opcode(instruction)
        if op in ("dot", "scaled-dot", "ragged-dot"):
            lhs, text = shape_of(instruction.operands()[0]), instruction.to_string()
            found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", text)
            dims = [int(d) for d in found[1].split(",") if d] if found else []
            k = math.prod(lhs.dims[d] for d in dims)
            return {_matmul_dtype(lhs.dtype, text): 2.0 * math.prod(shape_of(instruction).dims) * k}
        if op == "convolution":
            return _convolution(instruction)
        if op == "custom-call":
            return dict(self._custom_call(instruction).matmul_flops)
        return {}

    def _custom_call(self, instruction: Any) -> Cost:
        text = instruction.to_string()
        target = custom_call_target(text)
        moved = sum(shape_of(o).bytes for o in instruction.operands()) + _result_bytes(shape_of(instruction))
        if "fmha" in target:
            return Cost({}, *_attention(instruction, text, target), bytes_accessed=moved)
        if _GEMM.search(target):
            lhs = shape_of(instruction.operands()[0])
            found = _K_DIMS.search(text)
            dims = [int(d.strip(' "')) for d in found[1].split(",") if d.strip(' "')] if found else []
            k = math.prod(lhs.dims[d] for d in dims)
            result = shape_of(instruction)
            out = result.parts[0] if result.parts else result
            return Cost({_matmul_dtype(lhs.dtype, text): 2.0 * math.prod(out.dims) * k}, bytes_accessed=moved)
        if target.startswith("__cudnn$conv"):
            return Cost(_cudnn_convolution(instruction, text, target), bytes_accessed=moved)
        return Cost(bytes_accessed=moved, priced_by="bytes")


def custom_call_target(text: str) -> str:
    """`custom_call_target` of a printed instruction; empty if it has none."""
    found = re.search(r'custom_call_target="([^"]*)"', text)
    return found[1] if found else ""


def _attention(instruction: Any, text: str, target: str) -> tuple[float, bool]:
    """(FLOP, backward) of a cuDNN fused attention.

    Forward is two matmuls over the [batch, heads, length, length] scores: 4 b h s^2 d; backward five, so 2.5 times;
    a causal mask skips half (FlashAttention-2, section 3.1 and its FLOP formula in section 4.1).
    """
    backward = "Backward" in target
    found = _SCORES.search(text)
    scores = math.prod(int(d.strip(' "')) for d in found[1].split(",")) if found else 0
    head_dim = shape_of(instruction.operands()[0]).dims[-1]
    causal = 0.5 if re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', text) else 1.0
    return 4.0 * scores * head_dim * causal * (2.5 if backward else 1.0), backward


def _matmul_dtype(name: str, text: str) -> str:
    """Operand type of a matmul; `f32_highest` where the program forbids TF32."""
    return "f32_highest" if name == "f32" and _NO_TF32.search(text) else name


def _convolution(instruction: Any) -> dict[str, float]:
    kernel = shape_of(instruction.operands()[1])
    flops = _convolution_flops(shape_of(instruction), kernel, instruction.to_string())
    return {_matmul_dtype(kernel.dtype, instruction.to_string()): flops}


def _convolution_flops(output: Shape, kernel: Shape, text: str) -> float:
    """2 x outputs x (kernel window x input features): the kernel's elements per output feature."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", text)
    position = labels[1].index("o") if labels else len(kernel.dims) - 1
    return 2.0 * math.prod(output.dims) * math.prod(kernel.dims) / max(1, kernel.dims[position])


def _cudnn_convolution(instruction: Any, text: str, target: str) -> dict[str, float]:
    """The same multiply-adds in all three directions: those of the forward convolution of output and kernel."""
    first, second = (shape_of(o) for o in instruction.operands()[:2])
    result = shape_of(instruction)
    result = result.parts[0] if result.parts else result
    if "BackwardInput" in target:
        output, kernel = first, second
    elif "BackwardFilter" in target:
        output, kernel = second, result
    else:
        output, kernel = result, second
    return {_matmul_dtype(first.dtype, text): _convolution_flops(output, kernel, text)}


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
            if opcode(user) in _VIEWS:
                stack.append(user)
            else:
                uses.append((user, value))
    total = 0.0
    for user, value in uses:
        of_this = user.operands()[0].name == value.name
        if opcode(user) in SLICES and of_this:
            total += shape_of(user).bytes
        elif not (opcode(user) == "dynamic-update-slice" and of_this):
            return float(shape_of(parameter).bytes)
    return total if uses else float(shape_of(parameter).bytes)


def _root_bytes(instruction: Any, body: list[Any]) -> float:
    """Bytes that a fusion writes: of an in-place update, the update."""
    users = {i.name for i in body if i.users()}
    roots = [i for i in body if i.name not in users]
    if len(roots) != 1:
        return float(_result_bytes(shape_of(instruction)))
    return _written(roots[0])


def _written(value: Any) -> float:
    op = opcode(value)
    if op == "tuple":
        return sum(_written(o) for o in value.operands())
    if op in ("bitcast", "reshape"):
        return _written(value.operands()[0])
    if op == "dynamic-update-slice":
        return float(shape_of(value.operands()[1]).bytes)
    if op == "parameter":
        return 0.0
    return float(_result_bytes(shape_of(value)))
