"""What each mesh axis is for, read off the rules."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.config.rules import ShardingRules

_TENSOR_ACTIVATIONS = ("act_heads", "act_kv_heads", "act_mlp", "act_vocab")
_TENSOR_PARAMETERS = ("heads", "kv_heads", "mlp", "vocab")
_EXPERTS = ("experts", "act_experts")


@dataclass(frozen=True)
class AxisRoles:
    """Which mesh axes do what, read off the rules.

    Attributes:
        batch, length: axes that cut `act_batch`, and `act_length` or `act_residual_length`.
        residual: axes that cut `act_residual_length` alone (sequence parallelism).
        tensor: axes that cut heads, mlp or vocab of activations, or of parameters without cutting the batch; a
            pipeline, which cuts layers, may cut the vocabulary too and is none.
        expert: axes that cut experts.
    """

    batch: frozenset[str]
    length: frozenset[str]
    residual: frozenset[str]
    tensor: frozenset[str]
    expert: frozenset[str]

    @classmethod
    def of(cls, rules: ShardingRules) -> AxisRoles:
        """The roles that rules give."""
        mapping = rules.mapping("activations")

        def cut(*names: str) -> frozenset[str]:
            return frozenset(a for name in names for a in mapping.get(name, ()))

        batch, length = cut("act_batch"), cut("act_length")
        tensor = cut(*_TENSOR_ACTIVATIONS) | (cut(*_TENSOR_PARAMETERS) - batch - cut("layers"))
        return cls(batch, length, cut("act_residual_length") - length, tensor - length, cut(*_EXPERTS))
