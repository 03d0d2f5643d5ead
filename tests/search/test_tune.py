"""Test tune: what may be tried, what closed forms rule out, the order, and what a killed search keeps."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshkit.config.experiment import load
from meshkit.config.sections import RematMix
from meshkit.errors import ConfigError, RunError
from meshkit.search import workers as pool
from meshkit.search.bounds import Bounds, host_pool_bytes, pool_bytes
from meshkit.search.candidate import Candidate, Outcome
from meshkit.search.order import JOURNAL_FILE, Journal, Pruned, candidates
from meshkit.search.tune_report import pareto
from meshkit.search.tuner import tune_experiment
from meshkit.search.variants import REMATS, PipelineChoice, Variant, factorizations, make_space
from tests.search.made_up import MadeUpWorkers

CONFIGS = Path(__file__).parents[2] / "configs" / "experiments"
LLAMA_70B = str(CONFIGS / "llama3_70b.toml")
ON_64 = ("cluster.hosts=8", "mesh={ fsdp = { nvlink = 8, infiniband = 8 } }", "train.global_batch=128")
TINY = str(CONFIGS / "llama_debug_cpu.toml")
ON_16 = (
    'cluster={ name = "dgx_h100", hosts = 2 }',
    "mesh={ fsdp = { nvlink = 8, infiniband = 2 } }",
    'rules.preset="fsdp"',
)
AXES = ("fsdp", "tensor")  # With these axes, the searches have fewer variants to bound.


def space_of(path, overrides, axes=None):
    experiment = load(path, overrides)
    bounds = Bounds(experiment)
    return (
        experiment,
        bounds,
        make_space(experiment, axes=axes, logical_axes=bounds.logical_axes, remats=bounds.remats(REMATS)),
    )


@pytest.mark.parametrize(("n", "parts"), [(8, 3), (12, 2), (1, 4), (72, 3)])
def test_factorizations_are_all_ordered_products(n, parts):
    found = list(factorizations(n, parts))
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    assert sorted(found) == sorted(f for f in itertools.product(divisors, repeat=parts) if math.prod(f) == n)


def test_every_mesh_of_the_space_fits_the_cluster_and_is_there_once():
    experiment, _, space = space_of(TINY, ON_16)
    for mesh in space.meshes:
        assert mesh.resolve(experiment.cluster) == mesh
        assert set(mesh.axis_names) <= {"data", "fsdp", "tensor"}
        assert "fsdp" in mesh.axis_names  # fsdp is the file's own axis, which a rule may name.
    # 8 GPUs in a domain go to three axes in C(3 + 2, 2) = 10 ways, and 2 domains in 3.
    assert len(set(space.meshes)) == len(space.meshes) == 30


def test_settings_load_to_the_variant_they_are_of():
    """The bounds judge what `--set` would load: rules, micro-batches and recomputation alike."""
    experiment, bounds, space = space_of(TINY, ON_16)
    assert space.settings(space.base) == ()
    checked = 0
    for variant in itertools.islice(space.variants(), 0, None, 37):
        try:
            loaded = load(TINY, (*ON_16, *space.settings(variant)))
            bound = bounds.bound(loaded)
        except ConfigError:
            continue
        assert loaded.mesh == variant.mesh
        assert (loaded.train.accumulate, loaded.train.remat) == (variant.accumulate, variant.remat)
        assert (loaded.rules.gradients == {"embed": ("fsdp",)}) == variant.each_micro_batch
        found = {f"xla.{name}": value for name, value in loaded.xla.items()}
        found |= {"train.pgle": loaded.train.pgle} if loaded.train.pgle != "off" else {}
        assert found == dict(variant.options)
        plain = load(TINY, (*ON_16, *space.settings(Variant(variant.mesh, 1, False, experiment.train.remat))))
        assert bounds.bound(space.changed(plain, variant)) == bound
        checked += 1
    assert checked > 5


def test_a_pipeline_is_a_dimension_once_its_axis_may_have_a_size():
    _, _, space = space_of(LLAMA_70B, ON_64, axes=["fsdp", "tensor", "pipeline"])
    staged = [v for v in space.variants() if v.stages]
    assert {v.stages.schedule for v in staged} == {"1f1b", "interleaved_1f1b"}
    assert all(v.accumulate == 1 and not v.each_micro_batch for v in staged)
    found = next(v for v in staged if v.stages == PipelineChoice(8, "interleaved_1f1b", 2))
    settings = space.settings(found)
    assert 'pipeline.axis="pipeline"' in settings
    assert "pipeline.microbatches=8" in settings
    assert load(LLAMA_70B, (*ON_64, *settings)).pipeline.virtual_stages == 2
    # A stage that runs again as a whole keeps only its input, so recomputation inside it would be a third run.
    assert {v.remat for v in staged if v.stages.residuals == "recompute"} == {"none"}
    # Only the scan over layers moves what it offloads under other layers.
    kept = {remat for remat in space.remats if not isinstance(remat, RematMix)}
    assert {v.remat for v in staged if v.stages.residuals == "stash"} == kept < set(space.remats)


@pytest.mark.parametrize(("path", "cuts"), [(LLAMA_70B, True), (str(CONFIGS / "vit_l16.toml"), False)])
def test_models_of_stacked_layers_may_have_a_pipeline(path, cuts):
    assert Bounds(load(path)).can_pipeline == cuts


def test_the_guess_of_a_pipeline_counts_its_empty_places_and_what_is_in_flight():
    """For llama3_70b in 16 stages, five chunks each hold 80 layers, and four leave 48 of 128 places empty."""
    pipeline = (
        "mesh={ pipeline = { nvlink = 2, infiniband = 8 }, fsdp = 1, tensor = 4 }",
        "rules.preset=all",
        'pipeline={ axis = "pipeline", microbatches = 128, schedule = "interleaved_1f1b", residuals = "stash" }',
        'train.remat="dots"',
    )
    bounds = Bounds(load(LLAMA_70B, ON_64))
    five, four = (bounds.bound(load(LLAMA_70B, (*ON_64, *pipeline, f"pipeline.virtual_stages={v}"))) for v in (5, 4))
    assert four.compute_s == pytest.approx(five.compute_s * (1 + 15 / 512) / (1 + 15 / 640))
    assert four.estimate_s > 1.5 * five.compute_s
    # A plan of the five needs 54.0 GiB; the guess leaves out XLA's working memory.
    assert 0.8 * 54.0 * 2**30 < five.estimate_bytes < 54.0 * 2**30


def test_an_axis_that_no_rule_knows_is_refused():
    with pytest.raises(ConfigError, match="no rule of the experiment knows a mesh axis 'colour'"):
        space_of(TINY, ON_16, axes=["fsdp", "colour"])


def test_the_bounds_of_fsdp_are_the_closed_form():
    """llama3_70b with FSDP over 64 GPUs, recomputing all, has fp32 parameters and two moments in 64 pieces each.

    With them comes the larger of the gradients (fp32, reduced) and the inputs of 80 layers of one GPU's two sequences.
    """
    experiment, bounds, _ = space_of(LLAMA_70B, ON_64)
    bound = bounds.bound(experiment)
    parameters = 70_553_706_496
    assert bound.state_bytes == pytest.approx(12 * parameters / 64, rel=1e-6)
    gradients, inputs = 4 * parameters / 64, 2 * 8192 * 8192 * 2 * 80
    assert bound.needed_bytes == pytest.approx(12 * parameters / 64 + max(gradients, inputs), rel=1e-3)
    # The peak FLOP are model_flops_causal / GPUs / 989.4 TFLOP/s, with the tokens of a step.
    tokens = 128 * 8192
    causal = 6 * (parameters - 128_256 * 8192) * tokens + 6 * 80 * 8192 * 8192 * tokens
    assert bound.compute_s == pytest.approx(causal / 64 / 989.4e12, rel=1e-3)


@pytest.mark.parametrize(
    ("remat", "on_gpu", "on_host"),
    [
        ("full", 8192, 0),
        (("key", "value"), 8192 + 2 * 1024, 0),
        (("projection",), 2 * 8192 + 2 * 1024 + 2 * 28_672, 0),
        (("attention",), 8192, 0),  # Its output is no part of the bound, because attention may not be fused.
        (RematMix(("key", "value"), ("gate", "up")), 8192 + 2 * 1024, 2 * 28_672),
        (RematMix((), ("query", "layer_input")), 0, 2 * 8192),
        ("offload", 0, 8192),
    ],
)
def test_the_bounds_of_what_layers_keep_are_the_closed_form(remat, on_gpu, on_host):
    """llama3_70b keeps this many bf16 numbers for each of one GPU's 16,384 tokens in each of 80 layers.

    Over PCIe 5 they take as long as the host link sustains, one way.
    """
    experiment, bounds, space = space_of(LLAMA_70B, ON_64)
    bound = bounds.bound(space.changed(experiment, replace(space.base, remat=remat)))
    each = 2 * 8192 * 80 * 2
    gradients = 4 * 70_553_706_496 / 64
    assert bound.needed_bytes - bound.state_bytes == pytest.approx(max(gradients, each * on_gpu), rel=1e-3)
    assert bound.host_bytes == each * on_host
    link = experiment.cluster.offload_link()
    assert bound.host_s == pytest.approx(each * on_host / (link.bytes_per_s * link.achieved))


def test_what_exceeds_the_memory_of_a_host_is_ruled_out():
    """gate and up of 80 layers are 140 GiB a GPU, so 1.2 TB a host of eight."""
    small = (*ON_64, "cluster.host_memory_bytes=1e12")
    _, bounds, space = space_of(LLAMA_70B, small, axes=["fsdp"])
    pruned = Pruned()
    found = candidates(LLAMA_70B, small, space, bounds, pruned, lambda _: None)
    assert "140 GiB a GPU at least, of 116 GiB" in pruned.examples["host_memory"]
    kept = [c.variant for c in found if c.variant.remat == RematMix((), ("gate", "up"))]
    assert kept
    assert all(variant.accumulate > 1 for variant in kept)  # One micro-batch at a time is less.
    assert host_pool_bytes(load(LLAMA_70B, small)) == 1e12 / 8


def test_what_is_ruled_out_is_counted_and_the_rest_divides_and_may_fit():
    experiment, bounds, space = space_of(LLAMA_70B, ON_64, axes=["fsdp", "tensor"])
    pruned = Pruned()
    found = candidates(LLAMA_70B, ON_64, space, bounds, pruned, lambda _: None)
    assert sum(pruned.counts.values()) + len(found) == sum(1 for _ in space.variants())
    assert set(pruned.counts) == {"divisibility", "memory"}
    assert "kv_heads" in pruned.examples["divisibility"]
    assert all(c.bound.needed_bytes <= pool_bytes(experiment) for c in found)
    assert [c.guess_s for c in found] == sorted(c.guess_s for c in found)


# ------------------------------------------------------------------------------------- the search, with made-up plans


def made_up(settings, time_s, *, peak=10, fits=True, rows=(), compute_s=None):
    return Outcome(
        settings=settings,
        status="fits" if fits else "does_not_fit",
        num_gpus=16,
        time_s=time_s,
        compute_s=compute_s or time_s / 2,
        exposed_s=time_s - (compute_s or time_s / 2),
        peak_bytes=peak,
        rows=rows,
    )


@pytest.fixture
def plans(monkeypatch):
    """Return a function that replaces the processes: `time_s` gives the step time of settings."""
    return lambda time_s: MadeUpWorkers(lambda settings: made_up(settings, time_s(settings))).install(monkeypatch)


def by_length(settings):
    """Return a time: the base takes 1 s, and each other choice, but for XLA's options, saves 10 ms."""
    return 1.0 - 0.01 * sum(not s.startswith(("xla.", "train.pgle")) for s in settings)


