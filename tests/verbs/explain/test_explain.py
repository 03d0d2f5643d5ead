"""Test explain: shipped experiments have no findings, faults show with an exit code, and the JSON is complete."""

import json
import tomllib
from functools import cache
from pathlib import Path

import jax
import pytest
from flax import nnx
from rich.console import Console

from meshkit import cli
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.linting.examine import announce_findings
from meshkit.planning import planner
from meshkit.planning.planner import plan_experiment
from meshkit.planning.resolved import examine_experiment, make_train_step
from meshkit.sharding import build_mesh, describe_devices
from meshkit.verbs.explain.explainer import Explanation, explain

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs/experiments").glob("*.toml"))
# The default suite compiles what takes seconds, or what other tests plan too; the slow one compiles all of them as they
# are.
ON_16 = ("cluster={name='dgx_h100',hosts=2}", "mesh.data={infiniband=2}", "mesh.fsdp=4")
DEFAULT = {"llama_debug_cpu": ON_16, "mlp": ()}
COMPILED = [pytest.param(f, DEFAULT[f.stem], id=f"{f.stem}, default") for f in SHIPPED if f.stem in DEFAULT]
COMPILED += [pytest.param(f, (), id=f.stem, marks=pytest.mark.slow) for f in SHIPPED if DEFAULT.get(f.stem) != ()]
DEBUG = ROOT / "configs/experiments/llama_debug_cpu.toml"
MLP = ROOT / "configs/experiments/mlp.toml"
ON_H100S = ["cluster={name='dgx_h100',hosts=1}"]  # It has eight GPUs, as the CPU experiments have eight devices.


@cache
def planned(file, *overrides):
    """Return the plan of an experiment on GPUs, compiled once for all tests of this module."""
    experiment = load(file, overrides)
    return plan_experiment(load(file, [*overrides, *ON_H100S]) if experiment.cluster.is_cpu else experiment)


