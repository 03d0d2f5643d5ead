"""The XLA options that meshkit sets, as data, and the pieces of an installation that XLA needs to compile for GPUs.

    OPTIONS (crashes and defaults) + choices.py (of one program) + [xla] (the user's, which win) -> compiler_options

Each has a reason and the jaxlib releases it is for. What XLA does not know it refuses with an exception (as XLA_FLAGS
it would abort): an option of meshkit's own is then left out and named, one of the user's is an error that names the
closest option there is.

XLA answers a missing piece of an installation with an abort or a line of C++; `check_compiler` says first which piece,
and how to install it.
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
# What to install beside a plugin where XLA finds no assembler or no libdevice: nvcc's wheel of CUDA 12 has both.
_TOOLS = {
    "jax-cuda12-plugin": "pip install nvidia-cuda-nvcc-cu12",
    "jax-cuda13-plugin": "pip install nvidia-nvjitlink nvidia-nvvm",
}
# Where installed CUDA toolkits lie; XLA looks there too.
_TOOLKITS = "/usr/local"


@dataclass(frozen=True)
class Option:
    """One compiler option: its value, why, for which GPUs and which jaxlib."""

    name: str
    value: bool | int | float | str
    """As `compiler_options` takes it."""
    why: str
    """The problem without it, as a clause after "because"."""
    applies: str = "all"
    """`all`, or `before_hopper`."""
    since: str = ""
    """The first jaxlib release it is for; "" is open."""
    before: str = ""
    """The first jaxlib release it is not for; "" is open."""
    costs_memory: bool = False
    """Whether it is left out where it alone makes a program larger than its memory."""
    tight: tuple[bool | int | float | str, str] | None = None
    """Its value and why, where the program is larger than its memory with the first."""


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
    """How a step is compiled, beyond the options of every program."""

    options: Mapping[str, object] = field(default_factory=dict)
    """Options that the step and the user ask for; they win."""
    derived: Sequence[Option] = ()
    """Options that follow from weights, rules and links, see choices.py."""
    memory_fraction: float = 0.92
    """Share of the GPU's memory that the client may take."""
    pgle: str = "off"
    """`train.pgle`."""


PLAIN = CompileChoices()

# Of the process that plans alone: it has no GPU to time kernels on, and these change no instruction of the schedule.
PLANNERS = (
    Option(
        "xla_gpu_autotune_level",
        0,
        "the autotuner would compile its first guesses, for a third of the time, and choose one",
        since="0.12",  # before, nothing else gives a matmul its tiles: "No supported config found"
    ),
)