def test_the_experiment_as_it_is_comes_first_and_the_winner_is_the_fastest(plans, tmp_path):
    workers = plans(by_length)
    report = tune_experiment(TINY, ON_16, out=tmp_path, budget=12, jobs=2, axes=AXES)
    assert workers.planned[0] == ()
    assert len(workers.planned) == report.compiled == 12
    assert report.winner.time_s == min(o.time_s for o in report.outcomes)
    assert not report.winner_is_base
    assert (tmp_path / "winner.toml").exists()
    assert load(tmp_path / "winner.toml") is not None
    assert json.loads((tmp_path / "tune.json").read_text())["schema"] == "meshkit.tune/1"
    stages = [o.stage for o in report.outcomes]
    assert stages[0] == "base"
    assert set(stages[1:6]) == {"estimate"}
    assert set(stages[7:]) == {"neighbour"}


def test_a_killed_search_goes_on_where_it_was(plans, tmp_path):
    plans(by_length)
    tune_experiment(TINY, ON_16, out=tmp_path, budget=6, jobs=1, axes=AXES)
    with (tmp_path / JOURNAL_FILE).open("ab") as file:
        file.write(b'{"settings": ["mesh=')  # The killed process was writing this line.
    workers = plans(by_length)
    report = tune_experiment(TINY, ON_16, out=tmp_path, budget=8, jobs=1, axes=AXES)
    assert (report.compiled, report.reused, len(workers.planned)) == (8, 6, 2)
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert len(lines) == 1 + 8
    assert all(json.loads(line) for line in lines)


