"""A cluster's GPU as a compile target for XLA: the text of a `GpuTargetConfigProto`.

Written from the catalog; OpenXLA ships longer ones under xla/backends/gpu/target_config/specs, with which these agree
in every field they share (a test compares them).
"""

from __future__ import annotations

from meshkit.config.cluster import Cluster, Gpu
from meshkit.errors import ConfigError

# The compiler asks for the versions of the libraries it would call at run time; none is installed, so these are the
# ones that jaxlib 0.11 and 0.12 wheels are built against.
_VERSIONS = {"driver_version": "13.0.0", "runtime_version": "12.9.0", "compile_time_toolkit_version": "12.9.0"}
_CUDNN = "9.10.2"
# What jax is told of cuDNN, as cuDNN counts: 9.12, since attention on compute capability 10.3 needs 9.11.
CUDNN_NUMBER = 91200


def target_config(gpu: Gpu) -> str:
    """Text proto that describes one GPU to the compiler.

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
        "device_memory_size": int(gpu.memory_bytes),
        "device_address_bits": 64,
    }
    lines = [f"  {name}: {value}" for name, value in fields.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}")
    lines.append('  device_vendor: "NVIDIA Corporation"')
    lines.append(f'  platform_version: "Compute Capability {major}.{minor}"')
    lines.append(f'  name: "{gpu.name}"')
    lines += [f'  {name}: "{value}"' for name, value in _VERSIONS.items()]
    lines.append(f'  dnn_version: "{_CUDNN}"')
    if gpu.nvlink_links:
        lines.append(f"  device_interconnect_info {{ active_links: {gpu.nvlink_links} }}")
    body = "\n".join(lines)
    return f'gpu_device_info {{\n{body}\n}}\nplatform_name: "CUDA"\ndevice_description_str: "{gpu.name}"\n'


def topology_name(cluster: Cluster) -> str:
    """`partitions x hosts x GPUs` of a cluster, as PJRT's compile-only GPU topology spells it.

    Its product is the number of devices; how it splits into hosts is what XLA's own latency model sees.
    """
    used = cluster.gpus_used_per_domain
    hosts = max(1, -(-used // cluster.gpus_per_host))
    if used % hosts:
        return f"1x{cluster.num_nvlink_domains}x{used}"
    return f"1x{cluster.num_nvlink_domains * hosts}x{used // hosts}"
