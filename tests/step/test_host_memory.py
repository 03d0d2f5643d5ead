"""Test optimizer.memory = "host": equal training, moments outside of GPU memory, and a plan that shows both sides."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.planner import Plan, plan_experiment
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh
from meshkit.step.state import HOST_MEMORY, TrainState
from meshkit.step.train_step import TrainProgram
from meshkit.verbs.checkpoint.store import CheckpointStore

CONFIGS = Path(__file__).parents[2] / "configs/experiments"


@cache
def program(memory: str) -> TrainProgram:
    """Return a perceptron in fp32 with FSDP over 8 devices.

    With this eps, Adam does not divide numbers that are as small as their own rounding, so a gradient's rounding stays
    small.
    """
    options = ["train.precision=fp32", "optimizer.eps=1", f"optimizer.memory={memory}"]
    spec = load(CONFIGS / "mlp.toml", options)
    return make_train_step(spec, build_mesh(spec.mesh, spec.cluster))


def stepped(program: TrainProgram, state: TrainState, steps: range) -> TrainState:
    for step in steps:
        random = np.random.default_rng(step)
        batch = {n: random.normal(size=x.shape).astype(x.dtype) for n, x in program.abstract_batch.items()}
        state, _ = program.step(
            state, {n: jax.device_put(v, program.abstract_batch[n].sharding) for n, v in batch.items()}
        )
    return state


def memories(state: TrainState) -> tuple[set[str | None], set[str | None]]:
    """Return the memory kinds of moments, and of everything else that a step carries."""
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    others = [x for x in jax.tree.leaves(state) if not any(x is m for m in moments)]
    return {x.sharding.memory_kind for x in moments}, {x.sharding.memory_kind for x in others}


def test_three_steps_from_host_memory_are_those_from_device_memory():
    """The same operations on the same numbers are fused differently, for a few fp32 roundings of the largest entry."""
    found = {}
    for memory in ("device", "host"):
        made = program(memory)
        state = stepped(made, made.init(), range(3))
        assert memories(state) == ({HOST_MEMORY if memory == "host" else "device"}, {"device"})
        found[memory] = jax.tree.map(np.asarray, (state.params, state.opt_state))
    for a, b in zip(jax.tree.leaves(found["host"]), jax.tree.leaves(found["device"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 * 2.0**-24 * float(np.abs(b).max()))


def test_a_checkpoint_comes_back_into_host_memory(tmp_path):
    made = program("host")
    state = stepped(made, made.init(), range(1))
    store = CheckpointStore(tmp_path)
    store.save(state)
    store.wait()
    restored = store.restore_latest(made.abstract_state)
    store.close()
    assert restored is not None
    assert memories(restored) == memories(state) == ({HOST_MEMORY}, {"device"})
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    stepped(made, restored, range(1, 2))


def test_it_does_not_go_with_local_sgd():
    rounds = ['local_sgd.axis="data"', "local_sgd.every=1", "optimizer.memory=host"]
    with pytest.raises(ConfigError, match="needs the optimizer's state on the GPU during the whole round"):
        load(CONFIGS / "llama_debug_cpu.toml", rounds)


@cache
def planned(memory: str) -> Plan:
    """Return the plan of a larger debug Llama, with FSDP over one DGX H100."""
    cluster = ["cluster=dgx_h100", "mesh.data=", "mesh.fsdp=8", "mesh.tensor=", "rules.preset=fsdp"]
    sizes = ["model.embed=512", "model.mlp=2048", "model.head_dim=64", "train.sequence_length=512"]
    train = ["train.global_batch=8", "train.remat=full", f"optimizer.memory={memory}"]
    return plan_experiment(load(CONFIGS / "llama_debug_cpu.toml", [*cluster, *sizes, *train]))


@pytest.mark.deviceless
def test_the_plan_shows_the_memory_that_is_saved_and_what_it_costs():
    """Two fp32 moments of every parameter leave the GPU, and each crosses the host link twice a step.

    Temporaries do not grow by a copy of them, because activations are gone while moments are there.
    """
    host, device = planned("host"), planned("device")
    moments = 2 * (device.report.memory.parameters_bytes or 0)
    assert host.compiled.memory["argument"] == device.compiled.memory["argument"] - moments
    saved = device.compiled.peak_bytes - host.compiled.peak_bytes
    assert saved == pytest.approx(moments, rel=0.02)
    assert host.compiled.host_peak_bytes == moments
    assert device.report.memory.optimizer_bytes == moments + (host.report.memory.optimizer_bytes or 0)
    (warning,) = [w for w in host.report.warnings if w.code == "host_memory"]
    link = Cluster.load("dgx_h100").offload_link()
    assert warning.seconds == pytest.approx(2 * moments / (link.bytes_per_s * link.achieved))
    assert warning.message.startswith(
        "7.75 MiB per GPU are in host memory, 62.0 MiB of 1.82 TiB a host; 15.5 MiB a step cross"
    )
    assert host.report.step.time_s > device.report.step.time_s
