"""Compiling with options that XLA may refuse, in the planner's compiler process and on real GPUs alike.

What XLA does not know it refuses with an exception (as XLA_FLAGS it would abort). An option of meshkit's own is then
left out and named; one of the user's is an error that names the closest option there is.
"""

from __future__ import annotations

import difflib
import importlib.util
import mmap
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.compile.options import Option, chosen_options, first_that_fits, left_out_lines
from meshkit.config.cluster import Gpu
from meshkit.errors import ConfigError

_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_INVALID = re.compile(r"While setting option (\w+), '(.*?)' is not a valid (\w+) value")
_KINDS = {"bool": "true or false", "int64": "a whole number", "int32": "a whole number", "enum": "one of its names"}
_NAME = re.compile(rb"xla_[a-z][a-z0-9_]{3,90}")
_LIBRARIES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", "jaxlib")
_NO_SUCH = "this XLA has no such option"


class RefusedOption(Exception):
    """XLA refuses an option that the user set.

    Attributes:
        name: of the option.
        reason: XLA's, in one line.
    """

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason
        super().__init__(f"{name}: {reason}")


def compile_lowered(
    lowered: Any, options: Mapping[str, object], users: Collection[str] = ()
) -> tuple[Any, dict[str, str]]:
    """A lowered program compiled with as many of the options as this XLA takes.

    Args:
        lowered: what jax makes of `trace(...).lower(...)`.
        options: `compiler_options`.
        users: names of those that the user set, which must not be left out.

    Returns:
        The compiled program, and the options left out, each with XLA's reason.

    Raises:
        RefusedOption: XLA refuses one of the user's.
    """
    chosen, left_out = dict(options), dict[str, str]()
    while True:
        try:
            return lowered.compile(compiler_options=chosen or None), left_out
        except Exception as e:  # jax wraps XLA's errors in several types
            name, reason = refused_option(str(e))
            if name not in chosen:
                raise
            if name in users:
                raise RefusedOption(name, reason) from None
            left_out[name] = reason
            del chosen[name]


def compile_for_gpus(
    lowered: Any, gpu: Gpu, users: Mapping[str, object], derived: Sequence[Option], pool_bytes: float
) -> tuple[Any, list[Option], list[str]]:
    """A lowered program compiled on real GPUs with the options that plan compiles it with.

    Args:
        lowered: as above.
        gpu: that it runs on.
        users: options that the user set.
        derived: options of this program, with others where they make it larger than the pool.
        pool_bytes: of GPU memory.

    Returns:
        The compiled program, the options it was made with, and a line for the user about each option left out.

    Raises:
        RefusedOption: XLA refuses one of the user's.
    """

    def make(chosen: Sequence[Option]) -> tuple[Any, Sequence[Option], dict[str, str]]:
        compiled, left_out = compile_lowered(lowered, {o.name: o.value for o in chosen}, users)
        return compiled, chosen, left_out

    (compiled, chosen, left_out), said = first_that_fits(
        derived, lambda some: chosen_options(gpu, users, some), make, lambda made: peak_bytes(made[0]), pool_bytes
    )
    lines = [*([said] if said else []), *left_out_lines(left_out, derived)]
    return compiled, [o for o in chosen if o.name not in left_out], lines


def peak_bytes(compiled: Any) -> int:
    """GPU memory that an executable needs at once: arguments, outputs that alias none of them, temporaries; 0 where
    XLA does not say.
    """
    m = compiled.memory_analysis()
    if m is None:
        return 0
    inside = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return inside + m.temp_size_in_bytes + m.generated_code_size_in_bytes


def refused_option(message: str) -> tuple[str, str]:
    """(name, reason) of the option that an error of XLA is about; ("", "") if it is about none."""
    if found := _UNKNOWN.search(message):
        return found[1], _NO_SUCH
    if found := _INVALID.search(message):
        return found[1], f"'{found[2]}' is not {_KINDS.get(found[3], f'a valid {found[3]}')}"
    return "", ""


def option_error(name: str, value: object, reason: str, version: str) -> ConfigError:
    """The error about an option of the user's that XLA refuses, with the closest one that it has."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return ConfigError(
        f"XLA (jaxlib {version}) refuses the option {name}: {reason}.",
        at=f"[xla] {name} = {shown}",
        hint=hint_for(name, reason),
    )


def hint_for(name: str, reason: str) -> str:
    """What to try where XLA refuses an option: the closest it has, if it has none of that name."""
    if reason != _NO_SUCH:
        return "another value, or remove it"
    close = difflib.get_close_matches(name, known_options() - {name}, n=1, cutoff=0.8)
    return close[0] if close else "remove it"


def known_options() -> set[str]:
    """Names in XLA that look like options. It has no list of them that a program can ask for."""
    specs = [importlib.util.find_spec(m) for m in _LIBRARIES if importlib.util.find_spec(m.partition(".")[0])]
    folders = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    libraries = [folder / name for folder in folders for name in ("xla_cuda_plugin.so", "libjax_common.so")]
    return next((_names_in(library) for library in libraries if library.exists()), set())


def _names_in(library: Path) -> set[str]:
    """Mapped and searched for the prefix alone: the library is some hundred megabytes."""
    names: set[str] = set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        position = content.find(b"xla_")
        while position >= 0:
            found = _NAME.match(content[position : position + 100])
            if found and not (position and content[position - 1 : position].isalnum()):
                names.add(found[0].decode())
            position = content.find(b"xla_", position + 4)
    return names
