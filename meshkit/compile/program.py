"""Compile a function with XLA for GPUs that this machine does not have.

    step -> lowering.py (this process) -> cache.py | child.py (another process) -> CompiledProgram

This process traces and lowers for CUDA. A child process compiles, because XLA aborts on some programs. The result is
cached, so the same program for the same GPUs, options and versions is compiled once.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from meshkit.children import ChildDied, ChildFailed, KeptChild, sweep
from meshkit.compile import cache
from meshkit.compile.child import KERNELS_FILE
from meshkit.compile.choices import compile_to_fit, described_memory_bytes
from meshkit.compile.lowering import export_for_cuda, target_config, topology_name
from meshkit.compile.options import (
    PLAIN,
    CompileChoices,
    Option,
    bytes_at_once,
    check_compiler,
    left_out_lines,
    option_error,
    options_hash,
    planners_options,
    version_of,
)
from meshkit.compile.partitioned import refusal_of
from meshkit.compile.traced import TracedFlops
from meshkit.config.cluster import Cluster
from meshkit.config.files import integer
from meshkit.config.mesh import Placement
from meshkit.errors import ConfigError, ProgramError
from meshkit.hlo.module import Schedule, read_schedule
from meshkit.hlo.proto import Module, clean_path
from meshkit.sharding.mesh import DescribedMesh

COMPILE_TIMEOUT, _TIMEOUT_S = "MESHKIT_COMPILE_TIMEOUT", 1800.0
# Known failures of XLA: a part of its error text, and a remedy.
_REMEDIES = (
    ("ptxas too old", "pip install nvidia-cuda-nvcc-cu12: this GPU is older than CUDA 13 compiles for"),
    ("ptxas", "pip install 'meshkit[plan]' (ptxas and libdevice come with nvidia-cuda-nvcc-cu12)"),
    ("nvJitLink", "pip install 'meshkit[plan]' (ptxas and libdevice come with nvidia-cuda-nvcc-cu12)"),
    ("libdevice", "pip install 'meshkit[plan]' (ptxas and libdevice come with nvidia-cuda-nvcc-cu12)"),
    ("size mismatch when packing elements", '[xla] xla_gpu_experimental_use_collective_kernels = ""'),
    ("cudaErrorInvalidDevice", "[xla] xla_gpu_enable_cub_radix_sort = false"),
    ("Cannot infer shape for dot operation", "[xla] without xla_gpu_threshold_for_windowed_einsum_mib"),
    (
        "HloShardingV3",
        "with_sharding_constraint on results that mix arrays cut over one axis: this XLA dies with attached GPUs, too",
    ),
    ("Unsupported algorithm on the current device", 'train.precision = "fp32": GPUs before Ampere have no bf16'),
    (
        "Unable to convert MHLO to StableHLO",
        "jax.nn.scaled_matmul in place of jax.lax.scaled_dot, which this XLA cannot partition, GPUs attached or not",
    ),
    ("No supported config", "[xla] xla_gpu_enable_triton_gemm = false, or without xla_gpu_deterministic_ops"),
)


@dataclass(frozen=True)
class Rematerialization:
    """XLA's "Involuntary full rematerialization": an array made whole on every GPU to change its sharding."""

    array: str
    """Dtype and shape of one GPU's shard as XLA prints them, `bf16[8,512,128]`."""
    source: str
    """The `op_name` path of the model code; "" if XLA names none."""


