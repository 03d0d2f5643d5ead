"""Keeps off the terminal what orbax says of its work, and of failures that a run reports in one line.

orbax logs every step of every save. Where one write of many fails, it stops waiting for the rest, each of which then
leaves a traceback as it ends: of an event loop that is closed, or of a coroutine that nobody has waited for.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

_LOOP_IS_GONE = "Event loop is closed"


def silence_orbax() -> None:
    """From now on, in this process; a second call changes nothing."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    if getattr(sys.unraisablehook, "__name__", "") != _unraisable.__name__:
        _before.append(sys.unraisablehook)
        sys.unraisablehook = _unraisable


_before: list[Any] = []


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname


def _unraisable(found: Any) -> None:
    loop_is_gone = isinstance(found.exc_value, RuntimeError) and str(found.exc_value) == _LOOP_IS_GONE
    code = getattr(found.object, "cr_code", None)
    if not loop_is_gone and "orbax" not in getattr(code, "co_filename", ""):
        _before[-1](found)
