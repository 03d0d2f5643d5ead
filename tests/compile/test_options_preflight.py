"""Test that one message names a missing piece of the compiler's installation and the command that installs it."""

from pathlib import Path

import pytest

import meshkit as mk
from meshkit.compile import options

COMPLETE = {
    "jaxlib": "0.12.0",
    "jax-cuda12-plugin": "0.12.0",
    "jax-cuda12-pjrt": "0.12.0",
    "flatbuffers": "25.9.23",
}
WITHOUT = {
    "plugin": (
        {"jax-cuda12-plugin": None},
        r"no CUDA plugin of jax is installed.*\n  try pip install 'meshkit\[plan\]'",
    ),
    "pjrt": (
        {"jax-cuda12-pjrt": None},
        r"compiler, is not installed.*\n  try pip install 'jax-cuda12-pjrt==0.12.0'",
    ),
    "pjrt of the version": ({"jax-cuda12-pjrt": "0.11.2"}, r"jax-cuda12-pjrt, .* is version 0.11.2; .* is 0.12.0"),
    "plugin of the version": (
        {"jax-cuda12-plugin": "0.11.2"},
        r"jax-cuda12-plugin is version 0.11.2, but jaxlib is 0.12.0.*\n  try pip install 'jax-cuda12-plugin==0.12.0'",
    ),
    "one plugin": (
        {"jax-cuda13-plugin": "0.12.0"},
        r"two different CUDA plugins.*\n  try pip uninstall jax-cuda12-plugin",
    ),
    "flatbuffers": ({"flatbuffers": None}, r"flatbuffers is missing.*\n  try pip install flatbuffers"),
}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Set up a complete installation in a folder, from which a test takes a piece away."""
    for file in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    versions = dict(COMPLETE)
    monkeypatch.setattr(options, "version_of", versions.get)
    monkeypatch.setattr(options, "cuda_roots", lambda: [tmp_path])
    monkeypatch.setattr(options.shutil, "which", lambda name: None)
    monkeypatch.setattr(options.ctypes.util, "find_library", lambda name: None)
    options.check_compiler()
    return versions, tmp_path


@pytest.mark.parametrize(("change", "says"), list(WITHOUT.values()), ids=list(WITHOUT))
def test_a_missing_or_wrong_package_is_named(installed, change, says):
    versions, _ = installed
    versions.update(change)
    with pytest.raises(mk.ConfigError, match=says) as raised:
        options.check_compiler()
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("bin/ptxas", r"neither ptxas nor nvJitLink is installed.*\n  at .*\n  try pip install nvidia-cuda-nvcc-cu12"),
        (
            "nvvm/libdevice/libdevice.10.bc",
            r"libdevice.10.bc is not installed.*\n  at .*\n  try pip install nvidia-cuda-nvcc-cu12",
        ),
    ],
)
def test_a_missing_tool_is_named(installed, file, says):
    _, root = installed
    (root / file).unlink()
    with pytest.raises(mk.ConfigError, match=says):
        options.check_compiler()


def test_cuda_13_has_its_own_wheels(installed):
    versions, root = installed
    versions.update({"jax-cuda12-plugin": None, "jax-cuda12-pjrt": None})
    versions.update({"jax-cuda13-plugin": "0.12.0", "jax-cuda13-pjrt": "0.12.0"})
    options.check_compiler()
    (root / "bin/ptxas").unlink()
    with pytest.raises(mk.ConfigError, match=r"try pip install nvidia-nvjitlink nvidia-nvvm"):
        options.check_compiler()


@pytest.mark.parametrize("library", ["lib/libnvJitLink.so.12", "lib64/libnvJitLink.so.13"])
def test_nvjitlink_does_without_ptxas(installed, library):
    _, root = installed
    (root / "bin/ptxas").unlink()
    (root / library).parent.mkdir()
    (root / library).write_text("")
    options.check_compiler()


def test_the_roots_are_those_of_the_wheels(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_ROOT", str(tmp_path))
    roots = options.cuda_roots()
    assert roots[0] == tmp_path
    assert all(isinstance(root, Path) for root in roots)
