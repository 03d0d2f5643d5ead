"""ShardingRules: which mesh axes shard which logical axes.

A rule maps a logical axis (a named array dim such as `embed`) to mesh axes; an override maps a parameter's path to mesh
axes for each of its dims, and wins. A logical axis without a rule is replicated.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshkit.config.presets import PRESETS
from meshkit.config.problems import SpecError, did_you_mean, kind

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]

KINDS = ("parameters", "activations", "compute", "gradients", "optimizer")
_REPLICATED = "replicated"


@dataclass(frozen=True)
class AutoRule:
    """A rule for arrays without dim names: their largest dim that the axes divide is cut.

    Attributes:
        axes: mesh axes.
        min_bytes: arrays smaller than this, globally, stay whole.
    """

    axes: Axes
    min_bytes: int = 2**20


@dataclass(frozen=True)
class ShardingRules:
    """Rules from logical axes, and parameter paths, to mesh axes.

    Attributes:
        logical: logical axis -> mesh axis, list of mesh axes, or None (replicated); the first axis is the outermost.
        overrides: (path pattern, one entry per dim); `**` is any depth, `*` one segment; the first match wins.
        compute, optimizer: rules that override `logical` for the weights as the model computes with them, and for
            optimizer state.
        gradients: rules that override `logical` for the accumulators of gradients over micro-batches. An axis of
            `act_batch` that is named here reduces every micro-batch; one that is not, once a step.
        auto: a rule for arrays without names that no override matches, as AutoRule or `{axis, min_bytes}`.
        from_preset: logical axes whose rule a preset gave, not the user.
        where: says where a rule was written, for errors.
    """

    logical: Mapping[str, Any] = field(default_factory=dict)
    overrides: Sequence[tuple[str, Sequence[Any]]] = field(default=(), kw_only=True)
    compute: Mapping[str, Any] | None = field(default=None, kw_only=True)
    gradients: Mapping[str, Any] | None = field(default=None, kw_only=True)
    optimizer: Mapping[str, Any] | None = field(default=None, kw_only=True)
    auto: AutoRule | Mapping[str, Any] | None = field(default=None, kw_only=True)
    from_preset: frozenset[str] = field(default=frozenset(), kw_only=True, compare=False, repr=False)
    where: Callable[[Sequence[str]], str] | None = field(default=None, kw_only=True, compare=False, repr=False)

    def __post_init__(self):
        for name in ("logical", "compute", "gradients", "optimizer"):
            table = getattr(self, name)
            if table is not None and not isinstance(table, Mapping):
                raise SpecError(f"rules.{name} must be a table, not {kind(table)}.", key=("rules", name), value=table)
            rules = {logical: _axes(("rules", name, logical), axes) for logical, axes in (table or {}).items()}
            object.__setattr__(self, name, rules)
        parsed = tuple(_parse_override(index, *item) for index, item in enumerate(self.overrides))
        object.__setattr__(self, "overrides", parsed)
        if isinstance(self.auto, Mapping):
            axes = _axes(("rules", "auto", "axis"), self.auto["axis"])
            object.__setattr__(self, "auto", AutoRule(axes, self.auto.get("min_bytes", AutoRule.min_bytes)))

    @classmethod
    def preset(cls, name: str, mesh_axes: Iterable[str] | None = None) -> ShardingRules:
        """A named table of rules, without the axes that the mesh does not have.

        Raises:
            ConfigError: there is no such preset.
        """
        rules = preset_rules(name, mesh_axes)
        logical = rules.pop("logical")
        return cls(logical, **rules, from_preset=frozenset(logical))  # pyright: ignore[reportArgumentType]

    @property
    def explicit(self) -> frozenset[str]:
        """Logical axes whose rule the user wrote."""
        return frozenset(self.logical) - self.from_preset

    def mapping(self, kind: str) -> dict[str, Axes]:
        """Logical axis -> mesh axes, for `parameters`, `activations`, `compute`, `gradients` or `optimizer`."""
        if kind not in KINDS:
            raise SpecError(f"there are no rules for '{kind}'.", key=("rules",), hint=did_you_mean(kind, KINDS))
        own = {} if kind in ("parameters", "activations") else getattr(self, kind)
        return {**self.logical, **own}

    def spec_for(self, logical_axes: Sequence[str | None], *, kind: str = "parameters") -> Spec:
        """Mesh axes for each dim of an array; () is replicated.

        Raises:
            ConfigError: one mesh axis would shard two dims.
        """
        mapping = self.mapping(kind)
        spec = tuple(mapping.get(logical, ()) if logical is not None else () for logical in logical_axes)
        twice = _first_repeated(spec)
        if twice is not None:
            axis, first, second = twice
            raise self._used_twice(axis, first, second, logical_axes, kind)
        return spec

    def override_for(self, path: str) -> Spec | None:
        """Mesh axes for each dim of the parameter at `path`, `layers/mlp/up/kernel`; None without an override."""
        for pattern, spec in self.overrides:
            if path_pattern(pattern).fullmatch(path):
                return spec  # pyright: ignore[reportReturnType]  # __post_init__ normalised it
        return None

    def check(self, mesh_axis_names: Iterable[str]) -> None:
        """Refuse a rule to an axis that the mesh does not have.

        Raises:
            ConfigError: with the axis that was probably meant.
        """
        known = tuple(mesh_axis_names)
        for key, axes in self._all_axes():
            for axis in axes:
                if axis not in known:
                    raise SpecError(
                        f"{'.'.join(key)} names mesh axis '{axis}', but the mesh has {', '.join(known) or 'none'}.",
                        key=key,
                        value=list(axes) if len(axes) > 1 else axis,
                        hint=did_you_mean(axis, (*known, _REPLICATED)),
                        at=self.where(key) if self.where else None,
                    )

    def without(self, axes: Iterable[str]) -> ShardingRules:
        """The rules as they are where these mesh axes cut nothing."""
        gone = set(axes)

        def strip(table: Any) -> dict[str, Axes]:
            return {logical: tuple(a for a in axes if a not in gone) for logical, axes in table.items()}

        auto = self.auto
        if isinstance(auto, AutoRule):
            auto = replace(auto, axes=tuple(a for a in auto.axes if a not in gone))
        return replace(
            self,
            logical=strip(self.logical),
            compute=strip(self.compute),
            gradients=strip(self.gradients),
            optimizer=strip(self.optimizer),
            overrides=[(p, [[a for a in axes if a not in gone] for axes in spec]) for p, spec in self.overrides],
            auto=auto,
        )

    def to_dict(self) -> dict[str, Any]:
        """The `[rules]` table that says the same, without a preset."""
        states = ("logical", "compute", "gradients", "optimizer")
        table: dict[str, Any] = {
            name: {logical: _plain(axes) for logical, axes in getattr(self, name).items()} for name in states
        }
        table["override"] = [{"path": path, "spec": [_plain(axes) for axes in spec]} for path, spec in self.overrides]
        if isinstance(self.auto, AutoRule):
            table["auto"] = {"axis": _plain(self.auto.axes), "min_bytes": self.auto.min_bytes}
        return {name: value for name, value in table.items() if value}

    def _all_axes(self) -> Iterable[tuple[tuple[str, ...], Axes]]:
        for name in ("logical", "compute", "gradients", "optimizer"):
            for logical, axes in getattr(self, name).items():
                yield ("rules", name, logical), axes
        for index, (_, spec) in enumerate(self.overrides):
            yield ("rules", "override", str(index), "spec"), tuple(axis for axes in spec for axis in axes)
        if isinstance(self.auto, AutoRule):
            yield ("rules", "auto", "axis"), self.auto.axes

    def _used_twice(
        self, axis: str, first: int, second: int, logical_axes: Sequence[str | None], kind: str
    ) -> SpecError:
        names = [f"dim {index} ('{logical_axes[index]}')" for index in (first, second)]
        own = {} if kind in ("parameters", "activations") else getattr(self, kind)
        logical = logical_axes[second] or ""
        key = ("rules", kind if logical in own else "logical", logical)
        shown = ", ".join(str(name) for name in logical_axes)
        return SpecError(
            f"mesh axis '{axis}' shards both {' and '.join(names)} of an array ({shown}).",
            key=key,
            value=_plain(self.mapping(kind)[logical]),
            hint=f"another mesh axis for '{logical_axes[first]}' or '{logical}', or {logical} = \"{_REPLICATED}\"",
            at=self.where(key) if self.where else None,
        )


def preset_rules(name: str, mesh_axes: Iterable[str] | None = None) -> dict[str, dict[str, Axes]]:
    """The tables of a preset (logical, compute, gradients, optimizer), without the axes that the mesh does not have.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise SpecError(
            f"there is no rules preset '{name}'.",
            key=("rules", "preset"),
            value=name,
            hint=did_you_mean(name, PRESETS),
        )
    present = None if mesh_axes is None else set(mesh_axes)
    tables: dict[str, dict[str, Axes]] = {}
    for table in ("logical", "compute", "gradients", "optimizer"):
        tables[table] = {}
        for logical, value in PRESETS[name].get(table, {}).items():
            axes = _axes(("rules", "preset"), value)
            kept = tuple(axis for axis in axes if present is None or axis in present)
            if kept or not axes:  # a row that says "replicated" stays, since it overrides
                tables[table][logical] = kept
    return tables


