"""The entropy bonus."""

from __future__ import annotations

from torch import Tensor


def entropy_bonus(entropy: Tensor, coef: float) -> Tensor:
    """`-coef * H` of each token: a loss that is lower the more open the policy's next token is.

    Source: A3C (arXiv 1602.01783), section 4. `entropy` [t] in nats -> [t]
    """
    return -coef * entropy
