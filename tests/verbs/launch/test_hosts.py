"""Test gangs over two hosts: network namespaces of this machine, joined by one cable.

Each has its own name, /etc/hosts and ports, and runs its part of the gang, as `meshkit launch local --hosts 2` does.
What crosses the network really does.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from meshkit.distributed.certificates import make_certificates, write_certificates

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = ["198.18.7.1", "198.18.7.2"]  # RFC 2544 keeps this range for tests.
PROCESS = """
import jax, numpy as np
from meshkit.distributed.join import join_gang
rank, count = join_gang()
from jax.experimental import multihost_utils
gathered = multihost_utils.process_allgather(np.array([rank + 1]))
print(f"gathered {gathered.ravel().tolist()} of {count} on {jax.device_count()} devices")  # In one piece.
"""
LAUNCH = """
import sys
from pathlib import Path
from meshkit.verbs.launch.local import LocalPart
from meshkit.verbs.launch.local import Policy
index, folder, process = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
part = LocalPart(1, 2, hosts=2, host_index=index, coordinator="mk-host0:61000", attempt=0, virtual=True)
sys.exit(part.run([sys.executable, "-c", process], folder, Policy(max_restarts=0), print))
"""


def spaces_are_possible():
    if not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
        return False
    cable = ["ip", "link", "add", "mk0", "type", "veth", "peer", "name", "mk1"]
    command = ["unshare", "--net", "--mount", "--uts", *cable]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Host:
    """A network namespace with a name of its own, kept by a sleeping process."""

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


def environment(**variables):
    """Return the environment of this process without what it sets for itself."""
    own = ("MESHKIT_", "XLA_", "JAX_")
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | variables


def launch(host, folder, process=PROCESS):
    return subprocess.Popen(
        host.command(sys.executable, "-c", LAUNCH, str(host.index), str(folder), textwrap.dedent(process)),
        cwd=ROOT,
        env=environment(),
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
    assert all("gathered [1, 2] of 2 on 4 devices" in output for output in outputs)


@needs_spaces
@pytest.mark.multiprocess
def test_a_failure_on_one_host_ends_the_other(hosts, tmp_path):
    """Nothing on the second host sees the first one's process die; the connection to its coordinator tells."""
    process = PROCESS + "import os, time\nif rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    codes, outputs = finish([launch(host, tmp_path, process) for host in hosts])
    assert all(code not in (0, 2) for code in codes)
    assert "process 0 ended first: killed by SIGKILL" in outputs[0]
    assert "process 1 ended first: killed by SIGABRT" in outputs[1]


EXPERIMENT = "configs/experiments/llama_debug_cpu.toml"
STEPS = 6
SETS = [
    'cluster={gpu="cpu", hosts=2, gpus_per_host=4, scale_up="shared_memory"}',
    *("mesh.fsdp=", "mesh.data={infiniband=2}", "mesh.tensor=4", "profile.steps=", "optimizer.warmup_steps=2"),
    *(f"train.steps={STEPS}", "train.evaluate_every=0", "checkpoint.every=3"),
]


