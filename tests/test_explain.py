"""explain: shipped experiments are silent, compiled or not; what is wrong shows, with an exit code; its JSON."""

import json
import tomllib
from functools import cache
from pathlib import Path

import jax
import pytest
from flax import nnx

from meshkit import cli
from meshkit.explainer import Explanation, explain
from meshkit.planner import plan_experiment
from meshkit.spec.experiment import load

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "configs/experiments").glob("*.toml"))
# One of those for GPUs is compiled in the default suite; the others, of minutes on a busy machine, with the slow ones.
COMPILED = [
    pytest.param(
        f, id=f.stem, marks=[] if f.stem == "llama3_8b" or "cpu" in f.stem or f.stem == "mlp" else pytest.mark.slow
    )
    for f in SHIPPED
]
DEBUG = ROOT / "configs/experiments/llama_debug_cpu.toml"
ON_H100S = ["cluster={name='dgx_h100',hosts=1}"]  # eight GPUs, as the CPU experiments have devices


@cache
def planned(file, *overrides):
    """The plan of an experiment on GPUs; compiled once for all tests of this module."""
    experiment = load(file, overrides)
    return plan_experiment(load(file, [*overrides, *ON_H100S]) if experiment.cluster.is_cpu else experiment)


def run(capsys, *arguments):
    code = cli.main(["explain", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.stem)
def test_shipped_experiments_have_no_findings(file):
    found = explain(load(file), compile=False)
    assert found.findings == ()
    assert found.collectives is None


@pytest.mark.deviceless
@pytest.mark.parametrize("file", COMPILED)
def test_every_collective_of_a_shipped_experiment_is_explained(file):
    lint = planned(file).lint
    for allowed in lint.allowed:
        print(f"allowed: {allowed.code} {allowed.path}: {allowed.reason}")
    assert lint.findings == []
    assert len(lint.allowed) <= 3
    assert all(row.explanation and not row.exceeds for row in lint.collectives)


@pytest.mark.deviceless
def test_the_gathers_and_reductions_of_the_debug_llama_are_its_closed_forms():
    """FSDP 2 x TP 2 x DP 2: gradients are reduced once, over data in exactly the bytes of one GPU's fp32 shards; the
    weights are gathered at most three times, twice as written."""
    lint = planned(DEBUG).lint
    by_words = {(row.collective, row.axes): row for row in lint.collectives if row.bound_bytes}
    gathers = by_words["all-gather", ("fsdp",)]
    assert gathers.payload_bytes <= gathers.bound_bytes
    reduced = by_words["all-reduce", ("data",)]
    assert reduced.payload_bytes == pytest.approx(reduced.bound_bytes, rel=0.02)  # norms are combined elsewhere


@pytest.mark.deviceless
def test_explain_compiles_checks_and_places_by_default(capsys):
    sets = [f"--set={o}" for o in ON_H100S]
    code, out, _ = run(capsys, DEBUG, *sets, "--json")
    found = Explanation.model_validate_json(out)
    assert (code, found.findings, found.collectives_note) == (0, (), None)
    assert {"all-gather", "reduce-scatter", "all-reduce"} <= {row.collective for row in found.collectives}
    assert all(row.explanation for row in found.collectives)
    assert found.placement.communication_now_s > 0


def test_without_a_compiler_or_gpus_one_line_says_that_collectives_were_not_checked(capsys, monkeypatch):
    code, out, _ = run(capsys, DEBUG)
    assert code == 0
    assert "collectives were not checked: cluster 'cpu8' has no GPUs" in out
    monkeypatch.setattr("meshkit.xla.program._version", lambda name: None)
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
        "hint": '[rules.logical] act_batch = ["data", "fsdp"], or another preset',
        "allowed": False,
        "reason": None,
    }


def test_the_hint_of_an_idle_axis_mends_it(capsys):
    mended = ["--set", "rules.preset=data", "--set", "rules.logical.act_batch=['data','fsdp','tensor']", "--strict"]
    assert run(capsys, DEBUG, *mended)[0] == 0


def test_strict_is_3_for_a_warning_and_0_where_it_is_allowed(capsys):
    sets = ["--set", "rules.preset=data"]
    code, out, err = run(capsys, DEBUG, *sets, "--strict")
    assert code == 3
    assert "there are 2 findings (idle_axis), and --strict asks for none" in err
    allow = "lint.allow=[{code='idle_axis', path='*', reason='a scaling study'}]"
    code, out, _ = run(capsys, DEBUG, *sets, "--set", allow, "--strict")
    assert code == 0
    assert out.count("a scaling study") == 2
    assert "nothing looks wrong" in out


def test_an_allow_entry_that_silences_nothing_is_a_note_and_passes_strict(capsys):
    code, out, _ = run(capsys, DEBUG, "--set", "lint.allow=[{code='idle_axis', reason='x'}]", "--strict")
    assert code == 0
    assert "note unused_allow" in out
    known = "lint.allow=[{code='unexplained_collective', path='collective/**', reason='x'}]"
    assert "unused_allow" not in run(capsys, DEBUG, "--set", known)[1]  # nobody compiled, so nobody looked


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


def test_a_parameter_dim_that_does_not_divide_is_2_with_the_numbers(capsys):
    code, _, err = run(capsys, DEBUG, "--set", "model.mlp=385", "--no-compile")
    assert code == 2
    assert "size 385, which the 2 GPUs of mesh axis 'tensor' do not divide" in err


class Bare(nnx.Module):
    """Knows nothing of meshkit: no names, no constraints."""

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
    sets = ["--set", "cluster={name='dgx_h100',hosts=1}", "--set", "rules.preset=data"]
    assert cli.main(["plan", str(DEBUG), *sets, "--strict", "--json"]) == 3
    captured = capsys.readouterr()
    warnings = json.loads(captured.out)["warnings"]
    idle = [w["message"] for w in warnings if w["code"] == "idle_axis"]
    assert len(idle) == 2
    assert idle[0].startswith("warning: mesh axis 'fsdp' of size 2 shards nothing")


def test_train_prints_findings_at_its_start(tmp_path, capsys):
    sets = ["--set", "rules.preset=data", "--set", "train.steps=1"]
    assert cli.main(["train", str(ROOT / "configs/experiments/mlp.toml"), *sets, "--out", str(tmp_path / "run")]) == 0
    assert "warning idle_axis: mesh axis 'fsdp' of size 8 shards nothing" in " ".join(capsys.readouterr().err.split())
