"""The process of a rehearsal that owns the GPU: `python -m meshkit.verbs.rehearse.rehearsal_gpu REQUEST`.

jax is told of a topology in which this process's GPU is one of many (`jax_mock_gpu_topology`), and of an NCCL that does
nothing. The program is then that of process 0 of the whole job; it runs on data of the right shapes, and is captured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshkit.compile.attached import compile_step
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, load
from meshkit.errors import MeshkitError
from meshkit.sharding.mesh import build_mesh
from meshkit.step.data import Batches, check_tokens, open_data, vocab_of
from meshkit.step.train_step import TrainProgram, make_train_step
from meshkit.trace.capture import Capture, CapturedStep
from meshkit.trace.captured import TRACE_FOLDER

WARM_UP = 2
IDS_FILE = "ids.json"  # of a run folder: which ids the steps had
# Values repeat after so many: drawing gigabytes of random numbers would take longer than the rehearsal.
_BLOCK = 1 << 20
_SCALE = 0.02  # of weights, as models draw them: zeros would keep the GPU cooler than it will be
_SMALLEST_VOCABULARY = 256


def main(request: dict[str, Any]) -> None:
    """Compiles, runs and captures the experiment of a request; its code is beside the file that the user named."""
    experiment = load(request["experiment"])
    if request["beside"]:
        experiment = replace(experiment, path=Path(request["beside"]))
    mock(experiment.cluster)
    devices = sorted(jax.devices(), key=lambda d: d.id)
    rehearse(experiment, devices, Path(request["folder"]), request["steps"])


def mock(cluster: Cluster) -> None:
    """Tells jax, before it starts, of the cluster's GPUs, and to do nothing where they would communicate.

    It reads this from no environment. A process for each GPU, since only one GPU is real.
    """
    topology = f"{cluster.num_nvlink_domains}x{cluster.gpus_used_per_domain}x1"  # domains x processes x GPUs
    jax.config.update("jax_mock_gpu_topology", topology)


def rehearse(experiment: Experiment, devices: list[Any], folder: Path, steps: int) -> None:
    """Runs the experiment's step on what of the devices is this process's, and captures `steps` of it.

    Args:
        experiment: the job.
        devices: of the whole job, by GPU index; mocked but for those of this process.
        folder: the run folder.
        steps: to capture, after WARM_UP others.
    """
    mesh: Any = build_mesh(experiment.mesh, experiment.cluster, devices=devices)
    program = make_train_step(experiment, mesh)
    compiled = compile_step(program, experiment)
    state, batch = filled(program, experiment)
    (folder / IDS_FILE).write_text(json.dumps(ids_of(batch)), encoding="utf-8")
    capture = Capture(
        folder / TRACE_FOLDER,
        CapturedStep(compiled.program, mesh, experiment.cluster, experiment.mesh, program.facts, compiled.options),
        steps=(WARM_UP, WARM_UP + steps - 1),
        processes=(jax.process_index(),),
    )
    for step in range(WARM_UP + steps):
        capture.before(step, state)
        state, metrics = compiled.program(state, batch)
        capture.after(step, (state, metrics))


def filled(program: TrainProgram, experiment: Experiment) -> tuple[Any, Any]:
    """A state and a batch of a program's shapes and layouts, of which this process holds its part.

    The batch is the first of the experiment's data where that can be read here: how long look-ups and the gradient of
    their table take depends on which ids there are, and how often.
    """
    random = np.random.default_rng(0)
    state, model = program.abstract_state, program.model.abstract_model()
    # Signs decide how many bits change from one number to the next, and so what power a matmul takes.
    weights = jax.tree.map(lambda leaf: _filled(leaf, random, signed=True), state.params)
    # second moments must not be negative
    others = jax.tree.map(lambda leaf: _filled(leaf, random, signed=False), replace(state, params=()))
    try:
        data = open_data(experiment)
        check_tokens(experiment, data, model)
        first = Batches(data.train, program.abstract_step_batch, experiment.data.seed).iterate(
            0, program.steps_per_call
        )
        batch = program.stack([*first]) if program.stack else next(first)
    except MeshkitError as e:
        sys.stderr.write(f"the batch is made up, with ids at random: {e.message}\n")
        ids = vocab_of(model) or _SMALLEST_VOCABULARY
        batch = jax.tree.map(lambda leaf: _filled(leaf, random, signed=False, ids=ids), program.abstract_batch)
    return replace(others, params=weights), batch


def ids_of(batch: Any) -> dict[str, dict[str, int]]:
    """Of each array of integers: how many this process holds, how many different ones, the most of one."""
    found = {}
    for name, array in batch.items():
        if np.issubdtype(array.dtype, np.integer):
            held = {str(shard.index): np.asarray(shard.data).ravel() for shard in array.addressable_shards}
            counts = np.unique(np.concatenate([*held.values()]), return_counts=True)[1]
            found[name] = {"count": int(counts.sum()), "different": len(counts), "most": int(counts.max())}
    return found


def _filled(
    leaf: jax.ShapeDtypeStruct, random: np.random.Generator, *, signed: bool, ids: int = _SMALLEST_VOCABULARY
) -> jax.Array:
    """An array of the leaf's shape and layout, of which only this process's shards hold anything.

    Floats are normally distributed, or their absolute values are; integers are so many ids, each as often.
    """

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = int(np.prod(shape, dtype=np.int64))
        if np.issubdtype(leaf.dtype, np.integer):
            block = random.integers(0, ids, min(size, _BLOCK))
        else:
            block = random.standard_normal(min(size, _BLOCK), dtype=np.float32) * _SCALE
            block = block if signed else np.abs(block)
        return np.resize(block, shape).astype(leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
