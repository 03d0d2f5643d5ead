"""Lower a function for GPUs that this machine does not have, to bytes that another process can compile.

    step, abstract arguments -> export_for_cuda -> Exported -> compiled by program.py

Tracing and lowering need no GPU. Code that would query one (cuDNN attention) gets its answers from the cluster's
description, and so does the compiler (`target_config`). The FLOP of the traced program are later compared with those of
the compiled program.

    nnx.jit'ed or plain step, (model, optimizer, batch) -> over_arrays -> pure function of numbered arrays

A step changes its nnx modules in place and need not return them, so `over_arrays` makes the changed arrays outputs.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax import export
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshkit.compile.partitioned import lowered_for
from meshkit.compile.traced import TracedFlops, dead_updates, traced_flops
from meshkit.config.cluster import Cluster, Gpu
from meshkit.errors import ConfigError, ProgramError
from meshkit.sharding.mesh import AnyMesh, DescribedMesh

# The compiler queries the versions of the libraries that it would call at run time. None of them is installed, so these
# are the versions that jaxlib 0.11 and 0.12 wheels are built against.
_VERSIONS = {"driver_version": "13.0.0", "runtime_version": "12.9.0", "compile_time_toolkit_version": "12.9.0"}
# The first release of cuDNN that computes attention with a `score_mod`. jax and the compiler get the same version.
_CUDNN = (9, 13, 0)
CUDNN_NUMBER = 10_000 * _CUDNN[0] + 100 * _CUDNN[1] + _CUDNN[2]  # cuDNN's encoding of its version
# Custom calls that jax.export refuses by default because a later backend may change them. Here they are allowed, since
# the program is compiled at once.
_ALLOWED_CALLS = (
    *(
        f"__cudnn$fmha{scores}{dropout}{backward}"
        for scores in ("Softmax", "ScaleBiasSoftmax")
        for dropout in ("", "Dropout")
        for backward in ("", "Backward")
    ),
    "__cudnn$fmhaSoftmaxF8",
    "__cudnn$fmhaSoftmaxBackwardF8",
    "__op$block_scaled_dot",
    "__gpu$xla.gpu.triton",
    "CustomSPMDPartitioning",
    "mosaic_gpu_v2",
    "ragged_all_to_all",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
)
# Parts of jax's error when an operation (a Python callback) needs the attached backend but is lowered for another one.
_NEEDS_GPU = ("require devices", "different from the lowering platform")
# Parts of jax's errors when the shardings of one program are on several meshes.
_OTHER_MESH = re.compile(
    r"does not match the device assignment size: (\d+)|Mesh for all inputs should be equal|should match the aval mesh"
)


@dataclass(frozen=True)
class Exported:
    """A program for the compiler process: its bytes, and properties that jax.export does not store."""

    program: bytes
    donated: list[int]
    arguments: list[dict[str, Any] | None]
    flops: TracedFlops | None = None
    """None if they cannot be counted."""
    dead_updates: tuple[str, ...] = ()
    """See `traced.dead_updates`."""
    partitioned: Mapping[str, bytes] = field(default_factory=dict)
    """See `partitioned.lowered_for`."""
    carried: tuple[tuple[int, int], ...] = ()
    """See `_carried`."""


def export_for_cuda(step: Callable[..., Any], args: Sequence[Any], mesh: DescribedMesh, cluster: Cluster) -> Exported:
    """Return a function lowered for CUDA in this process; array leaves become arguments, other leaves constants.

    Args:
        step: a function, jitted or not.
        args: pytrees; their `jax.ShapeDtypeStruct`s are the program's arrays.
        mesh: the mesh of the shardings. If nothing in the program mentions it, every GPU runs the whole program.
        cluster: its description replaces an attached GPU when jax queries one.

    Raises:
        ProgramError: it cannot be lowered without GPUs, because it calls back into Python, has attention outside of a
            manual shard_map, is on another mesh, or changes a module that is not among its arguments.
    """
    jitted = step if hasattr(step, "trace") else jax.jit(step)
    within, tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    leaves = [leaf for _, leaf in within]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    arrays = [leaves[i] for i in places]

    def exported_step(*values: Any) -> tuple[Any, ...]:
        filled = list(leaves)
        for i, value in zip(places, values):
            filled[i] = value
        return tuple(jax.tree.leaves(jitted(*jax.tree.unflatten(tree, filled))))

    with lowering_for(cluster), lowered_for(mesh) as partitioned, _clear_errors(mesh):
        traced = jitted.trace(*args)
        infos = jax.tree.leaves(traced.args_info)
        of_arrays = [infos[i] for i in places] if len(infos) == len(leaves) else infos  # static arguments have no info
        donated = [i for i, info in enumerate(of_arrays) if info.donated]
        exported = _export(exported_step, arrays)
        if exported.nr_devices != mesh.size:  # nothing in the program mentions the mesh: every GPU runs all of it
            whole = NamedSharding(mesh, PartitionSpec())
            arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in arrays]
            exported = _export(exported_step, arrays)
    arguments = [_describe_sharding(a.sharding) for a in arrays]
    flops, dead = traced_flops(traced.jaxpr), dead_updates(traced.jaxpr)
    carried = _carried([within[i] for i in places], jax.tree_util.tree_flatten_with_path(traced.out_info)[0])
    return Exported(bytes(exported.serialize()), donated, arguments, flops, dead, partitioned, carried)


def _carried(arrays: Sequence[tuple[tuple, Any]], outputs: Sequence[tuple[tuple, Any]]) -> tuple[tuple[int, int], ...]:
    """Return pairs of numbers: an array of an argument, and the output that is its new value.

    The new value of an argument is the largest part of the output tree (the whole, a child or a grandchild) in which
    every array has the path, shape and type of an array of the argument.

    Args:
        arrays: the arrays of all arguments with their paths; the first key of a path is the argument's number.
        outputs: the outputs of the step with their paths.
    """

    def by_path(found: Sequence[tuple[tuple, Any]], above: int) -> dict[tuple, dict[tuple, tuple[int, Any]]]:
        parts: dict[tuple, dict[tuple, tuple[int, Any]]] = {}
        for number, (path, leaf) in enumerate(found):
            if len(path) >= above:
                parts.setdefault(path[:above], {})[path[above:]] = number, (leaf.shape, leaf.dtype)
        return parts

    given_back = [part for above in range(3) for part in by_path(outputs, above).values()]
    pairs: list[tuple[int, int]] = []
    for argument in by_path(arrays, 1).values():
        alike = [
            p for p in given_back if all(argument.get(path, (0, None))[1] == kind for path, (_, kind) in p.items())
        ]
        pairs += [(argument[path][0], number) for path, (number, _) in max(alike, key=len, default={}).items()]
    return tuple(pairs)


def _export(step: Callable[..., Any], arrays: Sequence[jax.ShapeDtypeStruct]) -> export.Exported:
    """Export for CUDA. Allow each custom call that jax.export refuses, since the program is compiled at once."""
    allowed = set(_ALLOWED_CALLS)
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in sorted(allowed)]
        try:
            return export.export(jax.jit(step, keep_unused=True), platforms=["cuda"], disabled_checks=checks)(*arrays)
        except ValueError as e:
            pattern = r"custom_call @\"?([\w$.]+)|['\"]([\w$.]+)['\"]"
            found = re.findall(pattern, str(e)) if "compatibility" in str(e) else []
            named = {name for pair in found for name in pair if name}
            if not named - allowed:
                raise
            allowed |= named


@contextmanager
def _clear_errors(mesh: DescribedMesh) -> Iterator[None]:
    """Turn jax's errors about programs that cannot be lowered without GPUs into a ProgramError."""
    try:
        yield
    except AssertionError as e:
        raise ProgramError(
            f"the program holds an operation that can only be lowered with GPUs attached: {str(e)[:300]}",
            hint="cuDNN attention inside meshkit.sharding.shard_over(...) or jax.shard_map",
        ) from e
    except TraceContextError as e:
        raise ProgramError(
            "the step changes an nnx module that is not among its arguments: it closes over it, or nnx.cached_partial "
            f"bound it ({str(e).split(' (http')[0]}).",
            hint="mk.plan(step, (model, optimizer, batch), ...) with a step that takes its modules as arguments",
        ) from e
    except ValueError as e:
        if other := _OTHER_MESH.search(str(e)):
            size = f" of {other[1]} devices" if other[1] else ""
            axes = " x ".join(f"{name} {n}" for name, n in mesh.shape.items())
            raise ProgramError(
                f"the step closes over another mesh{size}; it is planned for {axes}, {mesh.size} GPUs.",
                hint="a function that makes the step for a mesh, def make_step(mesh): ..., and "
                "mk.plan(make_step(mesh), args, mesh=mesh, ...) with arguments on that mesh",
            ) from e
        if not any(mark in str(e) for mark in _NEEDS_GPU):
            raise
        raise ProgramError(
            "the program calls back into Python (jax.debug.print, io_callback, pure_callback), and no callback can be "
            "compiled for absent GPUs.",
            hint="the step without its callbacks",
        ) from e


