"""Test error counters, read from files as the kernel writes them and from answers as NVML gives them."""

import pynvml
import pytest

from meshkit.discover import FixtureProbe
from meshkit.discover.health import ErrorGrowth, error_counts

COUNTERS = "/sys/class/infiniband/mlx5_0/ports/1/counters"


def machine(downed="0", recovered="2"):
    return FixtureProbe(files={f"{COUNTERS}/link_downed": f"{downed}\n", f"{COUNTERS}/link_error_recovery": recovered})


def test_links_are_read_from_sysfs():
    found = {"link failures of mlx5_0 port 1": 3, "link recoveries of mlx5_0 port 1": 2}
    assert error_counts(machine("3")) == found


def test_ethernet_adapters_are_read_but_no_virtual_interface():
    files = {f"/sys/class/net/{name}/carrier_down_count": "2\n" for name in ("eth0", "docker0")}
    files["/sys/class/net/eth0/device/vendor"] = "0x15b3"
    assert error_counts(FixtureProbe(files=files)) == {"link failures of eth0": 2}


def test_what_the_kernel_does_not_count_is_left_out():
    assert error_counts(machine("no PMA", "N/A")) == {}
    assert error_counts(FixtureProbe()) == {}


def test_gpus_are_asked_by_their_number(monkeypatch):
    def remapped(handle):
        if handle == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 1, 4, 0, 0

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", lambda handle, kind, counter: 10 * handle + kind)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetRemappedRows", remapped)
    assert error_counts(FixtureProbe(), [0, 1]) == {
        "uncorrected memory errors of GPU 0": 1,
        "remapped memory rows of GPU 0": 5,
        "uncorrected memory errors of GPU 1": 11,
    }


@pytest.mark.parametrize(
    ("counts", "lines"),
    [
        ([7, 7, 7], [0, 0, 0]),  # These errors happened before the training.
        ([0, 1, 1, 1], [0, 1, 0, 0]),
        ([0, 1, 2, 3, 4, 5], [0, 1, 1, 0, 1, 0]),  # The count is reported again when it has doubled.
        ([5, 0, 0], [0, 0, 0]),  # The driver was loaded again.
    ],
)
def test_growth_is_said_and_said_again_when_it_has_doubled(counts, lines):
    growth = ErrorGrowth()
    found = [growth.look([{"host": "n0", "errors": {"e of GPU 0": c}}, {"host": "n1", "errors": {}}]) for c in counts]
    assert [len(line) for line in found] == lines
    assert not found[1] or found[1][0].startswith("n0: e of GPU 0 rose by 1 since this training began")


def test_two_processes_of_a_host_are_one_voice():
    growth, both = ErrorGrowth(), lambda n: [{"host": "n0", "errors": {"x of mlx5_0 port 1": n}}] * 2
    assert growth.look(both(0)) == []
    assert len(growth.look(both(1))) == 1
