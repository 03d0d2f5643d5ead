"""Measure the time and the memory from a trace file to a report, and print them.

    python -m benchmarks.trace_speed [--events N] [--hta PYTHON]
    python -m benchmarks.trace_speed --cli [--before TREE] [--sqlite]
    python -m benchmarks.trace_speed --profile

The first command writes an XSpace file of N kernels with the stats that the CUDA collector gives them. It reads the
file to a report in a process of its own on one core, and prints events per second and peak memory. `--hta` names the
Python of an environment that has HolisticTraceAnalysis. The same kernels, as a Kineto trace, then go through its
overlap analysis for comparison.

The second command runs the whole of `meshkit profile` on N kernels of 8 GPUs, and on N kernels of one GPU, in processes
of their own. `--before` alternates with another checkout, and `--sqlite` uses an nsys export instead of XSpace. CPU
seconds are user and system time of the process and its children. The third command prints the functions that take most
of the reader's time.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gzip
import json
import os
import platform
import pstats
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MODULE = "jit_train_step"
KERNELS_PER_LAYER = 24
_NAMED = (
    "device_id", "correlation_id", "kernel_details", "tf_op", "name", "hlo_op", "hlo_module", "program_id",
    "context_id", "scope_range_id", "theoretical_occupancy_pct",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="kernels in the trace")
    parser.add_argument("--devices", type=int, default=8, help="GPUs in the trace")
    parser.add_argument("--steps", type=int, default=10, help="executions of the program in the trace")
    parser.add_argument("--repeats", type=int, default=3, help="runs; the fastest counts")
    parser.add_argument("--hta", metavar="PYTHON", help="python of an environment with HolisticTraceAnalysis")
    parser.add_argument("--cli", action="store_true", help="measure the whole command")
    parser.add_argument("--before", metavar="TREE", help="with --cli: another checkout to compare with")
    parser.add_argument("--sqlite", action="store_true", help="with --cli: an export of nsys in place of XSpace")
    parser.add_argument("--profile", action="store_true", help="the functions that take the reader's time")
    parser.add_argument("--read", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read:
        print(json.dumps(measure(Path(options.read), options.devices, options.steps, _layers(options))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        (whole_command if options.cli else profile if options.profile else report)(options, Path(folder))
    return 0


def whole_command(options: argparse.Namespace, folder: Path) -> None:
    """Print the CPU seconds and the peak memory of `meshkit profile` for each checkout."""
    here = Path(__file__).resolve().parents[1]
    trees = {"before": Path(options.before).resolve()} if options.before else {}
    trees["now"] = here
    for devices in (8, 1):
        options.devices = devices
        kernels = trace_kernels(options.steps, _layers(options))
        file = folder / f"{devices}.{'sqlite' if options.sqlite else 'xplane.pb'}"
        if options.sqlite:
            write_sqlite(file, kernels, devices)
        else:
            file.write_bytes(xspace(kernels, devices))
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
        for _ in range(options.repeats):
            for name, tree in trees.items():
                runs[name].append(_profiled(tree, file))
        for name, each in runs.items():
            seconds = sorted(s for s, _ in each)
            print(
                f"{file.name}, {len(kernels) * devices} kernels, {name}: {seconds[0]:.2f} CPU s at least, "
                f"{seconds[len(seconds) // 2]:.2f} the median of {len(seconds)}; {max(m for _, m in each) / 1e6:.0f} MB"
            )


def _profiled(tree: Path, file: Path) -> tuple[float, float]:
    """Return the CPU seconds and the peak bytes of one `meshkit profile` of a checkout.

    A small process starts the command, because a child's peak begins with that of its parent.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", _USED, sys.executable, "-m", "meshkit", "profile", str(file)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    seconds, peak = json.loads(done.stdout)
    return seconds, peak


