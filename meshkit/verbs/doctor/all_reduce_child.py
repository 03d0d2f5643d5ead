"""One process of `meshkit doctor --gang`: joins the job, sums over all devices, prints a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshkit.distributed.join import join_gang, keep_stdout


def main() -> int:
    """Joins, and makes one all-reduce of the devices' numbers."""
    keep_stdout()
    began = time.perf_counter()
    join_gang(timeout_s=float(os.environ["MESHKIT_DOCTOR_TIMEOUT"]))
    devices = jax.devices()
    joined = time.perf_counter()
    mesh = Mesh(np.array(devices), ("all",))
    numbers = jax.make_array_from_callback(
        (len(devices),),
        NamedSharding(mesh, PartitionSpec("all")),
        lambda index: np.arange(len(devices), dtype=np.float32)[index],
    )
    total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers))
    found = {
        "devices": len(devices),
        "join_s": joined - began,
        "all_reduce_s": time.perf_counter() - joined,
        "sum": total,
        "wanted": len(devices) * (len(devices) - 1) / 2,
    }
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
