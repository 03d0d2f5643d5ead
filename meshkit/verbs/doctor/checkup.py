"""All checks in their order, and how they read in a terminal."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from meshkit.config.experiment import Experiment
from meshkit.discover import LiveProbe
from meshkit.distributed.environment import read_gang
from meshkit.errors import MeshkitError
from meshkit.verbs.doctor.all_reduce import check_gang
from meshkit.verbs.doctor.diagnosis import Diagnosis, Result
from meshkit.verbs.doctor.node import check_disk, check_hardware, check_limits, check_packages
from meshkit.verbs.doctor.node_network import check_network
from meshkit.verbs.doctor.site_rules import check_site
from meshkit.verbs.doctor.variables import check_variables, check_xla_flags

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "bold red")}


def examine(
    experiment: Experiment | None = None,
    *,
    folder: Path = Path("runs"),
    gang_timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Looks at this installation and machine.

    Args:
        experiment: what shall run here; None checks the machine alone.
        folder: where it would write.
        gang_timeout_s: joins the job that the environment names and makes one all-reduce; None does not.
        env: in place of this process's environment.
    """
    env = dict(os.environ if env is None else env)
    cluster = experiment.cluster if experiment else None
    expected = None if cluster is None else 0 if cluster.is_cpu else cluster.gpus_per_host
    nics = cluster.nics_per_host if cluster is not None and cluster.hosts > 1 else None
    hardware = check_hardware(LiveProbe(), expected, nics)
    has_gpus = any(r.check == "gpus" and " x " in r.message for r in hardware)
    results: list[Result] = [*check_packages(has_gpus=has_gpus), *hardware]
    results += check_variables(env, memory_fraction=experiment.train.memory_fraction if experiment else None)
    results += check_xla_flags(env)
    results += check_limits(has_gpus=has_gpus)
    results += check_site()
    results += check_network(env, several=_is_one_of_several(env))
    needed_bytes = None
    if experiment is not None:
        from meshkit.verbs.doctor.needs import check_experiment

        found, needed_bytes = check_experiment(experiment)
        results += found
    results += check_disk(folder, needed_bytes)
    if gang_timeout_s is not None:
        results += check_gang(env, gang_timeout_s)
    return Diagnosis(host=socket.gethostname(), checks=tuple(results))


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints one line a check, and the way out below those that found something."""
    width = max(len(c.check) for c in diagnosis.checks)
    for c in diagnosis.checks:
        word, style = _MARKS[c.status]
        console.print(Text.assemble((f"{word:<8}", style), (f"{c.check:<{width}}  ", "bold"), c.message))
        if c.hint:
            console.print(Text(f"{'':<{width + 10}}try {c.hint}", style="dim"))
    bad, odd = len(diagnosis.errors), sum(c.status == "warning" for c in diagnosis.checks)
    console.print(f"{diagnosis.host}: {len(diagnosis.checks)} checks, {bad} errors, {odd} warnings")


def _is_one_of_several(env: Mapping[str, str]) -> bool:
    try:
        gang = read_gang(env)
    except MeshkitError:
        return True
    return gang is not None and gang.num_processes > 1