def train(out, *options, before=(), **variables):
    command = [sys.executable, "-m", "meshkit", "launch", "local", "--devices", "4", *options, EXPERIMENT]
    command += [word for text in SETS for word in ("--set", text)]
    return subprocess.Popen(
        [*before, *command, "--out", str(out)],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def listening(host, port):
    """Return a host's IPv4 addresses on which something listens on a port, as the kernel has them: lowest byte first.

    An IPv4 address in the table of IPv6 is the end of a mapped one; all zeros are all interfaces in both.
    """
    tables = subprocess.run(host.command("cat", "/proc/net/tcp", "/proc/net/tcp6"), capture_output=True, text=True)
    rows = [line.split() for line in tables.stdout.splitlines()]
    return {
        row[1].split(":")[0][-8:] for row in rows if len(row) > 3 and row[3] == "0A" and row[1].endswith(f":{port:04X}")
    }


def received_bytes(host):
    shown = subprocess.run(
        host.command("ip", "-s", "-j", "link", "show", f"mk{host.index}"), capture_output=True, text=True, check=True
    )
    return json.loads(shown.stdout)[0]["stats64"]["rx"]["bytes"]


@needs_spaces
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("mtls", [False, True])
def test_a_training_over_two_hosts(hosts, tmp_path, mtls):
    """The losses are those of one machine, gradients cross the cable, and only one interface is open."""
    alone = train(tmp_path / "alone", "--processes", "2")
    said, _ = alone.communicate(timeout=300)
    assert alone.returncode == 0, said

    variables = {}
    if mtls:
        write_certificates(tmp_path / "mtls", make_certificates(["mk-host0"]))
        variables["MESHKIT_MTLS"] = str(tmp_path / "mtls")
    part = ["--processes", "1", "--hosts", "2", "--coordinator", "mk-host0:61000", "--attempt", "0"]
    started = [
        train(
            tmp_path / "two",
            *part,
            "--host-index",
            str(host.index),
            before=[*host.command()[:-1], f"--wd={ROOT}", "--"],
            **variables,
        )
        for host in hosts
    ]
    open_at = set()
    while all(process.poll() is None for process in started):
        open_at |= listening(hosts[0], 61000)
        time.sleep(0.1)
    codes, outputs = finish(started)
    assert codes == [0, 0], "\n".join(outputs)
    assert losses(tmp_path / "two") == losses(tmp_path / "alone") != []
    # This is 198.18.7.1, the lowest byte first; no other interface is open, not even loopback.
    assert open_at == {"010712C6"}
    import jax

    from meshkit.config.experiment import load
    from meshkit.planning.resolved import resolve
    from meshkit.step.state import describe_model

    # Each host receives its half of the summed gradients and sends the other, at least once a step in fp32.
    parameters = sum(
        leaf.size for leaf in jax.tree.leaves(describe_model(resolve(load(ROOT / EXPERIMENT, SETS))).params)
    )
    assert min(map(received_bytes, hosts)) > 4 * parameters * STEPS


RESTARTING = LAUNCH.replace("attempt=0, ", "").replace("max_restarts=0", "max_restarts=2")
KEEPING = """
import os, time
from meshkit.runs.snapshots import slots_here
rank, attempt = os.environ["MESHKIT_PROCESS_ID"], int(os.environ["MESHKIT_ATTEMPT"])
slot = slots_here()[0]
if attempt == 0:
    data = slot.reserve(6)
    data[:] = b"share" + rank.encode()
    slot.seal(data, {"step": 4})
    print("copied", slot.wait_until_copied(100), flush=True)
    time.sleep(600)
print("has", bytes(slot.read()).decode(), flush=True)
"""


def keep_and_lose(hosts, tmp_path, lose):
    """Return exit codes and output of two launchers whose processes have a snapshot, of which host 1 is lost.


    Args:
        hosts: the machines.
        tmp_path: for all that is written.
        lose: called with the launchers; returns the one that goes on in place of that of host 1.
    """
    write_certificates(tmp_path / "mtls", make_certificates(["mk-host0"]))
    env = environment(MESHKIT_MTLS=str(tmp_path / "mtls"))

    def start(host):
        words = [sys.executable, "-u", "-c", RESTARTING, str(host.index), str(tmp_path / "run"), KEEPING]
        with (tmp_path / f"said{host.index}").open("ab") as said:
            return subprocess.Popen(host.command(*words), cwd=ROOT, env=env, stdout=said, stderr=subprocess.STDOUT)

    said = lambda index: (tmp_path / f"said{index}").read_text()
    started = [start(host) for host in hosts]
    try:
        wait_until(lambda: all(f"[{i}] copied True" in said(i) for i in range(2)), said)
        started.append(lose(started, start, said))
        codes = [started[i].wait(200) for i in (0, -1)]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, [said(i) for i in range(2)]


def wait_until(look, said):
    deadline = time.monotonic() + 120
    while not look():
        assert time.monotonic() < deadline, said(0) + said(1)
        time.sleep(0.05)


@needs_spaces
@pytest.mark.multiprocess
def test_a_lost_hosts_share_comes_back_over_the_network(hosts, tmp_path):
    """The certificate has the name of host 0 alone, and only the interfaces between the hosts are used."""

    def lose(started, start, said):
        assert listening(hosts[0], 61000) == {"010712C6"}  # This is 198.18.7.1, the lowest byte first.
        started[1].kill()
        started[1].wait()
        return start(hosts[1])

    codes, outputs = keep_and_lose(hosts, tmp_path, lose)
    assert codes == [0, 0], outputs
    assert "host 1 is lost" in outputs[0]
    assert "host 1 received its share of the snapshots of step 4 from the next host" in outputs[1]
    assert ["[0] has share0" in outputs[0], "[1] has share1" in outputs[1]] == [True, True]


@needs_spaces
@pytest.mark.slow
@pytest.mark.multiprocess
def test_hosts_that_no_longer_reach_each_other_end_the_attempt_and_meet_again(hosts, tmp_path):
    """No process or launcher is gone, and nobody says a word: the kernel ends connections after some 20 s."""

    def lose(started, start, said):
        hosts[1].run("ip", "link", "set", "mk1", "down")
        wait_until(lambda: "host 1 is lost" in said(0) and "host 0 is lost" in said(1), said)
        hosts[1].run("ip", "link", "set", "mk1", "up")
        return started[1]

    codes, outputs = keep_and_lose(hosts, tmp_path, lose)
    assert codes == [0, 0], outputs
    assert ["[0] has share0" in outputs[0], "[1] has share1" in outputs[1]] == [True, True]
    assert "from the next host" not in outputs[1]
