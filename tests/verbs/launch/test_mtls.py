"""Test certificates made for a run: who has none is not let in and cannot stop the job, over loopback.

The rendezvous and jax's own meeting share a port, and real processes attack both: with bytes that mean nothing, by a
process that claims a number of the job and has no certificate, and by one with a certificate of another authority.
"""

import inspect
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from meshkit.distributed.certificates import make_certificates, read_certificates, write_certificates
from meshkit.distributed.environment import Gang
from meshkit.distributed.roll_call import call_roll, free_port
from meshkit.errors import RunError

ROOT = Path(__file__).resolve().parents[3]
GANG = {"MESHKIT_COORDINATOR": "127.0.0.1:1", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_PROCESS_ID": "1"}
needs_jax_with_mtls = pytest.mark.skipif(
    "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters,
    reason=f"jax {jax.__version__} has no mutual TLS",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of the job's certificates, and of somebody else's for the same address."""
    made = []
    for name in ("ours", "theirs"):
        made.append(tmp_path_factory.mktemp("mtls") / name)
        write_certificates(made[-1], make_certificates(["127.0.0.1", "gpu7"]))
    return made


def meet(folder, disturb):
    """Return the rendezvous of two processes; `disturb` is called with the port before the second one comes."""
    port, found = free_port(), []
    gang = lambda number: Gang(f"127.0.0.1:{port}", 2, number, mtls=str(folder))
    certificates = read_certificates(str(folder))
    call = lambda number: call_roll(gang(number), 30, bind=f"127.0.0.1:{port}", certificates=certificates)
    first = threading.Thread(target=lambda: found.append(call(0)))
    first.start()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.01)
    disturb(port)
    found.append(call(1))
    first.join(timeout=60)
    return found


CLAIM = json.dumps({"id": 1, "of": 2, "host": "evil", "time": 0.0}).encode() + b"\n"


def say_in_the_open(said):
    def disturb(port):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(said)

    return disturb


def say_by_tls(folder):
    """Return a disturber that connects by TLS with other certificates, or without any, and must hear nothing."""

    heard = []

    def disturb(port):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if folder is not None:
            context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        plain = socket.create_connection(("127.0.0.1", port), timeout=10)
        with context.wrap_socket(plain) as connection, suppress(OSError):  # An alert or the end may come.
            connection.sendall(CLAIM)
            heard.append(connection.recv(1000))
        assert b"".join(heard) == b""

    return disturb


@pytest.mark.parametrize(
    "said", [CLAIM, b"", b"x" * 5000, os.urandom(300), b"\x16\x03\x01" + b"\0" * 200, b"GET /\r\n\r\n"]
)
def test_an_intruder_at_the_roll_call_in_the_open(folders, said):
    found = meet(folders[0], say_in_the_open(said))
    assert [f.problem for f in found] == [None, None]
    assert "evil" not in found[0].hosts.values()


@pytest.mark.parametrize("who", ["with a certificate of another authority", "without a certificate"])
def test_an_intruder_at_the_roll_call_by_tls(folders, who):
    found = meet(folders[0], say_by_tls(folders[1] if "another" in who else None))
    assert [f.problem for f in found] == [None, None]
    assert "evil" not in found[0].hosts.values()


def test_connections_that_say_nothing_do_not_keep_a_process_out(folders):
    silent = []
    try:
        found = meet(
            folders[0], lambda port: silent.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(200))
        )
    finally:
        for connection in silent:
            connection.close()
    assert [f.problem for f in found] == [None, None]


def test_a_process_without_certificates_is_told(folders):
    """Process 0 has certificates and process 1 has none; neither waits longer than for one that is missing."""
    address, found = f"127.0.0.1:{free_port()}", []
    call = lambda number, certificates: call_roll(
        Gang(address, 2, number), 1.5, bind=address, certificates=certificates
    )
    certificates = read_certificates(str(folders[0]))
    first = threading.Thread(target=lambda: found.append(call(0, certificates)))
    first.start()
    with pytest.raises(RunError, match=r"did not reach the coordinator .* within 1\.5 s: (it closed|connection)"):
        call(1, None)
    first.join(timeout=30)
    assert found[0].problem == "1 of 2 processes did not come: 1."


MEMBER = """
import sys, time
from pathlib import Path
from meshkit.distributed.join import join_gang
rank, count = join_gang()
import numpy as np
from jax.experimental.multihost_utils import process_allgather
folder, total, end = Path(sys.argv[1]), 0, False
(folder / f"joined{rank}").touch()
while not end:
    ends, one = process_allgather(np.array([(folder / "end").exists(), rank + 1])).reshape(count, 2).sum(0)
    end, total = bool(ends), total + int(one)
    assert total % 3 == 0
    time.sleep(0.05)
print("summed", flush=True)
"""
INTRUDER = """
import sys
from jaxlib import _jax
address, folder = sys.argv[1:3]
names = {"mtls_cert_file": "certificate.pem", "mtls_key_file": "key.pem", "mtls_ca_file": "ca.pem"}
files = {name: f"{folder}/{file}" for name, file in names.items()} if folder else {}
client = _jax.get_distributed_runtime_client(address, 1, init_timeout=2, shutdown_on_destruction=False, **files)
client.connect()
print("inside", flush=True)
"""


def bare():
    return {name: value for name, value in os.environ.items() if not name.startswith(("MESHKIT_", "XLA_", "JAX_"))}


def start(code, *arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=bare() | {"JAX_PLATFORMS": "cpu"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def throw_bytes(port):
    for said in (b"x" * 100_000, os.urandom(5000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 64, CLAIM):
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(said)
                connection.settimeout(0.2)
                connection.recv(1000)
        except OSError:
            continue


def finish(processes, timeout_s=120):
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


def until(condition, seconds, *processes):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


@needs_jax_with_mtls
@pytest.mark.multiprocess
def test_an_intruder_on_the_coordinators_port_gets_nowhere(folders, tmp_path):
    """Two processes sum, while three kinds of intruders come to the port of jax's coordinator."""
    ours, theirs = folders
    port = free_port()
    job = {"MESHKIT_COORDINATOR": f"127.0.0.1:{port}", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_JOIN_TIMEOUT": "120"}
    members = [start(MEMBER, tmp_path, **job, MESHKIT_PROCESS_ID=str(i), MESHKIT_MTLS=str(ours)) for i in range(2)]
    try:
        until(lambda: all((tmp_path / f"joined{i}").exists() for i in range(2)), 120, *members)
        intruders = [start(INTRUDER, f"127.0.0.1:{port}", folder) for folder in ("", theirs)]
        throw_bytes(port)
        codes, said = finish(intruders)
        (tmp_path / "end").touch()
    finally:
        ended, outputs = finish(members)
    assert codes == [-signal.SIGABRT] * 2, said  # This is how jax says that it was not let in.
    assert not any("inside" in text for text in said)
    assert ended == [0, 0], "\n".join(outputs)
    assert all("summed" in text for text in outputs)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_without_certificates_an_intruder_ends_the_job(tmp_path):
    """This shows what the guide says of a meeting without certificates."""
    port = free_port()
    job = {"MESHKIT_COORDINATOR": f"127.0.0.1:{port}", "MESHKIT_NUM_PROCESSES": "2", "MESHKIT_JOIN_TIMEOUT": "120"}
    members = [start(MEMBER, tmp_path, **job, MESHKIT_PROCESS_ID=str(i)) for i in range(2)]
    try:
        until(lambda: all((tmp_path / f"joined{i}").exists() for i in range(2)), 120, *members)
        finish([start(INTRUDER, f"127.0.0.1:{port}", "")])
    finally:
        ended, outputs = finish(members)
    assert 0 not in ended
    assert any("different incarnation" in text for text in outputs)


EXPERIMENT = "configs/experiments/llama_debug_cpu.toml"
SETS = [
    'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}',
    *("mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4", "profile.steps=", "checkpoint.every=0"),
    *("train.steps=40", "train.evaluate_every=0", "optimizer.warmup_steps=2"),
]


def train(out, *options):
    words = ["--processes", "2", "--devices", "4", *options, EXPERIMENT]
    words += [word for text in SETS for word in ("--set", text)]
    return subprocess.Popen(
        [sys.executable, "-m", "meshkit", "launch", "local", *words, "--max-restarts", "0", "--out", str(out)],
        cwd=ROOT,
        env=bare(),
        stderr=subprocess.PIPE,
        text=True,
    )


def losses(out):
    try:
        return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []


def port_of(out):
    """Return the port of a run's coordinator, from the environment of its processes."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"train" in words and str(out).encode() in words:
                variables = (entry / "environ").read_bytes().decode().split("\0")
                address = next(v for v in variables if v.startswith("MESHKIT_COORDINATOR="))
                return int(address.rsplit(":", 1)[1])
        except (OSError, StopIteration):
            continue
    return None


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
def test_wrong_lines_at_the_roll_call_of_a_launch_without_certificates_end_nothing(tmp_path):
    """A number that is taken, process 0's and another size must not end the job, though the strangers stay."""
    launched, strangers = train(tmp_path / "run"), []
    lines = [
        {"id": i, "of": of, "host": "evil", "time": time.time(), "token": "t"} for i, of in ((1, 2), (0, 2), (1, 3))
    ]
    try:
        until(lambda: port_of(tmp_path / "run") is not None, 60, launched)
        port, ends = port_of(tmp_path / "run"), time.monotonic() + 60
        while len(strangers) < len(lines) and time.monotonic() < ends:
            with suppress(OSError):
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                strangers[-1].sendall(json.dumps(lines[len(strangers) - 1]).encode() + b"\n")
            time.sleep(0.01)
        _, said = launched.communicate(timeout=400)
    finally:
        launched.kill()
        for connection in strangers:
            connection.close()
    assert len(strangers) == len(lines)
    assert launched.returncode == 0, said
    assert len(losses(tmp_path / "run")) == 40


@needs_jax_with_mtls
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc")
def test_a_training_under_attack_gives_the_same_losses(folders, tmp_path):
    """The attack lasts for the whole run; a run without certificates gives the same losses bit for bit."""
    alone = train(tmp_path / "alone")
    _, said = alone.communicate(timeout=400)
    assert alone.returncode == 0, said

    attacked, intruders = train(tmp_path / "attacked", "--mtls"), []
    try:
        until(lambda: port_of(tmp_path / "attacked") is not None, 60, attacked)
        port = port_of(tmp_path / "attacked")
        while attacked.poll() is None:
            throw_bytes(port)
            if len(intruders) < 6:  # Each gives up after 2 s.
                intruders.append(start(INTRUDER, f"127.0.0.1:{port}", ("", folders[1])[len(intruders) % 2]))
            time.sleep(0.5)
        _, said = attacked.communicate(timeout=10)
    finally:
        attacked.kill()
        codes, answers = finish(intruders)
    assert attacked.returncode == 0, said
    assert losses(tmp_path / "attacked") == losses(tmp_path / "alone") != []
    assert 0 not in codes
    assert not any("inside" in text for text in answers)
    assert not (tmp_path / "attacked/mtls").exists()
