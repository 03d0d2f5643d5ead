"""Memory of pipeline schedules as XLA compiles them for absent H100s, by microbatches, and executed over useful FLOP.

    python -m benchmarks.pipeline

Four stages across four hosts, data parallel inside them; a toy of residual blocks without attention. What it printed:
pipeline.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.parallel.pipeline import XLA_OPTIONS, Pipeline, make_pipeline, matmul_flops, scan_layers, vocabulary

EMBED, MLP, VOCAB, LAYERS, BATCH, LENGTH = 2048, 8192, 32_000, 8, 4, 1024
AXES = {"pipeline": {"infiniband": 4}, "data": 8}
MICROBATCHES = (8, 16, 32)


@dataclass(frozen=True)
class Model:
    """Embedding, residual blocks of two matmuls, head; bf16.

    Attributes:
        tensor, fsdp: mesh axes, or None.
        head: of the pipeline.
    """

    mesh: Any
    tensor: str | None = None
    fsdp: str | None = None
    head: str = "replicated"

    def layer(self, params, x, key):
        """Root mean square norm, two matmuls, residual."""
        scale = lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(x.dtype)
        hidden = (x * scale * params["norm"]) @ params["up"]
        if self.tensor:
            cut = NamedSharding(self.mesh, PartitionSpec(None, None, self.tensor))
            hidden = lax.with_sharding_constraint(hidden, cut)
        return x + jax.nn.gelu(hidden) @ params["down"]

    def stage(self, params, x, ctx):
        """A scan over the layers, each recomputed."""
        return scan_layers(self.layer, params, x, ctx, wrap=jax.checkpoint)

    def first(self, outer, batch, ctx):
        """Embedding."""
        if self.head == "vocab_parallel":
            return vocabulary.lookup(outer["table"], batch["tokens"], ctx.axis)
        return outer["table"][batch["tokens"]]

    def loss(self, outer, y, batch, ctx):
        """Cross-entropy."""
        logits = y @ outer["head"].T
        if self.head == "vocab_parallel":
            nll = vocabulary.cross_entropy(logits, batch["targets"], ctx.axis)
        else:
            logits = logits.astype(jnp.float32)
            target = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
            nll = jax.nn.logsumexp(logits, -1) - target
        return nll.sum(), jnp.float32(nll.size)

    def specs(self):
        """PartitionSpecs of the parameters."""
        rows, p = ("pipeline" if self.head == "vocab_parallel" else None), PartitionSpec
        stages = {"down": p("pipeline", self.tensor, self.fsdp), "norm": p("pipeline")}
        stages["up"] = p("pipeline", self.fsdp, self.tensor)
        return {"stages": stages, "outer": {"head": p(rows, self.fsdp), "table": p(rows, self.fsdp)}}

    def pipeline(self, schedule: str, virtual_stages: int, **options) -> Pipeline:
        """The model, pipelined."""
        data = tuple(a for a in ("data", "fsdp") if a in self.mesh.axis_names)
        return make_pipeline(
            self.stage,
            self.loss,
            self.first,
            mesh=self.mesh,
            layers=LAYERS,
            batch_spec=PartitionSpec(None, data),
            specs=self.specs(),
            head=self.head,
            schedule=schedule,
            virtual_stages=virtual_stages,
            **options,
        )


def arguments(made: Pipeline, microbatches: int) -> tuple[Any, Any]:
    """Abstract parameters and batch, where they lie."""

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    stages = {"down": bf16(LAYERS, MLP, EMBED), "norm": bf16(LAYERS, EMBED), "up": bf16(LAYERS, EMBED, MLP)}
    params = {"stages": stages, "outer": {"head": bf16(VOCAB, EMBED), "table": bf16(VOCAB, EMBED)}}
    params = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), params, made.shardings(params)
    )
    shape = (microbatches, BATCH * made.placement.shards, LENGTH)
    sharding = NamedSharding(made.placement.mesh, made.placement.batch)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    return params, {"tokens": tokens, "targets": tokens}


def compiled(schedule: str, virtual_stages: int, microbatches: int, *, axes=None, model=None, **options):
    """(CompiledProgram, Schedule) for four hosts of 8 H100."""
    from meshkit.xla.hlo import load_module, read_schedule
    from meshkit.xla.program import compile_absent

    cluster = mk.Cluster.load("dgx_h100", hosts=4)
    spec = mk.MeshSpec.parse(axes or AXES)
    mesh = mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))
    made = Model(mesh, **(model or {})).pipeline(schedule, virtual_stages, **options)
    args = arguments(made, microbatches)
    program = compile_absent(made.value_and_gradients, args, mesh=mesh, cluster=cluster, options=XLA_OPTIONS)
    return program, read_schedule(load_module(program.module), spec.placement(cluster))


def main() -> None:
    """Prints Markdown tables."""
    jax.config.update("jax_platforms", "cpu")
    rows = [("gpipe", 1, "recompute"), ("1f1b", 1, "recompute"), ("1f1b", 1, "stash")]
    rows += [("circular", 2, "recompute"), ("interleaved_1f1b", 2, "recompute")]
    print(f"| schedule | v | residuals | {' | '.join(f'M = {m}' for m in MICROBATCHES)} | per microbatch |")
    print("|---" * (len(MICROBATCHES) + 4) + "|")
    for schedule, chunks, residuals in rows:
        found = [compiled(schedule, chunks, m, residuals=residuals)[0].memory["temp"] / 2**20 for m in MICROBATCHES]
        slope = (found[-1] - found[-2]) / (MICROBATCHES[-1] - MICROBATCHES[-2])
        cells = " | ".join(f"{x:.1f}" for x in found)
        print(f"| {schedule} | {chunks} | {residuals} | {cells} | {slope:.1f} |", flush=True)
    print("\n| schedule | S | v | M | executed / useful | formula |\n|---|---|---|---|---|---|")
    for stages, chunks, m in ((4, 1, 4), (4, 1, 32), (4, 2, 8), (8, 1, 32)):
        schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
        executed, useful, formula = flops(schedule, stages, chunks, m)
        print(f"| {schedule} | {stages} | {chunks} | {m} | {executed / useful:.4f} | {formula:.4f} |")


def flops(schedule: str, stages: int, chunks: int, microbatches: int) -> tuple[float, float, float]:
    """Executed matmul FLOP of a device's layers, useful ones, and what their ratio should be."""
    cluster = mk.Cluster.load("dgx_h100", hosts=stages)
    spec = mk.MeshSpec.parse({"pipeline": {"infiniband": stages}, "data": 8})
    made = Model(mk.build_mesh(spec, cluster, devices=mk.describe_devices(cluster))).pipeline(schedule, chunks)
    executed = matmul_flops(made.value_and_gradients, *arguments(made, microbatches))
    head = 3 * 2 * BATCH * LENGTH * EMBED * VOCAB * microbatches  # forward and two backward, once a microbatch
    matmul = 2 * BATCH * LENGTH * EMBED * MLP
    # Of each layer: 2 forward, 2 recomputed by the pipeline, 1 by the layer's own checkpoint (the last one's output is
    # not needed again), 4 backward.
    useful = 9 * matmul * LAYERS / stages * microbatches
    return executed - head, useful, made.report(microbatches).executed_over_useful


if __name__ == "__main__":
    main()
