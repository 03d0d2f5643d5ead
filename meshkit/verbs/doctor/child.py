"""The child process of `meshkit doctor`: it starts XLA, or makes a job's all-reduce, which may abort or hang it."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshkit.children import serve
from meshkit.distributed.join import join_gang


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request: with `join_s`, call `all_reduce` with this timeout in seconds; without it, only start XLA."""
    if "join_s" in request:
        return all_reduce(request["join_s"])
    jax.devices()
    return {}


def all_reduce(timeout_s: float) -> dict[str, Any]:
    """Join the job that the environment names, and sum the numbers 0, 1, ... of its devices by one all-reduce."""
    began = time.perf_counter()
    join_gang(timeout_s=timeout_s)
    devices = jax.devices()
    joined = time.perf_counter()
    mesh = Mesh(np.array(devices), ("all",))
    numbers = jax.make_array_from_callback(
        (len(devices),),
        NamedSharding(mesh, PartitionSpec("all")),
        lambda index: np.arange(len(devices), dtype=np.float32)[index],
    )
    total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers))
    return {
        "devices": len(devices),
        "join_s": joined - began,
        "all_reduce_s": time.perf_counter() - joined,
        "sum": total,
        "wanted": len(devices) * (len(devices) - 1) / 2,
    }


if __name__ == "__main__":
    serve(answer)
