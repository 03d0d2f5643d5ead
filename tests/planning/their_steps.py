"""Make twelve training steps as people write them, without anything of meshkit, for test_their_steps.py.

Each function takes a mesh with the axes `data` and `fsdp` and returns a step, a function that makes its arguments, and
their PartitionSpecs. A step returns its new state and a loss; a step of nnx changes its modules and returns a loss.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, WIDTH, LAYERS, VOCAB, LENGTH = 16, 256, 3, 512, 32
ROWS, CUT = P(("data", "fsdp")), P("fsdp", None)
ADAM = optax.adam(1e-2)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 0.05


def updated(loss, params, moments, *batch, optimizer=ADAM):
    value, grads = jax.value_and_grad(loss)(params, *batch)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def with_moments(params, specs, optimizer=ADAM):
    """Return a state and its specs: moments lie where their parameters do."""
    moments = optimizer.init(params)
    placed = optax.tree.map_params(optimizer, lambda _, spec: spec, moments, specs, transform_non_params=lambda _: P())
    return (params, moments), (specs, placed)


def explicit_axes(mesh):
    """Return a step with explicit axes, in which every ambiguous matmul says where its result goes."""

    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(jnp.dot(x, jax.sharding.reshard(w, P()), out_sharding=ROWS))
        return jnp.mean(x**2)

    def arguments():
        params = {"layers": [normal(i, WIDTH, WIDTH) for i in range(LAYERS)]}
        return (params, ADAM.init(params)), {"x": normal(9, BATCH, WIDTH)}

    specs = jax.tree.map(lambda leaf: CUT if leaf.ndim else P(), jax.eval_shape(arguments)[0])

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        (params, moments), value = updated(loss, *state, batch["x"])
        return jax.tree.map(lambda a, s: jax.sharding.reshard(a, s), (params, moments), specs), value

    return step, arguments, (specs, {"x": ROWS})


def a_mesh_that_is_set(mesh):
    """Return a step with `jax.set_mesh` around it and bare PartitionSpecs inside."""

    def loss(params, tokens):
        x = jax.lax.with_sharding_constraint(params["table"][tokens], ROWS)
        x = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["w"]), ROWS)
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["table"].T, tokens).mean()

    params = {"table": normal(0, VOCAB, WIDTH), "w": normal(1, WIDTH, WIDTH)}
    state, specs = with_moments(params, {"table": CUT, "w": CUT})
    jax.set_mesh(mesh)
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["tokens"]), donate_argnums=0)
    tokens = jax.random.randint(jax.random.key(2), (BATCH, LENGTH), 0, VOCAB)
    return step, lambda: (state, {"tokens": tokens}), (specs, {"tokens": ROWS})


class Net(nnx.Module):
    def __init__(self, rngs):
        cut = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=cut, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=cut, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


def under_nnx_jit(mesh):
    """Return a step that changes modules and an optimizer in place."""

    @nnx.jit
    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def make():
        model = Net(nnx.Rngs(0))
        return (
            model,
            nnx.Optimizer(model, ADAM, wrt=nnx.Param),
            {k: normal(i, BATCH, WIDTH) for i, k in enumerate("xy")},
        )

    return step, make, (None, None, {"x": ROWS, "y": ROWS})


def linen_with_logical_rules(mesh):
    """Return a step with logical names in the module, a table of rules, and `logical_to_mesh_sharding`."""
    rules = (("embed", "fsdp"), ("mlp", None), ("batch", ("data", "fsdp")))

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            names = [
                nn.with_logical_partitioning(nn.initializers.lecun_normal(), n)
                for n in [("embed", "mlp"), ("mlp", "embed")]
            ]
            x = nn.with_logical_constraint(x, ("batch", None))
            return nn.Dense(WIDTH, kernel_init=names[1])(nn.relu(nn.Dense(2 * WIDTH, kernel_init=names[0])(x)))

    model = Block()

    def loss(params, x):
        with mesh, nn.logical_axis_rules(rules):
            return jnp.mean((model.apply({"params": params}, x) - x) ** 2)

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((BATCH, WIDTH)))["params"]
    specs = jax.tree.map(lambda s: s.spec, nn.logical_to_mesh_sharding(nn.get_partition_spec(shapes), mesh, rules))
    params = nn.meta.unbox(model.init(jax.random.key(0), jnp.zeros((BATCH, WIDTH))))["params"]
    state, specs = with_moments(params, specs)
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["x"]), donate_argnums=0)
    return step, lambda: (state, {"x": normal(9, BATCH, WIDTH)}), (specs, {"x": ROWS})


def scanned_layers(mesh):
    """Return a step whose layers are one loop body, recomputed in the backward pass."""

    def loss(params, x):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, params["w"])[0] ** 2)

    state, specs = with_moments({"w": normal(0, LAYERS, WIDTH, WIDTH)}, {"w": P(None, "fsdp", None)})
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["x"]), donate_argnums=0)
    return step, lambda: (state, {"x": normal(9, BATCH, WIDTH)}), (specs, {"x": ROWS})


def experts_by_vmap(mesh, *, constrained=True):
    """Return a step of a dense mixture: every expert sees every row, weighted by a softmax."""

    def loss(params, x):
        weights = jax.nn.softmax(x @ params["router"])
        out = jax.vmap(lambda w: jax.nn.relu(x @ w))(params["experts"])
        if constrained:
            out = jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P(None, ("data", "fsdp"), None)))
        return jnp.mean(jnp.einsum("be,ebd->bd", weights, out) ** 2)

    params = {"router": normal(0, WIDTH, 8), "experts": normal(1, 8, WIDTH, WIDTH)}
    state, specs = with_moments(params, {"router": P(), "experts": P("fsdp", None, None)})
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["x"]), donate_argnums=0)
    return step, lambda: (state, {"x": normal(9, BATCH, WIDTH)}), (specs, {"x": ROWS})


@custom_partitioning
def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _by_rows(mesh, shapes, result):
    where = NamedSharding(mesh, P(shapes[0].sharding.spec[0] if len(shapes[0].sharding.spec) else None, None))

    def local(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    return mesh, local, where, (where,)


normed.def_partition(
    partition=_by_rows, infer_sharding_from_operands=lambda m, s, r: _by_rows(m, s, r)[2], sharding_rule="i j -> i j"
)


@jax.custom_vjp
def norm(x):
    return normed(x)


norm.defvjp(lambda x: (normed(x), x), lambda x, g: (g / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)),))


def custom_partitioning_of_ones_own(mesh):
    """Return a step with an operation that says itself how it is sharded: by rows."""

    def loss(params, x):
        return jnp.mean(norm(x @ params["w"]) * x)

    state, specs = with_moments({"w": normal(0, WIDTH, WIDTH)}, {"w": CUT})
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["x"]), donate_argnums=0)
    return step, lambda: (state, {"x": normal(9, BATCH, WIDTH)}), (specs, {"x": ROWS})


def a_pallas_kernel(mesh, *, interpret):
    """Return a step with a kernel of its own in a `jax.shard_map` over the rows."""

    def kernel(x, y, out):
        out[...] = x[...] * jax.nn.sigmoid(y[...])

    def gated(x, y):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)(x, y)

    @jax.custom_vjp
    def gate(x, y):
        return jax.shard_map(gated, mesh=mesh, in_specs=(ROWS, ROWS), out_specs=ROWS, check_vma=False)(x, y)

    def backward(saved, g):
        x, y = saved
        s = jax.nn.sigmoid(y)
        return g * s, g * x * s * (1 - s)

    gate.defvjp(lambda x, y: (gate(x, y), (x, y)), backward)

    def loss(params, x):
        return jnp.mean(gate(x @ params["a"], x @ params["b"]) ** 2)

    params = {"a": normal(0, WIDTH, WIDTH), "b": normal(1, WIDTH, WIDTH)}
    state, specs = with_moments(params, {"a": CUT, "b": CUT})
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["x"]), donate_argnums=0)
    return step, lambda: (state, {"x": normal(9, BATCH, WIDTH)}), (specs, {"x": ROWS})


def a_ragged_dot(mesh):
    """Return a step whose rows are sorted by expert, each expert's weights for its own rows."""

    def loss(params, x, sizes):
        return jnp.mean(jax.lax.ragged_dot(x, params["experts"], sizes) ** 2)

    state, specs = with_moments({"experts": normal(0, 4, WIDTH, WIDTH)}, {"experts": P(None, "fsdp", None)})
    step = jax.jit(lambda state, batch: updated(loss, *state, batch["x"], batch["sizes"]), donate_argnums=0)
    batch = {"x": normal(9, BATCH, WIDTH), "sizes": jnp.array([4, 2, 7, 3], jnp.int32)}
    return step, lambda: (state, batch), (specs, {"x": P(), "sizes": P()})


