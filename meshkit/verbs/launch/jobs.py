"""Describe the job that every launcher starts (an experiment, its hosts, and the processes on each), and write it for
other machines: as a bash script for SLURM or MPI, or as a Kubernetes JobSet.

    experiment file + --set -> Job -> local gang, SLURM, JobSet, MPI
    Job + settings of the site -> directives + quoted assignments + bodies/*.sh unchanged -> script for sbatch | bash
    Job + image, volumes -> JobSet as dicts with Kubernetes' keys -> YAML -> kubectl create

A script quotes every value of the job. The fixed parts of a script (bodies/*.sh) are copied unchanged: no value is put
into their text.

The JobSet is configured so that all its pods stop together and restart together. There is one pod on each host. A pod
needs no rights in the cluster: its number, the coordinator's name and the attempt come as variables. If a host runs
several processes, `meshkit launch local` starts them inside the pod, since processes in separate pods would not reach
each other over NVLink. If NVLink domains span hosts, the pods of each domain form one Job, and JobSet places each Job
in a domain of its own. The pods read their certificates (or their shared secret, if there is no mutual TLS) from a
Secret, which Kubernetes removes with the JobSet. The rendered JobSet names the Secret and holds no key.
Sources: the Kubernetes API (batch/v1, v1) and jobset.x-k8s.io/v1alpha2, whose schema is in tests/data/.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.files import read_bounded
from meshkit.console import say
from meshkit.distributed.certificates import FILES, make_certificates
from meshkit.distributed.environment import (
    ATTEMPT,
    COORDINATOR,
    FIRST_PORT,
    MTLS,
    NUM_PROCESSES,
    OUT,
    PROCESS_ID,
    SECRET,
)
from meshkit.errors import CONDITION, INTERRUPTED, PREEMPTED, USER_ERROR, ConfigError, RunError
from meshkit.runs.limits import STALL_TIMEOUT, read_limits

SAVE_S = 120  # seconds that a job has after SIGTERM to save a checkpoint
_NAME = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_.,:+@%/=\[\]*-]*", re.ASCII)
_PYTHON = re.compile(r"(.*/)?python[0-9.]*", re.ASCII)
_Value = int | str | tuple[str, ...]  # a shell variable's value: integer, word, or array of words
_API_VERSION = "jobset.x-k8s.io/v1alpha2"
_WORKERS, _CONTAINER = "workers", "main"
_KILL_S = 30
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_EXCLUSIVE, _DOMAIN_LABEL = "alpha.jobset.sigs.k8s.io/exclusive-topology", "nvidia.com/gpu.clique"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MTLS_FOLDER, _SHARED = "/etc/meshkit/mtls", "secret"
_QUANTITY = re.compile(r"[0-9]{1,12}([KMGT]i?)?", re.ASCII)
_REMOVE = "kubectl delete jobset %s, and the same command again"


@dataclass(frozen=True)
class Job:
    """A training run to start."""

    name: str
    """Name of the job, and of its run folder if no folder is given: lower-case letters, digits and `-`."""
    experiment: str
    """Path of the experiment file on the processes' machines."""
    overrides: tuple[str, ...]
    """The `--set` options."""
    out: str
    """The run folder, on a file system that all hosts share."""
    hosts: int
    """The number of machines."""
    gpus_per_host: int
    """GPUs that the job uses on each host."""
    processes_per_host: int = 1
    """A number that divides the host's GPUs evenly, from 1 to one process for each GPU."""
    max_restarts: int = 3
    """Attempts after the first one."""
    own: tuple[str, ...] = ()
    """The user's own command in place of `meshkit train`. It gets the run folder in MESHKIT_OUT."""
    stall_timeout: tuple[str, ...] = ()
    """The `--stall-timeout` options, which the processes get in MESHKIT_STALL_TIMEOUT."""
    hosts_used_per_domain: int = 1
    """The number of hosts that the job uses in each NVLink domain."""
    hosts_per_domain: int = 1
    """The number of hosts that an NVLink domain spans; 1 if it does not span several."""

    @property
    def num_processes(self) -> int:
        return self.hosts * self.processes_per_host

    def command(self, python: Sequence[str]) -> tuple[str, ...]:
        """Return the command of every process."""
        told = (f"{STALL_TIMEOUT}={' '.join(self.stall_timeout)}",) if self.stall_timeout else ()
        if self.own:
            return ("env", f"{OUT}={self.out}", *told, *self.own)
        sets = (word for text in self.overrides for word in ("--set", text))
        train = (*python, "-m", "meshkit", "train", self.experiment, *sets, "--out", self.out)
        return ("env", *told, *train) if told else train


