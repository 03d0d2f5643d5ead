"""Other sizes of the cluster in a search: the same model and global batch on fewer or more hosts.

The experiment's own size is searched first. Each other size then gets a small share of the budget: every mesh and
recomputation of its own, with the options of XLA of the best so far, and a pipeline only where that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshkit.config.cluster import Cluster
from meshkit.config.emit import inline
from meshkit.config.experiment import Experiment, load
from meshkit.config.mesh import MeshAxis
from meshkit.errors import ConfigError
from meshkit.verbs.plan.space import Space, Variant

_SHARE = 12  # one of so many variants goes to each other size, and two at least
_LEAST = 2


@dataclass(frozen=True)
class Shares:
    """How many variants are compiled of the experiment's own size, and of each other."""

    own: int
    other: int


def parse_hosts(text: str | None) -> tuple[int, ...]:
    """`4,8,16` as numbers, each once.

    Raises:
        ConfigError: another form.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"'{text}' is no list of hosts.", at="--hosts", hint="--hosts 4,8,16")
    return tuple(sorted({int(part) for part in parts}))


def shares(budget: int, others: int) -> Shares:
    """The budget, shared out.

    Raises:
        ConfigError: it is not enough for so many sizes.
    """
    if not others:
        return Shares(budget, 0)
    other = max(_LEAST, budget // _SHARE)
    if budget - others * other < 1:
        hint = f"--candidates {1 + others * other} or more"
        raise ConfigError(f"{budget} variants are too few for {others + 1} sizes.", at="--hosts", hint=hint)
    return Shares(budget - others * other, other)


def at_size(path: str, overrides: Sequence[str], own: Experiment, hosts: int) -> Experiment:
    """The experiment on so many hosts, its largest axis over all GPUs: what the size's own meshes are laid over.

    Its batch is the experiment's, whether or not that divides by this mesh, which need not be among those.

    Raises:
        ConfigError: the cluster cannot have so many hosts, or the mesh cannot be.
    """
    try:
        cluster = Cluster.load(own.cluster.to_dict(), hosts=hosts)
    except ConfigError as error:
        raise ConfigError(f"no cluster of {hosts} hosts: {error.message}", at="--hosts", hint=error.hint) from None
    largest = max(own.mesh.axes, key=lambda axis: axis.size)
    whole = MeshAxis(largest.name, cluster.gpus_used_per_domain, cluster.num_nvlink_domains)
    axes = {a.name: (whole if a.name == largest.name else MeshAxis(a.name, 1, 1)).to_plain() for a in own.mesh.axes}
    batch = own.train.global_batch
    divides = f"train.global_batch={batch * cluster.num_gpus}"
    loaded = load(path, (*overrides, f"cluster.hosts={hosts}", f"mesh={inline(axes)}", divides))
    return replace(loaded, train=loaded.train.model_copy(update={"global_batch": batch}))


def like(space: Space, best: Variant | None) -> Space:
    """The space of another size: with the options of the best so far, and with a pipeline only if that has one."""
    if best is None:
        return space
    return replace(space, options=(best.options,), pipeline=space.pipeline if best.stages else None)
