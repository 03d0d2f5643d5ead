"""Define `Probe`, the four queries that discovery makes to a machine, and the classes that answer them.

A live machine, a recorded bundle and a test fixture have the same interface, so all of discovery also runs without a
GPU. `read_nvml` queries the driver through pynvml (distribution nvidia-ml-py). `Snapshot` is the form in which the
driver's answers are recorded, replayed and checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshkit.config.files import LARGEST_FILE_BYTES, short
from meshkit.discover.topology import NvLink, PcieLink, Small, Text
from meshkit.errors import TraceError

_LARGEST_SYSFS_BYTES = 65_536
_COMMAND_TIMEOUT_S = 30.0
_ENGLISH = {"LC_ALL": "C", "LANG": "C"}  # The output of commands must not depend on the user's language.
_SWITCH, _GPU, _IBM = 2, 0, 1  # NVML_NVLINK_DEVICE_TYPE_*
_P2P_NVLINK, _P2P_PCI = 2, 4  # NVML_P2P_CAPS_INDEX_*
_ANCESTORS = {10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # NVML_TOPOLOGY_*, as `topo -m` names them.
BUNDLE_HINT = "a bundle of `meshkit topo record`"
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class FabricState(_Plain):
    """The NVLink domain of a GPU, from nvmlDeviceGetGpuFabricInfoV; the uuid is zero if NVLink ends at the host."""

    state: Literal["not_supported", "not_started", "in_progress", "completed"]
    cluster_uuid: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    clique_id: Annotated[int, Field(ge=0, le=2**32)]
    status: Annotated[int, Field(ge=0, le=2**32)] = 0
    health_mask: Annotated[int, Field(ge=0, le=2**32)] = 0

    @property
    def identity(self) -> str | None:
        """`clusterUuid.cliqueId`, the identity of an NVLink domain; None if NVLink ends at the host."""
        return f"{self.cluster_uuid}.{self.clique_id}" if self.cluster_uuid.strip("0") else None


class Peer(_Plain):
    """The path between this GPU and another one of the machine."""

    index: Small
    nvlink: bool | None = None
    pci: bool | None = None
    ancestor: Literal["PIX", "PXB", "PHB", "NODE", "SYS"] | None = None


class GpuState(_Plain):
    """NVML's answers about one GPU."""

    index: Small
    name: Text
    bus: Text
    uuid: Text | None = None
    memory_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None
    compute_capability: tuple[Small, Small] | None = None
    performance_state: Small | None = None
    pcie: PcieLink = PcieLink()
    nvlinks: Annotated[tuple[NvLink, ...], Field(max_length=64)] = ()
    fabric: FabricState | None = None
    peers: Annotated[tuple[Peer, ...], Field(max_length=64)] = ()


class Snapshot(_Plain):
    """NVML's answers about all GPUs of a machine."""

    driver: Text | None = None
    gpus: Annotated[tuple[GpuState, ...], Field(max_length=64)] = ()


def check_snapshot(value: Any, *, at: str) -> Snapshot:
    """Return NVML's recorded answers as a Snapshot; raise `TraceError` if they are damaged."""
    try:
        snapshot = Snapshot.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the whole"
        what = f"the recorded NVML answers are damaged: {short(where)}: {short(problem['msg'])}."
        raise TraceError(what, at=at, hint=BUNDLE_HINT) from None
    indices = [gpu.index for gpu in snapshot.gpus]
    if len(set(indices)) < len(indices):
        raise TraceError("the recorded NVML answers name a GPU twice.", at=at, hint=BUNDLE_HINT)
    return snapshot


def has_driver() -> bool:
    with contextlib.suppress(_NoDriverError), _session():
        return True
    return False


def read_nvml() -> Mapping[str, Any] | str:
    """Return the driver's answers as plain data, or a short reason why there are none."""
    try:
        with _session() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            gpus = [_read_gpu(nvml, i, handle, handles) for i, handle in enumerate(handles)]
            return {"driver": _ask(nvml, "nvmlSystemGetDriverVersion"), "gpus": gpus}
    except _NoDriverError as error:
        return str(error)


