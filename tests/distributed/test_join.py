"""Test what the environment may say to a job of several processes, and let two processes join by it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.config import calibration
from meshkit.distributed import join as gang_module
from meshkit.distributed.join import Gang, bind_address, is_first_process, join_gang, read_gang
from meshkit.distributed.roll_call import Attendance
from meshkit.errors import ConfigError
from meshkit.verbs.bench.bench_report import BenchReport

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"MESHKIT_COORDINATOR": "10.0.0.1:1234", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": "1"}
CLUSTER = 'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}'
SETS = [CLUSTER, "mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4"]


@pytest.mark.parametrize(
    ("more", "gang"),
    [
        ({}, Gang("10.0.0.1:1234", 2, 1)),
        ({"MESHKIT_COORDINATOR": "[::1]:80"}, Gang("[::1]:80", 2, 1)),
        ({"MESHKIT_COORDINATOR": " node-1.local:65535 "}, Gang("node-1.local:65535", 2, 1)),
        ({"MESHKIT_LOCAL_DEVICE_IDS": "4, 5", "MESHKIT_ATTEMPT": "3"}, Gang("10.0.0.1:1234", 2, 1, (4, 5), 3)),
        ({"MESHKIT_LOCAL_DEVICE_IDS": "", "MESHKIT_ATTEMPT": ""}, Gang("10.0.0.1:1234", 2, 1)),
    ],
)
def test_what_the_environment_says(more, gang):
    assert read_gang(GOOD | more) == gang


@pytest.mark.parametrize("environment", [{}, {"MESHKIT_ATTEMPT": "1"}, dict.fromkeys(GOOD, "")])
def test_a_process_alone(environment):
    assert read_gang(environment) is None
    assert join_gang(environment) == (0, 1)
    assert is_first_process()


def test_a_job_of_one_process_needs_no_coordinator():
    assert join_gang(GOOD | {"MESHKIT_NUM_PROCESSES": "1", "MESHKIT_PROCESS_ID": "0"}) == (0, 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"MESHKIT_COORDINATOR": None},
            r"MESHKIT_NUM_PROCESSES is set, but MESHKIT_COORDINATOR is not(.|\n)*try MESHKIT",
        ),
        ({"MESHKIT_NUM_PROCESSES": None}, "MESHKIT_COORDINATOR is set, but MESHKIT_NUM_PROCESSES is not"),
        ({"MESHKIT_PROCESS_ID": ""}, "MESHKIT_COORDINATOR is set, but MESHKIT_PROCESS_ID is not"),
        ({"MESHKIT_NUM_PROCESSES": "two"}, r"MESHKIT_NUM_PROCESSES=two is no whole number(.|\n)*try MESHKIT_NUM_PROC"),
        ({"MESHKIT_NUM_PROCESSES": "0"}, "MESHKIT_NUM_PROCESSES=0 is no number of processes"),
        ({"MESHKIT_PROCESS_ID": "-1"}, "MESHKIT_PROCESS_ID=-1 is no whole number"),
        ({"MESHKIT_PROCESS_ID": "2"}, r"MESHKIT_PROCESS_ID=2 is none of the 2 processes(.|\n)*try .*0 to 1"),
        ({"MESHKIT_COORDINATOR": "10.0.0.1"}, r"MESHKIT_COORDINATOR is '10\.0\.0\.1', not host:port"),
        ({"MESHKIT_COORDINATOR": ":1234"}, "not host:port"),
        ({"MESHKIT_COORDINATOR": "host:0"}, "not host:port"),
        ({"MESHKIT_COORDINATOR": "host:70000"}, "not host:port"),
        ({"MESHKIT_COORDINATOR": "http://host:80"}, "not host:port"),
        ({"MESHKIT_LOCAL_DEVICE_IDS": "0,,1"}, "MESHKIT_LOCAL_DEVICE_IDS=0,,1 is no list of numbers"),
        ({"MESHKIT_LOCAL_DEVICE_IDS": "0,1,1"}, r"names a device twice(.|\n)*MESHKIT_LOCAL_DEVICE_IDS=0,1$"),
        ({"MESHKIT_ATTEMPT": "first"}, "MESHKIT_ATTEMPT=first is no whole number"),
    ],
)
def test_each_mistake_is_one_error(change, match):
    environment = {name: value for name, value in (GOOD | change).items() if value is not None}
    with pytest.raises(ConfigError, match=match) as error:
        read_gang(environment)
    assert error.value.at == "environment"


def test_jax_that_runs_already_cannot_join():
    import jax

    jax.devices()
    with pytest.raises(ConfigError, match=r"jax has already started, so process 1 can no longer join the other 1\."):
        join_gang(GOOD)


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [
        ("127.0.0.1:4321", "127.0.0.1:4321"),
        ("localhost:4321", "127.0.0.1:4321"),
        ("192.0.2.1:4321", None),  # Nobody has this address: a proxy or a NAT is in front of this machine.
        ("no-such-host.invalid:4321", None),
    ],
)
def test_the_coordinator_listens_on_one_interface(coordinator, address, monkeypatch):
    known = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1", "192.0.2.1": "192.0.2.1"}

    def look_up(host, port, **_):
        if host not in known:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert bind_address(coordinator) == address


def test_a_name_that_is_a_loopback_address_here_is_not_what_the_others_mean(monkeypatch):
    """Debian's /etc/hosts gives the machine's own name the address 127.0.1.1."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 4321))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert bind_address("this-machine:4321") is None


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(
    ("environment", "process", "size", "devices"),
    [
        (GOOD, 1, 2, None),  # The only process of a host drives all its GPUs.
        (GOOD | {"MESHKIT_LOCAL_DEVICE_IDS": "4,5"}, 1, 2, (4, 5)),
        (SLURM, 9, 16, (1,)),  # Each GPU has a process.
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_LOCALID": "0"}, 9, 16, None),
        ({"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
         | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MESHKIT_COORDINATOR": "10.0.0.1:1234"}, 9, 16, (1,)),
        ({"WORLD_SIZE": "16", "RANK": "9", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "1"}
         | {"MASTER_ADDR": "gpu003", "MASTER_PORT": "29500"}, 9, 16, (1,)),
        ({"JOB_COMPLETION_INDEX": "1"} | {n: v for n, v in GOOD.items() if n != "MESHKIT_PROCESS_ID"}, 1, 2, None),
    ],
)  # fmt: skip
def test_jax_is_told_everything(environment, process, size, devices, monkeypatch):
    """jax then detects nothing by itself and reaches the coordinator without a proxy."""
    import jax
    from jax._src import xla_bridge

    told, proxies = {}, []

    def initialize(**arguments):
        told.update(arguments)
        proxies.extend(name for name in os.environ if name.lower().endswith("_proxy"))

    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_grpc_proxy", "login1")
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(gang_module, "call_roll", lambda gang, *_, **__: Attendance(1, {0: "a"}, {0: 0.0}, {}, {}))
    monkeypatch.setattr(gang_module, "wait_for_name", lambda *_: None)
    monkeypatch.setattr(gang_module, "bind_address", lambda address: f"192.0.2.7:{address.rsplit(':', 1)[1]}")
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    before = jax.config.jax_cpu_collectives_implementation
    try:
        assert join_gang(environment) == (process, size)
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)
    assert (told["process_id"], told["num_processes"], told["local_device_ids"]) == (process, size, devices)
    assert told["cluster_detection_method"] == "deactivate"
    assert told["coordinator_bind_address"] is None  # Only process 0 binds an interface.
    assert told["initialization_timeout"] == 300
    assert not any(name.startswith("mtls") for name in told)
    assert proxies == []
    assert os.environ["https_proxy"] == "http://proxy:3128"  # Everything else still uses the proxy.
    assert dict(os.environ)["no_grpc_proxy"] == f"login1,{told['coordinator_address'].rsplit(':', 1)[0]}"


def start(port, process, *arguments):
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MESHKIT_", "XLA_", "JAX_"))}
    # Nothing listens at this address.
    mine |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    mine |= {"MESHKIT_COORDINATOR": f"127.0.0.1:{port}", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": process}
    return subprocess.Popen(
        [sys.executable, "-m", "meshkit", *arguments, *(word for text in SETS for word in ("--set", text))],
        cwd=ROOT,
        env=mine,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow  # tests/verbs/bench/test_bench.py covers two processes by default.
@pytest.mark.multiprocess
def test_bench_over_two_processes_that_the_environment_names(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [
        "bench",
        "configs/experiments/llama_debug_cpu.toml",
        "--sizes",
        "1024",
        "--json",
        "--out",
        str(tmp_path),
    ]
    started = [start(port, process, *arguments) for process in ("0", "1")]
    try:
        outputs = [p.communicate(timeout=240) for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0, 0], "\n".join(text for pair in outputs for text in pair)
    printed = BenchReport.model_validate(json.loads(outputs[0][0]))  # Standard output holds nothing else.
    assert outputs[1][0] == ""
    assert printed == BenchReport.model_validate_json((tmp_path / "bench.json").read_text())
    assert (printed.devices.processes, printed.devices.count, printed.wrong) == (2, 8, 0)
    found = calibration.load(tmp_path / "calibration.toml")
    assert found.measured_on is not None
    assert found.measured_on.devices == 8
