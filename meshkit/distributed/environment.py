"""The environment contract: the variables by which every launcher says to a process what job it is part of.

    launcher -> Gang.emit() -> MESHKIT_* variables -> read_gang() -> Gang -> jax.distributed.initialize
    SLURM_*, OMPI_*, PMI_*, PMIX_*, RANK..., JOB_COMPLETION_INDEX -> detect() -> Detected -> read_gang()

SLURM, OpenMPI, PMIx, Kubernetes and torchrun set variables of their own. They complete the contract where it leaves
something out, and where both say something, they agree or `read_gang` stops. Launchers nest: `mpirun` in a SLURM job
starts one daemon a host with srun, and torchrun one process a host of either. The variables of an outer one then
describe the daemons, so the innermost launcher that is there is the one that counts.

A process that fails, or that another one has failed, leaves at once, so that nobody waits for it:

    exception or exit code -> is it one of several? -> gone
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
# The end waits for what is still being measured (30 s) and for the others at jax's last barrier (120 s).
END_S = 300.0
OUT = "MESHKIT_OUT"  # the run folder of a command of the user's

# By which jax's client is told how much of a GPU's memory to take; of both together it stops, the second is deprecated.
MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")

# Above Linux's ephemeral ports (32768 to 60999), where a port that is free now is not given to another connection.
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
    """Number of this process, from 0."""
    local_device_ids: tuple[int, ...] | None = None
    """The GPUs of its machine that it drives; None for all."""
    attempt: int = 0
    """Restarts so far."""
    mtls: str | None = None
    """Folder of the certificates by which the processes know each other; None without."""
    secret: str | None = field(default=None, repr=False)
    """The secret of the processes where they have no certificates; with None they meet unauthenticated."""
    in_kubernetes: bool = field(default=False, compare=False)
    """Whether this is a pod, whose coordinator gets its name when it starts."""

    @property
    def address(self) -> tuple[str, int]:
        """The coordinator's host, without brackets, and port."""
        return split_address(self.coordinator)

    @property
    def on_loopback(self) -> bool:
        """Whether the coordinator's address is one that only this machine reaches."""
        host, _ = self.address
        return host in ("localhost", "::1") or host.startswith("127.")

    def emit(self) -> dict[str, str]:
        """The variables that `read_gang` reads back as this gang."""
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
    """Its name, as people write it."""
    settings: Mapping[str, Setting]
    """Values by variable of the contract; absent where the launcher's own do not say."""


