"""Run all checks in order. The checks of the network between machines (name, ports, clock, certificates) are here.

With --gang, the processes of the job also communicate:

    check_gang -> rendezvous of all processes -> a child (child.py) of each process joins the job -> all-reduce

The all-reduce runs in a child process, because jax ends a process when another process of its job is lost.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from meshkit.children import Child, ChildDied, ChildFailed
from meshkit.config.experiment import Experiment, ProgramExperiment
from meshkit.discover import LiveProbe
from meshkit.distributed.environment import FIRST_PORT, NUM_PORTS, Gang, read_gang, split_address
from meshkit.distributed.join import certificates_of
from meshkit.distributed.roll_call import Attendance, bind_address, call_roll, wait_for_name
from meshkit.errors import MeshkitError
from meshkit.units import format_bytes
from meshkit.verbs.doctor.node import (
    CHILD,
    Diagnosis,
    Result,
    check_disk,
    check_hardware,
    check_limits,
    check_packages,
    check_site,
    check_variables,
    check_xla_flags,
    error,
    failed,
    ok,
    warning,
)

_BUILT = 1_760_000_000  # October 2025. A clock that shows an earlier time is wrong.
_NTP = "chrony or ntpd, on all machines"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED_PORTS = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
# adjtimex(2): its result while no time service keeps the clock, and the bytes of its argument on 64-bit Linux.
_TIME_ERROR, _TIMEX_BYTES = 5, 208
# Time stamps in logs are useless if clocks differ by more than this. Measured differences include a message's latency.
_CLOCK_S = 1.0


def examine(
    experiment: Experiment | ProgramExperiment | None = None,
    *,
    folder: Path = Path("runs"),
    gang_timeout_s: float | None = None,
) -> Diagnosis:
    """Run the checks of this installation and machine.

    Args:
        experiment: the experiment that should run here; None checks only the machine.
        folder: the folder that the experiment would write to.
        gang_timeout_s: `timeout_s` of `check_gang`, which joins the job that the environment names; None skips this
            check.
    """
    env = dict(os.environ)
    cluster = experiment.cluster if experiment else None
    expected = None if cluster is None else 0 if cluster.is_cpu else cluster.gpus_per_host
    nics = cluster.nics_per_host if cluster is not None and cluster.hosts > 1 else None
    hardware = check_hardware(LiveProbe(), expected, nics)
    has_gpus = any(r.check == "gpus" and " x " in r.message for r in hardware)
    results = [*check_packages(has_gpus=has_gpus), *hardware]
    results += check_variables(env, memory_fraction=experiment.train.memory_fraction if experiment else None)
    results.append(check_xla_flags(env))
    results += check_limits(has_gpus=has_gpus)
    results += check_site()
    try:
        gang = read_gang(env)
        several = gang is not None and gang.num_processes > 1
    except MeshkitError:  # `check_variables` reports this error.
        gang, several = None, True
    results += check_network(gang, several=several)
    needed_bytes = None
    if experiment is not None:
        if isinstance(experiment, ProgramExperiment):
            results.append(check_program(experiment))
        else:
            result, needed_bytes = check_experiment(experiment)
            results.append(result)
    results += check_disk(folder, needed_bytes)
    if gang_timeout_s is not None:
        results += check_gang(env, gang_timeout_s)
    return Diagnosis(host=socket.gethostname(), checks=tuple(results))


def check_experiment(experiment: Experiment) -> tuple[Result, int | None]:
    """Return whether the model can be built, and the bytes of all kept checkpoints and one that is being written.

    The bytes are None if no checkpoints are written or the model cannot be built.
    """
    import jax
    from flax import nnx

    from meshkit.planning.resolved import resolve
    from meshkit.sharding.mesh import use_no_accelerator
    from meshkit.step.muon import find_matrices
    from meshkit.step.state import describe_model
    from meshkit.step.train_step import make_optimizer

    use_no_accelerator()  # An abstract model needs no GPU; with one, jax would reserve the GPU's memory.
    try:
        spec = resolve(experiment)
        model = describe_model(spec)
        mesh = jax.sharding.AbstractMesh(experiment.mesh.shape, experiment.mesh.axis_names)
        matrices = find_matrices(model.params, mesh, experiment.rules)  # pyright: ignore[reportArgumentType]
        optimizer = make_optimizer(spec.optimizer, spec.optimizer_class, spec.train.steps, matrices)
        params = nnx.to_pure_dict(model.params)
    except MeshkitError as e:
        return failed("experiment", e, "meshkit explain, which shows where"), None
    shapes = jax.tree.leaves(params)
    parameters = sum(math.prod(leaf.shape) for leaf in shapes)
    state = [*shapes, *jax.tree.leaves(jax.eval_shape(optimizer.init, params))]
    each = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in state)
    millions = parameters / 1e6
    text = f"{experiment.model.class_path} has {millions:.1f} M parameters, and a checkpoint takes {format_bytes(each)}"
    if not experiment.checkpoint.every:
        return ok("experiment", f"{text}; the experiment writes none"), None
    return ok("experiment", text), each * (experiment.checkpoint.keep + 1)


def check_program(experiment: ProgramExperiment) -> Result:
    """Return whether `program.make` can make its step for the cluster's GPUs, which need not be attached."""
    from meshkit.planning.planner import absent_program
    from meshkit.step.given import group_arguments

    try:
        with absent_program(experiment) as (program, _):
            facts = group_arguments(program.args, program.names).facts()
    except MeshkitError as e:
        return failed("experiment", e, "meshkit explain, which shows where")
    state = (facts.parameters_bytes or 0) + (facts.optimizer_bytes or 0)
    millions = (facts.parameters or 0) / 1e6
    text = (
        f"{experiment.program.make} has {millions:.1f} M parameters, and a GPU holds {format_bytes(state)} of its state"
    )
    return ok("experiment", text)