def make_job(
    file: Path | None,
    overrides: Sequence[str],
    out: str | None,
    processes_per_host: int,
    max_restarts: int,
    *,
    own: tuple[str, ...] = (),
    machines: tuple[int | None, int] = (None, 8),
    stall_timeout: Sequence[str] = (),
) -> Job:
    """Return the job for an experiment file on the hosts of its cluster, or for the user's own command.

    Args:
        file: the experiment file; None for a command, which runs on `machines`.
        overrides: the `--set` options.
        out: the run folder; `runs/NAME` by default.
        processes_per_host: a number that divides the host's GPUs evenly.
        max_restarts: attempts after the first one.
        own: the user's own command in place of the training.
        machines: the number of hosts and the number of GPUs on each, used if there is no experiment.
        stall_timeout: the `--stall-timeout` options.

    Raises:
        ConfigError: the processes cannot share a host's GPUs evenly, the mesh does not use equally many GPUs of each
            host, the cluster has virtual CPU devices, the number of hosts is not given, or one of `stall_timeout` is
            no limit.
    """
    together = spanned = 1
    if file is not None:
        experiment = load(file, overrides)
        cluster = experiment.cluster
        if cluster.is_cpu:
            raise ConfigError(
                f"cluster '{cluster.name}' has virtual CPU devices, which need no other machines.",
                hint="meshkit launch local, or a cluster of GPUs",
            )
        if experiment.launch.continues:
            say("note: [launch] applies only to `meshkit launch local --hosts`; this launcher waits for all hosts.")
        hosts, gpus, name = cluster.hosts_used, cluster.gpus_used_per_host, job_name(experiment.name)
        together, spanned = cluster.hosts_used_per_domain, cluster.hosts_per_domain
        _check_even(cluster)
    else:
        given, gpus, name = machines[0], machines[1], command_name(own)
        if given is None:
            raise ConfigError("the number of hosts for the command is not given.", hint="--hosts 4 --gpus-per-host 8")
        hosts = given
    check_share(processes_per_host, gpus, "GPUs of a host", "--processes-per-host")
    read_limits(stall_timeout)
    return Job(
        name=name,
        experiment=file.as_posix() if file is not None else "",
        overrides=tuple(overrides),
        out=out or f"runs/{name}",
        hosts=hosts,
        gpus_per_host=gpus,
        processes_per_host=processes_per_host,
        max_restarts=max_restarts,
        own=own,
        stall_timeout=tuple(stall_timeout),
        hosts_used_per_domain=together,
        hosts_per_domain=spanned,
    )


def _check_even(cluster: Cluster) -> None:
    """Raise an error unless the mesh uses the first GPUs of each host, and equally many of each host."""
    used, size, per_host = cluster.gpus_used_per_domain, cluster.nvlink_domain_size, cluster.gpus_per_host
    if size < per_host and used < size:
        message = f"the mesh uses {used} of each {size} GPUs on NVLink, and a host has {per_host // size} such groups"
        even = size
    elif used > per_host and used % per_host:
        full, rest = divmod(used, per_host)
        message = f"in each NVLink domain the mesh uses {full} hosts of {per_host} GPUs and {rest} GPUs of one more"
        even = full * per_host
    else:
        return
    raise ConfigError(
        f"{message}, but this launcher takes equally many neighbouring GPUs of each host.",
        at="cluster.gpus_used_per_domain",
        hint=f"--set cluster.gpus_used_per_domain={even}, and a mesh of {even} GPUs on NVLink",
    )


