"""Test which code an experiment file may name and whose code runs for it, by attacks that must fail."""

from __future__ import annotations

import importlib
import importlib.util
import marshal
import os
import py_compile
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomlkit

from meshkit.cli import main
from meshkit.config import user_code
from meshkit.config.experiment import load
from meshkit.config.user_code import load_function, load_object
from meshkit.errors import ConfigError
from meshkit.planning.resolved import find_tokenizer, functions_by_command
from meshkit.search.workers import file_request, open_workers
from meshkit.verbs.train.hooks import find_hooks

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "configs" / "experiments"
EXPERIMENT = EXPERIMENTS / "llama_debug_cpu.toml"
OWN = "from models.llama import Llama\nclass Mine(Llama):\n    pass\n"
posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
needs_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Forget the modules that a test has loaded."""
    monkeypatch.delenv("MESHKIT_MODEL_ROOTS", raising=False)
    before, served = set(sys.modules), dict(user_code.FINDER.served)
    yield
    user_code.FINDER.served = served
    for name in set(sys.modules) - before:
        if name.startswith("oc_"):
            del sys.modules[name]


def files(folder, **texts):
    """Write files by name, with `__` in place of `/`, and return their folder."""
    for name, text in texts.items():
        parts = name.replace("____init__", "__INIT").split("__")
        path = folder.joinpath(*parts[:-1], parts[-1].replace("INIT", "__init__")).with_suffix(".py")
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
    assert "os:system' belongs to Python itself" in out + err
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
    assert "'this:s' belongs to Python itself" in err
    assert name in err
    assert "this" not in sys.modules  # The module `this` would have printed a poem when imported.


@pytest.mark.parametrize(
    "name",
    ["os:system", "posix:system", "builtins:exec", "sys:exit", "os.path:join", "__main__:main", "test.support:x"],
)
def test_nothing_of_python_is_loaded(name):
    with pytest.raises(ConfigError, match="belongs to Python itself, so it is not loaded"):
        load_object(name)


def plant(folder):
    """Write what jax and Python look for into a folder; each piece makes a file if it runs. Return that file's path."""
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
    """A plugin runs neither beside the experiment and its model nor in the working directory."""
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
        importlib.import_module("oc_other")  # The module lies beside the user's code, but somebody else asks for it.


def test_the_folder_that_holds_the_module_is_the_one(tmp_path):
    """A folder that has only the package's name is passed over."""
    files(tmp_path / "a", oc_pkg__other="")
    files(tmp_path / "b", oc_pkg__net="value = 1\n")
    assert load_object("oc_pkg.net:value", [tmp_path / "a", tmp_path / "b"]) == 1


def test_two_modules_of_one_name_are_not_mistaken_for_each_other(tmp_path):
    folders = [files(tmp_path / name, oc_same=f"value = {name!r}\n") for name in ("a", "b")]
    assert load_object("oc_same:value", folders[:1]) == "a"
    assert load_object("oc_same:value", folders[:1]) == "a"
    with pytest.raises(
        ConfigError, match=r"'oc_same' in .*/b cannot be loaded: a module of that name is loaded from .*/a"
    ):
        load_object("oc_same:value", folders[1:])


@posix
@pytest.mark.parametrize("what", [".", "oc_pkg", "oc_pkg/net.py"])
def test_code_that_everybody_may_write_is_not_run(tmp_path, monkeypatch, what):
    files(tmp_path / "code", oc_pkg__net=f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "code" / what).chmod(0o777)
    with pytest.raises(ConfigError, match=r"everybody may write .*code.* \(mode 0777\)") as caught:
        load_object("oc_pkg.net:value", [tmp_path / "code"], at="e.toml:3: model.class")
    assert caught.value.at == "e.toml:3: model.class"
    monkeypatch.syspath_prepend(tmp_path / "code")  # The code is refused as well where Python itself finds it.
    with pytest.raises(ConfigError, match="everybody may write"):
        load_object("oc_pkg.net:value")
    assert not (tmp_path / "ran").exists()


def spoiled(folder, **spoil):
    """Write PACKAGE into a folder and set the modes of the given paths in it."""
    code = files(folder, **PACKAGE, oc_pkg____init__="", oc_pkg__sub____init__="")
    for name, mode in spoil.items():
        code.joinpath(*name.split("__")).with_suffix(".py" if mode < 0o700 else "").chmod(mode)
    return code


