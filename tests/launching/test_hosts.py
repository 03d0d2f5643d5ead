"""Two hosts: network namespaces of this machine, joined by one cable. What crosses the network really does.

Each has its own name, /etc/hosts and ports, and runs its part of the gang, as `meshkit launch local --hosts 2` does.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ["198.18.7.1", "198.18.7.2"]  # of the range that RFC 2544 keeps for tests
PROCESS = """
import jax, numpy as np
from meshkit.sharding.gang import join_gang
rank, count = join_gang()
from jax.experimental import multihost_utils
gathered = multihost_utils.process_allgather(np.array([rank + 1]))
print("gathered", gathered.ravel().tolist(), "of", count, "on", jax.device_count(), "devices", flush=True)
"""
LAUNCH = """
import sys
from pathlib import Path
from meshkit.launching.local import LocalPart
from meshkit.launching.supervisor import Policy, Supervisor
index, folder, process = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
part = LocalPart(1, 2, hosts=2, host_index=index, coordinator="mk-host0:61000", attempt=0)
command = [sys.executable, "-c", process]
supervisor = Supervisor(
    command, lambda n: part.environments(n, virtual=True), folder, Policy(max_restarts=0), print,
    logs=folder / f"host{index}", first_rank=part.first_rank,
)
sys.exit(supervisor.run())
"""


def spaces_are_possible():
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
        return False
    command = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "ip",
        "link",
        "add",
        "mk0",
        "type",
        "veth",
        "peer",
        "name",
        "mk1",
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Host:
    """A network namespace with a name of its own; a sleeping process keeps it."""

    def __init__(self, index):
        self.index = index
        self.holder = subprocess.Popen(["unshare", "--net", "--mount", "--uts", "sleep", "600"])
        deadline = time.monotonic() + 20
        while os.readlink(f"/proc/{self.holder.pid}/ns/uts") == os.readlink("/proc/self/ns/uts"):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def command(self, *words):
        return ["nsenter", "-t", str(self.holder.pid), "--net", "--mount", "--uts", "--", *words]

    def run(self, *words):
        subprocess.run(self.command(*words), check=True, capture_output=True, timeout=20)

    def prepare(self, hosts_file):
        self.run("hostname", f"mk-host{self.index}")
        self.run("mount", "--bind", str(hosts_file), "/etc/hosts")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{ADDRESSES[self.index]}/24", "dev", f"mk{self.index}")
        self.run("ip", "link", "set", f"mk{self.index}", "up")


@pytest.fixture
def hosts(tmp_path):
    made = []
    try:
        made += [Host(0)]
        made += [Host(1)]
        pids = [str(host.holder.pid) for host in made]
        cable = ["ip", "link", "add", "mk0", "netns", pids[0], "type", "veth", "peer", "name", "mk1", "netns", pids[1]]
        subprocess.run(cable, check=True, capture_output=True, timeout=20)
        names = tmp_path / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{a} mk-host{i}\n" for i, a in enumerate(ADDRESSES)))
        for host in made:
            host.prepare(names)
        yield made
    finally:
        for host in made:
            host.holder.kill()
            host.holder.wait()


def launch(host, folder, process=PROCESS):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MESHKIT_", "XLA_", "JAX_"))}
    return subprocess.Popen(
        host.command(sys.executable, "-c", LAUNCH, str(host.index), str(folder), textwrap.dedent(process)),
        cwd=ROOT,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(started):
    try:
        outputs = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [process.returncode for process in started], outputs


needs_spaces = pytest.mark.skipif(
    not spaces_are_possible(), reason="needs network namespaces: unshare, nsenter and ip, and the right to use them"
)


@needs_spaces
@pytest.mark.multiprocess
def test_a_gang_over_two_hosts(hosts, tmp_path):
    codes, outputs = finish([launch(host, tmp_path) for host in hosts])
    assert codes == [0, 0], "\n".join(outputs)
    for rank, output in enumerate(outputs):
        assert f"[{rank}] gathered [1, 2] of 2 on 4 devices" in output


@needs_spaces
@pytest.mark.multiprocess
def test_a_failure_on_one_host_ends_the_other(hosts, tmp_path):
    """Nothing on the second host can see the first one's process die; the connection to its coordinator tells."""
    process = PROCESS + "import os, time\nif rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    codes, outputs = finish([launch(host, tmp_path, process) for host in hosts])
    assert all(code not in (0, 2) for code in codes)
    assert "process 0 ended first: killed by SIGKILL" in outputs[0]
    assert "process 1 ended first: killed by SIGABRT" in outputs[1]
