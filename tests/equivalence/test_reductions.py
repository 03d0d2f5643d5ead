"""Test what the compiled step reduces, in which dtype and how often, and that each device makes only its shard."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from meshkit.config.experiment import load
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh, describe_devices

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
SMALL = ["train.global_batch=16", "train.sequence_length=64"]


def program_for(*overrides: str):
    spec = load(EXPERIMENT, [*SMALL, *overrides])
    return make_train_step(spec, build_mesh(spec.mesh, spec.cluster))


def test_every_device_holds_only_its_shard():
    program = program_for()
    state = program.init()
    for made, described in zip(jax.tree.leaves(state), jax.tree.leaves(program.abstract_state)):
        assert made.sharding.is_equivalent_to(described.sharding, made.ndim)
        for shard in made.addressable_shards:
            assert shard.data.shape == described.sharding.shard_shape(made.shape)
    kernel = state.params["layers"]["mlp"]["up"]["kernel"]
    # embed is sharded over fsdp = 2 and mlp over tensor = 2.
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


def test_init_makes_no_whole_copy_on_a_device():
    """The largest array of the compiled init is a shard, an eighth of the whole: embed is sharded over 8 devices."""
    program = program_for("mesh.data=1", "mesh.fsdp=8", "mesh.tensor=1")
    text = program.init.lower().compile().as_text()
    sizes = [int(np.prod([int(d) for d in dims.split(",")])) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    whole = program.abstract_state.params["layers"]["mlp"]["up"]["kernel"]
    assert max(sizes) <= whole.size // 8


def all_reduces_in_loops(text: str) -> list[str]:
    """Return the all-reduce instructions inside the while bodies of a compiled module."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    found, inside = [], False
    for line in text.splitlines():
        header = re.match(r"%?([\w.\-]+) \(.*\{$", line)
        if header:
            inside = header[1] in bodies
        if inside and re.search(r" all-reduce(-start)?\(", line):
            found.append(line)
    return found


def test_data_parallel_gradients_are_reduced_once_a_step():
    """Replicated gradients (plain data parallelism) are reduced after the loop over micro-batches, not in it."""
    pure = ["mesh.data=8", "mesh.fsdp=1", "mesh.tensor=1", 'rules.preset="data"', "train.accumulate=2"]
    program = program_for(*pure)
    text = program.step.lower(program.abstract_state, program.abstract_batch).compile().as_text()
    assert " all-reduce(" in text
    assert all_reduces_in_loops(text) == []


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("reduce_precision", "dtype", "accumulate"),
    [pytest.param("fp32", "f32", 1, marks=pytest.mark.slow), ("bf16", "bf16", 2)],  # test_bytes.py covers fp32 as well.
)
def test_gradients_are_reduced_in_the_precision_asked_for(reduce_precision, dtype, accumulate):
    """The program is compiled for H100s, because XLA:CPU widens every bf16 collective."""
    pytest.importorskip("jax_cuda12_plugin", reason="the `plan` extra is not installed")
    from meshkit.compile.program import compile_absent
    from meshkit.hlo.module import read_program

    overrides = [f'train.reduce_precision="{reduce_precision}"', f"train.accumulate={accumulate}"]
    mesh_shape = ["cluster={name='dgx_h100',hosts=1}", "mesh.data=2", "mesh.fsdp=4", "mesh.tensor=1"]
    spec = load(EXPERIMENT, [*SMALL, *mesh_shape, *overrides])
    mesh = build_mesh(spec.mesh, spec.cluster, devices=describe_devices(spec.cluster))
    program = make_train_step(spec, mesh)
    compiled = compile_absent(
        program.step, (program.abstract_state, program.abstract_batch), mesh=mesh, cluster=spec.cluster
    )
    found = read_program(compiled.hlo, compiled.placement).collectives
    # This is one layer's MLP kernel in bf16, sharded by fsdp; norms and scalars are below it.
    smallest = 128 * 384 * 2 // 4
    reductions = [c for c in found.values() if c.collective in ("all-reduce", "reduce-scatter")]
    reductions = [c for c in reductions if c.payload_bytes >= smallest]
    assert {axis for c in reductions for axis in c.axes} == {"data", "fsdp"}
    embedding = 256 * 128 * 4  # It is always scattered in fp32: see models.embedding.lookup.
    dtypes = {c.dtype for c in reductions if c.payload_bytes not in (embedding, embedding // 4)}
    assert dtypes == {dtype}


@pytest.mark.parametrize(
    ("rules", "share"),
    [(['rules.preset="zero1"'], 1), (['rules.preset="zero2"'], 8)],
    ids=["zero1", "zero2"],
)
def test_zero1_and_zero2_differ_by_their_accumulators(rules, share):
    """The accumulators are whole on every device, or sharded as the optimizer's state is."""
    program = program_for("mesh.fsdp=", "mesh.tensor=", "mesh.data=8", "train.accumulate=2", *rules)
    assert program.facts.gradients_bytes == 4 * program.facts.parameters // share
