"""Checkpoints that cannot be read: tried again, then an error. Only what was read can be called corrupt.

    a file is missing, or has other contents          corrupt: passed over, set aside
    EIO, ESTALE, ENOMEM, EMFILE, ...                  read again after each of PAUSES_S, then RunError (exit code 4)
    EACCES, EPERM                                     ConfigError (exit code 2)

Storage that is away for a minute, or one `chmod`, would otherwise cost the newest checkpoint its name.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from typing import Any

from meshkit.errors import ConfigError, MeshkitError, RunError

PAUSES_S = (0.5, 2.0, 8.0)  # between attempts to read what cannot be read
# Also a pipe or a device in the file's place (ENXIO), and far too many bytes (EFBIG): see meshkit.config.bounded.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EFBIG)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


def is_absent(error: OSError) -> bool:
    """Whether an error says that no such file is there, which storage that answers has said."""
    return error.errno in _ABSENT


def retried[T](read: Callable[[], T]) -> T:
    """What `read` gives; where storage or memory fails it, it is called again after each of PAUSES_S.

    Raises:
        OSError: there is no such file, it may not be read, or it still cannot be read.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return read()
        except MemoryError:
            error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        except OSError as problem:
            error = problem
        if pause_s is None or is_absent(error) or error.errno in _FORBIDDEN:
            raise error
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def explain(problem: BaseException) -> str:
    """What went wrong with a file, in one line: the system's words, without the calls that met it."""
    for error in (problem, problem.__cause__, problem.__context__):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = str(problem)
    if found := _OS_ERROR.search(text):  # as tensorstore ends a message of a dozen lines
        return os.strerror(int(found[1]))
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(problem).__name__)[:300]


def describe_failure(problem: BaseException) -> dict[str, Any]:
    """Why something could not be read, as JSON: `reason`, and whether it is `forbidden`."""
    chain = (problem, problem.__cause__, problem.__context__)
    numbers = {error.errno for error in chain if isinstance(error, OSError)}
    numbers |= {int(number) for number in _OS_ERROR.findall(str(problem))}
    return {"reason": explain(problem), "forbidden": not numbers.isdisjoint(_FORBIDDEN)}


def unreadable_error(what: str, failure: dict[str, Any], at: str) -> MeshkitError:
    """The error that ends a command because of what `describe_failure` has found."""
    if failure["forbidden"]:
        return ConfigError(
            f"{what} may not be read: {failure['reason']}. Nothing was changed.",
            at=at,
            hint="chmod -R u+rwX, or the user who wrote it",
        )
    return RunError(
        f"{what} cannot be read: {failure['reason']}; tried {len(PAUSES_S) + 1} times within {sum(PAUSES_S):.0f} s. "
        "That says nothing of its contents: nothing was changed.",
        at=at,
        hint="the same command, once the storage answers and there is memory",
    )
