"""Test reading NVML through its binding, with a stand-in for the module that answers as the real one does."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from meshkit.discover import FixtureProbe, discover
from meshkit.discover.probe import check_snapshot, has_driver, read_nvml


class NVMLError(Exception):
    pass


class FabricV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    ]


class FabricV3(FabricV2):
    pass


def fabric(handle, reference):
    info = reference._obj
    if isinstance(info, FabricV3):
        raise NVMLError("a driver that knows version 2")
    info.clusterUuid[:] = [handle + 1] * 16
    info.cliqueId, info.state, info.status = 7, 3, 0
    return 0


def link(handle, number):
    if number >= 18:
        raise NVMLError("invalid argument")
    return int(number != 17)


def not_supported(*arguments):
    raise NVMLError("not supported")


@pytest.fixture
def pynvml(monkeypatch):
    """Return a module that has two GPUs behind a switch, each in a fabric of its own, with link 17 down."""
    module = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=36,
        c_nvmlGpuFabricInfo_v2_t=FabricV2,
        c_nvmlGpuFabricInfo_v3_t=FabricV3,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda h: SimpleNamespace(busId=f"00000000:{h + 1:02X}:00.0"),
        nvmlDeviceGetName=lambda h: "NVIDIA GB200",
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}",
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=2**37),
        nvmlDeviceGetCudaComputeCapability=lambda h: (10, 0),
        nvmlDeviceGetPerformanceState=not_supported,
        nvmlDeviceGetCurrPcieLinkGeneration=lambda h: 5,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda h: 5,
        nvmlDeviceGetCurrPcieLinkWidth=lambda h: 16,
        nvmlDeviceGetMaxPcieLinkWidth=lambda h: 16,
        nvmlDeviceGetNvLinkState=link,
        nvmlDeviceGetNvLinkVersion=lambda h, n: 5,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda h, n: 2,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda h, n: SimpleNamespace(busId=b"00000000:FF:00.0"),
        nvmlDeviceGetGpuFabricInfoV=fabric,
        nvmlDeviceGetP2PStatus=lambda a, b, kind: 0 if kind == 2 else 5,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_every_answer_is_read(pynvml):
    snapshot = check_snapshot(read_nvml(), at="nvml")
    first = snapshot.gpus[0]
    assert (snapshot.driver, len(snapshot.gpus), first.bus, first.name) == ("580.1", 2, "0000:01:00.0", "NVIDIA GB200")
    assert (len(first.nvlinks), sum(x.active for x in first.nvlinks), first.nvlinks[0].version) == (18, 17, 5)
    assert (first.nvlinks[0].remote, first.nvlinks[0].remote_bus) == ("switch", "0000:ff:00.0")
    assert first.fabric.identity == "01" * 16 + ".7"
    assert first.performance_state is None
    assert (first.peers[0].nvlink, first.peers[0].pci, first.peers[0].ancestor) == (True, False, None)


def test_gpus_of_two_fabrics_are_two_domains(pynvml):
    found = discover(FixtureProbe(nvml=read_nvml()))
    assert [domain.gpus for domain in found.domains] == [("gpu0",), ("gpu1",)]
    assert found.gpus[0].active_nvlinks == 17


def test_an_old_binding_or_driver_leaves_gaps_only(pynvml):
    del pynvml.c_nvmlGpuFabricInfo_v3_t, pynvml.c_nvmlGpuFabricInfo_v2_t, pynvml.nvmlDeviceGetNvLinkRemoteDeviceType
    pynvml.nvmlDeviceGetMemoryInfo = pynvml.nvmlDeviceGetP2PStatus = not_supported
    (first, _) = check_snapshot(read_nvml(), at="nvml").gpus
    assert (first.fabric, first.memory_bytes, first.nvlinks[0].remote, first.peers[0].nvlink) == (None,) * 4


def test_a_guest_that_sees_no_switch_still_has_a_domain(pynvml):
    pynvml.nvmlDeviceGetNvLinkRemoteDeviceType = lambda h, n: 255
    pynvml.nvmlDeviceGetGpuFabricInfoV = not_supported
    found = discover(FixtureProbe(nvml=read_nvml()))
    assert next(c for c in found.connections if {c.a, c.b} == {"gpu0", "gpu1"}).path == "NV17"
    assert [domain.gpus for domain in found.domains] == [("gpu0", "gpu1")]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetPciInfo"])
def test_a_driver_that_does_not_answer_is_a_reason(pynvml, broken):
    assert has_driver()
    setattr(pynvml, broken, not_supported)
    assert "not supported" in read_nvml()
    assert has_driver() == (broken != "nvmlInit")


def test_a_missing_binding_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in read_nvml()
    assert not has_driver()
