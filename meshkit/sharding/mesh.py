"""Make a jax mesh from a MeshSpec and a Cluster, of attached devices in the cluster's order or of described devices.

The cluster's order is its GPU index, which counts one NVLink domain after another. Which attached GPUs share a domain
is read from the hardware (NVML's fabric identity), never guessed from processes.

Devices run asynchronously, so a step that runs out of memory raises its error later, where the program waits for values
(metrics, a checkpoint, a capture). Therefore `device_memory` encloses whole runs, not single calls.
"""

from __future__ import annotations

import functools
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

import jax
import numpy as np
from jax._src.mesh import abstract_mesh_context_manager, device_context, thread_resources
from jax.sharding import AbstractMesh, AxisType

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.config.sections import ProgramTrainTable, TrainTable
from meshkit.config.toml import did_you_mean
from meshkit.discover import LiveProbe, domain_identities, identity_record, local_identities
from meshkit.discover.probe import has_driver
from meshkit.distributed.environment import MEMORY_FRACTIONS
from meshkit.distributed.join import Agreement, jax_runtime
from meshkit.errors import ConfigError, MeshkitError, RunError, a_type, check_kinds
from meshkit.runs.limits import limits_of_environment
from meshkit.units import GIB, KIB, MIB, TIB, format_bytes

_FABRIC_S = 60.0  # Time limit for all processes to report the NVLink domains of their devices.
# Two cores that run eight virtual devices starve XLA:CPU's rendezvous for minutes; its defaults (20 s warn, 40 s abort)
# would kill a healthy run.
_CPU_WARN_S, _CPU_S, _LONGEST_S = 300, 1200, 10**6
# XLA's time limits on GPUs for a program's execution and NCCL's rendezvous: off by default, in jaxlib from 0.12 on.
_GPU_FLAGS = ("xla_gpu_execution_terminate_timeout", "xla_gpu_nccl_termination_timeout_seconds")
_GPU_FLAGS_SINCE = (0, 12)
_DEVICE_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_EXHAUSTED = re.compile(r"out[ _]of[ _]memory|RESOURCE_EXHAUSTED: .*\b(allocat|memory)", re.IGNORECASE)
_ASKED = re.compile(r"allocat\w+ ([\d.]+) ?(\w+)")
_PROGRAM = re.compile(r"executable_name='(\w+)'")
_UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}  # XLA writes these units, or "bytes".


@dataclass(frozen=True)
class DescribedDevice:
    """A device of a described cluster, in no real machine, with the fields of a jax device that placement needs."""

    id: int
    """The cluster's GPU index."""
    process_index: int
    """The host that would run it (one process a host)."""
    domain: int
    device_kind: str
    """The vendor's name, as jax prints it."""
    compute_capability: str
    """`"9.0"`; empty for a CPU."""
    platform: str
    """`gpu` or `cpu`."""


def describe_devices(cluster: Cluster) -> tuple[DescribedDevice, ...]:
    """Return the devices of a cluster that is not attached, by GPU index."""
    check_kinds(describe_devices, cluster=cluster)
    capability = ".".join(map(str, cluster.gpu.compute_capability or ()))
    platform = "cpu" if cluster.is_cpu else "gpu"
    return tuple(
        DescribedDevice(i, cluster.host_of(i), cluster.domain_of(i), cluster.gpu.name, capability, platform)
        for i in range(cluster.num_gpus)
    )


