"""The parts of Kubernetes and JobSet objects that meshkit writes, typed; camelCase outside.

Sources: the Kubernetes API (batch/v1, v1) and jobset.x-k8s.io/v1alpha2. Every default is one that a gang needs: it
stops as a whole, restarts as a whole, and never half of it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)

    def tables(self) -> dict[str, Any]:
        """Plain tables under the names that Kubernetes has, without what is not set."""
        return self.model_dump(by_alias=True, exclude_none=True)


class Owner(_Part):
    """With what an object is removed."""

    api_version: str
    kind: str
    name: str
    uid: str


class Metadata(_Part):
    name: str
    namespace: str | None = None
    owner_references: list[Owner] | None = None


class FieldRef(_Part):
    field_path: str


class EnvSource(_Part):
    field_ref: FieldRef


class Env(_Part):
    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class Resources(_Part):
    limits: dict[str, str]


class VolumeMount(_Part):
    name: str
    mount_path: str
    read_only: bool | None = None


class EmptyDir(_Part):
    medium: Literal["Memory"] = "Memory"
    size_limit: str


class Claim(_Part):
    claim_name: str


class SecretVolume(_Part):
    """Files of a Secret; read by the container's user and group, and not by everybody."""

    secret_name: str
    default_mode: int = 0o440


class Volume(_Part):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None
    secret: SecretVolume | None = None


class Capabilities(_Part):
    add: list[str]


class ContainerSecurity(_Part):
    allow_privilege_escalation: bool = False
    capabilities: Capabilities


class Container(_Part):
    name: str
    image: str
    command: list[str]
    working_dir: str | None = None
    env: list[Env]
    resources: Resources
    volume_mounts: list[VolumeMount]
    security_context: ContainerSecurity


class Selector(_Part):
    match_labels: dict[str, str]


class PodTerm(_Part):
    label_selector: Selector
    topology_key: str = "kubernetes.io/hostname"


class AntiAffinity(_Part):
    """Pods of one job on different hosts."""

    required_during_scheduling_ignored_during_execution: list[PodTerm]


class Affinity(_Part):
    pod_anti_affinity: AntiAffinity


class PodSpec(_Part):
    restart_policy: Literal["Never"] = "Never"
    automount_service_account_token: bool = False
    termination_grace_period_seconds: int
    affinity: Affinity
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(_Part):
    spec: PodSpec


class ExitCodes(_Part):
    container_name: str
    operator: Literal["In"] = "In"
    values: list[int]


class PodCondition(_Part):
    type: str
    status: str = "True"


class PodFailureRule(_Part):
    action: Literal["FailJob"] = "FailJob"
    on_exit_codes: ExitCodes | None = None
    on_pod_conditions: list[PodCondition] | None = None


class PodFailurePolicy(_Part):
    rules: list[PodFailureRule]


class JobSpec(_Part):
    parallelism: int
    completions: int
    completion_mode: Literal["Indexed"] = "Indexed"
    backoff_limit: Literal[0] = 0
    pod_failure_policy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(_Part):
    spec: JobSpec


class ReplicatedJob(_Part):
    name: str
    replicas: Literal[1] = 1
    template: JobTemplate


class Network(_Part):
    """Names of pods, known before they are ready: they wait for each other."""

    enable_dns_hostnames: bool = Field(default=True, alias="enableDNSHostnames")
    publish_not_ready_addresses: bool = True
    subdomain: str


class Coordinator(_Part):
    replicated_job: str
    job_index: int = 0
    pod_index: int = 0


class FailureRule(_Part):
    name: str
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    on_job_failure_reasons: list[str]
    on_job_failure_message_patterns: list[str] | None = None


class FailurePolicy(_Part):
    """Restarts once all pods of the last attempt are gone: a new process must not meet an old one."""

    max_restarts: int
    restart_strategy: Literal["BlockingRecreate"] = "BlockingRecreate"
    rules: list[FailureRule]


class JobSetSpec(_Part):
    network: Network
    coordinator: Coordinator
    failure_policy: FailurePolicy
    replicated_jobs: list[ReplicatedJob]


class JobSet(_Part):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"] = "jobset.x-k8s.io/v1alpha2"
    kind: Literal["JobSet"] = "JobSet"
    metadata: Metadata
    spec: JobSetSpec


class Secret(_Part):
    """Values are base64, as Kubernetes has them."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["Secret"] = "Secret"
    type: Literal["Opaque"] = "Opaque"
    immutable: bool = True
    metadata: Metadata
    data: dict[str, str]
