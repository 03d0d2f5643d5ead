"""The XLA options that meshkit sets, as data, for plan and for train on GPUs alike.

    OPTIONS (crashes and defaults) + derived.py (of one program) + [xla] (the user's, which win) -> compiler_options

Each has a reason and the jaxlib releases it is for. What XLA does not know it refuses with an exception (as XLA_FLAGS
it would abort): an option of meshkit's own is then left out and named, one of the user's is an error that names the
closest option there is.
"""

from __future__ import annotations

import difflib
import importlib.util
import mmap
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.compile.preflight import version_of
from meshkit.config.cluster import Gpu
from meshkit.errors import ConfigError
from meshkit.units import format_bytes

_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_INVALID = re.compile(r"While setting option (\w+), '(.*?)' is not a valid (\w+) value")
_KINDS = {"bool": "true or false", "int64": "a whole number", "int32": "a whole number", "enum": "one of its names"}
_NAME = re.compile(rb"xla_[a-z][a-z0-9_]{3,90}")
_LIBRARIES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", "jaxlib")
_NO_SUCH = "this XLA has no such option"


@dataclass(frozen=True)
class Option:
    """One compiler option: its value, why, for which GPUs and which jaxlib."""

    name: str
    value: bool | int | float | str  # as `compiler_options` takes it
    why: str  # what goes wrong without it, as a clause after "because"
    applies: str = "all"  # `all`, or `before_hopper`
    since: str = ""  # the first jaxlib release it is for; "" is open
    before: str = ""  # the first jaxlib release it is not for; "" is open
    costs_memory: bool = False  # whether it is left out where it alone makes a program larger than its memory
    tight: tuple[bool | int | float | str, str] | None = None
    """Its value and why, where the program is larger than its memory with the first."""


# Of the memory that a step may take, what XLA does not count in it (cuDNN's workspace, gaps between blocks): a program
# that is not held to a limit leaves this much.
_SPARE = 0.02

OPTIONS = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "the default for A100 and older runs every collective synchronously; Hopper and later hide them anyway",
        "before_hopper",
    ),
    Option(
        "xla_gpu_experimental_use_collective_kernels",
        "",
        "a scalar all-reduce over 64 GPUs aborts the compiler when it becomes a Triton kernel",
        since="0.11",
    ),
    Option(
        "xla_gpu_enable_cub_radix_sort",
        False,
        "CUB's sort asks the CUDA driver for its scratch size while compiling, and the planning machine has none",
    ),
)

# Of the process that plans alone: it has no GPU to time kernels on, and these change no instruction of the schedule.
PLANNERS = (
    Option(
        "xla_gpu_autotune_level",
        0,
        "the autotuner would compile its first guesses, for a third of the time, and choose one",
        since="0.12",  # before, nothing else gives a matmul its tiles: "No supported config found"
    ),
)


def planners_options(*, jaxlib: str | None = None) -> dict[str, object]:
    """Those of PLANNERS that are for a jaxlib release, default the installed one."""
    release = jaxlib or version_of("jaxlib") or ""
    return {o.name: o.value for o in PLANNERS if _is_for(o, release)}


def compiler_options(
    gpu: Gpu,
    user: Mapping[str, Any] | None = None,
    derived: Sequence[Option] = (),
    *,
    jaxlib: str | None = None,
) -> dict[str, object]:
    """Options for one GPU: meshkit's own, those derived from the program, then the user's `[xla]` table, which wins.

    Args:
        gpu: to compile for.
        user: by name.
        derived: of the program, see derived.py.
        jaxlib: release; default the installed one.
    """
    return {o.name: o.value for o in chosen_options(gpu, user, derived, jaxlib=jaxlib)}


def chosen_options(
    gpu: Gpu,
    user: Mapping[str, Any] | None = None,
    derived: Sequence[Option] = (),
    *,
    jaxlib: str | None = None,
) -> list[Option]:
    """The same, each with its reason; what the user sets has the reason `[xla]`."""
    release = jaxlib or version_of("jaxlib") or ""
    before_hopper = gpu.compute_capability is not None and gpu.compute_capability < (9, 0)
    own = (o for o in (*OPTIONS, *derived) if (o.applies == "all" or before_hopper) and _is_for(o, release))
    by_name = {o.name: o for o in own}
    by_name |= {name: Option(name, value, "[xla]") for name, value in (user or {}).items()}
    return list(by_name.values())


def left_out_lines(left_out: Mapping[str, str], derived: Sequence[Option] = ()) -> list[str]:
    """What a user must know of options that meshkit sets and this XLA refuses."""
    why = {o.name: f"; meshkit sets it because {o.why}" for o in (*OPTIONS, *derived)}
    return [f"{name} is left out: {reason}{why.get(name, '')}" for name, reason in left_out.items()]


def first_that_fits[T](
    derived: Sequence[Option],
    choose: Callable[[Sequence[Option]], Sequence[Option]],
    make: Callable[[Sequence[Option]], T],
    peak_bytes: Callable[[T], float],
    pool_bytes: float | None,
) -> tuple[T, str | None]:
    """A program with the derived options as they are, or else with tight values, or without those that cost memory.

    Args:
        derived: of the program.
        choose: all options, of the derived ones.
        make: compiles with them.
        peak_bytes: of what was made.
        pool_bytes: that the program may take; None for no limit.

    Returns:
        The first that fits; where none does, the one with tight values. And a line about options left out, if any.
    """
    tight = [replace(o, value=o.tight[0], why=o.tight[1], tight=None) if o.tight else o for o in derived]
    loose = choose(derived)
    if pool_bytes is None or loose != choose(tight):
        made = make(loose)
        if pool_bytes is None or peak_bytes(made) <= (1 - _SPARE) * pool_bytes:
            return made, None
    made = make(choose(tight))
    needed, cheap = peak_bytes(made), [o for o in tight if not o.costs_memory]
    if needed <= pool_bytes or len(cheap) == len(tight):
        return made, None
    plain = make(choose(cheap))
    if peak_bytes(plain) > pool_bytes:
        return made, None
    return plain, memory_line(needed, peak_bytes(plain))


def memory_line(with_bytes: float, without_bytes: float) -> str:
    """What a user must know where the derived options did not fit."""
    return (
        f"the options that hide the gathers of a layer are left out: they need {format_bytes(with_bytes)} of GPU memory"
        f", more than the step may take, and without them it needs {format_bytes(without_bytes)}"
    )


def _is_for(option: Option, release: str) -> bool:
    since, before, this = _numbers(option.since), _numbers(option.before), _numbers(release)
    return (not this or this >= since) and (not before or this < before)


def _numbers(release: str) -> tuple[int, ...]:
    """(0, 12, 0) of "0.12.0"; what is no number ends it."""
    found: list[int] = []
    for part in release.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


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