def two_losses(mesh):
    """Return one step for a generator and a critic, each with an optimizer."""

    def critic_loss(critic, generator, z, x):
        return jnp.mean(jnp.tanh(z @ generator["g"]) @ critic["c"]) - jnp.mean(x @ critic["c"])

    def generator_loss(generator, critic, z):
        return -jnp.mean(jnp.tanh(z @ generator["g"]) @ critic["c"])

    generator, of_g = with_moments({"g": normal(0, WIDTH, WIDTH)}, {"g": CUT})
    critic, of_c = with_moments({"c": normal(1, WIDTH, WIDTH)}, {"c": CUT})

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        critic, one = updated(critic_loss, *state["critic"], state["generator"][0], batch["z"], batch["x"])
        generator, other = updated(generator_loss, *state["generator"], critic[0], batch["z"])
        return {"generator": generator, "critic": critic}, one + other

    batch = {k: normal(i, BATCH, WIDTH) for i, k in enumerate("xz")}
    specs = {"generator": of_g, "critic": of_c}, dict.fromkeys("xz", ROWS)
    return step, lambda: ({"generator": generator, "critic": critic}, batch), specs


def lora_with_frozen_weights(mesh):
    """Return a step that trains two narrow matrices and only reads the wide ones."""

    def loss(adapters, frozen, x):
        for i, w in enumerate(frozen["params"]["w"]):
            x = jnp.tanh(x @ w + x @ adapters["a"][i] @ adapters["b"][i])
        return jnp.mean(x**2)

    adapters = {"a": normal(0, LAYERS, WIDTH, 8), "b": normal(1, LAYERS, 8, WIDTH)}
    state, specs = with_moments(adapters, {"a": P(), "b": P()})
    frozen = {"params": {"w": normal(2, LAYERS, WIDTH, WIDTH)}}

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, frozen, batch):
        return updated(loss, *state, frozen, batch["x"])

    arguments = ({"params": state[0], "opt": state[1]}, frozen, {"x": normal(9, BATCH, WIDTH)})

    def named(state, frozen, batch):
        (params, moments), value = step((state["params"], state["opt"]), frozen, batch)
        return {"params": params, "opt": moments}, value

    placed = ({"params": specs[0], "opt": specs[1]}, {"params": {"w": P(None, "fsdp", None)}}, {"x": ROWS})
    return jax.jit(named, donate_argnums=0), lambda: arguments, placed


