"""Check this machine: packages, GPUs and NICs, limits, disk, the site's allowed folders, the cache of programs.

Environment variables that make a job slow, hang or fail are checked, too: those of NCCL, XLA, GPU memory and proxies.
`meshkit doctor --json` prints a `Diagnosis` of `Result`s, and `show` prints it for a terminal.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshkit.children import Child, ChildDied, ChildFailed
from meshkit.compile.cache import cache_root
from meshkit.compile.options import check_compiler, version_of
from meshkit.config.site import listed, read_site
from meshkit.discover.machine import discover
from meshkit.discover.probe import Probe
from meshkit.distributed.environment import MEMORY_FRACTIONS, read_gang
from meshkit.errors import MeshkitError
from meshkit.private import NotPrivate, private_folder
from meshkit.redaction import redact
from meshkit.units import format_bytes, format_rate

Status = Literal["ok", "warning", "error"]
_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("ERROR", "bold red")}
# 64 MiB is Docker's default for /dev/shm. NCCL's channels and data loaders need far more (NVIDIA/nccl issue 525).
_SMALL_SHM_BYTES, _GOOD_SHM_BYTES = 64 << 20, 1 << 30
# A process holds a socket for each channel to each peer; the limit of login shells is often 1024.
_FEW_FILES, _GOOD_FILES = 1024, 65536
_WRITTEN_BYTES = 64 << 20
_SLOW_BYTES_PER_S = 100e6
_LEAST_FREE_BYTES = 1 << 30
# jax, NCCL and the checkpoint writer start hundreds of threads per process; users and containers have limits.
_FEW_THREADS = 4096
PIDS_FILES = ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max")
_SHOWN = ("flax", "optax", "orbax-checkpoint", "numpy")
# NCCL documents these variables as for debugging: they "should not be used in production nor retained in scripts"
# (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, read 2026-11).
_DEBUG_NCCL = (
    "NCCL_CHECKS_DISABLE", "NCCL_IGNORE_CPU_AFFINITY", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE", "NCCL_NET_DISABLE_INTRA", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_NET_GDR_LEVEL",
    "NCCL_CROSS_NIC", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS",
)  # fmt: skip
_CHATTY = ("INFO", "TRACE", "ABORT")
_COSTLY_MEMORY = (
    ("XLA_PYTHON_CLIENT_PREALLOCATE", ("false", "0"), ": memory fragments, and a step that fits may fail later."),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", ("platform",), " asks the driver for every buffer, which is very slow."),
    ("TF_FORCE_UNIFIED_MEMORY", ("1",), " lets GPU memory spill into the host's, at its bandwidth."),
)
INTERFACES = Path("/sys/class/net")
SHM = Path("/dev/shm")
_XLA_TIMEOUT_S = 60
CHILD = "meshkit.verbs.doctor.child"


class Result(BaseModel):
    """The result of one check."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    check: str
    status: Status
    """`error` makes a job fail or hang; `warning` makes it slow, or may make it fail later."""
    message: str
    """The finding, with its numbers."""
    hint: str | None = None
    """The remedy; None if nothing is wrong."""


