"""`meshkit launch jobset`: a job as a Kubernetes JobSet, one pod a host.

    Job + image, volumes -> JobSet (typed, camelCase outside) -> YAML -> kubectl apply

A pod needs no rights in the cluster: its number, the coordinator's name and the attempt come as variables. One process
for each GPU is started inside the pod by `meshkit launch local`: processes in pods of their own would not reach each
other over NVLink. With mutual TLS the pods read their certificates from a Secret that goes with the JobSet; what is
rendered names it, and never has a key in it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from meshkit.distributed.launchers import ATTEMPT, COORDINATOR, FIRST_PORT, NUM_PROCESSES, PROCESS_ID
from meshkit.distributed.mtls import FILES, MTLS
from meshkit.errors import ConfigError
from meshkit.verbs.launch.exits import CONDITION, INTERRUPTED, PREEMPTED, USER_ERROR
from meshkit.verbs.launch.job import Job
from meshkit.verbs.launch.kubernetes import (
    Affinity,
    AntiAffinity,
    Capabilities,
    Claim,
    Container,
    ContainerSecurity,
    Coordinator,
    EmptyDir,
    Env,
    EnvSource,
    ExitCodes,
    FailurePolicy,
    FailureRule,
    FieldRef,
    JobSet,
    JobSetSpec,
    JobSpec,
    JobTemplate,
    Metadata,
    Network,
    Owner,
    PodCondition,
    PodFailurePolicy,
    PodFailureRule,
    PodSpec,
    PodTemplate,
    PodTerm,
    ReplicatedJob,
    Resources,
    Secret,
    SecretVolume,
    Selector,
    Volume,
    VolumeMount,
)

_WORKERS, _CONTAINER = "workers", "main"
_SAVE_S, _KILL_S = 120, 30
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MTLS_FOLDER = "/etc/meshkit/mtls"
_QUANTITY = re.compile(r"[0-9]{1,12}([KMGT]i?)?", re.ASCII)


@dataclass(frozen=True)
class Kubernetes:
    """What a Kubernetes site wants to know.

    Attributes:
        image: with meshkit, the model and the experiment in it.
        namespace: None for kubectl's own.
        claims: persistent volume claim -> the folder where it is mounted; the run folder must be in one.
        resources: further resources of a pod beside the GPUs: `{"rdma/ib": "8"}`.
        shared_memory: size of /dev/shm, which NCCL and data loaders use and which is 64 MB otherwise.
        workdir: the folder with the experiment; None for the image's own.
        python: the interpreter in the image.
        mtls: whether the processes know each other by certificates.
    """

    image: str
    namespace: str | None = None
    claims: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    shared_memory: str = "64Gi"
    workdir: str | None = None
    python: str = "python3"
    mtls: bool = False


def jobset_yaml(job: Job, site: Kubernetes) -> str:
    """The JobSet as YAML; with mutual TLS, under a comment on how its Secret is made.

    Raises:
        ConfigError: a name or a quantity is none that Kubernetes takes.
    """
    text = yaml.safe_dump(jobset(job, site), sort_keys=False, width=120)
    return "".join(f"# {line}\n" for line in _secret_commands(job, site)) + text if site.mtls else text


def coordinator_host(job: Job) -> str:
    """The name of the first pod."""
    return f"{job.name}-{_WORKERS}-0-0.{job.name}"


def secret_name(job: Job) -> str:
    """Of the Secret with the certificates of a job."""
    return f"{job.name}-mtls"


def secret_yaml(job: Job, site: Kubernetes, files: Mapping[str, bytes], owner_uid: str) -> str:
    """The Secret with the certificates, which Kubernetes removes together with the JobSet. Not to be printed.

    Args:
        job: whose.
        site: of its namespace.
        files: as `make_certificates` makes them.
        owner_uid: of the JobSet, as Kubernetes has made it.
    """
    owner = Owner(api_version="jobset.x-k8s.io/v1alpha2", kind="JobSet", name=job.name, uid=owner_uid)
    metadata = Metadata(name=secret_name(job), namespace=site.namespace, owner_references=[owner])
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    return yaml.safe_dump(Secret(metadata=metadata, data=data).tables(), sort_keys=False)


def _secret_commands(job: Job, site: Kubernetes) -> list[str]:
    space = f" --namespace {site.namespace}" if site.namespace else ""
    files = " ".join(f"--from-file=mtls/{name}" for name in FILES)
    return [
        f"The certificates come from the Secret {secret_name(job)}. `meshkit launch jobset --mtls` makes it; by hand:",
        f"  meshkit launch certificates mtls --host {coordinator_host(job)}",
        f"  kubectl create secret generic {secret_name(job)}{space} {files}",
        "  rm -r mtls",
    ]


def jobset(job: Job, site: Kubernetes) -> dict[str, Any]:
    """The JobSet as plain tables, in the words of `jobset.x-k8s.io/v1alpha2`.

    Raises:
        ConfigError: a name or a quantity is none that Kubernetes takes.
    """
    _check(site)
    spec = JobSetSpec(
        network=Network(subdomain=job.name),
        coordinator=Coordinator(replicated_job=_WORKERS),
        failure_policy=_failure_policy(job),
        replicated_jobs=[
            ReplicatedJob(
                name=_WORKERS,
                template=JobTemplate(
                    spec=JobSpec(
                        parallelism=job.hosts,
                        completions=job.hosts,
                        pod_failure_policy=_pod_failure_policy(),
                        template=PodTemplate(spec=_pod(job, site)),
                    )
                ),
            )
        ],
    )
    return JobSet(metadata=Metadata(name=job.name, namespace=site.namespace), spec=spec).tables()


def _failure_policy(job: Job) -> FailurePolicy:
    """What follows the end of the one Job: everything starts again, together, unless a rule says otherwise.

    The messages are those of Kubernetes' job controller for a pod failure policy.
    """
    preempted = FailureRule(
        name="preempted",
        action="RestartJobSetAndIgnoreMaxRestarts",
        on_job_failure_reasons=["PodFailurePolicy"],
        on_job_failure_message_patterns=[f"exit code {PREEMPTED} matching", "condition DisruptionTarget matching"],
    )
    final = FailureRule(name="final", action="FailJobSet", on_job_failure_reasons=["PodFailurePolicy"])
    return FailurePolicy(max_restarts=job.max_restarts, rules=[preempted, final])


def _pod_failure_policy() -> PodFailurePolicy:
    """Names the ends that are no crash; any other end of a pod fails the Job too, for its backoff limit of 0."""

    def ended_with(*codes: int) -> PodFailureRule:
        return PodFailureRule(on_exit_codes=ExitCodes(container_name=_CONTAINER, values=sorted(codes)))

    disrupted = PodFailureRule(on_pod_conditions=[PodCondition(type="DisruptionTarget")])
    return PodFailurePolicy(rules=[ended_with(PREEMPTED), disrupted, ended_with(USER_ERROR, CONDITION, INTERRUPTED)])


def _pod(job: Job, site: Kubernetes) -> PodSpec:
    mounts = [VolumeMount(name="shared-memory", mount_path="/dev/shm")]
    volumes = [Volume(name="shared-memory", empty_dir=EmptyDir(size_limit=site.shared_memory))]
    for claim, path in site.claims.items():
        mounts.append(VolumeMount(name=claim, mount_path=path))
        volumes.append(Volume(name=claim, persistent_volume_claim=Claim(claim_name=claim)))
    if site.mtls:
        mounts.append(VolumeMount(name="mtls", mount_path=_MTLS_FOLDER, read_only=True))
        volumes.append(Volume(name="mtls", secret=SecretVolume(secret_name=secret_name(job))))
    container = Container(
        name=_CONTAINER,
        image=site.image,
        command=_command(job, site),
        working_dir=site.workdir,
        env=_environment(job, site),
        resources=Resources(limits={"nvidia.com/gpu": str(job.gpus_per_host), **site.resources}),
        volume_mounts=mounts,
        security_context=ContainerSecurity(capabilities=Capabilities(add=["IPC_LOCK"])),  # RDMA pins memory
    )
    selector = Selector(match_labels={"jobset.sigs.k8s.io/jobset-name": job.name})
    apart = AntiAffinity(required_during_scheduling_ignored_during_execution=[PodTerm(label_selector=selector)])
    return PodSpec(
        termination_grace_period_seconds=_SAVE_S + _KILL_S,
        affinity=Affinity(pod_anti_affinity=apart),
        containers=[container],
        volumes=volumes,
    )


def _environment(job: Job, site: Kubernetes) -> list[Env]:
    coordinator = f"{coordinator_host(job)}:{FIRST_PORT}"  # a pod has all ports for itself
    mtls = [Env(name=MTLS, value=_MTLS_FOLDER)] if site.mtls else []
    mine = PROCESS_ID if job.processes_per_host == 1 else "HOST_INDEX"
    return [
        Env(name=COORDINATOR, value=coordinator),
        Env(name=NUM_PROCESSES, value=str(job.num_processes)),
        Env(name=mine, value_from=EnvSource(field_ref=FieldRef(field_path=_INDEX))),
        Env(name=ATTEMPT, value_from=EnvSource(field_ref=FieldRef(field_path=_RESTARTS))),
        *mtls,
    ]


def _command(job: Job, site: Kubernetes) -> list[str]:
    """Kubernetes replaces `$(NAME)` in a command; a `$` of the user's is doubled, which keeps it."""
    train = [word.replace("$", "$$") for word in job.train_command((site.python,))]
    if job.processes_per_host == 1:
        return train
    python, module, meshkit, _, *arguments = train
    devices = job.gpus_per_host // job.processes_per_host
    part = ["--processes", str(job.processes_per_host), "--devices", str(devices), "--hosts", str(job.hosts)]
    part += ["--host-index", "$(HOST_INDEX)", "--coordinator", f"$({COORDINATOR})", "--attempt", f"$({ATTEMPT})"]
    return [python, module, meshkit, "launch", "local", *part, *arguments]


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
