"""Which NVLink domain each device of a job is in, as the machines themselves say.

Every process publishes one record (text) with the identities of its own GPUs; all processes read all records. GPUs with
the same identity share a domain. Nothing is guessed from processes or ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from meshkit.discover.machine import discover
from meshkit.discover.nvml import check_snapshot
from meshkit.discover.probe import Probe
from meshkit.errors import ConfigError

_LONGEST_RECORD = 2**20
_RECORD = TypeAdapter(dict[NonNegativeInt, str])
_SAME_VERSION = "the same version of meshkit in every process"


def local_identities(probe: Probe, *, host: str, visible: str | None = None) -> tuple[str, ...]:
    """Identity of the NVLink domain of each GPU that CUDA shows to this process, by CUDA ordinal.

    Args:
        probe: this machine, or a recorded one.
        host: what no other host of the job calls itself (a boot id).
        visible: CUDA_VISIBLE_DEVICES, if it is set.

    Raises:
        ConfigError: no GPU can be asked, or CUDA_VISIBLE_DEVICES names one that is not there.
    """
    found = discover(probe, network=False)
    if not found.gpus:
        raise ConfigError(
            f"the NVLink domain of the attached GPUs cannot be read: {found.nothing_here}.",
            hint="pip install nvidia-ml-py, on a machine with the NVIDIA driver",
        )
    # without NVLink the host is the domain; a GPU that is alone among others is a domain of its own
    identities = {gpu.id: f"{host}.{gpu.id}" if found.domains else f"{host}.host" for gpu in found.gpus}
    for domain in found.domains:
        identities |= dict.fromkeys(domain.gpus, domain.identity if domain.spans_hosts else f"{host}.{domain.identity}")
    by_index = [identities[gpu.id] for gpu in found.gpus]
    return tuple(by_index[i] for i in visible_gpus(probe, len(by_index), visible))


def visible_gpus(probe: Probe, count: int, visible: str | None) -> list[int]:
    """NVML indices by CUDA ordinal; CUDA stops at the first entry that it does not know.

    Args:
        probe: the machine.
        count: its GPUs.
        visible: CUDA_VISIBLE_DEVICES, if it is set.

    Raises:
        ConfigError: it names a slice of a GPU.
    """
    if visible is None:
        return list(range(count))
    answers = probe.nvml() if "gpu-" in visible.lower() else None
    snapshot = check_snapshot(answers, at=probe.name) if isinstance(answers, Mapping) else None
    uuids = [(gpu.uuid or "").lower() for gpu in snapshot.gpus] if snapshot else []
    order = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = entry.lower() if entry.lower().startswith("gpu-") else None
        named = [i for i, uuid in enumerate(uuids) if gpu and uuid.startswith(gpu)]
        if entry.isascii() and entry.isdigit() and int(entry) < count:
            order.append(int(entry))
        elif len(named) == 1:
            order += named
        elif entry.upper().startswith("MIG"):
            raise ConfigError("a slice of a GPU (MIG) has no NVLink domain.", at=f"CUDA_VISIBLE_DEVICES={visible}")
        else:
            break
    return order


def identity_record(identities: Mapping[int, str]) -> str:
    """What a process publishes: the identities of its own devices, by the job's device id."""
    return json.dumps({str(device): identity for device, identity in sorted(identities.items())})


def domain_identities(records: Iterable[str], *, devices: Iterable[int] | None = None) -> dict[int, str]:
    """Device id -> identity of its NVLink domain, from the records of all processes.

    Args:
        records: one per process, as `identity_record` writes them.
        devices: the ids that must be there; any, where it is not given.

    Raises:
        ConfigError: a damaged record, a device in two records, a device in none.
    """
    found: dict[int, str] = {}
    for process, text in enumerate(records):
        for device, identity in _read_record(text, process).items():
            if device in found:
                raise ConfigError(
                    f"device {device} is published by process {process} and by another one.",
                    hint="one process for each device; is a process started twice?",
                )
            found[device] = identity
    missing = sorted(set(devices) - set(found)) if devices is not None else []
    if missing:
        raise ConfigError(
            f"{len(missing)} devices have no NVLink identity, the first is {missing[0]}.",
            hint=_SAME_VERSION,
        )
    return found


def _read_record(text: str, process: int) -> dict[int, str]:
    try:
        return _RECORD.validate_json(text if len(text) <= _LONGEST_RECORD else "")
    except ValidationError:
        what = f"the NVLink identities that process {process} published cannot be read."
        raise ConfigError(what, hint=_SAME_VERSION) from None
