"""`--fail-if`: a condition on a comparison, for CI: exposed_s>1.1x."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from meshkit.errors import ConfigError
from meshkit.report.compare import ComparedRow, Comparison, JudgedCondition, Pair, pair, total
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

_CONDITION = re.compile(r"^\s*([A-Za-z_0-9.+]+)\s*(>=|<=|>|<)\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(x?)\s*$")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}
_EXAMPLES = "exposed_s>1.1x, step.time_s>0.5, communication.fsdp.exposed_s>1.2x or mfu<0.4"


def judge(comparison: Comparison, text: str) -> JudgedCondition:
    """Whether a condition such as `exposed_s>1.1x` holds for b, with the numbers.

    Args:
        comparison: of the reference (a) with what is judged (b).
        text: `QUANTITY OP NUMBER`. The quantity is a key of `step` or `memory`, with or without the part's name, or
            `communication.AXES.KEY`: the sum over the rows of those axes (`communication.data+fsdp.exposed_s`). An
            `x` after the number makes it a multiple of what a has.

    Raises:
        ConfigError: another form, a quantity that does not exist, or one that is unknown in a report that is needed.
    """
    found = _CONDITION.match(text)
    if not found:
        raise ConfigError(f"the condition '{text}' cannot be read.", at=f"--fail-if '{text}'", hint=_EXAMPLES)
    name, operator, number, relative = found.groups()
    values = _quantity(comparison, name, text)
    try:
        limit = float(number)
    except ValueError:
        raise ConfigError(f"'{number}' is not a number.", at=f"--fail-if '{text}'") from None
    reference = None
    if relative:
        reference = _known(values.a, name, "first", text)
        limit *= reference
    value = _known(values.b, name, "second", text)
    met = _HOLDS[operator](value, limit)
    return JudgedCondition(condition=text, met=met, value=value, limit=limit, reference=reference)


def evaluate_condition(comparison: Comparison, text: str) -> bool:
    """Whether a condition holds for b; see `judge`."""
    return judge(comparison, text).met


def condition_text(judged: JudgedCondition) -> str:
    """`exposed_s>1.1x: 212 ms, 1.31 x of 162 ms`."""
    form = _form(judged.condition)
    value = form(judged.value).strip()
    if judged.reference is None:
        return f"{judged.condition}: it is {value}"
    times = f", {judged.value / judged.reference:.2f} x" if judged.reference else ""
    return f"{judged.condition}: it is {value}, it was {form(judged.reference).strip()}{times}"


def _form(condition: str) -> Callable[[Any], str]:
    name = re.split(r"[<>]", condition)[0].strip()
    for suffix, form in (("per_gpu", format_count), ("_s", format_seconds), ("_bytes", format_bytes)):
        if name.endswith(suffix):
            return form
    shares = ("mfu", "mfu_causal", "hfu", "bubble_fraction")
    return format_percent if name.rpartition(".")[2] in shares else format_count


def _known(value: float | None, name: str, which: str, text: str) -> float:
    if value is None:
        raise ConfigError(f"{name} is unknown in the {which} report, so '{text}' cannot be judged.")
    return value


def _quantity(comparison: Comparison, name: str, text: str) -> Pair:
    if name.startswith("communication."):
        return _communication(comparison, name, text)
    known: dict[str, Pair] = {**comparison.memory, **comparison.step}
    qualified = {f"{part}.{key}": v for part in ("step", "memory") for key, v in getattr(comparison, part).items()}
    if name not in known and name not in qualified:
        close = difflib.get_close_matches(name, [*known, *qualified], n=1)
        hint = close[0] if close else ", ".join(list(comparison.step)[:7])
        raise ConfigError(f"there is no quantity '{name}' to compare.", at=f"--fail-if '{text}'", hint=hint)
    return qualified.get(name) or known[name]


def _communication(comparison: Comparison, name: str, text: str) -> Pair:
    """The sum over the rows of some axes; a report without such a row has none of it: 0."""
    _, _, rest = name.partition(".")
    axes, _, key = rest.rpartition(".")
    keys = [key for key, field in ComparedRow.model_fields.items() if field.annotation is Pair]
    named = {"+".join(row.axes) for row in comparison.communication}
    if axes not in named or key not in keys:
        hint = f"axes: {', '.join(sorted(n for n in named if n)) or 'none'}; keys: {', '.join(keys)}"
        raise ConfigError(f"there is no communication '{rest}' to compare.", at=f"--fail-if '{text}'", hint=hint)
    pairs = [getattr(row, key) for row in comparison.communication if "+".join(row.axes) == axes]
    a, b = (total([p for p in pairs if getattr(p, side) is not None], side) or 0.0 for side in ("a", "b"))
    return pair(a, b)
