"""What a kernel loses beside one that holds multiprocessors or streams device memory, as a collective does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.kernels import compiled, timed
from meshkit.compile.options import cuda_roots

HELD = (0, 8, 16, 24)
STREAMING = (8, 16, 24)
_SOURCE = Path(__file__).with_name("hold.cu")
_LIMIT_S = 20.0


def measure(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Slowdown of a matmul and of a copy, by multiprocessors held and by blocks that stream."""
    n, size = (64, 2**12) if toy else (8192, 2**30)
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (size // 4,), jnp.float32)
    work: dict[str, tuple[Callable, Any]] = {"matmul": (lambda m: m @ m, a), "copy": (lambda v: v + 1, x)}
    library = None if toy else build(folder)
    for name, (function, operands) in work.items():
        alone, program = None, compiled(function, operands)  # before anything holds the GPU: XLA times kernels
        for held, streaming in [*((h, 0) for h in HELD), *((0, s) for s in STREAMING)]:
            began, moved = time.perf_counter(), 0.0
            if library is not None and library.begin(held, streaming, ctypes.c_double(_LIMIT_S)):
                raise RuntimeError("the kernel that holds multiprocessors did not start")
            _, seconds = timed(program, operands, 0.05 if toy else 1.0)
            if library is not None:
                moved = library.finish()
            alone = alone or seconds
            label = f"{name}, {held} held" if not streaming else f"{name}, {streaming} blocks stream"
            yield {f"{label}: slowdown": seconds / alone}
            if streaming and library is not None:
                yield {f"{label}: streamed bytes_per_s": moved / (time.perf_counter() - began)}


def build(folder: Path) -> ctypes.CDLL:
    """The kernels, compiled by nvcc for the GPU that is here, in this process's own CUDA context."""
    target = folder / "hold.so"
    done = subprocess.run(nvcc(target, "native"), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc: {done.stderr[-1000:]}")
    jax.block_until_ready(jnp.ones(1))  # jax makes the context first
    library = ctypes.CDLL(str(target))
    library.finish.restype = ctypes.c_double
    if code := library.prepare():
        raise RuntimeError(f"preparing the kernels failed with {code}")
    return library


def nvcc(target: Path, arch: str) -> list[str]:
    """The command that compiles the kernels for an architecture."""
    found = (root / "bin/nvcc" for root in cuda_roots())
    compiler = shutil.which("nvcc") or next((str(path) for path in found if path.exists()), None)
    if compiler is None:
        raise FileNotFoundError("nvcc is neither on the PATH nor in a CUDA toolkit of this machine")
    return [compiler, "-shared", "-O2", f"-arch={arch}", "-Xcompiler", "-fPIC", "-o", str(target), str(_SOURCE)]
