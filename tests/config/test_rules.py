"""Test sharding rules: kinds of state, overrides by path, presets, and the errors of invalid rules."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.config.experiment import load
from meshkit.config.rules import PRESETS, ShardingRules, path_matches
from meshkit.errors import ConfigError

RULES = ShardingRules(
    {"act_batch": ["data", "fsdp"], "embed": "fsdp", "mlp": "tensor", "vocab": None, "heads": "replicated"},
    overrides=[("**/router/kernel", ("replicated", None)), ("**/kernel", ("fsdp", ["tensor", "data"]))],
    gradients={"embed": "data"},
)


@pytest.mark.parametrize(
    ("logical", "kind", "spec"),
    [
        (("embed", "mlp"), "parameters", (("fsdp",), ("tensor",))),
        (("vocab", "embed"), "parameters", ((), ("fsdp",))),
        ((None, "heads", "unknown"), "parameters", ((), (), ())),
        (("act_batch", "act_length"), "activations", (("data", "fsdp"), ())),
        (("embed", "mlp"), "gradients", (("data",), ("tensor",))),
        (("embed", "mlp"), "optimizer", (("fsdp",), ("tensor",))),
        ((), "parameters", ()),
    ],
)
def test_spec_for(logical, kind, spec):
    assert RULES.spec_for(logical, kind=kind) == spec


@pytest.mark.parametrize(
    ("path", "spec"),
    [
        ("layers/router/kernel", ((), ())),
        ("router/kernel", ((), ())),
        ("layers/attention/query/kernel", (("fsdp",), ("tensor", "data"))),
        ("kernel", (("fsdp",), ("tensor", "data"))),
        ("layers/kernel/bias", None),
        ("layers/mykernel", None),
    ],
)
def test_override_for(path, spec):
    assert RULES.override_for(path) == spec


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers/*/kernel", "layers/mlp/kernel", True),
        ("layers/*/kernel", "layers/a/b/kernel", False),
        ("layers/**", "layers/a/b", True),
        ("layers/**", "layers", True),
        ("layers/**", "layers2/a", False),
        ("**", "any/thing", True),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b/c/z", True),
        ("q*/k", "query/k", True),
        ("q*/k", "query/x/k", False),
        ("a.b", "axb", False),
        ("**/a*b*/**", "x/y/a1b2", True),
        ("**/a*b*/**", "x/y/a1b2/c/d", True),
        ("**a**/b", "axab", True),
        ("*/*/c", "a/b/c", True),
        ("*/*/c", "a/c", False),
        ("a/**b", "a/x/yb", True),
    ],
)
def test_globs(pattern, path, matches):
    found = ShardingRules(overrides=[(pattern, ())]).override_for(path)
    assert (found is not None) == matches


@given(st.text("ab*/", max_size=8), st.text("ab/", max_size=8))
def test_a_glob_means_what_its_regular_expression_does(pattern, path):
    meaning = {"**/": r"(?:.*/)?", "/**": r"(?:/.*)?", "**": r".*", "*": r"[^/]*"}
    pieces = re.split(r"(\*\*/|/\*\*$|\*\*|\*)", pattern)
    same = re.fullmatch("".join(meaning.get(piece, re.escape(piece)) for piece in pieces), path)
    assert path_matches(pattern, path) == (same is not None)


def test_rules_as_flax_has_them_are_a_list_of_pairs(tmp_path):
    pairs = [("act_batch", ("data", "fsdp")), ("embed", "fsdp"), ("vocab", None), ["embed", "fsdp"]]
    rules = ShardingRules(pairs)
    assert rules.logical == {"act_batch": ("data", "fsdp"), "embed": ("fsdp",), "vocab": ()}
    with pytest.raises(ConfigError, match="two rules for 'embed': 'fsdp' and 'data'"):
        ShardingRules([*pairs, ("embed", "data")])
    file = tmp_path / "e.toml"
    file.write_text(
        'cluster = "cpu8"\nmodel = { class = "models.mlp:Mlp" }\nmesh = { data = 8 }\n[train]\nglobal_batch = 8\n'
        '[rules]\nlogical = [["embed", "data"], ["mlp", ["data"]]]\n'
    )
    assert load(file).rules.logical == {"embed": ("data",), "mlp": ("data",)}
    file.write_text(file.read_text().replace('["mlp", ["data"]]', '["embed", "fsdp"]'))
    with pytest.raises(ConfigError, match="two rules for 'embed'"):
        load(file)


def test_many_wildcards_take_no_time():
    """A regular expression tries all ways to split the path, so 60 wildcards would never finish."""
    path = "a/" * 100 + "b"
    for piece in ("**/a*", "**a", "*a*", "**/", "a**"):
        path_matches(piece * 60 + "x", path)
        path_matches(piece * 5_000, path)


def test_a_logical_axis_may_not_use_one_mesh_axis_twice_in_an_array():
    rules = ShardingRules({"embed": "fsdp", "vocab": ["tensor", "fsdp"]})
    with pytest.raises(ConfigError, match=r"both dim 0 \('vocab'\) and dim 2 \('embed'\)") as caught:
        rules.spec_for(("vocab", None, "embed"))
    assert caught.value.at == 'rules.logical.embed = "fsdp"'


def test_an_override_in_another_state_is_the_key_that_is_blamed():
    rules = ShardingRules({"embed": "fsdp", "mlp": "tensor"}, optimizer={"mlp": "fsdp"})
    rules.spec_for(("embed", "mlp"))
    with pytest.raises(ConfigError, match=r"'embed'.*'mlp'") as caught:
        rules.spec_for(("embed", "mlp"), kind="optimizer")
    assert caught.value.at == 'rules.optimizer.mlp = "fsdp"'


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (lambda: ShardingRules({"embed": 3}), "rules.logical.embed must be a mesh axis or a list"),
        (lambda: ShardingRules({"embed": ["a", "a"]}), "names mesh axis 'a' twice"),
        (lambda: ShardingRules({"embed": [1]}), "must be a mesh axis or a list"),
        (lambda: ShardingRules(overrides=[("", ())]), "needs a parameter path"),
        (lambda: ShardingRules(overrides=[("a", "fsdp")]), "must be a list with an entry for each dim"),
        (lambda: ShardingRules(overrides=[("a", ("x", "x"))]), "both dim 0 and dim 1 of 'a'"),
        (lambda: ShardingRules({"embed": "tenso"}).check(["tensor"]), "names mesh axis 'tenso'(.|\n)*'tensor'"),
        (lambda: ShardingRules(compute={"embed": "x"}).check(["y"]), "rules.compute.embed names mesh axis 'x'"),
        (lambda: ShardingRules(overrides=[("a", ("x",))]).check(["y"]), "rules.override.0.spec names mesh axis 'x'"),
        (lambda: ShardingRules.preset("fsdp_tensr"), "no rules preset 'fsdp_tensr'(.|\n)*'fsdp_tensor'"),
        (lambda: ShardingRules({}).mapping("weights"), "there are no rules for 'weights'"),
    ],
)
def test_what_is_refused(rules, message):
    with pytest.raises(ConfigError, match=message):
        rules()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("axes", [("data",), ("fsdp",), ("data", "fsdp", "tensor"), ("other",)])
def test_a_preset_skips_the_axes_that_the_mesh_lacks(name, axes):
    rules = ShardingRules.preset(name, axes)
    rules.check(axes)
    assert rules.explicit == frozenset()


ARRAYS = [
    ("vocab", "embed"),
    ("embed", "heads", "head_dim"),
    ("embed", "kv_heads", "head_dim"),
    ("heads", "head_dim", "embed"),
    ("layers", "embed", "mlp"),
    ("mlp", "embed"),
    ("act_batch", "act_residual_length", "act_embed"),
    ("act_batch", "act_length", "act_heads", "head_dim"),
    ("act_batch", "act_length", "act_mlp"),
    ("act_batch", "act_length", "act_vocab"),
]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("logical", ARRAYS)
def test_a_preset_uses_no_mesh_axis_twice_in_the_arrays_of_a_transformer(name, logical):
    ShardingRules.preset(name).spec_for(logical)


def test_to_dict_round_trips():
    table = RULES.to_dict()
    overrides = [(row["path"], row["spec"]) for row in table.pop("override")]
    assert ShardingRules(table.pop("logical"), overrides=overrides, **table) == RULES
