"""Eight virtual CPU devices for every test, with collective timeouts that two busy cores cannot trip."""

import atexit
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1800",
        "--xla_cpu_collective_timeout_seconds=1800",
        "--xla_backend_optimization_level=0",  # of LLVM: most of a test's time is compiling what runs once
    ]
)
if "MESHKIT_CACHE" not in os.environ:  # programs compiled once in a run of the tests, and none of another run
    os.environ["MESHKIT_CACHE"] = tempfile.mkdtemp(prefix="meshkit-tests-")
    atexit.register(shutil.rmtree, os.environ["MESHKIT_CACHE"], ignore_errors=True)

import jax
import jaxtyping

import tests.shapes  # noqa: F401 named in the hook below

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jaxtyping.install_import_hook(["meshkit.parallel", "models"], "tests.shapes.check")
