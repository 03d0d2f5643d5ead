"""The calibration that `meshkit bench` measured on real devices: a TOML file that a cluster may name.

The kernel model takes its rates and the network model its constants. Where a file has no constants (from CPUs, or from
a trace), the fit of one group of GPUs prices a collective:

    seconds = latency_s + wire_bytes / bytes_per_s

with `wire_bytes` as nccl-tests counts bus bandwidth. `latency_s` belongs to the group that was measured.
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
    """Return a text that is checked to be one of these, and is any for the type checker."""
    return GetPydanticSchema(lambda *_: core_schema.literal_schema(list(names)))


class Fit(TomlTable):
    """Latency and bandwidth of one collective over groups of one shape."""

    link: Literal["nvlink", "infiniband"]
    """The slowest link that a group crosses."""
    collective: CollectiveName
    gpus_per_domain: _Whole
    """The group's shape, with `domains`."""
    domains: _Whole
    latency_s: _NotNegative
    bytes_per_s: _Positive
    """Bus bandwidth at saturation, per GPU."""
    residual_median: _NotNegative
    """Median of |fitted / measured - 1|."""
    points: _Whole

    @property
    def group_size(self) -> int:
        """Return GPUs of a group."""
        return self.gpus_per_domain * self.domains

    def time_s(self, wire_bytes: float) -> float:
        """Return seconds of one collective that puts `wire_bytes` on the wire per GPU."""
        return self.latency_s + wire_bytes / self.bytes_per_s


class Rates(TomlTable):
    """Sustained rates of one device: matmul and attention in FLOP/s, memory in bytes/s (read and written)."""

    memory_bytes_per_s: _Positive | None = None
    """A copy, both directions; None if it was not measured."""
    matmul_flops_per_s: dict[Annotated[str, _one_of("fp32", "tf32", "bf16", "fp16", "fp8")], _Positive] = {}
    """Large matmuls, by precision as in the catalog."""
    attention_flops_per_s: dict[Annotated[str, _one_of("forward", "backward")], _Positive] = {}
    """Fused causal attention at 4k tokens, without the masked half."""


class NetworkConstants(TomlTable):
    """Constants of the network model (`[fitted]` of nccl.toml), and rates of links relative to the catalog's."""

    constants: dict[str, _Positive]
    points: _Whole
    """Number of collectives that they are fitted to."""
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
    """Where it is there, collectives are priced by the network model with it, not by `fits`."""

    def find(self, link: str, collective: str, gpus_per_domain: int, domains: int) -> Fit | None:
        """Return the fit of this shape, else of the nearest size by ratio (of two the larger) on the link, or None."""
        same = [fit for fit in self.fits if fit.link == link and fit.collective == collective]
        exact = [fit for fit in same if (fit.gpus_per_domain, fit.domains) == (gpus_per_domain, domains)]
        if exact or not same:
            return exact[0] if exact else None

        def distance(fit: Fit) -> tuple[float, float, int]:
            """Return how far a fit's group is from the one asked for: by size, then by domains, the larger first."""
            size = abs(math.log(fit.group_size / (gpus_per_domain * domains)))
            return round(size, 9), round(abs(math.log(fit.domains / domains)), 9), -fit.group_size

        return min(same, key=distance)


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read the calibration of a file.

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
    """Return `load`, which reads a file again only once it has changed."""
    try:
        modified_ns = os.stat(path).st_mtime_ns
    except OSError:
        modified_ns = 0  # Reading the file then says why.
    return _load(os.fspath(path), modified_ns)


@functools.lru_cache(maxsize=16)
def _load(path: str, modified_ns: int) -> Calibration:
    return load(path)


def write(path: str | os.PathLike[str], calibration: Calibration) -> Path:
    """Write the file that `load` reads back as an equal calibration.

    Raises:
        ConfigError: it cannot be written.
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
            "this version does not read this calibration file.",
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
            raise SpecError("a group has 2 GPUs at least.", key=("fit", str(index)), hint="gpus_per_domain = 2")
        if shape in seen:
            group = f"{fit.domains} domains x {fit.gpus_per_domain} GPUs"
            raise SpecError(
                f"there are two fits of {fit.collective} on {fit.link} over {group}.",
                key=("fit", str(index)),
                hint="removing one of them",
            )
        seen.add(shape)
