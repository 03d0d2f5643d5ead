"""Test rehearse: what runs on the GPU runs on virtual devices here, and what reads its capture reads a made-up one."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import jax
import pytest
from jax.profiler import ProfileData

from meshkit.cli import main
from meshkit.compile.attached import compile_step
from meshkit.compile.choices import derive_options
from meshkit.compile.options import CompileChoices, chosen_options
from meshkit.compile.program import compile_absent
from meshkit.config import calibration
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load, load_any
from meshkit.errors import ConfigError, RunError, TraceError
from meshkit.planning.resolved import make_train_step
from meshkit.predict.kernels import kernel_work
from meshkit.report.summarize import check_invariants
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.verbs.rehearse import rehearsal

TINY = "configs/experiments/mlp.toml"
ON_16 = ('cluster={ name = "dgx_h100", hosts = 2 }', "mesh={ data = { infiniband = 2 }, fsdp = 8 }")
STEPS, NS = 2, 1_000_000  # These are the steps of a made-up trace, and the nanoseconds of a millisecond.


@pytest.mark.parametrize(
    ("cluster", "topology"),
    [
        (Cluster.load("dgx_h100", hosts=8), "8x8x1"),
        (Cluster.load("gb200_nvl72", gpus_used_per_domain=64), "1x64x1"),
        (Cluster.load("dgx_h100", hosts=2, gpus_used_per_domain=4), "2x4x1"),
    ],
)
def test_every_gpu_of_the_job_is_a_process_of_the_mocked_topology(cluster, topology):
    rehearsal.mock(cluster)
    try:
        assert jax.config.values["jax_mock_gpu_topology"] == topology  # jax does not take it from the environment.
    finally:
        jax.config.update("jax_mock_gpu_topology", "")


def test_the_process_on_the_gpu_sees_one_gpu_and_no_cuda_graphs():
    experiment = load(TINY, ON_16)
    given = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "CUDA_VISIBLE_DEVICES": "3,5",
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION --xla_x=1",
    }
    found = rehearsal.gpu_environment(experiment, given)
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert found["XLA_FLAGS"].split() == ["--xla_x=1", *rehearsal.FLAGS]
    assert float(found["XLA_CLIENT_MEM_FRACTION"]) == experiment.train.memory_fraction
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found  # With both variables, jax stops.


def test_without_a_gpu_the_verb_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rehearsal, "gpus_here", lambda: 0)
    out = tmp_path / "run"
    assert main(["rehearse", TINY, "--set", ON_16[0], "--set", ON_16[1], "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "a rehearsal runs on one real NVIDIA GPU, and there is none here" in said
    assert "--recorded" in said
    assert not out.exists()


def test_a_cluster_of_cpus_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no GPUs to rehearse"):
        rehearsal.run(load("configs/experiments/llama_debug_cpu.toml"), tmp_path, steps=1)


def test_a_rehearsal_that_runs_out_of_memory_says_what_helps(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal, "gpus_here", lambda: 1)
    said = "E: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 90.00GiB with allocator GPU_0_bfc"
    (tmp_path / "says_and_ends.py").write_text(f"import sys; sys.exit('x\\n{said}')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rehearsal, "MODULE", "says_and_ends")
    with pytest.raises(RunError, match=r"asked for 90.0 GiB at once[\s\S]*rehearsal.log[\s\S]*says what makes it fit"):
        rehearsal.run(load(TINY, ON_16), tmp_path, steps=1)


def test_recorded_needs_a_folder(capsys):
    assert main(["rehearse", TINY, "--recorded"]) == 2
    assert "--recorded reads the run folder of a rehearsal, but --out names none" in capsys.readouterr().err


def test_a_folder_without_a_capture_is_refused(tmp_path):
    with pytest.raises(TraceError, match="there is no captured trace"):
        rehearsal.measure(load(TINY, ON_16), tmp_path)


# ----------------------------------------------------------------------------- a made-up capture of a real H100 program


@pytest.fixture(scope="module")
def planned():
    """Return a step compiled for 16 absent H100s, as the one GPU of a rehearsal would compile it."""
    experiment = load(TINY, ON_16)
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    program = make_train_step(experiment, mesh)
    args = (program.abstract_state, program.abstract_batch)
    choices = CompileChoices({**program.xla_options, **experiment.xla})
    compiled = compile_absent(program.step, args, mesh=mesh, cluster=experiment.cluster, choices=choices)
    return experiment, compiled.hlo, compiled.module, compiled.schedule


def kernels_of(schedule):
    """Return name -> (milliseconds in the made-up trace, runs a step), where kernels next to each other differ."""
    found = {}
    for i, times in schedule.walk():
        if i.kind == "kernel":
            found[i.name] = (1 + len(found) % 7, times)
    return found


def write_capture(folder, experiment, module, serialized, kernels, *, pipeline=None, kind=None, **other):
    """Write the files that a rehearsal leaves: one GPU, STEPS steps, kernels back to back, no collective."""
    trace = folder / "trace"
    session = trace / "plugins" / "profile" / "p0"
    session.mkdir(parents=True)
    (trace / "program-p0.hlo.pb.gz").write_bytes(gzip.compress(serialized))
    (session / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(xspace(module.name, kernels)))
    mesh = experiment.mesh
    record = {
        "process": 0,
        "processes": 16,
        "host": "made-up",
        "platform": "gpu",
        "device_kind": kind,
        "devices": [{"id": 0, "ordinal": 0}],
        "mesh": {"axes": mesh.axis_names, "shape": mesh.shape,
                 "device_ids": mesh.device_order(experiment.cluster).reshape(-1).tolist()},
        "mesh_spec": mesh.to_dict(),
        "cluster": experiment.cluster.to_dict(),
        "module": module.name,
        "program_file": "program-p0.hlo.pb.gz",
        "first_step": 2,
        "num_steps": STEPS,
        "partitioner": "shardy",
        "work": {"model_flops": 1e12, "model_flops_causal": 1e12, "tokens": 1024, "training_steps": 10,
                 "pipeline": pipeline},
        "memory": {"pool_bytes": 70 * 2**30, "peak_bytes": 2**30},
        "captured_processes": [0],
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        **other,
    }  # fmt: skip
    (trace / "capture-p0.json").write_text(json.dumps(record))


def xspace(module, kernels):
    """Return the text of an XSpace as CUPTI's collector writes it: one stream of kernels, numbered by run."""
    events, names, now = [], list(kernels), 0
    for run in range(STEPS):
        for name, (milliseconds, times) in kernels.items():
            for _ in range(times):
                stats = (
                    f'stats{{metadata_id:1 str_value:"{name}"}} stats{{metadata_id:2 str_value:"{module}"}} '
                    f"stats{{metadata_id:3 int64_value:{run}}}"
                )
                offset, length = now * NS * 1000, milliseconds * NS * 1000  # These are picoseconds.
                metadata_id = names.index(name) + 1
                events.append(f"events{{metadata_id:{metadata_id} offset_ps:{offset} duration_ps:{length} {stats}}}")
                now += milliseconds
        now += 5
    meta = "".join(f'event_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in enumerate(names, 1))
    keys = enumerate(("hlo_op", "hlo_module", "run_id"), 1)
    meta += "".join(f'stat_metadata{{key:{i} value{{id:{i} name:"{n}"}}}}' for i, n in keys)
    return f'planes{{id:1 name:"/device:GPU:0" lines{{id:1 name:"Stream #7(Kernel)" {"".join(events)}}} {meta}}}'


@pytest.mark.deviceless
def test_measured_kernels_and_modelled_collectives_make_one_step(planned, tmp_path):
    experiment, module, serialized, schedule = planned
    kernels = kernels_of(schedule)
    write_capture(tmp_path, experiment, module, serialized, kernels)
    found = rehearsal.measure(experiment, tmp_path)
    report = found.report
    check_invariants(report)
    assert report.source == "rehearse"
    seconds = sum(milliseconds * times for milliseconds, times in kernels.values()) * 1e-3
    assert report.step.compute_s == pytest.approx(seconds, rel=1e-9)
    rows = {(r.collective, r.axes): r for r in report.communication}
    assert rows, "the collectives of the program are in the report although none of them ran"
    assert all(r.time_s > 0 for r in rows.values())
    assert report.step.time_s >= seconds
    assert report.memory.peak_bytes == 2**30
    assert report.memory.fits
    assert report.memory.nccl_bytes > 0
    codes = {w.code for w in report.warnings}
    assert {"rehearsal_values", "rehearsal_contention", "rehearsal_nccl_memory", "rehearsal_collectives"} <= codes
    assert "rehearsal_collectives_differ" not in codes
    assert "peak_before_steps" not in codes
    assert any("of one compiler and the same options" in w.message for w in report.warnings)
    assert not {"missing_processes", "process_subset", "collective_counts"} & codes


@pytest.fixture
def as_planned(planned, monkeypatch):
    """Take the planned program as the captured one, which saves a compile."""
    program = SimpleNamespace(schedule=planned[3], options={}, peak_bytes=2**30)
    monkeypatch.setattr(rehearsal, "planned_program", lambda _: program)


@pytest.mark.deviceless
@pytest.mark.usefixtures("as_planned")
def test_its_rates_are_a_calibration_that_plans_read(planned, tmp_path):
    experiment, module, serialized, schedule = planned
    kernels = kernels_of(schedule)
    write_capture(tmp_path, experiment, module, serialized, kernels)
    file = rehearsal.measure(experiment, tmp_path).calibration
    rates = calibration.load(file).rates
    # With these rates the kernel model gives all matmuls together the seconds that they took.
    modelled, measured = 0.0, 0.0
    for instructions in schedule.computations.values():
        for i in instructions:
            if i.kind == "kernel" and i.cost.matmul_flops:
                # A rehearsal mocks communication, so kernels ran at the full clock.
                modelled += kernel_work(i.cost, experiment.cluster.gpu, rates, busy=0.0).arithmetic_s
                measured += kernels[i.name][0] * 1e-3
    assert modelled == pytest.approx(measured)
    assert rates.memory_bytes_per_s is not None
    calibrated = load(TINY, (*ON_16, f'cluster.calibration="{file}"')).cluster
    assert calibrated.calibration == str(file)


@pytest.mark.deviceless
@pytest.mark.usefixtures("as_planned")
def test_an_instruction_that_is_several_kernels_takes_all_of_them(planned, tmp_path):
    """A trace shows three kernels of one name each time that cuDNN's attention backward runs."""
    experiment, module, serialized, schedule = planned
    kernels = {name: (milliseconds, 3 * times) for name, (milliseconds, times) in kernels_of(schedule).items()}
    write_capture(tmp_path, experiment, module, serialized, kernels)
    found = rehearsal.measure(experiment, tmp_path)
    seconds = sum(milliseconds * times for milliseconds, times in kernels.values()) * 1e-3
    assert found.report.step.compute_s == pytest.approx(seconds, rel=1e-9)
    rates = calibration.load(found.calibration).rates
    every = [i for body in schedule.computations.values() for i in body if i.kind == "kernel" and i.cost.matmul_flops]
    busy = sum(3e-3 * kernels_of(schedule)[i.name][0] for i in every)
    modelled = sum(kernel_work(i.cost, experiment.cluster.gpu, rates, busy=0.0).arithmetic_s for i in every)
    assert modelled == pytest.approx(busy)


@pytest.mark.deviceless
@pytest.mark.usefixtures("as_planned")
@pytest.mark.parametrize(
    ("kind", "key", "warns"),
    [
        (None, "h100_sxm", False),
        ("NVIDIA H100 80GB HBM3", "h100_sxm", False),
        ("NVIDIA H200", "h200", True),
        ("NVIDIA X1", "NVIDIA X1", True),
    ],
)
def test_kernels_of_another_gpu_are_named_and_calibrate_that_one(planned, tmp_path, kind, key, warns):
    experiment, module, serialized, schedule = planned
    write_capture(tmp_path, experiment, module, serialized, kernels_of(schedule), kind=kind)
    found = rehearsal.measure(experiment, tmp_path)
    assert ("rehearsal_other_gpu" in {w.code for w in found.report.warnings}) is warns
    measured_on = calibration.load(found.calibration).measured_on
    assert measured_on is not None
    assert measured_on.gpu == key


@pytest.mark.deviceless
@pytest.mark.usefixtures("as_planned")
def test_of_a_pipeline_the_masked_slots_are_named(planned, tmp_path):
    """Half of what the layer `up` does counts; the schedule's cost is in the report as a plan has it."""
    experiment, module, serialized, schedule = planned
    kernels = kernels_of(schedule)
    counts = dict.fromkeys(("stages", "virtual_stages", "microbatches", "layers", "padding_layers", "warmup_ticks",
                            "steady_ticks", "drain_ticks", "slots"), 1)  # fmt: skip
    pipeline = {**counts, "axis": "data", "schedule": "1f1b", "bubble_fraction": 0.5, "executed_over_useful": 2.0,
                "picture": [["F0"]], "useful": {"/up/": 0.5}}  # fmt: skip
    write_capture(tmp_path, experiment, module, serialized, kernels, pipeline=pipeline)
    report = rehearsal.measure(experiment, tmp_path).report
    masked = {i.name for i, _ in schedule.walk() if "/up/" in i.source and i.kind == "kernel"}
    assert masked
    seconds = sum(milliseconds * times for name, (milliseconds, times) in kernels.items() if name in masked) * 1e-3
    assert report.step.bubble_s == pytest.approx(seconds / 2)
    assert report.pipeline is not None
    assert (report.pipeline.axis, report.pipeline.bubble_fraction) == ("data", 0.5)


@pytest.mark.deviceless
@pytest.mark.usefixtures("as_planned")
def test_kernels_that_the_trace_lacks_are_priced_and_named(planned, tmp_path, monkeypatch):
    experiment, module, serialized, schedule = planned
    kernels = kernels_of(schedule)
    largest = max(schedule.walk(), key=lambda pair: pair[0].cost.bytes_accessed if pair[0].kind == "kernel" else 0)[0]
    left = {name: times for name, times in kernels.items() if name != largest.name}
    write_capture(tmp_path, experiment, module, serialized, left)
    monkeypatch.setattr(rehearsal, "NOTABLE", 0.0)  # Made-up kernels take milliseconds, but the missing one does not.
    report = rehearsal.measure(experiment, tmp_path).report
    assert report.step.compute_s > sum(milliseconds * times for milliseconds, times in left.values()) * 1e-3
    (warning,) = [w for w in report.warnings if w.code == "rehearsal_unnamed"]
    assert largest.name in warning.message


@pytest.mark.deviceless
def test_another_mesh_and_another_program_are_named(planned, tmp_path, monkeypatch):
    experiment, module, serialized, schedule = planned
    record = {
        "memory": {"peak_bytes": 2**30, "before_bytes": 2**30, "program_bytes": 960 * 2**20},
        "options": {"xla_a": 1},
    }
    write_capture(tmp_path, experiment, module, serialized, kernels_of(schedule), **record)
    with pytest.raises(TraceError, match=r"the capture has mesh \{'data': 2, 'fsdp': 8\}"):
        rehearsal.measure(load(TINY, (ON_16[0], "mesh={ data = { infiniband = 2, nvlink = 2 }, fsdp = 4 }")), tmp_path)
    wider = {name: tuple(_twice_as_wide(i) for i in body) for name, body in schedule.computations.items()}
    program = SimpleNamespace(schedule=replace(schedule, computations=wider), options={"xla_a": 2}, peak_bytes=2**31)
    monkeypatch.setattr(rehearsal, "planned_program", lambda _: program)
    monkeypatch.setattr(rehearsal, "version_of", lambda _: "0.99")
    found = {w.code: w.message for w in rehearsal.measure(experiment, tmp_path).report.warnings}
    why = f"(compiled by jaxlib {metadata.version('jaxlib')}, and the plan's by 0.99; xla_a is 1, and the plan's 2)"
    assert why in found["rehearsal_collectives_differ"]
    assert re.search(r"\d+ (fewer|more) all-gather bf16 over fsdp of", found["rehearsal_collectives_differ"])
    assert "peak is 1.00 GiB (XLA counts 960 MiB for the program on the GPU)" in found["rehearsal_memory"]
    assert "the plan's peak is 2.00 GiB (-50.0%; compiled by jaxlib" in found["rehearsal_memory"]
    assert "peak, 1.00 GiB, was reached before the first step" in found["peak_before_steps"]


def _twice_as_wide(i):
    c = i.collective
    return i if c is None else replace(i, collective=replace(c, payload_bytes=2 * c.payload_bytes))


# ---------------------------------------------------------------------------------- the process of the GPU, on CPUs


def test_the_process_of_the_gpu_compiles_with_the_options_of_the_plan():
    """These are the options for GPUs, those that follow from the program, and the user's, which win."""
    experiment = load(TINY, (*ON_16, "xla.xla_gpu_graph_level=0"))
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    program = make_train_step(experiment, mesh)
    asked = []

    class Lowered:
        def compile(self, compiler_options):
            asked.append(compiler_options)
            return self

        def memory_analysis(self):
            return None

    lowered = replace(program, step=SimpleNamespace(lower=lambda *_: Lowered()))
    made = compile_step(lowered, experiment.cluster, experiment.placement, experiment.xla)
    derived = derive_options(program, experiment.cluster, experiment.placement)
    assert derived
    assert asked == [made.options]
    chosen = chosen_options(experiment.cluster.gpu, {"xla_gpu_graph_level": 0}, derived)
    assert made.options == {o.name: o.value for o in chosen}


@pytest.mark.slow
def test_the_process_of_the_gpu_captures_the_steps_it_is_asked_for(tmp_path):
    """Eight virtual devices stand in for one GPU of many: the function is the same, and all devices are its own."""
    experiment = load("configs/experiments/llama_debug_cpu.toml", ["train.tokens_total=20480"])
    tmp_path /= "new"
    rehearsal.rehearse(experiment, list(jax.devices()), tmp_path, 2)
    record = json.loads((tmp_path / "trace" / "capture-p0.json").read_text())
    assert (record["first_step"], record["num_steps"]) == (rehearsal.WARM_UP, 2)
    assert len(record["devices"]) == 8
    assert (record["work"]["tokens"], record["work"]["training_steps"]) == (16 * 128, 10)
    ids = json.loads((tmp_path / rehearsal.IDS_FILE).read_text())["tokens"]  # The ids are of text, byte by byte.
    assert ids["count"] == 16 * 128
    assert 40 < ids["different"] < 128
    assert 0.1 < ids["most"] / ids["count"] < 0.5


@pytest.mark.parametrize("source", ["python-stdlib", "/nowhere/tokens.u16"])
def test_a_rehearsal_runs_on_the_first_batch_of_its_data_or_on_ids_over_the_whole_vocabulary(source, capsys):
    experiment = load("configs/experiments/llama_debug_cpu.toml", [f"data.source={source}", "model.vocab=4096"])
    program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster, devices=list(jax.devices())))
    state, batch = rehearsal.filled(program, experiment)
    ids = rehearsal.ids_of(batch)["tokens"]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (state, batch)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), (program.abstract_state, program.abstract_batch)
    )
    assert ids["count"] == 16 * 128
    made_up = "the batch is synthetic, with random ids: there is no file or folder /nowhere/tokens.u16."
    assert (made_up in capsys.readouterr().err) is (source != "python-stdlib")
    spread = 4096 * (1 - (1 - 1 / 4096) ** (16 * 128))  # This is the expected number of different ids in so many draws.
    assert ids["different"] < 128 if source == "python-stdlib" else ids["different"] == pytest.approx(spread, rel=0.05)


