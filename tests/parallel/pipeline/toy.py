"""Build a toy model for pipelines: embedding, gated residual layers with dropout and a load loss, tied or own head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from meshkit.parallel.pipeline import Functions, StageOutput, make_pipeline, scan_layers, vocabulary

EMBED, MLP, VOCAB, BATCH, LENGTH = 16, 32, 48, 4, 6
P = PartitionSpec


def make_mesh(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def compiled(fn, *args):
    """Return fn(*args), compiled without LLVM's optimizations, which would take most of the time."""
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fn).lower(*args).compile(options)(*args)


def make_params(layers, *, tied=False, dtype=np.float32):
    random = np.random.default_rng(1)

    def normal(*shape, scale=1.0, mean=0.0):
        return (mean + scale * random.standard_normal(shape)).astype(dtype)

    stages = {
        "down": normal(layers, MLP, EMBED, scale=MLP**-0.5),
        "norm": normal(layers, EMBED, scale=0.1, mean=1.0),
        "up": normal(layers, EMBED, MLP, scale=EMBED**-0.5),
    }
    outer = {"norm": normal(EMBED, scale=0.1, mean=1.0), "table": normal(VOCAB, EMBED)}
    if not tied:
        outer["head"] = normal(VOCAB, EMBED, scale=EMBED**-0.5)
    return {"stages": stages, "outer": outer}


def make_batch(microbatches, batch=BATCH):
    random = np.random.default_rng(0)
    shape = (microbatches, batch, LENGTH)
    # The weights differ between microbatches and shards, so that a mean of means would be wrong.
    mask = (random.random(shape) < np.linspace(0.3, 1, microbatches * batch).reshape(microbatches, batch, 1)) * 1.0
    return {
        "mask": mask.astype(np.float32),
        "targets": random.integers(0, VOCAB, shape, np.int32),
        "tokens": random.integers(0, VOCAB, shape, np.int32),
    }


def layer(params, x, key, rate=0.0, aux=False, hidden=lambda h: h):
    n = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * params["norm"]
    h = jax.nn.gelu(hidden(n @ params["up"]))
    y = h @ params["down"]
    if rate and key is not None:
        y = jnp.where(_kept(key, y.shape, rate), y / (1 - rate), 0)
    if aux:
        load = jnp.square(h.mean((0, 1))).sum() * x.shape[0]
        return StageOutput(x + y, 0.1 * load, {"load": load})
    return x + y


def _kept(key, shape, rate):
    """Return a dropout mask from a hash (murmur3's last mix) of key and place.

    It compiles faster than `jax.random.bernoulli`.
    """
    bits = jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape) ^ jax.random.key_data(key)[1]
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        bits = (bits ^ (bits >> 15)) * jnp.uint32(factor)
    return (bits ^ (bits >> 16)) >= jnp.uint32(rate * 2**32)


def score(outer, y, batch, logits):
    n = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * outer["norm"]
    nll = logits(n, outer.get("head", outer["table"]), batch["targets"])
    right = (nll < 1.0).mean()
    return (nll * batch["mask"]).sum(), batch["mask"].sum(), {"right": right}


def plain_logits(n, head, targets):
    logits = n @ head.T
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def reference(params, batch, rng=None, *, layers, rate=0.0, aux=False, shards=1):
    """Return loss and metrics without a pipeline: every layer of every shard of every microbatch in series."""
    pieces = jax.tree.map(lambda a: jnp.reshape(a, (a.shape[0] * shards, -1, *a.shape[2:])), batch)

    def one(inputs):
        i, piece = inputs

        def run(x, inputs):
            j, weights = inputs
            key = None
            if rng is not None:
                key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(rng, i // shards), i % shards), j)
            out = layer(weights, x, key, rate, aux)
            return (out.x, (out.loss_sum, out.metrics)) if aux else (out, (0.0, {}))

        x = params["outer"]["table"][piece["tokens"]]
        x, (more, stage_metrics) = lax.scan(run, x, (jnp.arange(layers), params["stages"]))
        loss_sum, weight, metrics = score(params["outer"], x, piece, plain_logits)
        return loss_sum + more.sum(), weight, metrics | jax.tree.map(lambda m: m.sum(0), stage_metrics)

    count = jax.tree.leaves(pieces)[0].shape[0]
    loss_sum, weight, metrics = lax.map(one, (jnp.arange(count), pieces))
    return loss_sum.sum() / weight.sum(), jax.tree.map(lambda m: m.mean(0), metrics)


def build(
    mesh, layers, *, head="replicated", rate=0.0, aux=False, data=(), tensor=None, fsdp=None, tied=False, **options
):
    """Return the toy model as a Pipeline on a mesh with axis `pipeline`."""
    hidden = lambda h: h
    if tensor:
        hidden = lambda h: lax.with_sharding_constraint(
            h, jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), P(None, None, tensor))
        )

    def stage_fn(params, x, ctx):
        return scan_layers(lambda p, x, key: layer(p, x, key, rate, aux, hidden), params, x, ctx)

    def first_fn(outer, batch, ctx):
        if head == "vocab_parallel":
            return vocabulary.lookup(outer["table"], batch["tokens"], ctx.axis)
        return outer["table"][batch["tokens"]]

    def loss_fn(outer, y, batch, ctx):
        def logits(n, head_table, targets):
            if head == "vocab_parallel":
                return vocabulary.cross_entropy(n @ head_table.T, targets, ctx.axis)
            return plain_logits(n, head_table, targets)

        return score(outer, y, batch, logits)

    rows = "pipeline" if head == "vocab_parallel" else None
    outer = {"norm": P(), "table": P(rows, fsdp)} | ({} if tied else {"head": P(rows, fsdp)})
    specs = {
        "stages": {
            "down": P("pipeline", tensor, fsdp),
            "norm": P("pipeline"),
            "up": P("pipeline", fsdp, tensor),
        },
        "outer": outer,
    }
    return make_pipeline(
        Functions(first_fn, stage_fn, loss_fn),
        mesh=mesh,
        layers=layers,
        batch_spec=P(None, data) if data else P(),
        specs=specs,
        head=head,
        **options,
    )