def _describe_sharding(sharding: Any) -> dict[str, Any] | None:
    if sharding is None:
        return None
    spec = [list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec]
    return {"spec": spec, "memory_kind": sharding.memory_kind}


@contextmanager
def lowering_for(cluster: Cluster) -> Iterator[None]:
    """Make jax trace and lower cuDNN attention, scaled matmuls and Pallas kernels for the cluster's absent GPU.

    While jax traces, it queries properties of the attached GPU and of cuDNN. In this context the cluster's description
    and `CUDNN_NUMBER` answer these queries.
    """
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as attention
    from jax._src.cudnn import scaled_matmul_stablehlo as scaled

    answers = [*_attention_answers(cluster, attention), *_pallas_answers(cluster)]
    saved = [(module, name, getattr(module, name)) for module, name, _ in answers if hasattr(module, name)]
    needing = dispatch.prim_requires_devices_during_lowering
    removed = {p for module in (attention, scaled) for p in vars(module).values() if isinstance(p, Primitive)} & needing
    for module, name, answer in answers:
        if hasattr(module, name):
            setattr(module, name, answer)
    needing -= removed
    try:
        yield
    finally:
        needing |= removed
        for module, name, function in saved:
            setattr(module, name, function)


_Answer = tuple[Any, str, Callable[..., Any]]


