"""Each thing that doctor looks at, made wrong on purpose: named, with the numbers and a way out."""

import json
import os

import pytest

from meshkit.cli import main
from meshkit.doctor import machine
from meshkit.doctor.gang import check_gang
from meshkit.doctor.machine import check_disk, check_hardware, check_limits
from meshkit.doctor.schema import Diagnosis
from meshkit.doctor.variables import check_variables, check_xla_flags
from meshkit.spec.discover.probe import FixtureProbe


def wrong(results):
    return {(r.check, r.status): r.message for r in results if r.status != "ok"}


@pytest.mark.parametrize(
    ("env", "check", "status", "says"),
    [
        ({"NCCL_IB_DISABLE": "1"}, "nccl", "warning", "NCCL_IB_DISABLE=1"),
        ({"NCCL_DEBUG": "INFO"}, "nccl", "warning", "fills the logs"),
        ({"NCCL_TOPO_FILE": "/missing/topo.xml"}, "nccl", "error", "/missing/topo.xml"),
        ({"NCCL_SOCKET_IFNAME": "ens"}, "nccl_sockets", "error", "this machine has eth0, lo"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "nccl_sockets", "error", "leaves no interface"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, "nccl_sockets", "error", "leaves no interface"),
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
def test_variables(tmp_path, env, check, status, says):
    for name in ("eth0", "lo"):
        (tmp_path / name).mkdir()
    found = wrong(check_variables(env, memory_fraction=0.92, interfaces=tmp_path))
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
def test_variables_that_are_fine(tmp_path, env):
    for name in ("eth0", "lo"):
        (tmp_path / name).mkdir()
    assert wrong(check_variables(env, memory_fraction=0.92, interfaces=tmp_path)) == {}


def test_a_flag_that_xla_does_not_know():
    found = wrong(check_xla_flags({**os.environ, "XLA_FLAGS": "--xla_no_such_flag=1"}))
    assert "no_such_flag" in found[("xla_flags", "error")]


def test_flags_that_xla_knows():
    assert wrong(check_xla_flags({**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"})) == {}


def test_gpus_that_the_cluster_has_and_the_machine_has_not():
    found = wrong(check_hardware(FixtureProbe(), 8))
    assert "0 GPUs here" in found[("gpus", "error")]
    assert wrong(check_hardware(FixtureProbe(), 0)) == {}


@pytest.mark.parametrize(("size", "status"), [(64 << 20, "error"), (512 << 20, "warning"), (16 << 30, "ok")])
def test_shared_memory(monkeypatch, tmp_path, size, status):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("U", (), {"total": size, "free": size})())
    (found,) = [r for r in check_limits(has_gpus=False, shm=tmp_path) if r.check == "shared_memory"]
    assert found.status == status


@pytest.mark.parametrize(("files", "status"), [(256, "error"), (4096, "warning"), (1 << 20, "ok")])
def test_open_files(monkeypatch, files, status):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (files, files))
    (found,) = [r for r in check_limits(has_gpus=True) if r.check == "open_files"]
    assert found.status == status


def test_disk(tmp_path):
    assert wrong(check_disk(tmp_path / "new" / "run")) == {}
    assert list(tmp_path.iterdir()) == []  # it leaves nothing behind
    found = wrong(check_disk(tmp_path, needed_bytes=1 << 60))
    assert "the checkpoints of this experiment take" in found[("disk", "error")]


def test_slow_storage(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_write_rate", lambda _: 5e6)
    assert "5.00 MB/s" in wrong(check_disk(tmp_path))[("disk", "warning")]


def test_a_gang_of_one_is_none():
    assert "no job of several processes" in wrong(check_gang({}))[("gang", "error")]


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
