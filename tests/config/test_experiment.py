"""Test experiments: shipped files, overrides, paths, round trips, errors that point, and the cost of loading."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshkit.config.experiment import experiment_json_schema, load
from meshkit.config.sections import RematMix, TrainTable
from meshkit.errors import ConfigError
from meshkit.verbs.new.template import new_experiment

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "configs/experiments").glob("*.toml"))

TEXT = """\
cluster = { name = "dgx_h100", hosts = 2 }

[model]
class = "models.llama:Llama"
preset = "llama3_8b"
layers = 4

[mesh]
data = { infiniband = 2 }
fsdp = 4
tensor = 2

[rules]
preset = "fsdp_tensor"
[rules.logical]
embed = ["fsdp"]
vocab = "replicated"
[[rules.override]]
path = "**/router/kernel"
spec = ["replicated", "tensor"]

[train]
global_batch = 32
sequence_length = 4096
"""


@pytest.fixture
def path(tmp_path):
    """Return the path of a file with the experiment above, in a folder of its own."""
    path = tmp_path / "experiment.toml"
    path.write_text(TEXT)
    return path


def again(experiment, folder):
    """Return the experiment that the resolved file of `experiment` describes."""
    path = folder / "again.toml"
    path.write_text(experiment.to_toml())
    return load(path)


def test_what_is_loaded(path):
    experiment = load(path)
    assert experiment.name == "experiment"
    assert experiment.cluster.num_gpus == 16
    assert experiment.mesh.shape == (2, 4, 2)
    assert experiment.model.class_path == "models.llama:Llama"
    assert experiment.model.options == {"layers": 4}
    rules = experiment.rules
    assert rules.spec_for(("vocab", "embed")) == ((), ("fsdp",))
    assert rules.spec_for(("act_batch",)) == (("data", "fsdp"),)
    assert rules.override_for("a/router/kernel") == ((), ("tensor",))
    assert rules.explicit == {"embed", "vocab"}
    assert (experiment.train.precision, experiment.train.memory_fraction) == ("bf16", 0.92)
    assert again(experiment, path.parent) == experiment


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_load_and_round_trip(path, tmp_path):
    experiment = load(path)
    assert experiment.name == path.stem
    assert again(experiment, tmp_path) == experiment


def test_what_the_shipped_experiments_say():
    loaded = {path.stem: load(path) for path in SHIPPED}
    debug = loaded["llama_debug_cpu"]
    assert debug.cluster.is_cpu
    assert debug.mesh.sizes == {"data": 2, "fsdp": 2, "tensor": 2}
    assert loaded["llama3_8b"].cluster.num_gpus == 16
    assert loaded["llama3_70b"].cluster.hosts == 64
    assert loaded["llama3_70b"].mesh.axes[0].infiniband == 64
    assert loaded["llama3_70b"].train.sequence_length == 8192


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["cluster.hosts=1", "mesh.data="], lambda e: (e.cluster.hosts, e.mesh.axis_names) == (1, ("fsdp", "tensor"))),
        (
            ["cluster.hosts=4", "mesh.new={infiniband=2}"],
            lambda e: e.mesh.axis_names[-1] == "new" and e.mesh.size == 32,
        ),
        (["mesh.fsdp=2", "mesh.extra=2"], lambda e: e.mesh.shape == (2, 2, 2, 2)),
        (
            ["cluster=gb200_nvl72", "mesh.data=", "mesh.fsdp=fill", "train.global_batch=36"],
            lambda e: e.mesh.shape == (36, 2),
        ),
        (["train.precision=fp32"], lambda e: e.train.precision == "fp32"),
        (["train.remat=dots"], lambda e: e.train.remat == "dots"),
        (['train.remat=["gate", "up"]'], lambda e: e.train.remat == ("gate", "up")),
        (
            ['train.remat={ keep = ["key"], offload = ["gate"] }'],
            lambda e: e.train.remat == RematMix(("key",), ("gate",)) and e.train.offloads,
        ),
        (['train.remat={ offload = ["gate"] }'], lambda e: e.train.remat.to_dict() == {"offload": ["gate"]}),
        (['train.precision="fp32"'], lambda e: e.train.precision == "fp32"),
        (["optimizer.learning_rate=1e-4"], lambda e: e.optimizer.learning_rate == 1e-4),
        (["optimizer.learning_rate=1"], lambda e: e.optimizer.learning_rate == 1),
        (["profile.steps=[3, 4]"], lambda e: e.profile.steps == (3, 4)),
        (["xla.xla_some_option=true"], lambda e: e.xla == {"xla_some_option": True}),
        (["model.layers=8", "model.preset="], lambda e: (e.model.options, e.model.preset) == ({"layers": 8}, None)),
        (["rules.logical.embed=", "rules.preset="], lambda e: e.rules.logical == {"vocab": ()}),
        (["rules.override.0.path=**/x"], lambda e: e.rules.override_for("a/x") == ((), ("tensor",))),
        (["rules.override.0="], lambda e: e.rules.overrides == ()),
        (["train.steps=5", "train.steps=6"], lambda e: e.train.steps == 6),
        (["name=my_run"], lambda e: e.name == "my_run"),
        (["train.loss=my.module:loss"], lambda e: e.train.loss == "my.module:loss"),
    ],
)
def test_overrides(path, overrides, expected):
    experiment = load(path, overrides)
    assert expected(experiment)
    assert again(experiment, path.parent) == experiment


@pytest.mark.parametrize("cluster", ['"dgx_h100"', '"own.toml"', '{ file = "own.toml" }', '{ name = "dgx_h100" }'])
def test_cluster_hosts_can_be_set_in_every_form(path, cluster):
    (path.parent / "own.toml").write_text('name = "dgx_h100"\nhosts = 2\n')
    path.write_text(TEXT.replace('{ name = "dgx_h100", hosts = 2 }', cluster))
    experiment = load(path, ["cluster.hosts=4", "mesh.data.infiniband=4"])
    assert experiment.cluster.num_gpus == 32


def test_paths_in_a_file_are_relative_to_it_and_in_set_to_the_working_directory(path, tmp_path, monkeypatch):
    (path.parent / "own.toml").write_text('name = "dgx_h100"\nhosts = 2\n')
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "theirs.toml").write_text('name = "dgx_a100"\nhosts = 2\n')
    monkeypatch.chdir(elsewhere)
    path.write_text(TEXT.replace('{ name = "dgx_h100", hosts = 2 }', '"own.toml"') + '[data]\nsource = "texts"\n')
    assert load(path).cluster.gpu.key == "h100_sxm"
    assert load(path).data.source == str(path.parent / "texts")
    changed = load(path, ["cluster=theirs.toml", "data.source=texts"])
    assert changed.cluster.gpu.key == "a100_80gb"
    assert changed.data.source == str(elsewhere / "texts")
    assert load(path, ["data.source=python-stdlib"]).data.source == "python-stdlib"
    assert load(path, ["data.source=my.data:make"]).data.source == "my.data:make"


def test_modules_are_looked_for_in_the_working_directory_and_above_the_file(tmp_path, monkeypatch):
    deep = tmp_path / "configs" / "experiments"
    deep.mkdir(parents=True)
    (deep / "e.toml").write_text(TEXT)
    monkeypatch.chdir("/")
    above = [folder for folder in tmp_path.parents if folder != Path("/")]
    assert load(deep / "e.toml").search_paths == [Path("/"), deep, tmp_path / "configs", tmp_path, *above]


@pytest.mark.parametrize(
    ("overrides", "key", "at"),
    [
        ([], "train.global_batch", "{path}:23: train.global_batch = 32"),
        ([], "train.accumulate", "{path}:22: [train] (train.accumulate is not set)"),
        ([], "optimizer.clip", "{path}: optimizer.clip is not set"),
        ([], "mesh", "{path}:8: [mesh]"),
        ([], "cluster.hosts", "{path}:1: cluster.hosts = 2"),
        ([], "rules.override.0.spec", '{path}:20: rules.override.0.spec = ["replicated", "tensor"]'),
        (["train.steps=3"], "train.steps", "--set train.steps=3"),
        (["mesh.tensor={nvlink=2}"], "mesh.tensor.nvlink", "--set mesh.tensor={nvlink=2}"),
        (["mesh.tensor=2"], "mesh", "{path}:8: [mesh] with --set mesh.tensor=2"),
        (["optimizer.clip=0.5"], "optimizer.clip", "--set optimizer.clip=0.5"),
    ],
)
def test_an_error_points_at_where_the_key_was_written(path, overrides, key, at):
    error = load(path, overrides).error(key, "is wrong.", hint="another")
    assert isinstance(error, ConfigError)
    assert error.at == at.replace("{path}", str(path))


def test_an_error_of_the_rules_at_resolve_time_points_into_the_file(path):
    path.write_text(TEXT.replace('vocab = "replicated"', 'vocab = "fsdp"'))
    with pytest.raises(ConfigError, match=r"shards both dim 0 \('vocab'\) and dim 1 \('embed'\)") as caught:
        load(path).rules.spec_for(("vocab", "embed"))
    assert caught.value.at == f'{path}:16: rules.logical.embed = ["fsdp"]'


def test_the_message_of_the_design(path):
    with pytest.raises(ConfigError, match="asks for 16 GPUs") as caught:
        load(path, ["mesh.tensor=16"])
    assert caught.value.render() == (
        "axis 'tensor' asks for 16 GPUs on NVLink, but an NVLink domain has 8.\n"
        "  at --set mesh.tensor=16\n"
        "  try mesh.tensor = 2"
    )


def test_a_byte_order_mark_and_windows_lines_are_fine(path):
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert load(path).mesh.shape == (2, 4, 2)
    assert load(path).error("train.global_batch", "x").at == f"{path}:23: train.global_batch = 32"


def mistake(path, overrides=()):
    """Return the ConfigError that loading raises, or None; any other exception fails the test."""
    try:
        load(path, overrides)
    except ConfigError as error:
        return error
    return None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=30), st.text(max_size=30))
@example("", "~nobody-here/x")
def test_any_override_gives_an_experiment_or_one_config_error(path, key, value):
    for override in (f"{key}={value}", f"train.{key}={value}", f"mesh.{value}=2", f"cluster={value}", key):
        error = mistake(path, [override])
        assert error is None or error.at


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(TEXT)), st.integers(0, 12), st.text('[]{}="\n.,#0ax', max_size=6))
def test_any_damage_to_the_file_gives_an_experiment_or_one_config_error(path, start, length, text):
    path.write_text(TEXT[:start] + text + TEXT[start + length :])
    error = mistake(path)
    assert error is None or (str(path) in error.at and error.hint)


@pytest.mark.parametrize(
    "options",
    [{}, {"cluster": "dgx_h100", "hosts": 4, "preset": None}, {"cluster": "gb200_nvl72"}, {"model": "mine.net:Net"}],
)
def test_the_template_loads(options, tmp_path):
    path = tmp_path / "new.toml"
    path.write_text(new_experiment("fresh", **options))
    experiment = load(path)
    assert experiment.name == "fresh"
    assert experiment.model.class_path == options.get("model", "models.llama:Llama")
    assert again(experiment, tmp_path) == experiment


def test_the_template_says_of_a_key_what_its_declaration_says():
    meaning = TrainTable.model_fields["global_batch"].description
    assert re.search(rf"^global_batch = 16 +# {meaning}$", new_experiment(), re.MULTILINE)


def test_the_commented_lines_of_the_template_load_too(tmp_path):
    text = new_experiment()
    for line in ("tokens_total", "accumulate", "reduce_precision", "remat", "[xla]", "xla_gpu", "act_residual_length"):
        text = text.replace(f"# {line}", line)
    for line in ("[[rules.override]]", 'path = "**/router/kernel"', 'spec = ["replicated", "replicated"]'):
        text = text.replace(f"# {line}", line)
    path = tmp_path / "new.toml"
    path.write_text(text)
    assert load(path).train.remat == "full"


def test_the_json_schema_has_every_key_of_the_file():
    schema = experiment_json_schema()
    json.dumps(schema)
    sections = ["cluster", "model", "mesh", "rules", "train", "optimizer", "data", "checkpoint", "profile", "xla"]
    sections += ["failures", "launch", "local_sgd", "compression", "pipeline", "lint", "program"]
    assert set(schema["properties"]) == {"name", *sections}
    assert schema["additionalProperties"] is False
    assert "dgx_h100" in json.dumps(schema["properties"]["cluster"])
    tables = [schema, *schema["$defs"].values()]
    undescribed = [key for table in tables for key, item in table["properties"].items() if "description" not in item]
    assert undescribed == []
    assert schema["$defs"]["TrainTable"]["properties"]["precision"]["enum"] == ["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]
    remat = schema["$defs"]["TrainTable"]["properties"]["remat"]
    assert [form["type"] for form in remat["anyOf"]] == ["string", "array", "object"]


def test_the_spec_layer_imports_no_jax():
    code = (
        "import sys, meshkit.config.experiment as e, meshkit.verbs.new.template;"
        "e.load(sys.argv[1]).to_toml(); e.load(sys.argv[1]).mesh;"
        "print([m for m in ('jax', 'jaxlib', 'flax', 'optax', 'numpy', 'orbax', 'grain') if m in sys.modules])"
    )
    path = ROOT / "configs/experiments/llama3_8b.toml"
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
