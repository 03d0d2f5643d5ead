"""Test a user's own training loop from the guide in a gang of two: one is killed, and the result is the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.distributed.roll_call import free_port
from meshkit.verbs.launch.jobs import command_name, make_job
from tests.runs.test_nccl_ras import in_json, serving, with_pids

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "own-loop.md").read_text(encoding="utf-8")
# This stands in front of the guide's script: process 1 kills itself at step 8 of the first attempt.
KILLED = """
import os, runpy, signal
import meshkit as mk
progress = mk.progress
def dies(step, **more):
    if (os.environ["MESHKIT_PROCESS_ID"], os.environ["MESHKIT_ATTEMPT"], step) == ("1", "0", 8):
        os.kill(os.getpid(), signal.SIGKILL)
    progress(step, **more)
mk.progress = dies
runpy.run_path("train.py")
"""


def launch(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "meshkit", "launch", "local", "--processes", "2", "--devices", "4"]
    return subprocess.run(
        [*command, "--out", "out", *options, "--", sys.executable, script],
        cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def test_a_loop_of_one_s_own_is_killed_and_comes_to_the_same(tmp_path):
    found = re.search(r"```python\n(# train\.py\n.*?)```", PAGE, re.DOTALL)
    assert found is not None
    (tmp_path / "train.py").write_text(found[1], encoding="utf-8")
    (tmp_path / "killed.py").write_text(KILLED, encoding="utf-8")
    done = launch(tmp_path, "killed.py")
    assert done.returncode == 0, done.stderr
    assert "process 1 ended first: killed by SIGKILL" in done.stderr
    assert re.search(r"restart 1 of 3; step [78] was reached", done.stderr)
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, 21))
    log = (tmp_path / "out" / "logs" / "attempt1" / "rank0.log").read_text()
    # The script runs alone, without a launcher, on as many devices.
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    alone = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.strip().startswith("loss 0.")
    assert alone.stdout.strip() in log


def test_what_raises_keeps_nobody_waiting_and_is_shown(tmp_path):
    (tmp_path / "train.py").write_text(
        "import meshkit as mk\nprocess, n = mk.init_distributed()\nimport jax\n"
        "from jax.experimental import multihost_utils\nmk.progress(1)\n"
        "if process == 1: raise ValueError('the data are wrong')\n"
        "multihost_utils.sync_global_devices('never')\n"
    )
    done = launch(tmp_path, "train.py", "--max-restarts", "0")
    assert done.returncode == 4
    assert "process 1 ended first: exit code 1" in done.stderr
    assert "ValueError: the data are wrong" in done.stderr


def test_a_script_that_says_nothing_is_watched_by_its_exit_code(tmp_path):
    (tmp_path / "train.py").write_text("import time; time.sleep(3)\n")
    # A training, which says what it does, would be stuck after a start of 0.3 s.
    done = launch(tmp_path, "train.py", "--stall-timeout", "0.05")
    assert done.returncode == 0, done.stderr


def test_the_command_stands_behind_two_dashes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "--hosts", "4", "--dry-run", "--", "python", "train.py", "--lr", "a b"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=4" in script
    assert """command=(env MESHKIT_OUT=runs/train "$python" train.py --lr 'a b')""" in script
    assert main(["launch", "slurm", "--dry-run", "--", "python", "train.py"]) == 2
    assert "the number of hosts for the command" in capsys.readouterr().err
    assert main(["launch", "slurm", "--dry-run"]) == 2
    assert "nothing to launch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "name"), [(("python", "/a/My_Train.py"), "my-train"), (("./run",), "run"), (("bash", "x.sh"), "x")]
)
def test_a_job_is_named_by_its_script(command, name):
    job = make_job(None, (), None, 8, 3, own=command, machines=(2, 8))
    assert (job.name, command_name(command), job.out) == (name, name, f"runs/{name}")
    assert job.num_processes == 16


HANGS = """
import os, time
import meshkit as mk
process, _ = mk.init_distributed()
def waits_for_a_file():
    while True:
        time.sleep(0.1)
for step in range(1, 4):
    mk.progress(step, phase="data")
    if process == 1 and step == 3:
        waits_for_a_file()
    mk.progress(step)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_loop_of_one_s_own_that_hangs_is_named_where_no_launcher_watches_it(tmp_path):
    """NCCL's service, which a test answers for, is asked about the processes, which lead no session."""
    both = []
    answer = lambda: with_pids(in_json({0: 1042, 1: 1041}), {process.pid: i for i, process in enumerate(both)})
    with serving(lambda channel: channel.sendall(answer().encode())) as (ras, _):
        text = run_pair(tmp_path, HANGS, both, **ras, JAX_PLATFORMS="")
    assert {process.returncode for process in both} <= {4, -6}  # One may lose the coordinator first
    assert "process 1 has not entered step 3, in which process 0 waits" in text
    assert "in phase 'data' at step 3" in text
    assert "in waits_for_a_file" in text
    assert "NCCL's RAS: communicator 0xabc123 of 2 ranks: rank 1 (process 1) has launched 1041 AllReduce" in text


def test_where_no_launcher_watches_the_others_end_soon_after_one_that_has_failed(tmp_path):
    """jax itself notices after 100 s that a process other than the first is gone."""
    script = """
import time
import meshkit as mk
process, _ = mk.init_distributed()
mk.progress(1)
if process == 1:
    raise ValueError("the data are wrong")
time.sleep(600)
"""
    both, began = [], time.monotonic()
    text = run_pair(tmp_path, script, both, MESHKIT_STALL_TIMEOUT="600")
    assert time.monotonic() - began < 90
    assert [process.returncode for process in both] == [4, 1]
    assert "ValueError: the data are wrong\n" in text
    assert "process 1 ends after ValueError: the data are wrong (train.py:7); the others end, too" in text
    assert "process 1 has failed, and its log says why; this process ends, too" in text


def run_pair(folder, script, both, **variables):
    """Runs a job of two processes that no launcher watches, adds them to `both`, and returns what they print."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    job = {"MESHKIT_COORDINATOR": f"127.0.0.1:{free_port()}", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_OUT": "out"}
    told = {"MESHKIT_SECRET": "s" * 32, "MESHKIT_STALL_TIMEOUT": "4", "PYTHONPATH": os.pathsep.join(sys.path)}
    for process in range(2):
        env = {**os.environ, **job, **told, **variables, "MESHKIT_PROCESS_ID": str(process)}
        command = [sys.executable, "train.py"]
        both.append(subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True))
    return "\n".join(process.communicate(timeout=120)[1] for process in both)
