"""Read the environment contract: the variables by which a launcher describes the job to each of its processes.

    launcher -> Gang.emit() -> MESHKIT_* variables -> read_gang() -> Gang -> jax.distributed.initialize
    SLURM_*, OMPI_*, PMI_*, PMIX_*, RANK..., JOB_COMPLETION_INDEX -> detect() -> Detected -> read_gang()

SLURM, OpenMPI, PMIx, Kubernetes and torchrun set their own variables. `read_gang` takes from them what the MESHKIT_*
variables leave out, and raises an error if the two contradict each other. Launchers can nest: in a SLURM job `mpirun`
starts one daemon on each host with srun, and srun or mpirun may start one torchrun on each host. The variables of the
outer launcher then describe these daemons, so `detect` uses only the innermost launcher.

A process that fails, or that loses another process of its job, exits at once, so that the others do not wait for it:

    exception or exit code -> does the job have several processes? -> exit without jax's last barrier
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshkit.console import say
from meshkit.errors import DONE, PREEMPTED, ConfigError, RunError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "MESHKIT_COORDINATOR", "MESHKIT_NUM_PROCESSES", "MESHKIT_PROCESS_ID"
LOCAL_DEVICE_IDS, ATTEMPT = "MESHKIT_LOCAL_DEVICE_IDS", "MESHKIT_ATTEMPT"
CONTRACT = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, LOCAL_DEVICE_IDS, ATTEMPT)
JOIN_TIMEOUT, MTLS, SECRET = "MESHKIT_JOIN_TIMEOUT", "MESHKIT_MTLS", "MESHKIT_SECRET"
# Seconds that a process may take to end. It waits for running measurements (30 s) and for the other processes at jax's
# last barrier (120 s).
END_S = 300.0
OUT = "MESHKIT_OUT"  # the run folder, for a user's own command

# The variables that set jax's share of a GPU's memory. jax fails if both are set. The second is deprecated.
MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# Ports above Linux's ephemeral ones (32768 to 60999), so Linux gives a port that is free now to no other connection.
FIRST_PORT, NUM_PORTS = 61000, 4000

_SHORTEST_SECRET = 32  # characters; 128 bits as hexadecimal digits
_REQUIRED = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
_EXAMPLES = {COORDINATOR: "10.0.0.1:12345", NUM_PROCESSES: "2", PROCESS_ID: "0"}
_OF_LAUNCHERS = (
    *("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK", "PMIX_NAMESPACE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "JOB_COMPLETION_INDEX"),
)
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class Gang:
    """The job as the environment describes it to one of its processes."""

    coordinator: str
    """The host:port on which process 0 listens."""
    num_processes: int
    process_id: int
    """The number of this process, from 0."""
    local_device_ids: tuple[int, ...] | None = None
    """The GPUs of the machine that this process drives; None for all."""
    attempt: int = 0
    """The number of restarts so far."""
    mtls: str | None = None
    """The folder of the certificates for mutual TLS; None for a job without certificates."""
    secret: str | None = field(default=None, repr=False)
    """The shared secret for authentication without certificates; None for no authentication."""
    in_kubernetes: bool = field(default=False, compare=False)
    """Whether this process runs in a pod; the coordinator's name is then unknown until its pod starts."""

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host, without brackets, and port."""
        return split_address(self.coordinator)

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the coordinator's address."""
        host, _ = self.address
        return host in ("localhost", "::1") or host.startswith("127.")

    def emit(self) -> dict[str, str]:
        """Return the variables from which `read_gang` makes this gang again."""
        variables = {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS_ID: str(self.process_id),
            ATTEMPT: str(self.attempt),
        }
        if self.local_device_ids is not None:
            variables[LOCAL_DEVICE_IDS] = ",".join(map(str, self.local_device_ids))
        if self.mtls is not None:
            variables[MTLS] = self.mtls
        if self.secret is not None:
            variables[SECRET] = self.secret
        return variables