def count_hosts(hostfile: str) -> int:
    """Return the number of machines in an OpenMPI hostfile.

    Raises:
        ConfigError: the file cannot be read, or names no machine.
    """
    text = read_bounded(hostfile, "hostfile", unfit=ConfigError).decode(errors="replace")
    names = {words[0] for line in text.splitlines() if (words := line.partition("#")[0].split())}
    if not names:
        raise ConfigError("the hostfile names no host.", at=hostfile, hint="a line for each, as `gpu7 slots=8`")
    return len(names)


def interpreter_of(command: Sequence[str]) -> str:
    """Return the Python interpreter that a command names, or else `python3`; meshkit runs with it too."""
    return next((word for word in command if _PYTHON.fullmatch(word)), "python3")


def command_name(command: Sequence[str]) -> str:
    """Return a name for the job of a command: the name of its script, or of its program if it has no script."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    return job_name(Path(script).stem)


def check_share(processes: int, devices: int, what: str, at: str) -> None:
    """Raise an error unless the processes can share the devices evenly.

    Args:
        processes: number of processes.
        devices: number of devices.
        what: the name of the devices in the message, such as `GPUs of a host`.
        at: the option that gives the number of processes, such as `--processes-per-host`; the hint names it too.

    Raises:
        ConfigError: the processes cannot share the devices evenly.
    """
    if processes < 1 or devices % processes:
        possible = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        raise ConfigError(
            f"{processes} processes cannot share {devices} {what} evenly.", at=at, hint=f"{at} {', '.join(possible)}"
        )


def job_name(text: str) -> str:
    """Return a name that SLURM, Kubernetes and file systems all accept.

    Kubernetes appends a suffix such as `-workers-0-511`, and the result must be a valid DNS label.

    Returns:
        Lower-case letters, digits and `-`, a letter first. It has up to 40 characters, or 44 if it begins with an
        added `job-`.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def submit(command: Sequence[str], text: str) -> str:
    """Run a command that submits a job, with the rendered job as its standard input.

    Returns:
        The program's standard output.

    Raises:
        ConfigError: the program is not on this machine.
        RunError: the program refused the job.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise ConfigError(
            f"{program} is not on this machine's PATH.", hint="--dry-run, which prints what would be handed to it"
        )
    done = subprocess.run(list(command), input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"{program} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}.")
    return done.stdout.strip()


@dataclass(frozen=True)
class Slurm:
    """The settings of a SLURM site."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Options of sbatch by name: `{"partition": "gpu", "time": "2-00:00:00"}`. They override meshkit's options."""
    container_image: str | None = None
    """Container image for pyxis; None runs on the host."""
    container_mounts: tuple[str, ...] = ()
    """Mounts of the container: `/data:/data`."""
    container_workdir: str | None = None
    """Folder in the container that has the experiment."""
    python: str = "python3"
    """The Python interpreter on the hosts or in the image."""
    mtls: bool = True
    """True: the processes identify each other by certificates, which the first host makes. False: by a secret."""


