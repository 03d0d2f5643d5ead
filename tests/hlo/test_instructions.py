"""Test what is known of an instruction by name: its kind of work, its key, and its line in the user's source."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from meshkit.hlo.instructions import SourceLines, layer_of, read_instructions, short_line
from meshkit.hlo.proto import Fields
from tests.hlo_text import compiled_module, parse_hlo

HLO = Path(__file__).parent.parent / "data" / "hlo"
FILES = (
    "/usr/lib/python3.12/runpy.py",
    "/home/me/meshkit/models/llama.py",
    "/home/me/meshkit/meshkit/sharding/constrain.py",
    "/venv/lib/python3.12/site-packages/optax/_src/update.py",
    "/home/me/meshkit/models/layers.py",
    "/venv/lib/python3.12/site-packages/meshkit/compile/child.py",
)
LOCATIONS = ((1, 10), (2, 20), (3, 30), (4, 40), (5, 50), (5, 60), (6, 70))  # Each pair is a file and a line.
PARENTS = (0, 1, 2, 1, 3, 5, 1)


def lines(parents=PARENTS, locations=range(1, 8), files=FILES):
    """Return the source lines of tables of files (1), locations (3: file 1, line 3) and frames (4: location 1, 2)."""
    index: Fields = {
        1: [name.encode() for name in files],
        3: [bytes((8, file, 24, line)) for file, line in LOCATIONS],
        4: [bytes((8, location, 16, parent)) for location, parent in zip(locations, parents)],
    }
    return SourceLines(index)


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({15: [2]}, "models/llama.py:20"),
        ({15: [3]}, "models/llama.py:20"),  # The user's line calls it.
        ({15: [4]}, "_src/update.py:40"),  # No user's line is among the frames, so a library's innermost line stands.
        ({15: [7]}, None),  # A line of meshkit itself is no cause.
        ({3: [b"/x/meshkit/compile/child.py"], 4: [3]}, None),
        ({15: [6]}, "models/layers.py:60 from models/llama.py:20"),
        ({15: [9]}, None),
        ({}, None),
        ({3: [b"/x/y/z.py"], 4: [3]}, "y/z.py:3"),
        ({3: [b"/tmp/ipykernel_12/345.py"], 4: [3]}, "notebook:3"),
    ],
)
def test_lines_of_frames(metadata, line):
    assert lines().find(metadata) == line


def test_the_models_of_a_wheel_are_no_library():
    installed = [
        f.replace("/home/me/meshkit/models/", "/v/lib/python3.12/site-packages/meshkit/_shipped/models/") for f in FILES
    ]
    assert lines(files=installed).find({15: [6]}) == lines().find({15: [6]})


TRAINER = (
    "/home/me/my_steps.py",
    "/venv/lib/python3.12/site-packages/meshkit/planning/planner.py",
    "/venv/lib/python3.12/site-packages/maxtext/models/llama2.py",
    "/venv/lib/python3.12/site-packages/flax/nnx/module.py",
    "/venv/lib/python3.12/site-packages/maxtext/layers/linears.py",
    "/venv/lib/python3.12/site-packages/jax/_src/lax/lax.py",
)


def test_an_installed_trainer_is_a_model_and_who_plans_it_is_not():
    assert lines(range(7), range(1, 8), TRAINER).find({15: [7]}) == "layers/linears.py:60 from models/llama2.py:30"


def test_the_users_own_file_led_to_an_installed_layer():
    files = ("/usr/lib/python3.12/runpy.py", TRAINER[0], *TRAINER[2:])
    assert lines(range(7), range(1, 8), files).find({15: [6]}) == "layers/linears.py:60 from me/my_steps.py:20"


def test_a_line_that_everything_comes_through_is_a_wrappers():
    """Two layers of a trainer come from one line of the user's: `parents` makes two chains of it."""
    files = (TRAINER[0], TRAINER[2], TRAINER[4], TRAINER[2].replace("llama2", "gemma"))
    found = lines((0, 1, 2, 1), (1, 2, 3, 4), files)
    assert [found.find({15: [n]}) for n in (3, 4)] == [
        "layers/linears.py:30 from models/llama2.py:20",
        "models/gemma.py:40",
    ]


def test_frames_that_call_each_other_end():
    assert lines(parents=(0, 4, 2, 2, 3, 5), locations=(1, 1, 3, 4, 5, 6)).find({15: [2]}) is not None


