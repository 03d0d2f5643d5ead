"""Test plan, explain and tune of a file with a `[program]`, whose step is made with the cluster's devices as jax's."""

import json

import pytest

import meshkit as mk
from meshkit import cli
from meshkit.config.experiment import load_any
from meshkit.config.sections import TABLE_OPTION
from meshkit.planning.planner import plan_experiment

pytestmark = pytest.mark.deviceless
STEPS = """
import jax
import jax.numpy as jnp
import meshkit as mk
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def loss(params, tokens):
    x = params["table"][tokens]
    for w in params["layers"]:
        x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), P(("data", "fsdp")))
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens).mean()

def make(mesh, layers=2, width=256):
    def array(*shape, spec=P("fsdp"), dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    jax.set_mesh(mesh)
    params = {"table": array(512, width), "layers": [array(width, width)] * layers, "head": array(width, 512)}
    tx = optax.adam(1e-3)

    def step(state, batch):
        params, moments = state
        updates, moments = tx.update(jax.grad(loss)(params, batch["tokens"]), moments)
        return optax.apply_updates(params, updates), moments

    state = params, jax.eval_shape(tx.init, params)
    batch = {"tokens": array(64, 128, spec=P(("data", "fsdp")), dtype=jnp.int32)}
    return mk.Program(jax.jit(step, donate_argnums=0), (state, batch))

def with_its_own_mesh(mesh):
    assert (jax.device_count(), len(jax.local_devices()), jax.default_backend()) == (16, 8, "gpu")
    one = Mesh(np.array(jax.devices()).reshape(2, 8), ("data", "fsdp"))
    other = jax.make_mesh((2, 8), ("data", "fsdp"), axis_types=mesh.axis_types)
    assert one.devices.shape == other.devices.shape == (2, 8)
    return make(one)

def too_small(mesh):
    return jax.make_mesh((4,), ("data",))

def broken(mesh):
    raise KeyError("layers")

def broken_step(mesh):
    def step(state, batch):
        return state @ batch

    return mk.Program(jax.jit(step), tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(4, 4), (3,)]))

def nothing(mesh):
    return 3

def real_arrays(mesh):
    return jax.device_put(np.ones(16), NamedSharding(mesh, P("fsdp")))
"""
FILE = """
cluster = { name = "dgx_h100", hosts = 2 }

[mesh]
data = { infiniband = 2 }
fsdp = 8

[program]
make = "steps_of_a_user:make"

[train]
tokens_total = 81_920
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "steps_of_a_user.py").write_text(STEPS)
    (folder / "mine.toml").write_text(FILE)
    return folder / "mine.toml"


@pytest.fixture(scope="module")
def plan(file):
    return plan_experiment(load_any(file))


def test_it_is_planned_with_memory_flop_tokens_and_training(plan):
    report, weights = plan.report, 2 * 256 * 256 + 2 * 512 * 256
    assert report.memory.parameters_bytes == 4 * weights // 8
    assert report.step.model_flops == 6 * 64 * 128 * (2 * 256 * 256 + 512 * 256)
    assert report.training.steps == 10  # These are 81,920 tokens, 8,192 a step.
    assert {"steps_of_a_user.py" in (op.line or "") for row in report.communication for op in row.ops} == {True}


def test_a_step_may_make_its_mesh_of_jaxs_devices(file, plan):
    other = plan_experiment(load_any(file, ['program.make="steps_of_a_user:with_its_own_mesh"']))
    assert [r.model_dump(exclude={"ops"}) for r in other.report.communication] == [
        r.model_dump(exclude={"ops"}) for r in plan.report.communication
    ]
    import jax

    assert jax.device_count() == 8  # jax has this process's devices again.


def test_options_are_the_functions_and_latencies_those_of_the_plan(file, plan):
    report = plan_experiment(load_any(file, ["program.options.layers=4", 'train.pgle="table"'])).report
    assert {o.name: o.value for o in report.program.options}[TABLE_OPTION] == "predicted"
    assert report.memory.parameters_bytes == plan.report.memory.parameters_bytes + 2 * 4 * 256 * 256 // 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_small", r"\(4,\), \('data',\)\) needs 4 devices, but 16 are described \(steps_of_a_user.py:\d+\)"),
        ("broken", r"raised KeyError: 'layers' \(steps_of_a_user.py:\d+\)"),
        (
            "broken_step",
            r"the step that .*broken_step made raised TypeError: .* \(steps_of_a_user.py:\d+\)",
        ),
        ("nothing", "returned an int; it must return an mk.Program"),
        ("real_arrays", r"steps_of_a_user.py:\d+"),
        ("absent", "has no 'absent'"),
    ],
)
def test_what_make_does_wrong_is_said_at_its_key(file, name, message):
    with pytest.raises(mk.ConfigError, match=message):
        plan_experiment(load_any(file, [f'program.make="steps_of_a_user:{name}"']))


def test_explain_says_where_the_parameters_lie_and_why_it_communicates(file, capsys):
    assert cli.main(["explain", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(row["path"], tuple(map(tuple, row["spec"]))) for row in found["parameters"]} >= {
        ("0/table", (("fsdp",), ())),
        ("0/head", (("fsdp",), ())),
    }
    assert {row["explanation"] for row in found["collectives"]} != {None}


def test_rules_are_for_the_lint(file):
    rules = 'rules.override=[{path="**", spec=["replicated", "fsdp"]}]'
    plan = plan_experiment(load_any(file, [rules]))
    assert plan.lint is not None
    assert "placed_otherwise" in {finding.code for finding in plan.lint.findings}


def test_it_is_tuned_over_every_mesh_of_its_axes(file, tmp_path, capsys):
    options = ["--candidates", "2", "--jobs", "1", "--out", str(tmp_path / "t"), "--json"]
    assert cli.main(["tune", str(file), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compiled"] == 2
    winner = load_any(tmp_path / "t" / "winner.toml")
    assert winner.mesh.size == 16


def test_the_axes_that_may_have_a_size_and_the_options_to_try_are_the_users(file, tmp_path, capsys):
    vary = ["--vary", "program.options.layers=[4, 2]", "--axes", "fsdp", "--candidates", "3"]
    assert cli.main(["tune", str(file), *vary, "--jobs", "1", "--out", str(tmp_path / "t"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # These are its mesh, and fsdp of 16 in two orders, with two, three or four layers.
    assert (found["space"], found["compiled"]) == (
        6,
        3,
    )
    assert {"program.options.layers=4"} in [set(outcome["settings"]) for outcome in found["outcomes"]]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--vary", "train.steps=[1]"], "is not a list of values of an option"),
        (["--vary", "xla.xla_gpu_graph_level=3"], "is not a list of values of an option"),
        (["--axes", "tensor"], "the mesh has no axis 'tensor'"),
    ],
)
def test_what_cannot_be_searched_is_refused(file, option, message, tmp_path, capsys):
    assert cli.main(["tune", str(file), *option, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_it_is_planned_at_several_sizes_with_the_batch_that_it_makes(file, capsys):
    assert cli.main(["plan", str(file), "--sweep", "hosts=1,2", "--jobs", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["axis"], [p["global_batch"] for p in found["points"]]) == (
        "program",
        "data",
        [None, None],
    )
    assert [p["outcome"]["num_gpus"] for p in found["points"]] == [8, 16]
    assert found["points"][1]["efficiency"] < 1  # The batch of `make` stays the same.
    assert cli.main(["plan", str(file), "--sweep", "hosts=1,2", "--scaling", "weak"]) == 2
    assert "the batch at each size is what its function returns" in capsys.readouterr().err


@pytest.mark.slow
def test_options_of_xla_that_meshkit_would_derive_are_tried(file, capsys):
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    said = [f"xla.xla_gpu_{kind}_combine_threshold_bytes=1000" for kind in kinds]
    said += [f'xla.xla_gpu_pipeline_{kind}="COLLECTIVE_PIPELINING_MODE_ON"' for kind in kinds]
    said.append('train.pgle="table"')
    settings = [argument for one in said for argument in ("--set", one)]
    assert cli.main(["plan", str(file), "--options", "--jobs", "1", "--json", *settings]) == 0
    # Only options that the file does not set are tried.
    found = json.loads(capsys.readouterr().out)["program"]["alternatives"]
    assert sorted(change["settings"] for change in found) == [
        ['train.pgle="predicted"'],
        ["xla.xla_gpu_enable_while_loop_double_buffering=true"],
    ]


def test_doctor_topo_and_compare_know_it(file, plan, tmp_path, capsys):
    cli.main(["doctor", str(file), "--json"])
    (check,) = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["check"] == "experiment"]
    assert check["status"] == "ok"
    assert "steps_of_a_user:make has 0.4 M parameters" in check["message"]
    assert cli.main(["topo", "--check", str(file)]) == 3  # This machine has no GPUs.
    assert "differs from the cluster" in capsys.readouterr().err
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(plan.report.to_json())
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-if", "step.time_s > 1.01"]) == 0


def test_train_says_how_to_launch_a_script(file, capsys):
    assert cli.main(["train", str(file)]) == 2
    assert "meshkit launch local -- python train.py" in capsys.readouterr().err