def test_a_folder_with_another_search_is_refused(plans, tmp_path):
    plans(by_length)
    tune_experiment(TINY, ON_16, out=tmp_path, budget=1, jobs=1, axes=AXES)
    with pytest.raises(ConfigError, match="this folder holds a search of another experiment"):
        tune_experiment(TINY, (*ON_16, "train.global_batch=32"), out=tmp_path, budget=1, jobs=1, axes=AXES)


@pytest.mark.parametrize("content", ["no json\n", '{"schema": "other"}\n', "[]\n"])
def test_a_file_that_is_no_record_is_refused(tmp_path, content):
    (tmp_path / JOURNAL_FILE).write_text(content)
    with pytest.raises(ConfigError, match="this file is not the record of a search"):
        Journal(tmp_path, load(TINY, ON_16))


def test_an_outcome_that_failed_is_tried_again(tmp_path):
    journal = Journal(tmp_path, load(TINY, ON_16))
    journal.add(Outcome(settings=("a=1",), status="error", error="the machine was out of memory"))
    journal.add(made_up((), 1.0))
    assert set(Journal(tmp_path, load(TINY, ON_16)).outcomes) == {()}


def test_guesses_are_put_right_by_what_was_compiled_of_their_kind(plans):
    """Micro-batches take a hundred times the guess: after the first, no other is compiled for its guess."""
    workers = plans(lambda settings: 100.0 if any("accumulate" in s for s in settings) else 1.0)
    tune_experiment(TINY, ON_16, budget=20, jobs=1, axes=["fsdp"])
    assert sum(any("accumulate" in s for s in settings) for settings in workers.planned[:10]) <= 1


