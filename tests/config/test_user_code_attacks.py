"""What an experiment file may name as code, and whose code runs for it: attacks that must come to nothing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshkit.cli import main
from meshkit.config import user_code
from meshkit.config.user_code import load_object
from meshkit.errors import ConfigError
from meshkit.search.workers import open_workers, request_of_file

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "configs" / "experiments"
EXPERIMENT = EXPERIMENTS / "llama_debug_cpu.toml"
OWN = "from models.llama import Llama\nclass Mine(Llama):\n    pass\n"
posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """What is loaded here is forgotten."""
    monkeypatch.delenv("MESHKIT_MODEL_ROOTS", raising=False)
    before, served = set(sys.modules), dict(user_code.FINDER.served)
    yield
    user_code.FINDER.served = served
    for name in set(sys.modules) - before:
        if name.startswith("oc_"):
            del sys.modules[name]


def files(folder, **texts):
    """Files by name, with `__` for `/`."""
    for name, text in texts.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def run(*words, cwd, **variables):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | variables
    command = [sys.executable, "-m", "meshkit", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def one_message(text):
    return text.count("meshkit: ") == 1 and "Traceback" not in text


@pytest.mark.parametrize("verb", ["explain", "doctor"])
def test_a_model_is_no_shell(tmp_path, capfd, verb):
    words = ["--set", "model.class=os:system", "--set", "model.preset=", "--set", f"model.command=id > {tmp_path}/ran"]
    code = main([verb, str(EXPERIMENT), *words])
    out, err = capfd.readouterr()
    assert "os:system' is of Python itself" in out + err
    assert code == (2 if verb == "explain" else 3)
    assert "Traceback" not in out + err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.class", "train.loss", "data.source", "train.metrics", "train.hooks"])
def test_python_is_refused_wherever_code_is_named(capfd, tmp_path, name):
    sys.modules.pop("this", None)
    value = '["this:s"]' if name == "train.hooks" else "this:s"
    words = ["--set", f"{name}={value}", "--out", str(tmp_path / "run")]
    assert main(["train", str(EXPERIMENT), *words]) == 2
    err = capfd.readouterr().err
    assert one_message(err)
    assert "'this:s' is of Python itself" in err
    assert name in err
    assert "this" not in sys.modules  # which prints a poem when it is imported


@pytest.mark.parametrize(
    "name",
    ["os:system", "posix:system", "builtins:exec", "sys:exit", "os.path:join", "__main__:main", "test.support:x"],
)
def test_nothing_of_python_is_loaded(name):
    with pytest.raises(ConfigError, match="is of Python itself, and is not loaded"):
        load_object(name)


def plant(folder):
    """A folder with what jax, and Python, look for; each makes a file if it runs."""
    ran = folder / "ran"
    code = f"open({str(ran)!r}, 'a').write(__name__)\n"
    files(folder, jax_plugins__evil____init__=code, oc_evil=code, flax__linen=code, absl__logging=code)
    info = folder / "oc_evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oc-evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jax_plugins]\nevil = oc_evil\n")
    return ran


@pytest.mark.parametrize(("model", "inside"), [("models.llama:Llama", False), ("oc_mine:Mine", True)])
def test_a_plugin_beside_an_experiment_does_not_run(tmp_path, model, inside):
    """Neither beside the file and its model, nor in the working directory."""
    shared = tmp_path / "shared"
    ran = plant(files(shared, oc_mine=OWN))
    (shared / "e.toml").write_text(EXPERIMENT.read_text())
    done = run("explain", shared / "e.toml", "--set", f"model.class={model}", cwd=shared if inside else tmp_path)
    assert done.returncode == 0, done.stderr
    assert not ran.exists()


def test_a_folder_does_not_stand_for_an_installed_package(tmp_path):
    ran = plant(tmp_path)
    assert load_object("flax.linen:Dense", [tmp_path]).__name__ == "Dense"
    assert not ran.exists()


PACKAGE = {
    "oc_pkg__net": "from . import part\nfrom oc_pkg.part import value\nfrom .sub.deep import far\nimport oc_help\n"
    "def late():\n    import oc_late\n    return oc_late.value, value, far, oc_help.value\n",
    "oc_pkg__part": "value = 1\n",
    "oc_pkg__sub__deep": "from ..part import value as far\n",
    "oc_help": "import oc_more\nvalue = oc_more.value\n",
    "oc_more": "value = 2\n",
    "oc_late": "value = 3\n",
    "oc_other": "value = 4\n",
}


@pytest.mark.parametrize("regular", [True, False])
def test_imports_inside_the_users_code_work_and_nobody_elses(tmp_path, regular):
    inits = {"oc_pkg____init__": "", "oc_pkg__sub____init__": ""} if regular else {}
    folder = files(tmp_path / "code", **PACKAGE, **inits)
    before = list(sys.path)
    late = load_object("oc_pkg.net:late", [tmp_path, folder])
    assert late() == (3, 1, 1, 2)
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("oc_other")  # lies beside, and is asked for by somebody else


def test_the_folder_that_holds_the_module_is_the_one(tmp_path):
    """A folder that has only the package's name is passed over."""
    files(tmp_path / "a", oc_pkg__other="")
    files(tmp_path / "b", oc_pkg__net="value = 1\n")
    assert load_object("oc_pkg.net:value", [tmp_path / "a", tmp_path / "b"]) == 1