class _NoDriverError(Exception):
    """The driver does not answer; the message is a short reason."""


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """Initialize NVML in a context; raise `_NoDriverError` if there is no driver or it stops answering."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise _NoDriverError("the NVML binding is not installed (pip install nvidia-ml-py)") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _NoDriverError(f"no NVIDIA driver ({error})") from None
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _NoDriverError(f"the NVIDIA driver does not answer ({error})") from None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _ask(nvml: Any, question: str, *arguments: Any) -> Any:
    """Call a function of NVML and return the result; None if this GPU, driver or binding does not support it."""
    try:
        answer = getattr(nvml, question)(*arguments)
    except (nvml.NVMLError, AttributeError):  # An older binding lacks the function (AttributeError).
        return None
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _read_gpu(nvml: Any, index: int, handle: Any, handles: list) -> dict[str, Any]:
    """Return the data of one GPU for a `Snapshot`, with None for values that its driver does not return."""
    ask = functools.partial(_ask, nvml)
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    return {
        "index": index,
        "name": ask("nvmlDeviceGetName", handle) or "unknown",
        "bus": _bus(nvml.nvmlDeviceGetPciInfo(handle)),
        "uuid": ask("nvmlDeviceGetUUID", handle),
        "memory_bytes": memory.total if memory is not None else None,
        "compute_capability": ask("nvmlDeviceGetCudaComputeCapability", handle),
        "performance_state": ask("nvmlDeviceGetPerformanceState", handle),
        "pcie": {
            "generation": ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "width": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "max_generation": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "max_width": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        },
        "nvlinks": _read_nvlinks(nvml, handle),
        "fabric": _read_fabric(nvml, handle),
        "peers": [_read_peer(nvml, handle, other, i) for i, other in enumerate(handles) if i != index],
    }


def _read_nvlinks(nvml: Any, handle: Any) -> list[dict[str, Any]]:
    links = []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, number)
        if state is None:  # This GPU has no link of that number.
            continue
        link: dict[str, Any] = {"active": bool(state)}
        if state:
            kind = _ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
            remote = _ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
            link |= {
                "version": _ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, number),
                "remote": {_SWITCH: "switch", _GPU: "gpu", _IBM: "cpu"}.get(kind),
                "remote_bus": _bus(remote),
            }
        links.append(link)
    return links


def _read_fabric(nvml: Any, handle: Any) -> dict[str, Any] | None:
    """Return the domain of a multi-host NVLink fabric, by the newest structure that binding and driver support."""
    structure = getattr(nvml, "c_nvmlGpuFabricInfo_v3_t", None) or getattr(nvml, "c_nvmlGpuFabricInfoV_t", None)
    if structure is None:  # The binding is older than multi-host NVLink.
        return None
    for kind in dict.fromkeys((structure, getattr(nvml, "c_nvmlGpuFabricInfo_v2_t", structure))):
        info = kind()
        if _ask(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
            continue  # The driver supports only an older structure, or none.
        return {
            "state": _FABRIC_STATES.get(int(info.state), "not_supported"),
            "cluster_uuid": bytes(info.clusterUuid).hex(),
            "clique_id": int(info.cliqueId),
            "status": int(info.status),
            "health_mask": int(info.healthMask),
        }
    return None


def _read_peer(nvml: Any, handle: Any, other: Any, index: int) -> dict[str, Any]:
    nvlink, pci = (_ask(nvml, "nvmlDeviceGetP2PStatus", handle, other, kind) for kind in (_P2P_NVLINK, _P2P_PCI))
    ancestor = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handle, other)
    return {
        "index": index,
        "nvlink": None if nvlink is None else nvlink == 0,
        "pci": None if pci is None else pci == 0,
        "ancestor": _ANCESTORS.get(ancestor),
    }


def _bus(pci: Any) -> str | None:
    bus = getattr(pci, "busId", None)
    return short_bus(bus.decode() if isinstance(bus, bytes) else bus) if bus else None


def short_bus(bus: str) -> str:
    """Return a PCI address as Linux writes it: lower case, and four digits for the domain (NVML writes eight)."""
    domain, _, rest = bus.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else domain


class Probe(Protocol):
    """The queries of discovery; a missing answer is None (or empty), never an exception."""

    name: str

    def read_file(self, path: str) -> str | None:
        """Return the text of a file of the machine."""
        ...

    def list_dir(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder of the machine, sorted."""
        ...

    def run_command(self, *command: str) -> str | None:
        """Return the output of a command; None if it is missing or fails."""
        ...

    def nvml(self) -> Mapping[str, Any] | str:
        """Return NVML's answers as plain data (`Snapshot`), or the reason why there are none."""
        ...


class LiveProbe:
    """Answers from this machine."""

    name = "this machine"

    def read_file(self, path: str) -> str | None:
        try:
            with open(path, "rb") as file:
                return file.read(_LARGEST_SYSFS_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def list_dir(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in Path(path).iterdir()))
        except OSError:
            return ()

    def run_command(self, *command: str) -> str | None:
        program = shutil.which(command[0])
        if program is None:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                capture_output=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
                env=os.environ | _ENGLISH,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:LARGEST_FILE_BYTES].decode("utf-8", errors="replace") if done.returncode == 0 else None

    def nvml(self) -> Mapping[str, Any] | str:
        return read_nvml()


class FixtureProbe:
    """Recorded answers, from a test or a bundle."""

    def __init__(
        self,
        *,
        files: Mapping[str, str] | None = None,
        commands: Mapping[str, str] | None = None,
        nvml: Mapping[str, Any] | str = "no NVIDIA driver",
        name: str = "a fixture",
    ):
        self.name, self.files, self.commands, self.answers = name, dict(files or {}), dict(commands or {}), nvml

    def read_file(self, path: str) -> str | None:
        return self.files.get(path)

    def list_dir(self, path: str) -> tuple[str, ...]:
        prefix = path.rstrip("/") + "/"
        return tuple(sorted({file[len(prefix) :].split("/")[0] for file in self.files if file.startswith(prefix)}))

    def run_command(self, *command: str) -> str | None:
        return self.commands.get(" ".join(command))

    def nvml(self) -> Mapping[str, Any] | str:
        return self.answers


class RecordingProbe(FixtureProbe):
    """Passes queries on to another probe and records its answers."""

    def __init__(self, probe: Probe):
        super().__init__(name=probe.name)
        self.probe = probe

    def read_file(self, path: str) -> str | None:
        text = self.probe.read_file(path)
        if text is not None:
            self.files[path] = text
        return text

    def list_dir(self, path: str) -> tuple[str, ...]:
        return self.probe.list_dir(path)

    def run_command(self, *command: str) -> str | None:
        text = self.probe.run_command(*command)
        if text is not None:
            self.commands[" ".join(command)] = text
        return text

    def nvml(self) -> Mapping[str, Any] | str:
        self.answers = self.probe.nvml()
        return self.answers
