"""What `meshkit bench` says, as pydantic models: `meshkit.bench/1`.

SI units, named in the key; a key that holds no value is None (`null`). Bandwidths are nccl-tests': algorithm bandwidth
= size / time, bus bandwidth = that times the collective's factor, both per GPU and one direction.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from meshkit.config.calibration import COLLECTIVES, Calibration, Fit, MeasuredOn, NetworkConstants, Rates
from meshkit.report.schema import ClusterPart, LinkName, MeshAxisPart, Part

SCHEMA = "meshkit.bench/1"
BENCH_FILE = "bench.json"


class DevicesPart(Part):
    """What it ran on, and with what."""

    platform: str
    kind: str
    count: int
    processes: int
    jax: str
    jaxlib: str


class BenchRow(Part):
    """One collective of one size over one axis; no axis for a copy on the device.

    `wrong` of `checked` elements differ from numpy's. `emulated` names the collective that stands in for one that XLA
    does not have. `fitted_time_s` is that of the fit of its link, collective and group shape.
    """

    axes: tuple[str, ...]
    link: LinkName | None
    fabric: str | None
    gpus_per_domain: int
    domains: int
    group_size: int
    num_groups: int
    collective: str
    emulated: str | None = None
    size_bytes: int
    count: int
    dtype: str
    time_s: float
    algorithm_bandwidth_bytes_per_s: float | None
    bus_bandwidth_bytes_per_s: float | None
    wire_bytes: float | None
    runs: int
    wrong: int
    checked: int
    fitted_time_s: float | None = None


class BenchFit(Part):
    """Latency and bandwidth of one collective over groups of one shape, with the error against what was measured."""

    link: LinkName
    fabric: str
    collective: str
    emulated: str | None = None
    axes: tuple[str, ...]
    gpus_per_domain: int
    domains: int
    latency_s: float
    bytes_per_s: float
    residual_median: float
    residual_p90: float
    points: int

    def time_s(self, wire_bytes: float) -> float:
        """Seconds of one collective that puts `wire_bytes` on the wire per GPU."""
        return self.latency_s + wire_bytes / self.bytes_per_s


class ConstantPart(Part):
    """A constant of the network model, or a link's rate relative to the catalog's."""

    name: str
    value: float
    shipped: float


class NetworkPart(Part):
    """What the network model's constants are here; errors are medians of |predicted / measured - 1|."""

    constants: tuple[ConstantPart, ...]
    points: int
    error_before: float
    error_after: float


class RatesPart(Part):
    """Sustained rates of one device; see `meshkit.config.calibration.Rates`."""

    matmul_flops_per_s: dict[str, float] = {}
    attention_flops_per_s: dict[str, float] = {}
    memory_bytes_per_s: float | None = None


class BenchWarning(Part):
    """What a reader should know before the numbers."""

    code: str
    message: str


class BenchReport(Part):
    """All of it; `residual_median` is over every fitted row."""

    schema_: Literal["meshkit.bench/1"] = Field(default=SCHEMA, alias="schema")
    date: str
    cluster: ClusterPart
    mesh: tuple[MeshAxisPart, ...]
    devices: DevicesPart
    rows: tuple[BenchRow, ...]
    fits: tuple[BenchFit, ...]
    rates: RatesPart
    network: NetworkPart | None = None
    wrong: int
    residual_median: float | None
    residual_p90: float | None
    wall_s: float
    warnings: tuple[BenchWarning, ...] = ()

    def write(self, folder: str | Path) -> Path:
        """Writes `bench.json` into a folder and returns its path."""
        path = Path(folder) / BENCH_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path

    def calibration(self) -> Calibration:
        """What a cluster file can name; without emulated collectives, which no program of XLA holds."""
        kept = [f for f in self.fits if f.emulated is None and f.collective in COLLECTIVES]
        fits = tuple(Fit(**{name: getattr(fit, name) for name in Fit.model_fields}) for fit in kept)
        machine = MeasuredOn(
            gpu=self.cluster.gpu or "unknown",
            scale_up=self.cluster.scale_up or "unknown",
            fabric=self.cluster.fabric,
            devices=self.devices.count,
            date=self.date,
            jax=self.devices.jax,
            jaxlib=self.devices.jaxlib,
        )
        network = self.network and NetworkConstants(
            constants={one.name: one.value for one in self.network.constants},
            **self.network.model_dump(exclude={"constants"}),
        )
        return Calibration(fits, machine, Rates(**self.rates.model_dump()), network)
