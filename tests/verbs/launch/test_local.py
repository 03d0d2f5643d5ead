"""Test what `meshkit launch local` gives each process, and what it refuses, without a process that imports jax."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.distributed.environment import read_gang
from meshkit.distributed.roll_call import free_port
from meshkit.errors import ConfigError
from meshkit.verbs.launch.jobs import Job, check_share, job_name
from meshkit.verbs.launch.local import LocalPart, check_part
from meshkit.verbs.launch.processes import Ending

ROOT = Path(__file__).resolve().parents[3]
DEBUG = ROOT / "configs/experiments/llama_debug_cpu.toml"


def test_the_environment_of_virtual_devices():
    base = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8", "PATH": "/bin", "SLURM_PROCID": "5"}
    environments = LocalPart(2, 4, virtual=True).environments(3, base=base)
    gangs = [read_gang(environment) for environment in environments]
    assert [(g.process_id, g.num_processes, g.local_device_ids, g.attempt) for g in gangs] == [
        (0, 2, None, 3),
        (1, 2, None, 3),
    ]
    assert {g.coordinator for g in gangs} == {gangs[0].coordinator}
    assert gangs[0].coordinator.startswith("127.0.0.1:")
    assert environments[1]["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=4"
    assert "SLURM_PROCID" not in environments[0]
    assert environments[0]["PATH"] == "/bin"


@pytest.mark.parametrize(("processes", "devices", "ids"), [(8, 1, [(i,) for i in range(8)]), (1, 8, [tuple(range(8))])])
def test_one_process_for_each_gpu_and_one_for_all(processes, devices, ids):
    base = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    environments = LocalPart(processes, devices).environments(0, base=base)
    assert [read_gang(environment).local_device_ids for environment in environments] == ids
    # All processes see all GPUs.
    assert all(e["CUDA_VISIBLE_DEVICES"] == base["CUDA_VISIBLE_DEVICES"] for e in environments)


def test_every_attempt_has_a_port_of_its_own():
    part = LocalPart(1, 1)
    ports = {part.environments(i, base={})[0]["MESHKIT_COORDINATOR"] for i in range(8)}
    assert len(ports) > 4  # Of 8 random ports of 4000, fewer than 5 differ in 1 of 10^9 runs.


def test_a_port_in_use_is_not_chosen(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        offers = iter([port, 0])
        monkeypatch.setattr("meshkit.distributed.roll_call.FIRST_PORT", 0)
        monkeypatch.setattr("meshkit.distributed.roll_call.secrets.randbelow", lambda _: next(offers))
        assert free_port() == 0


def test_one_host_of_several():
    part = LocalPart(8, 1, hosts=4, host_index=2, coordinator="host0:61000", attempt=5)
    gangs = [read_gang(environment) for environment in part.environments(0, base={})]
    assert [g.process_id for g in gangs] == list(range(16, 24))
    assert {(g.coordinator, g.num_processes, g.attempt) for g in gangs} == {("host0:61000", 32, 5)}
    assert gangs[3].local_device_ids == (3,)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        (LocalPart(2, 8), r"are 16, but cluster 'cpu8' has 8(.|\n)*--processes 2 --devices 4"),
        (LocalPart(3, 2), r"3 processes x 2 devices are 6(.|\n)*processes that divides 8, or a cluster of 6"),
        (LocalPart(2, 2, hosts=2), "2 hosts need one coordinator"),
        (LocalPart(2, 2, hosts=2, host_index=2, coordinator="a:1"), "host 2 of 2 .* is not a valid part of a job"),
        (LocalPart(2, 4, hosts=2, coordinator="a:1"), "2 hosts x 2 processes x 4 devices are 16"),
        (LocalPart(2, 4, hosts=2, coordinator="a"), "--coordinator is 'a', not host:port"),
        (LocalPart(2, 2, hosts=2, coordinator="a:1", mtls="m"), "several hosts must share them"),
    ],
)
def test_what_is_no_part_of_the_job(part, match):
    with pytest.raises(ConfigError, match=match):
        check_part(part, load(DEBUG))


def test_devices_that_are():
    for part in (LocalPart(2, 4), LocalPart(8, 1), LocalPart(2, 2, hosts=2, coordinator="a:1")):
        check_part(part, load(DEBUG))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3_70b", "llama3-70b"),
        ("My Run!", "my-run"),
        ("3d", "job-3d"),
        ("___", "job"),
        ("x" * 99, "x" * 40),
    ],
)
def test_names_that_every_launcher_takes(text, name):
    assert job_name(text) == name


def test_the_command_of_a_process():
    job = Job("a", "dir/a b.toml", ("mesh.x=2", 'y="$(z)"'), "runs/a", 1, 8)
    assert job.command(("python3",)) == (
        *("python3", "-m", "meshkit", "train", "dir/a b.toml"),
        *("--set", "mesh.x=2", "--set", 'y="$(z)"', "--out", "runs/a"),
    )
    assert replace(job, hosts=4, processes_per_host=8).num_processes == 32


@pytest.mark.parametrize("processes", [0, 3, 16])
def test_uneven_shares(processes):
    with pytest.raises(ConfigError, match=r"cannot share 8 GPUs of a host evenly(.|\n)*per-host 1, 2, 4, 8"):
        check_share(processes, 8, "GPUs of a host", "--processes-per-host")


@pytest.mark.parametrize(
    ("code", "final", "restart", "text"),
    [
        (0, True, False, "exit code 0 (done)"),
        (1, False, True, "exit code 1 (an exception; its traceback is in the log)"),
        (2, True, False, "exit code 2 (what the user gave is wrong)"),
        (4, False, True, "exit code 4 (the run failed and may be restarted)"),
        (75, False, False, "exit code 75 (preempted; a checkpoint is saved)"),
        (130, True, False, "exit code 130 (interrupted)"),
        (-9, False, True, "killed by SIGKILL (out of memory, or killed from outside)"),
        (-15, False, True, "killed by SIGTERM"),
        (99, False, True, "exit code 99 (unknown)"),
    ],
)
def test_what_an_end_means(code, final, restart, text):
    ending = Ending(code)
    assert (ending.is_final, ending.is_restartable, str(ending)) == (final, restart, text)


def run(*arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "meshkit", "launch", *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_processes_of_an_attempt_share_a_secret_that_is_new_each_time():
    secrets = [[read_gang(e).secret for e in LocalPart(2, 4).environments(i, base={})] for i in (0, 1)]
    (first, second), (third, _) = secrets
    assert first == second != third
    assert len(first) == 64


def test_dry_run_prints_the_command_of_each_process():
    done = run("local", "--processes", "2", "--devices", "4", str(DEBUG), "--out", "runs/x", "--dry-run")
    assert done.returncode == 0, done.stderr
    secret, *lines = done.stdout.splitlines()
    assert secret == 'export MESHKIT_SECRET="$(openssl rand -hex 32)"'
    assert [f"MESHKIT_PROCESS_ID={i}" in line for i, line in enumerate(lines)] == [True, True]
    assert all(line.endswith("llama_debug_cpu.toml --out runs/x") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["local", "--processes", "2", "--devices", "3", str(DEBUG)], "are 6, but cluster 'cpu8' has 8"),
        (["local", "--processes", "2", "--devices", "4", "none.toml"], "none.toml"),
        (["slurm", str(DEBUG), "--dry-run"], "virtual CPU devices"),
        (["local", str(DEBUG)], "--processes"),
    ],
)
def test_what_is_wrong_is_2_and_one_message(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
