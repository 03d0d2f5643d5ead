"""Test everything that doctor checks, made wrong on purpose: it is named, with the numbers and a remedy."""

import json
import os
import re
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.config.experiment import load
from meshkit.discover.probe import FixtureProbe
from meshkit.discover.topology import FoundNic, Topology
from meshkit.errors import ConfigError
from meshkit.verbs.doctor import node as machine
from meshkit.verbs.doctor.checkup import check_experiment
from meshkit.verbs.doctor.node import (
    Diagnosis,
    check_disk,
    check_hardware,
    check_limits,
    check_packages,
    check_variables,
    check_xla_flags,
)

ROOT = Path(__file__).resolve().parents[3]


def wrong(results):
    return {(r.check, r.status): r.message for r in results if r.status != "ok"}


@pytest.mark.parametrize(
    ("env", "check", "status", "says"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "nccl", "warning", "NCCL_IB_DISABLE=1"),
        ({"NCCL_DEBUG": "INFO"}, "nccl", "warning", "fills the logs"),
        ({"NCCL_TOPO_FILE": "/missing/topo.xml"}, "nccl", "error", "/missing/topo.xml"),
        ({"NCCL_SOCKET_IFNAME": "ens"}, "nccl_sockets", "error", "this machine has eth0, lo"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "nccl_sockets", "error", "matches no interface"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, "nccl_sockets", "error", "matches no interface"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "memory", "warning", "0.92"),
        (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5", "XLA_CLIENT_MEM_FRACTION": ".9"},
            "memory",
            "error",
            "contradict each other",
        ),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "memory", "warning", "fragments"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "memory", "warning", "slow"),
        ({"TF_FORCE_UNIFIED_MEMORY": "1"}, "memory", "warning", "spill"),
        ({"MESHKIT_PROCESS_ID": "0"}, "launcher", "error", "MESHKIT_COORDINATOR"),
        (
            {"MESHKIT_PROCESS_ID": "4", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_COORDINATOR": "h:1"},
            "launcher",
            "error",
            "4",
        ),
    ],
)
def test_variables(monkeypatch, tmp_path, env, check, status, says):
    monkeypatch.setattr(machine, "INTERFACES", tmp_path)
    for name in ("eth0", "lo"):
        (tmp_path / name).mkdir()
    found = wrong(check_variables(env, memory_fraction=0.92))
    assert says in found[(check, status)]


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_DEBUG": "WARN"},
        {"XLA_CLIENT_MEM_FRACTION": "0.92"},
        {"https_proxy": "http://proxy"},
    ],
)
def test_variables_that_are_fine(monkeypatch, tmp_path, env):
    monkeypatch.setattr(machine, "INTERFACES", tmp_path)
    for name in ("eth0", "lo"):
        (tmp_path / name).mkdir()
    assert wrong(check_variables(env, memory_fraction=0.92)) == {}


def test_a_flag_that_xla_does_not_know():
    found = check_xla_flags({**os.environ, "XLA_FLAGS": "--xla_no_such_flag=1"})
    assert (found.status, "no_such_flag" in found.message) == ("error", True)


def test_flags_that_xla_knows():
    assert check_xla_flags({**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}).status == "ok"


def test_gpus_that_the_cluster_has_and_the_machine_has_not():
    found = wrong(check_hardware(FixtureProbe(), 8))
    assert "0 GPUs here" in found[("gpus", "error")]
    assert wrong(check_hardware(FixtureProbe(), 0)) == {}


@pytest.mark.parametrize(("size", "status"), [(64 << 20, "error"), (512 << 20, "warning"), (16 << 30, "ok")])
def test_shared_memory(monkeypatch, tmp_path, size, status):
    monkeypatch.setattr(machine, "SHM", tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("U", (), {"total": size, "free": size})())
    (found,) = [r for r in check_limits(has_gpus=False) if r.check == "shared_memory"]
    assert found.status == status


@pytest.mark.parametrize(("files", "status"), [(256, "error"), (4096, "warning"), (1 << 20, "ok")])
def test_open_files(monkeypatch, files, status):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (files, files))
    (found,) = [r for r in check_limits(has_gpus=True) if r.check == "open_files"]
    assert found.status == status


def test_disk(tmp_path):
    assert ("disk", "error") not in wrong(check_disk(tmp_path / "new" / "run"))
    assert list(tmp_path.iterdir()) == []  # The check leaves nothing behind.
    found = wrong(check_disk(tmp_path, needed_bytes=1 << 60))
    assert "the checkpoints of this experiment take" in found[("disk", "error")]