def slurm_script(job: Job, site: Slurm) -> str:
    """Return the sbatch script of a job: `sbatch < script`.

    The job is one allocation, in which the processes are restarted after a failure. On a preemption, or at the end of
    its time, the job saves a checkpoint and is requeued. After the loss of a host it is requeued, too.

    Raises:
        ConfigError: an option cannot be written into a script; mounts or a working folder are given without an image;
            a working folder in the container is given and the run folder is not an absolute path; or SLURM could place
            the hosts that are meant for two NVLink domains into one.
    """
    together, there = job.hosts_used_per_domain, job.hosts_per_domain
    if job.hosts > together and 2 * together <= there and "spread-segments" not in site.options:
        raise ConfigError(
            f"the job needs {together} hosts in each of {job.hosts // together} NVLink domains, but two such groups "
            f"fit one domain of {there} hosts, where SLURM may place them.",
            at="--sbatch",
            hint="--sbatch spread-segments (from Slurm 25.05 on)",
        )
    directives = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        # With SLURM's topology/block plugin each segment of hosts is in one block, which is one NVLink domain.
        **({"segment": str(together)} if there > 1 else {}),
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
        raise ConfigError("mounts and a working folder need a container.", hint="--container-image IMAGE too")
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
    """Return the bash script that starts a job with OpenMPI's mpirun: `bash script`.

    Args:
        job: the job to start.
        hostfile: the file that names the hosts; process 0 runs on the first one.
        python: the Python interpreter on the hosts.
        mtls: as in `Slurm.mtls`.

    Raises:
        ConfigError: the run folder, or a word of a command, has a line break or control character in it; or NVLink
            domains span hosts, and `hostfile` names more or fewer hosts than the job has.
    """
    if job.hosts_per_domain > 1 and (listed := count_hosts(hostfile)) != job.hosts:
        raise ConfigError(
            f"it names {listed} hosts, but the mesh uses {job.hosts_used_per_domain} in each of "
            f"{job.hosts // job.hosts_used_per_domain} NVLink domains: {job.hosts}.",
            at=hostfile,
            hint=f"only the names of {job.hosts_used_per_domain} hosts of each domain",
        )
    options = ("-np", str(job.num_processes), "--map-by", f"ppr:{job.processes_per_host}:node", "--bind-to", "none")
    options += ("-x", MTLS if mtls else SECRET)
    values = {**_assignments(job, python, mtls), "hostfile": hostfile, "mpirun_options": options}
    bodies = ("mpi", *(("mpi_mtls", "mtls") if mtls else ("secret",)), "attempts")
    return _render(_comment(job, "bash FILE"), {}, values, bodies)


def _assignments(job: Job, python: str, mtls: bool) -> dict[str, _Value]:
    several = job.processes_per_host > 1
    make = (python, "-m", "meshkit", "launch", "certificates")
    words = lambda command, at: tuple(_Python() if word == python else _one_line(word, at) for word in command)
    return {
        "python": _one_line(python, "--python"),
        "out": _one_line(job.out, "--out"),
        "num_processes": job.num_processes,
        "devices_per_process": job.gpus_per_host // job.processes_per_host if several else 0,  # 0: all GPUs of the host
        "max_restarts": job.max_restarts,
        "command": words(job.command((python,)), "the command"),
        **({"make_certificates": words(make, "--python")} if mtls else {}),
    }


def _comment(job: Job, use: str) -> tuple[str, ...]:
    gpus = f"{job.hosts} hosts x {job.gpus_per_host} GPUs, {job.processes_per_host} process(es) a host"
    return f"{job.name}: {gpus}. Start it with `{use}`.", "Rendered by `meshkit launch`; ready to be edited."


