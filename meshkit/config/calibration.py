"""Read and write the calibration that `meshkit bench` measures on real devices: a TOML file that a cluster may name.

The kernel model uses the rates of the file, and the network model its constants. A file from CPUs or from a trace has
no constants. Then the fit of one group of GPUs prices a collective:

    seconds = latency_s + wire_bytes / bytes_per_s

`wire_bytes` are the bytes that nccl-tests counts for bus bandwidth. `latency_s` holds for the measured group.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, GetPydanticSchema
from pydantic_core import core_schema

from meshkit.config.files import TomlDocument, write_file
from meshkit.config.toml import SpecError, TomlTable, check_plain, did_you_mean, kind, to_toml, validate
from meshkit.errors import ConfigError

SCHEMA = "meshkit.calibration/1"
CALIBRATION_FILE = "calibration.toml"
CollectiveName = Literal[
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter"
]
COLLECTIVES: tuple[str, ...] = get_args(CollectiveName)
_TOP_KEYS = ("schema", "measured_on", "rates", "network", "fit")
_Whole = Annotated[int, Field(gt=0, le=2**31)]
_Positive = Annotated[float, Field(gt=0)]
_NotNegative = Annotated[float, Field(ge=0)]


def _one_of(*names: str) -> GetPydanticSchema:
    """Return an annotation for which pydantic accepts only these strings, and the type checker any string."""
    return GetPydanticSchema(lambda *_: core_schema.literal_schema(list(names)))


class Fit(TomlTable):
    """Latency and bandwidth of one collective over groups of one shape."""

    link: Literal["nvlink", "infiniband"]
    """The slowest link that a group crosses."""
    collective: CollectiveName
    gpus_per_domain: _Whole
    """GPUs of the group in each NVLink domain."""
    domains: _Whole
    latency_s: _NotNegative
    bytes_per_s: _Positive
    """Bus bandwidth at saturation, per GPU."""
    residual_median: _NotNegative
    """Median of |fitted / measured - 1|."""
    points: _Whole

    @property
    def group_size(self) -> int:
        """Return the number of GPUs in the group."""
        return self.gpus_per_domain * self.domains

    def time_s(self, wire_bytes: float) -> float:
        """Return the seconds of one collective that puts `wire_bytes` on the wire per GPU."""
        return self.latency_s + wire_bytes / self.bytes_per_s


class Rates(TomlTable):
    """Sustained rates of one device: matmuls and attention in FLOP/s, memory in bytes/s (reads plus writes)."""

    memory_bytes_per_s: _Positive | None = None
    """Rate of a copy in device memory, reads plus writes; None if it was not measured."""
    matmul_flops_per_s: dict[Annotated[str, _one_of("fp32", "tf32", "bf16", "fp16", "fp8")], _Positive] = {}
    """Precision, as the catalog calls it -> rate of large matmuls."""
    attention_flops_per_s: dict[Annotated[str, _one_of("forward", "backward")], _Positive] = {}
    """Pass -> rate of fused causal attention at 4k tokens; FLOP of the masked half do not count."""


class NetworkConstants(TomlTable):
    """Fitted constants of the network model (`[fitted]` of nccl.toml), and link rates relative to the catalog's."""

    constants: dict[str, _Positive]
    points: _Whole
    """Number of measured collectives to which the constants are fitted."""
    error_before: _NotNegative
    """Median of |predicted / measured - 1| with the shipped constants."""
    error_after: _NotNegative
    """The same median with these constants."""


class MeasuredOn(TomlTable):
    """The machine and the software of a calibration."""

    gpu: str
    scale_up: str
    devices: _Whole
    date: str
    jax: str
    jaxlib: str
    fabric: str | None = None


