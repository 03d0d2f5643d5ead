"""Test StepFacts: what make_train_step says of a step, and which of it the record beside a trace holds."""

import json
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.experiment import load
from meshkit.planning.resolved import make_train_step
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.program import StepFacts, local_bytes
from meshkit.trace.captured import CaptureRecord

MLP = Path(__file__).parents[2] / "configs/experiments/mlp.toml"
SIDECAR = "model_flops model_flops_causal hardware_flops_per_gpu tokens peak_flops_per_gpu training_steps"


def facts_of(*overrides, file=MLP):
    spec = load(file, overrides)
    return make_train_step(spec, build_mesh(spec.mesh, spec.cluster, devices=describe_devices(spec.cluster))).facts


def test_tokens_total_is_the_length_of_the_training():
    train = load(MLP).train
    tokens = train.global_batch * train.sequence_length
    assert facts_of().training_steps == train.steps
    assert facts_of(f"train.tokens_total={10 * tokens + 1}").training_steps == 11


def test_only_ids_in_sequences_are_tokens():
    of = {name: facts_of(file=MLP.with_name(f"{name}.toml")) for name in ("mlp", "vit_cpu", "llama_debug_cpu")}
    assert {name: (f.tokens, f.examples) for name, f in of.items()} == {
        "mlp": (None, 64),
        "vit_cpu": (None, 64),  # The examples are images, though their patches are a sequence.
        "llama_debug_cpu": (16 * 128, 16),
    }
    assert all(f.model_flops > 0 for f in of.values())


def test_a_state_is_parameters_and_two_moments_in_fp32():
    facts = facts_of()
    assert facts.state_bytes >= 12 * facts.parameters
    assert facts.parameters_bytes < 4 * facts.parameters  # They are sharded over the mesh.
    assert facts.optimizer_bytes >= 2 * facts.parameters_bytes


def test_bytes_of_a_gpu_are_those_of_its_own_shards_and_memory():
    spec = load(MLP)
    mesh = build_mesh(spec.mesh, spec.cluster, devices=describe_devices(spec.cluster))
    first = mesh.axis_names[0]

    def array(**more):
        return jax.ShapeDtypeStruct((8, 4), "float32", sharding=NamedSharding(mesh, PartitionSpec(first), **more))

    unplaced = jax.ShapeDtypeStruct((8, 4), "float32")
    assert local_bytes(array()) == 8 * 4 * 4 // mesh.shape[first] < 8 * 4 * 4
    assert local_bytes([array(), array(memory_kind="pinned_host"), unplaced, jax.random.key(0), 3]) == local_bytes(
        array()
    )


def test_a_sidecar_keeps_its_keys():
    record = {
        "process": 0, "processes": 1, "host": "h", "platform": "cpu", "module": "m", "program_file": "p",
        "first_step": 1, "num_steps": 1, "jax": "0", "jaxlib": "0", "devices": [{"id": 0, "ordinal": 0}],
        "mesh": {"axes": ["data"], "shape": [1], "device_ids": [0]},
        "work": {"tokens": 8, "steps_per_execution": 4, "of_a_later_version": 1},
    }  # fmt: skip
    read = CaptureRecord.model_validate(record)
    assert read.work == StepFacts(tokens=8, steps_per_call=4)
    work = json.loads(read.model_dump_json())["work"]
    assert set(work) == {*SIDECAR.split(), "steps_per_execution", "pipeline"}
    assert (work["tokens"], work["steps_per_execution"]) == (8, 4)
