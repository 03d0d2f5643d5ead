"""The environment of a job of several processes: what it may say, and two processes that join by it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.bench.schema import BenchReport
from meshkit.errors import ConfigError
from meshkit.sharding.gang import Gang, bind_address, is_first_process, join_gang, read_gang
from meshkit.spec import calibration

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
        ("192.0.2.1:4321", None),  # of nobody: a proxy or a NAT in front of this machine
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
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 4321))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert bind_address("this-machine:4321") is None


def start(port, process, *arguments):
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("MESHKIT_", "XLA_", "JAX_"))}
    mine |= {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}  # nothing listens there
    mine |= {"MESHKIT_COORDINATOR": f"127.0.0.1:{port}", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": process}
    return subprocess.Popen(
        [sys.executable, "-m", "meshkit", *arguments, *(word for text in SETS for word in ("--set", text))],
        cwd=ROOT,
        env=mine,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
    printed = BenchReport.model_validate(json.loads(outputs[0][0]))  # and nothing else on standard output
    assert outputs[1][0] == ""
    assert printed == BenchReport.model_validate_json((tmp_path / "bench.json").read_text())
    assert (printed.devices.processes, printed.devices.count, printed.wrong) == (2, 8, 0)
    found = calibration.load(tmp_path / "calibration.toml")
    assert found.measured_on is not None
    assert found.measured_on.devices == 8
