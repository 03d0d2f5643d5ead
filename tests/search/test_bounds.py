"""Test that bounds are below the plan, for Muon and for scans over several kinds of layers; and estimates on racks."""

import pytest

from meshkit.config.experiment import load
from meshkit.planning.planner import absent_step, plan_experiment
from meshkit.search.bounds import Bounds
from meshkit.search.proposals import changes
from meshkit.search.tuner import tune_experiment
from tests.search.made_up import MadeUpWorkers
from tests.search.test_tune import CONFIGS, ON_16, TINY, made_up

GPT_OSS, FOUR_RACKS = str(CONFIGS / "gpt_oss_120b.toml"), str(CONFIGS / "deepseek_v3_gb200.toml")
DEBUG = (
    'cluster={ name = "dgx_h100", hosts = 1 }',
    'model.preset="gpt_oss_debug"',
    "mesh={ fsdp = 2, expert = 4 }",
    "train.global_batch=64",
    "train.sequence_length=512",
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize(("file", "overrides"), [(TINY, ON_16), (GPT_OSS, DEBUG)])
def test_the_state_is_that_of_the_step(file, overrides, algorithm, dtype):
    """AdamW has two moments, of which the second is fp32, and Muon has one; the step also counts its updates."""
    asked = (*overrides, f'optimizer.algorithm="{algorithm}"', f'optimizer.dtype="{dtype}"')
    experiment = load(file, asked)
    facts, found = absent_step(experiment).facts, Bounds(experiment).bound(experiment).state_bytes
    assert found <= facts.parameters_bytes + facts.optimizer_bytes <= found + 64


def test_layers_of_a_pair_are_counted_once():
    """The scan over 18 pairs keeps the input of each, and the queries of both layers of each."""
    experiment = load(GPT_OSS, ('train.remat=["query"]', "train.global_batch=8192"))
    bound, none = (Bounds(e).bound(e) for e in (experiment, load(GPT_OSS, ("train.global_batch=8192",))))
    tokens = 8192 * 4096 / 256
    assert none.needed_bytes - none.state_bytes == pytest.approx(2 * tokens * 18 * 2880, rel=1e-6)
    assert bound.needed_bytes - none.needed_bytes == pytest.approx(2 * tokens * 36 * 64 * 64, rel=1e-6)


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "remat",
    [*(pytest.param(r, marks=pytest.mark.slow) for r in ('"full"', '["query", "key", "value"]')), '["projection"]'],
)
def test_the_bounds_of_pairs_of_layers_are_below_the_plan(remat):
    experiment = load(GPT_OSS, (*DEBUG, f"train.remat={remat}", 'optimizer.algorithm="muon"', "model.layers=8"))
    bound, report = Bounds(experiment).bound(experiment), plan_experiment(experiment).report
    assert bound.needed_bytes <= report.memory.peak_bytes
    assert bound.time_s <= report.step.time_s


def test_experts_over_racks_are_estimated_slower_than_experts_inside_them():
    inside = load(FOUR_RACKS)
    over = load(FOUR_RACKS, ("mesh={ fsdp = 4, expert = { nvlink = 16, infiniband = 4 } }",))
    of_inside, of_over = (Bounds(e).bound(e) for e in (inside, over))
    # The weights are then gathered over NVLink, but of what a GPU sends its experts 3/4 leave the rack: 65,536 tokens
    # to 8 experts each, five times in each of 58 layers.
    sent = 0.75 * 5 * 58 * 65_536 * 8 * 7168 * 2
    seconds = sent / inside.cluster.link("infiniband").bytes_per_s
    assert of_over.estimate_s > max(of_inside.estimate_s, 0.9 * seconds)
    assert of_over.link_s < 0.1 * seconds  # an exchange is no bound


def test_remedies_leave_expert_and_tensor_axes_inside_the_racks():
    tight = ("train.accumulate=1",)
    experiment = load(FOUR_RACKS, tight)
    found = list(changes(experiment, Bounds(experiment)))
    assert found
    for change in found:
        mesh = load(FOUR_RACKS, (*tight, *change.settings)).mesh
        crossing = {axis.name for axis in mesh.axes if axis.number("infiniband") > 1}
        assert not crossing & {"expert", "tensor", "context"}, change.settings


def test_tune_also_tries_a_power_of_two_of_each_rack(monkeypatch, tmp_path):
    """72 GPUs do not divide the model's dims as 64 do; the fastest on the experiment's hosts wins."""

    def planned(settings):
        part = "cluster.gpus_used_per_domain=64" in settings
        return made_up(settings, 0.9 if part else 1.0).model_copy(update={"num_gpus": 64 if part else 72})

    MadeUpWorkers(planned).install(monkeypatch)
    rack = ('cluster="gb200_nvl72"', "mesh={ fsdp = 72 }", 'rules.preset="fsdp"', "train.global_batch=576")
    report = tune_experiment(TINY, rack, out=tmp_path, budget=12, jobs=2, axes=["fsdp", "tensor"])
    assert {o.num_gpus for o in report.outcomes} == {64, 72}
    assert report.winner.num_gpus == 64
    won = load(tmp_path / "winner.toml")
    assert (won.cluster.gpus_used_per_domain, won.mesh.size, won.train.global_batch) == (64, 64, 576)
    part = ('cluster={name="gb200_nvl72", gpus_used_per_domain=64}', "mesh={ fsdp = 64 }", *rack[2:])
    alone = tune_experiment(TINY, part, budget=4, jobs=2, axes=["fsdp"])
    assert not any("gpus_used" in setting for o in alone.outcomes for setting in o.settings)
