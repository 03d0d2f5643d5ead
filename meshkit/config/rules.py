"""Define sharding rules: which mesh axes shard which logical axes.

A rule maps a logical axis (a named array dim such as `embed`) to mesh axes. An override maps the path of a parameter to
mesh axes for each of its dims, and takes precedence over rules. A logical axis without a rule is replicated.

A preset is a named table of rules over the axis names that the shipped configs use. Axes that a mesh lacks are left out
of the preset. `meshkit explain E --rules` prints the rules that a preset gives on a mesh. Sources of the schemes: ZeRO
1 to 3, Rajbhandari et al. 2020; FSDP and its hybrid form, Zhao et al. 2023; tensor parallelism, Shoeybi et al. 2019;
sequence parallelism, Korthikanti et al. 2022.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from meshkit.config.toml import SpecError, did_you_mean, kind

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]

KINDS = ("parameters", "activations", "compute", "gradients", "optimizer")
_REPLICATED = "replicated"
_SPEC = 'spec = ["fsdp", "replicated"]'
_TABLES = ("logical", "compute", "gradients", "optimizer")

_BATCH = ("data", "fsdp")
_TENSOR = dict.fromkeys(
    ("heads", "kv_heads", "mlp", "vocab", "act_heads", "act_kv_heads", "act_mlp", "act_vocab"), "tensor"
)
_FSDP = {"act_batch": _BATCH, "embed": "fsdp"}
_CONTEXT = {"act_length": "context", "act_residual_length": ("context", "tensor")}
_EXPERT = {"act_batch": (*_BATCH, "expert"), "experts": "expert", "act_experts": "expert"}

# ZeRO-1 and 2 shard the optimizer's work (fp32 parameters and moments) over `data` and gather the weights once a step,
# in the compute dtype. They differ in the accumulators of gradients over micro-batches: ZeRO-1 has whole ones on every
# GPU and reduces once a step, ZeRO-2 shards them and reduces with every micro-batch.
_ZERO_1 = {"logical": {"act_batch": "data", "embed": "data"}, "compute": {"embed": "replicated"}}
_ZERO_2 = {**_ZERO_1, "gradients": {"embed": "data"}}

# preset -> table of the rules -> logical axis -> mesh axes
PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "data": {"logical": {"act_batch": "data"}},
    "zero1": _ZERO_1,
    "zero2": _ZERO_2,
    "zero3": {"logical": _FSDP},
    "fsdp": {"logical": _FSDP},
    "hsdp": {"logical": _FSDP},
    "tensor": {"logical": {"act_batch": "data", **_TENSOR}},
    "tensor_sequence": {"logical": {"act_batch": "data", **_TENSOR, "act_residual_length": "tensor"}},
    "zero1_tensor": {**_ZERO_1, "logical": {**_ZERO_1["logical"], **_TENSOR}},
    "fsdp_tensor": {"logical": {**_FSDP, **_TENSOR}},
    "fsdp_tensor_sequence": {"logical": {**_FSDP, **_TENSOR, "act_residual_length": "tensor"}},
    "fsdp_context": {"logical": {**_FSDP, "act_length": "context", "act_residual_length": "context"}},
    "fsdp_expert": {"logical": {**_FSDP, **_EXPERT}},
    "all": {"logical": {**_FSDP, **_TENSOR, **_CONTEXT, **_EXPERT}},
}


@dataclass(frozen=True)
class AutoRule:
    """A rule for arrays without dim names: it shards their largest dim that the axes divide."""

    axes: Axes
    min_bytes: int = 2**20
    """Global arrays with fewer bytes are replicated."""


@dataclass(frozen=True)
class ShardingRules:
    """Rules from logical axes, and parameter paths, to mesh axes."""

    logical: Mapping[str, Any] = field(default_factory=dict)
    """Logical axis -> mesh axis, list of mesh axes, or None (replicated); the first axis is the outermost. A list of
    such pairs, as in flax, works too."""
    _: KW_ONLY
    overrides: Sequence[tuple[str, Sequence[Any]]] = ()
    """Pairs (path pattern, one entry per dim). `**` matches any depth, `*` one segment. The first match wins."""
    compute: Mapping[str, Any] | None = None
    """Overrides `logical` for the weights as the model computes with them."""
    gradients: Mapping[str, Any] | None = None
    """Overrides `logical` for the accumulators of gradients over micro-batches. Over an axis of `act_batch` that is
    named here, gradients are reduced with every micro-batch; over other axes, once a step."""
    optimizer: Mapping[str, Any] | None = None
    """Overrides `logical` for optimizer state."""
    auto: AutoRule | Mapping[str, Any] | None = None
    """Rule for arrays without dim names that no override matches: an AutoRule or `{axis, min_bytes}`."""
    strict: bool = False
    """Raise an error instead of a warning for an override that matches no array, or an axis that does not divide its
    dim."""
    from_preset: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Logical axes whose rule a preset gave, not the user."""
    where: Callable[[Sequence[str]], str] | None = field(default=None, compare=False, repr=False)
    """Function that returns the place where a rule was written, for errors."""

    def __post_init__(self):
        for name in _TABLES:
            table = from_pairs(getattr(self, name), ("rules", name))
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
        """Return a named table of rules, without the axes that the mesh does not have.

        Raises:
            ConfigError: there is no such preset.
        """
        rules = preset_rules(name, mesh_axes)
        logical = rules.pop("logical")
        return cls(logical, **rules, from_preset=frozenset(logical))  # pyright: ignore[reportArgumentType]

    @property
    def explicit(self) -> frozenset[str]:
        """Return the logical axes whose rule the user wrote."""
        return frozenset(self.logical) - self.from_preset

    def mapping(self, kind: str) -> dict[str, Axes]:
        """Map logical axes to mesh axes for `parameters`, `activations`, `compute`, `gradients` or `optimizer`."""
        if kind not in KINDS:
            raise SpecError(f"there are no rules for '{kind}'.", key=("rules",), hint=did_you_mean(kind, KINDS))
        return {**self.logical, **self._own(kind)}

    def written(self, logical: str, kind: str) -> tuple[str, ...] | None:
        """Return the key of the user's rule for a logical axis; None if a preset gave the rule, or if there is none."""
        if logical in self._own(kind):
            return ("rules", kind, logical)
        return ("rules", "logical", logical) if logical in self.explicit else None

    def _own(self, kind: str) -> dict[str, Axes]:
        return {} if kind in ("parameters", "activations") else getattr(self, kind)

    def spec_for(self, logical_axes: Sequence[str | None], *, kind: str = "parameters") -> Spec:
        """Return the mesh axes for each dim of an array; () is replicated.

        Args:
            logical_axes: name of each dim, or None. A dim without a name, or whose name has no rule, is replicated.
            kind: one of `KINDS`.

        Returns:
            A tuple of mesh axes for each dim, the outermost first.

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

    def override_for(self, *paths: str) -> Spec | None:
        """Return the override for a parameter as mesh axes for each dim; None without an override.

        The paths (such as `layers/up/kernel`) all lead to this parameter: from the root of its tree and, if the tree
        has more than the model, from the model.
        """
        for pattern, spec in self.overrides:
            if any(path_matches(pattern, path) for path in paths):
                return spec  # pyright: ignore[reportReturnType]  # __post_init__ normalised it
        return None

    def place(self, key: Sequence[str]) -> str | None:
        """Return the place where a key was written; None for rules that are in no file."""
        return self.where(key) if self.where else None

    def place_of_override(self, *paths: str) -> str | None:
        """Return the place of the override that `override_for` finds; None for rules that are in no file."""
        found = (i for i, (pattern, _) in enumerate(self.overrides) if any(path_matches(pattern, p) for p in paths))
        return self.place(("rules", "override", str(next(found)), "spec"))

    def check(self, mesh_axis_names: Iterable[str]) -> None:
        """Refuse a rule to an axis that the mesh does not have.

        Raises:
            ConfigError: the mesh lacks an axis; the hint is the axis that was probably meant.
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
                        at=self.place(key),
                    )

    def without(self, axes: Iterable[str]) -> ShardingRules:
        """Return the rules for a mesh in which these axes shard nothing."""
        gone = set(axes)

        def strip(axes: Axes) -> Axes:
            return tuple(a for a in axes if a not in gone)

        tables = {name: {logical: strip(axes) for logical, axes in getattr(self, name).items()} for name in _TABLES}
        overrides = [(path, [strip(axes) for axes in spec]) for path, spec in self.overrides]
        auto = replace(self.auto, axes=strip(self.auto.axes)) if isinstance(self.auto, AutoRule) else self.auto
        return replace(self, **tables, overrides=overrides, auto=auto)

    def to_dict(self) -> dict[str, Any]:
        """Return an equivalent `[rules]` table without a preset."""
        table: dict[str, Any] = {
            name: {logical: _plain(axes) for logical, axes in getattr(self, name).items()} for name in _TABLES
        }
        table["override"] = [{"path": path, "spec": [_plain(axes) for axes in spec]} for path, spec in self.overrides]
        if isinstance(self.auto, AutoRule):
            table["auto"] = {"axis": _plain(self.auto.axes), "min_bytes": self.auto.min_bytes}
        return {name: value for name, value in table.items() if value}

    def _all_axes(self) -> Iterable[tuple[tuple[str, ...], Axes]]:
        for name in _TABLES:
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
        pair = [str(logical_axes[index]) for index in (second, first)]
        key = next(filter(None, (self.written(name, kind) for name in pair)), ("rules", "logical", pair[0]))
        logical = key[-1]
        shown = ", ".join(str(name) for name in logical_axes)
        return SpecError(
            f"mesh axis '{axis}' shards both {' and '.join(names)} of an array ({shown}).",
            key=key,
            value=_plain(self.mapping(kind)[logical]),
            hint=f"another mesh axis for '{pair[0]}' or '{pair[1]}', or {logical} = \"{_REPLICATED}\"",
            at=self.place(key),
        )


