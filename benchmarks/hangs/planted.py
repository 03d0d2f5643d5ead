"""Code of a user in which a hang can be planted: a source of examples, a loss, a hook.

HANG_PLANT (JSON, of the harness) -> where this process gets stuck: `at` is written, and it does not come back
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
    """Whether this process gets stuck in this way."""
    return HERE and PLANT["kind"] == kind


def say_so() -> None:
    """Leaves a file for the harness."""
    part = Path(f"{PLANT['mark']}.{threading.get_ident()}")  # several threads may read data
    part.write_text(json.dumps({"time": time.time()}))
    with suppress(FileExistsError):
        os.link(part, PLANT["mark"])  # the first one's time stays


def get_stuck() -> None:
    """Says so, and never returns."""
    say_so()
    if PLANT.get("how") == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        if PLANT.get("how") == "keeps the interpreter":
            ctypes.PyDLL(None).sleep(3600)
        time.sleep(3600)


def run_out_of_memory() -> None:
    """From now on the kernel gives this process no more memory."""
    say_so()
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    np.ones(1 << 27)  # 1 GiB, as a batch that is too large


@dataclass(frozen=True)
class Examples(Mirrored):
    """As Mirrored, until the storage of this process does not answer."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """An example."""
        _read.append(index)
        if is_planted("data") and len(_read) > PLANT["after"]:
            get_stuck()
        return super().__getitem__(index)


_read: list[int] = []
_called: list[int] = []


def examples(*, seed: int, experiment) -> Examples:
    """A `[data] source`."""
    return Examples(seed, experiment.model.options.get("embed", 64))


def _seen(x: np.ndarray) -> np.ndarray:
    _called.append(1)
    if is_planted("callback") and len(_called) > PLANT["after"]:
        get_stuck()
    return x


def loss(model, batch: dict, rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """The squared error; by plan after a callback into Python on each device, or another in one process."""
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
