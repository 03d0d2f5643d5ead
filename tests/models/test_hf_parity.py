"""Test our models' logits against transformers' on tiny random models, with weights read in both directions."""

from __future__ import annotations

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshkit.weights.files import open_file, read_weights
from models import hf
from models.deepseek import DeepSeek
from models.gpt_oss import GptOss
from models.llama import Llama
from models.moe import Moe

os.environ["HF_HUB_OFFLINE"] = "1"  # Every model is made here, so nothing is downloaded.
try:
    import torch
    import transformers
except ImportError:
    torch = transformers = None

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        transformers is None, reason="transformers and torch are not installed (pip install '.[parity]')"
    ),
]

# Logits are of size 1 to 10, fp32 on both sides. Each is a chain of sums of at most 128 products, six a layer: rounding
# alone leaves about sqrt(128 x 12) x 2^-24 x 10 = 2e-5. The smallest mistake that no shape shows is a norm epsilon of
# 1e-6 for 1e-5, which moves these logits by 3e-3; another rotary base or convention moves them by more than 1.
TOLERANCE = 2e-4
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,  # This gives logits of size 1 and more, and attention that is not uniform.
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
QWEN_EXPERTS = QWEN | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
DEEPSEEK = {"num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
DEEPSEEK |= {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK |= {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK |= {"num_mtp_layers": 0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 8}
YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
GPT_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
GPT_OSS = {
    "head_dim": 16,
    "sliding_window": 6,  # There are 24 tokens.
    # 3 of 8 frequencies are mixed.
    "rope_parameters": GPT_YARN | {"rope_theta": 150.0, "original_max_position_embeddings": 100},
    "max_position_embeddings": 400,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"],
}
CASES = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rms_norm_eps": 1e-5}),
    "llama, wide heads": ("Llama", {"head_dim": 32}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", EXPERTS),
    "mixtral, one expert each": ("Mixtral", EXPERTS | {"num_experts_per_tok": 1, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", QWEN),
    "qwen3, wide heads, tied": ("Qwen3", QWEN | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, experts": ("Qwen3Moe", QWEN_EXPERTS),
    "deepseek": ("DeepseekV3", DEEPSEEK | {"n_shared_experts": 2, "first_k_dense_replace": 2}),
    "deepseek, yarn": ("DeepseekV3", DEEPSEEK | {"rope_parameters": YARN, "max_position_embeddings": 320}),
    "gpt_oss": ("GptOss", GPT_OSS),
}
OURS = {"Llama": Llama, "Mixtral": Moe, "Qwen3": Llama, "Qwen3Moe": Moe, "DeepseekV3": DeepSeek, "GptOss": GptOss}


def make(kind, options):
    """Return a random model of transformers; norms are random too, because scales of 1 would hide a mix-up."""
    config = getattr(transformers, f"{kind}Config")(**SIZES | options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias") or "sinks" in name:
                parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3)  # Scores are 0 to 1, so the bias changes which experts are chosen.
    return model


def read(kind, folder):
    """Return our model with the weights of a folder, sharded over 8 devices."""
    mesh = Mesh(np.array(jax.devices()), ("all",))
    model = nnx.eval_shape(lambda: OURS[kind](rngs=nnx.Rngs(0), dtype=jnp.float32, **hf.read_options(folder)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def place(x):
        cut = next((d for d, n in enumerate(x.shape) if n % mesh.size == 0), None)
        spec = PartitionSpec(*["all" if d == cut else None for d in range(x.ndim)])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return nnx.merge(
        nnx.graphdef(model), nnx.State(read_weights(folder, model.hf_layout(), jax.tree.map(place, params)))
    )


TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))


def their_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


def our_logits(model):
    with jax.default_matmul_precision("highest"):
        return np.asarray(nnx.jit(lambda m, t: m(t))(model, jnp.asarray(TOKENS)))


@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
def test_logits_agree_in_both_directions(kind, options, tmp_path):
    theirs = make(kind, options)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours = read(kind, tmp_path / "theirs")
    expected, got = their_logits(theirs), our_logits(ours)
    print(f"largest difference {np.abs(got - expected).max():.2e} of logits up to {np.abs(expected).max():.1f}")
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)

    hf.export(ours, tmp_path / "ours", max_shard_bytes=50_000)
    back = type(theirs).from_pretrained(tmp_path / "ours").eval()
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    np.testing.assert_array_equal(their_logits(back), expected)
    assert hf.read_options(tmp_path / "ours") == hf.read_options(tmp_path / "theirs")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_model_of_ours_is_read_by_transformers(tmp_path, dtype):
    model = Llama(rngs=nnx.Rngs(0), dtype=jnp.float32, layers=2, embed=64, mlp=112, heads=4, head_dim=16, vocab=96)
    hf.export(model, tmp_path / "ours", dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert theirs.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    rounded = read("Llama", tmp_path / "ours")  # This model has the rounded bf16 weights in fp32.
    np.testing.assert_allclose(our_logits(rounded), their_logits(theirs.float()), rtol=0, atol=TOLERANCE)


def test_the_names_that_transformers_has_in_memory_are_read_too(tmp_path):
    theirs = make("Mixtral", EXPERTS)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    names = open_file(tmp_path / "model.safetensors")
    if not any("gate_up_proj" in name for name in names):
        pytest.skip(f"transformers {transformers.__version__} has no fused experts")
    np.testing.assert_allclose(our_logits(read("Mixtral", tmp_path)), their_logits(theirs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "type 'linear'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_what_our_models_do_not_do_is_refused(tmp_path, options, message):
    make("Llama", options).save_pretrained(tmp_path)
    with pytest.raises(hf.ConfigError, match=message):
        hf.read_options(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers = \\[0\\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ],
)
def test_mixtures_of_qwen_that_ours_is_not_are_refused(tmp_path, options, message):
    make("Qwen3Moe", QWEN_EXPERTS | options).save_pretrained(tmp_path)
    with pytest.raises(hf.ConfigError, match=message):
        hf.read_options(tmp_path)


def test_files_of_an_older_version_are_read(tmp_path):
    """transformers 4 wrote `rope_theta` itself and left head_dim out."""
    theirs = make("Llama", CASES["llama"][1])
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": config.pop("rope_parameters", config)["rope_theta"], "rope_scaling": None}
    config.pop("head_dim", None)
    path.write_text(json.dumps(config))
    np.testing.assert_allclose(our_logits(read("Llama", tmp_path)), their_logits(theirs), rtol=0, atol=TOLERANCE)
