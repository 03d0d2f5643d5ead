"""List the trainings of some seconds on one GPU, the least known first; `rows.py` plans and runs them.

Each is an experiment as a user writes it: Llama 1B with other settings, or a program of programs.py. This module
imports no jax.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """One training, as settings of Llama 1B's experiment file."""

    what: str
    """A description for a reader."""
    model: tuple[str, ...] = ()
    """Settings of the model and of the shapes that go with it; at toy size `toy` replaces them."""
    train: tuple[str, ...] = ()
    """All other settings; at toy size, without XLA's options for GPUs."""
    toy: str = "model={ class = 'models.llama:Llama', preset = 'llama_debug' }"
    """The setting of the model at toy size."""
    program: str | None = None
    """The name of a program of programs.py, which has no settings; None for an experiment."""


def _llama(what: str, batch: int, length: int, *train: str, **dims: int) -> Training:
    model = [f"model.{key}={value}" for key, value in dims.items()]
    return Training(what, (*model, *_shape(batch, length)), train)


def _shape(batch: int, length: int) -> tuple[str, str]:
    return f"train.global_batch={batch}", f"train.sequence_length={length}"


def _model(class_: str, preset: str, **dims: object) -> str:
    options = "".join(f", {key} = {value}" for key, value in dims.items())
    return f"model={{ class = '{class_}', preset = '{preset}'{options} }}"


def _gpt(what: str, batch: int, *train: str, **dims: object) -> Training:
    toy = _model("models.gpt:GPT", "gpt_debug")
    return Training(what, (_model("models.gpt:GPT", "gpt2", **dims), *_shape(batch, 1024)), train, toy)


def _vit(what: str, preset: str, batch: int, *train: str) -> Training:
    images = ("train.loss=models.vit:classification_loss", "data={ source = 'models.vit:synthetic_images' }", *train)
    model = (_model("models.vit:ViT", preset), *_shape(batch, 197))
    return Training(what, model, images, _model("models.vit:ViT", "vit_debug"))


def _moe(what: str, batch: int, length: int, **dims: object) -> Training:
    toy = _model("models.moe:Moe", "moe_debug")
    return Training(what, (_model("models.moe:Moe", "mixtral_8x7b", **dims), *_shape(batch, length)), (), toy)


_8B = {"embed": 4096, "mlp": 14_336, "layers": 6, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 32_768}
_3B = {"embed": 3072, "mlp": 8192, "layers": 12, "heads": 24, "kv_heads": 8, "head_dim": 128, "vocab": 32_768}
_70B = {"embed": 8192, "mlp": 28_672, "layers": 2, "heads": 64, "kv_heads": 8, "head_dim": 128, "vocab": 32_768}
_SMALL = {"embed": 1024, "mlp": 4096, "layers": 12, "heads": 16, "kv_heads": 8, "head_dim": 64, "vocab": 32_768}
_MOE = {"embed": 1024, "mlp": 3584, "layers": 8, "heads": 16, "kv_heads": 8, "head_dim": 64}
# XLA's own fp8 kernels take 153 of the 159 s of compiling and are no faster than cuBLAS (README.md).
_CUBLAS = "xla.xla_gpu_enable_triton_gemm=false"
_LEAN = ("model.scan_layers=false", "model.fp32_logits=false")

TRAININGS: dict[str, Training] = {
    "gpt_flax": Training("GPT-2 medium of flax's own layers, without fused attention", program="gpt_flax"),
    "mamba": Training("selective state spaces by an associative scan", program="mamba"),
    "llama_1k": _llama("Llama 1B, 1,024 tokens long", 32, 1024),
    "vit_l16": _vit("ViT-L/16", "vit_l16", 128),
    "llama_32k": _llama("Llama 1B, 32,768 tokens long", 1, 32_768),
    "fp32": _llama("Llama of width 1024 in fp32", 4, 2048, "train.precision=fp32", **_SMALL),
    "llama_3b": _llama("Llama of width 3072, 12 layers", 4, 4096, **_3B),
    "moe_capacity": _moe("mixture of 8 experts, with a capacity of 1.25", 8, 2048, capacity_factor=1.25, **_MOE),
    "remat_none": _llama("Llama 1B, nothing recomputed", 2, 4096, "train.remat=none"),
    "llama_small": _llama("Llama of width 1024, 2,048 tokens long", 16, 2048, **_SMALL),
    "gpt_scores": _gpt("GPT-2 that writes its attention's scores to memory", 16, attention="'materialized'"),
    "unet": Training("U-Net with GroupNorm (nnx)", program="unet"),
    "resnet50": Training("ResNet-50 with BatchNorm (nnx)", program="resnet50"),
    "llama_1b": _llama("Llama 1B", 8, 4096),
    "unrolled": _llama("Llama 1B, its layers no loop, its logits bf16", 8, 4096, *_LEAN),
    "offload": _llama("Llama of width 4096, projections in host memory", 4, 4096, "train.remat=offload_dots", **_8B),
    "lora": Training("low-rank adapters beside frozen weights (nnx)", program="lora"),
    "pallas": Training("a decoder whose norms are Pallas kernels", program="pallas"),
    "remat_full": _llama("Llama 1B, each layer recomputed", 8, 4096, "train.remat=full"),
    "llama_16k": _llama("Llama 1B, 16,384 tokens long", 2, 16_384),
    "attention_again": _llama("Llama 1B, whose attention is computed twice", 8, 4096, "train.remat=['projection']"),
    "llama_8b": _llama("Llama of width 4096, 6 layers", 4, 4096, **_8B),
    "gpt2": _gpt("GPT-2, 124 million", 32),
    "moe": _moe("mixture of 8 experts, dropless", 8, 2048, **_MOE),
    "fp8": _llama("Llama of width 4096 in fp8", 4, 4096, "train.precision=fp8", _CUBLAS, **_8B),
    "llama_70b": _llama("Llama of width 8192, 2 layers", 2, 4096, **_70B),
    "dit": Training("diffusion transformer (nnx)", program="dit"),
    "accumulate": _llama("Llama 1B in 4 micro-batches", 16, 4096, "train.accumulate=4"),
    "lstm": Training("recurrent layers (nnx)", program="lstm"),
    "gpt_1b": _gpt("GPT, 1.3 billion", 16, embed=2048, mlp=8192, layers=24, heads=16),
    "vit_b16": _vit("ViT-B/16", "vit_b16", 256, "train.remat=none"),
    # Its additions in bf16 to 32 rows take seconds a step: 11 steps did not end in 55 s on an H100.
    "t5": Training("encoder and decoder with position biases (nnx)", program="t5"),
}
