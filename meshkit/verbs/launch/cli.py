"""`meshkit launch`: one function per launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import typer.core

from meshkit.console import output, run_folder, say
from meshkit.distributed.environment import MTLS
from meshkit.errors import ConfigError
from meshkit.verbs.arguments import SetOption, complete_experiment

if TYPE_CHECKING:
    from meshkit.config.experiment import Experiment
    from meshkit.verbs.launch.local import LocalPart

launch_app = typer.Typer(
    help="Start a job of several processes: here, or by SLURM, Kubernetes or MPI.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: meshkit launch local --processes 2 --devices 4 llama_debug_cpu",
)

_COMMAND = "command"  # key in `context.meta` of the words after `--`


class WithCommand(typer.core.TyperCommand):
    """A launcher's command line: an experiment, or `--` and the user's own command."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        """Store the words after `--` in `ctx.meta`, and parse the others."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND], args = tuple(args[at + 1 :]), args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx) -> list[str]:
        """Return the usage line: `[OPTIONS] EXPERIMENT | -- COMMAND ...`."""
        return [*super().collect_usage_pieces(ctx), "| -- COMMAND ..."]


ExperimentArg = Annotated[
    Path | None,
    typer.Argument(
        metavar="EXPERIMENT",
        help="Experiment file (TOML), or the name of a shipped one, to train unless a command follows `--`.",
        show_default=False,
        autocompletion=complete_experiment,
    ),
]
_HOSTS_HELP = "Number of machines, if there is no experiment or hostfile."
HostsOption = Annotated[int | None, typer.Option(metavar="H", min=1, help=_HOSTS_HELP)]
GpusOption = Annotated[
    int,
    typer.Option("--gpus-per-host", metavar="G", min=1, help="GPUs of each machine, if there is no experiment."),
]
OutOption = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Run folder, on a file system that all hosts share.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print the commands, and start nothing.")]
RestartsOption = Annotated[
    int, typer.Option("--max-restarts", metavar="K", min=0, help="Largest number of restarts after failures.")
]
PerHostOption = Annotated[
    int,
    typer.Option("--processes-per-host", metavar="N", min=1, help="Processes of a host, which share its GPUs evenly."),
]
_STALL_HELP = "Time limit of a step (default 600), or PHASE=SECONDS for another phase; repeatable."
StallOption = Annotated[list[str], typer.Option("--stall-timeout", metavar="SECONDS", help=_STALL_HELP)]
_PYTHON_HELP = "Python on the hosts; default the command's own, or python3."
PythonOption = Annotated[str | None, typer.Option("--python", metavar="PATH", help=_PYTHON_HELP, show_default=False)]
_MTLS_HELP = "Make certificates for this run, so that nobody else can join."
MtlsOption = Annotated[bool, typer.Option("--mtls/--no-mtls", help=_MTLS_HELP)]


@launch_app.command(cls=WithCommand, epilog="Example: meshkit launch local --processes 2 --devices 4 llama_debug_cpu")
def local(
    context: typer.Context,
    *,
    experiment: ExperimentArg = None,
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="Processes on this machine.")],
    devices: Annotated[
        int, typer.Option(metavar="M", min=1, help="Devices of each process: GPUs, or virtual CPU devices.")
    ],
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder; an existing run resumes.")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts", metavar="K", min=0, help="Largest number of restarts; default 3, with several hosts 0."
        ),
    ] = None,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time to save a checkpoint after SIGTERM.")
    ] = 120,
    stall_timeout: StallOption = [],  # noqa: B006
    hosts: Annotated[int, typer.Option(metavar="H", min=1, help="Number of machines; each runs this command.")] = 1,
    host_index: Annotated[int, typer.Option(metavar="I", min=0, help="Number of this machine, from 0.")] = 0,
    coordinator: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the first machine, if there are several.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="Restarts so far, if a scheduler restarts all machines.")
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby/--no-standby", help="Start the next attempt's processes early, up to imports.")
    ] = True,
    mtls: Annotated[bool, typer.Option("--mtls", help=_MTLS_HELP)] = False,
    dry_run: DryRunOption = False,
) -> None:
    """Start processes on this machine and watch them. If one fails, all are stopped and started again.

    The output of each process is in logs/ of the run folder; that of the first one is also shown. There is no restart
    after exit code 2 (your input is wrong), or after two attempts in a row without a new step. Your own command can
    report progress by `mk.progress`; if it does not, only its exit code is watched.
    """
    from meshkit.config.experiment import load
    from meshkit.discover.probe import has_driver
    from meshkit.runs.limits import STALL_TIMEOUT, read_limits
    from meshkit.verbs.launch.jobs import Job, command_name, job_name
    from meshkit.verbs.launch.local import LocalPart, Policy, check_part

    own = _own_command(context, experiment)
    loaded = load(experiment, set_) if experiment else None
    limits = read_limits(stall_timeout or os.environ.get(STALL_TIMEOUT, "").split(), own=bool(own))
    name = loaded.name if loaded else command_name(own)
    folder = out or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    secrets = str(folder / "mtls") if mtls else None
    virtual = loaded.cluster.is_cpu if loaded else not has_driver()
    told = tuple(stall_timeout)
    part = LocalPart(processes, devices, hosts, host_index, coordinator, attempt, secrets, told, virtual=virtual)
    check_part(part, loaded)
    _warn_of_the_open(mtls or hosts == 1 or bool(os.environ.get(MTLS)))
    file, gpus = str(experiment or ""), processes * devices
    job = Job(job_name(name), file, tuple(set_), str(folder), hosts, gpus, processes, own=own)
    command = job.command((sys.executable,))
    if dry_run:
        output("\n".join(part.shell_lines(command)))
        return
    run_folder(folder)
    continues = loaded is not None and loaded.launch.continues
    restarts = max_restarts if max_restarts is not None else 3 if hosts == 1 or continues else 0
    if loaded is not None and continues:
        part = _with_lost_hosts(part, loaded, restarts, own=bool(own))
    policy = Policy(max_restarts=restarts, save_grace_s=grace, limits=limits, standby=standby and not own)
    code = part.run(command, folder, policy, say)
    if code:
        raise typer.Exit(code)


