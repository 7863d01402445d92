"""The clipped policy loss of PPO, with a clip range that may be asymmetric."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """Loss of each token: `max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))`, with `r = exp(new - old)`.

    Source: PPO (arXiv 1707.06347), equation 7; the asymmetric range is DAPO's (arXiv 2503.14476), section
        3.1.

    Args:
        log_probs: [t] of the policy that is trained; the gradient flows through these alone.
        old_log_probs: [t] of the policy that the ratio is taken against.
        advantages: [t].
        eps_low: how far below 1 the ratio may count.
        eps_high: how far above 1 the ratio may count.

    Returns:
        (loss [t], clipped [t]); `clipped` is 1.0 where the clip took the gradient away, else 0.0.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    return torch.maximum(free, bounded), (bounded > free).to(log_probs.dtype)
