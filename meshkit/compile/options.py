"""The XLA options that meshkit sets, as data, for plan and for train on GPUs alike.

    OPTIONS (crashes and defaults) + derived.py (of one program) + [xla] (the user's, which win) -> compiler_options

Each has a reason and the jaxlib releases it is for. What XLA refuses all the same is left out and named (compiling.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshkit.compile.preflight import version_of
from meshkit.config.cluster import Gpu
from meshkit.units import format_bytes


@dataclass(frozen=True)
class Option:
    """One compiler option: its value, why, for which GPUs and which jaxlib.

    Attributes:
        name, value: as `compiler_options` takes them.
        why: what goes wrong without it, as a clause after "because".
        applies: `all`, or `before_hopper`.
        costs_memory: whether it is left out where it alone makes a program larger than its memory.
        tight: its value and why, where the program is larger than its memory with the first.
        since, before: the first jaxlib release it is for, and the first it is not; "" is open.
    """

    name: str
    value: bool | int | float | str
    why: str
    applies: str = "all"
    since: str = ""
    before: str = ""
    costs_memory: bool = False
    tight: tuple[bool | int | float | str, str] | None = None


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
