"""Compile operations that partition themselves (`jax.custom_partitioning`) for GPUs that this machine does not have.

    parent: jax lowers calls in lowered_for(mesh), as if devices were attached -> key of each call -> pickled callback
    child:  restored(calls, mesh) registers the callbacks, which answer XLA with the child's compile-only devices

XLA calls the operation's partition callback while it partitions the program, and that happens in the child process.
jax's cuDNN attention and scaled matmuls are such operations, and so are functions that a user decorates.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax._src import custom_partitioning, dispatch
from jax._src.interpreters import mlir
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext, parse_flatten_op_sharding
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshkit.errors import ProgramError
from meshkit.sharding.mesh import DescribedMesh

_PRIMITIVE = custom_partitioning.custom_partitioning_p
# jax's table of lowering rules is global. Without the lock, a thread could restore the rule that another one has set.
_LOWERING = threading.RLock()


@contextmanager
def lowered_for(mesh: DescribedMesh) -> Iterator[dict[str, bytes]]:
    """Make jax lower `custom_partitioning` operations without devices.

    Yields:
        Key of each call in the program -> its callback, static arguments and trees, pickled.

    Raises:
        ProgramError: a callback cannot be sent to the compiler process.
    """
    with _LOWERING:
        yield from _lowered_for(mesh)


def _lowered_for(mesh: DescribedMesh) -> Iterator[dict[str, bytes]]:
    calls: dict[str, bytes] = {}
    entry = mlir._lowerings[_PRIMITIVE]
    original: Any = entry.rule

    def rule(ctx: Any, *values: Any, **params: Any) -> Any:
        inside = ctx.module_context.axis_context
        if isinstance(inside, SPMDAxisContext) and set(inside.manual_axes) == set(inside.mesh.axis_names):
            return original(ctx, *values, **params)
        attached = ShardingContext(mesh.size, tuple(mesh.devices.flat), mesh)
        # jax.export refuses keepalives for callbacks. They are dropped, since the child calls these callbacks.
        outer = ctx.module_context.replace(axis_context=attached, keepalives=[])
        results = original(ctx.replace(module_context=outer), *values, **params)
        if mesh.size > 1:
            key = _record(calls, params, params["call"].jaxpr.debug_info.func_src_info)
            results[0].owner.attributes["backend_config"] = mlir.ir.StringAttr.get(key)
        return results

    needing = _PRIMITIVE in dispatch.prim_requires_devices_during_lowering
    dispatch.prim_requires_devices_during_lowering.discard(_PRIMITIVE)
    mlir._lowerings[_PRIMITIVE] = dataclasses.replace(entry, rule=rule)
    try:
        yield calls
    finally:
        mlir._lowerings[_PRIMITIVE] = entry
        if needing:
            dispatch.prim_requires_devices_during_lowering.add(_PRIMITIVE)


def _record(calls: dict[str, bytes], params: Mapping[str, Any], name: str) -> str:
    """Add a call to `calls` and return its key, a digest of its content, so that equal programs have equal bytes."""
    import cloudpickle

    kept = {key: params[key] for key in ("partition", "static_args", "in_tree", "out_tree", "decode_shardings")}
    try:
        said = cloudpickle.dumps({**kept, "name": name})
    except Exception as e:
        raise ProgramError(
            f"the partition callback of {name} cannot be sent to the process that compiles: {type(e).__name__}: "
            f"{str(e)[:200]}.",
            hint="a callback at the top level of a Python module, which closes over no arrays or devices",
        ) from e
    key = f"meshkit:{hashlib.sha256(said).hexdigest()[:32]}"
    calls[key] = said
    return key


class Refused(Exception):
    """The partition callback of an operation raised an exception; the message has the name and the exception."""


def refusal_of(said: str) -> str | None:
    """Return the sentence about a `Refused` that an error text of XLA contains; None for other failures."""
    found = re.search(rf"^{Refused.__name__}: (.*)$", said, re.MULTILINE)
    line = re.search(r"Suspected Python Code Location:\s+(\S+?:\d+)", said)
    return found and found[1].rstrip(".") + (f" (at {line[1]})" if line else "")


def _partition(name: str, partition: Callable[..., Any], *args: Any) -> Any:
    """Call a partition callback; if it raises, raise an error that names the operation."""
    try:
        return partition(*args)
    except Exception as e:
        raise Refused(f"the partition callback of {name} raised an error: {e}") from None


def restored(calls: Mapping[str, bytes], mesh: Mesh) -> list[Any]:
    """Register the partition callbacks of a program in this process.

    Args:
        calls: the result of `lowered_for`, from a process of the same user, since unpickling runs code.
        mesh: a mesh of compile-only devices.

    Returns:
        Objects that the caller must keep alive until the program is compiled.
    """
    import pickle

    devices = tuple(mesh.devices.flat)

    def sharding_of(described: Any, ndim: int, *, decode: bool) -> Any:
        if described is None:
            return None
        if not decode:
            from jax._src.sharding_impls import GSPMDSharding

            return GSPMDSharding(devices, described)
        spec = parse_flatten_op_sharding(described, mesh)[0]
        return NamedSharding(mesh, PartitionSpec(*spec, *(None,) * (ndim - len(spec))))

    context = types.SimpleNamespace(platforms=("cuda",), backend=None)
    kept = []
    for key, said in calls.items():
        call = pickle.loads(said)
        decode, name, partition = (call.pop(part) for part in ("decode_shardings", "name", "partition"))
        info = custom_partitioning._ShardingCallbackInfo(
            propagate_user_sharding=None,
            to_mesh_pspec_sharding=lambda described, ndim, decode=decode: sharding_of(described, ndim, decode=decode),
            infer_sharding_from_operands=None,
            module_context=context,
            mesh=mesh,
            partition=functools.partial(_partition, name, partition),
            **call,
        )
        custom_partitioning._sharding_callbacks[key.encode()] = info
        kept.append(info)
    return kept
