"""Test that a mistake in an experiment ends with exit code 2 and one message with file, line, key and a remedy."""

# ruff: noqa: E501 - Each row of the table is one mistake, and breaking lines would hide that.

from __future__ import annotations

import os
import re

import pytest

from meshkit import cli

GOOD = """\
cluster = { name = "dgx_h100", hosts = 2 }

[model]
class = "models.llama:Llama"
preset = "llama_debug"

[mesh]
data = { infiniband = 2 }
fsdp = 4
tensor = 2

[rules.logical]
act_batch = ["data", "fsdp"]
embed = "fsdp"
mlp = "tensor"

[train]
global_batch = 16
sequence_length = 128
steps = 10
"""


def change(old, new):
    """Return the good file with one thing changed."""
    assert old in GOOD
    return GOOD.replace(old, new)


def add(text):
    return GOOD + text


# Each row holds a name, the file, the message, the place that it names, and what it says to try.
MISTAKES = [
    ("unknown_key", change("steps = 10", "stepz = 10"), "unknown key 'stepz' in [train]", ":20: train.stepz = 10", "'steps'"),
    ("unknown_table", add("[trian]\nsteps = 1\n"), "unknown key 'trian'", ":21: [trian]", "'train'"),
    ("unknown_cluster_key", change("hosts = 2", "host = 2"), "unknown key 'host'", ":1: cluster.host = 2", "'hosts'"),
    ("wrong_type", change("steps = 10", 'steps = "ten"'), 'must be an integer, not the string "ten"', ":20: train.steps = \"ten\"", "an integer without quotes, such as steps = 100"),
    ("quoted_integer", change("steps = 10", 'steps = "10"'), 'must be an integer, not the string "10"', ":20: train.steps = \"10\"", "steps = 10, without quotes"),
    ("quoted_beyond_its_bounds", change("steps = 10", 'memory_fraction = "92"'), 'must be a number, not the string "92"', ":20: train.memory_fraction = \"92\"", "such as memory_fraction = 0.92"),
    ("quoted_with_zeros_before_it", change("steps = 10", 'steps = "010"'), 'must be an integer, not the string "010"', ":20: train.steps = \"010\"", "such as steps = 100"),
    ("quoted_axis", change("fsdp = 4", 'fsdp = "4"'), 'not the string "4"', ":9: mesh.fsdp = \"4\"", "fsdp = 4, without quotes"),
    ("axis_beyond_any", change("fsdp = 4", "fsdp = 9999999999"), "must be at most 2147483648; not 9999999999", ":9: mesh.fsdp", "fsdp = 1"),
    ("boolean_for_integer", change("steps = 10", "steps = true"), "not the boolean true", ":20: train.steps = true", "steps = 1"),
    ("float_for_integer", change("steps = 10", "steps = 10.5"), "must be an integer, not the number 10.5", ":20: train.steps = 10.5", "steps = 1"),
    ("list_for_string", change('preset = "llama_debug"', "preset = [1]"), "must be a string, not a list", ":5: model.preset = [1]", "preset ="),
    ("table_for_number", add("[optimizer]\nlearning_rate = {}\n"), "must be a number, not a table", ":22: optimizer.learning_rate = {}", "learning_rate = 0.0003"),
    ("number_for_table", change("[train]", "[other]").replace("[mesh]", "train = 3\n[mesh]"), "unknown key 'other'", ":18: [other]", "one of its keys"),
    ("duplicate_key", change("steps = 10", "steps = 10\nsteps = 11"), "'train.steps' is given twice: on line 20 and on line 21", ":21: steps = 11", "removing one"),
    ("duplicate_table", add("[mesh]\ndata = 1\n"), "'mesh' is given twice: on line 7 and on line 21", ":21: [mesh]", "removing one"),
    ("missing_key", change("global_batch = 16\n", ""), "[train] has no 'global_batch'", ":17: [train]", "a line global_batch = 8"),
    ("missing_table", change('[model]\nclass = "models.llama:Llama"\npreset = "llama_debug"\n', ""), "has no 'model'", "experiment.toml", "a section [model]"),
    ("not_a_number", add("[optimizer]\nlearning_rate = nan\n"), "is not a finite number", ":22: optimizer.learning_rate = nan", "a finite number"),
    ("infinite", add("[optimizer]\nclip = inf\n"), "is not a finite number", ":22: optimizer.clip = inf", "a finite number"),
    ("overflow_to_infinity", add("[optimizer]\nclip = 1e999\n"), "is not a finite number", ":22: optimizer.clip = 1e999", "a finite number"),
    ("huge_integer", change("steps = 10", "steps = " + "9" * 30), "does not fit into 64 bits", ":20: train.steps = 999", "smaller"),
    ("absurd_integer", change("steps = 10", "steps = " + "9" * 9999), "out of range", "experiment.toml", "smaller"),
    ("negative", change("steps = 10", "steps = -1"), "must be greater than 0, not -1", ":20: train.steps = -1", "greater than 0"),
    ("fraction_above_one", change("steps = 10", "memory_fraction = 92"), "must be at most 1", ":20: train.memory_fraction = 92", "at most 1"),
    ("unknown_precision", change("steps = 10", 'precision = "fp7"'), 'must be one of fp32, bf16, fp8, mxfp8, nvfp4; not "fp7"', ":20: train.precision", "fp8"),
    ("delayed_bf16", change("steps = 10", 'fp8_scaling = "delayed"'), 'delayed scaling is for fp8, but train.precision = "bf16"', ":20: train.fp8_scaling", 'precision = "fp8"'),
    ("delayed_pipeline", change("steps = 10", 'precision = "fp8"\nfp8_scaling = "delayed"\n[pipeline]\naxis = "tensor"\nmicrobatches = 2').replace('mlp = "tensor"\n', ""), "stages of a pipeline do not hand on the history", ":20: train.fp8_scaling", "current"),
    ("delayed_replicas", change("steps = 10", 'precision = "fp8"\nfp8_scaling = "delayed"\n[local_sgd]\naxis = "data"\nevery = 10'), "replicas of local_sgd do not agree on the history", ":21: train.fp8_scaling", "current"),
    ("bf16_replicas", change("steps = 10", 'parameter_precision = "bf16"\n[local_sgd]\naxis = "data"\nevery = 10'), "too small for bf16", ":20: train.parameter_precision", 'parameter_precision = "fp32"'),
    ("blocks_in_a_pipeline", change("steps = 10", 'precision = "mxfp8"\n[pipeline]\naxis = "tensor"\nmicrobatches = 2').replace('mlp = "tensor"\n', ""), "block-scaled matmuls inside of a pipeline's stage", ":19: train.precision", 'precision = "fp8"'),
    ("remat_empty", change("steps = 10", "remat = []"), "train.remat must be the name of a policy, or a list of names to keep, not an empty list", ":20: train.remat = []", "remat = "),
    ("remat_twice", change("steps = 10", 'remat = ["up", "up"]'), 'train.remat = ["up", "up"] lists a name twice', ':20: train.remat = ["up", "up"]', "remat = "),
    ("remat_number", change("steps = 10", 'remat = ["up", 3]'), "train.remat holds 3, which is not a valid name", ':20: train.remat = ["up", 3]', "remat = "),
    ("axis_too_large", change("tensor = 2", "tensor = 16"), "axis 'tensor' asks for 16 GPUs on NVLink, but an NVLink domain has 8", ":10: mesh.tensor = 16", "mesh.tensor = 2"),
    ("too_many_domains", change("infiniband = 2", "infiniband = 3"), "asks for 3 NVLink domains, but the cluster has 2", ":8: mesh.data", "infiniband = 2"),
    ("sizes_do_not_multiply", change("fsdp = 4", "fsdp = 2"), "multiply to 4 (fsdp 2 x tensor 2), but an NVLink domain uses 8", ":7: [mesh]", "mesh.fsdp = 4"),
    ("axis_of_zero", change("fsdp = 4", "fsdp = 0"), "must be a positive integer", ":9: mesh.fsdp = 0", "fsdp = 1"),
    ("axis_of_a_wrong_word", change("fsdp = 4", 'fsdp = "full"'), "must be a positive integer, \"fill\"", ":9: mesh.fsdp = \"full\"", "fsdp = 2"),
    ("two_fills", change("fsdp = 4\ntensor = 2", 'fsdp = "fill"\ntensor = "fill"'), 'both say "fill" on NVLink', ":10: mesh.tensor", "a number"),
    ("unknown_link", change("infiniband = 2", "ethernet = 2"), "axis 'data' has no link 'ethernet'", ":8: mesh.data.ethernet = 2", "infiniband"),
    ("reserved_axis", change("tensor = 2", "tensor = 2\nreplicated = 1"), "'replicated' cannot name a mesh axis", ":11: mesh.replicated = 1", "another name"),
    ("no_axes", change("data = { infiniband = 2 }\nfsdp = 4\ntensor = 2\n", ""), "[mesh] has no axes", ":7: [mesh]", "data ="),
    ("rule_to_unknown_axis", change('"tensor"', '"tenser"'), "names mesh axis 'tenser', but the mesh has data, fsdp, tensor", ":15: rules.logical.mlp = \"tenser\"", "'tensor'"),
    ("rule_of_a_wrong_type", change('embed = "fsdp"', "embed = 1"), "must be a mesh axis or a list of them", ":14: rules.logical.embed = 1", "replicated"),
    ("axis_twice_in_a_rule", change('["data", "fsdp"]', '["data", "data"]'), "names mesh axis 'data' twice", ":13: rules.logical.act_batch", "once"),
    ("axis_twice_in_an_override", add('[[rules.override]]\npath = "**/kernel"\nspec = ["fsdp", "fsdp"]\n'), "'fsdp' shards both dim 0 and dim 1", ":23: rules.override.0.spec", "replicated"),
    ("axis_twice_in_a_spec", change('mlp = "tensor"', 'mlp = "fsdp"'), "'fsdp' shards both dim", "rules.logical", "another mesh axis"),
    ("override_without_a_path", add('[[rules.override]]\nspec = ["fsdp"]\n'), "has no 'path'", ":21: [rules.override.0]", "a line path"),
    ("unknown_preset", add('[rules]\npreset = "fsdp_tensr"\n'), "no rules preset 'fsdp_tensr'", ":22: rules.preset", "'fsdp_tensor'"),
    ("unknown_cluster", change("dgx_h100", "dgx_h101"), 'no shipped cluster "dgx_h101"', ":1: cluster.name = \"dgx_h101\"", "'dgx_h100'"),
    ("missing_cluster_file", change('{ name = "dgx_h100", hosts = 2 }', '"no/such.toml"'), "no cluster file", ':1: cluster = "no/such.toml"', "shipped cluster"),
    ("unknown_gpu", change("hosts = 2", 'gpu = "h100_smx"'), "no GPU 'h100_smx'", ":1: cluster.gpu = \"h100_smx\"", "'h100_sxm'"),
    ("hosts_of_zero", change("hosts = 2", "hosts = 0"), "must be greater than 0, not 0", ":1: cluster.hosts = 0", "greater than 0"),
    ("batch_not_divisible", change("global_batch = 16", "global_batch = 12"), "train.global_batch = 12 is not divisible by 8 (data 2 x fsdp 4)", ":18: train.global_batch = 12", "16 or 8"),
    ("batch_not_divisible_by_micro_batches", change("steps = 10", "accumulate = 3"), "is not divisible by 24 (data 2 x fsdp 4 x accumulate 3)", ":18: train.global_batch = 16", "24"),
    ("sequence_not_divisible", change("mlp =", 'act_length = "tensor"\nmlp =').replace("length = 128", "length = 127"), "train.sequence_length = 127 is not divisible by 2 (tensor 2)", ":20: train.sequence_length = 127", "128 or 126"),
    ("profile_beyond_the_end", add("[profile]\nsteps = [8, 12]\n"), "goes beyond the 10 steps", ":22: profile.steps = [8, 12]", "[8, 10]"),
    ("profile_of_one_number", add("[profile]\nsteps = [8]\n"), "must have 2 entries, not 1", ":22: profile.steps = [8]", "2 entries"),
    ("xla_option_of_another_name", add("[xla]\nlatency_hiding = true\n"), "'latency_hiding' is not an XLA option", ":22: xla.latency_hiding = true", "xla_latency_hiding"),
    ("class_without_a_colon", change("models.llama:Llama", "models.llama.Llama"), "does not have the required form", ":4: model.class = \"models.llama.Llama\"", "package.module:name"),
    ("missing_module", change("models.llama:", "models.lama:"), "no module 'models.lama'", ":4: model.class", "a path that exists"),
    ("missing_class", change("llama:Llama", "llama:Lama"), "'models.llama' has no 'Lama'", ":4: model.class", "models.llama:Llama"),
    ("unknown_model_option", change("preset =", "colour = 1\npreset ="), "no option 'colour'", ":5: model.colour = 1", "one of: "),
    ("unknown_model_preset", change("llama_debug", "llama_debu"), "Llama preset 'llama_debu'", ':5: model.preset = "llama_debu"', ""),
    ("not_toml", "this is : not toml\n", "is not TOML", ":1: this is : not toml", "key = value"),
    ("unclosed_string", change('preset = "llama_debug"', 'preset = "llama_debug'), "is not TOML", ':5: preset = "llama_debug', '"quotes"'),
    ("unclosed_table", change("{ infiniband = 2 }", "{ infiniband = 2"), "is not TOML", ":8: data = { infiniband = 2", "key = value"),
    ("empty", "", "has no 'cluster'", "experiment.toml", "a line cluster"),
    ("deeply_nested", "a = " + "[" * 20000 + "]" * 20000, "is nested too deeply", "experiment.toml", "fewer"),
    ("deep_dotted_key", "a" + ".a" * 3000 + " = 1\n", "has more than 32 parts", "experiment.toml:1", "fewer"),
    ("longest_dotted_key", "\n\na" + ".a" * 50_000 + " = 1\n", "has more than 32 parts", "experiment.toml:3", "fewer"),
    ("long_header", "[a" + " . 'b'" * 50_000 + "]\n", "has more than 32 parts", "experiment.toml:1", "fewer"),
    ("long_inline_key", "x = { y = { " + r'"\"" . ' * 50_000 + "z = 1 }}\n", "has more than 32 parts", "experiment.toml:1", "fewer"),
]  # fmt: skip


