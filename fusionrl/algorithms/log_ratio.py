"""Two models' log-probs of the same tokens."""

import torch
from torch import Tensor

# A ratio beyond exp(+-20) is as good as infinite or zero. Without a bound its product with a zero gradient is NaN.
LOG_RATIO_BOUND = 20.0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """`exp(log_ratio)` within exp(+-20); without gradient beyond. [N] -> [N]"""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


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


def reverse_kl_gap(student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """On-policy distillation: `log p_teacher - log p_student` [N] at trained tokens, as an advantage of each.

    As a policy gradient that lowers the reverse KL, KL(student || teacher), token by token, without the later tokens'.
    Source: GKD (arXiv 2306.13649) and MiniLLM (arXiv 2306.08543) for the reverse KL on the student's own text.

    Returns:
        (advantages [N], excluded []): a token with a log-prob that is not finite gets 0 and is counted.
    """
    student, teacher, excluded = comparable(student_log_probs, teacher_log_probs, mask)
    return teacher - student, excluded
