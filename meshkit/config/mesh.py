"""Define a mesh: named axes over the links of a cluster, and the order of GPUs that results from them.

An axis has size `nvlink * infiniband` and index `ib_index * nvlink + nvlink_index`, so that neighbours along it share
an NVLink domain. Axes are listed outermost first, in the same order inside a domain and across domains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from meshkit.config.toml import SpecError, did_you_mean, inline, kind
from meshkit.errors import ConfigError

if TYPE_CHECKING:  # numpy takes longer to import than an experiment to load
    import numpy as np

    from meshkit.config.cluster import Cluster

Factor = int | Literal["fill"]
LINKS = ("nvlink", "infiniband")
RESERVED = "replicated"
_LINK_NAMES = {"nvlink": "NVLink", "infiniband": "InfiniBand"}
_LARGEST_FACTOR = 2**31


@dataclass(frozen=True)
class MeshAxis:
    """A mesh axis: ways inside an NVLink domain times ways across domains; `fill` takes the rest of a link."""

    name: str
    nvlink: Factor = 1
    infiniband: Factor = 1

    @property
    def size(self) -> int:
        """Return the number of ways along the axis.

        Raises:
            ConfigError: a factor is still `fill`.
        """
        return self.number("nvlink") * self.number("infiniband")

    def number(self, link: str) -> int:
        """Return the number of ways along the axis on one link.

        Raises:
            ConfigError: the factor is still `fill`.
        """
        factor = self.factor(link)
        if isinstance(factor, str):
            raise ConfigError(
                f"axis '{self.name}' has no size before `fill` is resolved.", hint="spec.resolve(cluster)"
            )
        return factor

    def factor(self, link: str) -> Factor:
        """Return the number of ways along the axis on one link, or `fill`."""
        return self.nvlink if link == "nvlink" else self.infiniband

    def to_plain(self) -> Any:
        """Return the shortest TOML value of the axis."""
        if self.infiniband == 1:
            return self.nvlink
        inside = {} if self.nvlink == 1 else {"nvlink": self.nvlink}
        return {**inside, "infiniband": self.infiniband}


@dataclass(frozen=True)
class MeshSpec:
    """Mesh axes, outermost first."""

    axes: tuple[MeshAxis, ...]

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> MeshSpec:
        """Return the axes of a `[mesh]` table.

        Raises:
            ConfigError: a value is not an axis, two axes have `fill` on one link, or a name is reserved.
        """
        if not isinstance(mapping, Mapping):
            raise SpecError(f"[mesh] must be a table, not {kind(mapping)}.", key=("mesh",), value=mapping)
        if not mapping:
            raise SpecError("[mesh] has no axes.", key=("mesh",), hint='data = "fill" below [mesh]')
        spec = cls(tuple(_parse_axis(name, value) for name, value in mapping.items()))
        for link in LINKS:
            _check_one_fill(spec, link)
        return spec

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Return the names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the axes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Map each axis to its size, outermost first."""
        return dict(zip(self.axis_names, self.shape))

    @property
    def size(self) -> int:
        """Return the number of devices in the mesh."""
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return the `[mesh]` table that `parse` reads back."""
        return {axis.name: axis.to_plain() for axis in self.axes}

    def resolve(self, cluster: Cluster) -> MeshSpec:
        """Return the same axes with every `fill` replaced.

        Raises:
            ConfigError: the factors of a link do not multiply to the GPUs of a domain, or to the number of domains.
        """
        totals = {"nvlink": cluster.gpus_used_per_domain, "infiniband": cluster.num_nvlink_domains}
        filled = {link: _resolve_link(self, link, totals) for link in LINKS}
        factors = zip(self.axes, filled["nvlink"], filled["infiniband"])
        return MeshSpec(tuple(MeshAxis(axis.name, inside, across) for axis, inside, across in factors))

    def device_order(self, cluster: Cluster) -> np.ndarray:
        """Return the GPU indices of the cluster, in the shape of the mesh.

        Let `d` be the domain (row-major over the InfiniBand factors) and `l` the position inside it (row-major over the
        NVLink factors). The GPU's index is `d * gpus_used_per_domain + l`. So innermost axes stay inside a host if a
        domain spans several hosts. GPUs that differ only in the domain have the same `l` and thus the same rail.

        Returns:
            Integers of shape [size of each axis], with each GPU of the cluster once.
        """
        import numpy as np

        spec = self.resolve(cluster)
        across = [axis.number("infiniband") for axis in spec.axes]
        inside = [axis.number("nvlink") for axis in spec.axes]
        by_link = np.arange(cluster.num_gpus).reshape(*across, *inside)
        count = len(spec.axes)
        interleaved = [axis for pair in zip(range(count), range(count, 2 * count)) for axis in pair]
        return by_link.transpose(interleaved).reshape(spec.shape)

    def placement(self, cluster: Cluster) -> Placement:
        """Return the GPU, domain and host of each partition of the mesh."""
        spec = self.resolve(cluster)
        return Placement.of_gpus(spec.axis_names, spec.shape, spec.device_order(cluster).reshape(-1), cluster)


@dataclass(frozen=True, eq=False)
class Placement:
    """The GPU of each partition of a program; a partition's id is its row-major position in the mesh."""

    axis_names: tuple[str, ...]
    """Names of the mesh axes, outermost first."""
    shape: tuple[int, ...]
    gpus: np.ndarray
    """[partitions] GPU index in the cluster."""
    domains: np.ndarray
    hosts: np.ndarray
    fabric: Mapping[str, str]
    rails: np.ndarray | None = None
    """[partitions] host port through which the GPU sends. If domains are whole hosts, equal positions in them have the
    same port. None without ports, or if the cluster is not known."""

    @property
    def num_partitions(self) -> int:
        """Return the number of partitions, one per device."""
        return math.prod(self.shape)

    def domains_along(self) -> dict[str, int]:
        """Map each axis to the largest number of NVLink domains on one line of the mesh along it."""
        import numpy as np

        ordered = self.domains.reshape(self.shape)
        lines = {name: np.diff(np.sort(ordered, axis=i), axis=i) > 0 for i, name in enumerate(self.axis_names)}
        return {name: 1 + int(new.sum(axis=i).max()) for i, (name, new) in enumerate(lines.items())}

    @classmethod
    def of_gpus(cls, axis_names: Sequence[str], shape: Sequence[int], gpus: np.ndarray, cluster: Cluster) -> Placement:
        """Return a placement on `gpus` [partitions]: indices in the cluster, in row-major order of the mesh."""
        links = LINKS if cluster.num_nvlink_domains > 1 else ("nvlink",)
        return cls(
            axis_names=tuple(axis_names),
            shape=tuple(shape),
            gpus=gpus,
            domains=cluster.domain_of(gpus),
            hosts=cluster.host_of(gpus),
            fabric={name: cluster.link(name).fabric for name in links},
            rails=cluster.rail_of(gpus),
        )

    @classmethod
    def from_shape(
        cls, axis_names: Sequence[str], shape: Sequence[int], *, gpus_per_domain: int | None = None
    ) -> Placement:
        """Return a placement of devices in order on an unknown fabric: `gpus_per_domain` per domain, a domain per host.

        The last domain has the remaining devices. With None, one domain has all devices.
        """
        import numpy as np

        gpus = np.arange(math.prod(shape))
        domains = gpus // (gpus_per_domain or max(len(gpus), 1))
        return cls(tuple(axis_names), tuple(shape), gpus, domains, domains.copy(), {})


