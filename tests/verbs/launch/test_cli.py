"""Test `meshkit launch` on the command line: help shows examples, and a failed process leaves the gang."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from jax.errors import JaxRuntimeError

from meshkit.cli import main
from meshkit.distributed.environment import leave_gang, say_lost_process
from meshkit.verbs.launch.cli import launch_app

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = typer.main.get_command(launch_app).commands
GANG = {"MESHKIT_COORDINATOR": "10.0.0.1:1234", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": "1"}


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_help_shows_an_example(launcher, capsys):
    assert main(["launch", launcher, "--help"]) == 0
    assert f"Example: meshkit launch {launcher}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "command", "said"),
    [
        (("--max-restarts", "0"), (), "--max-restarts 0 forbids them"),
        ((), ("--", "true"), "a command follows `--`"),
        (("--host-index", "3"), (), "--host-index from 0 to 2"),
        (("--hosts", "2"), (), "--hosts must be 3, the number of hosts"),
    ],
)
def test_a_launch_that_cannot_do_what_the_launch_section_asks_is_refused(options, command, said, tmp_path, capsys):
    place = ("--hosts", "3", "--host-index", "1", "--coordinator", "localhost:61000", "--processes", "1")
    file = "benchmarks/kill_matrix/three_hosts.toml"
    words = ["launch", "local", *place, "--devices", "4", "--out", str(tmp_path / "run"), *options, file, *command]
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "code", "leaves"),
    [
        ({}, 4, False),
        (GANG, 0, False),
        (GANG, 75, False),
        (GANG, 4, True),
        (GANG, 1, True),
        (GANG | {"MESHKIT_NUM_PROCESSES": "1", "MESHKIT_PROCESS_ID": "0"}, 4, False),
        (GANG | {"MESHKIT_NUM_PROCESSES": "x"}, 2, False),
    ],
)
def test_a_failed_process_of_several_does_not_wait_for_the_others(environment, code, leaves, monkeypatch):
    for name in GANG:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    left, limited = [], []
    monkeypatch.setattr("os._exit", left.append)
    # A real thread would end this very process, minutes after its tests.
    limit = SimpleNamespace(start=lambda: limited.append(code))
    monkeypatch.setattr("threading.Thread", lambda **_: limit)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: limited.append(code))
    leave_gang(code)
    assert left == [code] * leaves
    assert limited == [code]  # however it ends


@pytest.mark.parametrize("words", [["--sbatch", "a=1", "--sbatch", "a=2"], ["--sbatch", "=x"]])
def test_options_with_names_have_each_once(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["launch", "slurm", "configs/experiments/llama3_70b.toml", "--dry-run", *words]) == 2
    assert "has no name, or a name that was given before" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "error", "code"),
    [
        (GANG, JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"), 4),
        (GANG, JaxRuntimeError("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited"), 4),
        (GANG, JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), 0),
        (GANG, ValueError("Gloo"), 0),
        ({}, JaxRuntimeError("UNKNOWN: Gloo all-reduce failed"), 0),
    ],
)
def test_an_error_that_another_process_caused_is_no_bug(environment, error, code, monkeypatch, capsys):
    for name in GANG:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert say_lost_process(error) == code
    assert ("process 1 of 2 has lost another one" in capsys.readouterr().err) == (code == 4)


def test_launching_needs_no_jax():
    code = """
import sys
import meshkit.verbs.launch.cli, meshkit.verbs.launch.jobs, meshkit.verbs.launch.jobs, meshkit.verbs.launch.local
sys.exit('jax' in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.multiprocess
def test_a_wrong_experiment_ends_the_gang_once_and_says_why(tmp_path):
    arguments = ["local", "--processes", "2", "--devices", "4", "configs/experiments/llama_debug_cpu.toml"]
    arguments += ["--set", "model.class=models.llama:Nope", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "meshkit", "launch", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "ended first: exit code 2 (what the user gave is wrong)" in done.stderr
    assert "Nope" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["attempt0", "launcher"]


def test_a_second_launcher_of_a_run_folder_ends_before_it_touches_anything(tmp_path, capsys):
    from meshkit.verbs.launch.local import only_launcher

    words = ["--processes", "2", "--devices", "4", "--mtls", "llama_debug_cpu", "--out", str(tmp_path)]
    with only_launcher(tmp_path / "logs", print):
        assert main(["launch", "local", *words]) == 2
    assert "another launcher uses this run folder: process" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["logs", "launcher"]
