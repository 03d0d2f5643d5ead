"""What of a GPU's memory a compiled step takes that its compiler does not count.

    inside the pool    arguments + outputs + temporaries (the compiler's peak) + cuDNN's workspace + fragmentation
    outside            CUDA context + NCCL's buffers

The pool is `memory_fraction` of the memory, taken by the client as one piece; what is outside must find place in the
rest. The compiler sees the first part alone. The numbers behind the others, with their sources: catalog.toml,
[reserved].
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

    context: int  # CUDA's, with the kernels it has loaded
    nccl: int  # buffers of its communicators
    communicators: int  # how many there are
    cudnn_workspace: int  # of the largest fused attention
    fragmentation: int  # that the client's allocator may leave unused next to the program's largest block

    @property
    def inside_pool(self) -> int:
        """What the client's own allocator must find."""
        return self.cudnn_workspace + self.fragmentation

    @property
    def outside_pool(self) -> int:
        """What must find place outside the pool."""
        return self.context + self.nccl


def reserved_memory(module: Module, schedule: Schedule, cluster: Cluster, temporary_bytes: int) -> Reserved:
    """What a compiled module takes that its compiler does not count; `temporary_bytes` is its largest block.

    Args:
        module: scheduled HLO as the runtime's object; its attention calls need a workspace.
        schedule: of the same program; its collectives need communicators.
        cluster: whether NVSwitch reduces, which takes buffers too.
        temporary_bytes: of the compiler's memory analysis, on one GPU.
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
    """Buffers on one GPU of the communicator that these collectives share.

    Each connection has a buffer at its receiving end for every protocol, and a small one at the sending end. A ring has
    one connection a channel; the trees of an all-reduce add two; all-to-all and permutes have some to every peer, and
    across domains one shared pool; where the switch reduces, its buffers come on top (16 channels x 2 x 1 MiB a rank).

    Args:
        members: one or more, of the same groups; which kinds of collective they are decides what connects.
        cluster: says whether the switch reduces: NVSwitch, from NVLink 4 on.
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
    """Collectives by the communicator that they share: one for each way to group the GPUs."""
    groups: dict[tuple, list[Collective]] = {}
    for c in used:
        if c.group_size > 1:
            groups.setdefault((c.axes, c.group_size, c.num_groups, c.gpus_per_domain), []).append(c)
    return list(groups.values())


def _cudnn_workspace(module: Module) -> int:
    """The largest workspace of a fused attention's backward pass, the only one that has a large one."""
    found = [
        cudnn_workspace_bytes(*i.shape.parts[:2])
        for i in module.instructions.values()
        if _ATTENTION_BACKWARD.search(i.target)
    ]
    return max(found, default=0)


def cudnn_workspace_bytes(queries: Shape, keys: Shape) -> int:
    """Workspace of a fused attention's backward pass, by the shapes of dQ and dK: batch, heads, length, size of a head.

    The gradient of the queries and a number of each of their rows in fp32; where query heads share keys, dK and dV of
    every query head.

    Args:
        queries: of dQ, [batch, heads, length, head size].
        keys: of dK, alike; its heads divide those of the queries.
    """
    numbers = reserved()
    batch, heads, length, head_dim = queries.dims
    rows = batch * heads * length
    total = numbers["cudnn_workspace_bytes"] + rows * numbers["cudnn_workspace_bytes_per_query_row"]
    total += rows * head_dim * numbers["cudnn_workspace_bytes_per_query_element"]
    if heads != keys.dims[1]:
        total += 2 * keys.bytes // keys.dims[1] * heads
    return total
