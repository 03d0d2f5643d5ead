"""Eight virtual CPU devices for every test, with collective timeouts that two busy cores cannot trip."""

import atexit
import functools
import gc
import os
import shutil
import tempfile
import threading

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
        "--xla_cpu_collective_timeout_seconds=1800",
        # most of a test's time is compiling what runs once
        "--xla_backend_optimization_level=0",  # of LLVM
        "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE",
        "--xla_cpu_emitter_verification_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
if "MESHKIT_CACHE" not in os.environ:  # programs compiled once in a run of the tests, and none of another run
    os.environ["MESHKIT_CACHE"] = tempfile.mkdtemp(prefix="meshkit-tests-")
    atexit.register(shutil.rmtree, os.environ["MESHKIT_CACHE"], ignore_errors=True)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # else each of the processes that tests start compiles all anew
    os.environ["PYTHONPYCACHEPREFIX"] = os.path.join(os.environ["MESHKIT_CACHE"], "bytecode")

import jax
import jaxtyping
import pytest

import tests.shapes  # noqa: F401 named in the hook below

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook(["meshkit.parallel", "models"], "tests.shapes.check")


def pytest_collection_finish():
    """What collecting made stays until the end: no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(autouse=True, scope="session")
def kernels_kept(tmp_path_factory):
    """Compilers for absent GPUs find the kernels of programs before: three quarters of a compile, none of a schedule.

    XLA appends to the file, and knows of nobody else that does: each worker has its own, and one compile at a time.
    """
    from meshkit.compile import program

    plain, kept, free = program._compile, tmp_path_factory.mktemp("kernels") / "kept", threading.Lock()

    @functools.wraps(plain)
    def compile_with_kernels(exported, request, *rest):
        if not free.acquire(blocking=False):
            return plain(exported, request, *rest)
        try:
            options = {**request["planners_options"], "xla_gpu_kernel_cache_file": str(kept)}
            return plain(exported, {**request, "planners_options": options}, *rest)
        except BaseException:  # half of what it appended may be there
            kept.unlink(missing_ok=True)
            raise
        finally:
            free.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_compile", compile_with_kernels)
        yield
