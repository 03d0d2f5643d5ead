"""Test how identities of NVLink domains are read on each host, exchanged, and turned into the order of devices."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from meshkit.config.cluster import Cluster
from meshkit.discover import domain_identities, identity_record, local_identities
from meshkit.errors import ConfigError
from meshkit.sharding.mesh import order_by_domain


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int


def test_gpus_of_a_rack_share_an_identity_and_hosts_do_not(rack_host, hgx, cards):
    (one,) = set(local_identities(rack_host.probe(), host="a"))
    assert {one} == set(local_identities(rack_host.probe(), host="b"))
    assert set(local_identities(hgx.probe(), host="a")) == {"a.host"}
    assert set(local_identities(cards.probe(), host="a")) == {"a.host"}


def test_a_gpu_outside_has_an_identity_of_its_own(rack_host):
    rack_host.gpus[3]["fabric"]["clique_id"] = 2
    assert len(set(local_identities(rack_host.probe(), host="a"))) == 2


def test_visible_devices_choose_and_order(hgx, rack_host):
    rack_host.gpus[3]["fabric"]["clique_id"] = 2
    all_four = local_identities(rack_host.probe(), host="a")
    assert local_identities(rack_host.probe(), host="a", visible="3,0") == (all_four[3], all_four[0])
    assert local_identities(rack_host.probe(), host="a", visible="GPU-00000003") == (all_four[3],)
    assert local_identities(rack_host.probe(), host="a", visible="1,-1,2") == (all_four[1],)  # CUDA stops at -1 too.
    with pytest.raises(ConfigError, match="MIG"):
        local_identities(rack_host.probe(), host="a", visible="MIG-1")
    hgx.nvml["gpus"] = []
    with pytest.raises(ConfigError, match="cannot be read"):
        local_identities(hgx.probe(), host="a")


def test_recorded_identities_order_the_devices_of_a_rack(rack_host):
    """In two racks of two hosts, listed in turn with one process per GPU, the domain is not the host."""
    here = local_identities(rack_host.probe(), host="x")
    rack_host.gpus[:] = [gpu | {"fabric": gpu["fabric"] | {"cluster_uuid": "ab" * 16}} for gpu in rack_host.gpus]
    other = local_identities(rack_host.probe(), host="x")
    identities = [*here, *other, *here, *other]  # Hosts 0 and 2 are one rack, 1 and 3 the other.
    records = [identity_record({device: identity}) for device, identity in enumerate(identities)]
    devices = [Device(i, i) for i in range(16)]
    cluster = Cluster.load("gb200_nvl72", hosts=4, nvlink_domain_size=8)
    ordered = order_by_domain(devices, domain_identities(records, devices=range(16)), cluster)
    assert [d.id for d in ordered] == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]


def test_a_wrong_cluster_is_refused(hgx):
    identities = dict(enumerate(local_identities(hgx.probe(), host="a") * 2))
    records = [identity_record({i: f"host{i // 8}.{name}"}) for i, name in identities.items()]
    found = domain_identities(records)
    with pytest.raises(ConfigError, match=r"form 2 domains of \[8, 8\]"):
        order_by_domain(
            [Device(i, i // 8) for i in range(16)], found, Cluster.load("dgx_h100", hosts=2, nvlink_domain_size=16)
        )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": "b"}', '{"0": 1}', '{"-1": "a"}', "[" * 100_000, "0=a;1=b"])
def test_a_damaged_record_is_one_clear_error(text):
    with pytest.raises(ConfigError, match="process 1 published cannot be read"):
        domain_identities([identity_record({0: "a"}), text])


def test_devices_that_are_missing_or_published_twice():
    with pytest.raises(ConfigError, match="device 0 was published by process 1"):
        domain_identities([identity_record({0: "a"}), identity_record({0: "b"})])
    with pytest.raises(ConfigError, match="1 devices have no NVLink identity, the first of them is 2"):
        domain_identities([identity_record({0: "a", 1: "b"})], devices=range(3))


WORKER = """
import sys
process, count, port = map(int, sys.argv[1:])
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"127.0.0.1:{port}", count, process, coordinator_bind_address=f"127.0.0.1:{port}")
from jax._src import distributed
from meshkit.sharding.mesh import order_by_domain
from meshkit.config.cluster import Cluster
from meshkit.discover import domain_identities, identity_record
client = distributed.global_state.client
# recorded: two hosts in turn, so that the order by domain differs from the order by process
mine = {device.id: f"host{process % 2}.host" for device in jax.local_devices()}
client.key_value_set(f"identity/{process}", identity_record(mine))
records = [client.blocking_key_value_get(f"identity/{p}", 60_000) for p in range(count)]
identities = domain_identities(records, devices=[d.id for d in jax.devices()])
cluster = Cluster.load({"gpu": "cpu", "hosts": 2, "gpus_per_host": count // 2, "scale_up": "shared_memory"})
print("order", [d.process_index for d in order_by_domain(jax.devices(), identities, cluster)], flush=True)
client.wait_at_barrier("done", 60_000)
"""


@pytest.mark.multiprocess
def test_processes_exchange_identities_through_the_coordination_service():
    count = 4
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {"XLA_FLAGS": ""}
    env["PYTHONPATH"] = os.getcwd()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(process), str(count), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for process in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * count, outputs[0][1][-2000:]
    assert {out.strip() for out, _ in outputs} == {"order [0, 2, 1, 3]"}


def test_identities_take_no_commands_where_nvml_answers(hgx):
    hgx.commands = {"nvidia-smi topo -m": "damaged"}
    assert set(local_identities(hgx.probe(), host="a")) == {"a.host"}