def refused(code, message, name="oc_pkg.net:late"):
    """Check that naming and calling the folder's code is refused at the key, with a hint."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_object(name, [code], at="e.toml:3: model.class")()
    assert caught.value.at == "e.toml:3: model.class"
    assert caught.value.hint


@posix
@pytest.mark.parametrize(
    ("path", "mode"),
    [("oc_pkg__part", 0o666), ("oc_pkg__sub__deep", 0o606), ("oc_pkg__sub", 0o777), ("oc_help", 0o666),
     ("oc_more", 0o666), ("oc_late", 0o666)],
)  # fmt: skip
def test_what_the_users_code_imports_is_not_run_where_everybody_may_write_it(tmp_path, path, mode):
    refused(spoiled(tmp_path / "code", **{path: mode}), rf"everybody may write .*{path.split('__')[-1]}.*{mode:04o}\)")


@posix
def test_a_helper_on_pythons_own_path_is_looked_at_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(spoiled(tmp_path / "code", oc_help=0o666))
    with pytest.raises(ConfigError, match="'oc_help' is not loaded: everybody may write"):
        load_object("oc_pkg.net:late")


@needs_root
@pytest.mark.parametrize("path", [".", "oc_pkg", "oc_pkg/__init__.py", "oc_pkg/part.py", "oc_help.py", "oc_late.py"])
def test_code_of_another_user_is_not_run(tmp_path, monkeypatch, path):
    code = spoiled(tmp_path / "code")
    os.chown(code / path, 12345, -1)
    refused(code, r"belongs to another user \(uid 12345\)")
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(code))
    if path != ".":  # Only the owner of a declared root is trusted.
        refused(code, r"belongs to another user \(uid 12345\)")


@needs_root
def test_the_owner_of_a_declared_root_is_trusted(tmp_path, monkeypatch):
    code = spoiled(tmp_path / "open" / "code")
    for path in (code, *code.rglob("*")):
        os.chown(path, 12345, -1)
    (tmp_path / "open").chmod(0o777)  # The site is responsible for what is above a declared root.
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(code))
    assert load_object("oc_pkg.net:late", [code])() == (3, 1, 1, 2)


@posix
@pytest.mark.parametrize("what", ["link", "link to a link", "folder above"])
def test_a_folder_on_the_way_to_a_module_is_not_one_that_everybody_may_write(tmp_path, what):
    others = tmp_path / "open"
    others.mkdir()
    code = spoiled(others / "code" if what == "folder above" else tmp_path / "code")
    if what != "folder above":
        elsewhere = code / "oc_elsewhere.py" if what == "link to a link" else others / "oc_help.py"
        (code / "oc_help.py").rename(elsewhere)
        if what == "link to a link":
            (others / "oc_help.py").symlink_to(elsewhere)
        (code / "oc_help.py").symlink_to("../open/oc_help.py")
    assert load_object("oc_pkg.net:late", [code])() == (3, 1, 1, 2)
    for name in [name for name in sys.modules if name.startswith("oc_")]:
        del sys.modules[name]
    others.chmod(0o777)
    refused(code, r"everybody may write .*/open \(mode 0777\)")


@posix
def test_byte_code_is_not_read(tmp_path):
    """A `.pyc` with the source's time and size lies in a folder that everybody may write."""
    ran = tmp_path / "ran"
    code = files(tmp_path / "code", oc_byte="value = 1\n", oc_clean="value = 2\n")
    source = code / "oc_byte.py"
    evil = compile(f"open({str(ran)!r}, 'w'); value = 3", str(source), "exec")
    found = source.stat()
    cached = Path(importlib.util.cache_from_source(str(source)))
    cached.parent.mkdir(parents=True)
    head = importlib.util.MAGIC_NUMBER + struct.pack("<3I", 0, int(found.st_mtime), found.st_size)
    cached.write_bytes(head + marshal.dumps(evil))
    cached.parent.chmod(0o777)
    assert load_object("oc_byte:value", [code]) == 1
    assert load_object("oc_clean:value", [code]) == 2
    assert not ran.exists()
    assert [path.name for path in cached.parent.iterdir()] == [cached.name]


@needs_root
def test_a_module_of_byte_code_alone_is_looked_at_as_any_other(tmp_path):
    code = files(tmp_path / "code", oc_only="value = 1\n")
    py_compile.compile(str(code / "oc_only.py"), str(code / "oc_only.pyc"))
    (code / "oc_only.py").unlink()
    os.chown(code / "oc_only.pyc", 12345, -1)
    refused(code, r"oc_only.pyc belongs to another user", "oc_only:value")


@posix
def test_code_that_a_group_may_write_is_warned_of_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(user_code, "is_private_group", lambda uid, gid: False)
    folder = files(tmp_path / "code", oc_group="value = 1\n")
    folder.chmod(0o770)
    assert load_object("oc_group:value", [folder]) == load_object("oc_group:value", [folder]) == 1
    err = capfd.readouterr().err
    assert err.count("a group may write") == 1
    assert str(folder) in err