def _render(
    comment: Sequence[str], directives: Mapping[str, str], values: Mapping[str, _Value], bodies: Sequence[str]
) -> str:
    """Return a bash script.

    Args:
        comment: the script's first lines, without `#`.
        directives: `#SBATCH` options by name; an empty value is a flag.
        values: shell variables by name.
        bodies: names of the fixed parts that follow: files in bodies/, without `.sh`.

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
    """Return the text unchanged, after checking that it has no line breaks or control characters.

    Raises:
        ConfigError: the text has one.
    """
    if not text.isprintable():
        raise ConfigError(f"{text[:80]!r} has a line break or control character in it.", at=at, hint="one line")
    return text


def _directive(name: str, value: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"'{name[:80]}' is not an option of sbatch.", at="--sbatch", hint="--sbatch partition=gpu")
    if not _PLAIN.fullmatch(value):
        raise ConfigError(
            f"'{value[:80]}' has a space or another character that a #SBATCH line cannot hold.", at=f"--sbatch {name}"
        )
    return f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}"


class _Python(str):
    """The interpreter as a word of a command. A script writes it as "$python"."""


def _value(value: _Value) -> str:
    if isinstance(value, tuple):
        words = ('"$python"' if isinstance(word, _Python) else shlex.quote(word) for word in value)
        return "(" + " ".join(words) + ")"
    return str(value) if isinstance(value, int) else shlex.quote(value)


@dataclass(frozen=True)
class Kubernetes:
    """The settings of a Kubernetes site."""

    image: str
    """The container image, which has meshkit, the model and the experiment."""
    namespace: str | None = None
    """The namespace of the JobSet; None uses kubectl's current namespace."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Persistent volume claim -> the folder where it is mounted. The run folder must be in such a folder."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further resources of a pod besides the GPUs: `{"rdma/ib": "8"}`."""
    shared_memory: str = "64Gi"
    """Size of /dev/shm, which NCCL and data loaders use. Without this setting a pod has 64 MB."""
    workdir: str | None = None
    """The folder in the image that has the experiment; None uses the working folder of the image."""
    python: str = "python3"
    """The interpreter in the image."""
    mtls: bool = True
    """True: the processes identify each other by certificates. False: by a secret."""
    fs_group: int = 1000
    """The ID of the group that may read the certificates. Kubernetes adds the container's user to this group."""


def jobset_yaml(job: Job, site: Kubernetes) -> str:
    """Return the JobSet as YAML, after a comment with the commands that make its Secret.

    Raises:
        ConfigError: `jobset` refuses the job or the site.
    """
    text = yaml.safe_dump(jobset(job, site), sort_keys=False, width=120)
    return "".join(f"# {line}\n" for line in _secret_commands(job, site)) + text


def submit_jobset(job: Job, site: Kubernetes) -> str:
    """Create a JobSet, and the Secret that its pods wait for.

    The private key is never written to a disk of this machine or to a command line. Kubernetes removes the Secret
    together with the JobSet.

    Returns:
        A line that names what was created.

    Raises:
        ConfigError: kubectl is not on this machine, or `jobset` refuses the job or the site.
        RunError: kubectl refused the JobSet or the Secret.
    """
    create, text = ["kubectl", "create", "-f", "-"], jobset_yaml(job, site)
    shared = secrets.token_hex(32).encode()
    files = make_certificates([_coordinator_host(job)]) if site.mtls else {_SHARED: shared}
    made = submit([*create, "-o", "json"], text)
    try:
        uid = str(json.loads(made)["metadata"]["uid"])
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"kubectl created JobSet {job.name}, but did not return its uid.", hint=_REMOVE % job.name
        ) from None
    try:
        submit(create, _secret_yaml(job, site, files, uid))
    except RunError as e:
        message = f"the pods of JobSet {job.name} wait for Secret {_secret_name(job, site)}, but {e.message}"
        raise RunError(message, hint=_REMOVE % job.name) from None
    return f"jobset.jobset.x-k8s.io/{job.name} and secret/{_secret_name(job, site)} created"