class Diagnosis(BaseModel):
    """All checks of one process's machine, and with --gang those of the whole job as this process saw them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal["meshkit.doctor/1"] = "meshkit.doctor/1"
    host: str
    checks: tuple[Result, ...]

    @property
    def errors(self) -> tuple[Result, ...]:
        """The checks that found a reason for a job to fail or hang."""
        return tuple(c for c in self.checks if c.status == "error")

    def to_dict(self) -> dict:
        found = self.model_dump(mode="json")
        return {"schema": found.pop("schema_"), **found}


def ok(check: str, message: str) -> Result:
    return Result(check=check, status="ok", message=redact(message))


def warning(check: str, message: str, hint: str) -> Result:
    """Return a check that found a reason for a job to be slow, or to fail later."""
    return Result(check=check, status="warning", message=redact(message), hint=redact(hint))


def failed(check: str, problem: MeshkitError, hint: str) -> Result:
    """Return a check that raised an error; `hint` is used only if the error has no hint."""
    return error(check, problem.message, problem.hint or hint)


def error(check: str, message: str, hint: str) -> Result:
    """Return a check that found a reason for a job to fail or hang."""
    return Result(check=check, status="error", message=redact(message), hint=redact(hint))


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print one line per check, and below it the remedy, if there is one."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for c in diagnosis.checks:
        word, style = _MARKS[c.status]
        grid.add_row(Text(word, style), Text(c.check, "bold"), Text(c.message))
        if c.hint:
            grid.add_row("", "", Text(f"try {c.hint}", "dim"))
    console.print(grid)
    bad, odd = len(diagnosis.errors), sum(c.status == "warning" for c in diagnosis.checks)
    console.print(f"{diagnosis.host}: {len(diagnosis.checks)} checks, {bad} errors, {odd} warnings")


def check_packages(*, has_gpus: bool = False) -> list[Result]:
    """Check that jax is installed, that jaxlib has its version, and that this installation can compile for GPUs.

    Args:
        has_gpus: whether GPUs are attached: then a missing compiler is an error, since jax needs it to use them.
    """
    jax, jaxlib = version_of("jax"), version_of("jaxlib")
    if jax is None or jaxlib is None:
        return [error("packages", "jax or jaxlib is not installed.", "pip install meshkit")]
    others = ", ".join(f"{name} {version}" for name in _SHOWN if (version := version_of(name)))
    found = [ok("packages", f"Python {sys.version.split()[0]}, jax {jax}, jaxlib {jaxlib}, {others}")]
    if jaxlib.split(".")[:3] != jax.split(".")[:3]:
        message = f"jax is {jax} and jaxlib {jaxlib}; they are released together."
        found.append(warning("packages", message, f"pip install 'jaxlib=={jax}'"))
    try:
        check_compiler()
        found.append(ok("compiler", "can compile for GPUs, present or absent"))
    except MeshkitError as e:
        graded = error if has_gpus else warning
        hint = e.hint or "pip install 'meshkit[plan]'"
        found.append(graded("compiler", f"cannot compile for GPUs: {e.message}", hint))
    return found


def check_hardware(probe: Probe, gpus_expected: int | None = None, nics_expected: int | None = None) -> list[Result]:
    """Check the GPUs and network adapters of this machine.

    Args:
        gpus_expected: GPUs per host of the experiment's cluster; None if unknown, 0 for a CPU cluster.
        nics_expected: network adapters per host; None if unknown, or if the cluster has one host and needs none.
    """
    try:
        topology = discover(probe)
    except MeshkitError as e:
        return [failed("gpus", e, "nvidia-smi, and what it says")]
    names = [gpu.name or "a GPU without a name" for gpu in topology.gpus]
    found = []
    if gpus_expected is not None and gpus_expected != len(names) and gpus_expected:
        why = f" ({topology.nothing_here})" if topology.nothing_here else ""
        message = f"{len(names)} GPUs here{why}, but a host of the experiment's cluster has {gpus_expected}."
        found.append(error("gpus", message, "the host that lacks them, or cluster.gpus_per_host"))
    elif names:
        found.append(ok("gpus", f"{len(names)} x {names[0]}" if len(set(names)) == 1 else ", ".join(names)))
    else:
        found.append(ok("gpus", f"none ({topology.nothing_here}); training runs on virtual CPU devices"))
    found += [warning("hardware", text, "meshkit topo shows all of it") for text in topology.warnings]
    down = [nic.id for nic in topology.nics if nic.active is False]
    if down:
        message = f"{len(down)} of {len(topology.nics)} network adapters are down: {', '.join(down)}."
        found.append(warning("nics", message, "the cable, the switch, and `ibstat`"))
    elif topology.nics:
        found.append(ok("nics", f"{len(topology.nics)} network adapters are up"))
    up = len(topology.nics) - len(down)
    if nics_expected and topology.nics_listed and up < nics_expected:
        message = f"{up} network adapters are up here, but a host of the experiment's cluster has {nics_expected}."
        hint = "cluster.nics_per_host, or `ibstat` and /dev/infiniband in the container"
        found.append(warning("nics", message, hint))
    return found


def check_limits(*, has_gpus: bool) -> list[Result]:
    """Check the size of shared memory, and a process's limits of open files, threads and locked memory.

    Args:
        has_gpus: whether GPUs are attached: then fewer than 65536 open files are a warning, and locked memory is
            checked.
    """
    found = []
    if SHM.is_dir():
        size = shutil.disk_usage(SHM).total
        if size <= _SMALL_SHM_BYTES:
            hint = "docker run --shm-size=16g, or in Kubernetes an emptyDir with medium: Memory at /dev/shm"
            found.append(
                error("shared_memory", f"/dev/shm has {format_bytes(size)}; that is too little for NCCL.", hint)
            )
        elif size < _GOOD_SHM_BYTES:
            message = f"/dev/shm has {format_bytes(size)}; jobs with many GPUs need {format_bytes(_GOOD_SHM_BYTES)}."
            found.append(warning("shared_memory", message, "a larger /dev/shm"))
        else:
            found.append(ok("shared_memory", f"/dev/shm has {format_bytes(size)}"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _GOOD_FILES:
        text = f"a process may open {files} files; jobs with hundreds of GPUs need {_GOOD_FILES}"
        graded = error if files < _FEW_FILES else warning
        few = files < _FEW_FILES or has_gpus
        found.append(graded("open_files", text, f"ulimit -n {_GOOD_FILES}") if few else ok("open_files", text))
    else:
        found.append(ok("open_files", "enough open files for a process"))
    found.append(_threads())
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_gpus and locked != resource.RLIM_INFINITY:
        message = f"a process may lock {format_bytes(locked)}; InfiniBand registers GPU buffers as locked memory."
        found.append(warning("locked_memory", message, "ulimit -l unlimited; in a container --ulimit memlock=-1"))
    return found


def check_disk(folder: Path, needed_bytes: int | None = None) -> list[Result]:
    """Check that a folder has free space for the checkpoints and can be written, and measure its write rate.

    Args:
        folder: the run folder; if it does not exist yet, its nearest existing parent is checked.
        needed_bytes: bytes of all kept checkpoints and one that is being written; None if unknown.
    """
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    probe = there / f".meshkit-doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        free = shutil.disk_usage(there).free
        if free < max(_LEAST_FREE_BYTES, needed_bytes or 0):
            wants = f"; the checkpoints of this experiment take {format_bytes(needed_bytes)}" if needed_bytes else ""
            message = f"{there} has {format_bytes(free)} free{wants}."
            return [error("disk", message, "another --out, or a smaller checkpoint.keep")]
        rate = write_rate(probe)
    except OSError as e:
        return [error("disk", f"{there} cannot be written: {e.strerror}.", "another --out")]
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    text = f"{there} writes {format_rate(rate)} and has {format_bytes(free)} free"
    if rate < _SLOW_BYTES_PER_S:
        return [warning("disk", f"{text}.", "faster storage: a checkpoint holds up the run while it is written")]
    return [ok("disk", text)]


def _threads() -> Result:
    """Check the limit on threads: the container's or the user's, whichever is lower (`ulimit -u` counts threads)."""
    limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0]}
    for name in PIDS_FILES:
        with suppress(OSError, ValueError):  # The file contains "max", or there is no cgroup.
            limits["pids.max of the container"] = int(Path(name).read_text())
    finite = {name: value for name, value in limits.items() if value != resource.RLIM_INFINITY}
    if finite and (least := min(finite.values())) < _FEW_THREADS:
        name = min(finite, key=lambda name: finite[name])
        message = f"at most {least} threads ({name}); a process of a large job starts hundreds, and fails at the limit."
        return warning("threads", message, f"{name} {_FEW_THREADS} or more")
    return ok("threads", "enough threads for a process")


def write_rate(path: Path) -> float:
    """Write 64 MiB to a file with fsync, and return the bytes per second."""
    block = os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(_WRITTEN_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return _WRITTEN_BYTES / (time.perf_counter() - began)


def check_site() -> list[Result]:
    """Report the folders from which experiments may load models and files, and check the cache of programs."""
    return [*_roots(), _cache()]


def _roots() -> list[Result]:
    try:
        site = read_site()
    except MeshkitError as e:
        return [failed("site", e, "model_roots and file_roots, each a list of folders")]
    said = [
        f"{what} only from {listed(roots)}"
        for what, roots in (("models", site.model_roots), ("files", site.file_roots))
        if roots is not None
    ]
    return [ok("site", f"experiments may name {', '.join(said)}")] if said else []


def _cache() -> Result:
    try:
        root = cache_root()
    except MeshkitError as e:
        return failed("compile_cache", e, "MESHKIT_CACHE_BYTES in bytes")
    if root is None:
        return warning("compile_cache", "MESHKIT_CACHE=off: every restart compiles again.", "unset MESHKIT_CACHE")
    folder = root
    try:
        for folder in (root / "programs", root / "compiled"):
            private_folder(folder)
    except NotPrivate as problem:
        message = f"compiled programs cannot be kept in {folder}: {problem}; every restart compiles again."
        return warning("compile_cache", message, "MESHKIT_CACHE=/a/new/folder, which meshkit makes")
    return ok("compile_cache", f"compiled programs are kept in {folder}")


def check_variables(env: Mapping[str, str], *, memory_fraction: float | None = None) -> list[Result]:
    """Check the environment variables of a training process: launcher, NCCL, memory, proxies.

    Args:
        memory_fraction: the experiment's `train.memory_fraction`; None if there is no experiment.
    """
    found = [_launcher(env), *_nccl(env), *_sockets(env), *_memory(env, memory_fraction)]
    proxies = sorted(n for n in env if n.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"))
    if proxies:
        found.append(ok("proxies", f"{', '.join(proxies)}: ignored when the processes of a job meet"))
    return found


def check_xla_flags(env: Mapping[str, str]) -> Result:
    """Check that jaxlib accepts XLA_FLAGS, in a child process on the CPU, because an unknown flag aborts a process."""
    flags = env.get("XLA_FLAGS", "")
    if not flags.strip():
        return ok("xla_flags", "XLA_FLAGS is not set")
    with Child(CHILD, {**env, "JAX_PLATFORMS": "cpu"}) as child:
        try:
            child.ask({}, _XLA_TIMEOUT_S)
        except TimeoutError:
            why = f"jaxlib did not finish reading XLA_FLAGS within {_XLA_TIMEOUT_S} s."
            return warning("xla_flags", why, "unset XLA_FLAGS")
        except ChildFailed as e:
            log = e.log.splitlines() if isinstance(e, ChildDied) else []
            named = [line for line in log if "nknown flag" in line or "XLA_FLAGS" in line]
            why = named[-1].split("]", 1)[-1].strip() if named else str(e)
            return error("xla_flags", f"XLA aborts with these XLA_FLAGS: {why}", "take the flag out of XLA_FLAGS")
    return ok("xla_flags", f"XLA takes {len(flags.split())} flags")


def _launcher(env: Mapping[str, str]) -> Result:
    try:
        gang = read_gang(env)
    except MeshkitError as e:
        return failed("launcher", e, "meshkit launch sets them all")
    if gang is None:
        return ok("launcher", "no job of several processes in the environment")
    return ok("launcher", f"process {gang.process_id} of {gang.num_processes}, coordinator {gang.coordinator}")


def _nccl_files(env: Mapping[str, str]) -> dict[str, tuple[str, Path]]:
    """Return variable -> (value, file) of NCCL's configuration files, which are easily forgotten."""
    said: dict[str, tuple[str, Path]] = {}
    named = env.get("NCCL_CONF_FILE")
    for file in (Path("/etc/nccl.conf"), Path(named) if named else Path(env.get("HOME", "/")) / ".nccl.conf"):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        pairs = (line.split("#")[0].partition("=") for line in lines)
        said |= {name.strip(): (value.strip(), file) for name, sign, value in pairs if sign}
    return said


