"""Two models' log-probs of the same tokens, where they can be compared."""

from __future__ import annotations

import torch
from torch import Tensor


def comparable(log_probs: Tensor, reference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both log-probs [N] of the trained tokens, and 0 for both where either is not finite, or the token is untrained.

    A difference, or an estimate of KL, is then 0 there, and so is its gradient: such a token is left out. An engine
    gives -inf for a token that its own top-p or vocabulary forbids, and NaN where a kernel failed.

    Returns:
        (log_probs [N], other [N], excluded []): the trained tokens left out are counted, int64.
    """
    trained = mask != 0
    usable = trained & log_probs.isfinite() & reference.isfinite()
    return torch.where(usable, log_probs, 0.0), torch.where(usable, reference, 0.0), (trained & ~usable).sum()