def _axes(key: tuple[str, ...], value: Any) -> Axes:
    """The mesh axes that a rule's value names."""
    if value is None or value == _REPLICATED:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise SpecError(
            f"{'.'.join(key)} must be a mesh axis or a list of them; not {kind(value)}.",
            key=key,
            value=value,
            hint='"fsdp", ["data", "fsdp"], or "replicated"',
        )
    for name in names:
        if names.count(name) > 1:
            raise SpecError(
                f"{'.'.join(key)} names mesh axis '{name}' twice.", key=key, value=list(names), hint="naming it once"
            )
    return tuple(name for name in names if name != _REPLICATED)


def _parse_override(index: int, path: Any, spec: Any) -> tuple[str, Spec]:
    key = ("rules", "override", str(index))
    if not isinstance(path, str) or not path:
        raise SpecError(
            "an override needs a parameter path.", key=(*key, "path"), value=path, hint='path = "**/kernel"'
        )
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise SpecError(
            f"{'.'.join(key)}.spec must be a list with an entry for each dim; not {kind(spec)}.",
            key=(*key, "spec"),
            value=spec,
            hint='spec = ["fsdp", "replicated"]',
        )
    parsed = tuple(_axes((*key, "spec"), entry) for entry in spec)
    twice = _first_repeated(parsed)
    if twice is not None:
        axis, first, second = twice
        raise SpecError(
            f"mesh axis '{axis}' shards both dim {first} and dim {second} of '{path}'.",
            key=(*key, "spec"),
            value=list(spec),
            hint=f'"{_REPLICATED}" for one of them',
        )
    return path, parsed


def _first_repeated(spec: Spec) -> tuple[str, int, int] | None:
    """The first mesh axis that shards two dims, and the two dims."""
    seen: dict[str, int] = {}
    for dim, axes in enumerate(spec):
        for axis in axes:
            if axis in seen:
                return axis, seen[axis], dim
            seen[axis] = dim
    return None


def _plain(axes: Axes) -> Any:
    if not axes:
        return _REPLICATED
    return axes[0] if len(axes) == 1 else list(axes)


@functools.cache
def path_pattern(glob: str) -> re.Pattern[str]:
    """A path pattern as a regular expression: `**` any segments (also none), `*` within a segment."""
    parts = re.split(r"(\*\*/|/\*\*$|\*\*|\*)", glob)
    meaning = {"**/": r"(?:.*/)?", "/**": r"(?:/.*)?", "**": r".*", "*": r"[^/]*"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))
