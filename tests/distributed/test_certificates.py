"""Test the certificates made for one run: who can read them, which errors unfit ones cause, and how they travel."""

import base64
import json
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jsonschema
import pytest
import yaml

from meshkit.cli import main
from meshkit.distributed.certificates import (
    FILES,
    certificates_for,
    make_certificates,
    read_certificates,
    write_certificates,
)
from meshkit.distributed.environment import read_gang
from meshkit.distributed.join import join_gang
from meshkit.errors import ConfigError, RunError
from meshkit.private import MARK
from meshkit.verbs.launch.jobs import Job, Kubernetes, jobset, jobset_yaml, submit_jobset
from meshkit.verbs.launch.local import LocalPart

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = "configs/experiments/llama_debug_cpu.toml"
GANG = {"MESHKIT_COORDINATOR": "127.0.0.1:1", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": "1"}
SCHEMA = json.loads((ROOT / "tests/data/jobset_v1alpha2.schema.json").read_text())
JOB = Job("llama3-70b", "e.toml", (), "/runs/a", hosts=64, gpus_per_host=8)
SITE = Kubernetes("image", "team-a", claims={"runs": "/runs"}, mtls=True)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Return the folder of a job's certificates."""
    folder = tmp_path_factory.mktemp("mtls") / "ours"
    write_certificates(folder, make_certificates(["127.0.0.1", "gpu7"]))
    return folder


def test_only_this_user_can_read_them(ours):
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in ours.iterdir()}
    assert modes == dict.fromkeys((*FILES, MARK), 0o600)
    # No file holds the authority's key.
    assert [p.name for p in ours.iterdir() if b"PRIVATE KEY" in p.read_bytes()] == ["key.pem"]


def test_they_are_new_each_time_and_gone_afterwards(tmp_path):
    kept = []
    for _ in range(2):
        with certificates_for(tmp_path / "run/mtls", ["127.0.0.1"]) as folder:
            kept.append((folder / "key.pem").read_bytes())
            # This is the state after a start that was killed.
            write_certificates(folder, make_certificates(["127.0.0.1"]))
            kept.append((folder / "key.pem").read_bytes())
        assert list((tmp_path / "run").iterdir()) == []
    assert len(set(kept)) == 4


def test_a_folder_that_is_not_for_them(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"cannot be written to .*: it is a link"):
        write_certificates(tmp_path / "link", {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model.py").touch()
    with pytest.raises(ConfigError, match="there are files in it, and meshkit did not make it"):
        write_certificates(tmp_path / "full", {})
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["model.py"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_certificates(tmp_path / "full/model.py/mtls", {})


@pytest.mark.parametrize("host", ["a b", "", "-x", "gpu7;rm", "a" * 300])
def test_hosts_that_are_none(host):
    with pytest.raises(ConfigError, match="no name and no address"):
        make_certificates([host])


@pytest.mark.parametrize("host", ["127.0.0.1", "gpu7", None])
def test_certificates_that_fit(ours, host):
    assert read_certificates(str(ours), coordinator_host=host).folder == ours


def spoil(name, data):
    return lambda folder: (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda folder: (folder / "ca.pem").unlink(), r"ca\.pem cannot be read: No such file"),
        (lambda folder: (folder / "key.pem").chmod(0o644), r"may read the private key key\.pem \(mode 0644\)"),
        (spoil("ca.pem", b"x"), "the certificates cannot be used"),
        (spoil("certificate.pem", b""), "the certificates cannot be used"),
        (lambda folder: spoil("key.pem", make_certificates(["gpu7"])["key.pem"])(folder), "KEY_VALUES_MISMATCH"),
        (lambda folder: spoil("ca.pem", make_certificates(["gpu7"])["ca.pem"])(folder), "the certificate is not valid"),
        (lambda folder: write_certificates(folder, make_certificates(["gpu8"])), "not valid for 'gpu7'"),
        (lambda folder: write_certificates(folder, make_certificates(["gpu7"], days=-0.5)), "certificate has expired"),
    ],
)
def test_certificates_that_do_not_fit(tmp_path, change, match):
    write_certificates(tmp_path / "m", make_certificates(["gpu7"]))
    change(tmp_path / "m")
    with pytest.raises(ConfigError, match=match) as error:
        read_certificates(str(tmp_path / "m"), coordinator_host="gpu7")
    assert error.value.at == f"MESHKIT_MTLS={tmp_path / 'm'}"
    assert error.value.hint


def test_the_environment_says_where_they_are():
    gang = read_gang(GANG | {"MESHKIT_MTLS": "/etc/meshkit/mtls"})
    assert gang.mtls == "/etc/meshkit/mtls"
    assert read_gang(gang.emit()) == gang
    assert read_gang(GANG).mtls is None


@pytest.mark.parametrize(("own", "folder"), [(None, "/etc/meshkit/mtls"), ("/run/mtls", "/run/mtls")])
def test_processes_that_are_started_here_inherit_them(own, folder):
    """`launch local` inside a pod passes on the pod's certificates, unless it was given others."""
    part = LocalPart(2, 1, hosts=2, host_index=1, coordinator="gpu7:61000", mtls=own, virtual=True)
    environments = part.environments(0, base={"MESHKIT_MTLS": "/etc/meshkit/mtls"})
    assert [read_gang(environment).mtls for environment in environments] == [folder] * 2


def test_a_jax_that_has_no_mutual_tls(ours, monkeypatch):
    from jax._src import xla_bridge

    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda coordinator_address=None, num_processes=None: None)
    with pytest.raises(ConfigError, match=r"jax \S+ cannot protect the meeting(.|\n)*try jax 0\.11\.2 or newer"):
        join_gang(GANG | {"MESHKIT_MTLS": str(ours)})