@dataclass(frozen=True)
class Setting:
    """A value, and the variable that it was read or derived from."""

    variable: str
    value: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value[:80]}"


@dataclass(frozen=True)
class Detected:
    """The job as one launcher describes it."""

    launcher: str
    """The launcher's name for messages, such as `OpenMPI`."""
    settings: Mapping[str, Setting]
    """Values by MESHKIT_* variable; a variable is absent if the launcher does not determine it."""


def read_gang(environment: Mapping[str, str] | None = None) -> Gang | None:
    """Return the job that the environment describes; None if it describes none, so this process is alone.

    Args:
        environment: the variables; None for those of this process.

    Raises:
        ConfigError: a variable is missing, malformed, or contradicts another.
    """
    env = os.environ if environment is None else environment
    ours = {name: _setting(env, name) for name in CONTRACT if env.get(name, "").strip()}
    detected = detect(env)
    if detected is not None:
        _check_agreement(ours, detected)
    settings = {**(detected.settings if detected else {}), **ours}
    if not _is_a_job(ours, detected):
        return None
    for name in _REQUIRED:
        if name not in settings:
            raise _missing(name, settings, detected)
    check_address(settings[COORDINATOR].value)
    number, process = _whole(settings[NUM_PROCESSES]), _whole(settings[PROCESS_ID])
    if number < 1:
        raise _bad(settings[NUM_PROCESSES], "is no number of processes", "1 or more")
    if process >= number:
        problem = f"is none of the {number} processes of {settings[NUM_PROCESSES].variable}, which count from 0"
        raise _bad(settings[PROCESS_ID], problem, f"0 to {number - 1}")
    return Gang(
        settings[COORDINATOR].value,
        number,
        process,
        _device_ids(settings[LOCAL_DEVICE_IDS]) if LOCAL_DEVICE_IDS in settings else None,
        _whole(settings[ATTEMPT]) if ATTEMPT in settings else 0,
        mtls=env.get(MTLS, "").strip() or None,
        secret=_secret(env),
        in_kubernetes=bool(env.get("KUBERNETES_SERVICE_HOST")),
    )


def join_timeout_s(environment: Mapping[str, str] | None = None, *, otherwise: float) -> float:
    """Return the seconds that a process waits for the others: the value of MESHKIT_JOIN_TIMEOUT.

    Args:
        environment: the variables; None for those of this process.
        otherwise: the seconds if the variable is not set.

    Raises:
        ConfigError: the variable is no whole number of seconds, 1 or more.
    """
    env = os.environ if environment is None else environment
    text = env.get(JOIN_TIMEOUT, "").strip()
    if not text:
        return otherwise
    if not _NUMBER.fullmatch(text) or not int(text):
        raise _bad(Setting(JOIN_TIMEOUT, text), "is no whole number of seconds", "300")
    return float(text)


