"""Test the FLOP of a pipelined Llama, as its training step traces them, against the formula of its schedule."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from meshkit.compile.traced import traced_flops
from meshkit.config.experiment import load
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh

CONFIG = Path(__file__).parents[3] / "configs/experiments/llama_debug_cpu.toml"
SETS = ["mesh.fsdp=", "mesh.tensor=", "rules={preset='data'}", "model.layers=8", "train.global_batch=256"]
BATCH, LENGTH, EMBED, VOCAB, STAGES = 256, 128, 128, 256, 4
# The head runs once forward and twice backward; these are one GPU's FLOP, as all share the vocabulary.
HEAD = 3 * 2 * BATCH * LENGTH * EMBED * VOCAB / 8


def flops(*sets):
    """Return the training program and the matmul FLOP of one GPU."""
    experiment = load(CONFIG, [*SETS, *sets])
    program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
    jaxpr = jax.make_jaxpr(program.gradients)(program.abstract_state, program.abstract_step_batch)
    return program, traced_flops(jaxpr).executed / 8


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches"),
    [
        ("interleaved_1f1b", 2, 8),
        pytest.param("1f1b", 1, 4, marks=pytest.mark.slow),
        pytest.param("1f1b", 1, 32, marks=pytest.mark.slow),
    ],
)
def test_executed_over_useful_flops_are_the_formula(schedule, chunks, microbatches):
    """A pipeline of one stage, which recomputes its layers alike, executes only the useful FLOP."""
    keys = f"axis='pipeline', microbatches={microbatches}"
    _, useful = flops("mesh.data=8", "mesh.pipeline=1", f"pipeline={{{keys}, schedule='1f1b'}}")
    keys += f", schedule='{schedule}', virtual_stages={chunks}"
    program, executed = flops("mesh.data=2", f"mesh.pipeline={STAGES}", f"pipeline={{{keys}}}")
    ratio = (executed - HEAD) / (useful - HEAD)
    assert ratio == pytest.approx((microbatches + (STAGES - 1) / chunks) / microbatches, rel=0.005)
    assert ratio == pytest.approx(program.pipeline.report(microbatches).executed_over_useful, rel=0.005)
