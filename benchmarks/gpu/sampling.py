"""Sample clocks, power and temperature of the GPU while something runs. They are read, never set."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any, Self


class Sampler:
    """A context manager that reads NVML ten times a second, and records nothing on a machine without a driver."""

    def __init__(self, every_s: float = 0.1) -> None:
        self._every_s = every_s
        self._rows: list[tuple[float, float, int, int, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _read(self) -> None:
        import pynvml as n

        try:
            n.nvmlInit()
            gpu = n.nvmlDeviceGetHandleByIndex(0)
        except n.NVMLError:
            return
        while not self._done.wait(self._every_s):
            self._rows.append(
                (
                    time.perf_counter(),
                    n.nvmlDeviceGetPowerUsage(gpu) / 1000,
                    n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM),
                    n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_MEM),
                    n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
                )
            )
        n.nvmlShutdown()

    def summary(self) -> dict[str, Any]:
        """Return medians over the samples in which the GPU worked: those with at least 80 % of the highest power."""
        if not self._rows:
            return {}
        most = max(power for _, power, *_ in self._rows)
        rows = [row for row in self._rows if row[1] >= 0.8 * most]
        _, power, clock, memory, heat = (statistics.median(column) for column in zip(*rows))
        return {"power_w": power, "sm_mhz": clock, "memory_mhz": memory, "celsius": heat, "samples": len(rows)}