def read_gang(environment: Mapping[str, str] | None = None) -> Gang | None:
    """The job that the environment describes; None where it describes none, and this process is alone.

    Args:
        environment: in place of the process's own.

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
    """Seconds that a process waits for the others: what MESHKIT_JOIN_TIMEOUT says.

    Args:
        environment: in place of the process's own.
        otherwise: seconds where the variable is not set.

    Raises:
        ConfigError: it is no whole number of seconds, 1 or more.
    """
    env = os.environ if environment is None else environment
    text = env.get(JOIN_TIMEOUT, "").strip()
    if not text:
        return otherwise
    if not _NUMBER.fullmatch(text) or not int(text):
        raise _bad(Setting(JOIN_TIMEOUT, text), "is no whole number of seconds", "300")
    return float(text)


def check_address(text: str, *, at: str = "environment", name: str = COORDINATOR) -> None:
    """Stops unless the text is host:port.

    Args:
        text: a name, an IPv4 address or an IPv6 one in brackets, and a port from 1 to 65535.
        at: where the error points: the environment, or an option.
        name: what has that value, in the message.

    Raises:
        ConfigError: it is not.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        hint = "10.0.0.1:12345, host0:12345 or [::1]:12345"
        raise ConfigError(f"{name} is '{text[:80]}', not host:port.", at=at, hint=hint)


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _is_a_job(ours: Mapping[str, Setting], detected: Detected | None) -> bool:
    """Whether anything says that there are other processes. An Indexed Job of Kubernetes may be one run in each pod."""
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
    """The environment without what any launcher, meshkit's own too, says of the job: for the children of a new one."""
    return {name: value for name, value in env.items() if name not in _OF_LAUNCHERS and name not in CONTRACT}


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[003-007,9],login1` -> `gpu003`.

    Raises:
        ConfigError: it is none.
    """
    numbered = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist, flags=re.ASCII)
    match = re.match(r"([\w.-]+)(?:,|$)", numbered, re.ASCII)
    if not match:
        what = f"SLURM_STEP_NODELIST={nodelist[:80]} is no list of hosts."
        raise ConfigError(what, at="environment", hint=f"{COORDINATOR}=HOST:PORT, which is then used instead")
    return match[1]


def derived_port(*parts: str) -> int:
    """A port that every process of a job finds for itself, and another job, step or attempt most likely does not.

    Args:
        parts: what tells this start from all others: job, step, restart.

    Returns:
        One of 61000 to 64999.
    """
    import hashlib  # with OpenSSL, which takes longer than all else here

    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=8).digest()
    return FIRST_PORT + int.from_bytes(digest, "big") % NUM_PORTS


def share_of_devices(local_id: int, local_size: int, visible: int | None) -> tuple[int, ...] | None:
    """The GPUs of its host that a process drives, of `visible` ones; None for all of them.

    Where it is not known how many there are, one for each process. A launcher that hides all but a process's own GPUs
    leaves fewer than there are processes: those are then all its own.

    Args:
        local_id: number of the process on its host, from 0.
        local_size: processes on the host.
        visible: GPUs that the process sees; None where that is not known.

    Returns:
        Indices among the visible ones, in a row; where they do not divide evenly, nobody drives the rest.
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
    """MPICH and Intel MPI. SLURM's own PMI sets the same two variables, and SLURM's say more."""
    settings = _rank_and_size(env, "PMI_RANK", "PMI_SIZE")
    slurm = _slurm(env) if settings else None
    if not settings or (slurm is not None and slurm.settings[PROCESS_ID].value == settings[PROCESS_ID].value):
        return None
    return Detected("MPI", settings | _devices(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _pmix(env: Mapping[str, str]) -> Detected | None:
    """PMIx sets a rank, but has the number of processes only in its library; srun --mpi=pmix sets both."""
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
    """A task of a step, which srun started: a batch script has a SLURM_PROCID too, but is none."""
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
    """`8(x64)` or `8,4` tasks per node; which node this is, SLURM_NODEID says."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    node = env.get("SLURM_NODEID", "0")
    if not counts or not _NUMBER.fullmatch(node) or int(node) >= len(counts):
        return {}
    return _devices({**env, "tasks": str(counts[int(node)])}, "SLURM_LOCALID", "tasks")


def _kubernetes(env: Mapping[str, str]) -> Detected | None:
    """An Indexed Job gives a pod its number alone; the others come from the contract, as `launch jobset` renders it."""
    if not env.get("JOB_COMPLETION_INDEX"):
        return None
    return Detected("Kubernetes", {PROCESS_ID: _setting(env, "JOB_COMPLETION_INDEX")})


def _rank_and_size(env: Mapping[str, str], rank: str, size: str) -> dict[str, Setting]:
    if not env.get(rank) or not env.get(size):
        return {}
    return {NUM_PROCESSES: _setting(env, size), PROCESS_ID: _setting(env, rank)}


def _devices(env: Mapping[str, str], local_id: str, local_size: str) -> dict[str, Setting]:
    """The GPUs of this process, of those that the environment says it sees."""
    if not env.get(local_id) or not env.get(local_size):
        return {}
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    visible = int(on_node) if _NUMBER.fullmatch(on_node) else None
    if "CUDA_VISIBLE_DEVICES" in env:
        visible = len([part for part in env["CUDA_VISIBLE_DEVICES"].split(",") if part.strip()])
    ids = share_of_devices(_whole(_setting(env, local_id)), _whole(_setting(env, local_size)), visible)
    return {} if ids is None else {LOCAL_DEVICE_IDS: Setting(local_id, ",".join(map(str, ids)))}


def leave_gang(code: int) -> None:
    """Ends this process at once if it failed and is one of several.

    Python's own way out waits for the others at jax's last barrier, and they wait for this process in a collective.
    With exit codes 0 and 75 all end together. One that has not ended 300 s after its main thread prints its stacks and
    is ended; until then a program that has called `meshkit.cli.main` may go on for as long as it likes.
    """
    if _gang_of_several() is None:
        return
    if code in (DONE, PREEMPTED):
        threading.Thread(target=_limit_end, name="meshkit-end", daemon=True).start()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _limit_end() -> None:
    """Ends this process, with its stacks, where other threads or what runs at exit keep it from ending."""
    threading.main_thread().join()
    faulthandler.dump_traceback_later(END_S, exit=True)


def say_lost_process(error: Exception) -> int:
    """Says that another process of the job is gone, where that is what jax's error means.

    Returns:
        The exit code 4, which a supervisor restarts; 0 where the error means something else, and nothing is said.
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
    """The job that this process is part of; None where it is alone, or cannot tell."""
    try:
        gang = read_gang()
    except ConfigError:
        return None
    return gang if gang is not None and gang.num_processes > 1 else None
