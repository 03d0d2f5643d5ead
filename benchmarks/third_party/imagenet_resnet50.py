"""Shard Flax's ResNet-50 (linen, unnamed dims, batch norm) 8 ways: `python THIS_FILE FLAX_CHECKOUT`."""

# ruff: noqa: E401, E402, I001
import sys, jax, meshkit as mk
from compare import cross_entropy, report

sys.path.insert(0, f"{sys.argv[1]}/examples/imagenet")
mk.prepare_platform(cluster := mk.Cluster.load("cpu8"))
from models import ResNet50

mesh = mk.build_mesh(mk.MeshSpec.parse({"fsdp": 8}), cluster)
rules = mk.ShardingRules({}, auto={"axis": "fsdp", "min_bytes": 2**16})
model, images = ResNet50(num_classes=1000), jax.random.normal(jax.random.key(1), (16, 64, 64, 3))
init = lambda: model.init(jax.random.key(0), images)
apply = jax.vmap(lambda v, x: model.apply(v, x, mutable="batch_stats"), (None, 0), axis_name="batch")
loss = lambda p, v, x: (cross_entropy((out := apply(v | {"params": p}, x[None]))[0][0], jax.numpy.arange(16)), out[1])
step = jax.jit(lambda v, x: jax.value_and_grad(loss, has_aux=True)(v["params"], v, x))
whole, cut = jax.jit(init)(), jax.jit(init, out_shardings=mk.shardings(jax.eval_shape(init), mesh, rules))()
report(whole, cut, step(whole, images), step(cut, jax.device_put(images, jax.NamedSharding(mesh, jax.P("fsdp")))))
