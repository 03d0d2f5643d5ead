"""Test that a fault of the user's model, loss or data is one ConfigError at its key, with the user's line."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from meshkit.config.experiment import load
from meshkit.config.sections import ModelTable
from meshkit.errors import ConfigError, RunError
from meshkit.planning.resolved import find_tokenizer, make_train_step, resolve
from meshkit.sharding import build_mesh
from meshkit.step.data import Batches, abstract_batch, check_tokens, open_data
from meshkit.step.state import describe_model

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
HEAD = """
import jax.numpy as jnp
import numpy as np
from flax import nnx
from meshkit.step.loss import next_token
from models.layers import Projection

class Base(nnx.Module):
    def __init__(self, *, rngs):
        self.table = nnx.Param(jnp.ones((256, 4)), out_sharding=(None, None), eager_sharding=False)
        self.out = nnx.Param(jnp.ones((4, 256)), out_sharding=(None, None), eager_sharding=False)
    def __call__(self, tokens):
        return self.table.get_value()[tokens] @ self.out.get_value()

class Rows:
    def __init__(self, row, count=8): self.row, self.count = row, count
    def __len__(self): return self.count
    def __getitem__(self, index): return self.row
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Yield a function that writes `own.py`, which can be imported as long as the test runs."""
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("own", None)

    def write(source, head=HEAD):
        (tmp_path / "own.py").write_text(head + textwrap.dedent(source))

    yield write
    sys.modules.pop("own", None)


def experiment(*overrides, model="own:Model", **options):
    spec = load(EXPERIMENT, ["train.global_batch=8", "train.sequence_length=16", "train.remat=none", *overrides])
    return dataclasses.replace(spec, model=ModelTable.model_construct(class_path=model, **options))


def data_of(spec):
    return open_data(resolve(spec), find_tokenizer(spec))


def trace(spec):
    """Trace the step without compiling it."""
    program = make_train_step(spec, build_mesh(spec.mesh, spec.cluster))
    return jax.eval_shape(program.step, program.abstract_state, program.abstract_batch)


def one_error(call, message, key):
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert caught.value.at is not None
    assert key in caught.value.at


def class_of(init, call="return Base.__call__(self, tokens)", signature="self, *, rngs"):
    return f"""
class Model(Base):
    def __init__({signature}):
        Base.__init__(self, rngs=nnx.Rngs(0))
        {init}
    def __call__(self, tokens):
        {call}
