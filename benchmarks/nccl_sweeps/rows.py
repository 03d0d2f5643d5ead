"""Read measured collectives from sweep files, and price each or say why the model cannot."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.nccl_sweeps.systems import assumed, describe
from meshkit.config.cluster import Cluster
from meshkit.config.toml import did_you_mean
from meshkit.errors import ConfigError
from meshkit.predict.algorithms import CHOSEN, wire_factor
from meshkit.predict.network import collective_time_s

COLUMNS = ("system", "collective", "algo", "bytes", "time_us", "busbw_GBps", "source")
_NEEDED = ("system", "collective", "bytes", "time_us")
_UNITS = "bytes, microseconds, and 10^9 bytes a second of nccl-tests' bus bandwidth"
_COLLECTIVES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sendrecv": "collective-permute",
    "permute": "collective-permute",
    "collectivepermute": "collective-permute",
    "broadcast": "collective-broadcast",
}
_OFF = r"(?:\w+ and )*\b\w+(?:_ENABLE=0|(?:\s+is)?\s+(?:off|disabled)\b)|\b(?:without|no)\s+\w+(?:\s+hardware)?"
_FAMILIES = {
    "ring": r"\bring\b",
    "tree": r"\btree\b",
    "nvls tree": r"\bnvls[ _-]?tree\b",
    "nvls": r"\bnvls\b",
    "collnet": r"sharp|coll[ _-]?net",
    "copy engine": r"copy[ -]engine|\bCE\b",
    "symmetric": r"symmetric",
    "pat": r"\bPAT\b",
}
_VERSION = r"(?:NCCL|version)(?: table)?[ v=]*(\d+\.\d+(?:\.\d+)?)"
_OLDEST = "2.18"  # Older NCCLs are priced as this one.
_PLAIN = r"NCCL[ v]*[\d.]*|version|unsaid|unknown|tuned|default|auto|[\W\d_]"
_BUS_TOLERANCE = 0.03  # Allows for rounding, and for sweeps that print the best of several runs.
_UNIT_OFF = 4.0  # Above any bus factor (0.5 to 2), below any mix-up of units (8, 1000, 1024).
# The range of measured over predicted time at the largest message. No fabric is off by as much as a wrong unit.
_FASTEST, _SLOWEST = 1 / 30, 100.0


PCIE, RACKS = "inside a PCIe host", "GB200, GB300: several hosts"


class NotPriced(ValueError):
    """The reason why a row has no prediction."""


@dataclass(frozen=True)
class Forced:
    """The choice that a row's `algo` leaves to NCCL, and NCCL's version."""

    families: tuple[str, ...] = ()
    """The families of the network model's algorithms that NCCL may choose from; empty for all."""
    protocol: str = ""
    """The protocol that was forced; empty if none was."""
    nvls: bool = True
    """Whether NVLS was available."""
    unread: bool = False
    """Whether the text has words that name neither an algorithm nor a protocol."""
    nccl: str | None = None
    """The version of NCCL; None if the text has none."""

    @classmethod
    def of(cls, algo: str) -> Forced:
        """Return what a text like "Ring (NCCL_ALGO), NCCL 2.29.7" or "NVLS enabled, algorithm auto" forces."""
        off = " ".join(found[0] for found in re.finditer(_OFF, algo, re.IGNORECASE))
        text = re.sub(_OFF, "", algo, flags=re.IGNORECASE).replace("_", " ")
        nvls = not re.search("nvls", off, re.IGNORECASE)
        protocol = re.search(r"\b(LL128|LL|Simple)\b", text, re.IGNORECASE)
        speed = protocol[1].lower() if protocol else ""
        version = re.search(_VERSION, algo, re.IGNORECASE)
        nccl = max(version[1], _OLDEST, key=_numbers) if version else None
        if re.search(r"\b(auto|default)\b|ring of neighbours", text, re.IGNORECASE):
            return cls(protocol=speed, nvls=nvls, nccl=nccl)
        families = tuple(name for name, pattern in _FAMILIES.items() if re.search(pattern, text, re.IGNORECASE))
        if "^" in text:  # NCCL_ALGO=^NVLS excludes these.
            nvls = nvls and not any(name.startswith("nvls") for name in families)
            families = tuple(name for name in ("ring", "tree") if name not in families)
        if "nvls" in families:
            families = ("nvls",)  # Between hosts it is NVLSTree, whatever the text says.
        if "copy engine" in families:
            families = ("copy engine",)  # It uses symmetric memory, whether the text says so or not.
        unread = not (families or speed or off) and bool(re.sub(_PLAIN, "", text, flags=re.IGNORECASE))
        return cls(families, speed, nvls, unread, nccl)

    def algorithms(self) -> tuple[str | None, ...]:
        """Return the algorithms to ask `collective_time_s` for; None stands for NCCL's own choice."""
        families = self.families or (("ring", "tree") if self.protocol else ())
        return tuple(f"{family} {self.protocol}".strip() for family in families) or (None,)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@dataclass(frozen=True)
