"""Test that a bundle replays to the same machine from a folder or a tar, and that it holds no identities."""

import re
import socket

import pytest

from meshkit.config.cluster import Cluster
from meshkit.discover import FixtureProbe, discover, record, to_cluster
from meshkit.discover.machine import pseudonym, replay, scrub_command, scrub_file, scrub_text
from meshkit.errors import ConfigError

SECRET = re.compile(r"444455556666|secretcloud|host17|builder|(3f){16}", re.IGNORECASE)


@pytest.mark.parametrize("name", ["bundle", "bundle.tar", "bundle.tar.gz"])
def test_a_bundle_replays_to_the_same_cluster(hgx, tmp_path, name):
    before = record(tmp_path / name, hgx.probe())
    after = replay(tmp_path / name)
    assert to_cluster(after) == to_cluster(before) == to_cluster(discover(hgx.probe()))
    assert (after.connections, after.numa_nodes, after.rdma) == (before.connections, before.numa_nodes, before.rdma)
    assert [nic.pcie for nic in after.nics] == [nic.pcie for nic in before.nics]


def test_a_bundle_holds_no_identities(rack_host, hgx, tmp_path):
    hgx.commands["nvidia-smi topo -m"] += f"\n{socket.gethostname()}: GUID 0c42:a103:00ab:cdef Serial Number: 1234567\n"
    for number, machine in enumerate((rack_host, hgx)):
        record(tmp_path / f"host{number}", machine.probe())
    text = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert not SECRET.search(text)
    assert "0c42:a103" not in text
    assert "1234567" not in text
    assert socket.gethostname() not in text
    assert "0000:10:00.0" in text  # A PCI address identifies nobody.


def test_pseudonyms_are_the_same_on_every_host(rack_host, tmp_path):
    for host in range(18):
        record(tmp_path / "rack" / f"host{host}", rack_host.probe())
    found = replay(tmp_path / "rack")
    assert [len(domain.gpus) for domain in found.domains] == [72]
    assert Cluster.load(to_cluster(found)).nvlink_domain_size == 72
    assert pseudonym("GPU-00000000-1111-2222-3333-444455556666") == pseudonym("00000000111122223333444455556666")


def test_hosts_of_a_folder_are_in_natural_order(rack_host, hgx, tmp_path):
    for host, machine in (("host10", hgx), ("host2", rack_host)):
        record(tmp_path / host, machine.probe())
    assert [gpu.name for gpu in replay(tmp_path).gpus if gpu.host == 0] == ["NVIDIA GB200"] * 4


def test_a_machine_without_a_gpu_can_be_recorded(tmp_path):
    record(tmp_path / "b", FixtureProbe(nvml="no NVIDIA driver"))
    assert replay(tmp_path / "b").nothing_here == "no NVIDIA driver"


def test_nothing_is_overwritten(hgx, tmp_path):
    record(tmp_path / "b", hgx.probe())
    (tmp_path / "b.tar").write_text("mine")
    for name in ("b", "b.tar"):
        with pytest.raises(ConfigError, match="never overwrites"):
            record(tmp_path / name, hgx.probe())
    assert (tmp_path / "b.tar").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("10.1.2.3 aa:bb:cc:dd:ee:ff", "0.0.0.0 00:00:00:00:00:00"),
        ("fe80:0000:0000:0000:0c42:a103:00ab:cdef", "0000:0000:0000:0000"),
        ("Board Serial: 55\nx", "\nx"),
        ("0000:17:00.0 0001:00:00.0", "0000:17:00.0 0001:00:00.0"),
        ("400 Gb/sec (4X NDR)", "400 Gb/sec (4X NDR)"),
    ],
)
def test_scrub(text, kept):
    assert scrub_text(text) == kept


def test_scrub_keeps_of_a_file_what_discovery_reads():
    assert scrub_file("/sys/x/uevent", "DRIVER=a\nPCI_SLOT_NAME=0000:17:00.0\nID=1\n") == "PCI_SLOT_NAME=0000:17:00.0\n"
    assert scrub_file("/proc/sys/kernel/osrelease", "6.8.0-secret\n") == "6.8.0\n"
    assert scrub_command("lspci -vvv", "00:1 bridge\n\tSerial 1\n\t\tACSCtl: ReqRedir+\n") == "\tACSCtl: ReqRedir+\n"
