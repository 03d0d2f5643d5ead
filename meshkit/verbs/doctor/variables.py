"""Environment variables that make a job slow, hang or fail: NCCL's, XLA's, memory's, proxies'."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from meshkit.config.user_code import child_path
from meshkit.distributed.environment import MEMORY_FRACTIONS, read_gang
from meshkit.errors import MeshkitError
from meshkit.verbs.doctor.diagnosis import Result, error, failed, ok, warning

# NCCL's documentation of environment variables: for debugging, "should not be used in production nor retained in
# scripts" (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, read 2026-11).
_DEBUG_NCCL = (
    "NCCL_CHECKS_DISABLE",
    "NCCL_IGNORE_CPU_AFFINITY",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NET_DISABLE_INTRA",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_CROSS_NIC",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
)
_CHATTY = ("INFO", "TRACE", "ABORT")
_COSTLY_MEMORY = (
    ("XLA_PYTHON_CLIENT_PREALLOCATE", ("false", "0"), ": memory fragments, and a step that fits may fail later."),
    ("XLA_PYTHON_CLIENT_ALLOCATOR", ("platform",), " asks the driver for every buffer, which is very slow."),
    ("TF_FORCE_UNIFIED_MEMORY", ("1",), " lets GPU memory spill into the host's, at its bandwidth."),
)
_INTERFACES = Path("/sys/class/net")
_XLA_TIMEOUT_S = 60


def check_variables(
    env: Mapping[str, str], *, memory_fraction: float | None = None, interfaces: Path = _INTERFACES
) -> list[Result]:
    """Everything that the environment alone shows.

    Args:
        env: of the process that would train.
        memory_fraction: of the experiment, if there is one.
        interfaces: folder with one entry for each network interface.
    """
    found = [_launcher(env), *_nccl(env), *_sockets(env, interfaces), *_memory(env, memory_fraction)]
    proxies = sorted(n for n in env if n.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"))
    if proxies:
        found.append(ok("proxies", f"{', '.join(proxies)}: left out when the processes of a job meet"))
    return found


def check_xla_flags(env: Mapping[str, str]) -> Result:
    """Whether jaxlib takes XLA_FLAGS: an unknown flag aborts the process, so another process tries."""
    flags = env.get("XLA_FLAGS", "")
    if not flags.strip():
        return ok("xla_flags", "XLA_FLAGS is not set")
    code = "from jax._src.lib import xla_client; xla_client.make_cpu_client()"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**env, "JAX_PLATFORMS": "cpu", "PYTHONPATH": child_path()},
            capture_output=True,
            text=True,
            timeout=_XLA_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return warning("xla_flags", f"jaxlib was not done with XLA_FLAGS after {_XLA_TIMEOUT_S} s.", "unset XLA_FLAGS")
    if done.returncode == 0:
        return ok("xla_flags", f"XLA takes {len(flags.split())} flags")
    named = [line for line in done.stderr.splitlines() if "nknown flag" in line or "XLA_FLAGS" in line]
    why = named[-1].split("]", 1)[-1].strip() if named else f"jaxlib ends with {done.returncode}"
    return error("xla_flags", f"XLA aborts with these XLA_FLAGS: {why}", "take the flag out of XLA_FLAGS")


def _launcher(env: Mapping[str, str]) -> Result:
    try:
        gang = read_gang(env)
    except MeshkitError as e:
        return failed("launcher", e, "meshkit launch sets them all")
    if gang is None:
        return ok("launcher", "no job of several processes in the environment")
    return ok("launcher", f"process {gang.process_id} of {gang.num_processes}, coordinator {gang.coordinator}")


def _nccl_files(env: Mapping[str, str]) -> dict[str, tuple[str, Path]]:
    """What NCCL's own files say, which persist longest: variable -> value, file."""
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
        found.append(error("nccl", f"NCCL_TOPO_FILE names {topology}, which is not there.", "unset NCCL_TOPO_FILE"))
    return found or [ok("nccl", "no NCCL variable that should not persist")]


def _sockets(env: Mapping[str, str], interfaces: Path) -> list[Result]:
    """NCCL_SOCKET_IFNAME: a list of prefixes, `=` before exact names, `^` before those to leave out."""
    wanted = env.get("NCCL_SOCKET_IFNAME")
    if not wanted:
        return []
    try:
        there = sorted(p.name for p in interfaces.iterdir())
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
    message = f"NCCL_SOCKET_IFNAME={wanted} leaves no interface: this machine has {', '.join(there)}."
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
