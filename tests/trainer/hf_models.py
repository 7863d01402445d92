"""Tiny random Hugging Face models, and the losses that transformers' autograd computes on them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.trainer.trainer_worker import Samples

VOCAB = 120
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make(folder: str | Path, family: str, tied: bool, seed: int = 0, **values: Any) -> Any:
    """A model with biases and norms that are not trivial, saved to `folder`."""
    config_class, model_class = CLASSES[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "attn_implementation": "eager",
    }
    if family == "qwen3":
        sizes["head_dim"] = 16  # not hidden_size / heads
    torch.manual_seed(seed)
    model = model_class(config_class(**(sizes | values))).eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("norm.weight"):
                param.add_(0.2 * torch.randn_like(param))
            if name.endswith("bias"):
                param.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def response_log_probs(model: Any, samples: Samples, i: int, temperature: float = 1.0) -> tuple[Any, Any]:
    """(log-probs [response], entropies [response]) of sample i, one unpacked forward pass."""
    tokens = torch.tensor(samples.tokens[i], dtype=torch.long)
    total, response = int(samples.total[i]), int(samples.response[i])
    log_probs = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)[total - response - 1 : total - 1]
    chosen = log_probs.gather(-1, tokens[total - response :, None])[:, 0]
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def loss(
    model: Any,
    samples: Samples,
    ids: list[int],
    mode: str,
    temperature: float = 1.0,
    per_token: bool = True,
    reference: Any = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    old: dict[int, Any] | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
) -> Any:
    """The whole step's loss, a plain loop over samples and tokens' tensors."""
    num_tokens, num_samples = samples.count(ids)
    total = torch.zeros(())
    for i in ids:
        log_probs, entropy = response_log_probs(model, samples, i, temperature)
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
                    ref, _ = response_log_probs(reference, samples, i, temperature)
                token_loss = token_loss + kl_coef * ((ref - log_probs).exp() - 1 - (ref - log_probs))
        weight = 1 / num_tokens if per_token else 1 / (num_samples * max(float(mask.sum()), 1e-9))
        total = total + (mask * token_loss).sum() * weight
    return total


def hf_gradients(model: Any) -> dict[str, np.ndarray]:
    return {name: param.grad.numpy().copy() for name, param in model.named_parameters() if param.grad is not None}


def clone(model: Any) -> Any:
    return copy.deepcopy(model)
