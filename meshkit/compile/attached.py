"""Compile the training step for the attached devices, and keep its executables on disk.

    TrainProgram -> lowered -> XLA, with the options that plan uses -> CompiledStep, which the trainer runs
    with compile_cache(say):   jax compiles -> <private folder>/<machine>/<key> -> the next run loads the executable

A cache entry is native code that the next run executes, so whoever can write to the folder can run code as its owner.
Entries are therefore read and kept only in a private folder of meshkit (private.py). jax makes the keys (program,
options, versions, devices). Unlike jax's own cache, this one writes a file whole or not at all, requires that the file
belongs to the user, and stores a digest. When jax's own cache is killed while it writes, it leaves half a file behind
and warns of that file at every start.

The folder is `compiled` in `cache.cache_root`. It has one subfolder for each kind of CPU, because code for one kind may
use instructions that another kind lacks.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, compiler
from jax._src.compilation_cache_interface import CacheInterface

from meshkit.compile.cache import DamagedEntry, Store, cache_root, max_bytes, unfit_folder
from meshkit.compile.choices import choices_for, compile_to_fit
from meshkit.compile.options import (
    CompileChoices,
    Option,
    RefusedOption,
    bytes_at_once,
    compile_lowered,
    hint_for,
    left_out_lines,
    memory_of,
)
from meshkit.compile.traced import traced_flops
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.config.places import Places
from meshkit.console import say
from meshkit.distributed.join import Agreement
from meshkit.errors import ConfigError
from meshkit.hlo.module import Module, Schedule, read_schedule
from meshkit.predict.coverage import dequantized_note
from meshkit.private import NotPrivate, check_private, private_folder
from meshkit.step.train_step import TrainProgram

# Seconds to wait for the other processes. All begin to compile together, but a busy host finishes later.
_AGREE_S = 1800.0
_SETTINGS = {
    # also keep the small programs around the step: a restart compiles dozens of them
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    # the report names source lines, so a program with other source lines needs another key
    "jax_compilation_cache_include_metadata_in_key": True,
}
WRITE_ARGUMENTS = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
_SUFFIX = ".executable"


@dataclass(frozen=True)
class CompiledStep:
    """An executable step."""

    program: Any
    """The compiled program; its arguments are the state and the batch."""
    options: Mapping[str, object]
    """The compiler options that the program was compiled with."""
    seconds: float
    """Seconds of tracing, lowering and compiling."""
    executable_s: float = 0.0
    """The part of `seconds` that XLA took to compile the program, or the cache to load it."""


@dataclass(frozen=True)
class _Executable:
    """One compile of the step for GPUs, as `CompileAttempt` (choices.py) describes it."""

    program: Any
    chosen: Sequence[Option]
    log: tuple[str, ...]
    placement: Placement

    @property
    def peak_bytes(self) -> int:
        memory = memory_of(self.program)
        return bytes_at_once(memory) if memory else 0

    @functools.cached_property
    def schedule(self) -> Schedule:
        return _schedule_of(self.program, self.placement)


def _schedule_of(program: Any, placement: Placement) -> Schedule:
    (module, *_) = program.runtime_executable().hlo_modules()
    return read_schedule(Module(module.as_serialized_hlo_module_proto()), placement)


def compile_step(
    program: TrainProgram, cluster: Cluster, placement: Placement, xla: Mapping[str, object]
) -> CompiledStep:
    """Return the training step compiled ahead of time for the attached devices.

    Args:
        program: the step, on a mesh of the attached devices.
        cluster: describes the attached devices.
        placement: the place of each partition on these devices.
        xla: the compiler options that the user set in `[xla]`.

    Raises:
        ConfigError: XLA refuses an option that the user set.
        RunError: other processes of the job did not answer.
    """
    arguments = (program.abstract_state, program.abstract_batch)
    choices = CompileChoices(xla) if cluster.is_cpu else choices_for(program, cluster, placement, xla)
    lower = lambda: program.step.lower(*arguments)
    compiled = compile_attached(lower, cluster, placement, choices, program.spec.places)
    if program.spec.train.precision == "mxfp8" and not cluster.is_cpu and jax.process_index() == 0:
        flops = traced_flops(program.step.trace(*arguments).jaxpr)
        wanted = flops.block_scaled / cluster.num_gpus if flops else 0.0
        if note := dequantized_note(_schedule_of(compiled.program, placement), cluster.gpu, wanted):
            say(f"meshkit: {note}")
    return compiled


def compile_attached(
    lower: Callable[[], Any], cluster: Cluster, placement: Placement, choices: CompileChoices, places: Places
) -> CompiledStep:
    """Return any step compiled ahead of time for the attached devices.

    Args:
        lower: traces and lowers the step.
        cluster: describes the attached devices.
        placement: the place of each partition on these devices.
        choices: how to compile; on CPUs only its `options` are used.
        places: the file and line of each `[xla]` option, for error messages.

    Raises:
        ConfigError: XLA refuses an option that the user set.
        RunError: other processes of the job did not answer.
    """
    began = time.perf_counter()
    lowered = lower()
    lower_s = time.perf_counter() - began
    try:
        if cluster.is_cpu:
            compiled, _ = compile_lowered(lowered, choices.options, choices.options)
            seconds = time.perf_counter() - began
            return CompiledStep(compiled, choices.options, seconds, seconds - lower_s)
        made = compile_for_gpus(lowered, cluster, placement, choices)
    except RefusedOption as e:
        message = f"XLA refuses the option {e.name}: {e.reason}."
        raise places.error(f"xla.{e.name}", message, hint_for(e.name, e.reason)) from None
    if jax.process_index() == 0:
        for line in made.log:
            say(f"meshkit: {line}")
    seconds = time.perf_counter() - began
    return CompiledStep(made.program, {o.name: o.value for o in made.chosen}, seconds, seconds - lower_s)


def compile_for_gpus(lowered: Any, cluster: Cluster, placement: Placement, choices: CompileChoices) -> _Executable:
    """Return a lowered program compiled with the same options and instruction order as in `plan`.

    Args:
        lowered: the result of `trace(...).lower(...)`.
        cluster: its GPU memory must hold the program, and the instructions are ordered by durations predicted for it.
        placement: the place of each partition, which the schedule needs.
        choices: the options of the user and of the program, and the share of memory that the program may take.

    Raises:
        RefusedOption: XLA refuses an option that the user set.
        RunError: other processes of the job did not answer.
    """

    def make(chosen: Sequence[Option]) -> _Executable:
        compiled, left_out = compile_lowered(lowered, {o.name: o.value for o in chosen}, choices.options)
        kept = [o for o in chosen if o.name not in left_out]
        return _Executable(compiled, kept, tuple(left_out_lines(left_out, chosen)), placement)

    agree = _as_process_0 if jax.distributed.is_initialized() else lambda topic, mine: mine
    made, _ = compile_to_fit(make, cluster, choices, agree=agree)
    return made


def _as_process_0(topic: str, mine: Any) -> Any:
    """Return process 0's value: processes whose programs order collectives differently would deadlock."""
    return Agreement("pgle").reach(topic, mine, lambda said: said[0], timeout_s=_AGREE_S)


