"""Test the changes that make a step fit, each shown by a compile; those of a pipeline keep the pipeline."""

from contextlib import nullcontext

import pytest

from meshkit.cli import main
from meshkit.config.experiment import load
from meshkit.report.schema import OptionPart, ProgramPart, Report, StepPart, WindowPart
from meshkit.search import proposals
from meshkit.search.bounds import Bounds
from meshkit.search.candidate import Outcome
from meshkit.search.proposals import (
    changes,
    cost_text,
    find_alternatives,
    find_remedies,
    other_options,
    plan_fewer_hosts,
)

STAGES = "configs/experiments/llama_pipeline_cpu.toml"
# Sequences are so long and microbatches so few that activations, not the state, do not fit.
TIGHT = (
    'cluster={ name = "dgx_h100", hosts = 2 }',
    "mesh={ pipeline = { infiniband = 2 }, data = 2, fsdp = 2, tensor = 2 }",
    "pipeline.residuals=stash",
    "train.global_batch=256",
    "train.sequence_length=2048",
    'train.remat="none"',
)


def test_every_remedy_of_a_pipeline_keeps_the_pipeline():
    experiment = load(STAGES, TIGHT)
    found = list(changes(experiment, Bounds(experiment)))
    assert found[0].settings == ('pipeline.residuals="recompute"',)
    assert {"remat", "micro-batches", "fsdp"} <= {change.group for change in found}
    for change in found:
        assert load(STAGES, (*TIGHT, *change.settings)).pipeline.axis == "pipeline", change.settings


def test_layers_that_do_not_divide_among_the_stages_are_no_reason_to_rule_a_change_out():
    """Seven layers in four chunks have room for eight."""
    experiment = load(STAGES, TIGHT)
    bounds = Bounds(experiment)
    even = load(STAGES, (*TIGHT, "model.layers=8", 'pipeline.layout="2*4"'))
    assert bounds.bound(experiment).state_bytes == Bounds(even).bound(even).state_bytes


class Answers:
    """Stand in for workers that know the seconds of each change that fits."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def __call__(self, *_):
        return nullcontext(self)

    def plan_chosen(self, choose, take=lambda _: None):
        while (candidate := choose()) is not None:
            self.asked.append(candidate.settings)
            time_s = self.seconds.get(candidate.settings)
            status = "does_not_fit" if time_s is None else "fits"
            candidate.outcome = Outcome(settings=candidate.settings, status=status, time_s=time_s)
            take(candidate)

    def plan(self, candidates):
        waiting = iter(candidates)
        self.plan_chosen(lambda: next(waiting, None))


def plan_of(program: ProgramPart) -> Report:
    return Report(source="plan", window=WindowPart(steps=1, devices=1), step=StepPart(time_s=2.0), program=program)


def test_other_options_of_xla_are_those_in_the_place_of_derived_ones():
    """The user's own options stay; each change is one that loads, and one that does not compile is left out."""
    names = ("pipeline_all_gather", "all_gather_combine_threshold_bytes", "pipeline_all_reduce")
    options = tuple(OptionPart(name=f"xla_gpu_{name}", value=1, why="derived") for name in names)
    report = plan_of(ProgramPart(options=options))
    overrides = ("xla.xla_gpu_pipeline_all_reduce=2",)
    found = list(other_options(load("llama3_8b", overrides), report))
    pipelined, combined, none, predicted, table = (change.settings for change in found)
    assert pipelined == ('xla.xla_gpu_pipeline_all_gather="COLLECTIVE_PIPELINING_MODE_OFF"',)
    assert combined == ("xla.xla_gpu_all_gather_combine_threshold_bytes=31457287",)
    assert none == ("train.derived_options=false",)
    assert (predicted, table) == (('train.pgle="predicted"',), ('train.pgle="table"',))
    for change in found:
        load("llama3_8b", (*overrides, *change.settings))


