"""Test `[pipeline]` in a training program: checkpoints without stages, models of others, and refusals."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step
from meshkit.runs.metrics import read_metrics
from meshkit.sharding import build_mesh
from meshkit.verbs.checkpoint.store import CheckpointStore
from meshkit.verbs.train import trainer

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_pipeline_cpu.toml"
SMALL = [
    *("model.vocab=64", "model.embed=32", "model.mlp=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=8"),
    *("train.sequence_length=16", "train.evaluate_every=0", "checkpoint.every=0"),
]
PLAIN = ["pipeline=", "mesh.pipeline=", "mesh.fsdp=4"]
OTHER = ["pipeline.layout=", "pipeline.virtual_stages=1", "pipeline.schedule=1f1b", "mesh.pipeline=4", "mesh.fsdp=1"]
SIZES = ("vocab", "embed", "mlp", "heads", "kv_heads", "head_dim")
UNSIZED = [f"model.{name}=" for name in SIZES]  # These remove the sizes of SMALL.
STAGED = [
    *("model.class=tests.step.staged_model:Staged", "model.preset=", "model.layers=4", "rules.preset=fsdp"),
    *('pipeline.head="replicated"', 'train.precision="fp32"', "pipeline.layout=", "mesh.tensor=", "mesh.fsdp=4"),
    *("train.sequence_length=16", "train.global_batch=16", "pipeline.microbatches=4"),
]

DROPPED = [*SMALL, "model.layers=4", "model.dropout=0.3", "train.remat=full", *STAGED[3:]]


def program_of(*overrides: str):
    spec = load(EXPERIMENT, [*SMALL, *overrides])
    return make_train_step(spec, build_mesh(spec.mesh, spec.cluster))


def bits(tree) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def random_state(program):
    """Return a state as checkpoints hold it, with random numbers in every array."""
    random = np.random.default_rng(0)
    abstract = program.arrangement.saved if program.arrangement else program.abstract_state
    return jax.tree.map(
        lambda x: jax.device_put((100 * random.standard_normal(x.shape)).astype(x.dtype), x.sharding), abstract
    )


def test_a_checkpoint_knows_nothing_of_stages(tmp_path):
    """It is saved from two stages of two chunks of 7 layers, and restored bit by bit in four stages and in none."""
    staged, plain, other = program_of(), program_of(*PLAIN), program_of(*OTHER)
    saved = random_state(staged)
    assert bits(random_state(plain)).keys() == bits(saved).keys()
    assert staged.arrangement is not None
    state = staged.arrangement.from_saved(saved)
    chunks = np.asarray(state.params["layers"]["mlp"]["down"]["kernel"])
    # Chunks 0 and 2 are on the first stage, 1 and 3 on the second, and the last chunk has one place empty.
    assert chunks.shape[0] == 8
    natural = np.asarray(saved.params["layers"]["mlp"]["down"]["kernel"])
    np.testing.assert_array_equal(chunks[:7], natural[[0, 1, 4, 5, 2, 3, 6]])
    assert not chunks[7].any()
    store = CheckpointStore(tmp_path, arrangement=staged.arrangement)
    store.save(state)
    store.close()
    for program in (plain, other, staged):
        store = CheckpointStore(tmp_path, arrangement=program.arrangement)
        restored = store.restore_latest(program.abstract_state)
        store.close()
        assert restored is not None
        for x, like in zip(jax.tree.leaves(restored), jax.tree.leaves(program.abstract_state), strict=True):
            assert (x.shape, x.dtype, x.sharding) == (like.shape, like.dtype, like.sharding)
        back = program.arrangement.to_saved(restored) if program.arrangement else restored
        wanted = bits(saved)
        for path, found in bits(back).items():
            np.testing.assert_array_equal(found, wanted[path], err_msg=path)


def test_arrays_on_their_way_to_disk_stay_cut_over_the_stages():
    """Seven layers do not divide into two stages, but no device may hold all of them for that."""
    arrangement = program_of().arrangement
    assert arrangement is not None
    for x in jax.tree.leaves(arrangement.saved.params["layers"]):
        assert any("pipeline" in (axes if isinstance(axes, tuple) else (axes,)) for axes in x.sharding.spec if axes)


def test_layers_change_their_order_without_whole_copies():
    """Devices exchange shares of layers; none gathers or sums an array that is sharded over the stages."""
    program = program_of()
    arrangement = program.arrangement
    assert arrangement is not None
    saved = random_state(program)
    state = arrangement.from_saved(saved)
    arrangement.to_saved(state)
    for way, given in (("arrange", saved), ("restore", state)):
        text = arrangement.compiled[way].lower(given).compile().as_text()
        assert "all-to-all(" in text
        assert "all-gather(" not in text
        assert "all-reduce(" not in text


@pytest.mark.slow
def test_a_killed_run_goes_on_in_other_stages_and_in_none(tmp_path):
    """However the run is sharded, losses agree up to the rounding of fp32; without a change, bits agree."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    common = ["model.vocab=256", f"data.source={tmp_path / 'corpus'}", 'train.precision="fp32"']
    common += ["optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.global_batch=16"]

    def run(out, *overrides):
        spec = load(EXPERIMENT, [*SMALL, *common, *overrides])
        return trainer.train(spec, tmp_path / out, console=Console(quiet=True))

    def losses(out):
        return [r["loss"] for r in read_metrics(tmp_path / out / "metrics.jsonl")]

    run("straight", "train.steps=4", "train.evaluate_every=4", "train.evaluate_batches=1")
    run("cut", "train.steps=2", "checkpoint.every=2")
    result = run("cut", "train.steps=3", "checkpoint.every=3")
    assert result.resumed_step == 2
    assert losses("cut") == losses("straight")[:3]
    result = run("cut", "train.steps=4", "train.evaluate_every=4", "train.evaluate_batches=1", *PLAIN)
    assert result.resumed_step == 3
    np.testing.assert_allclose(losses("cut"), losses("straight"), rtol=1e-5)
    evaluations = [read_metrics(tmp_path / out / "metrics.jsonl")[-1]["evaluation_loss"] for out in ("cut", "straight")]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)


