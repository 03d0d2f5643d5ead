"""Make a program of MaxText's own unedited training step: its configuration, its model and its `train_step`.

    [program]
    make = "meshkit.integrations.maxtext:make"
    options = { model_name = "llama3-8b", per_device_batch_size = 2, attention = "cudnn_flash_jax" }

The axes of the experiment's mesh have MaxText's names (`data`, `fsdp`, `tensor`, `expert`, ...); MaxText's other axes
have size 1. `make check-maxtext` tests this module with the MaxText of `meshkit[maxtext]`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError, a_type
from meshkit.sharding.mesh import AnyMesh, DescribedMesh, absent_devices
from meshkit.step.given import Program

# Names of MaxText's mesh axes, outermost first.
AXES = ("diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses", "context_autoregressive",
        "tensor", "tensor_sequence", "expert", "autoregressive")  # fmt: skip
# These settings turn off what only a run needs: checkpoints, data and a run's folder.
_OF_A_PLAN = {
    "hardware": "gpu",
    "run_name": "plan",
    "base_output_directory": "unused",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "log_config": False,
}


def make(mesh: AnyMesh, config: str | None = None, **overrides: Any) -> Program:
    """Return MaxText's training step for a mesh of absent or attached GPUs.

    Args:
        mesh: a mesh whose axes have MaxText's names.
        config: a MaxText configuration file; None is MaxText's own `base.yml`.
        overrides: values of the configuration's keys, as on MaxText's command line.

    Returns:
        A program on a mesh with all of MaxText's axes; MaxText itself computes its tokens and model FLOP.

    Raises:
        ConfigError: MaxText is not installed, or an axis is none of MaxText's.
    """
    try:
        from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
        from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
        from maxtext.utils import maxtext_utils, sharding  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        hint = "pip install 'meshkit[plan,maxtext]'"
        raise ConfigError(f"MaxText cannot be imported: {e}.", hint=hint) from None
    import jax
    from flax.core.spmd import logical_axis_rules

    said = {**_OF_A_PLAN, **_parallelism(mesh), **overrides}
    absent = absent_devices(list(mesh.devices.flat)) if isinstance(mesh, DescribedMesh) else contextlib.nullcontext()
    with absent:
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

    abstract: Any = whole if isinstance(whole, DescribedMesh) else whole.abstract_mesh

    @functools.wraps(step)
    def train_step(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(abstract), logical_axis_rules(made.logical_axis_rules):
            return step(*args)

    jitted = jax.jit(train_step, in_shardings=ins, out_shardings=outs, static_argnums=static, donate_argnums=donated)
    return Program(
        jitted,
        arguments,
        tokens=made.global_batch_size_to_train_on * made.max_target_length,
        model_flops=teraflops * 1e12 * mesh.size,
    )


def _base_file() -> str:
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]

    return str(Path(pyconfig.__file__).with_name("base.yml"))


def _parallelism(mesh: AnyMesh) -> dict[str, int]:
    """Return MaxText's keys for the sizes of a mesh.

    All sizes are `ici`, for which MaxText looks for no slices: the mesh already places axes inside NVLink domains.
    """
    ones = {f"{link}_{key}_parallelism": 1 for link in ("ici", "dcn") for key in map(_key, AXES)}
    return ones | {f"ici_{_key(name)}_parallelism": size for name, size in mesh.shape.items()}


def _key(axis: str) -> str:
    return {"stage": "pipeline"}.get(axis, axis)


def experiment_table(config: str | None, settings: Sequence[str], cluster: Cluster) -> dict[str, Any]:
    """Return an experiment for a configuration of MaxText's, whose `ici` and `dcn` integers give the mesh.

    Args:
        config: a MaxText configuration file; None is MaxText's own `base.yml`.
        settings: overrides of the configuration, each `key=value`.
        cluster: the `ici` integers divide the GPUs of an NVLink domain, and the `dcn` integers divide the number of
            domains. One integer of each kind may be -1.

    Raises:
        ConfigError: a file that is no such configuration, or sizes that are not the cluster's.
    """
    overrides = dict(_setting(text) for text in settings)
    said = {**(_read(Path(config)) if config else {}), **overrides}
    places = {"nvlink": ("ici", "fsdp"), "infiniband": ("dcn", "data")}
    mesh: dict[str, dict[str, Any]] = {}
    for link, (prefix, filling) in places.items():
        for name in AXES:
            size = said.get(f"{prefix}_{_key(name)}_parallelism", -1 if name == filling else 1)
            if not isinstance(size, int) or (size < 1 and size != -1):
                raise ConfigError(f"{prefix}_{_key(name)}_parallelism is {size!r}, not a number of GPUs, nor -1.")
            if size != 1:
                mesh.setdefault(name, {})[link] = "fill" if size == -1 else size
    ordered = {name: mesh[name] for name in AXES if name in mesh}
    resolved = MeshSpec.parse(ordered).resolve(cluster)
    options = {key: value for key, value in overrides.items() if not key.startswith(("ici_", "dcn_"))}
    return {
        "mesh": {axis.name: axis.to_plain() for axis in resolved.axes if axis.size > 1},
        "program": {
            "make": f"{__name__}:make",
            "options": ({"config": str(Path(config).resolve())} if config else {}) | options,
        },
    }


def _read(path: Path) -> dict[str, Any]:
    """Return the keys of a MaxText configuration, including those of its base files in the same folder."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"{path} cannot be read: {str(e).splitlines()[0]}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no configuration of MaxText's: it holds {a_type(found)}.", hint="key: value")
    base = path.parent / str(found.get("base_config") or "")
    return {**(_read(base) if base.is_file() and base != path else {}), **found}


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"'{text}' is no key and value.", at="--set", hint="--set ici_fsdp_parallelism=8")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        return key, value


def _whole_mesh(mesh: AnyMesh, names: list[str]) -> AnyMesh:
    """Return the mesh with all of MaxText's axes, in MaxText's order; raise ConfigError for any other axis."""
    if other := [name for name in mesh.axis_names if name not in names]:
        raise ConfigError(f"MaxText has no mesh axis '{other[0]}'.", hint=", ".join(names))
    order = sorted(range(len(mesh.axis_names)), key=lambda n: names.index(mesh.axis_names[n]))
    devices = mesh.devices.transpose(order).reshape([mesh.shape.get(name, 1) for name in names])
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    default = next(iter(mesh.axis_types))
    made: Any = type(mesh)
    return made(devices, tuple(names), axis_types=tuple(kinds.get(name, default) for name in names))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
