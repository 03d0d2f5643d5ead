"""Test the scripts for SLURM and MPI: their text, and that they run with stand-ins for srun, scontrol and mpirun.

The files under launch/ are the renderings that launch/README.md says.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.errors import ConfigError
from meshkit.verbs.launch.jobs import Job, Slurm, mpi_script, slurm_script

ROOT = Path(__file__).resolve().parents[3]
RENDERED = re.findall(r"^\| \[(\S+)\]\(\1\) \| `meshkit (.*)` \|$", (ROOT / "launch/README.md").read_text(), re.M)
JOB = Job("llama", "e.toml", (), "run folder", hosts=2, gpus_per_host=8, max_restarts=2)

# It starts every task of a step on this machine, as srun and mpirun start them on theirs.
STARTER = """#!{python}
import os, pathlib, subprocess, sys
words = sys.argv[1:]
output = next((w.removeprefix("--output=") for w in words if w.startswith("--output=")), None)
start = words.index("bash" if "bash" in words else "python")
alone = "--ntasks=1" in words or ("-np", "1") in zip(words, words[1:])
command, tasks = words[start:], 1 if alone else int(os.environ["TASKS"])
pathlib.Path("started").open("a").write(" ".join(words[:start]) + "\\n")
children = []
for rank in range(tasks):
    mine = os.environ | {{"SLURM_PROCID": str(rank), "OMPI_COMM_WORLD_RANK": str(rank)}}
    mine |= {{"SLURM_LOCALID": str(rank % 8), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 8)}}
    log = open(output.replace("%t", str(rank)), "w") if output else None
    children.append(subprocess.Popen(command, env=mine, stdout=log, stderr=log))