def _with_lost_hosts(part: LocalPart, experiment: Experiment, restarts: int, *, own: bool) -> LocalPart:
    """Return the part with `[launch]`. On host 0, a thread begins to find with how many hosts the job can go on.

    Raises:
        ConfigError: the job does not restart, or `min_hosts` is set and a command follows `--`.
    """
    from meshkit.verbs.launch.hosts import FewerHosts

    if not restarts:
        message = "[launch] needs restarts, but --max-restarts 0 forbids them."
        raise experiment.error("launch", message, "without --max-restarts 0")
    part = replace(part, launch=experiment.launch)
    if experiment.launch.min_hosts is None:
        return part
    if own:
        message = "launch.min_hosts changes the mesh of meshkit's own training, and a command follows `--`."
        raise experiment.error("launch.min_hosts", message, "only launch.spares")
    if part.host_index == 0:
        part = replace(part, fewer_hosts=FewerHosts(experiment, say))
    return part


@launch_app.command(cls=WithCommand, epilog="Example: meshkit launch slurm llama3_70b --sbatch partition=gpu --dry-run")
def slurm(
    context: typer.Context,
    *,
    experiment: ExperimentArg = None,
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    hosts: HostsOption = None,
    gpus_per_host: GpusOption = 8,
    processes_per_host: PerHostOption = 1,
    max_restarts: RestartsOption = 3,
    stall_timeout: StallOption = [],  # noqa: B006
    sbatch: Annotated[
        list[str], typer.Option(metavar="OPTION=VALUE", help="An option of sbatch, as partition=gpu; repeatable.")
    ] = [],  # noqa: B006
    container_image: Annotated[str | None, typer.Option(metavar="IMAGE", help="Container image (pyxis).")] = None,
    container_mount: Annotated[
        list[str], typer.Option(metavar="SRC:DST", help="A mount of the container (pyxis); repeatable.")
    ] = [],  # noqa: B006
    container_workdir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder in the image that has the experiment.")
    ] = None,
    python: PythonOption = None,
    mtls: MtlsOption = True,
    dry_run: DryRunOption = False,
) -> None:
    """Submit an sbatch script that restarts the job in one allocation, and requeues it when preempted."""
    from meshkit.verbs.launch.jobs import Slurm, interpreter_of, make_job, slurm_script, submit

    own, machines = _own_command(context, experiment), (hosts, gpus_per_host)
    job = make_job(
        experiment, set_, out, processes_per_host, max_restarts, own=own, machines=machines, stall_timeout=stall_timeout
    )
    python, mounts = python or interpreter_of(own), tuple(container_mount)
    site = Slurm(_pairs(sbatch, "--sbatch"), container_image, mounts, container_workdir, python, mtls)
    _warn_of_the_open(mtls)
    text = slurm_script(job, site)
    output(text, end="") if dry_run else say(submit(["sbatch"], text))