def run(capsys, *arguments):
    code = cli.main(["explain", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


LONGEST = ("deepseek_v3_gb200", "llama3_405b")  # Tracing these takes longest.


@pytest.mark.parametrize(
    "file", [pytest.param(f, id=f.stem, marks=[pytest.mark.slow] * (f.stem in LONGEST)) for f in SHIPPED]
)
def test_shipped_experiments_have_no_findings(file):
    experiment = load(file)
    found = explain(experiment, compile=False)
    assert found.findings == ()
    assert len(experiment.lint.allow) <= 3
    assert found.collectives is None


@pytest.mark.deviceless
@pytest.mark.parametrize(("file", "overrides"), COMPILED)
def test_every_collective_of_a_shipped_experiment_is_explained(file, overrides):
    lint = planned(file, *overrides).lint
    for allowed in lint.allowed:
        print(f"allowed: {allowed.code} {allowed.path}: {allowed.reason}")
    # This one is a note with the times of other ways.
    assert [f for f in lint.findings if f.code != "ragged_way"] == []
    assert len(lint.allowed) <= 3
    assert all(row.explanation and not row.exceeds for row in lint.collectives)


# On 2 x 8 H100, each name maps to a preset, a mesh, and more settings. The model is Llama 3 8B with two layers unless
# "more" has a model.
OVER_16 = "data={nvlink=8,infiniband=2}"
HSDP = "data={infiniband=2},fsdp=8"
WITH_TENSOR = "data={nvlink=2,infiniband=2},tensor=4"
WITH_CONTEXT = "fsdp={nvlink=2,infiniband=2},context=4"
ACCUMULATE = ("train.accumulate=4", "train.global_batch=64")
PRESETS = {
    "data": ("data", OVER_16),
    "zero1": ("zero1", OVER_16),
    "zero2": ("zero2", OVER_16),
    "zero1, accumulated": ("zero1", OVER_16, *ACCUMULATE),
    "zero2, accumulated": ("zero2", OVER_16, *ACCUMULATE),
    "fsdp": ("fsdp", "fsdp={nvlink=8,infiniband=2}"),
    "fsdp, accumulated": ("fsdp", "fsdp={nvlink=8,infiniband=2}", *ACCUMULATE),
    "hsdp": ("hsdp", HSDP),
    "hsdp, accumulated": ("hsdp", HSDP, *ACCUMULATE),
    "tensor": ("tensor", WITH_TENSOR),
    "tensor_sequence": ("tensor_sequence", WITH_TENSOR),
    "tensor_sequence, collective matmul": ("tensor_sequence", WITH_TENSOR, "model.collective_matmul=true"),
    "zero1_tensor": ("zero1_tensor", WITH_TENSOR),
    "zero1_tensor, accumulated": ("zero1_tensor", WITH_TENSOR, *ACCUMULATE),
    "fsdp_tensor": ("fsdp_tensor", "fsdp={nvlink=4,infiniband=2},tensor=2"),
    "fsdp_tensor, accumulated": ("fsdp_tensor", "fsdp={nvlink=4,infiniband=2},tensor=2", *ACCUMULATE),
    "fsdp_tensor, fp8": ("fsdp_tensor", "fsdp={nvlink=4,infiniband=2},tensor=2", "train.precision=fp8"),
    "fsdp_tensor_sequence": ("fsdp_tensor_sequence", "fsdp={nvlink=4,infiniband=2},tensor=2"),
    "ring": ("fsdp_context", WITH_CONTEXT, "model.context=ring"),
    "ulysses": ("fsdp_context", WITH_CONTEXT, "model.context=ulysses"),
    "all_gather": ("fsdp_context", WITH_CONTEXT, "model.context=all_gather"),
    "local SGD": ("hsdp", HSDP, "local_sgd={axis='data',every=4}"),
    "stale local SGD": ("hsdp", HSDP, "local_sgd={axis='data',every=4,staleness=1}"),
    "compression": ("hsdp", HSDP, "compression={axis='data',dtype='int8'}"),
    "compression to bf16": ("hsdp", HSDP, "compression={axis='data',dtype='bf16'}"),
}
EXPERTS = {
    "tensor": "fsdp={infiniband=2},expert=4,tensor=2",
    "data": "data={infiniband=2},fsdp=2,expert=2,tensor=2",
    "context": "fsdp={infiniband=2},expert=2,context=2,tensor=2",
}


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(("preset", "mesh", "more"), [(p, m, x) for p, m, *x in PRESETS.values()], ids=list(PRESETS))
def test_no_preset_has_findings(preset, mesh, more):
    file = ROOT / "configs/experiments/llama3_8b.toml"
    lint = planned(file, "model.layers=2", f"rules.preset={preset}", f"mesh={{{mesh}}}", *more).lint
    assert lint.findings == []


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize("mesh", list(EXPERTS.values()), ids=list(EXPERTS))
def test_no_mesh_of_experts_has_findings(mesh):
    file = ROOT / "configs/experiments/mixtral_8x7b.toml"
    assert planned(file, "model.layers=2", "rules.preset=all", f"mesh={{{mesh}}}").lint.findings == []


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("saver", "says"),
    [
        ("local_sgd={axis='data',every=4}", "local SGD: weights averaged over data by the outer step"),
        (
            "compression={axis='data',dtype='int8'}",
            "compressed gradients over data: chunks exchanged, their sums gathered",
        ),
    ],
)
def test_the_axis_of_a_cross_host_saver_is_explained(saver, says):
    # Kernels of 128 x 512 are large enough to travel compressed.
    large = ("model.embed=128", "model.mlp=512", "mesh={data=2,fsdp=4}", "rules.preset=hsdp", "train.steps=48")
    lint = planned(MLP, *large, saver).lint
    assert lint.findings == []
    assert says in {row.explanation for row in lint.collectives if row.axes == ("data",)}


@pytest.mark.deviceless
def test_the_gathers_and_reductions_of_the_debug_llama_are_its_closed_forms():
    """With FSDP 4 x TP 2 x DP 2, gradients are reduced once and weights are gathered at most three times.

    The reduction over data has exactly the bytes of one GPU's fp32 shards. Two of the gathers are as written.
    """
    lint = planned(DEBUG, *ON_16).lint
    by_words = {(row.collective, row.axes): row for row in lint.collectives if row.bound_bytes}
    gathers = by_words["all-gather", ("fsdp",)]
    assert gathers.payload_bytes <= gathers.bound_bytes
    reduced = by_words["all-reduce", ("data",)]
    assert reduced.payload_bytes == pytest.approx(reduced.bound_bytes, rel=0.02)  # Norms are combined elsewhere.


@pytest.mark.deviceless
def test_muon_exchanges_each_stack_of_matrices_twice_over_each_axis():
    lint = planned(DEBUG, *ON_16, 'optimizer.algorithm="muon"').lint
    assert lint.findings == []
    rows = {row.axes: row for row in lint.collectives if row.explanation.startswith("Muon")}
    assert {(row.collective, axes) for axes, row in rows.items()} == {("all-to-all", (a,)) for a in ("tensor", "fsdp")}
    assert all(row.payload_bytes == row.bound_bytes for row in rows.values())


@pytest.mark.deviceless
def test_explain_compiles_checks_and_places_by_default_and_builds_the_step_once(capsys, monkeypatch):
    built = []
    monkeypatch.setattr(planner, "make_train_step", lambda *args: built.append(args) or make_train_step(*args))
    sets = [f"--set={o}" for o in ON_H100S]
    code, out, _ = run(capsys, MLP, *sets, "--json")
    found = Explanation.model_validate_json(out)
    assert (code, found.findings, found.collectives_note) == (0, (), None)
    assert {"all-gather", "reduce-scatter", "all-reduce"} <= {row.collective for row in found.collectives}
    assert all(row.explanation for row in found.collectives)
    assert found.placement.communication_now_s > 0
    assert len(built) == 1


def test_without_a_compiler_or_gpus_one_line_says_that_collectives_were_not_checked(capsys, monkeypatch):
    code, out, _ = run(capsys, DEBUG)
    assert code == 0
    assert "collectives were not checked: cluster 'cpu8' has no GPUs" in out
    monkeypatch.setattr("meshkit.compile.options.version_of", lambda name: None)
    found = explain(load(DEBUG, ON_H100S))
    assert "no CUDA plugin of jax is installed" in found.collectives_note
    assert "pip install 'meshkit[plan]'" in found.collectives_note


def test_no_compile_is_said_and_excludes_propose(capsys):
    code, out, _ = run(capsys, DEBUG, "--no-compile", "--json")
    assert (code, json.loads(out)["collectives_note"]) == (0, "collectives were not checked: --no-compile")
    assert run(capsys, DEBUG, "--no-compile", "--propose")[0] == 2


def test_findings_have_every_field_in_json(capsys):
    code, out, _ = run(capsys, DEBUG, "--set", "rules.preset=data", "--json")
    first = json.loads(out)["findings"][0]
    assert code == 0
    assert first == {
        "code": "idle_axis",
        "severity": "warning",
        "path": "fsdp",
        "message": "mesh axis 'fsdp' of size 2 shards nothing: its GPUs repeat work",
        "hint": '[rules.logical] act_batch = ["data", "fsdp", "tensor"], or another preset',
        "allowed": False,
        "reason": None,
        "seconds": None,
    }


def test_the_hint_of_an_idle_axis_mends_it(capsys):
    mended = ["--set", "rules.preset=data", "--set", "rules.logical.act_batch=['data','fsdp','tensor']", "--strict"]
    assert run(capsys, DEBUG, *mended)[0] == 0


def test_strict_is_3_for_a_warning_and_0_where_it_is_allowed(capsys):
    sets = ["--set", "rules.preset=data"]
    code, out, err = run(capsys, DEBUG, *sets, "--strict")
    assert code == 3
    assert "there are 2 findings (idle_axis), but --strict allows none" in err
    allow = "lint.allow=[{code='idle_axis', path='*', reason='a scaling study'}]"
    code, out, _ = run(capsys, DEBUG, *sets, "--set", allow, "--strict")
    assert code == 0
    assert out.count("a scaling study") == 2
    assert "nothing looks wrong" in out


def test_an_error_cannot_be_allowed_fails_strict_and_stops_train_before_it_compiles(capsys):
    """Llama 3 8B whole on every GPU has 8.03e9 parameters in fp32 and two moments, which are 89.7 GiB."""
    sets = ["rules.preset=data", "mesh={data={nvlink=8,infiniband=2}}"]
    sets += ["lint.allow=[{code='state_too_large', reason='x'}]"]
    file = ROOT / "configs/experiments/llama3_8b.toml"
    arguments = [file, "--no-compile", *(f"--set={s}" for s in sets)]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "error state_too_large at state" in out
    assert run(capsys, *arguments, "--strict")[0] == 3
    experiment = load(file, sets)
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    with pytest.raises(ConfigError, match=r"take 89\.7 GiB on each GPU, more than the 72\.8 GiB"):
        announce_findings(examine_experiment(experiment, make_train_step(experiment, mesh)), Console(quiet=True))


def test_the_tables_fit_80_columns_and_what_is_wrong_comes_first(capsys):
    _, out, _ = run(capsys, DEBUG, "--set", "rules.preset=data")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [
        "llama_debug_cpu on data 2 x fsdp 2 x tensor 2",
        "2 warnings in 12 parameters, 7 activations",
    ]
    assert lines[2] == "warning idle_axis at fsdp"
    assert lines[3].startswith("  mesh axis 'fsdp' of size 2 shards nothing")
    assert lines[4].startswith('  try [rules.logical] act_batch = ["data", "fsdp", "tensor"]')


def test_an_allow_entry_that_silences_nothing_is_a_note_and_passes_strict(capsys):
    code, out, _ = run(capsys, DEBUG, "--set", "lint.allow=[{code='idle_axis', reason='x'}]", "--strict")
    assert code == 0
    assert "note unused_allow" in out
    known = "lint.allow=[{code='unexplained_collective', path='collective/**', reason='x'}]"
    # Nothing was compiled, so collectives were not checked.
    assert "unused_allow" not in run(capsys, DEBUG, "--set", known)[1]


def test_rules_prints_the_resolved_table_as_toml(capsys):
    code, out, _ = run(capsys, DEBUG, "--set", "rules.preset=zero1", "--rules")
    assert code == 0
    rules = tomllib.loads(out)["rules"]
    assert rules["logical"] == {"act_batch": "data", "embed": "data"}
    assert rules["compute"] == {"embed": "replicated"}


def test_one_mesh_axis_on_two_dims_is_2_with_both_dims_named(capsys):
    code, _, err = run(capsys, DEBUG, "--set", "rules.logical.mlp=fsdp")
    assert code == 2
    assert "mesh axis 'fsdp' shards both dim 1 ('mlp') and dim 2 ('embed')" in err


OVERRIDE = """
[[rules.override]]
path = "layers/attention/key/kernel"
spec = {}
"""


@pytest.mark.parametrize(
    ("text", "overrides", "at", "remedy"),
    [
        ('[rules.logical]\nmlp = "fsdp"', [], 'rules.logical.mlp = "fsdp"', 'mlp = "replicated"'),
        ('[rules.logical]\nlayers = "data"', ["model.layers=3"], 'rules.logical.layers = "data"', "mesh.data = 1"),
        ("", ["mesh.data=1", "mesh.fsdp=1"], "mesh.tensor = 8", "mesh.tensor = 4, a size that 8 divides"),
        (OVERRIDE.format('["fsdp"]'), [], 'rules.override.0.spec = ["fsdp"]', "a spec of 4 entries"),
        (OVERRIDE.format('[[], [], ["data", "fsdp", "tensor"], []]'), [], "rules.override.0.spec", "a smaller axis"),
    ],
)
def test_what_does_not_fit_the_model_is_told_where_it_was_written(capsys, tmp_path, text, overrides, at, remedy):
    file = tmp_path / "experiment.toml"
    debug = DEBUG.read_text()
    file.write_text((debug.replace("tensor = 2", "tensor = 8") if overrides[1:] else debug) + f"\n{text}\n")
    code, _, err = run(capsys, file, "--no-compile", *(f"--set={override}" for override in overrides))
    assert code == 2
    where, hint = err.splitlines()[1:]
    assert where.startswith(f"  at {file}:")
    assert at in where
    assert hint.startswith("  try ")
    assert remedy in hint


def test_a_parameter_dim_that_does_not_divide_is_2_with_the_numbers(capsys):
    code, _, err = run(capsys, DEBUG, "--set", "model.mlp=385", "--no-compile")
    assert code == 2
    assert "size 385, which the 2 GPUs of mesh axis 'tensor' do not divide" in err
    # Of [2 layers, 385, 128] fp32 with 128 sharded in 2, the cost is half of one more row of 385.
    assert "padding it to 386 would cost 256 B more a GPU" in err


class Bare(nnx.Module):
    """A model that knows nothing of meshkit: it has no names and no constraints."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(256, 64, rngs=rngs)
        self.up = nnx.Linear(64, 512, rngs=rngs)
        self.head = nnx.Linear(512, 256, rngs=rngs)

    def __call__(self, tokens):
        return self.head(jax.nn.gelu(self.up(self.table(tokens))))


BARE = f"""
cluster = "cpu8"
model = {{ class = "{__name__.rpartition(".")[2]}:Bare" }}
[mesh]
fsdp = 8
[rules.logical]
act_batch = "fsdp"
[[rules.override]]
path = "**/kernel"
spec = ["fsdp", "replicated"]
[[rules.override]]
path = "up/kernel"
spec = ["replicated", "fsdp"]
[[rules.override]]
path = "**/scale"
spec = ["fsdp"]
[train]
global_batch = 8
sequence_length = 32
steps = 1
"""


def test_a_model_that_knows_nothing_of_meshkit(tmp_path, capsys):
    file = tmp_path / "bare.toml"
    file.write_text(BARE, encoding="utf-8")
    (tmp_path / f"{__name__.rpartition('.')[2]}.py").write_text(Path(__file__).read_text(), encoding="utf-8")
    code, out, _ = run(capsys, file, "--json")
    found = {(f["code"], f["path"]) for f in json.loads(out)["findings"]}
    assert code == 0
    assert {
        ("unmatched_parameter", "table/embedding"),
        ("unconstrained_activations", "activations"),
        ("duplicate_rule", "up/kernel"),
        ("rule_never_used", "**/scale"),
    } <= found


@pytest.mark.deviceless
def test_plan_carries_findings_as_warnings_and_strict_stops(capsys):
    sets = ["--set", "cluster={name='dgx_h100',hosts=1}", "--set", "rules.preset=data", "--set", "mesh={data=2,fsdp=4}"]
    assert cli.main(["plan", str(MLP), *sets, "--strict", "--json"]) == 3
    captured = capsys.readouterr()
    warnings = json.loads(captured.out)["warnings"]
    idle = [w["message"] for w in warnings if w["code"] == "idle_axis"]
    assert len(idle) == 1
    assert idle[0].startswith("warning: mesh axis 'fsdp' of size 4 shards nothing")


def test_train_prints_findings_at_its_start(tmp_path, capsys):
    sets = ["--set", "rules.preset=data", "--set", "train.steps=1"]
    assert cli.main(["train", str(ROOT / "configs/experiments/mlp.toml"), *sets, "--out", str(tmp_path / "run")]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "warning idle_axis at fsdp mesh axis 'fsdp' of size 8 shards nothing" in printed