def test_what_must_be_slower_than_the_best_is_never_compiled(plans):
    """A base of 1 ns beats every bound, because any FLOP at peak take longer, so nothing is left."""
    workers = plans(lambda _: 1e-9)
    report = tune_experiment(TINY, ON_16, budget=50, jobs=2, axes=AXES)
    assert workers.planned == [()]
    assert report.winner_is_base
    assert report.why == ("no compiled variant is faster than the experiment as it is.",)
    assert {p.rule: p.count for p in report.pruned}["time"] > 100
    assert report.left == 0


def test_no_plan_at_all_is_an_error(monkeypatch):
    MadeUpWorkers(lambda settings: Outcome(settings=settings, status="error", error="XLA died")).install(monkeypatch)
    with pytest.raises(RunError, match=r"none of 3 variants could be planned; the first: XLA died"):
        tune_experiment(TINY, ON_16, budget=3, jobs=1, axes=AXES)


def test_a_cluster_of_cpus_is_refused():
    with pytest.raises(ConfigError, match="has no GPUs, and tune only predicts GPUs"):
        tune_experiment(TINY)


def test_pareto_keeps_what_no_other_beats():
    outcomes = [
        made_up(("a=1",), 3.0, peak=1),
        made_up(("b=1",), 1.0, peak=5),
        made_up(("c=1",), 2.0, peak=5),  # b is faster with no more memory.
        made_up(("d=1",), 0.5, peak=9, fits=False),
        made_up(("e=1",), 2.0, peak=3),
    ]
    assert pareto(outcomes) == (1, 4, 0)