class Row:
    """One measured collective."""

    system: str
    """The name of the system, with its source."""
    gpu: str
    """The GPU's key in the catalog."""
    collective: str
    """The collective as the model names it."""
    payload_bytes: int
    measured_s: float
    gpus_per_domain: int
    """The GPUs of the group in each NVLink domain."""
    domains: int
    """The NVLink domains of the group."""
    cluster: Cluster
    """The cluster that the system's name describes."""
    forced: Forced = Forced()
    """The choice that was left to NCCL."""
    neighbours: bool = False
    """Whether a permute is nccl-tests' send and receive."""

    @property
    def place(self) -> str:
        """The place where it ran: RACKS, "between hosts", "inside a host" (with NVLink), or PCIE."""
        cluster = self.cluster
        if cluster.hosts_per_domain > 1 and self.gpus_per_domain * self.domains > cluster.gpus_per_host:
            return RACKS
        if self.domains > 1:
            return "between hosts"
        return "inside a host" if cluster.scale_up == "nvlink" else PCIE

    def predicted_s(self, fitted: Mapping[str, float] | None = None) -> float:
        """Return the seconds that the model predicts for the group alone, so that idle GPUs lend it their ports.

        Raises:
            NotPriced: the model lacks the algorithm that was forced.
        """
        has_choice = self.collective in CHOSEN or "copy engine" in self.forced.families
        choices = self.forced.algorithms() if has_choice else (None,)
        if self.neighbours:
            choices = ("neighbours",)
        times = []
        for algorithm in choices:
            try:
                times.append(self._seconds(algorithm, fitted))
            except ConfigError as error:
                refused = error
        if not times:
            raise NotPriced((refused.message or "").rstrip("."))
        return min(times)

    def _seconds(self, algorithm: str | None, fitted: Mapping[str, float] | None) -> float:
        return collective_time_s(
            self.collective,
            payload_bytes=self.payload_bytes,
            gpus_per_domain=self.gpus_per_domain,
            domains=self.domains,
            cluster=self.cluster,
            concurrent_groups=1,
            nvls=self.forced.nvls,
            algorithm=algorithm,
            nccl=self.forced.nccl,
            launch="nccl-tests",
            fitted=fitted,
        )


@dataclass(frozen=True)
class Measured:
    """One line of a sweep file."""

    record: Mapping[str, str]
    """The cells of the line by column."""
    source: str
    """The source of the measurement."""
    where: str
    """The file and the line."""
    row: Row | None = None
    """The row; None if its system or collective is not understood."""
    predicted_s: float | None = None
    """The predicted seconds; None if the row cannot be priced."""
    note: str = ""
    """The reason why there is no prediction, or the assumption behind it."""

    @property
    def understood(self) -> Row:
        """The row, of a line that is understood."""
        assert self.row is not None
        return self.row

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        assert self.predicted_s is not None
        return self.predicted_s / self.understood.measured_s - 1


def read_rows(path: Path) -> list[Measured]:
    """Return the lines of a sweep file, priced where they are understood.

    Raises:
        ConfigError: the file cannot be read, a column is missing or unknown, or a number is impossible.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            _check_columns(reader.fieldnames or (), path)
            found = [_measured(record, path, reader.line_num) for record in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"'{path}' cannot be read as CSV: {error}.", hint=f"columns {', '.join(COLUMNS)}") from None
    if not found:
        raise ConfigError(f"'{path}' has no rows.", hint=f"columns {', '.join(COLUMNS)}")
    _check_scale(found)
    return found


def _check_columns(given: Sequence[str], path: Path) -> None:
    """Raise ConfigError for a header that is not a sweep's."""
    for name in given:
        if name not in COLUMNS or given.count(name) > 1:
            what = "twice" if name in COLUMNS else "not a column of a sweep"
            raise ConfigError(f"column '{name}' is {what}.", at=f"{path}:1", hint=did_you_mean(name, COLUMNS))
    for name in _NEEDED:
        if name not in given:
            raise ConfigError(f"there is no column '{name}'.", at=f"{path}:1", hint=f"columns {', '.join(COLUMNS)}")


