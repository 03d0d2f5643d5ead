"""Instructions by name: kind of work, key, and the line of the user's source."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from meshkit.hlo.instructions import StackFrames, read_instructions

TABLES = """HloModule m

FileNames
1 "/usr/lib/python3.12/runpy.py"
2 "/home/me/meshkit/models/llama.py"
3 "/home/me/meshkit/meshkit/sharding/constrain.py"
4 "/venv/lib/python3.12/site-packages/optax/_src/update.py"
5 "/home/me/meshkit/models/layers.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=30 end_line=30 column=1 end_column=2}
4 {file_name_id=4 function_name_id=1 line=40 end_line=40 column=1 end_column=2}
5 {file_name_id=5 function_name_id=1 line=50 end_line=50 column=1 end_column=2}
6 {file_name_id=5 function_name_id=1 line=60 end_line=60 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}
5 {file_location_id=5 parent_frame_id=4}
6 {file_location_id=6 parent_frame_id=6}

%x = f32[] parameter(0)
"""


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        ("%a = f32[] add(), metadata={stack_frame_id=2}", "models/llama.py:20"),
        ("%a = f32[] add(), metadata={stack_frame_id=3}", "models/llama.py:20"),  # called by the user's line
        ("%a = f32[] add(), metadata={stack_frame_id=4}", "_src/update.py:40"),  # nobody's line: the innermost
        ("%a = f32[] add(), metadata={stack_frame_id=6}", "models/layers.py:60 from models/llama.py:20"),
        ("%a = f32[] add(), metadata={stack_frame_id=9}", None),
        ("%a = f32[] add()", None),
        ('%a = f32[] add(), metadata={source_file="/x/y/z.py" source_line=3}', "y/z.py:3"),
    ],
)
def test_lines_of_printed_tables(printed, line):
    assert StackFrames(TABLES).of(printed) == line


def test_tables_that_name_no_parent_twice_end():
    text = TABLES.replace("2 {file_location_id=2 parent_frame_id=2}", "2 {file_location_id=1 parent_frame_id=4}")
    assert StackFrames(text).of("%a = f32[] add(), metadata={stack_frame_id=2}") is not None


def model(x, w):
    with jax.named_scope("mlp"):
        y = x @ w
    y = jnp.sort(jnp.tanh(y) + 1.0, axis=-1)
    return (y[jnp.array([3, 1])] ** 2).sum(axis=1)


@pytest.fixture(scope="module")
def found():
    x, w = jnp.ones((64, 32)), jnp.ones((32, 128))
    compiled = jax.jit(model).lower(x, w).compile()
    return read_instructions(compiled.runtime_executable().hlo_modules()[0])


def test_kinds_of_a_real_program(found):
    kinds = {info.kind for info in found.values()}
    assert {"matmul", "sort"} <= kinds
    assert kinds <= {
        "matmul", "sort", "gather and scatter", "reduction", "elementwise", "data movement", "custom call",
    }  # fmt: skip


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
    other = read_instructions(again.runtime_executable().hlo_modules()[0])
    matmuls = [{i.key.split("|", 2)[1] for i in side.values() if i.kind == "matmul"} for side in (found, other)]
    assert matmuls[0] == matmuls[1]