class DescribedMesh(AbstractMesh):
    """A mesh of absent GPUs, with which jax traces and lowers.

    It is an `AbstractMesh`, so `NamedSharding` and `with_sharding_constraint` accept it. It also has the described
    devices, with their places, in `devices`, an object array of the mesh's shape. Two described meshes are equal only
    if they are the same object.

    `jax.set_mesh(mesh)`, as a call or a context, `jax.sharding.use_abstract_mesh` and `with mesh:` accept it.
    """

    _devices: np.ndarray

    def __new__(
        cls, devices: np.ndarray, axis_names: Sequence[str], axis_types: Sequence[AxisType] | None = None
    ) -> DescribedMesh:
        mesh = object.__new__(cls)
        values = {
            "axis_sizes": devices.shape,
            "axis_names": tuple(axis_names),
            "axis_types": (AxisType.Auto,) * devices.ndim if axis_types is None else tuple(axis_types),
            "abstract_device": None,
            "size": devices.size,
            "_devices": devices,
        }
        for name, value in values.items():
            object.__setattr__(mesh, name, value)
        _let_jax_set_it()
        return mesh

    @property
    def devices(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._devices

    def placement(self, cluster: Cluster) -> Placement:
        """Return partition id -> GPU, NVLink domain and host."""
        gpus = np.array([d.id for d in self._devices.flat])
        return Placement.of_gpus(self.axis_names, self._devices.shape, gpus, cluster)

    def __enter__(self) -> DescribedMesh:
        # jax refuses jax.set_mesh inside a jitted function, where `with mesh:` must work.
        context = jax.sharding.use_abstract_mesh(self)
        context.__enter__()
        _entered.stack.append((context, thread_resources.env))
        # Trainers read the mesh from here to constrain activations.
        thread_resources.env = thread_resources.env.with_mesh(cast("Any", self))
        return self

    def __exit__(self, *error: Any) -> None:
        context, thread_resources.env = _entered.stack.pop()
        context.__exit__(*error)

    def __reduce__(self) -> tuple[Any, ...]:
        return DescribedMesh, (self._devices, self.axis_names, self.axis_types)

    def __repr__(self) -> str:
        shape = ", ".join(f"'{n}': {s}" for n, s in zip(self.axis_names, self.axis_sizes))
        return f"DescribedMesh({shape}; {self.size} x {self._devices.flat[0].device_kind}, absent)"


AnyMesh = jax.sharding.Mesh | DescribedMesh


@contextmanager
def absent_devices(devices: Sequence[DescribedDevice]) -> Iterator[None]:
    """Replace `jax.devices()`, `jax.make_mesh` and the like by the cluster's devices inside a block.

    Code that makes its own mesh then makes a mesh of absent GPUs. Names that the code imported from jax before
    (`from jax import devices`) stay jax's own. A mesh that the code sets by `jax.set_mesh` is unset after the block.
    """
    devices = sorted(devices, key=lambda device: device.id)
    of_jax = jax.sharding.Mesh.__new__

    def new_mesh(cls: Any, devices: Any, *args: Any, **kwargs: Any) -> Any:
        table = np.asarray(devices, dtype=object)
        if table.size and isinstance(table.flat[0], DescribedDevice):
            return DescribedMesh(table, *args, **kwargs)
        return of_jax(cls, devices, *args, **kwargs)

    def make_mesh(shape: Sequence[int], names: Sequence[str], axis_types: Any = None, *, devices: Any = devices) -> Any:
        if math.prod(shape) != len(devices):
            asked = f"jax.make_mesh({tuple(shape)}, {tuple(names)})"
            raise ValueError(f"{asked} needs {math.prod(shape)} devices, but {len(devices)} are described")
        types = (AxisType.Explicit,) * len(shape) if axis_types is None else axis_types
        return new_mesh(jax.sharding.Mesh, np.array(devices, dtype=object).reshape(shape), names, axis_types=types)

    answers = {
        "devices": lambda backend=None: list(devices),
        "local_devices": lambda *_, **__: [d for d in devices if d.process_index == 0],
        "device_count": lambda backend=None: len(devices),
        "default_backend": lambda: devices[0].platform,
        "local_device_count": lambda backend=None: sum(d.process_index == 0 for d in devices),
        "make_mesh": make_mesh,
    }
    before = {name: getattr(jax, name) for name in answers}
    contexts = [(context, context.get_local()) for context in (abstract_mesh_context_manager, device_context)]
    for name, answer in answers.items():
        setattr(jax, name, answer)
    jax.sharding.Mesh.__new__ = new_mesh
    try:
        yield
    finally:
        jax.sharding.Mesh.__new__ = of_jax
        for context, value in contexts:
            context.set_local(value)
        for name, answer in before.items():
            setattr(jax, name, answer)


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []


_entered = _Entered()


@functools.cache
def _let_jax_set_it() -> None:
    """Let `jax.set_mesh`, which takes only a `Mesh`, also take described meshes, even where it is already imported."""
    of_jax = jax.set_mesh.__init__

    def set_mesh(self: Any, mesh: Any) -> None:
        absent = isinstance(mesh, DescribedMesh)
        of_jax(self, None if absent else mesh)
        if absent:
            abstract_mesh_context_manager.swap_local(mesh)

    jax.set_mesh.__init__ = set_mesh


def build_mesh(
    spec: MeshSpec,
    cluster: Cluster,
    *,
    devices: Sequence | None = None,
    axis_types: AxisType | Mapping[str, AxisType] = AxisType.Auto,
) -> AnyMesh:
    """Return the mesh of a spec on a cluster, with its axes in the spec's order.

    Args:
        spec: axes with their NVLink and InfiniBand factors; `"fill"` is resolved here.
        devices: devices by GPU index. None takes the attached devices, after a check that their NVLink domains match
            the cluster. `describe_devices(cluster)` makes a mesh of absent GPUs. jax devices are used in the order
            given.
        axis_types: one type for all axes, or a mapping from names to types, in which missing axes are Auto. With
            `jax.sharding.AxisType.Explicit`, shardings are part of the types of arrays, as with `jax.make_mesh`, and
            `constrain` reshards.

    Raises:
        ConfigError: the sizes do not multiply to the cluster, the devices do not match it, or a type names no axis.
    """
    check_kinds(build_mesh, spec=spec, cluster=cluster)
    spec = spec.resolve(cluster)
    types = _axis_types(spec.axis_names, axis_types)
    chosen = attached_devices(cluster) if devices is None else tuple(devices)
    if len(chosen) != cluster.num_gpus:
        raise ConfigError(
            f"the mesh needs {cluster.num_gpus} devices ({spec.shape} over {spec.axis_names}), "
            f"but {len(chosen)} are given."
        )
    table = np.empty(len(chosen), dtype=object)
    table[:] = chosen
    ordered = table[spec.device_order(cluster)]
    if isinstance(chosen[0], DescribedDevice):
        return DescribedMesh(ordered, spec.axis_names, types)
    return jax.sharding.Mesh(ordered, spec.axis_names, axis_types=types)


def described(mesh: AnyMesh, cluster: Cluster) -> DescribedMesh:
    """Return a mesh of the cluster's described GPUs, by index in C order; return a described mesh unchanged.

    The new mesh has the shape and the axes of `mesh`, but not its devices.

    Raises:
        ConfigError: the mesh has more or fewer devices than the cluster.
    """
    if mesh.devices.size != cluster.num_gpus:
        raise ConfigError(
            f"the mesh has {mesh.devices.size} devices, but cluster '{cluster.name}' has {cluster.num_gpus} GPUs.",
            hint="build_mesh(spec, cluster, devices=describe_devices(cluster))",
        )
    if isinstance(mesh, DescribedMesh):
        return mesh
    devices = np.empty(cluster.num_gpus, dtype=object)
    devices[:] = describe_devices(cluster)
    return DescribedMesh(devices.reshape(mesh.devices.shape), mesh.axis_names, mesh.axis_types)


def _axis_types(names: Sequence[str], given: AxisType | Mapping[str, AxisType]) -> tuple[AxisType, ...]:
    if isinstance(given, AxisType):
        return (given,) * len(names)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"axis_types is {a_type(given)}.",
            hint='jax.sharding.AxisType.Explicit, or {"data": jax.sharding.AxisType.Explicit}',
        )
    for name in given:
        if name not in names:
            raise ConfigError(
                f"axis_types names '{name}', which is not an axis of the mesh.", hint=did_you_mean(name, names)
            )
    return tuple(given.get(name, AxisType.Auto) for name in names)


