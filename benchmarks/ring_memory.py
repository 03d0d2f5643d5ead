"""Print the temporary memory of ring attention, forward and backward, by local sequence length.

    python -m benchmarks.ring_memory

XLA compiles it for 8 virtual CPU devices (fp32, one head of dimension 8) and for 8 absent H100s (bf16, 32 heads and 8
key heads of dimension 128, cuDNN). ring_memory.md has the output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
WAYS = 8


def arguments(mesh, local: int, heads: int, kv_heads: int, head_dim: int, dtype) -> list[jax.ShapeDtypeStruct]:
    """Return the abstract q, k, v and gradient of the output for one sequence."""
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))
    sizes = [(1, WAYS * local, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in sizes]


def loss_and_gradients(mesh):
    """Return a function from (q, k, v, g) to the output and the gradients of q, k and v."""
    from meshkit.parallel import ring_attention

    def run(q, k, v, g):
        out, pull = jax.vjp(lambda *qkv: ring_attention(*qkv, mesh=mesh, axis="context", balanced=True), q, k, v)
        return out, pull(g)

    return run


def on_cpu(local: int) -> int:
    """Return the bytes of temporaries on each of 8 CPU devices."""
    mesh = Mesh(np.array(jax.devices()), ("context",), axis_types=(AxisType.Auto,))
    lowered = jax.jit(loss_and_gradients(mesh)).lower(*arguments(mesh, local, 1, 1, 8, jnp.float32))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def on_h100(local: int) -> int:
    """Return the bytes of temporaries on each of 8 H100s."""
    import meshkit as mk
    from meshkit.compile.program import compile_absent

    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    spec = mk.MeshSpec.parse({"context": WAYS})
    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
    args = arguments(mesh, local, 32, 8, 128, jnp.bfloat16)
    return compile_absent(loss_and_gradients(mesh), args, mesh=mesh, cluster=cluster).memory["temp"]


def main() -> None:
    """Print a Markdown table."""
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