def check_address(text: str, *, at: str = "environment", name: str = COORDINATOR) -> None:
    """Check that a text is host:port.

    Args:
        text: a name, an IPv4 address or an IPv6 address in brackets; then a port from 1 to 65535.
        at: the place that the error names: the environment, or an option.
        name: the variable or option that has this value, for the message.

    Raises:
        ConfigError: the text is not host:port.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        hint = "10.0.0.1:12345, host0:12345 or [::1]:12345"
        raise ConfigError(f"{name} is '{text[:80]}', not host:port.", at=at, hint=hint)


def split_address(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _is_a_job(ours: Mapping[str, Setting], detected: Detected | None) -> bool:
    """Return whether this process is part of a larger job.

    A Kubernetes index alone does not show that, because each pod of an Indexed Job may be a job of its own.
    """
    if any(name in ours for name in _REQUIRED):
        return True
    if detected is None or detected.launcher == "Kubernetes":
        return False
    return NUM_PROCESSES not in detected.settings or _whole(detected.settings[NUM_PROCESSES]) > 1


def _check_agreement(ours: Mapping[str, Setting], detected: Detected) -> None:
    for name in (NUM_PROCESSES, PROCESS_ID):
        mine, theirs = ours.get(name), detected.settings.get(name)
        if mine is not None and theirs is not None and _whole(mine) != _whole(theirs):
            launcher = detected.launcher
            raise ConfigError(
                f"{mine}, but {theirs} ({launcher}): they are not of the same job.",
                at="environment",
                hint=f"one of the two; `env -u {theirs.variable} meshkit ...` if {launcher} did not start it",
            )


def _missing(name: str, settings: Mapping[str, Setting], detected: Detected | None) -> ConfigError:
    present = next(settings[other].variable for other in _REQUIRED if other in settings)
    message = f"{present} is set, but {name} is not: a job of several processes needs both."
    hint = f"{name}={_EXAMPLES[name]}, or none of {', '.join(_REQUIRED)} for one process"
    if detected is not None:
        message = f"{detected.launcher} started this process ({present} is set), and nothing says {name}."
        hint = f"{name}={_EXAMPLES[name]}, or `meshkit launch`, which sets it"
    return ConfigError(message, at="environment", hint=hint)


def _secret(env: Mapping[str, str]) -> str | None:
    text = env.get(SECRET, "").strip()
    if text and len(text) < _SHORTEST_SECRET:
        what = f"{SECRET} has {len(text)} characters, which somebody may guess; {_SHORTEST_SECRET} or more."
        raise ConfigError(what, at="environment", hint=f'{SECRET}="$(openssl rand -hex 32)", the same in every process')
    return text or None


def _whole(setting: Setting) -> int:
    if not _NUMBER.fullmatch(setting.value):
        raise _bad(setting, "is no whole number", _EXAMPLES.get(setting.variable, "0"))
    return int(setting.value)


def _device_ids(setting: Setting) -> tuple[int, ...]:
    parts = [part.strip() for part in setting.value.split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise _bad(setting, "is no list of numbers", "0,1,2,3")
    ids = tuple(map(int, parts))
    if len(set(ids)) < len(ids):
        raise _bad(setting, "names a device twice", ",".join(map(str, dict.fromkeys(ids))))
    return ids


def _bad(setting: Setting, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{setting} {problem}.", at="environment", hint=f"{setting.variable}={hint}")


def _setting(env: Mapping[str, str], variable: str) -> Setting:
    return Setting(variable, env[variable].strip())


# ---------------------------------------------------------------------------------------------- other launchers


def detect(env: Mapping[str, str]) -> Detected | None:
    """Return the innermost launcher's description of the job, or None without a launcher.

    Raises:
        ConfigError: its variables are malformed or contradict each other.
    """
    for read in (_torchrun, _open_mpi, _pmi, _pmix, _slurm, _kubernetes):
        detected = read(env)
        if detected is not None:
            return detected
    return None


def without_launchers(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the job variables of any launcher, for the children of a new launcher."""
    return {name: value for name, value in env.items() if name not in _OF_LAUNCHERS and name not in CONTRACT}


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: `gpu[003-007,9],login1` -> `gpu003`.

    Raises:
        ConfigError: the text is no node list.
    """
    numbered = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist, flags=re.ASCII)
    match = re.match(r"([\w.-]+)(?:,|$)", numbered, re.ASCII)
    if not match:
        what = f"SLURM_STEP_NODELIST={nodelist[:80]} is no list of hosts."
        raise ConfigError(what, at="environment", hint=f"{COORDINATOR}=HOST:PORT, which is then used instead")
    return match[1]


def derived_port(*parts: str) -> int:
    """Return a port that every process of a job computes by itself; other jobs, steps or attempts rarely get the same.

    Args:
        parts: the identity of this attempt: job, step, restart.

    Returns:
        A port from 61000 to 64999.
    """
    import hashlib  # imports OpenSSL, which takes longer than all other imports of this module

    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=8).digest()
    return FIRST_PORT + int.from_bytes(digest, "big") % NUM_PORTS


def share_of_devices(local_id: int, local_size: int, visible: int | None) -> tuple[int, ...] | None:
    """Return the visible GPUs of a host that one process drives; None for all of them.

    If the number of GPUs is unknown, each process drives one. If a process sees fewer GPUs than the host has processes,
    its launcher has hidden the GPUs of the other processes, and it drives all that it sees.

    Args:
        local_id: the number of the process on its host, from 0.
        local_size: the number of processes on the host.
        visible: the number of GPUs that the process sees; None if unknown.

    Returns:
        Consecutive indices of visible GPUs. If the processes do not divide the GPUs evenly, no process drives the rest.
    """
    if local_size == 1 or (visible is not None and visible < local_size):
        return None
    each = 1 if visible is None else visible // local_size
    return tuple(range(local_id * each, (local_id + 1) * each))


def _torchrun(env: Mapping[str, str]) -> Detected | None:
    settings = _rank_and_size(env, "RANK", "WORLD_SIZE")
    if not settings or not env.get("MASTER_ADDR") or not env.get("MASTER_PORT"):
        return None
    port = _whole(_setting(env, "MASTER_PORT"))
    if env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":  # torchrun itself listens on the port
        port += 1 if port < 65535 else -1
    host = env["MASTER_ADDR"].strip()
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    settings[COORDINATOR] = Setting("MASTER_ADDR and MASTER_PORT", f"{host}:{port}")
    if env.get("TORCHELASTIC_RESTART_COUNT"):
        settings[ATTEMPT] = _setting(env, "TORCHELASTIC_RESTART_COUNT")
    return Detected("torchrun", settings | _devices(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def _open_mpi(env: Mapping[str, str]) -> Detected | None:
    settings = _rank_and_size(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    devices = _devices(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Detected("OpenMPI", settings | devices) if settings else None


def _pmi(env: Mapping[str, str]) -> Detected | None:
    """Read MPICH and Intel MPI. SLURM's PMI sets the same two variables; SLURM's own say more, and are read instead."""
    settings = _rank_and_size(env, "PMI_RANK", "PMI_SIZE")
    slurm = _slurm(env) if settings else None
    if not settings or (slurm is not None and slurm.settings[PROCESS_ID].value == settings[PROCESS_ID].value):
        return None
    return Detected("MPI", settings | _devices(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _pmix(env: Mapping[str, str]) -> Detected | None:
    """Read PMIx, which sets only a rank. With srun --mpi=pmix, SLURM's variables also have the number of processes."""
    if not env.get("PMIX_RANK"):
        return None
    rank, slurm = _setting(env, "PMIX_RANK"), _slurm(env)
    if slurm is None:
        return Detected("PMIx", {PROCESS_ID: rank})
    theirs = slurm.settings[PROCESS_ID]
    if _whole(rank) != _whole(theirs):
        raise ConfigError(
            f"{rank}, but {theirs}: the two launchers do not mean the same process.",
            at="environment",
            hint=f"{NUM_PROCESSES} and {PROCESS_ID} in every process, without the variables of one of the two",
        )
    return slurm