def _parse_axis(name: str, value: Any) -> MeshAxis:
    key = ("mesh", name)
    if name == RESERVED or not name:
        raise SpecError(
            f"'{name}' cannot name a mesh axis: it is reserved." if name else "a mesh axis needs a name.",
            key=key,
            value=value,
            hint="another name, such as data",
        )
    if not isinstance(value, Mapping):
        return MeshAxis(name, nvlink=_parse_factor(key, value))
    for link in value:
        if link not in LINKS:
            raise SpecError(
                f"axis '{name}' has no link '{link}'.",
                key=(*key, str(link)),
                value=value[link],
                hint=did_you_mean(str(link), LINKS),
            )
    if not value:
        raise SpecError(f"axis '{name}' names no link.", key=key, value=value, hint=f"mesh.{name} = {{ nvlink = 2 }}")
    inside = _parse_factor((*key, "nvlink"), value.get("nvlink", 1))
    across = _parse_factor((*key, "infiniband"), value.get("infiniband", 1))
    return MeshAxis(name, inside, across)


def _parse_factor(key: tuple[str, ...], value: Any) -> Factor:
    if value == "fill":
        return "fill"
    whole_axis = len(key) == 2  # The key is mesh.tensor, not mesh.tensor.nvlink.
    more = ', "fill", or a table of nvlink and infiniband' if whole_axis else ' or "fill"'
    forms = f"a positive integer{more}"
    if isinstance(value, bool) or not isinstance(value, int):
        hint = f"{key[-1]} = {value}, without quotes" if re.fullmatch("[1-9][0-9]*", str(value)) else f"{key[-1]} = 2"
        raise SpecError(f"{'.'.join(key)} must be {forms}; not {kind(value)}.", key=key, value=value, hint=hint)
    if not 1 <= value <= _LARGEST_FACTOR:
        forms = f"at most {_LARGEST_FACTOR}" if value > 0 else forms
        raise SpecError(f"{'.'.join(key)} must be {forms}; not {value}.", key=key, value=value, hint=f"{key[-1]} = 1")
    return value


