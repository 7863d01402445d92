"""The loss of supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor


def sft_loss(log_probs: Tensor) -> Tensor:
    """Cross entropy of each token against the text: `-log p(token)`. [t] -> [t]"""
    return -log_probs
