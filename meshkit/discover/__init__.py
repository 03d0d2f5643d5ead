"""Describe a machine, live or recorded, as a Topology. Make a cluster of it, or compare it with a declared cluster.

Input: a Probe of a machine, a recorded bundle, or a file of `nvidia-smi topo -m` or NCCL. Output: `Topology`, a
cluster table, differences, NVLink identities. May be imported by its row of CONTRIBUTING.md and all above. Without jax.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from meshkit.config.files import decode, read_bounded
from meshkit.discover.describe import Mismatch, check, to_cluster
from meshkit.discover.machine import discover, domain_identities, identity_record, local_identities, record, replay
from meshkit.discover.nvidia_smi import parse_matrices, read_matrix
from meshkit.discover.probe import FixtureProbe, LiveProbe, Probe
from meshkit.discover.topology import Topology, merge
from meshkit.discover.topology_files import parse_topology

__all__ = [
    "FixtureProbe",
    "Form",
    "LiveProbe",
    "Mismatch",
    "Probe",
    "Topology",
    "check",
    "discover",
    "domain_identities",
    "identity_record",
    "local_identities",
    "merge",
    "read_recorded",
    "record",
    "to_cluster",
]

Form = Literal["bundle", "xml", "matrix"]


def read_recorded(path: Path, form: Form) -> tuple[Topology, ...]:
    """Return every machine that was recorded in a file or folder.

    Args:
        form: `bundle`: the output of `meshkit topo record`, all of whose hosts become one Topology. `xml`: a topology
            or graph file of NCCL. `matrix`: the output of `nvidia-smi topo -m`.

    Raises:
        ConfigError: there is no such record.
        TraceError: the record is damaged.
    """
    if form == "bundle":
        return (replay(path),)
    data = read_bounded(path, "topology")
    if form == "xml":
        return (parse_topology(data, at=str(path)),)
    text = decode(data, "topology", str(path))
    matrices = parse_matrices(text, at=str(path))
    return tuple(read_matrix(m, str(path) if len(matrices) == 1 else f"{path}:{m.line}") for m in matrices)
