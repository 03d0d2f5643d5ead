"""Check signatures with shapes (`Float[Array, "batch length embed"]`) in tests."""

from __future__ import annotations

from typing import get_args

import beartype
import jaxtyping


def check(fn):
    """Return fn with a check that its arguments and result have the named shapes; pyright checks other annotations."""
    hints = getattr(fn, "__annotations__", {})
    shaped = {name: hint for name, hint in hints.items() if _has_shape(hint)}
    if not shaped:
        return fn
    fn.__annotations__ = shaped
    return beartype.beartype(fn)


def _has_shape(hint) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(_has_shape(inner) for inner in get_args(hint))
