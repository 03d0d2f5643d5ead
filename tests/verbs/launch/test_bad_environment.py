"""Test wrong environments: each ends in time with one message with numbers and exit code 2 or 4, and nothing hangs.

The first half needs one process, which does not get as far as jax. In the second half real processes of `meshkit train`
meet, or fail to. There each has to be gone within 30 s of its start, and gets twice that, or more where this machine is
so busy that starting a process alone takes long.
"""

import functools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.distributed.roll_call import free_port

ROOT = Path(__file__).resolve().parents[3]
EXPERIMENT = "configs/experiments/llama_debug_cpu.toml"
GOOD = {"MESHKIT_COORDINATOR": "127.0.0.1:61000", "MESHKIT_NUM_PROCESSES": "8", "MESHKIT_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "gpu[003-006]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "3"}
TORCHRUN = {"WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "gpu003", "MASTER_PORT": "29500"}
POD = {"JOB_COMPLETION_INDEX": "3"}
LIMIT_S = 30  # A person may have to wait this long.


def bare():
    """Return this environment without what any launcher or jax would read in it."""
    ours = ("MESHKIT_", "XLA_", "JAX_", "SLURM_", "OMPI_", "PMI")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        name: value
        for name, value in kept.items()
        if name not in (*TORCHRUN, *POD, "LOCAL_RANK", "KUBERNETES_SERVICE_HOST")
    }


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"MESHKIT_COORDINATOR": None}, "MESHKIT_NUM_PROCESSES is set, but MESHKIT_COORDINATOR is not"),
        ({"MESHKIT_NUM_PROCESSES": None}, "but MESHKIT_NUM_PROCESSES is not"),
        ({"MESHKIT_PROCESS_ID": None}, "but MESHKIT_PROCESS_ID is not"),
        ({"MESHKIT_PROCESS_ID": "three"}, "MESHKIT_PROCESS_ID=three is no whole number"),
        ({"MESHKIT_PROCESS_ID": "1e0"}, "MESHKIT_PROCESS_ID=1e0 is no whole number"),
        ({"MESHKIT_PROCESS_ID": "8"}, "MESHKIT_PROCESS_ID=8 is none of the 8 processes"),
        ({"MESHKIT_NUM_PROCESSES": "0"}, "MESHKIT_NUM_PROCESSES=0 is no number of processes"),
        ({"MESHKIT_COORDINATOR": "127.0.0.1"}, "not host:port"),
        ({"MESHKIT_COORDINATOR": "127.0.0.1:99999"}, "not host:port"),
        ({"MESHKIT_LOCAL_DEVICE_IDS": "0;1"}, "MESHKIT_LOCAL_DEVICE_IDS=0;1 is no list of numbers"),
        ({"MESHKIT_ATTEMPT": "-1"}, "MESHKIT_ATTEMPT=-1 is no whole number"),
        ({"MESHKIT_JOIN_TIMEOUT": "soon"}, "MESHKIT_JOIN_TIMEOUT=soon is no whole number of seconds"),
        ({"MESHKIT_MTLS": "/nowhere"}, "ca.pem cannot be read"),
        (SLURM | {"SLURM_PROCID": "4"}, "MESHKIT_PROCESS_ID=3, but SLURM_PROCID=4 (SLURM)"),
        (SLURM | {"SLURM_NTASKS": "16"}, "MESHKIT_NUM_PROCESSES=8, but SLURM_NTASKS=16 (SLURM)"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "but OMPI_COMM_WORLD_RANK=4 (OpenMPI)"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "but OMPI_COMM_WORLD_SIZE=4 (OpenMPI)"),
        (TORCHRUN | {"RANK": "0"}, "but RANK=0 (torchrun)"),
        (TORCHRUN | {"WORLD_SIZE": "2"}, "but WORLD_SIZE=2 (torchrun)"),
        (POD | {"JOB_COMPLETION_INDEX": "5"}, "but JOB_COMPLETION_INDEX=5 (Kubernetes)"),
        (dict.fromkeys(GOOD) | OPEN_MPI, "OpenMPI started this process"),
        (dict.fromkeys(GOOD) | SLURM | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9 is none of the 8 processes"),
    ],
)
def test_what_one_process_sees_for_itself(environment, says, monkeypatch, capsys, tmp_path):
    from jax._src import xla_bridge

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr("meshkit.distributed.join.wait_for_name", None)  # The process does not get so far.
    monkeypatch.setattr("meshkit.sharding.mesh.prepare_platform", lambda *_, **__: None)
    monkeypatch.setattr("meshkit.distributed.join.keep_stdout", lambda: None)
    monkeypatch.setattr("meshkit.cli.leave_gang", lambda code: None)
    for name in set(os.environ) - set(bare()):
        if not name.startswith(("XLA_", "JAX_")):
            monkeypatch.delenv(name)
    for name, value in (GOOD | environment).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("MESHKIT_CACHE", "off")
    assert main(["train", EXPERIMENT, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert said.count("meshkit: ") == 1
    assert "\n  try " in said


LATE = """
import sys, time
real = time.time
time.time = lambda: real() + 3600
from meshkit.cli import main
sys.exit(main(sys.argv[1:]))
"""
SETS = [
    'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}',
    *("mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4", "profile.steps=", "train.steps=4"),
]


def start(folder, process, coordinator, size=2, *, code="", **more):
    variables = {"MESHKIT_COORDINATOR": coordinator, "MESHKIT_NUM_PROCESSES": size, "MESHKIT_PROCESS_ID": process}
    virtual = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return subprocess.Popen(
        [sys.executable, *(("-c", code) if code else ("-m", "meshkit")), "train", EXPERIMENT, "--out", str(folder)]
        + [word for text in SETS for word in ("--set", text)],
        cwd=ROOT,
        env=bare() | virtual | {name: str(value) for name, value in (variables | more).items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@functools.cache
def limit_s():
    """Return twice the limit, or more on a busy machine: ten times what a process takes to say what is wrong."""
    began = time.monotonic()
    process = start("runs/none", "", "127.0.0.1:61000")
    process.communicate(timeout=200)
    assert process.returncode == 2
    return max(2 * LIMIT_S, LIMIT_S + 10 * (time.monotonic() - began))


def ends(*processes):
    """Return the exit code and the words of each process, all of which have to be over in time."""
    deadline = time.monotonic() + limit_s()
    try:
        said = [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for text in said:
        assert "Traceback" not in text
        assert "Check failure" not in text
        assert text.count("meshkit: ") - text.count("s so far, ") == 1, text
        assert "\n  try " in text
    return list(zip((process.returncode for process in processes), said))


def here():
    return f"127.0.0.1:{free_port()}"


real = lambda test: pytest.mark.slow(pytest.mark.multiprocess(test))


@real
@pytest.mark.parametrize(("numbers", "size", "twice"), [((0, 1, 1), 3, 1), ((0, 0), 2, 0)])
def test_two_processes_with_one_number(tmp_path, numbers, size, twice):
    address = here()
    for code, said in ends(*(start(tmp_path, number, address, size) for number in numbers)):
        assert (code, f"2 processes say that they are number {twice}: on " in said) == (2, True), said


@real
def test_fewer_processes_than_said(tmp_path):
    address = here()
    for code, said in ends(*(start(tmp_path, number, address, 3) for number in range(2))):
        assert (code, "1 of 3 processes did not come: 2." in said) == (4, True), said


@real
def test_more_processes_than_said(tmp_path):
    address = here()
    (code, said), *others = ends(
        start(tmp_path, 2, address, 2), start(tmp_path, 0, address, 2), start(tmp_path, 1, address, 3)
    )
    assert (code, "MESHKIT_PROCESS_ID=2 is none of the 2 processes" in said) == (2, True), said
    for code, said in others:
        assert (code, "process 1 says that the job has 3 processes, and process 0 says 2" in said) == (2, True), said


@real
def test_a_port_that_something_else_listens_on(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        first, second = ends(*(start(tmp_path, number, address) for number in range(2)))
    assert (first[0], f"process 0 cannot listen on {address}: Address already in use" in first[1]) == (4, True), first
    assert (second[0], "what listens there does not answer" in second[1]) == (4, True), second


@real
def test_a_clock_that_is_off(tmp_path):
    address = here()
    for code, said in ends(start(tmp_path, 0, address), start(tmp_path, 1, address, code=LATE)):
        assert code == 2, said
        assert "the clock of process 1 (" in said
        assert " s off from that of process 0 (" in said


@real
@pytest.mark.parametrize("process", [0, 1])
def test_a_coordinator_that_nobody_knows(tmp_path, process):
    ((code, said),) = ends(start(tmp_path, process, "no-such-host.invalid:61000"))
    assert (code, "knows no host by the name of the coordinator no-such-host.invalid:61000" in said) == (2, True), said


@real
@pytest.mark.parametrize(
    ("coordinator", "more"), [("127.0.0.1:{}", {}), ("192.0.2.1:{}", {"MESHKIT_JOIN_TIMEOUT": 15})]
)
def test_a_coordinator_that_cannot_be_reached(tmp_path, coordinator, more):
    """The second address belongs to a network for documentation, where one waits 300 s unless told otherwise."""
    address = coordinator.format(free_port())
    ((code, said),) = ends(start(tmp_path, 1, address, **more))
    assert (code, f"process 1 of 2 did not reach the coordinator {address} within" in said) == (4, True), said


@real
def test_whom_a_process_waits_for_is_said_in_time(tmp_path):
    """Others may come minutes later, so the wait has not ended after 30 s, but a line names them."""
    process = start(tmp_path, 0, here(), 3, MESHKIT_JOIN_TIMEOUT=300)
    try:
        said = ""
        deadline = time.monotonic() + limit_s()
        while "waiting for" not in said and time.monotonic() < deadline:
            said = process.stderr.readline()
    finally:
        process.kill()
        process.wait()
    assert said.startswith("meshkit: waiting for 2 of 3 processes: 1, 2 (1")
    assert said.endswith("s so far, 300 s at most)\n")


@real
def test_processes_of_which_one_alone_has_certificates(tmp_path):
    from meshkit.distributed.certificates import make_certificates, write_certificates

    write_certificates(tmp_path / "mtls", make_certificates(["127.0.0.1"]))
    address = here()
    first, second = ends(start(tmp_path, 0, address, MESHKIT_MTLS=tmp_path / "mtls"), start(tmp_path, 1, address))
    assert (first[0], "1 of 2 processes did not come: 1." in first[1]) == (4, True), first
    assert (second[0], "did not reach the coordinator" in second[1]) == (4, True), second
