"""`meshkit launch slurm` and `mpi`: a bash script that starts a job on other machines and restarts it.

    Job + what the site wants -> directives, assignments (quoted) + bodies/*.sh (as they are) -> sbatch | bash

What is the job's is quoted, what is meshkit's has no holes in it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from meshkit.distributed.environment import MTLS, SECRET
from meshkit.errors import ConfigError
from meshkit.verbs.launch.job import SAVE_S, Job

_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@%/=\[\]*-]*", re.ASCII)
_Value = int | str | tuple[str, ...]  # of a shell variable: a whole number, a word, or an array of words


@dataclass(frozen=True)
class Slurm:
    """What a SLURM site wants to know."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch by name: `{"partition": "gpu", "time": "2-00:00:00"}`; they replace what meshkit sets."""
    container_image: str | None = None
    """Image that pyxis starts; None runs on the host."""
    container_mounts: tuple[str, ...] = ()
    """Mounts of the container: `/data:/data`."""
    container_workdir: str | None = None
    """Folder in the container that has the experiment."""
    python: str = "python3"
    """The interpreter, as the hosts or the image know it."""
    mtls: bool = True
    """Whether the processes know each other by certificates, which the first host makes; else by a secret."""


def slurm_script(job: Job, site: Slurm) -> str:
    """The sbatch script of a job: `sbatch < script`.

    One allocation, in which a gang that fails is started again; a preemption or the end of the time saves a checkpoint
    and puts the job back into the queue, and so does the loss of a host.

    Raises:
        ConfigError: an option cannot be written into a script.
    """
    directives = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": str(job.processes_per_host),
        "gpus-per-node": str(job.gpus_per_host),
        "exclusive": "",
        "mem": "0",
        "requeue": "",
        "signal": f"B:TERM@{SAVE_S}",
        "open-mode": "append",
        "output": "%x-%j.out",
    }
    options = ["--kill-on-bad-exit=1", "--cpu-bind=none", f"--ntasks={job.num_processes}"]
    if site.container_image is None and (site.container_mounts or site.container_workdir):
        raise ConfigError("mounts and a working folder are of a container.", hint="--container-image IMAGE too")
    if site.container_image is not None:
        options.append(f"--container-image={_one_line(site.container_image, '--container-image')}")
    if site.container_mounts:
        options.append("--container-mounts=" + _one_line(",".join(site.container_mounts), "--container-mounts"))
    if site.container_workdir is not None:
        if not job.out.startswith("/"):
            raise ConfigError(
                f"the run folder {job.out} is one folder on the hosts and another in the container.",
                at="--container-workdir",
                hint=f"--out /SHARED/{job.name}, mounted under the same path",
            )
        options.append(f"--container-workdir={_one_line(site.container_workdir, '--container-workdir')}")
    values = {**_assignments(job, site.python, site.mtls), "srun_options": tuple(options)}
    bodies = ("slurm", *(("slurm_mtls", "mtls") if site.mtls else ("secret",)), "attempts")
    return _render(_comment(job, "sbatch < FILE"), {**directives, **site.options}, values, bodies)


def mpi_script(job: Job, hostfile: str, *, python: str = "python3", mtls: bool = True) -> str:
    """The bash script that starts a job with OpenMPI's mpirun: `bash script`.

    Args:
        job: what to start.
        hostfile: names the hosts, the first one first; process 0 runs there.
        python: the interpreter, as the hosts know it.
        mtls: whether the processes know each other by certificates, which the first host makes; else by a secret.
    """
    options = ("-np", str(job.num_processes), "--map-by", f"ppr:{job.processes_per_host}:node", "--bind-to", "none")
    options += ("-x", MTLS if mtls else SECRET)
    values = {**_assignments(job, python, mtls), "hostfile": hostfile, "mpirun_options": options}
    bodies = ("mpi", *(("mpi_mtls", "mtls") if mtls else ("secret",)), "attempts")
    return _render(_comment(job, "bash FILE"), {}, values, bodies)


def _assignments(job: Job, python: str, mtls: bool) -> dict[str, _Value]:
    several = job.processes_per_host > 1
    make = (python, "-m", "meshkit", "launch", "certificates")
    return {
        "out": _one_line(job.out, "--out"),
        "num_processes": job.num_processes,
        "devices_per_process": job.gpus_per_host // job.processes_per_host if several else 0,  # 0: all of the host
        "max_restarts": job.max_restarts,
        "command": tuple(_one_line(word, "the command") for word in job.command((python,))),
        **({"make_certificates": tuple(_one_line(word, "--python") for word in make)} if mtls else {}),
    }


def _comment(job: Job, use: str) -> tuple[str, ...]:
    gpus = f"{job.hosts} hosts x {job.gpus_per_host} GPUs, {job.processes_per_host} process(es) a host"
    return f"{job.name}: {gpus}. Start it with `{use}`.", "Rendered by `meshkit launch`; ready to be edited."


def _render(
    comment: Sequence[str], directives: Mapping[str, str], values: Mapping[str, _Value], bodies: Sequence[str]
) -> str:
    """A bash script.

    Args:
        comment: its first lines, without `#`.
        directives: `#SBATCH` options by name; an empty value is a flag.
        values: shell variables.
        bodies: names of the fixed parts that follow, without `.sh`.

    Raises:
        ConfigError: a directive has a character that SLURM might take for something else.
    """
    folder = resources.files("meshkit.verbs.launch").joinpath("bodies")
    lines = ["#!/usr/bin/env bash", *(f"# {line}" for line in comment)]
    lines += [_directive(name, value) for name, value in directives.items()]
    lines += ["", *(f"{name}={_value(value)}" for name, value in values.items()), ""]
    lines += [folder.joinpath(f"{body}.sh").read_text("utf-8") for body in bodies]
    return "\n".join(lines).rstrip("\n") + "\n"


def _one_line(text: str, at: str) -> str:
    """The text, for a place that takes no line breaks and control characters.

    Raises:
        ConfigError: it has one.
    """
    if not text.isprintable():
        raise ConfigError(f"{text[:80]!r} has a line break or control character in it.", at=at, hint="one line")
    return text


def _directive(name: str, value: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name[:80]}' is no option of sbatch.", at="--sbatch", hint="--sbatch partition=gpu")
    if not _PLAIN.fullmatch(value):
        raise ConfigError(
            f"'{value[:80]}' has a space or another character that a #SBATCH line cannot hold.", at=f"--sbatch {name}"
        )
    return f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"


def _value(value: _Value) -> str:
    if isinstance(value, tuple):
        return "(" + " ".join(map(shlex.quote, value)) + ")"
    return str(value) if isinstance(value, int) else shlex.quote(value)
