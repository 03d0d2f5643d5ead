"""The XLA options that meshkit sets, as data. Layer 4; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshkit.spec.cluster import Gpu


@dataclass(frozen=True)
class Option:
    """One compiler option: its value, why, and for which GPUs.

    Attributes:
        name, value: as `compiler_options` takes them.
        why: what goes wrong without it.
        applies: `all`, or `before_hopper`.
    """

    name: str
    value: object
    why: str
    applies: str = "all"


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
        "a scalar all-reduce over 64 GPUs aborts the compiler when it becomes a Triton kernel (jaxlib 0.12)",
    ),
    Option(
        "xla_gpu_enable_cub_radix_sort",
        False,
        "CUB's sort asks the CUDA driver for its scratch size while compiling, and the planning machine has none",
    ),
)


def compiler_options(gpu: Gpu, user: Mapping[str, object] | None = None) -> dict[str, object]:
    """Options for one GPU: meshkit's own, then the user's `[xla]` table, which wins."""
    before_hopper = gpu.compute_capability is not None and gpu.compute_capability < (9, 0)
    chosen = {o.name: o.value for o in OPTIONS if o.applies == "all" or before_hopper}
    return chosen | dict(user or {})