def options_hash(options: Mapping[str, Any]) -> str:
    """Equal for equal options."""
    text = json.dumps(dict(options), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def planners_options(*, jaxlib: str | None = None) -> dict[str, object]:
    """Those of PLANNERS that are for a jaxlib release, default the installed one."""
    release = jaxlib or version_of("jaxlib") or ""
    return {o.name: o.value for o in PLANNERS if _is_for(o, release)}


def chosen_options(
    gpu: Gpu,
    user: Mapping[str, Any] | None = None,
    derived: Sequence[Option] = (),
    *,
    jaxlib: str | None = None,
) -> list[Option]:
    """Options for one GPU: meshkit's own, those derived from the program, then the user's `[xla]` table, which wins.

    Args:
        gpu: to compile for.
        user: by name; their reason is `[xla]`.
        derived: of the program, see choices.py.
        jaxlib: release; default the installed one.
    """
    release = jaxlib or version_of("jaxlib") or ""
    before_hopper = gpu.compute_capability is not None and gpu.compute_capability < (9, 0)
    own = (o for o in (*OPTIONS, *derived) if (o.applies == "all" or before_hopper) and _is_for(o, release))
    by_name = {o.name: o for o in own}
    by_name |= {name: Option(name, value, "[xla]") for name, value in (user or {}).items()}
    return list(by_name.values())


def left_out_lines(left_out: Mapping[str, str], derived: Sequence[Option] = ()) -> list[str]:
    """Return a line for each option that meshkit sets and this XLA refuses."""
    why = {o.name: f"; meshkit sets it because {o.why}" for o in (*OPTIONS, *derived)}
    return [f"{name} is left out: {reason}{why.get(name, '')}" for name, reason in left_out.items()]


def _is_for(option: Option, release: str) -> bool:
    since, before, this = _numbers(option.since), _numbers(option.before), _numbers(release)
    return (not this or this >= since) and (not before or this < before)


def _numbers(release: str) -> tuple[int, ...]:
    """(0, 12, 0) of "0.12.0"; what is no number ends it."""
    found: list[int] = []
    for part in release.split("."):
        if not part.isdecimal():
            break
        found.append(int(part))
    return tuple(found)


class RefusedOption(Exception):
    """XLA refuses an option that the user set."""

    def __init__(self, name: str, reason: str):
        self.name, self.reason = name, reason  # XLA's, in one line
        super().__init__(f"{name}: {reason}")


def compile_lowered(
    lowered: Any, options: Mapping[str, object], users: Collection[str] = ()
) -> tuple[Any, dict[str, str]]:
    """Return a lowered program compiled with as many of the options as this XLA takes.

    Args:
        lowered: what jax makes of `trace(...).lower(...)`.
        options: `compiler_options`.
        users: names of those that the user set, which must not be left out.

    Returns:
        The compiled program, and the options left out, each with XLA's reason.

    Raises:
        RefusedOption: XLA refuses one of the user's.
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
    """Return the bytes of a compiled program on one GPU, or None where XLA does not say.

    Args:
        compiled: what jax makes of `lowered.compile()`.
        prefix: "" or "host_".

    Returns:
        Keys `argument`, `output`, `alias`, `temp` and `generated_code`.
    """
    found = compiled.memory_analysis()
    return found and {name: int(getattr(found, f"{prefix}{name}_size_in_bytes")) for name in _MEMORY}


def bytes_at_once(memory: Mapping[str, int]) -> int:
    """Return the bytes needed at once: arguments, outputs that alias none of them, temporaries, code."""
    return memory["argument"] + memory["output"] - memory["alias"] + memory["temp"] + memory["generated_code"]


def refused_option(message: str) -> tuple[str, str]:
    """(name, reason) of the option that an error of XLA is about; ("", "") if it is about none."""
    if found := _UNKNOWN.search(message):
        return found[1], _NO_SUCH
    if found := _INVALID.search(message):
        return found[1], f"'{found[2]}' is not {_KINDS.get(found[3], f'a valid {found[3]}')}"
    return "", ""


def option_error(name: str, value: object, reason: str, version: str) -> ConfigError:
    """Return the error about an option of the user's that XLA refuses, with the closest one that it has."""
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return ConfigError(
        f"XLA (jaxlib {version}) refuses the option {name}: {reason}.",
        at=f"[xla] {name} = {shown}",
        hint=hint_for(name, reason),
    )


def hint_for(name: str, reason: str) -> str:
    """Return what to try where XLA refuses an option: the closest name where it has none of this name."""
    if reason != _NO_SUCH:
        return "another value, or remove it"
    close = difflib.get_close_matches(name, known_options() - {name}, n=1, cutoff=0.8)
    return close[0] if close else "remove it"


def known_options() -> set[str]:
    """Names in XLA that look like options. It has no list of them that a program can ask for."""
    specs = [importlib.util.find_spec(m) for m in _LIBRARIES if importlib.util.find_spec(m.partition(".")[0])]
    folders = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    libraries = [folder / name for folder in folders for name in ("xla_cuda_plugin.so", "libjax_common.so")]
    return next((flags_in(library) for library in libraries if library.exists()), set())


def flags_in(library: Path) -> set[str]:
    """Return the names of XLA's flags that a library of XLA holds as texts."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _NAME.finditer(content)
        return {m[0].decode() for m in found if not content[max(0, m.start() - 1) : m.start()].isalnum()}


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
    """Return the installed version of a distribution; None if it is not installed."""
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
    """Return the bitcode of CUDA's math functions."""
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