def jobset(job: Job, site: Kubernetes) -> dict[str, Any]:
    """Return the JobSet as nested dicts, with the keys of `jobset.x-k8s.io/v1alpha2`.

    Raises:
        ConfigError: Kubernetes does not take a name or a quantity, or a claim's folder is not an absolute path.
    """
    _check(site)
    together = job.hosts_used_per_domain if job.hosts_per_domain > 1 else job.hosts
    # JobSet gives each Job a different value of this node label, which NVIDIA's driver sets to the NVLink domain.
    apart = {"metadata": {"annotations": {_EXCLUSIVE: _DOMAIN_LABEL}}} if job.hosts_per_domain > 1 else {}
    pods = {
        "parallelism": together,
        "completions": together,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": _pod_failure_policy(),
        "template": {"spec": _pod(job, site)},
    }
    return {
        "apiVersion": _API_VERSION,
        "kind": "JobSet",
        "metadata": _metadata(job.name, site),
        "spec": {
            # The pods wait for each other, so their names must be known before the pods are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "coordinator": {"replicatedJob": _WORKERS, "jobIndex": 0, "podIndex": 0},
            "failurePolicy": _failure_policy(job),
            "replicatedJobs": [
                {"name": _WORKERS, "replicas": job.hosts // together, "template": {**apart, "spec": pods}}
            ],
        },
    }


def _metadata(name: str, site: Kubernetes) -> dict[str, Any]:
    return {"name": name, **({"namespace": site.namespace} if site.namespace is not None else {})}


def _failure_policy(job: Job) -> dict[str, Any]:
    """Return the policy for a failure of one of the JobSet's Jobs: all pods restart, unless a rule overrides this.

    They start only once all pods of the last attempt are gone, since a new process must not join an old one. The
    patterns match the messages that Kubernetes' job controller writes for a pod failure policy.
    """
    preempted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [f"exit code {PREEMPTED} matching", "condition DisruptionTarget matching"],
    }
    final = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": job.max_restarts, "restartStrategy": "BlockingRecreate", "rules": [preempted, final]}


def _pod_failure_policy() -> dict[str, Any]:
    """Return rules for pod failures other than a crash. A crash fails the Job too, because its backoff limit is 0."""

    def ended_with(*codes: int) -> dict[str, Any]:
        found = {"containerName": _CONTAINER, "operator": "In", "values": sorted(codes)}
        return {"action": "FailJob", "onExitCodes": found}

    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [ended_with(PREEMPTED), disrupted, ended_with(USER_ERROR, CONDITION, INTERRUPTED)]}


def _pod(job: Job, site: Kubernetes) -> dict[str, Any]:
    """Return the specification of a pod. Each host has at most one pod of the job."""
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": site.shared_memory}}]
    for claim, path in site.claims.items():
        mounts.append({"name": claim, "mountPath": path})
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    if site.mtls:
        mounts.append({"name": "mtls", "mountPath": _MTLS_FOLDER, "readOnly": True})
        # Only fsGroup may read the files; Kubernetes makes the container's user a member of this group.
        volumes.append({"name": "mtls", "secret": {"secretName": _secret_name(job, site), "defaultMode": 0o440}})
    container = {
        "name": _CONTAINER,
        "image": site.image,
        "command": _command(job, site),
        **({"workingDir": site.workdir} if site.workdir is not None else {}),
        "env": _environment(job, site),
        "resources": {"limits": {"nvidia.com/gpu": str(job.gpus_per_host), **site.resources}},
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["IPC_LOCK"]},  # for RDMA, which pins memory
        },
    }
    # Without this policy the kubelet would set the group of every file in a volume at each start.
    group = {"fsGroup": site.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    on_one_host = {
        "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": SAVE_S + _KILL_S,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [on_one_host]}},
        **({"securityContext": group} if site.mtls else {}),
        "containers": [container],
        "volumes": volumes,
    }


def _environment(job: Job, site: Kubernetes) -> list[dict[str, Any]]:
    values = {
        COORDINATOR: f"{_coordinator_host(job)}:{FIRST_PORT}",  # this port is free, because a pod has its own ports
        NUM_PROCESSES: str(job.num_processes),
    }
    shared = {"secretKeyRef": {"name": _secret_name(job, site), "key": _SHARED}}
    fields = {PROCESS_ID if job.processes_per_host == 1 else "HOST_INDEX": _INDEX, ATTEMPT: _RESTARTS}
    if job.hosts_per_domain > 1:
        fields = {"JOB_INDEX": _JOB_INDEX, "POD_INDEX": _INDEX, ATTEMPT: _RESTARTS}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": MTLS, "value": _MTLS_FOLDER} if site.mtls else {"name": SECRET, "valueFrom": shared},
    ]


