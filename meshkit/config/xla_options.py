"""Check the options of XLA in `[xla]`: an experiment file may set those that cannot name a file or start a program.

XLA accepts a boolean or a number only for an option of that type, so only an option with a string value can name a
path. The allowed options of this kind are listed here. A test compares the list with the descriptor of
`xla.DebugOptions` in the installed jaxlib.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from meshkit.config.toml import SpecError, inline, key_text

# Enum fields of `xla.DebugOptions` (xla/xla.proto, in jaxlib 0.11.2 and 0.12.0.1); values are names.
_ENUMS = """
    xla_autotuner_preferred_backend xla_cpu_experimental_onednn_fusion_type xla_cpu_experimental_xnn_fusion_type
    xla_cpu_experimental_xnn_graph_fusion_mode xla_cpu_experimental_ynn_fusion_type xla_cpu_opt_preset
    xla_cpu_scheduler_type xla_detect_unstable_reductions xla_detect_unstable_reductions_post_optimizations
    xla_gpu_all_gather_mode xla_gpu_collective_permute_mode xla_gpu_command_buffer_scheduling_mode
    xla_gpu_command_buffer_update_mode xla_gpu_cudnn_deviceless_compilation_mode xla_gpu_detect_inf
    xla_gpu_detect_nan xla_gpu_deviceless_cub_mode xla_gpu_disable_async_collectives
    xla_gpu_enable_collectives_command_buffer_filter xla_gpu_enable_command_buffer
    xla_gpu_enable_while_loop_unrolling xla_gpu_experimental_autotune_backends
    xla_gpu_experimental_autotune_cache_mode xla_gpu_experimental_deterministic_ops_triton
    xla_gpu_experimental_early_exit xla_gpu_experimental_pipeline_parallelism_opt_level
    xla_gpu_experimental_use_collective_kernels xla_gpu_libnvjitlink_mode xla_gpu_pgle_accuracy_checker
    xla_gpu_pipeline_all_gather xla_gpu_pipeline_all_reduce xla_gpu_pipeline_reduce_scatter
    xla_gpu_ragged_all_to_all_mode xla_gpu_shape_checks xla_gpu_unsupported_use_cross_host_one_shot_kernel
    xla_partitioning_algorithm xla_step_marker_location
"""
ENUMS = frozenset(_ENUMS.split())
# String fields that name no file and are no argument of a program: passes, an instruction set, timeouts.
_TEXTS = """
    xla_cpu_max_isa xla_disable_hlo_passes xla_enable_hlo_passes_only xla_gpu_device_execution_terminate_timeout
    xla_gpu_execution_terminate_timeout xla_run_hlo_passes_starting_from
"""
TEXTS = frozenset(_TEXTS.split())


def check_xla_options(options: Mapping[str, Any], by_command: Collection[str] = ()) -> None:
    """Refuse a name that is not an XLA option, and a string in an experiment file that could name a file or a program.

    `by_command` has the options that the command line sets. Their strings are not checked, since the user chose them.

    Raises:
        SpecError: an option is refused; the message names the key and what to set.
    """
    for name, value in options.items():
        key = ("xla", name)
        if not name.startswith("xla_"):
            hint = f"xla_{name.removeprefix('--').removeprefix('xla_')}"
            raise SpecError(f"'{name}' is not an XLA option.", key=key, value=value, hint=hint)
        if not isinstance(value, bool | int | float | str):
            message = f"xla.{name} must be a string, a number, true or false."
            raise SpecError(message, key=key, value=value, hint=f"{key_text(name)} = true, or a number")
        if isinstance(value, str) and name not in ENUMS | TEXTS and name not in by_command:
            message = (
                f"xla.{name} is a string that could name a file or a program; an experiment file may not set such an "
                "option of XLA."
            )
            hint = f"--set 'xla.{name}=\"...\"' on the command line; a number, true or false without quotes"
            raise SpecError(message, key=key, value=value, hint=hint)


def as_overrides(options: Mapping[str, Any]) -> list[str]:
    """Return checked options as overrides `xla.NAME=VALUE`, for `load` in another process."""
    return [f"xla.{key_text(name)}={inline(value)}" for name, value in options.items()]
