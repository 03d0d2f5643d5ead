"""Check the options of a model's config that a user gives, and suggest the name that was probably meant."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

Rate = float  # in [0, 1), e.g. of dropout


def check_option(name: str, value, kind: str):
    """Return the value with the type that a config needs; a whole number is accepted as a float.

    Args:
        name: name of the option.
        value: the user's value.
        kind: `bool`, `int`, `float`, or `Rate`, which may be zero.

    Raises:
        ValueError: the value has another type; or an int is below 1, a float is not positive or not finite, or a Rate
            is below 0 or not below 1.
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
    """Return the end of an error message: the name that was probably meant, or nothing."""
    near = difflib.get_close_matches(str(word), known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the name that was probably meant, or all known names."""
    names = sorted(known)
    return nearest(word, names) or f" Known: {', '.join(names)}."