"""


def test_a_model_of_ones_own_traces(write):
    write(class_of("pass"))
    assert "loss" in trace(experiment())[1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0", r"importing 'own' raised ZeroDivisionError: division by zero \(own.py:2\)"),
        ("\ndef broken(:", r"importing 'own' raised SyntaxError: .*\(own.py:3\)"),
        ("from flax import nothing", r"importing 'own' raised ImportError: .*\(own.py:2\)"),
        ("import nothing_of_the_kind", r"importing 'own' failed: ModuleNotFoundError: .*\(own.py:2\)"),
        ("raise SystemExit(3)", r"importing 'own' raised SystemExit: 3 \(own.py:2\)"),
    ],
)
def test_a_module_that_cannot_be_imported(write, source, message):
    write(source, head="\n")
    one_error(lambda: trace(experiment()), message, "class")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Network(nnx.Module): pass", "'own' has no 'Model'(.|\n)*own:Network"),
        ("Model = 3", "own:Model is an int, not a class"),
        ("def Model(*, rngs): return 3", "own:Model is not a model, nor a function that says that it returns one"),
        ("def Model(*, rngs) -> int: return 3", "own:Model is not a model, nor a function that says"),
        (
            "def Model(*, rngs) -> 'nnx.Module | None': return None",
            "own:Model is not a model, nor a function that says",
        ),
        ("def Model(*, rngs) -> 'Missing': return 3", "own:Model is not a model, nor a function that says"),
        ("def Model(*, rngs) -> 'nnx.Module': return 3", "own:Model makes an int, which is not a flax.nnx.Module"),
        ("from os import system as Model", "own:Model is not a model, nor a function that says that it returns one"),
        ("class Model:\n    pass", "own:Model is a class that is not a flax.nnx.Module"),
        (class_of("pass", signature="self"), "own:Model takes no `rngs`"),
        (class_of("pass", signature="self, width, *, rngs"), "own:Model needs the option 'width'"),
        (class_of("{}['a']"), r"own:Model raised KeyError: 'a' \(own.py:\d+\)"),
        (class_of("raise SystemExit(1)"), r"own:Model raised SystemExit: 1 \(own.py:\d+\)"),
        (class_of("raise ValueError('no')"), r"Model refuses its options: no \(own.py:\d+\)"),
        (class_of("nnx.MultiHeadAttention(3, 8, rngs=rngs)"), r"own:Model raised ValueError: .*\(own.py:\d+\)"),
        (class_of("jnp.ones(3) @ jnp.ones(4)"), r"own:Model raised TypeError: .*\(own.py:\d+\)"),
        (class_of("pass", "1 / 0"), r"forward pass of own:Model raised ZeroDivisionError: .*\(own.py:\d+\)"),
        (class_of("pass", "return tokens"), r"own:Model gives an array \[.*16\] for tokens"),
        (class_of("pass", "return None"), "own:Model gives NoneType for tokens"),
        (class_of("pass") + "    def matmul_parameters(self): return 'x'", "matmul_parameters .* raised ValueError"),
    ],
)
def test_a_model_that_is_wrong(write, source, message):
    write(source)
    one_error(lambda: trace(experiment()), message, "model" if "option" in message else "class")


GOOD = "s, w, m = next_token(model, batch, rng); "


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GOOD + "return s", r"returned an array float32\[\], not three values"),
        (GOOD + "return s, w", "returned 2 values, not three"),
        ("return None", "returned None, not three values"),
        (GOOD + "return jnp.ones(3), w, m", r"array float32\[3\] as loss_sum"),
        (GOOD + "return 3, w, m", "returned an int as loss_sum"),
        (GOOD + "return s, jnp.ones(2), m", r"float32\[2\] as weight"),
        (GOOD + "return s, w, None", "returned None as metrics"),
        (GOOD + "return s, w, {'a': jnp.ones(2)}", r"float32\[2\] as metric 'a'"),
        (GOOD + "return s, w, {'a': 'b'}", "returned a str as metric 'a'"),
        (GOOD + "return s, w, {'step': s}", "'step', which meshkit writes itself"),
        (GOOD + "return s, w, {'evaluation_loss': s}", "'evaluation_loss', which meshkit writes itself"),
        ("return batch['words']", r"own:loss raised KeyError: 'words' \(own.py:\d+\)"),
        ("raise SystemExit", r"own:loss raised SystemExit \(own.py:\d+\)"),
    ],
)
def test_a_loss_that_is_wrong(write, body, message):
    write(class_of("pass") + f"def loss(model, batch, rng): {body}")
    one_error(lambda: trace(experiment("train.loss=own:loss")), message, "train.loss")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("loss = 3", "is an int, not a function"),
        ("def loss(model): pass", "own:loss raised TypeError"),
        ("from os import system as loss", "own:loss belongs to Python itself; it is not a function of yours"),
        ("from subprocess import run as loss", "own:loss belongs to Python itself; it is not a function of yours"),
        ("import functools, os; loss = functools.partial(os.system, 'true')", "own:loss belongs to Python itself"),
        ("import operator; loss = operator.itemgetter(0)", "own:loss belongs to Python itself"),
        ("loss = dict", "own:loss belongs to Python itself"),
    ],
)
def test_a_loss_that_cannot_be_called(write, source, message):
    write(class_of("pass") + source)
    one_error(lambda: trace(experiment("train.loss=own:loss")), message, "train.loss")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("examples = 3", "is an int, not a function"),
        ("def examples(): pass", "own:examples raised TypeError"),
        ("def examples(*, seed, experiment): 1 / 0", r"own:examples raised ZeroDivisionError: .*\(own.py:\d+\)"),
        ("def examples(*, seed, experiment): return 3", "gave a int: it must return a sequence"),
        ("def examples(*, seed, experiment): return []", "gave no examples"),
        ("def examples(*, seed, experiment): return [1, 2]", "example 0 of own:examples is an int"),
        ("def examples(*, seed, experiment): return [[1], [2]]", "example 0 of own:examples is a list"),
        ("def examples(*, seed, experiment): return [{}]", "is a dict with keys"),
        ("def examples(*, seed, experiment): return [{'x': 'y'}]", "not an array of numbers"),
        ("def examples(*, seed, experiment): return [{'x': [1]}, {'x': [1, 2]}]", "the first example"),
        ("def examples(*, seed, experiment): return {1: 2}", "raised KeyError: 0"),
    ],
)
def test_a_source_that_is_wrong(write, source, message):
    write(class_of("pass") + source)
    spec = experiment("data.source=own:examples")
    one_error(lambda: data_of(spec), message, "data.source")
    one_error(lambda: trace(spec), message, "data.source")


def test_examples_without_tokens_need_a_loss(write):
    write(class_of("pass") + "def examples(*, seed, experiment): return Rows({'x': np.ones(3)})")
    one_error(lambda: trace(experiment("data.source=own:examples")), "needs tokens, targets, weights", "train.loss")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", r"the data of step 1 raised ZeroDivisionError"),
        ("return {'y': np.ones(3)}", "the data of step 1 raised KeyError: 'x'"),
        ("return {'x': np.ones(4)}", r"step 1 has an example whose 'x' is \[4\], not \[3\]"),
    ],
)
def test_a_source_that_fails_mid_run_is_a_run_error(body, message):
    class Failing:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            if 0 < index < 15:
                exec(f"def fail():\n    {body}", scope := {"np": np})
                return scope["fail"]()
            return {"x": np.ones(3)}

    spec = experiment(model="models.llama:Llama")
    mesh = build_mesh(spec.mesh, spec.cluster)
    like = abstract_batch(resolve(spec), mesh, spec.rules)["weights"]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batches = Batches(Failing(), {"x": jax.ShapeDtypeStruct((8, 3), like.dtype, sharding=sharding)}, 0)
    with pytest.raises(RunError, match=message):
        list(batches.iterate(0, 2))


@pytest.mark.parametrize(
    ("model", "option", "value", "message"),
    [
        ("models.llama:Llama", "layers", "x", "layers = 'x' must be a whole number of at least 1"),
        ("models.llama:Llama", "embed", "", "embed = '' must be"),
        ("models.llama:Llama", "kv_heads", [1, 2], r"kv_heads = \[1, 2\] must be"),
        ("models.llama:Llama", "heads", True, "heads = True must be"),
        ("models.llama:Llama", "norm_eps", -1, "norm_eps = -1 must be a positive number"),
        ("models.llama:Llama", "tied", 1, "tied = 1 must be true or false"),
        ("models.llama:Llama", "layer", 2, "no option 'layer'(.|\n)*try 'layers'"),
        (
            "models.llama:Llama",
            "kv_heads",
            3,
            "not a multiple of kv_heads = 3(.|\n)*try another model.kv_heads",
        ),
        ("models.llama:Llama", "context", "rings", "'rings' is not one of all_gather, ring, ulysses(.|\n)*try 'ring'"),
        ("models.llama:Llama", "remat", "ful", "'ful' is not one of none, full, dots(.|\n)*try 'full'"),
        ("models.gpt:GPT", "layer", 2, "no option 'layer'(.|\n)*try one of: "),
        ("models.mlp:MLP", "mlp", "x", "mlp = 'x' must be a whole number"),
        ("models.mlp:MLP", "layers", 2.0, "layers = 2.0 must be a whole number"),
    ],
)
def test_a_refused_option_is_told_at_its_key(model, option, value, message):
    one_error(lambda: trace(experiment(model=model, **{option: value})), message, f"model.{option}")


def test_a_whole_number_may_stand_for_a_float():
    trace(experiment(model="models.llama:Llama", rope_theta=4294967296))


@pytest.mark.parametrize("source", ["python-stdlib", "own:examples"])
def test_evaluation_needs_held_out_examples(write, source):
    write(class_of("pass") + "def examples(*, seed, experiment): return Rows({'x': np.ones(3)}, 1)")
    share = 0.0 if source == "python-stdlib" else 0.5
    overrides = [f"data.source={source}", f"data.validation_fraction={share}"]
    one_error(
        lambda: data_of(experiment("train.evaluate_every=1", *overrides)),
        "nothing is held out",
        "validation_fraction",
    )
    assert len(data_of(experiment("train.evaluate_every=0", *overrides)).train)


@pytest.mark.parametrize(("largest", "fits"), [(255, True), (256, False)])
def test_token_ids_beyond_the_vocab(tmp_path, largest, fits):
    np.array([*range(200), largest] * 9, np.uint16).tofile(tmp_path / "tokens.u16")
    spec = experiment(f"data.source={tmp_path / 'tokens.u16'}", "train.evaluate_every=0", model="models.llama:Llama")
    data = data_of(spec)
    model = describe_model(resolve(spec)).abstract_model()
    if fits:
        check_tokens(resolve(spec), data, model)
    else:
        one_error(lambda: check_tokens(resolve(spec), data, model), "token id 256, .* is 256", "data.source")
