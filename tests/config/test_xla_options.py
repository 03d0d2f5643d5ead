"""Test that `[xla]` in a file sets flags, numbers and names only; a file or a program needs the command line."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

import meshkit as mk
from meshkit.cli import main
from meshkit.config.experiment import load
from meshkit.config.xla_options import ENUMS, TEXTS, as_overrides
from meshkit.errors import ConfigError
from tests.config.debug_options import fields_of_debug_options

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
STRING, ENUM = 9, 14  # These numbers are of google.protobuf.FieldDescriptorProto.Type.


def experiment(folder: Path, option: str) -> Path:
    file = folder / "own.toml"
    file.write_text(f"{EXPERIMENT.read_text()}\n[xla]\n{option}\n")
    return file


REFUSED = (
    'xla_gpu_cuda_data_dir = "./tools"',  # XLA would run bin/ptxas of this folder.
    'xla_dump_to = "out"',
    'xla_gpu_kernel_cache_file = "kernels"',
    'xla_gpu_pgle_profile_file_or_directory_path = "pgle.pbtxt"',
    'xla_gpu_ptx_compiler_extra_flags = "--output-file=x"',
    'xla_option_of_a_later_release = "somewhere"',
    'xla_dump_to = "true"',
)


@pytest.mark.parametrize("verb", ["plan", "plan --options", "explain", "train", "rehearse", "tune"])
@pytest.mark.parametrize("option", REFUSED[:3])
def test_no_verb_takes_a_path_from_the_file(tmp_path, monkeypatch, capsys, verb, option):
    monkeypatch.chdir(tmp_path)
    file = experiment(tmp_path, option)
    assert main([*verb.split(), str(file)]) == 2
    name, line = option.split(" = ")[0], file.read_text().splitlines().index(option) + 1
    shown = capsys.readouterr().err
    assert f"xla.{name} is a string that could name a file or a program" in shown
    assert f"{file}:{line}: xla.{option}" in shown
    assert f"""try --set 'xla.{name}="...\"'""" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["own.toml"]


@pytest.mark.parametrize("option", REFUSED)
def test_a_text_in_the_file_is_refused_where_it_is_not_known_to_name_no_file(tmp_path, option):
    with pytest.raises(ConfigError, match="could name a file or a program"):
        load(experiment(tmp_path, option))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("xla_gpu_enable_latency_hiding_scheduler = true", True),
        ("xla_gpu_all_gather_combine_threshold_bytes = 134217728", 134217728),
        ('xla_gpu_pipeline_all_gather = "COLLECTIVE_PIPELINING_MODE_OFF"', "COLLECTIVE_PIPELINING_MODE_OFF"),
        ('xla_gpu_enable_command_buffer = ""', ""),
        ('xla_disable_hlo_passes = "rematerialization"', "rematerialization"),
        ("xla_option_of_a_later_release = 3", 3),
    ],
)
def test_flags_numbers_and_names_are_read(tmp_path, option, value):
    assert list(load(experiment(tmp_path, option)).xla.values()) == [value]


def test_the_command_line_sets_any_option_and_another_process_gets_it(tmp_path):
    set_ = ['xla.xla_dump_to="out"', "xla.xla_gpu_autotune_level=0"]
    found = load(EXPERIMENT, set_)
    assert found.xla == {"xla_dump_to": "out", "xla_gpu_autotune_level": 0}
    resolved = tmp_path / "experiment.toml"
    resolved.write_text(found.to_toml())
    with pytest.raises(ConfigError, match="xla_dump_to"):
        load(resolved)
    assert load(resolved, as_overrides(found.xla)).xla == found.xla


def test_an_override_of_one_option_lets_no_other_through(tmp_path):
    with pytest.raises(ConfigError, match="xla_dump_to"):
        load(experiment(tmp_path, 'xla_dump_to = "out"'), ["xla.xla_gpu_kernel_cache_file=kernels"])


@pytest.mark.deviceless
def test_what_the_compiler_process_sets_itself_nobody_else_does(tmp_path):
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 8}), cluster, devices=mk.describe_devices(cluster))
    options = {"xla_dump_to": str(tmp_path / "dump"), "xla_gpu_kernel_cache_file": str(tmp_path / "kernels")}
    report = mk.plan(lambda x: x + 1, (jnp.zeros(8),), mesh=mesh, cluster=cluster, options=options)
    assert list(tmp_path.iterdir()) == []
    said = [w.message for w in report.warnings if "sets it itself" in w.message]
    assert [name for name in options if any(name in message for message in said)] == list(options)


def test_the_lists_are_of_the_fields_that_this_jaxlib_has():
    kinds = fields_of_debug_options()
    assert len(kinds) > 300
    assert {name for name, kind in kinds.items() if kind == ENUM} <= ENUMS
    assert {name for name in ENUMS if kinds.get(name, ENUM) != ENUM} == set()
    assert {name for name in TEXTS if kinds.get(name, STRING) != STRING} == set()
