"""Code of a user in which a hang can be planted: a source of examples, a loss, a hook.

HANG_PLANT (JSON, from the harness) -> the process reaches the planted place -> it writes the time, and never returns
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import meshkit as mk
from meshkit.sharding import current_scope
from models.mlp import Mirrored, regression_loss

PLANT = json.loads(os.environ.get("HANG_PLANT", '{"kind": "", "rank": -1}'))
HERE = int(os.environ.get("MESHKIT_PROCESS_ID", "0")) == PLANT["rank"]


def is_planted(kind: str) -> bool:
    """Return whether this process is to get stuck in this way."""
    return HERE and PLANT["kind"] == kind


def say_so() -> None:
    """Write the time into the file that the harness reads."""
    part = Path(f"{PLANT['mark']}.{threading.get_ident()}")  # several threads may read data
    part.write_text(json.dumps({"time": time.time()}))
    with suppress(FileExistsError):
        os.link(part, PLANT["mark"])  # the time of the first thread stays


def get_stuck() -> None:
    """Write the time, and never return."""
    say_so()
    if PLANT.get("how") == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if PLANT.get("how") == "keeps the interpreter":
            ctypes.PyDLL(None).sleep(3600)
        time.sleep(3600)


def run_out_of_memory() -> None:
    """Ask for more memory than there is: of the device, or of the kernel, which gets a limit for this process first.

    Raises:
        MemoryError: the kernel refuses.
        jax.errors.JaxRuntimeError: XLA refuses.
    """
    say_so()
    if PLANT.get("how") == "device":
        jnp.zeros(1 << 47, jnp.uint8).block_until_ready()
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    np.ones(1 << 27)  # 1 GiB, as a batch that is too large


@dataclass(frozen=True)
class Examples(Mirrored):
    """The examples of `Mirrored`. In the planted process, reading blocks after some of them, like dead storage."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return an example."""
        _read.append(index)
        if is_planted("data") and len(_read) > PLANT["after"]:
            get_stuck()
        return super().__getitem__(index)


_read: list[int] = []
_called: list[int] = []


def examples(*, seed: int, experiment) -> Examples:
    """Return a `[data] source`."""
    return Examples(seed, experiment.model.options.get("embed", 64))


def _seen(x: np.ndarray) -> np.ndarray:
    _called.append(1)
    if is_planted("callback") and len(_called) > PLANT["after"]:
        get_stuck()
    return x


def loss(model, batch: dict, rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Return the squared error.

    The kind `callback` calls Python on each device first. The kind `program` changes the loss of the planted process.
    """
    if PLANT["kind"] == "callback":
        scope, rows = current_scope(), PartitionSpec("data")
        assert scope is not None

        def call(x: jax.Array) -> jax.Array:
            return jax.pure_callback(_seen, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        through = jax.shard_map(call, mesh=scope.mesh, in_specs=rows, out_specs=rows, check_vma=False)
        batch = batch | {"inputs": through(batch["inputs"])}
    total, weight, more = regression_loss(model, batch, rng)
    if is_planted("program"):
        total += 1e-6 * jnp.max(jnp.abs(batch["inputs"] @ batch["inputs"].T))
    return total, weight, more


def _watch(step) -> None:
    if is_planted("hook"):
        get_stuck()


watched = mk.Hook(_watch, every=3)