OF_A_USER = """
import jax, jax.numpy as jnp, optax
import meshkit as mk
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

def make(mesh, style="plain"):
    def array(*shape, spec=P(), dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    batch = {"ids": array(16, 32, spec=P("data"), dtype=jnp.int32), "key": array(dtype=jax.random.key(0).dtype)}
    if style == "nnx":
        model = nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
        optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))

        @nnx.jit
        def train(model, optimizer, batch):
            x = jax.nn.one_hot(batch["ids"], 64)
            loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
            optimizer.update(model, grads)
            return loss

        return mk.Program(train, (model, optimizer, batch))
    params = {"w": array(64, 64, spec=P("data"))}
    tx = optax.adam(1e-3)

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(lambda p: (jax.nn.one_hot(batch["ids"], 64) @ p["w"]).var())(params)
        updates, moments = tx.update(grads, moments)
        noise = jax.random.normal(batch["key"])
        return loss + noise, (optax.apply_updates(params, updates), moments)

    return mk.Program(jax.jit(step, donate_argnums=0), ((params, jax.eval_shape(tx.init, params)), batch), tokens=512)
"""
PROGRAM = """
cluster = { name = "x", gpu = "cpu", hosts = 1, gpus_per_host = 8 }
mesh = { data = 8 }
[program]
make = "NAME:make"
"""


@pytest.mark.parametrize("style", ["plain", "nnx"])
def test_a_step_of_the_users_own_is_filled_run_and_captured(tmp_path, style):
    """Eight virtual devices stand in for one GPU of many."""
    name = f"rehearsed_by_a_user_{style}"
    (tmp_path / f"{name}.py").write_text(OF_A_USER)
    (tmp_path / "mine.toml").write_text(PROGRAM.replace("NAME", name))
    experiment = load_any(tmp_path / "mine.toml", [f'program.options.style="{style}"'])
    rehearsal.rehearse(experiment, list(jax.devices()), tmp_path / "run", 2)
    record = json.loads((tmp_path / "run" / "trace" / "capture-p0.json").read_text())
    assert (record["num_steps"], record["work"]["tokens"]) == (2, 512)
    forward = 2 * 16 * 32 * 64 * 64
    assert record["work"]["model_flops"] == 2 * forward  # No gradient reaches the one-hot input.
    assert record["mesh_spec"] == {"data": 8}
    (ids,) = json.loads((tmp_path / "run" / rehearsal.IDS_FILE).read_text()).values()
    assert ids["count"] == 16 * 32
