"""Constants of a step's price, what 10 % more of each does: `python -m benchmarks.constants --rows FILE.csv --out DIR`.

DIR is that of `python -m benchmarks.published`; of each framework, GPU and precision the first row whose program is
compiled there is simulated again with one constant after the other, all else equal. A rate that is 10 % higher makes a
step faster, a cost that is 10 % higher makes it slower. What is fitted to sweeps of NCCL has a table of its own in
docs/concepts/network.md, what the compiler counts (FLOP, bytes, groups) is no constant.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from benchmarks.ablation import versions
from benchmarks.published import programs, replay
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row, measured_step_time_s, read_rows
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.predict import kernels as matmuls
from meshkit.predict.nccl import by_hand, nccl_constants

MORE = 1.1


@dataclass(frozen=True)
class Constant:
    """One number, or one of each GPU.

    Attributes:
        table: `gpu`, `nic`, `kernels` or `by_hand`: where it stands; `shapes`: the whole of matmul_shapes.csv.
        name: its key there; of a GPU or NIC below `achieved`.
        unit: of the value; "" for a share.
    """

    table: str
    name: str
    what: str
    unit: str = ""


CONSTANTS = (
    Constant("gpu", "matmul", "a long run of large matmuls, of the peak"),
    Constant("gpu", "matmul_fp8", "the same in fp8"),
    Constant("gpu", "matmul_mxfp8", "the same in MXFP8"),
    Constant("gpu", "matmul_nvfp4", "the same in NVFP4"),
    Constant("gpu", "burst", "large matmuls at the full clock"),
    Constant("gpu", "burst_fp8", "the same in fp8"),
    Constant("gpu", "burst_mxfp8", "the same in MXFP8"),
    Constant("gpu", "burst_nvfp4", "the same in NVFP4"),
    Constant("shapes", "matmul_shapes.csv", "cuBLAS's rate of every shape", "TFLOP/s"),
    Constant("gpu", "attention", "attention forward, causal, 4k, of the peak"),
    Constant("gpu", "attention_backward", "backward, of the rate forward"),
    Constant("gpu", "contended", "a matmul's rate beside a collective"),
    Constant("gpu", "memory", "device memory, of the peak"),
    Constant("gpu", "nvlink", "NVLink, of the peak, where no sweep says more"),
    Constant("nic", "achieved", "a NIC, of its line rate"),
    Constant("kernels", "gpu_spread", "standard deviation of the GPUs of a job"),
    Constant("kernels", "integer_lanes", "integer instructions of a multiprocessor in a clock"),
    Constant("kernels", "power_exponent", "power of tensor cores by their rate"),
    Constant("kernels", "attention_power_forward", "loss of attention at the power cap, over a matmul's"),
    Constant("kernels", "attention_power_backward", "the same backward"),
    Constant("kernels", "attention_head_64", "heads of 64 over heads of 128"),
    Constant("kernels", "fp8_promoted", "fp8 on Hopper whose sums are promoted, over others"),
    Constant("kernels", "nccl_memory_passes", "of device memory for a byte that arrives", "passes"),
    Constant("kernels", "block_clocks", "between two blocks of a multiprocessor", "clocks"),
    Constant("kernels", "sector_clocks", "a sector of a look-up across rows", "clocks"),
    Constant("kernels", "transpose_clocks", "an element that is transposed", "clocks"),
    Constant("kernels", "add_clocks", "an element that a scatter adds, beside others of its row", "clocks"),
    Constant("kernels", "add_apart_clocks", "one in a line of memory of its own", "clocks"),
    Constant("by_hand", "kernel_gap_s", "between two kernels", "us"),
    Constant("by_hand", "xla_launch_s", "a collective of a step beyond one of a sweep", "us"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constants", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of `python -m benchmarks.published`")
    options = parser.parse_args(arguments)
    rows = first_rows(read_rows(options.rows), options.out)
    changed: dict[Constant | None, dict[str, Prediction]] = {c: {} for c in (None, *CONSTANTS)}
    for row in rows:  # a row at a time, so that a program is read once and not kept
        with mock.patch.object(replay, "get_program", functools.cache(programs.get_program)):
            for constant, found in changed.items():
                with more_of(constant):
                    p = replay.predict(row, options.out, compile_missing=False)
                if p.error is not None:
                    found[row.id] = p
        print(row.id, file=sys.stderr)
    print(render(changed, {row.id: row for row in rows}))
    return 0


def first_rows(rows: Sequence[Row], folder: Path) -> list[Row]:
    """The first row of each framework, GPU and precision whose program is in the folder."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        run = replay.resolve(row)
        if isinstance(run, str) or not measured_step_time_s(row, run.model_flops)[0]:
            continue
        if replay.has_program(run.toml, folder / "programs"):
            found.setdefault((replay.family_of(run), str(run.machines.table["gpu"]), run.precision), row)
    return list(found.values())


