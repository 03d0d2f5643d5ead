"""Define the XLA options that meshkit sets, and check that the installation can compile for GPUs.

    OPTIONS (for every program) + choices.py (for one program) + [xla] (the user's, which win) -> compiler_options

Each option has a reason and the jaxlib releases that it is for. XLA raises an exception for an unknown compiler option
(for an unknown flag in XLA_FLAGS it would abort). If meshkit set the option, the option is left out and reported. If
the user set it, the user gets an error with the closest option that exists.

If a piece of the installation is missing, XLA aborts or prints a C++ error. `check_compiler` runs first and reports
which piece is missing and how to install it.
"""

from __future__ import annotations

import ctypes.util
import difflib
import hashlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from meshkit.config.cluster import Gpu
from meshkit.errors import ConfigError

_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_INVALID = re.compile(r"While setting option (\w+), '(.*?)' is not a valid (\w+) value")
_KINDS = {"bool": "true or false", "int64": "a whole number", "int32": "a whole number", "enum": "one of its names"}
_NAME = re.compile(rb"xla_[a-z][a-z0-9_]{3,90}")
_LIBRARIES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", "jaxlib")
_NO_SUCH = "this XLA has no such option"
_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
# What to install beside a plugin if XLA finds no assembler or no libdevice. The nvcc wheel of CUDA 12 has both.
_TOOLS = {
    "jax-cuda12-plugin": "pip install nvidia-cuda-nvcc-cu12",
    "jax-cuda13-plugin": "pip install nvidia-nvjitlink nvidia-nvvm",
}
# The folder of installed CUDA toolkits, which XLA searches, too.
_TOOLKITS = "/usr/local"


@dataclass(frozen=True)
class Option:
    """One compiler option: its value, the reason for it, and the GPUs and jaxlib releases that it is for."""

    name: str
    value: bool | int | float | str
    """A value for jax's `compiler_options`."""
    why: str
    """The problem without the option, as a clause that can follow "because"."""
    applies: str = "all"
    """The GPUs that it is for: `all` or `before_hopper`."""
    since: str = ""
    """The first jaxlib release that it is for; "" means any."""
    before: str = ""
    """The first jaxlib release that it is not for; "" means none."""
    costs_memory: bool = False
    """Whether the option takes GPU memory, so that it may be left out if the program does not fit."""
    tight: tuple[bool | int | float | str, str] | None = None
    """The value and the reason that replace `value` and `why` if the program does not fit in memory."""


OPTIONS = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "the default for A100 and older runs every collective synchronously; Hopper and later hide them anyway",
        "before_hopper",
    ),
    Option(
        "xla_gpu_experimental_use_collective_kernels",
        "",
        "a scalar all-reduce over 64 GPUs of a rack aborts the compiler when it becomes a Triton kernel",
        since="0.11",
    ),
    Option(
        "xla_gpu_enable_cub_radix_sort",
        False,
        "CUB's sort asks the CUDA driver for its scratch size while compiling, and the planning machine has none",
    ),
)


@dataclass(frozen=True)
class CompileChoices:
    """How to compile one step, beyond the options of every program."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Options that the step and the user set; they win."""
    derived: Sequence[Option] = ()
    """Options that follow from weights, rules and links; see choices.py."""
    memory_fraction: float = 0.92
    """The share of the GPU's memory that the client may take."""
    pgle: str = "off"
    """The value of `train.pgle` (profile-guided latency estimation)."""


PLAIN = CompileChoices()

# Options of the planning process only, which has no GPU on which to time kernels. They change no instruction of the
# schedule.
PLANNERS = (
    Option(
        "xla_gpu_autotune_level",
        0,
        "the autotuner would spend a third of the compile time on its first guesses, and choose one",
        since="0.12",  # in older releases only the autotuner sets a matmul's tiles: "No supported config found"
    ),
)


