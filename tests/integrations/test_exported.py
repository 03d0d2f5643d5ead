"""Test that an exported program plans as the step that made it, and that errors of unplannable ones say what to do."""

import contextlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import meshkit as mk
from meshkit import cli
from meshkit.config.experiment import load_any
from meshkit.integrations import exported
from meshkit.planning.planner import plan_experiment

WIDTH, LAYERS, ROWS = 256, 3, 64
SAID = ["cluster=dgx_h100", "mesh={ data = 2, fsdp = 4 }"]


def step_on(mesh):
    batch = NamedSharding(mesh, P(("data", "fsdp")))

    def layer(x, w):
        return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), batch), None

    def step(state, x):
        grads = jax.grad(lambda p: jnp.mean(jax.lax.scan(layer, x, p["w"])[0] ** 2))(state["params"])
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments), "moments": moments}

    cut = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32, sharding=NamedSharding(mesh, P(None, "fsdp")))
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=batch)
    return jax.jit(step, donate_argnums=0), ({"params": {"w": cut}, "moments": {"w": cut}}, rows)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    step, args = step_on(mesh)
    (folder / "step.bin").write_bytes(export.export(step, platforms=["cuda"])(*args).serialize())
    (folder / "cpu.bin").write_bytes(export.export(step, platforms=["cpu"])(*args).serialize())
    lowered = step.lower(*args)
    (folder / "step.mlir").write_text(lowered.as_text(debug_info=True))
    dump = {"xla_dump_to": str(folder / "dump"), "xla_dump_hlo_as_proto": True}
    lowered.compile(compiler_options=dump)
    for stage, name in (("before", "step"), ("cpu_after", "optimized")):
        (found,) = (folder / "dump").glob(f"*{stage}_optimizations.hlo.pb")
        found.rename(folder / f"{name}.pb")
    printing = jax.jit(lambda x: (jax.debug.print("{}", x), x)[1])
    (folder / "callback.mlir").write_text(printing.lower(jnp.ones(3)).as_text())
    (folder / "text.bin").write_text("no program at all, of whatever kind it may be\n")
    (folder / "text.mlir").write_text("no program\n")
    (folder / "text.pb").write_bytes(b"\x00\xff no program")
    return folder


@pytest.fixture(scope="module")
def planned_itself():
    cluster = mk.Cluster.load("dgx_h100")
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 2, "fsdp": 4}), cluster, devices=mk.describe_devices(cluster))
    step, args = step_on(mesh)
    return mk.plan(step, args, mesh=mesh, cluster=cluster)


def communicated(report):
    return {(row.axes, row.collective, row.count, row.payload_bytes) for row in report.communication}


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["step.bin", "step.mlir", "step.pb"])
def test_it_is_planned_as_the_step_that_made_it(files, planned_itself, name):
    report = plan_experiment(load_any(files / name, SAID)).report
    assert communicated(report) == communicated(planned_itself)
    assert report.step.time_s == pytest.approx(planned_itself.step.time_s, rel=1e-6)
    lines = {op.line for row in report.communication for op in row.ops}
    if name == "step.pb":
        assert report.memory.parameters_bytes is None
        return
    assert report.memory.peak_bytes == planned_itself.memory.peak_bytes
    held = 4 * LAYERS * WIDTH * WIDTH // 4
    assert (report.memory.parameters_bytes, report.memory.optimizer_bytes) == (held, held)
    assert {"test_exported.py:" in (line or "") for line in lines} == {True}


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("step.bin", ["cluster=dgx_h100", "mesh={ fsdp = 8 }"], "for a mesh data 2 x fsdp 4, but the mesh is fsdp 8"),
        ("step.mlir", ["cluster=dgx_h100", "mesh={ fsdp = 8 }"], "for a mesh data 2 x fsdp 4, but the mesh is fsdp 8"),
        ("cpu.bin", SAID, "was lowered for cpu"),
        ("optimized.pb", SAID, "is a program that XLA has optimized"),
        ("callback.mlir", SAID, "whose Python function died with the process"),
        ("text.bin", SAID, "is no program that jax.export serialized"),
        ("text.mlir", SAID, "is no StableHLO that this jax reads"),
        ("text.pb", SAID, "is no HLO that this jax reads"),
        ("nowhere.bin", SAID, "nowhere.bin"),
    ],
)
def test_what_cannot_be_planned_is_refused(files, name, said, message):
    with pytest.raises(mk.ConfigError, match=message):
        plan_experiment(load_any(files / name, said))


def test_without_a_cluster_the_command_says_what_is_missing(files, capsys):
    assert cli.main(["plan", str(files / "step.bin"), "--mesh", "{ data = 2, fsdp = 4 }"]) == 2
    assert "a program from a file needs a cluster" in capsys.readouterr().err


def test_a_site_keeps_it_to_its_folders(files, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHKIT_FILE_ROOTS", str(tmp_path))
    with pytest.raises(mk.ConfigError, match="outside of the folders that this site allows"):
        exported.make(mk.build_mesh(mk.MeshSpec.parse({"data": 8}), mk.Cluster.load("cpu8")), str(files / "step.bin"))


@pytest.mark.parametrize("name", ["step.bin", "step.mlir", "step.pb"])
def test_a_damaged_file_is_refused_or_read(files, tmp_path, name):
    cluster = mk.Cluster.load("dgx_h100")
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 2, "fsdp": 4}), cluster, devices=mk.describe_devices(cluster))
    whole, seeded = (files / name).read_bytes(), random.Random(7)
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(seeded.randrange(1, 20)):
            data[seeded.randrange(len(data))] = seeded.randrange(256)
        path = tmp_path / name
        path.write_bytes(bytes(data[: seeded.randrange(1, len(data))] if seeded.random() < 0.5 else data))
        with contextlib.suppress(mk.ConfigError):  # Any other error would be a traceback.
            exported.make(mesh, str(path))