def _slurm(env: Mapping[str, str]) -> Detected | None:
    """Read a task of a step, which srun started. A batch script also has a SLURM_PROCID, but is no such task."""
    size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    settings = _rank_and_size(env, "SLURM_PROCID", size)
    if not settings or not env.get("SLURM_STEP_ID") or not env.get("SLURM_STEP_NODELIST"):
        return None
    if env.get("SLURM_RESTART_COUNT"):
        settings[ATTEMPT] = _setting(env, "SLURM_RESTART_COUNT")
    identity = (env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    address = f"{first_host(env['SLURM_STEP_NODELIST'])}:{derived_port(*identity)}"
    settings[COORDINATOR] = Setting("SLURM_STEP_NODELIST", address)
    return Detected("SLURM", settings | _slurm_devices(env))


def _slurm_devices(env: Mapping[str, str]) -> dict[str, Setting]:
    """Return the GPUs of a task, from the tasks per node (`8(x64)` or `8,4`) and the number of this node."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    node = env.get("SLURM_NODEID", "0")
    if not counts or not _NUMBER.fullmatch(node) or int(node) >= len(counts):
        return {}
    return _devices({**env, "tasks": str(counts[int(node)])}, "SLURM_LOCALID", "tasks")


def _kubernetes(env: Mapping[str, str]) -> Detected | None:
    """Read an Indexed Job, which gives a pod only its number; `launch jobset` sets the other values as MESHKIT_*."""
    if not env.get("JOB_COMPLETION_INDEX"):
        return None
    return Detected("Kubernetes", {PROCESS_ID: _setting(env, "JOB_COMPLETION_INDEX")})


def _rank_and_size(env: Mapping[str, str], rank: str, size: str) -> dict[str, Setting]:
    if not env.get(rank) or not env.get(size):
        return {}
    return {NUM_PROCESSES: _setting(env, size), PROCESS_ID: _setting(env, rank)}


def _devices(env: Mapping[str, str], local_id: str, local_size: str) -> dict[str, Setting]:
    """Return the setting for the GPUs that this process drives, as indices into the GPUs that it sees."""
    if not env.get(local_id) or not env.get(local_size):
        return {}
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    visible = int(on_node) if _NUMBER.fullmatch(on_node) else None
    if "CUDA_VISIBLE_DEVICES" in env:
        visible = len([part for part in env["CUDA_VISIBLE_DEVICES"].split(",") if part.strip()])
    ids = share_of_devices(_whole(_setting(env, local_id)), _whole(_setting(env, local_size)), visible)
    return {} if ids is None else {LOCAL_DEVICE_IDS: Setting(local_id, ",".join(map(str, ids)))}


def leave_gang(code: int) -> None:
    """End this process at once if it failed and its job has several processes.

    Python's normal exit would wait for the others at jax's last barrier, while they wait for this process in a
    collective. With exit codes 0 and 75 all processes end together, so the normal exit is used, as in a process that is
    alone. A process that is still there 300 s after its main thread has ended prints its stacks and is killed. The main
    thread itself has no limit, so a program may continue after `meshkit.cli.main`.
    """
    if code in (DONE, PREEMPTED) or _gang_of_several() is None:
        threading.Thread(target=_limit_end, name="meshkit-end", daemon=True).start()
        return
    faulthandler.dump_traceback_later(END_S, exit=True)  # a flush blocks if nobody reads the other end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _limit_end() -> None:
    """End this process and print its stacks, if other threads or exit handlers keep it from ending."""
    threading.main_thread().join()
    faulthandler.dump_traceback_later(END_S, exit=True)


def say_lost_process(error: Exception) -> int:
    """Print that another process of the job is gone, if an error of jax means that.

    Returns:
        The exit code 4, after which a supervisor restarts the job; 0 if the error means something else.
    """
    signs = ("Gloo", "NCCL", "coordination service", "heartbeat", "Connection reset", "Socket closed", "UNAVAILABLE")
    gang = _gang_of_several()
    if gang is None or type(error).__name__ != "JaxRuntimeError" or not any(sign in str(error) for sign in signs):
        return 0
    lost = RunError(
        f"process {gang.process_id} of {gang.num_processes} has lost another one: {str(error).splitlines()[0]}",
        hint="the logs of the others, one of which failed first; `meshkit launch` restarts them all",
    )
    say(f"meshkit: {lost.render()}")
    return lost.exit_code


def _gang_of_several() -> Gang | None:
    """Return the job of this process; None if it has no other process, or if the environment is invalid."""
    try:
        gang = read_gang()
    except ConfigError:
        return None
    return gang if gang is not None and gang.num_processes > 1 else None
