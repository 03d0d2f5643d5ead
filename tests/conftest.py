"""Give every test eight virtual CPU devices, with collective timeouts that two busy cores cannot reach."""

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
        # A test spends most of its time on compiling what runs once.
        "--xla_backend_optimization_level=0",  # This is LLVM's level.
        "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE",
        "--xla_cpu_emitter_verification_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
# Programs are compiled once in a run of the tests, and none is taken from another run.
if "MESHKIT_CACHE" not in os.environ:
    os.environ["MESHKIT_CACHE"] = tempfile.mkdtemp(prefix="meshkit-tests-")
    atexit.register(shutil.rmtree, os.environ["MESHKIT_CACHE"], ignore_errors=True)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # A shell starts background processes with SIGINT ignored.
    # Otherwise the processes that tests interrupt would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Otherwise each process that a test starts would compile all sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

import tests.shapes  # noqa: F401 named in the hook below

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook(["meshkit.parallel", "models"], "tests.shapes.check")


# On a busy machine hypothesis is slow to make examples, which says nothing about them.
hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("tests")

# These files take half a minute or more, the longest first, so that workers share out the short ones at the end.
LONG = (
    *("test_sharded_equals_single", "test_kill_matrix", "test_explain", "test_gradients", "test_context", "test_cli"),
    *("test_bytes", "test_expert", "test_docs", "test_precision", "test_trainer", "test_third_party", "test_moe"),
    *("test_wheel", "test_context_llama", "test_reductions", "test_own_loop", "test_dropout", "test_composition"),
    *("test_notebook", "test_loss", "test_host_memory", "test_linen", "test_published", "test_run_owner"),
)


_BYTES_OF_A_WORKER = 4 * 2**30  # This includes the process that compiles for a worker.


def pytest_xdist_auto_num_workers(config):
    """Return one worker more than cores, where memory allows, because many tests wait for processes of their own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores + 1, memory_bytes // _BYTES_OF_A_WORKER))


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist's own order is by the number of a file's tests.


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish():
    """Freeze what collecting made, so that no garbage collection looks through it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture(scope="module")
def programs_kept():
    """Keep compiled programs for all tests that ask for this, so that a run and its resumption share one program.

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