def _check_one_fill(spec: MeshSpec, link: str) -> None:
    names = [axis.name for axis in spec.axes if axis.factor(link) == "fill"]
    if len(names) > 1:
        raise SpecError(
            f'axes {_names(names)} both say "fill" on {_LINK_NAMES[link]}; it may stand once per link.',
            key=("mesh", names[1]),
            hint=f"a number for {_names(names[:1])} or {_names(names[1:2])}",
        )


def _resolve_link(spec: MeshSpec, link: str, totals: Mapping[str, int]) -> list[int]:
    """Return the factors of one link, in the order of the axes; their product is the link's total."""
    total = totals[link]
    for axis in spec.axes:
        _check_axis_fits(spec, axis, link, totals)
    factors = [axis.factor(link) for axis in spec.axes]
    given = [factor for factor in factors if not isinstance(factor, str)]
    product = math.prod(given)
    has_fill = len(given) < len(factors)
    if total % product if has_fill else total != product:
        raise _wrong_product(spec, link, product, total)
    return [total // product if isinstance(factor, str) else factor for factor in factors]


def _check_axis_fits(spec: MeshSpec, axis: MeshAxis, link: str, totals: Mapping[str, int]) -> None:
    ways = axis.factor(link)
    if isinstance(ways, str) or ways <= totals[link]:
        return
    left = {each: max(1, total // _product(spec, each, without=axis)) for each, total in totals.items()}
    if link == "nvlink":
        message = f"axis '{axis.name}' asks for {ways} GPUs on NVLink, but an NVLink domain has {totals[link]}."
        if any(other.infiniband == "fill" for other in spec.axes if other is not axis):
            del left["infiniband"]  # The other axis takes all domains that are left.
        more = ""
    else:
        message = f"axis '{axis.name}' asks for {ways} NVLink domains, but the cluster has {totals[link]}."
        del left["nvlink"]
        more = ", or more hosts"
    hint = f"mesh.{axis.name} = {inline(replace(axis, **left).to_plain())}{more}"
    raise SpecError(message, key=("mesh", axis.name), value=axis.to_plain(), hint=hint)


def _product(spec: MeshSpec, link: str, *, without: MeshAxis) -> int:
    """Return the product of the numbers that the other axes have on a link."""
    factors = [axis.factor(link) for axis in spec.axes if axis is not without]
    return math.prod(factor for factor in factors if not isinstance(factor, str))


def _wrong_product(spec: MeshSpec, link: str, product: int, total: int) -> SpecError:
    parts = [f"{axis.name} {axis.factor(link)}" for axis in spec.axes if axis.factor(link) not in (1, "fill")]
    shown = f"{product} ({' x '.join(parts)})" if len(parts) > 1 else str(product)
    if link == "nvlink":
        there = f"an NVLink domain uses {total} GPUs"
    else:
        there = f"the cluster has {total} NVLink domain{'s' if total > 1 else ''}"
    has_fill = any(axis.factor(link) == "fill" for axis in spec.axes)
    verdict = ", which it does not divide" if has_fill else ""
    message = f"the {_LINK_NAMES[link]} factors of the mesh multiply to {shown}, but {there}{verdict}."
    return SpecError(message, key=("mesh",), hint=_mend(spec, link, total))


def _mend(spec: MeshSpec, link: str, total: int) -> str:
    """Return a change of one axis that corrects the product; axes that use the link come first, outermost first."""
    for axis in sorted(spec.axes, key=lambda axis: axis.factor(link) == 1):
        rest = _product(spec, link, without=axis)
        if axis.factor(link) != "fill" and total % rest == 0:
            mended = replace(axis, **{link: total // rest})
            return f"mesh.{axis.name} = {inline(mended.to_plain())}"
    return f"factors that multiply to {total}"


def _names(names: Sequence[str]) -> str:
    return " and ".join(f"'{name}'" for name in names)
