"""Measure what `mk.live` costs a training loop: `python -m benchmarks.live_loop [--seconds N] [--every N]`.

A loop runs on virtual CPU devices. Steps during which `mk.live` captured a trace or read one are counted apart from the
others; the cost is how much longer they take, compared with the mean of the others. Comparing two loops that run one
after the other would be less exact, because other work on the machine changes both by as much as the cost itself.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

_DEVICES, _LAYERS, _WIDTH, _BATCH, _WARM_UP = 4, 4, 512, 256, 50


def main() -> None:
    """Run the loop, and print its steps, its captures and their cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="seconds that the loop runs")
    parser.add_argument("--every", type=int, default=500, help="least number of steps between captures")
    asked = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={_DEVICES}"
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import meshkit as mk

    jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((2, _DEVICES // 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda rows, *spec: jax.device_put(jnp.full((rows, _WIDTH), 0.01), NamedSharding(mesh, PartitionSpec(*spec)))
    weights, x = [put(_WIDTH, None, "tensor") for _ in range(_LAYERS)], put(_BATCH, "data", None)

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def update(weights, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))

    step = jax.jit(update, out_shardings=[w.sharding for w in weights])
    for _ in range(_WARM_UP):
        weights = jax.block_until_ready(step(weights, x))
    took: dict[bool, list[float]] = {False: [], True: []}
    number, behind, lines = 0, 0, set[str]()
    began = now = time.perf_counter()
    with mk.live(every=asked.every, mesh=mesh) as live:
        while now - began < asked.seconds:
            with live.step(number):
                weights = jax.block_until_ready(step(weights, x))
            lines.add(live.line)
            number += 1
            if any(thread.name == "meshkit-live" for thread in threading.enumerate()):
                behind = 2  # This step and the next, which is slower too.
            before, now = now, time.perf_counter()
            took[behind > 0].append(now - before)
            behind = max(0, behind - 1)
    usual_s, slowed = sum(took[False]) / len(took[False]), took[True]
    cost_s = sum(slowed) - len(slowed) * usual_s
    read = len(lines - {""})
    print(f"{number} steps of {usual_s * 1e3:.1f} ms in {now - began:.0f} s, {read} of them captured and read")
    print(f"{len(slowed)} steps at captures took {cost_s:.2f} s longer, {cost_s / (now - began):.2%} of the loop")
    print(f"load {os.getloadavg()[0]:.1f}; the last line: {live.line}")


if __name__ == "__main__":
    main()