def check_network(gang: Gang | None, *, several: bool) -> list[Result]:
    """Check this machine's name, its ports for a coordinator, its clock, and the job's certificates.

    Args:
        gang: the job that the environment names; None if it names none, or is wrong.
        several: whether a job of several processes is expected, even if the environment is wrong and `gang` is None.
    """
    found = [_host_name(gang, several), _port(several), *_port_range(several)]
    if gang is not None and gang.num_processes > 1:
        found += [*_coordinator(gang), _certificates(gang)]
    return [*found, check_clock(several=several)]


def check_clock(*, several: bool) -> Result:
    """Check that the clock is plausible and, for a job of several processes, that a time service keeps it.

    Args:
        several: whether the job has several processes. `--gang` also compares the clocks of their hosts.
    """
    now_s = time.time()
    if now_s < _BUILT:
        date = time.strftime("%Y-%m-%d", time.gmtime(now_s))
        return error("clock", f"the clock says {date}, which is before meshkit was made.", _NTP)
    kept = clock_is_kept()
    if several and kept is False:
        need = "logs, certificates and goodput of several machines need it"
        message = f"no time service keeps this machine's clock; {need}."
        return warning("clock", message, _NTP)
    return ok("clock", "the clock is kept by a time service" if kept else "the clock is plausible")


