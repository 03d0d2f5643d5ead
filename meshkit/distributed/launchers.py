"""What SLURM, MPI, torchrun and Kubernetes say of a job, in the words of meshkit's environment contract.

    SLURM_*, OMPI_*, PMI_*, PMIX_*, RANK..., JOB_COMPLETION_INDEX -> detect() -> Claim -> environment.read_gang

Launchers nest: `mpirun` in a SLURM job starts one daemon a host with srun, and torchrun one process a host of either.
The variables of an outer one then describe the daemons, so the innermost launcher that is there is the one that counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshkit.errors import ConfigError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "MESHKIT_COORDINATOR", "MESHKIT_NUM_PROCESSES", "MESHKIT_PROCESS_ID"
LOCAL_DEVICE_IDS, ATTEMPT = "MESHKIT_LOCAL_DEVICE_IDS", "MESHKIT_ATTEMPT"
CONTRACT = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, LOCAL_DEVICE_IDS, ATTEMPT)

# Above Linux's ephemeral ports (32768 to 60999), where a port that is free now is not given to another connection.
FIRST_PORT, NUM_PORTS = 61000, 4000

_READ = (
    *("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_RANK", "PMIX_NAMESPACE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "JOB_COMPLETION_INDEX"),
)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


@dataclass(frozen=True)
class Said:
    """A value, and the variable that it was read or derived from."""

    variable: str
    value: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value[:80]}"


@dataclass(frozen=True)
class Claim:
    """What one launcher says of the job.

    Attributes:
        launcher: its name, as people write it.
        said: variable of the contract -> what the launcher's own variables make it; absent where they do not tell.
    """

    launcher: str
    said: Mapping[str, Said] = field(default_factory=dict)


def detect(env: Mapping[str, str]) -> Claim | None:
    """What the innermost launcher says; None where there is none.

    Raises:
        ConfigError: its variables are malformed or contradict each other.
    """
    for read in (_torchrun, _open_mpi, _pmi, _pmix, _slurm, _kubernetes):
        claim = read(env)
        if claim is not None:
            return claim
    return None


def without_launchers(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what any launcher, meshkit's own too, says of the job: for the children of a new one."""
    return {name: value for name, value in env.items() if name not in _READ and name not in CONTRACT}


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `gpu[003-007,9],login1` -> `gpu003`.

    Raises:
        ConfigError: it is none.
    """
    numbered = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist, flags=re.ASCII)
    match = re.match(r"([\w.-]+)(?:,|$)", numbered, re.ASCII)
    host = match[1] if match else ""
    if not host:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodelist[:80]} is no list of hosts.",
            at="environment",
            hint=f"{COORDINATOR}=HOST:PORT, which is then used instead",
        )
    return host


def derived_port(*parts: str) -> int:
    """A port that every process of a job finds for itself, and another job, step or attempt most likely does not."""
    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=8).digest()
    return FIRST_PORT + int.from_bytes(digest, "big") % NUM_PORTS


def share_of_devices(local_id: int, local_size: int, visible: int | None) -> tuple[int, ...] | None:
    """The GPUs of its host that a process drives, of `visible` ones; None for all of them.

    Where it is not known how many there are, one for each process. A launcher that hides all but a process's own GPUs
    leaves fewer than there are processes: those are then all its own.
    """
    if local_size == 1 or (visible is not None and visible < local_size):
        return None
    each = 1 if visible is None else visible // local_size
    return tuple(range(local_id * each, (local_id + 1) * each))


def _torchrun(env: Mapping[str, str]) -> Claim | None:
    if not all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    said = {NUM_PROCESSES: _said(env, "WORLD_SIZE"), PROCESS_ID: _said(env, "RANK")}
    port = _whole(env, "MASTER_PORT")
    if env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":  # torchrun itself listens on the port
        port += 1 if port < 65535 else -1
    said[COORDINATOR] = Said("MASTER_ADDR and MASTER_PORT", f"{_bracketed(env['MASTER_ADDR'])}:{port}")
    if env.get("TORCHELASTIC_RESTART_COUNT"):
        said[ATTEMPT] = _said(env, "TORCHELASTIC_RESTART_COUNT")
    return Claim("torchrun", said | _devices(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def _open_mpi(env: Mapping[str, str]) -> Claim | None:
    said = _rank_and_size(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    devices = _devices(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Claim("OpenMPI", said | devices) if said else None


def _pmi(env: Mapping[str, str]) -> Claim | None:
    """MPICH and Intel MPI. SLURM's own PMI sets the same two variables, and SLURM's say more."""
    said = _rank_and_size(env, "PMI_RANK", "PMI_SIZE")
    if not said or ((slurm := _slurm(env)) is not None and slurm.said[PROCESS_ID].value == said[PROCESS_ID].value):
        return None
    return Claim("MPI", said | _devices(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _pmix(env: Mapping[str, str]) -> Claim | None:
    """PMIx tells a rank, but the number of processes only through its library; srun --mpi=pmix tells both."""
    if not env.get("PMIX_RANK"):
        return None
    rank, slurm = _said(env, "PMIX_RANK"), _slurm(env)
    if slurm is None:
        return Claim("PMIx", {PROCESS_ID: rank})
    theirs = slurm.said[PROCESS_ID]
    if _whole(env, "PMIX_RANK") != _whole(env, "SLURM_PROCID"):
        raise ConfigError(
            f"{rank}, but {theirs}: the two launchers do not mean the same process.",
            at="environment",
            hint=f"{NUM_PROCESSES} and {PROCESS_ID} in every process, without the variables of one of the two",
        )
    return slurm


def _slurm(env: Mapping[str, str]) -> Claim | None:
    """A task of a step, which srun started: a batch script has a SLURM_PROCID too, but is none."""
    size = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if not all(env.get(name) for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", size)):
        return None
    said = {NUM_PROCESSES: _said(env, size), PROCESS_ID: _said(env, "SLURM_PROCID")}
    if env.get("SLURM_RESTART_COUNT"):
        said[ATTEMPT] = _said(env, "SLURM_RESTART_COUNT")
    identity = (env.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    address = f"{first_host(env['SLURM_STEP_NODELIST'])}:{derived_port(*identity)}"
    said[COORDINATOR] = Said("SLURM_STEP_NODELIST", address)
    return Claim("SLURM", said | _slurm_devices(env))


def _slurm_devices(env: Mapping[str, str]) -> dict[str, Said]:
    """`8(x64)` or `8,4` tasks per node; which node this is, SLURM_NODEID says."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part.strip(), re.ASCII)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    node = env.get("SLURM_NODEID", "0")
    if not counts or not node.isdigit() or int(node) >= len(counts):
        return {}
    return _devices({**env, "tasks": str(counts[int(node)])}, "SLURM_LOCALID", "tasks")


