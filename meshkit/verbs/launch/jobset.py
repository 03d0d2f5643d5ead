"""`meshkit launch jobset`: a job as a Kubernetes JobSet, one pod a host.

    Job + image, volumes -> JobSet as tables, in Kubernetes' own words -> YAML -> kubectl create

Every value is one that a gang needs: it stops as a whole, restarts as a whole, and never half of it. A pod needs no
rights in the cluster: its number, the coordinator's name and the attempt come as variables. One process for each GPU is
started inside the pod by `meshkit launch local`: processes in pods of their own would not reach each other over NVLink.
The pods read their certificates, or without mutual TLS the secret that they share, from a Secret that goes with the
JobSet; what is rendered names it, and never has a key in it. Sources: the Kubernetes API (batch/v1, v1) and
jobset.x-k8s.io/v1alpha2, whose schema tests/data/ has.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from meshkit.distributed.environment import ATTEMPT, COORDINATOR, FIRST_PORT, MTLS, NUM_PROCESSES, PROCESS_ID, SECRET
from meshkit.distributed.mtls import FILES
from meshkit.errors import CONDITION, INTERRUPTED, PREEMPTED, USER_ERROR, ConfigError, RunError
from meshkit.verbs.launch.certificates import make_certificates
from meshkit.verbs.launch.job import SAVE_S, Job, submit

_API_VERSION = "jobset.x-k8s.io/v1alpha2"
_WORKERS, _CONTAINER = "workers", "main"
_KILL_S = 30
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MTLS_FOLDER, _SHARED = "/etc/meshkit/mtls", "secret"
_QUANTITY = re.compile(r"[0-9]{1,12}([KMGT]i?)?", re.ASCII)
_REMOVE = "kubectl delete jobset %s, and the same command again"


@dataclass(frozen=True)
class Kubernetes:
    """What a Kubernetes site wants to know."""

    image: str
    """With meshkit, the model and the experiment in it."""
    namespace: str | None = None
    """None for kubectl's own."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Persistent volume claim -> the folder where it is mounted; the run folder must be in one."""
    resources: Mapping[str, str] = field(default_factory=dict)
    """Further resources of a pod besides the GPUs: `{"rdma/ib": "8"}`."""
    shared_memory: str = "64Gi"
    """Size of /dev/shm, which NCCL and data loaders use and which is 64 MB otherwise."""
    workdir: str | None = None
    """The folder with the experiment; None for the image's own."""
    python: str = "python3"
    """The interpreter in the image."""
    mtls: bool = True
    """Whether the processes know each other by certificates; else by a secret."""


def jobset_yaml(job: Job, site: Kubernetes) -> str:
    """The JobSet as YAML, under a comment on how its Secret is made.

    Raises:
        ConfigError: a name or a quantity is none that Kubernetes takes.
    """
    text = yaml.safe_dump(jobset(job, site), sort_keys=False, width=120)
    return "".join(f"# {line}\n" for line in _secret_commands(job, site)) + text


def submit_jobset(job: Job, site: Kubernetes) -> str:
    """Creates a JobSet, and the Secret that its pods wait for.

    The private key is on no disk of this machine and on no command line. Kubernetes removes the Secret with the JobSet.

    Returns:
        What was created.

    Raises:
        ConfigError: kubectl is not on this machine.
        RunError: kubectl refused.
    """
    create, text = ["kubectl", "create", "-f", "-"], jobset_yaml(job, site)
    shared = secrets.token_hex(32).encode()
    files = make_certificates([_coordinator_host(job)]) if site.mtls else {_SHARED: shared}
    made = submit([*create, "-o", "json"], text)
    try:
        uid = str(json.loads(made)["metadata"]["uid"])
    except (ValueError, KeyError, TypeError):
        raise RunError(
            f"kubectl created JobSet {job.name}, but did not say its number.", hint=_REMOVE % job.name
        ) from None
    try:
        submit(create, _secret_yaml(job, site, files, uid))
    except RunError as e:
        message = f"the pods of JobSet {job.name} wait for Secret {_secret_name(job, site)}, but {e.message}"
        raise RunError(message, hint=_REMOVE % job.name) from None
    return f"jobset.jobset.x-k8s.io/{job.name} and secret/{_secret_name(job, site)} created"