def prepare_platform(cluster: Cluster, *, memory_fraction: float | None = None) -> None:
    """Prepare jax for this cluster before it starts: virtual CPU devices, or the attached GPUs.

    Args:
        memory_fraction: share of a GPU's memory that jax takes at its start (jax's default: 0.75); the environment has
            priority.

    Raises:
        ConfigError: jax has already started with fewer CPU devices than the cluster has.
    """
    if not cluster.is_cpu:
        if not has_driver():  # Without a driver, jax would print the traceback of its CUDA plugin.
            use_no_accelerator()
            return
        _add_flags(gpu_timeouts())
        if memory_fraction is not None and not any(name in os.environ for name in MEMORY_FRACTIONS):
            os.environ[MEMORY_FRACTIONS[0]] = f"{memory_fraction:g}"
        return
    if _backend_started():
        if len(jax.devices("cpu")) < cluster.num_gpus:
            raise ConfigError(
                f"cluster '{cluster.name}' needs {cluster.num_gpus} CPU devices, but jax has already started with "
                f"{len(jax.devices('cpu'))}.",
                hint=f"jax.config.update('jax_num_cpu_devices', {cluster.num_gpus}) before any other use of jax",
            )
        return
    present = _add_flags(cpu_timeouts())
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" not in present:
        processes = jax_runtime().num_processes or 1
        # A lone process keeps a larger number that was set before. In a job, each process has a part of the devices.
        least = jax.config.jax_num_cpu_devices if processes == 1 else 1
        jax.config.update("jax_num_cpu_devices", max(least, cluster.num_gpus // processes))


def cpu_timeouts() -> dict[str, int]:
    """Return flags for XLA's own time limits on CPU devices: 1200 s, or twice meshkit's limit if that is longer."""
    limit_s = max(_CPU_S, math.ceil(min(2 * limits_of_environment().of("step"), _LONGEST_S)))
    return {
        "xla_cpu_collective_call_warn_stuck_timeout_seconds": _CPU_WARN_S,
        "xla_cpu_collective_call_terminate_timeout_seconds": limit_s,
        "xla_cpu_collective_timeout_seconds": limit_s,
    }


def gpu_timeouts() -> dict[str, int | str]:
    """Return flags for XLA's own time limits on GPUs; none if meshkit's limit for a step is off.

    They are twice meshkit's limit, so that meshkit's error, which has more details, comes first.
    """
    limit_s = limits_of_environment().of("step")
    if not math.isfinite(limit_s) or tuple(map(int, version("jaxlib").split(".")[:2])) < _GPU_FLAGS_SINCE:
        return {}
    execution, meeting = _GPU_FLAGS
    return {execution: f"{2 * limit_s:g}s", meeting: math.ceil(2 * limit_s)}


def _add_flags(flags: Mapping[str, int | str]) -> set[str]:
    """Add the flags that XLA_FLAGS does not set yet; return the names that it set before."""
    words = os.environ.get("XLA_FLAGS", "").split()
    present = {word.removeprefix("--").split("=")[0] for word in words}
    words += [f"--{name}={value}" for name, value in flags.items() if name not in present]
    if words:
        os.environ["XLA_FLAGS"] = " ".join(words)
    return present


def use_no_accelerator() -> None:
    """Keep jax on the CPU in a process that only traces and lowers; without effect once jax has started."""
    if not _backend_started():
        jax.config.update("jax_platforms", "cpu")


def attached_devices(cluster: Cluster) -> tuple[Any, ...]:
    """Return the attached devices by the cluster's GPU index, after checking that their NVLink domains match it.

    Raises:
        ConfigError: there are too few devices, the platform is wrong, or the domains are not what the cluster says.
    """
    prepare_platform(cluster)
    if cluster.is_cpu:
        devices = jax.devices("cpu")
        if len(devices) < cluster.num_gpus:
            raise ConfigError(
                f"cluster '{cluster.name}' needs {cluster.num_gpus} devices, but {len(devices)} CPU devices are here.",
                hint=f"a cluster of {len(devices)} devices, or start one process per host",
            )
        return tuple(devices[: cluster.num_gpus])
    devices = [d for d in jax.devices() if d.platform == "gpu"]
    if not devices:
        raise ConfigError(
            f"cluster '{cluster.name}' has {cluster.num_gpus} {cluster.gpu.name}, but no GPU is attached here.",
            hint="`meshkit plan`, which needs no GPU, or --set cluster=cpu8",
        )
    return order_by_domain(devices, _domain_identities(tuple(devices)), cluster)


def order_by_domain(devices: Sequence, identities: Mapping[int, str], cluster: Cluster) -> tuple:
    """Return the devices in GPU-index order, given the NVLink domain of each.

    Args:
        identities: device id -> identity of its NVLink domain.

    Raises:
        ConfigError: the real domains differ from `nvlink_domain_size` and the number of domains.
    """
    members: dict[str, list] = {}
    for d in sorted(devices, key=lambda d: (d.process_index, d.id)):
        members.setdefault(identities[d.id], []).append(d)
    sizes = [len(m) for m in members.values()]
    used, wanted = cluster.gpus_used_per_domain, cluster.num_nvlink_domains
    if len(sizes) < wanted or any(n < used for n in sizes[:wanted]):
        raise ConfigError(
            f"cluster '{cluster.name}' needs {wanted} NVLink domains with {used} GPUs each, but the attached GPUs form "
            f"{len(sizes)} domains of {sizes} GPUs.",
            hint="`hosts`, `gpus_per_host` and `nvlink_domain_size` of the cluster as they are here",
        )
    if max(sizes) > cluster.nvlink_domain_size:
        raise ConfigError(
            f"cluster '{cluster.name}' says that an NVLink domain has {cluster.nvlink_domain_size} GPUs, but the "
            f"attached GPUs form domains of {sizes}.",
            hint=f"nvlink_domain_size = {max(sizes)}, and gpus_used_per_domain to use fewer",
        )
    return tuple(d for m in list(members.values())[:wanted] for d in m[:used])


@functools.cache  # Domains do not change, and the exchange runs once even if processes call unequally often.
def _domain_identities(devices: tuple) -> dict[int, str]:
    """Return device id -> domain identity, gathered over all processes through jax's coordination service."""
    probe, visible = LiveProbe(), os.environ.get("CUDA_VISIBLE_DEVICES")
    boot = (probe.read_file("/proc/sys/kernel/random/boot_id") or "0").strip()
    local = local_identities(probe, host=f"{socket.gethostname()}.{boot}", visible=visible)
    mine = {d.id: local[d.local_hardware_id] for d in devices if d.process_index == jax.process_index()}
    if jax.process_count() == 1:
        return mine
    records = Agreement("fabric").reach("identities", identity_record(mine), list, timeout_s=_FABRIC_S)
    return dict(domain_identities(records, devices=[d.id for d in devices]))


def _backend_started() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bool(bridge and bridge.backends_are_initialized())


@contextmanager
def device_memory(cluster: Cluster, train: TrainTable, file: str, *, hint: str | None = None) -> Iterator[None]:
    """Run the programs of a block, and raise an error with remedies if a device runs out of memory.

    Args:
        train: settings that could reduce the memory.
        hint: remedies; None suggests `meshkit plan`.

    Raises:
        RunError: jax ran out of a device's memory, wherever in the block its error appeared.
    """
    try:
        yield
    except MeshkitError:
        raise
    except Exception as error:
        found: BaseException | None = error
        while found is not None:
            if type(found).__name__ in _DEVICE_ERRORS and is_out_of_memory(str(found)):
                raise too_little_memory(cluster, train, file, str(found), stats=_stats(), hint=hint) from error
            found = found.__cause__ or found.__context__
        raise


def is_out_of_memory(said: str) -> bool:
    return _EXHAUSTED.search(said) is not None


def too_little_memory(
    cluster: Cluster,
    train: ProgramTrainTable,
    file: str,
    said: str,
    *,
    stats: Mapping[str, int] | None = None,
    at: str | None = None,
    hint: str | None = None,
) -> RunError:
    """Return the error of a run that did not fit.

    Args:
        said: XLA's error.
        stats: the device allocator's statistics; without them, its pool is computed from `train.memory_fraction`.
        at: place in a file, by default the file itself.
        hint: remedies; None suggests `meshkit plan`.
    """
    stats = stats or {}
    asked, program = _ASKED.search(said), _PROGRAM.search(said)
    message = f"the device has too little memory for {program[1] if program else 'the run'}"
    if asked:
        message += f", which asked for {format_bytes(float(asked[1]) * _UNITS.get(asked[2], 1))} at once"
    if not cluster.is_cpu:
        pool = stats.get("bytes_limit", int(cluster.gpu.memory_bytes * train.memory_fraction))
        used = f", {format_bytes(stats['bytes_in_use'])} of them in use" if "bytes_in_use" in stats else ""
        name, there = cluster.gpu.name, format_bytes(cluster.gpu.memory_bytes)
        message += f": of the {there} of {name} XLA has {format_bytes(pool)}{used}"
    less = ["a smaller batch", "more recomputation"]
    if isinstance(train, TrainTable):
        less = [] if train.remat == "full" else ['train.remat = "full"']
        less += [f"train.accumulate above {train.accumulate}", f"train.global_batch below {train.global_batch}"]
    remedies = f"`meshkit plan {file}`, which says what makes it fit, such as {', '.join(less)}, "
    remedies += "or more GPUs to shard over"
    return RunError(f"{message}.", at=at or file, hint=hint or remedies)


def _stats() -> Mapping[str, Any] | None:
    """Return the allocator's statistics of this process's first device; None if it has none or cannot be asked."""
    jax = sys.modules.get("jax")
    try:
        return jax and jax.local_devices()[0].memory_stats()
    except Exception:
        return None
