"""Test meshkit checkpoint: it lists checkpoints, finds corrupt ones, and exports the very weights that were trained."""

import shutil
import tomllib

import numpy as np
import orbax.checkpoint as ocp
import pytest

from meshkit.cli import main
from meshkit.verbs.checkpoint.manifest import read_manifest, set_aside
from meshkit.weights.files import open_folder
from tests.verbs.tiny_llama import EXPERIMENT, TINY

SETS = [*TINY, "train.steps=2", "checkpoint.every=1", "checkpoint.keep=2", "profile.steps="]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, programs_kept):
    out = tmp_path_factory.mktemp("checkpoint") / "run"
    words = [word for text in SETS for word in ("--set", text)]
    assert main(["train", str(EXPERIMENT), *words, "--out", str(out)]) == 0
    return out


def test_what_is_intact_is_listed_and_verified(trained, capsys):
    for verb in ("list", "verify"):
        assert main(["checkpoint", verb, str(trained)]) == 0
        said = capsys.readouterr().err
        assert said.count("intact") == 2
        assert "corrupt" not in said


def test_the_manifest_of_a_run_says_what_it_needs_to_go_on(trained):
    record = read_manifest(trained / "checkpoints" / "2").record
    assert record["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert tomllib.loads(record["experiment"])["train"]["steps"] == 2
    assert record["data"]["examples a step"] == 8
    assert record["data"]["examples"] > 1000  # These are windows of the standard library.
    assert record["arrays"]["params/embedding"].startswith("float32[")


def test_a_flipped_bit_is_found(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    victim = max((p for p in (run / "checkpoints" / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert main(["checkpoint", "list", str(run)]) == 0  # The file has its full size, and `list` looks no further.
    assert main(["checkpoint", "verify", str(run)]) == 3
    assert "1 of 2 checkpoints are corrupt: 2." in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run), "--step", "1"]) == 0
    assert main(["checkpoint", "export", str(run), "--trust", "--out", str(tmp_path / "weights")]) == 2
    assert "corrupt" in capsys.readouterr().err


def test_the_exported_weights_are_those_of_the_checkpoint(trained, tmp_path):
    assert (
        main(["checkpoint", "export", str(trained), "--trust", "--out", str(tmp_path / "weights"), "--step", "1"]) == 0
    )
    written = open_folder(tmp_path / "weights")["model.embed_tokens.weight"].values[...]
    state = ocp.StandardCheckpointer().restore(trained / "checkpoints" / "1" / "state")
    np.testing.assert_array_equal(written, np.asarray(state["params"]["embedding"]))


@pytest.mark.parametrize(
    ("words", "says"), [(["list", "missing"], "there is no folder"), (["list", "."], "no checkpoint")]
)
def test_what_is_not_there(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", *words]) == 2
    assert says in capsys.readouterr().err


def test_after_a_quarantine_both_are_listed_and_the_good_one_is_exported(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "checkpoints" / "2" / "state" / "_METADATA").write_text("{}")
    set_aside(run / "checkpoints", 2)
    assert main(["checkpoint", "list", str(run)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("intact") == 1
    assert "corrupt: state/_METADATA has 2 bytes instead of" in said
    assert "set aside" in said
    assert main(["checkpoint", "verify", str(run)]) == 3
    assert "1 of 2 checkpoints are corrupt: 2.corrupt." in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(run), "--step", "1"]) == 0
    # The weights are of step 1.
    assert main(["checkpoint", "export", str(run), "--trust", "--out", str(tmp_path / "weights")]) == 0
    assert "wrote the weights of step 1" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(run), "--trust", "--out", str(tmp_path / "other"), "--step", "2"]) == 2
    assert "no checkpoint of step 2" in capsys.readouterr().err
