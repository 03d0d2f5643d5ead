"""Test plan --sweep: which axis grows, the experiment at every size, and the meaning of the numbers."""

from __future__ import annotations

import pytest

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.search.candidate import Outcome
from meshkit.search.scaling import growing_axis, parse_sweep, scale, sweep_sizes
from meshkit.verbs.plan.scaling_page import write_scaling_html
from tests.search.made_up import MadeUpWorkers

TINY = "configs/experiments/mlp.toml"
FOUR_HOSTS = 'cluster={ name = "dgx_h100", hosts = 4 }'
HYBRID = (FOUR_HOSTS, "mesh={ data = { infiniband = 4 }, fsdp = 8 }", 'rules.preset="hsdp"')


def sizes(what, numbers, kind="weak", overrides=HYBRID):
    axis, found = sweep_sizes(load(TINY, overrides), what, numbers, kind)
    return axis, [load(TINY, (*overrides, *size.settings)) for size in found]


def numbers_of(found):
    return [(e.cluster.hosts, e.cluster.num_gpus, e.train.global_batch) for e in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("hosts=1,2,4", ("hosts", (1, 2, 4))), ("gpus=8,4, 8", ("gpus", (4, 8)))],
)
def test_a_sweep_is_read(text, expected):
    assert parse_sweep(text) == expected


@pytest.mark.parametrize("text", ["hosts", "hosts=", "hosts=0", "nodes=1", "hosts=1;2", "hosts=-1"])
def test_another_sweep_is_refused(text):
    with pytest.raises(ConfigError, match="is not a sweep"):
        parse_sweep(text)


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        ("{ data = { infiniband = 4 }, fsdp = 8 }", "data"),
        ("{ data = 8, fsdp = { infiniband = 4 } }", "fsdp"),
        ('{ data = { infiniband = 2 }, fsdp = { nvlink = 8, infiniband = "fill" } }', "fsdp"),
        ('{ data = { nvlink = "fill" }, fsdp = { infiniband = "fill" } }', "fsdp"),
    ],
)
def test_the_axis_that_grows_is_the_one_marked_or_the_outermost_across_domains(mesh, axis):
    assert growing_axis(load(TINY, (FOUR_HOSTS, f"mesh={mesh}"))).name == axis


def test_on_one_domain_the_outermost_axis_of_the_batch_grows():
    overrides = ('cluster="dgx_h100"', "mesh={ tensor = 2, fsdp = 4 }", 'rules.preset="fsdp_tensor"')
    assert growing_axis(load(TINY, overrides)).name == "fsdp"


def test_where_no_axis_can_grow_the_error_says_how_to_mark_one():
    overrides = ('cluster="dgx_h100"', "mesh={ tensor = 8 }", 'rules.preset="tensor"')
    with pytest.raises(ConfigError, match=r"none of tensor crosses domains or cuts the batch[\s\S]*fill"):
        growing_axis(load(TINY, overrides))


def test_weak_scaling_grows_the_batch_and_strong_scaling_does_not():
    axis, weak = sizes("hosts", (1, 2, 8))
    assert axis == "data"
    assert numbers_of(weak) == [(1, 8, 16), (2, 16, 32), (8, 64, 128)]
    _, strong = sizes("hosts", (1, 8), "strong")
    assert [e.train.global_batch for e in strong] == [64, 64]
    assert all(e.cluster.num_gpus == e.mesh.size for e in weak)


def test_a_sweep_may_begin_inside_a_host():
    """From 1 to 8 GPUs the axis shrinks on NVLink; beyond, whole hosts join."""
    overrides = (FOUR_HOSTS, "mesh={ fsdp = { nvlink = 8, infiniband = 4 } }", "train.global_batch=64")
    _, found = sizes("gpus", (1, 2, 8, 16), overrides=overrides)
    assert numbers_of(found) == [(1, 1, 2), (1, 2, 4), (1, 8, 16), (2, 16, 32)]
    assert [e.mesh.to_dict() for e in found] == [
        {"fsdp": 1},
        {"fsdp": 2},
        {"fsdp": 8},
        {"fsdp": {"nvlink": 8, "infiniband": 2}},
    ]


@pytest.mark.parametrize(
    ("what", "numbers", "message"),
    [
        ("gpus", (12,), "12 gpus are not whole NVLink domains of 8 GPUs"),
        ("hosts", (1,), "3 sequences on 32 GPUs are not a whole number of sequences on 8"),
        ("gpus", (4,), r"axis 'data' grows in a sweep and the others stay \(fsdp 8\), but 8 do not divide 4 GPUs"),
    ],
)
def test_a_size_that_cannot_be_is_an_error(what, numbers, message):
    overrides = (*HYBRID[:1], "mesh={ data = { infiniband = 4 }, fsdp = 8 }", 'rules={ logical = { embed = "fsdp" } }')
    batch = ("train.global_batch=3",) if what == "hosts" else ()
    with pytest.raises(ConfigError, match=message):
        sizes(what, numbers, overrides=(*overrides, *batch))


@pytest.mark.parametrize("tokens", [True, False])
def test_efficiency_is_relative_to_the_smallest_size(monkeypatch, tmp_path, tokens):
    """Rates per GPU are 100 at 8 GPUs, 95 at 16 and 60 at 32; a growing share of each step is exposed."""
    made_up = {8: (100.0, 0.25), 16: (95.0, 0.3), 32: (60.0, 0.5)}

    def outcome(settings):
        rate, exposed = made_up[load(TINY, (*HYBRID, *settings)).cluster.num_gpus]
        return Outcome(
            settings=settings, status="fits", time_s=100 / rate, exposed_s=exposed * 100 / rate,
            tokens_per_s_per_gpu=rate if tokens else None,
        )  # fmt: skip

    MadeUpWorkers(outcome).install(monkeypatch)
    report = scale(TINY, HYBRID, "hosts=1,2,4", "weak", jobs=2)
    assert [p.num_gpus for p in report.points] == [8, 16, 32]
    assert [p.efficiency for p in report.points] == pytest.approx([1.0, 0.95, 0.6])
    assert [p.speedup for p in report.points] == pytest.approx([1.0, 1.9, 2.4])
    assert [p.exposed_share for p in report.points] == pytest.approx([0.25, 0.3, 0.5])
    page = write_scaling_html(report, tmp_path / "scaling.html").read_text()
    assert "weak scaling" in page
    assert '"steps"' in page


@pytest.mark.slow
@pytest.mark.deviceless
def test_scaling_of_a_small_llama_is_flat_inside_a_host_and_falls_where_infiniband_joins():
    overrides = (
        'cluster={ name = "dgx_h100", hosts = 4 }',
        'model={ class = "models.llama:Llama", preset = "llama_1b", layers = 4 }',
        "mesh={ fsdp = { nvlink = 8, infiniband = 4 } }",
        'rules={ preset = "fsdp" }',
        "train={ global_batch = 32, sequence_length = 2048 }",
    )
    report = scale("configs/experiments/llama3_8b.toml", overrides, "gpus=2,8,32", "weak", jobs=2)
    _, eight, all_32 = report.points
    assert eight.efficiency > 0.85
    assert all_32.efficiency < eight.efficiency
    assert all_32.exposed_share > eight.exposed_share
