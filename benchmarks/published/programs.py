"""Compiled programs of experiments, kept in a folder: one file per experiment file. Fifth in the flow of the replay.

A program is compiled once; simulating it again with other hardware numbers or another model of kernels costs seconds.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.published.kernels import Kernels, adapted, write_calibration
from benchmarks.published.prefetch import users
from meshkit.compile.choices import choices_for
from meshkit.compile.program import compile_absent
from meshkit.config.experiment import Experiment, load
from meshkit.hlo.module import Schedule, load_module, read_schedule
from meshkit.predict.simulate import Simulation, simulate
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices, use_no_accelerator

_ROOT = Path(__file__).parents[2]
_MAKERS = ("models", "meshkit/compile", "meshkit/parallel", "meshkit/sharding", "meshkit/step")


@dataclass(frozen=True)
class Program:
    """A scheduled program of an experiment's training step.

    Attributes:
        schedule: as read from the compiled module.
        peak_bytes: of the GPU's memory, by the compiler.
        gradients_bytes: of one GPU's accumulators.
        readers: instruction -> those that need its result.
    """

    experiment: Experiment
    schedule: Schedule
    peak_bytes: int
    gradients_bytes: int
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def simulate(self, kernels: Kernels, schedule: Schedule | None = None, gpus: int | None = None) -> Simulation:
        """The simulated step with the kernels of a run.

        Args:
            kernels: what the run had in place of the catalog's numbers.
            schedule: another one on the same cluster.
            gpus: of the whole run, which all wait for the slowest of them; default the cluster's.
        """
        return simulate(schedule or self.schedule, adapted(self.experiment.cluster, kernels), gpus=gpus)


def program_key(toml: str) -> str:
    """Equal for experiments that compile to the same program: their file without its name, jaxlib's version, and the
    code that a program is of (prices, which only schedule profiled runs, apart)."""
    text = re.sub(r"^name = .*\n", "", toml)
    return hashlib.sha256(f"{metadata.version('jaxlib')}\n{_digest(_ROOT)}\n{text}".encode()).hexdigest()[:20]


@functools.cache
def _digest(root: Path) -> str:
    """Of the sources that make a program."""
    found = hashlib.sha256()
    for file in sorted(file for folder in _MAKERS for file in (root / folder).rglob("*.py")):
        found.update(file.relative_to(root).as_posix().encode() + b"\n" + file.read_bytes())
    return found.hexdigest()


def get_program(toml: str, folder: Path) -> tuple[Program, bool]:
    """The program of an experiment file, and whether it had been compiled before.

    Args:
        toml: text of the experiment file.
        folder: keeps programs between runs.

    Raises:
        MeshkitError: what planning the experiment raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = program_key(toml)
    file, text = folder / f"{key}.gz", folder / f"{key}.toml"
    if not text.exists() or text.read_text() != toml:  # a row of another name may have been first
        text.write_text(toml)
    write_calibration(toml, folder)
    experiment = load(text)
    use_no_accelerator()
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    assert isinstance(mesh, DescribedMesh)
    found = _read(file)
    if found is None:
        found = _compile(experiment, mesh)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(gzip.compress(json.dumps(found[0]).encode() + b"\n" + found[1], 1))
        temporary.replace(file)
        cached = False
    else:
        cached = True
    facts, module = found
    loaded = load_module(module)
    schedule = read_schedule(loaded, mesh.placement(experiment.cluster))
    return Program(experiment, schedule, facts["peak_bytes"], facts["gradients_bytes"], users(loaded)), cached


def has_program(toml: str, folder: Path) -> bool:
    """Whether the program of an experiment file is kept in a folder."""
    return (folder / f"{program_key(toml)}.gz").exists()


def _read(file: Path) -> tuple[dict[str, Any], bytes] | None:
    try:
        head, module = gzip.decompress(file.read_bytes()).split(b"\n", 1)
        return json.loads(head), module
    except (OSError, ValueError, EOFError):  # not there, or half written
        return None


def _compile(experiment: Experiment, mesh: DescribedMesh) -> tuple[dict[str, Any], bytes]:
    from meshkit.step.train_step import make_train_step

    program = make_train_step(experiment, mesh)
    compiled = compile_absent(
        program.step,
        (program.abstract_state, program.abstract_batch),
        mesh=mesh,
        cluster=experiment.cluster,
        choices=choices_for(experiment, program, mesh),
    )
    facts = {
        "peak_bytes": compiled.peak_bytes,
        "gradients_bytes": program.facts.gradients_bytes,
        "memory": compiled.memory,
    }
    return facts, compiled.module