def _attention_answers(cluster: Cluster, attention: Any) -> list[_Answer]:
    capability = cluster.gpu.compute_capability or (0, 0)

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(x) for x in text.split("."))

    return [
        (attention, "check_cudnn_version", lambda: CUDNN_NUMBER),
        (attention, "check_compute_capability", lambda text: capability >= numbers(text)),
        (attention, "is_cuda_compute_capability_equal", lambda text: capability == numbers(text)),
    ]


def _pallas_answers(cluster: Cluster) -> list[_Answer]:
    """Return the answers to the queries of Pallas' Triton backend; older jax has no such module."""
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        return []
    major, minor = cluster.gpu.compute_capability or (0, 0)
    info = gpu_info.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)
    return [(gpu_info, "get_gpu_info", lambda: info)]


def on_own_stack[Result](work: Callable[[], Result]) -> Result:
    """Run `work` in a new thread and return its result or raise its exception.

    jax writes the call stack of each operation into the program, from the outermost call on, and the cache of compiled
    programs compares every byte. A new thread has an empty stack, so an experiment gives the same program whether the
    command line, a search or a notebook plans it.

    Settings of jax that hold for one thread (`jax.set_mesh`, `jax.enable_x64` as contexts) are not passed on. Ctrl-C
    interrupts the caller at once, while the thread continues until the process ends.
    """
    returned: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, name="meshkit-plan", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]