def model(x, w):
    with jax.named_scope("mlp"):
        y = x @ w
    y = jnp.sort(jnp.tanh(y) + 1.0, axis=-1)
    return (y[jnp.array([3, 1])] ** 2).sum(axis=1)


@pytest.fixture(scope="module")
def found():
    x, w = jnp.ones((64, 32)), jnp.ones((32, 128))
    compiled = jax.jit(model).lower(x, w).compile()
    return read_instructions(compiled_module(compiled))


def test_kinds_of_a_real_program(found):
    kinds = {info.kind for info in found.values()}
    assert {"matmul", "sort"} <= kinds
    assert kinds <= {
        "matmul", "sort", "gather and scatter", "reduction", "elementwise", "data movement", "custom call",
    }  # fmt: skip


def test_what_has_no_line_names_that_of_its_user():
    """XLA adds the gather of a parameter; its line is that of the call that used the parameter, if any."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, whole = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (("fsdp",), ()))
    step = jax.jit(model, in_shardings=(whole, cut), out_shardings=whole)
    compiled = step.lower(jnp.ones((64, 32)), jnp.ones((32, 128))).compile()
    found = read_instructions(compiled_module(compiled))
    gathered = [info.line for name, info in found.items() if name.startswith("all-gather")]
    _, first = inspect.getsourcelines(model)
    assert set(gathered) == {f"hlo/test_instructions.py:{first + 2}"}


def test_a_matmul_names_its_line(found):
    matmul = next(info for info in found.values() if info.kind == "matmul")
    first = inspect.getsourcelines(model)[1]
    assert matmul.line == f"hlo/test_instructions.py:{first + 2}"
    assert "mlp" in matmul.source
    assert matmul.key.startswith("matmul|f32[64,128]|")


def test_keys_are_unique_and_survive_a_recompile(found):
    keys = [info.key for info in found.values()]
    assert len(set(keys)) == len(keys)
    x, w = jnp.ones((64, 32)), jnp.ones((32, 128))
    again = jax.jit(lambda x, w: model(x, w)).lower(x, w).compile()
    other = read_instructions(compiled_module(again))
    matmuls = [{i.key.split("|", 2)[1] for i in side.values() if i.kind == "matmul"} for side in (found, other)]
    assert matmuls[0] == matmuls[1]


def test_a_combined_collective_has_the_causes_of_its_arrays():
    found = read_instructions(parse_hlo((HLO / "combined.hlo").read_text()))
    reduced, gather = found["reduced"], found["gather"]
    assert (reduced.arrays, gather.arrays, found["dq"].arrays) == (3, 2, 1)
    assert reduced.causes == {
        "attention models/llama.py:88": 4096 * 4,  # The causes are those that make each operand.
        "params['up']": 4096 * 4,
        "mlp models/llama.py:116": 64 * 4,
    }
    used = "layers/mlp models/llama.py:119"
    # The causes are those that take each array, also in the loop.
    assert gather.causes == {"embed models/llama.py:20": 256, used: 256}
    # The causes take it in the loop's next iteration.
    assert found["ahead"].causes == {used: 256, "layers/attention models/llama.py:104": 256}


@pytest.mark.parametrize(
    ("source", "layer"),
    [
        ("jit(f)/transpose(jvp(Net))/while/body/checkpoint/rematted_computation/mlp/dot_general", "Net/mlp"),
        ("jit(f)/jvp(Net)/(head/transpose:while/body/closed_call/mlp/dot_general)", "Net/head, Net/mlp"),
        ("jit(step)/jvp(layers)/mlp/jit(silu)/add_any", "layers/mlp"),
        ("jit(step)/attention/shard_map/bqhd,bkhd->bhqk/dot_general", "attention"),  # An einsum's scope is no module.
        # This is the scope of an nnx program.
        ("jit(step)/jit(train)/transpose(jvp())/while/body/closed_call/dot_general", ""),
        ("params['up']", ""),
    ],
)
def test_a_layer_is_the_scopes_of_modules(source, layer):
    assert layer_of(source) == layer


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("models/layers.py:9 from models/llama.py:12", "models/llama.py:12"),  # The second line says which layer it is.
        # The trainer's line says nothing about the layer.
        ("llama3/model.py:481 from sft/peft_trainer.py:842", "llama3/model.py:481"),
        ("train.py:3", "train.py:3"),
        ("", ""),
    ],
)
def test_where_there_is_room_for_one_line_the_one_that_says_more_stands(line, short):
    assert short_line(line) == short