def test_the_verb_for_a_launcher_of_ones_own(tmp_path, capsys):
    assert main(["launch", "certificates", str(tmp_path / "m"), "--host", "gpu7", "--host", "10.0.0.1"]) == 0
    assert "gpu7, 10.0.0.1" in capsys.readouterr().err
    for host in ("gpu7", "10.0.0.1"):
        read_certificates(str(tmp_path / "m"), coordinator_host=host)
    assert main(["launch", "certificates", str(tmp_path), "--host", "gpu7"]) == 2
    assert "meshkit did not make it" in capsys.readouterr().err


def test_what_local_would_start(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [
        "launch",
        "local",
        "--processes",
        "2",
        "--devices",
        "4",
        EXPERIMENT,
        "--out",
        str(tmp_path / "r"),
        "--mtls",
    ]
    assert main([*words, "--dry-run"]) == 0
    make, *processes = capsys.readouterr().out.splitlines()
    assert make.endswith(f"launch certificates {shlex.quote(str(tmp_path / 'r/mtls'))} --host 127.0.0.1")
    assert all(f"MESHKIT_MTLS={tmp_path / 'r/mtls'}" in line for line in processes)
    assert not (tmp_path / "r").exists()
    more = [
        "--hosts",
        "2",
        "--coordinator",
        "gpu7:61000",
    ]
    assert main([*words, *more]) == 2
    assert "several hosts must share them" in capsys.readouterr().err


KUBECTL = """#!{python}
import json, sys
from pathlib import Path
text = sys.stdin.read()
asked = Path("asked")
calls = json.loads(asked.read_text()) if asked.exists() else []
asked.write_text(json.dumps([*calls, [sys.argv[1:], text]]))
if "kind: Secret" in text and Path("refuse").exists():
    sys.exit("error: secrets is forbidden")
print(json.dumps({{"metadata": {{"uid": "1234-5678"}}}}) if "json" in sys.argv else "created")
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Return a function that reads the requests to a stand-in for kubectl, in a folder of its own."""
    (tmp_path / "kubectl").write_text(KUBECTL.format(python=sys.executable))
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return lambda: json.loads((tmp_path / "asked").read_text())


@pytest.mark.parametrize("processes", [1, 8])
def test_pods_read_them_from_a_secret(processes):
    made = jobset(replace(JOB, processes_per_host=processes), SITE)
    jsonschema.validate(made, SCHEMA)
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "mtls", "secret": {"secretName": "llama3-70b-mtls", "defaultMode": 0o440}} in pod["volumes"]
    assert {"name": "mtls", "mountPath": "/etc/meshkit/mtls", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert {"name": "MESHKIT_MTLS", "value": "/etc/meshkit/mtls"} in pod["containers"][0]["env"]


def test_what_is_printed_says_how_and_has_no_key():
    text = jobset_yaml(JOB, SITE)
    assert yaml.safe_load(text) == jobset(JOB, SITE)
    assert "PRIVATE KEY" not in text
    comment = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    assert comment == [
        "meshkit launch certificates mtls --host llama3-70b-workers-0-0.llama3-70b",
        "kubectl create secret generic llama3-70b-mtls --namespace team-a "
        + " ".join(f"--from-file=mtls/{name}" for name in FILES),
        "rm -r mtls",
    ]
    text = jobset_yaml(JOB, replace(SITE, mtls=False))
    comment = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    made = "kubectl create secret generic llama3-70b-secret --namespace team-a --from-file=secret=/dev/stdin"
    assert comment == [f"openssl rand -hex 32 | {made}"]
    assert "mtls" not in text


def test_the_secret_goes_with_the_jobset(cluster, tmp_path):
    said = submit_jobset(JOB, SITE)
    assert said == "jobset.jobset.x-k8s.io/llama3-70b and secret/llama3-70b-mtls created"
    (first, made), (second, text) = cluster()
    assert first == ["create", "-f", "-", "-o", "json"]
    assert yaml.safe_load(made) == jobset(JOB, SITE)
    assert second == ["create", "-f", "-"]  # The command line holds nothing of the secret.
    secret = yaml.safe_load(text)
    assert secret["metadata"]["namespace"] == "team-a"
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "llama3-70b", "uid": "1234-5678"}
    ]
    write_certificates(tmp_path / "m", {name: base64.b64decode(value) for name, value in secret["data"].items()})
    coordinator = next(e["value"] for e in find(made, "env") if e["name"] == "MESHKIT_COORDINATOR").split(":")[0]
    read_certificates(str(tmp_path / "m"), coordinator_host=coordinator)


