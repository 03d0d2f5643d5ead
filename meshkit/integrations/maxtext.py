"""MaxText's own training step as a program, unedited: its configuration, its model, its `train_step`.

    [program]
    make = "meshkit.integrations.maxtext:make"
    options = { model_name = "llama3-8b", per_device_batch_size = 2, attention = "cudnn_flash_jax" }

The mesh of the experiment has MaxText's names for its axes (`data`, `fsdp`, `tensor`, `expert`, ...); those that it
leaves out have size 1. Tried with MaxText 0.2.5 (`make check-maxtext`), which names no versions of what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshkit.errors import ConfigError
from meshkit.sharding.mesh import DescribedMesh, absent_devices
from meshkit.step.given import Program

TESTED = "0.2.5"
# MaxText writes what a run needs and a plan does not: checkpoints, data, a run's folder.
_OF_A_PLAN = {
    "hardware": "gpu",
    "run_name": "plan",
    "base_output_directory": "unused",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "log_config": False,
}


def make(mesh: DescribedMesh, config: str | None = None, **overrides: Any) -> Program:
    """Return MaxText's training step for a mesh of absent GPUs.

    Args:
        mesh: with names of MaxText's axes.
        config: a MaxText configuration file; None is MaxText's own `base.yml`.
        overrides: of its keys, as on MaxText's command line.

    Returns:
        Its mesh has every axis of MaxText's, its tokens and model FLOP are MaxText's own.

    Raises:
        ConfigError: MaxText is not installed, or an axis is none of MaxText's.
    """
    try:
        from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
        from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
        from maxtext.utils import maxtext_utils, sharding  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        hint = f"pip install maxtext=={TESTED}, and what it imports, as `make check-maxtext` of a clone does"
        raise ConfigError(f"MaxText cannot be imported: {e}.", hint=hint) from None
    import jax
    from flax.core.spmd import logical_axis_rules

    said = {**_OF_A_PLAN, **_parallelism(mesh), **overrides}
    with absent_devices(list(mesh.devices.flat)):
        made = pyconfig.initialize([None, config or _base_file(), *(f"{k}={_text(v)}" for k, v in said.items())])
        whole = _whole_mesh(mesh, made.mesh_axes)
        arguments, _, state, _, model = train_compile.get_shaped_inputs(whole, made)
        parameters, state = sharding.maybe_update_params_sharding_with_opt(made, state)
        entering = sharding.build_zero1_input_state_mesh_shardings(made, state, parameters)
        data = sharding.get_input_data_sharding(made, whole)
        step, ins, outs, static, donated = maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, entering, model, made, parameters
        )
        teraflops, _, _ = maxtext_utils.calculate_tflops_training_per_device(made, log=False)

    @functools.wraps(step)
    def train_step(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(whole), logical_axis_rules(made.logical_axis_rules):
            return step(*args)

    jitted = jax.jit(train_step, in_shardings=ins, out_shardings=outs, static_argnums=static, donate_argnums=donated)
    return Program(
        jitted,
        arguments,
        tokens=made.global_batch_size_to_train_on * made.max_target_length,
        model_flops=teraflops * 1e12 * mesh.size,
    )


def _base_file() -> str:
    """Return the path of MaxText's own configuration."""
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]

    return str(Path(pyconfig.__file__).with_name("base.yml"))


def _parallelism(mesh: DescribedMesh) -> Mapping[str, int]:
    """Return MaxText's keys for the sizes of a mesh.

    All are `ici`, where MaxText looks for no slices: the mesh itself says what lies inside an NVLink domain.
    """
    return {"ici_fsdp_parallelism": 1, "dcn_data_parallelism": 1} | {
        f"ici_{name}_parallelism": size for name, size in mesh.shape.items()
    }


def _whole_mesh(mesh: DescribedMesh, names: list[str]) -> DescribedMesh:
    """Return the mesh with every axis of MaxText's, in MaxText's order.

    Raises:
        ConfigError: it has another axis.
    """
    if other := [name for name in mesh.axis_names if name not in names]:
        raise ConfigError(f"MaxText has no mesh axis '{other[0]}'.", hint=", ".join(names))
    order = sorted(range(len(mesh.axis_names)), key=lambda n: names.index(mesh.axis_names[n]))
    devices = mesh.devices.transpose(order).reshape([mesh.shape.get(name, 1) for name in names])
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    default = next(iter(mesh.axis_types))
    return DescribedMesh(devices, names, [kinds.get(name, default) for name in names])


def _text(value: Any) -> str:
    """Return a value as MaxText's command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
