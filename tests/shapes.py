"""The check that tests put on signatures with shapes (`Float[Array, "batch length embed"]`)."""

from __future__ import annotations

from typing import get_args

import beartype
import jaxtyping


def check(fn):
    """fn, whose arguments and result must have the shapes that its signature names; other annotations are pyright's."""
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
