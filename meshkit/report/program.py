"""The report's `program`: which compiled program it is about, and with what options."""

from __future__ import annotations

from importlib import metadata

from meshkit.compile.program import CompiledProgram
from meshkit.hlo.schedule import Schedule
from meshkit.report.schema import OptionPart, ProgramPart
from meshkit.trace.captured import CaptureRecord


def program_part(compiled: CompiledProgram, schedule: Schedule) -> ProgramPart:
    """Of a program that was compiled for GPUs that are not there."""
    return ProgramPart(
        fingerprint=schedule.fingerprint,
        options_hash=compiled.options_hash,
        options=tuple(OptionPart(name=o.name, value=o.value, why=o.why) for o in compiled.chosen),
        jax=metadata.version("jax"),
        jaxlib=metadata.version("jaxlib"),
        partitioner=compiled.partitioner,
    )


def captured_program(record: CaptureRecord, schedule: Schedule | None) -> ProgramPart:
    """Of a program that a process captured."""
    return ProgramPart(
        fingerprint=schedule.fingerprint if schedule else None,
        options_hash=record.options_hash,
        jax=record.jax,
        jaxlib=record.jaxlib,
        partitioner=record.partitioner,
    )
