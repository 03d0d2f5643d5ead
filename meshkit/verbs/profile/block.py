"""`mk.profile`: the executions of a program in a block of somebody's own loop, traced and measured.

the block -> RUN/trace/ (meshkit.trace.capture) -> profiler.py, when its report is first asked for

This is the one half of the verb that runs where the job runs, and so the one that imports jax.
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
from meshkit.report.schema import Report
from meshkit.step.program import StepFacts
from meshkit.timeline import Timeline
from meshkit.trace.capture import Capture, CapturedStep, chosen_processes, traced_block
from meshkit.trace.captured import TRACE_FOLDER
from meshkit.verbs.profile.profiler import MeasuredTraces, Measurement, TracedJob, measure_run, measure_traces


class ProfileCapture:
    """What `mk.profile` yields: `.report` and `.timeline` once the block is left.

    Args:
        folder: the run folder.
        traced: of a block without a compiled program, where its devices are and what its steps do.
        program: of such a block, the program whose executions are the steps; None is that with the most time.
    """

    def __init__(self, folder: Path, traced: TracedJob | None = None, program: str | None = None):
        self.folder, self._traced, self._program = folder, traced, program

    @cached_property
    def _measured(self) -> Measurement | MeasuredTraces:
        if self._traced is None:
            measured = measure_run(self.folder)
        else:
            measured = measure_traces(self.folder / TRACE_FOLDER, self._traced, program=self._program)
        measured.report.write(self.folder)
        return measured

    @property
    def report(self) -> Report:
        """The measured report; reading it writes `report.json` into the folder.

        Raises:
            TraceError: the block is still running, or ran no step of the program.
        """
        return self._measured.report

    @property
    def timeline(self) -> Timeline:
        """The measured steps."""
        return self._measured.timeline

    def report_of(self, program: str) -> Report:
        """The report of another program that ran in the block, by its module or by the function that was jitted.

        Args:
            program: `jit_step`, or the function's name `step`.

        Raises:
            TraceError: the block ran no such program.
        """
        return measure_traces(self.folder / TRACE_FOLDER, self._traced or TracedJob(), program=program).report


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
    """Traces what runs inside the block, and measures the executions of one program in it.

        with mk.profile("runs/mine", mesh=mesh, cluster=cluster) as capture:
            for batch in batches:
                state, loss = train_step(state, batch)
        print(capture.report.verdict)

    Args:
        folder: the run folder; the trace goes to `trace/` in it.
        program: the step that the block calls: a jitted function or its name, or what `jitted.lower(...).compile()`
            returns, of which memory and compiler options are recorded too; None is the program with the most time.
        mesh: the mesh it was compiled for; without it rows go by replica groups.
        cluster: where the devices are; without it the link of each collective is that of one domain.
        mesh_spec: the spec the mesh was built from, if it was.
        model_flops, tokens: of one step over all devices, for MFU and tokens per second.
        processes: which processes of the job capture, or how many; None for all.

    Raises:
        ConfigError: `program` is none, or a process that the job does not have.
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
    capture = Capture(
        folder / TRACE_FOLDER,
        CapturedStep(program, mesh, cluster, mesh_spec, facts),
        steps=(0, 0),
        processes=chosen,
    )
    capture.start()
    try:
        yield ProfileCapture(folder)
    except BaseException:
        capture.abandon()
        raise
    capture.stop()


def _name_of(program: Any) -> str | None:
    """The module, or the function, that a program is.

    Raises:
        ConfigError: it is no program.
    """
    if program is None or isinstance(program, str):
        return program
    if hasattr(program, "runtime_executable"):
        return program.runtime_executable().hlo_modules()[0].name
    name = getattr(program, "__name__", None)
    if name is None or not hasattr(program, "lower"):
        raise ConfigError(
            f"`program` is {a_type(program)}, but a profile is of a jitted function or of a compiled program.",
            hint="jax.jit(step), its name, or jax.jit(step).lower(*args).compile()",
        )
    return re.sub(r"\W", "_", name)  # as jax names modules: `<lambda>` is `jit__lambda_`