def options_hash(options: Mapping[str, Any]) -> str:
    """Return a hash of options by name."""
    text = json.dumps(dict(options), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def planners_options() -> dict[str, object]:
    """Return the options of PLANNERS for the installed jaxlib."""
    release = version_of("jaxlib") or ""
    return {o.name: o.value for o in PLANNERS if _is_for(o, release)}


def chosen_options(gpu: Gpu, user: Mapping[str, Any] | None = None, derived: Sequence[Option] = ()) -> list[Option]:
    """Return the options for one GPU: meshkit's own, those derived from the program, and the user's, which win.

    Args:
        gpu: the GPU to compile for.
        user: the user's options by name; the returned options have the reason `[xla]`.
        derived: options that follow from the program; see choices.py.
    """
    release = version_of("jaxlib") or ""
    before_hopper = gpu.compute_capability is not None and gpu.compute_capability < (9, 0)
    own = (o for o in (*OPTIONS, *derived) if (o.applies == "all" or before_hopper) and _is_for(o, release))
    by_name = {o.name: o for o in own}
    by_name |= {name: Option(name, value, "[xla]") for name, value in (user or {}).items()}
    return list(by_name.values())


def left_out_lines(left_out: Mapping[str, str], derived: Sequence[Option] = ()) -> list[str]:
    """Return a message for each option that was left out because this XLA refuses it."""
    why = {o.name: f"; meshkit sets it because {o.why}" for o in (*OPTIONS, *derived)}
    return [f"{name} is left out: {reason}{why.get(name, '')}" for name, reason in left_out.items()]


def _is_for(option: Option, release: str) -> bool:
    since, before, this = _numbers(option.since), _numbers(option.before), _numbers(release)
    return (not this or this >= since) and (not before or this < before)


def _numbers(release: str) -> tuple[int, ...]:
    """Return (0, 12, 0) for "0.12.0"; the result ends before the first part that is no number."""
    found: list[int] = []
    for part in release.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


class RefusedOption(Exception):
    """XLA refuses an option that the user set."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason  # the reason is one line
        super().__init__(f"{name}: {reason}")


def compile_lowered(
    lowered: Any, options: Mapping[str, object], users: Collection[str] = ()
) -> tuple[Any, dict[str, str]]:
    """Return a lowered program compiled with all options that this XLA accepts.

    Args:
        lowered: the result of `trace(...).lower(...)`.
        options: values by name for `compiler_options`.
        users: names of the options that the user set, which must not be left out.

    Returns:
        The compiled program, and the name of each option that was left out -> XLA's reason.

    Raises:
        RefusedOption: XLA refuses an option that the user set.
    """
    chosen, left_out = dict(options), dict[str, str]()
    while True:
        try:
            return lowered.compile(compiler_options=chosen or None), left_out
        except Exception as e:  # jax wraps XLA's errors in several types
            name, reason = refused_option(str(e))
            if name not in chosen:
                raise
            if name in users:
                raise RefusedOption(name, reason) from None
            left_out[name] = reason
            del chosen[name]


def memory_of(compiled: Any, prefix: str = "") -> dict[str, int] | None:
    """Return the bytes of a compiled program for one GPU, or None if XLA does not report them.

    Args:
        compiled: the result of `lowered.compile()`.
        prefix: "" for GPU memory, "host_" for host memory.

    Returns:
        Keys `argument`, `output`, `alias`, `temp` and `generated_code`.
    """
    found = compiled.memory_analysis()
    return found and {name: int(getattr(found, f"{prefix}{name}_size_in_bytes")) for name in _MEMORY}


def bytes_at_once(memory: Mapping[str, int]) -> int:
    """Return the bytes needed at once: arguments, outputs that do not alias arguments, temporaries and code."""
    return memory["argument"] + memory["output"] - memory["alias"] + memory["temp"] + memory["generated_code"]


def refused_option(message: str) -> tuple[str, str]:
    """Return the name of the option that an error of XLA is about, and the reason; ("", "") for other errors."""
    if found := _UNKNOWN.search(message):
        return found[1], _NO_SUCH
    if found := _INVALID.search(message):
        return found[1], f"'{found[2]}' is not {_KINDS.get(found[3], f'a valid {found[3]}')}"
    return "", ""


def option_error(name: str, value: object, reason: str, version: str) -> ConfigError:
    """Return the error about a user's option that XLA refuses, with a hint what to try."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return ConfigError(
        f"XLA (jaxlib {version}) refuses the option {name}: {reason}.",
        at=f"[xla] {name} = {shown}",
        hint=hint_for(name, reason),
    )


def hint_for(name: str, reason: str) -> str:
    """Return a hint for a refused option: for an unknown name, the closest name that XLA has."""
    if reason != _NO_SUCH:
        return "another value, or remove it"
    close = difflib.get_close_matches(name, known_options() - {name}, n=1, cutoff=0.8)
    return close[0] if close else "remove it"


def known_options() -> set[str]:
    """Return the names in XLA's library that look like options, because XLA has no API that lists them."""
    specs = [importlib.util.find_spec(m) for m in _LIBRARIES if importlib.util.find_spec(m.partition(".")[0])]
    folders = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    libraries = [folder / name for folder in folders for name in ("xla_cuda_plugin.so", "libjax_common.so")]
    return next((flags_in(library) for library in libraries if library.exists()), set())


def flags_in(library: Path) -> set[str]:
    """Return all strings in a library that look like XLA flags."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _NAME.finditer(content)
        return {m[0].decode() for m in found if not content[max(0, m.start() - 1) : m.start()].isalnum()}


def check_compiler() -> None:
    """Check that this installation can compile for GPUs.

    Raises:
        ConfigError: there is no CUDA plugin of jax (it exists for Linux only), there are two, or its version is not
            jaxlib's. Or one of these is missing: its PJRT library, the package flatbuffers, an assembler for PTX
            (ptxas or nvJitLink), libdevice.
    """
    plugin = _check_plugin()
    _check_pjrt(plugin)
    if version_of("flatbuffers") is None:
        raise ConfigError(
            "the package flatbuffers is missing, which serializes programs.", hint="pip install flatbuffers"
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
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cuda_roots() -> list[Path]:
    """Return the folders in which XLA looks for CUDA's tools: `$CUDA_ROOT`, NVIDIA's wheels, installed toolkits."""
    named = [Path(os.environ["CUDA_ROOT"])] if os.environ.get("CUDA_ROOT") else []
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    packages = [folder for wheel in wheels if wheel.is_dir() for folder in sorted(wheel.iterdir()) if folder.is_dir()]
    return [*named, *packages, *sorted(Path(_TOOLKITS).glob("cuda*"))]


def find_assembler(roots: Sequence[Path]) -> Path | None:
    """Return ptxas or, without it, the nvJitLink library; XLA accepts either."""
    ptxas = (r / "bin" / "ptxas" for r in roots)
    linkers = (file for r in roots for lib in ("lib", "lib64") for file in (r / lib).glob("libnvJitLink.so*"))
    found = _first(ptxas) or _first(linkers)
    on_path = shutil.which("ptxas") or ctypes.util.find_library("nvJitLink")
    return found or (Path(on_path) if on_path else None)


def find_libdevice(roots: Sequence[Path]) -> Path | None:
    """Return the file with the bitcode of CUDA's math functions."""
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
