"""Test which rules a `[pipeline]` section adds, and what is refused about it before there is a model."""

from __future__ import annotations

import re

import pytest

from meshkit.config.experiment import load
from meshkit.errors import ConfigError

TEXT = """
cluster = "cpu8"
[model]
class = "models.llama:Llama"
[mesh]
pipeline = 4
data = 2
[rules]
preset = "fsdp_tensor"
[pipeline]
axis = "pipeline"
microbatches = 8
[train]
global_batch = 32
"""
CHUNKS = ('pipeline.schedule="interleaved_1f1b"', "pipeline.virtual_stages=2")


@pytest.fixture
def path(tmp_path):
    (tmp_path / "e.toml").write_text(TEXT)
    return tmp_path / "e.toml"


def test_the_section_cuts_layers_and_the_vocabulary(path):
    rules = load(path, ["mesh.data=1", "mesh.tensor=2"]).rules.mapping("parameters")
    assert rules["layers"] == ("pipeline",)
    assert rules["vocab"] == ("pipeline", "tensor")
    replicated = load(path, ['pipeline.head="replicated"']).rules.mapping("parameters")
    assert replicated["layers"] == ("pipeline",)
    assert "vocab" not in replicated  # The mesh has no tensor axis.
    assert "layers" not in load(path, ["pipeline="]).rules.mapping("parameters")


def test_a_resolved_file_loads_back_equal(path, tmp_path):
    spec = load(path, [*CHUNKS, 'pipeline.layout="1|2*7"'])
    (tmp_path / "again.toml").write_text(spec.to_toml())
    again = load(tmp_path / "again.toml", ['name="e"'])
    assert (again.pipeline, again.rules) == (spec.pipeline, spec.rules)
    assert spec.pipeline.layout == "1|2*7"
    assert "[pipeline]" not in load(path, ["pipeline="]).to_toml()


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["pipeline.axis=pipe"], "names mesh axis 'pipe', but the mesh has pipeline, data", "'pipeline'"),
        (["pipeline.axis=data"], "'data' holds different layers, so it cannot cut act_batch", "act_batch without"),
        ([*CHUNKS, "pipeline.microbatches=6"], "6 microbatches are not a multiple of the 4 stages", "= 4 or 8"),
        ([*CHUNKS, "pipeline.microbatches=3"], "3 microbatches are not a multiple of the 4 stages", "microbatches = 4"),
        (["pipeline.virtual_stages=2"], "'1f1b' has one virtual stage", 'schedule = "interleaved_1f1b"'),
        (["train.accumulate=2"], "train.accumulate must be 1", "pipeline.microbatches = 16"),
        (["train.global_batch=24"], "24 is not divisible by 16 (data 2 x microbatches 8)", "global_batch = 32 or 16"),
        (
            ["rules.logical.layers=data"],
            "cut the layers over data, but the pipeline cuts them over 'pipeline'",
            "no rule for it",
        ),
        (["rules.logical.embed=pipeline"], "so it cannot cut embed as well", "embed without 'pipeline'"),
        (['pipeline.head="replicated"', "rules.logical.vocab=pipeline"], "its head is replicated", "vocab_parallel"),
        (["rules.gradients.embed=data"], "reduces gradients over data once a step", "no rule for it"),
        (["local_sgd.axis=data"], "cannot be used with [local_sgd]", "one of the two sections"),
        (["compression.axis=data"], "cannot be used with [compression]", "one of the two sections"),
        (["compression.axis=pipeline"], "'pipeline' does not cut the batch", "one of: data"),
        (["pipeline.schedule=gpipe"], "pipeline.schedule must be one of 1f1b, interleaved_1f1b", "interleaved_1f1b"),
        (["pipeline.stages=4"], "unknown key 'stages' in [pipeline]", "'virtual_stages'"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(path, overrides, message, hint):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load(path, overrides)
    assert hint in str(error.value)
    assert overrides[-1].split("=")[0] in str(error.value.at)
