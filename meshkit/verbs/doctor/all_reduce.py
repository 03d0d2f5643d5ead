"""Whether the processes of a job find each other: a roll call, then one all-reduce over all devices.

    check_gang -> roll call -> child process (meeting.py) -> joins, all-reduce -> one line of JSON

A child does the second, because jax ends a process whose partners are gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from meshkit.distributed.environment import Gang, read_gang
from meshkit.distributed.join import bind_address, certificates_of
from meshkit.distributed.roll_call import Attendance, call_roll, wait_for_name
from meshkit.errors import MeshkitError
from meshkit.verbs.doctor.diagnosis import Result, error, ok, warning

# Time stamps of logs and of SLURM's accounting are of no use beyond it; a message takes a part of it.
_CLOCK_S = 1.0


def check_gang(env: Mapping[str, str], timeout_s: float = 60.0) -> list[Result]:
    """A roll call and one all-reduce over all processes that the environment names.

    Args:
        env: of this process, one of the job's.
        timeout_s: for the others to come, and again for the all-reduce.
    """
    try:
        gang = read_gang(env)
        if gang is None or gang.num_processes == 1:
            alone = "the environment names no job of several processes."
            return [error("gang", alone, "meshkit launch, or srun, around it")]
        certificates = certificates_of(gang)
        wait_for_name(gang, timeout_s)
        attendance = call_roll(gang, timeout_s, bind=bind_address(gang.coordinator), certificates=certificates)
    except MeshkitError as e:
        return [error("gang", e.message, e.hint or "meshkit launch sets these variables")]
    if attendance.problem is not None:
        return [error("gang", attendance.problem, "the log of that process, or of the machine it should run on")]
    return [*_clocks(attendance), *_all_reduce(env, gang, timeout_s)]


def _clocks(attendance: Attendance) -> list[Result]:
    clocks = attendance.clocks_s
    spread = max(clocks.values()) - min(clocks.values())
    text = f"{attendance.expected} processes on {len(set(attendance.hosts.values()))} hosts came to the roll call"
    if spread <= _CLOCK_S:
        return [ok("roll_call", f"{text}; their clocks agree within {spread + 0.05:.1f} s")]
    worst = max(clocks, key=lambda i: abs(clocks[i]))
    message = f"{text}, but the clock of process {worst} ({attendance.hosts[worst]}) is {clocks[worst]:+.1f} s off."
    return [warning("roll_call", message, "chrony or ntpd on all machines")]


def _all_reduce(env: Mapping[str, str], gang: Gang, timeout_s: float) -> list[Result]:
    child = {**env, "MESHKIT_DOCTOR_TIMEOUT": str(timeout_s)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "meshkit.verbs.doctor.meeting"],
            env=child,
            capture_output=True,
            text=True,
            timeout=2 * timeout_s + 30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"an all-reduce over {gang.num_processes} processes did not end in {2 * timeout_s + 30:g} s."
        return [error("gang", message, "interfaces and firewalls between the machines; NCCL_DEBUG=INFO tells more")]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return [_judge(json.loads(lines[-1]), gang.num_processes)]
    last = next((line for line in reversed(done.stderr.splitlines()) if "rror" in line), f"exit {done.returncode}")
    message = f"all came, but the all-reduce failed; process {gang.process_id} said: {last.strip()[:300]}"
    return [error("gang", message, "the logs of all; NCCL_DEBUG=INFO tells what NCCL tried")]


def _judge(found: dict, processes: int) -> Result:
    if found["sum"] != found["wanted"]:
        message = f"an all-reduce over {found['devices']} devices gave {found['sum']}, not {found['wanted']}."
        return error("gang", message, "the machine with the wrong GPU: bench each host alone")
    text = f"{processes} processes with {found['devices']} devices joined in {found['join_s']:.1f} s"
    return ok("gang", f"{text}; an all-reduce took {found['all_reduce_s']:.1f} s with its set-up")