def test_slow_storage(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "write_rate", lambda _: 5e6)
    assert "5.00 MB/s" in wrong(check_disk(tmp_path))[("disk", "warning")]


def test_nccl_files_persist_longest(tmp_path):
    (tmp_path / "nccl.conf").write_text("# of a bad day\nNCCL_P2P_DISABLE=1 # for a test\nNCCL_DEBUG=WARN\n")
    env = {"NCCL_CONF_FILE": str(tmp_path / "nccl.conf")}
    said = wrong(check_variables(env))[("nccl", "warning")]
    assert f"NCCL_P2P_DISABLE=1 in {tmp_path / 'nccl.conf'}: for debugging" in said
    assert "NCCL_P2P_DISABLE=0: for" in wrong(check_variables(env | {"NCCL_P2P_DISABLE": "0"}))[("nccl", "warning")]


@pytest.mark.parametrize(("has_gpus", "status"), [(True, "error"), (False, "warning")])
def test_a_plugin_that_does_not_fit_matters_where_gpus_are(monkeypatch, has_gpus, status):
    def refuse():
        raise ConfigError("jax-cuda12-plugin is version 0.11.0, but jaxlib is 0.12.0.", hint="pip install ...")

    monkeypatch.setattr(machine, "check_compiler", refuse)
    found = wrong(check_packages(has_gpus=has_gpus))
    assert "jaxlib is 0.12.0" in found[("compiler", status)]


def test_jax_and_jaxlib_that_were_not_released_together(monkeypatch):
    monkeypatch.setattr(machine, "version_of", lambda name: "0.12.0" if name == "jax" else "0.11.2")
    monkeypatch.setattr(machine, "check_compiler", lambda: None)
    assert "released together" in wrong(check_packages())[("packages", "warning")]


@pytest.mark.parametrize(("limit", "status"), [("512", "warning"), ("max", "ok"), ("16384", "ok")])
def test_threads_of_a_container(monkeypatch, tmp_path, limit, status):
    (tmp_path / "pids.max").write_text(limit + "\n")
    monkeypatch.setattr(machine, "PIDS_FILES", (str(tmp_path / "pids.max"),))
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (machine.resource.RLIM_INFINITY,) * 2)
    (found,) = [r for r in check_limits(has_gpus=False) if r.check == "threads"]
    assert (found.status, limit in found.message) == (status, status != "ok")


def test_what_an_experiment_needs():
    experiment = load(ROOT / "configs/experiments/llama_debug_cpu.toml", [])
    found, needed_bytes = check_experiment(experiment)
    assert (found.status, needed_bytes) == ("ok", None)
    experiment = load(ROOT / "configs/experiments/llama_debug_cpu.toml", ["checkpoint.every=5", "checkpoint.keep=2"])
    found, needed_bytes = check_experiment(experiment)
    parameters = float(re.search(r"has ([\d.]+) M parameters", found.message)[1]) * 1e6
    assert needed_bytes == pytest.approx(3 * 12 * parameters, rel=0.5e5 / parameters)  # The number is printed to 0.1 M.
    wrong_class = ["model.class=models.llama:Nope"]
    found, needed_bytes = check_experiment(load(ROOT / "configs/experiments/llama_debug_cpu.toml", wrong_class))
    assert (found.status, "Nope" in found.message, needed_bytes) == ("error", True, None)


@pytest.mark.parametrize(("expected", "says"), [(8, "1 network adapters are up here, but"), (1, None), (None, None)])
def test_a_host_with_fewer_adapters_than_its_cluster_says(monkeypatch, expected, says):
    nics = (FoundNic("mlx5_0", active=True), FoundNic("mlx5_1", active=False))
    monkeypatch.setattr(machine, "discover", lambda _: Topology("a host", nics=nics, nics_listed=True))
    found = [r.message for r in check_hardware(FixtureProbe(), None, expected) if r.check == "nics"]
    assert "1 of 2 network adapters are down: mlx5_1" in found[0]
    assert [says in message for message in found[1:]] == [True] * (says is not None)


def test_the_verb(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert main(["doctor", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["schema"] == "meshkit.doctor/1"
    printed["schema_"] = printed.pop("schema")
    assert Diagnosis.model_validate(printed).errors == ()
    monkeypatch.setenv("NCCL_TOPO_FILE", str(tmp_path / "none.xml"))
    assert main(["doctor", "--out", str(tmp_path)]) == 3
    assert "a job would fail or hang" in capsys.readouterr().err
