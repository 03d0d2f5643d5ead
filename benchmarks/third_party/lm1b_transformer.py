"""Shard Flax's lm1b transformer (linen, named dims) 4 x 2 ways: `python THIS_FILE FLAX_CHECKOUT`."""

# ruff: noqa: E401, E402, I001
import sys, jax, meshkit as mk
from compare import cross_entropy, report

sys.path.insert(0, f"{sys.argv[1]}/examples/lm1b")
mk.prepare_platform(cluster := mk.Cluster.load("cpu8"))
from models import TransformerConfig, TransformerLM

mesh = mk.build_mesh(mk.MeshSpec.parse({"fsdp": 4, "tensor": 2}), cluster)
heads = [("**/out/kernel", ("tensor", None, "fsdp")), ("**/Multi*/*/kernel", ("fsdp", "tensor", None))]
rules = mk.ShardingRules({"embed": "fsdp", "mlp": "tensor", "vocab": "tensor"}, overrides=heads)
model = TransformerLM(TransformerConfig(8192, 8192, num_layers=2, deterministic=True))
tokens = jax.random.randint(jax.random.key(1), (16, 32), 1, 8192)
init = lambda: model.init(jax.random.key(0), tokens)
step = jax.jit(jax.value_and_grad(lambda v, x: cross_entropy(model.apply(v, x), x)))
whole, cut = jax.jit(init)(), jax.jit(init, out_shardings=mk.shardings(jax.eval_shape(init), mesh, rules))()
report(whole, cut, step(whole, tokens), step(cut, jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("fsdp")))))
