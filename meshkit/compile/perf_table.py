"""The network model's prices as XLA's own table of collectives.

XLA's scheduler has two models of a collective: inside an NVLink domain a table of measured throughputs, by GPU, of
which it takes the nearest size; between hosts a formula, whose numbers no compile option sets. A table of one's own
(`xla_gpu_experimental_collective_perf_table_path`) takes the place of the first. It is the text of an
`xla.gpu.DeviceHloInstructionProfiles` (xla/service/gpu/model/hlo_op_profile.proto). Of an entry XLA reads the opcode,
the shape, the groups and the throughput in bytes of the whole array: an all-gather's result, the operand of all else
(collective_interpolator.cc there).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Schedule
from meshkit.predict.network import collective_time_s

_ITEM_BYTES = 4  # of f32, which XLA falls back to for all types
_GROUPED = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_PERMUTE = "collective-permute"
# Permutes as XLA tells them apart: GPUs send or receive, exchange, or pass on.
_PAIRS = (((0, 1),), ((0, 1), (1, 0)), ((0, 1), (1, 2), (2, 3), (3, 0)))
_SCALARS = tuple(range(4, 32, 4))  # bytes that no group divides: of reductions and permutes
# 32 B to 1.7 GB (distances of sizes are taken in 32 bits), four an octave: at most 9 % from any size between.
_SIZES = tuple(2 ** (quarter / 4) for quarter in range(4 * 5, 4 * 31 - 1))
_OLDEST = (9, 0)  # XLA has such a model for Hopper and Blackwell


def device_key(cluster: Cluster) -> str:
    """The name by which XLA finds a GPU's table: `sm_90`; of compute capability 10.0 `sm_100_B200`."""
    major, minor = cluster.gpu.compute_capability or (0, 0)
    return f"sm_{major}{minor}" + (f"_{cluster.gpu.name.split()[-1]}" if (major, minor) == (10, 0) else "")


def table_text(cluster: Cluster) -> str:
    """Prices of collectives inside an NVLink domain, of groups of every size that cuts it evenly."""
    gpus, unit = cluster.gpus_used_per_domain, _ITEM_BYTES * cluster.gpus_used_per_domain
    sizes = sorted({max(1, round(size / unit)) * unit for size in _SIZES})
    sizes = [*(size for size in _SCALARS if size < unit), *sizes]
    entries = "".join(entry for size in sizes for entry in _entries(cluster, gpus, size))
    return f'entries {{\n key: "{device_key(cluster)}"\n value {{\n{entries} }}\n}}\n'


def unread(cluster: Cluster, schedule: Schedule) -> tuple[str, ...]:
    """A line for the user where XLA goes by the table in nothing of a program."""
    kinds = {i.collective.collective for body in schedule.computations.values() for i in body if i.collective}
    others = sorted(kinds - {*_GROUPED, _PERMUTE})
    if (cluster.gpu.compute_capability or (0, 0)) < _OLDEST:
        why = f"XLA has a table of collectives for Hopper and Blackwell alone, not for {cluster.gpu.name}"
    elif others:
        why = f"XLA leaves its table of collectives aside in a program with {', '.join(others)}"
    else:
        return ()
    return (f'train.pgle = "table" changes nothing: {why}; "predicted" does',)


def _entries(cluster: Cluster, gpus: int, size: int) -> Iterator[str]:
    """Every collective of a size, over every group."""
    for n in (n for n in range(2, gpus + 1) if gpus % n == 0):
        groups = (
            f"iota_collective_device_list {{ num_replica_groups: {gpus // n} num_devices_per_group: {n} "
            f"iota_reshape_dims: {gpus} iota_transpose_perm: 0 }}"
        )
        for collective in ("all-reduce",) if size in _SCALARS else _GROUPED:
            elements = size // _ITEM_BYTES // (n if collective == "reduce-scatter" else 1)
            yield _entry(cluster, collective, (size, elements), n, groups)
    for pairs in _PAIRS if gpus > 1 else ():
        sends = " ".join(f"source_target_pairs {{ source: {a} target: {b} }}" for a, b in pairs)
        yield _entry(cluster, _PERMUTE, (size, size // _ITEM_BYTES), 2, sends)


def _entry(cluster: Cluster, collective: str, size: tuple[int, int], n: int, groups: str) -> str:
    """One instruction: its bytes, the elements of its result, and how fast it is."""
    payload, elements = size
    seconds = collective_time_s(collective, payload_bytes=payload, gpus_per_domain=n, cluster=cluster)
    return (
        f'  entries {{ instruction {{ name: "_" opcode: "{collective}" channel_id: 1 use_global_device_ids: true '
        f"shape {{ element_type: F32 dimensions: {elements} is_dynamic_dimension: false "
        f"layout {{ minor_to_major: 0 tail_padding_alignment_in_elements: 1 }} }} {groups} }} "
        f"network_throughput_bytes_per_sec: {max(1, round(payload / seconds))} }}\n"
    )
