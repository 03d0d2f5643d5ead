"""From pairs of devices to domains, scale-up fabric and the likely GPU: what all readers share."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshkit.config import catalog
from meshkit.discover.identify import Match, family_of, gpu_by_name, gpus_by_nvlinks
from meshkit.discover.matrix import Matrix
from meshkit.discover.topology import Connection, Domain, FoundGpu, FoundNic, Topology, connected


def from_matrix(matrix: Matrix, source: str) -> Topology:
    """The Topology that a matrix of `nvidia-smi topo -m` describes.

    Its GPUs are told by what the text around the matrix calls them, else by their NVLinks alone.
    """
    links = connections(matrix)
    totals = nvlinks_per_gpu([f"gpu{i}" for i in range(len(matrix.gpus))], links)
    called = matrix.gpu_names[0] if len(matrix.gpu_names) == 1 else None
    match = gpu_by_name(called) if called else Match()
    gpus = tuple(
        FoundGpu(
            f"gpu{i}",
            called,
            match.key,
            match.stand_in,
            None,
            matrix.numa.get(name),
            nvlinks_total=totals.get(f"gpu{i}"),
        )
        for i, name in enumerate(matrix.gpus)
    )
    nics = tuple(FoundNic(name, numa=_nic_numa(matrix, name)) for name in matrix.nics)
    numa = sorted({g.numa for g in gpus if g.numa is not None})
    found = Topology(source, gpus, nics, tuple((0, n) for n in numa), links)
    if called:
        found = replace(found, warnings=(f"the text beside the matrix calls the GPUs {called}.",))
    return stand_in_notes(assume_gpu(with_domains(found), heading=matrix.heading))


def connections(matrix: Matrix) -> tuple[Connection, ...]:
    """The pairs of a matrix, with GPUs as `gpu0`, `gpu1`, ... in its order."""
    called = {name: f"gpu{i}" for i, name in enumerate(matrix.gpus)} | {name: name for name in matrix.nics}
    order = [*matrix.gpus, *matrix.nics]
    pairs = [(a, b, matrix.cells[a, b]) for i, a in enumerate(order) for b in order[i + 1 :]]
    return tuple(
        Connection(called[a], called[b], "NV", int(cell[2:]))
        if cell.startswith("NV")
        else Connection(called[a], called[b], cell)
        for a, b, cell in pairs
    )


def nvlinks_per_gpu(gpus: Sequence[str], links: Sequence[Connection]) -> dict[str, int]:
    """Active NVLinks of each GPU: the cell itself behind a switch, the sum of a row where GPUs are wired directly."""
    rows = {g: [c.nvlinks for c in links if g in (c.a, c.b) and c.kind == "NV"] for g in gpus}
    widest = max((max(row) for row in rows.values() if row), default=0)
    if not widest:
        return {}
    direct = bool(gpus_by_nvlinks(max(sum(row) for row in rows.values())))
    return {g: sum(row) if direct else max(row, default=0) for g, row in rows.items()}


def with_domains(found: Topology) -> Topology:
    """The same with NVLink domains: by fabric identity where GPUs have one, else by what NVLink connects."""
    if found.domains or not found.gpus:
        return found
    by_fabric: dict[str, list[str]] = {}
    for gpu in found.gpus:
        if gpu.fabric:
            by_fabric.setdefault(gpu.fabric, []).append(gpu.id)
    domains = [Domain(identity, tuple(ids), spans_hosts=True) for identity, ids in by_fabric.items()]
    wired = [g.id for g in found.gpus if not g.fabric]
    on_switch: list[str] = [
        g.id for g in found.gpus if not g.fabric and any(x.remote == "switch" and x.active for x in g.nvlinks)
    ]
    edges = [(c.a, c.b) for c in found.connections if c.kind == "NV" and c.a in wired and c.b in wired]
    edges += list(itertools.pairwise(on_switch))
    groups = [group for group in connected(wired, edges) if len(group) > 1]
    domains += [Domain(f"host.{i}" if len(groups) > 1 else "host", group) for i, group in enumerate(groups)]
    has_nvlink = bool(domains) or any(g.active_nvlinks for g in found.gpus)
    ids = {g.id for g in found.gpus}
    paths_known = any(c.a in ids and c.b in ids for c in found.connections)
    scale_up = found.scale_up or ("nvlink" if has_nvlink else "pcie" if paths_known else None)
    return replace(found, domains=tuple(domains), scale_up=scale_up)


def assume_gpu(found: Topology, *, heading: Sequence[str] = ()) -> Topology:
    """The same with a catalog key for GPUs that nothing names, if their NVLinks allow one; says so in a warning.

    Args:
        found: what is there.
        heading: prose that may name the model, which then must agree with the NVLinks.
    """
    if not found.gpus or any(g.key or g.name for g in found.gpus) or not found.scale_up:
        return found
    links = max((g.active_nvlinks or 0 for g in found.gpus), default=0)
    keys, family = gpus_by_nvlinks(links), family_of(heading)
    seen = f"their {links} NVLinks" if links else "no NVLink between them"
    if not keys:
        why = f"nothing says what the GPUs are, and no GPU of the catalog has {links} NVLinks."
        return replace(found, warnings=(*found.warnings, why))
    named = [key for key in keys if family and re.search(rf"\b{family}\b", catalog.gpu(key).name)]
    first, *rest = named or keys
    others = f" ({', '.join(rest)} would fit as well)" if rest else ""
    said = f"only the text above says what the GPUs are, {family}" if named else "nothing says what the GPUs are"
    why = f"{said}; from {seen}, {first} is assumed{others}."
    stand_in = "" if named and not rest else "assumed from the number of NVLinks"
    gpus = tuple(replace(g, key=first, stand_in=stand_in) for g in found.gpus)
    return replace(found, gpus=gpus, warnings=(*found.warnings, why))


def apply_platform(found: Topology, row: Mapping[str, object] | None) -> Topology:
    """The same with what is known of a vendor's machine filled in where the file is silent; says so in a warning."""
    if row is None:
        return found
    gpus, nics = found.gpus, found.nics
    key, nic, scale_up = row.get("gpu"), row.get("nic"), row.get("scale_up")
    filled = []
    if isinstance(key, str) and any(g.key is None for g in gpus):
        gpus = tuple(replace(g, key=key) if g.key is None else g for g in gpus)
        filled.append(f"gpu = {key}")
    if isinstance(nic, str) and any(n.key is None for n in nics):
        port = catalog.nic(nic)
        layer = "infiniband" if port.fabric == "infiniband" else "ethernet" if port.rdma else "tcp"
        bits = port.bytes_per_s * 8
        nics = tuple(
            replace(n, key=nic, layer=n.layer or layer, bits_per_s=n.bits_per_s or bits) if n.key is None else n
            for n in nics
        )
        filled.append(f"nic = {nic}")
    if isinstance(scale_up, str) and found.scale_up is None:
        filled.append(f"scale_up = {scale_up}")
    if not filled:
        return found
    why = f"the file does not say {', '.join(filled)}; known of {row['label']}."
    found = replace(found, gpus=gpus, nics=nics, warnings=(*found.warnings, why))
    if found.scale_up is None and isinstance(scale_up, str):
        whole = (Domain("host", tuple(g.id for g in gpus)),) if scale_up == "nvlink" and len(gpus) > 1 else ()
        found = replace(found, scale_up=scale_up, domains=whole)
    return found


def stand_in_notes(found: Topology) -> Topology:
    """The same with a warning for each kind of GPU or NIC that the catalog has not exactly."""
    notes = []
    for name in dict.fromkeys(gpu.name for gpu in found.gpus if gpu.key is None and gpu.name):
        notes.append(f"the catalog has no GPU '{name}'.")
    for name, why in dict.fromkeys((gpu.name, gpu.stand_in) for gpu in found.gpus if gpu.name and gpu.stand_in):
        notes.append(f"{name} is {why}.")
    for why in dict.fromkeys(nic.stand_in for nic in found.nics if nic.stand_in):
        notes.append(f"the ports are {why}.")
    return replace(found, warnings=(*found.warnings, *notes))


def _nic_numa(matrix: Matrix, nic: str) -> int | None:
    """The NUMA node of the GPUs that a NIC reaches without the link between sockets."""
    near = {matrix.numa.get(g) for g in matrix.gpus if matrix.cells[g, nic] not in ("SYS", "X")}
    return near.pop() if len(near) == 1 else None