@pytest.mark.slow
def test_a_process_that_plans_finds_the_code_beside_the_experiment(tmp_path, monkeypatch):
    """The worker runs nothing else that lies there, and no folder of an experiment is on its path."""
    shared, log = tmp_path / "shared", tmp_path / "log"
    ran = plant(files(shared, oc_mine=OWN))
    (shared / "e.toml").write_text(EXPERIMENT.read_text())
    monkeypatch.chdir(shared)
    with open_workers(file_request(shared / "e.toml", ["cluster=dgx_h100"]), jobs=1, log=log) as workers:
        workers.submit(("model.class=oc_mine:Missing",))
        workers.submit(("model.class=oc_mine:Mine",))
        first, second = workers.next(), workers.next()
    assert "has no 'Missing'" in (first.error or "")
    assert second.error is None
    assert second.time_s
    assert str(shared) not in map(os.path.abspath, sys.path)  # The worker inherits this path.
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
    assert main([*words, "--experiment", str(EXPERIMENT)]) == 2  # This checkpoint is damaged.
    assert not (tmp_path / "ran").exists()


def naming(folder, key, name):
    """Write an experiment's file that names code at a key, and return its path."""
    table, last = key.split(".")
    document = tomlkit.parse(EXPERIMENT.read_text())
    document.setdefault(table, tomlkit.table())[last] = name
    folder.mkdir(exist_ok=True)
    (folder / "own.toml").write_text(tomlkit.dumps(document))
    return folder / "own.toml"


def named(file, key, *overrides):
    spec = load(file, overrides)
    return load_function(
        tomllib.loads(spec.to_toml())[key.split(".")[0]][key.split(".")[1]], [file.parent], key, spec.places
    )


@pytest.mark.parametrize(
    ("key", "name", "may"),
    [
        ("data.tokenizer", "yaml:unsafe_load", ""),  # This function runs what a text tells it to.
        ("data.tokenizer", "optax:sgd", ""),
        ("data.tokenizer", "meshkit.cli:main", ""),
        ("train.metrics", "pytest:main", ""),
        ("train.loss", "pytest:main", "optax or meshkit.step.loss or "),
        ("data.source", "numpy:load", "grain or "),
        ("optimizer.class", "yaml:unsafe_load", "optax or "),
        ("optimizer.class", "optaxes:sgd", None),
    ],
)
def test_a_function_of_an_installed_package_is_not_merely_named(tmp_path, key, name, may):
    file = naming(tmp_path, key, name)
    with pytest.raises(ConfigError) as caught:
        named(file, key)
    if may is None:  # No listed package has this name; one has a name that is its beginning.
        assert "no module 'optaxes'" in caught.value.message
        return
    package = name.partition(":")[0].partition(".")[0]
    what = (
        f"'{name}' belongs to the installed package '{package}', but in a file {key} may only name code of "
        f"{may}your own modules."
    )
    assert caught.value.message == what
    assert (
        f"own.toml:{next(n for n, line in enumerate(file.read_text().splitlines(), 1) if name in line)}"
        in caught.value.at
    )
    assert f"--set {key}=" in caught.value.hint
    assert "a function of your own" in caught.value.hint


def test_a_hook_is_not_merely_named(tmp_path):
    with pytest.raises(ConfigError, match="'pytest:main' belongs to the installed package 'pytest'"):
        find_hooks(load(naming(tmp_path, "train.hooks", ["pytest:main"])))


def test_a_corpus_is_no_code(tmp_path):
    """A tokenizer that runs a text is refused before any text is read, in the function that every run calls."""
    file = naming(tmp_path, "data.tokenizer", "yaml:unsafe_load")
    with pytest.raises(ConfigError, match="yaml:unsafe_load' belongs to the installed package"):
        find_tokenizer(load(file))


@pytest.mark.parametrize(
    ("key", "name"),
    [("train.loss", "optax:l2_loss"), ("train.loss", "meshkit.step.loss:next_token"), ("optimizer.class", "optax:lion"),
     ("data.source", "grain:MapDataset"), ("data.source", "models.mlp:random_examples"),
     ("data.tokenizer", "oc_own:encode")],
)  # fmt: skip
def test_what_a_file_may_name(tmp_path, monkeypatch, key, name):
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(tmp_path))  # The site's roots do not widen what a file may name.
    files(tmp_path, oc_own="import yaml\ndef encode(text):\n    return yaml.safe_load(text)\n")
    assert named(naming(tmp_path, key, name), key).found.__name__ == name.split(":")[1]


def test_the_command_line_names_any_function_and_another_process_gets_it(tmp_path):
    key, name = "data.tokenizer", "yaml:unsafe_load"
    file = naming(tmp_path, key, name)
    found = load(file, [f"{key}={name}"])
    assert find_tokenizer(found).name == name
    assert functions_by_command(found) == [f'{key}="{name}"']
    assert functions_by_command(load(file)) == []
    resolved = tmp_path / "experiment.toml"
    resolved.write_text(found.to_toml())
    assert find_tokenizer(load(resolved, functions_by_command(found))).name == name
