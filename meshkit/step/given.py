"""A user's own training step with its arguments, for `mk.plan`, `mk.explain`, `mk.tune` and `[program]`.

Program(step, args) -> group_arguments -> Groups -> bytes and tokens of StepFacts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.tree_util import SequenceKey

from meshkit.errors import ConfigError, a_type
from meshkit.sharding.resolve import array_of, is_named, is_statistic, path_name, paths_within_model
from meshkit.step.program import StepFacts, local_bytes

GROUPS = ("parameters", "optimizer", "batch")


@dataclass(frozen=True)
class Program:
    """Any training step, with its arguments on a mesh.

    Example:
        def make(mesh, layers=32):
            state, batch = ...                       # jax.ShapeDtypeStructs with NamedShardings on mesh
            return mk.Program(jax.jit(train_step, donate_argnums=0), (state, batch))

    Attributes:
        step: a plain function, or one under `jax.jit` or `nnx.jit`.
        args: the step's arguments, abstract or concrete; nnx modules and optimizers are allowed.
        tokens: tokens of one call over all GPUs; None: the elements of the largest array of integers in the batch.
        model_flops: FLOP of the model per call over all GPUs, for MFU; None: counted in the traced step without
            recomputation.
        names: `parameters`, `optimizer` or `batch` -> patterns of paths of `args`, for arrays whose group cannot be
            told from path and type. A path begins with the number of the argument (`"0/params/**"`).

    Raises:
        ConfigError: no function, arguments that are no tuple, or names of other groups.
    """

    step: Callable[..., Any]
    args: Sequence[Any]
    tokens: float | None = None
    model_flops: float | None = None
    names: Mapping[str, str | Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if hasattr(self.step, "runtime_executable"):
            raise ConfigError(
                "the step is compiled already, for the devices of its own mesh.",
                hint="the jitted function, without .lower(...).compile()",
            )
        if not callable(self.step):
            raise ConfigError(
                f"the step is {a_type(self.step)}, not a function.", hint="mk.Program(step, (state, batch))"
            )
        if not isinstance(self.args, tuple | list):
            raise ConfigError(f"args must be a tuple of arguments, not {type(self.args).__name__}.", hint="args=(x,)")
        object.__setattr__(self, "names", dict(self.names or {}))
        for group in self.names:
            if group not in GROUPS:
                raise ConfigError(f"names has the unknown group '{group}'.", hint=", ".join(GROUPS))


def as_program(made: Any, name: str) -> Program:
    """Return the result of a user's function, an `mk.Program` or a pair of a step and its arguments, as a Program.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(made, Program):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return Program(*made)
    raise ConfigError(f"{name} returned {a_type(made)}; it must return an mk.Program(step, args).")


@dataclass(frozen=True)
class Groups:
    """The arrays of a step's arguments, grouped by purpose; each group maps path -> array."""

    parameters: dict[str, Any]
    others: dict[str, Any]
    """Arrays beside the parameters, such as batch statistics."""
    optimizer: dict[str, Any]
    batch: dict[str, Any]
    within: dict[str, str]
    """Path of each array -> its path within the model, found from all arguments together."""

    @property
    def of_state(self) -> Iterator[Any]:
        """All arrays but the batch."""
        return chain(self.parameters.values(), self.others.values(), self.optimizer.values())

    @property
    def most_tokens(self) -> int:
        """Elements of the largest array of the batch, not counting the last dim of floats."""
        return max((_rows(leaf) for leaf in self.batch.values()), default=1)

    def facts(self) -> StepFacts:
        """Return the known facts: number of parameters, bytes of parameters and optimizer on one GPU, and tokens."""
        integers = [leaf for leaf in self.batch.values() if _is(leaf, jnp.integer)]
        return StepFacts(
            parameters=sum(math.prod(array_of(leaf).shape) for leaf in self.parameters.values()) or None,
            parameters_bytes=sum(map(held_bytes, self.parameters.values())) or None,
            optimizer_bytes=sum(map(held_bytes, self.optimizer.values())) or None,
            tokens=max(map(_rows, integers), default=None),
        )


def group_arguments(args: Sequence[Any], names: Mapping[str, str | Sequence[str]] | None = None) -> Groups:
    """Group the arrays of a step's arguments by purpose.

    Parameters are the `nnx.Param`s of modules and the arrays under `params` in a tree; if there are none, the floats of
    the first argument. Other variables of modules are `others`. The arrays in optax's states and in a TrainState's
    other fields are the optimizer's. The rest is the batch. `names`, as in `Program`, override these rules.

    Raises:
        ConfigError: a pattern that matches no array.
    """
    groups: dict[str, dict[str, Any]] = {"parameters": {}, "others": {}, "optimizer": {}, "batch": {}}
    patterns = [
        (p, group) for group, said in (names or {}).items() for p in ([said] if isinstance(said, str) else said)
    ]
    unused = {pattern for pattern, _ in patterns}
    plain: dict[str, Any] = {}  # floats of the first argument, which are the parameters if none are found
    named: list[str] = []
    leaves: list[tuple[tuple, Any]] = []
    for number, arg in enumerate(args):
        tree = jax.tree.map(lambda leaf: nnx.state(leaf) if _is_module(leaf) else leaf, arg, is_leaf=_is_module)
        for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]:
            if not hasattr(array_of(leaf), "shape"):
                continue
            path = path_name(key_path)
            full = f"{number}/{path}".rstrip("/")
            said = next((one for one in patterns if fnmatchcase(full, one[0].replace("**", "*"))), None)
            if said:
                unused.discard(said[0])
            group = said[1] if said else _group_of(key_path, path, leaf)
            if group == "batch" and not said and number == 0 and _is(leaf, jnp.inexact):
                plain[path] = leaf
            # Two arguments may have arrays with the same path.
            named.append(path if path not in groups[group] else full)
            leaves.append(((SequenceKey(number), *key_path), leaf))
            groups[group][named[-1]] = leaf
    if unused:
        raise ConfigError(
            f"names has {sorted(unused)[0]!r}, which matches no array of the arguments.", hint="0/params/**"
        )
    if not groups["parameters"]:
        groups["parameters"] = plain
        groups["batch"] = {path: leaf for path, leaf in groups["batch"].items() if path not in plain}
    return Groups(**groups, within=dict(reversed([*zip(named, paths_within_model(leaves))])))


def held_bytes(leaf: Any) -> int:
    """Return the bytes of an array on one GPU; all its bytes if it has no sharding."""
    array = array_of(leaf)
    if isinstance(getattr(array, "sharding", None), NamedSharding):
        return local_bytes(array)
    if not hasattr(array, "shape") or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return 0
    return math.prod(array.shape) * array.dtype.itemsize


def _group_of(key_path: tuple, path: str, leaf: Any) -> str:
    """Return the group of an array, from its type and its path."""
    if is_statistic(key_path, leaf):
        return "optimizer"
    if isinstance(leaf, nnx.Variable):
        return "parameters" if isinstance(leaf, nnx.Param) else "others"
    return "parameters" if "params" in path.split("/") else "batch"


def _is_module(leaf: Any) -> bool:
    return nnx.graphlib.is_graph_node(leaf) and not isinstance(leaf, nnx.Variable)


def _is(leaf: Any, kind: Any) -> bool:
    return jnp.issubdtype(array_of(leaf).dtype, kind)


def _rows(leaf: Any) -> int:
    return math.prod(array_of(leaf).shape[: -1 if _is(leaf, jnp.inexact) else None])