def explain(path, capsys, *arguments):
    """Return exit code and standard error of `meshkit explain`, after checking the form of its one message."""
    code = cli.main(["explain", str(path), *arguments])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Traceback" not in shown.err
    assert re.fullmatch(r"meshkit: [^\n]+\n  at [^\n]+\n(  try [^\n]+\n)?", shown.err), shown.err
    assert re.search(r"  try |Did you mean|Known: ", shown.err), shown.err
    return code, shown.err


@pytest.mark.parametrize(
    ("text", "message", "at", "hint"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_a_mistake_is_one_message(tmp_path, capsys, text, message, at, hint):
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    code, shown = explain(path, capsys)
    assert code == 2
    first, where, *way_out = shown.splitlines()
    assert message in first
    assert at in where
    assert str(path) in where
    assert hint in "".join(way_out)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("mesh.tensor=16", "asks for 16 GPUs on NVLink", "mesh.tensor = 2"),
        ("train.stepz=1", "unknown key 'stepz'", "'steps'"),
        ("train.steps=nan", "not a finite number", "a finite number"),
        ("mesh.nothing=", "no mesh.nothing to remove", "data, fsdp, tensor"),
        ("mesh.fsdp={nvlink", "is not TOML", "quoting it"),
        ("tensor", "needs a key and a value", "--set mesh.tensor=8"),
        ("=3", "is not a key", "--set mesh.tensor=8"),
        ("train.steps.more=3", "train.steps is not a table", "--set train.steps=..."),
        ("cluster=no/such.toml", "no cluster file", "shipped cluster"),
    ],
)
def test_a_mistake_in_an_override_is_one_message(tmp_path, capsys, override, message, hint):
    path = tmp_path / "experiment.toml"
    path.write_text(GOOD)
    code, shown = explain(path, capsys, "--set", override)
    assert code == 2
    assert message in shown
    assert f"at --set {override}\n" in shown
    assert hint in shown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "there is no such experiment file"),
        (lambda path: path.mkdir(), "is a folder"),
        (lambda path: path.write_bytes(bytes(range(256))), "is not TOML"),
        (lambda path: path.write_bytes(b"\x7fELF\x02\x01\xff\xfe"), "is not UTF-8 text (byte 0xff)"),
        (lambda path: path.write_bytes(GOOD.encode("utf-16")), "is not UTF-8 text"),
        (lambda path: path.write_bytes(b"\0" * 100), "is not TOML"),
        (lambda path: path.write_bytes(b"# " * 2**22), "is larger than 1 MiB"),
        (lambda path: path.symlink_to(path), "cannot be read"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
        (os.mkfifo, "it is a named pipe, not a regular file"),
    ],
    ids=["missing", "folder", "all_bytes", "binary", "utf16", "zeros", "huge", "link_to_itself", "endless", "pipe"],
)
def test_a_file_that_cannot_be_read_is_one_message(tmp_path, capsys, make, message):
    path = tmp_path / "experiment.toml"
    make(path)
    code, shown = explain(path, capsys)
    assert code == 2
    if message != "is not TOML":
        assert message in shown
    assert str(path) in shown


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission(tmp_path, capsys):
    path = tmp_path / "experiment.toml"
    path.write_text(GOOD)
    path.chmod(0)
    code, shown = explain(path, capsys)
    assert code == 2
    assert "cannot be read" in shown


def test_there_are_thirty_mistakes():
    assert len({row[0] for row in MISTAKES}) == len(MISTAKES) >= 30