def target_config(gpu: Gpu, memory_bytes: int | None = None) -> str:
    """Return the text of a `GpuTargetConfigProto` that describes one GPU of the catalog to the compiler.

    OpenXLA has longer texts in xla/backends/gpu/target_config/specs. A test checks that all fields that both have are
    equal.

    Args:
        gpu: a GPU of the catalog.
        memory_bytes: replaces the GPU's own memory; XLA takes a share of it as its limit.

    Raises:
        ConfigError: the catalog entry is no NVIDIA GPU.
    """
    if gpu.compute_capability is None:
        raise ConfigError(
            f"'{gpu.key}' is no GPU, so no GPU program can be compiled for it.", hint="a cluster with GPUs"
        )
    major, minor = gpu.compute_capability
    t = gpu.target
    accelerated = " feature_extension: ACCELERATED_FEATURES" if (major, minor) >= (9, 0) else ""
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": int(t["shared_memory_per_block_bytes"]),
        "shared_memory_per_core": int(t["shared_memory_per_sm_bytes"]),
        "shared_memory_per_block_optin": int(t["shared_memory_per_block_optin_bytes"]),
        "threads_per_core_limit": int(t["max_threads_per_sm"]),
        "core_count": gpu.sms,
        "fpus_per_core": int(t["fpus_per_sm"]),
        "registers_per_core_limit": int(t["registers_per_sm"]),
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "memory_bandwidth": int(gpu.memory_bytes_per_s),
        "l2_cache_size": int(gpu.l2_bytes),
        "clock_rate_ghz": round(gpu.clock_hz / 1e9, 4),
        "device_memory_size": int(gpu.memory_bytes) if memory_bytes is None else memory_bytes,
        "device_address_bits": 64,
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}")
    lines.append('  device_vendor: "NVIDIA Corporation"')
    lines.append(f'  platform_version: "Compute Capability {major}.{minor}"')
    lines.append(f'  name: "{gpu.name}"')
    lines += [f'  {name}: "{value}"' for name, value in _VERSIONS.items()]
    lines.append(f'  dnn_version: "{".".join(map(str, _CUDNN))}"')
    if gpu.nvlink_links:
        lines.append(f"  device_interconnect_info {{ active_links: {gpu.nvlink_links} }}")
    body = "\n".join(lines)
    return f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\ndevice_description_str: "{gpu.name}"\n'


def topology_name(cluster: Cluster) -> str:
    """Return `partitions x hosts x GPUs` of a cluster, in the syntax of PJRT's compile-only GPU topology.

    A partition of this topology is a set of GPUs that NVLink connects. With attached GPUs, each host or rack is one
    (topology_util.cc). XLA's scheduler learns from the partitions whether a group is inside an NVLink domain, where its
    table of collectives applies, or spans the network.
    """
    used, hosts = cluster.gpus_used_per_domain, cluster.hosts_used_per_domain
    if used % hosts:
        hosts = 1
    return f"{cluster.num_nvlink_domains}x{hosts}x{used // hosts}"


class Traceable(NamedTuple):
    """A step over arrays, and its abstract arguments."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    given: list[Any]
    """The caller's array for each abstract array in `args`, in the same order."""