def _measured(record: dict[str, str], path: Path, line: int) -> Measured:
    """Return one line, checked and priced."""
    if None in record or None in record.values():
        raise ConfigError("a row has another number of cells than the header.", at=f"{path}:{line}", hint="quotes")
    record = dict.fromkeys(COLUMNS, "") | record
    payload, time_us = (_positive(record, name, path, line) for name in ("bytes", "time_us"))
    if payload != int(payload):
        raise ConfigError(f"{record['bytes']} is no whole number of bytes.", at=f"{path}:{line}: bytes", hint=_UNITS)
    factor = _bus_factor(record, payload, time_us, path, line)
    source = re.split(r"[/@,:(\"]", record["source"])[0].strip() or path.stem
    where, row = f"{path}:{line}", None
    try:
        row = _row(record, source, int(payload), time_us)
        if factor and not _agrees(factor, row):
            n = row.gpus_per_domain * row.domains
            usual = wire_factor(row.collective, n)
            raise NotPriced(
                f"busbw_GBps is {factor[0]:.2f} x bytes / time, and {row.collective} of {n} GPUs has {usual:.2f}"
            )
        unread = "algo not understood, priced as NCCL's own choice" if row.forced.unread else ""
        note = "; ".join(filter(None, (assumed(record["system"]), unread)))
        return Measured(record, source, where, row, row.predicted_s(), note)
    except ConfigError as error:
        return Measured(record, source, where, row, note=error.message or "")
    except ValueError as error:
        return Measured(record, source, where, row, note=str(error))


def _row(record: Mapping[str, str], source: str, payload_bytes: int, time_us: float) -> Row:
    """Return the row of a line; raise ValueError if it is not understood."""
    gpu, cluster, g, k = describe(record["system"])
    if g * k == 1:
        raise NotPriced("one GPU: nothing to move")
    kind = re.sub("[ _-]", "", record["collective"].lower().removesuffix("_perf"))
    if kind not in _COLLECTIVES:
        raise NotPriced(f"collective not in the model: {record['collective']}")
    system = f"{record['system']} [{source}]"
    forced = Forced.of(record["algo"])
    neighbours = kind == "sendrecv"
    return Row(system, gpu, _COLLECTIVES[kind], payload_bytes, time_us * 1e-6, g, k, cluster, forced, neighbours)


def _positive(record: Mapping[str, str], name: str, path: Path, line: int) -> float:
    """Return a cell as a number; raise ConfigError unless it is above zero."""
    try:
        value = float(record[name])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        message = f"{name} is '{record[name]}' of '{record['system']}', and must be a number above 0."
        raise ConfigError(message, at=f"{path}:{line}: {name}", hint=_UNITS)
    return value


def _bus_factor(
    record: Mapping[str, str], payload: float, time_us: float, path: Path, line: int
) -> tuple[float, float] | None:
    """Return the bus bandwidth over bytes / time, and its uncertainty from rounding; None if the file has none."""
    text = record["busbw_GBps"].strip()
    if not text:
        return None
    try:
        bus = float(text)
    except ValueError:
        bus = math.nan
    if not 0 <= bus < math.inf:
        message = f"busbw_GBps is '{text}' of '{record['system']}', and must be a number, or blank."
        raise ConfigError(message, at=f"{path}:{line}: busbw_GBps", hint=_UNITS)
    per_s = payload / time_us / 1e3
    rounding = 0.5 * 10 ** -len(text.partition(".")[2])
    low, high = max(0.0, bus - rounding) / per_s, (bus + rounding) / per_s
    if low > _UNIT_OFF or high < 1 / _UNIT_OFF:
        message = (
            f"{payload:.0f} bytes in {time_us:g} us are {per_s:.4g} GB/s, and busbw_GBps says {bus:g}: a unit is off."
        )
        raise ConfigError(message, at=f"{path}:{line}", hint=_UNITS)
    return bus / per_s, rounding / per_s


def _agrees(factor: tuple[float, float], row: Row) -> bool:
    """Return whether the bus bandwidth fits the number of GPUs that the system's name gives."""
    usual = wire_factor(row.collective, row.gpus_per_domain * row.domains)
    return abs(factor[0] - usual) <= _BUS_TOLERANCE * usual + factor[1]


def _check_scale(found: list[Measured]) -> None:
    """Raise ConfigError for times that no fabric explains, where no bus bandwidth confirms them.

    Each sweep is judged by its largest message. If the time more than doubles over the sweep, it is also judged by the
    time of the largest message beyond that of the smallest.
    """
    sweeps: dict[tuple[str, str], list[Measured]] = {}
    for line in found:
        if line.row and line.predicted_s and not line.record["busbw_GBps"].strip():
            sweeps.setdefault((line.record["system"], line.row.collective), []).append(line)
    for (system, collective), lines in sweeps.items():
        lines.sort(key=lambda line: line.understood.payload_bytes)
        first, last = lines[0], lines[-1]
        small, large = first.understood.measured_s, last.understood.measured_s
        little, much = first.predicted_s or 0.0, last.predicted_s or 0.0
        times = large / much
        if large > 2 * small and much > little:
            times = max(times, (large - small) / (much - little))
        if not _FASTEST < times < _SLOWEST:
            size = last.understood.payload_bytes
            message = f"{collective} of {size} bytes on '{system}' takes {times:.2g} times what its links need"
            raise ConfigError(f"{message}: a unit is off.", at=f"{last.where}: bytes, time_us", hint=_UNITS)