def _kubernetes(env: Mapping[str, str]) -> Claim | None:
    """An Indexed Job tells a pod its number alone; the others come from the contract, as `launch jobset` renders it."""
    if not env.get("JOB_COMPLETION_INDEX"):
        return None
    return Claim("Kubernetes", {PROCESS_ID: _said(env, "JOB_COMPLETION_INDEX")})


def _rank_and_size(env: Mapping[str, str], rank: str, size: str) -> dict[str, Said]:
    if not env.get(rank) or not env.get(size):
        return {}
    return {NUM_PROCESSES: _said(env, size), PROCESS_ID: _said(env, rank)}


def _devices(env: Mapping[str, str], local_id: str, local_size: str) -> dict[str, Said]:
    if not env.get(local_id) or not env.get(local_size):
        return {}
    ids = share_of_devices(_whole(env, local_id), _whole(env, local_size), _visible(env))
    return {} if ids is None else {LOCAL_DEVICE_IDS: Said(local_id, ",".join(map(str, ids)))}


def _visible(env: Mapping[str, str]) -> int | None:
    """GPUs that a process sees, where the environment tells."""
    if "CUDA_VISIBLE_DEVICES" in env:
        return len([part for part in env["CUDA_VISIBLE_DEVICES"].split(",") if part.strip()])
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    return int(on_node) if _NUMBER.fullmatch(on_node) else None


def _said(env: Mapping[str, str], variable: str) -> Said:
    return Said(variable, env[variable].strip())


def _whole(env: Mapping[str, str], variable: str) -> int:
    text = env[variable].strip()
    if not _NUMBER.fullmatch(text):
        raise ConfigError(f"{variable}={text[:80]} is no whole number.", at="environment", hint=f"{variable}=0")
    return int(text)


def _bracketed(host: str) -> str:
    host = host.strip()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