def test_without_mutual_tls_the_pods_share_a_secret(cluster):
    said = submit_jobset(JOB, replace(SITE, mtls=False))
    assert said == "jobset.jobset.x-k8s.io/llama3-70b and secret/llama3-70b-secret created"
    (_, made), (_, text) = cluster()
    jsonschema.validate(yaml.safe_load(made), SCHEMA)
    shared = base64.b64decode(yaml.safe_load(text)["data"]["secret"]).decode()
    assert len(set(shared)) > 8
    assert len(shared) == 64
    assert shared not in made
    (variable,) = [e for e in find(made, "env") if e["name"] == "MESHKIT_SECRET"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "llama3-70b-secret", "key": "secret"}}


def find(text, key):
    spec = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec["containers"][0][key]


def test_a_secret_that_is_refused_is_told(cluster, tmp_path):
    (tmp_path / "refuse").touch()
    with pytest.raises(RunError, match=r"wait for Secret llama3-70b-mtls, but (.|\n)*forbidden(.|\n)*delete jobset"):
        submit_jobset(JOB, SITE)


@pytest.mark.parametrize("launcher", ["slurm", "jobset", "mpi"])
def test_the_option_of_each_launcher(launcher, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    more = {"slurm": [], "jobset": ["--image", "i"], "mpi": ["--hostfile", "hosts"]}[launcher]
    texts = []
    for option in ([], ["--mtls"], ["--no-mtls"]):
        assert main(["launch", launcher, "configs/experiments/llama3_70b.toml", *more, *option, "--dry-run"]) == 0
        texts.append(capsys.readouterr())
    assert ["MESHKIT_MTLS" in text.out for text in texts] == [True, True, False]
    assert ["MESHKIT_SECRET" in text.out for text in texts] == [False, False, True]
    assert ["anybody who reaches the coordinator's port" in text.err for text in texts] == [False, False, True]
    assert "PRIVATE KEY" not in texts[0].out
    if launcher != "jobset":
        assert subprocess.run(["bash", "-n"], input=texts[2].out, text=True, check=False).returncode == 0
