"""The XLA options that meshkit sets, as data, for plan and for train on GPUs alike. Layer 4; imports no jax.

    OPTIONS (crashes and defaults) + derived.py (of one program) + [xla] (the user's, which win) -> compiler_options

Each has a reason and the jaxlib releases it is for. What XLA refuses all the same is left out and named (compiling.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.spec.cluster import Gpu
from meshkit.units import format_bytes
from meshkit.xla.preflight import version_of


@dataclass(frozen=True)
class Option:
    """One compiler option: its value, why, for which GPUs and which jaxlib.

    Attributes:
        name, value: as `compiler_options` takes them.
        why: what goes wrong without it, as a clause after "because".
        applies: `all`, or `before_hopper`.
        costs_memory: whether it is left out where it alone makes a program larger than its memory.
        since, before: the first jaxlib release it is for, and the first it is not; "" is open.
    """

    name: str
    value: bool | int | float | str
    why: str
    applies: str = "all"
    since: str = ""
    before: str = ""
    costs_memory: bool = False


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


def without_costs(derived: Sequence[Option]) -> list[Option]:
    """Those that cost no memory."""
    return [o for o in derived if not o.costs_memory]


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
