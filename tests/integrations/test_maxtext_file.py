"""Test `meshkit new --from-maxtext`, which makes a mesh from MaxText's integers without MaxText."""

import pytest

from meshkit import cli
from meshkit.config.experiment import ProgramExperiment, load_any

CONFIG = """
base_config: "base.yml"
model_name: "llama3-70b"
per_device_batch_size: 4
"""
BASE = """
dcn_data_parallelism: -1
ici_fsdp_parallelism: -1
ici_pipeline_parallelism: 1
mesh_axes: ['data', 'fsdp']
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "base.yml").write_text(BASE)
    (tmp_path / "llama.yml").write_text(CONFIG)
    return tmp_path / "llama.yml"


def written(config, tmp_path, *settings, hosts=4, cluster="dgx_h100"):
    out = tmp_path / "mine.toml"
    options = [argument for setting in settings for argument in ("--set", setting)]
    command = ["new", "--from-maxtext", str(config), "--cluster", cluster, "--hosts", str(hosts), "--out", str(out)]
    assert cli.main([*command, *options]) == 0
    experiment = load_any(out)
    assert isinstance(experiment, ProgramExperiment)
    return experiment


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        ([], {"data": {"infiniband": 4}, "fsdp": 8}),
        (["dcn_data_parallelism=1", "dcn_fsdp_parallelism=-1"], {"fsdp": {"nvlink": 8, "infiniband": 4}}),
        (["ici_tensor_parallelism=4"], {"data": {"infiniband": 4}, "fsdp": 2, "tensor": 4}),
        (["dcn_pipeline_parallelism=4", "ici_fsdp_parallelism=8"], {"stage": {"infiniband": 4}, "fsdp": 8}),
    ],
)
def test_its_integers_are_a_mesh(config, tmp_path, settings, mesh):
    experiment = written(config, tmp_path, *settings)
    assert experiment.mesh.to_dict() == mesh
    assert experiment.program.options == {"config": str(config)}


def test_its_other_keys_are_options_of_the_program(config, tmp_path):
    experiment = written(config, tmp_path, "remat_policy=save_qkv_proj", "max_target_length=4096", "scan_layers=true")
    said = {"remat_policy": "save_qkv_proj", "max_target_length": 4096, "scan_layers": True}
    assert experiment.program.options == {"config": str(config), **said}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "ici_fsdp_parallelism=4"], "4"),
        (["--set", "ici_fsdp_parallelism=many"], "ici_fsdp_parallelism is 'many', not a number of GPUs"),
        (["--set", "ici_fsdp_parallelism"], "is no key and value"),
        (["--preset", "x"], "MaxText's configuration already names the model"),
    ],
)
def test_what_is_no_mesh_is_refused(config, tmp_path, options, message, capsys):
    assert cli.main(["new", "--from-maxtext", str(config), "--out", str(tmp_path / "x.toml"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.toml").exists()


@pytest.mark.parametrize("text", ["[1, 2]", "a: b: c", None])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, capsys):
    path = tmp_path / "config.yml"
    if text is not None:
        path.write_text(text)
    assert cli.main(["new", "--from-maxtext", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