def test_what_other_options_give_is_ranked_by_the_step(monkeypatch):
    answers = Answers({("train.derived_options=false",): 2.5, ('train.pgle="predicted"',): 1.5})
    monkeypatch.setattr(proposals, "open_workers", answers)
    report = plan_of(ProgramPart())
    slower, faster = reversed(find_alternatives("llama3_8b", (), report))
    assert (faster.cost_s, slower.cost_s) == (-0.5, 0.5)
    assert len(answers.asked) == 3


def test_the_steps_of_fewer_hosts_are_compiled_and_shown_with_their_meshes(monkeypatch):
    monkeypatch.setattr(proposals, "open_workers", Answers({("launch.hosts=2",): 3.0, ("launch.hosts=1",): 8.0}))
    overrides = ("cluster.hosts=3", "mesh.fsdp={infiniband=3}", "launch.min_hosts=1")
    found = plan_fewer_hosts("benchmarks/kill_matrix/three_hosts.toml", overrides, plan_of(ProgramPart()))
    assert [remedy.what for remedy in found] == [
        "2 of 3 hosts, fsdp 2 x tensor 4, accumulate 2",
        "1 of 3 hosts, fsdp 1 x tensor 4, accumulate 3",
    ]
    assert [remedy.cost_s for remedy in found] == [1.0, 6.0]


def test_other_options_are_of_one_size(capsys):
    assert main(["plan", "llama3_8b", "--options", "--sweep", "hosts=1,2"]) == 2
    assert "--options" in capsys.readouterr().err


FULL, DOTS, HOST = 'train.remat="full"', 'train.remat="dots"', 'optimizer.memory="host"'
ON_64 = (
    'cluster={name="dgx_h100", hosts=8}',
    "mesh={fsdp={nvlink=8, infiniband=8}}",
    'rules.preset="fsdp"',
    'model.preset="llama2_13b"',
    "train.global_batch=256",
    "train.sequence_length=4096",
    'train.remat="none"',
)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ({(FULL,): 2.0, (HOST, FULL): 3.0}, [(FULL,)]),  # Host memory is not proposed where recomputing is enough.
        ({(DOTS,): 1.8, (HOST, FULL): 3.0}, [(DOTS,)]),  # Nor is it proposed where recomputing less is enough.
        ({(HOST, FULL): 3.0}, [(HOST, FULL)]),
    ],
)
def test_two_changes_are_not_shown_where_one_of_them_is_enough(seconds, shown, monkeypatch):
    answers = Answers(seconds)
    monkeypatch.setattr("meshkit.search.proposals.open_workers", answers)
    monkeypatch.setattr("meshkit.search.proposals.may_fit", lambda *_: True)
    monkeypatch.setattr("meshkit.search.proposals.TRIES", 60)
    found = find_remedies("llama3_8b", ON_64, step_s=1.6)
    assert [remedy.settings for remedy in found] == shown
    assert [remedy.cost_s for remedy in found] == [pytest.approx(seconds[settings] - 1.6) for settings in shown]
    assert f"+{100 * (seconds[shown[0]] / 1.6 - 1):.1f} %" in cost_text(found[0])
    alone = [i for i, settings in enumerate(answers.asked) if len(settings) == 1]
    assert (HOST, FULL) not in answers.asked or answers.asked.index((HOST, FULL)) > max(alone)


@pytest.mark.slow
@pytest.mark.deviceless
def test_three_remedies_of_a_pipeline_are_compiled_and_hold_when_planned_again():
    """The pool is two thirds of what the step needs; the plan of each remedy fits and needs what was promised."""
    from meshkit.planning.planner import plan_experiment

    whole = plan_experiment(load(STAGES, TIGHT)).report.memory
    tight = (*TIGHT, f"train.memory_fraction={2 / 3 * whole.peak_bytes / whole.capacity_bytes:.5f}")
    assert plan_experiment(load(STAGES, tight)).report.memory.fits is False
    remedies = find_remedies(STAGES, tight, jobs=2)
    assert len(remedies) == 3
    for remedy in remedies:
        memory = plan_experiment(load(STAGES, (*tight, *remedy.settings))).report.memory
        assert memory.fits
        assert (memory.peak_bytes, memory.margin_bytes) == (remedy.peak_bytes, remedy.margin_bytes)