import signal
signal.signal(signal.SIGTERM, lambda *_: [c.terminate() for c in children])
sys.exit(max(128 - c if c < 0 else c for c in [c.wait() for c in children]))
"""
# One process says what its environment is, then ends as the file `codes` says for this attempt.
PROCESS = """#!/usr/bin/env bash
case "$*" in *"launch certificates"*) exec {python} "$@" ;; esac
[ -z "${{MESHKIT_MTLS-}}" ] || {{ stat -c '%a %n' "$MESHKIT_MTLS" "$MESHKIT_MTLS"/*; exit 0; }}
devices="devices ${{MESHKIT_LOCAL_DEVICE_IDS-all}}"
echo "$MESHKIT_PROCESS_ID of $MESHKIT_NUM_PROCESSES, attempt $MESHKIT_ATTEMPT, $devices"
echo "$MESHKIT_COORDINATOR"
printf '%s\\n' "$@"
[ ! -e secrets ] || echo "${{MESHKIT_SECRET-}}" >>secrets
if [ "$MESHKIT_PROCESS_ID" -eq 0 ]; then [ ! -e next ] || bash next "$MESHKIT_ATTEMPT"; fi
[ ! -e wait ] || {{ trap 'exit 75' TERM; touch ready; while :; do sleep 0.05; done; }}
exit "$(sed -n "$((MESHKIT_ATTEMPT + 1))p" codes)"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a folder with the programs of a cluster."""
    programs = tmp_path / "bin"
    programs.mkdir()
    scontrol = '#!/bin/sh\n[ "$1" = requeue ] && echo "$2" > requeued\n[ "$1" = show ] && printf "gpu7\\ngpu8\\n"\n'
    texts = {
        "srun": STARTER.format(python=sys.executable),
        "python": PROCESS.format(python=sys.executable),
        "scontrol": scontrol,
    }
    for name, text in {**texts, "mpirun": texts["srun"]}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "hosts").write_text("# the machines\n\ngpu7 slots=8\ngpu8 slots=8\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path


def script(launcher, job):
    return (
        slurm_script(job, Slurm(python="python", mtls=False))
        if launcher == "slurm"
        else mpi_script(job, "hosts", python="python", mtls=False)
    )


def start(text, tasks=2):
    environment = os.environ | {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[7-8]", "TASKS": str(tasks)}
    return subprocess.Popen(["bash", "-c", text], env=environment, stderr=subprocess.PIPE, text=True)


def run(text, tasks=2):
    process = start(text, tasks)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_every_process_is_told_its_place(site, launcher):
    (site / "codes").write_text("0\n")
    job = replace(JOB, overrides=("mesh.x={a=1}", "name='it''s $HOME'"))
    assert run(script(launcher, job))[0] == 0
    for rank in range(2):
        place, coordinator, *arguments = (site / f"run folder/logs/attempt0/rank{rank}.log").read_text().splitlines()
        assert place == f"{rank} of 2, attempt 0, devices all"
        assert re.fullmatch(r"gpu7:6[1-4]\d{3}", coordinator)
        # The arguments are unchanged, word for word, because no shell has read them.
        assert arguments == [*job.command(())]


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_one_process_for_each_gpu_drives_it(site, launcher):
    (site / "codes").write_text("0\n")
    job = replace(JOB, processes_per_host=4)
    assert run(script(launcher, job), tasks=8)[0] == 0
    logs = [(site / f"run folder/logs/attempt0/rank{rank}.log").read_text().splitlines()[0] for rank in range(8)]
    assert logs[3] == "3 of 8, attempt 0, devices 6,7"


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_certificates_are_made_on_the_first_host_and_removed_with_the_job(site, launcher):
    text = {
        "slurm": slurm_script(JOB, Slurm({}, "image", python="python")),
        "mpi": mpi_script(JOB, "hosts", python="python"),
    }[launcher]
    code, said = run(text)
    assert code == 0, said
    make, *starts = (site / "started").read_text().splitlines()
    assert "gpu7" in make
    assert ("--container-image=image" in make) == (launcher == "slurm")  # The container has meshkit.
    assert len(starts) == 1
    for rank in range(2):
        listed = (site / f"run folder/logs/attempt0/rank{rank}.log").read_text()
        folder, *files = (line.split(" ", 1) for line in listed.splitlines())
        assert folder[0] == "700"
        assert [(mode, Path(name).name) for mode, name in files] == [
            ("600", "ca.pem"),
            ("600", "certificate.pem"),
            ("600", "key.pem"),
        ]
    assert not list(site.glob("run folder/mtls*"))
    assert launcher == "slurm" or "-x MESHKIT_MTLS" in starts[0]


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_without_certificates_they_share_a_secret_that_nothing_shows(site, launcher):
    (site / "codes").write_text("0\n0\n")
    (site / "secrets").touch()
    for _ in range(2):
        assert run(script(launcher, JOB))[0] == 0
    first, second, third, _ = shared = (site / "secrets").read_text().splitlines()
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in shared)
    assert first == second != third
    assert first not in (site / "started").read_text()


def test_a_job_whose_certificates_cannot_be_made_ends_at_once(site):
    (site / "run folder").mkdir()
    (site / "run folder/mtls-77-0").mkdir()
    (site / "run folder/mtls-77-0/something").touch()
    code, said = run(slurm_script(JOB, Slurm(python="python")))
    assert code == 2
    assert "there are files in it, and meshkit did not make it" in said
    assert not (site / "run folder/logs").exists()


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
@pytest.mark.parametrize(
    ("codes", "steps", "code", "attempts", "says"),
    [
        ([0], [], 0, 1, ""),
        ([2], [], 2, 1, ""),  # The user must correct this.
        ([4, 137, 0], [5, 9, 12], 0, 3, ""),
        ([4, 1, 4, 0], [5, 9, 12], 4, 3, "all 2 restarts are used up"),
        ([4, 4, 4, 0], [0, 0, 0], 4, 2, "2 attempts in a row have reached no step after 0"),
        ([75], [3], 75, 1, ""),
        ([130], [3], 130, 1, ""),
    ],
)
def test_what_follows_the_end_of_an_attempt(site, launcher, codes, steps, code, attempts, says):
    (site / "codes").write_text("".join(f"{c}\n" for c in codes))
    steps = " ".join(map(str, steps)) or "0"
    (site / "next").write_text(
        f'steps=({steps}); echo "{{\\"step\\": ${{steps[$1]}}, \\"loss\\": 1}}" >> "run folder/metrics.jsonl"'
    )
    returned, said = run(script(launcher, JOB))
    assert returned == code, said
    assert says in said
    assert len(list((site / "run folder/logs").iterdir())) == attempts
    assert (site / "requeued").exists() == (launcher == "slurm" and code == 75)
    coordinators = {p.read_text().splitlines()[1] for p in site.glob("run folder/logs/*/rank0.log")}
    # The port is random each time: three equal ones happen in 1 of 10^7 runs.
    assert attempts < 3 or len(coordinators) > 1


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_the_logs_of_another_job_are_not_written_over(site, launcher):
    """Another job was given the same run folder meanwhile."""
    (site / "codes").write_text("4\n0\n0\n")
    (site / "next").write_text(
        '[ "$1" -gt 0 ] || { mkdir "run folder/logs/attempt1"; echo another >"run folder/logs/attempt1/rank0.log"; }'
    )
    assert run(script(launcher, JOB))[0] == 0
    logs = {path.parent.name: path.read_text() for path in site.glob("run folder/logs/*/rank0.log")}
    assert logs.pop("attempt1") == "another\n"
    assert sorted(logs) == ["attempt0", "attempt2"]
    assert "attempt 2" in logs["attempt2"]


def test_slurms_signal_reaches_the_tasks_and_the_job_goes_back_into_the_queue(site):
    (site / "wait").touch()
    process = start(script("slurm", JOB))
    try:
        deadline = time.monotonic() + 30
        while not (site / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)  # By then both tasks have set their traps.
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 75
    assert (site / "requeued").read_text() == "77\n"


def test_what_sbatch_is_told():
    text = slurm_script(JOB, Slurm(options={"partition": "gpu", "mem": "900G"}))
    directives = re.findall(r"^#SBATCH (.*)$", text, re.M)
    for expected in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue", "--signal=B:TERM@120"):
        assert expected in directives
    assert "--partition=gpu" in directives
    assert [d for d in directives if d.startswith("--mem")] == ["--mem=900G"]
    assert not any("gpu-bind" in d or "gpus-per-task" in d for d in directives)  # Every process must see all GPUs.


def test_containers_are_optional():
    assert "container" not in slurm_script(JOB, Slurm())
    site = Slurm({}, "nvcr.io#org/image:1", ("/data:/data", "/a b:/c"), "/work")
    line = next(
        line
        for line in slurm_script(replace(JOB, out="/data/run"), site).splitlines()
        if line.startswith("srun_options=")
    )
    words = shlex.split(line.removeprefix("srun_options=(").removesuffix(")"))
    assert words[-3:] == [
        "--container-image=nvcr.io#org/image:1",
        "--container-mounts=/data:/data,/a b:/c",
        "--container-workdir=/work",
    ]
    with pytest.raises(ConfigError, match="mounts and a working folder need a container"):
        slurm_script(JOB, Slurm(container_mounts=("/data:/data",)))
    with pytest.raises(ConfigError, match="one folder on the hosts and another in the container"):
        slurm_script(JOB, site)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"comment": "two words"}, "cannot hold"),
        ({"comment": "a\nrm -rf /"}, "cannot hold"),
        ({"Bad Name": ""}, "not an option of sbatch"),
        ({"wrap;": "x"}, "not an option of sbatch"),
    ],
)
def test_options_that_a_directive_cannot_hold(options, match):
    with pytest.raises(ConfigError, match=match):
        slurm_script(JOB, Slurm(options=options))


