"""Test linen modules in an experiment: names, batch statistics, dropout, train and eval, and errors of mistakes."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from rich.console import Console

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step, resolve
from meshkit.runs.metrics import read_metrics
from meshkit.sharding import build_mesh
from meshkit.sharding.resolve import placements
from meshkit.step.state import describe_model
from meshkit.verbs.train import trainer

EXPERIMENTS = Path(__file__).parents[2] / "configs" / "experiments"
SMALL = ["model.embed=32", "model.mlp=64", "model.heads=4", "model.head_dim=8", "train.global_batch=8",
         "model.max_length=16", "train.sequence_length=16", 'train.precision="fp32"']  # fmt: skip
OWN = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx

class Net(nn.Module):
    widths: tuple[int, ...] = (64,)
    dropout: float = 0.0
    @nn.compact
    def __call__(self, x, train):
        for width in self.widths:
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(width)(x)))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(8)(x)

class Streams(nn.Module):
    count: int
    @nn.compact
    def __call__(self, x, train):
        noise = sum(jax.random.normal(self.make_rng(f"stream{i}"), ()) for i in range(self.count))
        return nn.Dense(8)(x) + noise

class Flagged(nn.Module):
    deterministic: bool = True
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(8)(x))

class Linear(nnx.Module):
    def __init__(self, width, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
        self.up = nnx.Linear(8, width, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)
    def __call__(self, x):
        return self.down(self.up(x))

Wide = functools.partial(Net, widths=(128,))
made = Net()

def make_linen(depth) -> nn.Module:
    return Net(widths=(64,) * depth)

def make_nnx(width, rngs) -> "Linear":
    return Linear(width, rngs)

def make_without(width) -> nnx.Module | nn.Module:
    return Linear(width, nnx.Rngs(0))

def loss(model, batch, rng):
    error = model(batch["x"]) - batch["x"]
    return jnp.sum(error ** 2), jnp.float32(error.shape[0]), {}

def idle(model, batch, rng):
    return jnp.float32(0), jnp.float32(1), {}

class Rows:
    def __len__(self): return 256
    def __getitem__(self, i): return {"x": np.random.default_rng(int(i)).standard_normal(8, np.float32)}

def rows(*, seed, experiment):
    return Rows()
"""
FILE = """
cluster = "cpu8"
[model]
class = "own_linen:Net"
[mesh]
data = 2
fsdp = 4
[rules.logical]
act_batch = ["data", "fsdp"]
[rules.auto]
axis = "fsdp"
min_bytes = 1024
[train]
global_batch = 32
steps = 4
precision = "fp32"
loss = "own_linen:loss"
[data]
source = "own_linen:rows"
"""


@pytest.fixture
def own(tmp_path):
    """Yield a function that loads an experiment of models that know nothing of meshkit."""
    sys.modules.pop("own_linen", None)
    (tmp_path / "own_linen.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "own.toml").write_text(FILE)
    yield lambda *overrides: load(tmp_path / "own.toml", list(overrides))
    sys.modules.pop("own_linen", None)


def mesh_of(spec):
    return build_mesh(spec.mesh, spec.cluster)


def one_device(spec):
    rank = len(spec.mesh.shape)
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * rank), spec.mesh.axis_names, (AxisType.Auto,) * rank)


def placed(spec, part="params"):
    return {p.path: p for p in placements(getattr(describe_model(resolve(spec)), part), mesh_of(spec), spec.rules)}


def take_steps(spec, mesh, count=2):
    """Return the state after some steps on one batch, the losses, the program and the batch."""
    program = make_train_step(spec, mesh)
    state, random, losses = program.init(), np.random.default_rng(0), []
    tokens = {k: random.integers(0, 256, x.shape) for k, x in program.abstract_batch.items()}
    normal = {k: random.standard_normal(x.shape) for k, x in program.abstract_batch.items()}
    values = {k: (tokens if x.dtype == np.int32 else normal)[k] for k, x in program.abstract_batch.items()}
    batch = {k: jax.device_put(v.astype(program.abstract_batch[k].dtype), program.abstract_batch[k].sharding)
             for k, v in values.items()}  # fmt: skip
    for _ in range(count):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses, program, batch


def test_names_that_linen_gives_are_sharded_by_the_rules():
    found = placed(load(EXPERIMENTS / "linen_cpu.toml", SMALL))
    assert found["layers/attention/query/kernel"].logical_axes == ("layers", "embed", "heads", "head_dim")
    assert found["layers/attention/query/kernel"].spec == ((), ("fsdp",), ("tensor",), ())
    assert found["embedding"].spec == (("tensor",), ("fsdp",))
    assert all(p.rule == "logical" for p in found.values())


# Sums have K = 8 rows * 16 tokens = 128 terms at most, D = 28 in a row (7 matmuls a layer, 2 layers, both passes).
TOLERANCE = np.sqrt(28 * 128) * 2.0**-24


def test_the_shipped_decoder_shards_as_on_one_device():
    spec = load(EXPERIMENTS / "linen_cpu.toml", [*SMALL, "model.dropout=0.0"])
    results = []
    for mesh in (mesh_of(spec), one_device(spec)):
        program = make_train_step(spec, mesh)
        tokens = np.random.default_rng(0).integers(0, 256, (8, 17), np.int32)
        values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((8, 16), np.float32)}
        batch = {k: jax.device_put(v, program.abstract_batch[k].sharding) for k, v in values.items()}
        results.append(jax.tree.map(np.asarray, program.gradients(program.init(), batch)))
    (loss, gradients), (expected, wanted) = results
    assert float(loss) == pytest.approx(float(expected), rel=TOLERANCE)
    for g, w in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted)):
        assert np.abs(g - w).max() < TOLERANCE * np.abs(w).max()


