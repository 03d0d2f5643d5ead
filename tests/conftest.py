"""Eight virtual CPU devices for every test, with collective timeouts that two busy cores cannot trip."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

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
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else processes that tests interrupt ignore it, too
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of the processes that tests start compiles all anew

import hypothesis
import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

import tests.shapes  # noqa: F401 named in the hook below

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook(["meshkit.parallel", "models"], "tests.shapes.check")


# A busy machine is slow to make examples, too, which says nothing about them.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

# Files of half a minute and more, the longest first: at the end, workers share out the short ones.
LONG = (
    *("test_sharded_equals_single", "test_kill_matrix", "test_explain", "test_gradients", "test_context", "test_cli"),
    *("test_bytes", "test_expert", "test_docs", "test_precision", "test_trainer", "test_third_party", "test_moe"),
    *("test_wheel", "test_context_llama", "test_reductions", "test_own_loop", "test_dropout", "test_composition"),
    *("test_notebook", "test_loss", "test_host_memory", "test_linen", "test_published", "test_run_owner"),
)


_BYTES_OF_A_WORKER = 4 * 2**30  # with the process that compiles for it


def pytest_xdist_auto_num_workers(config):
    """Return one worker more than there are cores, where memory allows: many tests wait for a process of theirs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores + 1, memory_bytes // _BYTES_OF_A_WORKER))


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist's own order: by the number of a file's tests


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish():
    """What collecting made stays until the end: no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module")
def programs_kept():
    """Keeps what tests compile for all that ask for this: a run and the run that resumes it are one program.

    meshkit's own cache compiles it for each of them, since lines of the test are in its keys.
    """
    folder = os.path.join(os.environ["MESHKIT_CACHE"], "jax")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    settings = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.05,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}

    def use(values):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    use(settings)
    yield
    use(before)