@pytest.mark.parametrize("word", ["$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned #'])
def test_nothing_of_the_users_is_run_by_the_shell(site, word):
    (site / "codes").write_text("0\n0\n")
    job = replace(JOB, overrides=(word,), experiment=word, out=f"out {word}")
    for mtls in (False, True):
        assert run(slurm_script(job, Slurm(python="python", mtls=mtls)))[0] == 0
        assert not (site / "pwned").exists()
    assert word in (site / f"out {word}/logs/attempt0/rank0.log").read_text().splitlines()


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
@pytest.mark.parametrize(
    ("command", "python"),
    [(["/opt/v 1/bin/python3.12", "train.py"], "/opt/v 1/bin/python3.12"), (["bash", "run.sh"], "python3")],
)
def test_a_script_names_one_python_and_certificates_are_made_by_that_of_the_command(launcher, command, python, capsys):
    more = ["--hostfile", "hosts"] if launcher == "mpi" else []
    assert main(["launch", launcher, *more, "--hosts", "2", "--dry-run", "--", *command]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "python" in line]
    assert lines[0] == f"python={shlex.quote(python)}"
    assert 'make_certificates=("$python" -m meshkit launch certificates)' in lines
    assert not any(python in line for line in lines[1:])


@pytest.mark.parametrize(("text", "hosts"), [("gpu7 slots=8\n# off\ngpu8\n\ngpu7 slots=2\n", 2), ("# none\n", None)])
def test_a_command_runs_on_the_hosts_that_the_hostfile_names(text, hosts, tmp_path, capsys):
    (tmp_path / "hosts").write_text(text)
    words = ["launch", "mpi", "--hostfile", str(tmp_path / "hosts"), "--dry-run", "--", "python", "train.py"]
    assert main(words) == (0 if hosts else 2)
    said = capsys.readouterr()
    assert f"\nnum_processes={hosts}\n" in said.out if hosts else "the hostfile names no host." in said.err


def test_a_line_break_is_refused():
    with pytest.raises(ConfigError, match="line break"):
        slurm_script(replace(JOB, overrides=("a\nb",)), Slurm())


@pytest.mark.parametrize(("file", "command"), RENDERED)
def test_files_under_launch_are_what_their_commands_print(file, command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == (ROOT / "launch" / file).read_text()


def test_every_file_under_launch_has_its_command():
    assert sorted(p.name for p in (ROOT / "launch").iterdir()) == sorted(["README.md", *(file for file, _ in RENDERED)])


@pytest.mark.parametrize("file", [file for file, _ in RENDERED if file.endswith(".sh")])
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing(file):
    done = subprocess.run(["shellcheck", ROOT / "launch" / file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("verb", ["slurm", "jobset"])
def test_without_the_program_that_submits(verb, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", "/nonexistent")
    more = ["--image", "i"] if verb == "jobset" else []
    assert main(["launch", verb, "configs/experiments/llama3_70b.toml", *more]) == 2
    assert "is not on this machine's PATH" in capsys.readouterr().err
