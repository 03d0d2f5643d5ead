"""A function -> its program for GPUs that are not there, as bytes that another process can compile.

    step, abstract arguments -> export_for_cuda -> Exported -> compiled by program.py

Tracing and lowering need no GPU; what would ask one (cuDNN attention) is answered from the cluster's description.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.compile.target import CUDNN_NUMBER
from meshkit.compile.traced import traced_flops
from meshkit.config.cluster import Cluster
from meshkit.errors import ProgramError
from meshkit.sharding.mesh import DescribedMesh

# Custom calls that jax.export refuses by default because their backend may change; ours is compiled at once.
_ALLOWED_CALLS = (
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
    "__cudnn$fmhaSoftmaxDropout",
    "__cudnn$fmhaSoftmaxDropoutBackward",
    "__cudnn$fmhaScaleBiasSoftmax",
    "__cudnn$fmhaScaleBiasSoftmaxBackward",
    "__cudnn$fmhaScaleBiasSoftmaxDropout",
    "__cudnn$fmhaScaleBiasSoftmaxDropoutBackward",
    "__cudnn$fmhaSoftmaxF8",
    "__cudnn$fmhaSoftmaxBackwardF8",
    "__cudnn$blockScaledDot",
    "__gpu$xla.gpu.triton",
    "mosaic_gpu_v2",
    "ragged_all_to_all",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
)
# How jax words that an operation (a Python callback) wants the attached backend while it is lowered for another.
_NEEDS_GPU = ("require devices", "different from the lowering platform")


@dataclass(frozen=True)
class Exported:
    """A program on its way to the child: its bytes, and what jax.export does not carry of each array argument.

    Attributes:
        flops: over all GPUs, as traced; None where they cannot be counted, see `traced_flops`.
    """

    program: bytes
    donated: list[int]
    arguments: list[dict[str, Any] | None]
    flops: float | None = None


def export_for_cuda(step: Callable[..., Any], args: Sequence[Any], mesh: DescribedMesh, cluster: Cluster) -> Exported:
    """A function lowered for CUDA in this process, as a program of its array leaves; other leaves are constants."""
    jitted = step if hasattr(step, "trace") else jax.jit(step)
    leaves, tree = jax.tree.flatten(tuple(args))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    arrays = [leaves[i] for i in places]

    def exported_step(*values: Any) -> tuple[Any, ...]:
        filled = list(leaves)
        for i, value in zip(places, values):
            filled[i] = value
        return tuple(jax.tree.leaves(jitted(*jax.tree.unflatten(tree, filled))))

    with lowering_for(cluster), _clear_errors():
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
    return Exported(bytes(exported.serialize()), donated, arguments, traced_flops(traced.jaxpr))


def _export(step: Callable[..., Any], arrays: Sequence[jax.ShapeDtypeStruct]) -> export.Exported:
    """jax.export for CUDA; a custom call that it does not vouch for is let through, since it is compiled at once."""
    allowed = set(_ALLOWED_CALLS)
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in sorted(allowed)]
        try:
            return export.export(jax.jit(step, keep_unused=True), platforms=["cuda"], disabled_checks=checks)(*arrays)
        except ValueError as e:
            named = set(re.findall(r"['\"]([\w$.]+)['\"]", str(e))) if "compatibility" in str(e) else set()
            if not named - allowed:
                raise
            allowed |= named


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Turns what jax says of programs that cannot be lowered without GPUs into a ProgramError."""
    try:
        yield
    except AssertionError as e:
        raise ProgramError(
            f"the program holds an operation that can only be lowered with GPUs attached: {str(e)[:300]}",
            hint="cuDNN attention inside meshkit.sharding.shard_over(...) or jax.shard_map",
        ) from e
    except ValueError as e:
        if not any(mark in str(e) for mark in _NEEDS_GPU):
            raise
        raise ProgramError(
            "the program calls back into Python (jax.debug.print, io_callback, pure_callback), which cannot be "
            "compiled for GPUs that are not there.",
            hint="the step without its callbacks",
        ) from e


def _describe_sharding(sharding: Any) -> dict[str, Any] | None:
    if sharding is None:
        return None
    spec = [list(axes) if isinstance(axes, tuple) else axes for axes in sharding.spec]
    return {"spec": spec, "memory_kind": sharding.memory_kind}


@contextmanager
def lowering_for(cluster: Cluster) -> Iterator[None]:
    """Lets jax trace and lower cuDNN attention and Pallas kernels for the cluster's GPU, which is not here.

    jax asks the attached GPU and library a few questions while it traces; the cluster's description answers them.
    Inside a fully manual shard_map attention lowers to a plain custom call, so it does not need devices either.
    """
    from jax._src import dispatch
    from jax._src.cudnn import fused_attention_stablehlo as attention

    answers = [*_attention_answers(cluster, attention), *_pallas_answers(cluster)]
    saved = [(module, name, getattr(module, name)) for module, name, _ in answers if hasattr(module, name)]
    primitives = {
        p for n, p in vars(attention).items() if n.startswith("_dot_product_attention") and hasattr(p, "bind")
    }
    needing = dispatch.prim_requires_devices_during_lowering
    removed = {p for p in primitives if p in needing}
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
    """What Pallas' Triton backend asks of the GPU; nothing where this jax has no such module."""
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        return []
    major, minor = cluster.gpu.compute_capability or (0, 0)
    info = gpu_info.GpuInfo(gpu_version=None, arch_name=f"{major}.{minor}", compute_capability=10 * major + minor)
    return [(gpu_info, "get_gpu_info", lambda: info)]
