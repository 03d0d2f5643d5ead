"""Test that XLA schedules by measured costs: the program of an absent cluster is reordered when they change."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile.options import CompileChoices
from meshkit.errors import ProgramError
from meshkit.planning.planner import make_plan
from meshkit.trace.measured import write_pgle

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]
OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
EMBED, MLP, BATCH = 2048, 8192, 8192


def test_the_closed_loop_reaches_the_scheduler(tmp_path):
    cluster = mk.Cluster.load("dgx_h100", hosts=1)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"fsdp": 8}), cluster, devices=mk.describe_devices(cluster))

    def abstract(shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp", None)))

    def forward(weights, x):
        for up, down in weights:
            x = x + jax.nn.gelu(x @ up) @ down
        return x

    args = ([(abstract((EMBED, MLP)), abstract((MLP, EMBED))) for _ in range(3)], abstract((BATCH, EMBED)))

    def plan(**options):
        return make_plan(forward, args, mesh=mesh, cluster=cluster, choices=CompileChoices(options or {}))

    first = plan()
    (step,) = first.timeline.steps
    costs = {first.timeline.op_names[op]: b - a for op, (a, b) in zip(step.compute_op, step.compute)}
    # These gathers take twenty times as long as predicted.
    for i, (a, b) in zip(step.collective, step.communication):
        costs[first.timeline.collectives[i].name] = 20 * (b - a)
    file = write_pgle(tmp_path / "pgle.pbtxt", costs)
    second = plan(**{OPTION: str(file)})
    assert second.report.program.fingerprint != first.report.program.fingerprint
    counts = [sum(row.count for row in p.report.communication) for p in (first, second)]
    assert counts[0] == counts[1]  # The second program is the same in another order.

    # A file of the same name with other costs is another program, so nothing stale comes from the cache.
    write_pgle(file, {"no_such_instruction": 1e-3})
    # The checker also stops the autotuner, whose small programs are in no profile.
    with pytest.raises(ProgramError, match=r"missing instructions|Failed to get configs"):
        plan(**{OPTION: str(file), "xla_gpu_pgle_accuracy_checker": "PGLE_STRICTNESS_LEVEL_ERROR"})
    assert plan(**{OPTION: str(file)}).report.program.fingerprint != second.report.program.fingerprint
