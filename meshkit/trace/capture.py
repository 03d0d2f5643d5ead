"""Capture real steps: a profiler trace, and the facts that the trace does not have.

    trace/plugins/profile/p0/HOST.xplane.pb   the profiler's trace (TensorBoard and XProf open `trace/` as well)
    trace/program-p0.hlo.pb.gz                the compiled program, with each operation's communication
    trace/capture-p0.json                     mesh, devices, links, cluster, steps, work, options, versions, cost

Each process writes its own files; in a large job, some processes are enough. This module does not read the files:
`meshkit.verbs.profile.profiler` does, on any machine.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from meshkit.compile.options import bytes_at_once, memory_of, options_hash
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError, a_type
from meshkit.redaction import recorded_environment
from meshkit.step.program import NO_FACTS, StepFacts
from meshkit.trace import captured

_HOST_TRACER_LEVEL = 1  # The lowest level with XLA:CPU's operations; GPU kernels are traced at any level.


@dataclass(frozen=True)
class CapturedStep:
    """A compiled step, and the known facts about it."""

    program: Any
    """The compiled step (`jitted.lower(...).compile()`), or anything with the method `runtime_executable`."""
    mesh: jax.sharding.Mesh
    cluster: Cluster | None = None
    mesh_spec: MeshSpec | None = None
    facts: StepFacts = NO_FACTS
    options: Mapping[str, Any] | None = None


class Capture:
    """Traces the steps from `first` to `last` of a training loop, both included.

    The loop calls `before(step, state)` and `after(step, outputs)` around every step. Only the call of
    `before` for the step `first` and that of `after` for `last` take time: they wait until the devices are idle. The
    other calls only compare step numbers.

        capture = Capture(run / "trace", CapturedStep(compiled, mesh), steps=(10, 13))
        for step in range(steps):
            capture.before(step, state)
            state, metrics = compiled(state, batch)
            capture.after(step, (state, metrics))

    Args:
        folder: the folder for the files; files of an earlier capture of this process are removed.
        steps: (first, last).
        processes: processes that capture; None for all. Other processes do nothing.

    Raises:
        ConfigError: `last` is before `first`, or the program has no compiled module.
    """

    def __init__(
        self, folder: str | Path, step: CapturedStep, *, steps: tuple[int, int], processes: Sequence[int] | None = None
    ):
        self.folder = Path(folder)
        self.first, self.last = steps
        if self.last < self.first:
            raise ConfigError(f"[profile] steps = [{self.first}, {self.last}] ends before it starts.")
        self._step, self._module = step, _compiled_module(step.program)
        self._before = captured_memory(step.mesh.local_devices).peak_bytes
        self._processes = None if processes is None else tuple(sorted(set(processes)))
        self._done = 0
        self._start_s = self._began = 0.0
        self.untraced_step_s: float | None = None
        """Median time of a step without a trace, to compute the overhead; set it before the first captured step."""
        self.active = False

    def before(self, step: int, pending: Any = None) -> None:
        """Call `start` if this is the first step to capture."""
        if step == self.first and not self.active:
            self.start(pending)

    def after(self, step: int, pending: Any = None) -> None:
        """Count a step, and call `stop` if it is the last one."""
        if self.active:
            self._done += 1
            if step >= self.last:
                self.stop(pending)

    def start(self, pending: Any = None) -> None:
        """Wait for the arrays in `pending` (None: all), and start the trace; do nothing in a process not chosen."""
        if self._processes is not None and jax.process_index() not in self._processes:
            return
        jax.block_until_ready(jax.live_arrays() if pending is None else pending)
        began = time.perf_counter()
        clean(self.folder)
        # `_write` saves the program in a file of its own, which can be read without the trace.
        start_trace(self.folder, programs=False)
        self.active, self._done = True, 0
        self._began = time.perf_counter()
        self._start_s = self._began - began

    def stop(self, pending: Any = None) -> None:
        """Wait for the arrays in `pending` (None: all), stop the trace, and write the other files."""
        if not self.active:
            return
        jax.block_until_ready(jax.live_arrays() if pending is None else pending)
        ended = time.perf_counter()
        jax.profiler.stop_trace()
        self.active = False
        cost = captured.CapturedCost(
            start_s=self._start_s,
            stop_s=time.perf_counter() - ended,
            traced_step_s=(ended - self._began) / self._done / self._step.facts.steps_per_call if self._done else None,
            untraced_step_s=self.untraced_step_s,
        )
        self._write(cost)

    def abandon(self) -> None:
        """Stop the trace and remove its files, for steps that failed."""
        if self.active:
            self.active = False
            jax.profiler.stop_trace()
            clean(self.folder)

    def _write(self, cost: captured.CapturedCost) -> None:
        process = jax.process_index()
        program_file = f"program-p{process}.hlo.pb.gz"
        serialized = self._module.as_serialized_hlo_module_proto()
        (self.folder / program_file).write_bytes(gzip.compress(serialized, compresslevel=6))
        step, mesh = self._step, self._step.mesh
        devices = captured.CapturedMesh(
            axes=mesh.axis_names, shape=mesh.devices.shape, device_ids=tuple(d.id for d in mesh.devices.flat)
        )
        placement = devices.placement(step.cluster, step.mesh_spec) if step.cluster else None
        across = placement.domains_along().items() if placement else ()
        links = {name: "infiniband" if domains > 1 else "nvlink" for name, domains in across} or None
        record = captured.CaptureRecord(
            process=process,
            processes=jax.process_count(),
            host=socket.gethostname(),
            platform=mesh.devices.flat[0].platform,
            device_kind=next((d.device_kind for d in mesh.local_devices), None),
            devices=tuple(
                captured.CapturedDevice(id=id_, ordinal=i) for i, id_ in device_numbers(mesh.local_devices).items()
            ),
            mesh=devices,
            mesh_spec=step.mesh_spec.to_dict() if step.mesh_spec else None,
            cluster=step.cluster.to_dict() if step.cluster else None,
            module=self._module.name,
            program_file=program_file,
            first_step=self.first,
            num_steps=self._done,
            partitioner="shardy" if jax.config.jax_use_shardy_partitioner else "gspmd",
            options_hash=options_hash(step.options) if step.options else None,
            work=step.facts,
            memory=captured_memory(mesh.local_devices, self._before, program_bytes_of(step.program)),
            captured_processes=self._processes,
            domains=tuple(placement.domains.tolist()) if placement else None,
            links=links,
            options=dict(step.options) if step.options else None,
            xla_flags=recorded_environment().get("XLA_FLAGS"),
            trace=_written_trace(self.folder, process),
            cost=cost,
            jax=jax.__version__,
            jaxlib=metadata.version("jaxlib"),
            runtime=mesh.devices.flat[0].client.platform_version,
        )
        # The record is written last, so that a reader who finds it finds the other files too.
        (self.folder / f"capture-p{process}.json").write_text(record.model_dump_json(indent=1))


@contextlib.contextmanager
def traced_block(folder: Path, *, processes: Sequence[int] | None = None) -> Iterator[None]:
    """Trace a block; the profiler puts the HLO of the programs into the trace, so that no other file is needed.

    Args:
        folder: the folder for the trace; an earlier trace of this process is removed.
        processes: processes that trace; None for all.
    """
    if processes is not None and jax.process_index() not in processes:
        yield
        return
    clean(folder)
    jax.block_until_ready(jax.live_arrays())
    start_trace(folder, programs=True)
    try:
        yield
        jax.block_until_ready(jax.live_arrays())
    except BaseException:
        jax.profiler.stop_trace()
        clean(folder)
        raise
    jax.profiler.stop_trace()


def start_trace(folder: Path, *, programs: bool) -> None:
    """Start the profiler, with the index of this process in the session's ID.

    Args:
        folder: made if needed; its subfolder `plugins/profile/p<process>/` gets the trace.
        programs: whether the profiler puts the HLO of the programs that run into the trace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = _HOST_TRACER_LEVEL
    options.enable_hlo_proto = programs
    options.session_id = f"p{jax.process_index()}"  # Else processes on one host would overwrite each other's file.
    jax.profiler.start_trace(str(folder), profiler_options=options)


