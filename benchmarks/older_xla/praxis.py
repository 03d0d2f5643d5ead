"""A step of GPT 5B as praxis and paxml write it, by the XLA of the Python that runs this: `PYTHON praxis.py FOLDER`.

Written after their sources (google/praxis of 15 April 2024 with JAX-Toolbox's patch PR-27, google/paxml@7241216),
without dropout. Where no Transformer Engine is, does XLA's rewriter match attention with cuDNN? FOLDER/request.json
has XLA's flags; the scheduled program becomes scheduled.pb.
"""

import json
import os
import sys
from pathlib import Path

LAYERS, WIDTH, HEADS, DEPTH, MLP, VOCAB, LENGTH, SEQUENCES = 24, 4096, 32, 128, 16384, 51200, 2048, 8
SHAPES = {
    **dict.fromkeys(("bias1", "bias2", "bo", "bf2", "scale1", "scale2"), (WIDTH,)),
    "bqkv": (3, HEADS, DEPTH),
    "bf1": (MLP,),
    "qkv": (3, WIDTH, HEADS, DEPTH),
    "o": (WIDTH, HEADS, DEPTH),
    "f1": (WIDTH, MLP),
    "f2": (MLP, WIDTH),
}
CUT = {"qkv": (None, None, "data"), "o": (None, "data"), "f1": (None, "data"), "f2": (None, None, "data")}
TOP = {
    "table": ((VOCAB, WIDTH), (None, "data")),
    "positions": ((LENGTH, WIDTH), (None, "data")),
    "scale": ((WIDTH,), ()),
    "bias": ((WIDTH,), ()),
}


def main(folder):
    """Compiles; the scheduled program becomes scheduled.pb."""
    dump = folder / "dump"
    dump.mkdir(exist_ok=True)
    for file in dump.iterdir():
        file.unlink()
    flags = json.loads((folder / "request.json").read_text())["flags"]
    given = [
        f"--xla_dump_to={dump}",
        "--xla_dump_hlo_as_proto",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    os.environ["XLA_FLAGS"] = " ".join(given)
    compile_step()
    (found,) = dump.glob("*after_optimizations.hlo.pb")
    (folder / "scheduled.pb").write_bytes(found.read_bytes())
    os._exit(0)  # nothing to release on GPUs that are not there


def compile_step():
    """Lowers and compiles the step for every GPU that the driver shows."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_compilation_cache", False)
    devices = np.array(jax.devices("cuda"))
    mesh = Mesh(devices, ("data",))
    batch = SEQUENCES * len(devices)

    def placed(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    def act(x):
        return jax.lax.with_sharding_constraint(x, placed("data", *[None] * (x.ndim - 1)))

    def least(dtype):
        return jnp.asarray(-0.7 * float(jnp.finfo(dtype).max), dtype)

    def norm(x, scale, bias):
        y = x.astype(jnp.float32)
        mean = y.mean(-1, keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(jnp.square(y - mean).mean(-1, keepdims=True) + 1e-5)
        return y.astype(x.dtype) * (1 + scale) + bias

    def layer(x, w, padding):
        x = act(x)
        row, column = jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)[None]
        causal = ((row < column).astype(x.dtype) * least(x.dtype))[None, None]
        keys = padding[:, None, None, :] * least(x.dtype)
        mask = jnp.minimum(jnp.minimum(keys.transpose(0, 1, 3, 2), keys), causal)
        h = norm(x, w["scale1"], w["bias1"])
        q, k, v = (act(t) for t in jnp.einsum("btd,kdnh->kbtnh", h, w["qkv"]) + w["bqkv"][:, None, None])
        logits = jnp.einsum("btnh,bsnh->bnts", q * jnp.asarray(DEPTH**-0.5, q.dtype), k).astype(jnp.float32)
        shares = jax.nn.softmax(logits + mask.astype(jnp.float32), axis=-1).astype(k.dtype)
        mixed = act(jnp.einsum("bnts,bsnh->btnh", shares, v))
        x = act(act(jnp.einsum("btnh,dnh->btd", mixed, w["o"]) + w["bo"]) + x)
        h = norm(x, w["scale2"], w["bias2"])
        f = jax.nn.gelu(act(jnp.einsum("btd,df->btf", h, w["f1"]) + w["bf1"]), approximate=True)
        return act(act(jnp.einsum("btf,fd->btd", f, w["f2"]) + w["bf2"]) + x)

    def loss(weights, tokens, labels, padding):
        w = jax.tree_util.tree_map(lambda a: a.astype(jnp.bfloat16), weights)
        x = act(jax.nn.one_hot(tokens, VOCAB, dtype=jnp.bfloat16) @ w["table"]) + w["positions"]
        # SAVE_DOT_WITH_NO_BATCH_DIM
        saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        kept = jax.checkpoint(layer, policy=saved, prevent_cse=False)
        x, _ = jax.lax.scan(lambda x, one: (kept(x, one, padding.astype(x.dtype)), None), act(x), w["layers"])
        logits = act(jnp.einsum("btd,vd->btv", norm(x, w["scale"], w["bias"]), w["table"])).astype(jnp.float32)
        right = (logits * jax.nn.one_hot(labels, VOCAB, dtype=jnp.float32)).sum(-1)
        counted = 1 - padding
        return ((jax.nn.logsumexp(logits, -1) - right) * counted).sum() / counted.sum()

    def step(weights, mean, square, *batch):
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        leaves = jax.tree_util.tree_leaves(gradients)
        clip = jnp.minimum(1.0, jax.lax.rsqrt(sum(jnp.sum(jnp.square(g)) for g in leaves)))
        tree = jax.tree_util.tree_map
        mean = tree(lambda m, g: 0.9 * m + 0.1 * clip * g, mean, gradients)
        square = tree(lambda s, g: 0.95 * s + 0.05 * jnp.square(clip * g), square, gradients)
        weights = tree(lambda w, m, s: w - 1e-4 * (m / (jnp.sqrt(s) + 1e-8) + 0.1 * w), weights, mean, square)
        return weights, mean, square, value

    def of(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed(*spec))

    layers = {k: of((LAYERS, *s), jnp.float32, *CUT.get(k, ())) for k, s in SHAPES.items()}
    weights = {"layers": layers, **{k: of(s, jnp.float32, *cut) for k, (s, cut) in TOP.items()}}
    where = jax.tree_util.tree_map(lambda a: a.sharding, weights)
    tokens = of((batch, LENGTH), jnp.int32, "data")
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=(where, where, where, placed()))
    jitted.lower(weights, weights, weights, tokens, tokens, of((batch, LENGTH), jnp.float32, "data")).compile()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