def test_two_modules_of_one_name_are_not_mistaken_for_each_other(tmp_path):
    folders = [files(tmp_path / name, oc_same=f"value = {name!r}\n") for name in ("a", "b")]
    assert load_object("oc_same:value", folders[:1]) == "a"
    assert load_object("oc_same:value", folders[:1]) == "a"
    with pytest.raises(ConfigError, match=r"'oc_same' in .*/b cannot be loaded: another one .* from .*/a"):
        load_object("oc_same:value", folders[1:])


@posix
@pytest.mark.parametrize("what", [".", "oc_pkg", "oc_pkg/net.py"])
def test_code_that_everybody_may_write_is_not_run(tmp_path, monkeypatch, what):
    files(tmp_path / "code", oc_pkg__net=f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "code" / what).chmod(0o777)
    with pytest.raises(ConfigError, match=r"everybody may write .*code.* \(mode 0777\)") as caught:
        load_object("oc_pkg.net:value", [tmp_path / "code"], at="e.toml:3: model.class")
    assert caught.value.at == "e.toml:3: model.class"
    monkeypatch.syspath_prepend(tmp_path / "code")  # nor where Python finds it
    with pytest.raises(ConfigError, match="everybody may write"):
        load_object("oc_pkg.net:value")
    assert not (tmp_path / "ran").exists()


@posix
def test_code_that_a_group_may_write_is_warned_of_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(user_code, "is_private_group", lambda uid, gid: False)
    folder = files(tmp_path / "code", oc_group="value = 1\n")
    folder.chmod(0o770)
    assert load_object("oc_group:value", [folder]) == load_object("oc_group:value", [folder]) == 1
    err = capfd.readouterr().err
    assert err.count("a group may write") == 1
    assert str(folder) in err


def test_a_process_that_plans_finds_the_code_beside_the_experiment(tmp_path, monkeypatch):
    """And runs nothing else that lies there; the process has no folder of an experiment on its path."""
    shared, log = tmp_path / "shared", tmp_path / "log"
    ran = plant(files(shared, oc_mine=OWN))
    (shared / "e.toml").write_text(EXPERIMENT.read_text())
    monkeypatch.chdir(shared)
    with open_workers(request_of_file(shared / "e.toml", ["cluster=dgx_h100"]), jobs=1, log=log) as workers:
        workers.submit(("model.class=oc_mine:Missing",))
        workers.submit(("model.class=oc_mine:Mine",))
        first, second = workers.next(), workers.next()
    assert "has no 'Missing'" in (first.error or "")
    assert second.error is None
    assert second.time_s
    assert str(shared) not in map(os.path.abspath, sys.path)  # which the process gets
    assert not ran.exists()


def test_a_rehearsal_finds_the_code_beside_the_file_that_was_named(tmp_path, monkeypatch):
    from meshkit.verbs.rehearse import rehearsal

    shared = files(tmp_path / "shared", oc_mine=OWN)
    (tmp_path / "run").mkdir()
    text = EXPERIMENT.read_text()
    for folder in (shared, tmp_path / "run"):
        (folder / "experiment.toml").write_text(text)
    seen = []
    monkeypatch.setattr(rehearsal, "rehearse", lambda experiment, *rest: seen.append(experiment))
    run = str(tmp_path / "run")
    request = {"folder": run, "steps": 1, "overrides": [], "beside": str(shared / "experiment.toml")}
    rehearsal.main({**request, "experiment": str(tmp_path / "run" / "experiment.toml")})
    assert load_object("oc_mine:Mine", seen[0].search_paths).__name__ == "Mine"


def test_an_export_runs_no_code_that_a_run_folder_names(tmp_path, capfd):
    run_folder = tmp_path / "run"
    files(run_folder, oc_evil=f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    text = EXPERIMENT.read_text().replace("models.llama:Llama", "oc_evil:Model")
    (run_folder / "experiment.toml").write_text(text)
    (run_folder / "checkpoints" / "1").mkdir(parents=True)
    words = ["checkpoint", "export", str(run_folder), "--out", str(tmp_path / "weights")]
    assert main(words) == 2
    err = capfd.readouterr().err
    assert one_message(err)
    assert "no experiment is named" in err
    assert "--trust" in err
    assert main([*words, "--trust", "--experiment", str(EXPERIMENT)]) == 2
    assert "both --experiment and --trust" in capfd.readouterr().err
    assert main([*words, "--experiment", str(EXPERIMENT)]) == 2  # this checkpoint is damaged
    assert not (tmp_path / "ran").exists()
