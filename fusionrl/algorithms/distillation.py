"""On-policy distillation: the teacher judges each token that the student wrote."""

from __future__ import annotations

from torch import Tensor

from fusionrl.algorithms.log_ratio import comparable


def add_reverse_kl(
    advantages: Tensor, student_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor, coef: float
) -> tuple[Tensor, Tensor]:
    """`A_t - coef * (log p_student - log p_teacher)` at trained tokens: on any advantages [N], or on zeros.

    As a policy gradient that lowers the reverse KL, KL(student || teacher), token by token, without the later tokens'.
    Source: GKD (arXiv 2306.13649) and MiniLLM (arXiv 2306.08543) for the reverse KL on the student's own text.

    Args:
        advantages: [N], without gradient, as are both log-probs [N].
        mask: [N].
        coef: weight of the KL term.

    Returns:
        (advantages [N], excluded []): a token with a log-prob that is not finite keeps its advantage and is counted.
    """
    student, teacher, excluded = comparable(student_log_probs, teacher_log_probs, mask)
    return advantages - coef * (student - teacher), excluded
