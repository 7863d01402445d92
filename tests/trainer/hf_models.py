"""Tiny random Hugging Face models, and the losses that transformers' autograd computes on them."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from tests.trainer import short_conv  # noqa: F401 (transformers then knows it)
from tests.trainer.trainer_worker import Samples
from tools.parity_rows import KNOWN_AS

VOCAB = 120
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,  # transformers gives the padding token's embedding no gradient
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED: dict[str, Any] = {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
SIGMOID: dict[str, Any] = SHARED | {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1}
SIGMOID |= {"routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2}
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20}
LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
SOFTMAX = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"mscale": 0.8, "mscale_all_dim": 0.6}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
WINDOW: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# Sizes of a tiny model of each family: none equal that could be mistaken for each other, and as odd as they may be.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mimo": {},
    "qwen3": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": SIGMOID | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": LATENT | SHARED | SOFTMAX | {"q_lora_rank": None},
    "deepseek_v3": LATENT | SIGMOID | {"rope_parameters": YARN},
    "kimi_k2": LATENT | SIGMOID | {"rope_parameters": YARN, "n_group": 1, "topk_group": 1},
    # transformers takes 1e-6 in the norms of the compressed parts, whatever config.json says.
    "glm4_moe_lite": LATENT | SIGMOID | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
    "phi3": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_next": HYBRID | EXPERTS | {"shared_expert_intermediate_size": 40},
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 0.6,  # so small that some gates are cut off
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "gemma3_text": WINDOW | {"head_dim": 16, "query_pre_attn_scalar": 24},
    "olmo3": WINDOW,
}

# DeepSeek-V3 with an indexer that chooses keys, all of them in texts of the tests: `test_sparse.py`.
INDEXER: dict[str, Any] = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v32": LATENT | SIGMOID | INDEXER | {"rope_parameters": YARN},
    "glm_moe_dsa": LATENT | SIGMOID | INDEXER | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6},
}

# Those of plugins/models; the same tests run for them.
PLUGINS: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 16, "sliding_window": None},
    "short_conv": {"conv_size": 3, "layer_types": ["conv", "full_attention"]},
}


def config_of(family: str, tied: bool, **values: Any) -> Any:
    """transformers' configuration of a tiny model."""
    sizes = COMMON | (FAMILIES | SPARSE | PLUGINS)[family] | {"tie_word_embeddings": tied} | values
    config = AutoConfig.for_model(KNOWN_AS.get(family, family), **sizes)
    config._attn_implementation = "eager"
    return config


def make(
    folder: str | Path, family: str, tied: bool, seed: int = 0, kind: Any = AutoModelForCausalLM, **values: Any
) -> Any:
    """A model with biases and norms that are not trivial, saved to `folder`."""
    torch.manual_seed(seed)
    model = kind.from_config(config_of(family, tied, **values)).eval()
    _spread(model)
    model.save_pretrained(folder)
    if family in KNOWN_AS:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": family}))
    return model


def _spread(model: Any) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.add_(0.2 * torch.randn_like(param))
            if name.endswith(("A_log", "dt_bias")):  # transformers' own: some gates so small that gradients are noise
                param.copy_(torch.rand_like(param) - 0.5)
            elif name.endswith(("bias", "sinks")):
                param.normal_(std=0.2)
            if name.endswith(("gate.weight", "router.weight", "score.weight")):
                param.normal_(std=0.5)  # routers that choose clearly, so that rounding changes no choice
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)


VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}


def make_published(
    folder: Path, family: str, tied: bool, dtype: Any = torch.float32, seed: int = 5, **values: Any
) -> Any:
    """The text model of `family`; in `folder`/published the multimodal model around it, in `folder`/text itself.

    The former is transformers' own as it holds it, experts packed (`save_pretrained` takes them apart), with tensors
    of a layer that predicts a token more. The decays of delta nets are in fp32 whatever the dtype.
    """
    text = config_of(family, tied, **values)
    config = AutoConfig.for_model(
        family.removesuffix("_text"), text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=tied
    )
    torch.manual_seed(seed)
    whole = AutoModelForImageTextToText.from_config(config).to(dtype)
    _spread(whole)
    whole.save_pretrained(folder / "published")
    file = folder / "published" / "model.safetensors"
    tensors = {name: x.clone() for name, x in whole.state_dict().items() if not (tied and name == "lm_head.weight")}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensors[name] = torch.rand(tensor.shape) - 0.5
    hidden, experts = text.hidden_size, text.to_dict().get("num_experts")
    tensors["mtp.norm.weight"] = torch.randn(hidden, dtype=dtype)
    tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.randn(experts or 1, hidden, 24, dtype=dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_config(text).eval()
    named = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    missing, extra = model.load_state_dict(named, strict=False)
    assert missing == (["lm_head.weight"] if tied else [])
    assert all(name.startswith(("model.visual.", "mtp.")) for name in extra)
    model.save_pretrained(folder / "text")
    return model


def make_critic(folder: str | Path, family: str) -> Any:
    """A model with a value head."""
    return make(folder, family, True, seed=3, kind=AutoModelForSequenceClassification, num_labels=1)


def values_of(model: Any, samples: Samples, i: int) -> Any:
    """Values before each response token of sample i."""
    total, response = int(samples.total[i]), int(samples.response[i])
    hidden = model.model(torch.tensor(samples.tokens[i], dtype=torch.long)[None]).last_hidden_state[0]
    return model.score(hidden)[total - response - 1 : total - 1, 0]


def response_log_probs(model: Any, samples: Samples, i: int, temperature: float = 1.0) -> tuple[Any, Any]:
    """(log-probs [response], entropies [response]) of sample i, one unpacked forward pass."""
    tokens = torch.tensor(samples.tokens[i], dtype=torch.long)
    total, response = int(samples.total[i]), int(samples.response[i])
    log_probs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)[total - response - 1 : total - 1]
    chosen = log_probs.gather(-1, tokens[total - response :, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def all_log_probs(model: Any, samples: Samples, **options: Any) -> np.ndarray:
    """Those of all samples, one after the other."""
    with torch.no_grad():
        parts = [response_log_probs(model, samples, i, **options)[0] for i in range(len(samples))]
    return torch.cat(parts).numpy()


def loss(
    model: Any,
    samples: Samples,
    ids: list[int],
    mode: str,
    temperature: Any = 1.0,  # one, or one for each sample
    per_token: bool = True,
    reference: Any = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    old: Any = None,  # log-probs of each sample
    clip: tuple[float, float] = (0.2, 0.2),
) -> Any:
    """The whole step's loss, a plain loop over samples and tokens' tensors."""
    num_tokens, num_samples = samples.count(ids)
    total = torch.zeros(())
    for i in ids:
        own = temperature if isinstance(temperature, float) else temperature[i]
        log_probs, entropy = response_log_probs(model, samples, i, own)
        mask = torch.tensor(samples.mask[i])
        if mode == "sft":
            token_loss = -log_probs
        else:
            before = old[i] if old is not None else log_probs.detach()
            ratio, advantage = (log_probs - before).exp(), float(samples.rewards[i])
            token_loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage)
            token_loss = token_loss - entropy_coef * entropy
            if reference is not None:
                with torch.no_grad():
                    ref, _ = response_log_probs(reference, samples, i, own)
                token_loss = token_loss + kl_coef * ((ref - log_probs).exp() - 1 - (ref - log_probs))
        weight = 1 / num_tokens if per_token else 1 / (num_samples * max(float(mask.sum()), 1e-9))
        total = total + (mask * token_loss).sum() * weight
    return total


def clone(model: Any) -> Any:
    return copy.deepcopy(model)
