"""Test the JobSet: it is valid by its own schema and has a gang's policies. Nothing is sent to a cluster."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from meshkit.errors import ConfigError
from meshkit.verbs.launch.cli import launch_app
from meshkit.verbs.launch.jobs import Job, Kubernetes, Slurm, jobset, jobset_yaml, mpi_script, slurm_script

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "tests/data/jobset_v1alpha2.schema.json").read_text())
JOB = Job("llama3-70b", "e.toml", (), "/runs/a", hosts=64, gpus_per_host=8)
SITE = Kubernetes("image", claims={"runs": "/runs"})


def pod(job=JOB, site=SITE):
    return jobset(job, site)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def environment(job=JOB):
    found = pod(job)["containers"][0]["env"]
    return {e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"] for e in found}


@pytest.mark.parametrize("file", sorted((ROOT / "launch").glob("*.yaml")), ids=lambda p: p.name)
def test_the_rendered_files_are_valid(file):
    jsonschema.validate(yaml.safe_load(file.read_text()), SCHEMA)


@pytest.mark.parametrize("processes", [1, 8])
@pytest.mark.parametrize(
    "site",
    [SITE, Kubernetes("i", "team-a", {"runs": "/r", "data": "/d"}, {"rdma/ib": "8"}, "128Gi", "/work", "python")],
)
def test_every_rendering_is_valid(processes, site):
    made = jobset(Job("a", "e.toml", ("x=1",), "/r", 2, 8, processes), site)
    jsonschema.validate(made, SCHEMA)
    assert yaml.safe_load(jobset_yaml(Job("a", "e.toml", ("x=1",), "/r", 2, 8, processes), site)) == made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicatedJobs", 0, "template", "spec", "backoffLimit"), "0"),
        (("spec", "failurePolicy", "restartStrategy"), "Restart"),
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "volume"), []),
    ],
)
def test_the_schema_notices_mistakes(path, value):
    made = jobset(JOB, SITE)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError, match=r"is not (of type|one of)|were unexpected|was unexpected"):
        jsonschema.validate(made, SCHEMA)


def test_the_gang_starts_again_as_a_whole():
    spec = jobset(JOB, SITE)["spec"]
    policy = spec["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (3, "BlockingRecreate")
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["backoffLimit"], job["completionMode"], job["parallelism"], job["completions"]) == (
        0,
        "Indexed",
        64,
        64,
    )
    assert pod()["restartPolicy"] == "Never"


def test_exit_codes_decide_what_follows():
    spec = jobset(JOB, SITE)["spec"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert codes == [[75], [2, 3, 130]]  # Any other end is a crash, which the backoff limit of 0 lets through.
    preempted, final = spec["failurePolicy"]["rules"]
    assert preempted["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert "exit code 75 matching" in preempted["onJobFailureMessagePatterns"]
    assert (final["action"], final["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_one_pod_a_host_with_shared_memory_and_no_rights():
    made = pod()
    (term,) = made["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in made["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in made["containers"][0]["volumeMounts"]
    assert made["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert made["automountServiceAccountToken"] is False
    assert made["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_certificates_are_read_by_the_pods_group_where_the_image_is_of_another_user_than_root():
    """A Secret's files are root's, so their mode lets in the group, which fsGroup makes that of the container."""
    made = pod()
    (volume,) = (v["secret"] for v in made["volumes"] if "secret" in v)
    assert volume["defaultMode"] == 0o440
    assert made["securityContext"]["fsGroup"] == 1000
    assert pod(site=Kubernetes("image", fs_group=65532))["securityContext"]["fsGroup"] == 65532
    assert "securityContext" not in pod(site=Kubernetes("image", mtls=False))  # The secret is in no file.


def test_the_environment_of_a_process_a_host():
    assert environment() == {
        "MESHKIT_COORDINATOR": "llama3-70b-workers-0-0.llama3-70b:61000",
        "MESHKIT_NUM_PROCESSES": "64",
        "MESHKIT_PROCESS_ID": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "MESHKIT_ATTEMPT": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
        "MESHKIT_MTLS": "/etc/meshkit/mtls",
    }


def test_processes_for_each_gpu_are_started_inside_the_pod():
    job = Job("a", "e.toml", ("x=1",), "/r", 4, 8, 8)
    command = pod(job)["containers"][0]["command"]
    assert command[:5] == ["python3", "-m", "meshkit", "launch", "local"]
    options = dict(zip(command[5::2], command[6::2]))
    assert (options["--processes"], options["--devices"]) == ("8", "1")
    assert options["--hosts"] == "4"
    assert options["--host-index"] == "$(HOST_INDEX)"
    assert environment(job)["MESHKIT_NUM_PROCESSES"] == "32"
    words = [word.replace("$(MESHKIT_COORDINATOR)", "a:1") for word in command[5:]]
    words = ["0" if word.startswith("$(") else word for word in words]
    local = typer.main.get_command(launch_app).commands["local"]
    assert local.make_context("local", words).params["hosts"] == 4  # It is a command that `launch local` takes.


def test_the_limits_of_what_is_stuck_reach_the_processes():
    job = Job("a", "e.toml", (), "/r", 4, 8, stall_timeout=("300", "compile=7200"))
    told = "MESHKIT_STALL_TIMEOUT=300 compile=7200"
    assert pod(job)["containers"][0]["command"][:2] == ["env", told]
    assert f"command=(env '{told}' \"$python\" -m meshkit train e.toml" in slurm_script(job, Slurm())
    assert f"command=(env '{told}' \"$python\" -m meshkit train e.toml" in mpi_script(job, "hosts")
    command = pod(replace(job, processes_per_host=8))["containers"][0]["command"]
    limits = ["--stall-timeout", "300", "--stall-timeout", "compile=7200"]
    assert command[command.index(limits[0]) :] == [*limits, "e.toml", "--out", "/r"]


def test_a_dollar_of_the_users_stays_one():
    """Kubernetes replaces $(NAME) in a command, and makes one $ of two."""
    command = pod(Job("a", "e.toml", ("x=$(PATH) $$",), "/r", 4, 8))["containers"][0]["command"]
    assert "x=$$(PATH) $$$$" in command


@pytest.mark.parametrize(
    ("site", "match"),
    [
        (Kubernetes("i", claims={"Runs": "/r"}), "'Runs' is not a valid name in Kubernetes"),
        (Kubernetes("i", claims={"runs": "r"}), "'r' is not an absolute path"),
        (Kubernetes("i", namespace="a/b"), "'a/b' is not a valid name"),
        (Kubernetes("i", shared_memory="lots"), "'lots' is not a quantity"),
        (Kubernetes("i", resources={"rdma/ib": ""}), "'' is not a quantity"),
    ],
)
def test_what_kubernetes_would_refuse(site, match):
    with pytest.raises(ConfigError, match=match):
        jobset(JOB, site)