@launch_app.command(
    cls=WithCommand, epilog="Example: meshkit launch jobset llama3_70b --image REGISTRY/IMAGE:TAG --dry-run"
)
def jobset(
    context: typer.Context,
    *,
    experiment: ExperimentArg = None,
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Container image with meshkit, the model and the experiment.")
    ],
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    hosts: HostsOption = None,
    gpus_per_host: GpusOption = 8,
    processes_per_host: PerHostOption = 1,
    max_restarts: RestartsOption = 3,
    stall_timeout: StallOption = [],  # noqa: B006
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="Kubernetes namespace.")] = None,
    claim: Annotated[
        list[str], typer.Option(metavar="NAME=PATH", help="Persistent volume claim and where to mount it; repeatable.")
    ] = [],  # noqa: B006
    resource: Annotated[
        list[str], typer.Option(metavar="NAME=COUNT", help="A further resource of a pod, as rdma/ib=8; repeatable.")
    ] = [],  # noqa: B006
    shm: Annotated[str, typer.Option(metavar="SIZE", help="Size of /dev/shm.")] = "64Gi",
    workdir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder in the image that has the experiment.")
    ] = None,
    python: PythonOption = None,
    fs_group: Annotated[
        int, typer.Option(metavar="GID", min=1, help="Group of the pods, which may read the run's certificates.")
    ] = 1000,
    mtls: MtlsOption = True,
    dry_run: DryRunOption = False,
) -> None:
    """Create a Kubernetes JobSet: one pod for each host; after a failure all pods restart together."""
    from meshkit.verbs.launch.jobs import Kubernetes, interpreter_of, jobset_yaml, make_job, submit_jobset

    own, machines = _own_command(context, experiment), (hosts, gpus_per_host)
    job = make_job(
        experiment, set_, out, processes_per_host, max_restarts, own=own, machines=machines, stall_timeout=stall_timeout
    )
    claims, resources = _pairs(claim, "--claim"), _pairs(resource, "--resource")
    python = python or interpreter_of(own)
    site = Kubernetes(image, namespace, claims, resources, shm, workdir, python, mtls, fs_group)
    _warn_of_the_open(mtls)
    output(jobset_yaml(job, site), end="") if dry_run else say(submit_jobset(job, site))


@launch_app.command(cls=WithCommand, epilog="Example: meshkit launch mpi llama3_70b --hostfile hosts --dry-run")
def mpi(
    context: typer.Context,
    *,
    experiment: ExperimentArg = None,
    hostfile: Annotated[str, typer.Option(metavar="FILE", help="Hosts, one a line; process 0 runs on the first.")],
    set_: SetOption = [],  # noqa: B006
    out: OutOption = None,
    hosts: HostsOption = None,
    gpus_per_host: GpusOption = 8,
    processes_per_host: PerHostOption = 1,
    max_restarts: RestartsOption = 3,
    stall_timeout: StallOption = [],  # noqa: B006
    python: PythonOption = None,
    mtls: MtlsOption = True,
    dry_run: DryRunOption = False,
) -> None:
    """Write and run a script that restarts OpenMPI's mpirun after a failure."""
    from meshkit.verbs.launch.jobs import count_hosts, interpreter_of, make_job, mpi_script

    own = _own_command(context, experiment)
    machines = (hosts or (count_hosts(hostfile) if experiment is None else None), gpus_per_host)
    job = make_job(
        experiment, set_, out, processes_per_host, max_restarts, own=own, machines=machines, stall_timeout=stall_timeout
    )
    _warn_of_the_open(mtls)
    text = mpi_script(job, hostfile, python=python or interpreter_of(own), mtls=mtls)
    if dry_run:
        output(text, end="")
        return
    code = subprocess.run(["bash", "-c", text], env=dict(os.environ), check=False).returncode
    if code:
        raise typer.Exit(code)


@launch_app.command(epilog="Example: meshkit launch certificates runs/first-mtls --host gpu7")
def certificates(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for the certificates, which only this user may enter.")
    ],
    host: Annotated[
        list[str], typer.Option(metavar="NAME", help="Name or address of the coordinator's host; repeatable.")
    ],
    days: Annotated[
        int, typer.Option(metavar="N", min=1, max=3650, help="Days for which the certificates are valid.")
    ] = 365,
) -> None:
    """Make certificates for one run of a launcher of your own, which then sets MESHKIT_MTLS=DIR in every process.

    meshkit's launchers make certificates themselves: slurm, jobset and mpi unless --no-mtls, local with --mtls.
    """
    from meshkit.distributed.certificates import make_certificates, write_certificates

    write_certificates(folder, make_certificates(host, days=days))
    say(f"certificates of {', '.join(host)} for {days} days are in {folder}")


def _own_command(context: typer.Context, experiment: Path | None) -> tuple[str, ...]:
    """Return the words after `--`; none for the training of an experiment.

    Raises:
        ConfigError: there is neither.
    """
    command = context.meta.get(_COMMAND, ())
    if not command and experiment is None:
        raise ConfigError("nothing to launch.", hint="an experiment, or a command: -- python train.py")
    return command


def _warn_of_the_open(closed: bool) -> None:
    if not closed:
        say(
            "warning: without mutual TLS anybody who reaches the coordinator's port can read the processes' messages, "
            "change the values that jax and orbax keep there, and end the job (docs/guides/launch.md#who-may-join)"
        )


def _pairs(texts: list[str], at: str) -> dict[str, str]:
    """Return `NAME=VALUE` texts as a dict; a name without a value is a flag, and gets the value "".

    Raises:
        ConfigError: a name is missing or given twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or name in pairs:
            raise ConfigError(f"'{text[:80]}' has no name, or a name that was given before.", at=at, hint="NAME=VALUE")
        pairs[name] = value
    return pairs
