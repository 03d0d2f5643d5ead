"""Provide a debug Llama that trains in a second, so that all tests with `programs_kept` share one program."""

from pathlib import Path

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
TINY = [
    *("model.embed=32", "model.mlp=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=8", "model.dropout=0.1"),
    *("train.global_batch=8", "train.sequence_length=32", "profile.steps=[1,1]", "train.evaluate_every=0"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.evaluate_batches=1"),
]
