"""Test the message that a user reads when a device has too little memory for what jax raises."""

from __future__ import annotations

import pytest
from jax.errors import JaxRuntimeError

from meshkit.config.experiment import load
from meshkit.errors import ConfigError, RunError
from meshkit.sharding.mesh import device_memory

# jaxlib 0.11.2 said this on an H100.
REAL = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 389.77GiB with allocator GPU_0_bfc on device 0. "
    "[executable_name='jit_train_step'] [tf-allocator-allocation-error='']"
)


@pytest.fixture(scope="module")
def experiment():
    return load("configs/experiments/llama3_8b.toml", ["train.global_batch=64", "train.remat=dots"])


def test_the_message_has_what_was_asked_for_what_there_is_and_what_helps(experiment):
    with pytest.raises(RunError) as caught, device_memory(experiment.cluster, experiment.train, experiment.file):
        raise JaxRuntimeError(REAL)
    said = caught.value.render()
    assert caught.value.exit_code == 4
    assert "jit_train_step, which asked for 390 GiB at once: of the 79.1 GiB of NVIDIA H100 80GB HBM3 XLA has" in said
    for remedy in ("llama3_8b.toml`", 'remat = "full"', "train.accumulate above 1", "train.global_batch below 64"):
        assert remedy in said


@pytest.mark.parametrize(
    "said",
    [
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 41943040 bytes.",
        "INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "INTERNAL: NCCL operation ncclCommInitRank() failed: unhandled cuda error. Cuda failure 2 'out of memory'",
        "RESOURCE_EXHAUSTED: Failed to allocate 1073741824 bytes for new constant",
    ],
)
def test_memory_runs_out_in_several_words(said, experiment):
    with (
        pytest.raises(RunError, match="the device has too little memory"),
        device_memory(experiment.cluster, experiment.train, experiment.file),
    ):
        # A library may raise it this way.
        raise ValueError("the arrays could not be copied") from JaxRuntimeError(said)


@pytest.mark.parametrize(
    "error",
    [
        JaxRuntimeError("RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)"),
        JaxRuntimeError("INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited"),
        ValueError("RESOURCE_EXHAUSTED: Error writing to OCDBT: no memory"),  # The error is of a disk.
        ConfigError("out of memory"),
    ],
)
def test_other_errors_pass(error, experiment):
    with pytest.raises(type(error)) as caught, device_memory(experiment.cluster, experiment.train, experiment.file):
        raise error
    assert caught.value is error