def a_diffusion_u_net(mesh):
    """Return a step of convolutions down and up, with a skip, and a loss on the noise."""

    def convolve(x, w, stride=1):
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(params, images, noise, time):
        noisy = images * (1 - time) + noise * time
        first = jax.nn.silu(convolve(noisy, params["in"]))
        low = jax.nn.silu(convolve(first, params["down"], 2))
        up = jax.image.resize(jax.nn.silu(convolve(low, params["middle"])), first.shape[:3] + low.shape[3:], "nearest")
        return jnp.mean((convolve(jnp.concatenate([first, up], -1), params["out"]) - noise) ** 2)

    widths = {"in": (8, 32), "down": (32, 64), "middle": (64, 64), "out": (96, 8)}
    params = {name: normal(i, 3, 3, *pair) for i, (name, pair) in enumerate(widths.items())}
    state, specs = with_moments(params, dict.fromkeys(widths, P(None, None, None, "fsdp")))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        return updated(loss, *state, batch["images"], batch["noise"], batch["time"])

    shape = (BATCH, 16, 16, 8)
    batch = {"images": normal(1, *shape), "noise": normal(2, *shape), "time": jnp.full((BATCH, 1, 1, 1), 0.3)}
    return step, lambda: (state, batch), (specs, dict.fromkeys(batch, ROWS))


STEPS = (
    explicit_axes,
    a_mesh_that_is_set,
    under_nnx_jit,
    linen_with_logical_rules,
    scanned_layers,
    experts_by_vmap,
    custom_partitioning_of_ones_own,
    a_pallas_kernel,
    a_ragged_dot,
    two_losses,
    lora_with_frozen_weights,
    a_diffusion_u_net,
)