@dataclass(frozen=True)
class CompiledProgram:
    """A program that was compiled for an absent cluster."""

    module: bytes
    """Serialized `HloModuleProto`, scheduled."""
    placement: Placement
    """Partition id -> GPU, NVLink domain and host."""
    memory: Mapping[str, int]
    """Bytes per GPU: `argument`, `output`, `alias`, `temp`, `generated_code`."""
    lower_s: float
    """Seconds of tracing and lowering in both processes."""
    compile_s: float
    """Seconds of XLA's compilation, or of reading the program from the cache."""
    peak_rss_bytes: int
    """The peak resident memory of the child process."""
    partitioner: str
    """`shardy` or `gspmd`."""
    chosen: tuple[Option, ...]
    """The compiler options that were used, each with its reason."""
    log: tuple[str, ...]
    """Messages for the user: damaged cache entries, options left out, the compiler's warnings."""
    rematerializations: tuple[Rematerialization, ...] = ()
    """Arrays that XLA makes whole to reshard them, each once."""
    host_memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of host memory per GPU, with the keys of `memory`."""
    cached: bool = False
    """Whether it was read from the cache."""
    live: Mapping[str, int] | None = None
    """Bytes of GPU memory at the peak, by origin; see `child.live_bytes`. None if XLA did not report them."""
    traced_flops: TracedFlops | None = None
    """FLOP of the program before it was compiled; None if they cannot be counted."""
    symmetric_bytes: int = 0
    """Bytes of temporaries in collective memory, which the client allocates outside of its pool."""
    dead_updates: tuple[str, ...] = ()
    """Types of parameters whose new values the step drops; see `traced.dead_updates`."""
    donated: tuple[int, ...] = ()
    """Numbers of the argument arrays that the step may overwrite."""
    carried: tuple[tuple[int, int], ...] = ()
    """Pairs of numbers: an argument array, and the output that is its new value."""

    @functools.cached_property
    def hlo(self) -> Module:
        """The parsed module."""
        return Module(self.module)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The instructions in execution order."""
        return read_schedule(self.hlo, self.placement)

    @property
    def options(self) -> dict[str, object]:
        """Compiler options used, by name."""
        return {o.name: o.value for o in self.chosen}

    @property
    def options_hash(self) -> str:
        """A hash of the compiler options used."""
        return options_hash(self.options)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the client's pool needed at once: arguments, outputs that do not alias them, temporaries, code."""
        return bytes_at_once(self.memory) - self.symmetric_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Bytes of host memory needed at once for one GPU."""
        return bytes_at_once(self.host_memory) if self.host_memory else 0


def compile_absent(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: DescribedMesh,
    cluster: Cluster,
    choices: CompileChoices = PLAIN,
) -> CompiledProgram:
    """Return a function lowered and compiled for the GPUs of a described cluster.

    Args:
        step: a function, jitted or not; its shardings come from `args` and from constraints inside.
        args: abstract arguments: `jax.ShapeDtypeStruct`s with NamedShardings on `mesh`.
        mesh: from `build_mesh(..., devices=describe_devices(cluster))`.
        cluster: the GPUs to compile for.
        choices: how to compile.

    Raises:
        ConfigError: the `plan` extra is missing or does not match jaxlib, MESHKIT_COMPILE_TIMEOUT is no number of
            seconds, or XLA refuses an option that the user set.
        ProgramError: the program cannot be traced for CUDA, or XLA refuses it or dies while compiling it.
    """
    check_compiler()
    timeout_s = compile_timeout_s()
    sweep()
    start = time.perf_counter()
    exported = export_for_cuda(step, args, mesh, cluster)
    lower_s = time.perf_counter() - start
    request = {
        "topology": topology_name(cluster),
        "mesh_shape": list(mesh.devices.shape),
        "axis_names": list(mesh.axis_names),
        "axis_types": [kind.name for kind in mesh.axis_types],
        "device_order": [d.id for d in mesh.devices.flat],
        "donated": exported.donated,
        "arguments": exported.arguments,
        "partitioned": {key: base64.b64encode(said).decode() for key, said in exported.partitioned.items()},
        "enable_x64": bool(jax.config.jax_enable_x64),
        "planners_options": planners_options(),
        "users_options": sorted(choices.options),
    }

    def make(chosen: Sequence[Option]) -> CompiledProgram:
        options = {o.name: o.value for o in chosen}
        memory_bytes = described_memory_bytes(options, cluster, choices.memory_fraction)
        asked = {**request, "compiler_options": options, "target_config": target_config(cluster.gpu, memory_bytes)}
        kept, notes, read_s = _kept_or_compiled(exported.program, asked, timeout_s)
        found = dict(kept.result)
        left_out = found.pop("left_out")
        found["lower_s"] = lower_s + (found["lower_s"] if read_s is None else 0.0)
        found["compile_s"] = found["compile_s"] if read_s is None else read_s
        return CompiledProgram(
            **found,
            module=kept.module,
            placement=mesh.placement(cluster),
            chosen=tuple(o for o in chosen if o.name not in left_out),
            log=(*notes, *left_out_lines(left_out, chosen), *_notable(kept.log)),
            rematerializations=read_rematerializations(kept.log),
            cached=read_s is not None,
            traced_flops=exported.flops,
            dead_updates=exported.dead_updates,
            donated=tuple(exported.donated),
            carried=exported.carried,
        )

    best, made = compile_to_fit(make, cluster, choices)
    if len(made) == 1:
        return best
    return dataclasses.replace(
        best, compile_s=sum(one.compile_s for one in made), cached=all(one.cached for one in made)
    )


def compile_timeout_s() -> float:
    """Return the time limit of the compiler process in seconds: MESHKIT_COMPILE_TIMEOUT, or half an hour if unset.

    Raises:
        ConfigError: the variable is no whole number of seconds from 1 to 999999999.
    """
    text = os.environ.get(COMPILE_TIMEOUT, "").strip()
    if not text:
        return _TIMEOUT_S
    seconds = integer(text) if len(text) < 10 else None
    if not seconds:
        what = f"{COMPILE_TIMEOUT} is '{text[:80]}', not a number of seconds."
        raise ConfigError(what, at="environment", hint=f"{COMPILE_TIMEOUT}=7200, or 1 to 999999999")
    return float(seconds)


@contextmanager
def compiling(*, keep: bool = True, timeout_s: int | None = None) -> Iterator[None]:
    """Set the cache and the time limit of all compilers in this context, also in processes that it starts.

    Args:
        keep: True uses the cache that the environment selects; False uses none.
        timeout_s: the time limit of each compile; None keeps the limit from the environment.
    """
    asked = {} if keep else {"MESHKIT_CACHE": "off"}
    asked |= {} if timeout_s is None else {COMPILE_TIMEOUT: str(timeout_s)}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


COMPILER = KeptChild("meshkit.compile.child", cache.deciding)


class _Died(ProgramError):
    """The compiler process died or timed out."""


def _kept_or_compiled(
    program: bytes, request: Mapping[str, Any], timeout_s: float
) -> tuple[cache.KeptProgram, list[str], float | None]:
    """Return the compiled program, notes for the user, and the seconds of a read from the cache (None on a miss)."""
    began = time.perf_counter()
    environment, notes = child_environment(), []
    folder = cache.cache_folder()
    if folder is None:
        return _compile(program, request, environment, timeout_s)[0], notes, None
    key, of_kernels = cache.program_key(program, request, environment), cache.kernels_key(request, environment)
    try:
        if kept := cache.load(folder, key):
            return kept, notes, time.perf_counter() - began
    except cache.DamagedEntry as e:
        notes.append(f"a kept program, {folder / str(e)}; it was compiled anew")
    kernels = b""
    try:
        kernels = cache.load_kernels(folder, of_kernels)
    except cache.DamagedEntry as e:
        notes.append(f"kept kernels, {folder / str(e)}; they were compiled anew")
    try:
        made, more = _compile(program, request, environment, timeout_s, kernels)
    except _Died:
        cache.store_kernels(folder, of_kernels, b"")  # in case they killed the compiler
        raise
    cache.store(folder, key, made)
    if more != kernels:
        cache.store_kernels(folder, of_kernels, more)
    return made, notes, None


def _compile(
    program: bytes, request: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float, kernels: bytes = b""
) -> tuple[cache.KeptProgram, bytes]:
    """Compile a program in the child process; return it and its kernel file, which also has the given kernels."""
    with COMPILER.use(environment) as child:
        module, kept = child.folder / "module.pb", child.folder / KERNELS_FILE
        (child.folder / "program.bin").write_bytes(program)
        if kernels:
            kept.write_bytes(kernels)
        try:
            result = child.ask({**request, "folder": str(child.folder)}, timeout_s)
        except TimeoutError:
            how = f"a longer --compile-timeout ({COMPILE_TIMEOUT} for other verbs)"
            raise _Died(
                f"XLA was still compiling after {timeout_s:.0f} s and was stopped.",
                hint=f'remat = "full", scanned layers, or {how}',
            ) from None
        except ChildDied as e:
            raise _Died(f"XLA's compiler died ({e.how}): {last_words(e.log)}", hint=_hint(e.log, e.how)) from None
        except ChildFailed as e:
            if refused := refusal_of(str(e)):
                hint = "shardings of its arguments that it can have, or the operation inside a jax.shard_map"
                raise ProgramError(f"{refused}.", hint=hint) from None
            raise ProgramError(f"XLA refused the program: {str(e).splitlines()[0][:500]}", hint=_hint(str(e))) from None
        if "option" in result:
            value = request["compiler_options"][result["option"]]
            raise option_error(result["option"], value, result["reason"], version_of("jaxlib") or "?")
        result["peak_rss_bytes"] = child.peak_rss_bytes
        made = cache.KeptProgram(result, child.log(), module.read_bytes())
        return made, kept.read_bytes() if kept.exists() else b""


def child_environment() -> dict[str, str]:
    """Return the environment of the compiler process: the user's, with changes that keep XLA's log and dump complete.

    The log has XLA's warnings about replicated arrays, and the dump has its buffers. A program from jax's own cache
    would have no dump, so that cache is off.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES")}
    return environment | {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def last_words(stderr: str) -> str:
    """Return XLA's last error line, without time stamp and source position; without one, the last line of all."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip() and "***" not in line]
    lines = [line for line in lines if not re.match(r"I\d{4} |WARNING: All log messages before", line)]
    fatal = [line for line in lines if re.match(r"[EF]\d{4} ", line) or "Check failed" in line or "Error" in line]
    last = (fatal or lines or ["it said nothing"])[-1]
    return re.sub(r"^[EF]\d{4} [\d:.]+\s+\d+ \S+\] ", "", last)[:300]


def _hint(text: str, signal_name: str = "") -> str | None:
    if signal_name == "SIGKILL":
        return "a machine with more memory: a kill without a word is nearly always the kernel's, out of memory"
    known = next((remedy for mark, remedy in _REMEDIES if mark in text), None)
    if signal_name == "SIGSEGV" and known is None and (version_of("jaxlib") or "").startswith("0.11."):
        return "jaxlib 0.12: 0.11 dies where an array of no elements, cut over mesh axes, enters a jax.shard_map"
    return known or (
        "the same without [xla]; if it still dies, a smaller model finds the operation" if signal_name else None
    )


def _notable(stderr: str) -> tuple[str, ...]:
    """Return the compiler's messages about memory and missing tools that a user must see, once each."""
    marks = ("Can't reduce memory use", "ptxas too old")
    said = (line.split("] ", 1)[-1].strip() for line in stderr.splitlines() if any(mark in line for mark in marks))
    return tuple(dict.fromkeys(said))


def read_rematerializations(stderr: str) -> tuple[Rematerialization, ...]:
    """Return XLA's warnings that it replicates an array to change its sharding, once for each place in the model.

    Warnings about a `fake_parameter` are left out: the partitioner only estimates a cost there.
    """
    found: dict[Rematerialization, None] = {}
    for line in stderr.splitlines():
        if "Involuntary full rematerialization" not in line or "%fake_parameter" in line:
            continue
        array = re.search(r"HLO operation:? %\S+ = (\w+\[[\d,]*\])", line)
        source = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
        found[Rematerialization(array[1] if array else "an array", clean_path(source[1]) if source else "")] = None
    return tuple(found)
