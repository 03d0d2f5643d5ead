"""Compare the predicted and the measured times of block-scaled matmuls on one GB200.

    python -m benchmarks.block_scaling

The programs are those of marin-community/marin, issue 7282 (bench_mxfp8_dense.py). They multiply 65,536 tokens by a
kernel [k, n] in bf16: forward alone, and with the gradients of the sum of squares. Two further programs are the matmul
of operands that are quantized already, and the quantization of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from models import mxfp8
from models.matmul import project

TOKENS = 65536
SHAPES = {"2560 x 2560": (2560, 2560), "2560 x 1280": (2560, 1280), "1280 x 2560": (1280, 2560)}
# Issue 7282 of 2026-07-16, on one GB200 with jax 0.10.1 and cuDNN 9.19. The first three columns are the time of bf16
# over that of MXFP8: of the forward pass (first and second run), with gradients, and of the matmul alone. The last
# column is the milliseconds of quantizing the activations.
MEASURED = {
    "2560 x 2560": ("0.996, 1.024", "0.813", "1.332", "0.346"),
    "2560 x 1280": ("0.815, 0.881", "0.642", "1.114", "0.358"),
    "1280 x 2560": ("0.966, 1.005", "0.666", "1.139", "0.262"),
}


def main() -> None:
    """Print a row for each shape."""
    cluster = mk.Cluster.load("gb200_nvl72", hosts=18, gpus_used_per_domain=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 1}), cluster, devices=mk.describe_devices(cluster))
    whole = NamedSharding(mesh, PartitionSpec())

    def seconds(fn: Callable[..., Any], *shapes: tuple[tuple[int, ...], Any]) -> float:
        args = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape, dtype in shapes]
        return mk.plan(fn, args, mesh=mesh, cluster=cluster).step.time_s or float("nan")

    print("| kernel | bf16, ms | forward | with gradients | matmul alone | quantizing x, ms |")
    print("|---|---|---|---|---|---|")
    for name, (k, n) in SHAPES.items():
        x, w = ((TOKENS, k), jnp.bfloat16), ((k, n), jnp.bfloat16)
        times = {
            how: [seconds(fn, x, w) for fn in (partial(_forward, how), jax.grad(partial(_loss, how), (0, 1)))]
            for how in (project, _in_blocks)
        }
        kinds = (1, mxfp8.VALUES), (mxfp8.BLOCK, mxfp8.SCALES)
        parts = [((rows, k // each), dtype) for rows in (TOKENS, n) for each, dtype in kinds]
        alone, quantizing = seconds(_multiply, *parts), seconds(mxfp8.quantize, x)
        forward, both = (a / b for a, b in zip(times[project], times[_in_blocks]))
        predicted = (f"{forward:.3f}", f"{both:.3f}", f"{times[project][0] / alone:.3f}", f"{1e3 * quantizing:.3f}")
        cells = (f"{p} ({m})" for p, m in zip(predicted, MEASURED[name]))
        print(f"| {name} | {1e3 * times[project][0]:.3f} | {' | '.join(cells)} |")


def _in_blocks(x: jax.Array, w: jax.Array, contracted: int, dtype: Any) -> jax.Array:
    return mxfp8.project_each(x, [w], contracted, dtype)[0]


def _forward(how: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    return how(x, w, 1, jnp.bfloat16)


def _loss(how: Callable[..., jax.Array], x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(_forward(how, x, w).astype(jnp.float32) ** 2)


def _multiply(a: jax.Array, a_scales: jax.Array, b: jax.Array, b_scales: jax.Array) -> jax.Array:
    flat = (part[None] for part in (a, b, a_scales, b_scales))
    return jax.nn.scaled_matmul(*flat, preferred_element_type=jnp.bfloat16)


if __name__ == "__main__":
    main()
