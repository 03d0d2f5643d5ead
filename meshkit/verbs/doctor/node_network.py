"""How this machine meets others: its name, its ports, its clock, its certificates."""

from __future__ import annotations

import ctypes
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from meshkit.distributed.environment import FIRST_PORT, NUM_PORTS, Gang, read_gang
from meshkit.distributed.join import bind_address, certificates_of
from meshkit.errors import MeshkitError
from meshkit.verbs.doctor.diagnosis import Result, error, ok, warning

_BUILT = 1_760_000_000  # October 2025: a clock before it is wrong, whatever it says
_NTP = "chrony or ntpd, on all machines"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED_PORTS = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
# adjtimex(2): what it returns while nothing keeps the clock, and the size of its argument on 64-bit Linux (208 bytes).
_TIME_ERROR, _TIMEX_BYTES = 5, 208


def check_network(
    env: Mapping[str, str], *, several: bool, ports: Path = _PORT_RANGE, reserved: Path = _RESERVED_PORTS
) -> list[Result]:
    """This machine's name, a port on it, the range of ports that launchers use, its clock, and the certificates.

    Args:
        env: of the process that would train.
        several: whether it is one of several.
        ports, reserved: where Linux says from which ports connections get theirs, and which it leaves out.
    """
    try:
        gang = read_gang(env)
    except MeshkitError:  # of which another check speaks
        gang = None
    found = [_host_name(gang, several), _port(), *_port_range(ports, reserved, several)]
    if gang is not None and gang.num_processes > 1:
        found += [*_coordinator(gang), *_certificates(gang)]
    return [*found, *check_clock(several=several)]


def check_clock(*, several: bool, now_s: float | None = None, kept: bool | None = None) -> list[Result]:
    """Whether the clock can be right, and whether a time service keeps it.

    Args:
        several: whether other machines are part of the job; their clocks are compared with `--gang`.
        now_s: in place of the clock.
        kept: in place of what the kernel says; None where it does not.
    """
    now_s = time.time() if now_s is None else now_s
    if now_s < _BUILT:
        date = time.strftime("%Y-%m-%d", time.gmtime(now_s))
        return [error("clock", f"the clock says {date}, which is before meshkit was made.", _NTP)]
    kept = _clock_is_kept() if kept is None else kept
    if several and kept is False:
        message = (
            "no time service keeps this machine's clock; logs, certificates and goodput of several machines need it."
        )
        return [warning("clock", message, _NTP)]
    return [ok("clock", "the clock is kept by a time service" if kept else "the clock is plausible")]


def _clock_is_kept() -> bool | None:
    """What the kernel says; None where it does not, or is not Linux."""
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))  # modes = 0: it only reads
    return None if state < 0 else state != _TIME_ERROR


def _host_name(gang: Gang | None, several: bool) -> Result:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        text = f"the name {host} has no address."
        return warning("host_name", text, "/etc/hosts or DNS") if several else ok("host_name", text)
    first = gang is None or gang.process_id == 0
    if several and first and address.startswith("127.") and not _on_loopback(gang):
        message = f"the name {host} means {address} here, so other machines cannot be told it as coordinator."
        return warning("host_name", message, "MESHKIT_COORDINATOR with an address that others reach")
    return ok("host_name", f"{host} is {address}")


def _on_loopback(gang: Gang | None) -> bool:
    return gang is not None and gang.coordinator.startswith(("127.", "localhost:", "[::1]:"))


def _port() -> Result:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(5)
            client.connect(server.getsockname())
    except OSError as e:
        message = f"a port of this machine cannot be opened and reached: {e}."
        return error("ports", message, "the firewall, or a sandbox")
    return ok("ports", "a port can be opened and reached")


def _port_range(ports: Path, reserved: Path, several: bool) -> list[Result]:
    """Connections that get the coordinator's port for themselves: rare, and then the first attempt is lost."""
    try:
        first, last = (int(word) for word in ports.read_text().split())
        kept = reserved.read_text().strip() if reserved.is_file() else ""
    except (OSError, ValueError):
        return []
    ours = range(FIRST_PORT, FIRST_PORT + NUM_PORTS)
    if first > ours[-1] or last < ours[0] or _covers(kept, ours):
        return []
    text = f"connections get ports {first} to {last}, among them those of coordinators, {ours[0]} to {ours[-1]}."
    hint = f"sysctl net.ipv4.ip_local_reserved_ports={ours[0]}-{ours[-1]}"
    return [warning("ports", text, hint)] if several else []


def _covers(reserved: str, ours: range) -> bool:
    spans = re.findall(r"(\d+)(?:-(\d+))?", reserved)
    return any(int(a) <= ours[0] and ours[-1] <= int(b or a) for a, b in spans)


def _coordinator(gang: Gang) -> list[Result]:
    """Process 0: whether it can listen. The others: whether they know its name; it may not listen yet."""
    host, port = gang.coordinator.rsplit(":", 1)
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as e:
        message = f"this machine knows no host by the name of the coordinator {gang.coordinator} ({e.strerror})."
        return [error("coordinator", message, "its address, or a name that is in /etc/hosts or DNS here")]
    if gang.process_id != 0:
        return []
    bind = bind_address(gang.coordinator)
    if bind is None:
        message = f"{gang.coordinator} is no address of this machine, on which process 0 listens; it listens on all."
        return [warning("coordinator", message, "an address of this machine that the others reach")]
    address = bind.rsplit(":", 1)[0].strip("[]")
    try:
        socket.create_server((address, int(port)), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError as e:
        message = f"process 0 cannot listen on {gang.coordinator}: {e.strerror or e}."
        return [error("coordinator", message, "a port that is free on its host")]
    return [ok("coordinator", f"process 0 can listen on {bind}, and on no other interface")]


def _certificates(gang: Gang) -> list[Result]:
    if gang.mtls is None:
        text = "processes meet in the open: whoever reaches the coordinator's port can join or stop the job (--mtls)"
        return [ok("mtls", text)]
    try:
        certificates_of(gang)
    except MeshkitError as e:
        return [error("mtls", e.message, e.hint or "meshkit launch certificates")]
    return [ok("mtls", f"the certificates in {gang.mtls} fit each other")]