_USED = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
"""


def report(options: argparse.Namespace, folder: Path) -> None:
    """Write the trace, measure its reading, and print the results."""
    kernels = trace_kernels(options.steps, _layers(options))
    file = folder / "trace.xplane.pb"
    file.write_bytes(xspace(kernels, options.devices))
    size = file.stat().st_size
    events = len(kernels) * options.devices
    print(f"{events} kernels on {options.devices} GPUs, {options.steps} steps, {size / 1e6:.1f} MB; {_machine()}")
    runs = [_child(sys.executable, file, options) for _ in range(options.repeats)]
    best = min(runs, key=lambda run: run["seconds"])
    rate = events / best["seconds"]
    print(f"meshkit: {best['seconds']:.2f} s from file to report, {rate / 1e6:.2f} M events/s on one core")
    print(f"  loader {best['load_s']:.2f} s, windows and sweeps {best['seconds'] - best['load_s']:.2f} s")
    print(f"  memory beyond the file itself: {best['peak_bytes'] / size:.1f} x its size at the most")
    print(f"  overlapped {best['overlapped']:.2%} of communication")
    if options.hta:
        compare_with_hta(options.hta, kernels, options.devices, folder, events, rate)
    else:
        print("HolisticTraceAnalysis: not run (--hta PYTHON)")


def profile(options: argparse.Namespace, folder: Path) -> None:
    """Print the functions that take most of the reader's time; that of numpy counts for the function that calls it."""
    for devices in (8, 1):
        options.devices = devices
        file, layers = folder / f"{devices}.xplane.pb", _layers(options)
        file.write_bytes(xspace(trace_kernels(options.steps, layers), devices))
        measure(file, devices, options.steps, layers)  # This imports what reading needs.
        found = cProfile.Profile(time.process_time, builtins=False)
        found.runcall(measure, file, devices, options.steps, layers)
        pstats.Stats(found).strip_dirs().sort_stats("tottime").print_stats(12)


def measure(file: Path, devices: int, steps: int, layers: int) -> dict[str, float]:
    """Return the CPU seconds, the peak memory and the overlap of one reading, from the file to the report."""
    from meshkit.report.summarize import group_rows, summarize
    from meshkit.trace import operations
    from meshkit.trace import reader as trace

    collectives = {c.name: c for c in _collectives(layers)}
    rows = group_rows(tuple(collectives.values()))[0]
    spent = [0.0]
    read = operations.read_operations

    def timed(*args):
        began = time.process_time()
        found = read(*args)
        spent[0] += time.process_time() - began
        return found

    trace.read_operations = timed  # pyright: ignore[reportPrivateImportUsage]
    before = _memory_bytes("VmRSS")
    began = time.process_time()
    found = trace.read_trace(
        [operations.TraceFile(file, {i: i for i in range(devices)})],
        operations.TracedProgram(MODULE, collectives),
        rows=rows,
        num_steps=steps,
    )
    report = summarize(found.steps, swept=found, source="profile")
    seconds = time.process_time() - began
    peak = _memory_bytes("VmHWM") - before
    step = report.step
    assert step.communication_s
    assert step.overlapped_s is not None
    return {
        "seconds": seconds,
        "load_s": spent[0],
        "peak_bytes": peak - file.stat().st_size,
        "overlapped": step.overlapped_s / step.communication_s,
    }


def trace_kernels(steps: int, layers: int) -> list[tuple[str, int, int, int]]:
    """Return (instruction, stream, start_ns, duration_ns) of the kernels of one GPU."""
    kernels, now = [], 10_000
    for _ in range(steps):
        for layer in range(layers):
            began = now
            for i in range(KERNELS_PER_LAYER):
                duration = 3000 + i * 977 % 9000
                kernels.append((f"fusion.{layer * KERNELS_PER_LAYER + i}", 13, now, duration))
                now += duration + 700
            kernels.append((f"all-gather-start.{layer}", 21, began + 5000, now - began))
            now += 8000
    return kernels


