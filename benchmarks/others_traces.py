"""Read traces of other projects and print the tables of benchmarks/traces.md.

    python -m benchmarks.others_traces FILE.xplane.pb...
    python -m benchmarks.others_traces
    python -m benchmarks.others_traces --matmuls ARCHIVE...

The first command reads each file with the reader of `meshkit profile` and sums its busy time a second time, as a check.
For the check, jax's own decoder (`jax.profiler.ProfileData`) lists the kernels, and a plain loop takes the union of
their intervals within the steps. The table has the error message of each file that cannot be read.

The second command prints measured over predicted time for the traces in tests/data/traces that hold their program.

The third command takes archives of trainings that benchmarks/gpu recorded. It groups their single matmuls by duration.
Each group is compared with the predicted price, and with a price that is never below the time that cuBLAS takes for a
burst of the same shape.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax.profiler import ProfileData

from meshkit.config.cluster import Cluster, Gpu
from meshkit.errors import MeshkitError
from meshkit.hlo.costs import Matmul
from meshkit.predict.kernels import large_flops_per_s, precision_of, shape_share
from meshkit.report.compare import Pair, compare
from meshkit.report.summarize import group_rows
from meshkit.timeline import DeviceStep
from meshkit.trace.loose import open_loose
from meshkit.trace.operations import TracedProgram
from meshkit.trace.reader import read_trace
from meshkit.units import format_seconds
from meshkit.verbs.profile.profiler import TracedJob, measure_traces

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"
# The traces that hold their program, each with the cluster to use if the trace does not name the GPU.
PRICED: dict[str, Cluster | None] = {
    "h100_llama_1b/vm.xplane.pb.gz": None,
    "h100_debug/vm.xplane.pb.gz": None,
    "maxtext_h100x4": Cluster.load("dgx_h100"),
    "pax_a100x4": Cluster.load("dgx_a100", gpu="a100_40gb"),
}
_KINDS = ("matmul", "attention", "elementwise", "reduction", "data movement", "gather and scatter")
_COLLECTIVES = ("all-gather", "reduce-scatter")
# The smallest collective that is compared: latency alone decides the time of smaller ones.
_LEAST_BYTES = 2**20
_STREAM = re.compile(r"Stream ")  # Lines of kernels; a device's other lines are derived from them.


def busy_s(path: Path, program: TracedProgram, steps: Sequence[DeviceStep]) -> float:
    """Return the seconds in which at least one kernel ran, summed over the steps of all devices.

    The steps of a device follow one another without gaps, beginning with the program's first kernel.
    """
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
    """Return whether a kernel belongs to a program, by the runtime's program ID or else by the module's name."""
    if program.program_id is not None:
        return stats.get("program_id") == program.program_id
    return stats.get("hlo_module") == program.module


def row(path: Path) -> str:
    """Return the row of one file."""
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


def priced_column(name: str, cluster: Cluster | None) -> list[str]:
    """Return the cells of one trace: measured over predicted time, in the order of the table's rows."""
    measured = measure_traces(TRACES / name, TracedJob(cluster=cluster))
    priced = measured.price()
    assert priced is not None
    found = compare(priced, measured.report)
    kinds = {kind.kind: [kind.time_s] for kind in found.kernels}
    matmuls = [op.busy_s for op in found.kernel_ops if op.kind == "matmul"]
    ops = [op for row in measured.report.communication for op in row.ops]
    large = {op.name for op in ops if (op.payload_bytes or 0) >= _LEAST_BYTES * op.count}
    moved = {kind: [op.transfer_s for op in found.ops if op.key.startswith(f"{kind}|") and op.b_name in large]
             for kind in _COLLECTIVES}  # fmt: skip
    cells = [_ratio([found.step["time_s"]]), _spread(matmuls), *(_ratio(kinds.get(kind, [])) for kind in _KINDS)]
    return [*cells, *(_spread(moved[kind]) for kind in _COLLECTIVES)]


def _ratio(pairs: Sequence[Pair]) -> str:
    """Return the ratio of the first pair as text, or an empty string."""
    known = [pair.ratio for pair in pairs if pair.ratio is not None]
    return f"{known[0]:.3g}" if known else ""


