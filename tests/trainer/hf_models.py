"""Tiny random Hugging Face models, and the losses that transformers' autograd computes on them."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.trainer.trainer_worker import Samples

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
# Sizes of a tiny model of each family: none equal that could be mistaken for each other, and as odd as they may be.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3_moe": EXPERTS | {"head_dim": 16, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "glm4_moe": SIGMOID | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": LATENT | SHARED | SOFTMAX | {"q_lora_rank": None},
    "deepseek_v3": LATENT | SIGMOID | {"rope_parameters": YARN},
}

# Those of plugins/models; the same tests run for them.
PLUGINS: dict[str, dict[str, Any]] = {"mistral": {"head_dim": 16, "sliding_window": None}}


def config_of(family: str, tied: bool, **values: Any) -> Any:
    """transformers' configuration of a tiny model."""
    sizes = COMMON | (FAMILIES | PLUGINS)[family] | {"tie_word_embeddings": tied} | values
    config = AutoConfig.for_model(family, **sizes)
    config._attn_implementation = "eager"
    return config


def make(
    folder: str | Path, family: str, tied: bool, seed: int = 0, kind: Any = AutoModelForCausalLM, **values: Any
) -> Any:
    """A model with biases and norms that are not trivial, saved to `folder`."""
    torch.manual_seed(seed)
    model = kind.from_config(config_of(family, tied, **values)).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.add_(0.2 * torch.randn_like(param))
            if name.endswith("bias"):
                param.normal_(std=0.2)
            if name.endswith(("gate.weight", "score.weight")):
                param.normal_(std=0.5)  # routers that choose clearly, so that rounding changes no choice
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
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
