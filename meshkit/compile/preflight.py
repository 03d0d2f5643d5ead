"""Whether this installation can compile for GPUs: the pieces XLA needs, each checked before it is asked.

XLA answers a missing piece with an abort or a line of C++; this says which piece, and how to install it.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from meshkit.errors import ConfigError

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# What to install beside a plugin where XLA finds no assembler or no libdevice: nvcc's wheel of CUDA 12 has both.
_TOOLS = {
    "jax-cuda12-plugin": "pip install nvidia-cuda-nvcc-cu12",
    "jax-cuda13-plugin": "pip install nvidia-nvjitlink nvidia-nvvm",
}
# Where installed CUDA toolkits lie; XLA looks there too.
_TOOLKITS = "/usr/local"


def check_compiler() -> None:
    """Stops with one clear message where this installation cannot compile for GPUs.

    Raises:
        ConfigError: not Linux; no CUDA plugin, two of them, or one whose version is not jaxlib's; its PJRT library, the
            assembler for PTX (ptxas or nvJitLink) or libdevice is missing.
    """
    plugin = _check_plugin()
    _check_pjrt(plugin)
    if version_of("flatbuffers") is None:
        raise ConfigError(
            "the package flatbuffers is missing, with which programs travel.", hint="pip install flatbuffers"
        )
    roots = cuda_roots()
    if not find_assembler(roots):
        raise ConfigError(
            "XLA needs an assembler for GPU code, and neither ptxas nor nvJitLink is installed.",
            at=_looked_in(roots),
            hint=_TOOLS[plugin],
        )
    if not find_libdevice(roots):
        raise ConfigError(
            "XLA needs NVIDIA's libdevice (exp, log, tanh for GPUs), and libdevice.10.bc is not installed.",
            at=_looked_in(roots),
            hint=_TOOLS[plugin],
        )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cuda_roots() -> list[Path]:
    """Folders in which XLA looks for CUDA's tools: `$CUDA_ROOT`, NVIDIA's wheels, installed toolkits."""
    named = [Path(os.environ["CUDA_ROOT"])] if os.environ.get("CUDA_ROOT") else []
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    packages = [folder for wheel in wheels if wheel.is_dir() for folder in sorted(wheel.iterdir()) if folder.is_dir()]
    return [*named, *packages, *sorted(Path(_TOOLKITS).glob("cuda*"))]


def find_assembler(roots: Sequence[Path]) -> Path | None:
    """ptxas or the nvJitLink library, whichever comes first; XLA takes either."""
    ptxas = (r / "bin" / "ptxas" for r in roots)
    linkers = (file for r in roots for lib in ("lib", "lib64") for file in (r / lib).glob("libnvJitLink.so*"))
    found = _first(ptxas) or _first(linkers)
    on_path = shutil.which("ptxas") or ctypes.util.find_library("nvJitLink")
    return found or (Path(on_path) if on_path else None)


def find_libdevice(roots: Sequence[Path]) -> Path | None:
    """The bitcode of CUDA's math functions."""
    return _first(r / "nvvm" / "libdevice" / "libdevice.10.bc" for r in roots)


def _check_plugin() -> str:
    found = {name: version for name in _PLUGINS if (version := version_of(name))}
    if not found:
        where = "" if sys.platform == "linux" else f" (they exist for Linux only; this is {sys.platform})"
        raise ConfigError(
            f"compiling for absent GPUs needs XLA's CUDA compiler, and no CUDA plugin of jax is installed{where}.",
            hint="pip install 'meshkit[plan]'",
        )
    if len(found) > 1:
        raise ConfigError(
            f"two different CUDA plugins of jax are installed: {', '.join(f'{n} {v}' for n, v in found.items())}.",
            hint=f"pip uninstall {_PLUGINS[0]} {_pjrt_of(_PLUGINS[0])}",
        )
    (name, version), jaxlib = next(iter(found.items())), version_of("jaxlib")
    if version != jaxlib:
        raise ConfigError(
            f"{name} is version {version}, but jaxlib is {jaxlib}: the two must be the same.",
            hint=f"pip install '{name}=={jaxlib}' '{_pjrt_of(name)}=={jaxlib}'",
        )
    return name


def _check_pjrt(plugin: str) -> None:
    pjrt, wanted = _pjrt_of(plugin), version_of(plugin)
    installed = version_of(pjrt)
    if installed != wanted:
        state = "is not installed" if installed is None else f"is version {installed}"
        raise ConfigError(
            f"{pjrt}, XLA's CUDA compiler, {state}; {plugin} is {wanted}.",
            hint=f"pip install '{pjrt}=={wanted}'",
        )


def _pjrt_of(plugin: str) -> str:
    return plugin.replace("plugin", "pjrt")


def _looked_in(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots)) or "no folder of NVIDIA's wheels, and no toolkit"


def _first(paths: Iterable[Path]) -> Path | None:
    return next((p for p in paths if p.exists()), None)
