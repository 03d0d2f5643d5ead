"""Estimate the memory that a run needs on each GPU beyond XLA's own memory plan (NCCL, CUDA, fragmentation).

    inside the pool    arguments + outputs + temporaries (the compiler's peak) + cuDNN's workspace + fragmentation
    outside            CUDA context + NCCL's buffers

JAX's client allocates the pool as one piece: `memory_fraction` of the GPU's memory. Everything outside must fit into
the rest. The compiler counts only arguments, outputs and temporaries. The numbers behind the other parts, with sources,
are in catalog.toml, [reserved].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshkit.config.catalog import kernels, reserved
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Schedule
from meshkit.hlo.proto import Module, Shape
from meshkit.hlo.schedule import Collective

_ATTENTION_BACKWARD = re.compile(r"fmha.*Backward")
_POINT_TO_POINT = ("all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True)
class Reserved:
    """Bytes on one GPU that no compiler counts."""

    context: int
    nccl: int
    communicators: int
    cudnn_workspace: int
    fragmentation: int
    """Bytes that the client's allocator may leave unused next to the program's largest block."""

    @property
    def inside_pool(self) -> int:
        """Bytes that the client's own allocator must find."""
        return self.cudnn_workspace + self.fragmentation

    @property
    def outside_pool(self) -> int:
        """Bytes that must fit outside the pool."""
        return self.context + self.nccl


def reserved_memory(module: Module, schedule: Schedule, cluster: Cluster, temporary_bytes: int) -> Reserved:
    """Return the bytes that a run needs beyond XLA's own memory plan.

    Args:
        module: the compiled module; its attention calls need a workspace.
        schedule: the schedule of the same program; its collectives need communicators.
        cluster: the cluster; if its NVSwitch reduces, that needs buffers too.
        temporary_bytes: the program's largest block on one GPU, by the compiler's memory analysis.
    """
    numbers = reserved()
    used = [i.collective for instructions in schedule.computations.values() for i in instructions if i.collective]
    communicators = _communicators(used)
    return Reserved(
        context=numbers["cuda_context_bytes"],
        nccl=sum(nccl_bytes(members, cluster) for members in communicators),
        communicators=len(communicators),
        cudnn_workspace=_cudnn_workspace(module),
        fragmentation=min(numbers["fragmentation_bytes"], temporary_bytes),
    )


def nccl_bytes(members: Iterable[Collective], cluster: Cluster) -> int:
    """Return the bytes of buffers on one GPU of the communicator that these collectives share.

    Each connection has a buffer at its receiving end for every protocol, and a small one at the sending end. A ring has
    one connection per channel, and the trees of an all-reduce have two more. An all-to-all has connections to every
    peer in the domain, a permute to one peer. Both share one pool of buffers across domains. If the switch reduces, it
    has additional buffers (16 channels x 2 x 1 MiB per rank).

    Args:
        members: one or more collectives of the same groups; their kinds decide which connections exist.
        cluster: the cluster; its switch reduces if it is an NVSwitch of NVLink 4 or newer.
    """
    numbers = reserved()
    members = list(members)
    first = members[0]
    kinds = {c.collective for c in members}
    across = first.group_size > first.gpus_per_domain
    connection = numbers["nccl_receive_bytes"] + numbers["nccl_send_bytes"]
    channels = kernels()["nccl_channels"][across]
    total = 0
    if kinds - set(_POINT_TO_POINT):
        total += channels * connection
    if "all-reduce" in kinds:
        total += 2 * channels * connection
    if kinds & {"all-to-all", "ragged-all-to-all"}:
        total += (first.gpus_per_domain - 1) * numbers["nccl_peer_channels_nvlink"] * connection
    elif "collective-permute" in kinds and not across:
        total += numbers["nccl_peer_channels_nvlink"] * connection
    if kinds & set(_POINT_TO_POINT) and across:
        total += numbers["nccl_shared_network_bytes"]
    switched = cluster.has_nvswitch and (cluster.gpu.nvlink_generation or 0) >= 4
    if switched and kinds - set(_POINT_TO_POINT) and first.gpus_per_domain > 1:
        total += numbers["nccl_nvls_rank_bytes"] * first.gpus_per_domain
    return total


def _communicators(used: Iterable[Collective]) -> list[list[Collective]]:
    groups: dict[tuple, list[Collective]] = {}
    for c in used:
        if c.group_size > 1:
            groups.setdefault((c.axes, c.group_size, c.num_groups, c.gpus_per_domain), []).append(c)
    return list(groups.values())


def _cudnn_workspace(module: Module) -> int:
    """Return the bytes of the largest cuDNN workspace; only a fused attention's backward pass needs a large one."""
    found = [
        cudnn_workspace_bytes(*i.shape.parts[:2])
        for i in module.instructions.values()
        if _ATTENTION_BACKWARD.search(i.target)
    ]
    return max(found, default=0)


def cudnn_workspace_bytes(queries: Shape, keys: Shape) -> int:
    """Return the workspace of a fused attention's backward pass from the shapes of dQ and dK, the gradients of Q and K.

    It has dQ, and one number for each row of queries, in fp32. If query heads share keys, it also has dK and dV of
    every query head.

    Args:
        queries: shape of dQ, [batch, heads, length, head size].
        keys: shape of dK, with the same order of dims; its number of heads divides that of the queries.
    """
    numbers = reserved()
    batch, heads, length, head_dim = queries.dims
    rows = batch * heads * length
    total = numbers["cudnn_workspace_bytes"] + rows * numbers["cudnn_workspace_bytes_per_query_row"]
    total += rows * head_dim * numbers["cudnn_workspace_bytes_per_query_element"]
    if heads != keys.dims[1]:
        total += 2 * keys.bytes // keys.dims[1] * heads
    return total
