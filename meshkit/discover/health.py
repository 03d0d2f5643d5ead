"""Read the error counters of a machine's GPUs and links, and report counters that have grown.

NVML, sysfs -> error_counts -> process 0 compares with the first counts -> a line for each counter that has grown
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pynvml

from meshkit.discover.probe import Probe

_INFINIBAND, _NET = "/sys/class/infiniband", "/sys/class/net"
# Linux, Documentation/ABI/stable/sysfs-class-infiniband.
_LINK_COUNTERS = {
    "link_downed": "link failures",
    "link_error_recovery": "link recoveries",
}


def error_counts(probe: Probe, gpus: Sequence[int] = ()) -> dict[str, int]:
    """Return the error counters of a machine by name; counters that it does not have are left out.

    NVML counts the uncorrected memory errors and the remapped memory rows of each GPU. sysfs counts how often the link
    of each InfiniBand port or Ethernet adapter went down, and how often the link of an InfiniBand port recovered.

    Args:
        probe: reads the files of the machine.
        gpus: the NVML indices of the GPUs to query.
    """
    found: dict[str, int] = {}
    for device in probe.list_dir(_INFINIBAND):
        for port in probe.list_dir(f"{_INFINIBAND}/{device}/ports"):
            for counter, name in _LINK_COUNTERS.items():
                text = (probe.read_file(f"{_INFINIBAND}/{device}/ports/{port}/counters/{counter}") or "").strip()
                if text.isdecimal():
                    found[f"{name} of {device} port {port}"] = int(text)
    for device in probe.list_dir(_NET):
        text = (probe.read_file(f"{_NET}/{device}/carrier_down_count") or "").strip()
        if text.isdecimal() and probe.list_dir(f"{_NET}/{device}/device"):  # Virtual interfaces have no device.
            found[f"link failures of {device}"] = int(text)
    for gpu in gpus:
        for name, count in _GPU_COUNTERS.items():
            try:
                found[f"{name} of GPU {gpu}"] = int(count(pynvml.nvmlDeviceGetHandleByIndex(gpu)))
            except (pynvml.NVMLError, AttributeError, TypeError, ValueError):
                continue
    return found


def _uncorrected(handle: Any) -> int:
    return pynvml.nvmlDeviceGetTotalEccErrors(
        handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    )


def _remapped(handle: Any) -> int:
    correctable, uncorrectable, *_ = pynvml.nvmlDeviceGetRemappedRows(handle)
    return correctable + uncorrectable


_GPU_COUNTERS = {"uncorrected memory errors": _uncorrected, "remapped memory rows": _remapped}


class ErrorGrowth:
    """Compares the error counters of all processes with the first counts."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], int] = {}
        self._named: dict[tuple[str, str], int] = {}
        self.hosts: set[str] = set()
        """Hosts that have a counter that has grown."""

    def look(self, said: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a line for each counter that has grown since the first call, and again once the growth has doubled.

        Args:
            said: for each process its `host`, and its `errors` from `error_counts`.
        """
        lines = []
        for host, name, count in {(s["host"], name, count) for s in said for name, count in s["errors"].items()}:
            grown = count - self._first.setdefault((host, name), count)
            self.hosts |= {host} if grown > 0 else set()
            if grown > 0 and grown >= 2 * self._named.get((host, name), 0):
                self._named[host, name] = grown
                lines.append(f"{host}: {name} rose by {grown} since this training began.")
        return sorted(lines)
