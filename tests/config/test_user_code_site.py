"""Test what a site allows experiments to name: roots of models and files, which an experiment file cannot widen."""

import os
import sys
from pathlib import Path

import pytest

from meshkit.config import site
from meshkit.config.experiment import load
from meshkit.config.site import is_under, read_site
from meshkit.config.user_code import load_object
from meshkit.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "configs" / "experiments" / "llama_debug_cpu.toml"


@pytest.fixture(autouse=True)
def own_site(tmp_path, monkeypatch):
    """Use the test's site file alone, without variables, and forget what the test imports."""
    monkeypatch.setattr(site, "SITE_FILE", tmp_path / "site.toml")
    monkeypatch.delenv("MESHKIT_MODEL_ROOTS", raising=False)
    monkeypatch.delenv("MESHKIT_FILE_ROOTS", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path / "site.toml"
    for name in set(sys.modules) - before:
        if name.startswith(("site_", "sitepkg")):
            del sys.modules[name]


def declare(file, text):
    file.write_text(text)
    file.chmod(0o644)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a site's file belongs to root")


def test_nothing_declared_allows_everything():
    assert read_site() == site.Site(None, None)
    assert load_object("meshkit.units:format_bytes")(0) == "0 B"


def module(folder, name, text="value = 1\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    return folder


def test_a_model_comes_from_a_declared_root(tmp_path, monkeypatch):
    inside = module(tmp_path / "models", "site_inside")
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(inside))
    assert load_object("site_inside:value") == 1  # The module is found although nothing else names its folder.


def test_the_shipped_models_stay_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(tmp_path))
    assert load_object("models.options:suggest")("lama", ["llama"]) == " Did you mean 'llama'?"
    with pytest.raises(ConfigError, match="outside of the folders"):
        load_object("benchmarks.surface:main")  # This function belongs to the clone, but it is no model.


def test_a_model_beside_the_experiment_is_refused_and_never_run(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    outside = module(tmp_path / "mail", "site_outside", f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(tmp_path / "models"))
    with pytest.raises(ConfigError, match="no module 'site_outside'"):
        load_object("site_outside:value", [outside])
    monkeypatch.syspath_prepend(outside)  # The module is refused as well where Python itself finds it.
    with pytest.raises(
        ConfigError, match=r"module 'site_outside' is at .*/mail/site_outside\.py, outside of the folders"
    ):
        load_object("site_outside:value")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["os:system", "builtins:exec", "subprocess:run", "sys:exit", "posix:system"])
def test_python_itself_is_outside(tmp_path, monkeypatch, name):
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(tmp_path))
    with pytest.raises(ConfigError, match="belongs to Python itself, so it is not loaded"):
        load_object(name)


def test_a_link_inside_a_root_does_not_lead_out(tmp_path, monkeypatch):
    outside = module(tmp_path / "mail", "site_linked", f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    inside = module(tmp_path / "models", "site_other")
    (inside / "site_linked.py").symlink_to(outside / "site_linked.py")
    (inside / "sitepkg").symlink_to(outside)
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(inside))
    for name in ("site_linked:value", "sitepkg.site_linked:value"):
        with pytest.raises(ConfigError, match="outside of the folders that this site allows"):
            load_object(name)
    assert not (tmp_path / "ran").exists()