def _nccl(env: Mapping[str, str]) -> list[Result]:
    """Check NCCL's variables, set in the environment or in its files, for debugging settings and a missing file."""
    found, files = [], {name: pair for name, pair in _nccl_files(env).items() if name not in env}
    env = {**{name: value for name, (value, _) in files.items()}, **env}
    left = [name for name in _DEBUG_NCCL if name in env]
    if left:
        said = ", ".join(f"{n}={env[n]}" + (f" in {files[n][1]}" if n in files else "") for n in left)
        unset = " ".join(n for n in left if n not in files)
        hints = [f"unset {unset}"] * bool(unset) + ["that file without it"] * any(n in files for n in left)
        found.append(warning("nccl", f"{said}: for debugging; each may halve bandwidth.", ", and ".join(hints)))
    if env.get("NCCL_DEBUG", "").upper() in _CHATTY and "NCCL_DEBUG_FILE" not in env:
        message = f"NCCL_DEBUG={env['NCCL_DEBUG']} fills the logs of every process."
        found.append(warning("nccl", message, "NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE=nccl.%h.%p"))
    topology = env.get("NCCL_TOPO_FILE")
    if topology and not Path(topology).is_file():
        found.append(error("nccl", f"NCCL_TOPO_FILE names {topology}, which does not exist.", "unset NCCL_TOPO_FILE"))
    return found or [ok("nccl", "no NCCL variable that is only for debugging")]


