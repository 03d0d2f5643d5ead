"""Time Llama 3.2 1B in plain jax, as the floor under meshkit's own step: both run alternately on one GPU.

The model and its training follow models/llama.py and meshkit/step/train_step.py. They have the same parameters, loss,
clipping, schedule and AdamW, and fp32 weights that multiply in bf16. The outputs of projections and attention are kept
for the backward pass. Two things are left as jax does them by default: gradients of weights, and logits, are bf16,
where meshkit's are fp32. One case has them in fp32.

    python -m benchmarks.gpu.floor

prints what a plan says of each case; it needs no GPU.
"""

from __future__ import annotations

import functools
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import meshkit as mk
from benchmarks.gpu.verbs import DEBUG, LLAMA_1B, gpu_here
from meshkit.compile.attached import compile_step
from meshkit.compile.options import bytes_at_once, memory_of
from meshkit.config.experiment import Experiment, load
from meshkit.planning.planner import plan_experiment
from meshkit.planning.resolved import make_train_step
from meshkit.report.schema import Report
from meshkit.step.program import TrainProgram
from meshkit.verbs.rehearse.rehearsal import first_batch

Params = dict[str, Any]


@dataclass(frozen=True)
class Llama:
    """The model's sizes, and the ways of writing it that are timed."""

    vocab: int = 128_256
    embed: int = 2048
    mlp: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    theta: float = 500_000.0
    eps: float = 1e-5
    dtype: Any = jnp.bfloat16
    attention: Any = "cudnn"
    unrolled: bool = False
    """Whether layers are a Python loop instead of a scan."""
    cast_once: bool = False
    """Whether weights become bf16 before the first layer, instead of in each layer's forward and backward pass."""
    wide: bool = False
    """Whether logits and the gradients of weights are fp32, as meshkit's are."""


TOY = Llama(256, 128, 384, 2, 8, 4, 16, dtype=jnp.float32, attention="xla")


def init(c: Llama, key: jax.Array) -> Params:
    """Return random weights, stacked over layers."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    into = {"query": queries, "key": keys, "value": keys, "gate": c.mlp, "up": c.mlp}
    shapes = {name: (c.embed, n) for name, n in into.items()} | {"output": (queries, c.embed), "down": (c.mlp, c.embed)}
    each = jax.random.split(key, len(shapes) + 1)
    layers = {n: jax.random.normal(k, (c.layers, *s)) * s[0] ** -0.5 for k, (n, s) in zip(each, shapes.items())}
    layers |= {name: jnp.ones((c.layers, c.embed)) for name in ("attention_norm", "mlp_norm")}
    table = jax.random.normal(each[-1], (c.vocab, c.embed)) * c.embed**-0.5
    return {"embedding": table, "layers": layers, "norm": jnp.ones(c.embed)}


def norm(c: Llama, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return the RMSNorm of x, computed in fp32."""
    h = x.astype(jnp.float32)
    return (h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + c.eps) * scale).astype(x.dtype)


def rotate(c: Llama, x: jax.Array) -> jax.Array:
    """Return x of (batch, length, heads, head_dim) with rotary positions."""
    half = c.head_dim // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * c.theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def wide_matmul(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """Return x times a kernel, multiplied in the dtype of x.

    The product has the given dtype, and the kernel's gradient is fp32.
    """
    return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=dtype)


def _backward(dtype: Any, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    g = g.astype(x.dtype)
    return g @ kernel.astype(x.dtype).T, jnp.einsum("bli,blo->io", x, g, preferred_element_type=jnp.float32)


wide_matmul.defvjp(lambda x, kernel, dtype: (wide_matmul(x, kernel, dtype), (x, kernel)), _backward)


def matmul(c: Llama, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return x times a kernel; the product is kept for the backward pass."""
    return checkpoint_name(wide_matmul(x, kernel, x.dtype) if c.wide else x @ kernel.astype(x.dtype), "projection")


def block(c: Llama, x: jax.Array, p: Params) -> jax.Array:
    """Return the output of one layer."""
    split = lambda y: y.reshape(*y.shape[:2], -1, c.head_dim)
    h = norm(c, x, p["attention_norm"])
    q, k, v = (split(matmul(c, h, p[name])) for name in ("query", "key", "value"))
    a = jax.nn.dot_product_attention(rotate(c, q), rotate(c, k), v, is_causal=True, implementation=c.attention)
    x = x + matmul(c, a.reshape(*x.shape[:2], -1), p["output"])
    h = norm(c, x, p["mlp_norm"])
    return x + matmul(c, jax.nn.silu(matmul(c, h, p["gate"])) * matmul(c, h, p["up"]), p["down"])


def keep(primitive: Any, *avals: Any, **params: Any) -> Any:
    """Return whether a value is kept for the backward pass.

    Projections are kept, and the outputs of cuDNN's attention, which jax gives no name.
    """
    named = jax.checkpoint_policies.save_only_these_names("projection")
    return primitive.name.startswith("dot_product_attention_fwd") or named(primitive, *avals, **params)