@contextmanager
def more_of(constant: Constant | None) -> Iterator[None]:
    """The replay with 10 % more of a constant."""
    if constant is None:
        yield
        return
    adapted, load, shapes = programs.adapted, Cluster.load, matmuls.table_flops_per_s
    patches = []
    if constant.table in ("gpu", "nic"):
        change = functools.partial(with_more, constant=constant)
        patches.append(mock.patch.object(programs, "adapted", lambda *a: change(adapted(*a))))
        patches.append(mock.patch.object(replay, "adapted", lambda *a: change(adapted(*a))))
        patches.append(mock.patch.object(replay, "Cluster", mock.Mock(load=lambda *a, **k: change(load(*a, **k)))))
    elif constant.table == "shapes":
        patches.append(mock.patch.object(matmuls, "table_flops_per_s", lambda *a: MORE * shapes(*a)))
    else:
        table, key = _place(constant)
        patches.append(mock.patch.dict(table, {key: MORE * table[key]}))
    try:
        for patch in patches:
            patch.start()
        _forget()
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
        _forget()


def _forget() -> None:
    """What was found with other constants: rates of shapes, numbers set by hand."""
    matmuls._share.cache_clear()
    by_hand.cache_clear()


def with_more(cluster: Cluster, constant: Constant) -> Cluster:
    if constant.table == "nic":
        nic = cluster.nic
        return cluster.model_copy(update={"nic": replace(nic, achieved=min(1.0, MORE * nic.achieved))} if nic else {})
    achieved = {name: x * (MORE if name == constant.name else 1.0) for name, x in cluster.gpu.achieved.items()}
    return cluster.model_copy(update={"gpu": replace(cluster.gpu, achieved=achieved)})


def _place(constant: Constant) -> tuple[dict, str]:
    if constant.table == "kernels":
        return catalog.catalog()["kernels"], constant.name
    return nccl_constants()["by_hand"][constant.name], "value"


def render(changed: Mapping[Constant | None, Mapping[str, Prediction]], rows: Mapping[str, Row]) -> str:
    """A line for each constant: what it is, where from, and the medians with 10 % more of it."""
    base = changed[None]
    dense = {i: p for i, p in base.items() if not p.family.endswith("experts")}
    kinds: dict[str, Callable[[Prediction], bool]] = {
        "all": lambda p: True,
        "dense": lambda p: p.id in dense,
        "plan's own": lambda p: p.handling == "none",
    }
    head = ["constant", "what", "value", "source", "kind", "step, median and most"]
    head += [f"{name}: median, bias" for name in kinds]
    lines = [versions(len(base)), "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for constant, found in changed.items():
        if constant is None:
            cells = ["as shipped", "", "", "", "", ""]
        else:
            steps = [found[i].predicted_s / p.predicted_s - 1 for i, p in base.items()]  # pyright: ignore
            most = max(steps, key=abs)
            said = f"{statistics.median(steps):+.1%}, {most:+.1%}"
            cells = [f"`{constant.name}`", constant.what, *known_of(constant), said]
        for wanted in kinds.values():
            errors = [p.error for p in found.values() if wanted(p)]
            cells.append(f"{statistics.median(map(abs, errors)):.1%}, {statistics.median(errors):+.1%}")  # pyright: ignore
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def known_of(constant: Constant) -> tuple[str, str, str]:
    """(value, keys of its sources in catalog.toml, kind)."""
    if constant.table == "by_hand":
        return f"{1e6 * nccl_constants()['by_hand'][constant.name]['value']:g} us", "nccl.toml, `by_hand`", "assumed"
    if constant.table == "shapes":
        return "5 to 3,700 TFLOP/s", "benchmarks/kernel_rates.md", "measured"
    everything = catalog.catalog()
    if constant.table == "kernels":
        tables, name, values = [everything["kernels"]], constant.name, [everything["kernels"][constant.name]]
    else:
        many = everything[f"{constant.table}s"]
        tables = [many[key] for key in many if key != "cpu"]
        name = "achieved" if constant.table == "nic" else f"achieved.{constant.name}"
        found = [t["achieved"] if constant.table == "nic" else t["achieved"].get(constant.name) for t in tables]
        values = [x for x in found if x]
    keys = sorted({key for table in tables for key, of in table["sources"].items() if name in of})
    kinds = {_kind(everything["sources"][key]) for key in keys}
    ends = f"{min(values):g} to {max(values):g}" if len({*values}) > 1 else f"{values[0]:g} {constant.unit}"
    return ends.strip(), ", ".join(f"`{key}`" for key in keys), " and ".join(sorted(kinds, reverse=True))


def _kind(source: str) -> str:
    sheet = "data sheet" if "whitepaper" in source else "measured"
    return "assumed" if "assumed" in source else sheet


if __name__ == "__main__":
    sys.exit(main())