def _sockets(env: Mapping[str, str]) -> list[Result]:
    """Check that NCCL_SOCKET_IFNAME leaves an interface.

    Its value is a list of prefixes; a leading `=` means exact names, a leading `^` prefixes to exclude.
    """
    wanted = env.get("NCCL_SOCKET_IFNAME")
    if not wanted:
        return []
    try:
        there = sorted(p.name for p in INTERFACES.iterdir())
    except OSError:
        return []
    mode, names = (wanted[0], wanted[1:]) if wanted[0] in "=^" else ("", wanted)
    listed = [n for n in names.split(",") if n]
    if mode == "^":
        left = [n for n in there if not any(n.startswith(x) for x in listed) and n != "lo"]
        lost = [] if left else listed
    else:
        matches = (lambda n, x: n == x) if mode == "=" else (lambda n, x: n.startswith(x))
        lost = [x for x in listed if not any(matches(n, x) for n in there)]
    if not lost:
        return [ok("nccl_sockets", f"NCCL_SOCKET_IFNAME={wanted} matches an interface")]
    message = f"NCCL_SOCKET_IFNAME={wanted} matches no interface: this machine has {', '.join(there)}."
    return [error("nccl_sockets", message, "unset NCCL_SOCKET_IFNAME, or name one of them")]


def _memory(env: Mapping[str, str], memory_fraction: float | None) -> list[Result]:
    found = []
    said = {name: env[name] for name in MEMORY_FRACTIONS if name in env}
    if len(set(said.values())) > 1:
        message = f"{' and '.join(f'{n}={v}' for n, v in said.items())} contradict each other."
        found.append(error("memory", message, f"unset {MEMORY_FRACTIONS[1]}"))
    elif said and memory_fraction is not None:
        name, value = next(iter(said.items()))
        if not _same(value, memory_fraction):
            message = f"{name}={value}, but the experiment's train.memory_fraction is {memory_fraction:g}."
            found.append(warning("memory", message, f"unset {name}: the experiment sets it"))
    for name, values, why in _COSTLY_MEMORY:
        if env.get(name, "").lower() in values:
            found.append(warning("memory", f"{name}={values[0]}{why}", f"unset {name}"))
    return found or [ok("memory", "no memory variable that conflicts")]


def _same(text: str, value: float) -> bool:
    try:
        return abs(float(text) - value) < 1e-9
    except ValueError:
        return False