@dataclass(frozen=True)
class Calibration:
    """The contents of a `calibration.toml`."""

    fits: tuple[Fit, ...]
    measured_on: MeasuredOn | None = None
    rates: Rates = field(default_factory=Rates)
    network: NetworkConstants | None = None
    """If present, the network model prices collectives with these constants, and `fits` are not used."""

    def find(self, link: str, collective: str, gpus_per_domain: int, domains: int) -> Fit | None:
        """Return a collective's fit on a link for this shape of group, or for the nearest shape; None without a fit.

        The nearest shape has the most similar size, measured by ratio. Among equally similar sizes, the most similar
        number of domains decides, and then the larger group wins.
        """
        same = [fit for fit in self.fits if fit.link == link and fit.collective == collective]
        exact = [fit for fit in same if (fit.gpus_per_domain, fit.domains) == (gpus_per_domain, domains)]
        if exact or not same:
            return exact[0] if exact else None

        def distance(fit: Fit) -> tuple[float, float, int]:
            """Return a sort key: distance in size, distance in domains, and the larger group first."""
            size = abs(math.log(fit.group_size / (gpus_per_domain * domains)))
            return round(size, 9), round(abs(math.log(fit.domains / domains)), 9), -fit.group_size

        return min(same, key=distance)


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file.

    Raises:
        ConfigError: the file cannot be read, or is not TOML or not a calibration; the message names file, line and key.
    """
    document = TomlDocument.read(path, what="calibration file")
    try:
        check_plain(document.table)
        return _build(document.table)
    except SpecError as error:
        raise document.locate(error) from None


def load_cached(path: str | os.PathLike[str]) -> Calibration:
    """Return the calibration as `load` does, but read the file again only after it has changed."""
    try:
        modified_ns = os.stat(path).st_mtime_ns
    except OSError:
        modified_ns = 0  # `load` then raises the error.
    return _load(os.fspath(path), modified_ns)


@functools.lru_cache(maxsize=16)
def _load(path: str, modified_ns: int) -> Calibration:
    return load(path)


def write(path: str | os.PathLike[str], calibration: Calibration) -> Path:
    """Write a calibration to a file, from which `load` reads an equal calibration.

    Raises:
        ConfigError: the file cannot be written.
    """
    table: dict[str, Any] = {"schema": SCHEMA}
    if calibration.measured_on is not None:
        table["measured_on"] = calibration.measured_on.model_dump()
    if rates := {key: value for key, value in calibration.rates.model_dump().items() if value}:
        table["rates"] = rates
    if calibration.network is not None:
        table["network"] = calibration.network.model_dump()
    table["fit"] = [fit.model_dump() for fit in calibration.fits]
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, _HEADER + to_toml(table))
    except OSError as error:
        raise ConfigError(f"the calibration file cannot be written: {error.strerror}.", at=str(target)) from None
    return target


_HEADER = """\
# Measured by `meshkit bench`. Name it in a cluster file: calibration = "calibration.toml".
# seconds = latency_s + wire_bytes / bytes_per_s, with wire_bytes per GPU as nccl-tests counts bus bandwidth. Where
# [network] has constants of the network model, plans go by those: they hold for groups that were not measured, too.
"""


def _build(table: Mapping[str, Any]) -> Calibration:
    if table.get("schema") != SCHEMA:
        raise SpecError(
            "this version of meshkit cannot read this calibration file.",
            key=("schema",),
            hint=f'schema = "{SCHEMA}", as `meshkit bench` writes it',
        )
    for key in table:
        if key not in _TOP_KEYS:
            hint = did_you_mean(key, _TOP_KEYS, what="one of its keys")
            raise SpecError(f"unknown key '{key}' in the calibration file.", key=(key,), value=table[key], hint=hint)
    measured_on, network = table.get("measured_on"), table.get("network")
    return Calibration(
        fits=_fits(table.get("fit", [])),
        measured_on=None if measured_on is None else validate(MeasuredOn, measured_on, within=("measured_on",)),
        rates=validate(Rates, table.get("rates", {}), within=("rates",)),
        network=None if network is None else validate(NetworkConstants, network, within=("network",)),
    )


def _fits(entries: Any) -> tuple[Fit, ...]:
    if not isinstance(entries, list):
        raise SpecError(f"fit must be a list of tables, not {kind(entries)}.", key=("fit",), hint="[[fit]] sections")
    fits = tuple(validate(Fit, entry, within=("fit", str(index))) for index, entry in enumerate(entries))
    _check_unique(fits)
    return fits


def _check_unique(fits: Sequence[Fit]) -> None:
    seen: set[tuple[str, str, int, int]] = set()
    for index, fit in enumerate(fits):
        shape = (fit.link, fit.collective, fit.gpus_per_domain, fit.domains)
        if fit.group_size < 2:
            raise SpecError("a group must have at least 2 GPUs.", key=("fit", str(index)), hint="gpus_per_domain = 2")
        if shape in seen:
            group = f"{fit.domains} domains x {fit.gpus_per_domain} GPUs"
            raise SpecError(
                f"there are two fits of {fit.collective} on {fit.link} over {group}.",
                key=("fit", str(index)),
                hint="removing one of them",
            )
        seen.add(shape)
