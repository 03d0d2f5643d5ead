"""Test that reading the stored programs gives the stored results, to the last digit.

`tests/data/hlo/programs` has the programs as XLA left them, and the results as JSON; see `tests/data/SOURCES.md`. After
an intended change, `python -m tests.hlo.test_programs_read` writes the JSON anew.
"""

import dataclasses
import gzip
import json
import lzma
from collections.abc import Mapping, Set
from pathlib import Path

import numpy as np
import pytest

from meshkit.config.mesh import Placement
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Module, read_program
from meshkit.trace.captured import traced_program

DATA = Path(__file__).parent.parent / "data"
PROGRAMS = DATA / "hlo" / "programs"
EIGHT = {"data": 8}
MESHES = {  # These are the axes of each program, with four GPUs in a domain.
    "attention": EIGHT,
    "branches": EIGHT,
    "convolutions": EIGHT,
    "eight_bits": EIGHT,
    "experts": EIGHT,
    "in_pieces": {"data": 2, "tensor": 4},
    "matmuls": EIGHT,
    "offloaded": EIGHT,
    "peeled": {"fsdp": 8},
    "pipeline": {"pipeline": 4, "data": 2},
    "h100_debug": {"data": 1},
    "h100_llama_1b": {"data": 1},
}


def serialized(name):
    """Return the program's `HloModuleProto` as bytes."""
    if name.startswith("h100"):
        return gzip.decompress((DATA / "traces" / name / "program-p0.hlo.pb.gz").read_bytes())
    return lzma.decompress((PROGRAMS / f"{name}.pb.xz").read_bytes())


def plain(value):
    """Return the value as JSON has it; of a dataclass only the fields that differ from their defaults."""
    if dataclasses.is_dataclass(value):
        kept = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        defaults = {f.name: f.default for f in dataclasses.fields(value)}
        return {n: plain(v) for n, v in kept.items() if v not in (defaults[n], {}, ())}
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Set):
        return sorted(value)
    return list(map(plain, value)) if isinstance(value, (list, tuple)) else value


def read(name):
    """Return everything that is read of a program, except its fingerprint, as JSON has it."""
    mesh = MESHES[name]
    placement = Placement.from_shape(tuple(mesh), tuple(mesh.values()), gpus_per_domain=4)
    module = Module(serialized(name))
    program = read_program(module, placement)
    traced = traced_program(module, program, range(placement.num_partitions))
    works: dict = {}  # Equal works get the same number.
    nodes = [dataclasses.replace(n, work=(works.setdefault(n.work, len(works)),)) for n in traced.graph_nodes]
    found = {
        "computations": program.schedule.computations,
        "entry": program.schedule.entry,
        "notes": program.schedule.notes,
        "collectives": program.collectives,
        "participants": program.participants,
        "instructions": read_instructions(module),
        "nodes": nodes,
        **{part: getattr(traced, part) for part in ("fused", "containers", "expected", "kernels")},
    }
    return plain(found)


def stored(name):
    return json.loads(lzma.decompress((PROGRAMS / f"{name}.json.xz").read_bytes()))


@pytest.mark.parametrize("name", MESHES)
def test_a_program_is_read_as_before(name):
    found, before = read(name), stored(name)
    assert found.keys() == before.keys()
    for part, value in before.items():
        if isinstance(value, dict):
            different = [k for k in {**value, **found[part]} if found[part].get(k) != value.get(k)]
            assert not different, (part, different[0], found[part].get(different[0]), value.get(different[0]))
            assert list(found[part]) == list(value), part
        assert found[part] == value, part


def main():
    """Write the JSON of every program."""
    for name in MESHES:
        content = json.dumps(read(name), separators=(",", ":")).encode()
        (PROGRAMS / f"{name}.json.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