def test_the_shipped_decoder_counts_its_own_flops():
    program = make_train_step(spec := load(EXPERIMENTS / "linen_cpu.toml", SMALL), mesh_of(spec))
    assert program.facts.flops_source == "model"
    assert program.facts.matmul_parameters == 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 256


@pytest.mark.usefixtures("programs_kept")
def test_training_resumes_bit_for_bit_with_statistics_and_random_streams(own, tmp_path):
    overrides = [
        "model.dropout=0.5",
        "checkpoint.every=2",
        "optimizer.schedule=constant",
        "train.replica_check_every=1",
    ]

    def run(name, steps):
        trainer.train(own(*overrides, f"train.steps={steps}"), tmp_path / name, console=Console(quiet=True))
        return [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]

    straight = run("straight", 4)
    run("resumed", 2)
    assert run("resumed", 4) == straight


def test_unnamed_parameters_are_cut_by_the_automatic_rule_and_overrides(own):
    found = placed(own())
    assert (found["Dense_0/kernel"].spec, found["Dense_0/kernel"].rule) == (((), ("fsdp",)), "auto")
    assert found["Dense_1/kernel"].spec == (("fsdp",), ())  # Of 64 x 8, the longer dim is sharded.
    assert found["Dense_0/bias"].spec == ((),)  # 256 bytes are not worth a gather.


def test_batch_statistics_are_carried_and_equal_those_of_one_device(own):
    spec = own()
    state, losses, program, batch = take_steps(spec, mesh_of(spec), 1)
    alone, expected, *_ = take_steps(spec, one_device(spec), 1)
    # In fp32, 4 sums one after the other (two layers, mean, variance) have at most 64 terms: sqrt(4 * 64) u = 1e-6.
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    statistics = state.variables["BatchNorm_0"]
    assert set(statistics) == {"mean", "var"}
    assert np.abs(statistics["mean"]).max() > 0
    for got, want in zip(jax.tree.leaves(statistics), jax.tree.leaves(alone.variables)):
        assert np.abs(np.asarray(got) - np.asarray(want)).max() <= 1e-6 * np.abs(want).max()
    assert len(jax.tree.leaves(state.variables)) == 2  # There is no dropout, so there are no random streams.
    # Evaluation reads the statistics instead of the batch's, which gives another loss, the same one twice.
    first, second = (float(program.evaluate(state, batch)["loss_sum"]) for _ in range(2))
    assert first == second
    assert first / 32 != pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.parametrize(
    "overrides", [["model.dropout=0.5"], ['model.class="own_linen:Flagged"']], ids=["call", "field"]
)
def test_dropout_draws_anew_in_training_and_is_off_in_evaluation(own, overrides):
    spec = own(*overrides, "optimizer.learning_rate=1e-12", "optimizer.weight_decay=0")
    state, losses, program, batch = take_steps(spec, mesh_of(spec))
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)
    first, second = (float(program.evaluate(state, batch)["loss_sum"]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("overrides", "parameters"),
    [
        (["model.widths=[32,32]"], {"Dense_0", "Dense_1", "Dense_2", "BatchNorm_0", "BatchNorm_1"}),
        (['model.class="own_linen:Wide"'], {"Dense_0", "Dense_1", "BatchNorm_0"}),
        (['model.class="own_linen:make_linen"', "model.depth=1"], {"Dense_0", "Dense_1", "BatchNorm_0"}),
        (['model.class="own_linen:make_nnx"', "model.width=16"], {"up", "down"}),
        (['model.class="own_linen:Linear"', "model.width=16"], {"up", "down"}),
    ],
    ids=["class", "partial", "function of linen", "function of nnx", "nnx with names"],
)
def test_any_kind_of_model_is_taken(own, overrides, parameters):
    assert {path.partition("/")[0] for path in placed(own(*overrides))} == parameters


def test_a_module_of_eight_random_streams_is_taken(own):
    assert placed(own('model.class="own_linen:Streams"', "model.count=8"))


@pytest.mark.parametrize(
    ("overrides", "message", "key"),
    [
        (["model.depth=3"], "Net takes no option 'depth'", "model.depth"),
        (['model.class="own_linen:make_linen"'], "needs the option 'depth'", "model"),
        (['model.class="own_linen:made"'], "a linen module already made", "model.class"),
        (['model.class="own_linen:make_without"', "model.width=8"], "takes no `rngs`", "model.class"),
        (['model.class="own_linen:rows"'], "nor a function that says that it returns one", "model.class"),
        (['train.loss="own_linen:idle"'], "idle never calls the model", "train.loss"),
        (["model.widths=3"], r"Net raised TypeError: 'int' object is not iterable \(own_linen.py:\d+\)", "model.class"),
        (["train.remat=full"], "takes no `remat` argument", "train.remat"),
        (
            ['model.class="own_linen:Streams"', "model.count=9"],
            "own_linen:Streams draws from more than 8 RNG streams",
            "model.class",
        ),
    ],
)
def test_mistakes_are_one_sentence_at_their_key(own, overrides, message, key):
    spec = own(*overrides)
    with pytest.raises(ConfigError, match=message) as caught:
        make_train_step(spec, mesh_of(spec))
    assert key in caught.value.at