def test_the_program_says_what_its_pipeline_costs():
    program = program_of()
    assert program.pipeline is not None
    report = program.pipeline.report(4)
    # 2 + 2 + 2 + 1 layers are in 4 chunks of 2, and there are (S - 1) / v more than 4 microbatches.
    assert report.executed_over_useful == pytest.approx(8 / 7 * (4 + 1 / 2) / 4, rel=1e-6)
    assert set(program.deferred) == {"fsdp"}
    assert "xla_gpu_experimental_parallel_collective_overlap_limit" in program.xla_options
    assert program.facts.pipeline is not None
    plain = program_of(*PLAIN)
    assert plain.pipeline is None
    assert plain.facts.pipeline is None
    same = {"model_flops", "model_flops_causal", "tokens", "examples", "parameters", "matmul_parameters"}
    assert program.facts.model_dump(include=same) == plain.facts.model_dump(include=same)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "model"), [("1f1b", STAGED), ("1f1b", DROPPED)])
def test_dropout_does_not_depend_on_stages_or_schedule(schedule, model):
    """Somebody else's model and a Llama draw the same masks in two stages of two chunks as in four stages."""
    found = []
    chunks = ["pipeline.schedule=interleaved_1f1b", "pipeline.virtual_stages=2"]
    one = [f"pipeline.schedule={schedule}", "pipeline.virtual_stages=1", "mesh.pipeline=4", "mesh.fsdp=2"]
    for overrides in (chunks, one):
        spec = load(EXPERIMENT, [*model, *overrides, "rules.logical.act_batch=replicated"])
        program = make_train_step(spec, build_mesh(spec.mesh, spec.cluster))
        state, batch = program.init(), batch_of(program)
        loss, gradients = program.gradients(state, batch)
        assert program.arrangement is not None
        gradients["layers"] = program.arrangement.stack.restore(gradients["layers"])
        found.append((float(loss), bits(gradients)))
        sums = program.evaluate(state, batch)
        assert abs(float(sums["loss_sum"] / sums["weight"]) - float(loss)) > 1e-3  # An evaluation has no dropout.
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for path, wanted in found[0][1].items():
        np.testing.assert_allclose(found[1][1][path], wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=path)


def batch_of(program):
    random = np.random.default_rng(0)
    values = {name: random.integers(0, 64, x.shape).astype(x.dtype) for name, x in program.abstract_batch.items()}
    values["weights"] = (values["weights"] % 2).astype(np.float32)
    return {name: jax.device_put(v, program.abstract_batch[name].sharding) for name, v in values.items()}


@pytest.mark.slow
def test_a_plain_loss_function_gets_the_logits():
    on = ["model.rate=0.0", "train.loss=tests.step.staged_model:own_loss", "pipeline.virtual_stages=1"]
    spec = load(EXPERIMENT, [*STAGED, *on, "pipeline.schedule=1f1b"])
    program = make_train_step(spec, build_mesh(spec.mesh, spec.cluster))
    state, batch = program.init(), batch_of(program)
    sums = program.evaluate(state, batch)
    _, metrics = program.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(sums["loss_sum"] / sums["weight"]), rel=1e-6)
    assert float(metrics["weight"]) == batch["weights"].sum()
    assert "own" in metrics


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["model.layers=1", "pipeline.layout="], "2 stages x 2 virtual stages need at least 4 layers", "stages"),
        (["model.layers=3", "pipeline.layout="], "and the model has 3", "virtual_stages = 1"),
        (["pipeline.layout=3|4"], "the pipeline layout has 2 parts, but 2 stages x 2 virtual stages are 4", ""),
        (["pipeline.layout=1|1|1|1"], "places 4 layers (1|1|1|1)", ""),
        (["pipeline.layout=x"], "is not layers", "numbers of layers"),
        (["pipeline.residuals=everything"], "no residuals 'everything'", "dots_saveable"),
        (["model.vocab=66"], "has size 66, which the 4 GPUs of mesh axis 'pipeline' x 'tensor' do not divide", ""),
        (['rules.compute.mlp="replicated"'], "can only leave out axes of the batch", "the same axes"),
        (
            [*UNSIZED, *STAGED, "model.layers=", "model.class=tests.step.staged_model:NotStaged"],
            "NotStaged cannot be cut into stages: it has no first, layer, last()",
            "models.llama:Llama",
        ),
        (
            [*UNSIZED, *STAGED, 'pipeline.head="vocab_parallel"'],
            "has no parameter with a `vocab` dim",
            'head = "replicated"',
        ),
        (["train.loss=tests.step.staged_model:own_loss"], "takes whole logits", 'pipeline.head = "replicated"'),
        (
            [
                *UNSIZED,
                "model.class=models.vit:ViT",
                "model.preset=",
                "model.layers=",
                "train.loss=models.vit:classification_loss",
            ],
            "cannot be cut into stages",
            "mk.pipeline",
        ),
    ],
)
def test_what_a_model_cannot_do_is_refused(overrides, message, hint):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        program_of(*overrides)
    assert hint in str(error.value)
