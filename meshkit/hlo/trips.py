"""Iterations of a counted loop that XLA does not annotate: from its counter's start, step and limit.

XLA forgets a loop's trip count when it takes iterations out of it (collective pipelining), but not its induction
variable: the loop runs while `counter + a < limit`; the counter starts at a constant and grows by one in the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshkit.hlo.proto import Attributes, Fields, ModuleAttributes, integer, ints, message, text

_ALIASES = ("copy", "bitcast", "convert", "reshape", "broadcast")
_MIRRORED = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE", "NE": "NE"}
_LITERALS = (4, 5, 6, 7)  # s32s, s64s, u32s, u64s of xla.LiteralProto


@dataclass(frozen=True)
class _Linear:
    """`counter * n + offset`, with n 0 or 1."""

    counter: int
    offset: int


def count_trips(module: ModuleAttributes, loop: Attributes, computation: str) -> int | None:
    """Iterations of a loop of the computation; None where they are not so simple.

    Args:
        module: of the program.
        loop: a `while` whose backend configuration names the induction variable.
        computation: the one that the loop stands in.
    """
    variable = loop.backend.get("known_induction_variable", {}).get("tuple_index")
    if variable is None or len(loop.called) != 2:
        return None
    index = int(variable)
    scope = _Scope(module, computation)
    state = scope.operands(loop)[0]
    if state.opcode != "tuple":
        return None
    start = scope.value(scope.operands(state)[index])
    body, condition = (_Scope(module, name, index) for name in loop.called)
    if body.root.opcode != "tuple" or condition.root.opcode not in ("compare", "fusion"):
        return None
    step = body.value(body.operands(body.root)[index])
    limit = condition.limit()
    if start is None or start.counter or step is None or not step.counter or step.offset <= 0 or limit is None:
        return None
    return max(0, -(-(limit - start.offset) // step.offset))


class _Scope:
    """The instructions of one computation, and what its parameters stand for.

    Args:
        module: of the program.
        name: of the computation.
        counter: index of the induction variable in the tuple that is its parameter; None of a fusion.
        given: of a fusion, what each parameter stands for.
    """

    def __init__(
        self, module: ModuleAttributes, name: str, counter: int | None = None, given: Sequence[_Linear | None] = ()
    ):
        self._module, self._counter, self._given = module, counter, given
        attributes = [module.of(i) for i in module.order(name)]
        self._by_id: Mapping[int, Attributes] = {integer(a.fields, 35): a for a in attributes}
        self.root = self._by_id[module.root(name)]

    def operands(self, a: Attributes) -> list[Attributes]:
        return [self._by_id[i] for i in ints(a.fields, 36)]

    def value(self, a: Attributes) -> _Linear | None:
        """What an integer scalar is in terms of the counter; None if it is something else."""
        if a.opcode == "constant":
            return _literal(a.fields)
        if a.opcode == "parameter":
            number = integer(a.fields, 9)
            return self._given[number] if number < len(self._given) else None
        if a.opcode == "get-tuple-element":
            whole = self.operands(a)[0].opcode == "parameter"
            return _Linear(1, 0) if whole and integer(a.fields, 13) == self._counter else None
        if a.opcode in _ALIASES:
            return self.value(self.operands(a)[0])
        if a.opcode == "fusion":
            inner = self._inside(a)
            return inner.value(inner.root)
        if a.opcode == "add":
            left, right = map(self.value, self.operands(a))
            if left is None or right is None or left.counter + right.counter > 1:
                return None
            return _Linear(left.counter + right.counter, left.offset + right.offset)
        return None

    def limit(self) -> int | None:
        """The limit of a condition `counter < limit`, however it is written; None of any other."""
        if self.root.opcode == "fusion":
            return self._inside(self.root).limit()
        if self.root.opcode != "compare":
            return None
        left, right = map(self.value, self.operands(self.root))
        direction = text(self.root.fields, 63)
        if left is None or right is None or left.counter == right.counter:
            return None
        if right.counter:
            left, right, direction = right, left, _MIRRORED.get(direction, "")
        extra = {"LT": 0, "LE": 1}.get(direction)
        return None if extra is None else right.offset - left.offset + extra

    def _inside(self, fusion: Attributes) -> _Scope:
        return _Scope(self._module, fusion.called[0], given=[self.value(o) for o in self.operands(fusion)])


def _literal(fields: Fields) -> _Linear | None:
    literal = message(fields, 8)
    values = [v for number in _LITERALS for v in ints(literal, number)]
    if len(values) != 1:  # XLA leaves nothing out: a scalar zero is written
        return None
    value = values[0]
    return _Linear(0, value - (1 << 64) if value >= 1 << 63 else value)
