"""`meshkit launch slurm` and `mpi`: a bash script that starts a job on other machines and restarts it.

Job + what the site wants -> Script -> sbatch | bash
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshkit.distributed.mtls import MTLS
from meshkit.errors import ConfigError
from meshkit.verbs.launch.job import Job
from meshkit.verbs.launch.shell import Script, one_line

# From SIGTERM to the end of the job: as long as the supervisor of a local gang waits for a checkpoint.
SAVE_S = 120


@dataclass(frozen=True)
class Slurm:
    """What a SLURM site wants to know.

    Attributes:
        options: of sbatch, by name: `{"partition": "gpu", "time": "2-00:00:00"}`; they replace what meshkit sets.
        container_image: of pyxis; None runs on the host.
        container_mounts: of pyxis: `/data:/data`.
        container_workdir: of pyxis: the folder with the experiment.
        python: the interpreter, as the hosts or the image know it.
        mtls: whether the processes know each other by certificates, which the first host makes.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    container_workdir: str | None = None
    python: str = "python3"
    mtls: bool = False


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
        options.append(f"--container-image={one_line(site.container_image, '--container-image')}")
    if site.container_mounts:
        options.append("--container-mounts=" + one_line(",".join(site.container_mounts), "--container-mounts"))
    if site.container_workdir is not None:
        if not job.out.startswith("/"):
            raise ConfigError(
                f"the run folder {job.out} is one folder on the hosts and another in the container.",
                at="--container-workdir",
                hint=f"--out /SHARED/{job.name}, mounted under the same path",
            )
        options.append(f"--container-workdir={one_line(site.container_workdir, '--container-workdir')}")
    return Script(
        comment=_comment(job, "sbatch < FILE"),
        directives={**directives, **site.options},
        assignments={**_assignments(job, site.python, site.mtls), "srun_options": tuple(options)},
        bodies=("slurm", *(("slurm_mtls", "mtls") if site.mtls else ()), "attempts"),
    ).render()


def mpi_script(job: Job, hostfile: str, *, python: str = "python3", mtls: bool = False) -> str:
    """The bash script that starts a job with OpenMPI's mpirun: `bash script`.

    Args:
        job: what to start.
        hostfile: names the hosts, the first one first; process 0 runs there.
        python: the interpreter, as the hosts know it.
        mtls: whether the processes know each other by certificates, which the first host makes.
    """
    options = ("-np", str(job.num_processes), "--map-by", f"ppr:{job.processes_per_host}:node", "--bind-to", "none")
    if mtls:
        options += ("-x", MTLS)
    return Script(
        comment=_comment(job, "bash FILE"),
        directives={},
        assignments={**_assignments(job, python, mtls), "hostfile": hostfile, "mpirun_options": options},
        bodies=("mpi", *(("mpi_mtls", "mtls") if mtls else ()), "attempts"),
    ).render()


def _assignments(job: Job, python: str, mtls: bool) -> dict[str, int | str | tuple[str, ...]]:
    several = job.processes_per_host > 1
    make = (python, "-m", "meshkit", "launch", "certificates")
    return {
        "out": one_line(job.out, "--out"),
        "num_processes": job.num_processes,
        "devices_per_process": job.gpus_per_host // job.processes_per_host if several else 0,  # 0: all of the host
        "max_restarts": job.max_restarts,
        "command": tuple(one_line(word, "the command") for word in job.train_command((python,))),
        **({"make_certificates": tuple(one_line(word, "--python") for word in make)} if mtls else {}),
    }


def _comment(job: Job, use: str) -> tuple[str, ...]:
    gpus = f"{job.hosts} hosts x {job.gpus_per_host} GPUs, {job.processes_per_host} process(es) a host"
    return f"{job.name}: {gpus}. Start it with `{use}`.", "Rendered by `meshkit launch`; ready to be edited."
