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
        priced_by: `roofline`, or `bytes` where only memory traffic is known (an opaque custom call).
    """

    matmul_flops: Mapping[str, float] = field(default_factory=dict)
    attention_flops: float = 0.0
    attention_backward: bool = False
    bytes_accessed: float = 0.0
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
        return Cost(self._matmul_of(instruction), bytes_accessed=_plain_bytes(instruction, op))

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
            lhs = shape_of(instruction.operands()[0])
            found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.to_string())
            dims = [int(d) for d in found[1].split(",") if d] if found else []
            k = math.prod(lhs.dims[d] for d in dims)
            return {lhs.dtype: 2.0 * math.prod(shape_of(instruction).dims) * k}
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
            return Cost({lhs.dtype: 2.0 * math.prod(out.dims) * k}, bytes_accessed=moved)
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


def _convolution(instruction: Any) -> dict[str, float]:
    """2 x outputs x (kernel window x input features): the kernel's elements per output feature."""
    kernel = shape_of(instruction.operands()[1])
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.to_string())
    position = labels[1].index("o") if labels else len(kernel.dims) - 1
    per_output = math.prod(kernel.dims) / max(1, kernel.dims[position])
    return {kernel.dtype: 2.0 * math.prod(shape_of(instruction).dims) * per_output}


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

    Read only through slices: the slices. Only updated in place: nothing. Otherwise the whole array, once.
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
    if uses and all(opcode(u) in SLICES and u.operands()[0].name == v.name for u, v in uses):
        return float(sum(shape_of(u).bytes for u, _ in uses))
    if uses and all(opcode(u) == "dynamic-update-slice" and u.operands()[0].name == v.name for u, v in uses):
        return 0.0
    return float(shape_of(parameter).bytes)


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