def clean(folder: Path) -> None:
    """Remove the files of an earlier capture of this process."""
    process = jax.process_index()
    shutil.rmtree(folder / "plugins" / "profile" / f"p{process}", ignore_errors=True)
    for name in (f"capture-p{process}.json", f"program-p{process}.hlo.pb.gz"):
        (folder / name).unlink(missing_ok=True)


def chosen_processes(choice: int | Sequence[int] | None, processes: int) -> tuple[int, ...] | None:
    """Return the processes that capture, in order; None means all.

    Args:
        choice: a number, for that many processes spread over the job (at most all); a list of processes; None for all.
        processes: number of processes of the job.

    Raises:
        ConfigError: the job does not have one of the processes.
    """
    if choice is None:
        return None
    if isinstance(choice, int):
        count = min(choice, processes)
        return tuple(sorted({i * processes // count for i in range(count)}))
    if beyond := [p for p in choice if not 0 <= p < processes]:
        raise ConfigError(
            f"[profile] processes names process {beyond[0]}, but the job has {processes}.",
            hint=f"processes below {processes}, or a number of processes",
        )
    return tuple(sorted(set(choice)))


def _written_trace(folder: Path, process: int) -> captured.CapturedTrace | None:
    found = sorted((folder / "plugins" / "profile" / f"p{process}").glob("*.xplane.pb"))
    if not found:
        return None
    file, size = str(found[0].relative_to(folder)), found[0].stat().st_size
    return captured.CapturedTrace(file=file, bytes=size, blake2b=captured.digest(found[0]))


def _compiled_module(program: Any) -> Any:
    try:
        modules = program.runtime_executable().hlo_modules()
    except AttributeError:
        raise ConfigError(
            f"`program` is {a_type(program)}, but a capture needs the compiled program it traces.",
            hint="program = jitted.lower(*args).compile(), which the loop must call, too",
        ) from None
    return modules[0]


def serialized_module(program: Any) -> bytes:
    """Return a compiled program as its `HloModuleProto`.

    Raises:
        ConfigError: the program is not compiled.
    """
    return _compiled_module(program).as_serialized_hlo_module_proto()


def device_numbers(devices: Sequence[Any]) -> dict[int, int]:
    """Return a dictionary from a device's number in this process's traces to its id in the job."""
    return {_ordinal(d): d.id for d in devices}


def _ordinal(device: Any) -> int:
    """Return a device's number in traces: the global id on a CPU; on a GPU, the number within the process."""
    if device.platform == "cpu":
        return device.id
    return device.id if device.local_hardware_id is None else device.local_hardware_id


def captured_memory(
    devices: Any, before_bytes: int | None = None, program_bytes: int | None = None
) -> captured.CapturedMemory:
    """Return the allocator statistics of the device with the highest peak; empty for CPU devices, which have none."""
    found = [stats for d in devices if (stats := d.memory_stats())]
    if not found:
        return captured.CapturedMemory()
    fullest = max(found, key=lambda stats: stats.get("peak_bytes_in_use", 0))
    return captured.CapturedMemory(
        pool_bytes=fullest.get("bytes_limit"),
        peak_bytes=fullest.get("peak_bytes_in_use"),
        before_bytes=before_bytes,
        program_bytes=program_bytes,
    )


def program_bytes_of(program: Any) -> int | None:
    """Return the bytes that XLA reports for a compiled program; None if it reports none."""
    found = memory_of(program) if hasattr(program, "memory_analysis") else None
    return bytes_at_once(found) if found else None