def test_a_worker_that_dies_costs_its_variant_only(tmp_path, monkeypatch):
    """The processes are real, and end by themselves at a setting that says so."""
    (tmp_path / "dying_worker.py").write_text(
        "import os\n"
        "from meshkit.children import serve\n"
        "def answer(request):\n"
        "    if request['settings'] == ['die=1']:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return {'settings': request['settings'], 'status': 'fits', 'time_s': 1.0}\n"
        "serve(answer)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pool, "MODULE", "dying_worker")
    found = [Candidate((settings,)) for settings in ("a=1", "die=1", "b=1", "c=1")]
    with pool.open_workers({"experiment": "x.toml"}, 2) as workers:
        workers.plan(found)
    assert [c.outcome.status for c in found] == ["fits", "error", "fits", "fits"]
    assert found[1].outcome.error == "the planning process died (SIGKILL)."


# ------------------------------------------------------------------------------------------------- with real compiles


@pytest.mark.slow
@pytest.mark.deviceless
def test_the_search_of_70b_finds_that_its_widest_values_can_wait_in_host_memory(tmp_path, monkeypatch):
    """Six compiles beside the experiment find that offloading gate and up beats recomputing all.

    The plan finds their copies hidden, and the winner needs no more than a host has.
    """
    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path / "cache"))
    report = tune_experiment(LLAMA_70B, ON_64, out=tmp_path, budget=7, jobs=2, axes=["fsdp"])
    remat = load(tmp_path / "winner.toml").train.remat
    assert isinstance(remat, RematMix)
    assert {"gate", "up"} <= set(remat.offload)
    assert report.winner.compute_s < report.base.compute_s
    assert 0 < report.winner.host_bytes * 8 <= 2e12
    assert any("which the model itself does not need" in text for text in report.why)


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_search_ends_with_a_winner_that_plan_reproduces(tmp_path, monkeypatch):
    """Four compiles of a tiny model on 16 absent GPUs find a winner.

    Its file then plans to the same program and seconds, and compiles nothing.
    """
    from meshkit.planning.planner import plan_experiment

    monkeypatch.setenv("MESHKIT_CACHE", str(tmp_path / "cache"))
    report = tune_experiment(TINY, ON_16, out=tmp_path, budget=4, jobs=2)
    assert report.compiled == 4
    assert [o.status for o in report.outcomes] == ["fits"] * 4
    assert report.winner.time_s <= report.base.time_s
    again = plan_experiment(load(tmp_path / "winner.toml")).report
    assert again.compile.cached
    assert again.program.fingerprint == report.winner.fingerprint
    assert again.step.time_s == report.winner.time_s
    for outcome in report.outcomes[1:]:
        loaded = load(TINY, (*ON_16, *outcome.settings))
        bound = Bounds(loaded).bound(loaded)
        assert bound.time_s <= outcome.time_s
        assert bound.needed_bytes <= outcome.peak_bytes