def clock_is_kept() -> bool | None:
    """Return whether the kernel reports that a time service keeps the clock; None if that cannot be read."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # A zeroed argument only reads.
    return None if state < 0 else state != _TIME_ERROR


def _host_name(gang: Gang | None, several: bool) -> Result:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        text = f"the name {host} has no address."
        return warning("host_name", text, "/etc/hosts or DNS") if several else ok("host_name", text)
    first = gang is None or gang.process_id == 0
    if several and first and address.startswith("127.") and not (gang and gang.on_loopback):
        message = f"the name {host} is {address} here, so other machines cannot use it as coordinator."
        return warning("host_name", message, "MESHKIT_COORDINATOR with an address that others reach")
    return ok("host_name", f"{host} is {address}")


def _port(several: bool) -> Result:
    """Check that a coordinator's port can be used on the loopback address and, if `several`, on the host's address."""
    addresses = ["127.0.0.1"]
    if several:
        with suppress(OSError):  # `_host_name` reports this error.
            addresses.append(socket.gethostbyname(socket.gethostname()))
    ports = f"{FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}"
    found = []
    for address in dict.fromkeys(addresses):
        try:
            found.append(f"{address}:{_open_port(address)}")
        except OSError as e:
            message = f"a port for a coordinator ({ports}) cannot be opened and reached on "
            return error("ports", f"{message}{address}: {e}.", "the firewall, or a sandbox")
    return ok("ports", f"a launch's coordinator can listen and be reached here ({', '.join(found)})")


def _open_port(address: str) -> int:
    """Listen on a random free port of the launchers' range, connect to it at `address`, and return the port.

    If the address does not belong to this machine, listen on all interfaces, as process 0 would.

    Raises:
        OSError: the port cannot be opened or reached, or ten ports in a row are in use.
    """
    for last in (False,) * 9 + (True,):
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        listens = bind_address(f"{address}:{port}")
        try:
            server = socket.create_server(split_address(listens) if listens else ("", port))
        except OSError as e:
            if last or e.errno != errno.EADDRINUSE:
                raise
            continue
        with server, socket.create_connection((address, port), timeout=5):
            return port
    raise AssertionError("the last try returns or raises")


def _port_range(several: bool) -> list[Result]:
    """Warn if outgoing connections may take the coordinator's port, which is rare but makes a launch's attempt fail."""
    try:
        first, last = (int(word) for word in _PORT_RANGE.read_text().split())
        kept = _RESERVED_PORTS.read_text().strip() if _RESERVED_PORTS.is_file() else ""
    except (OSError, ValueError):
        return []
    ours = range(FIRST_PORT, FIRST_PORT + NUM_PORTS)
    if first > ours[-1] or last < ours[0] or _covers(kept, ours):
        return []
    text = (
        f"outgoing connections get ports {first} to {last}, which include coordinators' ports {ours[0]} to {ours[-1]}."
    )
    hint = f"sysctl net.ipv4.ip_local_reserved_ports={ours[0]}-{ours[-1]}"
    return [warning("ports", text, hint)] if several else []


def _covers(reserved: str, ours: range) -> bool:
    spans = re.findall(r"(\d+)(?:-(\d+))?", reserved)
    return any(int(a) <= ours[0] and ours[-1] <= int(b or a) for a, b in spans)


def _coordinator(gang: Gang) -> list[Result]:
    """Check that this machine can resolve the coordinator's name and, in process 0, that it can listen there.

    Other processes do not connect, because process 0 may not listen yet.
    """
    try:
        socket.getaddrinfo(*gang.address)
    except OSError as e:
        message = f"this machine cannot resolve the coordinator's name {gang.coordinator} ({e.strerror})."
        return [error("coordinator", message, "its address, or a name that is in /etc/hosts or DNS here")]
    if gang.process_id != 0:
        return []
    bind = bind_address(gang.coordinator)
    address = split_address(bind) if bind else ("", gang.address[1])
    try:
        socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET).close()
    except OSError as e:
        message = f"process 0 cannot listen on {bind or f'port {address[1]}'}: {e.strerror or e}."
        return [error("coordinator", message, "a port that is free on its host")]
    if bind is None:
        message = f"{gang.coordinator} is not an address of this machine, so process 0 listens on all interfaces."
        return [warning("coordinator", message, "an address of this machine that the others reach")]
    return [ok("coordinator", f"process 0 can listen on {bind}, and on no other interface")]


def _certificates(gang: Gang) -> Result:
    if gang.mtls is None:
        text = "anybody who reaches the coordinator's port can join or stop the job (--mtls)"
        known = "processes prove a secret to each other, but jax's rendezvous" if gang.secret else "the rendezvous"
        return ok("mtls", f"{known} is not encrypted: {text}")
    try:
        certificates_of(gang)
    except MeshkitError as e:
        return failed("mtls", e, "meshkit launch certificates")
    return ok("mtls", f"the certificates in {gang.mtls} fit each other")


def check_gang(env: Mapping[str, str], timeout_s: float = 60.0) -> list[Result]:
    """Check a rendezvous and one all-reduce over all processes of the job that the environment names.

    Args:
        timeout_s: limit for the rendezvous, and again for the child processes to join.
    """
    try:
        gang = read_gang(env)
        if gang is None or gang.num_processes == 1:
            alone = "the environment names no job of several processes."
            return [error("gang", alone, "meshkit launch, or srun, around the command")]
        certificates = certificates_of(gang)
        wait_for_name(gang, timeout_s)
        attendance = call_roll(gang, timeout_s, bind=bind_address(gang.coordinator), certificates=certificates)
    except MeshkitError as e:
        return [failed("gang", e, "meshkit launch sets these variables")]
    if attendance.problem is not None:
        return [error("gang", attendance.problem, "the log of that process, or of the machine it should run on")]
    return [_clocks(attendance), try_all_reduce(env, gang, timeout_s)]


def _clocks(attendance: Attendance) -> Result:
    clocks = attendance.clocks_s
    spread = max(clocks.values()) - min(clocks.values())
    text = f"{attendance.expected} processes on {len(set(attendance.hosts.values()))} hosts came to the rendezvous"
    if spread <= _CLOCK_S:
        return ok("roll_call", f"{text}; their clocks agree within {spread + 0.05:.1f} s")
    worst = max(clocks, key=lambda i: abs(clocks[i]))
    message = f"{text}, but the clock of process {worst} ({attendance.hosts[worst]}) is {clocks[worst]:+.1f} s off."
    return warning("roll_call", message, "chrony or ntpd on all machines")


def try_all_reduce(env: Mapping[str, str], gang: Gang, timeout_s: float) -> Result:
    """Check an all-reduce over all devices of the job, in a child process that can be ended if it hangs."""
    limit_s = 2 * timeout_s + 30
    with Child(CHILD, env) as child:
        try:
            return _judge(child.ask({"join_s": timeout_s}, limit_s), gang.num_processes)
        except TimeoutError:
            message = f"an all-reduce over {gang.num_processes} processes did not end in {limit_s:g} s."
            return error("gang", message, "interfaces and firewalls between the machines; NCCL_DEBUG=INFO tells more")
        except ChildFailed as e:
            log = e.log.splitlines() if isinstance(e, ChildDied) else []
            last = next((line.strip() for line in reversed(log) if "rror" in line), str(e))
            message = f"all processes came, but the all-reduce failed; process {gang.process_id} said: {last[:300]}"
            return error("gang", message, "the logs of all; NCCL_DEBUG=INFO tells what NCCL tried")


def _judge(found: dict, processes: int) -> Result:
    if found["sum"] != found["wanted"]:
        message = f"an all-reduce over {found['devices']} devices gave {found['sum']}, not {found['wanted']}."
        return error("gang", message, "the machine with the wrong GPU: bench each host alone")
    text = f"{processes} processes with {found['devices']} devices joined in {found['join_s']:.1f} s"
    return ok("gang", f"{text}; an all-reduce took {found['all_reduce_s']:.1f} s with its set-up")