def _command(job: Job, site: Kubernetes) -> list[str]:
    """Return the command of a pod. Kubernetes expands `$(NAME)`, so each `$` in the user's words is doubled."""
    command = [word.replace("$", "$$") for word in job.command((site.python,))]
    numbered = job.hosts_per_domain > 1
    index = f"$$((JOB_INDEX * {job.hosts_used_per_domain} + POD_INDEX))"  # bash computes it, since Kubernetes cannot
    if job.processes_per_host == 1:
        return ["bash", "-c", f'{PROCESS_ID}={index} exec "$$0" "$$@"', *command] if numbered else command
    devices = job.gpus_per_host // job.processes_per_host
    part = ["--processes", str(job.processes_per_host), "--devices", str(devices), "--hosts", str(job.hosts)]
    part += ["--coordinator", f"$({COORDINATOR})", "--attempt", f"$({ATTEMPT})"]
    part += [word for limit in job.stall_timeout for word in ("--stall-timeout", limit)]
    # `meshkit launch local` takes the arguments of `meshkit train`, or `--` and the user's own command.
    arguments = ["--out", job.out, "--", *command] if job.own else command[command.index("train") + 1 :]
    local = ["-m", "meshkit", "launch", "local"]
    if numbered:
        script = f'exec "$$0" {" ".join(local)} --host-index {index} "$$@"'
        return ["bash", "-c", script, site.python, *part, *arguments]
    return [site.python, *local, "--host-index", "$(HOST_INDEX)", *part, *arguments]


def _coordinator_host(job: Job) -> str:
    """Return the DNS name of the first pod."""
    return f"{job.name}-{_WORKERS}-0-0.{job.name}"


def _secret_name(job: Job, site: Kubernetes) -> str:
    return f"{job.name}-{'mtls' if site.mtls else _SHARED}"


def _secret_yaml(job: Job, site: Kubernetes, files: Mapping[str, bytes], owner_uid: str) -> str:
    """Return the Secret, which Kubernetes removes together with the JobSet. It must not be printed."""
    owner = {"apiVersion": _API_VERSION, "kind": "JobSet", "name": job.name, "uid": owner_uid}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "immutable": True,
        "metadata": {**_metadata(_secret_name(job, site), site), "ownerReferences": [owner]},
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }
    return yaml.safe_dump(secret, sort_keys=False)


def _secret_commands(job: Job, site: Kubernetes) -> list[str]:
    space = f" --namespace {site.namespace}" if site.namespace else ""
    name, files = _secret_name(job, site), " ".join(f"--from-file=mtls/{name}" for name in FILES)
    create = f"kubectl create secret generic {name}{space}"
    made = "`meshkit launch jobset` makes it; by hand:"
    if not site.mtls:
        shared = f"openssl rand -hex 32 | {create} --from-file={_SHARED}=/dev/stdin"
        return [f"What the processes share comes from the Secret {name}. {made}", f"  {shared}"]
    return [
        f"The certificates come from the Secret {name}. {made}",
        f"  meshkit launch certificates mtls --host {_coordinator_host(job)}",
        f"  {create} {files}",
        "  rm -r mtls",
    ]


def _check(site: Kubernetes) -> None:
    for name in (*site.claims, *([site.namespace] if site.namespace else [])):
        if not _LABEL.fullmatch(name):
            raise ConfigError(
                f"'{name[:80]}' is not a valid name in Kubernetes.",
                at="--claim, --namespace",
                hint="a-z, 0-9 and -, up to 63",
            )
    for path in site.claims.values():
        if not path.startswith("/"):
            raise ConfigError(f"'{path}' is not an absolute path.", at="--claim", hint="--claim NAME=/runs")
    for quantity in (site.shared_memory, *site.resources.values()):
        if not _QUANTITY.fullmatch(quantity):
            raise ConfigError(f"'{quantity[:80]}' is not a quantity.", at="--shm, --resource", hint="64Gi, or 8")