def jobset(job: Job, site: Kubernetes) -> dict[str, Any]:
    """The JobSet as plain tables, in the words of `jobset.x-k8s.io/v1alpha2`.

    Raises:
        ConfigError: a name or a quantity is none that Kubernetes takes.
    """
    _check(site)
    pods = {
        "parallelism": job.hosts,
        "completions": job.hosts,
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
            # names of pods are known before they are ready: they wait for each other
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "coordinator": {"replicatedJob": _WORKERS, "jobIndex": 0, "podIndex": 0},
            "failurePolicy": _failure_policy(job),
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _metadata(name: str, site: Kubernetes) -> dict[str, Any]:
    return {"name": name, **({"namespace": site.namespace} if site.namespace is not None else {})}


def _failure_policy(job: Job) -> dict[str, Any]:
    """What follows the end of the one Job: everything starts again, together, unless a rule says otherwise.

    It starts again once all pods of the last attempt are gone: a new process must not join an old one. The messages are
    those of Kubernetes' job controller for a pod failure policy.
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
    """Names the ends that are no crash; any other end of a pod fails the Job too, for its backoff limit of 0."""

    def ended_with(*codes: int) -> dict[str, Any]:
        found = {"containerName": _CONTAINER, "operator": "In", "values": sorted(codes)}
        return {"action": "FailJob", "onExitCodes": found}

    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [ended_with(PREEMPTED), disrupted, ended_with(USER_ERROR, CONDITION, INTERRUPTED)]}


def _pod(job: Job, site: Kubernetes) -> dict[str, Any]:
    """The pod of one host, alone on it: container, mounts, resources, time to save."""
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": site.shared_memory}}]
    for claim, path in site.claims.items():
        mounts.append({"name": claim, "mountPath": path})
        volumes.append({"name": claim, "persistentVolumeClaim": {"claimName": claim}})
    if site.mtls:
        mounts.append({"name": "mtls", "mountPath": _MTLS_FOLDER, "readOnly": True})
        # for the container's user and group, and not for everybody
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
            "capabilities": {"add": ["IPC_LOCK"]},  # RDMA pins memory
        },
    }
    on_one_host = {
        "labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job.name}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": SAVE_S + _KILL_S,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [on_one_host]}},
        "containers": [container],
        "volumes": volumes,
    }


def _environment(job: Job, site: Kubernetes) -> list[dict[str, Any]]:
    values = {
        COORDINATOR: f"{_coordinator_host(job)}:{FIRST_PORT}",  # a pod has all ports for itself
        NUM_PROCESSES: str(job.num_processes),
    }
    shared = {"secretKeyRef": {"name": _secret_name(job, site), "key": _SHARED}}
    fields = {PROCESS_ID if job.processes_per_host == 1 else "HOST_INDEX": _INDEX, ATTEMPT: _RESTARTS}
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": MTLS, "value": _MTLS_FOLDER} if site.mtls else {"name": SECRET, "valueFrom": shared},
    ]


def _command(job: Job, site: Kubernetes) -> list[str]:
    """Kubernetes replaces `$(NAME)` in a command; a `$` of the user's is doubled, which keeps it."""
    command = [word.replace("$", "$$") for word in job.command((site.python,))]
    if job.processes_per_host == 1:
        return command
    devices = job.gpus_per_host // job.processes_per_host
    part = ["--processes", str(job.processes_per_host), "--devices", str(devices), "--hosts", str(job.hosts)]
    part += ["--host-index", "$(HOST_INDEX)", "--coordinator", f"$({COORDINATOR})", "--attempt", f"$({ATTEMPT})"]
    # the launcher of a training takes its arguments, and puts the folder into a command's environment
    arguments = ["--out", job.out, "--", *command] if job.own else command[4:]
    return [site.python, "-m", "meshkit", "launch", "local", *part, *arguments]


def _coordinator_host(job: Job) -> str:
    """The name of the first pod."""
    return f"{job.name}-{_WORKERS}-0-0.{job.name}"


def _secret_name(job: Job, site: Kubernetes) -> str:
    return f"{job.name}-{'mtls' if site.mtls else _SHARED}"


def _secret_yaml(job: Job, site: Kubernetes, files: Mapping[str, bytes], owner_uid: str) -> str:
    """The Secret, which Kubernetes removes together with the JobSet. Not to be printed."""
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
                f"'{name[:80]}' is no name in Kubernetes.", at="--claim, --namespace", hint="a-z, 0-9 and -, up to 63"
            )
    for path in site.claims.values():
        if not path.startswith("/"):
            raise ConfigError(f"'{path}' is no absolute path.", at="--claim", hint="--claim NAME=/runs")
    for quantity in (site.shared_memory, *site.resources.values()):
        if not _QUANTITY.fullmatch(quantity):
            raise ConfigError(f"'{quantity[:80]}' is no quantity.", at="--shm, --resource", hint="64Gi, or 8")
