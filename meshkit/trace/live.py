"""Find exposed communication and stragglers in a traced step, in a low-priority process beside the training.

    the trace of one process -> start and end of each collective on each device -> a table of some kilobytes
    the tables of all processes -> clocks aligned by the ends of collectives -> waits -> stragglers

The process has the lowest priority, so that it does not slow the training down.
"""

from __future__ import annotations

import base64
import os
import statistics
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshkit.children import serve
from meshkit.config.mesh import Placement
from meshkit.hlo.module import Module, read_program
from meshkit.timeline import DeviceStep, exposed_waits
from meshkit.trace.captured import traced_program
from meshkit.trace.operations import TraceFile
from meshkit.trace.reader import read_instances
from meshkit.trace.skew import Instances, InstanceWaits, instance_waits, stragglers

_MOST_ROWS = 4096  # Limit on a table's rows; a larger table has only every second, fourth, ... collective.
_EVER = 1e9  # Seconds, longer than any step.
_LEAST = 0.01  # A device is reported if the others wait for it for at least this share of the step.


class Watcher:
    """Reads traces of one program.

    Args:
        program: path of the file with the serialized program.
        axes, shape, device_ids: the mesh that the program was compiled for.
        devices: ordinal in this process's traces -> global device id.
    """

    def __init__(
        self, program: str, axes: Sequence[str], shape: Sequence[int], device_ids: Sequence[int], devices: Any
    ):
        module = Module(Path(program).read_bytes())
        read = read_program(module, Placement.from_shape(axes, shape))
        self.program = traced_program(module, read, device_ids)
        self.devices = {int(ordinal): device for ordinal, device in devices.items()}

    def table(self, trace: str) -> dict[str, Any]:
        """Return a table of the collectives that this process's devices ran in the step of a trace."""
        (file,) = Path(trace).rglob("*.xplane.pb")
        found = read_instances(TraceFile(file, self.devices), self.program)
        entry, collective, _, start, end, _ = found.instances.columns()
        shares = [  # The exposed seconds of each span: its exposed wait if its transfer took no time.
            exposed_waits(spans, np.zeros(len(spans)), np.arange(len(spans)), exposed)
            for spans, exposed in zip(found.instances.split_steps(np.stack([start, end], 1)), found.exposed)
        ]
        exposed_s = np.concatenate(shares) if shares else np.zeros(0)
        every = 1
        while (kept := (collective >= 0) & (collective % every == 0)).sum() > _MOST_ROWS and every < len(collective):
            every *= 2
        columns = (entry, collective, start, end, exposed_s)
        return {
            "clock_ns": found.instances.clock_ns[0],
            "devices": [step.device for step in found.steps],
            "step_s": float(np.mean([s.total.window_s for s in found.sweeps])),
            "compute_s": float(np.mean([s.total.compute_s for s in found.sweeps])),
            "exposed_s": float(np.mean([s.total.exposed_s for s in found.sweeps])),
            "names": [c.name for c in found.collectives],
            "rows": [_packed(column[kept]) for column in columns],
        }

    def judge(self, tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the stragglers of a step, from the tables of all processes.

        Returns:
            `line`: keys for the step's line in `metrics.jsonl`. `exposed_share` is the exposed time divided by the
                step time, both summed over all processes. If others wait for a device for 1 % of the step or more,
                `late_device` is its id, and `late_share` is this share.
            `late`: the process that others wait for most, or None if nobody waits or there is one process. It has
                the waiting that the process causes, as a `share` of the step and as a share `of_all` waiting; the
                number of `others` in collectives with it; and `longer`, the relative excess of its compute time over
                the median process's.
        """
        exposed_s, steps_s = (sum(table[name] for table in tables) for name in ("exposed_s", "step_s"))
        line: dict[str, float] = {"exposed_share": exposed_s / steps_s}
        waits, open_s = self._waits(tables)
        if waits is None or not waits.judged.count:
            return {"line": line, "late": None}
        row, number = waits.judged.row, waits.judged.instance
        open_s = np.minimum(waits.wait_s, open_s)[row]  # A wait that compute hides costs nothing.
        process, step_s = waits.process[row], float(np.median([t["step_s"] for t in tables]))
        late = stragglers(number, waits.device[row], process, open_s, waits.early[row])[0]
        if late.delay_s >= _LEAST * step_s:
            line |= {"late_device": late.device, "late_share": late.delay_s / step_s}
        found = stragglers(number, process, process, open_s, waits.early[row])
        worst, all_s = found[0], sum(f.caused_wait_s for f in found)
        if not all_s or len(tables) < 2:
            return {"line": line, "late": None}
        compute_s = [t["compute_s"] for t in tables]
        usual_s = statistics.median_low(compute_s)
        return {
            "line": line,
            "late": {
                "process": worst.process,
                "share": worst.delay_s / step_s,
                "of_all": worst.caused_wait_s / all_s,
                "others": len(set(process[np.isin(number, number[process == worst.process])].tolist())) - 1,
                "longer": compute_s[worst.process] / usual_s - 1 if usual_s else 0.0,
            },
        }

    def _waits(self, tables: Sequence[Mapping[str, Any]]) -> tuple[InstanceWaits | None, np.ndarray]:
        """Return the waits of each device in each collective, and [rows] the exposed seconds of each span."""
        collectives = self.program.distinct_collectives
        index = {c.name: i for i, c in enumerate(collectives)}
        instances, devices, exposed = Instances(), [], [np.zeros(0)]
        for process, table in enumerate(tables):
            since_s = instances.begin(process, table["clock_ns"])
            entry, collective, start, end, exposed_s = map(_unpacked, table["rows"])
            own = np.array([index[name] for name in table["names"]], np.int64)[collective.astype(np.int64)]
            for i, device in enumerate(table["devices"]):
                mine = entry == i
                none, no_ops = np.zeros((0, 2)), np.zeros(0, np.int32)
                spans = np.stack([start[mine], end[mine]], axis=1)
                step = DeviceStep(device, 0, (-_EVER, _EVER), none, no_ops, spans, own[mine], none)
                instances.add(step, np.ones(len(spans), bool), since_s)
                devices.append(device)
                exposed.append(exposed_s[mine])
        n = len(devices)
        waits = instance_waits(
            instances, collectives, self.program.groups, devices, np.zeros(n, np.int64), np.ones(n, bool)
        )
        return waits, np.concatenate(exposed)


def _packed(column: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(column.astype("<f8").tobytes())).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<f8")


def main() -> None:
    """Answer requests: the first has a `Watcher`'s arguments; each later one has a `trace` or tables to `judge`."""
    watcher: Watcher | None = None

    def answer(request: Mapping[str, Any]) -> Any:
        nonlocal watcher
        if watcher is None:
            watcher = Watcher(**request)
            return None
        return watcher.table(request["trace"]) if "trace" in request else watcher.judge(request["judge"])

    os.nice(19)
    serve(answer)


if __name__ == "__main__":
    main()
