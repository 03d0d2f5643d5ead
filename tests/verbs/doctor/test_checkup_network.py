"""Test doctor's network checks: names, ports, clocks and certificates, each wrong on purpose, and a gang of two."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.distributed.certificates import make_certificates, write_certificates
from meshkit.distributed.environment import read_gang
from meshkit.distributed.roll_call import Attendance, free_port
from meshkit.verbs.doctor import checkup as network
from meshkit.verbs.doctor.checkup import check_clock, check_gang, check_network

ROOT = Path(__file__).resolve().parents[3]


def wrong(results):
    return {(r.check, r.status): r.message for r in results if r.status != "ok"}


@pytest.mark.parametrize(
    ("now_s", "kept", "several", "status", "says"),
    [
        (0.0, True, False, "error", "the clock says 1970-01-01"),
        (2e9, False, True, "warning", "no time service keeps"),
        (2e9, False, False, "ok", "plausible"),
        (2e9, True, True, "ok", "kept by a time service"),
    ],
)
def test_the_clock(monkeypatch, now_s, kept, several, status, says):
    monkeypatch.setattr(network.time, "time", lambda: now_s)
    monkeypatch.setattr(network, "clock_is_kept", lambda: kept)
    found = check_clock(several=several)
    assert (found.status, says in found.message) == (status, True)


def test_the_kernel_is_asked_about_the_clock():
    assert network.clock_is_kept() in (True, False, None)
    assert check_clock(several=False).status == "ok"


@pytest.mark.parametrize(
    ("ports", "reserved", "status"),
    [
        ("32768 60999", "", "ok"),
        ("1024 65535", "", "warning"),
        ("1024 65535", "8080,61000-64999", "ok"),
        ("1024 65535", "61000-61999", "warning"),
        ("none", "", "ok"),
    ],
)
def test_ports_that_connections_may_take(monkeypatch, tmp_path, ports, reserved, status):
    for name, text in (("_PORT_RANGE", ports), ("_RESERVED_PORTS", reserved)):
        (tmp_path / name).write_text(text + "\n")
        monkeypatch.setattr(network, name, tmp_path / name)
    found = check_network(None, several=True)
    worst = [r for r in found if r.check == "ports" and r.status != "ok"]
    assert [r.status for r in worst] == [status] * (status != "ok")
    assert all("ip_local_reserved_ports=61000-64999" in r.hint for r in worst)


def test_a_port_as_launches_take_it_is_opened_and_reached(monkeypatch):
    found = next(r for r in check_network(None, several=True) if r.check == "ports")
    assert (found.status, "127.0.0.1:6" in found.message) == ("ok", True)

    def refuses(address, **_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(network.socket, "create_server", refuses)
    message = wrong(check_network(None, several=False))[("ports", "error")]
    assert "61000 to 64999" in message
    assert "on 127.0.0.1: [Errno 13] Permission denied" in message


def gang(port, process=0):
    address = {"MESHKIT_COORDINATOR": f"127.0.0.1:{port}", "MESHKIT_NUM_PROCESSES": "2"}
    return address | {"MESHKIT_PROCESS_ID": str(process)}


def test_the_coordinators_port(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = wrong(check_network(read_gang(gang(port)), several=True))
        assert f"process 0 cannot listen on 127.0.0.1:{port}" in found[("coordinator", "error")]
        assert ("coordinator", "error") not in wrong(check_network(read_gang(gang(port, 1)), several=True))
        monkeypatch.setattr(network, "bind_address", lambda _: None)  # as with the address of a service
        found = wrong(check_network(read_gang(gang(port)), several=True))
        assert f"process 0 cannot listen on port {port}" in found[("coordinator", "error")]
        monkeypatch.undo()
    assert ("coordinator", "error") not in wrong(check_network(read_gang(gang(port)), several=True))
    monkeypatch.setattr(network, "bind_address", lambda _: None)
    assert (
        "not an address of this machine"
        in wrong(check_network(read_gang(gang(port)), several=True))[("coordinator", "warning")]
    )


def test_a_coordinator_that_nobody_knows(monkeypatch):
    def nobody(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(network.socket, "getaddrinfo", nobody)
    found = wrong(check_network(read_gang(gang(1) | {"MESHKIT_COORDINATOR": "gpu7:61000"}), several=True))
    assert "cannot resolve the coordinator's name gpu7:61000" in found[("coordinator", "error")]


def test_certificates(tmp_path):
    found = check_network(read_gang(gang(1, 1)), several=True)
    assert "can join or stop the job" in next(r.message for r in found if r.check == "mtls")
    missing = check_network(read_gang(gang(1, 1) | {"MESHKIT_MTLS": str(tmp_path)}), several=True)
    assert "ca.pem cannot be read" in wrong(missing)[("mtls", "error")]


@pytest.mark.parametrize(
    ("clocks", "status", "says"),
    [
        ({0: 0.0, 1: 0.4}, "ok", "2 processes on 2 hosts came to the rendezvous; their clocks agree"),
        ({0: 0.0, 1: 5.0}, "warning", "the clock of process 1 (b) is +5.0 s off"),
    ],
)
def test_clocks_of_a_gang(monkeypatch, clocks, status, says):
    attendance = Attendance(2, {0: "a", 1: "b"}, clocks, {}, {})
    monkeypatch.setattr(network, "call_roll", lambda *_, **__: attendance)
    monkeypatch.setattr(network, "try_all_reduce", lambda *_: None)
    found, _ = check_gang(gang(1, 1))
    assert (found.check, found.status, says in found.message) == ("roll_call", status, True)


@pytest.mark.parametrize(
    ("attendance", "says"),
    [
        (Attendance(4, {0: "a", 2: "b"}, {0: 0.0, 2: 0.0}, {}, {}), "2 of 4 processes did not come: 1, 3."),
        (Attendance(2, {0: "a"}, {0: 0.0}, {1: ["a", "b"]}, {}), "2 processes say that they are number 1: on a, b."),
        (Attendance(2, {0: "a", 1: "b"}, {0: 0.0, 1: -3600.0}, {}, {}), "the clock of process 1 (b) is -3600 s off"),
    ],
)
def test_who_is_missing_in_a_gang_is_named(monkeypatch, attendance, says):
    monkeypatch.setattr(network, "call_roll", lambda *_, **__: attendance)
    assert says in wrong(check_gang(gang(1, 1)))[("gang", "error")]


def start_doctor(port, process, tmp_path, *options):
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("MESHKIT_", "XLA_", "JAX_"))}
    words = ["doctor", "--gang", "--json", "--out", str(tmp_path), *options]
    return subprocess.Popen(
        [sys.executable, "-m", "meshkit", *words],
        cwd=ROOT,
        env=inherited | gang(port, process) | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("certified", [False, True])
def test_a_gang_of_two_that_sums(tmp_path, monkeypatch, certified):
    if certified:
        write_certificates(tmp_path / "mtls", make_certificates(["127.0.0.1"]))
        monkeypatch.setitem(os.environ, "PYTHONUNBUFFERED", "1")
    more = {"MESHKIT_MTLS": str(tmp_path / "mtls")} if certified else {}
    port = free_port()
    monkeypatch.setattr(sys.modules[__name__], "gang", lambda p, i, plain=gang: plain(p, i) | more)
    started = [start_doctor(port, i, tmp_path) for i in range(2)]
    said = [process.communicate(timeout=200) for process in started]
    for process, (out, err) in zip(started, said):
        checks = {c["check"]: c for c in json.loads(out)["checks"]}
        assert process.returncode == 0, err
        assert "2 processes with" in checks["gang"]["message"]
        assert "came to the rendezvous" in checks["roll_call"]["message"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_gang_that_is_not_all_there(tmp_path):
    process = start_doctor(free_port(), 0, tmp_path, "--timeout", "5")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, err
    (found,) = [c for c in json.loads(out)["checks"] if c["check"] == "gang"]
    assert found["message"] == "1 of 2 processes did not come: 1."


def test_a_gang_of_one_is_none():
    assert "no job of several processes" in wrong(check_gang({}))[("gang", "error")]
