"""Options of a model's config, as a user gives them: checked, with what was probably meant."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

Rate = float  # in [0, 1): of dropout


def check_option(name: str, value, kind: str):
    """The value as a config wants it; a whole number may stand for a float.

    Args:
        name: of the option.
        value: given by the user.
        kind: `bool`, `int`, `float`, or `Rate`, which may be zero.

    Raises:
        ValueError: another type, not positive, or no share below 1.
    """
    if kind == "bool":
        wanted, fits = "true or false", isinstance(value, bool)
    elif kind == "int":
        wanted, fits = "a whole number of at least 1", isinstance(value, int) and value >= 1
    elif kind == "Rate":
        wanted, fits = "a share of at least 0 and below 1", isinstance(value, int | float) and 0 <= value < 1
    else:
        wanted, fits = "a positive number", isinstance(value, int | float) and 0 < value < math.inf
    if not fits or isinstance(value, bool) != (kind == "bool"):
        raise ValueError(f"{name} = {value!r} must be {wanted}.")
    return float(value) if kind in ("float", "Rate") else value


def nearest(word: object, known: Iterable[str]) -> str:
    """The end of an error message: the name that was probably meant, or nothing."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the name that was probably meant, or all that there are."""
    names = sorted(known)
    return nearest(word, names) or f" Known: {', '.join(names)}."
