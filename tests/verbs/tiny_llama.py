"""The debug Llama at a size that trains in a second, for the tests that ask for `programs_kept`: one program of all."""

from pathlib import Path

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
TINY = [
    *("model.embed=32", "model.mlp=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=8", "model.dropout=0.1"),
    *("train.global_batch=8", "train.sequence_length=32", "profile.steps=[1,1]", "train.evaluate_every=0"),
    *("optimizer.schedule=constant", "optimizer.warmup_steps=0", "train.evaluate_batches=1"),
]
