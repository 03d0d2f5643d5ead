"""Temporary memory of ring attention, forward and backward, as XLA compiles it for 8 devices: by local length.

    python -m benchmarks.ring_memory

8 virtual CPU devices (fp32, 1 head of 8) and 8 absent H100s (bf16, 32 heads and 8 key heads of 128, cuDNN). What it
printed: ring_memory.md.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
WAYS = 8


def arguments(mesh, local: int, heads: int, kv_heads: int, head_dim: int, dtype) -> list[jax.ShapeDtypeStruct]:
    """q, k, v and the output's gradient of one sequence."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    sizes = [(1, WAYS * local, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in sizes]


def loss_and_gradients(mesh):
    """(q, k, v, g) -> output and the gradients of q, k, v."""
    from meshkit.parallel import ring_attention

    def run(q, k, v, g):
        out, pull = jax.vjp(lambda *qkv: ring_attention(*qkv, mesh=mesh, axis="context", balanced=True), q, k, v)
        return out, pull(g)

    return run


def on_cpu(local: int) -> int:
    """Bytes of temporaries per device in the program of 8 CPU devices."""
    mesh = Mesh(np.array(jax.devices()), ("context",), axis_types=(AxisType.Auto,))
    lowered = jax.jit(loss_and_gradients(mesh)).lower(*arguments(mesh, local, 1, 1, 8, jnp.float32))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def on_h100(local: int) -> int:
    """Bytes of temporaries per GPU in the program of 8 H100s."""
    import meshkit as mk
    from meshkit.compile.program import compile_absent

    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    spec = mk.MeshSpec.parse({"context": WAYS})
    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
    args = arguments(mesh, local, 32, 8, 128, jnp.bfloat16)
    return compile_absent(loss_and_gradients(mesh), args, mesh=mesh, cluster=cluster).memory["temp"]


def main() -> None:
    """Prints a Markdown table."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", WAYS)
    print("| local length | sequence | CPU: temporary | per token | H100: temporary | per token |")
    print("|---|---|---|---|---|---|")
    for local in LENGTHS:
        cpu, h100 = on_cpu(local), on_h100(local)
        print(
            f"| {local} | {WAYS * local} | {cpu / 2**20:.2f} MiB | {cpu / local:.0f} B "
            f"| {h100 / 2**20:.1f} MiB | {h100 / local:.0f} B |",
            flush=True,
        )


if __name__ == "__main__":
    main()
