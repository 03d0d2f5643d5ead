"""Test that measuring a GPU program's predicted step, written as a trace, gives the prediction back.

So everything between a kernel and a row is right for programs of GPUs: names, loops, groups, axes, links, overlap.
"""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.planning.planner import make_plan
from meshkit.report.compare import compare
from meshkit.report.summarize import check_invariants
from meshkit.trace.captured import CapturedDevice, CapturedMesh, CaptureRecord
from meshkit.verbs.profile.profiler import measure_run
from tests.trace.trace_files import clock_text, plane_text, write_planes

pytestmark = [pytest.mark.deviceless, pytest.mark.slow]
EMBED, MLP, BATCH, LAYERS = 1024, 4096, 4096, 3
EXECUTIONS = 3


@pytest.fixture(scope="module")
def cluster():
    return mk.Cluster.load("dgx_h100", hosts=2)


@pytest.fixture(scope="module")
def plan(cluster):
    spec = mk.MeshSpec.parse({"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2})
    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))

    def abstract(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def loss(weights, x):
        def layer(x, w):
            return (x + jax.nn.gelu(x @ w[0]) @ w[1]).astype(x.dtype), None

        return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - g, weights, gradients), value

    weights = (
        abstract((LAYERS, EMBED, MLP), None, "fsdp", "tensor"),
        abstract((LAYERS, MLP, EMBED), None, "tensor", "fsdp"),
    )
    args = (weights, abstract((BATCH, EMBED), ("data", "fsdp"), None))
    return make_plan(step, args, mesh=mesh, cluster=cluster)


def write_run(folder, plan, cluster, *, lost=0.0):
    """Write a run folder of two processes whose GPUs all did what was predicted, three times in a row.


    Args:
        folder: of the run.
        plan: what was predicted.
        cluster: of the plan.
        lost: share of the communication that ran in CUDA graphs, without a name.
    """
    (step,) = plan.timeline.steps
    module = plan.compiled.hlo
    trace = folder / "trace"
    trace.mkdir()
    length_s = step.window[1] - step.window[0]
    # An execution begins with its first kernel, so what lies before it belongs to the one before.
    events = []
    for i in range(EXECUTIONS):
        at = i * length_s
        for op, (a, b) in zip(step.compute_op, step.compute):
            events.append(kernel(plan.timeline.op_names[op], "fusion", at + a, at + b, module.name))
        for n, (c, (a, b)) in enumerate(zip(step.collective, step.communication)):
            name = plan.timeline.collectives[c].name
            found = kernel(name, "ncclDevKernel_AllGather", at + a, at + b, module.name)
            graph = n < lost * len(step.communication)
            events.append((*found[:3], {"cuda_graph_id": 7}) if graph else found)
        for a, b in step.copies:
            events.append(("MemcpyD2D", 1e6 * (at + a), 1e6 * (at + b), {"memcpy_details": "x"}))
    for process in range(2):
        texts = [clock_text(1_700_000_000_000_000_000 + process * 300_000_000)]
        for ordinal in range(8):
            texts.append(plane_text(f"/device:GPU:{ordinal}", events))
        session = trace / "plugins" / "profile" / f"p{process}"
        session.mkdir(parents=True)
        write_planes(session / "host.xplane.pb", *texts)
        (trace / f"program-p{process}.hlo.pb.gz").write_bytes(gzip.compress(plan.compiled.module))
        record = CaptureRecord(
            process=process,
            processes=2,
            host=f"host{process}",
            platform="gpu",
            devices=tuple(CapturedDevice(id=8 * process + i, ordinal=i) for i in range(8)),
            mesh=CapturedMesh(axes=("data", "fsdp", "tensor"), shape=(2, 4, 2), device_ids=tuple(range(16))),
            mesh_spec={"data": {"infiniband": 2}, "fsdp": 4, "tensor": 2},
            cluster=cluster.to_dict(),
            module=module.name,
            program_file=f"program-p{process}.hlo.pb.gz",
            first_step=10,
            num_steps=EXECUTIONS,
            jax="0",
            jaxlib="0",
        )
        (trace / f"capture-p{process}.json").write_text(json.dumps(record.model_dump(mode="json")))
    return folder


def kernel(op, name, start_s, end_s, module):
    return (name, 1e6 * start_s, 1e6 * end_s, {"hlo_op": op, "hlo_module": module})


def test_measuring_a_predicted_trace_gives_the_prediction(plan, cluster, tmp_path):
    measured = measure_run(write_run(tmp_path, plan, cluster)).report
    predicted = plan.report
    check_invariants(measured)
    assert measured.window.devices == 16
    # Each of some hundred boundaries is rounded to whole ps.
    near = {"rel": 1e-6, "abs": 1e-9}
    for name in ("time_s", "compute_s", "communication_s", "overlapped_s", "exposed_s", "other_s", "idle_s"):
        assert getattr(measured.step, name) == pytest.approx(getattr(predicted.step, name), **near), name
    rows = [
        {(r.axes, r.link, r.collective, r.dtype, r.group_size, r.num_groups): r for r in report.communication}
        for report in (predicted, measured)
    ]
    assert rows[0].keys() == rows[1].keys()
    assert {axis for row in measured.communication for axis in row.axes} == {"data", "fsdp", "tensor"}
    for key, row in rows[0].items():
        found = rows[1][key]
        assert (found.count, found.payload_bytes, found.wire_bytes) == (row.count, row.payload_bytes, row.wire_bytes)
        assert (found.time_s, found.exposed_s) == pytest.approx((row.time_s, row.exposed_s), **near)
        assert found.wait_s == pytest.approx(0, abs=1e-9)  # All GPUs were in step.
    assert measured.warnings == ()
    assert measured.quality.clock_offset_s == pytest.approx(0.3, abs=1e-9)
    joined = compare(predicted, measured)
    assert (joined.joined_by, joined.joined_share) == ("name", 1)
    kinds = [{k.kind: k.time_s for k in r.kernels.classes} for r in (predicted, measured)]
    assert kinds[0] == pytest.approx(kinds[1], **near)


@pytest.mark.parametrize(("lost", "withheld"), [(0.9, True), (0.0, False)])
def test_cuda_graphs_withhold_the_axes(plan, cluster, tmp_path, lost, withheld):
    report = measure_run(write_run(tmp_path, plan, cluster, lost=lost)).report
    check_invariants(report)
    assert report.quality.axes_withheld is withheld
    by_axis = [row for row in report.communication if row.axes]
    assert all((row.time_s is None) is withheld for row in by_axis)
    codes = {w.code for w in report.warnings}
    assert ({"axes_withheld", "command_buffers"} <= codes) is withheld
    # The step itself does not need the names.
    assert report.step.communication_s == pytest.approx(plan.report.step.communication_s, rel=1e-6)
    assert np.isfinite(report.step.exposed_s)
