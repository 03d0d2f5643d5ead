"""All checks in their order."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

from meshkit.config.experiment import Experiment
from meshkit.discover import LiveProbe
from meshkit.distributed.environment import read_gang
from meshkit.errors import MeshkitError
from meshkit.units import format_bytes
from meshkit.verbs.doctor.diagnosis import Diagnosis, Result, failed, ok
from meshkit.verbs.doctor.network import check_gang, check_network
from meshkit.verbs.doctor.node import (
    check_disk,
    check_hardware,
    check_limits,
    check_packages,
    check_site,
    check_variables,
    check_xla_flags,
)


def examine(
    experiment: Experiment | None = None,
    *,
    folder: Path = Path("runs"),
    gang_timeout_s: float | None = None,
) -> Diagnosis:
    """Looks at this installation and machine.

    Args:
        experiment: what shall run here; None checks the machine alone.
        folder: where it would write.
        gang_timeout_s: joins the job that the environment names and makes one all-reduce; None does not.
    """
    env = dict(os.environ)
    cluster = experiment.cluster if experiment else None
    expected = None if cluster is None else 0 if cluster.is_cpu else cluster.gpus_per_host
    nics = cluster.nics_per_host if cluster is not None and cluster.hosts > 1 else None
    hardware = check_hardware(LiveProbe(), expected, nics)
    has_gpus = any(r.check == "gpus" and " x " in r.message for r in hardware)
    results = [*check_packages(has_gpus=has_gpus), *hardware]
    results += check_variables(env, memory_fraction=experiment.train.memory_fraction if experiment else None)
    results.append(check_xla_flags(env))
    results += check_limits(has_gpus=has_gpus)
    results += check_site()
    try:
        gang = read_gang(env)
        several = gang is not None and gang.num_processes > 1
    except MeshkitError:  # of which check_variables speaks
        gang, several = None, True
    results += check_network(gang, several=several)
    needed_bytes = None
    if experiment is not None:
        result, needed_bytes = check_experiment(experiment)
        results.append(result)
    results += check_disk(folder, needed_bytes)
    if gang_timeout_s is not None:
        results += check_gang(env, gang_timeout_s)
    return Diagnosis(host=socket.gethostname(), checks=tuple(results))


def check_experiment(experiment: Experiment) -> tuple[Result, int | None]:
    """Whether the model can be built, and the bytes of the checkpoints that a run keeps, one more being written.

    Returns:
        The check, and those bytes; None where no checkpoints are written or the model is wrong.
    """
    import jax
    from flax import nnx

    from meshkit.sharding.mesh import use_no_accelerator
    from meshkit.step.state import describe_model
    from meshkit.step.train_step import make_optimizer

    use_no_accelerator()  # the model without its arrays needs no GPU, and a GPU's memory is not ours to take
    try:
        optimizer, params = make_optimizer(experiment), nnx.to_pure_dict(describe_model(experiment).params)
    except MeshkitError as e:
        return failed("experiment", e, "meshkit explain, which shows where"), None
    shapes = jax.tree.leaves(params)
    parameters = sum(math.prod(leaf.shape) for leaf in shapes)
    state = [*shapes, *jax.tree.leaves(jax.eval_shape(optimizer.init, params))]
    each = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state)
    text = f"{experiment.model.class_path} has {parameters / 1e6:.1f} M parameters, a checkpoint {format_bytes(each)}"
    if not experiment.checkpoint.every:
        return ok("experiment", f"{text}, of which none is written"), None
    return ok("experiment", text), each * (experiment.checkpoint.keep + 1)
