"""A model file of NVIDIA's topograph: which hosts share an NVLink domain.

Only its `blocks` matter here: nodes, and the accelerator domain that they are annotated with. The file is YAML; the few
forms that topograph writes are read strictly, line by line, and anything else is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshkit.config.bounded import short
from meshkit.discover.topology import Domain, FoundGpu, Topology, platform
from meshkit.errors import TraceError

_BLOCK = re.compile(r"- switch: (\S+)", re.ASCII)
_NODES = re.compile(r"- ([A-Za-z0-9_.-]*)(?:\[([0-9]{1,9})-([0-9]{1,9})\])?", re.ASCII)
_DOMAIN = re.compile(r"[A-Za-z0-9_./-]*/domain: (\S+)", re.ASCII)
_HINT = "a topograph model with blocks of nodes and their accelerator domain"
_MOST_HOSTS = 65_536


@dataclass
class _Block:
    """Hosts of one NVLink domain."""

    switch: str
    line: int
    nodes: list[str]
    domain: str = ""


def _parse(text: str, *, at: str) -> tuple[_Block, ...]:
    """The blocks of a model file.

    Raises:
        TraceError: it has none, or one is damaged.
    """
    blocks: list[_Block] = []
    section = ""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.split("#")[0].rstrip()
        if not line:
            continue
        if not line[0].isspace() and not line.startswith("-"):
            section = line.removesuffix(":") if line.endswith(":") else ""
        elif section == "blocks":
            _block_line(line.strip(), number, blocks, f"{at}:{number}")
    seen: set[str] = set()
    for block in blocks:
        repeated = seen & set(block.nodes)
        if not block.nodes or not block.domain or repeated:
            lacks = "has no domain" if block.nodes else "has no nodes"
            what = f"names host {min(repeated)} again" if repeated else lacks
            raise TraceError(f"block {block.switch} {what}.", at=f"{at}:{block.line}", hint=_HINT)
        seen |= set(block.nodes)
    if not blocks:
        raise TraceError("the model has no blocks, so no NVLink domain.", at=at, hint=_HINT)
    return tuple(blocks)


def from_rack(text: str, *, at: str) -> Topology:
    """The Topology of a rack model; the name of its kind of rack says how many GPUs a host has.

    Raises:
        TraceError: a damaged file, or a rack that is not known.
    """
    blocks = _parse(text, at=at)
    row = platform((at.rsplit("/", 1)[-1],))
    if row is None or "gpus_per_host" not in row:
        what = "the model does not say how many GPUs a host has, and its name is of no rack that is known."
        raise TraceError(what, at=at, hint="a file whose name has nvl72 in it")
    per_host = row["gpus_per_host"]
    gpus: list[FoundGpu] = []
    domains: dict[str, list[str]] = {}
    hosts = [block for block in blocks for _ in block.nodes]
    for host, block in enumerate(hosts):
        ids = [f"host{host}.gpu{local}" for local in range(per_host)]
        gpus += [FoundGpu(name, key=row["gpu"], fabric=block.domain, host=host) for name in ids]
        domains.setdefault(block.domain, []).extend(ids)
    return Topology(
        source=at,
        gpus=tuple(gpus),
        domains=tuple(Domain(identity, tuple(ids), True) for identity, ids in domains.items()),
        hosts=len(hosts),
        scale_up=row["scale_up"],
        assumed=(("nic", row["nic"]), ("nics_per_host", per_host)),
        warnings=(f"the model names hosts and domains only; the rest is known of {row['label']}.",),
    )


def _block_line(line: str, number: int, blocks: list[_Block], where: str) -> None:
    start, nodes, domain = _BLOCK.fullmatch(line), _NODES.fullmatch(line), _DOMAIN.fullmatch(line)
    if start:
        blocks.append(_Block(start[1], number, []))
    elif blocks and domain:
        blocks[-1].domain = domain[1]
    elif blocks and nodes and (nodes[1] or nodes[2]):
        blocks[-1].nodes += _expand(nodes, where)
        if sum(len(block.nodes) for block in blocks) > _MOST_HOSTS:
            raise TraceError(f"the model has more than {_MOST_HOSTS} hosts.", at=where, hint=_HINT)
    elif not (blocks and line in ("nodes:", "annotations:")):
        raise TraceError(f"'{short(line)}' is no line of a block.", at=where, hint=_HINT)


def _expand(nodes: re.Match, where: str) -> list[str]:
    if nodes[2] is None:
        return [nodes[1]]
    first, last = int(nodes[2]), int(nodes[3])
    if not 0 <= last - first < _MOST_HOSTS:
        raise TraceError(f"'{short(nodes[0])}' is no range of hosts.", at=where, hint=_HINT)
    width = len(nodes[2]) if nodes[2].startswith("0") else 0
    return [f"{nodes[1]}{n:0{width}d}" for n in range(first, last + 1)]
