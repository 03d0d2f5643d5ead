"""Plan the same experiment at several sizes, to show how a step changes with the number of hosts or GPUs.

Weak scaling grows the batch with the GPUs; strong scaling divides the experiment's batch among more GPUs. For a
`[program]` the function `make` chooses the batch for the mesh of each size. Efficiency is tokens per second per GPU
relative to the smallest size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ProgramExperiment, load_any
from meshkit.config.mesh import MeshAxis
from meshkit.config.toml import inline
from meshkit.errors import ConfigError
from meshkit.report.schema import Part
from meshkit.search.candidate import Candidate, Outcome
from meshkit.search.workers import default_jobs, file_request, open_workers

SCALING_SCHEMA = "meshkit.scaling/1"
SCALING_FILE = "scaling.json"
Kind = Literal["weak", "strong", "program"]


class ScalingPoint(Part):
    """The experiment at one size.

    Attributes:
        global_batch: the global batch at this size; None for a `[program]`.
        efficiency: tokens per second per GPU, relative to the smallest size that could be planned.
        speedup: tokens per second, relative to the same smallest size.
        exposed_share: share of the step that is exposed communication.
    """

    hosts: int
    num_gpus: int
    global_batch: int | None
    efficiency: float | None = None
    speedup: float | None = None
    exposed_share: float | None = None
    outcome: Outcome


class ScalingReport(Part):
    """The result of a sweep over sizes, the smallest first.

    Attributes:
        axis: the mesh axis that grows.
    """

    schema_: Literal["meshkit.scaling/1"] = Field(default=SCALING_SCHEMA, alias="schema")
    experiment: str
    gpu: str
    kind: Kind
    axis: str
    points: tuple[ScalingPoint, ...]


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """Return `hosts=1,2,4` as ("hosts", (1, 2, 4)), in ascending order.

    Raises:
        ConfigError: the text has another form.
    """
    name, _, values = text.partition("=")
    numbers = parse_sizes(values)
    if name not in ("hosts", "gpus") or not numbers:
        hint = "--sweep hosts=1,2,4,8, or --sweep gpus=1,2,4,8,16 to begin inside a host"
        raise ConfigError(f"'{text}' is not a sweep.", at="--sweep", hint=hint)
    return name, numbers


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return `4,8,16` as sorted numbers, each once; empty if the text is no list of positive numbers."""
    parts = [part.strip() for part in text.split(",")]
    numbers = {int(part) if part.isascii() and part.isdigit() else 0 for part in parts}
    return () if 0 in numbers else tuple(sorted(numbers))


def sweep_sizes(
    experiment: Experiment | ProgramExperiment, what: str, numbers: Sequence[int], kind: Kind
) -> tuple[str, tuple[Candidate, ...]]:
    """Return the axis that grows, and the experiment at each size of a sweep.

    The axis whose factor is `"fill"` grows. Without one, the outermost axis that crosses domains grows. If none crosses
    domains, the outermost axis that shards the batch grows, or for a `[program]` the outermost axis.

    Args:
        what: `hosts` or `gpus`, the unit of the numbers.
        numbers: the sizes, positive and in the order of the result.
        kind: `weak` scales the global batch with the GPUs, `strong` keeps it, and for `program` `make` decides.

    Raises:
        ConfigError: no axis can grow, or one of the sizes is impossible for the cluster, the mesh or the batch.
    """
    axis = growing_axis(experiment)
    return axis.name, tuple(_size(experiment, axis, what, number, kind) for number in numbers)


def growing_axis(experiment: Experiment | ProgramExperiment) -> MeshAxis:
    """Return the axis of a mesh that grows in a sweep, as `sweep_sizes` describes.

    `"fill"` is read from the file and from `--set`, because the resolved mesh has numbers in its place.

    Raises:
        ConfigError: no axis can grow.
    """
    table = experiment.document.table.get("mesh", {}) if experiment.document else {}
    axes = {axis.name: axis for axis in experiment.mesh.axes}
    filled = [
        name for name, value in table.items() if "fill" in (value.values() if isinstance(value, dict) else [value])
    ]
    if len(filled) == 1:
        return axes[filled[0]]
    if filled:
        across = [name for name in filled if isinstance(table[name], dict) and table[name].get("infiniband") == "fill"]
        return axes[(across or filled)[0]]
    crossing = [axis for axis in experiment.mesh.axes if axis.number("infiniband") > 1]
    if crossing:
        return crossing[0]
    if isinstance(experiment, ProgramExperiment):
        return experiment.mesh.axes[0]
    (batch,) = experiment.rules.spec_for(("act_batch",), kind="activations")
    cutting = [axis for axis in experiment.mesh.axes if axis.name in batch]
    if cutting:
        return cutting[0]
    raise experiment.error(
        "mesh",
        f"a sweep does not know which axis of the mesh grows: none of {', '.join(axes)} crosses domains or cuts the "
        "batch.",
        hint='one axis with infiniband = "fill"',
    )