class CompileCache(CacheInterface):
    """Executables in a private folder, by key. The least recently used are deleted beyond `most_bytes` in total."""

    def __init__(self, folder: Path, most_bytes: int):
        self.store, self._path = Store(folder, most_bytes), folder  # jax asks for _path
        self.hits = self.misses = 0  # look-ups so far

    def get(self, key: str) -> bytes | None:
        """Return the entry of a key; None if there is no entry or its file is damaged."""
        content = None
        with suppress(DamagedEntry):
            content = self.store.read(key + _SUFFIX)
        self.hits += content is not None
        self.misses += content is None
        return content

    def put(self, key: str, value: bytes) -> None:
        """Store an entry whole or not at all. On a full disk the entry is lost, without an error."""
        self.store.write(key + _SUFFIX, value)


@contextmanager
def compile_cache(say: Callable[[str], None]) -> Iterator[CompileCache | None]:
    """Make jax store the programs that it compiles in this context, and load them in the next run.

    Enter it after jax.distributed is initialized, in a job that initializes it.

    Args:
        say: prints a sentence if the default cache folder cannot be used.

    Yields:
        The cache; None if caching is off, its folder cannot be used, or the user gave jax a cache folder.

    Raises:
        ConfigError: `MESHKIT_CACHE` or `JAX_COMPILATION_CACHE_DIR` names a folder that is not private.
    """
    if theirs := jax.config.jax_compilation_cache_dir:
        checked = _check_theirs(theirs)
        try:
            jax.config.update("jax_compilation_cache_dir", checked)
            yield None
        finally:
            jax.config.update("jax_compilation_cache_dir", theirs)
        return
    cache = _open(say)
    if cache is None:
        yield None
        return
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", *_SETTINGS)}
    write: Any = getattr(compiler, "_cache_write", None)
    try:
        # XLA:GPU keeps the results of its autotuner in this folder, too
        for name, value in {"jax_compilation_cache_dir": str(cache.store.folder), **_SETTINGS}.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        compilation_cache._cache, compilation_cache._cache_initialized = cache, True
        as_expected = write is not None and list(inspect.signature(write).parameters) == WRITE_ARGUMENTS
        if as_expected and jax.default_backend() == "cpu":
            compiler._cache_write = _write_from_any_process
        yield cache
    finally:
        if write is not None:
            compiler._cache_write = write
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def _write_from_any_process(
    cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any
) -> None:
    """Store an executable of any process: on CPUs each process has its own keys, and jax only stores process 0's."""
    try:
        compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, int(compile_time_secs))
    except Exception as error:  # XLA cannot serialize this executable, so the next run compiles it again
        warnings.warn(f"{module_name} cannot be kept: {error}", stacklevel=2)


def _open(say: Callable[[str], None]) -> CompileCache | None:
    """Return the cache in a private folder; None if caching is off, or if the default folder cannot be used.

    In the second case `say` prints the reason.
    """
    root = cache_root()
    if root is None:
        return None
    folder = root / "compiled"
    try:
        cache = CompileCache(private_folder(private_folder(folder) / _machine()), max_bytes())
    except NotPrivate as problem:
        if "MESHKIT_CACHE" in os.environ:
            raise unfit_folder(folder, problem) from None
        why = f"{folder}: {problem}; MESHKIT_CACHE can name another folder"
        say(f"compiled programs are not kept, so a restart compiles again: {why}")
        return None
    with suppress(OSError):
        cache.store.trim()
    return cache


def _check_theirs(folder: str) -> str:
    """Return the real path of the cache folder that the user gave jax, after a check that the folder is private.

    jax opens each entry by this path, so no link in it may be redirected later.
    """
    if "://" in folder:
        return folder
    path = Path(folder)
    try:
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(path)
    except NotPrivate as problem:
        raise ConfigError(
            f"jax's compilation cache holds code that would be run, and it is not private: {problem}.",
            at=f"JAX_COMPILATION_CACHE_DIR={folder}",
            hint="a folder of your own (chmod 700), or unset that variable to use meshkit's cache",
        ) from None
    return os.path.realpath(path)


def _machine() -> str:
    """Return a name for this kind of CPU: a hash of its model and instruction set flags."""
    described = [platform.machine(), platform.processor()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        described += [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
