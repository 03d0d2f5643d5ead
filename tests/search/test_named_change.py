"""Test the change that a plan's verdict names, estimated and compiled, in made-up reports of real experiments."""

import pytest

import meshkit as mk
from meshkit.config.experiment import load, load_any
from meshkit.report.causes import add_plan_findings
from meshkit.report.schema import MemoryPart, ProgramPart, RemedyPart
from meshkit.report.views.words import shorten_verdict
from meshkit.search.named_change import find_change
from tests.report.test_causes import GIB, info, made_of

FREE = MemoryPart(fits=True, margin_bytes=54 * GIB)
AGAIN = {
    "fusion.2": info("elementwise", "jit(step)/transpose/rematted_computation/mlp/mul"),
    "dot.2": info(source="jit(step)/transpose/rematted_computation/mlp/dot"),
}
REMEDY = RemedyPart(settings=("train.accumulate=2",), what="2 micro-batches", time_s=1.2, margin_bytes=GIB)
FASTER = RemedyPart(settings=('train.pgle="predicted"',), what="by prices", time_s=0.93, margin_bytes=GIB)


def recomputing(memory=FREE, exposed_s=0.02, matmuls_s=0.12, **parts):
    """Return the plan of a step of 1 s, of which 160 ms are recomputed, matmuls among them."""
    seconds = [("dot.1", 0.84 - exposed_s), ("fusion.2", 0.16 - matmuls_s), ("dot.2", matmuls_s)]
    return made_of([*seconds, ("reduce-scatter.1", exposed_s)], infos=AGAIN, memory=memory, parts=parts)


def judged(made, experiment):
    report, planned = made
    return add_plan_findings(report, planned, find_change(report, experiment, planned))


def verdict(made, *overrides):
    return judged(made, load("llama3_8b", overrides)).verdict


def test_what_is_recomputed_is_kept_where_memory_is_free():
    said = verdict(recomputing())
    assert said.startswith(
        "16.0 % of the step of 1.00 s is recomputation of the forward pass. "
        '54.0 GiB are free: train.remat="dots" would take about 880 ms and '
    )
    assert "(estimated). It fits, with 54.0 GiB a GPU to spare." in said
    named = judged(recomputing(), load("llama3_8b"))
    assert named.change in shorten_verdict(named, 80)
    finding = named.findings[0]
    assert finding.hint == "--set 'train.remat=\"dots\"', which `meshkit plan` then compiles"


@pytest.mark.parametrize(
    ("gib", "policy"),
    [
        (300, 'train.remat="none" would take about 840 ms'),
        (5, 'train.remat=["query", "key", "value"] would take about 983 ms'),
    ],
)
def test_as_much_is_kept_as_memory_is_free_for(gib, policy):
    memory = MemoryPart(fits=True, margin_bytes=gib * GIB)
    assert policy in verdict(recomputing(memory, matmuls_s=0.15))


def test_attention_that_runs_again_is_kept():
    """Where all projections are kept, no matmul is saved, but 100 ms of attention are.

    The memory is that of 16,384 tokens in each of 32 layers, 4096 numbers in bf16 over 2 ways of tensor parallelism.
    """
    again = {"attention.2": info("attention", "jit(step)/transpose/rematted_computation/attention")}
    made = made_of(
        [("dot.1", 0.9), ("attention.2", 0.1)], infos=again, memory=MemoryPart(fits=True, margin_bytes=5 * GIB)
    )
    said = verdict(made, 'train.remat=["projection"]')
    assert 'train.remat="dots" would take about 900 ms and 2.00 GiB (estimated)' in said


def test_a_change_stands_behind_the_dearest_cause_and_says_what_it_mends():
    said = verdict(recomputing(exposed_s=0.3))
    assert said.startswith(
        "30.0 % of the step of 1.00 s is exposed communication. 16.0 % is recomputation of the forward pass, and "
        '54.0 GiB are free: train.remat="dots" would take about 880 ms'
    )
    assert said.count("recomputation") == 1
    named = judged(recomputing(exposed_s=0.3), load("llama3_8b"))
    assert named.change in str(mk.render(named)).replace("\n", " ")


@pytest.mark.parametrize(
    ("memory", "overrides"),
    [
        (MemoryPart(fits=True, margin_bytes=0), ()),
        (MemoryPart(fits=False, margin_bytes=-GIB), ()),
        (FREE, ('train.remat="none"',)),
    ],
)
def test_nothing_is_named_where_there_is_no_room_or_nothing_left_to_keep(memory, overrides):
    made = recomputing(memory)
    assert verdict(made, *overrides) == made[0].verdict


def test_a_pipeline_whose_stages_run_again_is_told_of_stash():
    mesh = "mesh={ data = { infiniband = 2 }, pipeline = 4, tensor = 2 }"
    pipeline = 'pipeline={ axis = "pipeline", microbatches = 8 }'
    rules = 'rules={ preset = "fsdp_tensor", logical = { layers = "pipeline" } }'
    said = verdict(recomputing(), mesh, pipeline, rules, 'train.remat="none"')
    assert 'pipeline.residuals="stash" would take about 840 ms' in said


def test_axes_on_other_links_are_named_with_what_they_would_save():
    report, planned = made_of([("dot.1", 0.5), ("reduce-scatter.1", 0.3)])
    rows = [
        r.model_copy(update={"axes": ("tensor",), "group_size": 2, "gpus_per_domain": 1}) for r in report.communication
    ]
    mesh = "mesh={ fsdp = 8, tensor = { infiniband = 2 } }"
    report = report.model_copy(update={"communication": tuple(rows)})
    said = verdict((report, planned), mesh, 'train.remat="none"')
    assert "communication. With mesh.fsdp={ nvlink = 4, infiniband = 2 } and mesh.tensor=2, communication would" in said
    assert "if none overlaps (estimated). Most of it is" in said


def test_a_change_that_was_compiled_comes_before_an_estimate():
    remedied = MemoryPart(fits=False, margin_bytes=-GIB, activations_bytes=GIB, remedies=(REMEDY,))
    assert verdict(recomputing(remedied)).startswith(
        "The step does not fit: 1.00 GiB a GPU too much. With train.accumulate=2 it fits and takes 1.20 s. The largest "
    )
    compiled = ProgramPart(fingerprint="f", alternatives=(FASTER,))
    said = verdict(recomputing(program=compiled))
    assert 'forward pass. With train.pgle="predicted" it takes 930 ms, 70.0 ms less. It fits' in said
    slower = FASTER.model_copy(update={"time_s": 0.995})
    assert "train.remat" in verdict(recomputing(program=ProgramPart(fingerprint="f", alternatives=(slower,))))


def test_of_a_step_of_the_users_own_the_step_that_recomputes_nothing_is_named(tmp_path):
    (tmp_path / "e.toml").write_text(
        'cluster = { name = "dgx_h100", hosts = 2 }\nmesh = { data = { infiniband = 2 }, fsdp = 8 }\n'
        '[program]\nmake = "tests.search.tuned_steps:make"\n'
    )
    report = judged(recomputing(), load_any(tmp_path / "e.toml"))
    assert "54.0 GiB are free: the step would take about 840 ms if all were kept (estimated)." in report.verdict
    assert "`meshkit tune --vary program.options.KEY=[...]`" in report.findings[0].hint