def from_pairs(table: Any, key: tuple[str, ...]) -> Any:
    """Return a table of rules from a list of pairs, as in flax; any other value is returned unchanged.

    Raises:
        ConfigError: one name has two different rules.
    """
    pairs = isinstance(table, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in table)
    if not pairs or not all(isinstance(logical, str) for logical, _ in table):
        return table
    rules: dict[str, Any] = {}
    for logical, axes in table:
        if logical in rules and rules[logical] != axes:
            raise SpecError(
                f"{'.'.join(key)} has two rules for '{logical}': {rules[logical]!r} and {axes!r}. Of "
                "several, flax.linen takes the first whose axes are free, flax.nnx the last; meshkit allows only one.",
                key=(*key, logical),
                value=axes,
                hint=f'one of them; a list, as in ["{logical}", ["data", "fsdp"]], cuts one dim over several axes',
            )
        rules[logical] = axes
    return rules


def preset_rules(name: str, mesh_axes: Iterable[str] | None = None) -> dict[str, dict[str, Axes]]:
    """Return the tables of a preset (logical, compute, gradients, optimizer), without axes that the mesh lacks.

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
    for table in _TABLES:
        tables[table] = {}
        for logical, value in PRESETS[name].get(table, {}).items():
            axes = _axes(("rules", "preset"), value)
            kept = tuple(axis for axis in axes if present is None or axis in present)
            if kept or not axes:  # A "replicated" rule stays, because it overrides `logical`.
                tables[table][logical] = kept
    return tables


def _axes(key: tuple[str, ...], value: Any) -> Axes:
    if value is None or value == _REPLICATED:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise SpecError(
            f"{'.'.join(key)} must be a mesh axis or a list of them; not {kind(value)}.",
            key=key,
            value=value,
            hint=_SPEC if key[-1] == "spec" else f'{key[-1]} = "fsdp", ["data", "fsdp"], or "{_REPLICATED}"',
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
            hint=_SPEC,
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


def path_matches(glob: str, path: str) -> bool:
    """Return whether a path matches a pattern: `**` matches any segments (also none), `*` any text in a segment.

    The time is at most proportional to the product of both lengths. For each piece of the pattern in turn, `at` is the
    set of positions in the path at which a match of the pieces so far can end.
    """
    at, size = {0}, len(path)
    for piece in _pieces(glob):
        if piece.startswith("**/"):
            at |= {i + 1 for i in range(min(at), size) if path[i] == "/"}
        elif piece.startswith("**"):
            at = set(range(min(at), size + 1))
        elif piece == "/**":
            at = {size} if any(i == size or path[i] == "/" for i in at) else set()
        elif piece == "*":
            found: set[int] = set()
            for i in sorted(at):
                if i not in found:
                    end = path.find("/", i)
                    found.update(range(i, (size if end < 0 else end) + 1))
            at = found
        else:
            at = {i + len(piece) for i in at if path.startswith(piece, i)}
        if not at:
            return False
    return size in at


@functools.lru_cache(maxsize=1024)
def _pieces(glob: str) -> tuple[str, ...]:
    """Split a pattern into its wildcards (equal ones in a row are one piece) and the text between them."""
    return tuple(filter(None, re.split(r"((?:\*\*/)+|/\*\*$|(?:\*\*)+(?!/)|\*)", glob)))
