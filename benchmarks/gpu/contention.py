"""Measure how kernels slow down beside one that holds multiprocessors or streams device memory, as a collective does.

It also measures what such a collective, or a copy from the host, loses beside the kernels.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.kernels import compiled, timed
from meshkit.compile.options import cuda_roots

HELD = (0, 8, 16, 24)
STREAMING = (8, 16, 24)
# The traffic in device memory of a ring over NVLink at 450 GB/s each way: each byte passes three times
# (nccl_memory_passes). A domain of H100s has 24 channels; 8 are measured too.
CHANNELS = (8, 24)
PACE_BYTES_PER_NS = 3 * 450.0
_SOURCE = Path(__file__).with_name("hold.cu")
_LIMIT_S = 20.0
_COPIES = 48  # Copies from the host of 256 MiB each, together a quarter of a second.


def measure(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield the slowdown of a matmul and of a copy, by multiprocessors held and by blocks that stream.

    It also yields what channels like a collective's, and copies from the host, move beside them.
    """
    n, size = (64, 2**12) if toy else (8192, 2**30)
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (size // 4,), jnp.float32)
    work: dict[str, tuple[Callable, Any]] = {"matmul": (lambda m: m @ m, a), "copy": (lambda v: v + 1, x)}
    library = None if toy else build(folder)
    seconds = 0.05 if toy else 1.0
    # Compile before anything holds the GPU.
    programs = {name: (compiled(*each), each[1]) for name, each in work.items()}
    alone = {name: timed(*program, seconds)[1] for name, program in programs.items()}
    for name, program in programs.items():
        for held, streaming in [*((h, 0) for h in HELD), *((0, s) for s in STREAMING)]:
            began, beside = time.perf_counter(), Beside(library, held, streaming)
            slowdown = timed(*program, seconds)[1] / alone[name]
            moved, _ = beside.end()
            label = f"{name}, {held} held" if not streaming else f"{name}, {streaming} blocks stream"
            yield {f"{label}: slowdown": slowdown}
            if streaming and moved:
                yield {f"{label}: streamed bytes_per_s": moved / (time.perf_counter() - began)}
    for channels in CHANNELS:
        yield from _channels(library, channels, programs, alone, seconds)
    for name, program in (("nothing", None), *programs.items()):
        if library is not None and library.begin_copies(_COPIES):
            raise RuntimeError("the copies from the host did not start")
        slowdown = timed(*program, seconds / 4)[1] / alone[name] if program else 0.0
        if library is not None:
            yield {f"copies from the host, beside {name}: bytes_per_s": library.finish_copies(_COPIES)}
        if program:
            yield {f"{name}, copies from the host: slowdown": slowdown}


def _channels(
    library: ctypes.CDLL | None,
    channels: int,
    programs: Mapping[str, tuple[Callable, Any]],
    alone: Mapping[str, float],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yield what `channels` channels move alone and beside each program, and the slowdown of the programs.

    Channels move as fast as NVLink would need, and then as fast as they can.
    """
    for name, program in (("nothing", None), *programs.items()):
        for pace, label in ((PACE_BYTES_PER_NS / channels, ""), (1e6, " without a link")):
            beside, slowdown = Beside(library, channels=channels, pace=pace), 0.0
            if program:
                slowdown = timed(*program, seconds / 2)[1] / alone[name]
            else:
                time.sleep(seconds / 2)
            moved, block_ns = beside.end()
            if program:
                yield {f"{name}, {channels} channels{label}: slowdown": slowdown}
            if block_ns:
                yield {f"{channels} channels{label}, beside {name}: bytes_per_s": 1e9 * channels * moved / block_ns}


class Beside:
    """A kernel that runs until it is ended; without a library, as on CPUs, it does nothing."""

    def __init__(
        self, library: ctypes.CDLL | None, held: int = 0, streaming: int = 0, channels: int = 0, pace: float = 1.0
    ):
        self._library = library
        numbers = (ctypes.c_double(pace), ctypes.c_double(_LIMIT_S))
        if library is not None and library.begin(held, streaming, channels, *numbers):
            raise RuntimeError("the kernel that holds multiprocessors did not start")

    def end(self) -> tuple[float, float]:
        """End the kernel, and return the bytes that it moved and the nanoseconds of its channels, summed over them."""
        block_ns = ctypes.c_double()
        moved = self._library.finish(ctypes.byref(block_ns)) if self._library is not None else 0.0
        if moved < 0:
            raise RuntimeError("the kernel that holds multiprocessors did not end")
        return moved, block_ns.value


def build(folder: Path) -> ctypes.CDLL:
    """Compile the kernels with nvcc for the GPU here, and load them in this process's own CUDA context."""
    target = folder / "hold.so"
    done = subprocess.run(nvcc(target, "native"), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc: {done.stderr[-1000:]}")
    jax.block_until_ready(jnp.ones(1))  # jax must make the context first.
    library = ctypes.CDLL(str(target))
    library.finish.restype = library.finish_copies.restype = ctypes.c_double
    if code := library.prepare():
        raise RuntimeError(f"preparing the kernels failed with {code}")
    return library


def nvcc(target: Path, arch: str) -> list[str]:
    """Return the command that compiles the kernels for an architecture."""
    found = (root / "bin/nvcc" for root in cuda_roots())
    compiler = shutil.which("nvcc") or next((str(path) for path in found if path.exists()), None)
    if compiler is None:
        raise FileNotFoundError("nvcc is neither on the PATH nor in a CUDA toolkit of this machine")
    return [compiler, "-shared", "-O2", f"-arch={arch}", "-Xcompiler", "-fPIC", "-o", str(target), str(_SOURCE)]