def loss(c: Llama, params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next token."""
    layer = jax.checkpoint(functools.partial(block, c), policy=keep, prevent_cse=c.unrolled)
    if c.cast_once:
        params = jax.tree.map(lambda x: x.astype(c.dtype) if x.ndim > 1 else x, params)
    x = params["embedding"][tokens].astype(c.dtype) if c.wide else params["embedding"].astype(c.dtype)[tokens]
    if c.unrolled:
        for i in range(c.layers):
            x = layer(x, jax.tree.map(operator.itemgetter(i), params["layers"]))
    else:
        x = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])[0]
    x, head = norm(c, x, params["norm"]), params["embedding"].T
    logits = wide_matmul(x, head, jnp.float32) if c.wide else (x @ head.astype(c.dtype)).astype(jnp.float32)
    is_target = lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1))


def optimizer(rate: float = 1e-4, warm_up: int = 5, steps: int = 25) -> optax.GradientTransformation:
    """Return clipped AdamW without decay of norms; the rate warms up linearly and falls on a cosine to a tenth."""
    decayed = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), params)
    ramp = optax.linear_schedule(rate / warm_up, rate, warm_up - 1)
    rates = optax.join_schedules([ramp, optax.cosine_decay_schedule(rate, steps - warm_up, 0.1)], [warm_up])
    adamw = optax.adamw(rates, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def step(c: Llama, state: tuple[Params, Any], tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    """Return ((parameters, moments), loss) after one update."""
    params, moments = state
    value, gradients = jax.value_and_grad(functools.partial(loss, c))(params, tokens, targets)
    updates, moments = optimizer().update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


# The model ends here. What follows times it, beside meshkit's.


_FP8 = ("train.precision=fp8", "xla.xla_gpu_enable_triton_gemm=false")  # Triton's fp8 matmuls compile for minutes.
_UNROLLED = ("model.scan_layers=false",)
_LEAN = (*_UNROLLED, "model.fp32_logits=false")

# Each case has its step over meshkit's, as planned before any was measured, and meshkit's settings or the floor's way.
CASES: dict[str, tuple[float, tuple[str, ...] | dict[str, bool]]] = {
    "meshkit": (1.0, ()),
    "floor": (0.989, {}),
    "meshkit, unrolled, bf16 logits": (0.951, _LEAN),
    "meshkit, unrolled": (0.962, _UNROLLED),
    "meshkit, unrolled, bf16 logits, fp8": (0.796, (*_LEAN, *_FP8)),
    "meshkit, bf16 logits": (0.989, ("model.fp32_logits=false",)),
    "meshkit, fp8": (0.854, _FP8),
    "floor, unrolled, weights cast once": (0.941, {"unrolled": True, "cast_once": True}),
    "floor, unrolled": (0.948, {"unrolled": True}),
    "floor, fp32 logits and gradients": (1.001, {"wide": True}),
}
_IN_TURN = ("meshkit", "floor")
_WARM_UP, _STEPS = 3, 12
_MEMORY = 0.92  # The share of the GPU, as `train.memory_fraction`.
# A Start returns a state, and a function from a state to the next state and the loss.
Start = Callable[[], tuple[Any, Callable[[Any], tuple[Any, Any]]]]


def measure(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield the seconds of a step of meshkit and of the floor, which run alternately, and then of the other cases."""
    gpu = None if toy else gpu_here()
    cluster = experiment_of(gpu).cluster
    mk.prepare_platform(cluster, memory_fraction=_MEMORY)
    program, experiment = _program(gpu, ())
    batch = first_batch(program, experiment)
    starts: dict[str, Start] = {}
    for case in _IN_TURN:
        starts[case], found = _compiled(case, gpu, batch)
        yield found
    times: dict[str, list[float]] = {case: [] for case in _IN_TURN}
    for _ in range(2):
        for case in _IN_TURN:
            times[case].append(_step_s(starts[case]))
            yield {f"{case}: step_s": statistics.mean(times[case]), f"{case}: steps_s": times[case]}
    starts.clear()
    for case in (name for name in CASES if name not in _IN_TURN):
        try:
            start, found = _compiled(case, gpu, batch)
            yield found
            step_s = _step_s(start)
        except Exception as e:  # The next case may fit. jax wraps XLA's errors in several types.
            yield {f"{case}: failed": str(e)[:300]}
            continue
        ratio = step_s / statistics.mean(times["meshkit"])
        yield {f"{case}: step_s": step_s, f"{case}: over meshkit's": ratio, f"{case}: as planned": CASES[case][0]}
        del start


def experiment_of(gpu: str | None, settings: tuple[str, ...] = ()) -> Experiment:
    """Return Llama 1B on a GPU or, if `gpu` is None, the debug Llama on a CPU device."""
    if gpu:
        return load(LLAMA_1B, [f"cluster.gpu={gpu}", *settings])
    one = ("cluster={ gpu='cpu', hosts=1, gpus_per_host=1 }", "mesh={ fsdp = 1 }", "train.evaluate_every=0")
    small = ("model.tied=true", "profile.steps=", "train.global_batch=4", "train.sequence_length=64")
    fp32 = "train.precision=fp32"  # CPUs lack some matmuls of fewer bits.
    return load(DEBUG, [*one, *small, fp32, *(s for s in settings if s not in _FP8)])


def _program(gpu: str | None, settings: tuple[str, ...]) -> tuple[TrainProgram, Experiment]:
    experiment = experiment_of(gpu, settings)
    devices = sorted(jax.devices(), key=lambda d: d.id)[:1]
    mesh: Any = mk.build_mesh(experiment.mesh, experiment.cluster, devices=devices)
    return make_train_step(experiment, mesh), experiment


def _compiled(case: str, gpu: str | None, batch: Mapping[str, jax.Array]) -> tuple[Start, dict[str, Any]]:
    """Return a function that makes a state and the function that advances it, and the time and memory of compiling."""
    began, (_, how) = time.perf_counter(), CASES[case]
    if isinstance(how, dict):
        c = _floor(gpu, how)
        start, ids = jax.jit(functools.partial(first, c)), (batch["tokens"], batch["targets"])
        program: Any = jitted(c).lower(jax.eval_shape(start), *ids).compile()
        advance = lambda state: program(state, *ids)
    else:
        made, experiment = _program(gpu, how)
        program = compile_step(made, experiment.cluster, experiment.placement, experiment.xla).program
        start, advance = made.init, lambda state: _state_and_loss(*program(state, batch))
    memory, seconds = memory_of(program), time.perf_counter() - began
    found = {"compile_s": seconds, "bytes": bytes_at_once(memory) if memory else None}
    return lambda: (start(), advance), {f"{case}: {key}": value for key, value in found.items()}


def first(c: Llama, key: Any = 0) -> tuple[Params, Any]:
    """Return the state before the first step."""
    params = init(c, jax.random.key(key))
    return params, optimizer().init(params)


def jitted(c: Llama) -> Any:
    """Return the floor's step, which reuses the memory of its state."""
    return jax.jit(functools.partial(step, c), donate_argnums=0)


def _floor(gpu: str | None, way: Mapping[str, bool]) -> Llama:
    return replace(Llama() if gpu else TOY, **way)


def _state_and_loss(state: Any, metrics: Any) -> tuple[Any, Any]:
    return state, metrics["loss"]


def _step_s(start: Start) -> float:
    """Return the seconds of a step and drop the state; each step is waited for while the next one runs."""
    state, advance = start()
    state, value = advance(state)
    for _ in range(_WARM_UP - 1):
        state, value = advance(state)
    value.block_until_ready()
    began, last = time.perf_counter(), value
    for _ in range(_STEPS):
        state, value = advance(state)
        last.block_until_ready()
        last = value
    last.block_until_ready()
    return (time.perf_counter() - began) / _STEPS


def plan_case(case: str, gpu: str = "h100_sxm") -> Report:
    """Return the plan of a case on an absent GPU."""
    _, how = CASES[case]
    experiment = experiment_of(gpu, () if isinstance(how, dict) else how)
    if not isinstance(how, dict):
        return plan_experiment(experiment).report
    c, cluster = _floor(gpu, how), experiment.cluster
    mesh = mk.build_mesh(experiment.mesh, cluster, devices=mk.describe_devices(cluster))
    ids = jax.ShapeDtypeStruct((experiment.train.global_batch, experiment.train.sequence_length), jnp.int32)
    state = jax.eval_shape(functools.partial(first, c))
    return mk.plan(jitted(c), (state, ids, ids), mesh=mesh, cluster=cluster, tokens=ids.size)


def main() -> None:
    """Print the plans of all cases: step, ratio to meshkit's step, peak, and milliseconds by class of kernels."""
    own_s = 0.0
    for case in CASES:
        report = plan_case(case)
        step, kernels, step_s = report.step, report.kernels, report.step.time_s or 0.0
        own_s = own_s or step_s
        parts = {c.kind: c.time_s or 0.0 for c in kernels.classes} if kernels else {}
        parts |= {"copies": step.other_s or 0.0, "idle": step.idle_s or 0.0}
        said = ", ".join(f"{kind} {1e3 * seconds:.1f}" for kind, seconds in parts.items())
        peak = (report.memory.peak_bytes or 0) / 1e9
        print(f"{case}: {1e3 * step_s:.1f} ms, {step_s / own_s:.3f}, {peak:.1f} GB: {said}", flush=True)


if __name__ == "__main__":
    main()