def xspace(kernels: Sequence[tuple[str, int, int, int]], devices: int) -> bytes:
    """Return an XSpace file in the form that the CUDA collector writes."""
    names = list(dict.fromkeys(name for name, *_ in kernels))
    strings = [MODULE, "XlaModule:", *names, *(f"regs:{i} static_shared:0 grid:{i},1,1" for i in range(64))]
    id_of = {s: len(_NAMED) + 1 + i for i, s in enumerate(strings)}
    symbols = [f"loop_fusion_kernel_{i}" for i in range(200)]
    symbols.append("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    named = b"".join(_named(4, i, s) for i, s in enumerate(symbols, 1))
    named += b"".join(_named(5, i, s) for i, s in enumerate((*_NAMED, *strings), 1))
    stats = {name: _stats_of(name, i, id_of) for i, name in enumerate(names)}
    symbol = {name: 201 if name.startswith("all-") else 1 + i % 200 for i, name in enumerate(names)}
    out = []
    for device in range(devices):
        lines: dict[int, list[bytes]] = {}
        head = _message(4, _number(1, _NAMED.index("device_id") + 1) + _number(3, device))
        for correlation, (name, stream, start, duration) in enumerate(kernels, 1):
            linked = _message(4, _number(1, 2) + _number(3, correlation))
            event = _number(1, symbol[name]) + _number(2, start * 1000) + _number(3, duration * 1000)
            lines.setdefault(stream, []).append(_message(4, event + head + linked + stats[name]))
        plane = _number(1, device + 1) + _message(2, f"/device:GPU:{device}".encode())
        for stream, events in lines.items():
            label = _message(2, f"Stream #{stream}(Kernel)".encode())
            plane += _message(3, _number(1, stream) + label + _number(3, 1000) + b"".join(events))
        out.append(_message(1, plane + named))
    return b"".join(out)


_EXPORT = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE ThreadNames (nameId INTEGER, globalTid INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, globalTid INTEGER, textId INTEGER, text TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER, graphNodeId INTEGER);
"""


def write_sqlite(file: Path, kernels: Sequence[tuple[str, int, int, int]], devices: int) -> None:
    """Write an SQLite file as nsys exports it, with each kernel launched inside the range of its thunk."""
    names = list(dict.fromkeys(name for name, *_ in kernels))
    texts = [f"Thunk:#name={name},hlo_op={name}#" for name in names]
    id_of = {text: i for i, text in enumerate((*names, *texts))}
    per_step = len(kernels) // sum(kernel[0] == kernels[0][0] for kernel in kernels)
    ranges, calls, ran = [], [], []
    for device in range(devices):
        thread = 1000 << 24 | device
        for i, (name, _, start, duration) in enumerate(kernels):
            at = 1000 * (i + 1)  # The launch, on the host's clock.
            if i % per_step == 0:
                module = f"XlaModule:#hlo_module={MODULE},program_id=7#"
                ranges.append((at - 100, at + 1000 * per_step - 200, thread, None, module))
            ranges.append((at, at + 600, thread, id_of[f"Thunk:#name={name},hlo_op={name}#"], None))
            calls.append((at + 100, at + 400, thread, len(calls)))
            ran.append((start, start + duration, device, len(ran), 1000 << 24, id_of[name], None))
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.executescript(_EXPORT)
        tables = {"StringIds": [(i, text) for text, i in id_of.items()], "NVTX_EVENTS": ranges,
                  "CUPTI_ACTIVITY_KIND_RUNTIME": calls, "CUPTI_ACTIVITY_KIND_KERNEL": ran}  # fmt: skip
        for table, rows in tables.items():
            database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def compare_with_hta(python: str, kernels: Sequence, devices: int, folder: Path, events: int, rate: float) -> None:
    """Print the speed of HolisticTraceAnalysis on the same kernels, beside meshkit's."""
    traces = folder / "kineto"
    traces.mkdir()
    for rank in range(devices):
        with gzip.open(traces / f"rank{rank}.json.gz", "wt", compresslevel=1) as f:
            json.dump(_kineto(kernels, rank), f)
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    done = subprocess.run(
        [python, "-c", _HTA, str(traces)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"HolisticTraceAnalysis failed: {done.stderr.strip().splitlines()[-1:]}")
        return
    found = json.loads(done.stdout.strip().splitlines()[-1])
    theirs = events / found["seconds"]
    print(f"HolisticTraceAnalysis {found['version']}: {found['seconds']:.2f} s, {theirs / 1e3:.0f} k events/s")
    print(
        f"  overlapped {found['overlap']:.2f} % of communication; meshkit reads {rate / theirs:.0f} x as many events/s"
    )


_HTA = """
import sys, os, json, importlib.metadata
from hta.trace_analysis import TraceAnalysis
began = sum(os.times()[:4])
found = TraceAnalysis(trace_dir=sys.argv[1]).get_comm_comp_overlap(visualize=False)
seconds = sum(os.times()[:4]) - began  # of its worker processes too
column = [c for c in found.columns if "overlap" in c][0]
version = importlib.metadata.version("HolisticTraceAnalysis")
print(json.dumps({"seconds": seconds, "overlap": float(found[column].mean()), "version": version}))
"""


def _kineto(kernels: Sequence, rank: int) -> dict:
    """Return a Kineto trace with the kernels and the launch of each; HolisticTraceAnalysis needs the launches."""
    events: list[dict] = [
        {"ph": "X", "cat": "cpu_op", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1e-3, "args": {}}
    ]
    for i, (name, stream, start, duration) in enumerate(kernels, 1):
        symbol = "ncclDevKernel_AllGather_RING_LL" if name.startswith("all-") else "loop_fusion_kernel"
        linked = {"correlation": i, "External id": i}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
        events.append(launch | {"ts": start / 1e3 - 5, "dur": 1.0, "args": dict(linked)})
        kernel = {"ph": "X", "cat": "kernel", "name": symbol, "pid": 0, "tid": stream, "ts": start / 1e3}
        events.append(kernel | {"dur": duration / 1e3, "args": {"stream": stream, "device": 0} | linked})
    return {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 8},
            "traceEvents": events}  # fmt: skip


def _child(python: str, file: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [python, "-m", "benchmarks.trace_speed", "--read", str(file)]
    for name in ("devices", "steps", "events"):
        command += [f"--{name}", str(getattr(options, name))]
    one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | one_core, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _collectives(layers: int) -> list:
    from meshkit.hlo.schedule import Collective

    where = {"axes": ("fsdp",), "axes_complete": True, "link": "nvlink", "fabric": None, "dtype": "bf16"}
    sizes = {"group_size": 8, "num_groups": 1, "gpus_per_domain": 8, "payload_bytes": 2**20}
    names = [f"all-gather-start.{i}" for i in range(layers)]
    return [Collective(name=n, key=n, collective="all-gather", **where, **sizes) for n in names]


def _layers(options: argparse.Namespace) -> int:
    return max(1, round(options.events / options.devices / options.steps / (KERNELS_PER_LAYER + 1)))


def _memory_bytes(key: str) -> int:
    """Return a value of /proc/self/status in bytes: VmRSS is the memory now, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    return 0


def _machine() -> str:
    return f"Python {platform.python_version()}, {platform.machine()}, load {os.getloadavg()[0]:.1f}"


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _named(field: int, id_: int, name: str) -> bytes:
    return _message(field, _number(1, id_) + _message(2, _number(1, id_) + _message(2, name.encode())))


def _stats_of(name: str, i: int, id_of: dict[str, int]) -> bytes:
    """Return the stats of a kernel that do not change from one launch to the next."""
    texts = {
        "kernel_details": f"regs:{i % 64} static_shared:0 grid:{i % 64},1,1", "tf_op": "XlaModule:", "name": name,
        "hlo_op": name, "hlo_module": MODULE,
    }  # fmt: skip
    out = b"".join(_message(4, _number(1, _NAMED.index(k) + 1) + _number(7, id_of[v])) for k, v in texts.items())
    for key, value in (("program_id", 7), ("context_id", 1), ("scope_range_id", 3)):
        out += _message(4, _number(1, _NAMED.index(key) + 1) + _number(4, value))
    occupancy = _number(1, _NAMED.index("theoretical_occupancy_pct") + 1) + b"\x11" + bytes(8)
    return out + _message(4, occupancy)


if __name__ == "__main__":
    raise SystemExit(main())
