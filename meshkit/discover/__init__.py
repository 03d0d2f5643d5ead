"""Discovery: what a machine is, as a Topology, and from there a cluster.

Probe (live machine, bundle, fixture) ─┐
nvidia-smi topo -m, NCCL XML, rack ────┴─> Topology ─> to_cluster(), check(), domain_identities()
"""

from __future__ import annotations

from pathlib import Path

from meshkit.discover.bundle import record, replay
from meshkit.discover.check import Finding, check
from meshkit.discover.damage import decode, read_bounded
from meshkit.discover.describe import compute_nics, to_cluster
from meshkit.discover.identity import domain_identities, identity_record, local_identities
from meshkit.discover.machine import discover
from meshkit.discover.matrix import parse_matrices
from meshkit.discover.nccl_xml import parse_topology
from meshkit.discover.probe import FixtureProbe, LiveProbe, Probe
from meshkit.discover.rack import from_rack
from meshkit.discover.topology import Topology, merge
from meshkit.discover.wiring import from_matrix

__all__ = [
    "Finding",
    "FixtureProbe",
    "LiveProbe",
    "Probe",
    "Topology",
    "check",
    "compute_nics",
    "discover",
    "domain_identities",
    "from_matrix",
    "from_rack",
    "identity_record",
    "local_identities",
    "merge",
    "parse_matrices",
    "parse_topology",
    "read_matrix",
    "read_xml",
    "record",
    "replay",
    "to_cluster",
]


def read_matrix(path: Path) -> tuple[Topology, ...]:
    """Every machine in a file with output of `nvidia-smi topo -m`; `path` may also be a rack model of topograph.

    Raises:
        ConfigError: no such file.
        TraceError: a damaged one.
    """
    text = decode(read_bounded(path, "topology"), "topology", str(path))
    if path.suffix in (".yaml", ".yml"):
        return (from_rack(text, at=str(path)),)
    matrices = parse_matrices(text, at=str(path))
    return tuple(from_matrix(m, str(path) if len(matrices) == 1 else f"{path}:{m.line}") for m in matrices)


def read_xml(path: Path) -> Topology:
    """The machine in NCCL's topology XML, or graph XML.

    Raises:
        ConfigError: no such file.
        TraceError: a damaged one.
    """
    return parse_topology(read_bounded(path, "topology"), at=str(path))