def _spread(pairs: Sequence[Pair]) -> str:
    """Return the median, the least and the greatest ratio with their number, such as `1.01 (0.89 to 1.06, 22)`."""
    known = sorted(pair.ratio for pair in pairs if pair.ratio is not None)
    return f"{statistics.median(known):.2f} ({known[0]:.2f} to {known[-1]:.2f}, {len(known)})" if known else ""


def priced_table() -> None:
    """Print measured over predicted time for every trace that holds its program."""
    heads = ["step", "single matmuls", *(f"all {kind}" for kind in _KINDS), *(f"single {c}" for c in _COLLECTIVES)]
    columns = [priced_column(name, cluster) for name, cluster in PRICED.items()]
    print(f"| measured / predicted | {' | '.join(name.split('/')[0] for name in PRICED)} |\n" + "|---" * 5 + "|")
    for head, *cells in zip(heads, *columns):
        print(f"| {head} | {' | '.join(cells)} |")


def matmuls(archive: Path) -> Iterator[tuple[str, float, float, float]]:
    """Yield (GPU, measured seconds, predicted seconds, seconds of bursts) of each matmul of an archive of trainings."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as packed:
        for member in packed:
            packed.extract(member, folder, filter="data")
        for capture in sorted(Path(folder).rglob("run/trace")):
            (trace,) = capture.rglob("*.xplane.pb")
            trace.rename(capture / trace.name)
            measured = measure_traces(capture / trace.name, TracedJob())
            priced, schedule, cluster = measured.price(), measured.schedule, measured.gpu
            assert priced is not None
            assert schedule is not None
            assert cluster is not None
            cost_of = {i.name: i.cost for body in schedule.computations.values() for i in body}
            for op in compare(priced, measured.report).kernel_ops:
                cost, runs = cost_of.get(op.b_name), op.count.a
                if (
                    cost
                    and cost.matmuls
                    and not cost.convolves
                    and not cost.attention_flops
                    and op.busy_s.ratio
                    and runs
                ):
                    of = ((m, precision_of(cluster.gpu, m.dtype)) for m in cost.matmuls)
                    bursts = (m.flops / _burst_flops_per_s(m, cluster.gpu, precision) for m, precision in of)
                    yield cluster.gpu.key, (op.busy_s.b or 0) / runs, (op.busy_s.a or 0) / runs, sum(bursts)


def _burst_flops_per_s(matmul: Matmul, gpu: Gpu, precision: str) -> float:
    """Return the rate of a burst of a shape, or infinity for a precision without measured bursts."""
    kind = large_flops_per_s(gpu, precision, "burst") * shape_share(matmul, gpu, precision, "burst")
    return kind if precision in ("bf16", "fp16", "fp8") else math.inf


def matmul_table(archives: Sequence[Path]) -> None:
    """Print measured over predicted time of matmuls, grouped by their duration: the median and the median error."""
    every = [row for archive in archives for row in matmuls(archive)]
    print(
        "| GPU | a matmul takes | matmuls | as priced | error | no faster than a burst | error |\n" + "|---" * 7 + "|"
    )
    for gpu in sorted({row[0] for row in every}):
        for least, most in itertools.pairwise((20e-6, 100e-6, 300e-6, 1e-3, 3e-3, 1.0)):
            rows = [row for row in every if row[0] == gpu and least <= row[1] < most]
            cells = []
            for ratios in ([s / a for _, s, a, _ in rows], [s / max(a, b) for _, s, a, b in rows]):
                error = statistics.median(abs(math.log(ratio)) for ratio in ratios)
                cells.append(f"{statistics.median(ratios):.2f} | {math.expm1(error):.1%}")
            print(f"| {gpu} | {least * 1e6:.0f} to {most * 1e6:.0f} us | {len(rows)} | {' | '.join(cells)} |")


def main(paths: Sequence[Path]) -> None:
    """Print the table that the arguments ask for."""
    if paths and str(paths[0]) == "--matmuls":
        matmul_table(paths[1:])
        return
    if not paths:
        priced_table()
        return
    print("| file | size | read | busy, meshkit | busy, the loop | difference, or why not |\n" + "|---" * 6 + "|")
    for path in paths:
        print(row(path))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
