"""Test the environment contract: what is emitted is read back, and other launchers' variables complete it or stop."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.distributed.environment import (
    FIRST_PORT,
    NUM_PORTS,
    Gang,
    derived_port,
    first_host,
    read_gang,
    share_of_devices,
    without_launchers,
)
from meshkit.errors import ConfigError

OURS = {"MESHKIT_COORDINATOR": "10.0.0.1:1234", "MESHKIT_NUM_PROCESSES": "8", "MESHKIT_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-006]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}
TORCHRUN = {
    "WORLD_SIZE": "8",
    "RANK": "3",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "gpu003",
    "MASTER_PORT": "29500",
}
POD = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
COORDINATOR = {"MESHKIT_COORDINATOR": "10.0.0.1:1234"}


@given(
    st.integers(1, 10_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
    st.none() | st.lists(st.integers(0, 71), min_size=1, max_size=8, unique=True).map(tuple),
    st.integers(0, 999),
)
def test_what_is_emitted_is_read_back(numbers, devices, attempt):
    gang = Gang("host-0.jobs:61000", *numbers, devices, attempt)
    assert read_gang(gang.emit()) == gang


@pytest.mark.parametrize("more", [SLURM, OPEN_MPI, TORCHRUN, POD, {"PMI_SIZE": "8", "PMI_RANK": "3"}])
def test_launchers_that_agree_change_nothing(more):
    gang = read_gang(OURS | more)
    assert (gang.coordinator, gang.num_processes, gang.process_id) == ("10.0.0.1:1234", 8, 3)


@pytest.mark.parametrize(
    ("environment", "gang"),
    [
        (SLURM, Gang(f"gpu003:{derived_port('77', '0', '')}", 8, 3, (1,))),
        (SLURM | {"SLURM_RESTART_COUNT": "2"}, Gang(f"gpu003:{derived_port('77', '0', '2')}", 8, 3, (1,), 2)),
        (SLURM | {"SLURM_GPUS_ON_NODE": "8"}, Gang(f"gpu003:{derived_port('77', '0', '')}", 8, 3, (4, 5, 6, 7))),
        # The process is already bound to its GPU.
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0"}, Gang(f"gpu003:{derived_port('77', '0', '')}", 8, 3)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)"},
            Gang(f"gpu003:{derived_port('77', '0', '')}", 8, 3),  # The only process of a host has all its GPUs.
        ),
        (SLURM | {"PMIX_RANK": "3"}, Gang(f"gpu003:{derived_port('77', '0', '')}", 8, 3, (1,))),
        (SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"}, Gang(f"gpu003:{derived_port('77', '0', '')}", 8, 3, (1,))),
        (TORCHRUN, Gang("gpu003:29500", 8, 3)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"},
            Gang("gpu003:29501", 8, 3, None, 1),  # torchrun's own store already uses the port.
        ),
        (TORCHRUN | {"MASTER_ADDR": "fd00::1"}, Gang("[fd00::1]:29500", 8, 3)),
        # The inner launcher counts.
        (TORCHRUN | SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Gang("gpu003:29500", 8, 3)),
        (OPEN_MPI | COORDINATOR, Gang("10.0.0.1:1234", 8, 3, (3,))),
        (OPEN_MPI | SLURM | {"SLURM_NTASKS": "2"} | COORDINATOR, Gang("10.0.0.1:1234", 8, 3, (3,))),
        (POD | COORDINATOR | {"MESHKIT_NUM_PROCESSES": "8"}, Gang("10.0.0.1:1234", 8, 3)),
        (SLURM | COORDINATOR, Gang("10.0.0.1:1234", 8, 3, (1,))),
        (SLURM | {"MESHKIT_LOCAL_DEVICE_IDS": "6,7"} | COORDINATOR, Gang("10.0.0.1:1234", 8, 3, (6, 7))),
    ],
)
def test_other_launchers_complete_the_contract(environment, gang):
    assert read_gang(environment) == gang


@pytest.mark.parametrize(
    "environment",
    [
        POD,  # Each pod of an Indexed Job may run alone.
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},  # This is an interactive shell.
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},  # This is a batch script.
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},
        {"RANK": "3"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_a_process_alone(environment):
    assert read_gang(environment) is None


@pytest.mark.parametrize(
    ("environment", "match"),
    [
        (
            OURS | SLURM | {"SLURM_PROCID": "4"},
            r"MESHKIT_PROCESS_ID=3, but SLURM_PROCID=4 \(SLURM\)(.|\n)*env -u",
        ),
        (OURS | SLURM | {"SLURM_NTASKS": "16"}, r"MESHKIT_NUM_PROCESSES=8, but SLURM_NTASKS=16 \(SLURM\)"),
        (OURS | SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, "MESHKIT_NUM_PROCESSES=8, but SLURM_STEP_NUM_TASKS=4"),
        (OURS | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "MESHKIT_NUM_PROCESSES=8, but OMPI_COMM_WORLD_SIZE=4"),
        (OURS | TORCHRUN | {"RANK": "0"}, r"MESHKIT_PROCESS_ID=3, but RANK=0 \(torchrun\)"),
        (OURS | POD | {"JOB_COMPLETION_INDEX": "5"}, "MESHKIT_PROCESS_ID=3, but JOB_COMPLETION_INDEX=5"),
        (OURS | {"PMIX_RANK": "5"}, r"MESHKIT_PROCESS_ID=3, but PMIX_RANK=5 \(PMIx\)"),
        (SLURM | {"PMIX_RANK": "5"}, "PMIX_RANK=5, but SLURM_PROCID=3"),
        (OPEN_MPI, "OpenMPI started this process .*, and nothing says MESHKIT_COORDINATOR"),
        ({"PMIX_RANK": "0"}, r"PMIx started this process .*, and nothing says MESHKIT_COORDINATOR"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID=x is no whole number"),
        (SLURM | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID=-1 is no whole number"),
        (SLURM | {"SLURM_PROCID": "9"}, "SLURM_PROCID=9 is none of the 8 processes of SLURM_NTASKS"),
        (SLURM | {"SLURM_STEP_NODELIST": "[1-"}, r"SLURM_STEP_NODELIST=\[1- is no list of hosts"),
        (TORCHRUN | {"MASTER_PORT": "none"}, "MASTER_PORT=none is no whole number"),
        (TORCHRUN | {"MASTER_ADDR": "a b"}, "not host:port"),
    ],
)
def test_each_disagreement_is_one_error_with_both_values(environment, match):
    with pytest.raises(ConfigError, match=match) as error:
        read_gang(environment)
    assert error.value.at == "environment"
    assert error.value.hint


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[12]", "gpu12"),
        ("rack1-gpu[08,10]", "rack1-gpu08"),
        ("a,b", "a"),
        ("n[1-4]-ib,x", "n1-ib"),
        ("host.domain", "host.domain"),
        ("r[1,2]n[03-04],x", "r1n03"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(
    ("local", "size", "visible", "ids"),
    [(0, 1, 8, None), (3, 8, 8, (3,)), (1, 2, 8, (4, 5, 6, 7)), (3, 8, None, (3,)), (3, 8, 1, None), (1, 3, 8, (2, 3))],
)
def test_the_share_of_a_process(local, size, visible, ids):
    assert share_of_devices(local, size, visible) == ids


def test_derived_ports_are_no_ephemeral_ones_and_differ_between_steps():
    ports = {derived_port("77", str(step), "") for step in range(20)}
    assert all(FIRST_PORT <= port < FIRST_PORT + NUM_PORTS <= 65536 for port in ports)
    assert len(ports) > 15


def test_a_new_gang_inherits_nothing_of_an_old_one():
    left = without_launchers(OURS | SLURM | OPEN_MPI | TORCHRUN | POD | {"PATH": "/bin", "SLURM_JOB_ID": "77"})
    assert read_gang(left) is None
    assert left["PATH"] == "/bin"
    assert left["SLURM_JOB_ID"] == "77"


@pytest.mark.parametrize(("job", "code"), [(OURS, 0), ({}, 0), ({}, 1)])
@pytest.mark.parametrize("hangs", ["atexit.register(waits)", "threading.Thread(target=waits).start()"])
def test_an_end_that_hangs_is_ended_with_its_stacks(hangs, job, code):
    """The end may hang in jax's exit barrier or for storage; the limit starts when the main thread has ended."""
    program = f"""
import atexit, threading, time
from meshkit.distributed import environment
environment.END_S = 0.5
def waits(): time.sleep(600)
{hangs}
environment.leave_gang({code})
time.sleep(1.5)
print("gone on", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | job, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "gone on\n"
    assert "in waits" in done.stderr
