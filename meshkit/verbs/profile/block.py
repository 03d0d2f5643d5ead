"""`mk.profile`: trace a `with` block in the user's own loop, and measure the executions of one program in it.

the block -> its trace in FOLDER/trace/ (meshkit.trace.capture) -> measured by profiler.py when `report` is first read

This module runs in the job's own processes, so it imports jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError, a_type, check_kinds
from meshkit.report.folder import find_prediction
from meshkit.report.schema import Report
from meshkit.step.program import StepFacts
from meshkit.timeline import Timeline
from meshkit.trace.capture import Capture, CapturedStep, chosen_processes, traced_block
from meshkit.trace.captured import TRACE_FOLDER
from meshkit.verbs.profile.profiler import MeasuredTraces, TracedJob, measure_run, measure_traces


class ProfileCapture:
    """The object that `mk.profile` yields; it has a `report` and a `timeline` once the block has ended.

    Args:
        traced: None if the block captured a compiled program on a known mesh. Otherwise the known facts of the job.
        program: the name of the program to measure, if `traced` is given; None is the one with the most time.
    """

    def __init__(self, folder: Path, traced: TracedJob | None = None, program: str | None = None):
        self.folder, self._traced, self._program = folder, traced, program

    @cached_property
    def _measured(self) -> MeasuredTraces:
        return measure_run(self.folder) if self._traced is None else self._measure(self._traced, self._program)

    def _measure(self, traced: TracedJob, program: str | None) -> MeasuredTraces:
        return measure_traces(self.folder / TRACE_FOLDER, traced, program=program)

    @cached_property
    def report(self) -> Report:
        """The measured report, with the program's predicted times. The first access writes `report.json`.

        Raises:
            TraceError: the block is still running, or did not run the program.
        """
        report = self._measured.write(None, find_prediction(self.folder) or self._measured.price())
        report.write(self.folder)
        return report

    @property
    def timeline(self) -> Timeline:
        return self._measured.timeline

    def report_of(self, program: str) -> Report:
        """Return the report of another program in the block.

        Args:
            program: the name of its HLO module (`jit_step`) or of its jitted function (`step`).

        Raises:
            TraceError: the block ran no such program.
        """
        measured = self._measure(self._traced or TracedJob(), program)
        return measured.write(None, measured.price())


@contextmanager
def profile(
    folder: str | Path,
    *,
    program: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    cluster: Cluster | None = None,
    mesh_spec: MeshSpec | None = None,
    model_flops: float | None = None,
    tokens: float | None = None,
    processes: int | Sequence[int] | None = None,
) -> Iterator[ProfileCapture]:
    """Trace a block, and measure the executions of one program in it.

        with mk.profile("runs/mine", mesh=mesh, cluster=cluster) as capture:
            for batch in batches:
                state, loss = train_step(state, batch)
        print(capture.report.verdict)

    Args:
        folder: the run folder; the trace goes to `trace/` in it.
        program: the step that the block calls: a jitted function, its name, or the result of
            `jitted.lower(...).compile()`, whose memory and compiler options are recorded, too, if `mesh` is given. None
            is the program with the most time.
        mesh: the mesh for which the program was compiled. Without it, rows of communication are by replica groups.
        cluster: the cluster of the devices. Without it, collectives of a compiled `program` on a mesh count as inside
            one NVLink domain, and the links of other programs are unknown.
        mesh_spec: the spec that the mesh was built from, if any.
        model_flops, tokens: FLOP and tokens of one step over all devices, for MFU and tokens per second.
        processes: the processes of the job that capture, or how many; None for all.

    Raises:
        ConfigError: `program` is not a program, or the job does not have one of the processes.
    """
    check_kinds(profile, folder=folder, mesh=mesh, cluster=cluster, mesh_spec=mesh_spec)
    folder = Path(folder)
    facts = StepFacts(model_flops=model_flops, tokens=tokens)
    chosen = chosen_processes(processes, jax.process_count())
    if mesh is None or not hasattr(program, "runtime_executable"):
        if mesh is not None and mesh_spec is None:
            mesh_spec = MeshSpec.parse(dict(mesh.shape))
        name = _name_of(program)
        with traced_block(folder / TRACE_FOLDER, processes=chosen):
            yield ProfileCapture(folder, TracedJob(mesh_spec, cluster, facts), name)
        return
    step = CapturedStep(program, mesh, cluster, mesh_spec, facts)
    capture = Capture(folder / TRACE_FOLDER, step, steps=(0, 0), processes=chosen)
    capture.start()
    try:
        yield ProfileCapture(folder)
    except BaseException:
        capture.abandon()
        raise
    capture.stop()


def _name_of(program: Any) -> str | None:
    """Return the name of a program's HLO module, or of its jitted function."""
    if program is None or isinstance(program, str):
        return program
    if hasattr(program, "runtime_executable"):
        return program.runtime_executable().hlo_modules()[0].name
    name = getattr(program, "__name__", None)
    if name is None or not hasattr(program, "lower"):
        raise ConfigError(
            f"`program` is {a_type(program)}, but a profile needs a jitted function or a compiled program.",
            hint="jax.jit(step), its name, or jax.jit(step).lower(*args).compile()",
        )
    return re.sub(r"\W", "_", name)  # jax names modules this way: `<lambda>` becomes `jit__lambda_`.