def traceable(step: Callable[..., Any], args: Sequence[Any], mesh: AnyMesh, absent: DescribedMesh) -> Traceable:
    """Return a step and abstract arguments that can be traced for a described mesh.

    The shardings of the arguments move from `mesh` to `absent`. They stay on `mesh` if it has explicit axes, because
    then the types inside the program name this very mesh.

    Args:
        step: under `nnx.jit`, plain, or under `jax.jit`.
        args: modules, arrays and other values; an array keeps everything but its values.
        mesh: the mesh of the arguments' shardings.
        absent: the described mesh, with the same axes.

    Raises:
        ConfigError: `args` is not a tuple or list.
    """
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args must be a tuple of arguments, not {type(args).__name__}.", hint="args=(x,)")
    step, args = over_arrays(step, args)
    target = mesh if AxisType.Explicit in mesh.axis_types else absent

    def describe_leaf(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        given = getattr(leaf, "sharding", None)
        sharding = None
        if isinstance(given, NamedSharding):
            sharding = NamedSharding(target, given.spec, memory_kind=given.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return Traceable(step, jax.tree.map(describe_leaf, args), list(filter(_is_array, jax.tree.leaves(args))))


def over_arrays(step: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the step as a pure function of arrays, and the arguments of that function.

    The function takes two dicts of arrays by number: the arrays that it may overwrite, and the others. It returns the
    results of the step, and a dict of the arrays that the step changed in its modules. A step under `nnx.jit` changes
    all arrays of its modules, as in flax's own program, because `nnx.jit` in its default mode returns all of them.

    A step under `jax.jit`, and a plain step without modules, are already functions of arrays and are returned as they
    are.

    Args:
        step: under `nnx.jit`, plain, or under `jax.jit`.
        args: modules, optimizers and similar objects, abstract or concrete, and other values.
    """
    if isinstance(step, functools.partial) and _is_of_nnx(step.func) and not step.keywords:
        step, args = step.func, (*step.args, *args)  # how flax binds a method under `nnx.jit`
    of_nnx = _is_of_nnx(step)
    if hasattr(step, "trace") and not of_nnx:
        return step, tuple(args)
    is_module = nnx.graphlib.is_graph_node if of_nnx else lambda leaf: isinstance(leaf, nnx.Pytree)
    leaves, tree = jax.tree.flatten(tuple(args), is_leaf=is_module)
    modules = [i for i, leaf in enumerate(leaves) if is_module(leaf)]
    if not modules and not of_nnx:
        return step, tuple(args)
    # Split all modules together, so that a variable which two of them share stays shared. The first key of a path is
    # then an index into `modules`.
    graph, state = nnx.split([leaves[i] for i in modules])
    within, state_tree = jax.tree_util.tree_flatten_with_path(state)
    plain = [i for i, leaf in enumerate(leaves) if not is_module(leaf) and _is_array(leaf)]
    owners = [modules[path[0].key] for path, _ in within] + plain
    arrays = [leaf for _, leaf in within] + [leaves[i] for i in plain]
    overwritten = _leaves_of(args, is_module, _donated(step) if of_nnx else ())
    given = [n for n, owner in enumerate(owners) if owner in overwritten]
    kept = [n for n, owner in enumerate(owners) if owner not in overwritten]

    def step_over_arrays(donated: dict[int, Any], others: dict[int, Any]) -> tuple[list[Any], dict[int, Any]]:
        values = [value for _, value in sorted((donated | others).items())]
        merged = nnx.merge(graph, jax.tree_util.tree_unflatten(state_tree, values[: len(within)]))
        filled = list(leaves)
        for i, leaf in [*zip(modules, merged), *zip(plain, values[len(within) :])]:
            filled[i] = leaf
        returned = step(*jax.tree.unflatten(tree, filled))
        entered = {id(value) for value in values}
        left = enumerate(jax.tree.leaves(nnx.split(merged)[1]))
        return jax.tree.leaves(returned), {n: leaf for n, leaf in left if id(leaf) not in entered}

    pure = jax.jit(step_over_arrays, donate_argnums=0)
    return pure, ({n: arrays[n] for n in given}, {n: arrays[n] for n in kept})


def _is_of_nnx(step: Any) -> bool:
    """Return whether `nnx.jit` made the step. A wrapper by `functools.wraps` has `jitted_fn`, but not `trace`."""
    return hasattr(step, "trace") and hasattr(step, "jitted_fn")


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _donated(step: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that a step under `nnx.jit` may overwrite (a private field of flax)."""
    return step.jitted_fn._jit_info.donate_argnums


def _leaves_of(args: Sequence[Any], is_leaf: Callable[[Any], bool], places: Sequence[int]) -> set[int]:
    """Return the numbers of the leaves (counted over all arguments) of the arguments at these positions."""
    owners = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg, is_leaf=is_leaf)]
    return {i for i, owner in enumerate(owners) if owner in places}
