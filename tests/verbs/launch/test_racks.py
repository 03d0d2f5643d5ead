"""Test that every launcher starts the processes of a mesh on parts of racks, on hosts grouped by NVLink domain."""

import itertools
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.verbs.launch.jobs import Slurm, jobset, make_job, mpi_script, slurm_script
from meshkit.verbs.launch.local import LocalPart, check_part
from tests.verbs.launch.test_jobs_jobset import SCHEMA, SITE

FOUR_RACKS = Path(__file__).parents[3] / "configs/experiments/deepseek_v3_gb200.toml"


def job(processes=1, used=64):
    sized = f"mesh={{fsdp={{infiniband=4}},expert={used}}}" if used != 64 else "train.steps=1000"
    return make_job(FOUR_RACKS, [f"cluster.gpus_used_per_domain={used}", sized], None, processes, 3)


@pytest.mark.parametrize("processes", [1, 4])
def test_slurm_asks_for_the_hosts_of_the_mesh_in_segments_of_one_rack(processes):
    text = slurm_script(job(processes), Slurm())
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\d+)$", text, re.M))
    assert (asked["nodes"], asked["segment"], asked["gpus-per-node"]) == ("64", "16", "4")
    assert f"--ntasks={64 * processes}" in text
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == load(FOUR_RACKS).mesh.size


def test_two_segments_that_fit_one_rack_are_spread():
    with pytest.raises(
        ConfigError, match="8 hosts in each of 4 NVLink domains, but two such groups fit one domain of 18"
    ):
        slurm_script(job(1, 32), Slurm())
    assert "#SBATCH --spread-segments\n" in slurm_script(job(1, 32), Slurm({"spread-segments": ""}))


@pytest.mark.parametrize("processes", [1, 4])
def test_a_jobset_has_a_job_for_each_rack_whose_pods_number_themselves(processes):
    made = jobset(job(processes), SITE)
    jsonschema.validate(made, SCHEMA)
    (workers,) = made["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    assert (workers["replicas"], spec["parallelism"], spec["completions"]) == (4, 16, 16)
    (label,) = workers["template"]["metadata"]["annotations"].items()
    assert label == ("alpha.jobset.sigs.k8s.io/exclusive-topology", "nvidia.com/gpu.clique")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e}
    assert fields["JOB_INDEX"] == "metadata.labels['jobset.sigs.k8s.io/job-index']"
    assert fields["POD_INDEX"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    bash, option, script, _, *arguments = (word.replace("$$", "$") for word in container["command"])
    shown = 'printf "%s\\n" "${MESHKIT_PROCESS_ID-}" "$@"'  # in place of Python
    found = []
    for rack, host in itertools.product(range(4), (0, 1, 15)):
        environment = {"JOB_INDEX": str(rack), "POD_INDEX": str(host), "PATH": "/usr/bin:/bin"}
        words = [bash, option, script, "bash", "-c", shown, "-", *arguments]
        if processes > 1:
            words = [bash, option, script.replace('"$0"', '"$0" -c "$SHOWN" -'), "bash", *arguments]
        said = subprocess.run(words, env=environment | {"SHOWN": shown}, capture_output=True, text=True, check=True)
        process, *rest = said.stdout.splitlines()
        found.append(int(process if processes == 1 else rest[rest.index("--host-index") + 1]))
    assert found == [16 * rack + host for rack, host in itertools.product(range(4), (0, 1, 15))]


def test_mpi_needs_a_hostfile_of_these_hosts_alone(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("".join(f"rack{i // 18}-{i % 18}\n" for i in range(72)))
    with pytest.raises(ConfigError, match="72 hosts, but the mesh uses 16 in each of 4 NVLink domains: 64"):
        mpi_script(job(), str(file))
    file.write_text("".join(f"rack{i // 16}-{i % 16}\n" for i in range(64)))
    assert "-np 64" in mpi_script(job(), str(file))


@pytest.mark.parametrize(
    ("cluster", "said", "even"),
    [
        ({"name": "gb200_nvl72", "gpus_used_per_domain": 66}, "uses 16 hosts of 4 GPUs and 2 GPUs of one more", 64),
        (
            {"gpu": "h100_pcie", "gpus_per_host": 4, "nvlink_domain_size": 2, "gpus_used_per_domain": 1},
            "uses 1 of each 2 GPUs on NVLink, and a host has 2 such groups",
            2,
        ),
    ],
)
def test_hosts_of_which_the_mesh_uses_unequal_parts_are_refused(tmp_path, cluster, said, even):
    used = Cluster.load(cluster)
    values = ", ".join(f"{key} = {f'"{value}"' if isinstance(value, str) else value}" for key, value in cluster.items())
    model = '[model]\nclass = "models.llama:Llama"\npreset = "llama3_8b"\n'
    mesh = f'[mesh]\nfsdp = {{ nvlink = {used.gpus_used_per_domain}, infiniband = "fill" }}\n'
    train = f"[train]\nglobal_batch = {used.num_gpus}\nsequence_length = 4096\nsteps = 10\n"
    (tmp_path / "e.toml").write_text(f'cluster = {{ {values} }}\n{model}{mesh}{train}[rules]\npreset = "fsdp"\n')
    with pytest.raises(ConfigError, match=said) as raised:
        make_job(tmp_path / "e.toml", (), None, 1, 3)
    assert f"gpus_used_per_domain={even}" in (raised.value.hint or "")


def test_launchers_on_the_hosts_of_the_mesh_are_its_hosts(tmp_path):
    experiment = load(FOUR_RACKS, ["launch.spares=1"])
    check_part(LocalPart(1, 4, 64, 0, "gpu7:61000"), experiment)
    with pytest.raises(ConfigError, match="--hosts must be 64, the number of hosts"):
        check_part(LocalPart(1, 4, 72, 0, "gpu7:61000"), experiment)