def test_a_package_is_checked_on_every_level(tmp_path, monkeypatch):
    """A package whose `__path__` leads elsewhere brings no module from there."""
    outside = module(tmp_path / "mail", "site_deep", f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    inside = tmp_path / "models"
    module(inside / "sitepkg", "__init__", f"__path__.append({str(outside)!r})\n")
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", str(inside))
    with pytest.raises(ConfigError, match=r"module 'sitepkg\.site_deep' is at .*/mail/"):
        load_object("sitepkg.site_deep:value")
    assert not (tmp_path / "ran").exists()


@needs_root
def test_the_variable_only_narrows_the_site(own_site, tmp_path, monkeypatch):
    for name in ("a/b", "c"):
        (tmp_path / name).mkdir(parents=True)
    declare(own_site, f'model_roots = ["{tmp_path}/a"]\nfile_roots = ["{tmp_path}/c"]\n')
    assert read_site() == site.Site((tmp_path / "a",), (tmp_path / "c",))
    monkeypatch.setenv("MESHKIT_MODEL_ROOTS", f"{tmp_path}/a/b")
    assert read_site().model_roots == (tmp_path / "a" / "b",)
    for wider in (tmp_path / "c", tmp_path, tmp_path / "a" / ".." / "c"):
        monkeypatch.setenv("MESHKIT_MODEL_ROOTS", f"{tmp_path}/a/b:{wider}")
        with pytest.raises(ConfigError, match=r"which .*site\.toml does not allow"):
            read_site()


@needs_root
def test_the_site_lists_packages_whose_functions_may_be_named(own_site, tmp_path, monkeypatch):
    installed = module(tmp_path / "site-packages", "site_text", "from yaml import unsafe_load\ndef own(): pass\n")
    monkeypatch.syspath_prepend(installed)
    with pytest.raises(ConfigError, match="'site_text:own' belongs to the installed package 'site_text'"):
        load_object("site_text:own", key="data.tokenizer")
    declare(own_site, 'functions = ["site_text"]\n')
    assert load_object("site_text:own", key="data.tokenizer").__name__ == "own"
    with pytest.raises(ConfigError, match="'site_text:unsafe_load' belongs to the installed package 'yaml'"):
        load_object("site_text:unsafe_load", key="data.tokenizer")  # The listed package merely imports this function.


@needs_root
@pytest.mark.parametrize(
    ("text", "message"),
    [("model_roots = 3", "model_roots is not a list of folders"), ("model_root = []", "unknown key 'model_root'"),
     ('model_roots = ["models"]', "'models' is not an absolute path"), ("model_roots =", "cannot be read"),
     ("model_roots = [1]", "is not a list of folders"), ("functions = 3", "functions is not a list of packages")],
)  # fmt: skip
def test_a_wrong_site_file_is_one_clear_error(own_site, text, message):
    declare(own_site, text)
    with pytest.raises(ConfigError, match=message):
        read_site()


@needs_root
def test_a_site_file_that_others_can_change_is_refused(own_site):
    declare(own_site, "model_roots = []\n")
    own_site.chmod(0o664)
    with pytest.raises(ConfigError, match="could be changed by others"):
        read_site()
    own_site.chmod(0o644)
    os.chown(own_site, 12345, -1)
    with pytest.raises(ConfigError, match=r"could be changed by others than the administrator \(uid 12345"):
        read_site()


@needs_root
def test_the_file_in_the_documentation_is_one(own_site):
    page = (ROOT / "docs" / "concepts" / "security.md").read_text(encoding="utf-8")
    declare(own_site, page.split("```toml\n")[1].split("```")[0])
    assert read_site() == site.Site((Path("/opt/models"),), (Path("/data"), Path("/scratch")), ("our_text",))


def test_an_experiment_names_files_in_declared_roots_only(tmp_path, monkeypatch):
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "other").mkdir()
    (data / "link").symlink_to(tmp_path / "other")
    monkeypatch.setenv("MESHKIT_FILE_ROOTS", str(data))
    load(EXPERIMENT)  # Names and the standard library are not paths.
    load(EXPERIMENT, [f"data.source={data}/x"])
    load(EXPERIMENT, ["data.source=models.mlp:random_examples"])
    cluster = tmp_path / "other" / "own.toml"
    cluster.write_text('gpu = "cpu"\ngpus_per_host = 8\n')
    outside = [f"data.source={tmp_path}/other", f"data.source={data}/../other", f"data.source={data}/link/x"]
    outside += [f"checkpoint.initial={tmp_path}/other", f"cluster={cluster}", f"cluster.file={cluster}"]
    for setting in outside:
        with pytest.raises(ConfigError, match="outside of the folders that this site allows"):
            load(EXPERIMENT, [setting])


def test_under_a_root(tmp_path):
    (tmp_path / "link").symlink_to("/")
    assert is_under(tmp_path, [tmp_path])
    assert is_under(tmp_path / "a" / "b", [tmp_path])
    assert not is_under(tmp_path / "..", [tmp_path])
    assert not is_under(tmp_path / "link" / "etc", [tmp_path])
    assert not is_under(f"{tmp_path}x", [tmp_path])
