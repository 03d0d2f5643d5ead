"""Check what can be checked without a GPU: packages, XLA's options, the mock of NCCL, and that every program fits."""

from __future__ import annotations

import importlib.util
import mmap
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.gpu.contention import nvcc
from benchmarks.gpu.measurements import MEASUREMENTS
from benchmarks.gpu.options import CASES, experiment_of, flags, refused
from benchmarks.gpu.verbs import DETERMINISTIC, LLAMA_1B, TOO_LARGE
from meshkit.config.experiment import Experiment, load
from meshkit.errors import MeshkitError

_PACKAGES = ("chex", "flax", "grain", "optax", "orbax.checkpoint", "plotly", "pynvml", "safetensors", "tomlkit")
# The options of jax's plugin client that mock a topology.
_MOCKED = (b"enable_mock_nccl", b"mock_gpu_topology")


def run_checks() -> int:
    """Print a line for each check, and return the number that failed."""
    failed = 0
    plans = {
        f"{name} {'fits' if fits else 'does not fit'}": lambda e=experiment, f=fits: check_memory(e, f)
        for name, experiment, fits in programs()
    }
    for name, check in (QUICK | plans).items():
        said = outcome(check)
        failed += said.startswith("FAILED")
        print(f"{name}: {said}", flush=True)
    return failed


def outcome(check: Callable[[], str]) -> str:
    """Return the result of a check: `ok` or `FAILED`, and what it found."""
    try:
        return f"ok, {check()}"
    except (MeshkitError, AssertionError, ImportError, OSError) as e:
        return f"FAILED, {e}"


def check_packages() -> str:
    """Check that all packages that the verbs need can be imported."""
    for name in _PACKAGES:
        importlib.import_module(name)
    from meshkit.compile.options import check_compiler, version_of

    check_compiler()
    return ", ".join(f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "flax", "orbax-checkpoint"))


def check_options() -> str:
    """Check that the installed XLA has every option of the measurements, with that type."""
    cases = {f"{program}, {case}": options for program in CASES for case, options in CASES[program].items()}
    cases |= flags() | {"kill_and_resume": DETERMINISTIC}
    wrong = refused(cases)
    assert not wrong, "; ".join(wrong)
    return f"{len({name for options in cases.values() for name in options})} known"


def check_mock() -> str:
    """Check that jax and its CUDA plugin support a mocked topology and NCCL's mock."""
    import jax

    library = plugin_library()
    assert "jax_mock_gpu_topology" in jax.config.values, "jax has no jax_mock_gpu_topology"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        missing = [word.decode() for word in _MOCKED if content.find(word) < 0]
    assert not missing, f"{library} has no {', '.join(missing)}"
    return f"{library.name} has {' and '.join(word.decode() for word in _MOCKED)}"


def plugin_library() -> Path:
    """Return the installed CUDA plugin's library."""
    found = [spec for cuda in ("xla_cuda12", "xla_cuda13") if (spec := importlib.util.find_spec(f"jax_plugins.{cuda}"))]
    assert found, "no CUDA plugin of jax is installed"
    assert found[0].origin is not None
    return Path(found[0].origin).parent / "xla_cuda_plugin.so"


def check_nvcc() -> str:
    """Check that the kernels that hold multiprocessors compile for an H100."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = nvcc(Path(folder) / "hold.so", "sm_90")
        except FileNotFoundError as e:
            return f"not tried: {e}"
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-1000:]
    return command[0]


# Checks of the machine itself that take seconds. They run on the GPU's machine too.
QUICK: dict[str, Callable[[], str]] = {
    "packages": check_packages,
    "options of XLA": check_options,
    "the mock of NCCL": check_mock,
    "nvcc": check_nvcc,
}


def programs() -> Iterator[tuple[str, Experiment, bool]]:
    """Yield each program that one H100 rehearses or trains, and whether it should fit."""
    for m in MEASUREMENTS:
        if m.function == "verbs:rehearse":
            yield m.name, load(m.options["experiment"], m.options["settings"]), True
        elif m.name.startswith("train_"):
            yield m.name, load(LLAMA_1B, m.options.get("settings", ())), True
    yield "llama3_8b of 16", experiment_of("llama3_8b of 16", toy=False), True
    yield "out_of_memory", load(LLAMA_1B, TOO_LARGE), False


def check_memory(experiment: Experiment, fits: bool) -> str:
    """Check that the plan of a program fits one H100, or does not."""
    from meshkit.planning.planner import plan_experiment
    from meshkit.units import format_bytes

    memory = plan_experiment(experiment).report.memory
    assert memory.fits is fits, f"peak {format_bytes(memory.peak_bytes)}, margin {format_bytes(memory.margin_bytes)}"
    return f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.capacity_bytes)}"
