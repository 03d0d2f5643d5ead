"""Traces of other people: `python -m benchmarks.others_traces FILE.xplane.pb...`, the table of benchmarks/traces.md.

Each is read by `meshkit profile`'s reader, and its busy time is summed a second time: jax's own decoder
(`jax.profiler.ProfileData`) lists the kernels, and a plain loop takes the union of their intervals in the windows of
the steps. What cannot be read says why, in the words of the tool.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from jax.profiler import ProfileData

from meshkit.errors import MeshkitError
from meshkit.report.summarize import group_rows
from meshkit.timeline import DeviceStep
from meshkit.trace.loose import open_loose
from meshkit.trace.operations import TracedProgram
from meshkit.trace.reader import read_trace
from meshkit.units import format_seconds

_STREAM = re.compile(r"Stream ")  # lines of kernels; the others of a device are derived from them


def busy_s(path: Path, program: TracedProgram, steps: Sequence[DeviceStep]) -> float:
    """Seconds in which a kernel ran, over all device steps: those of a device follow each other, from the program's
    first kernel on."""
    planes = {int(p.name.rsplit(":", 1)[1]): p for p in ProfileData.from_file(str(path)).planes if "GPU:" in p.name}
    total, first = 0.0, {}
    for step in steps:
        lines = [line for line in planes[step.device].lines if _STREAM.match(line.name)]
        events = [event for line in lines for event in line.events]
        if step.device not in first:
            first[step.device] = min(event.start_ns for event in events if _is_of(dict(event.stats), program))
        reached = first[step.device]
        last = first[step.device] = reached + (step.window[1] - step.window[0]) * 1e9
        for start, end in sorted((event.start_ns, event.end_ns) for event in events):
            start, end = max(start, reached), min(end, last)
            if end > start:
                total, reached = total + (end - start) * 1e-9, end
    return total


def _is_of(stats: dict[str | None, object], program: TracedProgram) -> bool:
    """Whether a kernel is of a program: by the runtime's number, else by the name of its module."""
    if program.program_id is not None:
        return stats.get("program_id") == program.program_id
    return stats.get("hlo_module") == program.module


def row(path: Path) -> str:
    """What comes of one file, as a row of the table."""
    size = f"{path.stat().st_size / 1e3:,.0f} kB"
    try:
        loose = open_loose(path)
        trace = read_trace(loose.files, loose.program, rows=group_rows(loose.program.distinct_collectives)[0])
    except MeshkitError as error:
        return f"| {path.name} | {size} | not read | | | {error.message} |"
    totals = [swept.total for swept in trace.sweeps]
    ours = sum(t.window_s - t.idle_s for t in totals)
    theirs = busy_s(path, loose.program, trace.steps.steps)
    what = f"{len(totals)} steps of '{loose.program.module}'"
    sums = f"{format_seconds(ours)} | {format_seconds(theirs)} | {ours / theirs - 1:+.0e}"
    return f"| {path.name} | {size} | {what} | {sums} |"


def main(paths: Sequence[Path]) -> None:
    """Prints the table."""
    print("| file | size | read | busy, meshkit | busy, the loop | difference, or why not |\n" + "|---" * 6 + "|")
    for path in paths:
        print(row(path))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
