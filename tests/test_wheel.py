"""Test that the wheel alone, in an empty folder, writes, explains, plans and trains an experiment without a clone."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
SETTINGS = ("model.layers=1", "train.steps=2", "train.sequence_length=16", "train.evaluate_every=0", "profile.steps=")
TINY = " ".join(f"--set {setting}" for setting in SETTINGS)
# Each line is a command; all run in one process, which imports jax once, and exit codes are printed.
COMMANDS = f"""
new --out a.toml
explain a.toml --no-compile
plan a.toml --set cluster=dgx_h100 {TINY}
plan llama3_8B
new --copy-model llama --out own/b.toml
new --copy-model llama --out own/c.toml
new --copy-model lama
"""
SCRIPT = """
import shlex, sys
from meshkit.cli import main
for line in sys.argv[1].strip().splitlines():
    print("$", line)
    print("->", main(shlex.split(line)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    return next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Return a function that runs Python with the wheel and its dependencies, without the clone of the environment."""
    installed, empty = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("empty")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-compile", "--target", str(installed), wheel], check=True)
    packages = dict.fromkeys([str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(packages), "XLA_FLAGS": flags, "HOME": str(empty)}

    def run(*arguments):
        command = [sys.executable, "-S", "-P", *arguments]  # With -S no .pth file is read, so there is no clone.
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300)

    run.empty = empty
    return run


def test_there_is_no_models_among_the_installed_packages(run, wheel):
    done = run("-c", "import meshkit; print(meshkit.__file__); import models")
    assert "installed" in done.stdout
    assert "No module named 'models'" in done.stderr
    with zipfile.ZipFile(wheel) as file:
        tops = {name.split("/")[0] for name in file.namelist()}
        (metadata,) = (file.read(name).decode() for name in file.namelist() if name.endswith("/METADATA"))
    assert {top.split("-")[0] for top in tops} == {"meshkit"}
    assert "](docs/" not in metadata
    assert "[project.urls]" not in metadata


@pytest.mark.deviceless
def test_the_wheel_alone_writes_explains_and_plans(run):
    """`make wheel-check` trains with it, too."""
    (run.empty / "own").mkdir()
    done = run("-c", SCRIPT, COMMANDS)
    parts = {text.split("\n", 1)[0]: text for text in done.stdout.split("$ ")[1:]}
    codes = [text.rsplit("-> ", 1)[1].strip() for text in parts.values()]
    assert codes == ["0", "0", "0", "2", "0", "2", "2"], done.stdout + done.stderr
    assert "nothing looks wrong" in parts["explain a.toml --no-compile"]
    assert "models/__init__.py exists, and `new` overwrites nothing" in done.stderr
    assert "try 'llama3_8b'" in done.stderr
    assert "try 'llama'" in done.stderr
    assert not list(run.empty.rglob("models/moe.py"))  # Only what the model imports is copied.
    own = run.empty / "own" / "models" / "llama.py"
    own.write_text(own.read_text().replace('"embed": c.embed}', '"mine": c.embed}'))
    # The copied model is used, not the shipped one.
    assert '"mine"' in run("-m", "meshkit", "explain", "own/b.toml", "--no-compile", "--json").stdout
    header = (run.empty / "a.toml").read_text().splitlines()[1:3]
    assert all("a.toml" in line for line in header)
    assert "plan a.toml --set cluster=dgx_h100" in header[1]