def _size(experiment: Experiment | ProgramExperiment, axis: MeshAxis, what: str, number: int, kind: Kind) -> Candidate:
    cluster = experiment.cluster
    target = _cluster_of(cluster, what, number)
    inside = _grown(experiment, axis, "nvlink", target.gpus_used_per_domain)
    across = _grown(experiment, axis, "infiniband", target.num_nvlink_domains)
    axes = [MeshAxis(axis.name, inside, across) if a.name == axis.name else a for a in experiment.mesh.axes]
    mesh = {a.name: a.to_plain() for a in axes}
    settings = [f"cluster.hosts={target.hosts}", f"mesh={inline(mesh)}"]
    if isinstance(experiment, Experiment):
        settings.append(f"train.global_batch={_batch(experiment, target, kind)}")
    if target.gpus_used_per_domain != cluster.gpus_used_per_domain:
        settings.append(f"cluster.gpus_used_per_domain={target.gpus_used_per_domain}")
    if target.nvlink_domain_size != cluster.nvlink_domain_size:
        settings.append(f"cluster.nvlink_domain_size={target.nvlink_domain_size}")
    return Candidate(tuple(settings))


def _batch(experiment: Experiment, target: Cluster, kind: Kind) -> int:
    batch, now = experiment.train.global_batch, experiment.cluster.num_gpus
    if kind == "strong":
        return batch
    scaled, rest = divmod(batch * target.num_gpus, now)
    if rest:
        raise experiment.error(
            "train.global_batch",
            f"{batch} sequences on {now} GPUs are not a whole number of sequences on {target.num_gpus}.",
            hint="a global_batch that the GPUs divide, or --scaling strong",
        )
    return scaled


def _cluster_of(cluster: Cluster, what: str, number: int) -> Cluster:
    used, hosts_per_domain = cluster.gpus_used_per_domain, cluster.hosts_per_domain
    domains, rest = divmod(number, used if what == "gpus" else hosts_per_domain)
    table = cluster.to_dict()
    if domains and not rest:
        return Cluster.load(table, hosts=domains * hosts_per_domain)
    gpus = number if what == "gpus" else number * cluster.gpus_per_host
    if domains or gpus > used:
        unit = f"{used} GPUs" if what == "gpus" else f"{hosts_per_domain} hosts"
        raise ConfigError(f"{number} {what} are not whole NVLink domains of {unit}.", at="--sweep")
    return Cluster.load(table, hosts=hosts_per_domain, gpus_used_per_domain=gpus)


def _grown(experiment: Experiment | ProgramExperiment, axis: MeshAxis, link: str, total: int) -> int:
    others = 1
    for other in experiment.mesh.axes:
        others *= other.number(link) if other.name != axis.name else 1
    if total % others == 0:
        return total // others
    kept = ", ".join(f"{a.name} {a.number(link)}" for a in experiment.mesh.axes if a.name != axis.name)
    there = f"{total} GPUs of a domain" if link == "nvlink" else f"{total} NVLink domains"
    raise experiment.error(
        f"mesh.{axis.name}",
        f"axis '{axis.name}' grows in a sweep and the others stay ({kept}), but {others} do not divide {there}.",
        hint="larger sizes in --sweep, or smaller factors of the other axes",
    )


def scale(
    path: str | Path,
    overrides: Sequence[str],
    sweep: str,
    kind: Kind | None = None,
    *,
    jobs: int | None = None,
) -> ScalingReport:
    """Plan an experiment at several sizes.

    `weak` (the default) grows the batch with the GPUs, and `strong` keeps the batch. For a `[program]`, `kind` must be
    None.

    Raises:
        ConfigError: the sweep is invalid, a size is impossible, or `kind` is set for a `[program]`, whose `make`
            decides the batch.
    """
    experiment = load_any(path, overrides)
    if isinstance(experiment, ProgramExperiment):
        if kind is not None:
            raise experiment.error(
                "program", "the batch at each size is what its function returns.", hint="without --scaling"
            )
        kind = "program"
    kind = kind or "weak"
    if experiment.cluster.is_cpu:
        raise ConfigError(f"cluster '{experiment.cluster.name}' has no GPUs, and a sweep predicts GPUs.")
    what, numbers = parse_sweep(sweep)
    axis, sizes = sweep_sizes(experiment, what, numbers, kind)
    # Impossible sizes fail before anything is compiled.
    experiments = [load_any(path, (*overrides, *size.settings)) for size in sizes]
    with open_workers(file_request(path, overrides), min(jobs or default_jobs(), len(sizes))) as workers:
        workers.plan(sizes)
    points = _points(experiments, [size.outcome for size in sizes if size.outcome])
    gpu = experiment.cluster.gpu.key
    return ScalingReport(experiment=experiment.name, gpu=gpu, kind=kind, axis=axis, points=points)


def _points(
    experiments: Sequence[Experiment | ProgramExperiment], outcomes: Sequence[Outcome]
) -> tuple[ScalingPoint, ...]:
    batches = [e.train.global_batch if isinstance(e, Experiment) else None for e in experiments]
    sizes = [(e.cluster.hosts, e.cluster.num_gpus, batch) for e, batch in zip(experiments, batches)]
    rates = [
        outcome.tokens_per_s_per_gpu or (batch / outcome.time_s / gpus if batch and outcome.time_s else None)
        for (_, gpus, batch), outcome in zip(sizes, outcomes)
    ]
    first = next(((size[1], rate) for size, rate in zip(sizes, rates) if rate), None)
    points = []
    for (hosts, num_gpus, global_batch), rate, outcome in zip(sizes, rates, outcomes):
        efficiency = rate / first[1] if rate and first else None
        share = outcome.exposed_s / outcome.time_s if outcome.exposed_s is not None and outcome.time_s else None
        points.append(
            ScalingPoint(
                hosts=hosts,
                num_gpus=num_gpus,
                global_batch=global_batch,
                efficiency=efficiency,
                speedup=efficiency * num_gpus / first[0] if efficiency and first else None,
                exposed_share=share,
                outcome=outcome,
            )
        )
    return tuple(points)
